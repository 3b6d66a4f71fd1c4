"""Frees a rank from a collective that will never end, and makes it able to communicate again."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any


def own_sockets() -> set[str]:
    """Names ("socket:[inode]") of the sockets that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                found.add(name)
    return found


def cut_sockets(inherited: set[str]) -> int:
    """Shut down the TCP connections opened since start-up; returns how many.

    gloo has no working abort, but a collective that waits on a closed connection raises at once.
    Listening sockets and everything in `inherited` stay untouched.
    """
    num_cut = 0
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith("socket:") or name in inherited:
                continue
            with socket.socket(fileno=os.dup(int(fd))) as sock:
                internet = sock.family in (socket.AF_INET, socket.AF_INET6)
                listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if internet and sock.type == socket.SOCK_STREAM and not listening:
                    sock.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
    return num_cut


def abort_nccl() -> int:
    """Abort the running collectives of all nccl groups; returns the number of these groups.

    The kernels of nccl wait on the GPU, so closing connections does not free them. If a
    communicator cannot be aborted, its rank stays blocked, and the front kills that rank.
    """
    from torch.distributed import distributed_c10d

    groups = [g for g, (name, _) in distributed_c10d._world.pg_map.items() if "nccl" in str(name)]
    for group in groups:
        with contextlib.suppress(Exception):
            group.abort()
    return len(groups)


def reset_groups() -> dict[str, Any]:
    """Destroy every process group, whatever its state; called between cells."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {"reset": False}
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return {"reset": not dist.is_initialized()}
