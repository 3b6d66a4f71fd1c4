"""What this test process has left: processes of ours, sockets' folders, files of ours."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

OURS = ("minidist.kernel", "autograder.referee.practice", "bwrap")
FILES = ("md-", "minidist-")


def find_leftovers() -> set[str]:
    """Names of what there is; what another test process has beside it is not this test's business.

    The tests' conftest has given this process a mark in the environment, and a folder, of its own.
    """
    found, place = set(), Path(tempfile.gettempdir())
    number = os.environ.get("TESTS_OF_PROCESS")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            theirs = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # In a box the environment is another one, but the folder is named.
        of_this_test = f"TESTS_OF_PROCESS={number}".encode() in theirs or f"{place}/" in words
        of_this_test |= number is None and sys.prefix in words  # no test, but a program of ours
        if state != "Z" and of_this_test and any(name in words for name in OURS):
            found.add(f"process {process.name}: {words[:150]}")
    found |= {f"file {path}" for path in place.iterdir() if path.name.startswith(FILES)}
    return found


def assert_nothing_left(before: set[str], deadline_s: float = 60.0) -> None:
    """Fails if something that was not there `before` is still there at the deadline."""
    ends_at = time.monotonic() + deadline_s
    while left := find_leftovers() - before:
        assert time.monotonic() < ends_at, "left behind:\n" + "\n".join(sorted(left))
        time.sleep(0.05)
