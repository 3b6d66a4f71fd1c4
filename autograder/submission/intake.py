"""Turns an untrusted file into a notebook that can be run. No code of the submission runs here.

Only the source of the submission's cells is used, in the submission's order. The cells that the lab
locks come from the master (the released lab), whatever the submission has in their place. Outputs,
tags, metadata, attachments and ids are dropped, because other tools act on them: for example, a
`skip-execution` tag would keep a check from running.

    submission.ipynb -> bounded read, outputs dropped -> JSON, depth checked first -> cells
    -> the master's put back
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from autograder.criteria.limits import MIB
from autograder.submission.find import display_name
from autograder.submission.strip import Stripper, TooBigError

_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*+"?')
_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_NOTES = 50
_MAX_EMPTY = 100  # up to so many empty cells stay, to keep the student's cell numbers
_PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class IntakeLimits:
    """Upper limits for a submission; far above any honest notebook.

    Attributes:
        max_bytes: size of the file without its outputs.
        max_file_bytes: size of the file.
        max_output_parts: number of lists and objects in outputs; bounds the time to skip them.
        max_depth: nesting of the JSON.
        max_containers: number of lists and objects in the JSON; bounds the cost of parsing.
        max_cells: number of cells.
        max_source: characters in one cell.
    """

    max_bytes: int = 20 * MIB
    max_file_bytes: int = 1 << 30
    max_output_parts: int = 10_000_000
    max_depth: int = 100
    max_containers: int = 500_000
    max_cells: int = 10_000
    max_source: int = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Intake:
    """A submission after reading: either `notebook` is set, or `invalid` says why not.

    Attributes:
        notebook: a fresh nbformat 4.5 notebook. Each code cell has ``metadata.minidist`` with
            ``kind`` ("check", "given", "solution" or "student"), ``grade_id`` and ``replay``
            (whether to run it again on fresh ranks).
        invalid: the reason, written for the student.
        sha256: of the file's bytes; of the reason text if the file was not read as a whole.
        notes: what was repaired.
    """

    notebook: NotebookNode | None = None
    invalid: str | None = None
    sha256: str
    notes: list[str] = field(default_factory=list)


class _Invalid(Exception):
    """The submission cannot be graded; the message is for the student."""


# --- one submission ---------------------------------------------------------------------------


def read_submission(path: Path, master: NotebookNode, limits: IntakeLimits | None = None) -> Intake:
    """Reads a submission and puts the master's locked cells back.

    Never raises because of the file or its content: the result is then an `Intake` with `invalid`.

    Args:
        path: the submitted file.
        master: the released lab, with nbgrader's metadata. The master is trusted.
        limits: see `IntakeLimits`.
    """
    limits = limits or IntakeLimits()
    notes: list[str] = []
    try:
        raw, digest = _read(path, limits)
    except _Invalid as reason:
        return Intake(invalid=str(reason), sha256=_unread(reason))
    sha256 = digest.hexdigest()
    try:
        cells = _cells(_parse(raw, limits), limits, notes)
        notebook = _assemble(cells, master, notes)
    except _Invalid as reason:
        return Intake(invalid=str(reason), sha256=sha256, notes=notes[:_MAX_NOTES])
    return Intake(notebook=notebook, sha256=sha256, notes=notes[:_MAX_NOTES])


def sha256_of(path: Path) -> str:
    """`Intake.sha256` of a submission, without parsing it."""
    try:
        return _read(path, IntakeLimits())[1].hexdigest()
    except _Invalid as reason:
        return _unread(reason)


def _unread(reason: _Invalid) -> str:
    return hashlib.sha256(b"nothing was read" + str(reason).encode()).hexdigest()


def _read(path: Path, limits: IntakeLimits) -> tuple[bytes, Any]:
    """The bytes of a regular file without outputs, and the digest of all its bytes.

    O_NONBLOCK: opening a FIFO must not wait.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise _Invalid("the submission is a symbolic link; hand in the file itself") from None
        if isinstance(error, FileNotFoundError):
            raise _Invalid(f"there is no file called {display_name(path.name)}") from None
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _Invalid(f"the submission cannot be opened: {reason}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _Invalid("the submission is not a regular file")
    stripper, digest = Stripper(limits.max_bytes, limits.max_output_parts), hashlib.sha256()
    left = limits.max_file_bytes
    with os.fdopen(descriptor, "rb") as file:
        try:
            while piece := file.read(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    raise TooBigError(f"at most {limits.max_file_bytes / MIB:.0f} MiB are read")
                digest.update(piece)
                stripper.feed(piece)
        except OSError as error:
            raise _Invalid(f"the submission cannot be read: {error.strerror}") from None
        except TooBigError as error:
            raise _Invalid(
                f"the file is too big: {status.st_size / MIB:.1f} MiB, of which at most "
                f"{limits.max_bytes / MIB:.0f} MiB are accepted without the outputs ({error}); "
                "clear the outputs and save it again"
            ) from None
    return bytes(stripper.kept), digest


def _parse(raw: bytes, limits: IntakeLimits) -> dict[str, Any]:
    if not raw.strip():
        raise _Invalid("the file is empty")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _Invalid(
            f"the file is not UTF-8 text (byte {error.start}); save it again in JupyterLab"
        ) from None
    depth = deepest = containers = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", _ESCAPE.sub(b"", raw))):
        if bracket.group() in b"[{":
            depth += 1
            containers += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
        if deepest > limits.max_depth or containers > limits.max_containers:
            raise _Invalid("the file is nested too deeply or has too many parts for a notebook")
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits is a ValueError too
        raise _Invalid(f"the file is not JSON, so not a notebook: {_likely(text, error)}") from None
    if not isinstance(notebook, dict) or ("cells" not in notebook and "nbformat" not in notebook):
        raise _Invalid("the file is JSON, but not a notebook: it has no cells")
    version = notebook.get("nbformat")
    if version != 4 or isinstance(version, bool):
        raise _Invalid(
            f"the notebook's format is {str(version)[:20]}, expected 4; "
            "open it in JupyterLab and save it"
        )
    return notebook


def _likely(text: str, error: Exception) -> str:
    """What the file probably is, for whoever handed it in."""
    start = text.lstrip()[:200].lower()
    if start.startswith(("<!doctype", "<html")):
        return "it is a web page. Download the notebook itself (JupyterLab: File, Download)"
    if not start.startswith("{"):
        return "it looks like text or a script. Hand in the file whose name ends in .ipynb"
    if conflict := re.search(r"^(<{7}|={7}|>{7})( |$)", text, re.MULTILINE):
        line = text.count("\n", 0, conflict.start()) + 1
        return f"line {line} has marks of a merge that git left open. Settle it and save again"
    if isinstance(error, json.JSONDecodeError):
        if error.pos >= len(text.rstrip()) - 1 or "Unterminated" in error.msg:
            return "it ends in the middle, as after an upload that broke off. Hand it in again"
        return f"line {error.lineno} was damaged ({error.msg}). Open it in JupyterLab to see"
    return str(error)[:200]


def _cells(notebook: dict[str, Any], limits: IntakeLimits, notes: list[str]) -> list[_Cell]:
    raw = notebook.get("cells")
    if not isinstance(raw, list):
        raise _Invalid("the notebook has no list of cells")
    if len(raw) > limits.max_cells:
        raise _Invalid(
            f"the notebook has {len(raw)} cells, at most {limits.max_cells} are accepted"
        )
    cells = [_cell(value, number, limits, notes) for number, value in enumerate(raw, 1)]
    if not any(cell.type == "code" for cell in cells):
        raise _Invalid("the notebook has no code cells")
    return cells


@dataclass
class _Cell:
    """A cell of the submission, and the master's cell that it corresponds to."""

    type: str
    source: str
    id: str | None = None
    grade_id: str | None = None
    master: NotebookNode | None = None


def _cell(value: Any, number: int, limits: IntakeLimits, notes: list[str]) -> _Cell:
    if not isinstance(value, dict):
        raise _Invalid(f"cell {number} is not a cell, but {type(value).__name__}")
    source = value.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise _Invalid(f"cell {number}: its source is not text")
    if len(source) > limits.max_source:
        raise _Invalid(
            f"cell {number}: {len(source)} characters, at most {limits.max_source} are accepted"
        )
    if "\r" in source:
        source = source.replace("\r\n", "\n").replace("\r", "\n")
    if _SURROGATE.search(source):
        source = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", source)
        notes.append(f"cell {number}: characters that are not Unicode text were replaced")
    kind = value.get("cell_type")
    if kind not in ("code", "markdown", "raw"):
        notes.append(f"cell {number}: of no known type, kept as text")
        kind = "raw"
    cell = _Cell(kind, source)
    if isinstance(identity := value.get("id"), str):
        cell.id = identity
    metadata = value.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    if isinstance(nbgrader, dict) and isinstance(claimed := nbgrader.get("grade_id"), str):
        cell.grade_id = claimed
    return cell


# --- the master's cells -----------------------------------------------------------------------


def _assemble(cells: list[_Cell], master: NotebookNode, notes: list[str]) -> NotebookNode:
    ours = {id_: cell for cell in master.cells if (id_ := _grade_id(cell)) is not None}
    _match(cells, ours, notes)
    _drop_empty(cells, notes)
    present = {_grade_id(cell.master) for cell in cells if cell.master is not None}
    previous: str | None = None
    for grade_id, cell in ours.items():
        if grade_id in present:
            previous = grade_id
        elif _is_locked(cell):
            place = 0
            if previous is not None:
                place = 1 + next(
                    i
                    for i, c in enumerate(cells)
                    if c.master is not None and _grade_id(c.master) == previous
                )
            cells.insert(place, _Cell(cell.cell_type, cell.source, master=cell))
            notes.append(f"{grade_id}: the cell was missing and has been put back")
            previous = grade_id
        elif cell.cell_type == "code":
            notes.append(f"{grade_id}: the cell to fill in is missing")
    metadata = {
        key: copy.deepcopy(master.metadata[key])
        for key in ("kernelspec", "language_info")
        if key in master.metadata
    }
    taken: set[str] = set()
    built = [_build(cell, number, taken, notes) for number, cell in enumerate(cells, 1)]
    top = {"cells": built, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return NotebookNode(nbformat.from_dict(top))


def _drop_empty(cells: list[_Cell], notes: list[str]) -> None:
    """Leaves out the student's own empty cells if there are very many.

    Each costs a message to every rank, and a place on the feedback page.
    """
    empty = [cell for cell in cells if cell.master is None and not cell.source.strip()]
    if len(empty) > _MAX_EMPTY:
        dropped = set(map(id, empty))
        cells[:] = [cell for cell in cells if id(cell) not in dropped]
        notes.append(f"{len(empty)} empty cells were left out")


def _match(cells: list[_Cell], ours: dict[str, NotebookNode], notes: list[str]) -> None:
    """Finds the submission's cell for each cell of the master; the first matching cell is taken.

    Cells match by grade_id. Some editors lose the metadata, so cells then match by cell id and,
    for locked cells, by equal source. A wrong match gives no advantage, because a locked cell
    always gets the master's source.
    """
    by_source = {
        cell.source.strip(): grade_id for grade_id, cell in ours.items() if _is_locked(cell)
    }
    by_id = {cell.get("id", grade_id): grade_id for grade_id, cell in ours.items()}
    taken: set[str] = set()
    doubled: set[str] = set()
    for claim in (
        lambda cell: cell.grade_id,
        lambda cell: by_id.get(cell.id),
        lambda cell: by_source.get(cell.source.strip()),
    ):
        for cell in cells:
            grade_id = claim(cell)
            if cell.master is not None or grade_id not in ours:
                continue
            if cell.type != ours[grade_id].cell_type and not _is_locked(ours[grade_id]):
                continue
            if grade_id not in taken:
                taken.add(grade_id)
                cell.master = ours[grade_id]
            elif cell.grade_id == grade_id and grade_id not in doubled:
                doubled.add(grade_id)
                notes.append(f"{grade_id}: there is a second cell of that name, run as it is")


def _build(cell: _Cell, number: int, taken: set[str], notes: list[str]) -> dict[str, Any]:
    kind, source, name = cell.type, cell.source, f"cell-{number:03d}"
    metadata: dict[str, Any] = {}
    grade_id, replay, role = None, True, "student"
    if cell.master is not None:
        grade_id = _grade_id(cell.master)
        metadata["nbgrader"] = copy.deepcopy(cell.master.metadata["nbgrader"])
        replay = cell.master.metadata.get("minidist", {}).get("replay", True) is not False
        role = "solution"
        if _is_locked(cell.master):
            role = "check" if metadata["nbgrader"].get("grade") else "given"
            if (kind, source.strip()) != (cell.master.cell_type, cell.master.source.strip()):
                notes.append(f"{grade_id}: the cell was edited and has been put back")
            kind, source = cell.master.cell_type, cell.master.source
        if grade_id is not None and _ID.fullmatch(grade_id):
            name = grade_id
    if kind == "code":
        metadata["minidist"] = {"kind": role, "grade_id": grade_id, "replay": replay}
    while name in taken:
        name = f"cell-{number:03d}-{len(taken)}"
    taken.add(name)
    built = {"cell_type": kind, "id": name, "metadata": metadata, "source": source}
    return built | {"execution_count": None, "outputs": []} if kind == "code" else built


def _nbgrader(cell: NotebookNode) -> dict[str, Any]:
    return cell.metadata.get("nbgrader", {})


def _grade_id(cell: NotebookNode) -> str | None:
    return _nbgrader(cell).get("grade_id")


def _is_locked(cell: NotebookNode) -> bool:
    """Whether nbgrader locks the cell: a graded or locked cell that is not a solution cell."""
    nbgrader = _nbgrader(cell)
    if nbgrader.get("solution"):
        return False
    return bool(nbgrader.get("grade") or nbgrader.get("locked"))
