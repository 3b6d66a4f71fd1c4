"""The two forms of a submission in tests/zoo/LAB: whole cells, and changes of single lines.

NAME.py is a percent script; a cell takes the place of the solution cell of that name:

    '''Sums the gradients instead of averaging them.

    loses: ddp_gradients
    '''

    # %% replaces="task7_ddp"
    class DDP(nn.Module): ...

NAME.diff has what is said of it, then a diff in which names of cells stand for line numbers:

    Never moves the targets to the device.

    loses: train_steps

    @@ task4_train
             for x, y in loader:
    -            x, y = x.to(device), y.to(device)
    +            x = x.to(device)

Lines that begin with a space or a minus must stand in the cell, one below the other, at one place
only. A cell may have several such parts, from its top to its bottom.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from autograder.authoring.percent import BuildError, read_cells

SUFFIXES = (".py", ".diff")
Change = Callable[[str], str]


def read_zoo_file(path: Path) -> tuple[str, dict[str, Change]]:
    """The file's text about the submission; and per solution cell, a function old -> new source.

    Raises:
        BuildError: the file has neither form; a change raises it if the cell does not fit.
    """
    text = path.read_text("utf-8")
    return _read_diff(path, text) if path.suffix == ".diff" else _read_script(path, text)


def without_markers(source: str) -> str:
    """The solution without nbgrader's BEGIN/END SOLUTION lines, as a student would write it."""
    lines = source.split("\n")
    return "\n".join(
        line for line in lines if not re.match(r"\s*### (BEGIN|END) SOLUTION\s*$", line)
    )


def _read_script(path: Path, text: str) -> tuple[str, dict[str, Change]]:
    try:
        said = ast.get_docstring(ast.parse(text)) or ""
    except SyntaxError as error:
        raise BuildError(f"{path}: not Python (is a magic not commented?): {error}") from error
    changes: dict[str, Change] = {}
    cells, _ = read_cells(text, where=str(path))
    for number, cell in enumerate(cells):
        name = cell.options.get("replaces")
        is_docstring = number == 0 and not cell.options
        if name is None and not is_docstring and cell.cell_type == "code" and cell.source.strip():
            raise BuildError(f'{path}: cell {number + 1} has no replaces="name of a solution cell"')
        if name in changes:
            raise BuildError(f"{path}: replaces {name!r} twice")
        if name is not None:
            changes[name] = partial(lambda new, _: new, without_markers(cell.source))
    return said, changes


def _read_diff(path: Path, text: str) -> tuple[str, dict[str, Change]]:
    said, *parts = re.split(r"^@@ ", text, flags=re.MULTILINE)
    by_cell: dict[str, list[list[str]]] = {}
    for part in parts:
        name, *lines = part.rstrip().split("\n")
        if wrong := [line for line in lines if line[:1] not in ("", " ", "-", "+")]:
            raise BuildError(f"{path}: expected ' ', '-' or '+' before {wrong[0]!r}")
        if not any(line[:1] in ("-", "+") for line in lines):
            raise BuildError(f"{path}: a part of {name} changes nothing")
        by_cell.setdefault(name, []).append(lines)
    return said.strip(), {name: partial(_edit, path, all_) for name, all_ in by_cell.items()}


def _edit(path: Path, parts: list[list[str]], source: str) -> str:
    lines, edited, end = source.split("\n"), [], 0
    for part in parts:
        old = [line[1:] for line in part if line[:1] != "+"]
        size = len(old)
        places = [k for k in range(len(lines) - size + 1) if lines[k : k + size] == old]
        if len(places) != 1 or places[0] < end:
            found = "one above the part before" if len(places) == 1 else str(len(places))
            what = "\n".join(old)
            raise BuildError(f"{path}: expected one place with these lines, found {found}:\n{what}")
        edited += lines[end : places[0]] + [line[1:] for line in part if line[:1] != "-"]
        end = places[0] + size
    return "\n".join(edited + lines[end:])
