"""Optimisers that look at whole parameters, over the pieces of Zero3: the steps of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_after_wrapping import Lamb
from torch import Tensor, nn

from minidist.launch import run
from minidist.parallel.zero import WholeOptimizer, Zero3
from minidist.precision import GradScaler

STEPS = 4


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, in the dtype of the parameter (torch's computes in bfloat16)."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                assert p.dim() == 2
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["beta"]).add_(p.grad)
                x = momentum / (momentum.norm() + 1e-12)
                for _ in range(5):  # smooth, unlike a decomposition of a singular matrix
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.sub_(group["lr"] * x)


KINDS = {
    "muon": Muon,
    "torch muon": partial(torch.optim.Muon, weight_decay=0.1),
    "lamb": Lamb,
    "adafactor": torch.optim.Adafactor,
}


class Net(nn.Module):
    """Sizes that divide by nothing; `never` is not used, `some` only by rank 0's samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.some = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(7, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        some = x[:, :1] > 0
        if some.any():
            h = h + torch.where(some, self.some(h), 0)
        return self.last(h).square().mean()


def batch(step: int) -> Tensor:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.double)
    x[:, 0] = torch.cat([x[:3, 0].abs(), -x[3:, 0].abs()])
    return x


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.dim() == 2]


def alone(kind: str, clip: bool = False, schedule: bool = False) -> dict[str, Any]:
    net = Net()
    chosen = matrices(net)
    rest = [p for p in net.parameters() if p.dim() == 1]
    special, adam = KINDS[kind](chosen, lr=0.05), torch.optim.AdamW(rest, lr=0.01, eps=1e-4)
    return train(net, net, special, adam, clip and nn.utils.clip_grad_norm_, schedule)


def train(
    net, forward, special, adam, clip: Any = None, schedule: bool = False, steps=range(STEPS)
):
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plan = torch.optim.lr_scheduler.LambdaLR(special, lambda step: 1 / (1 + step * schedule))
    for step in steps:
        share = batch(step).chunk(ranks)[rank] if ranks > 1 else batch(step)
        forward(share).backward()
        if clip:
            clip(list(net.parameters()), 0.1)
        for optimizer in (special, adam):
            optimizer.step()
            optimizer.zero_grad()
        plan.step()
    return {k: v.clone() for k, v in net.state_dict().items()}


def shard() -> tuple[Net, Zero3, list[nn.Parameter], torch.optim.Optimizer]:
    net = Net()
    chosen = matrices(net)
    rest = [p for p in net.parameters() if p.dim() == 1]
    zero = Zero3(net, units=[net.first, net.last])
    return net, zero, chosen, torch.optim.AdamW(rest, lr=0.01, eps=1e-4)


def sharded(kind: str, clip: bool, schedule: bool, bucket_bytes: int) -> Any:
    dist.init_process_group("gloo")
    net, zero, chosen, adam = shard()
    special = WholeOptimizer(zero, chosen, KINDS[kind], bucket_bytes=bucket_bytes, lr=0.05)
    own_clip = (lambda _, most: zero.clip_grad_norm_(most)) if clip else None
    train(net, net, special, adam, own_clip, schedule)
    # Nothing whole is left between steps.
    whole = [w for bucket in special.buckets for w in bucket.owned]
    assert all(w.untyped_storage().nbytes() == 0 and w.grad is None for w in whole)
    return zero.full_state_dict(), special.full_state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_muon_over_pieces_equals_one_process(ranks: int) -> None:
    wanted = alone("muon", clip=True, schedule=True)
    start = Net().state_dict()
    assert any(not torch.equal(wanted[k], v) for k, v in start.items())
    for values, _ in run(sharded, ranks, "muon", True, True, 300):
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["lamb", "adafactor", "torch muon"])
def test_other_optimizers_that_need_whole_parameters(kind: str) -> None:
    wanted = alone(kind)
    # torch's Muon rounds to bfloat16, where a last bit of the gradient may be a step of 2**-8.
    close = {"rtol": 0.0, "atol": 2e-3} if kind == "torch muon" else {"rtol": 1e-8, "atol": 1e-10}
    for values, state in run(sharded, 3, kind, False, False, 1 << 20):
        for name, value in wanted.items():
            torch.testing.assert_close(values[name], value, **close)
        assert len(state["param_groups"][0]["params"]) == 4
        assert 2 not in state["state"] or not state["state"][2]  # `never` has no gradient


def saved(folder: Path, first: bool) -> Any:
    dist.init_process_group("gloo")
    net, zero, chosen, adam = shard()
    special = WholeOptimizer(zero, chosen, Muon, lr=0.05)
    if first:
        train(net, net, special, adam, steps=range(2))
        zero.save_sharded(folder / "muon", special)
        zero.save_sharded(folder / "adam", adam)
        return None
    zero.load_sharded(folder / "muon", special)
    zero.load_sharded(folder / "adam", adam)
    train(net, net, special, adam, steps=range(2, STEPS))
    return zero.full_state_dict()


def test_state_is_carried_to_another_number_of_ranks(tmp_path: Path) -> None:
    run(saved, 3, tmp_path, True)
    for values in run(saved, 2, tmp_path, False):
        for name, value in alone("muon").items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-11)


def scaled() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, zero, chosen, _ = shard()
    special = WholeOptimizer(zero, chosen, Muon, lr=0.05)
    scaler = GradScaler(init_scale=4.0, group=zero.group)
    before = zero.full_state_dict()
    # An element that one rank alone holds overflows: no rank takes the step.
    scaler.scale(net(batch(0).chunk(2)[rank])).backward()
    if rank == 1:
        next(p for p in chosen if p.numel()).grad[0] = torch.inf
    scaler.step(special)
    scaler.update()
    assert scaler.get_scale() == 2.0
    after = zero.full_state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    # What it does not take.
    with pytest.raises(ValueError, match=r"not a piece of this model on rank \d of 2"):
        WholeOptimizer(zero, Net().parameters(), Muon)
    with pytest.raises(ValueError, match="needs all parameters in one place"):
        WholeOptimizer(zero, chosen, torch.optim.LBFGS)
    plain = Lamb(chosen)
    net(batch(0)).backward()
    with pytest.raises(ValueError, match=r"are not supported.*; give Zero3's pieces to WholeOpt"):
        plain.step()


def test_scaling_and_refusals() -> None:
    run(scaled, 2)
