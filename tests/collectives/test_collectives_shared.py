"""Collectives in shared memory against one process in fp64, and what happens when a rank fails."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minidist.collectives.shared import (
    SharedMemoryError,
    SharedMemoryGroup,
    algorithms,
    memory,
    shared_memory_hook,
)
from minidist.errors import DeadlineError, LaunchError, MinidistError, MismatchError
from minidist.launch import run

OPS = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}
# Sums of at most 4 numbers up to 8; 16-bit floats are rounded once.
ATOL = {"float16": 2e-2, "bfloat16": 0.13, "float32": 1e-5, "float64": 1e-13}
RTOL_OF_PRODUCTS = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}
SMALL_CHUNKS = 4096  # so that tensors of a few thousand elements stream through in many chunks


# ------------------------------------------------------------------ values


def inputs_of(case, num_ranks):
    """What every rank puts in, (ranks, elements); each rank draws it alike."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.rand(num_ranks, case["numel"], generator=generator, dtype=torch.float64) * 16 - 8
    return x.to(getattr(torch, case["dtype"]))


def check(got, wide, case):
    """got is `wide` (fp64) up to the rounding of its dtype."""
    if not got.dtype.is_floating_point:
        assert torch.equal(got, wide.trunc().to(got.dtype)), case
    else:
        rtol = RTOL_OF_PRODUCTS[case["dtype"]] if case["op"] == "prod" else 0
        torch.testing.assert_close(
            got.double(), wide, rtol=rtol, atol=ATOL[case["dtype"]], msg=lambda m: f"{case}: {m}"
        )


def in_buffer(shared, values, lead=0):
    """A copy of values in shared memory, `lead` elements after the start of a buffer."""
    buffer = shared.buffer(values.numel() + lead, values.dtype)[lead:]
    buffer.copy_(values.reshape(-1))
    return buffer


def place(shared, values, case):
    return in_buffer(shared, values, case["lead"]) if case["in_place"] else values.clone()


def all_reduce(shared, case):
    x = inputs_of(case, shared.num_ranks)
    mine = place(shared, x[shared.rank], case)
    work = shared.all_reduce(mine, case["op"], async_op=case["async"])
    if work is not None:
        assert work.wait()
        assert work.is_completed()
    check(mine, OPS[case["op"]](x.double()), case)
    return mine


def reduce_scatter(shared, case):
    n, rank = shared.num_ranks, shared.rank
    x = inputs_of(case | {"numel": case["numel"] * n}, n)
    mine, out = place(shared, x[rank], case), torch.empty(case["numel"], dtype=x.dtype)
    work = shared.reduce_scatter(out, mine, case["op"], async_op=case["async"])
    if work is not None:
        work.wait()
    check(out, OPS[case["op"]](x.double()).view(n, -1)[rank], case)
    assert torch.equal(mine, x[rank])  # the input is only read


def all_gather(shared, case):
    x = inputs_of(case, shared.num_ranks)
    out = torch.empty(x.numel(), dtype=x.dtype)
    work = shared.all_gather(out, place(shared, x[shared.rank], case), async_op=case["async"])
    if work is not None:
        work.wait()
    assert torch.equal(out, x.view(-1)), case
    return out


def broadcast(shared, case):
    x = inputs_of(case, shared.num_ranks)
    root = case["seed"] % shared.num_ranks
    mine = place(shared, x[shared.rank], case)
    work = shared.broadcast(mine, root, async_op=case["async"])
    if work is not None:
        work.wait()
    assert torch.equal(mine, x[root]), case
    return mine


KINDS = (all_reduce, reduce_scatter, all_gather, broadcast)


def run_cases(cases):
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup(chunk_bytes=SMALL_CHUNKS, timeout_s=30)
    for case in cases:
        result = KINDS[case["kind"]](shared, case)
        if result is not None:  # replicas must not drift apart: the same bits everywhere
            everyone = [torch.empty_like(result) for _ in range(shared.num_ranks)]
            dist.all_gather(everyone, result.clone())
            assert all(torch.equal(result, other) for other in everyone), case
    # The same tensors again without anything in between: a fast rank must not overtake.
    in_place, copied = shared.buffer(5000, torch.int64), torch.empty(5000, dtype=torch.int64)
    for turn in range(200):
        in_place.fill_(turn + shared.rank)
        copied.fill_(turn - shared.rank)
        shared.all_reduce(in_place)
        shared.all_reduce(copied, "max")
        want = sum(turn + rank for rank in range(shared.num_ranks))
        assert in_place.eq(want).all(), turn
        assert copied.eq(turn).all(), turn
    dist.barrier()
    shared.close()
    dist.destroy_process_group()


