"""Criterion for a function that tells whether all ranks hold the same gradients.

The function runs in the student's process and could read the variables of its callers. So the rank
does not get the name of a case. What it gets (its own gradients and the tolerance) fits two cases:
one in which the ranks agree and one in which they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

CASES = {
    "equal": "all ranks hold the same gradients",
    "last differs": "the last rank's last value differs by 0.01",
    "first differs": "rank 0's last value differs by 0.01",
    "swapped": "the last rank has two values swapped (sums agree)",
    "tiny": "one value differs by 1e-9, less than tol",
    "both ways": "two ranks are off by 0.7 tol, in opposite directions (1.4 tol apart)",
    "large": "values near 1000 differ by 0.001 (tol is absolute)",
    "coarse": "values differ by 0.01, and tol is 0.1",
    "fine": "values differ by 1e-9, and tol is 1e-12",
    "none on one": "one parameter has no gradient on the last rank and zeros on the others",
    "none on all": "one parameter has no gradient on any rank",
    "large equal": "all ranks hold the same values near 1000",
    "coarse differs": "values differ by 0.5, and tol is 0.1",
    "fine equal": "all ranks hold the same gradients, and tol is 1e-12",
    "nothing": "no parameter has a gradient on any rank",
    "nothing on one": "no parameter has a gradient on the last rank; all have on the others",
    "zeros on all": "one parameter's gradient is zero on all ranks",
}
AGREE = (
    "equal",
    "tiny",
    "coarse",
    "none on all",
    "nothing",
    "large equal",
    "fine equal",
    "zeros on all",
)
TOL = 1e-6
OTHER_TOL = {"coarse": 0.1, "coarse differs": 0.1, "fine": 1e-12, "fine equal": 1e-12}


def draw(source: Draw) -> list[Values]:
    """Cases whose gradients agree, and cases whose differences a sum or a mean might not show."""
    rng, world_size = source.shared(), source.world_size
    kinds = list(CASES)
    order = [kinds[i] for i in rng.permutation(len(kinds))]
    tolerances = [OTHER_TOL.get(kind) for kind in order]
    inputs: list[Values] = [{"tol": tolerances, "_cases": order} for _ in range(world_size)]
    for number, kind in enumerate(order):
        base = [rng.normal(size=(3, 4)), rng.normal(size=6)]
        if kind in ("large", "large equal"):
            base[1] += 1000.0
        if kind in ("none on one", "zeros on all"):
            base[1] *= 0.0
        for rank in range(world_size):
            last = rank == world_size - 1
            grads = _gradients_of(kind, base, last, rank == 0, rank == world_size - 2)
            for i, grad in enumerate(grads):
                if grad is not None:
                    inputs[rank][f"g{number}/{i}"] = grad
    return inputs


def _gradients_of(
    kind: str, base: list[np.ndarray], last: bool, first: bool, last_but_one: bool
) -> list[np.ndarray | None]:
    """One rank's gradients in one case."""
    weight, bias = (g.copy() for g in base)
    if (kind == "last differs" and last) or (kind == "first differs" and first):
        bias[-1] += 0.01
    if kind == "swapped" and last:
        weight[0, 0], weight[2, 3] = weight[2, 3], weight[0, 0]
    if kind in ("tiny", "fine") and last:
        weight[1, 1] += 1e-9
    if kind == "coarse" and last:
        bias[0] -= 0.01
    if kind == "coarse differs" and last:
        bias[0] -= 0.5
    if kind == "large" and last:
        bias[2] += 1e-3
    if kind == "both ways":
        weight[2, 0] += 0.7 * TOL * (int(last) - int(last_but_one))
    if kind == "nothing" or (kind == "nothing on one" and last):
        return [None, None]
    missing = kind == "none on all" or (kind == "none on one" and last)
    return [weight, None if missing else bias]


def observe(gradients_in_sync: Any, inputs: Values, context: Context) -> Values:
    """The function's answer for every case, and the gradients after the call."""
    answers: list[bool] = []
    answer: Values = {"answers": answers}
    for number, tol in enumerate(inputs["tol"]):
        shapes = ((3, 4), (6,))
        model = torch.nn.ParameterList([torch.zeros(s, dtype=torch.float64) for s in shapes])
        model = model.to(context.device)
        for i, p in enumerate(model.parameters()):
            if f"g{number}/{i}" in inputs:
                p.grad = torch.from_numpy(inputs[f"g{number}/{i}"].copy()).to(context.device)
        options = {} if tol is None else {"tol": tol}
        said = gradients_in_sync(model, **options)
        if isinstance(said, torch.Tensor | np.bool_):
            said = bool(said)
        if not isinstance(said, bool):
            raise TypeError(f"gradients_in_sync: expected True or False, got {said!r}")
        answers.append(said)
        for i, p in enumerate(model.parameters()):
            if f"g{number}/{i}" in inputs:
                answer[f"g{number}/{i}"] = oracle.grad_of(p)
    return answer


def judge(case: Case) -> Iterator[Finding]:
    """Every rank answers True if all ranks hold the same gradients, and False if not."""
    for rank, answer in enumerate(case.answers):
        said = answer.get("answers")
        for number, kind in enumerate(case.inputs[0]["_cases"]):
            expected = kind in AGREE or case.world_size == 1
            got = said[number] if isinstance(said, list) and number < len(said) else None
            if got is not expected:
                what = CASES[kind]
                yield Finding(f"{what}: expected {expected}, got {got}.", rank)
        for name, gradient in case.inputs[rank].items():
            if isinstance(gradient, np.ndarray) and not np.array_equal(
                answer.get(name, ()), gradient
            ):
                yield Finding("a gradient was changed: work on a copy of it.", rank)
                break
