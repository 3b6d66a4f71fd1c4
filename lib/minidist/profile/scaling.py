"""Strong and weak scaling, measured, with their spread.

    strong    the same batch over N ranks       speedup = t_1/t_N        efficiency = t_1/(N t_N)
    weak      the same batch on every rank      speedup = N t_1/t_N      efficiency = t_1/t_N

On a shared machine absolute times drift by tens of percent from minute to minute. So all sizes are
measured in **one** world: in every round, for each size N, the first N ranks run a step in their
own group while the other ranks wait. A speed-up is a ratio of times of the same round. The result
is the median of these ratios; low and high are their quartiles. Every time is the time of the
slowest rank. `log=` writes the measured times, a line of JSON per round and size, so that a report
can be checked against them.

Example::

    def make_step(group, batch_size):                 # runs on every rank of the group
        model = DDP(Net(), process_group=group)
        inputs = torch.randn(batch_size, 32)
        return lambda: model(inputs).sum().backward()

    rows = measure_scaling(make_step, [1, 2], mode="weak", batch_size=16)
    print(table(rows))

Limits. Ranks on the CPU share its cores, caches and memory bandwidth: two busy processes on two
cores slow each other by 8 to 10 %, so the weak-scaling efficiency there is at most about 0.92. With
more ranks than cores the figures mean nothing (see the row's `note`). The emulated cluster gives
exact figures, which are the same on every machine: `scaling_rows({n: [timeline.makespan_s], ...})`.

>>> print(table(scaling_rows({1: [8.0], 2: [4.0], 4: [2.5]}, mode="strong", batch_size=64)))
ranks  batch/rank    step (s)   samples/s  speed-up   low … high   efficiency
    1          64      8.0000         8.0      1.00  1.00 … 1.00      100.0%
    2          32      4.0000        16.0      2.00  2.00 … 2.00      100.0%
    4          16      2.5000        25.6      3.20  3.20 … 3.20       80.0%
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from minidist import launch
from minidist.profile.loader_settings import cores_per_rank
from minidist.profile.paired import end_rank, quartiles, slowest, start_rank, time_step

if TYPE_CHECKING:
    import torch.distributed as dist

Mode = Literal["strong", "weak"]
MakeStep = Callable[["dist.ProcessGroup", int], Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One world size.

    Attributes:
        batch_size: per rank.
        step_s: median over rounds; low_s, high_s: quartiles.
        speedup: speedup over one rank of the smallest measured size; median over rounds of the
            ratio within a round; speedup_low, speedup_high: quartiles.
        efficiency: speedup / world_size.
        note: a reason why the figure may mislead, or "".
    """

    mode: Mode
    world_size: int
    batch_size: int
    step_s: float
    low_s: float
    high_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    efficiency: float
    note: str = ""

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks together per second of the median step."""
        return self.world_size * self.batch_size / self.step_s


def scaling_rows(
    seconds: Mapping[int, Sequence[float]],
    *,
    mode: Mode = "weak",
    batch_size: int = 1,
    cores: int | None = None,
) -> list[ScalingRow]:
    """Rows from seconds per step, measured or simulated.

    Args:
        seconds: world size -> one figure per round; entry i of all sizes is the same round.
        batch_size: weak: per rank. strong: of all ranks together.
        cores: of the machine, for the note; None if each rank has its own device.

    Raises:
        ValueError: no times, different numbers of rounds, or a batch that does not divide.
    """
    _check(seconds, mode, batch_size)
    rounds = {len(times) for times in seconds.values()}
    if len(rounds) != 1 or rounds == {0}:
        raise ValueError(f"scaling_rows: every size needs equally many rounds, got {rounds}")
    base = min(seconds)  # larger than 1 if the model does not fit on one rank
    rows = []
    for size in sorted(seconds):
        # The speedup over one rank of the base, in each round.
        scale = base if mode == "strong" else size
        ratios = [scale * b / t for b, t in zip(seconds[base], seconds[size], strict=True)]
        low_s, step_s, high_s = quartiles(seconds[size])
        low, middle, high = quartiles(ratios)
        rows.append(
            ScalingRow(
                mode=mode,
                world_size=size,
                batch_size=batch_size // size if mode == "strong" else batch_size,
                step_s=step_s,
                low_s=low_s,
                high_s=high_s,
                speedup=middle,
                speedup_low=low,
                speedup_high=high,
                efficiency=middle / size,
                note=_note(size, cores),
            )
        )
    return rows


def _note(world_size: int, cores: int | None) -> str:
    if cores is None or world_size == 1:
        return ""
    if world_size > cores:
        return f"{world_size} ranks on {cores} cores take turns: not a measure of scaling"
    return "ranks share caches and memory bandwidth"


def measure_scaling(
    make_step: MakeStep,
    world_sizes: Sequence[int],
    *,
    mode: Mode = "weak",
    batch_size: int,
    rounds: int = 10,
    calls: int = 1,
    warmup: int = 2,
    deadline_s: float = 120.0,
    log: str | os.PathLike[str] | None = None,
) -> list[ScalingRow]:
    """Start as many ranks as the largest size has, and time a step on a group of each size.

    Args:
        make_step: `make_step(group, batch_size_per_rank)` builds a model on every rank of the group
            and returns a function that runs one training step. The step must communicate only in
            its group: `DDP(..., process_group=)`.
        batch_size: weak: per rank. strong: of all ranks together; must be divisible by each size.
        rounds, calls: each round times `calls` steps per size.
        warmup: untimed steps before the first round, because DDP rebuilds its buckets in the second
            step.
        deadline_s: for everything, counted from when all ranks have been started.
        log: a file to write: for each round and size a line of JSON with "round" (from 0), "ranks",
            "batch_per_rank" and "seconds" (per step, of the slowest rank).

    Raises:
        ValueError: invalid sizes, batch or mode.
        LaunchError: a rank failed.
    """
    sizes = sorted(set(world_sizes))
    _check(dict.fromkeys(sizes, ()), mode, batch_size)
    if rounds < 1 or calls < 1 or warmup < 0:
        raise ValueError(f"measure_scaling: got rounds={rounds}, calls={calls}, warmup={warmup}")
    per_rank = {n: batch_size // n if mode == "strong" else batch_size for n in sizes}
    results = launch.run(
        _measure, sizes[-1], make_step, per_rank, rounds, calls, warmup, deadline_s=deadline_s
    )
    seconds, on_cpu = results[0]
    if log is not None:
        _write_log(Path(log), seconds, per_rank)
    return scaling_rows(
        seconds, mode=mode, batch_size=batch_size, cores=cores_per_rank(1) if on_cpu else None
    )


def _write_log(
    path: Path, seconds: Mapping[int, Sequence[float]], per_rank: Mapping[int, int]
) -> None:
    lines = [
        {"round": i, "ranks": size, "batch_per_rank": per_rank[size], "seconds": times[i]}
        for i in range(len(next(iter(seconds.values()))))
        for size, times in seconds.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def _check(seconds: Mapping[int, Any], mode: str, batch_size: int) -> None:
    """Raise ValueError for invalid arguments, before any rank is started."""
    if mode not in ("strong", "weak"):
        raise ValueError(f'scaling: mode must be "strong" or "weak", got {mode!r}')
    if not seconds or min(seconds) < 1 or batch_size < 1:
        raise ValueError(
            f"scaling: wants world sizes >= 1 and a batch >= 1, got sizes {sorted(seconds)} and "
            f"batch_size={batch_size}"
        )
    for size in seconds:
        if mode == "strong" and batch_size % size:
            raise ValueError(f"scaling: a batch of {batch_size} does not divide over {size} ranks")


def _measure(
    make_step: MakeStep, per_rank: dict[int, int], rounds: int, calls: int, warmup: int
) -> tuple[dict[int, list[float]], bool]:
    """The function that every rank runs."""
    device = start_rank()
    seconds = _rounds(make_step, per_rank, rounds, calls, warmup, device)
    end_rank()
    return seconds, device.type == "cpu"


def _rounds(
    make_step: MakeStep,
    per_rank: dict[int, int],
    rounds: int,
    calls: int,
    warmup: int,
    device: Any,
) -> dict[int, list[float]]:
    """Time the sizes in turn, round by round; returns the slowest rank's seconds."""
    import torch.distributed as dist

    # All ranks must create every group, in the same order.
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in per_rank}
    steps: dict[int, Callable[[], Any]] = {}
    for size, batch in per_rank.items():
        if dist.get_rank() < size:
            steps[size] = make_step(groups[size], batch)
            for _ in range(warmup):
                steps[size]()
        dist.barrier()
    seconds: dict[int, list[float]] = {size: [] for size in per_rank}
    for _ in range(rounds):
        for size in per_rank:
            seconds[size].append(slowest(time_step(steps.get(size), calls, device)))
    return seconds


def table(rows: Sequence[ScalingRow]) -> str:
    """The rows and their notes as a text table."""
    lines = ["ranks  batch/rank    step (s)   samples/s  speed-up   low … high   efficiency"]
    for row in rows:
        lines.append(
            f"{row.world_size:>5}  {row.batch_size:>10}  {row.step_s:>10.4f}  "
            f"{row.samples_per_s:>10.1f}  {row.speedup:>8.2f}  "
            f"{row.speedup_low:.2f} … {row.speedup_high:.2f}  {row.efficiency:>10.1%}"
            + (f"  {row.note}" if row.note else "")
        )
    return "\n".join(lines)