def every_case():
    """Each kind with each dtype, op and place, at sizes around the borders of chunks and lines."""
    sizes = [0, 1, 5, 17, 1000, 3001, 10_007]
    dtypes = [*ATOL, "int64", "int32", "uint8"]
    cases = []
    for kind in range(len(KINDS)):
        for i, dtype in enumerate(dtypes):
            for j, op in enumerate(OPS):
                for in_place in (False, True):
                    seed = len(cases)
                    numel = sizes[(i + j + seed) % len(sizes)]
                    if dtype == "uint8" and op in ("sum", "avg", "prod"):
                        continue  # the result may not fit
                    cases.append(
                        {
                            "kind": kind,
                            "dtype": dtype,
                            "op": op,
                            "in_place": in_place,
                            "numel": numel,
                            "lead": 3 * (seed % 3),
                            "async": seed % 5 == 0,
                            "seed": seed,
                        }
                    )
    return cases


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_collective_dtype_operation_and_place(num_ranks):
    run(run_cases, num_ranks, every_case(), deadline_s=100)


ANY_DTYPE = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float32, torch.int16)


def uneven_and_any_dtype():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    shared = SharedMemoryGroup(chunk_bytes=SMALL_CHUNKS, timeout_s=30)
    generator = torch.Generator().manual_seed(0)
    for numel in (0, 1, 2, 3, 5, 1000, 1001, 10_007):
        x = torch.randint(-9, 9, (n, numel), generator=generator).double()
        longest = shared.buffer(-(-numel // n), torch.float64)
        for in_place in (False, True):
            place = partial(in_buffer, shared) if in_place else torch.clone
            want = x.sum(0).tensor_split(n)[rank]
            got = torch.full_like(want, -1)
            shared.reduce_scatter(got, place(x[rank]))
            assert torch.equal(got, want), numel
            whole = place(torch.full((numel,), -1.0).double())
            part = x[0].tensor_split(n)[rank]
            mine = longest[: part.numel()].copy_(part) if in_place else part.clone()
            assert shared.all_gather(whole, mine, async_op=True).wait()
            assert torch.equal(whole, x[0]), numel
        for dtype in ANY_DTYPE:  # what is only copied may be anything
            wide = x[0].clamp(0, 1).to(dtype)
            whole = torch.zeros(numel).to(dtype)
            shared.all_gather(whole, wide.tensor_split(n)[rank].clone())
            assert torch.equal(whole.view(torch.uint8), wide.view(torch.uint8)), (numel, dtype)
            sent = wide.clone() if rank == n - 1 else torch.zeros(numel).to(dtype)
            shared.broadcast(sent, group_src=n - 1)
            assert torch.equal(sent.view(torch.uint8), wide.view(torch.uint8)), (numel, dtype)
    bits = torch.tensor([6, 1 << rank])
    for op, want in (("band", [6, 0]), ("bor", [6, (1 << n) - 1]), ("bxor", [6 * (n % 2), None])):
        got = bits.clone()
        shared.all_reduce(got, op)
        assert got[0] == want[0]
        assert want[1] is None or n == 1 or got[1] == want[1]
    dist.barrier()
    shared.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_parts_that_differ_and_dtypes_that_are_only_copied(num_ranks):
    run(uneven_and_any_dtype, num_ranks)


case_strategy = st.fixed_dictionaries(
    {
        "kind": st.integers(0, len(KINDS) - 1),
        "dtype": st.sampled_from([*ATOL, "int64"]),
        "op": st.sampled_from(list(OPS)),
        "in_place": st.booleans(),
        "numel": st.integers(0, 20_000),
        "lead": st.integers(0, 40),
        "async": st.booleans(),
        "seed": st.integers(0, 2**30),
    }
)


@given(st.integers(2, 3), st.lists(case_strategy, min_size=40, max_size=40))
@settings(max_examples=2, derandomize=True, deadline=None, database=None)
def test_drawn_sequences_of_collectives(num_ranks, cases):
    run(run_cases, num_ranks, cases, deadline_s=100)


def sixteen_bit_sums():
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup()
    results = []
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        for numel in (10, 200_000):
            # Added one by one in 16 bits, the ones of ranks 1 to 3 are lost: 256 + 1 = 256.
            x = torch.full((numel,), large if shared.rank == 0 else 1.0, dtype=dtype)
            buffer = in_buffer(shared, x)
            shared.all_reduce(x)
            shared.all_reduce(buffer)
            half = torch.full((numel,), 60_000.0, dtype=torch.float16)
            shared.all_reduce(half, dist.ReduceOp.AVG)
            results += [x.unique().tolist(), buffer.unique().tolist(), half.unique().tolist()]
    dist.barrier()
    shared.close()
    dist.destroy_process_group()
    return results


def test_16_bit_floats_are_added_in_fp32_and_their_mean_does_not_overflow():
    mean = torch.tensor(60_000.0, dtype=torch.float16).item()
    expected = [[260.0], [260.0], [mean]] * 2 + [[2052.0], [2052.0], [mean]] * 2
    assert run(sixteen_bit_sums, 4) == [expected] * 4


def awkward_tensors():
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    shared = SharedMemoryGroup(chunk_bytes=SMALL_CHUNKS)
    # Transposed, strided, scalar, a parameter, a part of a buffer, and a view of it as a matrix.
    matrix = torch.arange(12.0).view(3, 4) + rank
    for tensor in (matrix.clone().t(), matrix.clone()[:, ::2], torch.tensor(5.0) + rank):
        want = tensor * world - rank * world + sum(range(world))
        shared.all_reduce(tensor)
        assert torch.equal(tensor, want)
    parameter = nn.Parameter(torch.full((2, 3), float(rank)))
    shared.broadcast(parameter, world - 1)
    assert parameter.eq(world - 1).all()
    assert parameter.requires_grad
    buffer = shared.buffer(3000)
    assert buffer.eq(0).all()
    buffer[:] = rank
    shared.all_reduce(buffer[7:2007].view(20, 100))
    want = torch.full((3000,), float(rank))
    want[7:2007] = sum(range(world))
    assert torch.equal(buffer, want)
    strided = buffer[::2]  # in a buffer, but not contiguous: goes by copy
    shared.all_reduce(strided, "max")
    assert strided[0] == world - 1
    # An output that is this rank's own part of the input, and the reverse.
    whole = torch.arange(world * 1500.0)
    part = whole.view(world, -1)[rank]
    want = part.clone()
    shared.reduce_scatter(part, whole, "avg")
    assert torch.equal(part, want)
    for make in (torch.zeros, shared.buffer):
        whole = make(world * 1500)
        whole.view(world, -1)[rank] = rank
        shared.all_gather(whole, whole.view(world, -1)[rank])
        assert torch.equal(whole, torch.arange(world).repeat_interleave(1500).float())
    # A buffer outlives its group.
    shared.close()
    buffer.add_(1)
    with pytest.raises(MinidistError, match="closed"):
        shared.all_reduce(buffer)
    shared.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_views_strides_parameters_and_overlapping_arguments(num_ranks):
    run(awkward_tensors, num_ranks)


def slow_reader():
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup()
    rank, n = shared.rank, shared.num_ranks
    if rank == 1:  # reads the others' buffers late
        for where, name in ((algorithms, "_reduce"), (shared._space, "places")):
            real = getattr(where, name)
            setattr(where, name, lambda *args, real=real: (time.sleep(0.1), real(*args))[1])
    buffer, part, whole = shared.buffer(300 * n), torch.zeros(300), torch.zeros(300 * n)
    results = []
    for turn, run_one in enumerate(
        (
            lambda: shared.reduce_scatter(part, buffer),
            lambda: shared.all_gather(whole, buffer[:300]),
            lambda: shared.all_reduce(buffer),
        )
    ):
        buffer.fill_((rank + 1) * 10**turn)
        run_one()
        results.append(buffer.clone())
        buffer.fill_(-100)  # as soon as the call returns, the tensor is the caller's again
    assert part.eq(sum(range(n + 1))).all()
    assert torch.equal(whole, 10 * torch.arange(1.0, n + 1).repeat_interleave(300))
    assert results[2].eq(100 * sum(range(n + 1))).all()
    dist.barrier()
    shared.close()
    dist.destroy_process_group()


def test_nobody_returns_while_another_rank_still_reads_its_buffer():
    run(slow_reader, 3)


def sub_groups():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2, 3]), dist.new_group([1])]
    shared = SharedMemoryGroup(groups[rank == 1])
    x = torch.tensor([float(rank)])
    shared.all_reduce(x)
    y, z = torch.tensor([rank]), torch.tensor([rank])
    if rank == 1:
        shared.broadcast(y, src=1)
        with pytest.raises(ValueError, match=r"one of the ranks \[1\], got 0"):
            shared.broadcast(z, src=0)
    else:
        shared.broadcast(y, src=2)
        shared.broadcast(z, group_src=2)
    dist.barrier()
    shared.close()
    dist.destroy_process_group()
    return x.item(), y.item(), z.item()


