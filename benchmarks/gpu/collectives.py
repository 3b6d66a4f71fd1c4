"""This course's collectives on the device's tensors: are they right, and what do they cost?

Over NCCL with one rank per GPU. NCCL refuses two ranks on one GPU, so worlds that are larger than
the machine run over gloo: its own collectives take CUDA tensors, its send and receive do not, so
ours are staged through the CPU there. That is slow and no way to train; it is how one GPU is enough
to see that streams, dtypes and devices are handled right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import paired, run_bench
from torch import Tensor

import minidist.collectives as ours
from gpu.device import choose_world, count_ranks, num_gpus, start_rank
from gpu.recorder import Recorder
from gpu.rows import quantity
from gpu.sizes import Sizes
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.profile import fit_collective, measure_collectives
from minidist.profile.paired import end_rank

DEADLINE_S = 60.0
# What a sum of a few numbers may differ by, relative to their size, when its order differs.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.int64: 0.0}
OPS = ("sum", "avg", "max")
ALL_REDUCES: dict[str, Callable[..., Any]] = {
    "ring": ours.ring_all_reduce,
    "tree": ours.tree_all_reduce,
    "halving-doubling": ours.halving_doubling_all_reduce,
    "direct": ours.direct_all_reduce,
}


def measure(recorder: Recorder, sizes: Sizes) -> None:
    """All rows of the part."""
    worlds = [("gloo", n) for n in sizes.world_sizes]
    if sizes.device == "cuda":
        worlds += [("nccl", n) for n in sorted({1, num_gpus()} - {0})]
    for backend, n in worlds:
        name = f"collectives, {count_ranks(n)} over {backend}"
        recorder.measure(name, functools.partial(correctness, recorder, sizes, name, backend, n))
    name = "torch's DDP on the backend minidist, 2 ranks"
    recorder.measure(name, lambda: ddp_on_minidist(recorder, sizes, name))
    backend, n = choose_world(sizes.device, at_least=2)
    name = f"all-reduce, {n} ranks over {backend}"
    recorder.measure(name, lambda: speed(recorder, sizes, name, backend, n))


def correctness(recorder: Recorder, sizes: Sizes, name: str, backend: str, n: int) -> None:
    """Every collective, dtype and odd size, held against what one process computes."""
    results = run_bench(check_all, n, backend, sizes.device, deadline_s=DEADLINE_S)
    wrong = [f"rank {rank}: {text}" for rank, (_, found) in enumerate(results) for text in found]
    recorder.check(name, not wrong, "; ".join(wrong[:5]), num_checks=sum(c for c, _ in results))


def check_all(backend: str, kind: str) -> tuple[int, list[str]]:
    """On every rank: how many results were looked at, and which were wrong."""
    device = start_rank(backend, kind)
    num_checks, wrong = 0, []
    for name, got, expected in results_of_all(device):
        num_checks += 1
        if text := difference(got, expected, device):
            wrong.append(f"{name}: {text}")
    end_rank()
    return num_checks, wrong


def results_of_all(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what was called, what it gave, what it should give), collective by collective."""
    me, n = dist.get_rank(), dist.get_world_size()
    local, cross = ours.node_groups(2 if n % 2 == 0 else 1)
    hierarchical = functools.partial(
        ours.hierarchical_all_reduce, local_group=local, cross_group=cross
    )
    for dtype in TOLERANCE:
        for numel in (0, 1, n + 1, 1000):
            every = [draw(rank, numel, dtype) for rank in range(n)]
            for op in OPS:
                if op == "avg" and not dtype.is_floating_point:
                    continue
                for name, call in (*ALL_REDUCES.items(), ("hierarchical", hierarchical)):
                    tensor = every[me].to(device, copy=True)
                    call(tensor, op)
                    yield f"{name} all-reduce, {op}, {dtype}, {numel}", tensor, fold(every, op)
    every = [draw(rank, 100 * n + 1, torch.float32) for rank in range(n)]
    total = fold(every, "sum").float()
    for name, scatter, gather in (
        ("ring", ours.ring_reduce_scatter, ours.ring_all_gather),
        ("direct", ours.direct_reduce_scatter, ours.direct_all_gather),
    ):
        mine = torch.empty_like(total.tensor_split(n)[me], device=device)
        scatter(mine, every[me].to(device), "sum")
        yield f"{name} reduce-scatter", mine, total.tensor_split(n)[me]
        whole = torch.empty_like(total, device=device)
        gather(whole, mine)
        yield f"{name} all-gather", whole, total
    root = n - 1
    tensor = every[me].to(device, copy=True)
    ours.broadcast(tensor, root)
    yield "broadcast", tensor, every[root]
    tensor = every[me].to(device, copy=True)
    ours.reduce(tensor, root, "sum")
    yield "reduce", tensor, total if me == root else every[me]
    parts = [torch.empty_like(each, device=device) for each in every]
    ours.gather(every[me].to(device), parts if me == root else None, root)
    if me == root:
        yield "gather", torch.stack(parts), torch.stack(every)
    tensor = torch.empty_like(every[me], device=device)
    ours.scatter(tensor, [each.to(device) for each in every] if me == root else None, root)
    yield "scatter", tensor, every[me]
    outputs = [torch.zeros(3, device=device) for _ in range(n)]
    ours.all_to_all(outputs, [torch.full((3,), 10.0 * me + d, device=device) for d in range(n)])
    expected = torch.stack([torch.full((3,), 10.0 * s + me) for s in range(n)])
    yield "all-to-all", torch.stack(outputs), expected
    yield from right_behind_its_producer(device)


