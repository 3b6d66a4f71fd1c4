"""Which code cells open folded: those that mostly draw, check claims or make sliders.

Students learn from such a cell's output, not from its code. A cell stays open if a statement that
draws nothing uses torch or starts ranks, or if its source has the tag "open".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from autograder.authoring.cells import parse_cell, split_magic

OPEN = "open"
FOLDED_ON_SITE = "hide-input"  # MyST-NB's name for it
_TECHNIQUE = {"torch", "dist", "nn", "F", "launch", "run", "run_traced", "mc"}
MIN_LINES = 4  # shorter cells stay open
_WORKSHOP = re.compile(
    r"(ax|axes|figure|new_figure|plt|display|claim|explore|show|(draw|plot)_\w+)$"
)


def is_workshop(source: str) -> bool:
    """Whether most lines of a cell, imports aside, belong to statements that draw or check.

    >>> is_workshop("figure, ax = new_figure()\\nax.plot(x)\\nax.set(title='t')\\nfigure")
    True
    >>> is_workshop("def step(x):\\n    loss = f(x)\\n    loss.backward()\\n    return loss")
    False
    """
    _, body = split_magic(source)
    if body.startswith("%%"):
        return False
    try:
        tree = parse_cell(body)
    except (SyntaxError, ValueError):  # ValueError: half a surrogate pair
        return False
    total = shown = 0
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        names = set(_names(statement))
        draws = any(map(_WORKSHOP.match, names))
        if not draws and names & _TECHNIQUE:
            return False
        lines = (statement.end_lineno or statement.lineno) - statement.lineno + 1
        total += lines
        shown += lines * draws
    return total >= MIN_LINES and 2 * shown > total


def _names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement uses, and that of the function that it defines."""
    if isinstance(statement, ast.FunctionDef):
        yield statement.name
    for part in ast.walk(statement):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.arg):
            yield part.arg
