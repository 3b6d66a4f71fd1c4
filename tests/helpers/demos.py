"""Runs the demos of a lab's notebook as a student does: in its kernel, cell after cell."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from course import ROOT
from kernel_helper import place_of_sockets
from nbclient import NotebookClient

LABS = sorted(path.stem for path in (ROOT / "solutions").glob("*/*.py"))


def name_of(cell: nbformat.NotebookNode) -> str:
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def is_demo(cell: nbformat.NotebookNode) -> bool:
    return cell.metadata.get("minidist", {}).get("replay") is False


def text_of(cell: nbformat.NotebookNode) -> str:
    """What it printed, without the kernel's word on ranks that take long."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    return re.sub(r"^\[(after \d+ s|rank \d+: .*)\]\n", "", text, flags=re.MULTILINE)


def run_without_errors(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Runs it in its own kernel; neither errors nor tracebacks of other programs may show."""
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=500, allow_errors=True, resources=where)
    manager = client.create_kernel_manager()
    manager.transport, manager.ip = "ipc", place_of_sockets()
    client.execute()
    for cell in notebook.cells:
        assert [o for o in cell.outputs if o.output_type == "error"] == [], name_of(cell)
        assert "Traceback" not in text_of(cell), f"{name_of(cell)}:\n{text_of(cell)}"


def solution_up_to(lab: str, demos: list[str]) -> nbformat.NotebookNode:
    """The solution without checks, with these demos only, up to the last of them."""
    notebook = nbformat.read(ROOT / "solutions" / lab / f"{lab}.ipynb", as_version=4)
    cells = []
    for cell in notebook.cells:
        is_check = cell.metadata.get("nbgrader", {}).get("grade")
        wanted = not is_demo(cell) or name_of(cell) in demos
        if cell.cell_type == "code" and not is_check and wanted:
            cells.append(cell)
        if name_of(cell) == demos[-1]:
            break
    notebook.cells = cells
    return notebook
