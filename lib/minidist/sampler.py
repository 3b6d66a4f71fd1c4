"""Which samples a rank sees, and data loaders for many ranks.

Phases of an epoch: every rank draws the same order of the whole data set (from seed and epoch,
without communication), pads or drops the tail if the length is not divisible by world_size, and
takes every world_size-th index.

>>> def indices(tail):
...     options = dict(world_size=3, shuffle=False, tail=tail)
...     return [list(DistributedSampler(7, rank=rank, **options)) for rank in range(3)]
>>> indices("pad")
[[0, 3, 6], [1, 4, 0], [2, 5, 1]]
>>> indices("drop")
[[0, 3], [1, 4], [2, 5]]
>>> indices("uneven")
[[0, 3, 6], [1, 4], [2, 5]]

    tail       every rank the same number   each sample once   use it for
    "pad"      yes                          some twice         training; torch's default
    "drop"     yes                          some never         training
    "uneven"   no                           yes                evaluation: an exact mean

With "uneven" the ranks take different numbers of batches: evaluate without collectives inside the
loop and reduce sums afterwards (minidist.metrics), or train under a join context.

A plain shuffled loader on each rank does not work: each walks through the whole data set, all in
one order if the ranks share a seed, else in orders that overlap by chance. Without `set_epoch`,
every epoch has the same order. torch-native: `torch.utils.data.DistributedSampler`, which has "pad"
and "drop" and gives the same indices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sized
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from minidist.datasets import EpochDataset, ShardedStream, listens, tell_epoch
from minidist.seeding import derive_seed
from minidist.unsupported import Unsupported

STREAMS = Unsupported(
    "DistributedSampler",
    "data sets without a length",
    instead="make_loader shares out an IterableDataset as a stream and resumes it",
)

Tail = Literal["pad", "drop", "uneven"]


class DistributedSampler(Sampler[int]):
    """Indices of the samples of one rank, in a new order each epoch.

    Args:
        dataset: anything with a length, or the length itself.
        rank, world_size: of the data-parallel group. Ranks that share one model (tensor, pipeline)
            must see the same samples, so pass `mesh.coordinate("dp")` and `mesh.size("dp")`.
        shuffle: draw a new order in every epoch; otherwise the order is 0, 1, 2, …
        seed: the same on every rank.
        tail: what to do if the length is not divisible by world_size; see above.

    Raises:
        ValueError: no such rank, or no such tail.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "pad",
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"DistributedSampler: rank must be in 0 … world_size - 1, got rank {rank} "
                f"of {world_size}"
            )
        if tail not in ("pad", "drop", "uneven"):
            raise ValueError(
                f'DistributedSampler: tail must be "pad", "drop" or "uneven", got {tail!r}'
            )
        self.num_samples = _length(dataset)
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.tail = tail
        self.epoch = 0
        self.num_consumed = 0

    def set_epoch(self, epoch: int, num_consumed: int = 0) -> None:
        """Choose the epoch, on every rank, before iterating.

        Args:
            num_consumed: to resume in the middle of an epoch: the number of samples of this epoch
                that all ranks together have trained on. The remaining samples are distributed
                again, so a different number of ranks may resume. Count in the training loop,
                because a loader's workers read ahead.
        """
        if epoch < 0 or num_consumed < 0:
            raise ValueError(
                f"set_epoch: must not be negative, got epoch={epoch}, num_consumed={num_consumed}"
            )
        self.epoch = epoch
        self.num_consumed = num_consumed

    def __iter__(self) -> Iterator[int]:
        # The same order on all ranks.
        order = list(range(self.num_samples))
        if self.shuffle:
            # A sum, not a hash, so that the order equals that of torch's sampler.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        rest = order[self.num_consumed :]
        # The tail.
        total = len(rest)
        if self.tail == "drop":
            total -= total % self.world_size
        if self.tail == "pad" and rest:
            total = math.ceil(total / self.world_size) * self.world_size
            rest = rest + (order * math.ceil(total / len(order)))[: total - len(rest)]
        # This rank's part.
        return iter(rest[self.rank : total : self.world_size])

    def __len__(self) -> int:
        left = max(0, self.num_samples - self.num_consumed)
        if self.tail == "drop":
            return left // self.world_size
        if self.tail == "pad":
            return math.ceil(left / self.world_size)
        return len(range(self.rank, left, self.world_size))


