"""Collectives through memory that the ranks of one machine share; `group.py` says how."""

from minidist.collectives.shared.ddp_hook import shared_memory_hook
from minidist.collectives.shared.group import SharedMemoryGroup
from minidist.collectives.shared.memory import SharedMemoryError
from minidist.collectives.shared.work import SharedWork

__all__ = ["SharedMemoryError", "SharedMemoryGroup", "SharedWork", "shared_memory_hook"]
