"""Preprocessors for nbgrader, which turn verdicts into outputs of the check cells.

nbgrader takes a cell's grade from its outputs: an error is zero, no output is full marks. So the
submission's own outputs in a check's cell are dropped, and the referee's verdict is the only output
there.

    generate:  KeepFullMarks    the lab's full marks and due date, after nbgrader's SaveCells
    sanitize:  ReadWithIntake   the same intake as `autograder grade`, before nbgrader looks at it
    autograde: GradeWithReferee box + kernel + papermill + referee, or the journal's record of it
               SavePoints       the points of every criterion, after nbgrader's SaveAutoGrades
    feedback:  TellStudents     what the page says, in place of nbgrader's list of cells
"""

from __future__ import annotations

import copy
import html
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.api import Gradebook
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Bool

from autograder.authoring.notebooks import REFLECT_POINTS
from autograder.box.sandbox import probe_support
from autograder.course.course import Course, CourseError
from autograder.course.times import parse_time
from autograder.criteria import get_lab
from autograder.criteria.criterion import Status, Verdict
from autograder.gradebook.database import TIMESTAMP, handed_in_at
from autograder.gradebook.full_marks import leave_reflections_out
from autograder.gradebook.late import set_due_date, set_extension
from autograder.plain_text import clean
from autograder.proof.bundled import is_bundled
from autograder.records.record import Record
from autograder.report.feedback import NOT_YET, Answer, Feedback, question_of, read_check
from autograder.report.safe_html import shorten
from autograder.submission.choose_box import choose_sandbox
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.intake import read_submission, sha256_of
from autograder.submission.without_run import known_record

SHOWN_BYTES = 20_000  # of a file that is no notebook
MODEL = "model answer"  # kind of a cell
_ANSWER = re.compile(r"<!-- BEGIN SOLUTION -->(.*?)<!-- END SOLUTION -->", re.DOTALL)


class _Bridge(NbGraderPreprocessor):
    def submission(self, resources: dict[str, Any]) -> Submission:
        """The submitted file."""
        names = resources["nbgrader"]
        folder = CourseDirectory(parent=self)
        path = folder.format_path(folder.submitted_directory, names["student"], names["assignment"])
        return Submission(names["student"], Path(path) / f"{names['notebook']}.ipynb")


class KeepFullMarks(_Bridge):
    """Runs after nbgrader's SaveCells, which takes reflections for a part of the full marks."""

    def preprocess(self, nb: NotebookNode, resources: dict[str, Any]):
        """Puts the lab's full marks and due date into the gradebook."""
        names = resources["nbgrader"]
        with Gradebook(names["db_url"]) as book:
            leave_reflections_out(book, names["assignment"])
            set_due_date(book, Course.find(), names["assignment"])
        return nb, resources


class ReadWithIntake(_Bridge):
    """Runs first of nbgrader's sanitizers."""

    def preprocess(self, nb: NotebookNode, resources: dict[str, Any]):
        """The submission with the master's locked cells; if it is invalid, the untouched master."""
        submission = self.submission(resources)
        self._correct_time(submission, resources["nbgrader"])
        names = resources["nbgrader"]
        with Gradebook(names["db_url"]) as book:
            set_extension(book, Course.find(), names["assignment"], submission.student)
        master = Course.find().master(names["assignment"])
        intake = read_submission(submission.path, master)
        if intake.notebook is None:
            return refused(master, intake.invalid or "", submission.path), resources
        return intake.notebook, resources

    def _correct_time(self, submission: Submission, names: dict[str, Any]) -> None:
        """Stores the time as we read it, because nbgrader reads -0800 as 800 seconds."""
        try:
            text = handed_in_at(submission.path)
        except ValueError as error:
            self.log.error(f"{error}; the submission counts as in time")
            text = ""
        path = submission.path.with_name(TIMESTAMP)
        if path.is_file() and path.read_bytes().strip():
            time = parse_time(text).replace(tzinfo=None) if text else None
            with Gradebook(names["db_url"]) as book:
                handed_in: Any = book.find_submission(names["assignment"], submission.student)
                handed_in.timestamp = time
                book.db.commit()


