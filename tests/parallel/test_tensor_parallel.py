"""Tensor and sequence parallelism against one process in float64."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from minidist import emulate
from minidist.data import make_tokens
from minidist.errors import LaunchError, MismatchError
from minidist.launch import run
from minidist.mesh import make_mesh
from minidist.model import GPT, Attention, Block, GPTConfig, lm_loss
from minidist.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelLayerNorm,
    RngTracker,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
    block_traffic,
    clip_grad_norm,
    copy_to,
    full_state_dict,
    gather_from,
    gather_sequence,
    load_full_state_dict,
    parallelize_gpt,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
    vocab_parallel_cross_entropy,
)
from minidist.parallel.tensor.mappings import all_gather

MODES = [(False, False), (False, True), (True, False), (True, True)]  # sequence_parallel, overlap


def world(check, *args):
    """One rank: `check` between init and destroy."""
    dist.init_process_group("gloo")
    result = check(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def ranks(n, check, *args):
    return run(world, n, check, *args)


def seeded(make, seed=0):
    """A module in float64, the same on all ranks, with no parameter left at a special value."""
    torch.manual_seed(seed)
    module = make().double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def total(tensors):
    return torch.stack(list(tensors)).sum(0)


def part(x, dim):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Counter(TorchDispatchMode):
    """Every collective that reaches a process group, with the bytes of its whole tensor."""

    OPS = {  # noqa: RUF012
        "allreduce_": ("all_reduce", 0),
        "_allgather_base_": ("all_gather", 0),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "all_reduce": ("all_reduce", 0),
        "all_gather_into_tensor": ("all_gather", 0),
        "reduce_scatter_tensor": ("reduce_scatter", 0),
    }

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and name in self.OPS:
            op, index = self.OPS[name]
            tensor = args[index]
            tensor = tensor[0] if isinstance(tensor, list | tuple) else tensor
            self.seen.append((op, tensor.numel() * tensor.element_size()))
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------- mappings


def check_mappings():
    size, rank = dist.get_world_size(), dist.get_rank()
    for dim in (0, 1, -1):
        # Every rank can compute what any other rank has: the oracle needs no communication.
        wholes: Any = [draw(2 * size, 3 * size, 4 * size, seed=r) for r in range(size)]
        weights = [draw(2 * size, 3 * size, 4 * size, seed=100 + r) for r in range(size)]
        parts = [whole.chunk(size, dim)[r] for r, whole in enumerate(wholes)]
        part_weights = [w.chunk(size, dim)[r] for r, w in enumerate(weights)]
        mine = {"whole": wholes[rank], "part": parts[rank]}
        own = {"whole": weights[rank], "part": part_weights[rank]}
        cases: list[Any] = [
            (lambda x: copy_to(x), "whole", wholes[rank], "whole", total(weights)),
            (lambda x: reduce_from(x), "whole", total(wholes), "whole", weights[rank]),
            (
                lambda x, d=dim: scatter_to(x, d),
                "whole",
                wholes[rank].chunk(size, dim)[rank],
                "part",
                torch.cat(part_weights, dim),
            ),
            (
                lambda x, d=dim: gather_from(x, d),
                "part",
                torch.cat(parts, dim),
                "whole",
                weights[rank].chunk(size, dim)[rank],
            ),
            (
                lambda x, d=dim: gather_sequence(x, d),
                "part",
                torch.cat(parts, dim),
                "whole",
                total(weights).chunk(size, dim)[rank],
            ),
            (
                lambda x, d=dim: reduce_scatter_sequence(x, d),
                "whole",
                total(wholes).chunk(size, dim)[rank],
                "part",
                torch.cat(part_weights, dim),
            ),
        ]
        for op, source, expected, weight, expected_grad in cases:
            x = mine[source].clone().requires_grad_()
            before = x.detach().clone()
            y = op(x)
            assert_close(y, expected)
            (y * own[weight]).sum().backward()
            assert_close(x.grad, expected_grad)
            assert_close(x.detach(), before, rtol=0, atol=0)  # no collective worked on the input


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_operators_and_their_gradients(n):
    ranks(n, check_mappings)


def check_second_derivative():
    torch.manual_seed(0)
    full = seeded(lambda: nn.Linear(4, 6))
    tp = TensorParallel()
    layer = ColumnParallelLinear(full, tp, gather_output=True)
    x = draw(3, 4).requires_grad_()
    found = []
    for linear in (full, layer):
        (g,) = torch.autograd.grad(linear(x).tanh().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), x)[0])
    assert_close(found[1], found[0])


def test_second_derivatives_work_too():
    ranks(2, check_second_derivative)


# -------------------------------------------------------------------- what the operators are for


def check_plain_all_gather():
    """The source lectures' version: column-parallel output joined by dist.all_gather."""
    full = seeded(lambda: nn.Linear(4, 6))
    x: Any = draw(5, 4).requires_grad_()
    weight = part(full.weight.detach(), 0).clone().requires_grad_()
    own = F.linear(x, weight, part(full.bias.detach(), 0))
    outputs = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, own.detach())
    joined = torch.cat(outputs, -1)
    assert_close(joined, full(x))  # right forward ...
    assert not joined.requires_grad  # ... but the gradient ends here
    with pytest.raises(RuntimeError, match="does not require grad"):
        joined.sum().backward()
    outputs[dist.get_rank()] = own  # the repair one finds on the web: rank's own part put back
    torch.cat(outputs, -1).square().sum().backward()
    x_full: Any = x.detach().clone().requires_grad_()
    full(x_full).square().sum().backward()
    assert_close(weight.grad, part(full.weight.grad, 0))  # helps the weight,
    assert not torch.allclose(x.grad, x_full.grad)  # but not the layers below

    # The same with the operators.
    layer = ColumnParallelLinear(full, TensorParallel(), gather_output=True)
    x.grad = None
    layer(x).square().sum().backward()
    assert_close(layer.weight.grad, part(full.weight.grad, 0))
    assert_close(x.grad, x_full.grad)


