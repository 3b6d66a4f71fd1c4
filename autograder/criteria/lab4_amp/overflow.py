"""Criteria for a loss scaler: which steps it skips, and that all ranks skip the same steps.

The referee draws which gradients overflow, in which steps and on which ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import described, read_number, short, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, named_ranks
from autograder.criteria.lab4_amp.scaler import (
    LR,
    NEVER,
    SHAPES,
    WEIGHT_DECAY,
    begin,
    draw_gradients,
    draw_start,
    make_optimizer,
    make_parameters,
    same,
    set_gradients,
    stepped,
    values_of,
)

# --- finds ---------------------------------------------------------------------------------------

ALONE = {"one rank": np.inf, "one rank's nan": np.nan}  # MAX of gloo may lose a nan
FIND_CASES: dict[str, tuple[str, bool]] = {
    "clean": ("all gradients are finite", True),
    "inf first": ("inf in the first gradient", False),
    "minus inf": ("-inf in a gradient in the middle", False),
    "nan last": ("nan in the last entry of the last gradient", False),
    "nan among many": ("nan and inf in the same gradient", False),
    "huge": ("entries of 2e38, large but finite", True),
    "none": ("one parameter has no gradient, the others are finite", True),
    "none and nan": ("one parameter has no gradient, another one has nan", False),
    "one rank": ("inf on the last rank, the gradients of all others are finite", False),
    "one rank's nan": ("nan on the last rank, the gradients of all others are finite", False),
}


def draw_finds(draw: Draw) -> list[Values]:
    """Every case on all ranks at once, with private values; but two overflows are on one rank only.

    All ranks have to leave out those steps: this is the idea of the lab, and a gate.
    """
    order = [list(FIND_CASES)[i] for i in draw.shared("order").permutation(len(FIND_CASES))]
    inputs = []
    for rank in range(draw.world_size):
        values = {"order": order} | draw_start(draw.private(rank))
        for kind in order:
            grads: list[np.ndarray | None] = list(draw_gradients(draw.shared(f"{rank} {kind}")))
            if kind in ALONE and rank == draw.world_size - 1:
                grads = [np.full_like(grad, ALONE[kind]) for grad in grads if grad is not None]
            for i, grad in enumerate(_spoil(kind, grads)):
                if grad is not None:
                    values[f"{kind}/{i}"] = grad
        inputs.append(values)
    return inputs


def _spoil(kind: str, grads: list[Any]) -> list[Any]:
    if kind == "inf first":
        grads[0][1, 2] = np.inf
    if kind == "minus inf":
        grads[1][3] = -np.inf
    if kind == "nan last":
        grads[2][1, 1] = np.nan
    if kind == "nan among many":
        grads[1][0], grads[1][4] = np.nan, np.inf
    if kind == "huge":
        # 12 numbers, whose sum overflows in float32; so does that of the two largest.
        grads[0][:] = grads[2][1, 0] = np.float32(2e38)
    if kind.startswith("none"):
        grads[1] = None  # another gradient of its group comes after it
    if kind == "none and nan":
        grads[2][0, 1] = np.nan
    return grads


def observe_finds(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """For each case, the parameters after one step of a new scaler, and what step() returned.

    The parameters are in two groups. A scaler that overlooks one group loses `amp_scaler_unscale`,
    and is judged here by what it finds in a single group.
    """
    two_groups = not _overlooks(scaler_class, inputs, context)
    answer: Values = {"taken": []}
    for number, kind in enumerate(inputs["order"]):
        scaler = scaler_class(init_scale=1.0, growth_interval=NEVER)
        parameters = make_parameters(inputs, context)
        optimizer = make_optimizer(parameters, two_groups)
        set_gradients(parameters, inputs, kind, scaler)
        if number % 2 and kind not in ALONE:  # `amp_scaler_agrees` judges that with unscale_
            scaler.unscale_(optimizer)
        taken = scaler.step(optimizer)
        scaler.update()
        known = isinstance(taken, bool | np.bool_) or (
            isinstance(taken, torch.Tensor) and taken.numel() == 1
        )
        answer["taken"].append(bool(taken) if known else described(taken))
        for i, value in enumerate(values_of(parameters)):
            answer[f"{kind}/{i}"] = value
    return answer


def _overlooks(scaler_class: Any, inputs: Values, context: Context) -> bool:
    """Whether unscale_ divides the gradients of one group of parameters, and not those of two."""
    halved = []
    for two in (False, True):
        parameters = make_parameters(inputs, context)
        for p in parameters:
            p.grad = torch.ones_like(p)
        scaler = scaler_class(init_scale=2.0, growth_interval=NEVER)
        begin(scaler, parameters)
        scaler.unscale_(make_optimizer(parameters, two))
        halved.append(all(bool((p.grad == 0.5).all()) for p in parameters if p.grad is not None))
    return halved == [True, False]


def judge_finds(case: Case) -> Iterator[Finding]:
    """step() acts, and returns True, if and only if every entry of every gradient is finite.

    It may look at the entries before or after it divides.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        start = oracle.parameters_of(inputs)
        taken = told(answer, "taken")
        for number, kind in enumerate(inputs["order"]):
            what, fine = FIND_CASES[kind]
            gradients = [inputs.get(f"{kind}/{i}") for i in range(len(SHAPES))]
            expected = stepped(start, gradients) if fine else start
            hint = (
                "The step has to be taken."
                if fine
                else (
                    "The step has to be left out: not one parameter may change, and no "
                    "optimizer.step() with different gradients either."
                )
            )
            for i, value in enumerate(expected):
                if wrong := oracle.differs(
                    rank,
                    f"{what}: parameter {i} after step",
                    answer.get(f"{kind}/{i}"),
                    value,
                    hint=hint,
                ):
                    yield wrong
                    break
            said = taken[number] if isinstance(taken, list) and number < len(taken) else None
            if said is not fine:
                yield Finding(f"{what}: step() has to return {fine}, it returned {said}.", rank)


