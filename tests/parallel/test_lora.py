"""Low-rank adapters: added before wrapping they train as in one process, later they are refused.

Hu et al., LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist.launch import run
from minidist.parallel.data import BucketedDDP
from minidist.parallel.zero import Zero2Optimizer, Zero3


class Adapted(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=torch.double))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.double))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def make(adapted: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Linear(8, 4)]
    model = nn.Sequential(*layers).double()
    if adapted:
        for i, layer in enumerate(layers):
            model[i] = Adapted(layer)
    return model


def gap(how: str) -> float:
    dist.init_process_group("gloo")
    alone = make(adapted=True)
    model = copy.deepcopy(alone)
    zero = Zero3(model, units=list(model)) if how == "zero3" else None
    forward = BucketedDDP(model) if how == "ddp" else model
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = torch.optim.AdamW
    optimizer = Zero2Optimizer(trained, kind) if how == "zero2" else kind(trained)
    reference = kind([p for p in alone.parameters() if p.requires_grad])
    x = torch.randn(4, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        forward(x.chunk(2)[dist.get_rank()]).square().mean().backward()
        alone(x).square().mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    got = model.state_dict() if zero is None else zero.full_state_dict()
    start = make(adapted=True).state_dict()
    assert all(torch.equal(got[k], v) == ("base" in k) for k, v in start.items())
    return max((got[k] - v).abs().max().item() for k, v in alone.state_dict().items())


@pytest.mark.parametrize("how", ["ddp", "zero2", "zero3"])
def test_adapters_that_are_added_first_train_as_in_one_process(how: str) -> None:
    assert max(run(gap, 2, how)) < 1e-12


def refused() -> None:
    dist.init_process_group("gloo")
    for wrap, instead in ((BucketedDDP, "before wrapping"), (Zero3, r"before Zero3\(model\)")):
        model = make(adapted=False)
        wrapped = wrap(model)
        model[0] = Adapted(nn.Linear(6, 8).double())
        forward = wrapped if isinstance(wrapped, nn.Module) else model
        with pytest.raises(ValueError, match=f"0.down was .* are not supported.*{instead}"):
            forward(torch.ones(2, 6, dtype=torch.double)).sum().backward()


def test_adapters_that_are_added_afterwards_are_refused() -> None:
    run(refused, 2)