def test_plain_all_gather_kills_the_gradient_and_ours_does_not():
    ranks(2, check_plain_all_gather)


def check_bias():
    """Bias on rank 0 only makes ranks go apart; bias before the sum counts n times."""
    full = seeded(lambda: nn.Linear(6, 4))
    x = draw(5, 6)
    layer = RowParallelLinear(full, TensorParallel())
    assert_close(layer(part(x, -1)), full(x))

    total = F.linear(part(x, -1), layer.weight)
    dist.all_reduce(total.detach())
    only_rank_0 = total + (full.bias if dist.get_rank() == 0 else 0)
    assert torch.allclose(only_rank_0, full(x)) == (dist.get_rank() == 0)
    before = F.linear(part(x, -1), layer.weight, full.bias).detach()
    dist.all_reduce(before)
    assert_close(before, full(x) + (dist.get_world_size() - 1) * full.bias)


def test_row_parallel_bias_counts_once_on_every_rank():
    ranks(3, check_bias)


def check_bias_under_autocast():
    """As nn.Linear: what leaves a layer under autocast is of the low dtype, bias and all."""
    full = nn.Linear(8, 6)
    layer = RowParallelLinear(full, TensorParallel())
    x = part(draw(5, 8).float(), -1)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("n", [1, 2])
def test_row_parallel_bias_does_not_undo_autocast(n):
    ranks(n, check_bias_under_autocast)


# ------------------------------------------------------------------------------------- layers


