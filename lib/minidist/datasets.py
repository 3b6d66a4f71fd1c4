"""Data sets whose content depends on the epoch, and streams that ranks and workers share out.

A loader's workers get a copy of the data set when they start. What the training loop changes in it
later, such as the number of the epoch, does not reach workers that live on. So the epoch goes to
them through shared memory: `make_loader` wraps what listens to epochs, and `set_epoch` tells it.

A data set listens if it has a method `set_epoch(epoch)` or an attribute `epoch`, or if a data set
inside it has (`Subset`, `ConcatDataset`).

>>> stream = range(7)
>>> [list(ShardedStream(stream, rank=r, world_size=3, batch_size=1)) for r in range(3)]
[[0, 3], [1, 4], [2, 5]]
>>> [list(ShardedStream(stream, rank=r, world_size=3, batch_size=1, tail="uneven")) for r in (0, 1)]
[[0, 3, 6], [1, 4]]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from minidist.errors import named_rank
from minidist.unsupported import Unsupported

ONCE = Unsupported(
    "ShardedStream, make_loader",
    "streams that can be read only once (generators, open files)",
    instead="give an IterableDataset whose __iter__ begins anew",
)


def listens(dataset: Any) -> bool:
    """Whether the data set, or one inside it, can be told the epoch."""
    return (
        callable(getattr(dataset, "set_epoch", None))
        or isinstance(getattr(dataset, "epoch", None), int)
        or any(listens(each) for each in _inside(dataset))
    )


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` of the data set, or set its `epoch`; else of those inside it."""
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
        return
    if isinstance(getattr(dataset, "epoch", None), int):
        with contextlib.suppress(AttributeError):  # a property: the data set has its own way
            dataset.epoch = epoch
    for each in _inside(dataset):
        tell_epoch(each, epoch)


def _inside(dataset: Any) -> list[Any]:
    several = getattr(dataset, "datasets", ())
    several = several.values() if isinstance(several, dict) else several
    inside = [*several] if isinstance(several, Iterable) else []
    inside += [dataset.dataset] if hasattr(dataset, "dataset") else []
    return [each for each in inside if isinstance(each, Dataset)]


class EpochDataset(Dataset[Any]):
    """A data set whose copies in the workers learn the epoch before the next sample.

    All other attributes are those of the data set inside, `dataset`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._told = -1

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)
        self._tell()

    def _tell(self) -> None:
        epoch = int(self._epoch)
        if epoch != self._told:
            self._told = epoch
            tell_epoch(self.dataset, epoch)

    def __getitem__(self, index: Any) -> Any:
        self._tell()
        return self.dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        self._tell()
        several = getattr(self.dataset, "__getitems__", None)
        return several(indices) if several else [self.dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.dataset, name)


class ShardedStream(IterableDataset[Any]):
    """This rank's samples of a stream: sample i goes to rank i % world_size.

    The workers of a rank take its batches in turn, so the order does not depend on their number.
    Every process reads the whole stream and drops what is not its own.

    Args:
        stream: gives the same samples in the same order on every rank and in every worker, anew
            at each `iter`. It must not share itself out by rank. It cannot share itself out by
            worker, because `get_worker_info` gives None while it is read. It may listen to epochs,
            and be endless.
        rank, world_size: of the data-parallel group.
        batch_size: samples per rank and batch.
        tail: "drop" leaves out the last, incomplete round, so that every rank has the same number;
            "uneven" gives each sample once.

    Raises:
        ValueError: no such tail, a stream that is shared out already, or one that had samples in
            an earlier epoch and has none any more.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        seed: int = 0,
        tail: str = "drop",
    ) -> None:
        if tail not in ("drop", "uneven"):
            raise ValueError(
                f'ShardedStream: tail must be "drop" or "uneven", got {tail!r}; the end of a '
                "stream is not known before it is there"
            )
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"ShardedStream: rank must be in 0 … world_size - 1, got rank {rank} of "
                f"{world_size}"
            )
        if isinstance(stream, ShardedStream):
            raise ValueError(
                "ShardedStream: got a ShardedStream, whose parts would be shared out once more; "
                "give the stream itself (make_loader shares it out)"
            )
        self.stream, self.rank, self.world_size = stream, rank, world_size
        self._had = False  # this process has read samples of the stream
        self.batch_size, self.seed, self.tail = batch_size, seed, tail
        self._at = torch.zeros(2, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int, num_consumed: int = 0) -> None:
        """As `DistributedSampler.set_epoch`; reaches workers that live on, too."""
        if epoch < 0 or num_consumed < 0:
            raise ValueError(
                f"set_epoch: must not be negative, got epoch={epoch}, num_consumed={num_consumed}"
            )
        self._at.copy_(torch.tensor([epoch, num_consumed]))

    def __iter__(self) -> Iterator[Any]:
        epoch, num_consumed = self._at.tolist()
        tell_epoch(self.stream, epoch)
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        own: Any = None
        for number, sample in enumerate(islice(self._samples(), num_consumed, None)):
            turn, place = divmod(number, self.world_size)
            if turn // self.batch_size % num_workers != worker:
                continue
            own = sample if place == self.rank else own
            # With "drop", a sample waits until its round is complete.
            if place == (self.rank if self.tail == "uneven" else self.world_size - 1):
                yield own

    def _samples(self) -> Iterator[Any]:
        """All samples of the stream.

        `get_worker_info` gives None here: with it, a stream could leave out other workers' samples.
        """
        info, ended = torch_worker._worker_info, object()
        source: Iterator[Any] | None = None
        while True:
            torch_worker._worker_info = None
            try:
                began = source is None
                source = source or iter(self.stream)
                sample = next(source, ended)
            finally:
                torch_worker._worker_info = info
            if began and self._had and (sample is ended or self._is_used_up(source)):
                raise ONCE.error(
                    f"the stream, {type(self.stream).__name__}, was read before and does not begin "
                    f"anew on {named_rank()}"
                )
            if sample is ended:
                return
            self._had = True
            yield sample

    def _is_used_up(self, source: Iterator[Any]) -> bool:
        return source is self.stream and not isinstance(self.stream, IterableDataset)
