"""Parallel layers keep every option of what they replace, or refuse it by name.

The options are read from torch's signatures, so that a new one of torch fails here until somebody
decides about it. The oracle is torch's own layer in one process, in float64.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from minidist.launch import run
from minidist.mesh import make_mesh
from minidist.model import GPT, MLP, Attention, Block, GPTConfig
from minidist.parallel.context import context_parallel_gpt, mean_over_ranks
from minidist.parallel.hybrid.stage import build_stages
from minidist.parallel.recompute import recompute
from minidist.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelLayerNorm,
    ParallelMLP,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
    full_state_dict,
    load_full_state_dict,
    parallelize_gpt,
    vocab_parallel_cross_entropy,
)
from minidist.parallel.tensor.block import ParallelDropout
from minidist.parallel.tensor.native import parallelize_gpt_native

SHAPES = {"num_embeddings", "embedding_dim", "in_features", "out_features", "normalized_shape"}
# Every option of torch's layers at a value that is not the default: what comes of it, see `keeps`.
OPTIONS: dict[Any, dict[str, Any]] = {
    nn.Embedding: {
        "padding_idx": 3,
        "max_norm": 0.5,
        "norm_type": 1.0,  # with max_norm
        "scale_grad_by_freq": True,
        "sparse": "refused",
        "_weight": torch.ones(24, 12, dtype=torch.float64),
        "_freeze": True,
        "device": "cpu",
        "dtype": torch.bfloat16,
    },
    nn.Linear: {"bias": False, "device": "cpu", "dtype": torch.bfloat16},
    nn.LayerNorm: {
        "eps": 0.5,
        "elementwise_affine": False,
        "bias": False,
        "device": "cpu",
        "dtype": torch.bfloat16,
    },
    nn.Dropout: {"p": 0.3, "inplace": True},
}
LOSS = {
    "weight": "refused",
    "size_average": "refused",  # torch has deprecated these two
    "reduce": "refused",
    "ignore_index": 5,
    "reduction": "sum",
    "label_smoothing": 0.1,
}
config = GPTConfig(vocab_size=24, context=12, width=12, num_layers=2, num_heads=12)


def world(check, *args):
    dist.init_process_group("gloo")
    check(*args)
    dist.barrier()
    dist.destroy_process_group()


def names(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - SHAPES - {"self", "input", "target"}


def test_no_option_of_torch_is_forgotten():
    for kind, options in OPTIONS.items():
        assert set(options) == names(kind), kind
    assert set(LOSS) == names(F.cross_entropy)


def make(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    shape = {nn.Embedding: (24, 12), nn.Linear: (12, 24), nn.LayerNorm: (12,), nn.Dropout: ()}
    layer = kind(*shape[kind], **options)
    return layer.double() if options.get("dtype") is None else layer


def run_layer(layer: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    y = layer(x.clone())
    weight = torch.arange(y.numel(), dtype=y.dtype).view_as(y) / y.numel()
    if y.requires_grad:
        (y * weight).sum().backward()
    return y.detach()


def compare(full: nn.Module, split: nn.Module, x: Tensor, dims: dict[str, int]) -> None:
    """Outputs, gradients and what a parameter is, on this rank's part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    y, got = run_layer(full, x), run_layer(split, x)
    close = {"rtol": 2e-2, "atol": 2e-2} if y.dtype == torch.bfloat16 else {}
    assert_close(got, y, **close)
    own = dict(split.named_parameters())
    assert own.keys() == dict(full.named_parameters()).keys()
    for name, p in full.named_parameters():
        assert own[name].requires_grad == p.requires_grad, name
        assert own[name].dtype == p.dtype
        for mine, whole in ((own[name], p), (own[name].grad, p.grad)):
            assert (mine is None) == (whole is None)
            if whole is not None and mine is not None:
                part = whole.chunk(size, dims[name])[rank] if name in dims else whole
                assert_close(mine.detach(), part.detach(), **close)


