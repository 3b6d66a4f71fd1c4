"""Criteria for PowerSGD over a whole model: what comes out of `reduce_gradients`.

The oracle starts from the student's own Q before the first step, so any random numbers are right.
P Q^T depends only on the span of Q, so signs and the method of orthonormalising do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.bonus_powersgd.columns import expected_shape
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, read_array
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

# Two layers have the same shape, as in most models.
SHAPES = ((14, 11), (14,), (9, 4, 3, 2), (), (2, 3), (12, 30), (1,), (14,), (12, 30))
MATRICES = ((13, 10), (6, 5, 4), (9, 16))  # for the first step: one of them a convolution
PLAIN = ((13, 10), (9, 16))


def parameters_for(shapes: Any, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Parameters of these shapes, all zero."""
    return [nn.Parameter(torch.zeros(tuple(s), dtype=dtype, device=device)) for s in shapes]


def draw_gradients(
    draw: Draw, shapes: Any, steps: int, dtype: str, rank: int | None = None
) -> list[Values]:
    """Private gradients g{step}/{parameter}; all ranks share the compression rank and a seed."""
    shared = draw.shared()
    common: Values = {
        "rank": int(shared.integers(2, 4)) if rank is None else rank,
        "seed": int(shared.integers(1, 10_000)),
        "steps": steps,
        "shapes": [list(shape) for shape in shapes],
        "dtype": dtype,
    }
    inputs = []
    for each in range(draw.world_size):
        rng, values = draw.private(each), dict(common)
        for step in range(steps):
            for i, shape in enumerate(shapes):
                # All ranks share the 0.5, so that the means are not only noise.
                values[f"g{step}/{i}"] = np.asarray(rng.normal(size=shape) + 0.5, dtype=dtype)
        inputs.append(values)
    return inputs


def as_array(tensor: Any) -> np.ndarray:
    """A student's tensor as a NumPy array; an empty array for None."""
    return np.zeros(0) if tensor is None else read_array(tensor, "q_of() or error_of()")


def observe_steps(powersgd: Any, inputs: Values, context: Context) -> Values:
    """Q before the first step, gradients after every step, and errors where there are any."""
    dtype = getattr(torch, inputs["dtype"])
    parameters = parameters_for(inputs["shapes"], dtype, context.device)
    reducer = powersgd(iter(parameters), inputs["rank"], seed=inputs["seed"])
    answer: Values = {}
    for i in range(len(parameters)):
        answer[f"q/{i}"] = as_array(reducer.q_of(i)).copy()
        if inputs.get("at start"):
            answer[f"e/{i}"] = as_array(reducer.error_of(i)).copy()
    for step in range(inputs["steps"]):
        run_step(reducer, parameters, inputs, step)
        for i, parameter in enumerate(parameters):
            answer[f"a{step}/{i}"] = oracle.grad_of(parameter).copy()
            if hasattr(reducer, "error_of"):
                answer[f"e{step}/{i}"] = as_array(reducer.error_of(i)).copy()
    return answer


def run_step(reducer: Any, parameters: list[nn.Parameter], inputs: Values, step: int) -> None:
    """Puts this step's gradients into the parameters and calls `reduce_gradients`."""
    for i, parameter in enumerate(parameters):
        gradient = torch.from_numpy(np.array(inputs[f"g{step}/{i}"]))
        parameter.grad = gradient.to(parameter.device)
    reducer.reduce_gradients()


def start_of(case: Case, i: int, columns: int) -> list[np.ndarray] | Finding:
    """The Q of parameter i on every rank, or what is wrong with it."""
    starts = []
    wanted = (columns, case.inputs[0]["rank"])
    for rank, answer in enumerate(case.answers):
        q = answer.get(f"q/{i}")
        if not is_floats(q, wanted):
            got = list(q.shape) if isinstance(q, np.ndarray) else "nothing"
            return Finding(
                f"q_of({i}) before the first step: expected shape {list(wanted)}, got "
                f"{got if got != [0] else None}.",
                rank,
            )
        if not np.isfinite(q).all() or np.abs(q).max(initial=0.0) > 1e6:
            return Finding(f"q_of({i}) before the first step is not finite, or huge.", rank)
        starts.append(q.astype(np.float64))
    return starts


