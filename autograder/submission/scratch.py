"""The temporary folder of one attempt, and its removal after the grader was killed.

The control group of the same name, or the container, is removed together with the folder
(`cgroup`, `containers`).

A worker that gets SIGKILL cannot clean up. So each folder holds a file that its owner keeps locked
while the owner lives. The next grader removes the folders whose lock is free.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autograder.box.cgroup import remove_group
from autograder.box.containers import remove_left
from autograder.files import owned, taken_over

MAX_PLACE_BYTES = 30  # the path of a unix socket has at most 107 bytes
PREFIX = "md-"


def place() -> Path:
    """Where these folders are: $TMPDIR, or /tmp if $TMPDIR is too long for a socket's path."""
    folder = os.path.realpath(tempfile.gettempdir())
    return Path(folder if len(os.fsencode(folder)) <= MAX_PLACE_BYTES else "/tmp")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder for this process, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place()))
    try:
        with owned(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> list[Path]:
    """Removes this user's folders whose owners are dead; returns them."""
    removed = []
    for folder in place().glob(f"{PREFIX}*"):
        with suppress(OSError):  # its owner removed it, or we may not read it
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with taken_over(folder):
                remove_group(folder.name)
                remove_left(folder)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed
