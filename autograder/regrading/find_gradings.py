"""Finds finished gradings in the journal, for replay, regrading and reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autograder.records.grading import Grading
from autograder.submission.find import Submission

MIN_PREFIX = 6  # shortest accepted beginning of a record's key, in characters


def find_grading(history: Sequence[Grading], name: str, lab: str | None = None) -> Grading:
    """The last grading of a student, or the one whose key begins with `name`.

    Raises:
        ValueError: there is no such grading, or `name` could mean several.
    """
    inside = [g for g in history if lab in (None, g.lab)]
    by_student = [g for g in inside if g.student == name]
    labs = sorted({g.lab for g in by_student})
    if len(labs) > 1:
        raise ValueError(f"{name!r} has records in {', '.join(labs)}: name one with --lab")
    if by_student:
        return by_student[-1]
    by_key = {g.key: g for g in inside if len(name) >= MIN_PREFIX and g.key.startswith(name)}
    if len(by_key) > 1:
        raise ValueError(f"{len(by_key)} records' keys begin with {name!r}: write more of it")
    if by_key:
        return by_key.popitem()[1]
    where = f" in {lab}" if lab else ""
    students = sorted({g.student for g in inside})
    known = ", ".join(students[:10]) + (", …" if len(students) > 10 else "")
    raise ValueError(
        f"the journal has no record of {name!r}{where} (a student's name, or the first "
        f"{MIN_PREFIX} characters or more of a record's key); it has: {known or 'nobody'}"
    )


# --- grade --student ----------------------------------------------------------------------------


def choose(submissions: Sequence[Submission], students: Sequence[str]) -> list[Submission]:
    """The submissions of these students.

    Raises:
        ValueError: a student has no submission here.
    """
    here = {submission.student for submission in submissions}
    if unknown := [name for name in students if name not in here]:
        raise ValueError(
            f"no submission by {', '.join(unknown)}; there are: {', '.join(sorted(here)[:20])}"
        )
    return [s for s in submissions if s.student in students]


def handed_in_before(
    history: Sequence[Grading], lab: str, students: Sequence[str]
) -> list[Submission]:
    """The submissions of these students that were graded last, under any file name.

    Raises:
        ValueError: a student was never graded in this lab, or a file no longer exists.
    """
    paths = {g.student: g.record.submission for g in history if g.lab == lab}
    if unknown := [name for name in students if name not in paths]:
        raise ValueError(f"no record of {', '.join(unknown)} in {lab}: name the notebook's path")
    found = [Submission(name, Path(paths[name])) for name in dict.fromkeys(students)]
    if gone := [submission.path for submission in found if not submission.path.exists()]:
        raise ValueError(f"there is no file or folder {gone[0]}: name the notebook's path")
    return found
