"""Lab 1 at a student's desk: the reference solution as a script and as a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import nbformat
import numpy as np
import pytest
from course import LAB, ROOT
from lab_helper import run_solution, sizes
from leftovers import assert_nothing_left, find_leftovers

from autograder.criteria import get_lab
from autograder.criteria.criterion import Case
from autograder.criteria.lab1_ddp.training import _trained
from autograder.referee.referee import draw_for

SOLUTION = ROOT / "solutions" / LAB / LAB


@pytest.mark.parametrize("num_ranks", sizes(3))
@pytest.mark.slow
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    run_solution(LAB, num_ranks, tmp_path)


@pytest.mark.slow
def test_papermill_runs_the_solution_on_two_ranks(tmp_path):
    before = find_leftovers()
    out = tmp_path / "out.ipynb"
    papermill = [sys.executable, "-m", "papermill", "-k", "torchrun-2", "--no-progress-bar"]
    done = subprocess.run(
        [*papermill, f"{SOLUTION}.ipynb", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-20000:]
    notebook = nbformat.read(out, as_version=4)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    text = "".join(o.get("text", "") for o in outputs)
    for criterion in get_lab(LAB).criteria:
        assert f"✓ {criterion.name}  {criterion.points:g}/{criterion.points:g}" in text
    assert "(100 of 100 points so far)" in text
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) >= 5
    assert_nothing_left(before)


def test_a_trained_parameter_that_comes_out_near_zero_is_right():
    """What float32 rounds is as large as the parameter was, not as what is left of it."""
    criterion, world_size = get_lab(LAB)["train_steps"], 3
    inputs = criterion.draw(draw_for(b"test", LAB, criterion.name, "one", world_size))

    def trained(start):
        for values in inputs:
            values["p3"] = np.array([start], dtype=np.float32)
        return _trained(Case(world_size, inputs, []))

    low, high = -20.0, 20.0
    assert trained(low)[3][0] < 0 < trained(high)[3][0]
    while (middle := (low + high) / 2) not in (low, high) and high - low > 1e-6:
        low, high = (low, middle) if trained(middle)[3][0] > 0 else (middle, high)
    expected = trained(high)
    assert abs(expected[3][0]) < 1e-5 < 1e-2 < abs(high)

    def judged(error):
        values = [*expected[:3], expected[3] + error * high]
        answer: dict[str, Any] = {"loss called": True}
        answer |= {f"p{i}": value.astype(np.float32) for i, value in enumerate(values)}
        return criterion.findings(Case(world_size, inputs, [answer] * world_size))

    assert judged(1e-6) == []
    assert judged(1e-3) != []
