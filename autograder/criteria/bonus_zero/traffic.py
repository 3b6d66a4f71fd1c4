"""Criteria for what a sharded optimiser sends, judged from the emulated cluster's trace.

Each rank asks for a charge before each step, so that the trace shows where a step begins. The
broker carries all values. So the trace also shows whether every rank sent its share of the new
parameters and no more, and whether the rank's gradient was in a reduction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from autograder.criteria.bonus_zero import harness
from autograder.criteria.common.charged import reaches_all
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from minidist.emulate.trace import Collective

STEPS, LR = 3, 0.05
# Here, whole tensors can be distributed over the ranks nearly as evenly as a flat vector. Three
# ranks (as in grading) divide neither the tensors nor the numbers of a group.
GROUPS = ([[61]] * 40, [[7]] * 16)
SHARE_SLACK, BYTES_SLACK, SMALL = 1.12, 1.1, 64
FLOATS = ("float32", "float64")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")


def draw_zero1(draw: Draw) -> list[Values]:
    """Two groups of many small tensors."""
    return harness.draw_training(draw, [(shapes, {}) for shapes in GROUPS], STEPS)


def draw_zero2(draw: Draw) -> list[Values]:
    """The inputs of `draw_zero1`, with two micro-batches per step."""
    return harness.draw_training(draw, [(shapes, {}) for shapes in GROUPS], STEPS, 2)


def observe(zero: Any, inputs: Values, context: Context) -> Values:
    """Runs some steps of SGD; returns the final parameters."""
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.SGD, lr=LR)
    for step in range(STEPS):
        context.broker.charge(0, "forward")
        harness.take_step(optimizer, parameters, inputs, step)
    return harness.arrays_of(parameters, "p")


# --- what the broker saw -------------------------------------------------------------------------


class _LastStep:
    """The collectives of one rank's last step."""

    def __init__(self, case: Case, rank: int) -> None:
        self.rank = rank
        events = case.trace.events[rank]
        marks = [i for i, e in enumerate(events) if e.kind == "compute"]
        begin = marks[-1] if len(marks) == STEPS else len(events)
        keys = {e.key for e in events[begin:] if e.kind == "issue"}
        self.all: list[Collective] = [
            c for c in case.trace.collectives if c.key in keys and c.kind != "barrier"
        ]
        whole = [c for c in self.all if reaches_all(c, case.world_size)]
        self.reductions = [c for c in whole if c.kind in REDUCTIONS]
        self.copies = [c for c in whole if c.kind not in REDUCTIONS]

    def sent(self, collectives: list[Collective]) -> np.ndarray:
        """All numbers that this rank put into `collectives`."""
        payloads = [c.payloads.get(self.rank) for c in collectives]
        flat = [np.asarray(p, dtype=np.float64).ravel() for p in payloads if p is not None]
        return np.concatenate(flat) if flat else np.zeros(0)

    def coarse(self) -> Finding | None:
        """A finding if more than SMALL numbers travelled in a dtype not in FLOATS."""
        for c in self.all:
            if c.dtype not in FLOATS and c.numel > SMALL:
                return Finding(
                    f"{c.numel} numbers travelled as {c.dtype}, expected float32.", self.rank
                )
        return None

    def ring_bytes(self, world_size: int) -> float:
        """Bytes through this rank's link, with ring algorithms."""
        n, total = world_size, 0.0
        for c in self.all:
            ring = (n - 1) / n if c.kind in _WHOLE else 1.0
            total += c.nbytes * (2 * (n - 1) / n if c.kind == "all_reduce" else ring)
        return total


_WHOLE = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def _contained(wanted: np.ndarray, sent: np.ndarray) -> float:
    """The fraction of the numbers in `wanted` that are also in `sent`, up to rounding."""
    if not len(sent):
        return 0.0
    pool = np.sort(sent)
    after = np.clip(np.searchsorted(pool, wanted), 0, len(pool) - 1)
    before = np.clip(after - 1, 0, len(pool) - 1)
    near = np.minimum(np.abs(pool[after] - wanted), np.abs(pool[before] - wanted))
    return float(np.mean(near <= 2e-6 * np.abs(wanted) + 1e-9))


def _numel(case: Case) -> int:
    return sum(int(np.prod(shape)) for shape in case.inputs[0]["shapes"])


def _share_sent(case: Case, rank: int, micro: int, sent: np.ndarray) -> float:
    """The share of a rank's gradient of a micro-batch of the last step that is in `sent`."""
    values = case.inputs[rank]
    names = (f"c{STEPS - 1}/{micro}/{i}" for i in range(len(values["shapes"])))
    gradient = np.concatenate([values[name].astype(np.float64).ravel() for name in names])
    return max(_contained(gradient * s, sent) for s in (1.0, 1 / case.world_size, 0.5))


