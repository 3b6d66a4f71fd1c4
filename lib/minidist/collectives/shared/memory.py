"""Memory that the ranks of one machine share, and flags in it that tell who has arrived.

Two parts that `group.py` builds its collectives on:

- `map_together`: one stretch of memory, mapped by every rank of a process group. Phases: rank 0
  creates it, tells the others where it is, all map it, all agree that all could.
- `Flags`: one counter per rank, in that memory. A rank adds one to its own counter when it arrives
  at a barrier, then looks at the others' counters until they are as high. No lock, no system call
  while nobody is late.

Nothing is left behind, whoever is killed: the memory has no name in any file system
(`memfd_create`) and goes with the last process that maps it. It does not come out of /dev/shm
either, which holds a mere 64 MiB in many containers. Linux only.

**Why a counter is enough.** The counter says "what I wrote before is complete". So the machine must
not show another core the new counter before the data written ahead of it, nor let the waiting rank
read data ahead of the counter.

- x86-64 guarantees both for ordinary loads and stores (total store order). The only exception are
  non-temporal stores, which memcpy uses for large blocks, and it ends them with a store fence.
- ARM and others may reorder ordinary loads and stores. Python has no fence, so there a rank calls
  `sched_yield` between data and counter, in both directions: the scheduler takes the run queue's
  lock and executes a full barrier (`smp_mb__after_spinlock`), which membarrier(2) relies on, too.
  That is how Linux is written, not what POSIX promises, and this project's tests run on x86-64.

A counter is one aligned word of 8 bytes, which both kinds of machine store in one piece. That
CPython writes an element of `memoryview.cast("Q")` with one store is true of every build we looked
at, and is no promise of the language either.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import platform
import secrets
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from minidist.errors import DeadlineError, MinidistError

_HUGE_PAGE = 2 << 20
# 128 bytes per rank: two cache lines, since processors fetch lines in pairs. Counters of two ranks
# in one line would travel between cores at every write of either.
WORDS_PER_RANK = 16
_TOTAL_STORE_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


class SharedMemoryError(MinidistError):
    """The ranks cannot share memory: other hosts, too little memory, or not Linux."""


def map_together(
    num_bytes: int, group: dist.ProcessGroup | None = None
) -> tuple[mmap.mmap, list[int]]:
    """Map the same new memory, filled with zeros, on every rank of `group`. Collective.

    Args:
        num_bytes: size, the same on every rank; at least 1.
        group: ranks of one machine; None means the default group.

    Returns:
        The mapping, which lives as long as something refers to it, and the process id of each rank.

    Raises:
        SharedMemoryError: on every rank, when one of them cannot map it; it says which and why.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    # Create. The name carries a secret: it shows to each rank that it has opened this memory.
    fd, name, failure = -1, f"minidist-{secrets.token_hex(8)}", None
    if rank == 0:
        try:
            fd = _create(name, num_bytes)
        except (OSError, SharedMemoryError) as error:
            failure = _explain(error)
    # Tell. Every rank says where it runs, so that errors can name hosts.
    here = {"pid": os.getpid(), "host": platform.node(), "fd": fd, "name": name, "failure": failure}
    ranks = _gather(here, num_ranks, group)
    # Map.
    memory, failure = None, ranks[0]["failure"]
    if failure is None:
        try:
            memory = _open(ranks[0]["pid"], ranks[0]["fd"], ranks[0]["name"], num_bytes)
        except (OSError, SharedMemoryError) as error:
            failure = _explain(error)
    # Agree; only now may rank 0 close its descriptor.
    failures = _gather(failure, num_ranks, group)
    if fd >= 0:
        os.close(fd)
    for other, text in enumerate(failures):
        if text is not None:
            hosts = ", ".join(f"rank {i} on {each['host']}" for i, each in enumerate(ranks))
            raise SharedMemoryError(
                f"rank {other} of {num_ranks} cannot share {num_bytes} bytes with rank 0: {text}. "
                f"Shared memory needs all ranks on one host and in one container ({hosts})",
                rank=rank,
            )
    assert memory is not None
    return memory, [each["pid"] for each in ranks]


def _create(name: str, num_bytes: int) -> int:
    if sys.platform != "linux":
        raise SharedMemoryError(f"memfd_create needs Linux, this is {sys.platform}")
    available = available_bytes()
    if num_bytes > available:
        raise SharedMemoryError(f"needs {num_bytes} bytes, {available} are available")
    fd = os.memfd_create(name)
    try:
        # Reserve now: memory that runs out at the first touch would kill the process (SIGBUS).
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open(pid: int, fd: int, name: str, num_bytes: int) -> mmap.mmap:
    """Map what process `pid` has open as `fd`, when that is the memory called `name`."""
    path = f"/proc/{pid}/fd/{fd}"
    # On another host, or in another container, the path leads elsewhere or nowhere.
    target = os.readlink(path)
    if not target.startswith(f"/memfd:{name}"):
        raise SharedMemoryError(f"{path} is {target}, not the memory of rank 0")
    opened = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(opened, num_bytes)
    finally:
        os.close(opened)
    if num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer page faults and address translations. Only advice: many kernels refuse it.
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return memory


def available_bytes() -> int:
    """Bytes of memory that can still be had, by /proc/meminfo and this process's cgroup."""
    limits = []
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    try:
        folder = "/sys/fs/cgroup"
        with open(f"{folder}/memory.max") as limit, open(f"{folder}/memory.current") as used:
            limits.append(int(limit.read()) - int(used.read()))
    except (OSError, ValueError):
        pass  # no cgroup v2, or its limit is "max"
    return max(0, min(limits)) if limits else sys.maxsize


