"""Context parallelism (ring, Ulysses) against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.data import make_tokens
from minidist.errors import MismatchError
from minidist.launch import run
from minidist.mesh import make_mesh
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.context import (
    causal_work,
    context_parallel_gpt,
    make_attention,
    mean_over_ranks,
    positions,
    ring_attention,
    ring_bytes,
    shard_sequence,
    sum_gradients,
    ulysses_attention,
    ulysses_bytes,
    unshard_sequence,
)
from minidist.parallel.tensor import full_state_dict, parallelize_gpt

LAYOUTS = ("zigzag", "contiguous")


def world(check, *args):
    """One rank: `check` between init and destroy."""
    dist.init_process_group("gloo")
    result = check(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def ranks(n, check, *args):
    return run(world, n, check, *args)


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_token_has_one_place(layout, size):
    held = torch.cat([positions(4 * size, rank, size, layout) for rank in range(size)])
    assert held.sort().values.tolist() == list(range(4 * size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_zigzag_balances_causal_work(size):
    assert len(set(causal_work(size, "zigzag"))) == 1
    assert causal_work(size, "contiguous") == list(range(1, size + 1))
    # The same work altogether: chunks of half the length, so 4 pairs for 1, less what is masked.
    tokens = 4 * size
    whole = sum(i + 1 for i in range(tokens))
    for layout in LAYOUTS:
        own = [int((positions(tokens, r, size, layout) + 1).sum()) for r in range(size)]
        assert sum(own) == whole
        assert (len(set(own)) == 1) == (layout == "zigzag" or size == 1)


def check_shards():
    for layout in LAYOUTS:
        for dim in (0, 1, -1):
            whole = draw(24, 24, 24)
            own = shard_sequence(whole, dim, layout=layout)
            assert own.shape[dim] == 24 // dist.get_world_size()
            assert_close(unshard_sequence(own, dim, layout=layout), whole, rtol=0, atol=0)


def test_shard_and_unshard():
    for n in (1, 2, 3, 4):
        ranks(n, check_shards)


# ---------------------------------------------------------------------------------- attention


def attentions() -> dict[str, Any]:
    from minidist.parallel.context.native import all_gather_attention, all_to_all_attention

    return {
        "ring": ring_attention,
        "ulysses": ulysses_attention,
        "native ring": all_gather_attention,
        "native ulysses": all_to_all_attention,
    }


def check_attention(cases):
    size = dist.get_world_size()
    for batch, heads, length, width, causal, layout in cases:
        shape = (batch, heads * size, 2 * length * size, width)
        whole = [draw(*shape, seed=seed) * 2 for seed in range(3)]
        weight = draw(*shape, seed=3)
        inputs: Any = [x.clone().requires_grad_() for x in whole]
        expected = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        expected_grads = torch.autograd.grad((expected * weight).sum(), inputs)

        cut = lambda x, layout=layout: shard_sequence(x, 2, layout=layout)  # noqa: E731
        for name, attention in attentions().items():
            own = [cut(x).requires_grad_() for x in whole]
            out = attention(*own, causal=causal, layout=layout)
            grads = torch.autograd.grad((out * cut(weight)).sum(), own)
            note = f"{name} {shape} causal={causal} {layout}: "
            say = lambda m, note=note: note + m  # noqa: E731
            assert_close(out, cut(expected), msg=say)
            for grad, expected_grad in zip(grads, expected_grads, strict=True):
                assert_close(grad, cut(expected_grad), msg=say)


def test_attention_of_any_shape():
    found: list[Any] = []

    @settings(derandomize=True, max_examples=14, deadline=None, database=None)
    @given(
        st.tuples(
            st.integers(1, 2),
            st.integers(1, 2),
            st.integers(1, 4),
            st.integers(1, 5),
            st.booleans(),
            st.sampled_from(LAYOUTS),
        )
    )
    def collect(case):
        found.append(case)

    collect()
    for n in (1, 2, 3, 4):
        ranks(n, check_attention, found)


def check_precision():
    """bf16 inputs are summed in float32; large scores do not overflow."""
    size = dist.get_world_size()
    whole = [(draw(1, 2, 8 * size, 4, seed=seed) * 30).bfloat16() for seed in range(3)]
    own = [shard_sequence(x, 2).requires_grad_() for x in whole]
    out = ring_attention(*own, scale=0.7)
    assert out.dtype == torch.bfloat16
    query, key, value = (x.float() for x in whole)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.7)
    assert_close(out, shard_sequence(expected, 2).bfloat16(), rtol=1e-2, atol=1e-2)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in own)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in own)


def test_bf16_and_large_scores():
    ranks(2, check_precision)


def check_detached_keys():
    """Negative control: keys gathered by a plain collective get no gradient from other ranks."""
    whole = [draw(1, 1, 8, 4, seed=seed) for seed in range(3)]
    inputs: Any = [x.clone().requires_grad_() for x in whole]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    expected = torch.autograd.grad(out.square().sum(), inputs)

    own = [shard_sequence(x, 2, layout="contiguous").requires_grad_() for x in whole]
    key, value = (unshard_sequence(x, 2, layout="contiguous") for x in own[1:])
    assert not key.requires_grad
    mask = positions(8, dist.get_rank(), 2, "contiguous").unsqueeze(1) >= torch.arange(8)
    out = F.scaled_dot_product_attention(own[0], key, value, attn_mask=mask)
    grads = torch.autograd.grad(out.square().sum(), own, allow_unused=True)
    assert_close(grads[0], shard_sequence(expected[0], 2, layout="contiguous"))
    assert grads[1] is None
    assert grads[2] is None


def test_plain_all_gather_of_keys_kills_their_gradient():
    ranks(2, check_detached_keys)


# ------------------------------------------------------------------------------------ traffic


class Sent(TorchDispatchMode):
    """Bytes that this rank sends."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::send":
            self.num_bytes += sum(t.numel() * t.element_size() for t in args[0])
        elif func._schema.name == "c10d::alltoall_base_":
            size = dist.get_world_size()
            self.num_bytes += args[1].numel() * args[1].element_size() * (size - 1) / size
        return func(*args, **(kwargs or {}))


