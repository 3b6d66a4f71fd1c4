"""Watches one submission's box from outside, and limits the sum over all of its processes.

The kernel's own limits (`environment.limit_command`) count per process, and some do not apply to
root. So a thread of the grader adds up twice a second what all processes in the box use, and kills
the whole box if the sum is above a limit. The submission then goes on with fresh ranks, as after
any death of a rank, and its feedback says which limit was exceeded. If the box is in a control
group (`cgroup`) or in a container, it is also bounded between two looks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from autograder.box.gpu_memory import Reader, find_reader
from autograder.criteria.limits import MIB, Limits
from minidist.processes.tree import Process, below, processes

PROC = Path("/proc")
EVERY_S = 0.5
GPU_EVERY = 4  # ask for GPU memory at every 4th look only: the driver answers slowly
MAX_FILES = 1 << 15  # open files of a whole box, because looking at each file takes time
_RSS = (b"RssAnon:", b"RssShmem:")  # without mapped files: all processes share library files
_TABLES = (b"VmPTE:",)


class Wall(Protocol):
    """A control group or container, which bounds a box and ends it as a whole."""

    def take_reason(self) -> str:
        """Why processes were killed since the last call; empty if none were."""
        ...

    def kill(self) -> None:
        """Kills everything inside."""
        ...


class Guard:
    """Keeps the descendants of one process within limits; call `start`, and `stop` at the end.

    Args:
        root: pid of the kernel's front, which starts the box and is outside the box.
        limits: limits of the box as a whole.
        wall: the box's control group or container; None if it has neither.
        sizes: the box's in-memory folders that nothing else bounds -> allowed bytes.
    """

    def __init__(
        self,
        root: int,
        limits: Limits,
        wall: Wall | None = None,
        sizes: Mapping[str, int] | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self.root, self.limits, self.wall, self.every_s = root, limits, wall, every_s
        self.sizes = sizes or {}
        self._gpu_memory: Reader | None = None
        self._reasons: list[str] = []
        self._seen: dict[int, int] = {}  # pid -> born, of everything that was ever below root
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def start(self) -> Guard:
        """Begins to watch; does nothing without /proc (macOS, which has no sandbox either)."""
        if PROC.joinpath("self", "stat").exists():
            self._thread.start()
        return self

    def take_reason(self) -> str:
        """Why the box was killed since the last call; empty if it was not."""
        with self._lock:
            reasons, self._reasons = self._reasons, []
        if self.wall is not None and (killed := self.wall.take_reason()):
            reasons.append(killed)
        return "; ".join(reasons)

    def stop(self) -> list[int]:
        """Stops watching and kills what is left of the box; returns the pids that were left."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)
        left = []
        if self.wall is not None:
            self.wall.kill()
        for process in living(processes()):
            if self._seen.get(process.pid) == process.born and process.pid != self.root:
                left.append(process.pid)
                _kill(process.pid)
        return left

    def _watch(self) -> None:
        self._gpu_memory, look = find_reader(), 0
        killed: set[tuple[int, int]] = set()
        while not self._stopped.wait(self.every_s):
            inside = living(below(self.root))
            self._seen |= {process.pid: process.born for process in inside}
            for process in inside:
                if process.headless:
                    _kill(process.pid)
            reason, look = self._excess(inside), look + 1
            if look % GPU_EVERY == 0:
                reason = reason or self._gpu_excess(inside)
            if reason:
                now = {(process.pid, process.born) for process in inside}
                if not killed & now:  # else noted already, and they are ending
                    with self._lock:
                        self._reasons.append(reason)
                killed = now
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
        except (OSError, subprocess.SubprocessError):  # the driver failed, not the submission
            return ""
        used = sum(held.get(process.pid, 0) for process in inside)
        if used > self.limits.gpu_memory_bytes:
            return (
                f"the submission held {used // MIB} MiB of GPU memory, at most "
                f"{self.limits.gpu_memory_bytes // MIB} MiB are allowed for all its ranks together"
            )
        return ""


def living(found: Iterable[Process]) -> list[Process]:
    """The processes without those that have ended and wait to be reaped."""
    return [p for p in found if p.num_threads > 1 or not p.headless]


def memory_of(pids: list[int], enough: int) -> int:
    """Memory of these processes in bytes, without mapped files.

    A page that several processes share counts once per process, if the sum is at most `enough`.
    Otherwise the sum is made again with each shared page counted once, which is slower.
    """
    used = sum(_fields(pid, "status", _RSS + _TABLES) for pid in pids)
    if used <= enough:
        return used
    shared = sum(_fields(pid, "smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) for pid in pids)
    return shared + sum(_fields(pid, "status", _TABLES) for pid in pids) if shared else used


def open_files_of(pids: list[int]) -> list[str]:
    """The open files of these processes, as paths in /proc; stops soon after `MAX_FILES`."""
    found: list[str] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended since
            found += [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        if len(found) > MAX_FILES:
            break
    return found


def memory_files_of(open_files: list[str]) -> int:
    """Bytes in those open files that exist only in memory (memfd), mapped or not; each once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in open_files:
        with contextlib.suppress(OSError):  # the process has ended, or the file is closed since
            if os.readlink(path).startswith("/memfd:"):
                file = os.stat(path)
                sizes[file.st_dev, file.st_ino] = 512 * file.st_blocks
    return sum(sizes.values())


def used_of(folder: str, pids: list[int]) -> int:
    """Bytes used in the box's own in-memory `folder`; 0 if no process has one.

    Args:
        pids: parents first, because processes further down cannot change what the box's first
            process sees.
    """
    for pid in pids:
        place = f"/proc/{pid}/root{folder}"
        try:
            # A process that starts a box, and is not yet inside, sees the machine's own folder.
            if os.stat(place).st_dev != os.stat(folder).st_dev:
                found = os.statvfs(place)
                return (found.f_blocks - found.f_bfree) * found.f_frsize
        except OSError:  # the process has ended since
            continue
    return 0


def _fields(pid: int, name: str, wanted: tuple[bytes, ...]) -> int:
    """The sum of the wanted lines ``Name: N kB`` of a file in /proc, in bytes."""
    try:
        lines = PROC.joinpath(str(pid), name).read_bytes().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
