"""Sums in the order of the ranks, bit by bit those of one process; a barrier that names ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist.collectives import monitored_barrier, ordered_all_reduce
from minidist.errors import DeadlineError
from minidist.launch import run
from minidist.parallel.data import BucketedDDP
from minidist.parallel.zero import Zero3, exchange

RANKS = 4


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 5)]
    return nn.Sequential(*layers)


def micro_batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def same_bits(how: str) -> list[bool]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, model = make(), make()
    zero = Zero3(model, units=list(model), deterministic=True) if how == "zero3" else None
    forward = BucketedDDP(model, deterministic=True, bucket_bytes=500) if how == "ddp" else model
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (alone, model)]
    for step in range(4):
        for r in range(RANKS):
            (alone(micro_batch(step, r)).exp().mean() / RANKS).backward()
        forward(micro_batch(step, rank)).exp().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got = model.state_dict() if zero is None else zero.full_state_dict()
    return [torch.equal(got[name], value) for name, value in alone.state_dict().items()]


@pytest.mark.parametrize("how", ["ddp", "zero3"])
def test_four_ranks_train_to_the_bits_of_one_process(how: str) -> None:
    for rank in run(same_bits, RANKS, how):
        assert rank == [True] * 6


def orders() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # 1 is lost next to 1e8 in float32, so the order shows: ((1e8 + 1) - 1e8) + 1 = 1.
    values = [1e8, 1.0, -1e8, 1.0]
    x = torch.full((5, 2), values[rank])
    ordered_all_reduce(x)
    assert x.unique().tolist() == [1.0]
    rows = torch.full((8,), values[rank])
    # As on NCCL, where rows are not sent one by one: a reduce-scatter may add in any order.
    exchange._direct = lambda *_: False
    exchange.reduce_scatter_single = None
    mean = exchange.reduce_rows(rows, [2] * 4, dist.group.WORLD, torch.float32, ordered=True)
    assert mean.wait().tolist() == [0.25, 0.25]
    half = dist.new_group([1, 3])
    y = torch.full((2,), float(rank))
    if rank in (1, 3):
        ordered_all_reduce(y, half)
        assert y.tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="not both"):
        BucketedDDP(make(), reduce=lambda flat: None, deterministic=True)


def test_the_order_is_that_of_the_ranks() -> None:
    run(orders, RANKS)


def barriers() -> str:
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for _ in range(3):
        monitored_barrier(timeout_s=20)
    pair = dist.new_group([0, 2])
    if rank != 1:
        monitored_barrier(pair, timeout_s=20)
        begin = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            monitored_barrier(timeout_s=8)
        assert time.monotonic() - begin < 22
        store.set(f"gave up/{rank}", "")
        return str(caught.value)
    store.wait(["gave up/0", "gave up/2"], timedelta(seconds=60))
    with pytest.raises(DeadlineError) as caught:
        monitored_barrier(timeout_s=20)
    return str(caught.value)


def test_a_barrier_names_the_ranks_that_are_missing() -> None:
    early, late, other = run(barriers, 3)
    for rank, text in ((0, early), (2, other)):
        assert text == (
            f"[rank {rank}] monitored_barrier: not all of the ranks [0, 1, 2] came within 8 s; "
            "missing: rank 1"
        )
    assert late.endswith("a rank came too late")
