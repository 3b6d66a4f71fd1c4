"""Whether submissions, nbgrader and kernels would import the grader that runs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import autograder
from autograder.course.course import CourseError


def foreign_code(path: Sequence[str] | None = None) -> str:
    """Why submissions would not run with this grader; empty if they would.

    `python -m autograder` in a clone runs the clone's code. If the clone has no environment of its
    own, the processes that this one starts import a different grader from the environment in use.

    Args:
        path: default: `sys.path`.
    """
    root = Path(autograder.__file__).resolve().parents[1]
    entries = list((sys.path if path is None else path)[1:])  # the first is this process's own
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry in entries:
            entries.remove(entry)
    if root in (Path(entry).resolve() for entry in entries):
        return ""
    return f"the grader in {root} runs with the packages of {sys.prefix}, which has a different one"


def check_installation() -> None:
    """Raises CourseError if submissions would run with a different grader."""
    if why := foreign_code():
        raise CourseError(
            f"{why}: use {sys.prefix}/bin/autograder, which grades in any course's folder, or run "
            "`make install` here"
        )
