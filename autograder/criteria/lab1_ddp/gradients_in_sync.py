"""Criterion for a function that tells whether all ranks hold the same gradients.

The function runs in the student's process and could read the variables of its callers. So the rank
does not get the name of a case. What it gets (its own gradients and the tolerance) fits two cases:
one in which the ranks agree and one in which they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

SHAPES = ((3, 4), (5,), (6,))
TOL = 1e-6
NONE_ON_ALL = "one parameter has no gradient on any rank"
ON = {"first": "rank 0", "middle": "a rank in the middle", "last": "the last rank"}


@dataclass(frozen=True)
class _Kind:
    """One case: what differs, and whether ranks agree.

    Attributes:
        add: (who, parameter, value that is added to the last entry of the parameter's gradient).
        everywhere: that value is added to all entries.
        frozen: parameters that need no gradient, but have one.
        missing: (who, parameter without a gradient); "all" means all ranks.
        single: parameters in float32; the others are in float64.
        near: the value around which the gradients are.
    """

    said: str
    agree: bool
    add: tuple[tuple[str, int, float], ...] = ()
    missing: tuple[tuple[str, int], ...] = ()
    tol: float | None = None
    near: float = 0.0
    swapped: bool = False
    everywhere: bool = False
    frozen: tuple[int, ...] = ()
    zeros: tuple[int, ...] = ()  # parameters whose gradient is zero
    single: tuple[int, ...] = ()


_NOTHING = tuple(("all", i) for i in range(len(SHAPES)))
KINDS = [
    _Kind("all ranks hold the same gradients", True),
    _Kind("the last rank has two values swapped (sums agree)", False, swapped=True),
    _Kind("one value differs by 1e-9, less than tol", True, (("last", 0, 1e-9),)),
    _Kind(
        "two ranks are off by 0.7 tol, in opposite directions (1.4 tol apart)",
        False,
        (("last", 0, 0.7 * TOL), ("last but one", 0, -0.7 * TOL)),
    ),
    _Kind(
        "the first rank is 0.7 tol below the one in the middle, the last one 0.7 tol above",
        False,
        (("first", 1, -0.7 * TOL), ("last", 1, 0.7 * TOL)),
    ),
    _Kind(
        "all values of a parameter differ by 0.9 tol",
        True,
        (("last", 0, 0.9 * TOL),),
        everywhere=True,
    ),
    _Kind(
        "a parameter that was frozen after backward differs",
        False,
        (("last", 1, 0.01),),
        frozen=(1,),
    ),
    _Kind("a parameter that was frozen after backward is the same", True, frozen=(1,)),
    _Kind("all ranks hold the same values near 1000", True, near=1000.0),
    _Kind(
        "values near 1000 differ by 0.0001 (tol is absolute)",
        False,
        (("last", 2, 1e-4),),
        near=1000.0,
    ),
    _Kind("values differ by 0.01, and tol is 0.1", True, (("last", 1, -0.01),), tol=0.1),
    _Kind("values differ by 0.5, and tol is 0.1", False, (("last", 1, -0.5),), tol=0.1),
    _Kind("all ranks hold the same gradients, and tol is 1e-12", True, tol=1e-12),
    _Kind("all ranks hold the same gradients, and tol is 0", True, tol=0.0),
    _Kind("values differ by 1e-12, and tol is 0", False, (("last", 1, 1e-12),), tol=0.0),
    _Kind(
        "0 and 0.25, and tol is 0.25: not more than tol apart",
        True,
        (("last", 0, 0.25),),
        tol=0.25,
        zeros=(0,),
    ),
    _Kind(
        "-0.25 and 0.25, and tol is 0.25",
        False,
        (("last", 0, 0.25), ("last but one", 0, -0.25)),
        tol=0.25,
        zeros=(0,),
    ),
    _Kind("values differ by 1e-9, and tol is 1e-12", False, (("last", 0, 1e-9),), tol=1e-12),
    _Kind(
        "parameter 0 is float32, values of float64 parameter 2 differ by 1e-9, tol is 1e-12",
        False,
        (("last", 2, 1e-9),),
        tol=1e-12,
        single=(0,),
    ),
    _Kind(
        "parameter 0 is float64, the others float32, and all are the same",
        True,
        single=(1, 2),
    ),
    _Kind(
        "all parameters are float32, and one value differs by 0.01",
        False,
        (("middle", 1, 0.01),),
        single=(0, 1, 2),
    ),
    _Kind(NONE_ON_ALL, True, missing=(("all", 2),)),
    _Kind("no parameter has a gradient on any rank", True, missing=_NOTHING),
    _Kind(
        "parameter 0 has no gradient on any rank, and parameter 1 differs",
        False,
        (("last", 1, 0.01),),
        missing=(("all", 0),),
    ),
    _Kind(
        "no parameter has a gradient on the last rank; all have on the others",
        False,
        missing=tuple(("last", i) for i in range(len(SHAPES))),
    ),
    _Kind(
        "each rank has no gradient of one parameter, and not of the same, and zeros elsewhere",
        False,
        missing=(("first", 0), ("middle", 1), ("last", 2)),
        zeros=(0, 1, 2),
    ),
    _Kind("one parameter's gradient is zero on all ranks", True, zeros=(2,)),
]


def _kinds_by_place() -> list[_Kind]:
    """Each parameter, on the first, a middle and the last rank."""
    kinds = []
    for number, (who, said) in enumerate(ON.items()):
        for parameter in range(len(SHAPES)):
            tol = TOL if number == parameter else 0.1
            kinds += [
                _Kind(
                    f"{said} differs by 1.1 tol in one value of parameter {parameter}",
                    False,
                    ((who, parameter, 1.1 * tol),),
                    tol=None if tol == TOL else tol,
                ),
                _Kind(
                    f"{said} differs by 0.9 tol in one value of parameter {parameter}",
                    True,
                    ((who, parameter, 0.9 * tol),),
                    tol=None if tol == TOL else tol,
                ),
            ]
        kinds.append(
            _Kind(
                f"parameter {number} has no gradient on {said}, and zeros on the others",
                False,
                missing=((who, number),),
                zeros=(number,),
            )
        )
    return kinds


KINDS += _kinds_by_place()


def draw(source: Draw) -> list[Values]:
    """Cases whose gradients agree, and cases whose differences a sum or a mean might not show."""
    rng, world_size = source.shared(), source.world_size
    order = [int(i) for i in rng.permutation(len(KINDS))]
    tolerances = [KINDS[i].tol for i in order]
    shared: Values = {"tol": tolerances, "_order": order}
    shared["frozen"] = [list(KINDS[i].frozen) for i in order]
    shared["single"] = [list(KINDS[i].single) for i in order]
    inputs: list[Values] = [dict(shared) for _ in range(world_size)]
    for number, kind in enumerate(KINDS[i] for i in order):
        dtypes = [np.float32 if i in kind.single else np.float64 for i in range(len(SHAPES))]
        base = [rng.normal(kind.near, 1.0, size=shape) for shape in SHAPES]
        for i in kind.zeros:
            base[i] *= 0.0
        for rank in range(world_size):
            for i, grad in enumerate(_gradients_of(kind, base, rank, world_size)):
                if grad is not None:
                    inputs[rank][f"g{number}/{i}"] = grad.astype(dtypes[i])
    return inputs


def _gradients_of(
    kind: _Kind, base: list[np.ndarray], rank: int, world_size: int
) -> list[np.ndarray | None]:
    """One rank's gradients in one case."""
    last = world_size - 1
    places = {"first": 0, "middle": world_size // 2, "last": last, "last but one": last - 1}
    mine = {who for who, place in places.items() if place == rank} | {"all"}
    grads: list[np.ndarray | None] = [g.copy() for g in base]
    for who, parameter, value in kind.add:
        if who in mine:
            place = slice(None) if kind.everywhere else slice(-1, None)
            grads[parameter].flat[place] += value  # type: ignore[union-attr]
    if kind.swapped and rank == last:
        weight = grads[0]
        weight[0, 0], weight[2, 3] = weight[2, 3], weight[0, 0]  # type: ignore[index]
    for who, parameter in kind.missing:
        if who in mine:
            grads[parameter] = None
    return grads


def observe(gradients_in_sync: Any, inputs: Values, context: Context) -> Values:
    """The function's answer for every case, and the gradients after the call."""
    answers: list[bool] = []
    answer: Values = {"answers": answers}
    for number, tol in enumerate(inputs["tol"]):
        single = inputs["single"][number]
        model = torch.nn.ParameterList(
            torch.zeros(shape, dtype=torch.float32 if i in single else torch.float64)
            for i, shape in enumerate(SHAPES)
        ).to(context.device)
        for i, p in enumerate(model.parameters()):
            grad = inputs.get(f"g{number}/{i}")
            if grad is not None:
                p.grad = torch.from_numpy(grad.copy()).to(context.device)
            p.requires_grad_(i not in inputs["frozen"][number])
        options = {} if tol is None else {"tol": tol}
        said = gradients_in_sync(model, **options)
        if isinstance(said, np.bool_) or (isinstance(said, torch.Tensor) and said.numel() == 1):
            said = bool(said)
        if not isinstance(said, bool):
            raise TypeError(f"gradients_in_sync: expected True or False, got {said!r}")
        answers.append(said)
        for i, p in enumerate(model.parameters()):
            if f"g{number}/{i}" in inputs:
                answer[f"g{number}/{i}"] = oracle.grad_of(p)
    return answer


def judge(case: Case) -> Iterator[Finding]:
    """Every rank answers True if all ranks hold the same gradients, and False if not.

    Ranks may compare extremes or gather all gradients.
    """
    for rank, answer in enumerate(case.answers):
        said = answer.get("answers")
        for number, kind in enumerate(KINDS[i] for i in case.inputs[0]["_order"]):
            expected = kind.agree or case.world_size == 1
            got = said[number] if isinstance(said, list) and number < len(said) else None
            if got is not expected:
                yield Finding(f"{kind.said}: expected {expected}, got {got}.", rank)
        for name, gradient in case.inputs[rank].items():
            if isinstance(gradient, np.ndarray) and not np.array_equal(
                answer.get(name, ()), gradient
            ):
                yield Finding("a gradient was changed: work on a copy of it.", rank)
                break
