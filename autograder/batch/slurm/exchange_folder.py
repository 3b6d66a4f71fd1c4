"""Files that the grader on the login node and its jobs exchange, in a folder that both can see.

    build/jobs/BATCH/
        kind              where its jobs run
        owner             locked by the grader for as long as it lives
        tasks/0007.2.json     what the second job of submission 7 shall grade
        results/0007.2.json   its result, beside the executed notebook 0007.2.ipynb
        submitit/             submitit's own files, and each job's log

A result is written under a temporary name and then renamed, so that a reader never sees half of it.
Results are JSON: the grader never unpickles data that a submission could have touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autograder.files import owned, taken_over, write_whole
from autograder.records.record import Record, read_field, read_object

JOBS = "jobs"  # in the course's build folder
KEEP_LOGS_S = 7 * 24 * 3600
COPIED = ("verdict", "infra")  # kinds of journal entries that the grader copies from a job
_CLOSED = "closed"
_KIND = "kind"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One submission, for one job.

    Attributes:
        root: the course's folder.
        path: the notebook.
        sha256, key: hash of the notebook and key of the grading, as the grader computed them. A job
            that computes different ones fails, because nobody would find its record.
        trusted: grade without a sandbox if the node has none.
        time_s: time for the whole task, in seconds.
        result: path of the result file.
    """

    root: str
    lab: str
    world_size: int
    student: str
    path: str
    sha256: str
    key: str
    trusted: bool
    time_s: int
    result: str

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text("utf-8")))

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1).encode())


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a task: either `failure` says why there is no record, or `record` is set.

    Attributes:
        entries: entries for the journal, without the record itself.
        host: the node that ran the task.
    """

    key: str
    host: str
    seconds: float
    failure: str = ""
    record: Record | None = None
    entries: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result in a file.

        Raises:
            ValueError: the file does not hold a result.
            OSError: the file cannot be read.
        """
        try:
            given = read_object(json.loads(path.read_text("utf-8")), "result")
            failure = read_field(given, "failure", str, "result")
            result = cls(
                key=read_field(given, "key", str, "result"),
                host=read_field(given, "host", str, "result"),
                seconds=read_field(given, "seconds", float, "result"),
                failure=failure,
                record=None if failure else Record.from_json(given.get("record")),
                entries=tuple(read_field(given, "entries", list, "result")),
            )
            result.check()
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a job's result: {error}") from None
        return result

    def check(self) -> None:
        """Raises ValueError if the key or the entries could harm other submissions' records."""
        if not self.key.isalnum():  # it becomes a file's name
            raise ValueError(f"result.key: expected letters and digits, got {self.key!r}")
        for number, entry in enumerate(self.entries):
            where = f"result.entries[{number}]"
            kind = read_field(read_object(entry, where), "kind", str, where)
            if kind not in COPIED or entry.get("key") != self.key:
                raise ValueError(f"{where}: expected {COPIED} of {self.key}, got {kind!r}")

    def write(self, path: Path) -> None:
        record = self.record.to_json() if self.record else None
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        write_whole(path, json.dumps(given | {"record": record}, allow_nan=False).encode())


class BatchFolder:
    """The folder of one grader's jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The name of this batch's Slurm jobs; no other jobs have it."""
        return f"autograder-{self.path.name}"

    @property
    def results(self) -> Path:
        return self.path / "results"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    def task_path(self, index: int, number: int) -> Path:
        return self.path / "tasks" / f"{index:04d}.{number}.json"

    def result_path(self, index: int, number: int) -> Path:
        return self.results / f"{index:04d}.{number}.json"

    def close(self) -> None:
        """Marks the folder as done: no result is left to take over."""
        (self.path / _CLOSED).touch()

    @property
    def closed(self) -> bool:
        return (self.path / _CLOSED).exists()


@contextmanager
def new_batch(build: Path, kind: str) -> Iterator[BatchFolder]:
    """A new folder for this process; the caller decides whether the folder is removed.

    Args:
        kind: where the jobs run, so that only a grader that can cancel them takes the folder over.
    """
    batch = BatchFolder(build / JOBS / secrets.token_hex(6))
    for name in ("tasks", "results", "submitit"):
        (batch.path / name).mkdir(parents=True, mode=0o700)
    with owned(batch.path):
        write_whole(batch.path / _KIND, kind.encode())
        yield batch


def remove_old(build: Path) -> None:
    """Removes closed folders, which were kept for their logs, after `KEEP_LOGS_S`."""
    for path in (build / JOBS).glob(f"*/{_CLOSED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEEP_LOGS_S:
                shutil.rmtree(path.parent, ignore_errors=True)


def abandoned_batches(build: Path, kind: str) -> Iterator[BatchFolder]:
    """Folders whose grader has died without closing them; each is locked while it is yielded."""
    for path in sorted((build / JOBS).glob("*")):
        batch = BatchFolder(path)
        if batch.closed:
            continue
        with contextlib.suppress(OSError):  # the folder has no kind yet, or was removed meanwhile
            if (path / _KIND).read_text() == kind:
                with taken_over(path):
                    yield batch
