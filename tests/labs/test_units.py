"""A right number in a wrong unit is told as one, in every lab that asks for seconds or bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from lab_helper import make_case

from autograder.criteria import get_lab
from autograder.criteria.bonus_powersgd import training
from autograder.criteria.bonus_zero import planning
from autograder.criteria.common.answers import unit_hint
from autograder.criteria.criterion import Context


def of_zero(factor):
    def bytes_sent(sizes, ranks, stage, micro=1):
        case = {"sizes": sizes, "ranks": ranks, "stage": stage, "micro": micro}
        return planning._bytes(case) * factor

    return bytes_sent


def seconds_saved(inputs):
    cases = iter(inputs["cases"])
    return lambda *_: 1e3 * training._saved(next(cases))


def traffic(n, ranks, strategy, size=4):
    return (3 if strategy == "zero3" else 2) * (ranks - 1) / ranks * n * size / 1024


# (lab, criterion, what the factor is, functions of a student or what makes them)
WRONG = [
    (
        *("bonus_ring_all_reduce", "ring_seconds", "1,000 times"),
        lambda _: (
            lambda b, n, a, w: 2e3 * (n - 1) * (a + b / n / w),
            lambda b, n, a, w: 2e3 * math.ceil(math.log2(n)) * (a + b / w),
        ),
    ),
    (
        *("bonus_ring_all_reduce", "ring_bus", "1/1,000,000,000 of"),
        lambda _: lambda b, n, s: 2 * (n - 1) / n * b / s / 1e9,
    ),
    ("bonus_zero", "zero_bytes", "1,000 times", lambda _: of_zero(1000)),
    (
        *("bonus_tensor_parallel", "btp_paper", "1/1,048,576 of"),
        lambda _: (
            lambda b, t, d, size, n: 8 * (n - 1) / n * b * t * d * size / 2**20,
            lambda d, size, n: 2 * (n - 1) / n * (12 * d**2 + 13 * d) * size / 2**20,
        ),
    ),
    (
        *("bonus_pipeline", "pipe_bubble", "1,000,000 times"),
        lambda _: (
            lambda p, m: (p - 1) / (m + p - 1),
            lambda p, m, f, b: (p - 1) * (f + b) * 1e6,
        ),
    ),
    (
        *("bonus_pipeline", "pipe_bytes", "1/1,000 of"),
        lambda _: (
            lambda p, m, size: min(p - 1, 2) * m * size / 1e3,
            lambda n, size: 2 * (n - 1) / n * size / 1e3,
        ),
    ),
    ("bonus_powersgd", "powersgd_seconds", "1,000 times", seconds_saved),
    ("lab3_fsdp", "fsdp_choice", "1/1,024 of", lambda _: (traffic, lambda *_, **__: "ddp")),
]


@pytest.mark.parametrize(("lab", "name", "times", "make"), WRONG, ids=[w[1] for w in WRONG])
def test_a_wrong_unit_is_called_one(lab, name, times, make):
    lab = get_lab(lab)
    criterion = lab[name]
    inputs = make_case(lab, criterion, [{}, {}]).inputs
    answers = [
        criterion.observe(make(inputs[rank]), inputs[rank], Context(rank, 2, None))  # type: ignore
        for rank in range(2)
    ]
    for finding in criterion.findings(make_case(lab, criterion, answers)):
        assert f"That is {times} the right value: look at the unit." in finding.message


NO_UNIT = (None, "3", True, [3.0], np.zeros(3), np.array(["a"]), 0.0, 3.0, 24.0)
OF_TWO = (["a", "b"], [3e3 + 1j, 5e3], [None, 5e3], [24.0, 40.0])


@pytest.mark.parametrize("got", [*NO_UNIT, *map(np.array, OF_TWO)])
def test_anything_else_is_no_wrong_unit(got):
    assert unit_hint(got, 3.0) == ""
    assert unit_hint(got, np.array([3.0, 5.0])) == ""
    assert unit_hint(np.array([3e3, 5e6]), np.array([3.0, 5.0])) == ""
