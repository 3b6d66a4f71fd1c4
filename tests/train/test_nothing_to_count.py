"""Micro-batches and ranks without a token: their nan reaches no gradient, in any engine."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.launch import run
from minidist.parallel.accumulation import accumulate, accumulate_step
from minidist.parallel.data import BucketedDDP, convert_sync_batch_norm
from minidist.parallel.zero import ShardedOptimizer, Zero2Optimizer, Zero3
from minidist.precision import GradScaler

CLASSES, MICRO = 5, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class WithLoss(Net):
    """The mean over nothing is inside the model."""

    def forward(self, batch: Any) -> torch.Tensor:
        return masked_mean(super().forward, batch)


def masked_mean(model, batch):
    x, targets = batch
    keep = (targets != -100).double()
    each = F.cross_entropy(model(x), targets.clamp(min=0), reduction="none")
    return (each * keep).sum() / keep.sum()


def selected(model, batch):
    x, targets = batch
    return F.cross_entropy(model(x)[targets != -100], targets[targets != -100])


def logarithm(model, batch):
    """inf in the loss, and inf * 0 in its gradient."""
    x, targets = batch
    keep = (targets != -100).double()
    each = F.cross_entropy(model(x), targets.clamp(min=0), reduction="none")
    return (each * keep).sum() / keep.sum() + torch.log(keep.mean()) - torch.log(keep.mean())


def inside(model, batch):
    return model(batch)


LOSSES = {fn.__name__: fn for fn in (masked_mean, selected, logarithm, inside)}
ENGINES = ("bucketed", "torch DDP", "zero1", "zero2", "zero3")
SCALERS = ("none", "ours", "torch")


def make(loss: str) -> nn.Module:
    torch.manual_seed(0)
    net = (WithLoss() if loss == "inside" else Net()).double()
    net.norm.eval()  # as in one process whatever the batch
    net.norm.train = lambda mode=True: net.norm
    return net


def micro_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The last rank has nothing but the first micro-batch; rank 1 has nothing at all."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(MICRO, 4, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, (MICRO, 4), generator=generator)
    targets[1:, 1:] = -100
    targets[1 + rank % 2 :] = -100
    if rank == 1:
        targets[:] = -100
    return list(zip(x, targets, strict=True))


def step(engine: str, loss: str, scaling: str) -> tuple[dict[str, torch.Tensor], float]:
    net, zero = make(loss), None
    model: Any = net
    group = dist.group.WORLD
    if engine == "bucketed":
        model = BucketedDDP(net)
    if engine == "torch DDP":
        model = nn.parallel.DistributedDataParallel(net)
    if engine == "zero3":
        zero = Zero3(net, units=[net.first])
    if engine in ("zero1", "zero2"):
        kind = ShardedOptimizer if engine == "zero1" else Zero2Optimizer
        options = {"average_gradients": True} if engine == "zero1" else {}
        optimizer: Any = kind(net.parameters(), torch.optim.SGD, lr=1.0, **options)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler: Any = None
    if scaling == "ours":
        scaler = GradScaler(init_scale=8.0, group=group)
    if scaling == "torch":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    batches = micro_batches(dist.get_rank())
    weights = [float((t != -100).sum()) for _, t in batches]
    done = accumulate_step(
        model, batches, LOSSES[loss], optimizer, weights=weights, scaler=scaler, max_norm=1e9
    )
    values = zero.full_state_dict() if zero else net.state_dict()
    return {name: value.clone() for name, value in values.items()}, done.loss.item()


def ranks():
    dist.init_process_group("gloo")
    found = {}
    for engine in ENGINES:
        for loss in LOSSES:
            for scaling in SCALERS:
                if scaling == "torch" and engine.startswith("zero"):
                    continue  # refused: see test_clipping_and_scaling
                if (engine, loss) == ("zero3", "inside"):
                    continue
                found[engine, loss, scaling] = step(engine, loss, scaling)
    dist.barrier()
    dist.destroy_process_group()
    return found


@cache
def oracle(loss: str, world_size: int) -> tuple[dict[str, torch.Tensor], float]:
    net = make(loss)
    parts = [each for rank in range(world_size) for each in micro_batches(rank)]
    x, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    value = LOSSES["masked_mean" if loss == "logarithm" else loss](net, (x, targets))
    value.backward()
    optimizer.step()
    return net.state_dict(), value.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_micro_batch_of_weight_0_adds_nothing(world_size):
    results = run(ranks, world_size, deadline_s=200)
    for case in results[0]:
        expected, loss = oracle(case[1], world_size)
        assert sum(each[case][1] for each in results) / world_size == pytest.approx(loss)
        for each in results:
            for name, value in each[case][0].items():
                torch.testing.assert_close(
                    value,
                    expected[name],
                    rtol=1e-9,
                    atol=1e-12,
                    check_dtype=False,
                    msg=lambda m, at=(case, name): f"{at}: {m}",
                )


def collectives_inside():
    """SyncBatchNorm adds up gradients over the ranks, so no nan may pass through it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = convert_sync_batch_norm(Net().double())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    batches = micro_batches(dist.get_rank())[:1]
    weights = [float((t != -100).sum()) for _, t in batches]
    accumulate_step(BucketedDDP(net), batches, masked_mean, optimizer, weights=weights)
    dist.barrier()
    dist.destroy_process_group()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_rank_of_weight_0_does_not_spoil_sync_batch_norm(world_size):
    torch.manual_seed(0)
    net = Net().double()
    parts = [micro_batches(rank)[0] for rank in range(world_size)]
    x, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    masked_mean(net, (x, targets)).backward()
    for each in run(collectives_inside, world_size, deadline_s=60):
        for name, p in net.named_parameters():
            torch.testing.assert_close(each[name], p.detach() - p.grad, rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------------------------- nesting


def nested():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(4, 1).double()
    batches = [torch.full((1, 4), rank + i + 1.0, dtype=torch.float64) for i in range(4)]
    found = {}
    for name, wrap in (("ours", BucketedDDP), ("torch", nn.parallel.DistributedDataParallel)):
        ddp = wrap(net)
        net.zero_grad()
        flags = []
        for outer, _ in accumulate([batches[:2], batches[2:]], ddp):
            for x, is_last in accumulate(outer, ddp):
                flags.append(is_last)
                ddp(x).sum().backward()
        found[name] = flags, net.weight.grad.clone()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        refusing = pytest.raises(ValueError, match=rf"inside no_sync\(\) on rank {rank} of")
        with refusing, ddp.no_sync(), contextlib.nullcontext():
            accumulate_step(ddp, batches, lambda m, x: m(x).sum(), optimizer)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_nested_accumulation_synchronises_once():
    for each in run(nested, 2):
        for flags, grad in each.values():
            assert flags == [False, False, False, True]
            assert grad.tolist() == [[(1 + 2 + 3 + 4 + 2 + 3 + 4 + 5) / 2] * 4]