# --- agrees --------------------------------------------------------------------------------------


def draw_agrees(draw: Draw) -> list[Values]:
    """Steps that overflow on the first, middle or last rank; on all but one of these; on all.

    Each kind comes twice: where step() unscales, and where unscale_ is called before. All gradients
    of a rank that overflows are inf, because what a scaler finds in them is not judged here.
    """
    rng, everybody = draw.shared("bad"), set(range(draw.world_size))
    some = {0, draw.world_size // 2, draw.world_size - 1}
    sets = [set(), everybody, *({r} for r in some), *(everybody - {r} for r in some)]
    kinds = sorted({(tuple(sorted(bad)), called) for bad in sets for called in (False, True)})
    steps = [kinds[i] for i in rng.permutation(len(kinds))]
    inputs = []
    for rank in range(draw.world_size):
        values = draw_start(draw.private(rank)) | {"unscale": [called for _, called in steps]}
        for step, (bad, _) in enumerate(steps):
            grads = draw_gradients(draw.shared(f"rank {rank} step {step}"))
            if rank in bad:
                grads = [np.full_like(grad, np.inf) for grad in grads]
            values |= {f"{step}/{i}": grad for i, grad in enumerate(grads)}
        inputs.append(values)
    return inputs


def observe_agrees(scaler_class: Any, inputs: Values, context: Context) -> Values:
    """Parameters and scale after every step."""
    scaler = scaler_class(init_scale=64.0, backoff_factor=0.75, growth_interval=NEVER)
    parameters = make_parameters(inputs, context)
    optimizer = make_optimizer(parameters)
    answer: Values = {"scales": []}
    for step, called in enumerate(inputs["unscale"]):
        set_gradients(parameters, inputs, str(step), scaler)
        if called:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        answer["scales"].append(read_number(scaler.get_scale(), "get_scale()"))
        for i, value in enumerate(values_of(parameters)):
            answer[f"{step}/{i}"] = value
    return answer


def _finite(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and bool(np.isfinite(array).all())


def _first_apart(got: Any, first: Any) -> str:
    """Where the scales of a rank leave those of rank 0."""
    if isinstance(got, list) and isinstance(first, list):
        for step, (one, other) in enumerate(zip(got, first, strict=False)):
            if one != other:
                return f"after step {step} the scale is {short(one)}, on rank 0 {short(other)}"
    return f"scales after each step: {got}, on rank 0 {first}"


def _who_stepped(case: Case, step: int) -> str:
    """Whether the ranks disagreed, or agreed on the wrong thing."""
    left = [answer.get(f"{step}/{i}") for answer in case.answers for i in range(len(SHAPES))]
    if any(isinstance(value, np.ndarray) and not _finite(value) for value in left):
        return (
            "A rank that overflowed stepped as well: one that overflows is enough for all to leave "
            "the step out, whichever it is, and however many there are."
        )
    return (
        "No rank may when one of them overflows: without an agreement the others step, and weights "
        "differ from rank to rank."
    )


def judge_agrees(case: Case) -> Iterator[Finding]:
    """If one rank overflows, no rank steps; the scale is the same on all ranks.

    Only whether a step was taken matters here; different criteria check the divisor, and that a
    step that is left out is not made with zeros instead. Ranks may agree in unscale_ or in step.
    """
    unscale = case.inputs[0]["unscale"]
    scales = [answer.get("scales") for answer in case.answers]
    overflowed = [
        [r for r, inputs in enumerate(case.inputs) if np.isinf(inputs[f"{step}/0"]).any()]
        for step in range(len(unscale))
    ]
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        before: list[Any] = oracle.parameters_of(inputs)
        for step, bad in enumerate(overflowed):
            after: list[Any] = [answer.get(f"{step}/{i}") for i in range(len(SHAPES))]
            who = named_ranks(bad) if bad else "no rank"
            called = "unscale_ and step" if unscale[step] else "step"
            what = f"step {step} ({called}), where {who} overflowed"
            if any(
                not isinstance(a, np.ndarray) or a.shape != shape or not _finite(a)
                for a, shape in zip(after, SHAPES, strict=True)
            ):
                yield Finding(
                    f"{what}: the parameters are not finite numbers. {_who_stepped(case, step)}",
                    rank,
                )
                break
            taken = not any(
                all(
                    np.allclose(a, b * kept, rtol=1e-6, atol=0.0)
                    for a, b in zip(after, before, strict=True)
                )
                for kept in (1.0, 1 - LR * WEIGHT_DECAY)
            )
            if taken == bool(bad):
                hint = "this rank did not step; every rank has to."
                if bad:
                    hint = f"this rank stepped. {_who_stepped(case, step)}"
                yield Finding(f"{what}: {hint}", rank)
                break
            before = after
        if not isinstance(scales[rank], list) or not same(scales[rank], scales[0]):
            yield Finding(
                f"{_first_apart(scales[rank], scales[0])}. Ranks with different scales add up "
                "gradients of different sizes.",
                rank,
            )
