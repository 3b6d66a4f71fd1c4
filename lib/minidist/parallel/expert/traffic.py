"""What an all-to-all of tokens sends."""

from __future__ import annotations


def all_to_all_bytes(
    *, num_tokens: int, top_k: int, width: int, itemsize: int, num_ranks: int
) -> float:
    """Bytes that a rank sends to others in one dispatch, if choices fall evenly on all ranks.

    A layer has four such exchanges per step: dispatch and combine, forward and backward.

    >>> all_to_all_bytes(num_tokens=1024, top_k=8, width=7168, itemsize=1, num_ranks=64) / 2**20
    55.125
    """
    return num_tokens * top_k * width * itemsize * (num_ranks - 1) / num_ranks
