"""Reserves a TCP port for a server that starts later, against other processes that use this module.

It would be a race to get a port from the system, close it and use it later: a different process may
get it in between, because the system hands out that range of numbers. The ports here are below that
range, and the process that takes one holds a lock on it: an abstract Unix socket, which ends with
its process, and which exists once per network namespace, like a port.

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
    """A port on which nothing listens; no other process gets it from here before `let_go`.

    Raises:
        OSError: no free port was found.
    """
    end = 32_768
    with suppress(OSError, ValueError, IndexError):
        end = int(_RANGE.read_text().split()[0])
    numbers = random.SystemRandom()  # leaves the caller's random state as it is
    for _ in range(_TRIES if end > _FIRST + _TRIES else 0):
        port = numbers.randrange(_FIRST, end)
        lock = _lock(port)
        if lock is not None and _is_free(port):
            _held[port] = lock
            return port
        if lock is not None:
            lock.close()
    with socket.socket() as sock:  # not Linux, or the system's range starts too low
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def let_go(port: int) -> None:
    """Releases a port of `free_port`."""
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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the later server
        try:
            sock.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def gloo_at_home() -> dict[str, str]:
    """The environment variable by which gloo's ranks on one machine meet on its loopback interface.

    By default they meet at the address of the host's own name. If the name has no address, or that
    of a VPN that lets nothing through, they wait for minutes. Empty without a loopback interface.
    """
    names = {name for _, name in socket.if_nameindex()}
    found = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if found is None else {"GLOO_SOCKET_IFNAME": found}
