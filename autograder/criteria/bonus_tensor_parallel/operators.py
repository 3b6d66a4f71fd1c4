"""Criteria for the conjugate operators: f and g, and the pair along the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.bonus_tensor_parallel.model import numbers, tensor, wrong_answer
from autograder.criteria.common.answers import read_tensor
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, named_ranks

OTHER_DTYPES = ("float32", "float16", "bfloat16")


def draw(source: Draw) -> list[Values]:
    """Private tensors and gradients: of three shapes, one for each rank, one for each other dtype.

    The tensors for the ranks have one shape, and in its own tensor a rank's gradient is zero. So
    code that sends no zeros skips one sum on each rank: it gets wrong sums, but does not hang.
    Tensors of other dtypes hold small whole numbers, whose sums are exact in all of them.
    """
    shared, n = source.shared(), source.world_size
    shapes = [shared.integers(2, 6, size).tolist() for size in (1, 3, 4)]
    shapes += [shapes[1]] * (n + len(OTHER_DTYPES))
    dtypes = ["float64"] * (3 + n) + list(OTHER_DTYPES)
    inputs = []
    for rank in range(n):
        rng = source.private(rank)
        values: Values = {"dtypes": dtypes}
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            x, g = rng.normal(0, 2, (2, *shape))
            is_own = i == 3 + rank
            values |= {f"x{i}": x, f"g{i}": 0 * g if is_own else g}
            if dtype != "float64":
                values |= {f"x{i}": np.round(x), f"g{i}": np.round(g)}
        inputs.append(values)
    return inputs


def _wide(value: Any) -> np.ndarray:
    """A tensor of any dtype as an array of float64."""
    return numbers(value.double() if isinstance(value, torch.Tensor) else value)


def observe(operator: Any, inputs: Values, context: Context) -> Values:
    """Outputs and input gradients, and the arguments and outputs after all passes."""
    answer: Values = {}
    kept = []
    for i, name in enumerate(inputs["dtypes"]):
        dtype = getattr(torch, name)
        x = tensor(inputs[f"x{i}"], context).to(dtype).requires_grad_()
        gradient = tensor(inputs[f"g{i}"], context).to(dtype)
        y = read_tensor(operator(x), "the operator")
        answer |= {f"y{i}": _wide(y), f"dtype{i}": str(y.dtype)}
        y.backward(gradient)
        answer[f"d{i}"] = _wide(x.grad)
        kept.append((x, gradient, y))
    for i, (x, gradient, y) in enumerate(kept):
        answer |= {
            f"after x{i}": _wide(x),
            f"after g{i}": _wide(gradient),
            f"after y{i}": _wide(y),
            f"after d{i}": _wide(x.grad),
        }
    return answer


def _judge(case: Case, *, sum_forward: bool) -> Iterator[Finding]:
    kinds = ["all-reduce" if summed else "identity" for summed in (sum_forward, not sum_forward)]
    for rank, answer in enumerate(case.answers):
        for i, dtype in enumerate(case.inputs[0]["dtypes"]):
            own = {k: case.inputs[rank][f"{k}{i}"] for k in "xg"}
            total = {k: np.sum([v[f"{k}{i}"] for v in case.inputs], axis=0) for k in "xg"}
            right = (
                {"x": total["x"], "g": own["g"]}
                if sum_forward
                else {"x": own["x"], "g": total["g"]}
            )
            if wrong := wrong_answer(case, f"y{i}", rank, f"forward ({kinds[0]})", right["x"]):
                yield wrong
                break
            none = [r for r, v in enumerate(case.inputs) if not v[f"g{i}"].any()]
            hint = ""
            if none and not sum_forward:
                hint = f"The gradient of {named_ranks(none)} is zero here, and takes part as well."
            if wrong := wrong_answer(
                case, f"d{i}", rank, f"backward ({kinds[1]})", right["g"], hint
            ):
                yield wrong
                break
            if answer.get(f"dtype{i}") != f"torch.{dtype}":
                got = str(answer.get(f"dtype{i}"))[:20]
                yield Finding(f"a tensor of {dtype} came out as {got}.", rank)
                break
            if changed := _find_changed(answer, i, own, rank):
                yield changed
                break


def _find_changed(answer: Values, i: int, before: Values, rank: int) -> Finding | None:
    for k, what in (("x", "argument"), ("g", "gradient that came in")):
        if not np.array_equal(answer.get(f"after {k}{i}", ()), before[k]):
            return Finding(
                f"the {what} was changed; dist.all_reduce works in place, so give it a copy.", rank
            )
    for k, what in (("y", "tensor that was returned"), ("d", "gradient of the argument")):
        if not np.array_equal(answer.get(f"after {k}{i}", ()), answer.get(f"{k}{i}", ())):
            return Finding(
                f"the {what} has changed after later calls: somebody may still be using it, so "
                "each call needs memory of its own.",
                rank,
            )
    return None


def judge_f(case: Case) -> Iterator[Finding]:
    """Identity forward, all-reduce backward. It may be an autograd function or a hook."""
    return _judge(case, sum_forward=False)


def judge_g(case: Case) -> Iterator[Finding]:
    """All-reduce forward, identity backward. A sum may be taken in a wider dtype."""
    return _judge(case, sum_forward=True)


# --- along the sequence --------------------------------------------------------------------------


def draw_sequence(source: Draw) -> list[Values]:
    """Parts [B, T / N, D] with gradients [B, T, D], and the reverse; private to each rank."""
    shared, n = source.shared(), source.world_size
    b, t, d = (int(k) for k in shared.integers(2, 5, 3))
    inputs = []
    for rank in range(n):
        rng = source.private(rank)
        inputs.append(
            {
                "part": rng.normal(size=(b, t, d)),
                "g whole": rng.normal(size=(b, t * n, d)),
                "whole": rng.normal(size=(b, t * n, d)),
                "g part": rng.normal(size=(b, t, d)),
            }
        )
    return inputs


def observe_sequence(operators: Any, inputs: Values, context: Context) -> Values:
    """Outputs and input gradients of both operators."""
    gather_in, scatter_out = operators
    part, whole = (tensor(inputs[name], context, grad=True) for name in ("part", "whole"))
    gathered = read_tensor(gather_in(part), "gather_in")
    _expect_shape("gather_in", part, gathered, inputs["whole"].shape)
    gathered.backward(tensor(inputs["g whole"], context))
    scattered = read_tensor(scatter_out(whole), "scatter_out")
    _expect_shape("scatter_out", whole, scattered, inputs["part"].shape)
    scattered.backward(tensor(inputs["g part"], context))
    return {
        "gathered": numbers(gathered),
        "d part": numbers(part.grad),
        "scattered": numbers(scattered),
        "d whole": numbers(whole.grad),
    }


def _expect_shape(name: str, given: torch.Tensor, got: Any, shape: tuple[int, ...]) -> None:
    if isinstance(got, torch.Tensor) and got.shape != shape:
        raise ValueError(
            f"{name} made {list(got.shape)} of {list(given.shape)}, expected {list(shape)}: tokens "
            "are dimension 1."
        )


def judge_sequence(case: Case) -> Iterator[Finding]:
    """All-gather and reduce-scatter along dimension 1, each the other's backward.

    Any collectives will do.
    """
    n = case.world_size
    joined = {k: np.concatenate([v[k] for v in case.inputs], axis=1) for k in ("part", "g part")}
    summed = {k: np.sum([v[k] for v in case.inputs], axis=0) for k in ("whole", "g whole")}
    for rank in range(n):
        cut = {k: np.split(v, n, axis=1)[rank] for k, v in summed.items()}
        for key, what, right in (
            ("gathered", "gather_in, forward (all-gather along dimension 1)", joined["part"]),
            ("d part", "gather_in, backward (reduce-scatter)", cut["g whole"]),
            ("scattered", "scatter_out, forward (reduce-scatter along dimension 1)", cut["whole"]),
            ("d whole", "scatter_out, backward (all-gather)", joined["g part"]),
        ):
            if wrong := wrong_answer(case, key, rank, what, right):
                yield wrong
                break
