"""The append-only journal of verdicts: what makes a batch resumable, and a crash harmless.

One JSON object per line. A line is written by one `write` under a lock and is on disk (fsync)
before `append` returns, so several processes may write, and one that is killed loses at most
the line that it had not finished. Such a torn line is skipped and reported by whoever reads,
and never joined with the next one.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import minidist

Record = dict[str, Any]

# Parts of this package that cannot change a verdict: they build labs or show results.
_NOT_GRADING = frozenset(
    {
        "__main__",
        "authored",
        "batch",
        "bridge",
        "build",
        "commands",
        "doctor",
        "executor",
        "files",
        "gradebook",
        "history",
        "job",
        "job_batch",
        "job_files",
        "lms",
        "percent",
        "practice",
        "publish",
        "regrade",
        "replay",
        "report",
        "report_page",
        "roster",
        "safe_html",
        "scratch",
        "similar",
        "slurm_jobs",
        "slurm_options",
        "status",
        "status_view",
        "suspicious",
        "sync",
        "zoo",
    }
)
# Parts of minidist that run while grading.
_GRADING = (
    "__init__",
    "config",
    "data",
    "device",
    "emulate",
    "errors",
    "fork_server",
    "kernel",
    "launch",
    "lifetime",
    "model",
    "ports",
    "stacks",
)


class Journal:
    """A journal file; it and its folder are made by the first `append`.

    Attributes:
        problems: what the last reading found wrong, one line each; empty if nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record; it is on disk when this returns.

        Raises:
            ValueError, TypeError: the record is not plain JSON (nan and inf are not).
            OSError: it could not be written (a full disk); the journal is as it was before.
        """
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._locked(os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as descriptor:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a torn line stays alone
            try:
                if os.write(descriptor, line) != len(line):
                    raise OSError(f"{self.path}: only a part of the record could be written")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise

    def iter_records(self) -> Iterator[Record]:
        """All complete records, oldest first; `problems` then tells of lines that were skipped."""
        yield from self._parsed(b"")

    def finished(self, key: str) -> Record | None:
        """The last verdict on a submission, if it was graded to the end.

        That is ``entry["record"]`` of the last entry ``{"kind": "submission", "key": key,
        "record": …}``.

        Args:
            key: from `submission_key`.
        """
        last: Record | None = None
        for entry in self._parsed(key.encode()):
            if entry.get("kind") == "submission" and entry.get("key") == key:
                record = entry.get("record")
                last = record if isinstance(record, dict) else last
        return last

    def all_finished(self) -> dict[str, Record]:
        """Key -> what `finished` says, of all keys in one reading."""
        return {
            str(entry.get("key")): entry["record"]
            for entry in self._parsed(b'"submission"')
            if entry.get("kind") == "submission" and isinstance(entry.get("record"), dict)
        }

    def _parsed(self, needle: bytes) -> Iterator[Record]:
        """The records of the lines that hold `needle`; parsing is what takes time."""
        self.problems = []
        lines = self._read().split(b"\n")
        if torn := lines.pop():
            self.problems.append(
                f"{self.path}: line {len(lines) + 1}: not finished ({len(torn)} bytes); skipped"
            )
        for number, line in enumerate(lines, 1):
            if needle not in line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield record
            else:
                self.problems.append(f"{self.path}: line {number}: not a record; skipped")

    def _read(self) -> bytes:
        try:
            with (
                self._locked(os.O_RDONLY, fcntl.LOCK_SH) as descriptor,
                open(descriptor, "rb", closefd=False) as file,
            ):
                return file.read()
        except FileNotFoundError:
            return b""

    @contextmanager
    def _locked(self, flags: int, kind: int) -> Iterator[int]:
        if flags & os.O_CREAT:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        descriptor = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Held for one short write or read, so waiting for it needs no deadline; a process that
            # dies gives it back.
            fcntl.flock(descriptor, kind)
            if new:
                _sync_folder(self.path.parent)
            yield descriptor
        finally:
            os.close(descriptor)


def submission_key(sha256: str, lab: str, world_size: int, grader_version: str) -> str:
    """Names one grading: the same bytes, lab, world size and grader give the same key (hex)."""
    parts = json.dumps([sha256, lab, world_size, grader_version])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


@functools.cache
def grader_version(*also: bytes) -> str:
    """A short hash of everything of ours that can change a verdict, and of torch's version.

    So that an edited criterion, referee or kernel grades again, and an edited report does not.
    Computed once per process, like the code that it stands for.

    Args:
        also: further bytes that matter, such as the master notebook's.
    """
    digest = hashlib.sha256()
    ours, lib = Path(__file__).parent, Path(minidist.__file__).parent
    files = [file for file in ours.rglob("*.py") if file.stem not in _NOT_GRADING]
    for name in _GRADING:
        files += [lib / f"{name}.py", *(lib / name).rglob("*.py")]
    for file in sorted(file for file in files if file.is_file()):
        root = ours if file.is_relative_to(ours) else lib
        _add(digest, f"{root.name}/{file.relative_to(root)}".encode())
        _add(digest, file.read_bytes())
    _add(digest, platform.python_version().encode())
    _add(digest, metadata.version("torch").encode())
    for more in also:
        _add(digest, more)
    return digest.hexdigest()[:12]


def _add(digest: Any, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "big") + data)


def _sync_folder(folder: Path) -> None:
    """A new file's name is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
