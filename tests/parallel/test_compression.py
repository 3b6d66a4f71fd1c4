"""Gradient compression: same bits on every rank, nothing lost, stock DDP and ours, convergence."""

from __future__ import annotations

import copy
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist.data import make_regression
from minidist.emulate import clusters
from minidist.emulate.teach import run as run_emulated
from minidist.launch import run
from minidist.parallel.compression import (
    Cast,
    Compressor,
    HookState,
    Int8,
    PowerSGD,
    Segment,
    TopK,
    compression_hook,
    orthonormalise,
    register_torch_hook,
    segments_of,
    sum_in_place,
)

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SHAPES = [(6, 5), (7,), (3, 2, 2, 2), (1,), (), (0,), (9, 4)]


def make(name: str) -> Compressor:
    """Every compressor; those with a + have error feedback."""
    return {
        "fp32": lambda: Cast(torch.float32),
        "fp16": lambda: Cast(torch.float16),
        "fp16+": lambda: Cast(torch.float16, predivide=1.0, error_feedback=True),
        "bf16": lambda: Cast(torch.bfloat16),
        "bf16+": lambda: Cast(torch.bfloat16, error_feedback=True),
        "int8": lambda: Int8(error_feedback=False),
        "int8+": lambda: Int8(),
        "int8 channel+": lambda: Int8(per_channel=True),
        "topk": lambda: TopK(0.1, error_feedback=False),
        "topk+": lambda: TopK(0.1),
        "powersgd": lambda: PowerSGD(1, min_ratio=1.0, error_feedback=False),
        "powersgd+": lambda: PowerSGD(2, min_ratio=1.0),
        "powersgd batched+": lambda: PowerSGD(2, min_ratio=1.0, batched=True),
        "powersgd cold+": lambda: PowerSGD(1, min_ratio=1.0, warm_start=False, start_step=1),
    }[name]()


NAMES = "fp32,fp16,fp16+,bf16,bf16+,int8,int8+,int8 channel+,topk,topk+,powersgd,powersgd+"
ALL = [*NAMES.split(","), "powersgd cold+", "powersgd batched+"]

# Largest error of one reduction, relative to the largest element of any rank's gradient.
TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3, "fp16+": 1e-3, "bf16": 8e-3, "bf16+": 8e-3}
TOLERANCE |= {name: 1.01 / 127 for name in ("int8", "int8+", "int8 channel+")}


def residual_of(compressor: Compressor, segments: list[Segment]) -> torch.Tensor:
    table = compressor.state_dict((str(i), s.key) for i, s in enumerate(segments))["residuals"]
    parts = [
        table.get(str(i), torch.zeros(segment.numel)).double() for i, segment in enumerate(segments)
    ]
    return torch.cat(parts)


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return torch.stack(every).mean(0)


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return len(set(every)) == 1


# ------------------------------------------------------------------ properties of one reduction


def in_world(fn, *args):
    """What a rank runs. Its DDPs are gone before its group: torch may hang otherwise."""
    dist.init_process_group("gloo")
    result = fn(*args)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return result


Case = tuple[str, list[tuple[int, ...]], torch.dtype, int, float]


