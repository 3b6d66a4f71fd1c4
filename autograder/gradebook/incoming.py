"""Finds complete submissions with new content, and copies them before they are graded.

    build/watch/LAB/STUDENT/LAB.ipynb, timestamp.txt    what was taken last

A student may save again while the grader works, so it works on a copy. The copies are a class's
folder: `autograder grade build/watch/LAB --lab LAB` grades them again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autograder.course.course import Course
from autograder.gradebook.database import TIMESTAMP, handed_in_at
from autograder.gradebook.roster import may_be_id
from autograder.gradebook.watching import watch_folder
from autograder.submission.find import Found, Submission, find_submissions
from autograder.submission.intake import IntakeLimits, sha256_of

SECRET = "submission_secret.txt"  # of nbgrader's exchange: whoever knows it may fetch the feedback
PATIENCE_S = 60.0  # for a file that is no complete JSON: it may still be being written
_BESIDE = (TIMESTAMP, SECRET)
_MAX_BESIDE_BYTES = 4096
_PIECE_BYTES = 4 << 20
_MAX_ENTRIES = 1_000_000

Signature = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Incoming:
    """A submission that is complete.

    Attributes:
        submission: the student, and the path of the copy.
        source: the notebook that was handed in.
        identity: "CONTENT.REST", hashes of the content, and of the time and the secret.
    """

    submission: Submission
    source: Path
    identity: str

    @property
    def student(self) -> str:
        return self.submission.student


@dataclass
class Look:
    """What one look at the folder has found.

    Attributes:
        growing: students whose file is still being written.
        left_out: what is no submission -> why.
        failed: the folder could not be looked at.
    """

    ready: list[Incoming] = field(default_factory=list)
    growing: list[str] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)
    failed: bool = False


class Inbox:
    """A class's folder that students hand in to, for one lab."""

    def __init__(self, course: Course, lab: str, folder: Path, settle_s: float) -> None:
        self.lab, self.folder, self.settle_s = lab, folder, settle_s
        self.copies = watch_folder(course) / lab
        self._seen: dict[Path, tuple[Signature, float]] = {}  # notebook -> state, since when
        self._taken: dict[Path, tuple[Signature, Incoming]] = {}
        self._found: tuple[bytes, Found] | None = None

    def look(self, returned: Mapping[str, str]) -> Look:
        """Copies what is new and complete.

        Args:
            returned: student -> identity of the submission whose feedback the student has.

        Raises:
            ValueError: the folder is not there, or could be a student's as well as a class's.
        """
        found = self._find()
        result = Look(left_out=dict(found.left_out))
        for submission in found.submissions:
            student, source = submission.student, submission.path
            if not may_be_id(student) or "," in student:
                why = "its name cannot be a student's in nbgrader: rename the folder"
                result.left_out[source.parent] = why
                continue
            state = _signature(source)
            before, incoming = self._taken.get(source, ((), None))
            if incoming is None or before != state:
                settled = self._is_settled(source, state)
                incoming = self._take(student, source, state) if settled else None
            if incoming is None:
                result.growing.append(student)
                continue
            self._taken[source] = state, incoming
            if incoming.identity != returned.get(student):
                result.ready.append(incoming)
        return result

    def _find(self) -> Found:
        """Reads notebooks only if something has changed; else only names, sizes and times."""
        state = _fingerprint(self.folder)
        if self._found is None or self._found[0] != state:
            self._found = state, find_submissions([self.folder], self.lab, strict=False)
        return self._found[1]

    def _is_settled(self, source: Path, state: Signature) -> bool:
        """Whether nobody has changed the file for a while, by its times or by our own clock."""
        before, since = self._seen.get(source, ((), 0.0))
        if before != state:
            before, since = state, time.monotonic()
            self._seen[source] = state, since
        # No times: the file has gone since the folder was read, or its folder cannot be entered.
        changed_s = max(max(each[3:]) for each in state if each) / 1e9 if state[0] else math.inf
        quiet = max(time.time() - changed_s, time.monotonic() - since)
        return quiet >= self.settle_s and (quiet >= PATIENCE_S or _is_whole(source))

    def _take(self, student: str, source: Path, state: Signature) -> Incoming | None:
        """Copies a submission; None if it has changed meanwhile."""
        target = self.copies / student / f"{self.lab}.ipynb"
        target.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        draft = _draft(source, target.parent)
        if draft is not None:
            try:
                (target.parent / TIMESTAMP).unlink(missing_ok=True)
                if text := _beside(source, TIMESTAMP):
                    (target.parent / TIMESTAMP).write_bytes(text)
                identity = identity_of(draft, source)
                if _signature(source) != state:
                    return None
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
        else:  # no file that can be read: intake says so to the student
            target, identity = source, identity_of(source)
        return Incoming(Submission(student, target), source, identity)


