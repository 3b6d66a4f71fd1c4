"""A whole class: submissions in parallel, progress on the terminal, then nbgrader's gradebook."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autograder.bridge import _refused
from autograder.course import Course, CourseError
from autograder.criteria import get_lab
from autograder.criteria.base import Status
from autograder.intake import Submission, read_submission
from autograder.run import Record, Settings, _all, _record, grade

NBGRADER_DEADLINE_S = 1800.0


def default_jobs(world_size: int) -> int:
    """As many submissions at once as the cores allow; two, as much of a run is waiting."""
    return max(2, (os.cpu_count() or 2) // world_size)


def grade_class(
    submissions: Sequence[Submission], settings: Settings, jobs: int, console: Console
) -> list[Record]:
    """One record per submission, in their order."""
    records: dict[int, Record] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"grading {settings.lab}", total=len(submissions))
        todo = dict(enumerate(submissions))
        for _ in range(
            3
        ):  # a worker that is killed takes the pool with it; the rest is tried again
            with ProcessPoolExecutor(
                jobs, multiprocessing.get_context("spawn"), initializer=_leave_interrupts_to_parent
            ) as pool:
                futures = {pool.submit(grade, todo[i], settings): i for i in todo}
                try:
                    for future in as_completed(futures):
                        index = futures[future]
                        records[index] = future.result()
                        del todo[index]
                        done = records[index]
                        progress.update(bar, advance=1, description=f"graded {done['student']}")
                except BrokenProcessPool:
                    continue
                except KeyboardInterrupt:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in multiprocessing.active_children():
                        process.terminate()
                    raise
            if not todo:
                break
    for index, submission in todo.items():
        records[index] = _lost(submission, settings)
    return [records[i] for i in range(len(submissions))]


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _lost(submission: Submission, settings: Settings) -> Record:
    lab = get_lab(settings.lab)
    verdicts = _all(lab, Status.INFRA, "a worker process of the grader was killed three times")
    return {
        "submission": str(submission.path), "student": submission.student, "lab": lab.name,
        "world_size": settings.world_size, **_record(lab, verdicts, 0.0, settings.sandboxed),
        "seconds": 0.0,
    }  # fmt: skip


def fill_gradebook(submissions: Sequence[Submission], course: Course, lab: str) -> Path:
    """Has nbgrader take the verdicts into its gradebook and write each student's feedback.

    Returns:
        the folder with one feedback page per student.

    Raises:
        CourseError: nbgrader failed; the message has the end of what it said.
    """
    made = course.build / "nbgrader"
    for submission in submissions:
        target = made / "submitted" / submission.student / lab / f"{lab}.ipynb"
        if submission.path.resolve() == target.resolve():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        intake = read_submission(submission.path, course.master(lab))
        if intake.notebook is None:  # nbgrader would stop at a file that it cannot read
            nbformat.write(_refused(_untouched(course, lab), intake.invalid or ""), target)
        else:
            target.write_bytes(submission.path.read_bytes())
    _nbgrader(course, "generate_assignment", lab, "--force")
    _nbgrader(course, "autograde", lab, "--force")
    _nbgrader(course, "generate_feedback", lab, "--force")
    return made / "feedback"


def _untouched(course: Course, lab: str) -> NotebookNode:
    return course.master(lab)


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
