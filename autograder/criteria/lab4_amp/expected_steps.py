"""What the recorded steps of a training loop should have done, in float64 and in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import as_number, told
from autograder.criteria.criterion import Case, Finding
from autograder.criteria.lab4_amp.recorded import LR

RTOL = 1e-4  # relative to the largest entry of a gradient; everything is computed in float64
SAME_FACTOR = 1e-3


@dataclass(frozen=True)
class Step:
    """One step of a loop.

    `update` is what the step took from the parameters, divided by the learning rate that was handed
    out, or by the optimizer's own one if a scheduler changes it.
    """

    batches: list[int]
    taken: bool
    lr: float
    before: np.ndarray
    update: np.ndarray


@dataclass(frozen=True)
class Base:
    """How a plain step, without the feature that is judged, differs from a right one.

    A criterion that judges a feature compares with this, because a different criterion charges what
    is wrong in plain steps.
    """

    local: bool = False  # gradients are this rank's own, not the mean over ranks
    factor: float = 1.0


def _is_table(values: Any, rows: int, columns: int) -> TypeGuard[np.ndarray]:
    right = isinstance(values, np.ndarray) and values.shape == (rows, columns)
    return right and values.dtype == np.float64


def steps_of(case: Case, run: str, rank: int) -> list[Step] | None:
    """The steps that a rank recorded; None if the answer is malformed."""
    answer, settings = case.answers[rank], case.inputs[0]["settings"][run]
    size = sum(p.size for p in oracle.parameters_of(case.inputs[0]))
    given_lr = None if settings.get("scheduler") else settings.get("lr", LR)
    told_steps = told(answer, f"{run}/steps")
    before, after = answer.get(f"{run}/before"), answer.get(f"{run}/after")
    if not isinstance(told_steps, list) or not all(isinstance(s, dict) for s in told_steps):
        return None
    taken = sum(step.get("taken") is True for step in told_steps)
    if not taken:
        before = after = np.zeros((0, size))
    if not (_is_table(before, taken, size) and _is_table(after, taken, size)):
        return None
    steps, place = [], 0
    for step in told_steps:
        lr, batches = as_number(step.get("lr")), step.get("batches")
        if not isinstance(batches, list) or lr is None:
            return None
        if step.get("taken") is True:
            with np.errstate(all="ignore"):
                update = (before[place] - after[place]) / (given_lr or lr or 1.0)
            steps.append(Step(batches, True, lr, before[place], update))
            place += 1
        else:
            steps.append(Step(batches, False, lr, np.zeros(size), np.zeros(size)))
    return steps


def loss_and_gradient(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean squared error of one hidden layer with tanh, and its flat gradient, at parameters `at`.

    Written out, because a judge needs it hundreds of times; `test_lab4.py` compares it with torch.
    """
    outputs, inputs = y.shape[1], x.shape[1]
    hidden = (at.size - outputs) // (inputs + 1 + outputs)
    w1, b1, w2, b2 = np.split(at, np.cumsum([hidden * inputs, hidden, outputs * hidden]))
    w1, w2 = w1.reshape(hidden, inputs), w2.reshape(outputs, hidden)
    x, h = x.astype(np.float64), np.tanh(x @ w1.T + b1)
    off = h @ w2.T + b2 - y
    back = 2 * off / off.size
    middle = (back @ w2) * (1 - h * h)
    parts = (middle.T @ x, middle.sum(axis=0), back.T @ h, back.sum(axis=0))
    return float((off**2).mean()), np.concatenate([part.ravel() for part in parts])


def batch_losses(case: Case, run: str, step: Step, rank: int) -> list[float]:
    """The loss of each batch of a step, with the parameters that the step began with."""
    inputs = case.inputs[rank]
    return [
        loss_and_gradient(step.before, inputs[f"x/{run}/{n}"], inputs[f"y/{run}/{n}"])[0]
        for n in step.batches
    ]


def gradient(
    case: Case, run: str, batches: Sequence[int], at: np.ndarray, rank: int | None = None
) -> np.ndarray:
    """Flat gradient at the parameters `at`, a mean over the batches, and over all ranks or one."""
    each = [
        loss_and_gradient(at, inputs[f"x/{run}/{n}"], inputs[f"y/{run}/{n}"])[1]
        for inputs in (case.inputs if rank is None else [case.inputs[rank]])
        for n in batches
    ]
    return np.mean(each, axis=0)


