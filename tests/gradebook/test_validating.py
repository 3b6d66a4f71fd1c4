"""What `nbgrader validate` and JupyterLab's Validate button say of a notebook that has run."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbgrader.validator import Validator

from autograder.gradebook.validating import tell_points


def check(name: str, points: float, *outputs):
    about = {"grade": True, "solution": False, "locked": True, "points": points}
    about |= {"grade_id": name, "schema_version": 3, "cell_type": "code"}
    return new_code_cell(f'check("{name}")', outputs=list(outputs), metadata={"nbgrader": about})


def answer(points: float):
    about = {"grade": True, "solution": True, "locked": False, "points": points}
    about |= {"grade_id": "reflect", "schema_version": 3, "cell_type": "markdown"}
    return new_markdown_cell("Because.", metadata={"nbgrader": about})


@pytest.fixture
def validate(tmp_path, monkeypatch):
    """What it says of cells that have run."""
    monkeypatch.setattr(Validator, "_get_failed_cells", Validator._get_failed_cells)
    tell_points()
    tell_points()  # as two tools of one process do, which both read the settings

    def run(*cells):
        nbformat.write(new_notebook(cells=list(cells)), tmp_path / "lab.ipynb")
        return Validator(preprocessors=[]).validate(str(tmp_path / "lab.ipynb"))

    return run


def test_validate_tells_the_points_so_far_above_the_first_check_that_fails(validate):
    wrong = new_output("error", ename="CheckFailed", evalue="", traceback=["✗ mean  0/20"])
    unwritten = new_output("stream", name="stderr", text="○ sum  0/35: not started\n")
    found = validate(
        check("setup", 45, new_output("stream", text="✓ setup  45/45\n")),
        check("mean", 20, wrong),
        check("sum", 35, unwritten),
        answer(1.5),
    )
    assert [cell["source"] for cell in found["failed"]] == ['check("mean")', 'check("sum")']
    first, second = (cell["error"].splitlines() for cell in found["failed"])
    assert first[0] == "So far 45 of 100 points; checks that fail: 2 of 3."
    assert first[-1] == "✗ mean  0/20"
    assert second == ["○ sum  0/35: not started"]
    assert found["failed"][0]["raw_error"].count("So far") == 1


def test_validate_says_nothing_of_points_if_every_check_passes(validate):
    assert validate(check("setup", 100), answer(1.5)) == {}
