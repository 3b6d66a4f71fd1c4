"""Who is late to the collectives, by how much, and what it costs everybody.

Synchronous training goes at the pace of its slowest rank: the others wait inside the collective,
where a plain profile shows their time as communication. So the time to look at is each rank's own,
from the end of one collective to its arrival at the next.

Phases: time each rank's own work; gather the rows; compare each rank with the *other* ranks in the
same step (their median), which cancels what slows down all; decide with the median and the MAD of
these differences, which a few odd steps do not move.

Example::

    timer = ArrivalTimer()
    for batch in loader:
        with timer:                     # own work: up to the collective, not including it
            loss = model(batch); loss.backward()
        all_reduce_gradients(model)
    print(find_stragglers(gather_rows(timer.seconds)))

>>> print(find_stragglers({0: [1.0, 1.1, 1.0], 1: [1.0, 1.0, 1.1], 2: [1.4, 1.5, 1.5]}))
rank 2 is late in every step: +0.450 s (43%); without it a step takes 1.067 s instead of 1.467 s
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist.profile.overlap import step_shares
from minidist.profile.timeline import Timeline

if TYPE_CHECKING:
    import torch.distributed as dist

# Turns the median absolute deviation of a normal distribution into its standard deviation.
MAD_TO_SIGMA = 1.4826


class ArrivalTimer:
    """Seconds of each `with` block.

    Args:
        synchronize: called at both ends, so that a GPU's work is inside: `torch.cuda.synchronize`.
    """

    def __init__(
        self,
        synchronize: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds: list[float] = []
        self._synchronize, self._clock, self._start_s = synchronize, clock, 0.0

    def __enter__(self) -> ArrivalTimer:
        if self._synchronize is not None:
            self._synchronize()
        self._start_s = self._clock()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._synchronize is not None:
            self._synchronize()
        self.seconds.append(self._clock() - self._start_s)


def gather_rows(
    seconds: Sequence[float], group: dist.ProcessGroup | None = None
) -> dict[int, list[float]]:
    """Collective: every rank's times, by global rank, on all ranks of `group`."""
    import torch.distributed as dist

    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, (dist.get_rank(), list(seconds)), group=group)
    return dict(rows)


def compute_rows(timeline: Timeline) -> dict[int, list[float]]:
    """Rows for `find_stragglers` from a timeline: compute seconds of each step of each rank.

    Ranks with fewer steps than others decide how many are compared.
    """
    rows: dict[int, list[float]] = {}
    for part in step_shares(timeline):
        rows.setdefault(part.rank if part.rank is not None else 0, []).append(part.compute_s)
    shortest = min(map(len, rows.values()), default=0)
    return {rank: row[:shortest] for rank, row in rows.items()}


@dataclass(frozen=True, kw_only=True)
class RankLateness:
    """One rank against the others.

    Attributes:
        typical_s: its median own time.
        late_s: median over steps of (own time - median of the other ranks' in that step).
        late_fraction: median over steps of the same, as a share of that median.
        noise_fraction: spread of that share over the steps, a standard deviation (from the MAD).
        is_straggler: late in general: by more than the noise and by a share that matters.
        late_steps: steps in which it was late far beyond its own habit: hiccups.
        last_fraction: share of the steps in which it came last.
    """

    rank: int
    typical_s: float
    late_s: float
    late_fraction: float
    noise_fraction: float
    is_straggler: bool
    late_steps: tuple[int, ...]
    last_fraction: float