def expected_update(case: Case, run: str, step: Step, base: Base, rank: int) -> np.ndarray:
    """What a step takes from the parameters, per lr, if plain steps go wrong as `base` says."""
    own = rank if base.local else None
    return base.factor * gradient(case, run, step.batches, step.before, own)


def near(got: np.ndarray, expected: np.ndarray, rtol: float = RTOL) -> bool:
    """Whether two vectors agree, relative to the largest entry."""
    with np.errstate(invalid="ignore"):
        return bool(np.abs(got - expected).max() <= rtol * np.abs(expected).max() + 1e-12)


def factor_between(got: np.ndarray, expected: np.ndarray) -> float | None:
    """c > 0 with got = c × expected; None if there is none."""
    if not np.isfinite(got).all():
        return None
    with np.errstate(all="ignore"):
        factor = float(got @ expected / (expected @ expected))
    return factor if factor > 0 and near(got, factor * expected) else None


def base_of(case: Case, run: str, rank: int) -> Base | None:
    """How the steps of a plain run differ from right ones; None if in no way that is known."""
    steps = steps_of(case, run, rank)
    if not steps or not all(valid(case, run, step) and step.taken for step in steps):
        return None
    for local in (False, True):
        factors = [
            factor_between(step.update, expected_update(case, run, step, Base(local), rank))
            for step in steps
        ]
        known = [factor for factor in factors if factor is not None]
        if len(known) == len(factors) and max(known) - min(known) <= SAME_FACTOR * max(known):
            return Base(local, 1.0 if abs(known[0] - 1) <= SAME_FACTOR else known[0])
    return None


def valid(case: Case, run: str, step: Step) -> bool:
    """Whether every batch of a step is one of those that were handed out."""
    count = case.inputs[0]["settings"][run]["batches"]
    return bool(step.batches) and all(n in range(count) for n in step.batches)


def checked_steps(case: Case, run: str, rank: int, *, strict: bool = False) -> list[Step] | Finding:
    """The steps that a rank recorded, or a finding if one has not the batches that it should have.

    Without `strict`, the first or the last step may be missing: a different criterion charges that.
    """
    settings = case.inputs[0]["settings"][run]
    k, count = settings.get("accumulate", 1), settings["batches"]
    expected = [list(range(first, first + k)) for first in range(0, count, k)]
    steps = steps_of(case, run, rank)
    what = f"{count} batches, accumulate={k}"
    if steps is None:
        return Finding(f"{what}: no steps came back.", rank)
    got = [sorted(step.batches) for step in steps]
    if got == expected or (not strict and got in (expected[1:], expected[:-1]) and got):
        return steps
    if len(got) != len(expected):
        missing = sorted({n for group in expected for n in group} - {n for g in got for n in g})
        unseen = f" The model has not seen batch {_listed(missing)} (of 0 to {count - 1})."
        return Finding(
            f"{what}: expected {len(expected)} optimizer steps, saw {len(got)}."
            + (unseen if missing else ""),
            rank,
        )
    place = next(i for i, (g, e) in enumerate(zip(got, expected, strict=True)) if g != e)
    seen = _listed(got[place]) or "none"
    if any(n < 0 for n in got[place]):
        seen = "something else"
    return Finding(
        f"{what}: step {place} has to see batch {_listed(expected[place])}, each by itself; "
        f"the model saw {seen}.",
        rank,
    )


def _listed(items: Sequence[Any]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, items[:-1])), *map(str, items[-1:])]))


def update_finding(what: str, step: Step, expected: np.ndarray, rank: int, why: str) -> Finding:
    place = int(np.argmax(np.abs(step.update - expected)))
    got = "nothing" if not step.update.any() else f"{step.update[place]:.6g}"
    return Finding(
        f"{what}: the step must be lr × the gradient; for entry {place} of all parameters this "
        f"gradient is {expected[place]:.6g}, and the step had {got}. {why}",
        rank,
    )


def step_name(run_name: str, number: int) -> str:
    return f"step {number}" + (" (accumulate=2)" if run_name == "two" else "")


def overflows(case: Case, name: str, step: Step, local: int | None = None) -> list[int]:
    """The ranks with an overflow in a batch of this step."""
    return [
        rank
        for rank, inputs in enumerate(case.inputs)
        if local in (None, rank)
        and any(np.isinf(inputs[f"y/{name}/{n}"]).any() for n in step.batches)
    ]
