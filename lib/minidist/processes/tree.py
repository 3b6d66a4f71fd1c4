"""Finds and ends all descendants of a process.

The front and the launcher adopt their orphaned descendants, so a daemon that a cell created by a
double fork is still found, and ended when its ranks end. Only a process's own descendants are
signalled; their pids come from the operating system, never from a rank.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path


def descendants(root: int) -> list[int]:
    """Pids below `root`, parents first, zombies included; empty if there is no /proc."""
    families, found, queue = _families(), [], [root]
    while queue:
        below = families.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def children(root: int) -> list[int]:
    """Pids of the direct children of `root`, zombies included."""
    return _families().get(root, [])


def _families() -> dict[int, list[int]]:
    """The children of every process that has some."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # "pid (name) state ppid …": the name may hold spaces and parentheses
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    return children


def count_open_files() -> int:
    """Files and sockets that this process has open; 0 if that is unknown."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def allow_more_files() -> None:
    """Let this process open as many files as the administrator lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS reports a number that it does not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def kill_descendants(root: int, *, deadline_s: float = 3.0) -> None:
    """SIGKILL everything below `root` until nothing is left or the deadline has passed."""
    end = time.monotonic() + deadline_s
    while True:
        pids = descendants(root)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap(pids)
        if not descendants(root) or time.monotonic() > end:
            return
        time.sleep(0.01)


def reap(pids: list[int]) -> None:
    """Collect those of `pids` that are ended children of this process."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def describe_exit(code: int) -> str:
    """Words for an exit status as `subprocess` gives it (negative: a signal)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