@dataclass(frozen=True, kw_only=True)
class StragglerReport:
    """All ranks, and what the late ones cost.

    Attributes:
        ranks: by rank.
        step_s: mean over steps of the slowest rank's time: what everybody pays.
        fair_step_s: the same if every straggler, and every hiccup, were as fast as the others'
            median in that step.
        wasted_rank_s: seconds that all ranks together wait for that, over all steps.
    """

    ranks: tuple[RankLateness, ...]
    step_s: float
    fair_step_s: float
    wasted_rank_s: float

    @property
    def stragglers(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.ranks if each.is_straggler)

    def __str__(self) -> str:
        cost = f"a step takes {self.fair_step_s:.3f} s instead of {self.step_s:.3f} s"
        lines = [
            f"rank {each.rank} is late in every step: +{each.late_s:.3f} s "
            f"({each.late_fraction:.0%})"
            for each in self.ranks
            if each.is_straggler
        ]
        lines += [
            f"rank {each.rank} is late now and then: in {len(each.late_steps)} steps, first "
            f"{', '.join(map(str, each.late_steps[:5]))}"
            for each in self.ranks
            if each.late_steps
        ]
        if not lines:
            return f"no straggler among {len(self.ranks)} ranks"
        return "\n".join(lines) + f"; without {'it' if len(lines) == 1 else 'them'} {cost}"


def find_stragglers(
    rows: Mapping[int, Sequence[float]],
    *,
    min_fraction: float = 0.05,
    num_sigmas: float = 3.0,
) -> StragglerReport:
    """Compare the ranks' own times, step by step.

    With two ranks there is no majority, and the slower one counts as late.

    Args:
        rows: per rank its own seconds in each step, before the collective; equally many per rank.
            Leave warm-up steps out.
        min_fraction: a rank that is late by less than this share of the others' time is not
            reported, however sure that is.
        num_sigmas: how far beyond the noise. For `is_straggler` it is the noise of a median over
            all steps, for `late_steps` that of one step.

    Raises:
        ValueError: fewer than two ranks, no step, or rows of different lengths.
    """
    lengths = {len(row) for row in rows.values()}
    if len(rows) < 2 or len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            "find_stragglers: wants two ranks or more with equally many steps, one at least; got "
            f"{ {rank: len(row) for rank, row in sorted(rows.items())} }"
        )
    ranks, num_steps = sorted(rows), lengths.pop()
    latest = [max(rows[rank][step] for rank in ranks) for step in range(num_steps)]

    # Compare each rank with the median of the others in the same step.
    others = {
        rank: [
            statistics.median(rows[other][step] for other in ranks if other != rank)
            for step in range(num_steps)
        ]
        for rank in ranks
    }
    results = []
    for rank in ranks:
        differences = [own - rest for own, rest in zip(rows[rank], others[rank], strict=True)]
        # As shares, since a step that is long for all has more noise, too.
        fractions = [
            difference / rest if rest > 0 else 0.0
            for difference, rest in zip(differences, others[rank], strict=True)
        ]
        late_fraction, noise = _median_and_sigma(fractions)
        # The standard error of a median is 1.25 sigma / sqrt(n).
        sure = num_sigmas * 1.2533 * noise / math.sqrt(num_steps)
        results.append(
            RankLateness(
                rank=rank,
                typical_s=statistics.median(rows[rank]),
                late_s=statistics.median(differences),
                late_fraction=late_fraction,
                noise_fraction=noise,
                is_straggler=late_fraction > max(min_fraction, sure),
                late_steps=tuple(
                    step
                    for step, fraction in enumerate(fractions)
                    if fraction > min_fraction
                    and fraction - late_fraction > max(num_sigmas * noise, min_fraction)
                ),
                last_fraction=sum(own == last for own, last in zip(rows[rank], latest, strict=True))
                / num_steps,
            )
        )

    # Cost: put the others' median in the place of what was late.
    def fair(each: RankLateness, step: int) -> float:
        own = rows[each.rank][step]
        late = each.is_straggler or step in each.late_steps
        return min(own, others[each.rank][step]) if late else own

    fair_latest = [max(fair(each, step) for each in results) for step in range(num_steps)]
    saved_s = math.fsum(latest) - math.fsum(fair_latest)
    return StragglerReport(
        ranks=tuple(results),
        step_s=math.fsum(latest) / num_steps,
        fair_step_s=math.fsum(fair_latest) / num_steps,
        wasted_rank_s=saved_s * len(ranks),
    )


def _median_and_sigma(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the standard deviation that the median absolute deviation stands for."""
    middle = statistics.median(values)
    return middle, MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)