def power_step(matrices: list[np.ndarray], qs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """P and the new Q, in float64 and one process."""
    p, _ = np.linalg.qr(oracle.mean([m @ q for m, q in zip(matrices, qs, strict=True)]))
    return p, oracle.mean(matrices).T @ p


def matrices_of(case: Case, step: int, i: int) -> list[np.ndarray]:
    """Every rank's gradient of a step, as a matrix."""
    gradients = [values[f"g{step}/{i}"].astype(np.float64) for values in case.inputs]
    return [gradient.reshape(gradient.shape[0], -1) for gradient in gradients]


def explain(got: Any, expected: np.ndarray, mean: np.ndarray, own: np.ndarray, n: int) -> str:
    """The likely reason why a compressed gradient is not the expected one."""
    if not isinstance(got, np.ndarray) or got.shape != expected.shape:
        return ""
    if oracle.agrees(got, mean):
        return "That is the exact mean: it was not compressed."
    told = oracle.explain_gradient(got, expected, own, n)
    return told or oracle.explain_gradient(got, mean, own, n)


# --- the first step ------------------------------------------------------------------------------


def draw_first(draw: Draw) -> list[Values]:
    """One step, matrices of two and more dimensions."""
    return draw_gradients(draw, MATRICES, 1, "float32", rank=2)


def judge_first(case: Case) -> Iterator[Finding]:
    """The gradient of every matrix is P Q^T, computed from the student's own Q.

    It may be a new tensor or the old one, changed in place.
    """
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        matrices = matrices_of(case, 0, i)
        starts = start_of(case, i, matrices[0].shape[1])
        if isinstance(starts, Finding):
            yield starts
            return
        p, q = power_step(matrices, starts)
        expected, mean = (p @ q.T).reshape(shape), oracle.mean(matrices).reshape(shape)
        for rank, answer in enumerate(case.answers):
            got = answer.get(f"a0/{i}")
            own = case.inputs[rank][f"g0/{i}"]
            hint = explain(got, expected, mean, own, case.world_size)
            what = f"gradient of parameter {i}, shape {shape}, after one step of rank 2"
            if wrong := oracle.differs(rank, what, got, expected, hint=hint):
                yield wrong


# --- what is not compressed ----------------------------------------------------------------------


def draw_vectors(draw: Draw) -> list[Values]:
    """Parameters of many shapes; the two steps have different gradients."""
    inputs = draw_gradients(draw, SHAPES, 2, "float32", rank=2)
    small = [i for i, shape in enumerate(SHAPES) if not expected_shape(list(shape), 2)]
    return [values | {"small": small} for values in inputs]


def observe_vectors(powersgd: Any, inputs: Values, context: Context) -> Values:
    """As `observe_steps`, and the gradients of a model that has the small parameters alone."""
    answer, small = observe_steps(powersgd, inputs, context), inputs["small"]
    alone = inputs | {"shapes": [inputs["shapes"][i] for i in small]}
    pairs = [(f"{step}/{k}", f"{step}/{i}") for step in range(2) for k, i in enumerate(small)]
    found = observe_steps(powersgd, alone | {f"g{k}": inputs[f"g{i}"] for k, i in pairs}, context)
    return answer | {f"alone{i}": found[f"a{k}"] for k, i in pairs}


def judge_vectors(case: Case) -> Iterator[Finding]:
    """Vectors, scalars and small matrices are averaged exactly; and they have no Q."""
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        if expected_shape(shape, case.inputs[0]["rank"]):
            continue
        for rank, answer in enumerate(case.answers):
            q = answer.get(f"q/{i}")
            if not isinstance(q, np.ndarray) or q.size:
                yield Finding(
                    f"q_of({i}): a parameter of shape {shape} is not compressed, expected None.",
                    rank,
                )
                continue
            for step in range(case.inputs[0]["steps"]):
                name = f"g{step}/{i}"
                mean = oracle.mean([values[name] for values in case.inputs])
                own = case.inputs[rank][name]
                what = f"gradient of parameter {i}, shape {shape}, which is not compressed"
                got, alone = answer.get(f"a{step}/{i}"), answer.get(f"alone{step}/{i}")
                hint = oracle.explain_gradient(got, mean, own, case.world_size)
                wrong = oracle.differs(rank, what, got, mean, hint=hint)
                if wrong is None:
                    what = f"gradient of shape {shape} in a model of which nothing is compressed"
                    hint = oracle.explain_gradient(alone, mean, own, case.world_size)
                    wrong = oracle.differs(rank, what, alone, mean, hint=hint)
                if wrong:
                    yield wrong
                    break
