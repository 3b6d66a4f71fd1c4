"""Watches one submission's box from outside: all of its processes together, not each by itself.

The kernel's own limits (`sandbox`) count per process, and leave out who is root. So a thread of the
grader adds up what everything in the box uses, a few times a second, and kills the whole box when
that is too much. The submission then goes on with fresh ranks, as after any death of a rank, and
its feedback says what was too much. A box in a control group (`cgroup`) or in a container is also
bounded between two looks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autograder.box.gpu_memory import Reader, find_reader
from autograder.criteria.limits import MIB, Limits

PROC = Path("/proc")
EVERY_S = 0.5
GPU_EVERY = 4  # looks: asking the driver takes longer
MAX_FILES = 1 << 15  # of a whole box: looking at each takes a while
_RSS = (b"RssAnon:", b"RssShmem:")  # files of libraries are everybody's
_TABLES = (b"VmPTE:",)


@dataclass(frozen=True)
class Process:
    """One line of the process table; `born` tells it from a later one with the same pid.

    In one that is `headless` the first thread has ended and others have not: it is about to end, or
    hides, since the kernel says of the first thread only what a process uses.
    """

    pid: int
    parent: int
    num_threads: int
    born: int
    headless: bool


class Wall(Protocol):
    """What the kernel, or a container engine, bounds and ends as a whole."""

    def take_reason(self) -> str:
        """What it has killed since this was last asked; empty if nothing."""
        ...

    def kill(self) -> None:
        """Ends all that is in it."""
        ...


class Guard:
    """Keeps the descendants of one process within limits; `start`, and `stop` at the end.

    Args:
        root: pid of the kernel's front, which starts the box and is not in it.
        limits: of the box as a whole.
        wall: what else bounds the box, its control group or container; None if nothing does.
        sizes: the box's folders in memory that nothing bounds -> bytes that they may hold.
    """

    def __init__(
        self, root: int, limits: Limits, wall: Wall | None = None,
        sizes: Mapping[str, int] | None = None, every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self.root, self.limits, self.wall, self.every_s = root, limits, wall, every_s
        self.sizes = sizes or {}
        self._gpu_memory: Reader | None = None
        self._reasons: list[str] = []
        self._seen: dict[int, int] = {}  # pid -> born, of everything that was ever below root
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def start(self) -> Guard:
        """Begins to watch; does nothing where there is no /proc (macOS has no sandbox either)."""
        if PROC.joinpath("self", "stat").exists():
            self._thread.start()
        return self

    def take_reason(self) -> str:
        """Why the box was killed since this was last asked; empty if it was not."""
        with self._lock:
            reasons, self._reasons = self._reasons, []
        if self.wall is not None and (killed := self.wall.take_reason()):
            reasons.append(killed)
        return "; ".join(reasons)

    def stop(self) -> list[int]:
        """Ends the watch and kills what is left of the box; returns the pids of what was."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)
        left = []
        if self.wall is not None:
            self.wall.kill()
        for process in processes():
            if self._seen.get(process.pid) == process.born and process.pid != self.root:
                left.append(process.pid)
                _kill(process.pid)
        return left

    def _watch(self) -> None:
        self._gpu_memory, look = find_reader(), 0
        while not self._stopped.wait(self.every_s):
            inside = descendants(self.root)
            self._seen |= {process.pid: process.born for process in inside}
            for process in inside:
                if process.headless:
                    _kill(process.pid)
            reason, look = self._excess(inside), look + 1
            if look % GPU_EVERY == 0:
                reason = reason or self._gpu_excess(inside)
            if reason:
                with self._lock:
                    self._reasons.append(reason)
                if self.wall is not None:
                    self.wall.kill()
                for process in inside:
                    if process.parent == self.root:  # a box dies with its first process
                        _kill(process.pid)

    def _excess(self, inside: list[Process]) -> str:
        number = sum(process.num_threads for process in inside)
        if number > self.limits.num_processes:
            return (
                f"the submission had {number} processes and threads at once, at most "
                f"{self.limits.num_processes} are allowed"
            )
        for folder, size in self.sizes.items():
            used = used_of(folder, [process.pid for process in inside])
            if used > size:
                return (
                    f"the submission had {used // MIB} MiB in {folder}, at most {size // MIB} MiB "
                    "are allowed"
                )
        pids = [process.pid for process in inside]
        open_files = open_files_of(pids)
        if len(open_files) > MAX_FILES:
            return f"the submission had over {MAX_FILES} files open at once"
        files = memory_files_of(open_files)
        used = files + memory_of(pids, max(0, self.limits.box_memory_bytes - files))
        if used > self.limits.box_memory_bytes:
            return (
                f"the submission used {used // MIB} MiB of memory, at most "
                f"{self.limits.box_memory_bytes // MIB} MiB are allowed for all its ranks together"
            )
        return ""

    def _gpu_excess(self, inside: list[Process]) -> str:
        if self._gpu_memory is None:
            return ""
        try:
            held = self._gpu_memory()
        except (OSError, subprocess.SubprocessError):  # of the driver's, and nobody's fault
            return ""
        used = sum(held.get(process.pid, 0) for process in inside)
        if used > self.limits.gpu_memory_bytes:
            return (
                f"the submission held {used // MIB} MiB of GPU memory, at most "
                f"{self.limits.gpu_memory_bytes // MIB} MiB are allowed for all its ranks together"
            )
        return ""


