"""Finds the submissions of a class: files and folders, and whose they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Submission:
    """A notebook to grade; `student` is safe to display and not necessarily unique."""

    student: str
    path: Path


@dataclass(frozen=True)
class Found:
    """The submissions, and the folders of a class without a submission: folder -> reason."""

    submissions: list[Submission]
    left_out: dict[Path, str]


def find_submissions(paths: Sequence[Path], lab: str) -> Found:
    """The notebooks of one lab in files and folders, sorted by student.

    A path is a notebook, the folder of one student (``lab.ipynb`` or ``lab/lab.ipynb`` in it), or
    the folder of a class: ``STUDENT/lab.ipynb`` or nbgrader's ``STUDENT/lab/lab.ipynb``. In a
    class's folder, a student's only notebook is taken even if its name is different. Links that
    lead out of a class's folder are not followed.

    Raises:
        ValueError: a path does not exist, cannot be listed, holds no submission, or could be both
            the folder of one student and the folder of a class.
    """
    found: dict[Path, Submission] = {}
    left_out: dict[Path, str] = {}
    for path in map(Path, paths):
        if not os.path.lexists(path):
            raise ValueError(f"there is no file or folder {path}")
        try:
            here = list(_submissions(path, lab, left_out))
        except OSError as error:
            raise ValueError(f"{path} cannot be listed: {error.strerror}") from None
        if not here:
            raise ValueError(
                f"{path} holds no submission: expected {lab}.ipynb, STUDENT/{lab}.ipynb "
                f"or STUDENT/{lab}/{lab}.ipynb in it"
            )
        found |= {submission.path: submission for submission in here}
    return Found(sorted(found.values()), dict(sorted(left_out.items())))


def display_name(name: str) -> str:
    """The name of a file or student, without characters that a terminal or page acts on."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _submissions(path: Path, lab: str, left_out: dict[Path, str]) -> Iterator[Submission]:
    absolute = Path(os.path.abspath(path))
    if not path.is_dir():
        folder = absolute.parent
        student = folder.parent.name if folder.name == lab else folder.name
        yield Submission(display_name(student if absolute.stem == lab else absolute.stem), path)
    elif alone := _of_student(path, lab):
        others = [f for f in path.iterdir() if f != alone.parent and _is_students(f, lab)]
        if alone.parent == path and others:
            names = ", ".join(sorted(display_name(folder.name) for folder in others))
            raise ValueError(
                f"{path} holds {lab}.ipynb, as the folder of one student does, and folders that "
                f"hold one, as that of a class does ({names}): move the one or the others away, "
                "or name the notebooks that are to be graded"
            )
        student = absolute.parent.name if absolute.name == lab else absolute.name
        yield Submission(display_name(student), alone)
    else:
        for child in path.iterdir():
            if child.name.startswith(".") or not child.is_dir():
                continue
            if child.is_symlink() and not child.resolve().is_relative_to(path.resolve()):
                left_out[child] = "a link that leads out of the class's folder"
                continue
            try:
                notebook = _of_student(child, lab) or _only_notebook(child, lab)
            except OSError:  # cannot be listed: reading the notebook reports this for the student
                notebook = child / f"{lab}.ipynb"
            if notebook:
                yield Submission(display_name(child.name), notebook)
            else:
                left_out[child] = f"there is no {lab}.ipynb and no other notebook in it"


def _is_students(folder: Path, lab: str) -> bool:
    """Whether the folder holds a submission named exactly like the lab."""
    if folder.name.startswith(".") or not folder.is_dir():
        return False
    return any(os.path.lexists(folder / name) for name in (f"{lab}.ipynb", f"{lab}/{lab}.ipynb"))


def _of_student(folder: Path, lab: str) -> Path | None:
    direct, nested = folder / f"{lab}.ipynb", folder / lab
    if os.path.lexists(direct):
        return direct
    if nested.is_dir() and not nested.is_symlink():
        return _only_notebook(nested, lab)
    return None


def _only_notebook(folder: Path, lab: str) -> Path | None:
    """`lab`.ipynb if it exists, else the only notebook; None if the folder has no notebook.

    If there are several other notebooks, returns the missing `lab`.ipynb, which is then reported.
    """
    expected = folder / f"{lab}.ipynb"
    if os.path.lexists(expected):
        return expected
    others = [path for path in folder.glob("*.ipynb") if not path.name.startswith(".")]
    return others[0] if len(others) == 1 else expected if others else None
