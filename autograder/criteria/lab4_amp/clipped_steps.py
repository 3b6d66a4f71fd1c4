"""Judges a training loop: steps that are clipped, and steps that are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import told
from autograder.criteria.criterion import Case, Finding, named_ranks
from autograder.criteria.lab4_amp import expected_steps
from autograder.criteria.lab4_amp.expected_steps import Base, Step, near
from autograder.criteria.lab4_amp.recorded import GAMMA, LR, halves


def _clipped(update: np.ndarray, limit: float | None) -> np.ndarray:
    norm = float(np.linalg.norm(update))
    return update if limit is None or norm <= limit else update * (limit / norm)


def judge_clip(case: Case) -> Iterator[Finding]:
    """The norm of the unscaled gradient of the whole step is clipped."""
    for rank, answer in enumerate(case.answers):
        plain, pair = (expected_steps.base_of(case, name, rank) for name in ("plain", "pair"))
        found = _clip_finding(case, "one", rank, plain or Base())
        found = found or _clip_finding(case, "zero", rank, plain or Base())
        # Steps of several batches are judged here only if they work without clipping.
        if found is None and pair is not None:
            if raised := told(answer, "two/raised"):
                found = Finding(
                    f"accumulate=2 with max_norm raised {raised}: unscale and clip once per step, "
                    "after the backward of its last batch.",
                    rank,
                )
            else:
                found = _clip_finding(case, "two", rank, pair)
        if found is not None:
            yield found


def _clip_finding(case: Case, name: str, rank: int, base: Base) -> Finding | None:
    steps = expected_steps.checked_steps(case, name, rank)
    if isinstance(steps, Finding):
        return steps
    settings = case.inputs[0]["settings"][name]
    limit = settings["max_norm"]
    for number, step in enumerate(steps):
        whole = expected_steps.expected_update(case, name, step, base, rank)
        right = _clipped(whole, limit)
        if step.taken and near(step.update, right):
            continue
        each = [
            expected_steps.expected_update(
                case, name, Step([n], True, step.lr, step.before, step.update), base, rank
            )
            / len(step.batches)
            for n in step.batches
        ]
        ends = np.cumsum([p.size for p in oracle.parameters_of(case.inputs[0])])[:-1]
        why = "Unscale, then clip to max_norm, then step."
        for expected, reason in (
            (
                _clipped(whole, limit / settings["scale"]),
                "That is what comes out when gradients "
                "are clipped while they are still scaled: call scaler.unscale_(optimizer) first.",
            ),
            (whole, "That is what comes out without any clipping."),
            (
                _in_turn(each, limit),
                "The gradient was clipped after each batch. Clip once, after the last backward.",
            ),
            (
                np.sum([_clipped(update, limit) for update in each], axis=0),
                "Each batch was clipped, and the step was not: clip once, after the last backward.",
            ),
            (
                np.concatenate([_clipped(p, limit) for p in np.split(whole, ends)]),
                "Each parameter was clipped by itself; the norm is that of all gradients together.",
            ),
            (
                np.concatenate([_clipped(p, limit) for p in _groups(np.split(whole, ends))]),
                "Each of the optimizer's groups was clipped by itself; the norm is that of all "
                "gradients together.",
            ),
            (np.clip(whole, -limit, limit), "Each entry was clipped; the norm is meant."),
            (whole * (limit / np.linalg.norm(whole)), "A smaller norm stays as it is."),
        ):
            if near(step.update, expected):
                why = reason
                break
        norm = f"norm {np.linalg.norm(whole):.4g}, max_norm {limit:.4g}"
        what = f"{expected_steps.step_name(name, number)}, {norm}"
        return expected_steps.update_finding(what, step, right, rank, why)
    return None


def _groups(parts: list[np.ndarray]) -> list[np.ndarray]:
    return [np.concatenate(group) for group in halves(parts)]


def _in_turn(each: list[np.ndarray], limit: float) -> np.ndarray:
    total = np.zeros_like(each[0])
    for update in each:
        total = _clipped(total + update, limit)
    return total


def judge_skips(case: Case) -> Iterator[Finding]:
    """A step that overflows on one rank changes neither parameters nor learning rate."""
    for rank, answer in enumerate(case.answers):
        found = _skip_finding(case, "main", rank) or _history_finding(case, rank)
        # Steps of several batches are judged here only if they work without an overflow.
        if found is None and expected_steps.base_of(case, "pair", rank) is not None:
            if raised := told(answer, "two/raised"):
                found = Finding(f"accumulate=2, with an overflow: raised {raised}.", rank)
            else:
                found = _skip_finding(case, "two", rank)
        found = found or _other_finding(case, rank)
        if found is not None:
            yield found


def _other_finding(case: Case, rank: int) -> Finding | None:
    """A finding about an overflow in bf16 or with a max_norm, or gradients from before the call.

    What raises also without an overflow is charged by a different criterion.
    """
    answer = case.answers[rank]
    if (raised := told(answer, "limited/raised")) and not told(answer, "limit/raised"):
        return Finding(
            f"max_norm, with an overflow on all ranks: raised {raised}. Such a step is left out, "
            "and training goes on.",
            rank,
        )
    for name, what in (("bf16", "dtype=torch.bfloat16"), ("limited", "max_norm")):
        for number, step in enumerate(expected_steps.steps_of(case, name, rank) or ()):
            known = expected_steps.valid(case, name, step)
            if known and step.taken and expected_steps.overflows(case, name, step):
                return Finding(
                    f"{what}: step {number} was taken, though the loss was inf on all ranks. The "
                    "scaler takes part in every precision, with max_norm and without.",
                    rank,
                )
    return _old_finding(case, rank)


def _old_finding(case: Case, rank: int) -> Finding | None:
    """A finding if gradients from before the call are in the first step, and later steps are right.

    What is wrong in every step is charged by a different criterion.
    """
    steps = expected_steps.steps_of(case, "limit", rank) or []
    if not steps or not all(expected_steps.valid(case, "limit", s) and s.taken for s in steps):
        return None
    for base in (Base(), Base(local=True)):
        rights = [expected_steps.expected_update(case, "limit", s, base, rank) for s in steps]
        first, *later = (
            expected_steps.factor_between(s.update, right) is not None
            for s, right in zip(steps, rights, strict=True)
        )
        if not first and later and all(later):
            return expected_steps.update_finding(
                "step 0, where the parameters had gradients before train_amp was called",
                steps[0],
                rights[0],
                rank,
                "Clear the gradients before every step, the first one too.",
            )
    return None


def _history_finding(case: Case, rank: int) -> Finding | None:
    """A finding if the losses of steps that were left out are missing."""
    losses = told(case.answers[rank], "main/losses")
    steps = expected_steps.steps_of(case, "main", rank)
    taken = [step for step in steps or () if step.taken]
    if steps is None or not isinstance(losses, list) or len(losses) != len(taken) != len(steps):
        return None
    return Finding(
        f"{len(losses)} losses of {len(steps)} steps, {len(taken)} of which were taken: expected "
        "one for each step, left out or not.",
        rank,
    )


def _skip_finding(case: Case, name: str, rank: int) -> Finding | None:
    """What is wrong with the steps taken and left out; a gradient's size is not judged here."""
    steps = expected_steps.checked_steps(case, name, rank)
    if isinstance(steps, Finding):
        return steps
    taken, before = 0, ""
    local = _is_local(case, name, steps, rank)
    for number, step in enumerate(steps):
        bad, what = (
            expected_steps.overflows(case, name, step, rank if local else None),
            expected_steps.step_name(name, number),
        )
        if bad:
            before = f" since {what}, which overflowed"
            if step.taken:
                who = named_ranks(bad)
                return Finding(
                    f"dtype=None, {what} was taken, though a loss on {who} was inf. Leave it to "
                    "scaler.step(optimizer) whether a step is taken, in every precision.",
                    rank,
                )
            continue
        if not step.taken:
            return Finding(
                f"{what} was left out, though its own gradients are finite{before and ';'}"
                + (
                    f" no step was taken{before}. Its gradients must not reach the next step: "
                    "zero_grad() before every step."
                    if before
                    else "."
                ),
                rank,
            )
        right = expected_steps.expected_update(case, name, step, Base(local), rank)
        if expected_steps.factor_between(step.update, right) is None:
            return expected_steps.update_finding(
                what, step, right, rank, "Clear the gradients before every step."
            )
        expected = LR * GAMMA**taken
        if not _near(step.lr, expected):
            return _rate_finding(what, step, expected, taken, rank)
        taken += 1
    got, expected = told(case.answers[rank], f"{name}/lr"), LR * GAMMA**taken
    if not _near(got, expected):
        return Finding(
            f"learning rate at the end: expected {expected:.6g} after {taken} steps that were "
            f"taken and {len(steps) - taken} that were left out, got {got}. Call "
            "scheduler.step() if scaler.step(optimizer) returned True.",
            rank,
        )
    return None


def _rate_finding(what: str, step: Step, expected: float, taken: int, rank: int) -> Finding:
    hint = "Call scheduler.step() once after each step that was taken, and only then."
    if step.lr > expected:
        hint = (
            "After a step that was taken scheduler.step() was not called: scaler.step() tells "
            "which are; the scale may grow as well after a step that was taken."
        )
    return Finding(
        f"{what} had the learning rate {step.lr:.6g}; expected {expected:.6g}, as {taken} of the "
        f"steps before were taken. {hint}",
        rank,
    )


def _is_local(case: Case, name: str, steps: list[Step], rank: int) -> bool:
    """Whether the first step that was taken has this rank's own gradient, not the mean."""
    first = next((step for step in steps if step.taken), None)
    if first is None or not expected_steps.valid(case, name, first):
        return False
    return all(
        (expected_steps.factor_between(first.update, right) is None) is not local
        for local in (False, True)
        for right in [expected_steps.expected_update(case, name, first, Base(local), rank)]
        if np.isfinite(right).all()
    )


def _near(got: Any, expected: float) -> bool:
    return isinstance(got, float) and abs(got - expected) <= 1e-6 * expected
