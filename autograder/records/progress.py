"""`autograder status`: shows what a `grade` in a different terminal is doing, or how it ended.

A grader notes in the journal which students it is going to grade (`batch`), which ones are finished
(`done`) and that the batch has ended (`batch_end`). `submission.attempt.grade` notes every attempt,
verdict and failure of the grader. The reader takes no lock and never writes, so it does not disturb
the grader.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autograder.records.journal import Entry, Journal
from autograder.records.record import Record
from minidist.processes.tree import find

MIN_RUN_S = 1.0  # if grading took less time, nothing was run
LAST_RUNS = 50  # the usual time is the mean of this many last runs


# --- what the grader notes ----------------------------------------------------------------------


class Announcer:
    """Notes a batch in the journal. A journal that cannot be written never stops the grading."""

    def __init__(self, journal: Path) -> None:
        self._journal = Journal(journal)

    def begin(self, students: Sequence[str], known: Sequence[str], **about: Any) -> None:
        """Notes a batch's students; `known` are those with a record in the journal already."""
        pid = os.getpid()
        self._note("batch", students=list(students), known=list(known), pid=pid, **about)

    def done(self, record: Record) -> None:
        """Notes that a student's record exists."""
        why = {"message": record.infra.message} if record.infra else {}
        self._note("done", student=record.student, lab=record.lab, **why)

    def end(self, lab: str) -> None:
        """Notes that the batch has ended."""
        self._note("batch_end", lab=lab, pid=os.getpid())

    def _note(self, kind: str, **about: Any) -> None:
        if kind == "batch":
            about |= {"born": birth(os.getpid()), "host": socket.gethostname()}
        with contextlib.suppress(OSError):
            self._journal.append({"kind": kind, "time": time.time(), **about})


def birth(pid: int) -> str:
    """The start time of a process, which distinguishes it from later processes with the same pid.

    Empty if there is no such process.
    """
    if (process := find(pid)) is not None:
        return "" if process.headless else str(process.born)  # a zombie counts as ended
    if Path("/proc/self/stat").exists():
        return ""
    import psutil  # comes with ipykernel

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""


# --- how the reader builds batches from the notes -----------------------------------------------


