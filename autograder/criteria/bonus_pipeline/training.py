"""Criterion for training with a pipeline: one step of the optimizer per batch, and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_pipeline import parts
from autograder.criteria.bonus_pipeline.plan import gpipe_of
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import item_of
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

STEPS, LR = 4, 1e-3


def draw_train(draw: Draw) -> list[Values]:
    """Several steps, each with a batch of its own, and gradients far larger than 1.

    Even larger ones are there before the first step.
    """
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    m = draw.world_size + 2
    for number in range(STEPS):
        parts.add_case(inputs, draw, [gpipe_of(m)] * draw.world_size, [3] * m)
        inputs[-1][f"y/{number}"] *= 100
    parts.add_old_gradients(inputs, draw, scale=1e3)
    return inputs


def _optimizer(stage: nn.Module) -> torch.optim.SGD:
    """SGD; weights and biases are a group each."""
    return torch.optim.SGD([{"params": [p]} for p in stage.parameters()], lr=LR)


def observe_train(train_step: Any, inputs: Values, context: Context) -> Values:
    """The parameters after a few steps, and the loss that each step returns."""
    stage = parts.make_stage(inputs, context)
    optimizer = _optimizer(stage)
    parts.set_old_gradients(stage, inputs)
    losses: list[float | str] = []
    for number in range(STEPS):
        given = parts.arguments(stage, inputs, context, number)
        losses.append(parts.read_loss(train_step(given[0], optimizer, *given[1:])))
    return {"losses": losses} | {
        f"p{i}": p.detach().cpu().numpy().copy() for i, p in enumerate(stage.parameters())
    }


def judge_train(case: Case) -> Iterator[Finding]:
    """The parameters are those of one process that takes the same steps; so are the losses."""
    stages = parts.stages_of(case)
    optimizers = [_optimizer(stage) for stage in stages]
    losses: list[float] = []
    for number in range(STEPS):
        stages.zero_grad()
        x, y = parts.batch_of(case, number)
        loss = oracle.mse(stages(x), y)
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    for rank, answer in enumerate(case.answers):
        for i, p in enumerate(stages[rank].parameters()):
            got = answer.get(f"p{i}")
            start = case.inputs[rank]["wb"[i]]
            hint = "One step of the optimizer per batch, from that batch's gradients only."
            if isinstance(got, np.ndarray) and np.array_equal(got, start):
                hint = "They have not changed."
            right = p.detach().numpy()
            if wrong := oracle.differs(
                rank, f"parameter {i} after {STEPS} steps", got, right, hint=hint
            ):
                yield wrong
                break
        else:
            if wrong := _other_loss(answer, rank, losses):
                yield wrong


def _other_loss(answer: Values, rank: int, losses: list[float]) -> Finding | None:
    for number, right in enumerate(losses):
        got = item_of(answer.get("losses"), number)
        if type(got) is not float or not abs(got - right) <= parts.RTOL * abs(right):
            return Finding(
                f"step {number}: the loss of the batch is {right:.6g}, returned was "
                f"{str(got)[:40]}. train_step returns the tensor that run_pipeline has returned.",
                rank,
            )
    return None
