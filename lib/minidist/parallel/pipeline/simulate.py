"""How long a schedule takes, how much of the time is bubble, and how much it keeps in memory.

Phases: walk the schedule in dependency order; start every action when its rank is free and
everything that it needs is there; compute bubble and memory from the result.

With equal stages, the bubble is the following share of the time of a step. (The papers often give
(p-1)/m, which is the share of the ideal time.)

    naive                (p-1) / p
    GPipe, 1F1B          (p-1) / (m + p-1)
    interleaved          (p-1) / (v*m + p-1)
    ZB-H1                (p-1)(tF+tB-tW) / (m (tF+tB+tW) + (p-1)(tF+tB-tW)),  m >= p, tW <= tF, tB

Rank r keeps m micro-batches (GPipe), min(p - r, m) (1F1B), at most p + (p-1)/v (interleaved), or at
most p (ZB-H1).

>>> from minidist.parallel.pipeline.schedule import gpipe, one_f_one_b, zb_h1
>>> timeline = simulate(one_f_one_b(3, 4))
>>> print(draw(timeline))
rank 0 F0 F1 F2             B0--- F3 B1---    B2---    B3---
rank 1    F0 F1       B0--- F2 B1--- F3 B2---    B3---
rank 2       F0 B0--- F1 B1--- F2 B2--- F3 B3---
>>> timeline.makespan_s, round(timeline.bubble_fraction, 4), timeline.peak_activations
(18.0, 0.3333, (3.0, 2.0, 1.0))
>>> simulate(gpipe(3, 4)).peak_activations
(4.0, 4.0, 4.0)
>>> print(draw(simulate(zb_h1(3, 4))))
rank 0 F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3
rank 1    F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
rank 2       F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

Messages take `p2p_s`, and slow down neither each other nor the computation. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minidist.parallel.pipeline.check import check_schedule, in_order
from minidist.parallel.pipeline.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one micro-batch takes on one stage: one number, or one number per stage.

    In a schedule without W, a B takes backward_s + weight_s. With v chunks per rank a stage has 1/v
    of the rank's layers, so give 1/v of the time for a comparison with v = 1.

    Args:
        forward_s: forward pass.
        backward_s: gradient of the input.
        weight_s: gradients of the weights.
        update_s: optimizer step (PipeDream).
        p2p_s: one activation or gradient from rank to rank.
    """

    forward_s: float | Sequence[float] = 1.0
    backward_s: float | Sequence[float] = 1.0
    weight_s: float | Sequence[float] = 1.0
    update_s: float | Sequence[float] = 0.0
    p2p_s: float = 0.0

    def of(self, schedule: Schedule, stage: int, kind: Kind) -> float:
        """Seconds of one action."""

        def at(times: float | Sequence[float]) -> float:
            return times[stage] if isinstance(times, Sequence) else times

        match kind:
            case Kind.FORWARD:
                return at(self.forward_s)
            case Kind.BACKWARD if schedule.splits_backward:
                return at(self.backward_s)
            case Kind.BACKWARD:
                return at(self.backward_s) + at(self.weight_s)
            case Kind.WEIGHT:
                return at(self.weight_s)
            case Kind.UPDATE:
                return at(self.update_s)

    def validate(self, schedule: Schedule) -> None:
        """Raise ValueError for a negative time, or a sequence of the wrong length."""
        for name in ("forward_s", "backward_s", "weight_s", "update_s", "p2p_s"):
            times = getattr(self, name)
            if isinstance(times, Sequence) and len(times) != schedule.num_stages:
                raise ValueError(
                    f"StageTimes: {name} needs one number per stage, {schedule.num_stages} for "
                    f"{schedule.name}, got {len(times)}"
                )
            if (min(times) if isinstance(times, Sequence) else times) < 0:
                raise ValueError(f"StageTimes: {name} cannot be negative, got {times}")


