"""Builds the notebooks of the course from their sources.

    notebooks/NN_topic.py         -> notebooks/NN_topic.ipynb
    solutions/labN_x/labN_x.py    -> solutions/labN_x/labN_x.ipynb    task, solution and checks
    solutions/labN_x/labN_x.ipynb -> labs/labN_x/labN_x.ipynb         by nbgrader, without solutions

The same source gives the same bytes. A notebook carries a hash of its cells (metadata
`minidist.built`), so that a notebook that somebody edited later, for example in formgrader, is
never overwritten.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from traitlets.config import Config

from autograder.authoring.folding import FOLDED_ON_SITE, OPEN, is_workshop
from autograder.authoring.percent import BuildError, SourceCell, read_cells
from autograder.course.course_toml import read_options
from autograder.criteria import get_lab

COURSE_ROOT = Path(__file__).resolve().parents[2]
SCRIPT_ONLY = "script-only"
KINDS = ("given", "solution", "check", "demo", "reflect")
REFLECT_POINTS = 2  # given by a person, in addition to the criteria's 100
_KERNEL = re.compile(r"torchrun-([1-9]\d*)")
_LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}


# --- .py -> notebook -------------------------------------------------------------------------


def build_notebook(py: Path, *, text: str | None = None) -> NotebookNode:
    """The notebook of one source, without outputs; equal sources give equal notebooks.

    Args:
        py: a percent script. A lab is a script whose folder has the same name as the script.
        text: used instead of the content of `py`, if given.

    Raises:
        BuildError: the source is invalid; the message names the file, the cell and the problem.
    """
    cells, header = read_cells(py.read_text("utf-8") if text is None else text, where=str(py))
    points: dict[str, float] = {}
    num_ranks = 2
    if py.parent.name == py.stem:
        try:
            lab = read_options(py.parents[2]).apply(get_lab(py.stem))
        except ValueError as error:
            raise BuildError(f"{py}: {error}") from error
        points = {criterion.name: criterion.listed_points for criterion in lab.criteria}
        num_ranks = lab.practice_world_size
    kernel = header.get("kernelspec", {}).get("name", f"torchrun-{num_ranks}")
    if not (match := _KERNEL.fullmatch(kernel)):
        raise BuildError(f"{py}: kernelspec must be torchrun-N, got {kernel!r}")

    built = []
    for cell in cells:
        if SCRIPT_ONLY in cell.tags:
            continue
        where = f"{py}: cell {len(built) + 1} ({cell.source.strip().splitlines()[:1]})"
        metadata = _cell_metadata(cell, points, where)
        built.append(_new_cell(cell, metadata, f"{py.stem}-{len(built) + 1:03d}"))
    _check_ids(built, points, str(py))
    return nbformat.from_dict(
        {
            "cells": built,
            "metadata": {
                "kernelspec": {
                    "display_name": f"torchrun × {match[1]}",
                    "language": "python",
                    "name": kernel,
                },
                "language_info": _LANGUAGE,
                "minidist": {"built": cells_hash(built)},
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )  # type: ignore[return-value]


def _new_cell(cell: SourceCell, metadata: dict[str, Any], fallback_id: str) -> dict[str, Any]:
    new: dict[str, Any] = {
        "cell_type": cell.cell_type,
        "id": metadata.get("nbgrader", {}).get("grade_id", fallback_id),
        "metadata": metadata,
        "source": cell.source,
    }
    if cell.cell_type == "code":
        new |= {"execution_count": None, "outputs": []}
        kind = set(cell.options) & {"solution", "check"}
        if not kind and OPEN not in cell.tags and is_workshop(cell.source):
            tags = [*cell.tags, FOLDED_ON_SITE]
            new["metadata"] = metadata | {"tags": tags, "jupyter": {"source_hidden": True}}
    return new


def _cell_metadata(cell: SourceCell, points: dict[str, float], where: str) -> dict[str, Any]:
    """Expands the one-word option of a cell into nbgrader's metadata (schema version 3)."""
    metadata: dict[str, Any] = {}
    if cell.tags:
        metadata["tags"] = cell.tags
    unknown = sorted(set(cell.options) - set(KINDS))
    kinds = [kind for kind in KINDS if kind in cell.options]
    if unknown or len(kinds) > 1:
        raise BuildError(f"{where}: expected at most one of {KINDS}, got {sorted(cell.options)}")
    if not kinds:
        if "BEGIN SOLUTION" in cell.source:
            raise BuildError(
                f'{where}: has a solution but no solution="name" or reflect="name" option'
            )
        return metadata
    kind = kinds[0]
    name = cell.options[kind]
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)):
        raise BuildError(f"{where}: {kind}= must be a name of letters, digits, _, -; got {name!r}")
    wanted = "markdown" if kind == "reflect" else "code"
    if cell.cell_type != wanted and kind != "given":
        raise BuildError(f"{where}: {kind}={name!r} must be a {wanted} cell, got {cell.cell_type}")
    is_answer = kind in ("solution", "reflect")
    nbgrader: dict[str, Any] = {
        "grade": kind in ("check", "reflect"),
        "grade_id": name,
        "locked": not is_answer,
        "schema_version": 3,
        "solution": is_answer,
        "task": False,
    }
    if kind == "check":
        if name not in points:
            raise BuildError(f"{where}: the lab has no criterion {name!r}; it has {sorted(points)}")
        value = points[name]
        nbgrader["points"] = int(value) if float(value).is_integer() else value
    if kind == "reflect":
        if "BEGIN SOLUTION" not in cell.source:
            raise BuildError(f"{where}: reflect={name!r} has no model answer in a solution region")
        nbgrader["points"] = REFLECT_POINTS
    if kind == "demo":
        metadata["minidist"] = {"replay": False}
    return metadata | {"nbgrader": nbgrader}


def _check_ids(cells: list[dict[str, Any]], points: dict[str, float], where: str) -> None:
    ids = [cell["id"] for cell in cells]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise BuildError(
            f"{where}: a name may be used once (nbgrader's grade_id), also not for a solution and "
            f"its check; used twice: {', '.join(twice)}"
        )
    checks = (cell for cell in cells if cell["cell_type"] == "code")
    graded = {cell["id"] for cell in checks if cell["metadata"].get("nbgrader", {}).get("grade")}
    if missing := sorted(set(points) - graded):
        raise BuildError(f"{where}: these criteria have no check cell: {missing}")


def cells_hash(cells: list[Any]) -> str:
    """A hash of what a person edits: types, sources, nbgrader options; not outputs, not ids."""
    content = [cell_content(cell) for cell in cells]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def cell_content(cell: Any) -> list[Any]:
    """[type, source, nbgrader options without those that nbgrader computes itself]."""
    nbgrader = {
        key: value
        for key, value in cell["metadata"].get("nbgrader", {}).items()
        if key not in ("checksum", "cell_type")
    }
    return [cell["cell_type"], cell["source"], nbgrader]


def to_bytes(notebook: NotebookNode) -> bytes:
    """The bytes of a notebook in the one form in which notebooks are stored."""
    return (nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n").encode()


# --- notebook with solutions -> notebook for students ----------------------------------------


def release_notebook(notebook: NotebookNode, lab: str) -> NotebookNode:
    """The student version that `nbgrader generate_assignment` makes: stubs, and locked cells.

    nbgrader's converter gets only the notebook, so that no other file can be released with it.
    """
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory

    with tempfile.TemporaryDirectory(prefix="minidist-build-") as temp:
        root = Path(temp).resolve()
        source = root / "solutions" / lab
        source.mkdir(parents=True)
        (source / f"{lab}.ipynb").write_bytes(to_bytes(notebook))
        config = Config()
        config.CourseDirectory.root = str(root)
        config.CourseDirectory.source_directory = "solutions"
        config.CourseDirectory.release_directory = "labs"
        config.CourseDirectory.assignment_id = lab
        config.SaveCells.enabled = False  # writes to a gradebook
        config.GenerateAssignment.no_database = True
        coursedir = CourseDirectory(config=config)
        converter = GenerateAssignment(coursedir=coursedir, config=config)
        converter.log.setLevel("ERROR")
        converter.start()
        release = root / "labs" / lab / f"{lab}.ipynb"
        return nbformat.read(release, as_version=nbformat.NO_CONVERT)


# --- the course ------------------------------------------------------------------------------


def sources(root: Path) -> Iterator[Path]:
    """Every source of the course, lectures first."""
    yield from sorted((root / "notebooks").glob("[0-9]*.py"))
    yield from sorted(py for py in (root / "solutions").glob("*/*.py") if py.stem == py.parent.name)


def build_course(root: Path, *, write: bool = True) -> tuple[list[Path], list[str]]:
    """Builds every notebook of the course that is out of date.

    Returns:
        The out-of-date files (now written, if `write`), and a complaint for each file that was not
        written because somebody edited it.
    """
    stale: list[Path] = []
    complaints: list[str] = []
    for py in sources(root):
        target = py.with_suffix(".ipynb")
        notebook = build_notebook(py)
        outputs = [(target, notebook)]
        edited = edited_by_hand(target)
        if edited is not None and cells_hash(edited.cells) != cells_hash(notebook.cells):
            complaints.append(
                f"{target} was edited since it was built. "
                "'python -m autograder.authoring --sync' writes these cells into the .py, "
                f"deleting the .ipynb drops them:\n{cell_diff(notebook, edited)}"
            )
            stale.append(target)
            continue
        if py.parent.name == py.stem:
            lab = root / "labs" / py.stem / f"{py.stem}.ipynb"
            release = release_notebook(notebook, py.stem)
            outputs.append((lab, release))
            # nbgrader copies the notebook's metadata, so both notebooks carry the release's hash.
            for each in (notebook, release):
                each.metadata.minidist.released = cells_hash(release.cells)
            found = edited_by_hand(lab, key="released")
            if found is not None and cells_hash(found.cells) != cells_hash(release.cells):
                complaints.append(
                    f"{lab} was edited, but it is generated from {py}: make the change there, "
                    f"then delete the file:\n{cell_diff(release, found)}"
                )
                stale.append(lab)
                outputs.pop()
        for path, content in outputs:
            data = to_bytes(content)
            if path.exists() and path.read_bytes() == data:
                continue
            stale.append(path)
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    return stale, complaints


def read_notebook(path: Path) -> NotebookNode:
    """The notebook at `path`; raises BuildError, with a remedy, if the file is not a notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise BuildError(
            f"{path} is not a notebook ({error}); delete it to build it anew"
        ) from error


def edited_by_hand(path: Path, *, key: str = "built") -> NotebookNode | None:
    """The notebook at `path` if its cells do not have the hash that it carries, else None."""
    if not path.exists():
        return None
    notebook = read_notebook(path)
    built = notebook.metadata.get("minidist", {}).get(key)
    return None if cells_hash(notebook.cells) == built else notebook


def cell_diff(built: NotebookNode, found: NotebookNode) -> str:
    """The differences between two notebooks, cell by cell, for a person."""
    old = {cell.id: cell for cell in built.cells}
    new = {cell.get("id"): cell for cell in found.cells}
    lines: list[str] = []
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            lines.append(f"  cell {name}: deleted")
        elif name not in old:
            lines.append(f"  cell {name}: added")
            lines += [f"    +{line}" for line in new[name].source.splitlines()]
        elif cell_content(old[name]) != cell_content(new[name]):
            lines.append(f"  cell {name}: changed")
            for one, two, what in zip(
                cell_content(old[name]),
                cell_content(new[name]),
                ("type", "source", "options"),
                strict=True,
            ):
                if what == "source":
                    diff = difflib.unified_diff(
                        one.splitlines(), two.splitlines(), lineterm="", n=1
                    )
                    lines += [f"    {line}" for line in list(diff)[2:]]
                elif one != two:
                    lines.append(f"    {what}: {one} -> {two}")
    if not lines:
        lines.append("  the order of the cells")
    return "\n".join(lines)
