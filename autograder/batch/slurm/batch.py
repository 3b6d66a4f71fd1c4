"""One batch of jobs: submits them, collects their results, and submits lost jobs again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from autograder.batch.slurm.backend import ENDED, QUEUED, RUNNING, Backend, Refused, Seen
from autograder.batch.slurm.exchange_folder import BatchFolder, Result, Task
from autograder.course.course import Course, CourseError
from autograder.course.slurm_options import TIME_MARGIN_S, SlurmOptions
from autograder.plain_text import say
from autograder.records.journal import Journal
from autograder.records.record import Record
from autograder.signals import handling
from autograder.submission.class_run import ClassRun, executed_path
from autograder.submission.find import Submission
from autograder.submission.intake import sha256_of
from autograder.submission.without_run import not_graded

HARVEST_S = 0.2  # time between two looks at the results' folder
LATE_S = 600.0  # a job that is this long over Slurm's time limit will not end by itself
Done = Callable[[int, Record], None]
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@dataclass
class _Work:
    """One submission that has no record yet.

    Attributes:
        tries: number of jobs that were submitted for it.
        due_at: earliest time for the next job.
        job: id of its current job; empty if it has none.
        since: when its job entered `phase`.
        seen: last known state of its job.
    """

    index: int
    submission: Submission
    sha256: str = ""
    key: str = ""
    tries: int = 0
    due_at: float = 0.0
    job: str = ""
    phase: str = ""
    since: float = 0.0
    seen: Seen | None = None


class JobBatch:
    """Runs jobs for submissions, until each submission has a record."""

    def __init__(
        self,
        backend: Backend,
        class_run: ClassRun,
        folder: BatchFolder,
        options: SlurmOptions,
        console: Console,
        done: Done,
        trusted: bool,
    ) -> None:
        self.backend, self.class_run, self.folder, self.options = (
            backend,
            class_run,
            folder,
            options,
        )
        self.console, self._done, self.trusted = console, done, trusted
        self.journal = class_run.journal
        self.limits = class_run.lab.limits
        self.work: dict[int, _Work] = {}
        self.chunk = backend.array_size
        self.answered_at = time.monotonic()
        self.asked_at = self.refused_until = 0.0
        self.lost = False
        # Node -> submissions whose jobs failed there. A broken node fails at once, so Slurm would
        # give it job after job, and it would spoil a class. If only one submission failed on a
        # node, the submission may be to blame, so only its own next job avoids the node.
        self.failed_on: dict[str, set[int]] = {}

    def grade(self, todo: Mapping[int, Submission]) -> None:
        self.work = {index: _Work(index, each) for index, each in todo.items()}
        try:
            while self.work:
                self._harvest()
                self._submit()
                self._look()
                time.sleep(min(HARVEST_S, self.options.poll_s) if self.work else 0)
        except BaseException:
            with handling(_ENDING, signal.SIG_IGN):  # a second Ctrl-C must not leave jobs behind
                cancelled = self.backend.cancel()
                self._harvest()
                if cancelled:
                    self.folder.close()
                else:  # the next grader tries again to cancel
                    say(self.console, f"jobs may still be there: scancel --name={self.folder.name}")
            raise
        self.folder.close()
        if self.lost:
            self.backend.cancel()  # e.g. a job whose id never reached us
        else:
            shutil.rmtree(self.folder.path, ignore_errors=True)

    # --- results --------------------------------------------------------------------------------

    def _harvest(self) -> None:
        """Collects the results that jobs have written."""
        there = {path.name for path in self.folder.results.iterdir()}
        for work in [each for each in self.work.values() if each.job]:
            path = self.folder.result_path(work.index, work.tries)
            if path.name not in there:
                continue
            try:
                result = Result.read(path)
            except (ValueError, OSError) as error:
                self._failed(work, str(error))
                continue
            record, student = result.record, work.submission.student
            infra = record and record.infra
            if record is None or infra:
                self._blame(work, result.host)
                self._failed(work, infra.message if infra else result.failure)
            elif result.key != work.key:
                self._failed(work, f"{path}: expected key {work.key}, got {result.key}")
            elif (record.student, record.lab) != (student, self.class_run.lab_name):
                self._failed(work, f"{path}: expected {student}'s record, got {record.student}'s")
            else:
                file_result(self.class_run.course, path, result, record)
                del self.work[work.index]
                self._done(work.index, record)

    def _failed(self, work: _Work, reason: str, *, again: bool = True) -> None:
        """Handles a job without a result: plans a new job after a while, or gives up (INFRA)."""
        self.lost = True
        student, job = work.submission.student, work.job
        again = again and work.tries < self.options.tries
        wait_s = self.options.backoff_s * 2 ** (work.tries - 1)
        then = f"again in {wait_s} s" if again else "not tried again"
        entry = {
            "kind": "infra",
            "key": work.key,
            "lab": self.class_run.lab_name,
            "student": student,
        }
        entry |= {"try": work.tries, "time": time.time(), "message": f"job {job}: {reason}"}
        with contextlib.suppress(OSError):
            self.journal.append(entry | ({"state": "waiting"} if again else {}))
        say(self.console, f"{student}: job {job}: {reason}; {then}")
        work.job, work.phase, work.seen = "", "", None
        work.due_at = time.monotonic() + wait_s
        if not again:
            self._give_up(
                work,
                f"{work.tries} jobs came to nothing; the last, {job}: {reason} (logs: "
                f"{self.folder.submitit})"
                if work.tries > 1
                else f"job {job}: {reason} (log: {self.folder.submitit})",
            )

    def _blame(self, work: _Work, node: str) -> None:
        """Notes that a submission failed on a node, so that later jobs avoid this node."""
        failed = self.failed_on.get(node, set())
        if not node or work.index in failed:
            return
        self.failed_on[node] = failed | {work.index}
        if len(self.failed_on[node]) == 2:
            say(self.console, f"jobs came to nothing on {node}: the next ones go to other nodes")

    def _bad_nodes(self, due: Sequence[_Work]) -> set[str]:
        """The nodes that the jobs of these submissions must avoid."""
        again = {work.index for work in due}
        return {node for node, by in self.failed_on.items() if len(by) > 1 or by & again}

    def _give_up(self, work: _Work, reason: str) -> None:
        del self.work[work.index]
        self._done(work.index, not_graded(work.submission, self.class_run, reason))

    # --- jobs -----------------------------------------------------------------------------------

    def _submit(self) -> None:
        now = time.monotonic()
        if now < self.refused_until:
            return
        active = sum(bool(each.job) for each in self.work.values())
        due = [each for each in self.work.values() if not each.job and each.due_at <= now]
        room = self.backend.capacity - active
        if not due or (room < len(due) and 2 * room < self.chunk):
            return  # wait, to submit few large arrays and not one job whenever a job ends
        due = due[: min(self.chunk, room)]
        tasks, bad_nodes = [self._write_task(each) for each in due], self._bad_nodes(due)
        try:
            ids = self.backend.submit(tasks, bad_nodes)
        except Refused as error:
            if bad_nodes and not error.away and not error.too_many:
                self.failed_on.clear()  # perhaps no other nodes exist; the bad ones may be well now
                return
            self._refused(error, active, len(due))
            return
        for work, job in zip(due, ids, strict=True):
            work.tries += 1
            work.job, work.phase, work.since = job, QUEUED, time.monotonic()
            work.seen = Seen(QUEUED, "PENDING")
        jobs = {each.submission.student: each.job for each in due}
        self._note("queued", jobs=jobs)
        self.answered_at = time.monotonic()

    def _refused(self, error: Refused, active: int, number: int) -> None:
        """Handles a refused submit: try later, or with fewer jobs, or raise CourseError."""
        self.lost = True
        self.refused_until = time.monotonic() + self.options.poll_s
        if error.away:
            self._check_silence(str(error))
        elif error.too_many and number > 1:
            self.chunk = number // 2
        elif not active:
            raise CourseError(f"Slurm does not take the jobs: {error} (see [slurm] in course.toml)")

    def _write_task(self, work: _Work) -> Path:
        """Writes the task file; hashes the notebook anew, because it may have been replaced."""
        class_run, submission = self.class_run, work.submission
        work.sha256 = sha256_of(submission.path)
        work.key = class_run.key_of(work.sha256)
        path = self.folder.task_path(work.index, work.tries + 1)
        Task(
            root=str(class_run.course.root.resolve()),
            lab=class_run.lab_name,
            world_size=class_run.world_size,
            student=submission.student,
            path=str(submission.path.absolute()),
            sha256=work.sha256,
            key=work.key,
            trusted=self.trusted,
            time_s=self.options.seconds(self.limits),
            result=str(self.folder.result_path(work.index, work.tries + 1)),
        ).write(path)
        return path

    def _look(self) -> None:
        """Asks once about all jobs, and handles those that will bring no result."""
        now = time.monotonic()
        active = {each.job: each for each in self.work.values() if each.job}
        if not active or now - self.asked_at < self.options.poll_s:
            return
        self.asked_at = now
        seen = self.backend.look(active.keys())
        if seen is None:
            self._check_silence("squeue fails")
            return
        self.answered_at = now
        for job, work in active.items():
            self._take_in(work, seen.get(job, Seen(ENDED, "LOST")), now)
        late = [each for each in active.values() if each.job and self._is_late(each, now)]
        if late:
            self.backend.cancel([each.job for each in late])
        for work in late:
            what = "waited for its turn" if work.phase == QUEUED else "was running"
            note = f" ({work.seen.note})" if work.seen and work.seen.note else ""
            self._failed(work, f"it {what} for {now - work.since:.0f} s{note} and was cancelled")

    def _take_in(self, work: _Work, seen: Seen, now: float) -> None:
        if seen.phase != work.phase:
            work.phase, work.since = seen.phase, now
            if seen.phase == RUNNING:
                self._note(
                    "attempt",
                    key=work.key,
                    student=work.submission.student,
                    pid=0,
                    job=work.job,
                    node=seen.node,
                    **{"try": work.tries},
                )
        work.seen = seen
        # On a shared file system, the result may become visible some time after the job's end.
        if seen.phase == ENDED and now - work.since >= self.options.settle_s:
            self._harvest()
            if work.index in self.work and work.job:
                if seen.may_be_its_node:
                    self._blame(work, seen.node)
                self._failed(work, seen.tell(), again=seen.may_try_again)

    def _is_late(self, work: _Work, now: float) -> bool:
        if work.phase == QUEUED:
            return now - work.since > self.options.pending_s
        most_s = self.options.minutes(self.limits) * 60 + TIME_MARGIN_S + LATE_S
        return work.phase == RUNNING and now - work.since > most_s

    def _check_silence(self, what: str) -> None:
        """Gives up all submissions if Slurm's controller is silent for more than `silent_s`.

        Before that, results of running jobs still arrive.
        """
        silent_s = time.monotonic() - self.answered_at
        if silent_s <= self.options.silent_s:
            return
        for work in list(self.work.values()):
            self._give_up(work, f"Slurm's controller did not answer for {silent_s:.0f} s: {what}")

    def _note(self, kind: str, **about: object) -> None:
        """Writes a journal entry for `autograder status`; ignores a failure to write."""
        with contextlib.suppress(OSError):
            self.journal.append(
                {"kind": kind, "lab": self.class_run.lab_name, "time": time.time(), **about}
            )


def file_result(course: Course, path: Path, result: Result, record: Record) -> None:
    """Moves the notebook to `build/executed`, then writes the result to the journal.

    The record comes last, because a record means that everything else is there.
    """
    notebook = path.with_suffix(".ipynb")
    if notebook.exists():
        target = executed_path(course, record.lab, result.key)
        target.parent.mkdir(parents=True, exist_ok=True)
        notebook.replace(target)
    journal = Journal(course.journal_path)
    for entry in result.entries:
        journal.append(entry)
    journal.append_record(result.key, record)
