"""What holds for every lab, with what to edit where it does not."""

from __future__ import annotations

import inspect
from functools import partial

import pytest

from autograder.criteria import get_lab, lab_names
from autograder.criteria.later import Later
from autograder.referee.referee import draw_for


@pytest.mark.parametrize("name", lab_names())
def test_points_add_up(name):
    lab = get_lab(name)
    points = {c.name: c.points for c in lab.criteria if not c.extra}
    where = f"change `points` in autograder/criteria/{name}/table.py, where they are"
    assert lab.max_score == sum(points.values()) == 100, f"{where} {points}"
    assert max(points.values()) <= 8, f"{where}: one fault costs at most 8 points: {points}"


@pytest.mark.parametrize("name", lab_names())
def test_every_function_of_a_table_is_there(name):
    """A table imports them when they are called: a wrong name would be an error in a grade."""
    for criterion in get_lab(name).criteria:
        for function in (criterion.draw, criterion.observe, criterion.judge, criterion.plan):
            while isinstance(function, partial):
                function = function.func
            function = inspect.unwrap(function) if function else None
            if isinstance(function, Later):
                assert callable(function.find()), f"{criterion.name}: {function.path}"


@pytest.mark.parametrize("name", lab_names())
def test_grading_is_not_what_was_practised(name):
    lab = get_lab(name)
    assert len(lab.criteria) >= 10
    assert lab.practice_world_size != lab.grading_world_size, (
        f"autograder/criteria/{name}/table.py: a solution for {lab.practice_world_size} ranks "
        "would pass"
    )


@pytest.mark.parametrize(
    "attempts",
    [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)],
    ids=["often", "others"],
)
@pytest.mark.parametrize("name", lab_names())
def test_whatever_is_drawn_can_be_built(name, attempts):
    """A draw that fails by chance is INFRA for one student in many."""
    lab = get_lab(name)
    for criterion in lab.criteria:
        for attempt in attempts:
            draw = draw_for(b"key", name, criterion.name, str(attempt), lab.grading_world_size)
            if criterion.plan:
                criterion.plan(draw)
            assert len(criterion.draw(draw)) == lab.grading_world_size