class GradeWithReferee(_Bridge):
    """Replaces nbgrader's Execute."""

    trusted = Bool(False, help="Grade without a sandbox where there is none.").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: dict[str, Any]):
        """Takes the submission's record from the journal, or runs the submission."""
        course, lab = Course.find(), get_lab(resources["nbgrader"]["assignment"])
        submission = self.submission(resources)
        class_run = ClassRun(course, lab.name, lab.grading_world_size, sandboxed=True)
        record = known_record(submission, class_run)  # may come from a machine with a sandbox
        if record is None:
            from autograder.submission.attempt import grade  # slow: imports torch

            bundled = not probe_support().works and is_bundled(submission.path, lab.name)
            sandboxed = choose_sandbox(self.trusted, bundled)
            record = grade(submission, replace(class_run, sandboxed=sandboxed))
        if record.infra:
            raise CourseError(record.infra.message)
        executed = class_run.executed_path(class_run.key_of(sha256_of(submission.path)))
        if executed.is_file():
            nb.cells = nbformat.read(executed, as_version=4).cells
        shorten(nb)
        show_verdicts(nb, record)
        add_model_answers(nb, course.root / "solutions" / lab.name / f"{lab.name}.ipynb")
        _restore_points(nb, class_run.master)
        resources["minidist_record"] = record
        return nb, resources


class SavePoints(_Bridge):
    """Saves the points of every criterion as the record has them, after nbgrader's SaveAutoGrades.

    nbgrader itself knows all or nothing per cell: 0 of 0 for extra points, all points where a gate
    gives fewer. A BLOCKED criterion gets no score, so nbgrader lists its cell for a person.
    """

    def preprocess(self, nb: NotebookNode, resources: dict[str, Any]):
        """Writes the scores into the gradebook."""
        record: Record = resources["minidist_record"]
        names = resources["nbgrader"]
        with Gradebook(names["db_url"]) as book:
            for verdict in record.criteria:
                grade: Any = book.find_grade(
                    verdict.criterion, names["notebook"], names["assignment"], names["student"]
                )
                blocked = verdict.status == Status.BLOCKED
                grade.auto_score = None if blocked else verdict.points
                # A person has to look at what could not be read: formgrader must not call it done.
                refused = verdict.status == Status.INVALID and grade.manual_score is None
                grade.needs_manual_grade = blocked or refused or grade.manual_score is not None
            book.db.commit()
        for cell in nb.cells:  # for the feedback page
            name = _grade_id(cell)
            if name in record.by_name:
                cell.metadata["minidist"] = {"verdict": record.by_name[name].record()}
        return nb, resources


class TellStudents(_Bridge):
    """Runs after nbgrader's GetGrades; collects what the feedback page shows."""

    def preprocess(self, nb: NotebookNode, resources: dict[str, Any]):
        """Gives the template its `Feedback`, and takes model answers out."""
        nb.cells = [c for c in nb.cells if c.metadata.get("minidist", {}).get("kind") != MODEL]
        names = resources["nbgrader"]
        lab = get_lab(names["assignment"])
        where = (names["notebook"], names["assignment"], names["student"])
        checks, answers = [], []
        with Gradebook(names["db_url"]) as book:
            for cell in nb.cells:
                about = cell.metadata.get("nbgrader", {})
                if not about.get("grade"):
                    continue
                if cell.cell_type == "code":
                    checks.append(read_check(lab, cell))
                    continue
                grade: Any = book.find_grade(about["grade_id"], *where)
                waits = grade.needs_manual_grade and grade.manual_score is None
                if waits:
                    said = about.get("comment")
                    about["comment"] = f"{NOT_YET}\n\n{said}" if said else NOT_YET
                answers.append(
                    Answer(
                        name=about["grade_id"],
                        question=question_of(cell.source),
                        score=None if waits else about["score"],
                        points=REFLECT_POINTS,
                        # nbgrader gives an untouched cell 0 points, and asks nobody.
                        given=waits or grade.manual_score is not None,
                    )
                )
        resources["feedback"] = Feedback(
            lab=lab,
            student=names["student"],
            score=names["score"],
            max_score=names["max_score"],
            late_penalty=names["late_penalty"],
            checks=[check for check in checks if check is not None],
            answers=answers,
        )
        return nb, resources


