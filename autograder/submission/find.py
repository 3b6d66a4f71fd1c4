"""Finds the submissions of a class: files and folders, and whose they are.

Everything in a class's folder becomes a submission or is named with the reason why not. A folder
that could be two submissions stops the grading; all such folders are named at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autograder.criteria import get_lab, lab_names

TOOLS_OWN = (".git", ".ipynb_checkpoints", ".DS_Store", "__MACOSX", "Thumbs.db")
_HANDED_IN = (".ipynb", ".ipynb.txt", ".ipynb.json", ".py", ".html", ".zip", ".tar", ".gz", ".7z")
# "lab1_ddp (2)" of browsers, "lab1_ddp-2" of Canvas, "lab1_ddp-Copy2" of Jupyter.
_COPY = re.compile(r"(.*?)(?: ?\((\d{1,4})\)|(?:-Copy|-)(\d{1,4}))", re.IGNORECASE)
_GRADE_ID = re.compile(rb'"grade_id"\s*:\s*"([A-Za-z0-9_-]{1,64})"')
_PIECE_BYTES = 4 << 20
_MAX_SEARCHED = 256 << 20  # bytes of a file
_SHOWN = 5  # files that are named


@dataclass(frozen=True, order=True)
class Submission:
    """A notebook to grade; `student` is safe to display and not necessarily unique."""

    student: str
    path: Path


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        left_out: folder or file of a class that is no submission -> why.
        notes: notebook -> what a person should know about why this one was taken.
    """

    submissions: list[Submission]
    left_out: dict[Path, str]
    notes: dict[Path, str] = field(default_factory=dict)

    def explain(self) -> Iterator[str]:
        """One line per thing found: whose submission it is, or why it is none."""
        for submission in self.submissions:
            note = self.notes.get(submission.path, "")
            yield f"{submission.student}: {submission.path}{f' ({note})' if note else ''}"
        for path, why in self.left_out.items():
            yield f"{display_name(path.name)}: not graded: {why}"


class AmbiguousError(Exception):
    """A folder could be two submissions; the message says which."""


def find_submissions(paths: Sequence[Path], lab: str, *, strict: bool = True) -> Found:
    """The notebooks of one lab in files and folders, sorted by student.

    A path is a notebook, the folder of one student (``lab.ipynb`` or ``lab/lab.ipynb`` in it), or
    the folder of a class: ``STUDENT/lab.ipynb`` or nbgrader's ``STUDENT/lab/lab.ipynb``. In a
    class's folder, a student's only notebook of the lab is taken even if its name is different, and
    of copies such as ``lab (1).ipynb`` the one with the highest number. A notebook of a different
    lab is no submission. Links that lead out of a class's folder are not followed.

    Args:
        strict: without it, a folder may be empty, and a student whose folder holds several
            notebooks of the lab is left out and stops nobody else.

    Raises:
        ValueError: a path does not exist, cannot be listed, holds no submission, or could be both
            the folder of one student and the folder of a class; or folders hold several notebooks
            of the lab.
    """
    found: dict[Path, Submission] = {}
    everything = Found([], {})
    unclear: dict[Path, str] = {}
    for path in map(Path, paths):
        try:
            here = list(_submissions(path, lab, everything, unclear))
        except OSError as error:
            why = f"{path} cannot be listed: {error.strerror}"
            if not os.path.lexists(path):  # it may have been removed meanwhile
                why = f"there is no file or folder {path}"
            raise ValueError(why) from None
        except AmbiguousError as error:
            unclear[path] = str(error)
            continue
        if not here and not unclear and strict:
            why = "".join(f"\n  {line}" for line in everything.explain())
            raise ValueError(
                f"{path} holds no submission: expected {lab}.ipynb, STUDENT/{lab}.ipynb "
                f"or STUDENT/{lab}/{lab}.ipynb in it{why}"
            )
        found |= {submission.path: submission for submission in here}
    if unclear and strict:
        lines = [f"{display_name(str(path))}: {why}" for path, why in unclear.items()]
        raise ValueError("\n  ".join(["rename or remove all notebooks but one:", *lines]))
    left_out = dict(sorted((everything.left_out | unclear).items()))
    return Found(sorted(found.values()), left_out, everything.notes)


