"""Bonus "Ring all-reduce": the solution as a script, and judges that no answer can confuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab_helper import assert_none_confuses, make_case, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.bonus_ring_all_reduce import ours, plan
from autograder.criteria.common.tensor_memory import TensorMemory
from autograder.proof.verify import choose_covering
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import draw_for

NAME = "bonus_ring_all_reduce"
LAB = get_lab(NAME)
WORLD_SIZE = 4
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
    np.zeros(8, dtype=np.float32),
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


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_draws_are_fresh_and_serve_every_world_size(criterion, world_size):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, world_size))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == world_size
    # A plan has nothing that could be drawn: it is asked for, for several world sizes, whole.
    assert (repr(first) != repr(again)) != criterion.name.startswith("ring_plan_")


def _judged(name, ring_steps):
    answers = [
        {f"{n}/{r}": ring_steps(r, n) for n in plan.ALSO_ONE for r in range(real, n, 4)}
        for real in range(WORLD_SIZE)
    ]
    answers = [{k: [list(pair) for pair in steps] for k, steps in a.items()} for a in answers]
    return LAB[name].findings(make_case(LAB, LAB[name], answers))


@pytest.mark.parametrize(
    ("ring_steps", "lost"),
    [
        (ours.ring_steps, []),
        (lambda r, n: [((r + s) % n, (r + s - 1) % n) for s in range(2 * (n - 1))], ["reduce"]),
        (lambda r, n: [((r - s) % n, (r - s - 1) % n) for s in range(n - 1)] * 2, ["gather"]),
        (lambda r, n: [((r - s) % n, (r - s - 1) % n) for s in range(2 * n - 3)], ["gather"]),
        (lambda r, n: [(0, 0)] * (2 * (n - 1)), ["reduce"]),
    ],
    ids=["ours", "wrong way", "second half anew", "one step short", "one chunk"],
)
def test_a_fault_of_the_plan_costs_one_criterion(ring_steps, lost):
    found = [half for half in ("reduce", "gather") if _judged(f"ring_plan_{half}", ring_steps)]
    assert found == lost


@pytest.mark.parametrize("numel", [0, 1, 7, 12, 1001])
def test_our_chunks_are_those_that_are_asked_for(numel):
    assert (
        plan._chunks_problem([list(pair) for pair in ours.chunk_bounds(numel, 4)], numel, 4) is None
    )


def test_new_tensors_are_counted_while_they_live():
    old = torch.zeros(100)
    with TensorMemory() as memory:
        old.view(10, 10).add_(1)
        assert memory.peak_bytes == 0
        a = old + 1
        del a
        b = old * 2
        b.view(-1).add_(1)
    assert memory.peak_bytes == 400