@dataclass(frozen=True)
class Span:
    """One action and when it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When each rank did what: simulated, or recorded by the executor (then in real seconds)."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # per rank, in order

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end over all ranks."""
        spans = [span for rank in self.spans for span in rank]
        return max((s.end_s for s in spans), default=0.0) - min(
            (s.start_s for s in spans), default=0.0
        )

    def busy_s(self, rank: int) -> float:
        """Seconds in which `rank` computes."""
        return sum(span.end_s - span.start_s for span in self.spans[rank])

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they do not compute; 0 to 1."""
        total_s = len(self.spans) * self.makespan_s
        return 1 - sum(map(self.busy_s, range(len(self.spans)))) / total_s if total_s else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """See `peak_activations`."""
        return peak_activations(self.schedule)


def simulate(schedule: Schedule, times: StageTimes | None = None) -> Timeline:
    """The timeline of a schedule.

    Args:
        times: times of the stages; by default forward 1, backward 2 (of which 1 for the weights).

    Raises:
        ValueError: the schedule is invalid (`check_schedule`), or `times` do not fit it.
    """
    times = times or StageTimes()
    times.validate(schedule)
    check_schedule(schedule)
    free_s = [0.0] * schedule.num_ranks
    end_s: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in free_s]
    for rank, action in in_order(schedule):
        ready_s = [
            end_s[other, need] + (times.p2p_s if other != rank else 0.0)
            for other, need in schedule.needs(rank, action)
        ]
        start_s = max([free_s[rank], *ready_s])
        took_s = times.of(schedule, schedule.stage(rank, action.chunk), action.kind)
        free_s[rank] = end_s[rank, action] = start_s + took_s
        spans[rank].append(Span(action, start_s, start_s + took_s))
    return Timeline(schedule, tuple(map(tuple, spans)))


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """The most activations that each rank keeps at once, in micro-batches through all its layers.

    Activations live from F to B, or to W if the schedule has W. A chunk has 1/v of the rank's
    layers.
    """
    last = Kind.WEIGHT if schedule.splits_backward else Kind.BACKWARD
    peaks = []
    for actions in schedule.actions:
        live = peak = 0
        for action in actions:
            live += (action.kind is Kind.FORWARD) - (action.kind is last)
            peak = max(peak, live)
        peaks.append(peak / schedule.num_chunks)
    return tuple(peaks)


def staleness(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Per rank and micro-batch: the number of updates between its forward and its own update.

    0 everywhere in a schedule that updates after the flush; min(i, p - r - 1) for micro-batch i on
    rank r of PipeDream (arXiv 1806.03377, section 3.3).

    >>> from minidist.parallel.pipeline.schedule import pipedream
    >>> staleness(pipedream(3, 5))
    ((0, 1, 2, 2, 2), (0, 1, 1, 1, 1), (0, 0, 0, 0, 0))
    """
    result = []
    for actions in schedule.actions:
        version, used = 0, {}
        stale = [0] * schedule.num_micro_batches
        for action in actions:
            if action.kind is Kind.FORWARD:
                used[action.micro_batch] = version
            elif action.kind is Kind.UPDATE:
                stale[action.micro_batch] = version - used[action.micro_batch]
                version += 1
        result.append(tuple(stale))
    return tuple(result)


def draw(timeline: Timeline, columns: int | None = None) -> str:
    """A timeline as text, one line per rank. If an action is too short, its label is clipped.

    Args:
        columns: width of the time axis; by default so that the shortest action shows its label.
    """
    spans = [span for rank in timeline.spans for span in rank if span.end_s > span.start_s]
    if not spans:
        return ""
    origin_s = min(span.start_s for span in spans)
    if columns is None:
        shortest_s = min(span.end_s - span.start_s for span in spans)
        label = max(len(str(span.action)) for span in spans) + 1
        columns = min(round(label * timeline.makespan_s / shortest_s), 400)
    per_s = columns / timeline.makespan_s
    lines = []
    for rank, of_rank in enumerate(timeline.spans):
        line = [" "] * columns
        for span in of_rank:
            left, right = (round((t - origin_s) * per_s) for t in (span.start_s, span.end_s))
            if right > left:
                width = max(right - left - 1, 1)  # a blank keeps actions apart
                line[left : left + width] = str(span.action).ljust(width, "-")[:width]
        lines.append(f"rank {rank} {''.join(line)}".rstrip())
    return "\n".join(lines)