def _gather(value: Any, num_ranks: int, group: dist.ProcessGroup | None) -> list[Any]:
    values: list[Any] = [None] * num_ranks
    dist.all_gather_object(values, value, group=group)
    return values


def _explain(error: Exception) -> str:
    return (
        str(error) if isinstance(error, SharedMemoryError) else f"{type(error).__name__}: {error}"
    )


class Flags:
    """A barrier in two halves, `arrive` and `wait`, made of one counter per rank.

    Between the two halves a rank may do what needs nobody else.

    Args:
        words: shared memory as `memoryview.cast("Q")`, `num_words(num_ranks)` long, zero at first.
        rank: this rank in the group.
        pids: the process of each rank, watched while this one waits.
        timeout_s: how long `wait` waits.
    """

    def __init__(self, words: memoryview, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        self.words = words
        self.rank = rank
        self.timeout_s = timeout_s
        self.count = 0
        self._turn = 0
        self._mine = rank * WORDS_PER_RANK
        self._gave_up = len(pids) * WORDS_PER_RANK
        self._others = [i * WORDS_PER_RANK for i in range(len(pids)) if i != rank]
        self._watched = _Watch(pids, rank)
        # To spin is right only while every rank has a core to itself. It is kept to about 3 µs: in
        # case the ranks have to share a core after all, each spin delays the one waited for.
        cores = len(os.sched_getaffinity(0))
        self._spins = 100 if len(pids) <= cores else 0

    @staticmethod
    def num_words(num_ranks: int) -> int:
        return (num_ranks + 1) * WORDS_PER_RANK

    def announce(self, message: tuple[int, int]) -> None:
        """Say two words before arriving; `announced` reads them after the wait.

        Two places are used in turn: who still reads the message before the last barrier is not
        disturbed, as nobody gets two barriers ahead.
        """
        self._turn ^= 2
        at = self._mine + 1 + self._turn
        self.words[at], self.words[at + 1] = message

    def announced(self) -> list[tuple[int, tuple[int, int]]]:
        """(rank, its two words) of every other rank."""
        words, shift = self.words, 1 + self._turn
        return [
            (i // WORDS_PER_RANK, (words[i + shift], words[i + shift + 1])) for i in self._others
        ]

    def arrive(self) -> None:
        """Tell the others that all this rank wrote until now is complete."""
        self.count += 1
        if not _TOTAL_STORE_ORDER:
            os.sched_yield()
        self.words[self._mine] = self.count

    def wait(self, patient: bool = False) -> None:
        """Return when all ranks have arrived as often as this one; what they wrote is visible.

        Args:
            patient: go to sleep soon; for a thread beside one that computes.

        Raises:
            DeadlineError: a rank has ended, has given up, or did not arrive in time.
        """
        words, count = self.words, self.count
        for other in self._others:
            if words[other] < count:
                self._wait_for(other, patient)
        if not _TOTAL_STORE_ORDER:
            os.sched_yield()

    def _wait_for(self, other: int, patient: bool) -> None:
        words, count = self.words, self.count
        # A rank that is on its way comes within microseconds: look at nothing but its counter.
        for _ in range(0 if patient else self._spins):
            if words[other] >= count:
                return
        # Then let others have the core, and look up what happened to the late one now and then.
        start_s = time.monotonic()
        for attempt in itertools.count():
            if words[other] >= count:
                return
            if attempt < (4 if patient else 400):
                os.sched_yield()  # gives up the GIL as well
                continue
            waited_s = time.monotonic() - start_s
            time.sleep(min(1e-3, max(2e-5, waited_s / 20)))
            if attempt % 16 == 0:
                self._check(waited_s)

    def _check(self, waited_s: float) -> None:
        # In this order: who has ended before the counters are read has arrived, or never will.
        ended = self._watched.ended()
        late = [i // WORDS_PER_RANK for i in self._others if self.words[i] < self.count]
        gone = [i for i in ended if i in late]
        quitter = self.words[self._gave_up]
        if not late:
            return
        if gone:
            text = f"{_names(gone)} ended before it arrived"
        elif quitter and quitter - 1 != self.rank:
            text = f"rank {quitter - 1} gave up before, after an error of its own"
        elif waited_s > self.timeout_s:
            text = f"{_names(late)} did not arrive within {self.timeout_s:g} s"
        else:
            return
        self.give_up()
        raise DeadlineError(
            f"shared-memory barrier {self.count}: {text} ({len(self._others) + 1} ranks)",
            rank=self.rank,
        )

    def give_up(self) -> None:
        """Tell ranks that wait, now or later, that this rank will not arrive any more."""
        self.words[self._gave_up] = self.words[self._gave_up] or self.rank + 1


class _Watch:
    """Knows which processes of other ranks have ended; a pidfd becomes readable then."""

    def __init__(self, pids: Sequence[int], rank: int) -> None:
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        for other, pid in enumerate(pids):
            if other == rank or not hasattr(os, "pidfd_open"):
                continue
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                continue  # an old kernel, or a sandbox that forbids it: the deadline remains
            self._ranks[fd] = other
            self._poll.register(fd, select.POLLIN)

    def ended(self) -> list[int]:
        return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0))

    def __del__(self) -> None:
        for fd in self._ranks:
            os.close(fd)


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
