"""`python -m autograder.authoring.desk`: sets out `work/`, where a student works.

    work/Course.md     lectures and labs in order, as links; JupyterLab opens with it
    work/notebooks/    own copies of the lectures
    work/labs/         own copies of the labs; links between notebooks hold

A copy that is there already stays as it is. The front page tells how many points a lab's checks
gave when the copy was last saved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

FRONT_PAGE = "Course.md"
SETTINGS = "nbgrader_config.py"  # the button Validate reads this file in the folder where it runs


def set_out(root: Path) -> Iterator[str]:
    """Copies new files to `root/work`, writes the front page, yields a line per new or kept one."""
    work = root / "work"
    work.mkdir(exist_ok=True)
    for source in _sources(root):
        copy = work / source.relative_to(root)
        before = (
            work / copy.relative_to(work / "labs") if copy.is_relative_to(work / "labs") else copy
        )
        if not copy.exists() and before.exists():  # made before labs had a folder of their own
            copy.parent.mkdir(parents=True, exist_ok=True)
            before.rename(copy)
            yield f"moved {copy.relative_to(root)}"
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            yield f"new   {copy.relative_to(root)}"
        elif not _same(source, copy):
            afresh = source.relative_to(root)
            yield f"kept  {copy.relative_to(root)} (delete it to get {afresh} afresh)"
    (work / FRONT_PAGE).write_text(front_page(root), "utf-8")
    link = work / SETTINGS
    if not link.is_symlink() and not link.exists():
        link.symlink_to(os.path.join("..", SETTINGS))


def front_page(root: Path) -> str:
    """The course in order, in Markdown."""
    lectures = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    labs = sorted((root / "labs").glob("lab*/*.ipynb"))
    bonuses = sorted((root / "labs").glob("bonus*/*.ipynb"))
    lines = ["# Training over many GPUs", ""]
    if lectures:
        lines += [f"Begin with {_link(root, lectures[0])}.", "", "## Lectures", ""]
        lines += [f"- {_link(root, path)}" for path in lectures]
    for heading, paths in (("Labs", labs), ("Bonuses", bonuses)):
        if paths:
            own = (
                f"- {_link(root, path)}{_points(root / 'work' / path.relative_to(root))}"
                for path in paths
            )
            lines += ["", f"## {heading}", "", *own]
    lines += [
        "",
        "These are your own copies; `make lab` adds what is new and changes none of them.",
    ]
    return "\n".join(lines) + "\n"


def _points(copy: Path) -> str:
    """The points of the checks when a lab was last saved; empty if no check was run."""
    cells = [cell for cell in _cells(copy) if cell.cell_type == "code"]
    checks = [cell for cell in cells if cell.metadata.get("nbgrader", {}).get("grade")]
    if not any(cell.outputs for cell in checks):
        return ""
    passed = [
        cell.metadata.nbgrader.points
        for cell in checks
        for output in cell.outputs
        if output.get("text", "").startswith(f"✓ {cell.metadata.nbgrader.grade_id} ")
    ]
    most = sum(cell.metadata.nbgrader.points for cell in checks)
    return f": **{sum(passed):g} of {most:g} points** when last saved"


def _same(source: Path, copy: Path) -> bool:
    """Whether two files are equal; for notebooks, whether the cells' sources are.

    JupyterLab rewrites a notebook that was only opened or run.
    """
    if source.read_bytes() == copy.read_bytes():
        return True
    said = [[(cell.cell_type, cell.source) for cell in _cells(each)] for each in (source, copy)]
    return bool(said[0]) and said[0] == said[1]


def _cells(path: Path) -> list[Any]:
    """The cells of a notebook; none of a file that is no notebook."""
    try:
        return nbformat.read(path, as_version=4).cells
    except Exception:  # a file that a student edited may cause many kinds of errors
        return []


def _sources(root: Path) -> list[Path]:
    files = [path for path in (root / "labs").glob("*/*") if path.is_file()]
    return sorted([*files, *(root / "notebooks").glob("*.ipynb")])


def _link(root: Path, path: Path) -> str:
    headings = (
        line.removeprefix("# ").replace("`", "")
        for cell in _cells(path)
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("# ")
    )
    return f"[{next(headings, path.stem)}]({path.relative_to(root)})"


if __name__ == "__main__":
    for line in set_out(Path.cwd()):
        print(line, flush=True)
