"""Files that several processes share: atomic writes, and folders that outlive a killed owner."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER = "owner"  # in a folder: a file that the folder's owner keeps locked


def write_whole(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Writes a file atomically and syncs the data to disk; creates the folder if needed.

    Raises:
        OSError: the file cannot be written; a previous file at this path is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Marks a folder as this process's own until the end, or until this process dies."""
    # Lock first, rename second: no other process may find the file under its name and unlocked.
    unnamed = folder / f"{OWNER}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(folder / OWNER)
        yield
    finally:
        os.close(lock)


@contextmanager
def taken_over(folder: Path) -> Iterator[None]:
    """Keeps other processes from a folder whose owner has died.

    Raises:
        OSError: its owner lives, or it has no owner yet, or we may not open it.
    """
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
