"""Criteria for the parts of PowerSGD: orthonormal columns, packed means, shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, read, read_array
from autograder.criteria.common.pretending import pretending
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer, per_rank

TOLERANCE = {"float32": 2e-4, "float64": 1e-8}


# --- orthonormal columns -------------------------------------------------------------------------


# At the larger angle, modified Gram-Schmidt (one projection after the other) works in float32. At
# the smaller one, a threshold of 1e-3 would take the rest of a column for zero.
SMALL_ANGLES = {"nearly parallel columns": 1e-3, "almost parallel columns": 2e-4}


def _matrices(draw: Draw, kinds: list[tuple[str, str]]) -> list[Values]:
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        values: Values = {"kinds": [[kind, dtype] for kind, dtype in kinds]}
        for number, (kind, dtype) in enumerate(kinds):
            values[str(number)] = _matrix(rng, kind).astype(dtype)
        inputs.append(values)
    return inputs


def _matrix(rng: np.random.Generator, kind: str) -> np.ndarray:
    n, r = int(rng.integers(9, 20)), int(rng.integers(3, 6))
    full = rng.normal(size=(n, r))
    if kind == "one column":
        return full[:, :1] * 7
    if kind == "square":
        u, _ = np.linalg.qr(rng.normal(size=(r, r)))
        return u @ (np.diag(rng.uniform(0.5, 2, r)) + 0.3 * np.triu(rng.normal(size=(r, r)), 1))
    if kind == "tiny numbers":
        return full * 1e-6
    if kind == "columns of different length":
        return full * 10.0 ** np.linspace(-3, 3, r)
    if kind == "zeros":
        return full * 0
    if kind == "one column of zeros":
        full[:, int(rng.integers(r))] = 0
    if kind in SMALL_ANGLES:
        return full[:, :1] + SMALL_ANGLES[kind] * full[:, :3]
    if kind == "two equal columns":
        full[:, -1] = full[:, 0]
    if kind == "a matrix of rank 1":
        return np.outer(rng.normal(size=n), rng.normal(size=r))
    return full


def draw_columns(draw: Draw) -> list[Values]:
    """Matrices whose columns are independent."""
    return _matrices(
        draw,
        [
            ("random numbers", "float32"),
            ("random numbers", "float64"),
            ("one column", "float32"),
            ("square", "float32"),
            ("tiny numbers", "float32"),
            ("almost parallel columns", "float64"),
            ("columns of different length", "float64"),
        ],
    )


def draw_dependent(draw: Draw) -> list[Values]:
    """Matrices whose columns are not independent."""
    return _matrices(
        draw,
        [
            ("zeros", "float32"),
            ("one column of zeros", "float32"),
            ("two equal columns", "float32"),
            ("nearly parallel columns", "float32"),
            ("a matrix of rank 1", "float32"),
            ("a matrix of rank 1", "float64"),
        ],
    )


def observe_columns(orthonormalise: Any, inputs: Values, context: Context) -> Values:
    """The results, and the arguments afterwards."""
    answer: Values = {}
    for number in range(len(inputs["kinds"])):
        matrix = torch.from_numpy(inputs[str(number)].copy()).to(context.device)
        result = orthonormalise(matrix)
        answer[str(number)] = read_array(result, "orthonormalise")
        answer[f"before/{number}"] = matrix.cpu().numpy()
    return answer


def judge_columns(case: Case) -> Iterator[Finding]:
    """As `judge_dependent`, in the argument's precision and dtype; the argument is unchanged."""
    return _judge(case, TOLERANCE, strict=True)


def judge_dependent(case: Case) -> Iterator[Finding]:
    """The columns are orthogonal, have length 1 or 0, and span those of the argument.

    Any such columns are right. A dependent column may become zero or any other direction.
    """
    # Only `judge_columns` asks for float64's precision, so losing it costs only one criterion.
    return _judge(case, dict.fromkeys(TOLERANCE, TOLERANCE["float32"]), strict=False)


def _judge(case: Case, tolerance: dict[str, float], *, strict: bool) -> Iterator[Finding]:
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, (kind, dtype) in enumerate(inputs["kinds"]):
            matrix = inputs[str(number)]
            got = answer.get(str(number))
            problem = columns_problem(got, matrix, tolerance[dtype])
            if strict and problem is None:
                if got.dtype != matrix.dtype:  # pyright: ignore
                    problem = f"the result is {got.dtype}."  # pyright: ignore
                elif not np.array_equal(answer.get(f"before/{number}", ()), matrix):
                    problem = "the argument was changed; work on a copy."
            if problem:
                yield Finding(
                    f"orthonormalise of {kind}, {dtype} {list(matrix.shape)}: {problem}", rank
                )
                break