def check_properties(cases: list[Case]) -> int:
    rank = dist.get_rank()
    for name, shapes, dtype, seed, scale in cases:
        compressor = make(name)
        segments = [Segment(i, shape) for i, shape in enumerate(shapes)]
        numel = sum(segment.numel for segment in segments)
        generator = torch.Generator().manual_seed(seed + 1000 * rank)
        for step in range(4):
            where = (name, shapes, dtype, seed, scale, step)
            flat = (torch.randn(numel, generator=generator) * scale).to(dtype)
            original = flat.clone()
            before = mean_over_ranks(residual_of(compressor, segments))
            result = compressor.reduce(flat, segments)
            assert torch.equal(flat, original), where
            assert result.shape == flat.shape, where
            assert result.dtype == dtype, where
            assert same_on_all_ranks(result), where
            # What went in and what came out, in fp64.
            largest = flat.abs().amax().double() if numel else torch.zeros(()).double()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            exact = mean_over_ranks(flat.double()) + before
            after = mean_over_ranks(residual_of(compressor, segments))
            rounding = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 8e-3}[dtype]
            if compressor.error_feedback:
                size = (rounding * 10 + 1e-30) * (largest + max([0.0, *exact.abs().tolist()]))
                error = (exact - (result.double() + after)).abs()
                assert (error <= size).all(), (where, error.max(), size)
            if name in TOLERANCE and not compressor.error_feedback:
                size = (TOLERANCE[name] + rounding) * largest
                assert ((exact - result.double()).abs() <= size).all(), where
    return len(cases)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_gets_the_same_bits_and_nothing_is_lost(world_size):
    cases: list[Case] = [(name, SHAPES, torch.float32, 1, 1.0) for name in ALL]
    cases += [("topk+", [(1,)], torch.float32, 2, 1.0), ("powersgd+", [(0,)], torch.float32, 3, 1)]

    # Cases are drawn here and run in one world.
    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.sampled_from(ALL),
        st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.integers(0, 100),
        st.sampled_from([1.0, 1e-3, 100.0]),
    )
    def draw(name, shapes, dtype, seed, scale):
        cases.append((name, shapes, dtype, seed, scale))

    draw()
    assert len(cases) > 20
    assert run(in_world, world_size, check_properties, cases) == [len(cases)] * world_size


