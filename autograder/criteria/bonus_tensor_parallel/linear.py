"""Criteria for column-parallel and row-parallel linear layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.bonus_tensor_parallel.model import (
    fill_parts,
    gradients,
    linear,
    numbers,
    part_of,
    tensor,
    wrong_answer,
    wrong_part,
)
from autograder.criteria.common.answers import is_floats, read_tensor, same_array
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values


def draw(source: Draw) -> list[Values]:
    """A column and a row layer, each with input and output gradient; the same on all ranks."""
    rng, n = source.shared(), source.world_size
    out, fan_in, other = (n * int(k) for k in rng.integers(2, 6, 3))
    values: Values = {
        "column.w": rng.normal(size=(out, other + 1)),
        "column.b": rng.normal(size=out),
        "row.w": rng.normal(size=(out + 1, fan_in)),
        "row.b": rng.normal(size=out + 1),
        "column.x": rng.normal(size=(2, 3, other + 1)),
        "column.gy": rng.normal(size=(2, 3, out)),
        "row.x": rng.normal(size=(2, 3, fan_in)),
        "row.gy": rng.normal(size=(2, 3, out + 1)),
    }
    return [dict(values) for _ in range(n)]


def draw_scatter(source: Draw) -> list[Values]:
    """The inputs of `draw`, with a bias of zero in the row layer: `judge_row` checks the bias."""
    return [values | {"row.b": 0 * values["row.b"]} for values in draw(source)]


# --- which part is held --------------------------------------------------------------------------


def observe_slices(classes: Any, inputs: Values, context: Context) -> Values:
    """What the layers hold after construction, and which uneven splits they refuse."""
    answer: Values = {"refused": []}
    n = context.world_size
    for kind, build in zip(("column", "row"), classes, strict=True):
        weight, bias = inputs[f"{kind}.w"], inputs[f"{kind}.b"]
        full = linear(weight, bias, context)
        layer = build(full)
        with torch.no_grad():  # the part must be a copy that does not change with the whole layer
            full.weight.zero_()
            full.bias.zero_()
        whole = weakref.ref(full.weight)
        del full
        gc.collect()
        answer[f"{kind} keeps"] = whole() is not None
        answer[f"{kind}.w"], answer[f"{kind}.b"] = numbers(layer.weight), numbers(layer.bias)
        parameters = list(layer.parameters())
        answer[f"{kind} count"] = sum(parameter.numel() for parameter in parameters)
        answer[f"{kind} trains"] = all(
            any(p is q for q in parameters) and p.requires_grad for p in (layer.weight, layer.bias)
        )
        bare = build(linear(weight, None, context))
        answer[f"{kind} bare"] = bare.bias is None and len(list(bare.parameters())) == 1
        uneven = np.ones((n + 1, 2 * n) if kind == "column" else (2 * n, n + 1))
        try:
            build(linear(uneven, None, context))
        except ValueError:
            answer["refused"].append(kind)
    return answer


def list_of(value: Any) -> list[Any]:
    """The value if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def _explain_slice(case: Case, name: str, rank: int) -> str:
    got, n = case.answers[rank].get(name), case.world_size
    if isinstance(got, np.ndarray) and got.size and not got.any():
        return "The check set `full` to zero when the layer was built: the part has to be a copy."
    first = part_of(name, case.inputs[rank][name], 0, n)
    if rank == n - 1 > 0 and same_array(got, first):
        return (
            "That is rank 0's part. This rank is alone on a second node here: is LOCAL_RANK taken "
            "for RANK?"
        )
    return ""


def judge_slices(case: Case) -> Iterator[Finding]:
    """Requires the rank's slice of weight and bias only, and a ValueError for uneven splits."""
    n = case.world_size
    for rank, answer in enumerate(case.answers):
        for kind in ("column", "row"):
            names = [f"{kind}.w", f"{kind}.b"]
            parts = [part_of(name, case.inputs[rank][name], rank, n) for name in names]
            whats = [f"{kind.title()}ParallelLinear(full).{w}" for w in ("weight", "bias")]
            wrongs = (
                wrong_answer(case, name, rank, what, part, _explain_slice(case, name, rank))
                for name, what, part in zip(names, whats, parts, strict=True)
            )
            if wrong := next(filter(None, wrongs), None):
                yield wrong
                break
            held, wanted = answer.get(f"{kind} count"), sum(part.size for part in parts)
            if held != wanted or answer.get(f"{kind} trains") is not True:
                yield Finding(
                    f"{kind.title()}ParallelLinear has {str(held)[:20]} numbers in its parameters, "
                    f"expected {wanted}: weight and bias are its nn.Parameters, and nothing else.",
                    rank,
                )
            elif answer.get(f"{kind} keeps") is not False:
                yield Finding(
                    f"{kind.title()}ParallelLinear keeps the whole layer alive: its weight is "
                    "still there after the last other reference to it has gone.",
                    rank,
                )
            elif answer.get(f"{kind} bare") is not True:
                yield Finding(
                    f"{kind.title()}ParallelLinear of a layer without bias: expected bias None.",
                    rank,
                )
            elif n > 1 and kind not in list_of(answer.get("refused")):
                yield Finding(
                    f"{kind.title()}ParallelLinear of {n + 1} features on {n} ranks: expected "
                    "a ValueError.",
                    rank,
                )


