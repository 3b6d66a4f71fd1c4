"""Does training wait for its data? Time waiting for a batch beside time computing on it.

A loader with workers runs beside the training loop, so it cannot be judged alone: what counts is
how long the loop stands still in `next(loader)`. Timing the copy to the GPU measures the copy.

`WatchedLoader` times the loop; `minidist.profile.loader_settings` compares settings and chooses.

Example::

    watched = WatchedLoader(loader)
    for batch in watched:
        train_step(batch)
    print(watched.report())

With a batch that takes L seconds to make and a step of C seconds, w workers make one every L/w
seconds, so the loop waits max(0, L/w - C) per batch: w = L/C workers are enough, if there are as
many free cores. Without workers it waits L, always.

>>> clock = FakeClock()                     # loading takes 3 s, computing 1 s
>>> batches = (clock.sleep(3) for _ in range(4))
>>> watched = WatchedLoader(batches, clock=clock)
>>> for batch in watched:
...     clock.sleep(1)
>>> print(watched.report())
4 batches: 75% of the time waiting for data (3 s of 4 s per batch): the loader is the bottleneck
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


class FakeClock:
    """A clock that stands still unless told to sleep: for examples and tests."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """Where the time of the loop went.

    Attributes:
        num_batches: batches counted, the first one left out where there are more: it pays for the
            start of the workers.
        first_wait_s: what the first batch took to come.
        wait_s, compute_s: per batch, the mean.
        median_wait_s, worst_wait_s: per batch: a mean of a few long waits looks harmless.
    """

    num_batches: int
    first_wait_s: float
    wait_s: float
    compute_s: float
    median_wait_s: float
    worst_wait_s: float

    @property
    def wait_fraction(self) -> float:
        """Share of the loop's time in which it waits for data, 0 to 1."""
        whole_s = self.wait_s + self.compute_s
        return self.wait_s / whole_s if whole_s else 0.0

    def is_bottleneck(self, threshold: float = 0.05) -> bool:
        """Whether the loop waits for more than this share of its time."""
        return self.wait_fraction > threshold

    def __str__(self) -> str:
        verdict = "the loader is the bottleneck" if self.is_bottleneck() else "the loader keeps up"
        return (
            f"{self.num_batches} batches: {self.wait_fraction:.0%} of the time waiting for data "
            f"({self.wait_s:.3g} s of {self.wait_s + self.compute_s:.3g} s per batch): {verdict}"
        )


class WatchedLoader:
    """Iterates over a loader and notes how long each batch was waited for and worked on.

    May be iterated several times (epochs); times add up. The last batch's work ends when the loop
    asks for another one.

    Args:
        synchronize: called when the loop comes back for the next batch. On a GPU give
            `torch.cuda.synchronize`: otherwise the loop comes back while the GPU still computes,
            and what is called waiting would really be hidden behind computation.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        synchronize: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loader = loader
        self.wait_s: list[float] = []
        self.compute_s: list[float] = []
        self._synchronize, self._clock = synchronize, clock

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        asked_s = self._clock()  # before iter(): that is what starts the workers
        for batch in self.loader:
            got_s = self._clock()
            self.wait_s.append(got_s - asked_s)
            try:
                yield batch
            finally:  # a loop that breaks off has worked on this batch, too
                if self._synchronize is not None:
                    self._synchronize()
                asked_s = self._clock()
                self.compute_s.append(asked_s - got_s)

    def report(self) -> LoaderReport:
        """What has been seen so far.

        Raises:
            ValueError: no batch has been worked on.
        """
        pairs = list(zip(self.wait_s, self.compute_s, strict=False))
        if not pairs:
            raise ValueError("WatchedLoader: no batch has come yet, so there is nothing to report")
        counted = pairs[1:] or pairs
        waits = [wait for wait, _ in counted]
        return LoaderReport(
            num_batches=len(pairs),
            first_wait_s=pairs[0][0],
            wait_s=statistics.fmean(waits),
            compute_s=statistics.fmean(compute for _, compute in counted),
            median_wait_s=statistics.median(waits),
            worst_wait_s=max(waits),
        )