def check_special_cases():
    rank, n = dist.get_rank(), dist.get_world_size()

    # 1. Values that are not finite on one rank: all ranks see it, and the residual survives.
    for name in ALL:
        for bad in (float("inf"), float("nan"), -float("inf")):
            compressor = make(name)
            segments = [Segment("w", (8, 8)), Segment("b", (8,))]
            flat = torch.randn(72, generator=torch.Generator().manual_seed(rank))
            compressor.reduce(flat, segments)
            before = residual_of(compressor, segments)
            factors = copy.deepcopy(compressor.state_dict([("w", "w")]).get("factors"))
            broken = flat.clone()
            if rank == n - 1:
                broken[5] = bad
            result = compressor.reduce(broken, segments)
            assert not torch.isfinite(result).all(), (name, bad)
            assert same_on_all_ranks(torch.isfinite(result).all()), (name, bad)
            assert torch.equal(residual_of(compressor, segments), before), (name, bad)
            if factors:
                now = compressor.state_dict([("w", "w")])["factors"]["w"]
                assert torch.isfinite(now).all(), (name, bad)
            assert torch.isfinite(compressor.reduce(flat, segments)).all(), (name, bad)

    # 2. fp16: predivide by the group's size keeps what would overflow; too much still overflows.
    huge = torch.full((3,), 50_000.0)
    assert torch.allclose(Cast(torch.float16).reduce(huge), huge, rtol=1e-3)
    over = torch.full((3,), 65_504.0 * 1.5)
    assert torch.allclose(Cast(torch.float16).reduce(over), over, rtol=1e-3)
    assert torch.isinf(Cast(torch.float16, predivide=1.0).reduce(over)).all()
    assert torch.allclose(Cast(torch.bfloat16).reduce(over), over, rtol=4e-3)
    # What predividing costs: 8e-8 is a number of fp16, half of it only as 6e-8.
    tiny = torch.full((3,), 4e-8)
    assert Cast(torch.float16, predivide=1.0).reduce(tiny).count_nonzero() == 3
    assert Cast(torch.float16).reduce(tiny).count_nonzero() == 0

    # 3. Exact where it has to be: everything sent; a matrix of rank 1 or of full rank.
    flat = torch.randn(40, generator=torch.Generator().manual_seed(10 + rank))
    exact = mean_over_ranks(flat.double()).float()
    torch.testing.assert_close(TopK(1.0).reduce(flat), exact)
    full = PowerSGD(5, min_ratio=0.0)
    torch.testing.assert_close(full.reduce(flat, [Segment(0, (8, 5))]), exact, rtol=1e-4, atol=1e-5)
    column = torch.arange(1.0, 9.0)
    outer = torch.outer(column, torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0])).reshape(-1)
    # Batched: biases are in the matrix too, and 40 elements become a square of 7 x 7.
    pieces = [Segment(0, (8, 4)), Segment(1, (8,))]
    square = PowerSGD(7, min_ratio=0.0, batched=True)
    torch.testing.assert_close(square.reduce(flat, pieces), exact, rtol=1e-4, atol=1e-5)
    few = PowerSGD(1, min_ratio=0.0, batched=True)
    few.reduce(flat, pieces)
    assert few.traffic.sent_bytes < square.traffic.sent_bytes / 5 or n == 1
    padded = torch.cat([exact, torch.zeros(9)]).view(7, 7).double()
    largest = torch.linalg.svdvals(padded)
    alone = PowerSGD(1, min_ratio=0.0, batched=True, error_feedback=False)
    left = [(alone.reduce(flat, pieces) - exact).norm() for _ in range(60)][-1]
    assert left <= largest[1:].norm() * 1.001, "the best matrix of rank 1, from step to step"
    one = PowerSGD(1, min_ratio=0.0).reduce(outer * (rank + 1), [Segment(0, (8, 5))])
    torch.testing.assert_close(one, outer * (n + 1) / 2)

    # 4. PowerSGD's warm start gets better from step to step on the same gradient.
    def error(compressor, steps):
        got = [compressor.reduce(flat, [Segment(0, (8, 5))]) for _ in range(steps)]
        return (got[-1] - exact).norm()

    best = exact.view(8, 5).double()
    u, s, v = torch.linalg.svd(best, full_matrices=False)
    floor = (best - s[0] * torch.outer(u[:, 0], v[0])).norm()
    warm = error(PowerSGD(1, min_ratio=0.0, error_feedback=False), 40)
    assert warm <= floor * 1.001, (warm, floor)
    assert error(PowerSGD(1, min_ratio=0.0, error_feedback=False), 1) > floor * 1.001
    # ... and is not stuck after a gradient of zeros.
    recovers = PowerSGD(1, min_ratio=0.0)
    zeros = recovers.reduce(torch.zeros(40), [Segment(0, (8, 5))])
    assert zeros.count_nonzero() == 0
    assert recovers.reduce(flat, [Segment(0, (8, 5))]).count_nonzero() > 0

    # 5. int8: one channel's large gradient does not coarsen the others.
    rows = torch.ones(2, 64)
    rows[0] *= 1000.0
    rows[1] *= torch.linspace(-1, 1, 64)
    channel = Int8(per_channel=True, error_feedback=False)
    tensor = Int8(error_feedback=False)
    fine = channel.reduce(rows.reshape(-1), [Segment(0, (2, 64))]).view(2, 64)
    coarse = tensor.reduce(rows.reshape(-1), [Segment(0, (2, 64))]).view(2, 64)
    assert (fine[1] - rows[1]).abs().max() < 0.01
    assert coarse[1].count_nonzero() == 0

    # 6. Bytes on the wire, by hand.
    numel = 1200
    chunk = numel // n
    flat = torch.ones(numel)
    fp32 = 2 * (n - 1) * chunk * 4
    expected = {
        "fp32": fp32,
        "fp16": fp32 // 2,
        "bf16": fp32 // 2,
        "int8": fp32 // 4 + 2 * (n - 1) * 4,  # and the step
        "topk": (n - 1) * 120 * 8,
        "powersgd": 2 * (n - 1) * 4 * (-(-40 // n) + -(-30 // n)),
    }
    for name, sent in expected.items():
        compressor = make(name)
        compressor.reduce(flat, [Segment(0, (40, 30))])
        assert compressor.traffic.sent_bytes == sent, name
        assert compressor.traffic.fp32_bytes == fp32, name
        assert compressor.traffic.ratio == (fp32 / sent if n > 1 else 1.0), name

    # 7. A loss scaler halved its scale: so are the residuals.
    compressor = TopK(0.1)
    compressor.reduce(flat)
    before = residual_of(compressor, [Segment("flat", (numel,))])
    compressor.rescale(0.5)
    assert torch.equal(residual_of(compressor, [Segment("flat", (numel,))]), before / 2)
    assert before.count_nonzero() > 0

    # 8. In a group of some of the ranks.
    if n > 2:
        group = dist.new_group([0, n - 1])
        if isinstance(group, dist.ProcessGroup) and rank in (0, n - 1):
            value = torch.full((5,), float(rank))
            for name in ALL:
                if "topk" not in name:
                    got = make(name).reduce(value, group=group)
                    torch.testing.assert_close(
                        got, torch.full((5,), (n - 1) / 2), rtol=1e-2, atol=0
                    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_special_cases(world_size):
    run(in_world, world_size, check_special_cases)


def test_wrong_arguments_are_refused_before_any_communication():
    flat = torch.ones(6)
    for bad, text in [
        (torch.ones(2, 3), "1-D floating-point"),
        (torch.ones(6, dtype=torch.int64), "1-D floating-point"),
    ]:
        with pytest.raises(ValueError, match=text):
            Cast(torch.float16).reduce(bad)
    with pytest.raises(ValueError, match="5 elements together, the tensor has 6"):
        Int8().reduce(flat, [Segment("a", (5,))])
    with pytest.raises(ValueError, match="same key"):
        Int8().reduce(flat, [Segment("a", (3,)), Segment("a", (3,))])
    with pytest.raises(ValueError, match="not of these buckets"):
        sum_in_place(TopK(), flat, [])
    for build in (
        lambda: Cast(torch.float64),
        lambda: Cast(torch.float16, predivide=0.0),
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: PowerSGD(0),
        lambda: PowerSGD(1, start_step=-1),
    ):
        with pytest.raises(ValueError, match="must"):
            build()
    with pytest.raises(ValueError, match="tables"):
        Int8().load_state_dict({}, [])


def test_columns_become_orthonormal_or_zero():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        matrix = torch.randn(20, 4, dtype=dtype)
        matrix[:, 2] = matrix[:, 0] * 3 + 1e-3 * matrix[:, 1]  # depends on the first two
        matrix[:, 3] = 1e-20
        q = orthonormalise(matrix)
        gram = (q.T @ q).double()
        expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0]).double())
        torch.testing.assert_close(gram, expected, rtol=0, atol=1e-5)
    assert torch.equal(orthonormalise(torch.zeros(3, 2)), torch.zeros(3, 2))
    assert orthonormalise(torch.full((3, 2), float("nan"))).isnan().all()


