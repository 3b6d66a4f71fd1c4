"""Where the time of a step goes: compute, communication, their overlap, and idle time.

Per rank, the spans of a kind become a set of points in time (`minidist.profile.intervals`), so that
two simultaneous kernels count once. Then every moment of a step counts as the first kind in this
list that is active:

    compute > exposed communication > exposed copy > loader > idle

    compute + exposed communication + exposed copy + loader + idle = step        (exactly)
    communication = exposed communication + overlapped communication
    bubble = step - compute       utilization = compute / step

In a pipeline without communication costs, `bubble_fraction` is the (p-1)/(m+p-1) of GPipe and 1F1B.

Example: a step of 5 s with a backward of 3 s and an all-reduce from second 2 to second 4.

>>> from minidist.profile.timeline import Span, Timeline, Window
>>> timeline = Timeline(
...     (Span(rank=0, lane="a", kind="compute", name="backward", start_s=0, end_s=3),
...      Span(rank=0, lane="b", kind="communication", name="all_reduce", start_s=2, end_s=4)),
...     (Window(rank=0, name="step 0", start_s=0, end_s=5),))
>>> (share,) = step_shares(timeline)
>>> share.compute_s, share.overlapped_s, share.exposed_s, share.idle_s, share.utilization
(3.0, 1.0, 1.0, 1.0, 0.6)
>>> print(report(timeline))
rank  step      compute  exposed   copy  loader   idle    overlapped
   0  step 0      60.0%    20.0%   0.0%    0.0%  20.0%         50.0%
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minidist.cost.scaling import Bottleneck, bottleneck
from minidist.profile.intervals import Interval, clip, intersect, length, merge, subtract
from minidist.profile.timeline import KINDS, Kind, Timeline, Window


@dataclass(frozen=True, kw_only=True)
class Shares:
    """One rank's seconds in one window, or the sum over several windows.

    Attributes:
        step_s: length of the window.
        compute_s: time in which at least one computation runs.
        communication_s: time in which at least one collective runs, or waits for other ranks.
        overlapped_s: time with computation and communication.
        exposed_s: time with communication and without computation.
        copy_s: time with a copy and without computation and communication.
        loader_s: time of waiting for data without any of the above.
        idle_s: time without any of the above.
    """

    rank: int | None = None  # None for a sum over ranks
    name: str = ""
    step_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    exposed_s: float
    copy_s: float
    loader_s: float
    idle_s: float

    @property
    def utilization(self) -> float:
        """Share of the step in which the device computes, 0 to 1."""
        return self.compute_s / self.step_s if self.step_s else 0.0

    @property
    def bubble_s(self) -> float:
        """Time without computation, for any reason."""
        return self.step_s - self.compute_s

    @property
    def bubble_fraction(self) -> float:
        """Share of the step without computation, 0 to 1."""
        return self.bubble_s / self.step_s if self.step_s else 0.0

    @property
    def overlap_fraction(self) -> float:
        """Share of the communication that runs behind computation; 1 without communication."""
        return self.overlapped_s / self.communication_s if self.communication_s else 1.0


def shares(timeline: Timeline, window: Window) -> Shares:
    """The shares of one rank in one window."""
    return _divide(_busy(timeline, window.rank), window)


def step_shares(timeline: Timeline) -> list[Shares]:
    """Shares of every step of every rank, by rank and time."""
    return [
        _divide(busy, window)
        for rank in timeline.ranks
        for busy in [_busy(timeline, rank)]
        for window in timeline.windows(rank)
    ]


def _busy(timeline: Timeline, rank: int) -> dict[Kind, list[Interval]]:
    """Per kind: the points in time at which the rank has a span of this kind."""
    found: dict[Kind, list[Interval]] = {kind: [] for kind in KINDS}
    for span in timeline.of(rank):
        found[span.kind].append((span.start_s, span.end_s))
    return {kind: merge(intervals) for kind, intervals in found.items()}


def _divide(busy: dict[Kind, list[Interval]], window: Window) -> Shares:
    """Count each moment of the window as the first kind that is active."""
    start, end = window.start_s, window.end_s
    inside = {kind: clip(intervals, start, end) for kind, intervals in busy.items()}
    compute, communication = inside["compute"], inside["communication"]
    exposed = subtract(communication, compute)
    taken = merge([*compute, *communication])
    copy = subtract(inside["copy"], taken)
    taken = merge([*taken, *copy])
    loader = subtract(inside["loader"], taken)
    taken = merge([*taken, *loader])
    return Shares(
        rank=window.rank,
        name=window.name,
        step_s=max(0.0, end - start),
        compute_s=length(compute),
        communication_s=length(communication),
        overlapped_s=length(intersect(compute, communication)),
        exposed_s=length(exposed),
        copy_s=length(copy),
        loader_s=length(loader),
        idle_s=length(subtract([(start, end)], taken)) if start < end else 0.0,
    )


def total(parts: Iterable[Shares]) -> Shares:
    """The sum over steps or ranks. The fractions of the sum refer to the total time."""
    rows = list(parts)
    ranks = {row.rank for row in rows}
    names = ("step", "compute", "communication", "overlapped", "exposed", "copy", "loader", "idle")
    sums = {f"{name}_s": sum(getattr(row, f"{name}_s") for row in rows) for name in names}
    return Shares(rank=ranks.pop() if len(ranks) == 1 else None, name="total", **sums)


def find_bottleneck(part: Shares, num_gpus: int) -> Bottleneck:
    """What limits a step, and what to try: `minidist.cost.bottleneck` on measured shares.

    Exposed copies count as loader, because on a GPU they are the transfer of batches.

    Raises:
        ValueError: no computation in this part.
    """
    return bottleneck(
        compute_s=part.compute_s,
        communication_s=part.communication_s,
        overlapped_s=part.overlapped_s,
        loader_s=part.loader_s + part.copy_s,
        step_s=part.step_s,
        num_gpus=num_gpus,
    )


def report(timeline: Timeline) -> str:
    """A table of the shares of each rank and step; "overlapped" is a share of the communication."""
    rows = step_shares(timeline)
    width = max([4, *(len(row.name) for row in rows)])
    head = f"{'rank':>4}  {'step':{width}}    compute  exposed   copy  loader   idle    overlapped"
    lines = [head]
    for row in rows:
        step_s = row.step_s or 1.0
        parts = (row.compute_s, row.exposed_s, row.copy_s, row.loader_s, row.idle_s)
        c, e, k, d, i = (f"{part / step_s:.1%}" for part in parts)
        lines.append(
            f"{row.rank:>4}  {row.name:{width}}    {c:>7}  {e:>7}  {k:>5}  {d:>6}  {i:>5}  "
            f"{row.overlap_fraction:>12.1%}"
        )
    return "\n".join(lines)
