"""Judges of the training loop that steps once per k micro-batches.

From the gradients that `loop` has noted, `_steps` finds which batch entered which step with which
weight. Each criterion judges one aspect of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import told
from autograder.criteria.common.weights import (
    Gradient,
    are_close,
    collect,
    norm,
    present,
    show,
    weights_of,
)
from autograder.criteria.criterion import Case, Finding, Values
from autograder.criteria.lab2_accumulation.loop import NUM_PARAMETERS, basis_of, stale_of
from autograder.criteria.lab2_accumulation.memory import too_much_memory


@dataclass
class _Step:
    """One optimizer step: the weight of every batch, and the batches that no earlier step had."""

    weights: np.ndarray
    new: list[int]
    gradient: list[Any]


def _steps(case: Case, rank: int, number: int, extra: Sequence[Gradient] = ()) -> list[_Step] | str:
    """The steps of a run, or a message why they cannot be determined.

    Args:
        extra: gradients beside those of the batches; their weights come last.
    """
    inputs, answer = case.inputs[rank], case.answers[rank]
    n = inputs["runs"][number]["n"]
    count = told(answer, f"steps/{number}")
    if not isinstance(count, int) or not 0 <= count <= 2 * n + 2:
        return "the epoch did not end as it should."
    basis = [*basis_of(inputs, number), *extra]
    steps: list[_Step] = []
    seen: set[int] = set()
    for step in range(count):
        gradient = collect(answer, f"g{number}/{step}", NUM_PARAMETERS)
        weights = weights_of(basis, gradient)
        if weights is None:
            return (
                f"optimizer step {step}: p.grad is not a sum of the gradients of this epoch's "
                "batches."
            )
        new = [i for i in present(weights) if i not in seen]
        seen.update(new)
        steps.append(_Step(weights, new, gradient))
    return steps


def _judge(case: Case, judge_run: Any) -> Iterator[Finding]:
    """The first finding of each rank: `judge_run(rank, number, run, steps)` returns a message."""
    for rank in range(case.world_size):
        for number, run in enumerate(case.inputs[rank]["runs"]):
            # Gradients that an earlier epoch has left are not judged here.
            extra = basis_of(case.inputs[rank], number - 1) if run.get("goes_on") else ()
            steps = _steps(case, rank, number, extra)
            if isinstance(steps, str):
                by_groups = " Is all of it clipped by one factor?" if run.get("groups") else ""
                message = steps + by_groups
            else:
                message = judge_run(rank, number, run, steps)
            if message:
                head = f"{run['n']} batches, accumulation_steps={run['k']}: "
                yield Finding(head + message, rank)
                break


def judge_steps(case: Case) -> Iterator[Finding]:
    """Step s has the batches sk to sk + k - 1, each with weight 1/k, and there are n/k steps.

    A loop may use len(batches), look one batch ahead, or collect the batches of a step first.
    """

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        k, n = run["k"], run["n"]
        for s, step in enumerate(steps[: n // k]):
            group = list(range(s * k, s * k + k))
            if step.new != group:
                return (
                    f"optimizer step {s} took in batches {step.new}, expected {group}."
                    f"{_why_group(step.new, group, s)}"
                )
            if not are_close(step.weights[group], [1 / k] * k):
                return (
                    f"optimizer step {s}: weights {show(step.weights[group])}, expected "
                    f"{1 / k:.3g} each."
                )
        if len(steps) != n // k:
            return (
                f"{len(steps)} optimizer steps, expected {n // k}. Step only for a group that has "
                "a batch."
            )
        got = told(case.answers[rank], f"returned/{number}")
        return "" if got == n // k else f"returned {got}, expected {n // k} optimizer steps."

    found = {finding.rank: finding for finding in _judge(case, judge_run)}
    for rank, answer in enumerate(case.answers):
        swapped = oracle.find_misused_loss(answer, rank)
        wrong = found.get(rank) or swapped or too_much_memory(answer.get("peak"), rank)
        if wrong := wrong or _too_much_data(case, rank):
            yield wrong


def _too_much_data(case: Case, rank: int) -> Finding | None:
    """A finding if an epoch's batches were asked for twice, or more than two groups were kept."""
    for number, run in enumerate(case.inputs[rank]["runs"]):
        k, data = run["k"], told(case.answers[rank], f"data/{number}")
        if not isinstance(data, list) or len(data) != 3 or not all(type(n) is int for n in data):
            continue
        passes, held, alive = data
        head = f"{run['n']} batches, accumulation_steps={k}: "
        if passes > 1:
            return Finding(
                f"{head}you began {passes} times to go through `batches`. Once is all there is: a "
                "loader loads and shuffles anew each time.",
                rank,
            )
        if held > 2 * k + 1:  # one batch beyond a group shows whether the group is the last one
            return Finding(
                f"{head}{held} of them had been taken from `batches` and had entered no step yet. "
                "They come one by one, and an epoch does not fit into memory: train on each group "
                "before you take the next.",
                rank,
            )
        if alive > 2 * k + 1:
            return Finding(
                f"{head}{alive} of them were in memory at once, most of which had entered a step. "
                "An epoch does not fit into memory: keep none beyond its group.",
                rank,
            )
    return None


