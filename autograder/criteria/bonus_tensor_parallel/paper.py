"""Criterion for the bytes of tensor parallelism and of data parallelism, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.common.answers import read_number, unit_hint
from autograder.criteria.criterion import Case, Context, Finding, Values, differs, per_rank

CASES = 6


@per_rank
def draw(rng: np.random.Generator) -> Values:
    """Batches, tokens, widths, bytes per number, ranks."""
    cases = [
        [
            int(rng.integers(1, 9)),
            int(rng.integers(100, 4000)),
            64 * int(rng.integers(2, 200)),
            int(rng.choice([2, 4])),
            int(rng.integers(3, 65)),
        ]
        for _ in range(CASES)
    ]
    cases[0][-1], cases[1][-1] = 1, 2
    return {"cases": cases}


def observe(functions: Any, inputs: Values, context: Context) -> Values:
    """The bytes of tensor parallelism and of data parallelism for every case."""
    tensor, data = functions
    cases = inputs["cases"]
    activations = [read_number(tensor(*case), "tensor_parallel_bytes") for case in cases]
    gradients = [read_number(data(*case[2:]), "data_parallel_bytes") for case in cases]
    return {"tensor": np.array(activations), "data": np.array(gradients)}


def judge(case: Case) -> Iterator[Finding]:
    """Requires the bytes of four all-reduces of activations, and of one of all gradients."""
    for rank, answer in enumerate(case.answers):
        b, t, d, size, n = np.array(case.inputs[rank]["cases"], dtype=np.float64).T
        ring = 2 * (n - 1) / n * size
        activations, gradients = ring * 4 * b * t * d, ring * (12 * d**2 + 13 * d)
        if wrong := differs(
            rank,
            f"tensor_parallel_bytes of {CASES} cases",
            answer.get("tensor"),
            activations,
            rtol=1e-9,
            atol=0.0,
            hint=unit_hint(answer.get("tensor"), activations)
            or "Two all-reduces forward, two backward, each of B T D numbers.",
        ) or differs(
            rank,
            f"data_parallel_bytes of {CASES} cases",
            answer.get("data"),
            gradients,
            rtol=1e-9,
            atol=0.0,
            hint=unit_hint(answer.get("data"), gradients)
            or "12 D^2 weights; biases of 3 D, D, 4 D and D; two norms with 2 D each.",
        ):
            yield wrong