def processes() -> Iterator[Process]:
    """The process table, as far as it can be read."""
    for name in os.listdir("/proc"):  # twice a second for each submission: no pathlib
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                text = file.read(4096)
        except OSError:  # it has ended since
            continue
        # Its name, in brackets, may hold anything.
        fields = text[text.rindex(b")") + 2 :].split()
        parent, num_threads, born = (int(fields[i]) for i in (1, 17, 19))
        headless = fields[0] in (b"Z", b"X")
        if num_threads > 1 or not headless:
            yield Process(int(name), parent, num_threads, born, headless)


def descendants(root: int) -> list[Process]:
    """Children of `root`, their children and so on."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, todo = [], [root]
    while todo:
        below = children.pop(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return found


def memory_of(pids: list[int], enough: int) -> int:
    """Memory of these processes in bytes, without files that are mapped.

    Pages that several of them share count once where the sum with all of them is above `enough`;
    telling them apart takes the kernel a while.
    """
    used = sum(_fields(pid, "status", _RSS + _TABLES) for pid in pids)
    if used <= enough:
        return used
    shared = sum(_fields(pid, "smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) for pid in pids)
    return shared + sum(_fields(pid, "status", _TABLES) for pid in pids) if shared else used


def open_files_of(pids: list[int]) -> list[str]:
    """All that these processes have open, as paths in /proc; not much more than `MAX_FILES`."""
    found: list[str] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended since
            found += [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        if len(found) > MAX_FILES:
            break
    return found


def memory_files_of(open_files: list[str]) -> int:
    """Bytes in files of these that are nowhere but in memory, each file once; mapped or not."""
    sizes: dict[tuple[int, int], int] = {}
    for path in open_files:
        with contextlib.suppress(OSError):  # it has ended, or is closed since
            if os.readlink(path).startswith("/memfd:"):
                file = os.stat(path)
                sizes[file.st_dev, file.st_ino] = 512 * file.st_blocks
    return sum(sizes.values())


def used_of(folder: str, pids: list[int]) -> int:
    """Bytes in a folder in memory that these processes see; 0 where none has one of its own.

    Args:
        pids: parents first: what a box's first process sees, the others cannot change.
    """
    for pid in pids:
        place = f"/proc/{pid}/root{folder}"
        try:
            if os.stat(place).st_dev != os.stat(folder).st_dev:  # what starts a box sees ours
                found = os.statvfs(place)
                return (found.f_blocks - found.f_bfree) * found.f_frsize
        except OSError:  # it has ended since
            continue
    return 0


def _fields(pid: int, name: str, wanted: tuple[bytes, ...]) -> int:
    """The sum of some lines ``Name: N kB`` of a file in /proc, in bytes."""
    try:
        lines = PROC.joinpath(str(pid), name).read_bytes().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
