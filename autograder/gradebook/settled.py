"""Finds students whose verdicts are already in nbgrader's gradebook.

When nbgrader grades a submission again, it marks everything that a person has graded as "needs
manual grade". So nbgrader gets only the submissions whose scores it does not have yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nbgrader.api import Gradebook, MissingEntry

from autograder.course.course import Course
from autograder.criteria.criterion import Status
from autograder.gradebook.database import (
    TIMESTAMP,
    gradebook_path,
    handed_in_at,
    noted_lateness,
    open_gradebook,
    seconds_late,
)
from autograder.gradebook.late import keep_calendar
from autograder.records.grading import Grading
from autograder.records.record import Record
from autograder.submission.find import Submission


def find_settled(
    course: Course,
    lab: str,
    submissions: Sequence[Submission],
    records: Sequence[Record],
    before: Mapping[str, Grading],
) -> set[str]:
    """Students for whom nbgrader already has this same submission with these same verdicts.

    A student does not count if `nbgrader_config.py`, the lab's solution, the `timestamp.txt`, the
    due date or an extension has changed since: late penalties, for example, may then be different.

    Args:
        before: student -> last grading before this one, which nbgrader may have.
    """
    made = course.nbgrader
    if not gradebook_path(course).is_file():
        return set()
    settled = set()
    solutions = (course.root / "solutions" / lab).glob("*.ipynb")
    config = [course.root / "nbgrader_config.py", *solutions]
    keep_calendar(course, lab)
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
    """Criterion -> points and maximum points in nbgrader's gradebook."""
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
    return [(c.criterion, c.status, c.message) for c in record.criteria]


def _points(record: Record) -> dict[str, tuple[float, float]]:
    return {
        c.criterion: (c.points, 0.0 if c.extra else c.max_points)
        for c in record.criteria
        if c.status != Status.BLOCKED  # nbgrader has no score: a person grades it
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
        return not other.with_name(TIMESTAMP).exists()  # an unreadable file is not copied


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0