def test_a_part_of_the_ranks():
    assert run(sub_groups, 4) == [(5.0, 2, 3), (1.0, 1, 1), (5.0, 2, 3), (5.0, 2, 3)]


def test_slices_cover_everything_once():
    for numel in (0, 1, 15, 16, 17, 1000):
        for num_ranks in (1, 2, 3, 7):
            bounds = algorithms.slice_bounds(numel, torch.float32, num_ranks)
            covered = [i for low, high in bounds for i in range(low, high)]
            assert covered == list(range(numel))


# ------------------------------------------------------------------ async and DDP


def overlapping():
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup(chunk_bytes=SMALL_CHUNKS)
    rank, n = shared.rank, shared.num_ranks
    tensors = [torch.full((k * 300,), float(rank + k)) for k in range(20)]
    works = [shared.all_reduce(t, async_op=True) for t in tensors]
    # A blocking collective comes after those that were called before it.
    last = torch.tensor([float(rank)])
    shared.all_reduce(last)
    assert all(work.is_completed() for work in works)
    for k, tensor in enumerate(tensors):
        assert tensor.eq(sum(range(n)) + n * k).all()
    # A callback gets the tensor, and may not wait for the thread that it runs in.
    seen = []

    def callback(future):
        try:
            inner = shared.all_reduce(torch.zeros(1), async_op=True)
            inner.wait()
        except MinidistError as error:
            seen.append(str(error))
        return future.value() * 2

    gate = threading.Event()
    shared._worker.submit(lambda: gate.wait(10), None)
    work = shared.all_reduce(torch.ones(3), async_op=True)
    doubled = work.get_future().then(callback)
    gate.set()
    assert doubled.wait().tolist() == [2.0 * n] * 3
    assert "inside a callback" in seen[0]
    shared.barrier()
    dist.barrier()
    shared.close()
    dist.destroy_process_group()