# ------------------------------------------------------------------ training


def make_model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8)
    ).to(dtype)


def batches(steps: int, world_size: int, per_rank: int = 16):
    """(inputs, targets) of each step, one row of a list per rank."""
    x, y = make_regression(64 * world_size * per_rank, 16, 8, seed=3)
    size = world_size * per_rank
    for step in range(steps):
        at = (step % 64) * size
        yield x[at : at + size].chunk(world_size), y[at : at + size].chunk(world_size)


def oracle(steps: int, world_size: int) -> tuple[list[float], list[torch.Tensor]]:
    """One process, fp64, the whole batch."""
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for xs, ys in batches(steps, world_size):
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.cat(xs).double()), torch.cat(ys).double())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(make_ddp, steps: int, dtype=torch.float32, gradients=None) -> tuple[list, nn.Module]:
    """Losses of the whole batch, and the model; `make_ddp` wraps it. Fills `gradients`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = make_model(dtype)
    ddp = make_ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for xs, ys in batches(steps, n):
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(xs[rank].to(dtype)), ys[rank].to(dtype))
        loss.backward()
        if gradients is not None:
            gradients.append(gradient_of(model))
        optimizer.step()
        losses.append(mean_over_ranks(loss.detach()).item())
    return losses, model


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def small_buckets(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.002)  # type: ignore[arg-type]


def train_with_hooks(steps: int, names: list[str]):
    results = {}
    for name in names:
        compressor = None if name.startswith("torch") else make(name)

        def wrap(model, name=name, compressor=compressor):
            # torch's PowerSGD hook mixes buckets up on gloo: see native.py.
            one_bucket = name == "torch powersgd"
            ddp = DistributedDataParallel(model) if one_bucket else small_buckets(model)
            if compressor is None:
                register_torch_hook(ddp, name.removeprefix("torch "), rank=2)
            else:
                ddp.register_comm_hook(HookState(compressor), compression_hook)
            return ddp

        losses, model = train(wrap, steps)
        assert same_on_all_ranks(parameters_of(model)), name
        results[name] = losses
    with pytest.raises(ValueError, match="got 'zip'"):
        register_torch_hook(None, "zip")  # type: ignore[arg-type]
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        pytest.raises(ValueError, match="trains on the CPU and sees a GPU"),
    ):
        register_torch_hook(DistributedDataParallel(nn.Linear(2, 2)), "powersgd")
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_stock_ddp_trains_with_every_compressor(world_size):
    steps = 40
    names = [*ALL, "torch none", "torch fp16", "torch powersgd"]
    if world_size != 2:
        names = ["fp32", "int8+", "topk+", "powersgd+"]
    losses, _ = oracle(steps, world_size)
    results = run(in_world, world_size, train_with_hooks, steps, names, env=NO_GPU)[0]
    # Uncompressed: the oracle, to fp32's rounding.
    torch.testing.assert_close(results["fp32"], losses, rtol=1e-4, atol=1e-6)
    start, end = losses[0], sum(losses[-8:]) / 8
    assert end < 0.4 * start
    # Compressed: the share of the progress that is kept.
    kept = {name: (start - sum(got[-8:]) / 8) / (start - end) for name, got in results.items()}
    for name, share in kept.items():
        lossy = "topk" in name or "powersgd" in name
        assert share > (0.9 if lossy else 0.99) or name in ("topk", "powersgd"), kept
    if world_size == 2:
        assert 0.5 < kept["topk"] < kept["topk+"], kept
        assert 0.5 < kept["powersgd"] < kept["powersgd+"], kept


# ------------------------------------------------------------------ ten steps, by definition


def two_phases(every: list[torch.Tensor], rounded) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rounded on the way there and on the way back; the owner of a chunk carries the second."""
    n = len(every)
    sent = [rounded(values) for values in every]
    exact = torch.stack(sent).mean(0)
    mean = rounded(exact)
    chunk = -(-exact.numel() // n)
    for rank in range(n):
        part = slice(rank * chunk, (rank + 1) * chunk)
        sent[rank][part] -= n * (exact - mean)[part]
    return mean, sent


def to_16_bit(dtype: torch.dtype, divisor: float):
    return lambda every, *_: two_phases(
        every, lambda values: (values / divisor).to(dtype).double() * divisor
    )


def to_int8(per_channel: bool):
    def reduce(every, shapes, *_):
        largest = torch.stack([values.abs() for values in every]).amax(0)
        steps = []
        for shape, part in zip(shapes, largest.split([s.numel() for s in shapes]), strict=True):
            rows = part.view(shape[0] if per_channel and len(shape) > 1 else 1, -1)
            step = rows.amax(1, keepdim=True).float() / 127  # the step travels in fp32
            steps.append(step.double().expand_as(rows).flatten())
        step = torch.cat(steps)
        return two_phases(every, lambda values: (values / step).round() * step)

    return reduce


def to_largest(density: float):
    def reduce(every, *_):
        sent = []
        for values in every:
            k = max(1, round(density * len(values)))
            threshold = values.abs().sort(descending=True).values[k - 1]
            sent.append(torch.where(values.abs() >= threshold, values, 0.0))
        return torch.stack(sent).mean(0), sent

    return reduce


def to_low_rank(rank: int, start_step: int = 0, warm_start: bool = True):
    factors = {}

    def reduce(every, shapes, members, step):
        sizes = [shape.numel() for shape in shapes]
        mean = torch.stack(every).mean(0)
        if step < start_step:
            return mean, every
        result, sent = [], [[] for _ in every]
        for i, (shape, member) in enumerate(zip(shapes, members, strict=True)):
            parts = [values.split(sizes)[i] for values in every]
            whole = mean.split(sizes)[i]
            if len(shape) == 2 and sum(shape) * min(rank, *shape) < shape.numel():
                matrix = whole.view(shape)
                generator = torch.Generator().manual_seed(1_000_003 * step + i)
                q = torch.randn(shape[1], rank, generator=generator, dtype=torch.float64)
                if warm_start and len(factors.get(member, ())) == len(q):
                    q = factors[member]
                p = torch.linalg.qr(matrix @ q).Q
                factors[member] = matrix.T @ p
                whole = (p @ p.T @ matrix).flatten()
                parts = [whole] * len(every)
            result.append(whole)
            for own, part in zip(sent, parts, strict=True):
                own.append(part)
        return torch.cat(result), [torch.cat(own) for own in sent]

    return reduce


def as_one_matrix(reduce):
    """A bucket as one square, filled up with zeros."""

    def batched(every, shapes, members, step):
        numel = len(every[0])
        side = next(i for i in range(numel + 1) if i * i >= numel)
        squares = [F.pad(values, (0, side * side - numel)) for values in every]
        mean, sent = reduce(squares, [torch.Size((side, side))], members[:1], step)
        return mean[:numel], [own[:numel] for own in sent]

    return batched


def definition_of(name: str, n: int):
    """What `make(name)` promises, of all ranks' values at once."""
    return {
        "fp32": lambda: to_16_bit(torch.float32, 1.0),
        "fp16": lambda: to_16_bit(torch.float16, n),
        "fp16+": lambda: to_16_bit(torch.float16, 1.0),
        "bf16": lambda: to_16_bit(torch.bfloat16, 1.0),
        "int8": lambda: to_int8(False),
        "int8 channel": lambda: to_int8(True),
        "topk": lambda: to_largest(0.1),
        "powersgd": lambda: to_low_rank(1),
        "powersgd+": lambda: to_low_rank(2),
        "powersgd cold": lambda: to_low_rank(1, 1, False),
        "powersgd batched": lambda: as_one_matrix(to_low_rank(2)),
    }[name if name in ("fp16+", "powersgd+") else name.removesuffix("+")]()


def simulate(name: str, layouts: list[list[list[int]]], n: int, divisor: int):
    """All ranks in one process in fp64.

    Args:
        name: of the compressor.
        layouts: per step, each bucket's parameters by number.
        n: number of ranks.
        divisor: what gradients are divided by before they are compressed; 16-bit floats have
            another error then. Ours divides by n before it sums, stock DDP leaves it to the hook.
    """
    model = make_model(torch.float64)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    reduce = definition_of(name, n)
    residuals = [[torch.zeros_like(p) for p in parameters] for _ in range(n)]
    losses, gradients = [], []
    for step, (xs, ys) in enumerate(batches(len(layouts), n)):
        of_rank = [F.mse_loss(model(x.double()), y.double()) for x, y in zip(xs, ys, strict=True)]
        losses.append(torch.stack(of_rank).mean().item())
        own = [torch.autograd.grad(loss, parameters) for loss in of_rank]
        for members in layouts[step]:
            shapes = [parameters[i].shape for i in members]
            every = [
                torch.cat([(own[r][i] / divisor + residuals[r][i]).flatten() for i in members])
                for r in range(n)
            ]
            mean, sent = reduce([values.clone() for values in every], shapes, members, step)
            sizes = [shape.numel() for shape in shapes]
            for i, part in zip(members, mean.split(sizes), strict=True):
                parameters[i].grad = part.view_as(parameters[i]) * divisor
            for r in range(n if name.endswith("+") else 0):
                for i, part in zip(members, (every[r] - sent[r]).split(sizes), strict=True):
                    residuals[r][i] = part.view_as(parameters[i])
        gradients.append(gradient_of(model))
        optimizer.step()
    return losses, gradients, parameters_of(model).detach()


def ten_steps():
    """Every compressor in our own DDP and in stock DDP, in fp64, on several buckets."""
    results = {}
    for name in ALL if dist.get_world_size() in (2, 3) else ALSO_IN_STOCK:
        for how in ("ours", "stock") if name in ALSO_IN_STOCK else ("ours",):
            compressor, layouts, gradients = make(name), [], []
            losses, model = train(
                lambda m, how=how, compressor=compressor, layouts=layouts: (
                    spied_ours if how == "ours" else spied_stock
                )(m, compressor, layouts),
                10,
                torch.float64,
                gradients,
            )
            assert same_on_all_ranks(parameters_of(model)), name
            assert dist.get_world_size() == 1 or compressor.traffic.sent_bytes > 0
            results[name, how] = losses, gradients, parameters_of(model), layouts
    return results


ALSO_IN_STOCK = ("fp32", "bf16+", "int8+", "topk+", "powersgd+")


def spied_ours(model: nn.Module, compressor: Compressor, layouts):
    """Our own DDP; `layouts` receives the parameters of each bucket of each step."""
    from minidist.parallel.data import BucketedDDP

    numbers = {p: i for i, p in enumerate(model.parameters())}
    layouts.append([])

    def reduce(flat):
        (bucket,) = (b for b in ddp.buckets if b.flat is flat)
        if sum(map(len, layouts[-1])) == len(numbers):
            layouts.append([])
        layouts[-1].append([numbers[p] for p in bucket.parameters])
        return sum_in_place(compressor, flat, ddp.buckets)

    ddp = BucketedDDP(model, bucket_bytes=2048, reduce=reduce)
    assert len(ddp.buckets) > 1
    return ddp


def spied_stock(model: nn.Module, compressor: Compressor, layouts):
    numbers = {p: i for i, p in enumerate(model.parameters())}

    def hook(state, bucket):
        if bucket.index() == 0:
            layouts.append([])
        layouts[-1].append([numbers[p] for p in bucket.parameters()])
        return compression_hook(state, bucket)

    hook.__annotations__ = compression_hook.__annotations__
    ddp = small_buckets(model)
    ddp.register_comm_hook(HookState(compressor), hook)
    return ddp


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_steps_are_those_of_the_definition(world_size):
    every_rank = run(in_world, world_size, ten_steps_and_resume)
    exact_losses, exact = oracle(10, world_size)
    for (name, how), (losses, gradients, parameters, layouts) in every_rank[0].items():
        what = f"{name}, {how}"
        assert len(layouts) == 10, what
        assert max(map(len, layouts)) > 1, what
        divisor = world_size if how == "ours" else 1
        expected_losses, expected_gradients, expected = simulate(name, layouts, world_size, divisor)
        rtol = 1e-6 if name == "fp32" else 1e-8
        assert losses == pytest.approx(expected_losses, rel=rtol), what
        for got, want in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, msg=what)
        torch.testing.assert_close(parameters, expected, rtol=rtol, atol=rtol, msg=what)
        # Against training without compression: the same, or not the same at all.
        far = (parameters - torch.cat([p.flatten() for p in exact])).abs().max().item()
        if name == "fp32":
            assert losses == pytest.approx(exact_losses, rel=1e-6)
            assert far < 1e-7
        else:
            assert far > 1e-7, what


