"""Samplers, loaders and seeding."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from minidist.launch import run
from minidist.sampler import DistributedSampler, make_loader, set_epoch
from minidist.seeding import derive_seed, get_rng_state, seed_all, seeded, set_rng_state


def samplers(num, world_size, **options):
    return [
        DistributedSampler(num, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


@settings(derandomize=True, max_examples=80, deadline=None)
@given(
    num=st.integers(0, 40),
    world_size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
)
def test_what_each_tail_promises(num, world_size, shuffle, seed, epoch):
    for tail in ("pad", "drop", "uneven"):
        ranks = samplers(num, world_size, shuffle=shuffle, seed=seed, tail=tail)
        for sampler in ranks:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in ranks]
        assert [len(part) for part in parts] == [len(sampler) for sampler in ranks]
        every = [i for part in parts for i in part]
        if tail == "uneven":
            assert sorted(every) == list(range(num))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            continue
        assert len({len(part) for part in parts}) == 1
        if tail == "drop":
            assert len(every) == len(set(every)) == num - num % world_size
        else:
            assert set(every) == set(range(num))
            assert len(every) - num < world_size
        if num > 0:  # torch's sampler divides by zero without samples
            for rank, part in enumerate(parts):
                peer = TorchSampler(
                    range(num), world_size, rank, shuffle, seed, drop_last=tail == "drop"
                )
                peer.set_epoch(epoch)
                if not (tail == "drop" and num < world_size):
                    assert part == list(peer)


def test_epochs_differ_and_ranks_agree():
    ranks = samplers(20, 3)
    first = [list(s) for s in ranks]
    assert [list(s) for s in ranks] == first
    for s in ranks:
        s.set_epoch(1)
    second = [list(s) for s in ranks]
    assert second != first
    assert {i for part in second for i in part} == set(range(20))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    num=st.integers(1, 40), old=st.integers(1, 5), new=st.integers(1, 5), steps=st.integers(0, 8)
)
def test_resuming_in_an_epoch_with_another_number_of_ranks(num, old, new, steps):
    """Two samples per rank and step; the new ranks see exactly what the old ones had not."""
    before = [list(s) for s in samplers(num, old, tail="uneven")]
    seen = [i for part in before for i in part[: 2 * steps]]
    ranks = samplers(num, new, tail="uneven")
    for s in ranks:
        s.set_epoch(0, num_consumed=len(seen))
    rest = [i for s in ranks for i in s]
    assert sorted(seen + rest) == list(range(num))
    assert [len(list(s)) for s in ranks] == [len(s) for s in ranks]
    if new == old:
        assert [list(s) for s in ranks] == [part[2 * steps :] for part in before] or (
            len(seen) % old
        )


def test_wrong_arguments():
    for rank, world_size in ((3, 3), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"got rank {rank} of {world_size}"):
            DistributedSampler(5, rank=rank, world_size=world_size)
    with pytest.raises(ValueError, match="got 'half'"):
        DistributedSampler(5, rank=0, world_size=1, tail="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch=-1"):
        DistributedSampler(5, rank=0, world_size=1).set_epoch(-1)
    data = TensorDataset(torch.arange(5))
    with pytest.raises(ValueError, match="got 0 and 0"):
        make_loader(data, 0, rank=0, world_size=1)
    for setting in ({"prefetch_factor": 4}, {"persistent_workers": True}):
        with pytest.raises(ValueError, match="need num_workers of at least 1"):
            make_loader(data, 2, rank=0, world_size=1, **setting)
    with_workers = make_loader(data, 2, rank=0, world_size=1, num_workers=1)
    assert with_workers.persistent_workers
    fresh = make_loader(data, 2, rank=0, world_size=1, num_workers=1, persistent_workers=False)
    assert not fresh.persistent_workers
    with pytest.raises(ValueError, match="make_loader"):
        set_epoch(torch.utils.data.DataLoader(data), 1)


class Noise(Dataset):
    """What the three generators draw in the process that loads."""

    def __init__(self, num=12):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        return torch.tensor([i, random.random(), np.random.rand(), torch.rand(()).item()]).double()


def test_loaders_cover_the_data_and_their_workers_draw_different_numbers():
    drawn = {}
    for rank in range(2):
        for _ in range(2):  # making it again gives the same
            loader = make_loader(Noise(), 2, rank=rank, world_size=2, num_workers=2, seed=3)
            rows = torch.cat(list(loader))
            assert rows.shape == (6, 4)
            if rank in drawn:
                torch.testing.assert_close(rows, drawn[rank], rtol=0, atol=0)
            drawn[rank] = rows
            assert loader.persistent_workers
    every = torch.cat([drawn[0], drawn[1]])
    assert sorted(every[:, 0].tolist()) == list(range(12))
    for column in (1, 2, 3):  # no two workers of any rank draw the same
        assert len(set(every[:, column].tolist())) == 12
    loader = make_loader(Noise(), 2, rank=0, world_size=2, num_workers=1, seed=3)
    set_epoch(loader, 1)
    other = torch.cat(list(loader))
    assert other[:, 0].tolist() != drawn[0][:, 0].tolist()
    assert not set(other[:, 1].tolist()) & set(every[:, 1].tolist())


def test_loaders_for_training_and_evaluation():
    data = TensorDataset(torch.arange(11))
    train = [make_loader(data, 2, rank=r, world_size=3) for r in range(3)]
    batches = [[b[0].tolist() for b in loader] for loader in train]
    assert [[len(b) for b in own] for own in batches] == [[2, 2]] * 3
    evaluation = [make_loader(data, 2, rank=r, world_size=3, train=False) for r in range(3)]
    batches = [[b[0].tolist() for b in loader] for loader in evaluation]
    assert batches == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8]]]
    assert evaluation[0].pin_memory == torch.cuda.is_available()
    set_epoch(evaluation[0], 0, num_consumed=6)
    assert [b[0].tolist() for b in evaluation[0]] == [[6, 9]]


# ------------------------------------------------------------------------------------- seeding


def draw():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_seeds_differ_by_every_part():
    seeds = {
        derive_seed(s, *parts) for s in range(20) for parts in ((), (0,), (1,), ("1",), (0, 1))
    }
    assert len(seeds) == 100
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed(0, 1) == 8460089376201537895  # the same on every machine


def test_state_of_all_generators_is_saved_and_restored():
    seed_all(5)
    random.gauss(0, 1)  # both keep a second number for later
    np.random.randn()
    state = get_rng_state()
    file = io.BytesIO()
    torch.save(state, file)
    first = (random.gauss(0, 1), draw(), draw())
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert (random.gauss(0, 1), draw(), draw()) == first
    with pytest.raises(ValueError, match="CUDA devices"):
        set_rng_state({**state, "cuda": [torch.zeros(1)] * 99})


def test_a_seeded_block_leaves_no_trace():
    seed_all(5)
    expected = draw()
    seed_all(5)
    with seeded(9, "init"):
        inside = draw()
    assert draw() == expected
    seed_all(9, "init")
    assert draw() == inside


def init_then_dropout():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_all(0)
    model = nn.Linear(4, 4)
    seed_all(0, rank)
    mask = nn.functional.dropout(torch.ones(64), 0.5)
    with seeded(0, "again"):
        again = nn.Linear(4, 4)
    dist.barrier()
    dist.destroy_process_group()
    return model.weight.detach(), mask, again.weight.detach()


def test_same_initialisation_and_different_dropout():
    ranks = run(init_then_dropout, 3)
    for weight, _, again in ranks[1:]:
        torch.testing.assert_close(weight, ranks[0][0], rtol=0, atol=0)
        torch.testing.assert_close(again, ranks[0][2], rtol=0, atol=0)
    masks = {tuple(mask.tolist()) for _, mask, _ in ranks}
    assert len(masks) == 3


def test_numpys_and_torchs_integers_are_integers():
    assert [*DistributedSampler(np.int64(5), rank=1, world_size=2, shuffle=False)] == [1, 3, 0]
    for two in (np.int64(2), np.uint8(2), torch.tensor(2)):
        assert derive_seed(1, two) == derive_seed(1, 2)
