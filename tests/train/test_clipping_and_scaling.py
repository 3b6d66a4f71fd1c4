"""Clipping, unscaling and norms act on what the optimizer steps, in every combination."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.errors import MinidistError
from minidist.launch import run
from minidist.parallel.accumulation import accumulate_step
from minidist.parallel.data import BucketedDDP
from minidist.parallel.zero import ShardedOptimizer, Zero2Optimizer, Zero3
from minidist.precision import GradScaler, MasterWeights, autocast_step

LIMIT, STEPS = 0.05, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENGINES = ("masters", "masters, zero3", "zero1", "zero2", "zero3", "plain")


def make(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return net.to(torch.bfloat16).to(dtype)  # values that every dtype holds


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(4, 4, generator=generator).bfloat16()
    return x.float(), 20 * torch.randn(4, 1, generator=generator)


def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out.float(), y)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def train(engine: str, dtype: torch.dtype, scaling: str, how: str) -> Any:
    net, zero = make(dtype), None
    model: Any = net
    if engine.endswith("zero3"):
        zero = Zero3(net, units=[net[0]])
    elif not engine.startswith("zero"):
        model = BucketedDDP(net)
    masters = None if dtype == torch.float32 else torch.float32
    optimizer: Any
    if engine.startswith("masters"):
        optimizer = MasterWeights(net.parameters(), sgd)
    elif engine == "zero1":
        optimizer = ShardedOptimizer(
            net.parameters(), torch.optim.SGD, average_gradients=True, master_dtype=masters, lr=1.0
        )
    elif engine == "zero2":
        optimizer = Zero2Optimizer(net.parameters(), torch.optim.SGD, master_dtype=masters, lr=1.0)
    else:
        optimizer = sgd(net.parameters())
    scaler: Any = None
    if scaling == "ours":
        scaler = GradScaler(init_scale=8.0, group=dist.group.WORLD)
    if scaling == "torch":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    norms = []
    for step in range(STEPS):
        x, y = batch(dist.get_rank(), step)
        if how == "autocast_step":
            autocast_step(
                model, loss_fn, x.to(dtype), y, optimizer, dtype=None, scaler=scaler, max_norm=LIMIT
            )
        else:
            done = accumulate_step(
                model,
                [(x.to(dtype), y)],
                lambda m, b: loss_fn(m(b[0]), b[1]),
                optimizer,
                scaler=scaler,
                max_norm=LIMIT,
            )
            norms.append(float(done.grad_norm))
    values = zero.full_state_dict() if zero else net.state_dict()
    return {name: value.float().clone() for name, value in values.items()}, norms


def cases() -> list[tuple[str, torch.dtype, str, str]]:
    found = []
    for engine in ENGINES:
        for dtype in DTYPES:
            for scaling in ("none", "ours", "torch"):
                sharded = "zero" in engine and (engine != "zero1" or scaling == "torch")
                if (dtype != torch.float32 and engine in ("zero3", "plain")) or (
                    scaling == "torch" and sharded
                ):
                    continue
                if dtype == torch.bfloat16 and scaling == "torch":
                    continue
                how = ("autocast_step", "accumulate_step")[len(found) % 2]
                found += [(engine, dtype, scaling, how)]
                if engine == "masters":
                    found += [(engine, dtype, scaling, "accumulate_step")]
    return found


def refused():
    """A torch scaler decides on each rank alone; ours without a group, too."""
    texts = []
    for engine in ("masters, zero3", "zero2", "zero1", "zero3"):
        with pytest.raises(ValueError, match=r"use minidist\.precision\.GradScaler\(group") as why:
            train(engine, torch.float32, "torch", "accumulate_step")
        texts.append(str(why.value))
    net = make(torch.float32)
    Zero3(net)
    for optimizer in (sgd(net.parameters()), MasterWeights(net.parameters(), sgd)):
        net(batch(0, 0)[0]).sum().backward()
        with pytest.raises(ValueError, match=r"expected GradScaler\(group"):
            GradScaler().unscale_(optimizer)
    net = make(torch.float32)
    with pytest.raises(ValueError, match=r"master_dtype=torch\.float32"):
        MasterWeights(net.parameters(), lambda p: Zero2Optimizer(p, torch.optim.SGD, lr=0.1))
    return texts


def ranks():
    dist.init_process_group("gloo")
    found = {case: train(*case) for case in cases()}
    texts = refused() if dist.get_world_size() > 1 else []
    dist.barrier()
    dist.destroy_process_group()
    return found, texts


@cache
def oracle(dtype: torch.dtype, world_size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, float64 masters; forward with the rounded weights, as the model has them."""
    masters = make(torch.float64)
    norms = []
    for step in range(STEPS):
        net = make(torch.float64)
        with torch.no_grad():
            for p, master in zip(net.parameters(), masters.parameters(), strict=True):
                p.copy_(master.to(dtype))
        for rank in range(world_size):
            x, y = batch(rank, step)
            (F.mse_loss(net(x.double()), y.double()) / world_size).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), LIMIT).item())
        with torch.no_grad():
            for p, master in zip(net.parameters(), masters.parameters(), strict=True):
                master -= p.grad
    return {name: value.float() for name, value in masters.state_dict().items()}, norms


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_is_clipped_is_what_is_stepped(world_size):
    results = run(ranks, world_size, deadline_s=200)
    for found, texts in results:
        assert len(texts) == (4 if world_size > 1 else 0)
        for case, (values, norms) in found.items():
            dtype = case[1]
            expected, expected_norms = oracle(dtype, world_size)
            coarse = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
            if norms:
                assert norms == pytest.approx(expected_norms, rel=coarse), case
            for name, value in values.items():
                torch.testing.assert_close(
                    value,
                    expected[name],
                    rtol=coarse,
                    atol=coarse * LIMIT,
                    msg=lambda m, at=(case, name): f"{at}: {m}",
                )


