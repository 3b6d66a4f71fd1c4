"""Criteria for the time that an all-reduce takes: the α–β model, ring or tree, bus bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.common.answers import item_of, returned, unit_hint
from autograder.criteria.criterion import Case, Context, Finding, Values, differs, per_rank

KINDS = 5
CASES = 2 * KINDS + 1


@per_rank
def draw(rng: np.random.Generator) -> Values:
    """Sizes, clusters and seconds, each case within 10 % of where ring and tree take equally long.

    There are two cases for each kind of world size (a power of two, one or two more, one or two
    less, any, one more than a large power of two): the ring is a little faster in one, the tree in
    the other one. Both have the same size, so no size decides. With two ranks the ring is faster.
    """
    cases = [case for kind in range(KINDS) for case in _two_cases(kind, rng)]
    latency_s, bandwidth = cases[0][2:]
    cases.append([float(round(latency_s * bandwidth * rng.uniform(0.5, 2))), 2, *cases[0][2:]])
    seconds = [float(ring_s(*case) * rng.uniform(1.1, 2.0)) for case in cases]  # pyright: ignore
    return {"cases": cases, "seconds": seconds}


def _two_cases(kind: int, rng: np.random.Generator) -> list[list[float]]:
    while True:
        cases: list[list[float]] = []
        num_bytes = 0.0
        for ring_is_faster in (True, False):
            power = 2 ** int(rng.integers(3, 8))
            more = int(rng.integers(1, 3))
            large = 2 ** int(rng.integers(11, 14)) + 1
            n = (power, power + more, power - more, int(rng.integers(5, 200)), large)[kind]
            latency_s = float(10 ** rng.uniform(-6, -4))
            bandwidth = float(10 ** rng.uniform(9, 11.5))
            margin = float(rng.uniform(0.1, 0.2)) * (1 if ring_is_faster else -1)
            depth = math.ceil(math.log2(n))
            # Both take equally long where latency_s * bandwidth * sizes == num_bytes.
            sizes = (n - 1 - depth) / (depth - (n - 1) / n)
            if ring_is_faster:
                num_bytes = float(round(latency_s * bandwidth * sizes * math.exp(margin)))
            else:
                latency_s = num_bytes / bandwidth / sizes * math.exp(-margin)
            cases.append([num_bytes, n, latency_s, bandwidth])
        gaps = [abs(math.log(ring_s(*case) / tree_s(*case))) for case in cases]
        if num_bytes > 1e4 and 1e-6 < cases[1][2] < 1e-4 and all(0.02 < gap < 0.1 for gap in gaps):
            return cases


def ring_s(num_bytes: float, n: float, latency_s: float, bandwidth: float) -> float:
    """Seconds of a ring: 2 (n - 1) steps, each with one n-th of the tensor."""
    return 2 * (n - 1) * (latency_s + num_bytes / n / bandwidth)


def tree_s(num_bytes: float, n: float, latency_s: float, bandwidth: float) -> float:
    """Seconds of a binary tree, up and down: each level passes on the whole tensor."""
    return 2 * math.ceil(math.log2(n)) * (latency_s + num_bytes / bandwidth)


def _arguments(case: list[float]) -> tuple[int, int, float, float]:
    return int(case[0]), int(case[1]), case[2], case[3]


def _where(case: list[float]) -> str:
    return (
        f"{case[0]:.3g} bytes on {case[1]:.0f} ranks, {case[2] * 1e6:.3g} µs, "
        f"{case[3] / 1e9:.3g} GB/s"
    )


def _first(got: Any, expected: np.ndarray, cases: list[list[float]]) -> str:
    """The first case whose number is wrong, in words."""
    if not isinstance(got, np.ndarray) or got.shape != expected.shape or got.dtype.kind not in "fi":
        return ""
    wrong = np.flatnonzero(~np.isclose(got, expected, rtol=1e-6, atol=0.0))
    return f", {_where(cases[wrong[0]])} and other cases" if wrong.size else ""


def observe_seconds(functions: Any, inputs: Values, context: Context) -> Values:
    """The ring's and the tree's seconds for every case."""
    ring, tree = functions
    arguments = [_arguments(case) for case in inputs["cases"]]
    return {
        "ring": np.array([returned(ring(*a), "ring_seconds") for a in arguments]),
        "tree": np.array([returned(tree(*a), "tree_seconds") for a in arguments]),
    }


def judge_seconds(case: Case) -> Iterator[Finding]:
    """Requires the formulas' seconds."""
    for rank, answer in enumerate(case.answers):
        cases = case.inputs[rank]["cases"]
        for name, formula, hint in (
            ("ring", ring_s, "2 (N - 1) steps; in each a latency and one N-th of the bytes."),
            ("tree", tree_s, "2 ⌈log₂ N⌉ steps; in each a latency and all of the bytes."),
        ):
            expected = np.array([formula(*values) for values in cases])
            if wrong := differs(
                rank,
                f"{name}_seconds{_first(answer.get(name), expected, cases)}",
                answer.get(name),
                expected,
                rtol=1e-6,
                atol=0.0,
                hint=unit_hint(answer.get(name), expected) or hint,
            ):
                yield wrong


def observe_choice(choose: Any, inputs: Values, context: Context) -> Values:
    """The choice in every case."""
    return {"said": [str(choose(*_arguments(case)))[:20] for case in inputs["cases"]]}


def judge_choice(case: Case) -> Iterator[Finding]:
    """Requires the faster algorithm in every case. No case is a tie, where either is right."""
    for rank, answer in enumerate(case.answers):
        said = answer.get("said")
        for number, values in enumerate(case.inputs[rank]["cases"]):
            ring, tree = ring_s(*values), tree_s(*values)
            right = "ring" if ring < tree else "tree"
            got = item_of(said, number)
            if got != right:
                yield Finding(
                    f"{_where(values)}: a ring takes {ring:.3g} s, a tree {tree:.3g} s; expected "
                    f"{right!r}, got {got!r}.",
                    rank,
                )
                break


def observe_bus(bus_bandwidth: Any, inputs: Values, context: Context) -> Values:
    """The bus bandwidth of every measurement."""
    pairs = zip(inputs["cases"], inputs["seconds"], strict=True)
    return {
        "found": np.array(
            [returned(bus_bandwidth(int(c[0]), int(c[1]), s), "bus_bandwidth") for c, s in pairs]
        )
    }


def judge_bus(case: Case) -> Iterator[Finding]:
    """Requires the bytes that each link carried, per second."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        expected = np.array(
            [
                2 * (c[1] - 1) / c[1] * c[0] / s
                for c, s in zip(inputs["cases"], inputs["seconds"], strict=True)
            ]
        )
        if wrong := differs(
            rank,
            f"bus_bandwidth{_first(answer.get('found'), expected, inputs['cases'])}",
            answer.get("found"),
            expected,
            rtol=1e-6,
            atol=0.0,
            hint=unit_hint(answer.get("found"), expected)
            or "Every link carries 2 (N - 1) / N of the tensor: divide that by the seconds.",
        ):
            yield wrong
