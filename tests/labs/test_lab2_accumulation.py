"""Lab 2: the reference solution as a script, and judges that no answer can confuse."""

from __future__ import annotations

import numpy as np
import pytest
from lab_helper import assert_none_confuses, make_case, run_solution, sizes

from autograder.criteria import get_lab
from autograder.referee.referee import draw_for

NAME = "lab2_accumulation"
LAB = get_lab(NAME)
WORLD_SIZE = 3
HOSTILE = (
    None,
    "text",
    [],
    ["text"],
    [1],
    [[[]]],
    {},
    True,
    -1,
    10**9,
    float("nan"),
    np.array(np.nan),
    np.array(1e300),
    np.zeros(0),
    np.zeros((3, 3), dtype=np.complex64),
    np.array(["text"]),
    np.full((9, 5), np.inf, dtype=np.float32),
    np.zeros((9, 5), dtype=np.float16),
)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    run_solution(NAME, num_ranks, tmp_path)


def test_names():
    assert all(criterion.name.startswith("accum_") for criterion in LAB.criteria)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_no_answer_passes_and_none_confuses_the_judge(criterion):
    findings = criterion.findings(make_case(LAB, criterion, [{} for _ in range(WORLD_SIZE)]))
    assert {f.rank for f in findings} in ({None}, set(range(WORLD_SIZE)))
    assert_none_confuses(LAB, criterion, HOSTILE, WORLD_SIZE)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_draws_are_private_or_fresh(criterion):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, WORLD_SIZE))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == WORLD_SIZE
    assert repr(first) != repr(again)
