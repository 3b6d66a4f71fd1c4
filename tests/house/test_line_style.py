"""The formatter's style is ours, but for tables that are read as a whole; functions are short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "# fmt: "


def test_the_formatter_is_switched_off_only_for_the_labs_tables():
    """CONTRIBUTING.md says why for all of `table.py`; elsewhere, the reason follows the mark."""
    folders = ("autograder", "benchmarks", "book", "lib", "notebooks", "solutions", "tests")
    marked = [
        (path, line.partition(MARK)[2])
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if MARK in line and path != Path(__file__)
    ]
    for path, said in marked:
        kind, _, reason = said.partition("  # ")
        assert (path.parents[1], kind) == (ROOT / "autograder" / "criteria", "skip"), path
        assert path.name == "table.py" or reason, path
    assert f"`{MARK}skip`" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert len(marked) <= 20


MOST_LINES = 60


@pytest.mark.parametrize("folder", ["autograder", "lib"])
def test_no_function_is_long(folder):
    """Lines that a function's statements and parameters are on, without its docstring."""
    long = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                if (function.end_lineno or 0) - function.lineno < MOST_LINES:
                    continue
                body = function.body[ast.get_docstring(function) is not None :]
                parts = [node for part in (function.args, *body) for node in ast.walk(part)]
                ends = [(node.lineno, node.end_lineno) for node in parts if hasattr(node, "lineno")]
                lines = {line for first, last in ends for line in range(first, last + 1)}
                if len(lines) > MOST_LINES:
                    long.append((len(lines), path.relative_to(ROOT).as_posix(), function.name))
    assert long == []