def columns_problem(got: Any, matrix: np.ndarray, tolerance: float) -> str | None:
    """Why `got` is not an orthonormal basis of the columns of `matrix`, or None."""
    if not is_floats(got):
        return "expected a tensor of floating-point numbers."
    if got.shape != matrix.shape:
        return f"expected shape {list(matrix.shape)}, got {list(got.shape)}."
    columns, wanted = got.astype(np.float64), matrix.astype(np.float64)
    if not np.isfinite(columns).all():
        return "has values that are not finite. Was a column divided by a length of zero?"
    if np.abs(columns).max(initial=0.0) > 1e6:
        return "has values above a million; columns have length 1 or 0."
    gram = columns.T @ columns
    lengths = np.diag(gram)
    bad = np.minimum(np.abs(lengths - 1), np.abs(lengths)) > 10 * tolerance
    if bad.any():
        column = int(np.argmax(bad))
        length = math.sqrt(lengths[column])
        if abs(length - 1) < 1e-4:
            return (
                f"column {column} has length 1 to {abs(length - 1):.0e} only, and float64 has 16 "
                "digits: was something computed in float32?"
            )
        return f"column {column} has length {length:.4g}, expected 1 or 0."
    product = np.abs(gram - np.diag(lengths))
    if product.max(initial=0.0) > 10 * tolerance:
        i, j = (int(k) for k in np.unravel_index(int(product.argmax()), product.shape))
        return (
            f"columns {min(i, j)} and {max(i, j)} are not orthogonal: their product is "
            f"{product.max():.3g}. {_why_not_orthogonal(wanted, max(i, j))}"
        )
    norms = np.linalg.norm(wanted, axis=0)
    lost = np.linalg.norm(wanted - columns @ (columns.T @ wanted), axis=0)
    if (lost > 10 * tolerance * norms).any():
        column = int(np.argmax(lost > 10 * tolerance * norms))
        if not columns.any():
            return "all of it is zero."
        return (
            f"column {column} of the argument is not in the span of the result: "
            f"{lost[column] / norms[column]:.3g} of its length is missing."
        )
    return None


# --- packed means --------------------------------------------------------------------------------

MEAN_SHAPES = ((3, 4), (), (7,), (2, 3, 5), (1,), (0,), (6, 2))


# Name of a call -> shapes and dtype. A result must not share memory with an argument (shows with
# one tensor, "d"), nor with an earlier result (shows with the same sizes again, "a" and "c").
MEANS = {
    "a": (MEAN_SHAPES, "float32"),
    "b": (MEAN_SHAPES[:3], "float64"),
    "c": (MEAN_SHAPES, "float32"),
    "d": (MEAN_SHAPES[:1], "float32"),
}
# Two float32 tensors of so many numbers exceed a bucket of DDP (25 MB).
LARGE = 2**22


@per_rank
def draw_mean(rng: np.random.Generator) -> Values:
    """Private tensors of several shapes for every call."""
    values: Values = {}
    for letter, (shapes, dtype) in MEANS.items():
        for number, shape in enumerate(shapes):
            values[f"{letter}{number}"] = np.asarray(rng.normal(size=shape), dtype=dtype)
    return values


def observe_mean(packed_mean: Any, inputs: Values, context: Context) -> Values:
    """All means, and the arguments afterwards; the all-reduces for two large tensors and none."""

    def means_of(tensors: list[torch.Tensor]) -> list[Any]:
        return read(packed_mean(tensors), list, "packed_mean", "a list of tensors")

    answer: Values = {"none": len(means_of([]))}
    calls = {}
    for letter, (shapes, _) in MEANS.items():
        arrays = [np.array(inputs[f"{letter}{i}"]) for i in range(len(shapes))]
        tensors = [torch.from_numpy(array).to(context.device) for array in arrays]
        calls[letter] = tensors, means_of(tensors)
    for letter, (tensors, means) in calls.items():
        answer[f"{letter} count"] = len(means)
        for i, (mean, tensor) in enumerate(zip(means, tensors, strict=False)):
            answer[f"{letter}{i}"] = read_array(mean, f"packed_mean, tensor {i}")
            answer[f"before/{letter}{i}"] = tensor.cpu().numpy()
    answer["calls"] = _count_calls(packed_mean, [torch.ones(LARGE, device=context.device)] * 2)
    answer["calls for none"] = _count_calls(packed_mean, [])
    return answer


def _count_calls(packed_mean: Any, tensors: list[torch.Tensor]) -> int:
    all_reduce, calls = dist.all_reduce, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **options)

    with pretending(packed_mean, {(dist, "all_reduce"): counted}):
        packed_mean(tensors)
    return calls


def _why_not_orthogonal(wanted: np.ndarray, column: int) -> str:
    """A hint from the rest of the column after the projections on earlier ones are subtracted."""
    left = abs(np.linalg.qr(wanted)[1][:, column][column]) if column < wanted.shape[0] else 0.0
    length = float(np.linalg.norm(wanted[:, column]))
    if left <= 1e-5 * length:
        return "Where nothing but rounding is left of a column, its direction means nothing."
    if left <= 1e-2 * length:
        return (
            "Little is left of this column, so rounding counts: subtract one projection after the "
            "other, or all of them twice."
        )
    return "Subtract from each column its projection on every finished one."


