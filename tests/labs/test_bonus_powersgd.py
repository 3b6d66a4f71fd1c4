"""Bonus "PowerSGD": the solution as a script, and judges that no answer can confuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lab_helper import assert_none_confuses, make_case, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.bonus_powersgd.columns import MEANS, columns_problem
from autograder.criteria.criterion import Case
from autograder.proof.verify import choose_covering
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import draw_for

NAME = "bonus_powersgd"
LAB = get_lab(NAME)
WORLD_SIZE = 3
HOSTILE = (
    None,
    "text",
    [],
    ["text"],
    [[0, 0]] * 6,
    [[[0, 1]]],
    {},
    True,
    -1,
    float("nan"),
    np.array(np.nan),
    np.zeros(0),
    np.array(["text"]),
    np.zeros((3, 3), dtype=np.complex64),
    np.full((9, 6), np.inf, dtype=np.float32),
    np.full((14, 2), 1e300),
    np.zeros(8, dtype=np.float32),
    np.zeros((13, 10)),
)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    run_solution(NAME, num_ranks, tmp_path)


def test_few_submissions_lose_every_criterion():
    assert len(choose_covering(LAB, load_zoo(NAME))) <= len(LAB.criteria)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_no_answer_passes_and_none_confuses_the_judge(criterion):
    assert criterion.findings(make_case(LAB, criterion, [{} for _ in range(WORLD_SIZE)]))
    assert_none_confuses(LAB, criterion, HOSTILE, WORLD_SIZE)


def test_a_mean_that_nearly_cancels_is_right():
    """What float32 rounds is as large as the numbers that are added, not as their sum."""
    criterion = LAB["powersgd_mean"]
    inputs = criterion.draw(draw_for(b"test", NAME, criterion.name, "one", WORLD_SIZE))
    scalars = ("a1", "b1")
    for name in scalars:
        kind = inputs[0][name].dtype.type
        for rank, value in enumerate((0.7, 0.4, -1.1)):
            inputs[rank][name] = np.array(kind(value) + kind(1e-7 if kind is np.float32 else 0))

    def answers(error: float) -> list[dict[str, object]]:
        counts = {f"{letter} count": len(shapes) for letter, (shapes, _) in MEANS.items()}
        means: dict[str, Any] = {"none": 0, "calls": 1, "calls for none": 0} | counts
        for name in (key for key in inputs[0] if isinstance(inputs[0][key], np.ndarray)):
            everyone = [values[name] for values in inputs]
            total = np.sum(everyone, axis=0, dtype=everyone[0].dtype)
            means[name] = np.asarray(total / total.dtype.type(WORLD_SIZE))
        for name in scalars:
            means[name] = np.asarray(means[name] + means[name].dtype.type(error))
        before = [{f"before/{k}": v for k, v in values.items()} for values in inputs]
        return [means | each for each in before]

    assert criterion.findings(Case(WORLD_SIZE, inputs, answers(0.0))) == []
    assert criterion.findings(Case(WORLD_SIZE, inputs, answers(5e-3)))


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_draws_are_fresh_and_serve_every_world_size(criterion, world_size):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, world_size))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == world_size
    assert repr(first) != repr(again)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (np.eye(3, 2), None),
        (-np.eye(3, 2)[:, ::-1], None),
        (np.diag([1.0, 0.0, 0.0])[:, :2], "not in the span"),
        (np.array([[1, 1], [0, 0], [0, 0.0]]), "not orthogonal"),
        (2 * np.eye(3, 2), "length 2"),
        (np.eye(3, 3), "expected shape"),
        (np.full((3, 2), np.nan), "not finite"),
    ],
)
def test_any_orthonormal_basis_will_do(columns, problem):
    matrix = np.array([[3, 1], [4, -1], [0, 0.0]])
    found = columns_problem(columns, matrix, 1e-6)
    assert (found is None) if problem is None else problem in found