def check_layers() -> None:
    tp = TensorParallel()
    tokens = torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(2))
    x = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for kind, options in OPTIONS.items():
        for name, value in [("nothing", None), *options.items()]:
            chosen = {} if name == "nothing" else {name: value}
            if name == "norm_type":
                chosen["max_norm"] = 0.5
            if name == "_freeze":
                chosen["_weight"] = options["_weight"].clone()
            if value == "refused":
                full = make(kind, **{name: True})
                with pytest.raises(ValueError, match=f"VocabParallelEmbedding: .*{name}=True"):
                    VocabParallelEmbedding(full, tp)
                continue
            inputs = x.to(torch.bfloat16) if name == "dtype" else x
            for frozen in (False, True):
                full = make(kind, **chosen).train(not frozen)
                full.requires_grad_(not frozen and name != "_freeze")
                if kind is nn.Embedding:
                    split: Any = VocabParallelEmbedding(full, tp)
                    compare(full, split, tokens, {"weight": 0})
                elif kind is nn.Linear:
                    split = ColumnParallelLinear(full, tp, gather_output=True)
                    compare(full, split, inputs, {"weight": 0, "bias": 0})
                    full.zero_grad()
                    split = RowParallelLinear(full, tp)
                    compare_rows(full, split, inputs)
                elif kind is nn.LayerNorm:
                    split = ParallelLayerNorm(full, tp)
                    compare(full, split, inputs, {})
                else:
                    split = ParallelDropout.of(full, tp)
                    assert split.inplace == full.inplace
                    compare(full, split, x, {})
                assert split.training == full.training


