"""A rank that leaves the loop early is named on every rank, whatever the parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.cost.parallelism import ParallelismConfig
from minidist.errors import MismatchError
from minidist.launch import run
from minidist.mesh import make_mesh
from minidist.model import GPT, GPTConfig
from minidist.parallel.data import BucketedDDP, in_step, join
from minidist.parallel.data.join import _watch
from minidist.parallel.hybrid import HybridTrainer
from minidist.parallel.pipeline import PipelineExecutor, one_f_one_b, split_model
from minidist.parallel.zero import ShardedOptimizer, Zero2Optimizer, Zero3

KINDS = ("ddp", "zero1", "zero2", "zero3", "pipeline", "hybrid")


def stepper(kind: str) -> Any:
    """A function that takes one training step with a batch (4, 4)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    forward: Any = net
    params, sgd = list(net.parameters()), torch.optim.SGD
    if kind == "hybrid":
        config = GPTConfig(vocab_size=5, context=4, width=4, num_layers=1, num_heads=1)
        ranks = dist.get_world_size()
        plan = ParallelismConfig(dp=ranks, zero_stage=1)
        trainer = HybridTrainer(GPT(config), make_mesh(dp=ranks), plan, micro_batch=4)

        def train(x: Tensor) -> None:
            trainer.forward_backward(x.long().abs() % 5, x.long().abs() % 5)
            trainer.step()

        return train
    if kind == "pipeline":
        stage = split_model(net, dist.get_world_size())[dist.get_rank()]
        schedule = one_f_one_b(dist.get_world_size(), 2)
        pipeline = PipelineExecutor(stage, schedule, nn.functional.mse_loss)
        return lambda x: pipeline.step(x, x[:, :2])
    optimizer: Any = None
    match kind:
        case "ddp":
            forward, optimizer = BucketedDDP(net), sgd(params, lr=0.1)
        case "zero1":
            optimizer = ShardedOptimizer(params, sgd, average_gradients=True, lr=0.1)
        case "zero2":
            optimizer = Zero2Optimizer(params, sgd, lr=0.1)
        case _:
            Zero3(net, units=[net[0]])
            optimizer = sgd(params, lr=0.1)

    def train(x: Tensor) -> None:
        forward(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def batches(num: int, fails: bool = False) -> Iterator[Tensor]:
    yield from (torch.full((4, 4), float(i)) for i in range(num))
    if fails:
        raise OSError("a file is gone")


def uneven() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kind in KINDS:
        train = stepper(kind)
        own = 5 if rank == 1 else 3
        seen: list[Any] = []
        with pytest.raises(MismatchError) as caught:
            seen.extend(map(train, in_step(batches(own))))
        assert len(seen) == 3
        assert str(caught.value) == (
            f"[rank {rank}] in_step: after 3 steps the ranks are not in step: rank 0, 2: no batch; "
            "rank 1: a batch; give all ranks the same number of batches (drop_last=True), or use "
            'when_uneven="stop"'
        )
        for x in in_step(batches(own), when_uneven="stop"):
            train(x)
            seen.append(x)
        assert len(seen) == 6
        for x in in_step(batches(4)):
            train(x)
            seen.append(x)
        assert len(seen) == 10


def test_ranks_with_fewer_batches_are_named_and_nobody_hangs() -> None:
    run(uneven, 3)


def take(num: int, source: Iterator[Tensor]) -> None:
    """A loop that ends by `break` after some batches."""
    for i, _ in enumerate(source, 1):
        if i == num:
            break


def leaves() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    take(2, in_step(batches(5)))  # `break` on all ranks at once is no error
    # Data that fails on one rank, with its own error there.
    source = in_step(batches(2 + (rank == 0), fails=rank == 1), when_uneven="stop")
    with pytest.raises(OSError if rank == 1 else MismatchError, match=r"is gone|rank 1: its data"):
        list(source)
    # A part of the ranks; and nothing at all.
    alone = [dist.new_group([r]) for r in range(2)][rank]
    assert len(list(in_step(batches(1 + rank), alone))) == 1 + rank
    assert list(in_step([])) == []
    with pytest.raises(ValueError, match="when_uneven must be"):
        next(in_step([1], when_uneven="join"))
    zero2 = Zero2Optimizer([nn.Parameter(torch.ones(3))], torch.optim.SGD)
    for other in (Zero3(nn.Linear(2, 2)), nn.Linear(2, 2), zero2):
        block = join(other)
        with pytest.raises(TypeError, match=rf"got a \w+ on rank {rank} of 2 .*; iterate over in_"):
            block.__enter__()
    # `break` on one rank: last, because the group is of no use then.
    source = in_step(batches(5), when_uneven="stop")
    if rank == 1:
        take(2, source)
    else:
        with pytest.raises(MismatchError, match=r"after 2 steps .*rank 1: has left the loop"):
            list(source)


def leaves_after_this_step() -> None:
    """Another rank may have left its loop while this one's all-reduce is about to end."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    handle = Mock(is_completed=Mock(side_effect=[False] * 9 + [True]))
    with patch("minidist.parallel.data.join._POLL_S", 0.0):
        store.set("loop/0", "3")
        _watch(handle, 2, [0], "loop")
        assert handle.is_completed.call_count == 10
        store.set("loop/0", "2")
        with pytest.raises(MismatchError, match="rank 0: has left the loop"):
            _watch(Mock(is_completed=Mock(return_value=False)), 2, [0], "loop")


def test_a_rank_that_leaves_after_a_step_has_taken_part_in_it() -> None:
    run(leaves_after_this_step, 1)


def test_break_errors_of_data_groups_and_what_cannot_join() -> None:
    run(leaves, 2)
