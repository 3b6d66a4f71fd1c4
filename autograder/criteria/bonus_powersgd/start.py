"""Criteria for PowerSGD's Q: its start, its reuse in the next step, and its recovery from zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from autograder.criteria.bonus_powersgd.model import (
    PLAIN,
    as_array,
    draw_gradients,
    matrices_of,
    parameters_for,
)
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import is_floats
from autograder.criteria.common.places import hashing_as
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

# --- the start -----------------------------------------------------------------------------------

STARTS = (*PLAIN, (30, 400))
MANY = 1000  # so many random numbers show their distribution


def draw_seed(draw: Draw) -> list[Values]:
    """Two seeds that all ranks share, and a private seed of torch's global generator."""
    rng = draw.shared()
    seeds = [int(seed) for seed in rng.choice(10_000, 2, replace=False)]
    return [
        {"seeds": seeds, "own": int(draw.private(rank).integers(1 << 30)), "rank": 5}
        for rank in range(draw.world_size)
    ]


def observe_seed(powersgd: Any, inputs: Values, context: Context) -> Values:
    """The Qs of two reducers with different seeds, and of one more with the first seed."""
    torch.manual_seed(inputs["own"])
    torch.rand(3)  # so seeding with the same seed does not restore the state
    before, answer = torch.get_rng_state(), {}
    for number, seed in enumerate([*inputs["seeds"], inputs["seeds"][0]]):
        parameters = parameters_for(STARTS, torch.float32, context.device)
        with hashing_as(context.rank, powersgd):
            reducer = powersgd(parameters, inputs["rank"], seed=seed)
        for i in range(len(parameters)):
            answer[f"{number}/{i}"] = as_array(reducer.q_of(i)).copy()
    answer["moved"] = not torch.equal(before, torch.get_rng_state())
    return answer


def judge_seed(case: Case) -> Iterator[Finding]:
    """Q is the same on all ranks, differs between seeds, and has r independent columns.

    There may be one generator for all or one for each, and Q may be drawn when it is asked for.
    """
    for rank, answer in enumerate(case.answers):
        if answer.get("moved") is not False:
            yield Finding(
                "torch's global generator was moved or seeded. Dropout draws from it: use a "
                "torch.Generator of your own.",
                rank,
            )
        for i, shape in enumerate(STARTS):
            wanted = (int(np.prod(shape[1:])), case.inputs[0]["rank"])
            qs = [answer.get(f"{number}/{i}") for number in range(3)]
            zero = case.answers[0].get(f"0/{i}")
            if not all(_is_start(q, wanted) for q in qs):
                yield Finding(
                    f"q_of({i}): expected {list(wanted)} finite random numbers, with columns that "
                    "are independent.",
                    rank,
                )
                break
            problem = None
            if not _same(qs[0], zero, 1e-6):
                problem = (
                    "differs from rank 0's. P = M Q can only be averaged if Q is the same on all "
                    "ranks: let it depend on seed and number alone. (hash() of a text is "
                    "a different one in every process.)"
                )
            elif not _same(qs[0], qs[2], 1e-6):
                problem = "has different numbers when the same seed is used again."
            elif _same(qs[0], qs[1], 1e-3):
                problem = "has the same numbers for two seeds."
            elif qs[0].size > MANY and not _is_normal(qs[0]):  # pyright: ignore
                problem = "is not drawn from a normal distribution: is it `rand` for `randn`?"
            if problem:
                yield Finding(f"q_of({i}) {problem}", rank)
                break


def _same(one: Any, other: Any, tolerance: float) -> bool:
    return (
        isinstance(one, np.ndarray)
        and is_floats(other, one.shape)
        and np.allclose(one, other, rtol=tolerance, atol=tolerance)
    )


def _is_normal(q: np.ndarray) -> bool:
    """Mean about zero, and tails: the fourth moment is 3, that of a uniform distribution 1.8."""
    scaled = q.astype(np.float64) / np.sqrt(np.square(q.astype(np.float64)).mean())
    return bool(abs(scaled.mean()) < 0.3 and (scaled**4).mean() > 2.3)


def _is_start(q: Any, wanted: tuple[int, int]) -> bool:
    return (
        is_floats(q, wanted)
        and bool(np.isfinite(q).all())
        and int(np.linalg.matrix_rank(q)) == wanted[1]
    )


# --- warm start ----------------------------------------------------------------------------------

WARM_STEPS, WARM_RANK = 10, 2
IDLE, PAUSE = 1, WARM_STEPS - 2  # this parameter's gradients are zero in this step


