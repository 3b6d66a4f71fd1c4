"""Measure whether training waits for its data: wait time and compute time per batch.

A loader with workers runs in parallel to the training loop, so its own speed says little. The
important time is how long the loop waits in `next(loader)`. The time of the copy to the GPU is not
loading time.

`WatchedLoader` times the loop; `minidist.profile.loader_settings` compares settings and chooses.

Example::

    watched = WatchedLoader(loader)
    for batch in watched:
        train_step(batch)
    print(watched.report())

If making a batch takes L seconds and a step C seconds, then w workers make one batch every L/w
seconds, and the loop waits max(0, L/w - C) per batch. So w = L/C workers are enough, if there are
as many free cores. Without workers the loop always waits L.

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
    """A clock whose time changes only in `sleep`: for examples and tests."""

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
        num_batches: number of batches, including the first. The figures below, except first_wait_s,
            leave out the first batch if there are more, because it includes the workers' start.
        first_wait_s: wait for the first batch.
        wait_s, compute_s: means per batch.
        median_wait_s, worst_wait_s: per batch, because a mean hides a few long waits.
    """

    num_batches: int
    first_wait_s: float
    wait_s: float
    compute_s: float
    median_wait_s: float
    worst_wait_s: float

    @property
    def wait_fraction(self) -> float:
        """Share of the loop's time that is waiting for data, 0 to 1."""
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
    """Iterates over a loader and records, for each batch, the wait and the time of the loop's work.

    May be iterated several times (epochs); the records of all epochs are kept. The work on a batch
    ends when the loop asks for the next batch, or stops.

    Args:
        synchronize: called when the loop asks for the next batch. On a GPU pass
            `torch.cuda.synchronize`: otherwise the loop asks while the GPU still computes, and
            waits that run behind computation would count as waiting.
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
        asked_s = self._clock()  # before iter(), because iter() starts the workers
        for batch in self.loader:
            got_s = self._clock()
            self.wait_s.append(got_s - asked_s)
            try:
                yield batch
            finally:  # also if the loop ends with `break`: it has worked on this batch
                if self._synchronize is not None:
                    self._synchronize()
                asked_s = self._clock()
                self.compute_s.append(asked_s - got_s)

    def report(self) -> LoaderReport:
        """A report of the batches so far.

        Raises:
            ValueError: the loop has not worked on any batch yet.
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