def judge_mean(case: Case) -> Iterator[Finding]:
    """As many tensors as were passed, each the mean over ranks, in its shape; one all-reduce.

    A rank may divide before or after the all-reduce.
    """
    for rank, answer in enumerate(case.answers):
        calls = answer.get("calls")
        if not isinstance(calls, int) or calls > 1:
            yield Finding(
                f"dist.all_reduce was called {str(calls)[:40]} times for two tensors of {LARGE} "
                "numbers, expected once, however many and however large they are.",
                rank,
            )
        if not _is_count(answer.get("none"), 0):
            yield Finding("packed_mean([]): expected an empty list.", rank)
        if not _is_count(answer.get("calls for none"), 0):
            yield Finding(
                "packed_mean([]): no dist.all_reduce is needed, as nothing is sent.", rank
            )
        for letter, (shapes, dtype) in MEANS.items():
            count = len(shapes)
            call = f"packed_mean of {count} tensor{'s' * (count > 1)} ({dtype})"
            if not _is_count(answer.get(f"{letter} count"), count):
                yield Finding(f"expected a list of {count} tensors.", rank)
                continue
            for i in range(count):
                name = f"{letter}{i}"
                everyone = [values[name] for values in case.inputs]
                own, mean = everyone[rank], oracle.mean(everyone)
                got = answer.get(name)
                hint = oracle.explain_gradient(got, mean, own, case.world_size)
                hint = hint.replace("gradients", "tensors").replace("gradient", "tensor")
                later = [
                    oracle.mean([values[f"{other}{i}"] for values in case.inputs])
                    for other in MEANS
                    if other > letter and f"{other}{i}" in case.inputs[rank]
                ]
                if any(value.shape == mean.shape and oracle.agrees(got, value) for value in later):
                    hint = (
                        "That is the mean of a later call: what was returned was overwritten. "
                        "Return memory of its own."
                    )
                if wrong := oracle.differs(
                    rank,
                    f"{call}: mean of tensor {i}, shape {list(own.shape)}",
                    got,
                    mean,
                    dtype=dtype,
                    hint=hint,
                    terms=everyone,
                ):
                    yield wrong
                    break
                if not np.array_equal(answer.get(f"before/{name}", ()), own):
                    yield Finding(f"{call}: tensor {i} of the arguments was changed.", rank)
                    break


def _is_count(value: Any, count: int) -> bool:
    return isinstance(value, int) and value == count


# --- shapes --------------------------------------------------------------------------------------


def draw_shapes(draw: Draw) -> list[Values]:
    """Shapes of zero to five dimensions; some exactly at break-even, some beside it."""
    rng = draw.shared()
    cases: list[list[Any]] = [[[], 1], [[1], 1], [[4, 4], 2], [[2, 2], 1], [[1, 9], 1], [[6, 3], 2]]
    for _ in range(3):
        n, m, r = int(rng.integers(40, 90)), int(rng.integers(30, 60)), int(rng.integers(1, 5))
        cases += [[[n, m], r], [[m, n], r], [[n], r], [[n, m], min(n, m)]]
        cases += [[[n, int(rng.integers(3, 20)), 3, 3], r], [[r + 1, r * (r + 1)], r]]
        cases += [[[n, m, 3], r], [[n, 3, 2, 3, 4], r], [[1, n, m], r], [[n, 1, m], r]]
        cases += [[[r + 1, r * (r + 1) + 1], r], [[r + 1, r * (r + 1) - 1], r]]
    return [{"cases": cases} for _ in range(draw.world_size)]


def expected_shape(shape: list[int], rank: int) -> list[int] | None:
    """[rows, columns], or None where compression saves nothing."""
    if len(shape) > 1:
        rows, columns = shape[0], math.prod(shape) // shape[0]
        if rows * columns > rank * (rows + columns):
            return [rows, columns]
    return None


def observe_shapes(matrix_shape: Any, inputs: Values, context: Context) -> Values:
    """The function's answer for every case."""
    said = []
    for shape, rank in inputs["cases"]:
        found = matrix_shape(tuple(shape), rank)
        if found is not None:
            found = read(found, list, "matrix_shape", "None or a pair of ints")
            found = [integer(k, "a number of rows") for k in found]
        said.append(found)
    return {"said": said}


def judge_shapes(case: Case) -> Iterator[Finding]:
    """Rows and columns where compression pays, None elsewhere."""
    for rank, answer in enumerate(case.answers):
        said = answer.get("said")
        for number, (shape, r) in enumerate(case.inputs[rank]["cases"]):
            expected = expected_shape(shape, r)
            got = said[number] if isinstance(said, list) and number < len(said) else "nothing"
            if got != expected:
                n, m = shape[0] if shape else 1, math.prod(shape[1:])
                yield Finding(
                    f"matrix_shape({tuple(shape)}, {r}): expected {_pair(expected)}, got "
                    f"{_pair(got)}. Compressed it has {r * (n + m)} numbers, as it is {n * m}.",
                    rank,
                )
                break


def _pair(shape: Any) -> str:
    return str(tuple(shape)) if isinstance(shape, list) else str(shape)[:40]
