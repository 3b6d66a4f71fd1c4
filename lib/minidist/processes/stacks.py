"""Tells at which line a different process stands, even while it is blocked or its GIL is held.

Example::

    tell_when_asked(pipe.fileno())  # in the process: a signal has its stack written there
    ask({pid: pipe.fileno()})  # outside: {pid: "in all_reduce, called by step, train.py line 12"}

Python's faulthandler writes the stack from C, in the signal handler, so a thread that waits in a
collective need not return to Python for it. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_SOURCE_CHARS = 120
_MAX_BYTES = 1 << 16
_QUIET_S = 0.2
_DECORATORS = ("wrapper", "decorate_context", "_fn", "inner")
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_NOT_OWN = (
    *(
        f"{folder}{os.sep}"
        for folder in (
            *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
            Path(__file__).parents[1],
        )
    ),
    "<frozen ",
)


def tell_when_asked(fd: int) -> None:
    """Let SIGUSR1 write the stack of this process's main thread to an open file."""
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, file=fd, all_threads=False)


def ask(readers: Mapping[int, int], within_s: float = 1.0) -> dict[int, str]:
    """pid -> where the process stands, in words; without processes that do not answer in time.

    Args:
        readers: pid -> the open file from which that process's stack is read.
        within_s: seconds for all of them together.
    """
    waiting = {fd: pid for pid, fd in readers.items()}
    for pid in readers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    stacks = dict.fromkeys(readers, b"")
    end_s = time.monotonic() + within_s
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        quiet_s = _QUIET_S if all(stacks.values()) else left_s  # a stack comes in small pieces
        ready = connection.wait(list(waiting), min(left_s, quiet_s))
        for fd in waiting.keys() & ready:
            data = b""
            with contextlib.suppress(OSError):  # the process has died meanwhile
                data = os.read(fd, _MAX_BYTES)
            stacks[waiting[fd]] += data
            if not data or len(stacks[waiting[fd]]) > _MAX_BYTES:
                del waiting[fd]
        if not ready:
            break
    told = {pid: _words(stack.decode(errors="replace")) for pid, stack in stacks.items()}
    return {pid: words for pid, words in told.items() if words}


def _words(stack: str) -> str:
    """The innermost line outside of libraries, and the library function that it has called."""
    # faulthandler writes what is not ASCII as an escape.
    stack = _ESCAPED.sub(lambda found: chr(int(found[found.lastindex or 0], 16)), stack)
    frames = _FRAME.findall(stack)
    if not frames:
        return ""
    own = next((n for n, frame in enumerate(frames) if not frame[0].startswith(_NOT_OWN)), 0)
    called = [name for _, _, name in frames[:own] if name not in _DECORATORS]
    file, line, function = frames[own]
    place = f"line {line}"
    if not file.startswith("<"):  # code that was pickled by value has no file
        source = linecache.getline(file, int(line)).strip()[:_SOURCE_CHARS]
        place = f"{os.path.basename(file)} {place}{source and f': {source}'}"
    where = f"in {called[-1]}, called by {function}" if called else f"in {function}"
    return f"{where}, {place}"
