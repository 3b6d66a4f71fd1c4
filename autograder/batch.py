"""A whole class: submissions in parallel, progress on the terminal, then nbgrader's gradebook."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import nbformat
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autograder import workers
from autograder.bridge import refused
from autograder.course import Course, CourseError
from autograder.criteria.base import Lab
from autograder.gpus import divide, most_jobs, visible_gpus
from autograder.gradebook import TIMESTAMP, handed_in_at, note_lateness
from autograder.history import latest, read_history
from autograder.intake import Submission, read_submission
from autograder.journal import Journal
from autograder.roster import may_be_id
from autograder.run import (
    Record,
    Settings,
    back_off,
    executed_path,
    grade,
    known_record,
    not_graded,
    record_key,
)
from autograder.scratch import remove_abandoned
from autograder.status import Announcer

NBGRADER_DEADLINE_S = 1800.0
POOL_TRIES = 3
# Runs what is left; returns those that came to nothing, and why.
Runner = Callable[
    [dict[int, Submission], Settings, int, Callable[[int, Record], None]], dict[int, str]
]


def default_jobs(world_size: int, lab: Lab | None = None) -> int:
    """As many submissions at once as the cores allow; two, as much of a run is waiting.

    And as the GPUs do, where ranks or criteria of the lab use them. Without a lab: of any lab.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 2
    jobs, gpus = max(2, cores // world_size), len(visible_gpus())
    measured = lab is None or any(criterion.extra for criterion in lab.criteria)
    if gpus >= world_size or (gpus and measured):
        return min(jobs, most_jobs(gpus, world_size))
    return jobs


def grade_class(
    submissions: Sequence[Submission],
    settings: Settings,
    jobs: int,
    console: Console,
    runner: Runner | None = None,
) -> list[Record]:
    """One record per submission, in their order; what is in the journal is not run again.

    Args:
        runner: what runs them; default: a pool of processes.
    """
    records: dict[int, Record] = {}
    announcer: Announcer | None = None
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"grading {settings.lab}", total=len(submissions))

        def done(index: int, record: Record) -> None:
            records[index] = record
            if announcer:
                announcer.done(record)
            progress.update(bar, advance=1, description=f"graded {record['student']}")

        last = latest(read_history(settings.course), settings.lab, settings.world_size)
        finished = Journal(settings.course.journal_path).all_finished()
        for index, submission in enumerate(submissions):
            if known := known_record(submission, settings, last, finished):
                done(index, known)
        announcer = Announcer(settings.course.journal_path)
        announcer.begin(
            [s.student for s in submissions], [r["student"] for r in records.values()],
            lab=settings.lab, world_size=settings.world_size, jobs=jobs, again=settings.again,
        )  # fmt: skip
        run = runner or _run_pool
        todo = {i: s for i, s in enumerate(submissions) if i not in records}
        lost = run(todo, settings, min(jobs, len(todo)), done) if todo else {}
        remove_abandoned()
        for index, reason in lost.items():  # alone: one of them may have killed the others' workers
            for failures in range(POOL_TRIES):
                if failures:
                    back_off(failures)
                again = run({index: todo[index]}, settings, 1, done)
                remove_abandoned()
                if index not in again:
                    break
                reason = again[index]
            else:
                reason += f", {POOL_TRIES} times in a row"
                done(index, not_graded(todo[index], settings, reason))
    announcer.end(settings.lab)
    return [records[index] for index in range(len(submissions))]


def _run_pool(
    todo: dict[int, Submission],
    settings: Settings,
    jobs: int,
    done: Callable[[int, Record], None],
) -> dict[int, str]:
    workers.begin(settings.lab)
    places = divide(visible_gpus(), jobs)
    return workers.run_pool(partial(grade, settings=settings), todo, places, done)


def check_names(submissions: Sequence[Submission]) -> None:
    """Raises ValueError where nbgrader could not keep the students apart, or not name them."""
    names = Counter(submission.student for submission in submissions)
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"{count} submissions are by {name!r}: grade them one by one")
        if not may_be_id(name):
            raise ValueError(
                f"{name!r} cannot be a student's name in nbgrader: rename the folder, "
                "or grade with --no-gradebook"
            )


