"""Criteria for error feedback: which errors are kept, that nothing is lost, and checkpoints."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.bonus_powersgd.columns import expected_shape
from autograder.criteria.bonus_powersgd.model import (
    SHAPES,
    as_array,
    draw_gradients,
    explain,
    matrices_of,
    observe_steps,
    parameters_for,
    power_step,
    run_step,
    start_of,
)
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import finite_floats
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

observe = observe_steps
NOTHING = 1e-6  # relative to the largest true value: a smaller gradient counts as zero
TINY = 1e-7  # small, but not zero: Q goes on from such gradients, too
FLAT = tuple(shape for shape in SHAPES if len(shape) < 3)


def draw_telescope(draw: Draw) -> list[Values]:
    """Six steps, each with different gradients; in one of them, a rank has zeros for a matrix."""
    inputs = draw_gradients(draw, SHAPES, 6, "float64", rank=1)
    inputs[-1]["g2/0"] = np.zeros(SHAPES[0])
    return inputs


def draw_errors(draw: Draw) -> list[Values]:
    """One step; the errors are asked for before it, too."""
    inputs = draw_gradients(draw, FLAT, 1, "float64", rank=2)
    return [values | {"at start": True} for values in inputs]


def draw_steps(draw: Draw) -> list[Values]:
    """Five steps; the compression rank is drawn, too. A matrix begins with tiny gradients."""
    inputs = draw_gradients(draw, SHAPES, 5, "float64")
    return [values | {"g0/0": TINY * values["g0/0"]} for values in inputs]


def judge_telescope(case: Case) -> list[Finding]:
    """All applied gradients plus the mean of the remaining errors are the sum of the true means."""
    findings: list[Finding] = []
    steps = case.inputs[0]["steps"]
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        if not expected_shape(shape, case.inputs[0]["rank"]):
            continue
        left: list[np.ndarray] = []
        for rank, answer in enumerate(case.answers):
            error = finite_floats(answer.get(f"e{steps - 1}/{i}"), shape)
            if error is None:
                return [Finding(f"error_of({i}): expected finite numbers of shape {shape}.", rank)]
            left.append(error)
        means = [oracle.mean([v[f"g{s}/{i}"] for v in case.inputs]) for s in range(steps)]
        true = np.sum(means, axis=0)
        late = oracle.mean(left)
        for rank, answer in enumerate(case.answers):
            parts = [finite_floats(answer.get(f"a{s}/{i}"), shape) for s in range(steps)]
            applied = [part for part in parts if part is not None]
            total = np.sum(applied, axis=0) + late if len(applied) == steps else None
            hint = _first_wrong_error(case, i, steps)
            if not any(error.any() for error in left):
                hint = "All errors are zero: what was not sent is lost."
            if _is_nothing(applied, true):
                findings.append(
                    Finding(
                        f"parameter {i}: the gradients after {steps} steps are all zero. Nothing "
                        "was applied, so all of it is late.",
                        rank,
                    )
                )
                break
            # The tolerance comes from the true means, because the rank reports what was applied.
            if wrong := oracle.differs(
                rank,
                f"parameter {i}: the sum of {steps} applied gradients + the mean error, held "
                "against the sum of the true means",
                total,
                true,
                dtype="float32",
                hint=hint,
                terms=means,
            ):
                findings.append(wrong)
        if findings:
            break
    return findings


def _first_wrong_error(case: Case, i: int, steps: int) -> str:
    """The first step whose error is not gradient + old error - applied gradient, in words."""
    for step in range(steps):
        for rank, answer in enumerate(case.answers):
            new, old, applied = (
                np.asarray(answer.get(key, 0.0), np.float64)
                for key in (f"e{step}/{i}", f"e{step - 1}/{i}", f"a{step}/{i}")
            )
            own = case.inputs[rank][f"g{step}/{i}"].astype(np.float64)
            if not new.shape == applied.shape == own.shape or old.shape not in ((), own.shape):
                continue
            if np.allclose(new, own + old - applied, rtol=1e-3, atol=1e-3 * np.abs(own).max()):
                continue
            why = ""
            if step and np.allclose(new, own - applied, atol=1e-3 * np.abs(own).max()):
                why = " The old error is missing in it."
            elif step and np.array_equal(new, old):
                why = " It stayed as it was."
            return (
                f"First in step {step} on rank {rank}: the new error is not gradient + old error - "
                f"what was applied, which every rank computes in every step.{why}"
            )
    return "Every rank adds its error to its gradient once, before the step."


def _is_nothing(applied: list[np.ndarray], true: np.ndarray) -> bool:
    largest = max((float(np.abs(part).max()) for part in applied), default=0.0)
    return bool(applied) and largest < NOTHING * float(np.abs(true).max())


def judge_errors(case: Case) -> Iterator[Finding]:
    """After the first step, the error is the rank's own gradient minus the applied gradient."""
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        compressed = expected_shape(shape, case.inputs[0]["rank"])
        for rank, answer in enumerate(case.answers):
            own = case.inputs[rank][f"g0/{i}"].astype(np.float64)
            applied = finite_floats(answer.get(f"a0/{i}"), shape)
            if applied is None:
                yield Finding(f"the gradient of parameter {i}, {shape}, is not finite.", rank)
                return
            if compressed and _is_nothing([applied], own):
                yield Finding(
                    f"the gradient of parameter {i}, {shape}, is zero after the first step: "
                    "nothing was applied.",
                    rank,
                )
                return
            zeros = np.zeros(shape)
            if wrong := oracle.differs(
                rank, f"error_of({i}) before the first step", answer.get(f"e/{i}"), zeros
            ):
                yield wrong
                return
            got = answer.get(f"e0/{i}")
            hint = "" if compressed else "Of this shape a gradient travels as it is: no error."
            if compressed and isinstance(got, np.ndarray) and got.shape == tuple(shape):
                mean = oracle.mean([v[f"g0/{i}"] for v in case.inputs])
                if oracle.agrees(got, mean - applied):
                    hint = "That is the mean's error: each rank keeps its own."
                elif not got.any():
                    hint = "Nothing was kept. Or was the copy overwritten in place?"
                elif oracle.agrees(got, case.world_size * (own - applied)):
                    hint = f"That is {case.world_size} times the error: it needs no factor."
                else:
                    hint = (
                        "The error is this rank's gradient minus the gradient that came out of the "
                        "step, not minus what its own matrix gives."
                    )
            what = f"error_of({i}), shape {shape}, after the first step"
            expected = np.zeros(shape)
            if compressed:
                # What was applied is added on both sides: the tolerance comes from the gradient.
                what += ", + the gradient that was applied, held against this rank's own gradient"
                error, expected = finite_floats(answer.get(f"e0/{i}"), shape), own
                got = None if error is None else error + applied
            if wrong := oracle.differs(rank, what, got, expected, dtype="float32", hint=hint):
                yield wrong
                return


