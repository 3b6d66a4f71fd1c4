"""Criteria for one step of PowerSGD's power iteration; P and Q are judged separately."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.bonus_powersgd.columns import columns_problem
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats, read, read_array
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

TOLERANCE = 1e-3
# `judge_basis` checks whether columns are orthonormal. `judge_factor` only excludes a degenerate P:
# with P = 0 the product M^T P is 0 for every M.
LEAST_STRETCH, MOST_STRETCH = 1e-3, 1e6


def draw_steps(draw: Draw, *, also_none: bool = False) -> list[Values]:
    """Private matrices of full rank; the mean of the last matrix over all ranks has rank r.

    Args:
        also_none: also call it with no matrices at all.
    """
    rng, n = draw.shared(), draw.world_size
    r = int(rng.integers(2, 4))
    shapes = [(int(rng.integers(8, 15)), int(rng.integers(16, 24))) for _ in range(3)]
    shared: Values = {"count": len(shapes), "also_none": also_none}
    deviations: dict[int, list[np.ndarray]] = {}
    for i, shape in enumerate(shapes):
        shared[f"q{i}"] = rng.normal(size=(shape[1], r)).astype(np.float32)
        own = [draw.private(rank).normal(size=(4, *shape))[i] for rank in range(n)]
        if i == len(shapes) - 1:
            thin = rng.normal(size=(shape[0], r)) @ rng.normal(size=(r, shape[1]))
            middle = np.mean(own, axis=0)
            own = [thin + (each - middle) for each in own]
        deviations[i] = own
    return [
        shared | {f"m{i}": own[rank].astype(np.float32) for i, own in deviations.items()}
        for rank in range(n)
    ]


def observe(power_step: Any, inputs: Values, context: Context) -> Values:
    """P and Q of all matrices, and the arguments afterwards."""
    count = inputs["count"]
    matrices, qs = (
        [torch.from_numpy(inputs[f"{letter}{i}"].copy()).to(context.device) for i in range(count)]
        for letter in "mq"
    )
    pair = read(power_step(matrices, qs), list, "power_step", "a pair of lists of tensors")
    if len(pair) != 2 or any(not hasattr(each, "__getitem__") for each in pair):
        raise TypeError("power_step: expected a pair of lists of tensors")
    ps, new_qs = pair
    answer: Values = {}
    if inputs["also_none"]:  # a model whose parameters are all too small
        power_step([], [])
    for i in range(count):
        answer[f"p{i}"] = read_array(ps[i], "power_step, P")
        answer[f"q{i}"] = read_array(new_qs[i], "power_step, Q")
        answer[f"before/m{i}"], answer[f"before/q{i}"] = (
            matrices[i].cpu().numpy(),
            qs[i].cpu().numpy(),
        )
    return answer


def judge_basis(case: Case) -> Iterator[Finding]:
    """P is orthonormal, spans the mean of M Q, and is the same on all ranks.

    Any basis is right, also one of the sum.
    """
    for i in range(case.inputs[0]["count"]):
        q = case.inputs[0][f"q{i}"].astype(np.float64)
        product = oracle.mean([values[f"m{i}"] for values in case.inputs]) @ q
        first = case.answers[0].get(f"p{i}")
        for rank, answer in enumerate(case.answers):
            got = answer.get(f"p{i}")
            problem = columns_problem(got, product, TOLERANCE / 10)
            if problem is None and not _alike(got, first):
                problem = "differs from rank 0's."
            if problem is None and not np.array_equal(
                answer.get(f"before/m{i}", ()), case.inputs[rank][f"m{i}"]
            ):
                problem = "the matrix was changed; work on a copy."
            if problem:
                yield Finding(
                    f"P of matrix {i}, held against the mean over ranks of M Q: {problem} "
                    "Take the mean first, then orthonormalise.",
                    rank,
                )


def _alike(one: Any, other: Any) -> bool:
    return (
        isinstance(one, np.ndarray)
        and isinstance(other, np.ndarray)
        and one.shape == other.shape
        and np.allclose(one, other, rtol=0, atol=TOLERANCE)
    )


def judge_factor(case: Case) -> Iterator[Finding]:
    """Q is the mean over ranks of M^T P, with each rank's own P; the start Q is unchanged."""
    n = case.world_size
    for i in range(case.inputs[0]["count"]):
        shape = (case.inputs[0][f"m{i}"].shape[0], case.inputs[0][f"q{i}"].shape[1])
        ps = [answer.get(f"p{i}") for answer in case.answers]
        bad = [rank for rank, p in enumerate(ps) if not _usable(p, shape)]
        if bad:
            yield Finding(
                f"P of matrix {i}: expected {list(shape)} finite numbers in columns that are "
                "independent and of length 1, so Q cannot be judged.",
                bad[0],
            )
            continue
        local = [
            values[f"m{i}"].astype(np.float64).T @ p.astype(np.float64)  # pyright: ignore
            for values, p in zip(case.inputs, ps, strict=True)
        ]
        mean = oracle.mean(local)
        for rank, answer in enumerate(case.answers):
            got = answer.get(f"q{i}")
            hint = oracle.explain_gradient(got, mean, local[rank], n).replace("gradient", "product")
            if wrong := oracle.differs(
                rank,
                f"Q of matrix {i}, held against the mean of M^T P",
                got,
                mean,
                hint=hint,
            ):
                yield wrong
                break
            start = case.inputs[rank][f"q{i}"]
            if not np.array_equal(answer.get(f"before/q{i}", ()), start):
                yield Finding(f"the start Q of matrix {i} was changed.", rank)


def _usable(p: Any, shape: tuple[int, int]) -> bool:
    return (
        is_floats(p, shape)
        and bool(np.isfinite(p).all())
        and float(np.abs(p).max(initial=0.0)) < MOST_STRETCH
        and float(np.linalg.svd(p.astype(np.float64), compute_uv=False)[-1]) > LEAST_STRETCH
    )
