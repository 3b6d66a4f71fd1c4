"""Due dates, extensions and late penalties: from the course's calendar into nbgrader's gradebook.

nbgrader keeps an extension with a submission, so it cannot know one before the student hands in.
Extensions are therefore in `build/extensions.json`, as dates, and go into the gradebook whenever a
class is graded. Where the calendar says nothing, nbgrader's own due dates and policy stay.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nbgrader.api import Gradebook, MissingEntry
from nbgrader.plugins import LateSubmissionPlugin
from sqlalchemy.exc import SAWarning

from autograder.course.course import Course, CourseError
from autograder.files import write_whole
from autograder.gradebook.database import (
    gradebook_path,
    note_lateness,
    open_gradebook,
    same_name,
)

Extensions = dict[str, dict[str, datetime]]  # lab -> student -> until when, in UTC


class CoursePolicy(LateSubmissionPlugin):
    """The late policy of course.toml; nbgrader's own where course.toml has none for the lab."""

    def late_submission_penalty(
        self, student_id: str, score: float, total_seconds_late: float
    ) -> float | None:
        """The points to take off."""
        dates = Course.find().calendar.of(getattr(self.parent, "assignment_id", ""))
        if dates.late_per_day is None:
            return super().late_submission_penalty(student_id, score, total_seconds_late)
        return dates.penalty(score, total_seconds_late)


@dataclass(frozen=True)
class Late:
    """A submission that was late: by how much, and what it cost."""

    student: str
    seconds: float
    penalty: float

    @property
    def words(self) -> str:
        """How late, and what it costs, for a person."""
        days, rest = divmod(int(self.seconds), 24 * 3600)
        by = f"{days} d {rest // 3600} h" if days else f"{rest // 3600} h {rest // 60 % 60} min"
        return f"{by}: {self.penalty:g} points off" if self.penalty else f"{by}, nothing off"


def read_extensions(course: Course) -> Extensions:
    """All extensions.

    Raises:
        CourseError: the file is damaged.
    """
    path = extensions_path(course)
    try:
        found = json.loads(path.read_text("utf-8"))
        return {
            lab: {student: datetime.fromisoformat(until) for student, until in of.items()}
            for lab, of in found.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError) as error:
        raise CourseError(f"{path} is damaged: {error}") from None


def extensions_path(course: Course) -> Path:
    """Path of the extensions: private, as they are about students."""
    return course.build / "extensions.json"


def extend(course: Course, student: str, lab: str, until: datetime, *, new: bool = False) -> str:
    """Moves one student's due date; returns the student's name in the gradebook.

    Args:
        new: the gradebook need not know the student.

    Raises:
        CourseError: the lab has no due date, the new one is not later, or nobody has this name.
    """
    due = due_date(course, lab)
    if due is None:
        raise CourseError(
            f"{lab} has no due date: set due in [calendar.{lab}] of {course.root / 'course.toml'}"
        )
    if until <= due:
        raise CourseError(f"expected a time after {due.isoformat()}, when {lab} is due anyway")
    student = _known(course, student, new)
    found = read_extensions(course)
    found.setdefault(lab, {})[student] = until.astimezone(UTC)
    plain = {
        name: {who: when.isoformat() for who, when in sorted(of.items())}
        for name, of in sorted(found.items())
    }
    write_whole(extensions_path(course), json.dumps(plain, indent=1).encode() + b"\n")
    if gradebook_path(course).is_file():
        keep_calendar(course, lab)
    return student


def _known(course: Course, student: str, new: bool) -> str:
    """The student's name as the gradebook writes it. A misspelt name would extend nothing."""
    names: list[str] = []
    if gradebook_path(course).is_file():
        with open_gradebook(course) as book:
            names = [str(each.id) for each in book.students]
    same = [name for name in names if same_name(name) == same_name(student)]
    if same or new:
        return same[0] if same else student
    near = difflib.get_close_matches(student, names, n=3, cutoff=0.5)
    did = f"did you mean {' or '.join(near)}? " if near else ""
    raise CourseError(
        f"the gradebook has no student {student!r}: {did}Put the class into it with "
        "`autograder roster`, or say --new"
    )


