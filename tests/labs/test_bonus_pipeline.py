"""Bonus "A pipeline of your own": the solution as a script, judges that no answer can confuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from lab_helper import assert_none_confuses, make_case, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.bonus_pipeline import plan
from autograder.proof.verify import choose_covering
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import draw_for

NAME = "bonus_pipeline"
LAB = get_lab(NAME)
WORLD_SIZE = 4
HOSTILE = (
    None,
    "text",
    [],
    ["text"],
    [[0, 0]] * 8,
    [[[0, 1]]],
    [["forward", 0], ["backward", 0]],
    {},
    True,
    -1,
    float("nan"),
    10**400,
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
    assert len(choose_covering(LAB, load_zoo(NAME))) <= 10


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_no_answer_passes_and_none_confuses_the_judge(criterion):
    empty = make_case(LAB, criterion, [{} for _ in range(WORLD_SIZE)])
    assert criterion.findings(empty)
    assert_none_confuses(LAB, criterion, HOSTILE, WORLD_SIZE)


@pytest.mark.parametrize("name", ["pipe_messages", "pipe_time", "pipe_limit"])
def test_who_says_done_and_has_done_nothing_does_not_pass(name):
    assert LAB[name].findings(
        make_case(LAB, LAB[name], [{"done": True} for _ in range(WORLD_SIZE)])
    )


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_draws_are_fresh_and_serve_every_world_size(criterion, world_size):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, world_size))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == world_size
    assert repr(first) != repr(again)


def test_the_cheapest_cut_is_that_of_all_cuts():
    rng = np.random.default_rng(0)
    for _ in range(40):
        costs = [int(c) for c in rng.integers(1, 20, int(rng.integers(4, 9)))]
        stages = int(rng.integers(1, 5))
        ways = (
            max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))
            for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
        )
        assert plan.least_cost(costs, stages) == min(ways)


def test_1f1b_is_the_library_s():
    from minidist.parallel.pipeline import gpipe, one_f_one_b

    names = {"F": "forward", "B": "backward"}
    for stages, micro_batches in itertools.product(range(1, 6), range(1, 8)):
        for rank in range(stages):
            theirs, theirs_gpipe = (
                [(names[a.kind], a.micro_batch) for a in build(stages, micro_batches).actions[rank]]
                for build in (one_f_one_b, gpipe)
            )
            ours = plan.one_f_one_b_of(rank, stages, micro_batches)
            assert ours == theirs
            assert plan.gpipe_of(micro_batches) == theirs_gpipe
            assert plan.most_kept(ours) == min(stages - rank, micro_batches)
