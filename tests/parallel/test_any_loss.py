"""BucketedDDP averages however the loss was made, and whatever changed after wrapping."""

from __future__ import annotations

import copy
import pickle
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidist.errors import MinidistError
from minidist.launch import run
from minidist.parallel.data import BucketedDDP, OverlappedDDP

WORLDS = [1, 2, 3, 4]
OPTIONS = {
    "small buckets": {"bucket_bytes": 200, "first_bucket_bytes": 0},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"bucket_bytes": 200, "find_unused": True},
}


class Net(nn.Module):
    """`reentrant`: parts under checkpointing; `other` is used by losses only, `never` by none."""

    def __init__(self, reentrant: bool | None = None, shared: bool = False) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))
        self.last, self.other, self.never = nn.Linear(4, 2), nn.Linear(4, 1), nn.Linear(2, 2)
        self.reentrant, self.shared = reentrant, shared
        self.double()

    def part(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def compute(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(layer(x))

        if self.reentrant is None:
            return compute(x)
        return checkpoint(compute, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(self.a, self.first(x))
        return self.last(self.part(self.a if self.shared else self.b, x))


class Answer:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Opaque(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return Answer(super().forward(x))


def penalty(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


# Each takes (what to call, the module, x) and runs its backwards.
def only_penalty(call, net, x):
    penalty(call(x), x).backward()


def output_and_penalty(call, net, x):
    out = call(x)
    (out.square().mean() + penalty(out, x)).backward()


def second_penalty(call, net, x):
    (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    curve.square().sum().backward()


def sub_module(call, net, x):
    net.other(x).square().mean().backward()


def output_and_sub_module(call, net, x):
    (call(x).square().mean() + net.other(torch.tanh(net.first(x))).square().mean()).backward()


def weights_alone(call, net, x):
    (x.detach().sum() * sum(p.square().sum() for p in net.parameters())).backward()


def opaque(call, net, x):
    call(x).y.square().mean().backward()


def opaque_and_penalty(call, net, x):
    penalty(call(x).y, x).backward()


def two_backwards(call, net, x):
    out = call(x)
    out[:, 0].square().mean().backward(retain_graph=True)
    out[:, 1].exp().mean().backward()


def backward_then_penalty(call, net, x):
    out = call(x)
    out.square().mean().backward(retain_graph=True)
    penalty(out, x).backward()


def some_inputs(call, net, x):
    call(x).square().mean().backward(inputs=[net.a.weight, net.last.bias])


def one_rank_looks(call, net, x):
    out = call(x)
    if dist.is_initialized() and dist.get_rank() == 0:
        torch.autograd.grad(out.sum(), [x, net.a.weight], retain_graph=True)
    out.square().mean().backward()


def output(call, net, x):
    call(x).square().mean().backward()


def checkpointed_sub_module(call, net, x):
    net.part(net.a, x).square().mean().backward()


LOSSES = {
    fn.__name__: (fn, Net)
    for fn in (
        only_penalty,
        output_and_penalty,
        second_penalty,
        sub_module,
        output_and_sub_module,
        weights_alone,
        two_backwards,
        backward_then_penalty,
        some_inputs,
        one_rank_looks,
    )
} | {fn.__name__: (fn, Opaque) for fn in (opaque, opaque_and_penalty)}
for _reentrant in (False, True):
    for _shared in (False, True):
        LOSSES[f"checkpointed, {_reentrant=}, {_shared=}"] = (
            output,
            partial(Net, _reentrant, _shared),
        )
LOSSES["checkpointed sub-module, reentrant"] = (checkpointed_sub_module, partial(Net, True))


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def data(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in net.named_parameters()
    }


@cache
def oracle(name: str, world_size: int, step: int) -> dict[str, torch.Tensor]:
    """The mean over the batches of all ranks, in one process."""
    loss, make = LOSSES[name]
    total: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        net = seeded(make)
        loss(net, net, data(rank, step))
        for name, grad in gradients(net).items():
            total[name] = total.get(name, 0) + grad / world_size
    return total


def ranks():
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, (loss, make) in LOSSES.items():
        for how, options in OPTIONS.items():
            ddp = BucketedDDP(seeded(make), **options)
            steps = []
            for step in range(3):  # the second has new buckets, the third accumulates under no_sync
                ddp.zero_grad()
                if step == 2:
                    with ddp.no_sync(), ddp.no_sync():
                        loss(ddp, ddp.module, data(rank, 0))
                loss(ddp, ddp.module, data(rank, step))
                steps.append(gradients(ddp.module))
            found[name, how] = steps
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_are_means_however_the_loss_was_made(world_size):
    for rank, found in enumerate(run(ranks, world_size, deadline_s=240)):
        for (name, how), steps in found.items():
            for step, got in enumerate(steps):
                expected = oracle(name, world_size, step)
                if step == 2:
                    first = oracle(name, world_size, 0)
                    expected = {key: value + first[key] for key, value in expected.items()}
                torch.testing.assert_close(
                    got,
                    expected,
                    rtol=1e-9,
                    atol=1e-12,
                    msg=lambda m, at=(rank, name, how, step): f"{at}: {m}",
                )


# ------------------------------------------------------------------------ changes after wrapping


def converted():
    """.to(dtype), storage replaced and frozen layers between wrapping, forwards and backwards."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for dtype in (torch.float64, torch.bfloat16):
        for views in (False, True):
            for when in ("before forward", "before backward", "between steps"):
                net = seeded(Net).float()
                ddp = BucketedDDP(net, bucket_bytes=200, gradient_as_bucket_view=views)
                if when == "between steps":
                    ddp(data(rank, 7).float()).square().mean().backward()
                    ddp.zero_grad(set_to_none=views)
                if when != "before backward":
                    ddp.to(dtype)
                x = data(rank, 0).detach().to(net.first.weight.dtype)
                loss = ddp(x).square().mean()
                if when == "before backward":
                    for p in net.parameters():
                        p.data = p.data.clone()
                loss.backward()
                assert all(p.grad.dtype == p.dtype for p in net.parameters())
                found[str(dtype), views, when] = gradients(net)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_model_may_change_its_dtype_after_wrapping(world_size):
    for found in run(converted, world_size, deadline_s=120):
        for (dtype, _views, when), got in found.items():
            kind = getattr(torch, dtype.removeprefix("torch."))
            kind = torch.float32 if when == "before backward" else kind
            net = seeded(Net).float().to(kind).double()
            for rank in range(world_size):
                (net(data(rank, 0)).square().mean() / world_size).backward()
            exact = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[kind]
            expected = gradients(net)
            for name, value in got.items():
                torch.testing.assert_close(
                    value.double(), expected[name], rtol=exact, atol=exact / 10
                )


def refused():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Parameters that nothing would average, with a forward and without.
    for wrap in (BucketedDDP, OverlappedDDP):
        for change in ("added", "replaced"):
            ddp = wrap(seeded(Net))
            if change == "added":
                ddp.module.first.lora = nn.Parameter(torch.ones(4, dtype=torch.float64))
            else:
                ddp.module.first.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
            with pytest.raises(ValueError, match=rf"first\.\w+ was frozen or not.*rank {rank} of"):
                ddp(data(rank, 0))
    ddp = BucketedDDP(seeded(Net))
    ddp.module.lora = nn.Parameter(torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="wrap the model again"):
        (ddp.module.other(data(rank, 0)) * ddp.module.lora).sum().backward()
    # Copies would train without averaging.
    for wrap in (BucketedDDP, OverlappedDDP):
        ddp = wrap(seeded(Net))
        for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"copy or save ddp\.module"):
                make_copy(ddp)
        copy.deepcopy(ddp.module)
    # The same layer inside and outside of reentrant checkpointing.
    net = Net(True)
    ddp = BucketedDDP(net, bucket_bytes=0)
    x = data(rank, 0)
    with pytest.raises(MinidistError, match="use_reentrant=False"):
        (ddp(x).sum() + net.a(net.part(net.a, x)).sum()).backward()
    # A backward that failed, and then one without a forward.
    ddp = BucketedDDP(seeded(Net))
    x = data(rank, 0)

    def fail(_):
        raise ZeroDivisionError

    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        ddp(x).sum().backward()
    with pytest.raises(MinidistError, match="out of step"):
        ddp.module.other(data(rank, 0)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()


def test_what_would_not_be_averaged_is_refused():
    run(refused, 2)
