"""Where the time of a step goes: compute, communication, what hides behind what, and idle time.

Per rank the spans of a kind become a set of points in time (`minidist.profile.intervals`), so that
two kernels at once count once. Then every moment of a step is given to the first that applies:

    compute > exposed communication > exposed copy > loader > idle

    compute + exposed communication + exposed copy + loader + idle = step        (exactly)
    communication = exposed communication + overlapped communication
    bubble = step - compute       utilization = compute / step

In a pipeline without communication costs, `bubble_fraction` is the (p-1)/(m+p-1) of GPipe and 1F1B.

Example: backward for 3 s; from second 2 on an all-reduce of 2 s; a step of 5 s.

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
    """One rank's seconds in one window, or the sum over several.

    Attributes:
        step_s: the window.
        compute_s: at least one computation runs.
        communication_s: at least one collective runs, or waits for other ranks.
        overlapped_s: both at once. exposed_s: communication and no computation.
        copy_s: copies beside which neither runs.
        loader_s: waiting for data beside which nothing of the above runs.
        idle_s: nothing at all.
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
        """Time without computation, whatever the reason."""
        return self.step_s - self.compute_s

    @property
    def bubble_fraction(self) -> float:
        """Share of the step without computation, 0 to 1."""
        return self.bubble_s / self.step_s if self.step_s else 0.0

    @property
    def overlap_fraction(self) -> float:
        """Share of the communication that hides behind computation; 1 if there is none."""
        return self.overlapped_s / self.communication_s if self.communication_s else 1.0


def shares(timeline: Timeline, window: Window) -> Shares:
    """What one rank does in one window."""
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
    """Per kind the points in time at which the rank does it."""
    found: dict[Kind, list[Interval]] = {kind: [] for kind in KINDS}
    for span in timeline.of(rank):
        found[span.kind].append((span.start_s, span.end_s))
    return {kind: merge(intervals) for kind, intervals in found.items()}


def _divide(busy: dict[Kind, list[Interval]], window: Window) -> Shares:
    """Give each moment of the window to the first kind that applies."""
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
    """The sum, over steps or ranks: its fractions are those of all their time together."""
    rows = list(parts)
    ranks = {row.rank for row in rows}
    names = ("step", "compute", "communication", "overlapped", "exposed", "copy", "loader", "idle")
    sums = {f"{name}_s": sum(getattr(row, f"{name}_s") for row in rows) for name in names}
    return Shares(rank=ranks.pop() if len(ranks) == 1 else None, name="total", **sums)


def find_bottleneck(part: Shares, num_gpus: int) -> Bottleneck:
    """What limits a step, and what to try: `minidist.cost.bottleneck` on measured shares.

    Exposed copies count as loader: on a GPU they are batches on their way.

    Raises:
        ValueError: nothing was computed.
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
    """A table: per rank and step the shares of the step; "overlapped" is of the communication."""
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
