"""Lifetimes: end with the parent process, adopt orphans, keep the backends of process groups.

The first two need Linux. On other systems they do nothing, and only closed sockets show that a
process has ended. Importing this module does not import torch.
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
    """Send this process signal `how` when `parent` (its parent's pid) ends, or if it has ended."""
    _prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep_backends() -> None:
    """Keep the backends of process groups, even destroyed groups, until this process ends.

    The last owner of a gloo backend may be DDP's reducer. Its destructor would join gloo's thread
    while it holds the GIL, and that thread may wait for the GIL to drop the last all-reduce. On a
    busy machine, this made correct code hang at its end, if the code destroyed its group before its
    model was freed. The groups themselves are freed, with everything that is bound to them.
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
                with contextlib.suppress(RuntimeError):  # no backend: a group written in Python
                    backend = each._get_backend(device)
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # never freed
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    distributed_c10d.destroy_process_group = destroy_process_group
