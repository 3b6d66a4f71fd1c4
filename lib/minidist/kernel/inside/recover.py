"""Frees a rank from a collective that will never end, and makes it able to communicate again."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from typing import Any

_cell = "start"
_inits_in_cell = 0


def new_cell(cell_id: str) -> None:
    """Every rank that runs the cell calls this with the same `cell_id`."""
    global _cell, _inits_in_cell
    _cell, _inits_in_cell = cell_id, 0


def install_fresh_store_keys() -> None:
    """Give each `init_process_group` its own key prefix in the rendezvous store.

    The store lives in torch's agent and outlives process groups. Without the prefix, a second
    `init_process_group` reads addresses that the first one left there, and fails to connect. The
    prefix consists of the cell and the number of the call within the cell, so ranks agree on it
    without communication, even after one of them failed half way in an earlier cell.
    """
    import torch.distributed as dist

    # `torch.distributed.rendezvous` as an attribute is the function of that name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._rendezvous_handlers["env"]

    def handler(url: str, *args: Any, **kwargs: Any) -> Any:
        global _inits_in_cell
        _inits_in_cell += 1
        prefix = f"minidist/{_cell}/{_inits_in_cell}"
        for store, rank, world_size in original(url, *args, **kwargs):
            yield dist.PrefixStore(prefix, store), rank, world_size

    rendezvous._rendezvous_handlers["env"] = handler


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
