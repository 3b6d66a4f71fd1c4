"""Criteria for what a sharded optimiser computes.

All run on real ranks, except the criterion for the order of groups, which runs on emulated ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_zero import harness
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, same_array, short
from autograder.criteria.common.timed_collectives import TimedCollectives
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

# No number of ranks from 2 to 5 divides these groups.
FIRST: tuple[tuple[int, ...], ...] = ((7, 5), (7,), (), (4, 3, 2))
SECOND: tuple[tuple[int, ...], ...] = ((9, 6), (1,), (6, 2))
THIRD: tuple[tuple[int, ...], ...] = ((5, 3), (4,))
FOURTH: tuple[tuple[int, ...], ...] = ((4, 4), (1,))
TINY: tuple[tuple[int, ...], ...] = ((1,),)
LR = 0.05


# --- reduce --------------------------------------------------------------------------------------

# At reduce()'s last collective one group is being reduced. The group before it may have its
# gradients, too, if the code begins one group's collective before it waits for the other's.
STILL_THERE = 2


def draw_reduce(draw: Draw) -> list[Values]:
    """Three backward passes; more groups than those that may still have gradients at the end."""
    return harness.draw_training(draw, [(g, {}) for g in (FIRST, SECOND, THIRD, FOURTH)], 3)


def observe_reduce(zero: Any, inputs: Values, context: Context) -> Values:
    """Shares after one reduce(), after a second reduce(), after zero_grad() and a third, halved.

    Also how many groups have gradients when a reduce() begins its last collective.
    """
    parameters = harness.make_parameters(inputs, context.device)
    groups = [group["params"] for group in harness.make_groups(inputs, parameters)]
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.SGD, lr=LR)
    answer: Values = {}
    there = [0]  # at each collective; 0 if none is seen

    def count() -> None:
        there.append(sum(not harness.none_left(group) for group in groups))

    for step in range(3):
        if step == 2:
            harness.backward(parameters, inputs, 0)  # zero_grad() must drop this batch
            optimizer.zero_grad()
        harness.backward(parameters, inputs, step)
        with TimedCollectives(count):
            optimizer.reduce()
        answer[f"there{step}"] = there[-1]
        answer[f"g{step}"] = harness.numbers_of(optimizer)
        answer[f"none{step}"] = harness.none_left(parameters)
    for gradient in optimizer.gradients():  # in place, as clipping does
        gradient.mul_(0.5)
    answer["half"] = harness.numbers_of(optimizer)
    return answer | harness.arrays_of(parameters, "p")


def _mean(case: Case, steps: tuple[int, ...]) -> list[np.ndarray]:
    count = len(case.inputs[0]["shapes"])
    return [
        np.asarray(np.sum([harness.mean_gradient(case, s, 0, i) for s in steps], axis=0))
        for i in range(count)
    ]


def judge_reduce(case: Case) -> list[Finding]:
    """Requires each number of the mean once, on one rank; a further reduce() adds to the shares.

    Gradients of a group that is reduced are gone before those of later groups are. A mean may be
    taken by group or by tensor, divided before or after the sum.
    """
    findings: list[Finding] = []
    for step, what in enumerate(
        ("reduce()", "a second backward and reduce()", "zero_grad(), a third backward and reduce()")
    ):
        expected = _mean(case, ((0,), (0, 1), (2,))[step])
        got = [answer.get(f"g{step}") for answer in case.answers]
        if problem := harness.same_numbers(got, expected):
            hint = harness.explain_numbers(got, expected, case.world_size)
            if step == 1 and harness.same_numbers(got, _mean(case, (1,))) is None:
                hint = "That is the second one alone: reduce() adds to what the shards have."
            findings.append(Finding(f"gradients() after {what}: {problem} {hint}".rstrip()))
            return findings
        for rank, answer in enumerate(case.answers):
            if answer.get(f"none{step}") is not True:
                findings.append(Finding(f"a p.grad is left after {what}, expected None.", rank))
            elif not isinstance(n := answer.get(f"there{step}"), int) or n > STILL_THERE:
                findings.append(
                    Finding(
                        f"when reduce() begins its last collective, {n} of "
                        f"{len(case.inputs[0]['counts'])} groups still have a p.grad: each "
                        "becomes None as soon as its group is reduced.",
                        rank,
                    )
                )
        if findings:
            return findings
    half = [answer.get("half") for answer in case.answers]
    if harness.same_numbers(half, [0.5 * mean for mean in _mean(case, (2,))]):
        return [
            Finding(
                "gradients() after all that it gave was halved in place: not halved. "
                "Clipping scales it, so it has to be the shards' own."
            )
        ]
    for rank, answer in enumerate(case.answers):
        for i in range(len(case.inputs[0]["shapes"])):
            if not same_array(answer.get(f"p{i}"), case.inputs[0][f"p{i}"]):
                findings.append(Finding("reduce() has changed a parameter.", rank))
                break
    return findings


# --- AdamW ---------------------------------------------------------------------------------------

ADAMW = {"lr": LR, "weight_decay": 0.3, "eps": 1e-16}
QUICK = ADAMW | {"lr": 0.2, "betas": (0.5, 0.8)}  # so that rounded gradients become visible


def draw_adamw(draw: Draw) -> list[Values]:
    """Four steps, one group."""
    return harness.draw_training(draw, [(FIRST + SECOND, {})], 4)


def observe_adamw(zero: Any, inputs: Values, context: Context) -> Values:
    """The parameters after each step; the optimiser gets an iterator of parameters.

    Also whether views that were taken before the first step have the final numbers.
    """
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(iter(parameters), torch.optim.AdamW, **QUICK)
    answer: Values = {}
    views = [p.detach() for p in parameters]
    for step in range(inputs["steps"]):
        harness.take_step(optimizer, parameters, inputs, step)
        answer |= harness.arrays_of(parameters, f"p{step}/")
    pairs = zip(views, parameters, strict=True)
    return answer | {"in place": all(torch.equal(view, p.detach()) for view, p in pairs)}


def judge_adamw(case: Case) -> list[Finding]:
    """Requires one process's result, written in place.

    AdamW's steps do not depend on a factor in the gradient.
    """
    findings = _judge_history(case, harness.trained(case, torch.optim.AdamW, QUICK), _why_adamw)
    return findings or [
        Finding(
            "a view that was taken of a parameter before the first step() has old numbers: step() "
            "writes the shards into the parameters, in place.",
            rank,
        )
        for rank, answer in enumerate(case.answers)
        if answer.get("in place") is not True
    ]


def _judge_history(
    case: Case, history: list[Any], why: Any, dtype: str = "float32"
) -> list[Finding]:
    findings: list[Finding] = []
    for step, expected in enumerate(history):
        for rank, answer in enumerate(case.answers):
            for i, value in enumerate(expected):
                got = answer.get(f"p{step}/{i}")
                if wrong := oracle.differs(
                    rank,
                    f"parameter {i} after step {step + 1}",
                    got,
                    value,
                    dtype=dtype,
                    hint=why(case, step, i, got),
                ):
                    findings.append(wrong)
                    break
        if findings:
            break
    return findings


def _why_adamw(case: Case, step: int, i: int, got: Any) -> str:
    if same_array(got, case.inputs[0][f"p{i}"]):
        return "It has not moved: are the updated shards written back into the parameters?"
    if step == 0:
        return (
            "Does every share come back to its own place? AdamW needs the mean of the gradients; "
            "the mean of what each rank has made of its own is something else."
        )
    return (
        "The first step was right: is the optimiser's state kept, are old gradients gone, and is "
        "nothing rounded on its way?"
    )


# --- options -------------------------------------------------------------------------------------

FACTORS = (0.3, 2.0)


def draw_options(draw: Draw) -> list[Values]:
    """Two groups with their own options, a third with the constructor's options; all float64."""
    rng = draw.shared("options")
    options: list[Values] = [
        {"lr": float(rng.uniform(0.02, 0.05)), "weight_decay": 0.0},
        {"weight_decay": float(rng.uniform(0.5, 0.9)), "betas": [0.5, 0.8]},
        {},
    ]
    groups = list(zip((FIRST, SECOND, TINY), options, strict=True))
    return harness.draw_training(draw, groups, 3, dtype="float64")


