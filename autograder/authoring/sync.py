"""Writes the cells that were edited in a built notebook back into its source."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupytext.stringparser import StringParser
from nbformat import NotebookNode

from autograder.authoring.folding import FOLDED_ON_SITE
from autograder.authoring.notebooks import (
    SCRIPT_ONLY,
    build_notebook,
    cell_content,
    cell_diff,
    cells_hash,
    edited_by_hand,
)
from autograder.authoring.percent import (
    ACTIVE_IPYNB,
    BuildError,
    has_commented_body,
    read_cells,
    source_to_script,
)
from autograder.files import write_whole

_MARKER = re.compile(r"^# %%(?:\s.*)?$")


@dataclass(kw_only=True)
class Segment:
    """The lines of one cell in the script: its `# %%` line, its text and the newlines after it."""

    marker: str
    body: str
    gap: str

    def text(self) -> str:
        return (f"{self.marker}\n" if self.marker else "") + self.body + self.gap


def split_script(text: str) -> tuple[str, list[Segment]]:
    """The jupytext header (may be empty) and the segments; joined, they give `text` again."""
    match = re.match(r"# ---\n(?:#.*\n)*?# ---\n\n*", text)
    header = match.group(0) if match else ""
    blocks: list[list[str]] = []
    parser = StringParser("python")
    for line in text[len(header) :].splitlines(keepends=True):
        if not blocks or (not parser.is_quoted() and _MARKER.match(line.rstrip("\n"))):
            blocks.append([])
        blocks[-1].append(line)
        parser.read_line(line.rstrip("\n"))
    segments = []
    for block in blocks:
        marker = block.pop(0).rstrip("\n") if _MARKER.match(block[0].rstrip("\n")) else ""
        full = "".join(block)
        body = full.rstrip("\n")
        segments.append(Segment(marker=marker, body=body, gap=full[len(body) :]))
    return header, segments


def sync(py: Path) -> bool:
    """Writes the cells edited in the notebook of `py` back into `py`; the rest stays byte for byte.

    Returns:
        Whether there was anything to write.

    Raises:
        BuildError: `py` was edited since the build too, or the source cannot express the edit.
    """
    target = py.with_suffix(".ipynb")
    edited = edited_by_hand(target)
    current = build_notebook(py)
    if edited is None or cells_hash(current.cells) == cells_hash(edited.cells):
        return False
    if current.metadata.minidist.built != edited.metadata.get("minidist", {}).get("built"):
        raise BuildError(
            f"{py} and {target} were both edited since the build; bring these cells together in "
            f"the .py and delete the .ipynb:\n{cell_diff(current, edited)}"
        )
    source = py.read_bytes()
    new_text = _merge(py.read_text("utf-8"), current, edited, str(py))
    rebuilt = build_notebook(py, text=new_text)
    if cells_hash(rebuilt.cells) != cells_hash(edited.cells):
        raise BuildError(
            f"{py}: an edit in {target} cannot be written as source (points, for one, belong in "
            f"autograder/criteria):\n{cell_diff(rebuilt, edited)}"
        )
    if b"\r\n" in source:
        new_text = new_text.replace("\n", "\r\n")
    try:
        data = new_text.encode()
    except UnicodeEncodeError as error:
        bad = new_text[error.start : error.end]
        raise BuildError(f"{target}: a cell holds {bad!r}, which no file can") from None
    write_whole(py, data, mode=py.stat().st_mode & 0o777)
    return True


def _merge(text: str, current: NotebookNode, edited: NotebookNode, where: str) -> str:
    header, segments = split_script(text)
    cells, _ = read_cells(text, where=where)
    if len(cells) != len(segments):
        raise BuildError(f"{where}: expected {len(cells)} '# %%' cells, found {len(segments)}")
    segments[-1].gap = "\n\n"  # this cell may no longer be the last one

    # A script-only cell is not in the notebook: it stays behind the cell that it follows.
    leading: list[Segment] = []
    groups: dict[str, list[Segment]] = {}
    group = leading
    names = iter(current.cells)
    for cell, segment in zip(cells, segments, strict=True):
        if SCRIPT_ONLY not in cell.tags:
            group = groups[next(names).id] = []
        group.append(segment)

    before = {cell.id: cell_content(cell) for cell in current.cells}
    out = leading
    for cell in edited.cells:
        group = groups.pop(cell.get("id", ""), None) or [Segment(marker="", body="", gap="\n\n")]
        old, new = before.get(cell.get("id", "")), cell_content(cell)
        if old != new:
            head = group[0]
            if old is None or (old[0], old[2]) != (new[0], new[2]):
                head.marker = _marker(cell)
            head.body = _body(cell, head)
        out += group
    for group in groups.values():  # cells deleted in the notebook
        out += group[1:]
    return header + "".join(segment.text() for segment in out).rstrip("\n") + "\n"


def _marker(cell: Any) -> str:
    """The `# %%` line that `build_notebook` expands to the metadata of this cell."""
    nbgrader = cell.metadata.get("nbgrader", {})
    kind = "given"
    if nbgrader.get("solution"):
        kind = "reflect" if nbgrader.get("grade") else "solution"
    elif nbgrader.get("grade"):
        kind = "check"
    elif cell.metadata.get("minidist", {}).get("replay") is False:
        kind = "demo"
    type_part = "" if cell.cell_type == "code" else f" [{cell.cell_type}]"
    option = f' {kind}="{nbgrader["grade_id"]}"' if nbgrader else ""
    if tags := [tag for tag in cell.metadata.get("tags", ()) if tag != FOLDED_ON_SITE]:
        option += f" tags={json.dumps(tags)}"
    return f"# %%{type_part}{option}"


def _body(cell: Any, former: Segment) -> str:
    if cell.cell_type == "code" and ACTIVE_IPYNB not in former.marker:
        return source_to_script(cell.source, commented=has_commented_body(former.body))
    return "\n".join(f"# {line}".rstrip() for line in cell.source.split("\n"))
