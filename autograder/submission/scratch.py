"""The temporary folder that one attempt works in, and what becomes of it when the grader is killed.

A control group of the same name, or a container, goes with it (`cgroup`, `containers`).

A worker that gets SIGKILL cannot tidy up. So each folder holds a file that its owner has locked for
as long as it lives, and whoever grades next takes away the folders whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autograder.box.cgroup import remove_group
from autograder.box.containers import remove_left

MAX_PLACE_BYTES = 30  # a unix socket's path has at most 107
PREFIX = "md-"
_OWNER = "owner"


def place() -> Path:
    """Where these folders are: $TMPDIR, or /tmp where sockets in it would have too long a path."""
    folder = os.path.realpath(tempfile.gettempdir())
    return Path(folder if len(os.fsencode(folder)) <= MAX_PLACE_BYTES else "/tmp")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder of this process's own, gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place()))
    try:
        # Locked before it has its name: nobody may find it free in between.
        unnamed = folder / f"{_OWNER}.new"
        lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(folder / _OWNER)
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> list[Path]:
    """Takes away this user's folders whose owners are dead; returns them."""
    removed = []
    for folder in place().glob(f"{PREFIX}*"):
        with suppress(OSError):  # it went by itself, or is not ours to read
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_group(folder.name)
                remove_left(folder)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed
