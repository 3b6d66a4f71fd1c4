"""What of ours is still there: processes of this checkout, sockets' folders, shared memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

OURS = ("minidist.kernel", "autograder.practice", "bwrap")
FOLDERS = ("md-", "minidist-")


def find_leftovers() -> set[str]:
    """Names of our processes and of files in /tmp and /dev/shm that only we make."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        # Another checkout's, or another user's, are not this test's business.
        if state != "Z" and sys.prefix in words and any(name in words for name in OURS):
            found.add(f"process {process.name}: {words[:150]}")
    for folder in ("/tmp", "/dev/shm"):
        for path in Path(folder).iterdir():
            if path.name.startswith(FOLDERS):
                found.add(f"file {path}")
    return found


def assert_nothing_left(before: set[str], deadline_s: float = 15.0) -> None:
    """Fails if something that was not there `before` is still there at the deadline."""
    ends_at = time.monotonic() + deadline_s
    while left := find_leftovers() - before:
        assert time.monotonic() < ends_at, "left behind:\n" + "\n".join(sorted(left))
        time.sleep(0.25)
