"""Lab 4: the reference solution as a script, and what the criteria's own arithmetic rests on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab_helper import SameUnderEveryKey, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.criterion import Case, Draw
from autograder.criteria.lab4_amp import autocast, growth, measure
from autograder.referee.referee import draw_for

pytestmark = pytest.mark.timeout(300)
LAB = "lab4_amp"


# The others' judges look at the emulated cluster's trace first.
WITHOUT_TRACE = [c for c in get_lab(LAB).criteria if c.world != "emulated"]


def _draw(criterion: str, world_size: int, attempt: str = "0") -> Draw:
    return draw_for(b"test", LAB, criterion, attempt, world_size)


@pytest.mark.parametrize("num_ranks", sizes(3))
@pytest.mark.slow
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    run_solution(LAB, num_ranks, tmp_path)


@pytest.mark.parametrize("criterion", WITHOUT_TRACE, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_judge_survives_rubbish(criterion, world_size):
    draw = _draw(criterion.name, world_size)
    inputs = criterion.draw(draw)
    everything = ("text", [None], np.full((2, 2), np.nan), np.zeros((2, 2), bool), 1e300)
    for value in (None, *everything):
        answers = [SameUnderEveryKey(value) for _ in range(world_size)]
        assert criterion.findings(Case(world_size, inputs, answers))


def test_the_scale_follows_torch():
    for attempt in range(5):
        values = growth.draw_grows(_draw("amp_scaler_grows", 1, str(attempt)))[0]
        settings, steps = values["settings"], values["steps"]
        scaler = torch.amp.GradScaler("cpu", **settings)
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        scales = []
        for overflow in steps:
            scaler.scale(torch.zeros(()))
            parameter.grad = torch.full((1,), torch.inf if overflow else 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == pytest.approx(growth.scales_of(settings, steps), rel=1e-5)
        for rule in growth.GROWTH_MISTAKES:
            assert growth.scales_of(settings, steps, rule) != scales


def test_every_mistake_with_autocast_changes_a_weight():
    for attempt in range(5):
        inputs = autocast.draw(_draw("amp_loop_autocast", 3, str(attempt)))
        for name in autocast.NAMES:
            right = autocast._gradients(inputs, name, (True, True, False))
            for places in autocast.MISTAKES:
                assert autocast._differ(right, autocast._gradients(inputs, name, places))


def test_bytes_of_autocast_are_less_only_for_large_batches():
    case = {"sizes": [64] * 4, "frozen": False, "optimizer": "SGD"}

    def saved(precision, batch):
        net = case | {"precision": precision, "batch": batch}
        return measure.expected_bytes(net)["saved"][0]

    assert saved("autocast", 8) > saved("float32", 8)
    assert saved("autocast", 1024) < 0.7 * saved("float32", 1024)
