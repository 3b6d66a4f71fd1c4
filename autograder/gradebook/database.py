"""Opens nbgrader's gradebook, and reads the grades in it."""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbgrader.api import Gradebook, MissingEntry
from sqlalchemy.exc import DatabaseError

from autograder.course.course import Course, CourseError
from autograder.course.times import MAX_CHARS, as_utc, parse_time
from autograder.files import write_whole
from autograder.gradebook.full_marks import max_score

TIMESTAMP = "timestamp.txt"  # nbgrader's file beside a notebook, with the time of submission


def gradebook_path(course: Course) -> Path:
    """The database that `nbgrader_config.py` names."""
    return course.nbgrader / "gradebook.db"


def put_alembic_on_path() -> None:
    """Makes PATH lead to this Python's scripts: nbgrader starts `alembic` by name.

    They are not on PATH if the virtual environment is not activated.
    """
    scripts, folders = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if scripts not in folders.split(os.pathsep):
        os.environ["PATH"] = f"{scripts}{os.pathsep}{folders}"


@contextmanager
def open_gradebook(course: Course, *, create: bool = False) -> Iterator[Gradebook]:
    """Opens the gradebook, and closes it at the end; uncommitted changes are lost.

    Args:
        create: make a gradebook if there is none.

    Raises:
        CourseError: there is no gradebook, a different process has locked it, or the file is not a
            gradebook.
    """
    path = gradebook_path(course)
    if not path.is_file() and not create:
        raise CourseError(f"there is no gradebook yet ({path}): run `autograder grade` first")
    path.parent.mkdir(parents=True, exist_ok=True)
    put_alembic_on_path()
    try:
        with Gradebook(f"sqlite:///{path}") as book:
            yield book
    except DatabaseError as error:
        raise CourseError(
            f"{path} cannot be used ({error.orig}): is another nbgrader writing to it?"
        ) from error


def same_name(name: str) -> str:
    """A form of a name that ignores upper and lower case and the Unicode form of accents.

    File names of macOS have accents in a different Unicode form.
    """
    return unicodedata.normalize("NFC", name).casefold()


@dataclass(frozen=True, kw_only=True)
class Person:
    """One line of a class list; missing values are empty."""

    line: int
    id: str
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    lms_id: str = ""
    sis_user_id: str = ""
    sis_login_id: str = ""
    section: str = ""
    github: str = ""
    group: str = ""

    def names(self) -> set[str]:
        """All names that can identify this person in a gradebook.

        An LMS's number for a user may look like a student number of a different person. So it gets
        the prefix "LMS"; no other name has capital letters.
        """
        all_ = (self.id, self.email, self.sis_user_id, self.sis_login_id)
        names = {same_name(name) for name in all_ if name}
        return names | ({f"LMS {same_name(self.lms_id)}"} if self.lms_id else set())


def in_gradebook(student: Any) -> Person:
    """What nbgrader knows about a student."""
    return Person(
        line=0,
        id=str(student.id),
        first_name=str(student.first_name or ""),
        last_name=str(student.last_name or ""),
        email=str(student.email or ""),
        lms_id=str(student.lms_user_id or ""),
    )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One graded cell of one submission."""

    name: str
    score: float
    max_score: float
    needs_person: bool
    comment: str = ""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """One student's grade in one lab, from nbgrader.

    Attributes:
        submitted: whether there is a submission; without a submission there is no score.
        score: points of all cells, including points given by a person, minus the late penalty; at
            least 0.
        penalty: points that were subtracted for handing in late.
        max_score: full marks; reflections and extra points come on top, see `full_marks`.
    """

    person: Person
    submitted: bool
    score: float = 0.0
    penalty: float = 0.0
    max_score: float
    cells: tuple[Cell, ...] = ()

    @property
    def student(self) -> str:
        """The student's name in the gradebook."""
        return self.person.id

    @property
    def needs_person(self) -> bool:
        """Whether a person still has to grade something."""
        return any(cell.needs_person for cell in self.cells)


