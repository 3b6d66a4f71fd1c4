"""Ways to look fast on the emulated cluster, as traces: what the judges of lab 1 say of each.

A trace is made in this process from what a rank would send, so every form costs milliseconds. The
gradients in it are right, with the factors that the plan gives out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Draw
from autograder.criteria.lab1_ddp import emulated
from autograder.criteria.lab1_ddp.network import make_model
from minidist.emulate.plan import PlanChannel
from minidist.emulate.session import Session

N, LAYERS, STEPS = 3, emulated.LAYERS, emulated.STEPS
EVERYBODY = list(range(N))
NOTHING = np.empty(0, np.uint8)
JUDGES = (emulated.judge_buckets, emulated.judge_overlap, emulated.judge_scaling)
Action = (
    tuple  # ("charge", layer, direction) | ("reduce", gradient, dtype, ranks) | ("wait", number)
)
Program = Callable[[int, list[list[np.ndarray]]], Iterator[Action]]


def _seed(purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:16], "big")


@pytest.fixture(scope="module")
def handed_out():
    """Inputs and plan, and every rank's own gradients per step."""
    draw = Draw(N, _seed)
    inputs = emulated.draw_steps(draw)
    plan = emulated.plan_steps(draw)
    gradients = []
    for rank in range(N):
        model = make_model(inputs[rank], PlanChannel(plan, rank), [])
        steps = []
        for step in range(STEPS):
            x, y = (torch.from_numpy(inputs[rank][f"{name}/{step}"]) for name in "xy")
            model.zero_grad()
            oracle.mse(model(x), y).backward()
            steps.append([oracle.grad_of(p).copy() for p in model.parameters()])
        gradients.append(steps)
    return inputs, plan, gradients


def _run(handed_out, program: Program) -> Case:
    inputs, plan, gradients = handed_out
    session = Session(
        1, N, plan, lambda *_: None, keep_payloads=True, deadline_s=30.0, max_bytes=1 << 30
    )
    requests = itertools.count()
    for rank in range(N):
        session.handle(rank, {"t": "join", "q": next(requests)}, NOTHING)
        counts: dict[str, int] = {}
        for kind, *what in program(rank, gradients[rank]):
            if kind == "charge":
                layer, direction = what
                charge = {"t": "charge", "layer": layer, "dir": direction, "q": next(requests)}
                session.handle(rank, charge, NOTHING)
            elif kind == "wait":
                session.handle(rank, {"t": "wait", "key": f"g{EVERYBODY}/{what[0]}"}, NOTHING)
            else:
                gradient, dtype, ranks = what
                group = f"g{ranks}"
                payload = gradient.astype(dtype).ravel()
                issue = {
                    "t": "issue",
                    "g": group,
                    "r": ranks,
                    "kind": "all_reduce",
                    "op": "sum",
                    "dtype": dtype,
                    "shape": [payload.size],
                    "k": counts.get(group, 0),
                }
                counts[group] = counts.get(group, 0) + 1
                session.handle(rank, issue, payload.view(np.uint8))
    return Case(N, inputs, [{"done": 1}] * N, session.trace(), plan)


def _forward() -> Iterator[Action]:
    return (("charge", layer, "forward") for layer in range(LAYERS))


def _backward() -> Iterator[Action]:
    return (("charge", layer, "backward") for layer in reversed(range(LAYERS)))


def overlapped(rank: int, gradients: list[list[np.ndarray]]) -> Iterator[Action]:
    """What is asked for: the gradients of two layers leave while backward goes on."""
    yield from _in_hooks(gradients, EVERYBODY, waits=True)


def in_a_group_of_its_own(rank: int, gradients: list[list[np.ndarray]]) -> Iterator[Action]:
    """The same, but each rank reduces with itself alone: nothing is sent, in no time."""
    yield from _in_hooks(gradients, [rank], waits=False)


def with_one_neighbour(rank: int, gradients: list[list[np.ndarray]]) -> Iterator[Action]:
    """Ranks 0 and 1 reduce with each other, the last one alone: fewer bytes than for all."""
    yield from _in_hooks(gradients, [0, 1] if rank < 2 else [2], waits=False)