def ten_steps_and_resume():
    results = ten_steps()
    resume()
    return results


def resume():
    """Residuals, factors and step counts go on bit for bit."""
    for name in ("topk+", "powersgd+", "powersgd cold+", "int8+"):
        segments = [Segment("w", (12, 8)), Segment("b", (12,))]
        named = [("weight", "w"), ("bias", "b")]
        generator = torch.Generator().manual_seed(dist.get_rank())
        flats = [torch.randn(108, generator=generator) for _ in range(6)]
        whole, first, second = make(name), make(name), make(name)
        for flat in flats[:3]:
            assert torch.equal(whole.reduce(flat, segments), first.reduce(flat, segments))
        second.load_state_dict(copy.deepcopy(first.state_dict(named)), named)
        for flat in flats[3:]:
            assert torch.equal(whole.reduce(flat, segments), second.reduce(flat, segments)), name
        fresh = make(name)
        assert not torch.equal(fresh.reduce(flats[0], segments), whole.reduce(flats[0], segments))
        with pytest.raises(ValueError, match="unknown names"):
            second.load_state_dict(first.state_dict(named), [("other", "w")])


def hooked(model: nn.Module, compressor: Compressor) -> DistributedDataParallel:
    ddp = small_buckets(model)
    ddp.register_comm_hook(HookState(compressor), compression_hook)
    return ddp


