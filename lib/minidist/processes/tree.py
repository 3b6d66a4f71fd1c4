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
from collections.abc import Iterator
from typing import NamedTuple


class Process(NamedTuple):
    """One process of the process table; `born` distinguishes it from a later one with its pid.

    In a `headless` process the first thread has ended. If no other thread is left, the process has
    ended and waits to be reaped. Otherwise it is about to end, or it hides: the kernel reports
    memory and files only through the first thread.
    """

    pid: int
    parent: int
    num_threads: int
    born: int
    headless: bool


def find(pid: int) -> Process | None:
    """The process with this pid; None if there is none, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(4096)
    except OSError:
        return None
    # "pid (name) state ppid …": the name may hold spaces and parentheses
    state, *fields = text[text.rindex(b")") + 2 :].split()
    parent, num_threads, born = (int(fields[i]) for i in (0, 16, 18))
    return Process(pid, parent, num_threads, born, state in (b"Z", b"X"))


def processes() -> Iterator[Process]:
    """All processes, zombies included; none if there is no /proc."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else ()  # pathlib would be too slow
    for name in names:
        if name.isdigit() and (process := find(int(name))) is not None:
            yield process


def below(root: int) -> list[Process]:
    """The children of `root`, their children and so on: parents first, zombies included."""
    families: dict[int, list[Process]] = {}
    for process in processes():
        families.setdefault(process.parent, []).append(process)
    found, todo = [], [root]
    while todo:
        children = families.pop(todo.pop(0), [])
        found += children
        todo += [process.pid for process in children]
    return found


def descendants(root: int) -> list[int]:
    """Pids below `root`, parents first, zombies included; empty if there is no /proc."""
    return [process.pid for process in below(root)]


def children(root: int) -> list[int]:
    """Pids of the direct children of `root`, zombies included."""
    return [process.pid for process in processes() if process.parent == root]


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
