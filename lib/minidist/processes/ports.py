"""A TCP port for a server that is yet to start, kept from others of ours until it is let go.

To ask the system for one, close it and use it later is a race: the number is one of those that it
hands out, so another process may get it in between. These are below that range, and whoever takes
one holds a lock on it: an abstract Unix socket, which ends with its process, and which exists once
per network namespace, as a port does.

Importing this module does not import torch.
"""

from __future__ import annotations

import errno
import random
import socket
from contextlib import suppress
from pathlib import Path

_FIRST = 10_240
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # what the system hands out
_TRIES = 200
_held: dict[int, socket.socket] = {}


def free_port() -> int:
    """A port that nothing listens at; no other process that asks here gets it before `let_go`.

    Raises:
        OSError: none was found.
    """
    end = 32_768
    with suppress(OSError, ValueError, IndexError):
        end = int(_RANGE.read_text().split()[0])
    numbers = random.SystemRandom()  # the numbers of whoever calls stay as they are
    for _ in range(_TRIES if end > _FIRST + _TRIES else 0):
        port = numbers.randrange(_FIRST, end)
        lock = _lock(port)
        if lock is not None and _is_free(port):
            _held[port] = lock
            return port
        if lock is not None:
            lock.close()
    with socket.socket() as sock:  # not Linux, or a range of its own
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def let_go(port: int) -> None:
    """Lets others have a port of `free_port`."""
    if lock := _held.pop(port, None):
        lock.close()


def _lock(port: int) -> socket.socket | None:
    if not hasattr(socket, "AF_UNIX"):
        return None
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0minidist-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as whoever will listen
        try:
            sock.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True
