"""A process dies while it changes files: at every call that does so, and in the middle of a write.

Python tells an audit hook of every call that opens, renames or deletes a file, before the call. In
a forked process that is about to die anyway, such a hook kills at the n-th of these calls. Or it
lets files grow only up to a limit from the n-th call on, and the kernel kills in the middle of the
next large write. n grows until the function comes to its end.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEADLINE_S = 15.0
WRITE_LIMIT_BYTES = 100_000
MAX_CALLS = 20  # an honest save makes six
_CALLS = {
    "os.mkdir": "made a folder",
    "os.rename": "renamed",
    "os.remove": "deleted",
    "os.rmdir": "deleted a folder",
    "os.link": "linked",
    "os.symlink": "linked",
    "os.truncate": "cut off",
    "subprocess.Popen": "started a program",
    "os.system": "started a program",
}


@dataclass(frozen=True)
class Death:
    """How a process ended that was to die.

    Attributes:
        ended: "killed", "ended" (nothing was left to die at), "raised" (likewise) or "hung".
        when: what the process was about to do, in words; empty if it was not killed.
    """

    ended: str
    when: str = ""


def deaths(save: Callable[[], Any], before: Path, place: Path) -> Iterator[Death]:
    """Runs `save` in one forked process after another, each of which dies a bit later.

    Args:
        before: the files before `save`; `place`, in which it works, becomes their copy each time.

    Yields:
        each death, right after it; a process that hung ends the iteration.
    """
    for in_a_write in (False, True):
        for number in range(0 if in_a_write else 1, MAX_CALLS + 1):
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(before, place)
            death = die_at(save, number, in_a_write=in_a_write)
            if death.ended in ("ended", "raised"):
                break  # there are fewer calls, or no large write after this one
            yield death
            if death.ended == "hung":
                return


def run_to_its_end(save: Callable[[], Any]) -> bool:
    """Runs `save` in a forked process as above, which does not die; whether it came to its end."""
    return die_at(save, -1, in_a_write=False).ended == "ended"


def die_at(save: Callable[[], Any], number: int, *, in_a_write: bool) -> Death:
    """Runs `save` in a process that dies at call `number`, or in the first large write after it."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            silent = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
            sys.stdout = sys.stderr = silent
            for name in (signal.SIGALRM, signal.SIGXFSZ):
                signal.signal(name, signal.SIG_DFL)
            signal.alarm(int(DEADLINE_S))
            torch.set_num_threads(1)  # a fork has no threads that could help
            sys.addaudithook(_Hook(number, in_a_write, writable))
            save()
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writable)
    with open(readable, "rb", buffering=0) as told:
        status = _wait(pid)
        # Whatever `save` has started may keep the pipe open, so what is there is read.
        there = select.select([told], [], [], 0)[0]
        lines = (
            os.read(told.fileno(), 1 << 16).decode(errors="replace").splitlines() if there else []
        )
    ended_by = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
    if status is None or ended_by == signal.SIGALRM:
        return Death("hung")
    if ended_by not in (signal.SIGKILL, signal.SIGXFSZ):
        return Death("ended" if status == 0 else "raised")
    last = lines[-1] if lines else "begun"
    if in_a_write:
        return Death("killed", f"in the middle of a write, after it had {last}")
    return Death("killed", f"before it had {last}")


def _wait(pid: int) -> int | None:
    """The status of a child that has ended; None if it had to be killed at the deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.002)


class _Hook:
    """The audit hook of a process that is to die: tells of each call, and dies at the n-th."""

    def __init__(self, number: int, in_a_write: bool, told: int) -> None:
        self.left, self.in_a_write, self.told = number, in_a_write, told
        if in_a_write and number == 0:
            self._limit()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        what = _change(event, args)
        if not what:
            return
        os.write(self.told, f"{what}\n".encode(errors="replace"))
        self.left -= 1
        if self.left == 0 and self.in_a_write:
            self._limit()
        elif self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _limit(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (WRITE_LIMIT_BYTES, hard))


def _change(event: str, args: tuple[Any, ...]) -> str:
    """What a call does to files, in the past tense; empty if it only reads."""
    if event == "open":
        path, _, flags = args
        if not isinstance(path, str | bytes | os.PathLike):
            return ""  # a descriptor that is open already
        changes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        told = changes and not os.fsdecode(path).startswith("/dev/")
        return f"opened {_name(path)} to write" if told else ""
    if event not in _CALLS:
        return ""
    if event == "os.rename":
        return f"renamed {_name(args[0])} to {_name(args[1])}"
    named = args and isinstance(args[0], str | bytes | os.PathLike) and event.startswith("os.re")
    return f"{_CALLS[event]} {_name(args[0])}" if named else _CALLS[event]


def _name(path: Any) -> str:
    return Path(os.fsdecode(path)).name[:80].replace("\n", " ")