def _length(dataset: Any) -> int:
    if hasattr(dataset, "__index__") and not hasattr(dataset, "__len__"):
        return operator.index(dataset)  # also numpy's
    try:
        return len(dataset)
    except TypeError:
        raise STREAMS.error(
            f"{type(dataset).__name__} has no length, and an order of samples needs one"
        ) from None


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    world_size: int,
    train: bool = True,
    seed: int = 0,
    tail: Tail | None = None,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    pin_memory: bool | None = None,
    drop_last: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """A loader of this rank's samples with sensible settings; call `set_epoch` before each epoch.

    An `IterableDataset` is shared out as it comes (`minidist.datasets.ShardedStream`): it has no
    order to shuffle and no length, and its tail is "drop" for training, else "uneven".

    Args:
        dataset: `set_epoch` tells it the epoch, also in its workers, if it has a `set_epoch` or an
            `epoch` (then `loader.dataset` is a `minidist.datasets.EpochDataset` around it).
        batch_size: samples per rank and batch.
        rank, world_size: of the data-parallel group, as for `DistributedSampler`.
        train: True shuffles, gives every rank the same number of batches, and leaves out a smaller
            last batch (its samples would have more weight in the mean). False is for evaluation:
            in order, each sample once.
        num_workers: loading processes per rank; 0 loads in the training loop itself. All ranks of a
            node share its cores: more workers than cores / ranks per node do not help.
        prefetch_factor: batches that each worker loads ahead; torch's default is 2. Needs memory
            for num_workers x prefetch_factor batches per rank.
        persistent_workers: keep the workers between epochs, because starting them takes seconds;
            False frees their memory between epochs. None means True if there are workers.
        pin_memory: put batches into page-locked memory, so that a copy to a GPU can be asynchronous
            (`.to(device, non_blocking=True)`). None means True if there is a GPU.
        drop_last: leave out a smaller last batch; None means the value of `train`.

    Raises:
        ValueError: batch_size or num_workers out of range, or worker settings without workers.
    """
    _check_settings(batch_size, num_workers, prefetch_factor, persistent_workers)
    if persistent_workers is None:
        persistent_workers = num_workers > 0
    sampler = None
    if isinstance(dataset, IterableDataset):
        dataset = ShardedStream(
            dataset,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            seed=seed,
            tail=tail or ("drop" if train else "uneven"),
        )
    else:
        sampler = DistributedSampler(
            dataset,  # type: ignore[arg-type]
            rank=rank,
            world_size=world_size,
            shuffle=train,
            seed=seed,
            tail=tail or ("pad" if train else "uneven"),
        )
        if persistent_workers and listens(dataset):
            dataset = EpochDataset(dataset)
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent_workers,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        drop_last=train if drop_last is None else drop_last,
        collate_fn=collate_fn,
        # In worker i torch seeds `random`, numpy and itself from i and a number that it draws from
        # this generator. With equal numbers, worker i would augment in the same way on all ranks.
        generator=torch.Generator(),
    )
    set_epoch(loader, 0)
    return loader


def _check_settings(
    batch_size: int,
    num_workers: int,
    prefetch_factor: int | None,
    persistent_workers: bool | None,
) -> None:
    if batch_size < 1 or num_workers < 0:
        raise ValueError(
            "make_loader: batch_size must be at least 1 and num_workers at least 0, "
            f"got {batch_size} and {num_workers}"
        )
    if num_workers == 0 and (prefetch_factor is not None or persistent_workers):
        raise ValueError(
            "make_loader: prefetch_factor and persistent_workers need num_workers of at least 1, "
            f"got prefetch_factor={prefetch_factor}, persistent_workers={persistent_workers}, "
            "num_workers=0"
        )


def set_epoch(loader: DataLoader[Any], epoch: int, num_consumed: int = 0) -> None:
    """Choose the epoch of a `make_loader` loader: its order and its workers' random numbers.

    Both depend only on seed, rank and epoch, not on earlier epochs, so a resumed run draws the same
    numbers as an uninterrupted run. (Exception: persistent workers keep their generators between
    epochs, so their numbers are exact only in the first epoch after the loader was made. If this
    matters, draw from `derive_seed(seed, epoch, index)` in the data set.)

    The data set is told the epoch as well, also in workers that live on.
    """
    stream = isinstance(loader.dataset, ShardedStream)
    sampler: Any = loader.dataset if stream else loader.sampler
    if not isinstance(sampler, DistributedSampler | ShardedStream) or loader.generator is None:
        raise ValueError(f"set_epoch: wants a loader of make_loader, got one with {sampler!r}")
    sampler.set_epoch(epoch, num_consumed)
    if not stream:
        tell_epoch(loader.dataset, epoch)
    loader.generator.manual_seed(derive_seed(sampler.seed, "loader", sampler.rank, epoch))
