"""`nbgrader validate`, and JupyterLab's Validate button: the verdict of the checks, nothing else.

nbgrader fails a check's cell that wrote a line to stderr, whatever the check says. torch and
students write warnings there, and grading does not mind them. So what a cell wrote to stderr is
shown as its normal output, except that a check was not started.
"""

from __future__ import annotations

from typing import Any

from nbgrader.preprocessors import Execute

from autograder.inside.probe import NOT_STARTED


def forgive_warnings() -> None:
    """Makes nbgrader's Execute do so; its Validator takes no other preprocessors, nor a hook."""
    plain: Any = Execute.on_cell_executed
    if getattr(plain, "forgives_warnings", False):
        return

    def on_cell_executed(self: Any, **about: Any) -> None:
        plain(self, **about)
        for output in about["cell"].get("outputs", ()):
            is_stderr = output.output_type == "stream" and output.name == "stderr"
            if is_stderr and f": {NOT_STARTED}, " not in output.text:
                output.name = "stdout"

    on_cell_executed.forgives_warnings = True  # type: ignore[attr-defined]
    Execute.on_cell_executed = on_cell_executed
