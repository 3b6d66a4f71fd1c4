"""Bonus "Elastic training": the solution as a script, judges that no answer can confuse."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from course import ROOT
from lab_helper import assert_none_confuses, make_case, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.bonus_elastic import interrupted, training_job
from autograder.criteria.bonus_elastic import script as elastic_script
from autograder.criteria.criterion import Case
from autograder.proof.verify import choose_covering
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import draw_for

NAME = "bonus_elastic"
LAB = get_lab(NAME)
WORLD_SIZE = 3
HOSTILE = (
    None,
    "text",
    [],
    ["text"],
    [[0, 0]] * 8,
    [[[0, 1]]],
    [[[[0, 1]]]] * 3,
    [{"saves": "text", "taken": [], "asked": "text"}] * 2,
    [["save", 0, [1]]] * 4,
    {},
    True,
    -1,
    float("nan"),
    np.array(np.nan),
    np.zeros(0),
    np.array(["text"]),
    np.zeros((3, 3), dtype=np.complex64),
    np.full((7, 5), np.inf, dtype=np.float32),
    np.full(8, 1e300),
    np.zeros(8, dtype=np.float32),
)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    printed = run_solution(NAME, num_ranks, tmp_path)
    assert "the curves are the same: True" in printed
    step = 30 if num_ranks == 1 else 20  # all load the same one
    assert printed.count(f"all load ({step}, {{'value': {step}}})") == num_ranks


def test_few_submissions_lose_every_criterion():
    assert len(choose_covering(LAB, load_zoo(NAME))) <= 25


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_no_answer_passes_and_none_confuses_the_judge(criterion):
    assert criterion.findings(make_case(LAB, criterion, [{} for _ in range(WORLD_SIZE)]))
    assert_none_confuses(LAB, criterion, HOSTILE, WORLD_SIZE)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_draws_are_fresh_and_serve_every_world_size(criterion, world_size):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, world_size))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == world_size
    assert repr(first) != repr(again)


def test_a_rank_is_killed_between_two_checkpoints_of_its_run():
    for attempt in range(30):
        draw = draw_for(b"test", NAME, "elastic_rejoin", str(attempt), 3)
        given = interrupted.draw_rejoin(draw)[0]
        every = given["job"]["every"]
        assert sorted(given["ranks"]) == [1, 2, 3]
        for number, (step, rank) in enumerate(given["kills"]):
            assert (number + 1) * every < step < (number + 2) * every
            assert rank < given["ranks"][number]
        # Rank 0, which would write --out, is left once.
        assert any(rank for _, rank in given["kills"])
        # Shares are equal, so that unequal ones are the business of elastic_script alone.
        assert all(len(batch) % 6 == 0 for batch in given["batches"])


def test_the_undisturbed_script_has_batches_with_fewer_samples_than_ranks():
    for world_size in (2, 3, 4, 8):
        given = elastic_script.draw_script(draw_for(b"t", NAME, "elastic_script", "", world_size))
        batches = given[0]["batches"][: given[0]["job"]["steps"]]
        assert min(map(len, batches)) < world_size
        assert any(len(batch) % world_size for batch in batches if len(batch) > world_size)


def test_the_oracle_is_the_curve_that_passes():
    draw = draw_for(b"test", NAME, "elastic_rejoin", "", 3)
    inputs = interrupted.draw_rejoin(draw)
    parameters, losses = training_job.expected_training(inputs[0])
    every = inputs[0]["job"]["every"]
    killed = [n * [1] for n in inputs[0]["ranks"][:2]]
    answer = {"losses": losses, "began": [0, every, 2 * every], "ends": killed, "early": [[], []]}
    answer |= {f"p{i}": p for i, p in enumerate(parameters)}
    for run in ("whole", "done", "resumed"):
        answer |= {f"{run}/{k}": v for k, v in answer.items() if k == "losses" or k[0] == "p"}
    assert interrupted.judge_rejoin(Case(3, inputs, [answer, {}, {}])) == []
    one_bit = answer | {"resumed/losses": np.nextafter(losses, 2.0)}
    assert interrupted.judge_rejoin(Case(3, inputs, [one_bit, {}, {}]))
    off = answer | {"losses": losses * (1 + 1e-6)}
    assert interrupted.judge_rejoin(Case(3, inputs, [off, {}, {}]))
    anew = answer | {"began": [0, 0, 0]}
    assert interrupted.judge_rejoin(Case(3, inputs, [anew, {}, {}]))
    swallowed = answer | {"ends": [n * [0] for n in inputs[0]["ranks"][:2]]}
    (finding,) = interrupted.judge_rejoin(Case(3, inputs, [swallowed, {}, {}]))
    assert "ended with exit code 0" in finding.message
    written = answer | {"early": [[], ["0"]]}
    (finding,) = interrupted.judge_rejoin(Case(3, inputs, [written, {}, {}]))
    assert "wrote --out" in finding.message


def test_the_stand_in_has_what_the_script_imports():
    script = (ROOT / "solutions" / NAME / f"{NAME}.py").read_text("utf-8")
    (line,) = [x for x in script.splitlines() if x.startswith("# from elastic_parts import")]
    wanted = {name.strip() for name in line.partition(" import ")[2].split(",")}
    tree = ast.parse(training_job.STAND_IN.read_text("utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert wanted <= there
