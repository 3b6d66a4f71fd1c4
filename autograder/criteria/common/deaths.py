"""Kills a process while it changes files, at every moment that leaves different files behind.

A killed process leaves the files as they are at that moment. So a save first runs undisturbed in a
forked process, in which two of Python's hooks report the moments that count. An audit hook is
called before every call that opens, renames or deletes a file. A profile hook is called whenever
any call ends, and looks whether a file has changed since the last look: by a write, a flush or a
close of an open file, by C++, or by a different program. Then the save runs anew for each moment,
in a process that kills itself at that moment.

A process also has to die in the middle of a large write: the kernel kills it, because from the n-th
audited call on, files grow only up to a limit. n grows until the save comes to its end.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

DEADLINE_S = 15.0
WRITE_LIMIT_BYTES = 100_000
MAX_CALLS = 20  # with a large write after them; an honest save makes six
MAX_MOMENTS = 30  # an honest save has ten
# A file system's time moves in ticks; two writes in one tick have the same time of change.
TICK_S = 0.05
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
    """How a process ended that was to be killed.

    Attributes:
        ended: "killed", "ended" or "raised" (both before the moment came), or "hung".
        when: what the process was about to do, or had just done, in words; empty if it was not
            killed.
    """

    ended: str
    when: str = ""


class Moment(NamedTuple):
    """A moment at which a process can die: before a call, or when files have changed."""

    before_call: bool
    words: str  # what the call was going to do, or what was done, in the past tense

    def when(self) -> str:
        return f"before it had {self.words}" if self.before_call else f"right after {self.words}"


def deaths(save: Callable[[], Any], before: Path, place: Path) -> Iterator[Death]:
    """Runs `save` in one forked process after another, each of which dies a bit later.

    Args:
        before: the files before `save`; `place`, where it works, becomes a copy of them each time.

    Yields:
        each death, right after it; a process that hung ends the iteration.
    """
    _copy(before, place)
    first, moments = _run(save, watched=place)
    if first.ended == "hung":
        yield first
        return
    for number in _telling(moments):
        _copy(before, place)
        death, _ = _run(save, number, watched=place)
        if death.ended in ("ended", "raised"):
            continue  # threads made this run's moments fewer
        yield death
        if death.ended == "hung":
            return
    number = 0
    while number <= MAX_CALLS:
        _copy(before, place)
        death, calls = _run(save, number, in_a_write=True)
        if death.ended in ("ended", "raised"):
            break  # there are fewer calls, or no large write after this one
        yield death
        if death.ended == "hung":
            return
        number = max(number, len(calls)) + 1  # the deadly write came after all of these calls


def run_to_its_end(save: Callable[[], Any]) -> bool:
    """Whether `save` comes to its end in a forked process that nothing kills."""
    return _run(save)[0].ended == "ended"


def _copy(before: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(before, place)


def _telling(moments: list[Moment]) -> list[int]:
    """The numbers, from 1 on, of the moments at which a death shows something new.

    A death right after a change and one right before the next call leave the same files: one of
    them is enough. Of many like changes in a row, the first and the last are enough. If there are
    too many moments, the last ones count, because a save renames its file at the end.
    """
    numbered = list(enumerate(moments, 1))
    chosen: list[int] = []
    for _, group in groupby(numbered, key=lambda it: it[1] if not it[1].before_call else it[0]):
        numbers = [number for number, _ in group]
        chosen += sorted({numbers[0], numbers[-1]})
    said_by_a_call = {
        number
        for number, moment in numbered[:-1]
        if not moment.before_call and moments[number].before_call
    }
    return [number for number in chosen if number not in said_by_a_call][-MAX_MOMENTS:]


def _run(
    save: Callable[[], Any],
    number: int = -1,
    *,
    watched: Path | None = None,
    in_a_write: bool = False,
) -> tuple[Death, list[Moment]]:
    """Runs `save` in a process that dies at a moment; also returns the moments until its end.

    Args:
        number: the moment, from 1 on, or -1 for none; with `in_a_write`, the call after which the
            first large write is deadly, or 0 for the first large write of all.
        watched: the folder in which changes are moments, too; by default only calls are.
    """
    # A file, not a pipe: a pipe can fill up, and a process that `save` starts may keep it open.
    with tempfile.TemporaryFile() as told:
        pid = os.fork()
        if pid == 0:
            try:
                silent = open(os.devnull, "w")  # noqa: SIM115  the process ends with it
                sys.stdout = sys.stderr = silent
                for name in (signal.SIGALRM, signal.SIGXFSZ):
                    signal.signal(name, signal.SIG_DFL)
                signal.alarm(int(DEADLINE_S))
                torch.set_num_threads(1)  # a fork has no threads that could help
                _Hooks(number, told.fileno(), watched, in_a_write).set()
                save()
                os._exit(0)
            finally:
                os._exit(1)
        status = _wait(pid)
        told.seek(0)
        lines = told.read().decode(errors="replace").splitlines()
    moments = [Moment(line[0] == "<", line[1:]) for line in lines if line]
    ended_by = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
    if status is None or ended_by == signal.SIGALRM:
        return Death("hung"), moments
    if ended_by not in (signal.SIGKILL, signal.SIGXFSZ):
        return Death("ended" if status == 0 else "raised"), moments
    if in_a_write:
        last = moments[-1].words if moments else "begun"
        return Death("killed", f"in the middle of a write, after it had {last}"), moments
    return Death("killed", moments[-1].when() if moments else "when it had begun"), moments


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


class _Hooks:
    """The hooks of a process that is to die: they report each moment, and kill at the n-th."""

    def __init__(self, number: int, told: int, watched: Path | None, in_a_write: bool) -> None:
        self.left, self.told, self.in_a_write = number, told, in_a_write
        self.files = _Files(watched) if watched else None
        self.call = ""  # what the C call that is under way does to files
        self.one_looks = threading.Lock()

    def set(self) -> None:
        if self.in_a_write and self.left == 0:
            _limit_files()
        sys.addaudithook(self.audit)
        if self.files:
            threading.setprofile(self.profile)
            sys.setprofile(self.profile)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if what := _change(event, args):
            self.call = what
            self._reach("<" + what)

    def profile(self, frame: Any, event: str, function: Any) -> None:
        # From the end of a call to the beginning of the next, bytecode runs: it changes no file.
        if event not in ("call", "c_call"):
            name = frame.f_code.co_qualname if event == "return" else function.__name__
            with self.one_looks:
                if self.files and (changes := self.files.changes()):
                    done = f"it had {self.call}" if self.call else f"{name}(), when {changes}"
                    self._reach(">" + done)
        if event != "call":
            self.call = ""

    def _reach(self, moment: str) -> None:
        os.write(self.told, f"{moment}\n".encode(errors="replace"))
        self.left -= 1
        if self.left == 0 and self.in_a_write:
            _limit_files()
        elif self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _limit_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (WRITE_LIMIT_BYTES, hard))


class _Files:
    """What is in a folder and in those below, to see what has changed since the last look."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.fspath(folder)
        self.seen: dict[str, _Seen] = {}
        self.changes()

    def changes(self) -> str:
        """What is different from the last look, in words; "" if nothing is."""
        old, self.seen = self.seen, {}
        self._look(self.folder, old)
        changed = [
            f"{_name(path)} was {'new' if path not in old else 'changed' if now else 'gone'}"
            for path in sorted({*old, *self.seen})
            if (now := self.seen.get(path)) is None
            or path not in old
            or now.content != old[path].content
        ]
        return ", ".join(changed[:3])

    def _look(self, folder: str, old: dict[str, _Seen]) -> None:
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError:  # deleted meanwhile, by a thread or a different program
            return
        for entry in entries:
            try:
                self.seen[entry.path] = _see(entry, old.get(entry.path))
            except OSError:
                continue
            if entry.is_dir(follow_symlinks=False):
                self._look(entry.path, old)


class _Seen(NamedTuple):
    """A file at the last look: its content, and a mark that tells quickly if it has changed."""

    mark: tuple[int, int, int]
    settled: bool  # whether every later change gives it a different mark
    content: tuple[int, int]


def _see(entry: os.DirEntry[str], old: _Seen | None) -> _Seen:
    """The file as it is now; it is read if it may have changed since `old`."""
    status, now_s = entry.stat(follow_symlinks=False), time.time()
    mark = (status.st_ino, status.st_size, status.st_mtime_ns)
    if old and old.settled and old.mark == mark:
        return old
    content = 0
    if stat.S_ISREG(status.st_mode):
        with open(entry.path, "rb") as file:
            content = zlib.crc32(file.read())
    return _Seen(mark, now_s - status.st_mtime > TICK_S, (status.st_ino, content))


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
