"""What passes between the grader on the login node and its jobs: files in a folder that both see.

    build/jobs/BATCH/
        kind              where its jobs run
        owner             locked by the grader for as long as it lives
        tasks/0007.2.json     what the second job of submission 7 shall grade
        results/0007.2.json   what came of it; with it 0007.2.ipynb, the notebook as it was run
        submitit/             submitit's own files, and each job's log

A result is written under another name and then renamed, so whoever sees it sees it whole. It is
JSON: nothing that came near a submission is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autograder.files import write_whole

JOBS = "jobs"  # in the course's build folder
KEEP_LOGS_S = 7 * 24 * 3600
_CLOSED = "closed"
_KIND = "kind"
_OWNER = "owner"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One submission, for one job.

    Attributes:
        root: the course's folder.
        path: the notebook.
        sha256, key: of the notebook, and of the grading, as the grader sees them; a job that finds
            others would file its record where nobody looks.
        trusted: grade without a sandbox where there is none.
        time_s: time for all of it.
        result: where the result goes.
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
    """What came of a task: either `failure` says why nothing did, or the rest is set.

    Attributes:
        entries: for the journal, without the record itself.
        host: where it ran.
    """

    key: str
    host: str
    seconds: float
    failure: str = ""
    record: dict[str, Any] | None = None
    entries: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result in a file.

        Raises:
            ValueError: it is not one.
            OSError: it cannot be read.
        """
        try:
            result = cls(**json.loads(path.read_text("utf-8")))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a job's result, got {error}") from None
        if not result.failure and not isinstance(result.record, dict):
            raise ValueError(f"{path}: expected a record or a failure, got neither")
        return result

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(dataclasses.asdict(self), allow_nan=False).encode())


class BatchFolder:
    """The folder of one grader's jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """What its jobs are called in Slurm, which only they are."""
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
        """Notes that nothing is left to be taken from here."""
        (self.path / _CLOSED).touch()

    @property
    def closed(self) -> bool:
        return (self.path / _CLOSED).exists()


@contextmanager
def new_batch(build: Path, kind: str) -> Iterator[BatchFolder]:
    """A folder of this process's own; whether it stays is for who uses it to say.

    Args:
        kind: where its jobs run, so that only who can cancel them takes it over.
    """
    batch = BatchFolder(build / JOBS / secrets.token_hex(6))
    for name in ("tasks", "results", "submitit"):
        (batch.path / name).mkdir(parents=True, mode=0o700)
    lock = os.open(batch.path / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Last: who looks for folders without a grader passes by those that do not say their kind.
        write_whole(batch.path / _KIND, kind.encode())
        yield batch
    finally:
        os.close(lock)


def remove_old(build: Path) -> None:
    """Removes folders that were kept for their logs and have been there for a while."""
    for path in (build / JOBS).glob(f"*/{_CLOSED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEEP_LOGS_S:
                shutil.rmtree(path.parent, ignore_errors=True)


def abandoned_batches(build: Path, kind: str) -> Iterator[BatchFolder]:
    """Folders whose grader is gone without having closed them; each is locked while it is used."""
    for path in sorted((build / JOBS).glob("*")):
        batch = BatchFolder(path)
        if batch.closed:
            continue
        with contextlib.suppress(OSError):  # it is taken, or went by itself
            if (path / _KIND).read_text() != kind:
                continue
            lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            try:
                yield batch
            finally:
                os.close(lock)
