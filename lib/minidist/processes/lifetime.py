"""Who dies with whom: a process that ends with its parent, one that adopts orphans, and backends.

The first two ask Linux. Elsewhere nothing happens, and only closed sockets tell of a death.
Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
from typing import Any

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


def keep_backends() -> None:
    """Let the backend of every process group live as long as this process, also a destroyed one's.

    The last owner of a gloo group may be DDP's reducer. Its destructor would join gloo's thread and
    hold the GIL meanwhile, for which that thread may wait to drop the last all-reduce: on a busy
    machine, right code that destroyed its group before its model went away hung at its end. The
    groups themselves go, and with them what others have bound to them.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        for each in distributed_c10d._world.pg_map:
            for device in each._device_types:
                with contextlib.suppress(RuntimeError):  # it has none: a group written in Python
                    backend = each._get_backend(device)
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # through Python's end
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    distributed_c10d.destroy_process_group = destroy_process_group
