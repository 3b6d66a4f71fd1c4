"""`autograder grade --executor slurm|local`: grades a class in jobs, not in a pool of processes.

    submissions -> tasks (files) -> jobs -> results (files) -> journal

Only this process writes the journal and `build/executed`. It asks Slurm about all jobs together,
every few seconds. A lost job is submitted again after a while, up to a few times, unless a new job
could not do better (a cancelled job, for example). If no job brings a result, the submission is
INFRA (a failure of the grader), never a zero. Ctrl-C cancels the jobs that this process has
submitted. The same command continues an interrupted grading: it takes over the results of a grader
that was killed, cancels that grader's jobs, and grades nothing that has a record in the journal.
"""

from __future__ import annotations

import os
import shutil
import signal

from rich.console import Console

from autograder.batch.slurm.backend import Backend, LocalJobs, SlurmJobs, cancel_by_name
from autograder.batch.slurm.batch import Done, JobBatch, file_result
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
from autograder.signals import handling
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.without_run import known_record


class JobRunner:
    """Grades submissions in jobs; `grade_class` calls it in place of the pool."""

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
        """Number of submissions that run at once; on this machine it would be `jobs`."""
        return self.options.array_parallelism if self.kind == "slurm" else jobs

    def __call__(
        self, todo: dict[int, Submission], class_run: ClassRun, jobs: int, done: Done
    ) -> dict[int, str]:
        """Grades `todo` and passes every record to `done`, INFRA included; so none is returned."""
        todo = dict(todo)
        if self._take_over(class_run.course):
            finished = class_run.journal.all_finished()
            for index, submission in list(todo.items()):
                if known := known_record(submission, class_run, finished=finished):
                    done(index, known)
                    del todo[index]
        if not todo:
            return {}
        # A login node sends these when it ends our session or this process; nohup ignores SIGHUP.
        ends = handling((signal.SIGHUP, signal.SIGTERM), _interrupt, instead_of=signal.SIG_DFL)
        with ends, new_batch(class_run.course.build, self.kind) as folder:
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
        """Files the results of graders that were killed, and cancels those graders' jobs."""
        taken = 0
        remove_old(course.build)
        for folder in abandoned_batches(course.build, self.kind):
            if self.kind == "slurm" and not cancel_by_name(folder.name):
                continue  # the next grader tries again to cancel
            kept = False
            for path in sorted(folder.results.glob("*.json")):
                try:
                    result = Result.read(path)
                    if result.record is None or result.record.infra:
                        continue  # a failure of the grader is no verdict: grade again
                    if Journal(course.journal_path).finished(result.key) is None:
                        file_result(course, path, result, result.record)
                        taken += 1
                except ValueError:
                    continue  # not a valid result
                except OSError:
                    kept = True  # e.g. a full disk: keep the folder for the next grader
            if not kept:
                shutil.rmtree(folder.path, ignore_errors=True)
        if taken:
            self.console.print(f"{taken} results were there already, of a grader that was killed")
        return taken


def _leave_job() -> None:
    """Removes this job's own SLURM_* variables: sbatch would use them as options of new jobs."""
    if "SLURM_JOB_ID" in os.environ:
        for name in [each for each in os.environ if each.startswith(("SLURM_", "SRUN_"))]:
            if name != "SLURM_CONF":
                del os.environ[name]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
