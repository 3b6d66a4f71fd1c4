"""Bonus "ZeRO": the solution as a script, and judges that no answer can confuse."""

from __future__ import annotations

import numpy as np
import pytest
from lab_helper import assert_none_confuses, make_case, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.bonus_zero import harness, limit
from autograder.proof.verify import choose_covering
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import draw_for

NAME = "bonus_zero"
LAB = get_lab(NAME)
WORLD_SIZE = 3
HOSTILE = (
    None,
    "text",
    [],
    ["text"],
    [[0, 0]] * 3,
    [[[0, 1]]],
    [{"status": "ok", "losses": "text"}] * 3,
    [{"status": "ok", "losses": [1.0, 1.0]}] * 3,
    [{"status": "memory"}],
    [None] * 3,
    {},
    True,
    -1,
    1.0,
    float("nan"),
    np.array(np.nan),
    np.zeros(0),
    np.array(["text"]),
    np.zeros((3, 3), dtype=np.complex64),
    np.full((7, 5), np.inf, dtype=np.float32),
    np.full((9, 6), 1e300),
    np.zeros(8, dtype=np.float32),
    np.zeros(8, dtype=np.uint8),
    np.zeros((90, 110)),
)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    printed = run_solution(NAME, num_ranks, tmp_path)
    for stage in range(4):  # what lies in memory is what the formula says
        line = next(x for x in printed.splitlines() if x.startswith(f"stage {stage}: measured"))
        measured, formula = line.split()[3], line.split("formula ")[1].split(";")[0]
        if stage < 3 or num_ranks == 1:
            assert measured == formula, line
        else:  # `fully_shard` cuts by rows, and three do not divide its 64
            assert int(formula) <= int(measured) <= 1.05 * int(formula), line


def test_few_submissions_lose_every_criterion():
    assert len(choose_covering(LAB, load_zoo(NAME))) <= 16


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_no_answer_passes_and_none_confuses_the_judge(criterion):
    assert criterion.findings(make_case(LAB, criterion, [{} for _ in range(WORLD_SIZE)]))
    assert_none_confuses(LAB, criterion, HOSTILE, WORLD_SIZE)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_draws_are_fresh_and_serve_every_world_size(criterion, world_size):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, world_size))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == world_size
    assert repr(first) != repr(again)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
def test_the_memory_limit_lies_between_right_and_wrong(world_size):
    share = 1 / world_size
    # the mean gradient whole
    assert 2 + 4 * share < limit.copies(world_size, 1) < 3 + 3 * share
    assert 1 + 2 * share < limit.copies(world_size, 2) < 2 + share  # the gradient whole


def test_any_layout_of_the_shares_will_do_and_none_that_lacks_a_number():
    wanted = [np.array([[1.0, -2.0], [3.0, 4.0]]), np.array([5.0])]
    a, b = np.array([5.0, 0.0, -2.0]), np.array([4.0, 1.0, 3.0, 0.0])
    assert harness.same_numbers([a, b], wanted) is None
    assert harness.same_numbers([a, b[:-2]], wanted)
    assert harness.same_numbers([a, np.append(b, 5.0)], wanted)
    assert "3 times the mean" in harness.explain_numbers([3 * a, 3 * b], wanted, 3)
    assert "divided by 2" in harness.explain_numbers([1.5 * a, 1.5 * b], wanted, 3)
