"""The formatter's style is ours, but for tables that are read as a whole; functions are short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "# fmt: " + "skip"


def test_the_formatter_is_switched_off_only_for_the_labs_tables():
    folders = ("autograder", "benchmarks", "book", "lib", "notebooks", "solutions", "tests")
    marked = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for _ in range(path.read_text("utf-8").count(MARK))
    ]
    tables = [ROOT / "autograder" / "criteria"] * len(marked)
    assert [path.parents[1] for path in marked] == tables
    assert len(marked) <= 20


MOST_LINES = 60


@pytest.mark.parametrize("folder", ["autograder", "lib"])
def test_no_function_is_long(folder):
    """Lines that a function's statements and parameters are on, without its docstring."""
    long = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                body = function.body[ast.get_docstring(function) is not None :]
                parts = [node for part in (function.args, *body) for node in ast.walk(part)]
                ends = [(node.lineno, node.end_lineno) for node in parts if hasattr(node, "lineno")]
                lines = {line for first, last in ends for line in range(first, last + 1)}
                if len(lines) > MOST_LINES:
                    long.append((len(lines), path.relative_to(ROOT).as_posix(), function.name))
    assert long == []
