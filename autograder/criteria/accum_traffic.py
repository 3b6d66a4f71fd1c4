"""Criteria: gradients travel once per step with token weights and with mixed precision, too.

Their values are other criteria's. Here the emulated cluster counts what a rank contributes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autograder.criteria import accum_amp, oracle
from autograder.criteria.accum_ddp import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    TokenModel,
    token_loss,
    wrap,
)
from autograder.criteria.base import Case, Context, Draw, Finding, Values
from minidist.emulate.plan import ChargePlan
from minidist.emulate.trace import Event

MICRO_BATCHES, CALLS = 6, 3
# Times the gradients: float64 on the wire is allowed, and a loss beside them.
MOST = 2.5


def plan(draw: Draw) -> ChargePlan:
    """Nothing is charged: bytes count, not time."""
    return ChargePlan((), (), draw.seed("charges").to_bytes(16, "big"))


def draw_tokens(draw: Draw) -> list[Values]:
    """The same weights, other tokens per rank, call and micro-batch."""
    rng = draw.shared()
    shapes = ((VOCABULARY, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    start: Values = {f"p{i}": rng.normal(size=s).astype(np.float32) for i, s in enumerate(shapes)}
    inputs = []
    for rank in range(draw.world_size):
        own, shape = draw.private(rank), (CALLS, MICRO_BATCHES, 2, 6)
        targets = own.integers(VOCABULARY, size=shape)
        targets[..., 5] = IGNORED
        inputs.append(start | {"x": own.integers(VOCABULARY, size=shape), "y": targets})
    return inputs


def observe_tokens(accumulate_tokens: Any, inputs: Values, context: Context) -> Values:
    """Several accumulations."""
    module = TokenModel(inputs)
    wrapped = wrap(module, context)
    for xs, ys in zip(inputs["x"], inputs["y"], strict=True):
        module.zero_grad()
        pairs = zip(torch.from_numpy(xs), torch.from_numpy(ys), strict=True)
        accumulate_tokens(wrapped, list(pairs), token_loss)
    return {"done": True}


def draw_amp(draw: Draw) -> list[Values]:
    """The same weights, other data per rank, call and micro-batch."""
    sizes = accum_amp.SIZES
    start = oracle.draw_parameters(draw.shared(), sizes)
    inputs = []
    for rank in range(draw.world_size):
        batch = oracle.draw_batch(draw.private(rank), CALLS * MICRO_BATCHES * 4, sizes)
        inputs.append(start | {
            name: batch[name].reshape(CALLS, MICRO_BATCHES, 4, -1) for name in "xy"
        })  # fmt: skip
    return inputs


def observe_amp(amp_step: Any, inputs: Values, context: Context) -> Values:
    """Several steps in bfloat16, whose scaler does nothing."""
    module = oracle.mlp(inputs)
    wrapped = wrap(module, context)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for xs, ys in zip(inputs["x"], inputs["y"], strict=True):
        optimizer.zero_grad()
        pairs = zip(torch.from_numpy(xs), torch.from_numpy(ys), strict=True)
        amp_step(wrapped, list(pairs), oracle.mse, optimizer, scaler, dtype=torch.bfloat16)
    return {"done": True}


def _contributed(events: list[Event]) -> float:
    """Bytes of floats that a rank brought into reductions, gathers and messages."""
    total = 0.0
    for event in events:
        if event.kind == "issue" and "float" in event.dtype and event.collective != "broadcast":
            share = len(event.ranks) if event.collective == "all_gather" else 1
            total += event.nbytes / share if event.collective != "recv" else 0.0
    return total


def judge(case: Case) -> list[Finding]:
    """About once the gradients per step, not once per micro-batch."""
    assert case.trace is not None
    if case.trace.faults:
        return [Finding(fault) for fault in case.trace.faults]
    if case.world_size == 1:
        return []
    gradients = sum(p.nbytes for p in oracle.parameters_of(case.inputs[0]))
    findings: list[Finding] = []
    for rank, events in enumerate(case.trace.events):
        times = _contributed(events) / (CALLS * gradients)
        if times > MOST:
            findings.append(Finding(
                f"{times:.1f} times the gradients travelled in a step of {MICRO_BATCHES} "
                "micro-batches, once is enough: forward and backward of all but the last one "
                "belong inside no_sync().", rank,
            ))  # fmt: skip
        elif times < 0.9:
            findings.append(Finding(
                f"only {times:.1f} times the gradients travelled in a step: those of the last "
                "micro-batch have to be synchronised, with all that was added up before.", rank,
            ))  # fmt: skip
    return findings