def check_traffic():
    n = dist.get_world_size()
    shape = {"batch": 2, "num_heads": n, "num_tokens": 4 * n, "head_width": 3}
    for dtype in (torch.float64, torch.bfloat16):
        for attention, formula in (
            (ring_attention, ring_bytes),
            (ulysses_attention, ulysses_bytes),
        ):
            own = [draw(2, n, 4, 3, seed=i).to(dtype).requires_grad_() for i in range(3)]
            expected = formula(**shape, num_ranks=n, itemsize=own[0].element_size())
            with Sent() as forward:
                out = attention(*own)
            with Sent() as backward:
                out.sum().backward()
            assert forward.num_bytes == pytest.approx(expected.forward)
            assert backward.num_bytes == pytest.approx(expected.backward)


def test_bytes_are_what_the_formula_says():
    for n in (1, 3):
        ranks(n, check_traffic)


# ---------------------------------------------------------------------------------- whole GPT


def config_for(n, **changes):
    values: Any = {"vocab_size": 17, "context": 8 * n, "width": 24, "num_layers": 2}
    return GPTConfig(num_heads=4 if n == 4 else 6, **(values | changes))


def make_gpt(config) -> Any:
    torch.manual_seed(0)
    return GPT(config).double()


def check_gpt(cases):
    n = dist.get_world_size()
    for method, layout in cases:
        config = config_for(n, mlp_ratio=2, tied=method == "ring")
        full, shared = make_gpt(config), make_gpt(config)
        model = context_parallel_gpt(shared, method=method, layout=layout)
        assert {k for k, _ in model.named_parameters()} == {k for k, _ in full.named_parameters()}
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (full, model)]
        for step in range(10):
            tokens, targets = make_tokens(3, config.context, config.vocab_size, seed=step)
            targets[0, : step + 1] = -100  # not the same number of tokens on every rank
            own_tokens, own_targets = (shard_sequence(x, layout=layout) for x in (tokens, targets))
            logits = full(tokens)
            loss = lm_loss(logits, targets)
            if step == 0:
                own_logits = model(own_tokens)
                assert_close(unshard_sequence(own_logits, layout=layout), logits)
            own_loss = model.loss(own_tokens, own_targets)
            assert_close(own_loss, loss)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            own_loss.backward()
            sum_gradients(model)
            if step == 0:
                for name, p in full.named_parameters():
                    assert_close(model.get_parameter(name).grad, p.grad)
            for optimizer in optimizers:
                optimizer.step()
        assert_close(dict(model.state_dict()), dict(full.state_dict()), rtol=1e-6, atol=1e-9)
        tokens, _ = make_tokens(3, config.context, config.vocab_size)
        assert_close(shared(tokens), full(tokens), rtol=1e-6, atol=1e-8)  # shares the parameters


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_gpt_trains_as_in_one_process(n):
    cases = [("ring", "zigzag"), ("ulysses", "zigzag"), ("ring", "contiguous")]
    ranks(n, check_gpt, cases)