def judge_steps(case: Case) -> list[Finding]:
    """Every gradient of every step, as one process computes it from the student's first Q."""
    findings: list[Finding] = []
    r = case.inputs[0]["rank"]
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        compressed = expected_shape(shape, r)
        qs: Any = start_of(case, i, compressed[1]) if compressed else None
        if isinstance(qs, Finding):
            return [qs]
        errors: list[Any] = [0.0] * case.world_size
        for step in range(case.inputs[0]["steps"]):
            mean = oracle.mean([v[f"g{step}/{i}"] for v in case.inputs])
            expected = mean
            if compressed:
                totals = [m + e for m, e in zip(matrices_of(case, step, i), errors, strict=True)]
                p, q = power_step(totals, qs)
                qs, errors = [q] * case.world_size, [total - p @ q.T for total in totals]
                expected = (p @ q.T).reshape(shape)
            for rank, answer in enumerate(case.answers):
                got, own = answer.get(f"a{step}/{i}"), case.inputs[rank][f"g{step}/{i}"]
                if oracle.agrees(got, expected):
                    continue
                what = (
                    f"step {step}, compressed with rank {r}: gradient of parameter {i}, shape "
                    f"{shape}"
                )
                hint = explain(got, expected, mean, own, case.world_size)
                if not hint and compressed:
                    hint = _why_step(case, i, step, compressed[1], got)
                if wrong := oracle.differs(rank, what, got, expected, dtype="float32", hint=hint):
                    findings.append(wrong)
            if findings:
                return findings
    return findings


# Known mistakes in a step, and the hint for each.
_WAYS = {
    "none": "no error is added: add each rank's error to its gradient before the step",
    "forgets": "the new error is gradient - applied: the old error is missing in it",
    "twice": "the error is added twice",
    "times": "the error is multiplied by the number of ranks: it needs no factor",
    "stays": "each step starts from the Q of step 0: it starts from the Q of the step before",
    "raw": "P is not orthonormalised before Q is computed from it",
    "old": "the gradient is P times the old Q^T: it is P times the new one",
}


_AT_ONCE = ("raw", "old")  # these make the first step wrong, and later ones huge


def _why_step(case: Case, i: int, step: int, columns: int, got: Any) -> str:
    """A hint: the known mistake that gives this compressed gradient."""
    qs = start_of(case, i, columns)
    if isinstance(qs, Finding) or not isinstance(got, np.ndarray):
        return ""
    if not got.any():
        return "It is zero: nothing was applied."
    for how, why in _WAYS.items():
        if (step == 0) != (how in _AT_ONCE):
            continue
        value = _computed(case, i, step, qs, how)
        if oracle.agrees(got, value.reshape(case.inputs[0]["shapes"][i])):
            return f"That is what comes out if {why}."
    if (step, i) == (1, 0):
        return (
            "Step 1 starts from the Q that step 0 left, also where step 0's gradients were small "
            f"({TINY} here), but not zero."
        )
    if step:
        return (
            "The steps before it were right. Two things go on from step to step: each parameter's "
            "own Q, and each rank's error."
        )
    return ""


def _computed(case: Case, i: int, step: int, start: list[np.ndarray], how: str) -> np.ndarray:
    """The gradient of one step as a matrix, computed in one of `_WAYS`."""
    n, qs, applied = case.world_size, start, np.zeros(())
    errors: list[Any] = [0.0] * n
    for number in range(step + 1):
        own = matrices_of(case, number, i)
        totals = [m + e * (how != "none") for m, e in zip(own, errors, strict=True)]
        sums = [t + e * (how == "twice") for t, e in zip(totals, errors, strict=True)]
        p, q = power_step(sums, qs)
        if how == "raw":
            p = oracle.mean([m @ old for m, old in zip(sums, qs, strict=True)])
            q = oracle.mean(sums).T @ p
        applied = p @ (oracle.mean(qs) if how == "old" else q).T
        kept = own if how == "forgets" else totals
        errors = [(each - applied) * (n if how == "times" else 1) for each in kept]
        qs = start if how == "stays" else [q] * n
    return applied


# --- a checkpoint --------------------------------------------------------------------------------

BEFORE, AFTER = 2, 3
NUMEROUS = (*SHAPES, (10,), (12, 30), (7, 13))  # more than ten: "10" as text comes before "2"


def draw_resume(draw: Draw) -> list[Values]:
    """Steps before and after the checkpoint."""
    return draw_gradients(draw, NUMEROUS, BEFORE + AFTER, "float64", rank=2)


def observe_resume(subject: Any, inputs: Values, context: Context) -> Values:
    """Gradients after the checkpoint, of a reducer that continued and of one that was loaded."""
    feedback, save_state, load_state = subject
    dtype = getattr(torch, inputs["dtype"])
    parameters = parameters_for(inputs["shapes"], dtype, context.device)
    reducer = feedback(iter(parameters), inputs["rank"], seed=inputs["seed"])
    for step in range(BEFORE):
        run_step(reducer, parameters, inputs, step)
    file = io.BytesIO()
    torch.save(save_state(reducer), file)
    answer: Values = {}
    _errors(reducer, inputs, answer, "on")
    _go_on(reducer, parameters, inputs, answer, "on")
    # The reducer of a second job: nothing is shared with the first one, not even the seed.
    others = parameters_for(inputs["shapes"], dtype, context.device)
    loaded = feedback(iter(others), inputs["rank"], seed=inputs["seed"] + 1)
    run_step(loaded, others, inputs, 0)  # so there is something that loading has to replace
    file.seek(0)
    _errors(loaded, inputs, answer, "before")
    load_state(loaded, torch.load(file, weights_only=True))
    _errors(loaded, inputs, answer, "again")
    _go_on(loaded, others, inputs, answer, "again")
    return answer