def account_for_everything():
    """Sum of all gradients = sum of all results + what is still in the residuals."""
    rank, n = dist.get_rank(), dist.get_world_size()
    layouts = {}
    for name in ("topk+", "int8+", "powersgd+"):
        model = make_model()
        ddp = small_buckets(model)
        compressor = make(name)
        state = HookState(compressor)
        given: dict[nn.Parameter, torch.Tensor] = {}
        seen: list[list[int]] = [[]]

        def spying_hook(state, bucket, given=given, seen=seen):
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                given[parameter] = given.get(parameter, 0) + grad.double()
            seen[-1].append(bucket.buffer().numel())
            if bucket.is_last():
                seen.append([])
            return compression_hook(state, bucket)

        spying_hook.__annotations__ = compression_hook.__annotations__
        ddp.register_comm_hook(state, spying_hook)
        got = {p: torch.zeros_like(p).double() for p in model.parameters()}
        for xs, ys in batches(6, n):
            ddp.zero_grad()
            F.mse_loss(ddp(xs[rank]), ys[rank]).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                got[parameter] += parameter.grad
        for parameter in model.parameters():
            residual = residual_of(compressor, segments_of([parameter])).view(parameter.shape)
            wanted = mean_over_ranks(given[parameter])
            have = got[parameter] + mean_over_ranks(residual)
            torch.testing.assert_close(have, wanted, rtol=1e-4, atol=1e-6)
        layouts[name] = seen[:-1]
    return layouts


