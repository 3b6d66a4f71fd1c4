"""Criteria for DDP written from scratch: parameters that are tied, frozen, odd or not used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import oracle
from autograder.criteria.common.places import alone
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab1_ddp.matched import matched_collectives
from autograder.criteria.lab1_ddp.scratch import (
    BATCH,
    SMALL_CAP_MB,
    combine,
    judge_steps,
    place,
    shares_of,
    step_once,
    tensors,
)

BRANCH_CAP_MB = 0.00004  # about 40 bytes: one bucket per branch, all of the same size

# --- tied and frozen -----------------------------------------------------------------------------

TIED_SIZE, TIED_STEPS = 6, 4
AWKWARD = {
    "first.weight": "It is used twice: reduce it once, after both uses have added up.",
    "factor": "It is float64, the others are float32: a bucket has one dtype.",
    "gain": "It is a single number, of shape ().",
    "turned": "It is a transpose, so its memory is not contiguous.",
}


class Tied(nn.Module):
    """One matrix that is used twice, a frozen layer between, and a float64 factor at the end.

    It also has a scalar, and a matrix that is stored as its transpose.
    """

    def __init__(self, inputs: Values, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        first, self.frozen, last = (nn.Linear(TIED_SIZE, TIED_SIZE, dtype=dtype) for _ in range(3))
        self.first, self.last = first, last
        self.last.weight = self.first.weight
        self.factor = nn.Parameter(torch.ones(TIED_SIZE, dtype=torch.float64))
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.turned = nn.Parameter(torch.ones(3, TIED_SIZE, dtype=dtype).t())
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(torch.from_numpy(inputs[name]))
        for p in self.frozen.parameters():
            p.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        hidden = torch.tanh(hidden @ self.turned @ self.turned.t() * self.gain)
        return (hidden * self.factor).to(x.dtype)


def draw_tied(draw: Draw) -> list[Values]:
    """The same weights on all ranks; different data per rank."""
    rng, shape = draw.shared(), (TIED_SIZE, TIED_SIZE)
    start = {
        name: rng.normal(0, 0.5, shape if name.endswith("weight") else TIED_SIZE).astype(np.float32)
        for name in ("first.weight", "first.bias", "frozen.weight", "frozen.bias", "last.bias")
    } | {"factor": rng.normal(1, 0.2, TIED_SIZE)}
    start["gain"] = np.array(rng.normal(1, 0.2), np.float32)
    start["turned"] = rng.normal(0, 0.5, (TIED_SIZE, 3)).astype(np.float32)
    sizes = (TIED_SIZE, TIED_SIZE)
    return [
        start | oracle.draw_batch(draw.private(r), BATCH, sizes) for r in range(draw.world_size)
    ]


def observe_tied(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients of two steps on the same batch with many buckets, then with one for each dtype.

    At the end, the gradients of a step in which each rank trains alone.
    """
    answer: Values = {}
    for run, cap in enumerate((SMALL_CAP_MB, 25.0)):
        module = place(Tied(inputs), context)
        ddp = ddp_class(module, bucket_cap_mb=cap)
        for step in (2 * run, 2 * run + 1):
            answer |= _tied_step(ddp, module, inputs, context, f"g{step}")
        for name, p in module.frozen.named_parameters():
            answer[f"value frozen.{name}"] = p.detach().cpu().numpy()
            answer[f"frozen {name} has a gradient"] = p.grad is not None
    with alone(context):
        module = place(Tied(inputs), context)
        return answer | _tied_step(ddp_class(module), module, inputs, context, "alone")


def _tied_step(
    ddp: Any, module: nn.Module, inputs: Values, context: Context, label: str
) -> dict[str, np.ndarray]:
    module.zero_grad()
    step_once(ddp, *tensors(inputs, context, "x", "y"))
    return {f"{label}/{name}": oracle.grad_of(p).copy() for name, p in module.named_parameters()}


