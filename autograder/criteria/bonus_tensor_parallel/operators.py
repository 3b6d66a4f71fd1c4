"""Criteria for the conjugate operators: f and g, and the pair along the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.bonus_tensor_parallel.model import numbers, tensor, wrong_answer
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values


def draw(source: Draw) -> list[Values]:
    """Private tensors of three shapes, private gradients."""
    shared = source.shared()
    shapes = [shared.integers(2, 6, size).tolist() for size in (1, 3, 4)]
    inputs = []
    for rank in range(source.world_size):
        rng = source.private(rank)
        values: Values = {}
        for i, shape in enumerate(shapes):
            values |= {f"x{i}": rng.normal(size=shape), f"g{i}": rng.normal(size=shape)}
        inputs.append(values)
    return inputs


def observe(operator: Any, inputs: Values, context: Context) -> Values:
    """Output and input gradient, and the arguments after both passes."""
    answer: Values = {}
    for i in range(sum(name[0] == "x" for name in inputs)):
        x = tensor(inputs[f"x{i}"], context, grad=True)
        gradient = tensor(inputs[f"g{i}"], context)
        y = operator(x)
        answer[f"y{i}"] = numbers(y)
        y.backward(gradient)
        answer |= {
            f"d{i}": numbers(x.grad),
            f"after x{i}": numbers(x),
            f"after g{i}": numbers(gradient),
        }
    return answer


def _judge(case: Case, *, sum_forward: bool) -> Iterator[Finding]:
    kinds = ["all-reduce" if summed else "identity" for summed in (sum_forward, not sum_forward)]
    for rank in range(case.world_size):
        for i in range(sum(name[0] == "x" for name in case.inputs[0])):
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
            if wrong := wrong_answer(case, f"d{i}", rank, f"backward ({kinds[1]})", right["g"]):
                yield wrong
                break
            for k, what in (("x", "argument"), ("g", "gradient that came in")):
                if not np.array_equal(case.answers[rank].get(f"after {k}{i}", ()), own[k]):
                    yield Finding(
                        f"the {what} was changed; dist.all_reduce works in place, so give it a "
                        "copy.",
                        rank,
                    )
                    break


def judge_f(case: Case) -> Iterator[Finding]:
    """Identity forward, all-reduce backward."""
    return _judge(case, sum_forward=False)


def judge_g(case: Case) -> Iterator[Finding]:
    """All-reduce forward, identity backward."""
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
    gathered = gather_in(part)
    gathered.backward(tensor(inputs["g whole"], context))
    scattered = scatter_out(whole)
    scattered.backward(tensor(inputs["g part"], context))
    return {
        "gathered": numbers(gathered),
        "d part": numbers(part.grad),
        "scattered": numbers(scattered),
        "d whole": numbers(whole.grad),
    }


def judge_sequence(case: Case) -> Iterator[Finding]:
    """All-gather and reduce-scatter along dimension 1, each the other's backward."""
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