def draw_warm(draw: Draw) -> list[Values]:
    """The same private gradients in every step; their mean has two large singular values.

    One parameter has a step of zeros before the last: its Q from before that step has to stay.
    """
    rng, n = draw.shared(), draw.world_size
    inputs = draw_gradients(draw, PLAIN, WARM_STEPS, "float64", rank=WARM_RANK)
    for i, shape in enumerate(PLAIN):
        rows, columns = shape[0], int(np.prod(shape[1:]))
        u, _ = np.linalg.qr(rng.normal(size=(rows, rows)))
        v, _ = np.linalg.qr(rng.normal(size=(columns, columns)))
        count = min(rows, columns)
        values = np.concatenate([[4.0, 3.0], 0.9 * 0.7 ** np.arange(count - 2)])
        thin = (u[:, :count] * values) @ v[:, :count].T
        own = [draw.private(rank).normal(size=(4, rows, columns))[i] for rank in range(n)]
        middle = np.mean(own, axis=0)
        for rank in range(n):
            gradient = (thin + own[rank] - middle).reshape(shape)
            for step in range(WARM_STEPS):
                zero = i == IDLE and step == PAUSE
                inputs[rank][f"g{step}/{i}"] = np.zeros_like(gradient) if zero else gradient
    return inputs


def judge_warm(case: Case) -> Iterator[Finding]:
    """After ten steps on the same gradients, the result is the best rank-2 approximation.

    A step of zeros among them changes nothing.
    """
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        mean = oracle.mean(matrices_of(case, 0, i))
        u, s, vt = np.linalg.svd(mean)
        best = (u[:, :WARM_RANK] * s[:WARM_RANK]) @ vt[:WARM_RANK]
        for rank, answer in enumerate(case.answers):
            got = answer.get(f"a{WARM_STEPS - 1}/{i}")
            hint = (
                "With the same gradients again and again, Q comes to lie where the largest "
                "singular vectors do, if every step starts with the Q of the step before."
            )
            if oracle.agrees(got, mean.reshape(shape)):
                hint = "That is the exact mean: it was not compressed."
            elif i == IDLE:
                hint += f" In step {PAUSE} this gradient was zero on all ranks; the old Q stays."
                if isinstance(got, np.ndarray) and not got.any():
                    continue  # Q has become zero, which `judge_revive` finds
            if wrong := oracle.differs(
                rank,
                f"gradient of parameter {i} in step {WARM_STEPS - 1}, held against the best "
                f"approximation of rank {WARM_RANK}",
                got,
                best.reshape(shape),
                dtype="float32",
                hint=hint,
            ):
                yield wrong
                break


# --- zeros ---------------------------------------------------------------------------------------


REVIVE_RANKS = (0, 1, 2, 2)  # of the mean gradient, step by step
# In the first step of rank 2, a column of Q may be only rounding noise of the step before, which
# some methods to orthonormalise drop. In the second step the column is right with all methods.
REVIVE_JUDGED = (0, 1, 3)


def draw_revive(draw: Draw) -> list[Values]:
    """Zeros on all ranks, then gradients whose mean has rank 1, then twice the same of rank 2."""
    rng, n = draw.shared(), draw.world_size
    inputs = draw_gradients(draw, PLAIN, len(REVIVE_RANKS), "float64", rank=3)
    for i, shape in enumerate(PLAIN):
        rows, columns = shape[0], int(np.prod(shape[1:]))
        left, right = rng.normal(size=(rows, 2)), rng.normal(size=(2, columns))
        own = [draw.private(rank).normal(size=(4, rows, columns))[i] for rank in range(n)]
        middle = np.mean(own, axis=0)
        for rank in range(n):
            for step, r in enumerate(REVIVE_RANKS):
                gradient = left[:, :r] @ right[:r] + own[rank] - middle if r else np.zeros(shape)
                inputs[rank][f"g{step}/{i}"] = gradient.reshape(shape)
    return inputs


def judge_revive(case: Case) -> Iterator[Finding]:
    """Zeros give zeros, and later steps are exact, because the rank of their mean is at most r."""
    for i, shape in enumerate(case.inputs[0]["shapes"]):
        for step in REVIVE_JUDGED:
            mean, found = oracle.mean(matrices_of(case, step, i)).reshape(shape), False
            for rank, answer in enumerate(case.answers):
                got, own = answer.get(f"a{step}/{i}"), case.inputs[rank][f"g{step}/{i}"]
                hint = oracle.explain_gradient(got, mean, own, case.world_size)
                what = f"gradient of parameter {i}, zero on all ranks"
                if step:
                    what = (
                        f"gradient of parameter {i}, whose mean has rank {REVIVE_RANKS[step]}, in "
                        f"step {step} (step 0 had zeros{', step 1 had rank 1' * (step > 1)})"
                    )
                    if step > 1 and not hint:
                        hint = "Which columns of Q became zero in step 1? Have they come back?"
                    if isinstance(got, np.ndarray) and not got.any():
                        hint = "Q has become zero, and M·0 is zero. Keep the old Q's column then."
                if wrong := oracle.differs(rank, what, got, mean, dtype="float32", hint=hint):
                    found = True
                    yield wrong
            if found:
                return
