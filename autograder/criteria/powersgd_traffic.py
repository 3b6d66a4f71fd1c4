"""Criteria for what PowerSGD sends, judged from the emulated cluster's trace.

Before each step the rank asks for a charge, so that the trace shows where a step begins.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autograder.criteria import oracle
from autograder.criteria.base import Case, Context, Draw, Finding, Values
from autograder.criteria.powersgd_columns import expected_shape
from autograder.criteria.powersgd_model import draw_gradients, parameters_for, run_step
from minidist.emulate.plan import ChargePlan
from minidist.emulate.trace import Event

LAYERS, STEPS, RANK = 6, 3, 2
SLACK_BYTES = 200  # for a message that only agrees on something
MOST_CALLS = 3


def plan(draw: Draw) -> ChargePlan:
    """One layer of no cost: its charges mark the steps."""
    return ChargePlan((1e-6,), (1e-6,), draw.seed("charges").to_bytes(16, "big"))


def draw(source: Draw) -> list[Values]:
    """Layers of two sizes, each with a bias."""
    rng = source.shared("sizes")
    shapes: list[tuple[int, ...]] = []
    for _ in range(LAYERS // 2):
        n, m = int(rng.integers(50, 70)), int(rng.integers(50, 70))
        shapes += [(n, m), (n,), (m, n), (m,)]
    return draw_gradients(source, shapes, STEPS, "float32", rank=RANK)


def observe(powersgd: Any, inputs: Values, context: Context) -> Values:
    """Three steps; a sum of the gradients, so that something was computed."""
    parameters = parameters_for(inputs["shapes"], torch.float32, context.device)
    reducer = powersgd(iter(parameters), inputs["rank"], seed=inputs["seed"])
    for step in range(STEPS):
        context.broker.charge(0, "forward")
        run_step(reducer, parameters, inputs, step)
    return {"norms": [float(abs(oracle.grad_of(p)).sum()) for p in parameters]}


def _steps(case: Case, rank: int) -> list[list[Event]] | Finding:
    """What a rank sent in each step, barriers left out."""
    assert case.trace is not None
    steps: list[list[Event]] = []
    for event in case.trace.events[rank]:
        if event.kind == "compute":
            steps.append([])
        elif event.kind == "issue" and event.collective not in ("barrier", "recv") and steps:
            steps[-1].append(event)
    if len(steps) != STEPS:
        return Finding(f"{len(steps)} steps were begun, expected {STEPS}.", rank)
    if case.world_size > 1 and not all(steps):
        return Finding("a step sent nothing at all.", rank)
    return steps


def _all_steps(case: Case) -> list[list[list[Event]]] | list[Finding]:
    assert case.trace is not None
    if case.trace.faults:
        return [Finding(fault) for fault in case.trace.faults]
    found = [_steps(case, rank) for rank in range(case.world_size)]
    problems = [steps for steps in found if isinstance(steps, Finding)]
    return problems or [steps for steps in found if not isinstance(steps, Finding)]


def judge_calls(case: Case) -> list[Finding]:
    """No step has more than three collectives."""
    findings: list[Finding] = []
    for rank, steps in enumerate(_all_steps(case)):
        if isinstance(steps, Finding):
            findings.append(steps)
            continue
        most = max(len(step) for step in steps)
        if most > MOST_CALLS:
            tensors = len(case.inputs[0]["shapes"])
            findings.append(Finding(
                f"a step took {most} collectives for {tensors} parameters, expected at most "
                f"{MOST_CALLS}: all P together, all Q together, and all that is not compressed. "
                "Every collective costs its latency, however little it carries.", rank,
            ))  # fmt: skip
    return findings


def judge_bytes(case: Case) -> list[Finding]:
    """No step sends more than the thin matrices and what is not compressed."""
    findings: list[Finding] = []
    shapes, rank_r = case.inputs[0]["shapes"], case.inputs[0]["rank"]
    whole = 4 * sum(math.prod(shape) for shape in shapes)
    pairs = [(shape, expected_shape(shape, rank_r)) for shape in shapes]
    least = 4 * sum(rank_r * sum(nm) if nm else math.prod(shape) for shape, nm in pairs)
    for rank, steps in enumerate(_all_steps(case)):
        if isinstance(steps, Finding):
            findings.append(steps)
            continue
        # Of the same data an all-reduce sends twice as much as any other collective.
        sent = max(
            sum(e.nbytes * (1.0 if e.collective == "all_reduce" else 0.5) for e in step)
            for step in steps
        )
        if sent > 1.02 * least + SLACK_BYTES:
            hint = "What else travels?"
            if sent >= whole:
                hint = f"Uncompressed it would be {whole}."
            findings.append(Finding(
                f"a step sent {sent:.0f} bytes, expected {least}: {rank_r} (n + m) numbers for "
                f"each matrix that is worth it, and the others as they are. {hint}", rank,
            ))  # fmt: skip
    return findings
