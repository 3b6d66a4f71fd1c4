"""Whom nbgrader need not look at again: the gradebook has these verdicts already.

nbgrader marks everything that a person has graded as "needs manual grade" when it takes a
submission in anew, so only those go through it whose scores it does not have yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nbgrader.api import Gradebook, MissingEntry

from autograder.course.course import Course
from autograder.gradebook.database import (
    TIMESTAMP,
    gradebook_path,
    handed_in_at,
    noted_lateness,
    open_gradebook,
    seconds_late,
)
from autograder.records.grading import Grading, Record
from autograder.submission.intake import Submission


def find_settled(
    course: Course,
    lab: str,
    submissions: Sequence[Submission],
    records: Sequence[Record],
    before: Mapping[str, Grading],
) -> set[str]:
    """Students of whom nbgrader has this very submission with these very verdicts already.

    Not counted is who was taken in before `nbgrader_config.py`, the lab's solution, a
    `timestamp.txt`, the due date or an extension changed: late penalties, say, may be others now.

    Args:
        before: the gradings that nbgrader may have taken in.
    """
    made = course.build / "nbgrader"
    if not gradebook_path(course).is_file():
        return set()
    settled = set()
    solutions = (course.root / "solutions" / lab).glob("*.ipynb")
    config = [course.root / "nbgrader_config.py", *solutions]
    noted = noted_lateness(course, lab)
    with open_gradebook(course) as book:
        late = seconds_late(book, lab)
        for submission, record in zip(submissions, records, strict=True):
            student = submission.student
            taken = made / "submitted" / student / lab / f"{lab}.ipynb"
            graded = made / "autograded" / student / lab / f"{lab}.ipynb"
            newer = [*config, taken.with_name(TIMESTAMP)]
            if (
                student in before
                and _said(before[student].record) == _said(record)
                and graded.is_file()
                and _same_file(submission.path, taken)
                and _same_time(submission.path, taken)
                and all(_time(path) <= _time(graded) for path in newer)
                and late.get(student, 0.0) == noted.get(student, 0.0)
                and _scores(book, lab, student) == _points(record)
            ):
                settled.add(student)
    return settled


def _scores(book: Gradebook, lab: str, student: str) -> dict[str, tuple[float, float]] | None:
    """Criterion -> points and full points in nbgrader's gradebook."""
    try:
        grades = book.find_submission_notebook(lab, lab, student).grades
    except MissingEntry:
        return None
    return {
        grade.name: (grade.auto_score, grade.max_score)
        for grade in grades
        if grade.auto_score is not None and grade.cell.cell_type == "code"
    }


def _said(record: Record) -> list[tuple[str, str, str]]:
    return [(c["name"], c["status"], c["message"]) for c in record["criteria"]]


def _points(record: Record) -> dict[str, tuple[float, float]]:
    return {
        c["name"]: (c["points"], 0.0 if c.get("extra") else c["max_points"])
        for c in record["criteria"]
        if c["status"] != "BLOCKED"  # for a person: nbgrader has no score of it
    }


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other) or one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _same_time(one: Path, other: Path) -> bool:
    try:
        return handed_in_at(one) == handed_in_at(other)
    except ValueError:
        return not other.with_name(TIMESTAMP).exists()  # it was left out


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0