def test_nothing_is_lost_when_ddp_rebuilds_its_buckets():
    for layouts in run(in_world, 2, account_for_everything)[0].values():
        assert len(layouts) == 6
        assert layouts[0] != layouts[1]  # rebuilt: the test is about something
        assert len(layouts[1]) > 1
        assert all(layout == layouts[1] for layout in layouts[1:])


def descend(density: float, error_feedback: bool, steps: int) -> float:
    """Minimise mean_r f_r with f_r(x) = ±3 x0 + (x1 - 1)^2 / 2; returns the distance of x1 to 1.

    The gradients of x0 cancel over the ranks, but on every rank it is the largest.
    """
    compressor = TopK(density, error_feedback=error_feedback)
    x = torch.zeros(2)
    for _ in range(steps):
        sign = 1.0 if dist.get_rank() == 0 else -1.0
        x = x - 0.03 * compressor.reduce(torch.stack([torch.tensor(3.0 * sign), x[1] - 1]))
    return abs(x[1].item() - 1)


def compare_error_feedback():
    return [descend(1.0, False, 250), descend(0.5, True, 250), descend(0.5, False, 50)]


def test_without_error_feedback_topk_stands_still():
    exact, with_feedback, without = run(in_world, 2, compare_error_feedback)[0]
    assert exact < 0.01
    assert with_feedback < 0.1
    assert without == 1.0  # not one step was made towards the goal


def on_the_emulated_cluster(steps: int):
    losses = {}
    for name in ("fp32", "bf16", "int8+", "topk+", "powersgd+"):
        losses[name], model = train(lambda m, name=name: hooked(m, make(name)), steps)
        assert same_on_all_ranks(parameters_of(model)), name
    return losses


def test_compressors_run_on_the_emulated_cluster():
    results, timeline = run_emulated(on_the_emulated_cluster, 2, clusters.laptop(2), 4)
    expected, _ = oracle(4, 2)
    torch.testing.assert_close(results[0]["fp32"], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(results[0]["bf16"], expected, rtol=1e-2, atol=0)
    assert timeline is not None


def a_key_without_a_name():
    compressor = TopK(0.5)
    compressor.reduce(torch.arange(4.0))
    with pytest.warns(UserWarning, match="none of them has a name here on rank"):
        compressor.state_dict(nn.Linear(2, 2).named_parameters())
    assert compressor.state_dict([("all", "flat")])["residuals"]["all"].tolist() == [0, 1, 0, 0]


def test_a_residual_that_would_not_be_saved_is_told():
    run(in_world, 2, a_key_without_a_name)
