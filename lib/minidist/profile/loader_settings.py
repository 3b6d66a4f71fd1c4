"""Run the training loop with several loader settings in turn, and choose the settings that suffice.

Example::

    rows = compare_settings(
        lambda s: DataLoader(dataset, 32, **s.as_arguments()), train_step,
        [LoaderSettings(num_workers=w) for w in (0, 1, 2, 4)],
    )
    print(suggest(rows, cores=cores_per_rank(), on_gpu=True, batches_per_epoch=500))

>>> slow = SettingsRow(settings=LoaderSettings(), wait_s=0.3, compute_s=0.1, worst_wait_s=0.3,
...                    start_s=0.3)
>>> suggest([slow], cores=8).settings.num_workers       # 0.3 s to make a batch, 0.1 s to use it
3
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.processes.cores import num_cores
from minidist.profile.loader import LoaderReport, WatchedLoader


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Arguments of torch's DataLoader that decide whether it is fast enough."""

    num_workers: int = 0
    prefetch_factor: int | None = None  # batches ahead per worker; needs workers
    pin_memory: bool = False
    persistent_workers: bool = False

    def as_arguments(self) -> dict[str, Any]:
        """Arguments for `DataLoader(dataset, batch_size, **settings.as_arguments())`."""
        return {
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor if self.num_workers else None,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.persistent_workers and self.num_workers > 0,
        }


@dataclass(frozen=True, kw_only=True)
class SettingsRow:
    """The times of the loop with one choice of settings: medians over the rounds."""

    settings: LoaderSettings
    wait_s: float
    compute_s: float
    worst_wait_s: float
    start_s: float  # wait for the first batch

    @property
    def batch_s(self) -> float:
        return self.wait_s + self.compute_s


def compare_settings(
    make_loader: Callable[[LoaderSettings], Iterable[Any]],
    step: Callable[[Any], Any],
    settings: Sequence[LoaderSettings],
    *,
    num_batches: int = 50,
    rounds: int = 3,
    synchronize: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[SettingsRow]:
    """Run the training loop with each of the settings, in turn, round by round.

    Args:
        make_loader: returns a new loader with the given settings.
        step: the work on a batch.
        num_batches: largest number of batches per round and settings; at least 2, because the first
            batch does not count.
    """
    if num_batches < 2 or rounds < 1 or not settings:
        raise ValueError(
            f"compare_settings: wants settings, 2 batches and 1 round at least, got "
            f"{len(settings)} settings, {num_batches} batches, {rounds} rounds"
        )
    reports: dict[LoaderSettings, list[LoaderReport]] = {each: [] for each in settings}
    for _ in range(rounds):
        for each in reports:
            watched = WatchedLoader(make_loader(each), synchronize=synchronize, clock=clock)
            for count, batch in enumerate(watched, 1):
                step(batch)
                if count == num_batches:
                    break
            reports[each].append(watched.report())

    def middle(name: str, of: list[LoaderReport]) -> float:
        return statistics.median(getattr(report, name) for report in of)

    return [
        SettingsRow(
            settings=each,
            wait_s=middle("wait_s", of),
            compute_s=middle("compute_s", of),
            worst_wait_s=middle("worst_wait_s", of),
            start_s=middle("first_wait_s", of),
        )
        for each, of in reports.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Settings and the reasons for them."""

    settings: LoaderSettings
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.settings), *(f"- {reason}" for reason in self.reasons)])


def cores_per_rank(local_world_size: int | None = None) -> int:
    """Cores that one rank and its workers may use together; at least 1.

    Args:
        local_world_size: ranks on this node; None means torchrun's LOCAL_WORLD_SIZE, else 1.
    """
    if local_world_size is None:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, num_cores() // local_world_size)


def _why_persistent(row: SettingsRow, batches_per_epoch: int) -> str:
    epoch_s = batches_per_epoch * row.batch_s
    return (
        f"persistent_workers: starting them takes {row.start_s:.3g} s, "
        f"{row.start_s / (row.start_s + epoch_s):.0%} of an epoch"
    )


def suggest(
    rows: Sequence[SettingsRow],
    *,
    cores: int,
    on_gpu: bool = False,
    batches_per_epoch: int | None = None,
    tolerance: float = 0.03,
) -> Suggestion:
    """The cheapest settings that are about as fast as the fastest measured settings.

    Args:
        rows: of `compare_settings`. If a row has `num_workers=0`, `suggest` also computes how many
            workers would be enough, even if this number was not measured.
        cores: cores per rank: `cores_per_rank()`.
        on_gpu: whether batches are copied to a GPU.
        batches_per_epoch: batches between two starts of the workers if they do not persist.
        tolerance: how much slower cheaper settings may be, as a share of the fastest batch time.
    """
    if not rows or cores < 1:
        raise ValueError(f"suggest: wants measured rows and cores >= 1, got {len(rows)}, {cores}")
    reasons: list[str] = []

    # Among the rows about as fast as the fastest: the fewest workers, then the least prefetching.
    fastest = min(row.batch_s for row in rows)
    best = min(
        (row for row in rows if row.batch_s <= fastest * (1 + tolerance)),
        key=lambda row: (row.settings.num_workers, row.settings.prefetch_factor or 2),
    )
    workers, prefetch = best.settings.num_workers, best.settings.prefetch_factor
    share = best.wait_s / best.batch_s if best.batch_s else 0.0
    reasons.append(
        f"{workers} workers: {best.batch_s:.3g} s per batch, {share:.0%} of it waiting; "
        f"the fastest measured was {fastest:.3g} s"
    )

    # Suggest more workers than were measured, if that helps.
    alone = next((row for row in rows if row.settings.num_workers == 0), None)
    if alone is not None and share > tolerance and best.compute_s > 0:
        enough = math.ceil(alone.wait_s / best.compute_s)
        measured = max(row.settings.num_workers for row in rows)
        if enough > measured and cores > measured:
            workers = min(enough, cores)
            reasons.append(
                f"a batch takes {alone.wait_s:.3g} s to make and {best.compute_s:.3g} s to compute "
                f"on: {enough} workers would be enough; {workers} fit on {cores} cores; measure"
            )
        elif enough > cores:
            reasons.append(
                f"{enough} workers would be needed and there are {cores} cores per rank: make "
                "batches cheaper (preprocess once, store decoded, augment on the device)"
            )

    # Prefetching hides single slow batches, but not a slow average.
    if workers and best.compute_s > 0 and best.worst_wait_s > 2 * (best.wait_s + best.compute_s):
        deep = math.ceil((best.worst_wait_s + best.compute_s) / best.compute_s / workers) + 1
        if deep > (prefetch or 2):
            prefetch = deep
            reasons.append(
                f"prefetch_factor {deep}: single batches are {best.worst_wait_s:.3g} s late; costs "
                f"the memory of {deep * workers} batches"
            )
    if workers and batches_per_epoch:
        reasons.append(_why_persistent(best, batches_per_epoch))
    if on_gpu:
        reasons.append("pin_memory: with it .to(device, non_blocking=True) runs beside computation")
    return Suggestion(
        settings=LoaderSettings(
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            pin_memory=on_gpu,
            persistent_workers=workers > 0,
        ),
        reasons=tuple(reasons),
    )
