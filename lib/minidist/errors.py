"""Named errors. A message says what, where, what was expected, what came, and on which rank.

>>> try:
...     raise LaunchError("worker failed", rank=1)
... except MinidistError as error:
...     print(error)
[rank 1] worker failed
"""

from __future__ import annotations


class MinidistError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        message: what happened, where, what was expected and what came.
        rank: the rank on which it happened, where there is one.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message if rank is None else f"[rank {rank}] {message}")


class LaunchError(MinidistError):
    """Ranks could not be started, or one of them ended without a result."""


class DeadlineError(MinidistError):
    """Something took longer than its deadline; the message says what was waited for."""


class ProtocolError(MinidistError):
    """A peer sent something that is not of the agreed form."""


class MismatchError(MinidistError):
    """Ranks of one group called different collectives, or the same one with other shapes."""