def handed_in_at(notebook: Path) -> str:
    """The time in `timestamp.txt` beside a notebook, in nbgrader's form; empty if there is none.

    Raises:
        ValueError: the file holds no time that has one meaning (`times.parse_time`), or cannot be
            read.
    """
    path = notebook.with_name(TIMESTAMP)
    if not path.is_file() or path.is_symlink():
        return ""
    try:
        with path.open("rb") as file:
            text = file.read(4 * MAX_CHARS).decode("utf-8-sig", errors="replace")
        return as_utc(parse_time(text)) if text.strip() else ""
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def seconds_late(book: Gradebook, lab: str) -> dict[str, float]:
    """Student -> seconds late, by the current due dates and extensions, which may change later."""
    late = {str(s.student_id): s.total_seconds_late for s in book.assignment_submissions(lab)}
    return {student: float(seconds) for student, seconds in late.items()}


def note_lateness(course: Course, lab: str, students: Collection[str]) -> None:
    """Saves how late these students are, after nbgrader has subtracted points for this."""
    with open_gradebook(course) as book:
        late = seconds_late(book, lab)
    noted = noted_lateness(course, lab) | {name: late.get(name, 0.0) for name in students}
    write_whole(_lateness_path(course, lab), json.dumps(noted).encode())


def noted_lateness(course: Course, lab: str) -> dict[str, float]:
    """Student -> seconds late at the time when nbgrader last graded the submission."""
    try:
        return json.loads(_lateness_path(course, lab).read_bytes())
    except (OSError, ValueError):
        return {}


def _lateness_path(course: Course, lab: str) -> Path:
    return gradebook_path(course).with_name(f"{lab}.seconds_late.json")


def graded_labs(book: Gradebook) -> list[str]:
    """The labs with at least one submission."""
    return sorted(str(each.name) for each in book.assignments if each.num_submissions)


def read_grades(book: Gradebook, lab: str) -> list[Grade]:
    """The grades of all students that nbgrader knows.

    Raises:
        CourseError: nbgrader does not know the lab.
    """
    try:
        assignment: Any = book.find_assignment(lab)
    except MissingEntry:
        raise CourseError(f"the gradebook has no {lab}: run `autograder grade` first") from None
    by_student: dict[str, Any] = {
        str(each.student_id): each for each in book.assignment_submissions(lab)
    }
    grades = []
    for student in book.students:
        submission = by_student.get(str(student.id))
        about: dict[str, Any] = {}
        if submission is not None:
            penalty = float(submission.late_submission_penalty or 0.0)
            about = {
                "score": max(0.0, float(submission.score) - penalty),
                "penalty": penalty,
                "cells": tuple(_cells(submission)),
            }
        grades.append(
            Grade(
                person=in_gradebook(student),
                submitted=submission is not None,
                max_score=max_score(assignment),
                **about,
            )
        )
    return grades


def points_by_person(course: Course) -> dict[str, dict[str, str]]:
    """Lab -> student -> the points that a person gave for answers, or "to give"."""
    if not gradebook_path(course).is_file():
        return {}
    with open_gradebook(course) as book:
        return {
            lab: {
                str(each.student_id): "to give"
                if each.needs_manual_grade
                else f"{each.written_score:g}"
                for each in book.assignment_submissions(lab)
            }
            for lab in graded_labs(book)
        }


def _cells(submission: Any) -> Iterator[Cell]:
    for notebook in submission.notebooks:
        comments = {str(c.name): str(c.comment or "") for c in notebook.comments}
        for grade in notebook.grades:
            yield Cell(
                name=str(grade.name),
                score=float(grade.score),
                max_score=float(grade.max_score),
                needs_person=bool(grade.needs_manual_grade),
                comment=comments.get(str(grade.name), ""),
            )