def compare_rows(full: nn.Linear, split: RowParallelLinear, x: Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    y, got = run_layer(full, x), run_layer(split, x.chunk(size, -1)[rank])
    close = {"rtol": 3e-2, "atol": 3e-2} if y.dtype == torch.bfloat16 else {}
    assert_close(got, y, **close)
    assert split.weight.requires_grad == full.weight.requires_grad
    if full.weight.grad is not None:
        assert_close(split.weight.grad, full.weight.grad.chunk(size, 1)[rank], **close)
    assert (split.bias is None) == (full.bias is None)
    if split.bias is not None and split.bias.requires_grad:
        assert_close(split.bias.grad, full.bias.grad, **close)


def check_loss() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    logits = torch.randn(6, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    targets = torch.tensor([1, 5, 5, 23, 7, -100])
    for name, value in LOSS.items():
        own = logits.chunk(size, 1)[rank].clone().requires_grad_()
        if value == "refused":
            with pytest.raises(TypeError, match=name):
                vocab_parallel_cross_entropy(own, targets, **{name: None})
            continue
        chosen = targets.clamp(min=5) if name == "ignore_index" else targets
        whole = logits.clone().requires_grad_()
        wanted = F.cross_entropy(whole, chosen, **{name: value})
        wanted.backward()
        got = vocab_parallel_cross_entropy(own, chosen, **{name: value})
        got.backward()
        assert_close(got, wanted)
        assert_close(own.grad, whole.grad.chunk(size, 1)[rank])
    with pytest.raises(ValueError, match="not probabilities"):
        vocab_parallel_cross_entropy(own, targets.double())


def check_masks() -> None:
    """What is masked may be nan or inf: it counts as zero, and so does its gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    nan = float("nan")
    # Logits of -inf, and of nan where the target does not count.
    logits = torch.randn(6, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits[:, ::7] = -float("inf")
    logits[4] = nan
    targets = torch.tensor([1, 5, 5, 23, -100, -100])
    whole = logits[[0, 1, 2, 3, 5]].clone().requires_grad_()
    wanted = F.cross_entropy(whole, targets[[0, 1, 2, 3, 5]])
    wanted.backward()
    own = logits.chunk(size, 1)[rank].clone().requires_grad_()
    got = vocab_parallel_cross_entropy(own, targets)
    got.backward()
    assert_close(got, wanted)
    assert_close(own.grad[[0, 1, 2, 3, 5]], whole.grad.chunk(size, 1)[rank])
    assert not own.grad[4].any()
    # Nothing counts: as in torch, a mean of nan and gradients of zero.
    own = torch.randn(6, 24 // size, dtype=torch.float64, requires_grad=True)
    got = vocab_parallel_cross_entropy(own, torch.full((6,), -100))
    got.backward()
    assert got.isnan()
    assert not own.grad.any()
    # A row that nobody looks up.
    full = make(nn.Embedding)
    with torch.no_grad():
        full.weight[::12] = nan
    tokens = torch.tensor([[1, 2, 13, 23]])
    split = VocabParallelEmbedding(full, TensorParallel())
    assert_close(split(tokens), full(tokens))
    # A rank whose tokens do not count.
    mine = torch.tensor(nan if rank == 0 and size > 1 else 6.0, requires_grad=True)
    count = torch.tensor(0 if rank == 0 and size > 1 else 3)
    mean = mean_over_ranks(mine * 1.0, count)
    mean.backward()
    assert mean.item() == 2.0
    assert mine.grad == (0.0 if count == 0 else 1 / (3 * max(size - 1, 1)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", [check_layers, check_loss, check_masks])
def test_layers(world_size, check):
    run(world, world_size, check, deadline_s=120)


# ------------------------------------------------------------------------------------- refusals


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def with_hook(module: nn.Linear) -> nn.Module:
    module.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return module


def with_part(module: nn.Module, name: str, part: Any) -> nn.Module:
    setattr(module, name, part)
    return module


def gpt(**embedding: Any) -> GPT:
    model = GPT(config)
    for name, value in embedding.items():
        setattr(model.token_embedding, name, value)
    return model


def check_refusals() -> None:
    tp = TensorParallel()
    linear = nn.Linear(12, 12)
    block, attention, mlp = Block(config), Attention(config), MLP(config)
    cases: list[tuple[str, Any]] = [
        ("ColumnParallelLinear: Own has a forward", lambda: ColumnParallelLinear(Own(12, 12), tp)),
        ("RowParallelLinear: Own has a forward", lambda: RowParallelLinear(Own(12, 12), tp)),
        (
            "ColumnParallelLinear: the ParametrizedLinear has .*parametrization of weight",
            lambda: ColumnParallelLinear(parametrizations.weight_norm(nn.Linear(12, 12)), tp),
        ),
        (
            "RowParallelLinear: the Linear has forward_hooks",
            lambda: RowParallelLinear(hooked(nn.Linear(12, 12)), tp),
        ),
        (
            "RowParallelLinear: the Linear has a hook on weight",
            lambda: RowParallelLinear(with_hook(nn.Linear(12, 12)), tp),
        ),
        (
            "ParallelLayerNorm: expected an nn.LayerNorm, got RMSNorm",
            lambda: ParallelLayerNorm(nn.RMSNorm(12), tp),
        ),
        (
            "ParallelDropout: expected an nn.Dropout, got AlphaDropout",
            lambda: ParallelMLP(with_part(MLP(config), "dropout", nn.AlphaDropout(0.1)), tp),
        ),
        (
            "VocabParallelEmbedding: expected an nn.Embedding, got EmbeddingBag",
            lambda: VocabParallelEmbedding(nn.EmbeddingBag(24, 12), tp),
        ),
        ("VocabParallelHead: expected .* without bias", lambda: VocabParallelHead(linear, tp)),
        (
            "ParallelAttention: MultiheadAttention has no query, key, value, out",
            lambda: ParallelAttention(nn.MultiheadAttention(12, 12), tp),
        ),
        (
            "ParallelAttention: Attention also has query_norm",
            lambda: ParallelAttention(with_part(attention, "query_norm", nn.LayerNorm(1)), tp),
        ),
        (
            "ParallelMLP: MLP also has activation",
            lambda: ParallelMLP(with_part(mlp, "activation", nn.ReLU()), tp),
        ),
        (
            "ParallelBlock: Block also has scale",
            lambda: ParallelBlock(with_part(block, "scale", nn.Parameter(torch.ones(1))), tp),
        ),
        (
            "ParallelGPT: GPT also has final",
            lambda: parallelize_gpt(with_part(GPT(config), "final", nn.Tanh())),
        ),
        (
            "ContextParallelGPT: GPT also has final",
            lambda: context_parallel_gpt(with_part(GPT(config), "final", nn.Tanh())),
        ),
        (
            r"replaced forward \(as `recompute`",
            lambda: parallelize_gpt(GPT(config).apply(recompute)),
        ),
    ]
    mesh = make_mesh(tp=dist.get_world_size())
    for name, value in {"max_norm": 1.0, "scale_grad_by_freq": True, "sparse": True}.items():
        wanted = f"ContextParallelGPT: .*{name}={value}"
        cases.append((wanted, lambda o={name: value}: context_parallel_gpt(gpt(**o))))
        wanted = f"parallelize_gpt_native: .*{name}={value}"
        cases.append((wanted, lambda o={name: value}: parallelize_gpt_native(gpt(**o), mesh)))
    cases.append(
        (
            "parallelize_gpt_native: .*padding_idx=1",
            lambda: parallelize_gpt_native(gpt(padding_idx=1), mesh),
        )
    )
    positions = GPT(config)
    positions.position_embedding.max_norm = 1.0
    cases.append(("ParallelGPT: .*max_norm=1.0", lambda: parallelize_gpt(positions)))
    for wanted, call in cases:
        with pytest.raises(ValueError, match=wanted):
            call()


def test_what_would_be_lost_is_refused_by_name():
    run(world, 2, check_refusals)


# ------------------------------------------------------------------------------ shared weights


def shared_model(how: str) -> GPT:
    torch.manual_seed(0)
    model = GPT(config).double()
    if how == "head":  # by hand, not by GPTConfig(tied=True)
        model.head.weight = model.token_embedding.weight
    if how == "block":
        model.blocks[1] = model.blocks[0]
    if how == "query and key":
        model.blocks[0].attention.key.weight = model.blocks[0].attention.query.weight
    if how == "query and out":
        model.blocks[0].attention.out.weight = model.blocks[0].attention.query.weight
    return model


def check_shared() -> None:
    tokens = torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(2))
    for how in ("head", "block", "query and key"):
        full = shared_model(how)
        for sequence_parallel in (False, True):
            split = parallelize_gpt(shared_model(how), sequence_parallel=sequence_parallel)
            one = copy.deepcopy(full)
            for model in (one, split):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
                for _ in range(3):
                    optimizer.zero_grad()
                    if model is split:
                        split.loss(tokens, tokens).backward()
                    else:
                        F.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()).backward()
                    optimizer.step()
            state = full_state_dict(split)
            assert_close(state, dict(one.state_dict()), msg=lambda m: f"{how}: {m}")  # noqa: B023
            number = len(list(full.parameters()))
            assert len(list(split.parameters())) == number
            # A state with two values for one weight is refused; the right one goes back in.
            load_full_state_dict(split, state)
            wrong = dict(state)
            name = {"head": "head.weight", "query and key": "blocks.0.attention.key.weight"}.get(
                how, "blocks.1.mlp.up.weight"
            )
            wrong[name] = wrong[name] + 1
            with pytest.raises(ValueError, match=f"and {name} are one parameter"):
                load_full_state_dict(split, wrong)
    with pytest.raises(ValueError, match=r"query.weight and .*out.weight .* split differently"):
        parallelize_gpt(shared_model("query and out"))
    mesh = make_mesh(tp=dist.get_world_size())
    with pytest.raises(ValueError, match=r"blocks.0.norm1.weight and blocks.1.norm1.weight are"):
        build_stages(shared_model("block"), mesh, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_weights_stay_shared(world_size):
    run(world, world_size, check_shared, deadline_s=120)
