"""What of a notebook its author wrote, as plain Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from autograder.course import Course
from autograder.intake import read_submission


def read_class(
    course: Course, lab: str, submissions: Sequence[tuple[str, Path]]
) -> dict[str, NotebookNode]:
    """Student -> what intake makes of the file, for those whose file is a notebook."""
    master = course.master(lab)
    read = {name: read_submission(path, master).notebook for name, path in submissions}
    return {name: notebook for name, notebook in read.items() if notebook is not None}


def is_given(cell: NotebookNode) -> bool:
    """Whether a cell is the master's: locked, or graded without being an answer."""
    nbgrader = cell.metadata.get("nbgrader", {})
    return bool(nbgrader.get("grade") or nbgrader.get("locked")) and not nbgrader.get("solution")


def name_of(cell: NotebookNode) -> str:
    """nbgrader's id of a cell; empty for a cell that the author added."""
    return str(cell.metadata.get("nbgrader", {}).get("grade_id") or "")


def code_of(source: str) -> str:
    """Plain Python: a script that a cell writes is code too, and other magics become calls."""
    if source.lstrip().startswith("%%"):
        source = source.lstrip().partition("\n")[2]
        if source.lstrip().startswith("%%"):  # %%rank 0 above %%writefile
            return code_of(source)
    source = re.sub(r"^\s*### (BEGIN|END) SOLUTION\s*$", "", source, flags=re.MULTILINE)
    try:
        return TransformerManager().transform_cell(source)
    except Exception:  # source of a stranger
        return source
