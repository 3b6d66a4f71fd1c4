"""The attack corpus: submissions that want points, secrets or somebody else's grade.

tests/attacks/GROUP/NAME.py is a percent script, close to what the zoo has:

    '''Rebinds `check`, so that every check cell prints full marks.

    passes: nothing
    status: setup NOT_RUN
    '''

    # %% put="after imports"
    check = print

What the docstring says of the outcome:

- `passes:` `nothing`, `everything`, or names of criteria; `everything but a, b` works too.
- `status:` a criterion and its status, where it matters.
- `invalid:` words of the reason, for a file that intake must refuse.
- `same as:` `starter` or `reference`: intake must make the same notebook of it, so that it is
  graded like that one. It is run only when the whole corpus is.
- `base:` the submission that is changed, `starter` (the default: nothing earned) or `reference`.
- `ci: yes` for the part that is run on every change.

Cells are put `first`, `last`, `after NAME` or `before NAME`, or replace a solution cell
(`replaces="task1_setup"`). A cell with `put="hand_in"` is ours and trusted: it defines
`hand_in(notebook, folder)`, which gets the notebook as plain JSON and returns it, or bytes; or it
writes into the folder itself and returns None.

Student code that reaches what it must not prints LEAKED; the test looks for that word.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from autograder.authoring.percent import read_cells
from autograder.criteria import get_lab
from autograder.proof.zoo import load_zoo

ROOT = Path(__file__).resolve().parents[2]
LAB = "lab1_ddp"
CORPUS = ROOT / "tests" / "attacks"
CRITERIA = [criterion.name for criterion in get_lab(LAB).criteria]
# `key: value`; the value goes on below a comma at the end of a line.
_LINE = re.compile(r"^(passes|invalid|same as|base|ci): *((?:.*,\n)*.+)$", re.MULTILINE)


Plain = dict[str, Any]  # a notebook as plain JSON


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One submission of the corpus, and what must become of it.

    Attributes:
        path: the script whose cells change the base; None: the base as it is.
    """

    name: str
    group: str
    docstring: str
    passes: frozenset[str]
    statuses: dict[str, str] = field(default_factory=dict)
    invalid: str = ""
    same_as: str = ""
    in_ci: bool = False
    base: str = "starter"
    path: Path | None = None

    @property
    def title(self) -> str:
        """group/name, unique."""
        return f"{self.group}/{self.name}"

    @cached_property
    def _made(self) -> tuple[Plain, Callable[[Plain, Path], Any] | None]:
        notebook = copy.deepcopy(bases()[self.base])
        hand_in = _change(notebook, self.path) if self.path else None
        return json.loads(json.dumps(notebook)), hand_in

    @property
    def notebook(self) -> Plain:
        """What is handed in, before `hand_in` has it."""
        return self._made[0]

    def write(self, folder: Path) -> Path:
        """Hands it in below `folder`; the path that a grader is given."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{LAB}.ipynb"
        notebook, hand_in = self._made
        content: Any = copy.deepcopy(notebook)
        if hand_in is not None:
            content = hand_in(content, folder)
        if isinstance(content, dict):
            content = json.dumps(content, indent=1).encode()
        if content is not None:
            path.write_bytes(content)
        return path


@cache
def bases() -> dict[str, NotebookNode]:
    """The lab as handed out, and with the reference solution in its solution cells."""
    return {entry.name: entry.notebook for entry in load_zoo(LAB, "starter", "reference")}


@cache
def load_attacks() -> tuple[Attack, ...]:
    """The whole corpus, in the order of its files."""
    return tuple(_load(path) for path in sorted(CORPUS.glob("*/[!_]*.py")))


def _load(path: Path) -> Attack:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    lines = {key: " ".join(value.split()) for key, value in _LINE.findall(docstring)}
    base = lines.get("base", lines.get("same as", "starter"))
    statuses = dict(re.findall(r"^status: *(\w+) +([A-Z_]+)$", docstring, re.M))
    assert set(statuses) <= set(CRITERIA), f"{path}: no such criteria: {statuses}"
    return Attack(
        name=path.stem,
        group=path.parent.name,
        docstring=docstring,
        passes=_passes(lines.get("passes", ""), base, path, "invalid" in lines),
        statuses=statuses,
        invalid=lines.get("invalid", ""),
        same_as=lines.get("same as", ""),
        in_ci=lines.get("ci") == "yes",
        base=base,
        path=path,
    )


def _change(notebook: NotebookNode, path: Path) -> Callable[[Plain, Path], Any] | None:
    """Puts the cells of a script into the notebook; its `hand_in`, if it has one."""
    hand_in = None
    cells, _ = read_cells(path.read_text("utf-8"), where=str(path))
    added: dict[str, int] = {}  # where the next cell of the same place goes
    for number, cell in enumerate(cells[1:], 2):
        options = cell.options
        if set(options) == {"replaces"}:
            _find(notebook, options["replaces"], path)[1].source = cell.source
        elif options.get("put") == "hand_in":
            space: dict[str, Any] = {}
            exec(compile(cell.source, str(path), "exec"), space)
            hand_in = space["hand_in"]
        elif set(options) == {"put"}:
            _put(notebook, options["put"], cell.source, f"own-{number}", added, path)
        else:
            raise ValueError(f"{path}: cell {number}: expected put= or replaces=, got {options}")
    return hand_in


def _passes(words: str, base: str, path: Path, invalid: bool) -> frozenset[str]:
    if not words:
        if invalid:
            return frozenset()
        words = "everything" if base == "reference" else "nothing"
    if words in ("nothing", "everything"):
        return frozenset(CRITERIA if words == "everything" else ())
    but = words.startswith("everything but ")
    names = set(re.split(r"[,\s]+", words.removeprefix("everything but ")))
    assert names <= set(CRITERIA), f"{path}: no such criteria: {sorted(names - set(CRITERIA))}"
    return frozenset(set(CRITERIA) - names if but else names)


def _find(notebook: NotebookNode, name: str, path: Path) -> tuple[int, NotebookNode]:
    for index, cell in enumerate(notebook.cells):
        if cell.metadata.get("nbgrader", {}).get("grade_id") == name:
            return index, cell
    raise ValueError(f"{path}: the lab has no cell {name!r}")


def _put(
    notebook: NotebookNode, place: str, source: str, name: str, added: dict[str, int], path: Path
) -> None:
    cell = NotebookNode(
        cell_type="code",
        id=name,
        metadata=NotebookNode(),
        outputs=[],
        execution_count=None,
        source=source,
    )
    where, _, anchor = place.partition(" ")
    if where == "last":
        notebook.cells.append(cell)
        return
    index = 0 if where == "first" else _find(notebook, anchor, path)[0] + (where == "after")
    if where != "before":  # before: the anchor moves on by itself
        index += added.get(place, 0)
        added[place] = added.get(place, 0) + 1
    notebook.cells.insert(index, cell)
