"""Time several ways to do a step in turn, in one world of ranks: DDP beside plain training, say.

Example::

    def make_steps():                                   # runs on every rank
        plain, inputs = Net(), torch.randn(16, 32)
        ddp = DDP(Net())
        return {
            "plain": lambda: plain(inputs).sum().backward(),
            "ddp": lambda: ddp(inputs).sum().backward(),
            "no_sync": no_sync_step(ddp, inputs),
        }

    for row in measure_overhead(make_steps, 2):
        print(f"{row.name}: {row.ratio:.2f} ({row.low:.2f} … {row.high:.2f})")

In every round each of them runs once; a ratio is taken within a round, so that what slows down the
whole machine cancels. The result is the median of the ratios with their quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist import launch


@dataclass(frozen=True, kw_only=True)
class OverheadRow:
    """Several ways to train, against the first; ratios within a round, and their quartiles."""

    name: str
    step_s: float
    ratio: float
    low: float
    high: float


def measure_overhead(
    make_steps: Callable[[], Mapping[str, Callable[[], Any]]],
    world_size: int,
    *,
    rounds: int = 10,
    calls: int = 1,
    warmup: int = 2,
    deadline_s: float = 120.0,
) -> list[OverheadRow]:
    """What one way to train costs against another, such as DDP against plain training.

    All ranks run all of them in turn, so that "plain" (no communication, each rank for itself) has
    the same neighbours on the machine as DDP has: what is left is DDP's own cost.

    Args:
        make_steps: called on every rank; returns name -> one step, the baseline first, with the
            same names in the same order on all ranks.

    Raises:
        LaunchError: a rank failed.
    """
    if world_size < 1 or rounds < 1 or calls < 1:
        raise ValueError(
            f"measure_overhead: got world_size={world_size}, rounds={rounds}, calls={calls}"
        )
    seconds = launch.run(
        _measure_overhead, world_size, make_steps, rounds, calls, warmup, deadline_s=deadline_s
    )[0]
    return overhead_rows(seconds)


def overhead_rows(seconds: Mapping[str, Sequence[float]]) -> list[OverheadRow]:
    """Rows from seconds per round; the i-th of all names belong together, the first is the base.

    >>> [round(row.ratio, 2) for row in overhead_rows({"plain": [1, 2, 4], "ddp": [1.1, 2.2, 4.8]})]
    [1.0, 1.1]
    """
    base = next(iter(seconds.values()))
    rows = []
    for name, times in seconds.items():
        low, middle, high = quartiles([t / b for t, b in zip(times, base, strict=True)])
        step_s = statistics.median(times)
        rows.append(OverheadRow(name=name, step_s=step_s, ratio=middle, low=low, high=high))
    return rows


def _measure_overhead(
    make_steps: Callable[[], Mapping[str, Callable[[], Any]]], rounds: int, calls: int, warmup: int
) -> dict[str, list[float]]:
    """What every rank runs."""
    device = start_rank()
    seconds = _rounds(make_steps(), rounds, calls, warmup, device)
    end_rank()
    return seconds


def _rounds(
    steps: Mapping[str, Callable[[], Any]], rounds: int, calls: int, warmup: int, device: Any
) -> dict[str, list[float]]:
    """All steps in turn, round by round."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(slowest(time_step(step, calls, device)))
    return seconds


def start_rank() -> Any:
    """What every rank does first: its device, and the default group. Returns the device."""
    import torch
    import torch.distributed as dist

    from minidist.device import choose_backend, choose_device

    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(choose_backend())
    return device


def end_rank() -> None:
    """What every rank does last. The models have to be gone by then: a DDP that outlives its
    process group destroys it in turn, holding Python's lock while it joins gloo's threads, which
    may want that lock; about one time in three that hangs (torch 2.13).
    """
    import gc

    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def time_step(step: Callable[[], Any] | None, calls: int, device: Any) -> float:
    """Seconds per call on this rank, all starting together; 0 on ranks that only wait."""
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if step is None:
        return 0.0
    start_s = time.perf_counter()
    for _ in range(calls):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start_s) / calls


def slowest(seconds: float) -> float:
    """Collective: the longest time of all ranks, on all of them."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return max(every)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
