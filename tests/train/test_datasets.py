"""Data sets learn the epoch in workers that live on; streams are shared out and can be resumed."""

from __future__ import annotations

from collections import Counter
from itertools import chain, count, islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from minidist.datasets import EpochDataset, ShardedStream
from minidist.sampler import DistributedSampler, make_loader, set_epoch


class Attribute(Dataset):
    epoch = 0
    classes = ("a", "b")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, self.epoch])


class Method(Attribute):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Batched(Attribute):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


class Property(Dataset):
    """Its number of the epoch comes from elsewhere, so nobody can set it."""

    def __len__(self) -> int:
        return 6

    @property
    def epoch(self) -> int:
        return 7

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, self.epoch])


DATASETS: dict[str, Any] = {
    "attribute": Attribute,
    "method": Method,
    "batched": Batched,
    "subset": lambda: Subset(Subset(Attribute(), range(6)), range(6)),
    "concatenated": lambda: ConcatDataset([Subset(Attribute(), range(3)), Method()]),
}
WORKERS = [(0, None), (1, None), (2, None), (1, False)]


def epochs_seen(loader: Any) -> set[int]:
    return {int(epoch) for batch in loader for epoch in batch[:, 1]}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize(("num_workers", "persistent"), WORKERS)
def test_the_epoch_reaches_the_workers(kind, num_workers, persistent):
    dataset = DATASETS[kind]()
    loader = make_loader(
        dataset,
        2,
        rank=0,
        world_size=1,
        num_workers=num_workers,
        persistent_workers=persistent,
    )
    workers = []
    for epoch in (0, 1, 5, 2):
        set_epoch(loader, epoch)
        assert epochs_seen(loader) == {epoch}
        if loader.persistent_workers:
            workers.append({worker.pid for worker in loader._iterator._workers})  # type: ignore[attr-defined]
    assert all(pids == workers[0] for pids in workers)  # they do live on
    assert isinstance(loader.dataset, EpochDataset) == loader.persistent_workers
    # An epoch that was left early.
    set_epoch(loader, 3)
    next(iter(loader))
    set_epoch(loader, 4)
    assert epochs_seen(loader) == {4}


def test_what_does_not_listen_stays_as_it_is():
    plain = TensorDataset(torch.arange(6))
    loader = make_loader(plain, 2, rank=0, world_size=1, num_workers=1)
    assert loader.dataset is plain
    loader = make_loader(Property(), 2, rank=0, world_size=1)
    set_epoch(loader, 1)
    assert epochs_seen(loader) == {7}
    inside = Attribute()
    wrapped = make_loader(inside, 2, rank=0, world_size=1, num_workers=1).dataset
    assert wrapped.dataset is inside  # type: ignore[attr-defined]
    assert wrapped.classes == ("a", "b")  # type: ignore[attr-defined]
    assert len(wrapped) == 6  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- streams


class Stream(IterableDataset):
    """Numbers that depend on the epoch, in an order of the epoch."""

    epoch = 0

    def __init__(self, num: int | None) -> None:
        self.num = num

    def __iter__(self):
        numbers = range(self.num) if self.num is not None else count()
        return (1000 * self.epoch + i for i in numbers)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    ("world_size", "num_workers"), [(1, 0), (2, 0), (3, 0), (4, 0), (1, 3), (2, 1)]
)
def test_a_stream_is_shared_out_as_a_data_set_is(world_size, num_workers):
    for num in (0, 1, 3, 13, 24) if num_workers == 0 else (13,):  # processes take time
        for train in (True, False):
            for epoch, consumed in ((0, 0), (2, 2 * world_size)):
                got, wanted = [], []
                for rank in range(world_size):
                    options: Any = {"rank": rank, "world_size": world_size, "train": train}
                    loader = make_loader(Stream(num), 2, num_workers=num_workers, **options)
                    if num_workers and epoch:
                        batches(loader)  # the workers live on
                    set_epoch(loader, epoch, consumed)
                    got.append(batches(loader))
                    sampler = DistributedSampler(
                        num,
                        rank=rank,
                        world_size=world_size,
                        shuffle=False,
                        tail="drop" if train else "uneven",
                    )
                    sampler.set_epoch(epoch, consumed)
                    own = [1000 * epoch + i for i in sampler]
                    cut = [own[i : i + 2] for i in range(0, len(own), 2)]
                    wanted.append([each for each in cut if len(each) == 2 or not train])
                assert got == wanted, (num, train, epoch)
                if not train:
                    seen = Counter(i for rank in got for batch in rank for i in batch)
                    assert set(seen) == {1000 * epoch + i for i in range(consumed, num)}
                    assert set(seen.values()) <= {1}