def _restore_points(nb: NotebookNode, master: NotebookNode) -> None:
    """Gives reflections the points that students were told, where the gradebook has 0.

    nbgrader tells an answer from an untouched cell by a checksum that includes the points.
    """
    points = {
        cell.metadata.nbgrader.grade_id: cell.metadata.nbgrader.points
        for cell in master.cells
        if cell.cell_type == "markdown" and cell.metadata.get("nbgrader", {}).get("grade")
    }
    for cell in nb.cells:
        about = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown" and about.get("grade_id") in points:
            about["points"] = points[about["grade_id"]]


def add_model_answers(nb: NotebookNode, solution: Path) -> None:
    """Puts the model answer below each answer that a person grades, for that person only."""
    answers, shown = _model_answers(solution), []
    for cell in nb.cells:
        shown.append(cell)
        name = _grade_id(cell)
        if cell.cell_type == "markdown" and name in answers:
            text = f"**Model answer** (students do not see it)\n\n{answers[name]}"
            model = nbformat.v4.new_markdown_cell(text, id=f"model-{name}"[:64])
            model.metadata["minidist"] = {"kind": MODEL}
            shown.append(model)
    nb.cells = shown


@cache  # nbgrader grades a class in one process
def _model_answers(solution: Path) -> dict[str | None, str]:
    """Question -> model answer; empty for a course without its solutions."""
    if not solution.is_file():
        return {}
    return {
        _grade_id(cell): found[1].strip()
        for cell in nbformat.read(solution, as_version=4).cells
        if (found := _ANSWER.search(cell.source))
    }


def _grade_id(cell: NotebookNode) -> str | None:
    return cell.metadata.get("nbgrader", {}).get("grade_id")


def show_verdicts(nb: NotebookNode, record: Record) -> None:
    """Makes the verdict the only output of every check cell."""
    verdicts = record.by_name
    titles = {c.name: c.title for c in get_lab(record.lab).criteria}
    for cell in nb.cells:
        name = _grade_id(cell)
        if cell.cell_type == "code" and name in verdicts:
            cell.outputs = [verdict_output(verdicts[name], titles[name], record.sandboxed)]


def verdict_output(verdict: Verdict, title: str, sandboxed: bool) -> NotebookNode:
    """A display for PASS and BLOCKED, an error for any other status.

    nbgrader gives full marks for a display, and zero for an error.
    """
    extra = " extra" if verdict.extra else ""
    score = f"{verdict.points:g}/{verdict.max_points:g}{extra}"
    note = "" if sandboxed else "  (UNSANDBOXED)"
    if verdict.status == Status.PASS:
        said = f"{title}{note}" + (f". {verdict.message}" if verdict.message else "")
        text = f"✓ {score}  {said}"
        shown = f'<div style="color:#1a7f37"><b>✓ {score}</b> {html.escape(said)}</div>'
        return new_output("display_data", {"text/plain": text, "text/html": shown})
    if verdict.status == Status.BLOCKED:  # costs no points, so no error output
        text = f"○ {score}  {title}: not here. {verdict.message}{note}"
        return new_output("display_data", {"text/plain": text})
    ranks = ", ".join(f"rank {rank}: {status}" for rank, status in enumerate(verdict.ranks))
    lines = [f"✗ {score}  {title}: {verdict.status}{note}", *verdict.message.splitlines()]
    return new_output(
        "error",
        ename=str(verdict.status),
        evalue=verdict.message[:500],
        traceback=[*lines, *([f"({ranks})"] if ranks else [])],
    )


def refused(master: NotebookNode, reason: str, path: Path) -> NotebookNode:
    """The untouched lab, below the reason and the start of what was handed in.

    Used in place of a notebook that is invalid, so that a person sees what there is to grade.
    """
    text = f"**This submission could not be graded.** {html.escape(reason)}"
    shown = [nbformat.v4.new_markdown_cell(text, id="refused")]
    try:
        with path.open("rb") as file:
            handed_in = file.read(SHOWN_BYTES + 1)
    except OSError:
        handed_in = b""  # the reason says so
    if handed_in:
        more = "\n[…]" if len(handed_in) > SHOWN_BYTES else ""
        start = clean(handed_in[:SHOWN_BYTES].decode("utf-8", errors="replace"), SHOWN_BYTES)
        shown.append(nbformat.v4.new_raw_cell(f"{path.name}:\n{start}{more}", id="handed-in"))
    master = copy.deepcopy(master)
    master.cells[:0] = shown
    return master
