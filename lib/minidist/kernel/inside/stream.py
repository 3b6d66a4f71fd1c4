"""stdout and stderr of a rank: bounded in the notebook, complete in a file.

If a cell prints too much, the beginning goes to the notebook. At the bound, the text shown so far
and all later text go to a file, and the notebook names the file. When the cell ends, the last lines
are shown as well. A redrawn line (a progress bar) counts once.
"""

from __future__ import annotations

import array
import codecs
import collections
import contextlib
import fcntl
import os
import re
import select
import sys
import termios
import threading
import time
import zlib
from collections.abc import Generator
from typing import Any, ClassVar

from ipykernel.iostream import OutStream

from minidist.kernel.outputs import MAX_TEXT
from minidist.kernel.text import Screen, fold, settle

# The front cuts each rank's text at MAX_TEXT; this leaves room for the note about the file.
MAX_SHOWN_CHARS = MAX_TEXT - 16 * 1024
TAIL_CHARS = 2000
MAX_FILE_BYTES = 256 * 1024 * 1024
# What torch's profiler writes at its start and its end, on every rank.
_PROFILER = re.compile(r"^USDT:[^\n]*\] profiler_(?:start|stop)\n?", re.M)
# Files kept per stream; older files are removed, so that a notebook cannot fill a disk.
MAX_FILES = 4
# Most bytes of output of C code and programs that are printed at once, and the longest time that a
# cell, when it ends, waits until all such output is printed.
_PIPE_BYTES, _DRAIN_S = 64 * 1024, 2.0
# After this many changes between stdout and stderr in a cell, a change no longer sends the text of
# the previous stream at once.
MAX_CHANGES = 2000


class BoundedStream(OutStream):
    """An OutStream with a bound per cell.

    Attributes:
        folder: directory of the files; None: no files. rank: this rank, for the file's name.
    """

    folder: str | None = None
    rank = 0
    of_rank: ClassVar[list[BoundedStream]] = []  # even if sys.stdout and sys.stderr were replaced
    _sending: ClassVar[Any] = threading.RLock()  # one stream at a time
    _last: ClassVar[BoundedStream | None] = None  # the one printed to last
    _changes: ClassVar[int] = 0
    _cut_line = False  # whether a line was dropped whose end has not come yet

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._files: collections.deque[str] = collections.deque()
        self._renew_locks()
        self._forget("start")
        # A forked child (a data loader's worker) must not wait for a lock that a thread held, nor
        # send what its parent has printed.
        os.register_at_fork(after_in_child=self._renew_locks)
        super().__init__(*arguments, **options)
        BoundedStream.of_rank.append(self)

    def close(self) -> None:
        """Only flush, because the next cells print to this stream, too."""
        self.flush()

    def _watch_pipe_fd(self) -> None:
        """Print what C code and programs that a cell starts write to the file descriptor.

        ipykernel's own method decodes each kilobyte separately, so it breaks characters there.
        """
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        assert self._fid is not None
        try:
            poller = select.poll()
            poller.register(self._fid, select.POLLIN | select.POLLHUP)
            while poller.poll():
                with self._pipe_lock:
                    data = os.read(self._fid, _PIPE_BYTES)
                    self.write(decode(data))
                if not data:
                    return
                os.write(self._original_stdstream_copy, data)
        except Exception:
            self._exc = sys.exc_info()

    def drain(self) -> None:
        """Wait until what was written to the file descriptor so far is printed."""
        left, end_s = array.array("i", [1]), time.monotonic() + _DRAIN_S
        while self._fid is not None and left[0] and time.monotonic() < end_s:
            with self._pipe_lock:
                fcntl.ioctl(self._fid, termios.FIONREAD, left)
            time.sleep(0.001 if left[0] else 0)

    def _renew_locks(self) -> None:
        self._bound_lock = threading.RLock()
        self._pipe_lock = threading.Lock()
        BoundedStream._sending, BoundedStream._last = threading.RLock(), None

    def _forget(self, cell: str) -> None:
        self._cell = cell
        self._screen: Screen | None = Screen()  # what was shown so far; None beyond the bound
        self._fd: int | None = None
        self._total = self._checksum = self._in_file = 0
        self._tail = ""

    def _without_profiler(self, text: str) -> str:
        if self._cut_line:  # the end of the dropped line comes separately
            text, self._cut_line = text.removeprefix("\n"), False
        if "USDT:" not in text:
            return text
        kept = _PROFILER.sub("", text)
        self._cut_line = kept != text and not text.endswith("\n")
        return kept

    def write(self, string: str) -> int | None:
        if not isinstance(string, str):
            return super().write(string)  # raises the fitting error
        size, string = len(string), self._without_profiler(string)
        if size and not string:
            return size
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
        """Send the text that the other stream holds, if that stream was printed to last."""
        last = BoundedStream._last
        if last is self:
            return
        BoundedStream._last = self
        BoundedStream._changes += 1
        if last is not None and self._changes <= MAX_CHANGES:
            last._flush()

    def flush(self) -> None:
        # A cell flushes several times. Each flush waits for the sending thread, mostly with
        # nothing to send.
        with BoundedStream._sending:  # waits until the thread has sent what it has taken out
            if not (self._flush_pending or self._subprocess_flush_pending):
                return
        super().flush()

    def _flush(self) -> None:
        # One flush at a time: a second thread's flush must not overtake the text that this flush
        # has taken out.
        with BoundedStream._sending:
            super()._flush()

    def _open(self) -> str:
        """Open this cell's file; returns its path for the notebook, or "" if there is no file.

        The path has a `*` in place of the rank. So all ranks print the same path, and equal outputs
        stay equal when the front compares them.
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
            except OSError:  # e.g. the disk is full: the cell goes on
                self._in_file = MAX_FILE_BYTES

    def new_cell(self, cell: str) -> None:
        """Reset the stream for a new cell; the name of its file, if any, begins with `cell`."""
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
            # Two ranks with the same checksum have printed the same text.
            words = f"{self._total} characters in all, checksum {self._checksum:08x}{cut}"
            tail = settle(self._tail)
            if len(self._tail) == TAIL_CHARS:  # it begins in the middle of a line
                tail = tail.partition("\n")[2] or tail
            super().write(f"[… {words}; the last lines:]\n{tail}")

    def _flush_buffers(self) -> Generator[tuple[dict[str, Any], str], Any, None]:
        # Called a few times a second: drops the drawings that were overwritten since the last call.
        for parent, data in super()._flush_buffers():
            yield parent, fold(data)


def make_usable() -> None:
    """After a cell: restore sys.stdout or sys.stderr if it cannot be flushed any more.

    The kernel flushes both before it replies, and would not reply if a flush failed.
    """
    for stream in BoundedStream.of_rank:
        try:
            getattr(sys, stream.name).flush()
        except Exception as error:
            setattr(sys, stream.name, stream)
            stream.write(
                f"[sys.{stream.name} could not be used any more ({error}); it is the notebook's "
                "again]\n"
            )
    for original in (sys.__stdout__, sys.__stderr__):  # they have their own buffers
        with contextlib.suppress(Exception):
            original.flush()  # pyright: ignore[reportOptionalMemberAccess]
    for stream in BoundedStream.of_rank:
        stream.drain()
