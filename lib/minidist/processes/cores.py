"""How many cores this process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores that this process may use; all of the machine's if the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
