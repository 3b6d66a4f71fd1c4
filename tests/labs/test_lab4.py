"""Lab 4: the reference solution as a script, and what the criteria's own arithmetic rests on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab_helper import SameUnderEveryKey, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.common import oracle
from autograder.criteria.criterion import Case, Draw
from autograder.criteria.lab4_amp import autocast, expected_steps, growth, loop, measure, overflow
from autograder.referee.referee import draw_for

LAB = "lab4_amp"


# The others' judges look at the emulated cluster's trace first.
WITHOUT_TRACE = [c for c in get_lab(LAB).criteria if c.world != "emulated"]


def _draw(criterion: str, world_size: int, attempt: str = "0") -> Draw:
    return draw_for(b"test", LAB, criterion, attempt, world_size)


@pytest.mark.parametrize("num_ranks", sizes())
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
        for one in growth.draw_grows(_draw("amp_scaler_grows", 1, str(attempt)))[0]["runs"]:
            settings, steps = one["settings"], one["steps"]
            scaler = torch.amp.GradScaler("cpu", **settings)
            parameter = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([parameter], lr=0.0)
            scales = []
            for is_bad in steps:
                scaler.scale(torch.zeros(()))
                parameter.grad = torch.full((1,), torch.inf if is_bad else 1.0)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            assert scales == pytest.approx(growth.scales_of(settings, steps), rel=1e-5)


def test_every_draw_tells_a_scale_that_changes_by_a_wrong_rule():
    for attempt in range(100):
        runs = growth.draw_grows(_draw("amp_scaler_grows", 1, str(attempt)))[0]["runs"]
        for one in runs:
            defaults = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
            assert not any(one["settings"][name] == value for name, value in defaults.items())
            right = growth.scales_of(one["settings"], one["steps"])
            for rule in growth.GROWTH_MISTAKES:
                assert growth.scales_of(one["settings"], one["steps"], rule) != right, rule
        scales = [growth.scales_of(one["settings"], one["steps"]) for one in runs]
        assert min(map(min, scales)) < 1
        assert max(map(max, scales)) > 2**16


def test_every_draw_lets_each_kind_of_rank_overflow_alone_and_all_but_it():
    for attempt in range(100):
        inputs = overflow.draw_agrees(_draw("amp_scaler_agrees", 3, str(attempt)))
        for called in (False, True):
            sets = {
                tuple(r for r in range(3) if np.isinf(inputs[r][f"{step}/0"]).any())
                for step, unscale in enumerate(inputs[0]["unscale"])
                if unscale is called
            }
            assert len(sets) == 8  # every subset of three ranks


def test_every_mistake_with_autocast_changes_a_weight():
    for attempt in range(20):
        inputs = autocast.draw(_draw("amp_loop_autocast", 3, str(attempt)))[0]
        for name in autocast.NAMES:
            right = autocast._gradients(inputs, name, autocast.right_places(name))
            for places in autocast.places_of(name):
                assert autocast._differ(right, autocast._gradients(inputs, name, places))


def test_the_gradient_that_is_written_out_is_torchs():
    rng = np.random.default_rng(0)
    arrays = oracle.draw_parameters(rng, loop.SIZES)
    batch = oracle.draw_batch(rng, 3, loop.SIZES)
    at = np.concatenate([p.astype(np.float64).ravel() for p in oracle.parameters_of(arrays)])
    loss, gradient = expected_steps.loss_and_gradient(at, batch["x"], batch["y"])
    expected = [g.ravel() for g in oracle.gradients(arrays, batch["x"], batch["y"])]
    assert gradient == pytest.approx(np.concatenate(expected))
    output = oracle.mlp(arrays, torch.float64)(torch.from_numpy(batch["x"]).double())
    assert loss == pytest.approx(float(oracle.mse(output, torch.from_numpy(batch["y"]))))


def test_bytes_of_autocast_are_less_only_for_large_batches():
    case = measure.PLAIN | {"sizes": [64] * 4, "optimizer": "SGD"}

    def saved(precision, batch):
        net = case | {"precision": precision, "batch": batch}
        return measure.expected_bytes(net)["saved"]

    assert saved("autocast", 8) > saved("float32", 8)
    assert saved("autocast", 1024) < 0.7 * saved("float32", 1024)