def test_async_collectives_run_in_order():
    run(overlapping, 3)


def model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)
    )


def training_data(rank):
    return torch.randn(10, 6, 12, generator=torch.Generator().manual_seed(rank))


def train(net, data, dtype):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x in data.to(dtype):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [p.detach().double() for p in net.parameters()]


def train_with_hook(gradient_as_bucket_view):
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup()
    ddp = nn.parallel.DistributedDataParallel(
        model(), bucket_cap_mb=0.002, gradient_as_bucket_view=gradient_as_bucket_view
    )
    ddp.register_comm_hook(shared, shared_memory_hook)
    parameters = train(ddp, training_data(dist.get_rank()), torch.float32)
    dist.barrier()
    shared.close()
    dist.destroy_process_group()
    return [p.tolist() for p in parameters]


@pytest.mark.parametrize(("num_ranks", "view"), [(1, False), (2, True), (3, False), (4, True)])
def test_ddp_hook_trains_like_one_process(num_ranks, view):
    data = torch.cat([training_data(rank) for rank in range(num_ranks)], dim=1)
    expected = train(model().double(), data, torch.float64)
    for parameters in run(train_with_hook, num_ranks, view):
        for got, want in zip(parameters, expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(got, dtype=torch.float64), want, rtol=1e-5, atol=1e-6
            )