def fill_gradebook(
    submissions: Sequence[Submission],
    records: Sequence[Record],
    settings: Settings,
    settled: Collection[str] = (),
) -> Path:
    """Has nbgrader take the verdicts into its gradebook and write each student's feedback.

    Args:
        settled: students whose verdicts the gradebook has already; it is left as it is for them.

    Returns:
        the folder with one feedback page per student.

    Raises:
        CourseError: nbgrader failed; the message has the end of what it said.
    """
    course, lab = settings.course, settings.lab
    made = course.build / "nbgrader"
    ours = {submission.student for submission in submissions}
    for submission, record in zip(submissions, records, strict=True):
        target = made / "submitted" / submission.student / lab / f"{lab}.ipynb"
        if submission.path.resolve() == target.resolve():
            if what := _unreadable(target):  # not ours to change
                ours.remove(submission.student)
                print(f"autograder: not in the gradebook, as nbgrader cannot read it: {what}",
                      file=sys.stderr)  # fmt: skip
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_time(submission.path, target)
        intake = read_submission(submission.path, course.master(lab))
        # nbgrader would stop, for the whole class, at a file that it cannot read.
        if intake.notebook is None or not _is_readable(submission.path):
            stand_in = intake.notebook or refused(course.master(lab), intake.invalid or "")
            nbformat.write(stand_in, target)
            if known_record(Submission(submission.student, target), settings) is None:
                key = record_key(read_submission(target, course.master(lab)).sha256, settings)
                executed = executed_path(course, lab, record_key(intake.sha256, settings))
                if executed.is_file():
                    shutil.copyfile(executed, executed_path(course, lab, key))
                entry = {"kind": "submission", "key": key, "record": record}
                Journal(course.journal_path).append(entry)
        else:
            shutil.copyfile(submission.path, target)
    everyone = {f.name for f in (made / "submitted").iterdir() if "," not in f.name}

    def only(students: set[str]) -> str:
        return f"--CourseDirectory.student_id_exclude={','.join(sorted(everyone - students))}"

    # nbgrader takes a release away before it writes it anew, and may fail in between: not the
    # students' own, therefore.
    elsewhere = f"--CourseDirectory.release_directory={made / 'release'}"
    _nbgrader(course, "generate_assignment", lab, "--force", elsewhere)
    trusted = f"--GradeWithReferee.trusted={not settings.sandboxed}"
    failed: CourseError | None = None
    if new := ours - set(settled):
        try:
            _nbgrader(course, "autograde", lab, "--force", only(new), trusted)
        except CourseError as error:  # of one; nbgrader goes on with the others
            failed = error
        note_lateness(course, lab, new)
    if ours:
        _nbgrader(course, "generate_feedback", lab, "--force", only(ours))
    if failed is not None:
        raise failed
    return made / "feedback"


def _copy_time(path: Path, target: Path) -> None:
    """nbgrader's note of when a notebook was handed in, by which it counts late penalties.

    nbgrader would stop, for the whole class, at one that it cannot read.
    """
    copy = target.with_name(TIMESTAMP)
    try:
        text = handed_in_at(path)
    except ValueError as error:
        text = ""
        print(f"autograder: {error}: taken as if it was not there", file=sys.stderr)
    if not text:
        copy.unlink(missing_ok=True)
    elif not copy.is_file() or copy.read_bytes() != text.encode():
        copy.write_bytes(text.encode())


def _is_readable(path: Path) -> bool:
    """Whether nbformat, which asks more of a notebook than intake, can read this one."""
    try:
        notebook = nbformat.read(path, as_version=nbformat.current_nbformat)
        nbformat.validate(notebook)
    except Exception:
        return False
    return True


def _unreadable(path: Path) -> str:
    """What of a submission in nbgrader's own folder it cannot read; empty if nothing."""
    if not _is_readable(path):
        return str(path)
    try:
        handed_in_at(path)
    except ValueError as error:
        return str(error)
    return ""


def _nbgrader(course: Course, command: str, *arguments: str) -> None:
    scripts = str(Path(sys.executable).parent)  # nbgrader calls `alembic` by name
    env = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", command, *arguments], cwd=course.root, env=env,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NBGRADER_DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CourseError(f"nbgrader {command} took over {NBGRADER_DEADLINE_S:.0f} s") from None
    if done.returncode != 0:
        raise CourseError(f"nbgrader {command} failed:\n{(done.stdout + done.stderr)[-3000:]}")
