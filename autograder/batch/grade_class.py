"""Grades a class: runs submissions in parallel, and shows the progress on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autograder.batch import pool
from autograder.box.gpus import divide, most_jobs, visible_gpus
from autograder.criteria.criterion import Lab
from autograder.records.progress import Announcer
from autograder.records.record import Record
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.scratch import remove_abandoned
from autograder.submission.without_run import back_off, known_record, not_graded
from minidist.processes.cores import num_cores

POOL_TRIES = 3
# Runs the given submissions; returns the indices of those without a record, and the reason.
Runner = Callable[
    [dict[int, Submission], ClassRun, int, Callable[[int, Record], None]], dict[int, str]
]


def default_jobs(world_size: int, lab: Lab | None = None) -> int:
    """The number of submissions to run at once: as many as the cores allow, but at least two.

    At least two, because a run waits for much of its time. If ranks or criteria of the lab (of any
    lab, without `lab`) use GPUs, the number of GPUs is a limit too.
    """
    jobs, gpus = max(2, num_cores() // world_size), len(visible_gpus())
    measured = lab is None or any(criterion.extra for criterion in lab.criteria)
    if gpus >= world_size or (gpus and measured):
        return min(jobs, most_jobs(gpus, world_size))
    return jobs


def grade_class(
    submissions: Sequence[Submission],
    class_run: ClassRun,
    jobs: int,
    console: Console,
    runner: Runner | None = None,
) -> list[Record]:
    """One record per submission, in their order; submissions with a journal record are not rerun.

    Args:
        runner: runs the submissions; default: a pool of processes.
    """
    records: dict[int, Record] = {}
    announcer: Announcer | None = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"grading {class_run.lab_name}", total=len(submissions))

        def done(index: int, record: Record) -> None:
            records[index] = record
            if announcer:
                announcer.done(record)
            progress.update(bar, advance=1, description=f"graded {record.student}")

        for index, submission in enumerate(submissions):
            if known := known_record(submission, class_run, class_run.before, class_run.finished):
                done(index, known)
        announcer = Announcer(class_run.course.journal_path)
        announcer.begin(
            [s.student for s in submissions],
            [record.student for record in records.values()],
            lab=class_run.lab_name,
            world_size=class_run.world_size,
            jobs=jobs,
            again=class_run.again,
        )
        run = runner or _run_pool
        todo = {i: s for i, s in enumerate(submissions) if i not in records}
        lost = run(todo, class_run, min(jobs, len(todo)), done) if todo else {}
        remove_abandoned()
        for index, reason in lost.items():  # one by one: one may have killed the others' workers
            for failures in range(POOL_TRIES):
                if failures:
                    back_off(failures)
                again = run({index: todo[index]}, class_run, 1, done)
                remove_abandoned()
                if index not in again:
                    break
                reason = again[index]
            else:
                reason += f", {POOL_TRIES} times in a row"
                done(index, not_graded(todo[index], class_run, reason))
    announcer.end(class_run.lab_name)
    return [records[index] for index in range(len(submissions))]


def _run_pool(
    todo: dict[int, Submission],
    class_run: ClassRun,
    jobs: int,
    done: Callable[[int, Record], None],
) -> dict[int, str]:
    pool.begin(class_run.lab_name)
    places = divide(visible_gpus(), jobs)
    return pool.run_pool(partial(_grade, class_run=class_run), todo, places, done)


def _grade(submission: Submission, class_run: ClassRun) -> Record:
    """Runs in a worker; the grader itself does not import torch, and so begins sooner."""
    from autograder.submission.attempt import grade

    return grade(submission, class_run)
