"""The part of a notebook that its author wrote, as plain Python."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode

from autograder.submission.class_run import ClassRun

_SOLUTION = re.compile(r"^[ \t]*### (?:BEGIN|END) SOLUTION[ \t]*$", re.MULTILINE)
# `%magic`, `!command`, `?help`, `help?` on a separate line; also `x = %magic`, `x = !command`.
# Possessive quantifiers avoid backtracking, because a line may be long.
_MAGIC = re.compile(
    r"^([ \t]*+(?:[\w.,][\w., \t]*+=[ \t]*+(?=[%!]))?)([%!?].*|[\w.]++\?{1,2}[ \t]*$)",
    re.MULTILINE,
)


def read_class(
    class_run: ClassRun, submissions: Sequence[tuple[str, Path]]
) -> dict[str, NotebookNode]:
    """Student -> the notebook that intake reads, without students whose file is invalid."""
    read = {name: class_run.read(path).notebook for name, path in submissions}
    return {name: notebook for name, notebook in read.items() if notebook is not None}


def is_given(cell: NotebookNode) -> bool:
    """Whether the master provides the cell: it is locked or graded, and not a solution cell."""
    nbgrader = cell.metadata.get("nbgrader", {})
    return bool(nbgrader.get("grade") or nbgrader.get("locked")) and not nbgrader.get("solution")


def name_of(cell: NotebookNode) -> str:
    """nbgrader's grade_id of a cell; empty for a cell that the author added."""
    return str(cell.metadata.get("nbgrader", {}).get("grade_id") or "")


@functools.lru_cache(maxsize=128)  # many cells of a class are equal, and each is parsed often
def _parsed(source: str) -> ast.Module | Exception:
    try:
        return ast.parse(source)
    except Exception as error:  # untrusted source: too deep, with odd characters, or not Python
        return error.with_traceback(None)


def parse(source: str) -> ast.Module:
    """The tree of a cell's code, cached, so do not change it; empty if it is not Python."""
    tree = _parsed(source)
    return tree if isinstance(tree, ast.Module) else ast.Module([], [])


def code_of(source: str) -> str:
    """Plain Python with the same number of lines.

    Leading cell magics become empty lines, so the script of a %%writefile cell counts as code. If
    the rest is not Python, other magics become calls.

    >>> code_of("%%rank 0\\n%%writefile a.py\\nx = 1\\n!ls 'a b'\\ny = %pwd\\nx?")
    '\\n\\nx = 1\\nmagic("!ls \\'a b\\'")\\ny = magic(\\'%pwd\\')\\nmagic(\\'x?\\')'
    """
    lines = source.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("%%"):
            break
        lines[number] = ""  # several may come first, such as %%rank 0 above %%writefile
    source = _SOLUTION.sub("", "\n".join(lines))
    if isinstance(_parsed(source), SyntaxError):  # perhaps because of magics
        return _MAGIC.sub(lambda m: f"{m[1]}magic({m[2]!r})", source)
    return source