# --------------------------------------------------------------------------- changes afterwards


def test_masters_follow_parameters_that_are_changed_from_outside():
    net = make(torch.bfloat16)
    optimizer = MasterWeights(net.parameters(), sgd)
    with torch.no_grad():
        net[0].weight.fill_(3.0)  # as load_state_dict and a broadcast do
        net[0].bias.data.fill_(2.0)
    assert optimizer.state_dict()["masters"][0].unique().tolist() == [3.0]
    kept = optimizer.masters[2].clone()
    for p in net.parameters():
        p.grad = torch.full_like(p, 2.0**-12)
    optimizer.step()
    assert optimizer.masters[0].unique().tolist() == [3 - 2.0**-12]
    assert optimizer.masters[1].unique().tolist() == [2 - 2.0**-12]
    assert torch.equal(optimizer.masters[2], kept - 2.0**-12)
    for _ in range(3):  # small updates still add up
        optimizer.zero_grad()
        for p in net.parameters():
            p.grad = torch.full_like(p, 2.0**-12)
        optimizer.step()
    assert optimizer.masters[0].unique().tolist() == [3 - 2.0**-10]


def test_masters_refuse_what_they_do_not_know():
    net = make(torch.bfloat16)
    net[0].weight.requires_grad_(False)
    optimizer = MasterWeights(net.parameters(), sgd)
    net[0].weight.requires_grad_(True)
    net(batch(0, 0)[0].bfloat16()).sum().backward()
    with pytest.raises(ValueError, match=r"\(8, 4\).* were unfrozen"):
        optimizer.step()


# --------------------------------------------------------------------------------------- floors


@pytest.mark.parametrize(("floor", "num_good"), [(None, 142), (2.0**-4, 20), (2.0**16, 0)])
def test_the_scale_has_a_floor(floor, num_good):
    p = nn.Parameter(torch.ones(3))
    optimizer = sgd([p])
    scaler = GradScaler() if floor is None else GradScaler(min_scale=floor)

    def step(value: float) -> None:
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        p.grad.mul_(value)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(num_good):
        step(torch.nan)
    for _ in range(2):  # the scale stays, however often
        with pytest.raises(MinidistError, match=rf"in {num_good + 1} steps in a row|in .* a row"):
            step(torch.inf)
        assert scaler.get_scale() == 2.0 ** (16 - num_good)
    step(1.0)  # and goes on
    assert p.tolist() == [0.0] * 3


def test_a_scale_is_above_0_and_finite():
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="scale"):
            GradScaler(bad)
        with pytest.raises(ValueError, match="scale"):
            GradScaler().update(bad)
        with pytest.raises(ValueError, match="scale"):
            GradScaler().load_state_dict({**GradScaler().state_dict(), "scale": bad})
        with pytest.raises(ValueError, match="min_scale"):
            GradScaler(min_scale=min(bad, 0.0) if bad != torch.inf else 0.0)