# ------------------------------------------------------------------ wrong use, lost ranks


def bad_arguments():
    dist.init_process_group("gloo")
    with pytest.raises(ValueError, match="chunk_bytes must be at least 64 for each of 2 ranks"):
        SharedMemoryGroup(chunk_bytes=100)
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        SharedMemoryGroup(timeout_s=0)
    shared = SharedMemoryGroup()
    x = torch.ones(4)
    wrong = {
        "op must be one of sum, avg, prod": lambda: shared.all_reduce(x, "mean"),
        "band of torch.float32": lambda: shared.all_reduce(x, dist.ReduceOp.BAND),
        "dtype torch.complex64": lambda: shared.all_reduce(x.to(torch.complex64)),
        "output must hold the part": lambda: shared.reduce_scatter(x, torch.ones(4)),
        "input must hold the part": lambda: shared.all_gather(torch.ones(8).double(), x),
        "src must be one of": lambda: shared.broadcast(x, 2),
        "group_src must be 0 to 1": lambda: shared.broadcast(x, group_src=-1),
        "got both": lambda: shared.broadcast(x, 0, group_src=0),
        "numel must be at least 0": lambda: shared.buffer(-1),
        "buffer: dtype torch.bool": lambda: shared.buffer(3, torch.bool),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    shared.all_reduce(x)  # a ValueError does no harm
    assert x.eq(2).all()
    dist.barrier()
    shared.close()
    dist.destroy_process_group()


def test_bad_arguments_are_refused_before_anything_is_sent():
    run(bad_arguments, 2)


def mismatches():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    texts = []

    def expect(call):
        shared = SharedMemoryGroup(timeout_s=20)
        with pytest.raises(MismatchError) as caught:
            call(shared)
        texts.append(str(caught.value))
        with pytest.raises(MinidistError, match="earlier call failed"):
            shared.barrier()
        dist.barrier()

    expect(lambda g: g.all_reduce(torch.ones(3 + rank)))
    expect(lambda g: g.all_reduce(torch.ones(3), "avg" if rank else "sum"))
    expect(lambda g: g.barrier() if rank else g.broadcast(torch.ones(3).int()))
    expect(lambda g: g.all_reduce(g.buffer(70)[rank:][:8], "max"))
    expect(lambda g: g.all_reduce(torch.ones(100_000 + rank), async_op=True).wait())
    dist.destroy_process_group()
    return texts


def test_different_calls_are_named_on_both_ranks():
    first, second = run(mismatches, 2)
    ours, theirs = "this rank called", "called"
    for texts, rank in ((first, 0), (second, 1)):
        assert all(text.startswith(f"[rank {rank}]") for text in texts[:4])
        assert f"{ours} all_reduce(sum) of {3 + rank} float32" in texts[0]
        assert f"rank {1 - rank} {theirs} all_reduce(sum) of {4 - rank} float32" in texts[0]
    assert "all_reduce(sum) of 3 float32" in first[1]
    assert "rank 1 called all_reduce(avg) of 3 float32" in first[1]
    assert "called broadcast from 0 of 3 int32, rank 1 called barrier" in first[2]
    assert "all_reduce(max) of 8 float32 in buffer 1 at byte 4" in second[3]
    assert "100001 float32" in first[4]


def late_rank():
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup(timeout_s=0.3)
    if dist.get_rank() == 1:
        dist.barrier()
    else:
        # The first to run out of time names the late one; the others hear of either.
        with pytest.raises(DeadlineError, match=r"rank 1 did not arrive|gave up before"):
            shared.all_reduce(torch.ones(5))
        dist.barrier()
    # Who comes late learns that the others have gone, before its own deadline.
    if dist.get_rank() == 1:
        start_s = time.monotonic()
        shared._space.flags.timeout_s = 60
        shared.all_reduce(torch.ones(5))  # they had put in theirs before they left
        with pytest.raises(DeadlineError, match=r"rank [02] gave up before"):
            shared.barrier()
        assert time.monotonic() - start_s < 30
    dist.barrier()
    dist.destroy_process_group()


def test_a_late_rank_is_named():
    run(late_rank, 3)


def all_reduce_either_way(shared, x, async_op):
    work = shared.all_reduce(x, async_op=async_op)
    if async_op:
        work.wait()


def killed_rank(in_place):
    dist.init_process_group("gloo")
    shared = SharedMemoryGroup(timeout_s=60)
    x = shared.buffer(1 << 16) if in_place else torch.zeros(1 << 16)
    shared.all_reduce(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank 1 ended before it arrived"):
        all_reduce_either_way(shared, x, async_op=not in_place)
    assert time.monotonic() - start_s < 30
    raise RuntimeError("rank 0 saw it")


@pytest.mark.parametrize("in_place", [True, False])
def test_a_killed_rank_is_noticed_at_once_and_leaves_nothing_behind(in_place):
    with pytest.raises(LaunchError, match="SIGKILL") as caught:
        run(killed_rank, 2, in_place)
    assert "rank 0 saw it" in str(caught.value)
    assert list(Path("/dev/shm").glob("minidist-*")) == []


def cannot_map(trouble):
    dist.init_process_group("gloo")
    if trouble == "memory" and dist.get_rank() == 0:
        memory.available_bytes = lambda: 1000
    if trouble == "host" and dist.get_rank() == 1:
        os.readlink = lambda path: "/dev/null"  # what the same path may be on another machine
    try:
        SharedMemoryGroup()
    except SharedMemoryError as error:
        text = str(error)
    open_fds = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    dist.barrier()
    dist.destroy_process_group()
    return text, [path for path in open_fds if "memfd:minidist" in path]


def test_ranks_that_cannot_share_memory_all_say_why():
    for rank, (text, fds) in enumerate(run(cannot_map, 2, "host")):
        assert text.startswith(f"[rank {rank}] rank 1 of 2 cannot share")
        assert "/dev/null, not the memory of rank 0" in text
        assert "needs all ranks on one host" in text
        assert fds == []
    for text, _ in run(cannot_map, 2, "memory"):
        assert "1000 are available" in text


# ------------------------------------------------------------------ the harness of the benchmarks


def measured():
    dist.init_process_group("gloo")
    slow_rank = dist.get_rank() == 1
    calls = {"quick": 0, "slow": 0, "before": 0}

    def call(name, pause_s=0.0):
        calls[name] += 1
        time.sleep(pause_s)

    times = harness.paired(
        {"quick": lambda: call("quick"), "slow": lambda: call("slow", 0.02 * slow_rank)},
        rounds=5,
        warmup=1,
        calls=2,
        before={"slow": lambda: call("before")},
    )
    dist.barrier()
    dist.destroy_process_group()
    return times, calls


def test_paired_counts_the_slowest_rank_and_agrees_on_all():
    (times, calls), other = run(measured, 2)
    assert (times, calls) == other
    assert calls == {"quick": 11, "slow": 11, "before": 11}
    assert [len(samples) for samples in times.values()] == [5, 5]
    assert min(times["slow"]) >= 0.02  # of rank 1, although rank 0 does nothing


def test_rows_are_written_with_these_keys_and_shown_with_their_goals(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    times = {"ours": [1.0, 3.0, 2.0], "peer": [2.0, 3.0, 8.0]}
    rows = [harness.row("a", times, goal=0.5), harness.row("b", times, goal=0.4)]
    harness.write([*rows, harness.Row("c", 2048, 1024, 2.0, 2.0, 2.0, "bytes")], "some")
    written = json.loads((tmp_path / "some.json").read_text())
    assert written[0] == {
        "name": "a",
        "ours": 2.0,
        "peer": 3.0,
        "ratio": 0.5,  # the median of 0.5, 1, 0.25, not the ratio of medians
        "low": 0.375,
        "high": 0.75,
        "unit": "s",
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].endswith("≤ 0.5 met")
    assert lines[-2].endswith("≤ 0.4 not met")
    assert "2.00 KiB" in lines[-1]
