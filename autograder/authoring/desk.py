"""`python -m autograder.authoring.desk`: sets out `work/`, where a student works.

    work/Course.md     lectures and labs in order, as links; JupyterLab opens with it
    work/notebooks/    own copies of the lectures
    work/labs/         own copies of the labs; links between notebooks hold

A copy that is there already stays as it is.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat

FRONT_PAGE = "Course.md"
SETTINGS = "nbgrader_config.py"  # of the button Validate, which reads those of where it runs


def set_out(root: Path) -> Iterator[str]:
    """Copies what is new to `root/work` and writes the front page; yields a line per news."""
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
        elif not filecmp.cmp(source, copy, shallow=False):
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
            lines += ["", f"## {heading}", "", *(f"- {_link(root, path)}" for path in paths)]
    lines += [
        "",
        "These are your own copies; `make lab` adds what is new and changes none of them.",
    ]
    return "\n".join(lines) + "\n"


def _sources(root: Path) -> list[Path]:
    files = [path for path in (root / "labs").glob("*/*") if path.is_file()]
    return sorted([*files, *(root / "notebooks").glob("*.ipynb")])


def _link(root: Path, path: Path) -> str:
    notebook = nbformat.read(path, as_version=4)
    headings = (
        line.removeprefix("# ").replace("`", "")
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("# ")
    )
    return f"[{next(headings, path.stem)}]({path.relative_to(root)})"


if __name__ == "__main__":
    for line in set_out(Path.cwd()):
        print(line, flush=True)
