"""Criteria for what a pipeline computes: the gradients and the loss of the whole batch.

The first criterion runs on real ranks, where a send that no rank receives blocks. The others run on
the emulated cluster, where the other ranks stop waiting at once if a rank fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.bonus_pipeline import parts
from autograder.criteria.bonus_pipeline.plan import Step, gpipe_of
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import item_of, short
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values


def everywhere(draw: Draw, steps: list[Step]) -> list[list[Step]]:
    """The same schedule on all ranks."""
    return [steps] * draw.world_size


# --- gradients -----------------------------------------------------------------------------------


def draw_gradients(draw: Draw) -> list[Values]:
    """GPipe: one micro-batch, fewer than stages, more, and a number not divisible by the stages."""
    rng, n = draw.shared(), draw.world_size
    inputs = parts.draw_stages(draw, parts.draw_widths(draw))
    for m in (n + 1, max(1, n - 1), 1, 2 * n + 1):
        size = int(rng.integers(2, 5))
        parts.add_case(inputs, draw, everywhere(draw, gpipe_of(m)), [size] * m)
    return inputs


def observe_gradients(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients on this rank after a call that starts without gradients."""
    answer: Values = {}
    for number in range(len(inputs["cases"])):
        stage = parts.make_stage(inputs, context)
        run_pipeline(*parts.arguments(stage, inputs, context, number))
        answer |= parts.gradients_of(stage, number)
    return answer


def judge_gradients(case: Case) -> list[Finding]:
    """The gradients are those of the whole batch in one process, up to a common factor."""
    for number in range(len(case.inputs[0]["cases"])):
        _, expected = parts.solve(case, number)
        if findings := parts.judge_direction(case, number, name_of(case, number), expected):
            return findings
    return []


def name_of(case: Case, number: int) -> str:
    """Stages, micro-batches and schedule of a call, in words."""
    each = case.inputs[0]["cases"][number]
    what = f"{case.world_size} stages, {len(each['sizes'])} micro-batches"
    if len(set(each["sizes"])) > 1:
        what += f" of {each['sizes']} samples"
    if case.inputs[-1]["cases"][number]["schedule"] != each["schedule"]:
        kinds = [kind for kind, _ in each["schedule"]]
        is_gpipe = kinds == sorted(kinds, reverse=True)  # all forwards first
        return what + (", GPipe on the first ranks, 1F1B behind them" if is_gpipe else ", 1F1B")
    return f"{what}, in the order " + " ".join(
        f"{kind[0].upper()}{i}" for kind, i in each["schedule"][:24]
    )


# --- the loss and its factor ---------------------------------------------------------------------


def draw_scale(draw: Draw) -> list[Values]:
    """Micro-batches of equal size: 3 of them, and 3 more than stages."""
    rng = draw.shared()
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    for m in (3, draw.world_size + 3):
        parts.add_case(inputs, draw, everywhere(draw, gpipe_of(m)), [int(rng.integers(2, 5))] * m)
    return inputs


def draw_uneven(draw: Draw) -> list[Values]:
    """Micro-batches of different sizes; a sample's target is repeated, as often as drawn.

    Then as many of equal size, to compare with. Code that takes all sizes but the last for the
    first one gets a wrong sum, whatever the order of the sizes.
    """
    rng = draw.shared()
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    sizes = [int(s) for s in rng.permutation([1, 2, 4, 8])]
    parts.add_case(inputs, draw, everywhere(draw, gpipe_of(len(sizes))), sizes)
    repeats = [int(r) for r in rng.permutation([1, 2, 3, 5])]
    for values in inputs:
        values["cases"][0]["repeats"] = repeats
    parts.add_case(inputs, draw, everywhere(draw, gpipe_of(len(sizes))), [3] * len(sizes))
    return inputs


