"""Criterion for master weights: 16-bit parameters with updates too small for the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from autograder.criteria.common.answers import same_array
from autograder.criteria.criterion import Case, Context, Finding, Values, differs, per_rank
from autograder.criteria.lab4_amp.formats import DTYPES
from autograder.criteria.lab4_amp.scaler import same

SHAPES = ((4, 3), (3,), (6,), (2,))
# Parameter 1 is frozen, 2 has a gradient in every second step, and 3 is too large for fp16.
UNTOUCHED, SOMETIMES, LARGE = 1, 2, 3
STEPS = 48
CASES = (("bfloat16", "SGD"), ("float16", "SGD"), ("bfloat16", "AdamW"))


def _factory(kind: str, lr: float) -> Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]:
    if kind == "SGD":
        return lambda params: torch.optim.SGD(params, lr=lr, momentum=0.5)
    return lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=0.0)


def _has_gradient(parameter: int, step: int) -> bool:
    return parameter != UNTOUCHED and not (parameter == SOMETIMES and step % 2)


@per_rank
def draw(rng: np.random.Generator) -> Values:
    """Parameters between 1 and 2, and gradients that move them by about a fifth of eps per step.

    In bf16 one parameter and its gradients are 2^20 times as large.
    """
    values: Values = {}
    for number, (name, kind) in enumerate(CASES):
        eps = float(torch.finfo(DTYPES[name]).eps)
        # AdamW's steps are of size lr for any gradient; momentum 0.5 doubles the steps of SGD.
        move = eps * float(rng.uniform(0.15, 0.22))
        values[f"lr/{number}"] = move if kind == "AdamW" else move / 2
        for i, shape in enumerate(SHAPES):
            size = np.float32(2.0**20 if i == LARGE and name == "bfloat16" else 1.0)
            values[f"p/{number}/{i}"] = size * rng.uniform(1.3, 1.7, shape).astype(np.float32)
            sign = rng.choice([-1.0, 1.0], shape)
            grads = sign * rng.uniform(0.6, 1.4, (STEPS, *shape))
            values[f"g/{number}/{i}"] = size * grads.astype(np.float32)
    return values


def observe(master_class: Any, inputs: Values, context: Context) -> Values:
    """Parameters after all steps, their dtype, and how often a gradient was not cleared."""
    answer: Values = {}
    for number, (name, kind) in enumerate(CASES):
        parameters = [
            torch.nn.Parameter(
                torch.from_numpy(inputs[f"p/{number}/{i}"]).to(context.device, DTYPES[name])
            )
            for i in range(len(SHAPES))
        ]
        parameters[UNTOUCHED].requires_grad_(False)
        optimizer = master_class(list(parameters), _factory(kind, inputs[f"lr/{number}"]))
        left = 0
        for step in range(STEPS):
            for i, p in enumerate(parameters):
                grad = torch.from_numpy(inputs[f"g/{number}/{i}"][step]).to(p)
                p.grad = grad if _has_gradient(i, step) else None
            optimizer.step()
            optimizer.zero_grad()
            left += sum(p.grad is not None and bool((p.grad != 0).any()) for p in parameters)
        answer[f"left/{number}"] = left
        for i, p in enumerate(parameters):
            answer[f"p/{number}/{i}"] = p.detach().float().cpu().numpy()
            answer[f"dtype/{number}/{i}"] = str(p.dtype).removeprefix("torch.")
    return answer


def _oracle(inputs: Values, number: int) -> list[np.ndarray]:
    """The same optimiser on float64 copies, with gradients rounded to the parameters' dtype."""
    name, kind = CASES[number]
    masters = [
        torch.from_numpy(inputs[f"p/{number}/{i}"]).to(DTYPES[name]).double().requires_grad_()
        for i in range(len(SHAPES))
    ]
    optimizer = _factory(kind, inputs[f"lr/{number}"])(masters)
    for step in range(STEPS):
        for i, master in enumerate(masters):
            grad = torch.from_numpy(inputs[f"g/{number}/{i}"][step]).to(DTYPES[name]).double()
            master.grad = grad if _has_gradient(i, step) else None
        optimizer.step()
    return [master.detach().numpy() for master in masters]


def judge(case: Case) -> Iterator[Finding]:
    """Parameters are the rounded masters, within one eps of the format.

    zero_grad() may leave zeros or None, and masters may be float64.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, (name, kind) in enumerate(CASES):
            eps = float(torch.finfo(DTYPES[name]).eps)
            if not same(answer.get(f"left/{number}"), 0):
                yield Finding("zero_grad() left gradients behind.", rank)
            for i, expected in enumerate(_oracle(inputs, number)):
                got = answer.get(f"p/{number}/{i}")
                if not same(answer.get(f"dtype/{number}/{i}"), name):
                    yield Finding(
                        f"a {name} parameter is {answer.get(f'dtype/{number}/{i}')} after a step. "
                        "The model's parameters keep their dtype.",
                        rank,
                    )
                    break
                start = torch.from_numpy(inputs[f"p/{number}/{i}"]).to(DTYPES[name]).double()
                still = same_array(got, start.numpy())
                hint = (
                    "The masters go on from their own last value, in float32; the parameters are a "
                    "rounded copy of them."
                )
                if still and i != UNTOUCHED:
                    hint = (
                        "They have not moved: each update is less than half the distance to the "
                        f"next {name} number. Add up the updates in float32 masters that go on "
                        "from their own last value, and are never read back from the parameters."
                    )
                elif i == SOMETIMES:
                    hint = (
                        "Where p.grad is None its master has none: neither zeros nor that of the "
                        "step before."
                    )
                if wrong := differs(
                    rank,
                    f"{name}, {kind}: parameter {i} after {STEPS} small steps",
                    got,
                    expected,
                    rtol=eps,
                    atol=0.0,
                    hint=hint,
                ):
                    yield wrong
                    break
