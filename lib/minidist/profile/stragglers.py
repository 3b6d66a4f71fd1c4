"""Which ranks are late to the collectives, by how much, and what their lateness costs all ranks.

Synchronous training is as fast as its slowest rank: the other ranks wait inside the collective, and
a plain profile shows this wait as communication. So measure each rank's own work: the time from the
end of one collective to the arrival at the next collective.

Phases: time each rank's own work; gather the rows; compare each rank with the median of the *other*
ranks in the same step, so that a slowdown of all ranks cancels; decide with the median and the MAD
(median absolute deviation) of these differences, which a few unusual steps hardly change.

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

# Standard deviation / median absolute deviation, for a normal distribution.
MAD_TO_SIGMA = 1.4826


class ArrivalTimer:
    """Seconds of each `with` block.

    Args:
        synchronize: called at both ends of the block, so that the block includes a GPU's work:
            `torch.cuda.synchronize`.
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

    All rows are cut to the smallest number of steps of any rank.
    """
    rows: dict[int, list[float]] = {}
    for part in step_shares(timeline):
        rows.setdefault(part.rank if part.rank is not None else 0, []).append(part.compute_s)
    shortest = min(map(len, rows.values()), default=0)
    return {rank: row[:shortest] for rank, row in rows.items()}


@dataclass(frozen=True, kw_only=True)
class RankLateness:
    """One rank compared with the other ranks.

    Attributes:
        late_s: median over steps of (own time - median of the other ranks' times in this step).
        late_fraction: median over steps of this difference divided by the other ranks' median.
        is_straggler: the rank is late in general: late_fraction is above the noise and above
            min_fraction.
        late_steps: hiccups: steps in which the rank was much later than it usually is.
        last_fraction: share of the steps in which the rank was the slowest.
    """

    rank: int
    late_s: float
    late_fraction: float
    is_straggler: bool
    late_steps: tuple[int, ...]
    last_fraction: float


@dataclass(frozen=True, kw_only=True)
class StragglerReport:
    """All ranks, and the cost of the late ranks.

    Attributes:
        ranks: in order of rank.
        step_s: mean over steps of the slowest rank's time, which is the step time of all ranks.
        fair_step_s: the same mean, if in every step of a straggler and in every hiccup the rank
            took only the median time of the other ranks.
        wasted_rank_s: (step_s - fair_step_s) * number of steps * number of ranks.
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

    With two ranks there is no majority, and the slower rank counts as late.

    Args:
        rows: rank -> its own seconds in each step, before the collective; the same number of steps
            for every rank, without warm-up steps.
        min_fraction: a rank that is late by less than this share of the other ranks' time is not
            reported, even if the lateness is certain.
        num_sigmas: how many standard deviations a rank must be late. For `is_straggler` this is the
            standard error of the median over all steps, for `late_steps` the deviation of one step.

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
        # As fractions, because a step that is long for all ranks also has more noise.
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
                late_s=statistics.median(differences),
                late_fraction=late_fraction,
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

    # Cost: replace each late time by the median of the other ranks.
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
    """Median, and the standard deviation estimated from the median absolute deviation."""
    middle = statistics.median(values)
    return middle, MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)