# --- what they compute ---------------------------------------------------------------------------


def _cut(array: np.ndarray, rank: int, n: int) -> np.ndarray:
    return np.split(array, n, axis=-1)[rank]


def _observe(kind: str, build: Any, inputs: Values, context: Context, *, whole: bool) -> Values:
    """Output and gradients with this rank's correct weights.

    With `whole`, the layer gets and returns tensors that are not split.
    """
    rank, n = context.rank, context.world_size
    options = {"column": {"gather_output": True}, "row": {"input_is_parallel": False}}[kind]
    other = linear(np.roll(inputs[f"{kind}.w"], 1), np.roll(inputs[f"{kind}.b"], 1), context)
    layer = build(other, **options) if whole else build(other)
    fill_parts({kind: layer}, inputs, context)
    x, gy = inputs[f"{kind}.x"], inputs[f"{kind}.gy"]
    if not whole and kind == "row":
        x = _cut(x, rank, n)
    if not whole and kind == "column":
        gy = _cut(gy, rank, n)
    x = tensor(x, context, grad=True)
    # The layer's input is no leaf here: a leaf's gradient could be a tensor that the layer's own
    # backward still changes.
    y = read_tensor(layer(x * 1.0), "forward()")
    if not y.requires_grad:
        raise RuntimeError(
            "no backward pass is possible: the graph of what the layer returns was cut. Is a "
            "collective called that autograd does not see?"
        )
    answer: Values = {"y": numbers(y)}
    y.backward(tensor(gy, context))
    return answer | {"x": numbers(x.grad)} | gradients({kind: layer})


def observe_column(build: Any, inputs: Values, context: Context) -> Values:
    """A column-parallel layer whose output stays split."""
    return _observe("column", build, inputs, context, whole=False)


def observe_row(build: Any, inputs: Values, context: Context) -> Values:
    """A row-parallel layer whose input is split."""
    return _observe("row", build, inputs, context, whole=False)


def observe_gather(build: Any, inputs: Values, context: Context) -> Values:
    """A column-parallel layer with gather_output=True."""
    return _observe("column", build, inputs, context, whole=True)


def observe_scatter(build: Any, inputs: Values, context: Context) -> Values:
    """A row-parallel layer with input_is_parallel=False."""
    return _observe("row", build, inputs, context, whole=True)


def _solve(values: Values, kind: str) -> Values:
    x, weight, gy = (values[f"{kind}.{name}"] for name in ("x", "w", "gy"))
    rows, grads = x.reshape(-1, x.shape[-1]), gy.reshape(-1, gy.shape[-1])
    return {
        "y": x @ weight.T + values[f"{kind}.b"],
        "x": gy @ weight,
        f"{kind}.w": grads.T @ rows,
        f"{kind}.b": grads.sum(0),
    }


def _judge(case: Case, kind: str, *, whole: bool) -> Iterator[Finding]:
    n, right = case.world_size, _solve(case.inputs[0], kind)
    bias = case.inputs[0][f"{kind}.b"]
    for rank in range(n):
        y, x = right["y"], right["x"]
        if not whole and kind == "column":
            y = _cut(y, rank, n)
        if not whole and kind == "row":
            x = _cut(x, rank, n)
        added = bias if whole or kind == "row" else _cut(bias, rank, n)
        hint = _explain_bias(case.answers[rank].get("y"), y, added, n)
        names = [f"{kind}.w", f"{kind}.b"]
        if whole and kind == "row":
            names.pop()  # judge_row checks the bias
        wrong = wrong_answer(case, "y", rank, "output", y, hint) or wrong_part(
            case, rank, right, names
        )
        # With or without a gather, f makes the input's gradient, which judge_column checks.
        if not wrong and not (whole and kind == "column"):
            wrong = wrong_answer(case, "x", rank, "gradient of the input", x)
        if wrong:
            yield wrong


def _explain_bias(got: Any, y: np.ndarray, bias: np.ndarray, n: int) -> str:
    if not is_floats(got, y.shape) or n == 1:
        return ""
    if np.allclose(got, y + (n - 1) * bias):
        return f"The bias was added {n} times: each rank added it before the sum."
    if np.allclose(got, y - bias):
        return "The bias is missing here."
    return ""


def judge_column(case: Case) -> Iterator[Finding]:
    """Requires this rank's output features, and the whole gradient of the input."""
    return _judge(case, "column", whole=False)


def judge_row(case: Case) -> Iterator[Finding]:
    """Requires all output features, the bias once, and this rank's part of the input's gradient."""
    return _judge(case, "row", whole=False)


def judge_gather(case: Case) -> Iterator[Finding]:
    """Requires all output features, and the gradients of this rank's weight and bias.

    Features may be gathered or summed up with zeros.
    """
    return _judge(case, "column", whole=True)


def judge_scatter(case: Case) -> Iterator[Finding]:
    """Requires all output features, and the whole gradient of the whole input.

    The gradient may be gathered or summed up with zeros.
    """
    return _judge(case, "row", whole=True)