def check_mlp(cases):
    size = dist.get_world_size()
    for batch, tokens, width, hidden, bias, sequence_parallel, overlap in cases:
        tp = TensorParallel(sequence_parallel=sequence_parallel, overlap=overlap)
        make = lambda w=width, h=hidden * size, b=bias: nn.Sequential(  # noqa: E731
            nn.LayerNorm(w), nn.Linear(w, h, bias=b), nn.GELU(), nn.Linear(h, w, bias=b)
        )
        full: Any = seeded(make)
        ours = nn.Sequential(
            ParallelLayerNorm(full[0], tp),
            ColumnParallelLinear(full[1], tp),
            nn.GELU(),
            RowParallelLinear(full[3], tp),
        )
        x, weight = (draw(batch, tokens * size, width, seed=seed) for seed in (1, 2))
        x_full = x.clone().requires_grad_()
        y_full = full(x_full)
        (y_full * weight).sum().backward()
        cut = (lambda t: part(t, 1)) if sequence_parallel else (lambda t: t)
        x_own = cut(x).clone().requires_grad_()
        y = ours(x_own)
        assert_close(y, cut(y_full))
        (y * cut(weight)).sum().backward()
        assert_close(x_own.grad, cut(x_full.grad))
        dims = {"1.weight": 0, "1.bias": 0, "3.weight": 1}
        for name, p in ours.named_parameters():
            expected = full.get_parameter(name).grad
            if name in dims:
                expected = part(expected, dims[name])
            assert_close(p.grad, expected, msg=lambda m, name=name: f"{name}: {m}")


def test_mlp_of_any_shape():
    found = []

    @settings(derandomize=True, max_examples=25, deadline=None, database=None)
    @given(
        st.tuples(
            st.integers(1, 3),
            st.integers(1, 3),
            st.integers(1, 6),
            st.integers(1, 4),
            st.booleans(),
            st.booleans(),
            st.booleans(),
        )
    )
    def collect(case):
        found.append(case)

    collect()
    for n in (1, 2, 3, 4):
        ranks(n, check_mlp, found)


def check_autocast():
    """The overlapped path has its own autograd function, which autocast does not see into."""
    full = seeded(lambda: nn.Linear(8, 12)).float()
    x = draw(2, 4, 8).float()
    grads = []
    for overlap in (False, True):
        layer = ColumnParallelLinear(full, TensorParallel(overlap=overlap))
        x_own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x_own)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        assert layer.weight.grad is not None
        assert x_own.grad is not None
        assert layer.weight.grad.dtype == x_own.grad.dtype == torch.float32
        grads.append((x_own.grad, layer.weight.grad))
    for plain, overlapped in zip(*grads, strict=True):
        assert_close(plain, overlapped, rtol=3e-2, atol=3e-2)


def test_overlap_under_autocast():
    ranks(2, check_autocast)


