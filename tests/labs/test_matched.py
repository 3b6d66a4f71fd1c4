"""Ranks that begin different collectives are told so, each with what all of them called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autograder.criteria.criterion import Context
from autograder.criteria.lab1_ddp import matched
from minidist.launch import run


def step(tensors: list[torch.Tensor]) -> None:
    """What a student wrote: an all-reduce for each tensor."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def told(*tensors: list[torch.Tensor]) -> str:
    """What this rank is told when each rank reduces its own of these lists; "" if nothing."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with matched.matched_collectives(step, Context(rank, len(tensors), torch.device("cpu"))):
        try:
            step(tensors[rank])
        except matched.DifferentCollectivesError as error:
            return str(error)
    return ""


BEGAN = (
    "the ranks began different collectives, call {} since the wrapping (the last ones of each): "
)
ALL = "all_reduce of {} × float32".format


def of_sizes(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_who_calls_the_same_notices_nothing(n):
    assert run(told, n, *[of_sizes(8, 4, 4, 2)] * n) == [""] * n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_rank_is_told_what_each_calls(n):
    """The last rank's second call has another size."""
    said = [f"rank {rank}: {ALL(8)}, {ALL(4)}" for rank in range(n - 1)]
    said.append(f"rank {n - 1}: {ALL(8)}, {ALL(2)}")
    got = run(told, n, *[of_sizes(8, 4)] * (n - 1), of_sizes(8, 2))
    assert got == [BEGAN.format(2) + "; ".join(said)] * n


def test_a_rank_that_calls_nothing_more_is_named():
    said = f"rank 0: {ALL(8)}, {ALL(4)}; rank 1: {ALL(8)}, nothing more"
    assert run(told, 2, of_sizes(8, 4), of_sizes(8)) == [BEGAN.format(2) + said, ""]


def test_dtypes_count():
    said = f"rank 0: {ALL(4)}; rank 1: all_reduce of 4 × float64"
    assert run(told, 2, of_sizes(4), [torch.ones(4).double()]) == [BEGAN.format(1) + said] * 2
