"""Judges the steps of a training loop: their gradients, losses, and updates of the scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autograder.criteria.common.answers import as_number, short, told
from autograder.criteria.criterion import Case, Finding
from autograder.criteria.lab4_amp import expected_steps
from autograder.criteria.lab4_amp.expected_steps import Base, Step, near
from autograder.criteria.lab4_amp.loop import BF16_RTOL, HALF_RTOL, TINY
from autograder.criteria.lab4_amp.recorded import BACKOFF, GROWTH

# --- judge ---------------------------------------------------------------------------------------


def judge_fp16(case: Case) -> Iterator[Finding]:
    """Every step is one with the mean gradient, and the returned losses are unscaled."""
    for rank in range(case.world_size):
        steps = expected_steps.checked_steps(case, "main", rank, strict=True)
        if isinstance(steps, Finding):
            yield steps
            continue
        for number, step in enumerate(steps):
            if not step.taken:
                yield Finding(f"step {number} was left out; all gradients were finite.", rank)
                break
            right = TINY * expected_steps.expected_update(case, "main", step, Base(), rank)
            if not near(step.update, right, HALF_RTOL):
                why = _explain(case, "main", step, right, rank)
                yield expected_steps.update_finding(
                    expected_steps.step_name("main", number), step, right, rank, why
                )
                break
        yield from _loss_findings(case, "main", rank, steps, TINY, HALF_RTOL)
        yield from _bf16_finding(case, rank)


def _bf16_finding(case: Case, rank: int) -> Iterator[Finding]:
    """In bf16, gradients are scaled as in fp16; `amp_loop_autocast` judges the dtype."""
    for number, step in enumerate(expected_steps.steps_of(case, "bf16", rank) or ()):
        if not expected_steps.valid(case, "bf16", step) or not step.taken:
            continue
        right = expected_steps.expected_update(case, "bf16", step, Base(), rank)
        if not near(step.update, right, BF16_RTOL):
            why = _explain(case, "bf16", step, right, rank)
            yield expected_steps.update_finding(f"bf16, step {number}", step, right, rank, why)
            return


def _explain(case: Case, run: str, step: Step, right: np.ndarray, rank: int) -> str:
    """Why an update of the run "main" (fp16, a tiny loss) or "bf16" is not the right one."""
    scale, is_fp16 = case.inputs[0]["settings"][run]["scale"], run == "main"
    local = expected_steps.expected_update(case, run, step, Base(local=True), rank)
    local *= TINY if is_fp16 else 1.0
    if near(step.update, right / scale, BF16_RTOL) and not is_fp16:
        return "In bf16 the scaler takes part as in fp16: scale, unscale_, step and update."
    if is_fp16 and np.abs(step.update).max() < 0.01 * np.abs(right).max():
        return (
            "The gradients of this loss are below what fp16 can hold: scale the loss, backward "
            "through the scaled one, and let the scaler take the step."
        )
    for expected, reason in (
        (right * scale, "That is still multiplied by the scale: let the scaler take the step."),
        (
            local,
            "That is this rank's own gradient, not the mean over the ranks: call the model "
            "that is wrapped in DDP.",
        ),
        (right * case.world_size, "That is the sum over the ranks. DDP's gradients are means."),
        (right / case.world_size, "That is the mean over ranks divided by their number once more."),
    ):
        if near(step.update, expected, HALF_RTOL if is_fp16 else BF16_RTOL):
            return reason
    return ""


def _loss_findings(
    case: Case, name: str, rank: int, steps: list[Step], factor: float, rtol: float
) -> Iterator[Finding]:
    """The returned losses: one float per step, the mean over its batches, of this rank."""
    losses = told(case.answers[rank], f"{name}/losses")
    if not isinstance(losses, list):
        yield Finding(f"expected a list of losses, one float per step; got {losses}.", rank)
        return
    if len(losses) != len(steps):
        k = case.inputs[0]["settings"][name].get("accumulate", 1)
        yield Finding(
            f"{len(steps)} steps of {k} batches: expected {len(steps)} losses, one per step, got "
            f"{len(losses)}.",
            rank,
        )
        return
    for number, (got, step) in enumerate(zip(losses, steps, strict=True)):
        if as_number(got) is None:
            yield Finding(f"the loss of step {number}: expected a finite float, got {got}.", rank)
            return
        each = [factor * loss for loss in expected_steps.batch_losses(case, name, step, rank)]
        right = float(np.mean(each))
        if abs(got - right) <= rtol * abs(right):
            continue
        scale, everybody = case.inputs[0]["settings"][name]["scale"], []
        for r in range(case.world_size):
            everybody += [
                factor * loss for loss in expected_steps.batch_losses(case, name, step, r)
            ]
        why = ""
        for value, reason in (
            (right * scale, "That is the scaled loss."),
            (sum(each), "That is the sum over the batches."),
            (right / len(each), "That is the mean divided by their number once more."),
            (each[-1], "That is the loss of the last batch alone."),
            (each[-1] / len(each), "That is the last batch's loss, divided by their number."),
            (float(np.mean(everybody)), "That is the mean over all ranks: each returns its own."),
        ):
            if len({right, value}) == 2 and abs(got - value) <= rtol * abs(value):
                why = " " + reason
                break
        yield Finding(
            f"the loss of step {number}: expected {right:.6g}, the mean over the batches of this "
            f"rank's unscaled loss, got {got:.6g}.{why}",
            rank,
        )
        return


def judge_update(case: Case) -> Iterator[Finding]:
    """One update of the scale per step, after the step."""
    for rank, answer in enumerate(case.answers):
        steps = expected_steps.checked_steps(case, "main", rank)
        if isinstance(steps, Finding):
            yield steps
            continue
        base = expected_steps.base_of(case, "plain", rank) or Base()
        scale, told_scale = case.inputs[0]["settings"]["main"]["scale"], told(answer, "main/scale")
        for number, step in enumerate(steps):
            if expected_steps.overflows(case, "main", step):
                # A different criterion judges a loop that takes this step all the same.
                scale *= GROWTH if step.taken and told_scale == scale * GROWTH else BACKOFF
                continue
            scale *= GROWTH
            right = expected_steps.expected_update(case, "main", step, base, rank)
            if not step.taken or not near(step.update, right):
                why = "The scale grows after every step here."
                if near(step.update, right / GROWTH):
                    why += (
                        " The gradient was divided by the next scale, not by the one that its loss "
                        "was multiplied with: update() comes last."
                    )
                yield expected_steps.update_finding(
                    f"dtype=None, {expected_steps.step_name('main', number)}",
                    step,
                    right,
                    rank,
                    why,
                )
                break
        else:
            if _divides_late(case, rank, steps):
                yield Finding(
                    "each loss is too small by the factor by which the scale has just grown: it "
                    "was divided by get_scale() after update(). The unscaled loss is loss.item().",
                    rank,
                )
            elif told_scale != scale:
                began = case.inputs[0]["settings"]["main"]["scale"]
                yield Finding(
                    f"dtype=None: the scale after {len(steps)} steps, the last of which "
                    f"overflowed: expected {scale:g}, got {short(told_scale)}"
                    + (", with which it began" if told_scale == began else "")
                    + ". Call update() once per step, in every precision, also after one that "
                    "was left out.",
                    rank,
                )


def _divides_late(case: Case, rank: int, steps: list[Step]) -> bool:
    losses = told(case.answers[rank], "main/losses")
    if not isinstance(losses, list) or len(losses) != len(steps):
        return False
    taken = [
        (as_number(got), expected_steps.batch_losses(case, "main", step, rank)[0])
        for got, step in zip(losses, steps, strict=True)
        if step.taken
    ]
    return bool(taken) and all(
        got is not None and abs(GROWTH * got - right) <= expected_steps.RTOL * abs(right)
        for got, right in taken
    )


def judge_accumulates(case: Case) -> Iterator[Finding]:
    """k batches per step give their mean gradient, one unscale, one step and one update."""
    for rank, answer in enumerate(case.answers):
        plain = expected_steps.steps_of(case, "plain", rank)
        steps = expected_steps.checked_steps(case, "main", rank)
        if isinstance(steps, Finding):
            yield steps
            continue
        yield from _accumulation_finding(case, rank, steps)
        # What is wrong without accumulation, too, is charged by a different criterion.
        if plain and not list(_loss_findings(case, "plain", rank, plain, 1.0, expected_steps.RTOL)):
            yield from _loss_findings(case, "main", rank, steps, 1.0, expected_steps.RTOL)
        scale = case.inputs[0]["settings"]["main"]["scale"]
        if plain and told(answer, "plain/scale") == scale * GROWTH ** len(plain):
            expected = scale * GROWTH ** len(steps)
            if (got := told(answer, "main/scale")) != expected:
                yield Finding(
                    f"the scale, which grows with each update here, after {len(steps)} steps: "
                    f"expected {expected:g}, got {short(got)}. Call update() "
                    "once per step, not once per batch.",
                    rank,
                )


def _accumulation_finding(case: Case, rank: int, steps: list[Step]) -> Iterator[Finding]:
    k = case.inputs[0]["settings"]["main"]["accumulate"]
    base = expected_steps.base_of(case, "plain", rank) or Base()
    for number, step in enumerate(steps):
        if not step.taken:
            yield Finding(f"step {number} was left out; all gradients were finite.", rank)
            return
        right = expected_steps.expected_update(case, "main", step, base, rank)
        if near(step.update, right):
            continue
        alone, own_alone = (
            [
                expected_steps.expected_update(
                    case, "main", Step([n], True, 1.0, step.before, right), of, rank
                )
                for n in step.batches
            ]
            for of in (base, Base(True, base.factor))
        )
        last, own = alone[-1], np.mean(own_alone, axis=0)
        rows = [len(case.inputs[rank][f"x/main/{n}"]) for n in step.batches]
        why = (
            f"One unscale, step and update, after the last of the {k} batches: the scale must not "
            "change while gradients add up."
        )
        for expected, reason in (
            (k * right, "That is the sum over the batches, not their mean."),
            (right / k, f"That is the mean divided by {k} once more."),
            (last, "That is the gradient of the last batch alone."),
            (
                last / k,
                f"That is the last batch's gradient, divided by {k}: clear gradients once "
                "per step.",
            ),
            (own, "That is this rank's own gradient: DDP must reduce in the last backward."),
            (
                own + (alone[0] - own_alone[0]) / k,
                "Only the first batch is a mean over ranks: DDP must reduce in the last backward.",
            ),
            (
                np.average(alone, axis=0, weights=rows),
                "Batches were weighted by their size; each counts the same.",
            ),
        ):
            if near(step.update, expected):
                why = reason
                break
        yield expected_steps.update_finding(
            f"accumulate={k}, step {number}", step, right, rank, why
        )
        return