def check_overlap_order():
    """What is called in which order in the backward pass: reduce, compute, wait."""
    log = []
    original = dist.all_reduce

    class Handle:
        def __init__(self, work):
            self.work = work

        def wait(self):
            log.append("wait")
            self.work.wait()

    def all_reduce(tensor, *args, async_op=False, **kwargs):
        log.append("all_reduce" if async_op else "blocking all_reduce")
        work = original(tensor, *args, async_op=async_op, **kwargs)
        return Handle(work) if async_op else None

    class Matmuls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func._schema.name in ("aten::mm", "aten::bmm"):
                log.append("weight" if out.shape == weight_shape else "input")
            return out

    full = seeded(lambda: nn.Linear(8, 12))
    weight_shape = (12 // dist.get_world_size(), 8)
    for overlap in (True, False):
        layer = ColumnParallelLinear(full, TensorParallel(overlap=overlap))
        y = layer(draw(5, 8).requires_grad_())
        log.clear()
        dist.all_reduce = all_reduce
        try:
            with Matmuls():
                y.sum().backward()
        finally:
            dist.all_reduce = original
        if overlap:
            assert log == ["input", "all_reduce", "weight", "wait"]
        else:
            assert sorted(log[:2]) == ["input", "weight"]
            assert log[2:] == ["blocking all_reduce"]


def run_on_emulated_gpus(overlap):
    """One wide layer, backward, on two emulated A100s; in bf16, where communication weighs."""
    layer = nn.Linear(1024, 2048, bias=False).bfloat16()
    ours = ColumnParallelLinear(layer, TensorParallel(overlap=overlap))
    x = torch.zeros(1, 512, 1024, dtype=torch.bfloat16, requires_grad=True)
    ours(x).sum().backward()


def test_overlap_saves_time_on_the_emulated_cluster():
    times = {}
    for overlap in (False, True):
        _, timeline = emulate.run(run_on_emulated_gpus, 2, emulate.clusters.pcie_a100(2), overlap)
        times[overlap] = timeline.makespan_s
        spans = {
            kind: [(i.start_s, i.end_s) for i in timeline.intervals[0] if i.kind == kind]
            for kind in ("compute", "communication")
        }
        (reduce,) = spans["communication"]
        beside = sum(
            max(0.0, min(end, reduce[1]) - max(start, reduce[0])) for start, end in spans["compute"]
        )
        assert (beside > 0) == overlap
    assert times[True] < times[False]


def test_overlap_reduces_while_it_computes_the_weight_gradient():
    ranks(2, check_overlap_order)


# --------------------------------------------------------------------------------- vocabulary


def check_vocab(cases):
    size = dist.get_world_size()
    for i, (num, vocab, width, ignored, smoothing, reduction, sequence_parallel) in enumerate(
        cases
    ):
        tp = TensorParallel(sequence_parallel=sequence_parallel)
        embedding: Any = seeded(lambda v=vocab, w=width: nn.Embedding(v, w), i)
        head: Any = seeded(lambda v=vocab, w=width: nn.Linear(w, v, bias=False), i)
        generator = torch.Generator().manual_seed(i)
        tokens, targets = torch.randint(vocab, (2, 2, num * size), generator=generator)
        targets[torch.rand(2, num * size, generator=generator) < ignored] = -100
        if reduction == "mean":
            targets[0, 0] = 0  # the mean of nothing is nan
        own_embedding = VocabParallelEmbedding(embedding, tp)
        own_head = VocabParallelHead(head, tp)

        logits = head(embedding(tokens) * 3)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction=reduction
        )
        own_logits = own_head(own_embedding(tokens) * 3)
        assert_close(own_head.gather(own_logits), logits)
        own_loss = vocab_parallel_cross_entropy(
            own_logits, targets, vocab_size=vocab, label_smoothing=smoothing, reduction=reduction
        )
        assert_close(own_loss.flatten(), loss.flatten())
        weight = draw(*own_loss.shape)
        (loss * weight.view(loss.shape)).sum().backward()
        (own_loss * weight).sum().backward()
        for ours, full in ((own_embedding, embedding), (own_head, head)):
            rows = -(-vocab // size)
            padded = F.pad(full.weight.grad, (0, 0, 0, rows * size - vocab))
            assert_close(ours.weight.grad, part(padded, 0))


def test_vocabulary_of_any_size():
    found = [(2, 1, 3, 0.5, 0.1, "mean", False), (1, 2, 3, 0.0, 0.0, "none", True)]

    @settings(derandomize=True, max_examples=25, deadline=None, database=None)
    @given(
        st.tuples(
            st.integers(1, 4),
            st.integers(1, 13),
            st.integers(1, 4),
            st.sampled_from([0.0, 0.4]),
            st.sampled_from([0.0, 0.1, 1.0]),
            st.sampled_from(["mean", "sum", "none"]),
            st.booleans(),
        )
    )
    def collect(case):
        found.append(case)

    collect()
    for n in (1, 2, 3, 4):
        ranks(n, check_vocab, found)


def check_loss_traffic_and_precision():
    # Three numbers per token travel, whatever the vocabulary.
    logits = (draw(2, 5, 50, seed=dist.get_rank()) * 100).requires_grad_()
    targets = torch.randint(100, (2, 5), generator=torch.Generator().manual_seed(0))
    with Counter() as counter:
        vocab_parallel_cross_entropy(logits, targets).backward()
    assert counter.seen == [("all_reduce", 10 * 8), ("all_reduce", 2 * 10 * 8)]

    # Large logits do not overflow, and bf16 ones are summed in float32.
    whole = [draw(2, 5, 50, seed=r) * 1000 for r in range(2)]
    expected = F.cross_entropy(
        torch.cat(whole, -1).bfloat16().float().flatten(0, 1), targets.flatten()
    )
    loss = vocab_parallel_cross_entropy(whole[dist.get_rank()].bfloat16(), targets)
    assert loss.dtype == torch.float32
    assert_close(loss, expected)


def test_loss_sends_three_numbers_per_token():
    ranks(2, check_loss_traffic_and_precision)


# ---------------------------------------------------------------------------------- whole GPT


def config_for(n, **changes):
    heads = 6 if n in (1, 2, 3) else 4
    values: Any = {"vocab_size": 19, "context": 12, "width": 24, "num_layers": 2, "mlp_ratio": 2}
    return GPTConfig(num_heads=heads, **(values | changes))


def batch(config, num=4, seed=0):
    return make_tokens(num, config.context, config.vocab_size, seed)


def check_gpt(cases):
    n = dist.get_world_size()
    for sequence_parallel, overlap, tied, bias in cases:
        config = config_for(n, tied=tied, bias=bias)
        full: Any = seeded(lambda c=config: GPT(c))
        model = parallelize_gpt(full, sequence_parallel=sequence_parallel, overlap=overlap)
        assert set(model.state_dict()) == set(full.state_dict())
        tokens, targets = batch(config)

        # Forward and gradients.
        expected = full(tokens)
        assert_close(model.head.gather(model(tokens)), expected)
        loss = lm_loss(expected, targets)
        loss.backward()
        own_loss = model.loss(tokens, targets)
        assert_close(own_loss, loss)
        own_loss.backward()
        assert_close(gradients(model), {k: p.grad for k, p in full.named_parameters()})

        # Clipping, then ten steps.
        norm = nn.utils.clip_grad_norm_(full.parameters(), 0.1)
        assert_close(clip_grad_norm(model, 0.1), norm)
        assert_close(gradients(model), {k: p.grad for k, p in full.named_parameters()})
        train(full, lambda m, x, y: lm_loss(m(x), y), config)
        train(model, lambda m, x, y: m.loss(x, y), config)
        assert_close(full_state_dict(model), dict(full.state_dict()), rtol=1e-6, atol=1e-9)

        # Replicated parameters have stayed equal.
        for name in ("norm.weight", "blocks.0.mlp.down.bias"):
            if bias or not name.endswith("bias"):
                own = model.get_parameter(name).detach().clone()
                dist.broadcast(own, 0)
                assert_close(model.get_parameter(name).detach(), own, rtol=0, atol=1e-14)
    check_frozen()


def check_frozen():
    """Frozen parameters of each kind stay as they are; the others train as they would alone."""
    config = config_for(dist.get_world_size())
    full: Any = seeded(lambda: GPT(config))
    for frozen in (full.token_embedding, full.blocks[0].attention, full.blocks[1].mlp.up):
        frozen.requires_grad_(False)
    before = copy.deepcopy(dict(full.state_dict()))
    model = parallelize_gpt(full)
    train(full, lambda m, x, y: lm_loss(m(x), y), config)
    train(model, lambda m, x, y: m.loss(x, y), config)
    after = full_state_dict(model)
    assert_close(after, dict(full.state_dict()), rtol=1e-6, atol=1e-9)
    for name, p in model.named_parameters():
        assert p.requires_grad == (p.grad is not None)
        assert p.requires_grad or torch.equal(after[name], before[name])
    assert not model.token_embedding.weight.requires_grad
    assert model.head.weight.requires_grad


def gradients(model):
    """Whole gradients by name, through a copy whose parameters are the gradients."""
    clone = copy.deepcopy(model)
    pairs = zip(clone.parameters(), model.parameters(), strict=True)
    for to, p in pairs:
        assert p.grad is not None
        to.data = p.grad
    names = {name for name, _ in model.named_parameters()}
    return {name: g for name, g in full_state_dict(clone).items() if name in names}


def train(model, loss_of, config, steps=10):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(config, seed=step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gpt_trains_as_in_one_process(n):
    tied = [False, True, True, False]
    cases = [(*mode, tie, True) for mode, tie in zip(MODES, tied, strict=True)]
    ranks(n, check_gpt, [*cases, (True, False, False, False)])


def check_mesh():
    """Two tensor-parallel groups beside each other, each with data of its own."""
    mesh = make_mesh(dp=2, tp=2)
    config = config_for(2)
    full: Any = seeded(lambda: GPT(config))
    model = parallelize_gpt(full, mesh, sequence_parallel=True)
    tokens, targets = batch(config, seed=mesh.coordinate("dp"))
    loss = model.loss(tokens, targets)
    loss.backward()
    expected = lm_loss(full(tokens), targets)
    expected.backward()
    assert_close(loss, expected)
    assert_close(gradients(model), {k: p.grad for k, p in full.named_parameters()})


def test_groups_of_a_mesh():
    ranks(4, check_mesh)


# -------------------------------------------------------------------------------------- state


def check_save(tied):
    config = config_for(3, tied=tied)
    full = seeded(lambda: GPT(config))
    return full_state_dict(parallelize_gpt(full)), dict(full.state_dict())


def check_load(state, tied):
    config = config_for(3, tied=tied)
    other: Any = seeded(lambda: GPT(config), 5)
    tokens, _ = batch(config)
    with torch.device("meta"):
        empty = GPT(config)
    logits = []
    for model in (parallelize_gpt(other), parallelize_gpt(empty)):
        load_full_state_dict(model, state)
        assert_close(full_state_dict(model), state, rtol=0, atol=0)
        assert (model.head.weight is model.token_embedding.weight) == tied
        logits.append(model.head.gather(model(tokens)).detach())
    assert_close(logits[0], logits[1])
    with pytest.raises(ValueError, match=r"norm.weight: expected shape \(24,\), got \(7,\)"):
        load_full_state_dict(model, state | {"norm.weight": torch.zeros(7)})
    with pytest.raises(ValueError, match=r"rank \d of 2: names .* got \['extra'\] besides"):
        load_full_state_dict(model, state | {"extra": torch.zeros(7)})
    return True


@pytest.mark.parametrize("tied", [False, True])
def test_full_state_from_three_ranks_goes_to_two(tied):
    saved = ranks(3, check_save, tied)
    for state, expected in saved:
        assert_close(state, expected, rtol=0, atol=0)
    ranks(2, check_load, saved[0][0], tied)


# ------------------------------------------------------------------------------------ dropout


def check_dropout():
    config = config_for(2, dropout=0.3)
    full: Any = seeded(lambda: GPT(config))
    tokens, _ = batch(config)

    # Replicated activations: the masks of all ranks are those of one process.
    model = parallelize_gpt(full)
    torch.manual_seed(7)
    expected = full(tokens)
    torch.manual_seed(7)
    assert_close(model.head.gather(model(tokens)), expected)

    # Split activations: each rank draws its own mask; the common stream moves on alike.
    torch.manual_seed(11)
    rng = RngTracker(3)
    with rng.fork():
        masks = [F.dropout(torch.ones(64), 0.5) for _ in range(2)]
    common = torch.get_rng_state()
    with rng.fork():
        masks.append(F.dropout(torch.ones(64), 0.5))
    assert len({tuple(mask.tolist()) for mask in masks}) == 3
    torch.set_rng_state(common)  # from a checkpoint, or by torch's activation checkpointing
    with rng.fork():
        assert torch.equal(F.dropout(torch.ones(64), 0.5), masks[2])
    assert_close(common, all_gather(common, 0).chunk(2)[0], rtol=0, atol=0)

    # In the model: the same tokens everywhere, so that only the masks can differ.
    split: Any = parallelize_gpt(full, sequence_parallel=True)
    ones = torch.ones(1, 50, 24, dtype=torch.float64)
    dropped = split.blocks[0].mlp.dropout(ones)
    split.loss(*batch(config)).backward()
    split.eval()
    full.eval()
    assert_close(split.head.gather(split(tokens)), full(tokens))
    return masks[0], dropped


def test_dropout_masks():
    (first, dropped_first), (second, dropped_second) = ranks(2, check_dropout)
    assert not torch.equal(first, second)
    assert not torch.equal(dropped_first, dropped_second)


# ------------------------------------------------------------------------------------ traffic


def check_traffic():
    n = dist.get_world_size()
    config = config_for(n, num_layers=1)
    for bias in (True, False):
        for sequence_parallel, overlap in MODES:
            tp = TensorParallel(sequence_parallel=sequence_parallel, overlap=overlap)
            block = ParallelBlock(Block(config_for(n, bias=bias)).double(), tp)
            x = draw(3, config.context, config.width)
            x = part(x, 1) if sequence_parallel else x
            x = x.clone().requires_grad_()
            expected = block_traffic(
                batch=3,
                num_tokens=config.context,
                width=config.width,
                itemsize=8,
                sequence_parallel=sequence_parallel,
                overlap=overlap,
                bias=bias,
            )
            with Counter() as forward:
                y = block(x)
            with Counter() as backward:
                y.sum().backward()
            for phase, seen in (("forward", forward.seen), ("backward", backward.seen)):
                wanted = [t for t in expected if t.phase == phase]
                assert len(seen) == sum(t.count for t in wanted)
                for op in ("all_reduce", "all_gather", "reduce_scatter"):
                    num_bytes = [size for name, size in seen if name == op]
                    assert len(num_bytes) == sum(t.count for t in wanted if t.op == op)
                    assert sum(num_bytes) == sum(
                        t.count * t.num_bytes for t in wanted if t.op == op
                    )


def test_block_sends_what_the_formula_says():
    ranks(2, check_traffic)


# ------------------------------------------------------------------------------------- native


def check_native(cases):
    from minidist.parallel.tensor.native import loss_parallel, parallelize_gpt_native

    n = dist.get_world_size()
    mesh = make_mesh(tp=n)
    found = {}
    for sequence_parallel, one_input, num_steps in cases:
        config = config_for(n, vocab_size=6 * n, context=4 * n, tied=sequence_parallel)
        tokens, targets = batch(config)
        full: Any = seeded(lambda c=config: GPT(c))
        lm_loss(full(tokens), targets).backward()
        ours = parallelize_gpt(full, sequence_parallel=sequence_parallel)
        theirs: Any = parallelize_gpt_native(
            copy.deepcopy(full), mesh, sequence_parallel=sequence_parallel, one_input=one_input
        )
        theirs.zero_grad()
        our_loss = ours.loss(tokens, targets)
        our_loss.backward()
        with loss_parallel():
            logits = theirs(tokens)
            their_loss: Any = lm_loss(logits, targets)
            with Counter() as counter:
                their_loss.backward()
        full_loss = their_loss.full_tensor() if hasattr(their_loss, "full_tensor") else their_loss
        assert_close(full_loss, our_loss)
        assert_close(logits.full_tensor(), full(tokens))
        grads = gradients(ours)
        for name, p in theirs.named_parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert_close(grad, full.get_parameter(name).grad, msg=lambda m, name=name: name + m)
            assert_close(grad, grads[name])
        num_bytes = 4 * config.context * config.width * 8
        found[sequence_parallel, one_input] = counter.seen.count(("all_reduce", num_bytes))

        # Every parameter is a DTensor, so clipping and list-wise optimizers take them.
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        nn.utils.clip_grad_norm_(full.parameters(), 0.1)
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (theirs, full)
        ]
        for step in range(num_steps):
            for model, optimizer in zip((theirs, full), optimizers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                if step < num_steps - 1:
                    tokens, targets = batch(config, seed=step + 1)
                    with loss_parallel() if model is theirs else contextlib.nullcontext():
                        lm_loss(model(tokens), targets).backward()
        whole: Any = dict(theirs.named_parameters())
        for name, q in whole.items():
            assert_close(q.full_tensor(), full.get_parameter(name), rtol=1e-6, atol=1e-9)
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_dtensor_gives_the_same(n):
    cases = [(False, True, 10), (False, False, 1), (True, True, 10)]
    found = ranks(n, check_native, cases)[0]
    if n > 1:
        # Per block one for the attention's input and one for the MLP's; one for the head.
        assert found[False, True] == 2 * 2 + 1
        assert found[False, False] == 2 * 4 + 1  # query, key and value each


# --------------------------------------------------------------------------------- wrong use


def expect(error, match, fn, *args, **kwargs):
    with pytest.raises(error, match=match):
        fn(*args, **kwargs)


def check_errors():
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == 4
    tp = TensorParallel()
    where = rf"\[rank {rank}\]"
    six = GPTConfig(num_heads=6, width=24, context=12)
    expect(
        ValueError,
        rf"{where} ParallelAttention: heads: 6 cannot be split over 4 ranks "
        r"\(6 = 4 x 1 \+ 2\): use 1, 2, 3 or 6 ranks",
        ParallelAttention,
        Attention(six),
        tp,
    )
    expect(ValueError, rf"{where} parallelize_gpt: heads: 6 .* over 4", parallelize_gpt, GPT(six))
    expect(ValueError, r"output features: 7 .* 4 ranks", ColumnParallelLinear, nn.Linear(8, 7), tp)
    expect(ValueError, r"input features: 7 .* over 4", RowParallelLinear, nn.Linear(7, 8), tp)
    expect(
        ValueError,
        r"expected this rank's 2 of 8 input features, got 8",
        RowParallelLinear(nn.Linear(8, 8), tp),
        torch.zeros(1, 8),
    )
    expect(
        ValueError,
        r"scatter_to: dimension 1 .*\(2, 6\): 6 cannot",
        scatter_to,
        torch.zeros(2, 6),
        1,
    )
    expect(ValueError, "without bias", VocabParallelHead, nn.Linear(8, 8), tp)
    expect(
        ValueError,
        "needs an RngTracker",
        ParallelBlock,
        Block(config_for(4, dropout=0.1)),
        TensorParallel(sequence_parallel=True),
    )

    # The loss.
    loss, logits, targets = vocab_parallel_cross_entropy, torch.zeros(3, 2), torch.zeros(3).long()
    expect(ValueError, r"need targets of shape \(3,\), got \(2,\)", loss, logits, targets[:2])
    expect(
        ValueError, r"4 ranks x 2 columns = 8 cannot hold .* 9", loss, logits, targets, vocab_size=9
    )
    expect(ValueError, "from 0 to 6, got 7", loss, logits, targets + 7, vocab_size=7)
    expect(ValueError, "reduction is", loss, logits, targets, reduction="avg")
    expect(ValueError, "label_smoothing goes", loss, logits, targets, label_smoothing=2.0)
    embedding = VocabParallelEmbedding(nn.Embedding(6, 4), tp)
    expect(ValueError, rf"{where} .*tokens go from 0 to 5, got 6", embedding, torch.tensor([[6]]))

    # What differs between ranks is named instead of hanging or going wrong in silence.
    config = config_for(4)
    different: Any = seeded(lambda: GPT(config), seed=rank // 3)
    expect(
        MismatchError,
        rf"{where} parallelize_gpt: rank 3 of .* other weights .*token_embedding",
        parallelize_gpt,
        different,
    )
    full: Any = seeded(lambda: GPT(config_for(4, dropout=0.1)))
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    model = parallelize_gpt(full)
    expect(
        MismatchError,
        rf"{where} .*rank 2 .* other tokens .*\(2, 12\).*\(1, 12\)",
        model,
        tokens[:1] if rank == 2 else tokens,
    )
    expect(MismatchError, r"rank 1 .* other tokens .*checksum 0", model, tokens + (rank == 1))
    torch.manual_seed(rank)
    expect(MismatchError, r"rank 1 .* other dropout masks", model, tokens)
    torch.manual_seed(0)
    model(tokens)
    expect(ValueError, r"13 tokens, but its context is 12", model, torch.zeros(1, 13).long())
    split = parallelize_gpt(full, sequence_parallel=True)
    expect(ValueError, r"10 cannot be split over 4 ranks", split, tokens[:, :10])

    pair = dist.new_group([0, 1])
    if rank > 1:
        expect(ValueError, rf"{where} TensorParallel: not a member", TensorParallel, group=pair)


def test_wrong_use_is_named():
    ranks(4, check_errors)


def test_no_process_group():
    with pytest.raises(ValueError, match="init_process_group first"):
        TensorParallel()


def one_rank_wrong():
    TensorParallel()
    config = config_for(2)
    model = parallelize_gpt(seeded(lambda: GPT(config)))
    model.loss(*batch(config, seed=dist.get_rank()))


def test_error_reaches_the_caller():
    with pytest.raises(LaunchError, match="rank 1 of the tensor-parallel group got other tokens"):
        ranks(2, one_rank_wrong)
