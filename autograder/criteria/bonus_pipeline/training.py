"""Criterion for training with a pipeline: one step of the optimizer per batch, and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_pipeline import parts
from autograder.criteria.bonus_pipeline.plan import gpipe_of
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, item_of, short
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

STEPS, LR = 4, 1e-3


def draw_train(draw: Draw) -> list[Values]:
    """Several steps, each with a batch of its own, and gradients far larger than 1.

    So large ones are there before the first step that float32 loses the others beside them.
    """
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    m = draw.world_size + 2
    for number in range(STEPS):
        parts.add_case(inputs, draw, [gpipe_of(m)] * draw.world_size, [3] * m)
        inputs[-1][f"y/{number}"] *= 100
    parts.add_old_gradients(inputs, draw, scale=1e12)
    return inputs


def _optimizer(stage: nn.Module) -> torch.optim.SGD:
    """SGD; weights and biases are a group each."""
    return torch.optim.SGD([{"params": [p]} for p in stage.parameters()], lr=LR)


def observe_train(train_step: Any, inputs: Values, context: Context) -> Values:
    """The parameters after each of a few steps, and the loss that it returns.

    A step of a different stage comes before them, so that the first call is none of its process.
    """
    earlier = parts.make_stage(inputs, context)
    given = parts.arguments(earlier, inputs, context, 0)
    train_step(given[0], _optimizer(earlier), *given[1:])
    stage = parts.make_stage(inputs, context)
    optimizer = _optimizer(stage)
    parts.set_old_gradients(stage, inputs)
    losses: list[float | str] = []
    answer: Values = {"losses": losses}
    for number in range(STEPS):
        given = parts.arguments(stage, inputs, context, number)
        losses.append(parts.read_loss(train_step(given[0], optimizer, *given[1:])))
        for i, p in enumerate(stage.parameters()):
            answer[f"p{number}/{i}"] = p.detach().cpu().numpy().copy()
    return answer


@dataclass(frozen=True)
class _Step:
    """What is right in a step: its loss, and per rank the gradients and parameters of the stage."""

    loss: float
    gradients: list[list[np.ndarray]]
    parameters: list[list[np.ndarray]]


def _steps(case: Case) -> Iterator[_Step]:
    """The steps that one process takes, in float64."""
    stages = parts.stages_of(case)
    optimizers = [_optimizer(stage) for stage in stages]
    for number in range(STEPS):
        stages.zero_grad()
        x, y = parts.batch_of(case, number)
        loss = oracle.mse(stages(x), y)
        loss.backward()
        gradients = [[oracle.grad_of(p).copy() for p in stage.parameters()] for stage in stages]
        for optimizer in optimizers:
            optimizer.step()
        parameters = [[p.detach().numpy().copy() for p in s.parameters()] for s in stages]
        yield _Step(loss.item(), gradients, parameters)


def judge_train(case: Case) -> list[Finding]:
    """The parameters are those of one process that takes the same steps; so are the losses.

    Old gradients may become None or zeros, and the batch may be the optimizer's closure.
    Only the first wrong step is reported, because the later errors follow from it.
    """
    for number, step in enumerate(_steps(case)):
        ranks = range(case.world_size)
        found = [_wrong_parameters(case, rank, number, step) for rank in ranks]
        if not any(found):
            found = [_other_loss(case.answers[rank], rank, number, step.loss) for rank in ranks]
        if findings := [finding for finding in found if finding]:
            return findings
    return []


def _wrong_parameters(case: Case, rank: int, number: int, step: _Step) -> Finding | None:
    answer = case.answers[rank]
    for i, right in enumerate(step.parameters[rank]):
        name = f"{('weight', 'bias')[i]} of the stage after step {number}"
        got = answer.get(f"p{number}/{i}")
        hint = _why(case, rank, number, i, step.gradients[rank][i])
        if wrong := oracle.differs(rank, name, got, right, hint=hint):
            if _other_loss(answer, rank, number, step.loss):
                # The loss is computed before the step, so the step alone is not the cause.
                why = "The loss is wrong, too. Do weights change between the micro-batches?"
                return oracle.differs(rank, name, got, right, hint=why)
            return wrong
    return None


def _why(case: Case, rank: int, number: int, i: int, gradient: np.ndarray) -> str:
    """A hint from the gradient that the step used, which is SGD's change divided by the rate."""
    values, answer = case.inputs[rank], case.answers[rank]
    start = answer.get(f"p{number - 1}/{i}") if number else values["wb"[i]]
    got = answer.get(f"p{number}/{i}")
    if not is_floats(start, gradient.shape) or not is_floats(got, gradient.shape):
        return ""
    used = parts.vector(((start.astype(np.float64) - got) / LR).ravel(), gradient.ravel())
    right = gradient.ravel()
    if used is None:
        return ""
    if not used.any():
        return "They have not changed."
    if _is_near(used, right + values[f"before/{'wb'[i]}"].ravel()):
        return "The gradients that were there before the first call are in it: clear them first."
    factor = parts.scale_of(used, right)
    if _is_near(used, factor * right):
        return (
            f"The step was made with {factor:.3g} times the gradients of the batch: the optimizer "
            "takes them as run_pipeline leaves them."
        )
    return "A call makes one step of the optimizer, with the gradients of this batch alone."


def _is_near(used: np.ndarray, gradient: np.ndarray) -> bool:
    """Whether `used` is this gradient, as far as that can be read from float32 parameters."""
    return bool(np.abs(used - gradient).max() <= 1e-3 * np.abs(gradient).max() + 1e-3)


def _other_loss(answer: Values, rank: int, number: int, right: float) -> Finding | None:
    got = item_of(answer.get("losses"), number)
    if type(got) is float and abs(got - right) <= parts.RTOL * abs(right):
        return None
    return Finding(
        f"step {number}: the loss of the batch is {right:.6g}, returned was "
        f"{short(got)[:40]}. train_step returns the tensor that run_pipeline has returned.",
        rank,
    )
