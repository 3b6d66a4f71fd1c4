"""Criteria for what PowerSGD sends, judged from the emulated cluster's trace.

Before each step the rank asks for a charge, so that the trace shows where a step begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from autograder.criteria.bonus_powersgd.columns import expected_shape
from autograder.criteria.bonus_powersgd.model import draw_gradients, parameters_for, run_step
from autograder.criteria.common import carried, oracle
from autograder.criteria.common.charged import reaches_all
from autograder.criteria.common.emulated import of_every_rank
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.trace import Event

LAYERS, STEPS, RANK = 6, 3, 2
MANY = 120  # steps of a longer run, to find what is sent in few steps only
REST = 0.005  # allowed relative error of an uncompressed gradient; 16 bits use a third of it
SLACK_BYTES = 200  # for a message in which ranks only agree on something
MOST_CALLS = 3
MAX_NUMBERS = 100_000  # a larger payload was made to waste the judge's time
# Share of the numbers that a step has to send. The share is low because other criteria check
# whether a P, a Q or vectors were forgotten.
LEAST_SHARE = 0.5


def draw(source: Draw, taken: int = STEPS) -> list[Values]:
    """Layers of two sizes, each with a bias.

    Args:
        taken: how many steps are taken; the gradients of the first STEPS steps are repeated.
    """
    rng = source.shared("sizes")
    shapes: list[tuple[int, ...]] = []
    for _ in range(LAYERS // 2):
        n, m = int(rng.integers(50, 70)), int(rng.integers(50, 70))
        shapes += [(n, m), (n,), (m, n), (m,)]
    inputs = draw_gradients(source, shapes, STEPS, "float32", rank=RANK)
    return [values | {"taken": taken} for values in inputs]


draw_many = partial(draw, taken=MANY)


def observe(powersgd: Any, inputs: Values, context: Context) -> Values:
    """Takes all steps; returns a sum per gradient, so that there is a result."""
    parameters = parameters_for(inputs["shapes"], torch.float32, context.device)
    reducer = powersgd(iter(parameters), inputs["rank"], seed=inputs["seed"])
    for step in range(inputs["taken"]):
        context.broker.charge(0, "forward")
        run_step(reducer, parameters, inputs, step % STEPS)
    return {"norms": [float(abs(oracle.grad_of(p)).sum()) for p in parameters]}


def _steps(case: Case, rank: int) -> list[list[Event]] | Finding:
    """The collectives and sends that a rank issued in each step, without barriers; or a finding."""
    steps: list[list[Event]] = []
    for event in case.trace.events[rank]:
        if event.kind == "compute":
            steps.append([])
        elif event.kind == "issue" and event.collective not in ("barrier", "recv") and steps:
            steps[-1].append(event)
    taken = case.inputs[0]["taken"]
    if len(steps) != taken:
        return Finding(f"{len(steps)} steps were begun, expected {taken}.", rank)
    if case.world_size > 1:
        for number, step in enumerate(steps):
            if problem := _too_little(case, rank, step):
                return Finding(f"step {number}: {problem}", rank)
    return steps


def _too_little(case: Case, rank: int, step: list[Event]) -> str | None:
    """Why a step cannot have computed means of gradients over all ranks, or None."""
    payloads = _payloads(case, rank, step)
    if len(payloads) < len(step):
        event = next(event for event in step if event.key not in payloads)
        return (
            f"{event.collective} among ranks {list(event.ranks)}; a mean takes all "
            f"{case.world_size} of them."
        )
    sent = sum(int(np.count_nonzero(payload)) for payload in payloads.values())
    least = _least_numbers(case)
    if sent < LEAST_SHARE * least:
        return (
            f"{sent} numbers other than zero were sent, expected {least}: all P, all Q, and all "
            "that is not compressed."
        )
    return None


def _payloads(case: Case, rank: int, step: list[Event]) -> dict[str, np.ndarray]:
    """This rank's payloads of a step, from the collectives in which all ranks took part."""
    keys = {event.key for event in step}
    nothing = np.zeros(0)
    return {
        c.key: np.asarray(c.payloads.get(rank, nothing))
        for c in case.trace.collectives
        if c.key in keys and reaches_all(c, case.world_size)
    }


