"""Named errors. A message says what happened, where, what was expected, what was got, which rank.

>>> try:
...     raise LaunchError("worker failed", rank=1)
... except MinidistError as error:
...     print(error)
[rank 1] worker failed
"""

from __future__ import annotations

import sys
from typing import Any


class MinidistError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: what happened, where, what was expected and what was got.
        rank: the rank on which it happened, where there is one.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message if rank is None else f"[rank {rank}] {message}")


def named_rank(group: Any = None) -> str:
    """Names this process in a message: "rank 1 of 4"; without a process group, "this process".

    Args:
        group: the group whose ranks are counted; None means the default group. The rank is the
            global one.

    >>> named_rank()
    'this process'
    """
    dist = sys.modules.get("torch.distributed")  # a process with ranks has imported it
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return "this process"
    if group is None:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    return f"rank {dist.get_rank()} (of a group of {dist.get_world_size(group)})"


class LaunchError(MinidistError):
    """Ranks could not be started, or one of them ended without a result."""


class DeadlineError(MinidistError):
    """Something took longer than its deadline; the message says what was waited for."""


class LaunchDeadlineError(LaunchError, DeadlineError):
    """Ranks had not finished at the deadline of their launch."""


class ProtocolError(MinidistError):
    """A peer sent something that is not of the agreed form."""


class MismatchError(MinidistError):
    """Ranks of one group called different collectives, or the same one with different shapes."""