class Tail:
    """Reads a growing journal without its lock; an unfinished line is read the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place, self._file = 0, (0, 0)

    def read(self) -> tuple[list[Entry], bool]:
        """The new entries, and whether the file was replaced or cut, so that reading restarted."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                which = (status.st_dev, status.st_ino)
                anew = which != self._file or status.st_size < self._place
                self._file, self._place = which, 0 if anew else self._place
                file.seek(self._place)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return [], False
        self._place += len(whole) + len(newline)
        entries = []
        for line in whole.split(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(entry := json.loads(line), dict):
                    entries.append(entry)
        return entries, anew


@dataclass
class Run:
    """One student in a batch."""

    student: str
    state: str = "waiting"  # waiting, queued (as a job), running, done, known, INFRA
    tries: int = 0
    key: str = ""
    began: float = 0.0
    after: str = ""  # the criterion whose verdict came last
    message: str = ""  # of the grader's last failure

    def at(self, criteria: Sequence[str]) -> str:
        """The current check: the one after the check that was judged last."""
        if self.state != "running":
            return ""
        place = criteria.index(self.after) + 1 if self.after in criteria else 0
        if self.after and place == len(criteria):
            return "after the last check"
        number = f"check {place + 1} of {len(criteria)}"
        return f"{number}: {criteria[place]}" if criteria else ""


@dataclass
class Batch:
    """One `autograder grade`."""

    lab: str
    world_size: int
    pid: int
    born: str
    host: str
    jobs: int
    began: float
    runs: dict[str, Run]
    ended: float | None = None
    criteria: tuple[str, ...] = ()
    usual: list[float] = field(default_factory=list)  # seconds of the last runs

    def count(self, *states: str) -> int:
        """How many students are in one of these states."""
        return sum(run.state in states for run in self.runs.values())

    def alive(self) -> bool | None:
        """Whether the grader's process is alive; None if it runs on a different machine."""
        if self.host != socket.gethostname():
            return None
        return bool(self.born) and birth(self.pid) == self.born

    def is_repeated_by(self, later: Batch) -> bool:
        """Whether a later batch grades a student of this batch again."""
        same = (self.lab, self.world_size) == (later.lab, later.world_size)
        return same and not self.runs.keys().isdisjoint(later.runs)

    def left_s(self, now: float) -> float | None:
        """Estimated seconds until all are graded; None if there is nothing to estimate from."""
        if not self.usual or self.ended is not None or self.alive() is False:
            return None
        usual = statistics.fmean(self.usual)
        running = [run for run in self.runs.values() if run.state == "running"]
        work = sum(max(usual - (now - run.began), 0.1 * usual) for run in running)
        waiting = self.count("waiting", "queued")
        return (work + usual * waiting) / max(1, min(self.jobs, len(running) + waiting))


class Progress:
    """All batches of a journal, built from its entries one by one."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.num_records = 0
        self._usual: dict[str, list[float]] = {}

    def feed(self, entries: Iterator[Entry] | Sequence[Entry]) -> None:
        """Processes entries, oldest first; ignores malformed ones and unknown fields."""
        for entry in entries:
            take = getattr(self, f"_take_{entry.get('kind')}", None)
            if take is not None:
                with contextlib.suppress(
                    KeyError, TypeError, ValueError, AttributeError, OverflowError
                ):
                    take(entry)

    def shown(self, lab: str | None = None) -> list[Batch]:
        """The last batch, and every earlier batch that is still being graded."""
        mine = [batch for batch in self.batches if lab in (None, batch.lab)]
        busy = [
            batch
            for place, batch in enumerate(mine[:-1], start=1)
            if batch.ended is None
            and batch.alive() is not False
            and not (batch.alive() is None and any(map(batch.is_repeated_by, mine[place:])))
        ]
        return busy + mine[-1:]

    def _take_batch(self, entry: Entry) -> None:
        known = set(entry["known"])
        runs = {s: Run(s, "known" if s in known else "waiting") for s in entry["students"]}
        self.batches.append(
            Batch(
                lab=str(entry["lab"]),
                world_size=int(entry["world_size"]),
                pid=int(entry["pid"]),
                born=str(entry["born"]),
                host=str(entry["host"]),
                jobs=int(entry["jobs"]),
                began=_time(entry),
                runs=runs,
                usual=self._usual.setdefault(str(entry["lab"]), []),
            )
        )

    def _take_batch_end(self, entry: Entry) -> None:
        for batch in reversed(self.batches):
            if (batch.lab, batch.pid) == (entry["lab"], entry["pid"]) and batch.ended is None:
                batch.ended = _time(entry)
                return

    def _take_queued(self, entry: Entry) -> None:
        for student in entry["jobs"]:
            if run := self._run(entry["lab"], student):
                run.state = "queued"

    def _take_attempt(self, entry: Entry) -> None:
        if run := self._run(entry["lab"], entry["student"]):
            run.state, run.tries, run.after = "running", int(entry["try"]), ""
            run.key, run.began = entry["key"], _time(entry)

    def _take_verdict(self, entry: Entry) -> None:
        student = entry["seed_id"].rpartition(":")[0]
        for batch in reversed(self.batches):
            run = batch.runs.get(student)
            if run and run.state == "running" and run.key == entry["key"]:
                run.after = str(entry["name"])
                return

    def _take_infra(self, entry: Entry) -> None:
        if run := self._run(entry["lab"], entry["student"]):
            run.message = str(entry["message"])
            run.state = str(entry.get("state", run.state))  # "waiting" again after a lost job

    def _take_submission(self, entry: Entry) -> None:
        record = entry["record"]
        self.num_records += 1
        if record["seconds"] >= MIN_RUN_S:
            usual = self._usual.setdefault(record["lab"], [])
            usual.append(float(record["seconds"]))
            del usual[:-LAST_RUNS]
        if run := self._run(record["lab"], record["student"]):
            run.state = "done"

    def _take_done(self, entry: Entry) -> None:
        if run := self._run(entry["lab"], entry["student"]):
            run.state = "INFRA" if "message" in entry else "done"
            run.message = str(entry.get("message", ""))

    def _run(self, lab: str, student: str) -> Run | None:
        """The student's run in the last unfinished batch of this lab that has the student."""
        for batch in reversed(self.batches):
            if batch.lab == lab and student in batch.runs and batch.ended is None:
                return batch.runs[student]
        return None


def _time(entry: Entry) -> float:
    time_s = float(entry["time"])
    if not math.isfinite(time_s):
        raise ValueError(f"expected a time, got {time_s}")
    return time_s
