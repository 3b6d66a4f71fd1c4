"""A moving average of weights, of whole and of sharded models, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist.average import WeightAverage
from minidist.launch import run
from minidist.parallel.data import BucketedDDP
from minidist.parallel.zero import Zero2Optimizer, Zero3
from minidist.precision import MasterWeights


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(step))


def train(forward, model, optimizer, average, steps, part=slice(None)) -> None:
    for step in steps:
        optimizer.zero_grad()
        forward(batch(step)[part]).square().mean().backward()
        optimizer.step()
        average.update()


def gap(how: str) -> float:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone, model = make(), make()
    wanted = WeightAverage(alone.parameters(), decay=0.8)
    train(alone, alone, torch.optim.AdamW(alone.parameters(), lr=0.1), wanted, range(6))
    zero = Zero3(model, units=[model[0], model[2]]) if how == "zero3" else None
    forward = BucketedDDP(model) if how == "ddp" else model
    if how == "zero2":
        optimizer = Zero2Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    part = slice(2 * rank, 2 * rank + 2)
    average = WeightAverage(model.parameters(), decay=0.8)
    train(forward, model, optimizer, average, range(3), part)
    resumed = WeightAverage(model.parameters(), decay=0.1)
    resumed.load_state_dict(average.state_dict())
    train(forward, model, optimizer, resumed, range(3, 6), part)

    def state() -> dict[str, torch.Tensor]:
        found = model.state_dict() if zero is None else zero.full_state_dict()
        return {name: value.clone() for name, value in found.items()}

    before = state()
    with resumed.applied(), wanted.applied():
        got, expected = state(), alone.state_dict()
        worst = max((got[k] - v).abs().max().item() for k, v in expected.items())
        with torch.no_grad():  # evaluation gathers the average, not the last weights
            worst = max(worst, (forward(batch(9)) - alone(batch(9))).abs().max().item())
    assert all(torch.equal(before[k], v) for k, v in state().items())
    forward(batch(9)).sum().backward()  # and training goes on with the weights
    return worst


@pytest.mark.parametrize("how", ["ddp", "zero2", "zero3"])
def test_the_average_is_that_of_one_process_also_after_a_resume(how: str) -> None:
    assert max(run(gap, 2, how)) < 1e-9


def test_wrong_use_is_named() -> None:
    weight = nn.Parameter(torch.ones(3))
    average = WeightAverage([weight])
    with average.applied(), pytest.raises(RuntimeError, match=r"update\(\) inside applied\(\)"):
        average.update()
    with pytest.raises(ValueError, match="as many ranks as saved it"):
        average.load_state_dict({"decay": 0.5, "averages": [torch.ones(2)]})
    weight.data = torch.ones(1)  # as Zero3 does
    with pytest.raises(ValueError, match=r"make it after Zero3\(model\)"):
        average.update()
    with pytest.raises(ValueError, match="got 1"):
        WeightAverage([weight], decay=1)


def test_a_bfloat16_weight_has_a_wide_average_and_an_error_puts_the_weights_back() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    average = WeightAverage([weight], decay=0.999)
    weight.data.fill_(2)
    for _ in range(100):
        average.update()

    def evaluate() -> None:
        with average.applied():
            assert weight.item() == pytest.approx(2 - 0.999**100, abs=2**-8)
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert weight.item() == 2


def test_blocks_of_the_average_may_be_one_in_the_other() -> None:
    weight = nn.Parameter(torch.zeros(1))
    average = WeightAverage([weight], decay=0.5)
    weight.data.fill_(4)
    average.update()
    with average.applied():
        with average.applied():
            assert weight.item() == 2
        assert weight.item() == 2
        with pytest.raises(RuntimeError, match=r"update\(\) inside applied\(\)"):
            average.update()
    assert weight.item() == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_average_of_masters_reaches_the_model(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = MasterWeights([weight], lambda masters: torch.optim.SGD(masters, lr=1.0))
    average = WeightAverage(optimizer.masters, decay=0.5)
    weight.grad = torch.full_like(weight, -4)
    optimizer.step()
    average.update()
    with average.applied():
        assert weight.item() == optimizer.masters[0].item() == 2
        assert optimizer.state_dict()["masters"][0].item() == 2
    assert weight.item() == optimizer.masters[0].item() == 4