def check_shorter_sequence_and_wrong_positions():
    """Sequences may be shorter than the context; positions that count from 0 are wrong."""
    config = config_for(4)
    full = make_gpt(config)
    model: Any = context_parallel_gpt(full)
    tokens, _ = make_tokens(2, 16, config.vocab_size)
    expected = full(tokens)
    own = shard_sequence(tokens)
    assert_close(model(own), shard_sequence(expected))
    model.embed = full.embed
    assert not torch.allclose(model(own), shard_sequence(expected))


def test_positions_are_those_of_the_whole_sequence():
    ranks(2, check_shorter_sequence_and_wrong_positions)


def check_mesh():
    """Context and tensor parallelism together: ranks 2 x 2."""
    mesh = make_mesh(cp=2, tp=2)
    config = config_for(4)
    for method in ("ring", "ulysses"):
        for sequence_parallel in (False, True):
            full = make_gpt(config)
            model: Any = parallelize_gpt(full, mesh, sequence_parallel=sequence_parallel)
            group = mesh.group("cp")
            for block in model.blocks:
                block.attention.attend = make_attention(group, method=method)
            tokens, targets = make_tokens(2, config.context, config.vocab_size)
            own_tokens, own_targets = (shard_sequence(x, group=group) for x in (tokens, targets))
            own_positions = positions(config.context, mesh.coordinate("cp"), 2)
            own_loss = model.loss(own_tokens, own_targets, own_positions)
            count = torch.tensor(own_targets.numel())
            own_loss = mean_over_ranks(own_loss * count, count, group)
            own_loss.backward()
            sum_gradients(model, group)
            loss = lm_loss(full(tokens), targets)
            loss.backward()
            assert_close(own_loss, loss)
            for m in (full, model):
                torch.optim.SGD(m.parameters(), lr=1.0).step()
            assert_close(full_state_dict(model), dict(full.state_dict()))


def test_with_tensor_parallelism():
    ranks(4, check_mesh)


# ----------------------------------------------------------------------------------- wrong use


def expect(error, match, fn, *args, **kwargs):
    with pytest.raises(error, match=match):
        fn(*args, **kwargs)


def check_errors():
    rank = dist.get_rank()
    where = rf"\[rank {rank}\]"
    x, bad = torch.zeros(1, 4, 6, 2), torch.zeros(1, 4, 4, 2)
    for name, attention in attentions().items():
        expect(ValueError, rf"{where} .* one shape \(B, H, T, K\)", attention, x, bad, bad)
        expect(ValueError, "one shape", attention, x[0], x[0], x[0])
        expect(ValueError, r"layout is one of \('zigzag'", attention, x, x, x, layout="striped")
        odd = x[:, :, :3]
        expect(ValueError, rf"{where} .*two equal chunks, got T = 3", attention, odd, odd, odd)
        if "ulysses" in name:
            expect(
                ValueError,
                rf"{where} .*: 4 heads cannot be split over 3 ranks \(4 = 3 x 1 \+ 1\)",
                attention,
                x,
                x,
                x,
            )
    expect(
        ValueError,
        r"10 tokens cannot be split into 6 chunks \(10 = 6 x 1 \+ 4\); pad to 12",
        shard_sequence,
        torch.zeros(1, 10),
    )
    expect(ValueError, "expected one of .* got 'striped'", positions, 6, 0, 3, "striped")

    full = make_gpt(config_for(3))  # 6 heads, context 24
    expect(ValueError, "method is one of", context_parallel_gpt, full, method="flash")
    four = make_gpt(config_for(4))
    expect(
        ValueError,
        rf"{where} context_parallel_gpt: 4 heads cannot be split over 3 ranks .*ring",
        context_parallel_gpt,
        four,
        method="ulysses",
    )
    model: Any = context_parallel_gpt(full)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    expect(
        MismatchError,
        rf"{where} .*rank 1 .* shape \(2, 6\), expected \(2, 8\)",
        model,
        tokens[:, :6] if rank == 1 else tokens,
    )
    model(tokens)
    expect(
        ValueError,
        r"3 ranks x 10 tokens = 30, but the context is 24",
        model,
        torch.zeros(2, 10).long(),
    )
    pair = dist.new_group([0, 1])
    if rank == 2:
        expect(ValueError, rf"{where} .* not a member", ring_attention, x, x, x, group=pair)


def test_wrong_use_is_named():
    ranks(3, check_errors)
