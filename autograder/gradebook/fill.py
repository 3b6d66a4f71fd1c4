"""Writes the verdicts of a class into nbgrader's gradebook."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nbformat

from autograder.course.course import Course, CourseError
from autograder.files import write_whole
from autograder.gradebook.commands import NbGrader
from autograder.gradebook.database import TIMESTAMP, handed_in_at, note_lateness
from autograder.gradebook.late import keep_calendar
from autograder.gradebook.preprocessors import refused
from autograder.gradebook.roster import may_be_id
from autograder.records.record import Record
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.intake import IntakeLimits, sha256_of
from autograder.submission.without_run import known_record


def check_names(submissions: Sequence[Submission]) -> None:
    """Raises ValueError, with all names, if students are doubled or nbgrader forbids a name."""
    names = Counter(submission.student for submission in submissions)
    wrong = [
        f"{count} submissions are by {name!r}: grade them one by one"
        for name, count in names.items()
        if count > 1
    ]
    wrong += [
        f"{name!r} cannot be a student's name in nbgrader: rename the folder, or grade with "
        "--no-gradebook"
        for name in names
        if not may_be_id(name)
    ]
    if wrong:
        raise ValueError("\n  ".join(wrong))


def begin_nbgrader(course: Course, lab: str) -> NbGrader:
    """Starts nbgrader, which puts the lab into its gradebook while the class is graded."""
    # nbgrader deletes a release before it writes the new one, and may fail in between. So it gets
    # its own release folder, and not the one with the students' notebooks.
    release = course.nbgrader / "release"
    nbgrader = NbGrader(course)
    nbgrader.begin(
        "generate_assignment", lab, "--force", f"--CourseDirectory.release_directory={release}"
    )
    return nbgrader


def fill_gradebook(
    submissions: Sequence[Submission],
    records: Sequence[Record],
    class_run: ClassRun,
    settled: Collection[str] = (),
    nbgrader: NbGrader | None = None,
) -> Path:
    """Has nbgrader write the verdicts to its gradebook, and each student's feedback.

    Args:
        settled: students whose verdicts are already in the gradebook; their grades stay as they
            are.
        nbgrader: from `begin_nbgrader`; default: one that begins now.

    Returns:
        the folder with one feedback page per student.

    Raises:
        CourseError: nbgrader failed; the message has the end of what it said.
    """
    course, lab = class_run.course, class_run.lab_name
    made = course.nbgrader
    ours = {submission.student for submission in submissions}
    for submission, record in zip(submissions, records, strict=True):
        target = made / "submitted" / submission.student / lab / f"{lab}.ipynb"
        if submission.path.resolve() == target.resolve():
            _rewrite_time(target)
            if what := _unreadable(target):  # we must not change the submitted file itself
                ours.remove(submission.student)
                print(
                    f"autograder: not in the gradebook, as nbgrader cannot read it: {what}",
                    file=sys.stderr,
                )
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_time(submission.path, target)
        intake = class_run.read(submission.path)
        # nbgrader would stop for the whole class at a file that it cannot read.
        if intake.notebook is None or not _is_readable(submission.path):
            stand_in = intake.notebook or refused(
                class_run.master, intake.invalid or "", submission.path
            )
            nbformat.write(stand_in, target)
            if known_record(Submission(submission.student, target), class_run) is None:
                key = class_run.key_of(sha256_of(target))
                executed = class_run.executed_path(class_run.key_of(intake.sha256))
                if executed.is_file():
                    shutil.copyfile(executed, class_run.executed_path(key))
                class_run.journal.append_record(key, record)
        else:
            shutil.copyfile(submission.path, target)
    everyone = {f.name for f in (made / "submitted").iterdir() if "," not in f.name}

    def only(students: set[str]) -> str:
        return f"--CourseDirectory.student_id_exclude={','.join(sorted(everyone - students))}"

    trusted = f"--GradeWithReferee.trusted={not class_run.sandboxed}"
    failed: CourseError | None = None
    new = ours - set(settled)
    with nbgrader or begin_nbgrader(course, lab) as begun:
        begun.wait()
        keep_calendar(course, lab, new)
        if new:
            try:
                begun.run("autograde", lab, "--force", only(new), trusted)
            except CourseError as error:  # for one student; nbgrader goes on with the others
                failed = error
            note_lateness(course, lab, new)
        if ours:
            begun.run("generate_feedback", lab, "--force", only(ours))
    if failed is not None:
        raise failed
    return made / "feedback"


def _copy_time(path: Path, target: Path) -> None:
    """Copies `timestamp.txt`, from which nbgrader computes late penalties.

    A file that cannot be read is left out, because nbgrader would stop for the whole class.
    """
    copy = target.with_name(TIMESTAMP)
    try:
        text = handed_in_at(path)
    except ValueError as error:
        text = ""
        print(f"autograder: {error}; the submission counts as in time", file=sys.stderr)
    if not text:
        copy.unlink(missing_ok=True)
    elif not copy.is_file() or copy.read_bytes() != text.encode():
        copy.write_bytes(text.encode())


def _rewrite_time(notebook: Path) -> None:
    """Rewrites a time that we can read, in the only form that nbgrader reads the same way."""
    path = notebook.with_name(TIMESTAMP)
    try:
        text = handed_in_at(notebook)
    except ValueError:
        return  # `_unreadable` reports it
    if text and path.read_bytes() != text.encode():
        write_whole(path, text.encode())


@contextmanager
def _quiet_nbformat() -> Iterator[None]:
    """Silences nbformat: its log about a notebook is for the author, not for our terminal."""
    logger = logging.getLogger("traitlets")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _is_readable(path: Path) -> bool:
    """Whether nbformat can read the notebook; nbformat is stricter than intake.

    nbgrader reads outputs, too. So it gets a copy without outputs of a file that is too big.
    """
    try:
        if path.stat().st_size > IntakeLimits().max_bytes:
            return False
        with warnings.catch_warnings(), _quiet_nbformat():
            warnings.simplefilter("ignore")  # one per cell without an id, or with an id twice
            notebook = nbformat.read(path, as_version=nbformat.current_nbformat)
            nbformat.validate(notebook)
    except Exception:
        return False
    return True


def _unreadable(path: Path) -> str:
    """Which part of a submission in nbgrader's own folder nbgrader cannot read; empty if none."""
    if not _is_readable(path):
        return str(path)
    try:
        handed_in_at(path)
    except ValueError as error:
        return str(error)
    return ""
