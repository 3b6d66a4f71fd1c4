"""`autograder grade --executor slurm|local`: a class as jobs, instead of in a pool of processes.

    submissions -> tasks (files) -> jobs -> results (files) -> journal

This process alone writes the journal and `build/executed`. It asks Slurm about all jobs together,
every few seconds. A job that was lost, whatever the reason, is submitted again after a while, a
few times; then the submission is INFRA, our failure, and never a zero. Ctrl-C cancels the jobs that
this process has submitted. Run again, it goes on: results of a grader that was killed are taken
over, its jobs are cancelled, and what the journal has is not graded again.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from autograder.batch.slurm.backend import Backend, LocalJobs, SlurmJobs, cancel_by_name
from autograder.batch.slurm.batch import Done, JobBatch, file_result, infra_reason
from autograder.batch.slurm.exchange_folder import (
    BatchFolder,
    Result,
    abandoned_batches,
    new_batch,
    remove_old,
)
from autograder.course.course import Course, CourseError
from autograder.course.slurm_options import SlurmOptions
from autograder.records.journal import Journal
from autograder.submission.attempt import known_record
from autograder.submission.class_run import ClassRun
from autograder.submission.intake import Submission


class JobRunner:
    """Grades submissions in jobs; called in place of the pool."""

    def __init__(
        self, kind: str, course: Course, console: Console, *, trusted: bool = False
    ) -> None:
        if kind == "slurm" and shutil.which("sbatch") is None:
            raise CourseError(
                "--executor slurm: expected sbatch on this machine, found none; run this on a "
                "login node of the cluster, or use --executor local"
            )
        self.kind, self.console, self.trusted = kind, console, trusted
        self.options: SlurmOptions = course.slurm

    def parallel(self, jobs: int) -> int:
        """Submissions that run at once, where `jobs` would on this machine."""
        return self.options.array_parallelism if self.kind == "slurm" else jobs

    def __call__(
        self, todo: dict[int, Submission], class_run: ClassRun, jobs: int, done: Done
    ) -> dict[int, str]:
        """Grades `todo` and tells `done` every record, INFRA included: nothing is lost."""
        todo = dict(todo)
        if self._take_over(class_run.course):
            finished = Journal(class_run.course.journal_path).all_finished()
            for index, submission in list(todo.items()):
                if known := known_record(submission, class_run, finished=finished):
                    done(index, known)
                    del todo[index]
        if not todo:
            return {}
        with _interrupted_by_hangup(), new_batch(class_run.course.build, self.kind) as folder:
            backend = self._backend(class_run, folder, jobs)
            JobBatch(
                backend, class_run, folder, self.options, self.console, done, self.trusted
            ).grade(todo)
        return {}

    def _backend(self, class_run: ClassRun, folder: BatchFolder, jobs: int) -> Backend:
        limits = class_run.lab.limits
        if self.kind == "local":
            return LocalJobs(folder.submitit, jobs, self.options.seconds(limits))
        _leave_job()
        return SlurmJobs(folder.name, folder.submitit, self.options).ask_for(
            class_run.world_size, limits
        )

    def _take_over(self, course: Course) -> int:
        """Takes the results of graders that were killed, and cancels their jobs."""
        taken = 0
        remove_old(course.build)
        for folder in abandoned_batches(course.build, self.kind):
            if self.kind == "slurm" and not cancel_by_name(folder.name):
                continue  # the next grader tries it again
            kept = False
            for path in sorted(folder.results.glob("*.json")):
                try:
                    result = Result.read(path)
                    if result.record is None or infra_reason(result.record):
                        continue  # our own failure is no verdict: it is tried again
                    if Journal(course.journal_path).finished(result.key) is None:
                        file_result(course, path, result, result.record)
                        taken += 1
                except ValueError:
                    continue  # half a file
                except OSError:
                    kept = True  # a full disk, say: the next grader finds it here
            if not kept:
                shutil.rmtree(folder.path, ignore_errors=True)
        if taken:
            self.console.print(f"{taken} results were there already, of a grader that was killed")
        return taken


def _leave_job() -> None:
    """Inside a job, what this one was given would count as options of those that it submits."""
    if "SLURM_JOB_ID" in os.environ:
        for name in [each for each in os.environ if each.startswith(("SLURM_", "SRUN_"))]:
            if name != "SLURM_CONF":
                del os.environ[name]


@contextmanager
def _interrupted_by_hangup() -> Iterator[None]:
    """A login node that ends our session, or us, interrupts like Ctrl-C: no job stays behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGHUP, signal.SIGTERM):
            if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
