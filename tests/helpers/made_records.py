"""A course with records that nobody had to run for: journal, executed notebooks, gradebook."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import nbgrader.api
from course import LAB, ROOT

from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.criteria.criterion import Status, Verdict
from autograder.gradebook.database import open_gradebook
from autograder.gradebook.full_marks import leave_reflections_out
from autograder.records.journal import Journal
from autograder.records.record import Record
from autograder.records.version import grader_version
from autograder.submission.attempt import grade
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.intake import read_submission

# nbgrader starts a process for each new gradebook to ask which version its tables have.
nbgrader.api.get_alembic_version = functools.cache(nbgrader.api.get_alembic_version)


def make_course(root: Path, lab: str = LAB) -> Course:
    """A course with one lab and a key."""
    root.mkdir(parents=True, exist_ok=True)
    for kind in ("labs", "solutions"):
        shutil.copytree(ROOT / kind / lab, root / kind / lab)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    course = Course(root)
    course.make_key()
    return course


def hand_in(course: Course, student: str, text: str = "", lab: str = LAB) -> Path:
    """A copy of the lab in which one cell is different."""
    notebook = course.master(lab)
    notebook.cells.append(nbformat.v4.new_code_cell(text or f"whose = {student!r}", id="own"))
    path = course.root / "handed_in" / student / f"{lab}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def made_record(
    student: str,
    lost: Mapping[str, str] | None = None,
    *,
    lab: str = LAB,
    path: Path | None = None,
    seconds: float = 10.0,
) -> Record:
    """A grading record; `lost` maps a criterion to its status, "*" stands for every one."""
    lost, criteria = lost or {}, []
    for criterion in get_lab(lab).criteria:
        status = Status(lost.get(criterion.name, lost.get("*", "PASS")))
        criteria.append(
            Verdict(
                criterion.name,
                status,
                criterion.points if status == "PASS" else 0.0,
                criterion.points,
                "" if status == "PASS" else f"{criterion.name}: it is {status}",
                (status,) * 3,
            )
        )
    return Record(
        submission=str(path or f"{student}/{lab}.ipynb"),
        student=student,
        lab=lab,
        world_size=get_lab(lab).grading_world_size,
        seconds=seconds,
        sandboxed=True,
        criteria=tuple(criteria),
    )


def file_record(
    course: Course,
    student: str,
    lost: Mapping[str, str] | None = None,
    *,
    lab: str = LAB,
    text: str = "",
) -> str:
    """Does what grading a new submission does to the course, and returns the record's key."""
    path = hand_in(course, student, text, lab)
    class_run = ClassRun(course, lab, get_lab(lab).grading_world_size, True)
    record = made_record(student, lost, lab=lab, path=path)
    return keep(class_run, Submission(student, path), record)


def keep(class_run: ClassRun, submission: Submission, record: Record) -> str:
    """What grading leaves in journal and `build/executed`; the record's key."""
    course, lab = class_run.course, class_run.lab_name
    intake = read_submission(submission.path, course.master(lab))
    key, journal = class_run.key_of(intake.sha256), Journal(course.journal_path)
    entry = {"kind": "verdict", "key": key, "seed_id": f"{submission.student}:{intake.sha256}"}
    entry |= {"grader_version": grader_version(lab), "seconds": 0.5}
    for verdict in record.criteria:
        journal.append(entry | verdict.record())
    journal.append_record(key, record)
    executed = class_run.executed_path(key)
    executed.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(intake.notebook, executed)
    return key


def take_in(course: Course, record: Record, by_person: float | None = None) -> None:
    """What nbgrader's autograde leaves of a student, who has answered one question.

    Args:
        by_person: the points of a person for the answer; None for not graded yet.
    """
    student, lab, made = record.student, record.lab, course.build / "nbgrader"
    for kind in ("submitted", "autograded"):
        folder = made / kind / student / lab
        folder.mkdir(parents=True, exist_ok=True)
        if Path(record.submission).is_file():
            shutil.copyfile(record.submission, folder / f"{lab}.ipynb")
    with open_gradebook(course, create=True) as book:
        book.update_or_create_assignment(lab)
        book.update_or_create_notebook(lab, lab)
        points = {c.criterion: (c.max_points, "code") for c in record.criteria}
        for name, (most, kind) in (points | {"reflect_1": (2, "markdown")}).items():
            book.update_or_create_grade_cell(name, lab, lab, max_score=most, cell_type=kind)
        leave_reflections_out(book, lab)
        book.update_or_create_student(student)
        book.update_or_create_submission(lab, student)
        for verdict in record.criteria:
            grade = book.find_grade(verdict.criterion, lab, lab, student)
            grade.auto_score, grade.needs_manual_grade = verdict.points, False
        if by_person is not None:
            answer = book.find_grade("reflect_1", lab, lab, student)
            answer.manual_score, answer.needs_manual_grade = by_person, False
        book.db.commit()


class stub_grading:
    """Stands for the pool: `lost` says what students lose, `asked` who was graded."""

    def __init__(self, monkeypatch: Any) -> None:
        self.lost: dict[str, Mapping[str, str]] = {}
        self.asked: list[str] = []
        self.again: list[bool] = []
        monkeypatch.setattr("autograder.batch.grade_class._run_pool", self._run_pool)
        monkeypatch.setattr(
            "autograder.submission.choose_box.choose_sandbox", lambda *_, **__: True
        )

    @staticmethod
    def class_run(course: Course, lab: str = LAB) -> ClassRun:
        return ClassRun(course, lab, get_lab(lab).grading_world_size, True)

    def _run_pool(self, todo: Any, class_run: ClassRun, jobs: int, done: Any) -> dict[int, str]:
        self.again.append(class_run.again)
        for index, submission in todo.items():
            self.asked.append(submission.student)
            if class_run.read(submission.path).notebook is None:
                done(index, grade(submission, class_run))  # nothing of it is run
                continue
            record = made_record(
                submission.student,
                self.lost.get(submission.student),
                lab=class_run.lab_name,
                path=submission.path,
                seconds=10.0 + len(self.asked),
            )
            keep(class_run, submission, record)
            done(index, record)
        return {}