def due_date(course: Course, lab: str) -> datetime | None:
    """When a lab is due: as the calendar says, else as nbgrader's gradebook says."""
    if (due := course.calendar.of(lab).due) is not None:
        return due
    if not gradebook_path(course).is_file():
        return None
    with open_gradebook(course) as book:
        try:
            naive: Any = book.find_assignment(lab).duedate
        except MissingEntry:
            return None
    return naive.replace(tzinfo=UTC) if naive else None


def keep_calendar(course: Course, lab: str, new: Collection[str] = ()) -> None:
    """Brings due date, extensions and penalties of a lab in the gradebook up to date.

    A penalty is changed in place, because nbgrader would mark all that a person has graded for
    review if it graded the submission again.

    Args:
        new: students whose submissions nbgrader is about to grade for the first time.
    """
    with open_gradebook(course) as book:
        try:
            book.find_assignment(lab)
        except MissingEntry:
            return
        changed = _keep(book, course, lab, new)
        book.db.commit()
    if changed:
        note_lateness(course, lab, changed)


def _keep(book: Gradebook, course: Course, lab: str, new: Collection[str]) -> set[str]:
    """Returns the students whose penalty was computed anew."""
    dates, extensions = course.calendar.of(lab), read_extensions(course).get(lab, {})
    assignment: Any = book.find_assignment(lab)
    if dates.due is not None:
        assignment.duedate = _naive(dates.due)
    for student in new:
        if student in extensions:
            book.update_or_create_student(student)
            with warnings.catch_warnings():  # nbgrader adds the parts before the submission
                warnings.simplefilter("ignore", SAWarning)
                book.update_or_create_submission(lab, student)
    changed = set()
    submissions: Any = book.assignment_submissions(lab)
    for submission in submissions:
        student = str(submission.student_id)
        if student in extensions and assignment.duedate is not None:
            submission.extension = _naive(extensions[student]) - assignment.duedate
        if dates.late_per_day is None or student in new:
            continue
        for notebook in submission.notebooks:
            penalty = dates.penalty(float(notebook.score), float(submission.total_seconds_late))
            notebook.late_submission_penalty = penalty or None
        changed.add(student)
    return changed


def set_due_date(book: Gradebook, course: Course, lab: str) -> None:
    """Takes the lab's due date from the calendar, if it has one."""
    if (due := course.calendar.of(lab).due) is not None:
        assignment: Any = book.find_assignment(lab)
        assignment.duedate = _naive(due)
        book.db.commit()


def set_extension(book: Gradebook, course: Course, lab: str, student: str) -> None:
    """Gives a submission the student's extension, which may be older than the submission."""
    until = read_extensions(course).get(lab, {}).get(student)
    submission: Any = book.find_submission(lab, student)
    if until is not None and submission.assignment.duedate is not None:
        submission.extension = _naive(until) - submission.assignment.duedate
        book.db.commit()


def late_students(course: Course, lab: str, students: Collection[str]) -> list[Late]:
    """Those of these students whose submission of a lab is late, as the gradebook has it."""
    if not gradebook_path(course).is_file():
        return []
    with open_gradebook(course) as book:
        found = []
        for submission in book.assignment_submissions(lab):
            student, seconds = str(submission.student_id), float(submission.total_seconds_late)
            if student in students and seconds > 0:
                penalty: Any = submission.late_submission_penalty
                found.append(Late(student, seconds, float(penalty or 0.0)))
    return sorted(found, key=lambda late: late.student)


def _naive(time: datetime) -> datetime:
    """UTC without a zone, as nbgrader's database keeps times."""
    return time.astimezone(UTC).replace(tzinfo=None)
