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

from autograder.records.record import Record, read_object

Entry = dict[str, Any]  # one line; `kind` says what it is about


class Journal:
    """A journal file; the first `append` makes the file and its folder.

    Attributes:
        problems: the problems that the last reading found, one line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes one entry; the entry is on disk when this method returns.

        Raises:
            ValueError, TypeError: the entry is not plain JSON (nan and inf are not JSON).
            OSError: the entry could not be written (a full disk); the journal is unchanged.
        """
        line = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._locked(os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as descriptor:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # ends the torn line before this one
            try:
                if os.write(descriptor, line) != len(line):
                    raise OSError(f"{self.path}: only a part of the entry could be written")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise

    def append_record(self, key: str, record: Record) -> None:
        """Writes that the submission with this key was graded to the end; see `append`."""
        self.append({"kind": "submission", "key": key, "record": record.to_json()})

    def iter_entries(self) -> Iterator[Entry]:
        """All complete entries, oldest first; afterwards `problems` names the skipped lines.

        The record of a "submission" is a `Record`, and not JSON.
        """
        yield from self._parsed(b"")

    def finished(self, key: str) -> Record | None:
        """The last record of a submission, if it was graded to the end.

        Args:
            key: from `submission_key`.
        """
        return self._records(key.encode()).get(key)

    def all_finished(self) -> dict[str, Record]:
        """Key -> the record that `finished` returns, for all keys in one reading."""
        return self._records(b'"submission"')

    def _records(self, needle: bytes) -> dict[str, Record]:
        found = (e for e in self._parsed(needle) if e.get("kind") == "submission")
        return {str(entry.get("key")): entry["record"] for entry in found}

    def _parsed(self, needle: bytes) -> Iterator[Entry]:
        """The entries of the lines that contain `needle`; other lines are not parsed, for speed."""
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
                entry = read_object(json.loads(line), "entry")
                if entry.get("kind") == "submission":
                    entry["record"] = Record.from_json(entry.get("record"))
            except (ValueError, RecursionError) as error:
                self.problems.append(f"{self.path}: line {number}: {error}; skipped")
            else:
                yield entry

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
