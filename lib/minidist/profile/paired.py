"""Time several versions of a step in turn on the same ranks, for example DDP and plain training.

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

Every round runs each version once (`calls` steps). The ratio of two versions is computed within a
round, so that a slowdown of the whole machine cancels. The result is the median of these ratios
with their quartiles.
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
    """One version of a step. `ratio` is the median ratio to the first version within a round, `low`
    and `high` are the quartiles of the ratios, `step_s` is the median time."""

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
    """The cost of one version of a step compared with a baseline, such as DDP with plain training.

    All ranks run all versions in turn. So in "plain" (no communication, each rank on its own) the
    machine is as busy as with DDP, and the difference is the cost of DDP itself.

    Args:
        make_steps: called on every rank; returns name -> a function that runs one step. The
            baseline is first. All ranks return the same names in the same order.

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
    """Rows from seconds per round. Entry i of every list is round i; the first name is the base.

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
    """The function that every rank runs."""
    device = start_rank()
    seconds = _rounds(make_steps(), rounds, calls, warmup, device)
    end_rank()
    return seconds


def _rounds(
    steps: Mapping[str, Callable[[], Any]], rounds: int, calls: int, warmup: int, device: Any
) -> dict[str, list[float]]:
    """Run all steps in turn, round by round; returns the slowest rank's seconds."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(slowest(time_step(step, calls, device)))
    return seconds


def start_rank() -> Any:
    """The first action of every rank: set the device, make the default group; return the device."""
    import torch
    import torch.distributed as dist

    from minidist.device import choose_backend, choose_device

    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(choose_backend())
    return device


def end_rank() -> None:
    """The last action of every rank: collect garbage, then destroy the process group.

    The models must be gone before. A DDP object that outlives the process group destroys the group
    later, and then it joins gloo's threads while it holds Python's lock. These threads may need
    the lock, so about one time in three the program hangs (torch 2.13).
    """
    import gc

    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def time_step(step: Callable[[], Any] | None, calls: int, device: Any) -> float:
    """Seconds per call on this rank, after a barrier of all ranks; 0 if `step` is None."""
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
    """Collective: the longest time of all ranks, returned on every rank."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return max(every)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile.

    >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0]), quartiles([7.0])
    ((2.0, 3.0, 4.0), (7.0, 7.0, 7.0))
    """
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
