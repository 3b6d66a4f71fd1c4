"""Criteria for the price of a pipeline: its bubble, how many micro-batches it needs, its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.common.answers import is_floats, item_of, read_number, unit_hint
from autograder.criteria.criterion import Case, Context, Finding, Values, differs, integer, per_rank

CASES = 8


@per_rank
def draw(rng: np.random.Generator) -> Values:
    """Stages, micro-batches, times, sizes, and upper limits of the bubble."""
    cases = [
        [
            int(rng.integers(2, 33)),
            int(rng.integers(1, 65)),
            *rng.uniform(1e-3, 0.1, 2).tolist(),
        ]
        for _ in range(CASES)
    ]
    cases[0][:2] = [1, 5]
    # From the third to the fifth the bubble is exactly the limit, without rounding in any formula.
    many, stages = int(rng.integers(20, 41)), int(rng.integers(3, 8))
    wanted: list[list[float]] = [[1, 0.1], [4, 0.9], [many, 1 / 128], [stages, 0.25], [2, 2.0**-17]]
    wanted.append([int(rng.integers(2, 33)), 1.0])  # any bubble will do
    while len(wanted) < CASES:
        stages, bubble = int(rng.integers(2, 33)), round(float(rng.uniform(0.03, 0.5)), 3)
        exact = (stages - 1) * (1 - bubble) / bubble
        if 0.01 < exact % 1 < 0.99:  # rounding of floats must not decide
            wanted.append([stages, bubble])
    sizes = [
        [int(rng.integers(3, 17)), int(rng.integers(1, 65)), int(rng.integers(10**3, 10**8))]
        for _ in range(CASES)
    ]
    sizes[0][0], sizes[1][0] = 1, 2
    return {"cases": cases, "wanted": wanted, "sizes": sizes}


def observe_bubble(functions: Any, inputs: Values, context: Context) -> Values:
    """Share and seconds of every case."""
    fraction, seconds = functions
    cases = inputs["cases"]
    shares = [read_number(fraction(p, m), "bubble_fraction") for p, m, _, _ in cases]
    idle = [read_number(seconds(*each), "idle_seconds") for each in cases]
    return {"fraction": np.array(shares), "seconds": np.array(idle)}


def _is_close(got: Any, expected: np.ndarray) -> bool:
    return is_floats(got, expected.shape) and bool(np.allclose(got, expected))


def judge_bubble(case: Case) -> Iterator[Finding]:
    """Both results follow the formulas."""
    for rank, answer in enumerate(case.answers):
        cases = case.inputs[rank]["cases"]
        share = np.array([(p - 1) / (m + p - 1) for p, m, _, _ in cases])
        hint = "Each rank idles for P - 1 of the M + P - 1 times of a micro-batch."
        got = answer.get("fraction")
        ratio = np.array([(p - 1) / m for p, m, _, _ in cases])
        if _is_close(got, ratio):
            hint = "That is the idle time over the busy time: a share is of the whole step."
        idle = np.array([(p - 1) * (f + b) for p, _, f, b in cases])
        if wrong := differs(
            rank, "bubble_fraction", got, share, rtol=1e-9, atol=0.0, hint=hint
        ) or differs(
            rank,
            "idle_seconds",
            answer.get("seconds"),
            idle,
            rtol=1e-9,
            atol=0.0,
            hint=unit_hint(answer.get("seconds"), idle)
            or "A rank waits P - 1 forwards until its turn comes or the gradients do, and "
            "as many backwards; how many micro-batches there are does not matter.",
        ):
            yield wrong


def observe_choice(micro_batches_for: Any, inputs: Values, context: Context) -> Values:
    """The number of micro-batches for every limit of the bubble."""
    return {
        "found": [
            integer(micro_batches_for(int(p), bubble), "micro_batches_for")
            for p, bubble in inputs["wanted"]
        ]
    }


def judge_choice(case: Case) -> Iterator[Finding]:
    """The smallest number of micro-batches whose bubble is within the limit.

    No case depends on rounding.
    """
    for rank, answer in enumerate(case.answers):
        found = answer.get("found")
        for number, (p, bubble) in enumerate(case.inputs[rank]["wanted"]):
            right = max(1, math.ceil((p - 1) * (1 - bubble) / bubble))
            got = item_of(found, number)
            if type(got) is not int or got != right:
                why = ""
                if type(got) is int and 0 < got < 10**6:
                    share = (p - 1) / (got + p - 1)
                    enough = "too large" if share > bubble else "fewer are enough"
                    why = f" With {got} it is {share:.4g}: {enough}."
                yield Finding(
                    f"{p:.0f} stages, a bubble of {bubble} at most: expected {right}, got "
                    f"{str(got)[:40]}.{why}",
                    rank,
                )
                break


def observe_bytes(functions: Any, inputs: Values, context: Context) -> Values:
    """Bytes sent by a pipeline and by data parallelism."""
    pipeline, data_parallel = functions
    sizes = inputs["sizes"]
    sent = [read_number(pipeline(*each), "pipeline_bytes") for each in sizes]
    ring = [read_number(data_parallel(n, size), "data_parallel_bytes") for n, _, size in sizes]
    return {"pipeline": np.array(sent), "data": np.array(ring)}


def judge_bytes(case: Case) -> Iterator[Finding]:
    """A pipeline sends activations and their gradients; data parallelism sends ring all-reduces."""
    for rank, answer in enumerate(case.answers):
        sizes = case.inputs[rank]["sizes"]
        ways = np.array([min(p - 1, 2) for p, _, _ in sizes])
        sent = ways * np.array([m * size for _, m, size in sizes], dtype=np.float64)
        ring = np.array([2 * (n - 1) / n * size for n, _, size in sizes])
        if wrong := differs(
            rank,
            f"pipeline_bytes of {CASES} cases",
            answer.get("pipeline"),
            sent,
            rtol=1e-9,
            atol=0.0,
            hint=unit_hint(answer.get("pipeline"), sent)
            or "A rank in the middle sends M activations on and M gradients back; with two "
            "stages each rank sends one of the two, with one nobody sends.",
        ) or differs(
            rank,
            f"data_parallel_bytes of {CASES} cases",
            answer.get("data"),
            ring,
            rtol=1e-9,
            atol=0.0,
            hint=unit_hint(answer.get("data"), ring)
            or "An all-reduce sends 2 (N - 1) / N of the gradients.",
        ):
            yield wrong