def _errors(reducer: Any, inputs: Values, answer: Values, name: str) -> None:
    for i, shape in enumerate(inputs["shapes"]):
        if expected_shape(shape, inputs["rank"]):
            answer[f"{name}/{i}"] = as_array(reducer.error_of(i)).copy()


def _go_on(reducer: Any, parameters: Any, inputs: Values, answer: Values, name: str) -> None:
    for step in range(BEFORE, BEFORE + AFTER):
        run_step(reducer, parameters, inputs, step)
        for i, parameter in enumerate(parameters):
            answer[f"{name}{step}/{i}"] = oracle.grad_of(parameter).copy()


def judge_resume(case: Case) -> list[Finding]:
    """The loaded reducer gives the same gradients as the first one, and they are not all zero.

    The state may have any form that torch.load reads with weights_only=True.
    """
    findings: list[Finding] = []
    for rank, answer in enumerate(case.answers):
        for i, shape in enumerate(case.inputs[0]["shapes"]):
            error = finite_floats(answer.get(f"on/{i}"), shape)
            if error is not None:
                what = f"error_of({i}) after load_state, held against the one that was saved"
                hint = _explain_loaded(case, rank, i, error)
                if wrong := oracle.differs(
                    rank, what, answer.get(f"again/{i}"), error, dtype="float64", hint=hint
                ):
                    return [wrong]
    for step in range(BEFORE, BEFORE + AFTER):
        for rank, answer in enumerate(case.answers):
            applied = [
                answer.get(f"on{step}/{i}")
                for i, shape in enumerate(case.inputs[0]["shapes"])
                if expected_shape(shape, case.inputs[0]["rank"]) is not None
            ]
            if not any(isinstance(a, np.ndarray) and a.any() for a in applied):
                return [
                    Finding(
                        "after a step all gradients that are compressed are zero: nothing was "
                        "applied.",
                        rank,
                    )
                ]
        for i, shape in enumerate(case.inputs[0]["shapes"]):
            for rank, answer in enumerate(case.answers):
                on = finite_floats(answer.get(f"on{step}/{i}"), shape)
                if on is None:
                    findings.append(
                        Finding(f"the gradient of parameter {i}, {shape}, is not finite.", rank)
                    )
                    return findings
                if wrong := oracle.differs(
                    rank,
                    f"gradient of parameter {i}, step {step - BEFORE} after the checkpoint, held "
                    "against the same step without one",
                    answer.get(f"again{step}/{i}"),
                    on,
                    dtype="float64",
                    hint="Two things have to come back: every Q, and this rank's errors."
                    if step == BEFORE
                    else "The first step after the checkpoint was right. What else does the "
                    "reducer use from step to step? Does it draw anything anew?",
                ):
                    findings.append(wrong)
            if findings:
                return findings
    return findings


def _explain_loaded(case: Case, rank: int, i: int, saved: np.ndarray) -> str:
    """What the error after load_state is, if it is a known wrong one."""
    got = case.answers[rank].get(f"again/{i}")
    errors = [finite_floats(answer.get(f"on/{i}"), saved.shape) for answer in case.answers]
    known = [error for error in errors if error is not None]
    before = finite_floats(case.answers[rank].get(f"before/{i}"), saved.shape)
    for value, why in (
        (before, "That is what the new reducer had before: nothing was put back."),
        (
            None if before is None else before + saved,
            "That is the saved error plus the one that this reducer had: replace, do not add.",
        ),
        (saved, "That is right to float32 only: the saved tensor was float64."),
        (errors[0] if rank else None, "That is rank 0's error; each rank has its own."),
        (oracle.mean(known), "That is the mean of all ranks' errors."),
    ):
        if value is not None and oracle.agrees(got, value):
            return why
    return ""