def _least_numbers(case: Case) -> int:
    """How many numbers a step has to send: r (n + m) per matrix, other parameters in full."""
    total, rank_r = 0, case.inputs[0]["rank"]
    for shape in case.inputs[0]["shapes"]:
        pair = expected_shape(shape, rank_r)
        total += rank_r * sum(pair) if pair else math.prod(shape)
    return total


def _found_beside(case: Case, rank: int) -> str | None:
    """Words for needless communication: any before the first step, and barriers in steps."""
    events = case.trace.events[rank]
    began = [i for i, event in enumerate(events) if event.kind == "compute"]
    early = [event.collective for event in events[: began[0]] if event.kind == "issue"]
    if early:
        return (
            f"{early[0]} before the first step: every rank can draw the same Q without "
            "communication."
        )
    # After the last step there may be barriers of ours.
    if any(e.collective == "barrier" for e in events[: began[-1]] if e.kind == "issue"):
        return "a barrier in a step: all ranks wait, and nothing needs it."
    return None


def judge_calls(case: Case) -> Iterator[Finding]:
    """No step has more than three collectives, and nothing is sent but in steps.

    Two are right, too: uncompressed gradients may travel with all P.
    """
    for rank, steps in enumerate(of_every_rank(case, _steps)):
        if isinstance(steps, Finding):
            yield steps
            continue
        if problem := _found_beside(case, rank):
            yield Finding(problem, rank)
            continue
        counts = [len(step) for step in steps]
        most = max(counts)
        if most > MOST_CALLS:
            tensors = len(case.inputs[0]["shapes"])
            yield Finding(
                f"step {counts.index(most)} took {most} collectives for {tensors} parameters, "
                f"expected at most {MOST_CALLS}: all P together, all Q together, and all that is "
                "not compressed. Every collective costs its latency, however little it carries.",
                rank,
            )


def judge_bytes(case: Case) -> Iterator[Finding]:
    """A step sends no more than the thin matrices and all that is not compressed."""
    shapes, rank_r = case.inputs[0]["shapes"], case.inputs[0]["rank"]
    whole = 4 * sum(math.prod(shape) for shape in shapes)
    least = 4 * _least_numbers(case)
    for rank, steps in enumerate(of_every_rank(case, _steps)):
        if isinstance(steps, Finding):
            yield steps
            continue
        # For the same data, an all-reduce sends twice as much as any other collective.
        sent = max(
            sum(e.nbytes * (1.0 if e.collective == "all_reduce" else 0.5) for e in step)
            for step in steps
        )
        if sent > 1.02 * least + SLACK_BYTES:
            hint = "What else travels?"
            if sent >= whole:
                hint = f"Uncompressed it would be {whole}."
            yield Finding(
                f"a step sent {sent:.0f} bytes, expected {least}: {rank_r} (n + m) numbers for "
                f"each matrix that is worth it, and the others as they are. {hint}",
                rank,
            )
            continue
        for number, step in enumerate(steps):
            missing = _missing_vector(case, rank, number, step)
            if case.world_size > 1 and missing is not None:
                yield Finding(
                    f"step {number}: the gradient of parameter {missing}, shape {shapes[missing]}, "
                    "is in nothing that this rank sent. It is not compressed, so it has to travel "
                    "as it is.",
                    rank,
                )
                break


def _missing_vector(case: Case, rank: int, number: int, step: list[Event]) -> int | None:
    """The first uncompressed parameter whose gradient was not sent, or None."""
    found = _payloads(case, rank, step).values()
    payloads = [p.astype(np.float64).ravel() for p in found if p.size <= MAX_NUMBERS]
    payloads = [p for p in payloads if np.isfinite(p).all()]
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        own = case.inputs[rank][f"g{number}/{i}"].astype(np.float64)
        if expected_shape(shape, case.inputs[0]["rank"]) is None and not any(
            carried.holds_sum(payload, [own], REST) for payload in payloads
        ):
            return i
    return None