def judge_scale(case: Case) -> Iterator[Finding]:
    """The last stage's gradients are those of the mean loss, not a multiple of them."""
    last = case.world_size - 1
    for number, each in enumerate(case.inputs[0]["cases"]):
        m = len(each["sizes"])
        expected = parts.solve(case, number)[1][last]
        grads = parts.vector(case.answers[last].get(f"g/{number}"), expected)
        if grads is None:
            yield Finding("no finite gradients came back.", last)
            return
        factor = parts.scale_of(grads, expected)
        if abs(factor - 1) > parts.RTOL:
            why = ""
            if abs(factor - m) < parts.RTOL * m:
                why = (
                    " Each micro-batch counts with its share n / N of the samples, here 1 / "
                    f"{m}: multiply its loss by that."
                )
            elif abs(factor - 1 / m) < parts.RTOL / m:
                why = " The loss was divided by M twice."
            elif abs(factor * case.world_size - m) < parts.RTOL * m:
                why = " They were divided by the number of stages instead of micro-batches."
            yield Finding(
                f"{m} micro-batches: the gradients are {factor:.6g} times those of the batch's "
                f"mean loss.{why}",
                last,
            )
            return


def observe_uneven(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """Gradients and losses of all calls on this rank."""
    answer: Values = {"losses": []}
    for number in range(len(inputs["cases"])):
        stage = parts.make_stage(inputs, context)
        loss = run_pipeline(*parts.arguments(stage, inputs, context, number))
        answer["losses"].append(parts.read_loss(loss))
        answer |= parts.gradients_of(stage, number)
    return answer


def judge_uneven(case: Case) -> Iterator[Finding]:
    """The weight of a micro-batch is its share of the samples, in gradients and loss.

    A factor that is wrong with micro-batches of equal size, too, is left to other criteria.
    """
    last = case.world_size - 1
    sizes = case.inputs[0]["cases"][0]["sizes"]
    solved = [parts.solve(case, number) for number in range(2)]
    expected = [grads[last] for _, grads in solved]
    grads = parts.vector(case.answers[last].get("g/0"), expected[0])
    grads_of_equal = parts.vector(case.answers[last].get("g/1"), expected[1])
    what = f"micro-batches of {sizes} samples"
    if grads is None or grads_of_equal is None:
        yield Finding("no finite gradients came back.", last)
        return
    factor, equal = (
        parts.scale_of(*pair) for pair in zip((grads, grads_of_equal), expected, strict=True)
    )
    off = np.abs(grads - factor * expected[0]).max()
    if not grads.any() or off > parts.RTOL * np.abs(grads).max():
        yield Finding(
            f"{what}: the gradients do not have the direction of the batch's. "
            + (
                "A micro-batch of n out of N samples counts n / N: neither all alike, nor by "
                "the numbers in their targets."
                if grads.any()
                else "They are zero."
            ),
            last,
        )
        return
    if abs(equal - 1) <= parts.RTOL < abs(factor - 1):
        yield Finding(
            f"{what}: the gradients are {factor:.6g} times those of the batch's mean loss, "
            f"though right if all have 3 samples. N is the sum of all sizes: {sum(sizes)}.",
            last,
        )
        return
    losses = [item_of(case.answers[last].get("losses"), k) for k in range(2)]
    is_right = [
        type(loss) is float and abs(loss - right) <= 1e-5 * abs(right)
        for loss, (right, _) in zip(losses, solved, strict=True)
    ]
    if is_right[1] and not is_right[0]:
        yield Finding(
            f"{what}: the loss of the batch is {solved[0][0]:.6g}, returned was "
            f"{short(losses[0])[:20]}. It is right if all have 3 samples: a micro-batch of n "
            "out of N samples counts n / N in the loss, too.",
            last,
        )
        return


def _below_zero(output: Any, target: Any) -> Any:
    return oracle.mse(output, target) - BELOW


BELOW = 100.0  # far more than the loss
_LOSSES = (oracle.mse, _below_zero)


def observe_loss(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The losses that `run_pipeline` has returned on this rank, read after the last call."""
    losses = []
    for number in range(len(inputs["cases"])):
        stage = parts.make_stage(inputs, context)
        *given, _, buffer = parts.arguments(stage, inputs, context, number)
        losses.append(run_pipeline(*given, _LOSSES[number], buffer))
    return {"losses": [parts.read_loss(loss) for loss in losses]}


def judge_loss(case: Case) -> list[Finding]:
    """Every rank returns the mean loss over the batch, which is negative in the second call.

    It is a tensor of one number, of any dtype and shape. How it gets to a rank does not matter.
    """
    findings: list[Finding] = []
    for number, each in enumerate(case.inputs[0]["cases"]):
        right, m = parts.solve(case, number)[0] - BELOW * number, len(each["sizes"])
        for rank, answer in enumerate(case.answers):
            losses = answer.get("losses")
            got = item_of(losses, number)
            if type(got) is float and abs(got - right) <= 1e-5 * abs(right):
                continue
            why = ""
            last = item_of(case.answers[-1].get("losses"), number)
            if got == 0 or got == "nothing (None)":
                why = " Only the last rank knows it: let it tell the others."
                if not (type(last) is float and abs(last - right) <= 1e-5 * abs(right)):
                    why = " The last rank has no right loss either."
            elif type(got) is float and abs(got - m * right) < 1e-5 * m * abs(right):
                why = " That is the sum over micro-batches, not their mean."
            elif number == 0 and got == item_of(losses, 1):
                why = " It has become the loss of the next call: return a new tensor each time."
            findings.append(
                Finding(
                    f"{m} micro-batches: the loss of the batch is {right:.6g}, returned was "
                    f"{short(got)[:40]}.{why}",
                    rank,
                )
            )
        if findings:
            break
    return findings


# --- gradients from before the call --------------------------------------------------------------


def draw_accumulate(draw: Draw) -> list[Values]:
    """One call, and gradients that exist before it."""
    inputs = parts.draw_stages(draw, parts.draw_widths(draw, equal=True))
    m = draw.world_size + 1
    parts.add_case(inputs, draw, everywhere(draw, gpipe_of(m)), [3] * m)
    parts.add_old_gradients(inputs, draw)
    return inputs


def observe_accumulate(run_pipeline: Any, inputs: Values, context: Context) -> Values:
    """The gradients after a call that starts with existing gradients."""
    stage = parts.make_stage(inputs, context)
    parts.set_old_gradients(stage, inputs)
    run_pipeline(*parts.arguments(stage, inputs, context, 0))
    return parts.gradients_of(stage, 0)


def judge_accumulate(case: Case) -> Iterator[Finding]:
    """The old gradients are still included, and on the last rank the batch's gradients are added.

    As in `judge_scale`, the added gradients are judged on the last rank only: other criteria check
    whether gradients reach the earlier stages. A `.grad` may be new or changed in place.
    """
    _, expected = parts.solve(case, 0)
    for rank, answer in enumerate(case.answers):
        values = case.inputs[rank]
        before = np.concatenate([values[f"before/{k}"].ravel() for k in ("w", "b")])
        grads = parts.vector(answer.get("g/0"), before)
        if grads is None:
            yield Finding("no finite gradients came back.", rank)
            continue
        # The component of `before` that is orthogonal to the new gradients.
        along = expected[rank] / np.linalg.norm(expected[rank])
        rest = before - (before @ along) * along
        share = float(grads @ rest / (rest @ rest))
        if abs(share - 1) > parts.RTOL:
            what = f"of the gradients that were there before the call, {share:.4g} times are left"
            if abs(share) < 1e-4:
                what = "the gradients that were there before the call are gone"
            yield Finding(
                f"{what}. run_pipeline adds to .grad; whoever calls it decides when to clear.",
                rank,
            )
        elif rank == case.world_size - 1:
            added = grads - before
            factor = parts.scale_of(added, expected[rank])
            off = np.abs(added - factor * expected[rank]).max()
            # The rounding error comes from `before`, which may be far larger than what was added.
            if not added.any():
                yield Finding("the call has added nothing to the gradients that were there.", rank)
            elif not 1e-6 < factor < 1e6 or off > parts.RTOL * np.abs(grads).max():
                yield Finding(
                    "gradients were there before the call, and what it has added to them does not "
                    "have the direction of the batch's gradients.",
                    rank,
                )
