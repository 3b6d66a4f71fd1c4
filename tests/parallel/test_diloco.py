"""DiLoCo against all ranks in one process, with the outer step written as in the paper, in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.data import make_regression
from minidist.launch import run
from minidist.parallel.local_sgd import DiLoCo, LocalSGD
from minidist.parallel.zero import ShardedOptimizer
from minidist.precision import MasterWeights

STEPS = 13  # the last meeting is three steps before the end of period 5, one of period 4
CASES = [  # period, outer rate, outer momentum
    (5, 0.7, 0.9),
    (4, 0.7, 0.0),
    (1, 1.0, 0.5),
]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3)
    ).double()


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = make_regression(8, 6, 3, seed=100 * rank + step)
    return F.mse_loss(model(x.double()), y.double())


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def oracle(n: int, period: int, lr: float, momentum: float) -> list[torch.Tensor]:
    """Every rank's parameters at the end. Nesterov: v <- m v + g, theta <- theta - lr (g + m v)."""
    models = [make_model() for _ in range(n)]
    optimizers = [make_adamw(model) for model in models]
    theta = vector(models[0])
    velocity = torch.zeros_like(theta)
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if (step + 1) % period == 0:
            outer_gradient = theta - torch.stack([vector(model) for model in models]).mean(0)
            velocity = momentum * velocity + outer_gradient
            theta = theta - lr * (outer_gradient + momentum * velocity)
            for model in models:
                nn.utils.vector_to_parameters(theta.clone(), model.parameters())
            for same in zip(*[model.buffers() for model in models], strict=True):
                if same[0].is_floating_point():
                    mean = torch.stack(same).mean(0)
                    for buffer in same:
                        buffer.copy_(mean)
    return [vector(model) for model in models]


def train(make, resume_at: int | None = None) -> tuple[torch.Tensor, int, int]:
    rank = dist.get_rank()
    model = make_model()
    if rank > 0:  # replicas are made equal
        nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    optimizer = make_adamw(model)
    stepper = make(model, optimizer)
    for step in range(STEPS):
        if step == resume_at:  # in the middle of a period, into fresh objects
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            state, sent = copy.deepcopy(stepper.state_dict()), stepper.sent_bytes
            model = make_model()
            optimizer = make_adamw(model)
            stepper = make(model, optimizer)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            stepper.load_state_dict(state)
            stepper.sent_bytes = sent
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        stepper.step()
    return vector(model), stepper.sent_bytes, stepper.num_steps


def body():
    dist.init_process_group("gloo")
    results = []
    for period, lr, momentum in CASES:
        for resume_at in (None, 7):
            results.append(
                train(
                    lambda m, o, p=period, lr=lr, mo=momentum: DiLoCo(
                        m, o, p, outer_lr=lr, outer_momentum=mo
                    ),
                    resume_at,
                )
            )
    as_local = train(lambda m, o: DiLoCo(m, o, 3, outer_lr=1.0, outer_momentum=0.0))
    local = train(lambda m, o: LocalSGD(m, o, 3))
    # A meeting without a step in between changes nothing, though there is momentum.
    model = make_model()
    stepper = DiLoCo(model, make_adamw(model), 2)
    for step in range(2):
        loss_of(model, dist.get_rank(), step).backward()
        stepper.step()
    before = vector(model)
    stepper.average()
    assert torch.equal(before, vector(model))
    stepper.optimizer.zero_grad()
    loss_of(model, dist.get_rank(), 2).backward()
    stepper.step()
    stepper.average()  # early, before evaluating: all ranks are equal
    every = [torch.empty_like(before) for _ in range(dist.get_world_size())]
    dist.all_gather(every, vector(model))
    assert all(torch.equal(every[0], other) for other in every)
    for wrong in ({"outer_lr": 0.0}, {"outer_momentum": 1.0}):
        with pytest.raises(ValueError, match="outer_lr must be above 0"):
            DiLoCo(model, stepper.optimizer, 2, **wrong)
    dist.barrier()
    dist.destroy_process_group()
    return results, as_local[0], local[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_diloco_is_what_the_paper_says(world_size):
    every_rank = run(body, world_size)
    numel = vector(make_model()).numel()
    for number, (period, lr, momentum) in enumerate(CASES):
        expected = oracle(world_size, period, lr, momentum)
        meeting = 2 * (world_size - 1) * 8 * (numel + 2 * 10) // world_size
        for rank in range(world_size):
            for resumed in (0, 1):
                got, sent, num_steps = every_rank[rank][0][2 * number + resumed]
                torch.testing.assert_close(got, expected[rank], rtol=1e-9, atol=1e-12)
                assert num_steps == STEPS
                assert sent == STEPS // period * meeting
    for _, as_local, local in every_rank:
        torch.testing.assert_close(as_local, local, rtol=1e-9, atol=1e-12)


def small_outer_steps() -> list[float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ends = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        module = nn.ParameterList([weight])
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        diloco = DiLoCo(module, optimizer, 1, outer_lr=0.1, outer_momentum=0.0)
        for _ in range(10):
            weight.grad = torch.full_like(weight, 2.0 ** -(5 + 2 * rank))
            diloco.step()
        ends.append(weight.item())
    dist.barrier()
    return ends


def test_small_outer_steps_add_up_in_16_bits_too() -> None:
    mean = (2.0**-5 + 2.0**-7) / 2
    for bf16, fp32 in run(small_outer_steps, 2):
        assert fp32 == pytest.approx(1 - mean, abs=1e-6)
        assert bf16 == pytest.approx(1 - mean, abs=2**-8)  # 16-bit sums would stay at 1


def what_would_drift() -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = DiLoCo(model, optimizer, 1)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="4 parameters are trainable and 2 were"):
        diloco.step()
    for kind in (LocalSGD, DiLoCo):
        for other in (
            MasterWeights(model.parameters(), lambda p: torch.optim.SGD(p, lr=0.1)),
            ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        ):
            with pytest.raises(ValueError, match=f"{kind.__name__}: got {type(other).__name__}"):
                kind(model, other, 1)  # type: ignore[arg-type]
    dist.barrier()


def test_what_would_never_meet_is_refused() -> None:
    run(what_would_drift, 2)