def display_name(name: str) -> str:
    """The name of a file or student, without characters that a terminal or page acts on."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _submissions(
    path: Path, lab: str, found: Found, unclear: dict[Path, str]
) -> Iterator[Submission]:
    absolute = Path(os.path.abspath(path))
    if not path.is_dir():
        os.lstat(path)
        folder = absolute.parent
        student = folder.parent.name if folder.name == lab else folder.name
        if (other := _other_lab(path, lab)) is not None:
            raise ValueError(f"{path} is the notebook of {other}, not of {lab}")
        yield Submission(display_name(student if absolute.stem == lab else absolute.stem), path)
    elif alone := _of_student(path, lab, found):
        others = [f for f in path.iterdir() if f != alone.parent and _is_students(f, lab)]
        if alone.parent == path and others:
            names = ", ".join(sorted(display_name(folder.name) for folder in others))
            raise ValueError(
                f"{path} holds {lab}.ipynb, as the folder of one student does, and folders that "
                f"hold one, as that of a class does ({names}): move the one or the others away, "
                "or name the notebooks that are to be graded"
            )
        if (other := _other_lab(alone, lab)) is not None:
            raise ValueError(f"{alone} is the notebook of {other}, not of {lab}")
        student = absolute.parent.name if absolute.name == lab else absolute.name
        yield Submission(display_name(student), alone)
    else:
        for child in sorted(path.iterdir()):
            try:
                notebook = _of_child(child, path, lab, found)
            except AmbiguousError as error:
                unclear[child] = str(error)
                continue
            if notebook is not None:
                yield Submission(display_name(child.name), notebook)


def _of_child(child: Path, inside: Path, lab: str, found: Found) -> Path | None:
    """The submission in an entry of a class's folder; if there is none, `found` says why."""
    name = child.name
    if name in TOOLS_OWN:
        return None
    if not child.is_dir():
        if name.casefold().endswith(_HANDED_IN):
            found.left_out[child] = "a loose file: put it, unpacked, into a folder of its student"
        return None
    if child.is_symlink() and not child.resolve().is_relative_to(inside.resolve()):
        found.left_out[child] = "a link that leads out of the class's folder"
        return None
    try:
        notebook = _of_student(child, lab, found) or _only_notebook(child, lab, found)
    except OSError:  # cannot be listed: reading the notebook reports this for the student
        notebook = child / f"{lab}.ipynb"
    if notebook is None:
        if not name.startswith("."):
            found.left_out[child] = _why_nothing(child, lab)
    elif name.startswith("."):
        found.left_out[child] = "its name begins with a dot: rename it"
        return None
    elif (other := _other_lab(notebook, lab)) is not None:
        found.left_out[child] = f"holds the notebook of {other}, and none of {lab}"
        return None
    return notebook


def _why_nothing(folder: Path, lab: str) -> str:
    """Why a folder of a class is no submission, with what there is instead."""
    why = f"there is no {lab}.ipynb and no other notebook in it"
    deeper = [f.relative_to(folder) for f in sorted(folder.glob(f"*/**/{lab}.ipynb"))[:_SHOWN]]
    nested = folder / lab if (folder / lab).is_dir() and not (folder / lab).is_symlink() else folder
    there = [f.relative_to(folder) for f in sorted(nested.iterdir()) if not f.is_dir()]
    names = ", ".join(display_name(str(each)) for each in (deeper or there)[:_SHOWN])
    return f"{why}, but {names}" if names else why


def _is_students(folder: Path, lab: str) -> bool:
    """Whether the folder holds a submission named exactly like the lab."""
    if folder.name.startswith(".") or not folder.is_dir():
        return False
    return any(os.path.lexists(folder / name) for name in (f"{lab}.ipynb", f"{lab}/{lab}.ipynb"))


def _of_student(folder: Path, lab: str, found: Found) -> Path | None:
    direct, nested = folder / f"{lab}.ipynb", folder / lab
    if os.path.lexists(direct):
        return direct
    if nested.is_dir() and not nested.is_symlink():
        return _only_notebook(nested, lab, found)
    return None


def _only_notebook(folder: Path, lab: str, found: Found) -> Path | None:
    """`lab`.ipynb if it exists, else the only notebook of the lab; None if there is no notebook.

    If there are several notebooks that say nothing about their lab, returns the missing
    `lab`.ipynb, which is then reported.

    Raises:
        AmbiguousError: there are several notebooks of the lab, and they are no numbered copies.
    """
    expected = folder / f"{lab}.ipynb"
    if os.path.lexists(expected):
        return expected
    others = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.casefold() == ".ipynb" and not path.name.startswith(".")
    )
    if len(others) < 2:
        return others[0] if others else None
    ours = [path for path in others if lab in labs_in(path)]
    if len(ours) == 1:
        return ours[0]
    if not ours:
        foreign = [path for path in others if _other_lab(path, lab) is not None]
        rest = [path for path in others if path not in foreign]
        return rest[0] if len(rest) == 1 else expected if rest else foreign[0]
    copies = {path: _COPY.fullmatch(path.stem) for path in ours}
    stems = {(match[1] if match else path.stem).casefold() for path, match in copies.items()}
    if len(stems) > 1:
        names = ", ".join(display_name(path.name) for path in ours)
        raise AmbiguousError(f"several notebooks of {lab}: {names}")
    newest = max(ours, key=lambda path: int(match[2] or match[3]) if (match := copies[path]) else 0)
    found.notes[newest] = f"the newest of {len(ours)} copies"
    return newest


def labs_in(notebook: Path) -> set[str]:
    """The labs whose checks the file names; empty if it cannot be read."""
    names: set[str] = set()
    left, tail = _MAX_SEARCHED, b""
    try:
        if not notebook.is_file() or notebook.is_symlink():
            return set()
        with notebook.open("rb") as file:
            while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
                left -= len(piece)
                names |= {name.decode() for name in _GRADE_ID.findall(tail + piece)}
                tail = piece[-128:]
    except OSError:
        return set()
    labs = map(get_lab, lab_names())
    return {lab.name for lab in labs if any(c.name in names for c in lab.criteria)}


def _other_lab(notebook: Path, lab: str) -> str | None:
    """The lab whose notebook this is, if it is not of `lab`."""
    labs = labs_in(notebook)
    return None if lab in labs or not labs else ", ".join(sorted(labs))
