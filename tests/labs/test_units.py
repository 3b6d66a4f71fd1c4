"""A right number in a wrong unit is told as one, in every lab that asks for seconds or bytes."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from lab_helper import make_case

from autograder.criteria import get_lab
from autograder.criteria.bonus_powersgd import training
from autograder.criteria.bonus_zero import planning
from autograder.criteria.common.answers import unit_hint
from autograder.criteria.criterion import Context
from autograder.criteria.lab3_fsdp import memory
from autograder.criteria.lab4_amp import measure


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


def memory_formula(n, ranks, strategy, *, mixed=False):
    if strategy not in memory.STRATEGIES:
        raise ValueError
    return tuple(b / 1024 for b in memory.state_bytes(n, ranks, strategy, mixed))


def scaling_report(log):
    """Samples per millisecond; the reference's other numbers are those of one round."""
    sizes = sorted({line["ranks"] for line in log})
    rates = {
        n: {r["round"]: n * r["batch_per_rank"] / r["seconds"] for r in log if r["ranks"] == n}
        for n in sizes
    }
    return {
        n: {
            "samples_per_s": [f(list(of.values())) / 1e3 for f in (min, statistics.median, max)],
            "efficiency": (1.0, 1.0, 1.0),
        }
        for n, of in rates.items()
    }


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
    ("lab3_fsdp", "fsdp_memory_formula", "1/1,024 of", lambda _: memory_formula),
    ("lab6_profiling", "prof_report", "1/1,000 of", lambda _: scaling_report),
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
    assert_called_a_unit(lab, criterion, answers, times)


def assert_called_a_unit(lab, criterion, answers, times):
    findings = criterion.findings(make_case(lab, criterion, answers))
    assert findings
    for finding in findings:
        assert f"That is {times} the right value: look at the unit." in finding.message


def test_wrong_units_of_what_was_measured():
    """Ranks and an optimiser are not needed to have numbers in a wrong unit."""
    lab = get_lab("lab3_fsdp")
    criterion = lab["fsdp_memory_measured"]
    widths = make_case(lab, criterion, [{}, {}]).inputs[0]["widths"]
    told = [
        {
            name: [v / 2**20 for v in memory._expected_bytes(widths, name, 2, rank)]
            for name in memory._MEASURED
        }
        for rank in range(2)
    ]
    assert_called_a_unit(lab, criterion, [{"told": each} for each in told], "1/1,048,576 of")
    lab = get_lab("lab4_amp")
    criterion = lab["amp_memory"]
    answers = []
    for inputs in make_case(lab, criterion, [{}, {}]).inputs:
        expected = [measure.expected_bytes(case) for case in inputs["cases"]]
        calls = [{"compute_loss": 1, "optimizer.step": 1}] * len(expected)
        reports = [{key: v / 1e3 for key, v in each.items()} for each in expected]
        answers.append({"reports": reports, "calls": calls, "stepped": True})
    assert_called_a_unit(lab, criterion, answers, "1/1,000 of")


NO_UNIT = (None, "3", True, [3.0], np.zeros(3), np.array(["a"]), 0.0, 3.0, 24.0)
OF_TWO = (["a", "b"], [3e3 + 1j, 5e3], [None, 5e3], [24.0, 40.0])


@pytest.mark.parametrize("got", [*NO_UNIT, *map(np.array, OF_TWO)])
def test_anything_else_is_no_wrong_unit(got):
    assert unit_hint(got, 3.0) == ""
    assert unit_hint(got, np.array([3.0, 5.0])) == ""
    assert unit_hint(np.array([3e3, 5e6]), np.array([3.0, 5.0])) == ""
