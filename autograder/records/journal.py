"""The append-only journal of verdicts: it makes a batch resumable, and a crash harmless.

One JSON object per line. A line is written by one `write` under a lock and is on disk (fsync)
before `append` returns. So several processes may write, and a process that is killed loses at most
its unfinished line. Readers skip and report such a torn line, and the next line never continues it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """A journal file; the first `append` makes the file and its folder.

    Attributes:
        problems: the problems that the last reading found, one line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record; the record is on disk when this method returns.

        Raises:
            ValueError, TypeError: the record is not plain JSON (nan and inf are not JSON).
            OSError: the record could not be written (a full disk); the journal is unchanged.
        """
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._locked(os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as descriptor:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # ends the torn line before this one
            try:
                if os.write(descriptor, line) != len(line):
                    raise OSError(f"{self.path}: only a part of the record could be written")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise

    def iter_records(self) -> Iterator[Record]:
        """All complete records, oldest first; afterwards `problems` names the skipped lines."""
        yield from self._parsed(b"")

    def finished(self, key: str) -> Record | None:
        """The last record of a submission, if it was graded to the end.

        This is ``entry["record"]`` of the last entry ``{"kind": "submission", "key": key,
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
        """Key -> the record that `finished` returns, for all keys in one reading."""
        return {
            str(entry.get("key")): entry["record"]
            for entry in self._parsed(b'"submission"')
            if entry.get("kind") == "submission" and isinstance(entry.get("record"), dict)
        }

    def _parsed(self, needle: bytes) -> Iterator[Record]:
        """The records of the lines that contain `needle`; other lines are not parsed, for speed."""
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
            # No deadline is needed: every process holds the lock for one short write or read only,
            # and a process that dies releases it.
            fcntl.flock(descriptor, kind)
            if new:
                _sync_folder(self.path.parent)
            yield descriptor
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder to disk: a new file's name is on disk only after that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
