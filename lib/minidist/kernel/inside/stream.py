"""stdout and stderr of a rank: bounded in the notebook, whole in a file.

Phases of a cell that prints too much: its beginning goes to the notebook; at the bound, what has
been shown and all that follows goes to a file, which the notebook names; when the cell ends, the
last lines are shown as well. Redrawn lines (progress bars) count once.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import zlib
from collections.abc import Generator
from typing import Any, ClassVar

from ipykernel.iostream import OutStream

from minidist.kernel.outputs import MAX_TEXT
from minidist.kernel.text import Screen, fold, settle

# The front cuts at MAX_TEXT whatever a rank sends; this leaves room for the words about the file.
MAX_SHOWN_CHARS = MAX_TEXT - 16 * 1024
TAIL_CHARS = 2000
MAX_FILE_BYTES = 256 * 1024 * 1024
# Older files of a stream are removed, so that a notebook cannot fill a disk.
MAX_FILES = 4
# Changes from one stream to the other that a cell may make before they come in heaps again.
MAX_CHANGES = 2000


class BoundedStream(OutStream):
    """An OutStream with a bound per cell.

    Attributes:
        folder: where the whole goes; None keeps it nowhere. rank: this rank, for the file's name.
    """

    folder: str | None = None
    rank = 0
    _sending: ClassVar[Any] = threading.RLock()  # one stream at a time
    _last: ClassVar[BoundedStream | None] = None  # printed to last
    _changes: ClassVar[int] = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._files: collections.deque[str] = collections.deque()
        self._renew_locks()
        self._forget("start")
        # A forked child (a data loader's worker) must not wait for a lock that a thread held, nor
        # send what its parent has printed.
        os.register_at_fork(after_in_child=self._renew_locks)
        super().__init__(*arguments, **options)

    def _renew_locks(self) -> None:
        self._bound_lock = threading.RLock()
        BoundedStream._sending, BoundedStream._last = threading.RLock(), None

    def _forget(self, cell: str) -> None:
        self._cell = cell
        self._screen: Screen | None = Screen()  # what was shown so far; None beyond the bound
        self._fd: int | None = None
        self._total = self._checksum = self._in_file = 0
        self._tail = ""

    def write(self, string: str) -> int | None:
        if not isinstance(string, str):
            return super().write(string)  # which says what is wrong with that
        self._take_turn()
        with self._bound_lock:
            if self._screen is None:
                self._keep(string)
                return len(string)
            room = MAX_SHOWN_CHARS - self._screen.length
            if len(string) <= room:
                self._screen.add(string)
                return super().write(string)
            # The bound is reached: show what fits, and put everything into the file.
            begun, self._screen = self._screen.text(), None
            super().write(string[:room])
            path = self._open()
            where = f"everything is in {path}" if path else "the rest is not kept"
            end = "; the end of it follows when the cell ends" if path else ""
            super().write(f"\n[… this was much to print: {where}{end}]\n")
            self._keep(begun)
            self._keep(string)
            # Only what was not shown is shown at the end.
            self._tail = string[room:][-TAIL_CHARS:]
            return len(string)

    def _take_turn(self) -> None:
        """Send what the other stream holds, if it was printed to last."""
        last = BoundedStream._last
        if last is self:
            return
        BoundedStream._last = self
        BoundedStream._changes += 1
        if last is not None and self._changes <= MAX_CHANGES:
            last._flush()

    def flush(self) -> None:
        # A cell flushes several times; each takes a turn of the sending thread, mostly for nothing.
        with BoundedStream._sending:  # what it has taken out is on its way
            if not (self._flush_pending or self._subprocess_flush_pending):
                return
        super().flush()

    def _flush(self) -> None:
        # Whole, so that another thread's flush cannot overtake what this one has taken out.
        with BoundedStream._sending:
            super()._flush()

    def _open(self) -> str:
        """Open this cell's file; returns its name for the notebook, empty where there is none.

        All ranks give the same name, with a `*` for the rank, so that the same output stays the
        same in what the notebook compares.
        """
        if self.folder is None:
            return ""
        path = f"{self.folder}/{self._cell}-{self.name}-rank%s.txt"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(path % self.rank, flags, 0o600)
        except OSError:
            return ""
        self._files.append(path % self.rank)
        while len(self._files) > MAX_FILES:
            with contextlib.suppress(OSError):
                os.unlink(self._files.popleft())
        return path % "*"

    def _keep(self, string: str) -> None:
        data = string.encode("utf-8", "replace")
        self._total += len(string)
        self._checksum = zlib.crc32(data, self._checksum)
        self._tail = (self._tail + string[-TAIL_CHARS:])[-TAIL_CHARS:]
        left = MAX_FILE_BYTES - self._in_file
        if self._fd is not None and left > 0:
            try:
                self._in_file += os.write(self._fd, data[:left])
            except OSError:  # the disk is full, say: the cell goes on
                self._in_file = MAX_FILE_BYTES

    def new_cell(self, cell: str) -> None:
        """Start afresh; `cell` begins the name of a file, should there be one."""
        BoundedStream._changes = 0
        with self._bound_lock:
            self._forget(cell)

    def end_cell(self) -> None:
        with self._bound_lock:
            if self._screen is not None:
                return
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            full = self._in_file >= MAX_FILE_BYTES
            cut = f"; the file ends after {self._in_file} bytes" if full else ""
            # Where two ranks print the same checksum, they printed the same.
            words = f"{self._total} characters in all, checksum {self._checksum:08x}{cut}"
            tail = settle(self._tail)
            if len(self._tail) == TAIL_CHARS:  # it begins somewhere in a line
                tail = tail.partition("\n")[2] or tail
            super().write(f"[… {words}; the last lines:]\n{tail}")

    def _flush_buffers(self) -> Generator[tuple[dict[str, Any], str], Any, None]:
        # Called a few times a second: drawings that were replaced in between nobody would see.
        for parent, data in super()._flush_buffers():
            yield parent, fold(data)