def judge_tied(case: Case) -> Iterator[Finding]:
    """A tied parameter gets the mean of its whole gradient; frozen parameters do not change."""
    local = []
    for inputs in case.inputs:
        model = Tied(inputs, torch.float64)
        x, y = (torch.from_numpy(inputs[k]).double() for k in "xy")
        oracle.mse(model(x), y).backward()
        local.append({name: oracle.grad_of(p) for name, p in model.named_parameters()})
    plain, ranks = ("first.bias", "last.bias"), range(case.world_size)
    shares = shares_of(
        [[[local[r][name]] * TIED_STEPS for name in plain] for r in ranks],
        [
            [[case.answers[r].get(f"g{s}/{name}") for s in range(TIED_STEPS)] for name in plain]
            for r in ranks
        ],
    )
    for rank, answer in enumerate(case.answers):
        (alone_share,) = shares_of(
            [[[local[rank][name]] for name in plain]],
            [[[answer.get(f"alone/{name}")] for name in plain]],
        )
        for name in local[0]:
            expected = combine(shares[rank], [grads[name] for grads in local])
            for step in range(TIED_STEPS):
                got = answer.get(f"g{step}/{name}")
                hint = oracle.explain_gradient(got, expected, local[rank][name], case.world_size)
                hint = hint or AWKWARD.get(name, "")
                if wrong := oracle.differs(rank, f"gradient of {name}", got, expected, hint=hint):
                    yield wrong
                    break
            else:
                what = f"in a process group of one rank: gradient of {name}"
                expected = combine(alone_share, [local[rank][name]])
                if wrong := oracle.differs(rank, what, answer.get(f"alone/{name}"), expected):
                    yield wrong
        # The tolerance above is that of float32, because the loss is float32. But the all-reduce
        # has to use float64, so the gradient must have more digits than float32 holds.
        factors = [answer.get(f"g{step}/factor") for step in range(TIED_STEPS)]
        if any(
            isinstance(factor, np.ndarray)
            and factor.dtype.kind == "f"
            and np.array_equal(factor, factor.astype(np.float32))
            for factor in factors
        ):
            yield Finding(
                "gradient of factor: it is float64, but was rounded to float32. A bucket has the "
                "dtype of its parameters.",
                rank,
            )
        for name in ("frozen.weight", "frozen.bias"):
            if wrong := oracle.differs(
                rank, name, answer.get(f"value {name}"), case.inputs[0][name]
            ):
                yield wrong
            elif answer.get(f"{name.replace('.', ' ')} has a gradient") is True:
                yield Finding(
                    f"{name} is frozen, but has a gradient after the step: it should stay None, or "
                    "an optimizer with weight decay changes the parameter.",
                    rank,
                )


# --- unused --------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three branches; the caller chooses which of them to use."""

    def __init__(self, inputs: Values, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=dtype)
        self.branches = nn.ModuleList([nn.Linear(4, 2, dtype=dtype) for _ in range(3)])
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.from_numpy(inputs[f"p{i}"]))

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([self.branches[i](hidden) for i in use]).sum(0)


def draw_unused(draw: Draw) -> list[Values]:
    """Which branches each rank uses in each step; no rank, some or all ranks use branch 2."""
    rng, world_size = draw.shared(), draw.world_size
    start: Values = {}
    for i in range(4):
        start[f"p{2 * i}"] = rng.normal(0, 0.5, (4 if i == 0 else 2, 4)).astype(np.float32)
        start[f"p{2 * i + 1}"] = rng.normal(0, 0.5, 4 if i == 0 else 2).astype(np.float32)
    lucky = int(rng.integers(world_size))
    inputs = []
    for rank in range(world_size):
        only = [0, 2] if rank == lucky else [1]
        uses = [[0, 1], only, [0, 1, 2], [rank % 3]]
        batch = oracle.draw_batch(draw.private(rank), BATCH, (4, 2))
        inputs.append(start | batch | {"uses": uses})
    return inputs


def observe_unused(ddp_class: Any, inputs: Values, context: Context) -> Values:
    """Gradients of steps that use different branches each time; None is recorded as zeros."""
    module = Branches(inputs).to(context.device)
    x, y = tensors(inputs, context, "x", "y")
    answer: Values = {}
    with matched_collectives(ddp_class.__init__, context):
        ddp = ddp_class(module, bucket_cap_mb=BRANCH_CAP_MB)
        for step, use in enumerate(inputs["uses"]):
            module.zero_grad(set_to_none=step != 3)  # zeros, not None, before step 3
            oracle.mse(ddp(x, use=use), y).backward()
            ddp.finish_gradient_synchronization()
            for i, p in enumerate(module.parameters()):
                answer[f"g{step}/{i}"] = oracle.grad_of(p).copy()
    return answer


def judge_unused(case: Case) -> Iterator[Finding]:
    """Ranks that did not use a parameter count as zeros in its mean.

    Where no rank used it, zeros and None are both right.

    Here buckets become ready in a different order on each rank. A rank that launches them in that
    order reduces the wrong buckets together, because all branches have the same shape.
    """

    def local(rank: int, step: int) -> list[np.ndarray]:
        inputs = case.inputs[rank]
        model = Branches(inputs, torch.float64)
        x, y = (torch.from_numpy(inputs[k]).double() for k in "xy")
        oracle.mse(model(x, inputs["uses"][step]), y).backward()
        return [oracle.grad_of(p) for p in model.parameters()]

    def describe(step: int) -> str:
        cleared = ", after zero_grad(set_to_none=False)" * (step == 3)
        return f"step {step}{cleared} (branches per rank: {[i['uses'][step] for i in case.inputs]})"

    return judge_steps(
        case,
        4,
        local,
        describe,
        plain=(0, 1),  # the trunk, which all ranks use in every step
    )
