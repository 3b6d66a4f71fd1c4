"""ZeRO-2 and -3: gradients are those of one process however the loss is made, and recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minidist.launch import run
from minidist.parallel.recompute import recompute
from minidist.parallel.zero import Zero2Optimizer, Zero3

Loss = Callable[[Any, Tensor], Tensor]


def make() -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 7))
    return nn.Sequential(nn.Linear(4, 7), inner, nn.Dropout(0.3), nn.Linear(7, 1)).double()


def data(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, 4, generator=generator, dtype=torch.double).requires_grad_()


def penalty(net: Any, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def output_and_penalty(net: Any, x: Tensor) -> Tensor:
    out = net(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + (gradient.norm(dim=1) - 1).square().sum()


def penalty_between_forwards(net: Any, x: Tensor) -> Tensor:
    first = net(x).mean()
    return penalty(net, x) + net(x * 2).mean() + first


def backward_with_a_graph(net: Any, x: Tensor) -> Tensor:
    out = net(x).square().mean()
    out.backward(create_graph=True)
    assert x.grad is not None
    return x.grad.square().sum()


def weights(net: Any, x: Tensor) -> Tensor:
    return net(x).mean() + sum(p.square().sum() for p in net.parameters())


def square(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean()


def two_outputs(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean() + net(x.flip(0)).mean()


LOSSES = (
    penalty,
    output_and_penalty,
    penalty_between_forwards,
    backward_with_a_graph,
    weights,
    square,
    two_outputs,
)


def again(net: Any, how: str) -> None:
    for block in (net[0], net[1], net[3]) if how == "ours" else ():
        recompute(block)
    for block in (net[1], net[3]) if how == "reentrant" else ():
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=True)


def change(kind: str, units: Callable[[Any], list[nn.Module]], how: str, loss: Loss) -> dict:
    """What a step of SGD with rate 1 takes away: the gradients."""
    net, rank = make(), dist.get_rank()
    again(net, how)
    zero = Zero3(net, units=units(net)) if kind == "zero3" else None
    sgd: Any = torch.optim.SGD
    optimizer = (
        sgd(net.parameters(), lr=1.0) if zero else Zero2Optimizer(net.parameters(), sgd, lr=1.0)
    )
    for step in range(2):  # the second step also shows what the first has left behind
        if step:
            optimizer.zero_grad()
        torch.manual_seed(7 + rank)
        loss(net, data(rank)).backward()
    optimizer.step()
    end = zero.full_state_dict() if zero else net.state_dict()
    return {name: value - end[name] for name, value in make().state_dict().items()}


def ranks() -> list[str]:
    dist.init_process_group("gloo")
    wrong = []
    splits = [lambda net: [net[0], net[1]], lambda net: [net[1][2], net[3]], lambda _: []]
    for loss in LOSSES:
        for how in ("none", "ours", "reentrant"):
            if how == "reentrant" and loss is not square:
                continue  # torch: no second derivatives through it
            alone = make()
            for rank in range(dist.get_world_size()):
                torch.manual_seed(7 + rank)
                if loss is backward_with_a_graph:
                    before = [p.grad for p in alone.parameters()]
                    for p in alone.parameters():
                        p.grad = None
                    loss(alone, data(rank)).backward()
                    for p, old in zip(alone.parameters(), before, strict=True):
                        assert p.grad is not None
                        p.grad = p.grad / dist.get_world_size() + (0 if old is None else old)
                else:
                    (loss(alone, data(rank)) / dist.get_world_size()).backward()
            for kind, units in [("zero2", splits[2]), *(("zero3", split) for split in splits)]:
                got = change(kind, units, how, loss)
                worst = max(
                    (got[n] - (0 if p.grad is None else p.grad)).abs().max()
                    for n, p in alone.named_parameters()
                )
                if not worst < 1e-9:
                    wrong.append(f"{loss.__name__}, {kind}, {how}: {worst}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_equal_one_process_however_the_loss_is_made(world_size: int) -> None:
    assert run(ranks, world_size) == [[]] * world_size
