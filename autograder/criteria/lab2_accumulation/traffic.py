"""Criteria: gradients travel once per step with token weights and with mixed precision, too.

Different criteria judge the values of the gradients. Here the emulated cluster counts the bytes
that a rank contributes, and the judge looks for the gradients in them: what travels must be a sum
over the micro-batches, with any weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common import carried, oracle
from autograder.criteria.common.charged import reaches_all
from autograder.criteria.common.training import wrap
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab2_accumulation import amp
from autograder.criteria.lab2_accumulation.ddp import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    TokenModel,
    token_loss,
)
from minidist.emulate.trace import Event

MICRO_BATCHES, CALLS = 6, 3
# Multiples of the size of all gradients. MOST is counted in numbers, because float64 on the wire is
# allowed; so is a loss beside the gradients. In a ring of messages a number travels nearly twice.
MOST, MOST_IN_MESSAGES = 1.5, 2.5
LEAST = 0.9
# Allowed relative remainder of what travels after a fit by a sum of gradients. Rounding to bfloat16
# leaves 0.01. An optimizer step after each micro-batch leaves more; it is not judged here.
REST = {"float32": 0.02, "bfloat16": 0.35}


def draw_tokens(draw: Draw) -> list[Values]:
    """The same weights on all ranks; different tokens per rank, call and micro-batch."""
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
    """Runs several accumulations."""
    module = TokenModel(inputs)
    wrapped = wrap(module, context)
    for xs, ys in zip(inputs["x"], inputs["y"], strict=True):
        module.zero_grad()
        pairs = zip(torch.from_numpy(xs), torch.from_numpy(ys), strict=True)
        accumulate_tokens(wrapped, list(pairs), token_loss)
    return {"done": True}


def draw_amp(draw: Draw) -> list[Values]:
    """The same weights on all ranks; different data per rank, call and micro-batch."""
    sizes = amp.SIZES
    start = oracle.draw_parameters(draw.shared(), sizes)
    inputs = []
    for rank in range(draw.world_size):
        batch = oracle.draw_batch(draw.private(rank), CALLS * MICRO_BATCHES * 4, sizes)
        inputs.append(
            start | {name: batch[name].reshape(CALLS, MICRO_BATCHES, 4, -1) for name in "xy"}
        )
    return inputs


def observe_amp(amp_step: Any, inputs: Values, context: Context) -> Values:
    """Runs several steps in bfloat16, with a disabled scaler."""
    module = oracle.mlp(inputs)
    wrapped = wrap(module, context)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for xs, ys in zip(inputs["x"], inputs["y"], strict=True):
        optimizer.zero_grad()
        pairs = zip(torch.from_numpy(xs), torch.from_numpy(ys), strict=True)
        amp_step(wrapped, list(pairs), oracle.mse, optimizer, scaler, dtype=torch.bfloat16)
    return {"done": True}


def _contributed(events: Iterable[Event]) -> float:
    """Bytes of floats that a rank contributed to reductions, gathers and messages it sent."""
    return sum(nbytes for nbytes, _ in _contributions(events))


def _numbers(events: Iterable[Event]) -> float:
    """The number of the floats that `_contributed` counts in bytes."""
    return sum(nbytes / getattr(torch, dtype).itemsize for nbytes, dtype in _contributions(events))


def _contributions(events: Iterable[Event]) -> Iterator[tuple[float, str]]:
    for event in events:
        if event.kind == "issue" and "float" in event.dtype and event.collective != "broadcast":
            share = len(event.ranks) if event.collective == "all_gather" else 1
            if event.collective != "recv":
                yield event.nbytes / share, event.dtype


def _missing(case: Case, rank: int, gradients: Gradients, rest: float) -> Finding | None:
    """A finding if this rank did not send some parameter's gradient of the first step."""
    inputs = case.inputs[rank]
    sent = [
        c.payloads[rank]
        for c in case.trace.collectives
        if rank in c.payloads and "float" in c.dtype and reaches_all(c, case.world_size)
    ]
    size = sum(p.size for p in oracle.parameters_of(inputs))
    # A larger payload holds more than a rank may send in all steps together.
    payloads = [
        np.asarray(p, dtype=np.float64).ravel()
        for p in sent
        if np.size(p) <= 4 * MOST * CALLS * size
    ]
    payloads = [payload for payload in payloads if np.isfinite(payload).all()]
    per_batch = [
        gradients(inputs, x, y) for x, y in zip(inputs["x"][0], inputs["y"][0], strict=True)
    ]
    for number, each in enumerate(zip(*per_batch, strict=True)):
        if not any(carried.holds_sum(payload, list(each), rest) for payload in payloads):
            return Finding(
                f"the gradient of parameter {number} in the first step, a sum over "
                f"{MICRO_BATCHES} micro-batches, is in nothing that this rank sent to all others.",
                rank,
            )
    return None


def _by_messages(events: list[Event]) -> bool:
    """Whether a rank contributed most of its bytes as messages to single ranks."""
    messages = [event for event in events if event.collective == "send"]
    return _contributed(messages) > _contributed(events) / 2


Gradients = Callable[[Values, np.ndarray, np.ndarray], list[np.ndarray]]


def _token_gradients(inputs: Values, tokens: np.ndarray, targets: np.ndarray) -> list[np.ndarray]:
    model: nn.Module = TokenModel(inputs, torch.float64)
    token_loss(model(torch.from_numpy(tokens)), torch.from_numpy(targets)).backward()
    return [oracle.grad_of(p) for p in model.parameters()]


def judge_tokens(case: Case) -> Iterator[Finding]:
    """Gradients with token weights travel about once per step."""
    return _judge(case, _token_gradients, REST["float32"])


def judge_amp(case: Case) -> Iterator[Finding]:
    """Gradients of mixed precision travel about once per step."""
    return _judge(case, oracle.gradients, REST["bfloat16"])


def _judge(case: Case, gradients_of: Gradients, rest: float) -> Iterator[Finding]:
    """All gradients travel about once per step, not once per micro-batch."""
    gradients = sum(p.nbytes for p in oracle.parameters_of(case.inputs[0]))
    whole = {c.key for c in case.trace.collectives if reaches_all(c, case.world_size)}
    for rank, events in enumerate(case.trace.events):
        times = _numbers(events) / (CALLS * gradients / 4)  # they are float32
        to_all = _contributed(e for e in events if e.key in whole) / (CALLS * gradients)
        if times > (MOST_IN_MESSAGES if _by_messages(events) else MOST):
            yield Finding(
                f"{times:.1f} times the gradients travelled in a step of {MICRO_BATCHES} "
                "micro-batches, once is enough: forward and backward of all but the last one "
                "belong inside no_sync().",
                rank,
            )
        elif to_all < LEAST:
            yield Finding(
                f"only {to_all:.1f} times the gradients travelled to all ranks in a step: those of "
                "the last micro-batch have to be synchronised, with all that was added up before.",
                rank,
            )
        elif _by_messages(events):
            continue  # a hand-made ring cuts gradients at any place and adds to them on the way
        elif problem := _missing(case, rank, gradients_of, rest):
            yield problem