def observe_options(zero: Any, inputs: Values, context: Context) -> Values:
    """Changes the learning rates of two groups after every step, as a scheduler would."""
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.AdamW, **ADAMW)
    answer: Values = {}
    for step in range(inputs["steps"]):
        harness.take_step(optimizer, parameters, inputs, step)
        for group, factor in zip(optimizer.param_groups, FACTORS, strict=False):
            group["lr"] *= factor
        answer |= harness.arrays_of(parameters, f"p{step}/")
    return answer


def judge_options(case: Case) -> list[Finding]:
    """Requires that each group trains with its own options, as they are at that step."""
    history = harness.trained(case, torch.optim.AdamW, ADAMW, FACTORS)
    return _judge_history(case, history, _why_options, dtype="float64")


def _why_options(case: Case, step: int, i: int, got: Any) -> str:
    ends = np.cumsum(case.inputs[0]["counts"])
    number = int(np.searchsorted(ends, i, side="right"))
    if step == 0:
        own = {k: short(v) for k, v in case.inputs[0]["options"][number].items()}
        return f"It is in group {number}, whose own options are {own}; all numbers are float64."
    return (
        "The first step was right; then the learning rate in param_groups was changed. Are they "
        "the wrapped optimiser's own, and are old gradients gone?"
    )


# --- special parameters --------------------------------------------------------------------------

MOMENTUM = {"lr": LR, "momentum": 0.9}


def draw_special(draw: Draw) -> list[Values]:
    """Frozen parameters, a parameter that is given twice, and some missing gradients; float64."""
    groups = [(FIRST, {}), (TINY, {}), (SECOND, {})]
    inputs = harness.draw_training(draw, groups, 4, dtype="float64", frozen=[1, 5], tied=[0])
    for rank in range(draw.world_size):
        harness.leave_out(inputs, rank, 1, 0, 3)  # on all ranks
        harness.leave_out(inputs, rank, 2, 0, 4)  # a whole group, on all ranks
        if rank != 0:
            harness.leave_out(inputs, rank, 0, 0, 6)
        if rank == draw.world_size - 1:
            harness.leave_out(inputs, rank, 2, 0, 2)
            harness.leave_out(inputs, rank, 3, 0, 0)
    return inputs


def observe_special(zero: Any, inputs: Values, context: Context) -> Values:
    """The parameters after all steps."""
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.SGD, **MOMENTUM)
    for step in range(inputs["steps"]):
        harness.take_step(optimizer, parameters, inputs, step)
    return harness.arrays_of(parameters, "p")


def judge_special(case: Case) -> Iterator[Finding]:
    """Requires SGD with momentum, in which a missing gradient counts as zeros."""
    expected = harness.trained(case, torch.optim.SGD, MOMENTUM)[-1]
    for rank in range(case.world_size):
        if wrong := harness.same_direction(case, rank, "p", expected):
            why = _why_special(case, rank, expected)
            yield Finding(f"{wrong.message} {why}".rstrip(), rank)


_WRONG_MEANS = (
    (
        harness.mean_of_those_that_have,
        "That is the mean over the ranks that have a gradient. A gradient that is None counts as "
        "zeros: divide by the number of all ranks.",
    ),
    (
        harness.mean_or_none,
        "That comes from a step without gradient. If no rank has a gradient, or a share is all "
        "zeros, the shard's gradient is zeros, not None: momentum still moves it.",
    ),
)


def _why_special(case: Case, rank: int, expected: list[np.ndarray]) -> str:
    """The wrong mean that explains each number that is not as expected, or an empty string."""
    answer = case.answers[rank]
    got = [g for i, e in enumerate(expected) if is_floats(g := answer.get(f"p{i}"), e.shape)]
    if len(got) < len(expected):
        return ""
    for mean, why in _WRONG_MEANS:
        # Each share is computed on one rank, so the mistake may show in some shares only.
        other = harness.trained(case, torch.optim.SGD, MOMENTUM, mean=mean)[-1]
        triples = zip(got, expected, other, strict=True)
        if all((np.isclose(g, a) | np.isclose(g, b)).all() for g, a, b in triples):
            return why
    return ""


# --- ZeRO-2 --------------------------------------------------------------------------------------


def draw_accumulate(draw: Draw) -> list[Values]:
    """Two steps of three micro-batches."""
    return harness.draw_training(draw, [(FIRST, {}), (SECOND, {})], 2, 3)


def observe_accumulate(zero: Any, inputs: Values, context: Context) -> Values:
    """Shares after every micro-batch; the second step starts again from zero."""
    parameters = harness.make_parameters(inputs, context.device)
    optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.SGD, lr=LR)
    answer: Values = {}
    for step in range(inputs["steps"]):
        for micro in range(inputs["micro_batches"]):
            harness.backward(parameters, inputs, step, micro)
            optimizer.reduce()
            answer[f"g{step}/{micro}"] = harness.numbers_of(optimizer)
            answer[f"none{step}/{micro}"] = harness.none_left(parameters)
        optimizer.step()
        optimizer.zero_grad()
    return answer


def judge_accumulate(case: Case) -> Iterator[Finding]:
    """Requires after each micro-batch the sum of all means over ranks so far, in shares."""
    count = len(case.inputs[0]["shapes"])
    for step in range(case.inputs[0]["steps"]):
        sums = [np.zeros(tuple(shape)) for shape in case.inputs[0]["shapes"]]
        for micro in range(case.inputs[0]["micro_batches"]):
            means = [harness.mean_gradient(case, step, micro, i) for i in range(count)]
            before, sums = sums, [a + b for a, b in zip(sums, means, strict=True)]
            got = [answer.get(f"g{step}/{micro}") for answer in case.answers]
            where = f"step {step + 1}, after micro-batch {micro + 1}"
            if problem := harness.same_numbers(got, sums):
                hint = harness.explain_numbers(got, sums, case.world_size)
                if micro and harness.same_numbers(got, means) is None:
                    hint = "That is the last micro-batch's alone: parts add up in the shards."
                elif micro and harness.same_numbers(got, before) is None:
                    hint = "It is as it was: nothing of this backward was added to the shards."
                yield Finding(f"{where}: {problem} {hint}".rstrip())
                return
            none_left = [answer.get(f"none{step}/{micro}") is True for answer in case.answers]
            for rank, none in enumerate(none_left):
                if not none:
                    yield Finding(f"{where}: a p.grad is left after reduce(), expected None.", rank)
            if not all(none_left):
                return


def draw_order(draw: Draw) -> list[Values]:
    """Three groups; rank and step decide which group lacks one or all of its gradients."""
    groups = [(FIRST, {}), (SECOND, {}), ([(5, 3), (4,)], {})]
    inputs = harness.draw_training(draw, groups, 4)
    ends = [int(n) for n in np.cumsum(inputs[0]["counts"])]
    for rank in range(draw.world_size):
        for step in range(4):
            group = 2 - (rank + step) % 3
            numbers = range(ends[group] - inputs[0]["counts"][group], ends[group])
            for i in numbers if step % 2 else numbers[:1]:
                harness.leave_out(inputs, rank, step, 0, i)
    return inputs


def observe_order(zero: Any, inputs: Values, context: Context) -> Values:
    """The parameters after all steps, each with a new optimiser and copies of the parameters.

    Other criteria judge whether reduce() prepares the next backward.
    """
    parameters = harness.make_parameters(inputs, context.device)
    for step in range(inputs["steps"]):
        parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
        optimizer = zero(harness.make_groups(inputs, parameters), torch.optim.SGD, lr=LR)
        harness.take_step(optimizer, parameters, inputs, step)
    return harness.arrays_of(parameters, "p")


def judge_order(case: Case) -> Iterator[Finding]:
    """Requires that no collective met a different one, and that no gradient was lost."""
    expected = harness.trained(case, torch.optim.SGD, {"lr": LR})[-1]
    for rank in range(case.world_size):
        if wrong := harness.same_direction(case, rank, "p", expected):
            yield Finding(f"{wrong.message} On each rank different gradients were missing.", rank)
