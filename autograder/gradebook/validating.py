"""`nbgrader validate`, and JupyterLab's Validate button: the verdict of the checks, nothing else.

nbgrader fails a check's cell that wrote a line to stderr, whatever the check says. torch and
students write warnings there, and grading does not mind them. So stderr is shown as the cell's
normal output, except the line that a check was not started.

nbgrader says which checks fail, but no points. JupyterLab's window can show points in one place
only, above the output of the first check that fails.
"""

from __future__ import annotations

import re
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.preprocessors import Execute
from nbgrader.utils import determine_grade, is_grade, is_solution
from nbgrader.validator import Validator

from autograder.inside.probe import NOT_STARTED

_NOT_STARTED = re.compile(rf"^{NOT_STARTED}, ", re.MULTILINE)


def forgive_warnings() -> None:
    """Makes Execute show stderr as normal output; nbgrader's Validator has no hook for this."""
    plain: Any = Execute.on_cell_executed
    if getattr(plain, "forgives_warnings", False):
        return

    def on_cell_executed(self: Any, **about: Any) -> None:
        plain(self, **about)
        for output in about["cell"].get("outputs", ()):
            is_stderr = output.output_type == "stream" and output.name == "stderr"
            if is_stderr and not _NOT_STARTED.search(output.text):
                output.name = "stdout"

    on_cell_executed.forgives_warnings = True  # type: ignore[attr-defined]
    Execute.on_cell_executed = on_cell_executed


def tell_points() -> None:
    """Makes nbgrader's Validator show the points; it has no hook for this."""
    plain: Any = Validator._get_failed_cells
    if getattr(plain, "tells_points", False):
        return

    def get_failed_cells(self: Validator, nb: NotebookNode) -> list[NotebookNode]:
        failed = plain(self, nb)
        missed = [cell for cell in failed if _is_check(cell)]
        if missed:
            text = f"{_points_so_far(nb, self.log)}\n"
            missed[0].outputs.insert(0, new_output("stream", name="stderr", text=text))
        return failed

    get_failed_cells.tells_points = True  # type: ignore[attr-defined]
    Validator._get_failed_cells = get_failed_cells


def _points_so_far(notebook: NotebookNode, log: Any) -> str:
    """The points of all checks of a notebook that has run; a person gives those of answers."""
    checks = [cell for cell in notebook.cells if _is_check(cell)]
    found = [(got or 0, most) for got, most in (determine_grade(cell, log) for cell in checks)]
    points, most = (sum(numbers) for numbers in zip(*found, strict=True))
    missed = sum(got < most for got, most in found)
    return f"So far {points:g} of {most:g} points; checks that fail: {missed} of {len(found)}."


def _is_check(cell: NotebookNode) -> bool:
    return is_grade(cell) and not is_solution(cell)