def right_behind_its_producer(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Asynchronous ones, issued while the kernels that make their input are still queued.

    On a GPU a collective that reads too early, on another stream or through the host, would find
    the tensor as it was before, and one that is waited for too late would let the next kernel do.
    """
    n = dist.get_world_size()
    side = 1024 if device.type == "cuda" else 64
    heavy = torch.full((side, side), 1e-3, device=device)
    for name, call in ALL_REDUCES.items():
        tensor = torch.zeros(1 << 16, device=device)
        for _ in range(20):
            heavy = (heavy @ heavy).clamp(max=1e-3)
        tensor += heavy[0, 0] * 0 + 1
        work = call(tensor, "sum", async_op=True)
        work.wait()
        yield f"{name} all-reduce behind its producer", tensor * 2, torch.full((1 << 16,), 2.0 * n)


def draw(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A rank's contribution, on the CPU; every rank can draw those of all others."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (numel,), generator=generator, dtype=dtype)
    return torch.randn(numel, generator=generator).to(dtype)


def fold(every: Sequence[Tensor], op: str) -> Tensor:
    """What an all-reduce should give, in double precision where that is more."""
    wide = torch.double if every[0].dtype.is_floating_point else every[0].dtype
    stacked = torch.stack([each.to(wide) for each in every])
    if op == "max":
        return stacked.amax(0)
    return stacked.sum(0) if op == "sum" else stacked.mean(0)


def difference(got: Tensor, expected: Tensor, device: torch.device) -> str:
    """What is wrong with a result; "" if nothing is."""
    if got.device.type != device.type:
        return f"is on {got.device}"
    if got.shape != expected.shape:
        return f"has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not got.numel():
        return ""
    values = got.cpu().to(expected.dtype)
    tolerance = TOLERANCE[got.dtype] * max(1.0, float(expected.abs().max()))
    error = float((values - expected).abs().max())
    # Not "error > tolerance": NaN is wrong, too.
    return "" if error <= tolerance else f"off by {error:.3g}, expected at most {tolerance:.3g}"


def ddp_on_minidist(recorder: Recorder, sizes: Sizes, name: str) -> None:
    """A step of torch's DDP whose buckets travel on our rings, against one over gloo."""
    gradients = {
        backend: run_bench(
            ddp_gradients, 2, backend, sizes.device, sizes.trace_gpt, deadline_s=DEADLINE_S
        )[0]
        for backend in ("gloo", "minidist")
    }
    pairs = list(zip(gradients["gloo"], gradients["minidist"], strict=True))
    # Against the largest of all: some gradients, such as a key's bias, are nothing but rounding.
    largest = max(float(a.abs().max()) for a, _ in pairs)
    error = max(float((a - b).abs().max()) for a, b in pairs) / largest
    recorder.check(name, error < 1e-4, f"gradients differ by {error:.3g} of the largest")


def ddp_gradients(backend: str, kind: str, config: GPTConfig) -> list[Tensor]:
    """Of rank 0: the mean gradients of one step, in full fp32; the others need not send theirs."""
    if backend == "minidist":
        ours.register()
    device = start_rank(backend, kind)
    torch.manual_seed(0)
    model = GPT(config).to(device)
    ids = [device.index] if device.type == "cuda" else None
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    torch.manual_seed(1 + dist.get_rank())
    tokens_BT = torch.randint(config.vocab_size, (2, config.context + 1)).to(device)
    lm_loss(ddp(tokens_BT[:, :-1]), tokens_BT[:, 1:]).backward()
    found = []
    if dist.get_rank() == 0:
        found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    del ddp, model
    end_rank()
    return found


def speed(recorder: Recorder, sizes: Sizes, name: str, backend: str, n: int) -> None:
    """Ours beside the backend's own all-reduce; with a GPU per rank, NCCL's bus bandwidth, too."""
    times, rows = run_bench(time_all_reduces, n, backend, sizes, deadline_s=DEADLINE_S)[0]
    for num_bytes, seconds in times.items():
        for algorithm in ALL_REDUCES:
            recorder.ratio(
                f"{name}, {quantity(num_bytes, 'bytes')}: {algorithm} / {backend}",
                seconds,
                algorithm,
                backend,
                num_bytes=num_bytes,
            )
    for row in rows:
        recorder.figure(
            f"{backend}'s {row.kind}, {n} ranks, {quantity(row.num_bytes, 'bytes')}, bus bandwidth",
            row.bus_bytes_per_s,
            "bytes/s",
            seconds=row.seconds,
        )
    if len(rows) >= 3:
        link = fit_collective(rows, "all_reduce").link
        name = f"{backend}'s all_reduce, {n} ranks, "
        recorder.figure(name + "fitted latency", link.latency_s, "s")
        recorder.figure(name + "fitted bandwidth", link.bandwidth_bytes_per_s, "bytes/s")


def time_all_reduces(backend: str, sizes: Sizes) -> tuple[dict[int, Any], list[Any]]:
    """On every rank: seconds per call of each algorithm, by size; rows of NCCL's own."""
    device = start_rank(backend, sizes.device)
    found: dict[int, Any] = {}
    for num_bytes in sizes.message_bytes:
        # Zeros stay finite however often they are added up.
        tensor = torch.zeros(num_bytes // 4, device=device)
        calls: dict[str, Callable[[], Any]] = {
            name: functools.partial(call, tensor) for name, call in ALL_REDUCES.items()
        }
        calls[backend] = functools.partial(dist.all_reduce, tensor)
        found[num_bytes] = paired(calls, rounds=sizes.rounds)
    rows: list[Any] = []
    if backend == "nccl":
        messages = [2**k for k in range(10, 29, 3)]
        rows = measure_collectives(("all_reduce",), messages, rounds=sizes.rounds, device=device)
    end_rank()
    return found, rows