@pytest.mark.parametrize(("old", "new", "steps"), [(2, 3, 2), (4, 2, 1), (3, 4, 2)])
def test_a_stream_goes_on_with_another_number_of_ranks(old, new, steps):
    seen = []
    for rank in range(old):
        stream = ShardedStream(range(24), rank=rank, world_size=old, batch_size=2)
        seen += list(islice(stream, 2 * steps))
    for rank in range(new):
        stream = ShardedStream(range(24), rank=rank, world_size=new, batch_size=2, tail="uneven")
        stream.set_epoch(0, 2 * steps * old)
        seen += list(stream)
    assert sorted(seen) == list(range(24))


def test_a_stream_without_end():
    loader = make_loader(Stream(None), 3, rank=1, world_size=2, num_workers=2)
    assert [batch.tolist() for batch in islice(loader, 3)] == [[1, 3, 5], [7, 9, 11], [13, 15, 17]]


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match=r'"drop" or "uneven", got \'pad\'; the end of a stream'):
        make_loader(Stream(3), 2, rank=0, world_size=2, tail="pad")
    with pytest.raises(ValueError, match="got rank 2 of 2"):
        ShardedStream(range(3), rank=2, world_size=2, batch_size=1)
    with pytest.raises(ValueError, match="epoch=0, num_consumed=-1"):
        set_epoch(make_loader(Stream(3), 2, rank=0, world_size=2), 0, -1)
    with pytest.raises(ValueError, match=r"Stream has no length.*make_loader shares out"):
        DistributedSampler(Stream(3), rank=0, world_size=1)  # type: ignore[arg-type]


class KnowsWorkers(IterableDataset):
    """Shares itself out among the workers, as torch's documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(begin, 20, step))


class KnowsWorkersLater(KnowsWorkers):
    """Asks only when the first sample is wanted."""

    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize("kind", [KnowsWorkers, KnowsWorkersLater])
def test_a_stream_that_knows_of_workers_is_not_shared_out_twice(kind):
    for num_workers in (0, 2):
        options: Any = {"world_size": 2, "train": False, "num_workers": num_workers}
        loaders = [make_loader(kind(), 2, rank=rank, **options) for rank in range(2)]
        assert sorted(i for loader in loaders for i in chain(*batches(loader))) == [*range(20)]


class HoldsGenerator(IterableDataset):
    def __init__(self) -> None:
        self.samples = (i for i in range(6))

    def __iter__(self):
        return self.samples


@pytest.mark.parametrize("make", [lambda: (i for i in range(6)), lambda: map(int, "012345")])
def test_a_stream_that_cannot_begin_anew_says_so(make):
    for stream in (make(), HoldsGenerator()):
        sharded = ShardedStream(stream, rank=0, world_size=2, batch_size=1)
        assert list(sharded) == [0, 2, 4]
        with pytest.raises(ValueError, match="read before and does not begin anew"):
            list(sharded)
    left_early = ShardedStream(make(), rank=0, world_size=1, batch_size=1)
    assert list(islice(left_early, 2)) == [0, 1]
    with pytest.raises(ValueError, match="only once"):
        list(left_early)
    empty = ShardedStream([], rank=0, world_size=1, batch_size=1)
    assert list(empty) == list(empty) == []


def test_a_stream_is_shared_out_once():
    stream = ShardedStream(range(6), rank=0, world_size=2, batch_size=1)
    with pytest.raises(ValueError, match="give the stream itself"):
        make_loader(stream, 1, rank=0, world_size=2)
