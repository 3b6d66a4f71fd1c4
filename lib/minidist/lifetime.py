"""Who dies with whom: a process that ends with its parent, and one that adopts orphans.

Both ask Linux. Elsewhere nothing happens, and only closed sockets tell of a death.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int, how: int = signal.SIGKILL) -> None:
    """Have this process sent `how` when `parent` (its parent's pid) ends; at once if it has."""
    _prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
