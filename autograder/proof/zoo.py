"""The bundled class: wrong, unusual and right submissions, each a small change of the reference.

A file tests/zoo/LAB/NAME.py replaces whole solution cells of the reference, NAME.diff single lines
of them (`zoo_file.py`). The text about the submission has these lines:

- `loses:` lists criteria; also possible: `nothing`, `everything`.
- `base: starter` (optional) takes the other solution cells from the untouched lab.
- `class: example` (optional) puts the submission into the class that `make grade` shows.
- `misses:` (optional) names the idea of a gate that the submission misses, so that it must not
  pass. No other submission may lose points to a gate.
- `because:` says why one fault costs several criteria; required if it does.
- `status:` (optional) names the exact status of a lost criterion; without it any loss will do.
- `says:` (optional) names a lost criterion and words that its message must have.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from nbformat import NotebookNode

from autograder.authoring.notebooks import COURSE_ROOT, build_notebook, release_notebook, to_bytes
from autograder.authoring.percent import BuildError
from autograder.criteria import get_lab
from autograder.criteria.criterion import Gate
from autograder.proof.zoo_file import SUFFIXES, read_zoo_file, without_markers

MAX_COMBINED = 8  # parts of one submission, so that all its failing checks fit into its time


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """One submission of the bundled class.

    Attributes:
        name: the file's name; also the student's id.
        docstring: what is special about the submission.
        loses: the criteria that the submission must lose; it must pass all others.
        statuses: criterion -> status, for criteria of `loses` with a `status:` line.
        says: criterion -> words of its message, for criteria of `loses` with a `says:` line.
        misses: the idea of a gate, if the submission misses it; else "".
        in_example: whether it is in the class that `make grade` shows (`class: example`).
        notebook: what the student hands in.
        replaced: name of a replaced solution cell -> its source.
        base: where the other solution cells come from: "reference" or "starter".
        parts: the entries that were combined into this one; empty for an entry that is a file.
    """

    name: str
    docstring: str
    loses: frozenset[str] | Literal["everything"]
    statuses: dict[str, str] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    misses: str = ""
    in_example: bool = False
    notebook: NotebookNode
    replaced: dict[str, str] = field(default_factory=dict)
    base: str = "reference"
    parts: tuple[ZooEntry, ...] = ()

    def expected_score(self, points: dict[str, float], gates: Sequence[Gate] = ()) -> float:
        """The score that the entry must get, given the points of every criterion and the gates."""
        if self.loses == "everything":
            return 0.0
        closed = [g for g in gates if len(set(g.criteria) - set(self.loses)) < g.needed]
        total = sum(value for name, value in points.items() if name not in self.loses)
        return min([total, *(gate.at_most for gate in closed)])


def load_zoo(lab: str, *patterns: str, root: Path = COURSE_ROOT) -> list[ZooEntry]:
    """The entries of a lab whose names match a pattern such as "right_*", sorted by name.

    Without patterns, all entries; this takes a few seconds.

    Raises:
        BuildError: an entry names a cell or a criterion that the lab does not have, or has no
            `loses:` line; the message names the file.
    """
    folder = root / "tests" / "zoo" / lab
    found = {file for pattern in patterns or "*" for file in folder.glob(pattern + ".*")}
    files = sorted(file for file in found if file.suffix in SUFFIXES)
    if not files:
        raise BuildError(f"{folder}: no submissions; expected NAME.py files in a checkout")
    if twice := [a.stem for a, b in pairwise(files) if a.stem == b.stem]:
        raise BuildError(f"{folder}: both {twice[0]}.py and {twice[0]}.diff")
    reference = build_notebook(root / "solutions" / lab / f"{lab}.py")
    starter = release_notebook(reference, lab)
    solved = copy.deepcopy(starter)
    solutions = {cell.id: without_markers(cell.source) for cell in reference.cells}
    for cell in solved.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            cell.source = solutions[cell.id]
    # Unpickling makes a copy in a fifth of the time of deepcopy.
    bases = {"starter": pickle.dumps(starter), "reference": pickle.dumps(solved)}
    return [_load_entry(py, lab, bases) for py in files]


def write_class(
    lab: str,
    dest: Path,
    layout: Literal["nbgrader", "flat"] = "nbgrader",
    *,
    only_example: bool = False,
    root: Path = COURSE_ROOT,
    entries: Sequence[ZooEntry] | None = None,
) -> list[Path]:
    """Writes entries as submitted notebooks.

    Args:
        lab: such as "lab1_ddp".
        dest: the folder that gets one folder per student.
        layout: "nbgrader" for DEST/NAME/LAB/LAB.ipynb, "flat" for DEST/NAME/LAB.ipynb.
        only_example: write only the entries of the example class.
        entries: entries to write; default: all entries of the lab.

    Returns:
        The paths of the notebooks, in the order of the entries. A notebook that already exists with
        the same content is not written again.
    """
    if layout not in ("nbgrader", "flat"):
        raise ValueError(f"layout must be 'nbgrader' or 'flat', got {layout!r}")
    paths = []
    for entry in load_zoo(lab, root=root) if entries is None else entries:
        if only_example and not entry.in_example:
            continue
        folder = dest / entry.name / lab if layout == "nbgrader" else dest / entry.name
        path = folder / f"{lab}.ipynb"
        data = to_bytes(entry.notebook)
        if not path.exists() or path.read_bytes() != data:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        paths.append(path)
    return paths


def _load_entry(py: Path, lab: str, bases: dict[str, bytes]) -> ZooEntry:
    docstring, changes = read_zoo_file(py)
    base = _line(docstring, "base") or "reference"
    if base not in bases:
        raise BuildError(f"{py}: base must be reference or starter, got {base!r}")

    notebook = pickle.loads(bases[base])
    by_id = {
        cell.id: cell
        for cell in notebook.cells
        if cell.metadata.get("nbgrader", {}).get("solution")
    }
    replaced = {}
    for name, change in changes.items():
        if name not in by_id:
            raise BuildError(
                f"{py}: changes {name!r}, but {lab} has no such solution cell; "
                f"it has: {', '.join(by_id)}"
            )
        replaced[name] = by_id[name].source = change(by_id[name].source)

    criteria = {criterion.name for criterion in get_lab(lab).criteria}
    loses, statuses, says = _expectations(py, docstring, criteria)
    misses, ideas = _line(docstring, "misses"), [gate.idea for gate in get_lab(lab).gates]
    if misses and misses not in ideas:
        raise BuildError(f"{py}: misses {misses!r}; the gates of {lab} are {ideas}")
    if bool(loses) == py.stem.startswith("right_") and py.stem != "reference":
        raise BuildError(f"{py}: right_NAME.py loses nothing, and only that; it loses {loses!r}")
    return ZooEntry(
        name=py.stem,
        docstring=docstring,
        loses=loses,
        statuses=statuses,
        says=says,
        misses=misses,
        in_example=_line(docstring, "class") == "example",
        notebook=notebook,
        replaced=replaced,
        base=base,
    )


def combine(entries: Sequence[ZooEntry]) -> list[ZooEntry]:
    """Combines entries into fewer submissions, in which every bug costs the same as alone.

    Entries are combined if they change different cells of the reference and lose different
    criteria. Right entries are combined with right entries only.
    """
    bins: list[list[ZooEntry]] = []
    alone = []
    for entry in sorted(entries, key=lambda e: (-len(e.replaced) - len(e.loses), e.name)):
        if entry.base != "reference" or entry.loses == "everything" or not entry.replaced:
            alone.append([entry])
            continue
        for together in bins:
            if len(together) < MAX_COMBINED and all(_are_apart(entry, other) for other in together):
                together.append(entry)
                break
        else:
            bins.append([entry])
    return sorted((_combined(each) for each in alone + bins), key=lambda e: e.name)


def _are_apart(one: ZooEntry, other: ZooEntry) -> bool:
    return (
        bool(one.loses) == bool(other.loses)
        and not set(one.replaced) & set(other.replaced)
        and not set(one.loses) & set(other.loses)
    )


def _combined(parts: Sequence[ZooEntry]) -> ZooEntry:
    if len(parts) == 1:
        return parts[0]
    replaced = {name: source for part in parts for name, source in part.replaced.items()}
    notebook = copy.deepcopy(parts[0].notebook)
    for cell in notebook.cells:
        cell.source = replaced.get(cell.id, cell.source)
    return ZooEntry(
        name=f"{parts[0].name}-and-{len(parts) - 1}-more",
        docstring="\n".join(part.name for part in parts),
        loses=frozenset[str]().union(*(part.loses for part in parts)),
        statuses={name: status for part in parts for name, status in part.statuses.items()},
        says={name: words for part in parts for name, words in part.says.items()},
        notebook=notebook,
        replaced=replaced,
        parts=tuple(parts),
    )


def _expectations(
    py: Path, docstring: str, criteria: set[str]
) -> tuple[frozenset[str] | Literal["everything"], dict[str, str], dict[str, str]]:
    value = _line(docstring, "loses")
    if not value:
        raise BuildError(f"{py}: the docstring needs a line 'loses: criterion, criterion'")
    loses: frozenset[str] | Literal["everything"] = frozenset()
    if value == "everything":
        loses = "everything"
    elif value != "nothing":
        loses = frozenset(re.split(r"[,\s]+", value.strip(", ")))
    statuses = dict(re.findall(r"^status:\s*(\w+)\s+([A-Z_]+)\s*$", docstring, re.MULTILINE))
    says = dict(re.findall(r"^says:\s*(\w+)\s+(.+?)\s*$", docstring, re.MULTILINE))
    named = set(statuses) | set(says) | (set() if loses == "everything" else set(loses))
    if unknown := sorted(named - criteria):
        raise BuildError(f"{py}: no such criteria: {unknown}; the lab has {sorted(criteria)}")
    if loses != "everything" and (extra := sorted((set(statuses) | set(says)) - loses)):
        raise BuildError(f"{py}: status: or says: for criteria that are not in loses: {extra}")
    if loses != "everything" and len(loses) > 1 and not _line(docstring, "because"):
        raise BuildError(
            f"{py}: loses {len(loses)} criteria. One fault costs one criterion (see "
            "`Criterion.stand_ins`), or a line 'because: ...' says why not"
        )
    return loses, statuses, says


def _line(docstring: str, key: str) -> str:
    """The value of a `key: value` line; lines that are indented or follow a comma continue it."""
    pattern = rf"^{key}:[ \t]*((?:.*,[ \t]*\n)*.*(?:\n[ \t]+\S.*)*)"
    match = re.search(pattern, docstring, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""