def _gradient_problem(case: Case, step: _LastStep) -> Finding | None:
    """A finding if reductions over all ranks lack this rank's gradients of the last step."""
    sent = step.sent(step.reductions)
    for micro in range(case.inputs[step.rank]["micro_batches"]):
        found = _share_sent(case, step.rank, micro, sent)
        if found < 0.99:
            return Finding(
                f"only {100 * found:.0f} % of this rank's gradient of micro-batch {micro + 1} was "
                f"in a reduction over all {case.world_size} ranks.",
                step.rank,
            )
    return None


def _share_problem(case: Case, steps: list[_LastStep]) -> Finding | None:
    """A finding if a rank sent more than its share, or if no rank sent some new parameters."""
    share = sum(-(-sum(s[0] for s in shapes) // case.world_size) for shapes in GROUPS)
    for step in steps:
        count = len(step.sent(step.copies))
        if count > SHARE_SLACK * share + 8:
            return Finding(
                f"this rank sent {count} numbers beyond reductions, expected {share}: the "
                f"parameters that it has updated, 1/{case.world_size} of {_numel(case)}.",
                step.rank,
            )
    everything = np.concatenate([step.sent(step.copies) for step in steps])
    for rank, answer in enumerate(case.answers):
        arrays = [answer[f"p{i}"] for i in range(len(case.inputs[0]["shapes"]))]
        final = np.concatenate([np.asarray(a, dtype=np.float64).ravel() for a in arrays])
        found = _contained(final, everything)
        if found < 0.99:
            return Finding(
                f"only {100 * found:.0f} % of the new parameters were sent by the rank that "
                "updated them, in an all-gather or a broadcast to all ranks. Does every rank "
                "update all of them by itself?",
                rank,
            )
    return None


def _prepare(case: Case) -> list[Finding] | list[_LastStep]:
    """Each rank's last step, or findings if the training was not right up to a factor."""
    expected = harness.trained(case, torch.optim.SGD, {"lr": LR})[-1]
    found = [harness.same_direction(case, r, "p", expected) for r in range(case.world_size)]
    why = "What travels is judged where the numbers are right."
    wrong = [Finding(f"{f.message} {why}", f.rank) for f in found if f]
    return wrong or [_LastStep(case, rank) for rank in range(case.world_size)]


def _judge(case: Case, most_bytes: float, hint: str) -> list[Finding]:
    prepared = _prepare(case)
    steps = [step for step in prepared if isinstance(step, _LastStep)]
    if not steps:
        return [finding for finding in prepared if isinstance(finding, Finding)]
    if case.world_size == 1:
        return []
    for step in steps:
        problem = step.coarse() or _gradient_problem(case, step)
        sent = step.ring_bytes(case.world_size)
        if problem is None and sent > BYTES_SLACK * most_bytes + 4 * SMALL:
            problem = Finding(
                f"{sent:.0f} bytes went through this rank's link in a step, expected at most "
                f"{most_bytes:.0f}. {_scattered(case, step) or hint}",
                step.rank,
            )
        if problem:
            return [problem]
    return [problem] if (problem := _share_problem(case, steps)) else []


def _scattered(case: Case, step: _LastStep) -> str:
    """A hint if an all-reduce carries something else, and none carries the gradient."""
    reduced = [c for c in step.reductions if c.kind == "all_reduce"]
    if not reduced or _share_sent(case, step.rank, 0, step.sent(reduced)) > 0.5:
        return ""
    return "An all-reduce carries other numbers than gradients: gather the shares (all-gather)."


def judge_zero1(case: Case) -> list[Finding]:
    """Allows one all-reduce of the gradient; each rank sends its share of the new parameters.

    That may be an all-gather, with a list or without, or a broadcast by each owner.
    """
    n, whole = case.world_size, 4 * _numel(case)
    # The ranks may all-gather the shares in a ring, or each owner may broadcast its share.
    most = whole * (2 * (n - 1) / n + 1)
    return _judge(case, most, "An all-reduce of the gradient, an all-gather of the shares.")


def judge_zero2(case: Case) -> list[Finding]:
    """Allows one reduce-scatter per micro-batch; each rank sends its share of the parameters.

    Any collective that sends no more will do, also a reduce-scatter with a list.
    """
    n, whole = case.world_size, 4 * _numel(case)
    most = whole * (2 * (n - 1) / n + 1)  # one reduce-scatter for each of two micro-batches
    return _judge(
        case,
        most,
        "A rank needs only its part of the sum: that is a reduce-scatter, half an all-reduce.",
    )
