"""Atomic file writes: other processes see the whole file or no file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