def _why_group(new: list[int], group: list[int], step: int) -> str:
    if step == 0 and new == [0]:
        return " Counted from 0, i % k == 0 is true at once: the group is full at (i + 1) % k == 0."
    if new == group[-1:]:
        return " The earlier gradients are gone: clear them once per group, not per batch."
    return ""


def judge_tail(case: Case) -> Iterator[Finding]:
    """The batches that are left over make a step of their own, with their mean gradient."""

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        k, n = run["k"], run["n"]
        count, steps = len(steps), _with_batches(steps)
        tail = list(range(n // k * k, n))
        last = steps[-1] if steps else None
        whole = len(tail)
        uneven = _uneven(steps[:-1])  # 0 is not judged: a later group's size cannot change step 0
        if uneven and n > k and _varies(case, rank, uneven):
            weights = show(steps[uneven].weights[steps[uneven].new])
            return (
                f"optimizer step {uneven} took in batches {steps[uneven].new} with weights "
                f"{weights}, expected equal ones: only batches {tail} are in the smaller group."
            )
        if _keeps_last(case, rank):
            tail = tail[-1:]
        if last is None or not set(tail) & set(last.new):
            return f"the last batches {tail} entered no optimizer step; their group is smaller."
        if last.new != tail:
            return f"the last optimizer step took in batches {last.new}, expected {tail}."
        if not are_close(last.weights[tail], [1 / whole] * len(tail)):
            return (
                f"the last optimizer step has weights {show(last.weights[tail])} for batches "
                f"{tail}, expected {1 / whole:.3g} each: the mean over the batches that "
                "this group really has."
            )
        got = told(case.answers[rank], f"returned/{number}")
        return "" if got in (count, len(steps)) else f"{count} optimizer steps, but returned {got}."

    return _judge(case, judge_run)


def _uneven(steps: Sequence[_Step]) -> int | None:
    """The number of the first step whose batches do not enter with equal weights."""
    entered = [step.weights[step.new] for step in steps]
    wrong = (i for i, w in enumerate(entered) if w.size and not are_close(w, [w.mean()] * w.size))
    return next(wrong, None)


def _varies(case: Case, rank: int, number: int) -> bool:
    """Whether a step's batches have different shares before a tail of 1 and before one of k - 1.

    If not, the tail is not the reason that they are uneven, and `judge_steps` finds the mistake.
    """
    shares = []
    for run in (0, 1):
        steps = _steps(case, rank, run)
        if isinstance(steps, str) or not steps[number:] or not steps[number].new:
            return False
        entered = steps[number].weights[steps[number].new]
        shares.append(entered / entered.sum())
    return len(shares[0]) != len(shares[1]) or not are_close(*shares)


def _with_batches(steps: list[_Step]) -> list[_Step]:
    """The steps without those at the end that had no gradient, which `judge_steps` finds."""
    last = max((i for i, step in enumerate(steps) if present(step.weights)), default=-1)
    return steps[: last + 1]


def _keeps_last(case: Case, rank: int) -> bool:
    """Whether a whole group's step holds only its last batch, which `judge_steps` finds."""
    k, steps = case.inputs[rank]["runs"][0]["k"], _steps(case, rank, 0)
    if isinstance(steps, str) or len(steps) < 2:
        return False
    return all(step.new == [number * k + k - 1] for number, step in enumerate(steps[:2]))


def judge_zero_grad(case: Case) -> Iterator[Finding]:
    """No step contains gradients from before the epoch or from an earlier step.

    Gradients may be cleared before or after each step, to zeros or to None; the last may stay.
    """
    for rank in range(case.world_size):
        inputs = case.inputs[rank]
        stale = stale_of(inputs, 0)
        olds = ([stale], [stale, *basis_of(inputs, 0)], [stale_of(inputs, 2)])
        names = ("epoch 0", "epoch 1", "epoch 0 of a model with frozen parameters")
        for number, (name, old) in enumerate(zip(names, olds, strict=True)):
            steps = _steps(case, rank, number, old)
            if isinstance(steps, str):
                whose = "frozen parameter" if number == 2 else "second group"
                message = f"{steps} Is something old in some of them, such as a {whose}'s?"
            else:
                message = _old(inputs, number, steps) or _frozen_filled(case, rank, number)
            if message:
                yield Finding(f"{name}: {message}", rank)
                break


def _frozen_filled(case: Case, rank: int, number: int) -> str:
    """What is wrong if a frozen parameter without an old gradient got a gradient, such as zeros."""
    inputs, filled = case.inputs[rank], told(case.answers[rank], f"filled/{number}")
    frozen = inputs["runs"][number].get("frozen", ())
    never = [i for i in frozen if f"stale/{number}/{i}" not in inputs]
    if isinstance(filled, list) and any(i in filled for i in never):
        return (
            "a frozen parameter had no gradient before, and has one at an optimizer step. Zeros "
            "are one too: with weight decay the optimizer moves the parameter."
        )
    return ""


def _old(inputs: Values, number: int, steps: list[_Step]) -> str:
    n = inputs["runs"][number]["n"]
    if len(steps) < 2:
        return f"{len(steps)} optimizer steps, too few to tell."
    for s, step in enumerate(steps):
        entered = present(step.weights)
        if any(i >= n for i in entered):
            return (
                f"optimizer step {s} contains gradients that were in p.grad before this epoch: "
                "clear them at its beginning."
            )
        if old := sorted(set(entered) - set(step.new)):
            return (
                f"optimizer step {s} contains batches {old} once more: clear the gradients "
                "after each step."
            )
    return ""


def judge_clip(case: Case) -> Iterator[Finding]:
    """The whole accumulated gradient is clipped once, before the step."""

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        limit = run["max_norm"]
        if limit == 0:
            size = max((norm(step.gradient) for step in steps), default=0.0)
            return f"max_norm=0: the norm was {size:.4g}. 0 is a limit." * (size > 1e-3)
        if not any(present(step.weights) for step in steps):
            return "there was no optimizer step with a gradient."
        for step in steps:
            entered = step.weights[step.new]  # old batches are not judged here
            size = norm(step.gradient)
            if entered.size == 0:
                continue  # a surplus step is not judged here, either
            if number != 1 and not np.isclose(size, limit, rtol=0.02):
                return (
                    f"max_norm={limit:.4g}: at the optimizer step the gradient's norm is "
                    f"{size:.4g}. Clip before the step, after the last backward, and when "
                    "p.grad is the mean of the group."
                    + " The norm is that over all parameters of the model."
                    * bool(run.get("groups"))
                )
            if number == 1 and size > 0.9 * limit:
                return (
                    f"max_norm={limit:.4g}: the norm was made {size:.4g} although it was "
                    "below the limit: clipping never enlarges."
                )
            # A whole group before a smaller one is judged by `judge_tail`.
            judged = step is steps[-1] or run["n"] % run["k"] == 0
            if judged and _uneven([step]) is not None:
                return (
                    f"max_norm={limit:.4g}: at an optimizer step the weights of all batches were "
                    f"{show(step.weights)}, expected equal ones for those of its group: clip the "
                    "accumulated gradient once, not that of each batch."
                )
        return ""

    return _judge(case, judge_run)


def judge_schedule(case: Case) -> Iterator[Finding]:
    """The scheduler steps once after each optimizer step."""

    def judge_run(rank: int, number: int, run: Values, steps: list[_Step]) -> str:
        answer, count = case.answers[rank], len(_with_batches(steps))
        if count < 2:
            return f"{count} optimizer steps, too few to tell."
        begin = told(answer, f"end/{number - 1}") if run.get("goes_on") else 0
        begin = begin if isinstance(begin, int) else 0
        expected, made = list(range(begin, begin + count)), told(answer, f"schedule/{number}")
        made = made[:count] if isinstance(made, list) else made
        ends = (begin + count, begin + len(steps))
        if made != expected or told(answer, f"end/{number}") not in ends:
            epoch = f", after {begin} in an epoch before" if begin else ""
            return (
                f"{count} optimizer steps{epoch}, and the scheduler ends at "
                f"{answer.get(f'end/{number}')}; before each optimizer step it stood at "
                f"{answer.get(f'schedule/{number}')}, expected {expected}: scheduler.step(), "
                "without a number, belongs right after optimizer.step()."
            )
        return ""

    return _judge(case, judge_run)