def _in_hooks(gradients, ranks: list[int], *, waits: bool) -> Iterator[Action]:
    for step in range(STEPS):
        yield from _forward()
        for layer in reversed(range(LAYERS)):
            yield ("charge", layer, "backward")
            if layer % 2 == 0:
                yield ("reduce", np.stack(gradients[step][layer : layer + 2]), "float32", ranks)
        if waits:
            first = step * LAYERS // 2
            yield from (("wait", number) for number in range(first, first + LAYERS // 2))


def _after(gradients, *, waits: bool, steps=range(STEPS), dtype="float32") -> Iterator[Action]:
    number = itertools.count()
    for step in range(STEPS):
        yield from _forward()
        yield from _backward()
        for layer in range(0, LAYERS, 2) if step in steps else ():
            yield ("reduce", np.stack(gradients[step][layer : layer + 2]), dtype, EVERYBODY)
            if waits:
                yield ("wait", next(number))


def after_backward(rank: int, gradients: list[list[np.ndarray]]) -> Iterator[Action]:
    """Nothing overlaps."""
    return _after(gradients, waits=True)


def after_backward_without_waits(rank, gradients) -> Iterator[Action]:
    """The data is taken, but no wait for it is reported."""
    return _after(gradients, waits=False)


def only_the_step_that_is_looked_at(rank, gradients) -> Iterator[Action]:
    """The steps before send nothing at all."""
    return _after(gradients, waits=False, steps=[STEPS - 1])


def in_half_precision(rank, gradients) -> Iterator[Action]:
    """Half of the bytes, only in the last step, and no waits."""
    return _after(gradients, waits=False, steps=[STEPS - 1], dtype="float16")


def paid_ahead(rank: int, gradients: list[list[np.ndarray]]) -> Iterator[Action]:
    """All backward passes but the very last are paid for in the step that is not timed."""
    yield from _forward()
    for layer in range(LAYERS):
        yield from [("charge", layer, "backward")] * (STEPS if layer else STEPS - 1)
    for step in range(STEPS):
        if step:
            yield from _forward()
        if step == STEPS - 1:
            yield ("reduce", gradients[step][-1], "float32", EVERYBODY)
            yield ("charge", 0, "backward")
        yield from (("reduce", g, "float32", EVERYBODY) for g in gradients[step])


def all_but_the_first_step_overlapped_without_waits(rank, gradients) -> Iterator[Action]:
    """Everything travels in time, but nobody waits for it."""
    yield from _in_hooks(gradients, EVERYBODY, waits=False)


def reduced_in_the_last_step_only(rank: int, gradients) -> Iterator[Action]:
    """As it is asked for, but only in the last of the steps that are timed."""
    for _ in range(STEPS - 1):
        yield from _forward()
        yield from _backward()
    yield from _forward()
    for layer in reversed(range(LAYERS)):
        yield ("charge", layer, "backward")
        if layer % 2 == 0:
            both = np.stack(gradients[STEPS - 1][layer : layer + 2])
            yield ("reduce", both, "float32", EVERYBODY)
    yield from (("wait", number) for number in range(LAYERS // 2))


def backward_paid_in_forward(rank: int, gradients) -> Iterator[Action]:
    """Half of the backward is paid for before the forward has ended, so that more hides behind."""
    for step in range(STEPS):
        half = LAYERS // 2
        yield from (("charge", layer, "forward") for layer in range(half))
        yield from (("charge", layer, "backward") for layer in reversed(range(half)))
        yield from (("charge", layer, "forward") for layer in range(half, LAYERS))
        for layer in reversed(range(half, LAYERS)):
            yield ("charge", layer, "backward")
        for layer in range(0, LAYERS, 2):
            yield ("reduce", np.stack(gradients[step][layer : layer + 2]), "float32", EVERYBODY)
            yield ("wait", step * half + layer // 2)


def test_what_is_asked_for_passes(handed_out):
    case = _run(handed_out, overlapped)
    assert [list(judge(case)) for judge in JUDGES] == [[], [], []]


@pytest.mark.parametrize(
    "program",
    [
        in_a_group_of_its_own,
        with_one_neighbour,
        after_backward,
        after_backward_without_waits,
        only_the_step_that_is_looked_at,
        in_half_precision,
        paid_ahead,
    ],
)
def test_nothing_else_is_taken_for_overlap(handed_out, program):
    case = _run(handed_out, program)
    assert list(emulated.judge_overlap(case)), program.__doc__
    assert list(emulated.judge_scaling(case)), program.__doc__


@pytest.mark.parametrize(
    "program",
    [
        all_but_the_first_step_overlapped_without_waits,
        reduced_in_the_last_step_only,
        backward_paid_in_forward,
    ],
)
def test_every_timed_step_is_proven(handed_out, program):
    case = _run(handed_out, program)
    assert list(emulated.judge_scaling(case)), program.__doc__


def test_the_margin_is_where_it_was_meant_to_be(handed_out):
    """Without waits and in the last step only is as fast as it gets without overlap: below 0.9."""
    efficiency = [
        emulated.scaling_efficiency(_run(handed_out, program))[0]
        for program in (after_backward, only_the_step_that_is_looked_at, overlapped)
    ]
    assert efficiency[0] == pytest.approx(emulated.AFTER_BACKWARD, abs=0.01)
    assert efficiency[1] < 0.85
    assert efficiency[2] > 0.93