def _fingerprint(folder: Path) -> bytes:
    """Changes whenever something in a class's folder does."""
    digest, left = hashlib.sha256(), _MAX_ENTRIES
    todo = [(folder, 0)]
    while todo:
        where, depth = todo.pop()
        try:
            entries = sorted(os.scandir(where), key=lambda entry: entry.name)
        except OSError as error:
            digest.update(f"{where}: {error.errno}\n".encode("utf-8", "surrogateescape"))
            continue
        for entry in entries[:left]:
            left -= 1
            line = f"{entry.path} {_state_of(entry.path)}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
            if depth < 2 and entry.is_dir(follow_symlinks=False):
                todo.append((Path(entry.path), depth + 1))
    return digest.digest()


def _signature(notebook: Path) -> Signature:
    names = (notebook.name, *_BESIDE)
    return tuple(_state_of(notebook.with_name(name)) for name in names)


def _state_of(path: Path | str) -> tuple[int, ...]:
    """Inode, size, mode and times; ctime shows changes that keep mtime."""
    try:
        of = os.lstat(path)
    except OSError:
        return ()
    return (of.st_ino, of.st_size, of.st_mode, of.st_mtime_ns, of.st_ctime_ns)


def _open(path: Path) -> int | None:
    """A descriptor of a regular file that is no link; None of anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return descriptor


def _beside(notebook: Path, name: str) -> bytes:
    """The content of a small file beside a notebook; empty if there is none."""
    descriptor = _open(notebook.with_name(name))
    if descriptor is None:
        return b""
    with open(descriptor, "rb") as file:
        return file.read(_MAX_BESIDE_BYTES)


def identity_of(content: Path, source: Path | None = None) -> str:
    """Identity of a notebook; `source` is where its time and its secret are, if elsewhere."""
    source = source or content
    try:
        when = handed_in_at(source).encode()
    except ValueError:
        when = _beside(source, TIMESTAMP)
    rest = hashlib.sha256(b"\n".join([when, _beside(source, SECRET)])).hexdigest()
    return f"{sha256_of(content)[:32]}.{rest[:16]}"


def same_but_for_content(one: str, other: str) -> bool:
    """Whether two identities are of the same time and secret."""
    return one.partition(".")[2] == other.partition(".")[2]


def _is_whole(notebook: Path) -> bool:
    """Whether the file is complete JSON; True for anything but a file, which cannot grow."""
    descriptor = _open(notebook)
    if descriptor is None:
        return True
    with open(descriptor, "rb") as file:
        if os.fstat(file.fileno()).st_size > IntakeLimits().max_file_bytes:
            return True
        try:
            json.load(file)
        except (ValueError, RecursionError):
            return False
    return True


def _draft(source: Path, folder: Path) -> Path | None:
    """A copy, on disk, of a regular file up to the size limit; None of anything else."""
    descriptor = _open(source)
    if descriptor is None:
        return None
    left = IntakeLimits().max_file_bytes
    with (
        open(descriptor, "rb") as file,
        tempfile.NamedTemporaryFile(dir=folder, prefix=".writing-", delete=False) as copy,
    ):
        try:
            while piece := file.read(_PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    break
                copy.write(piece)
            copy.flush()
            os.fsync(copy.fileno())
        except BaseException:
            os.unlink(copy.name)
            raise
    if left < 0:
        os.unlink(copy.name)
        return None
    return Path(copy.name)
