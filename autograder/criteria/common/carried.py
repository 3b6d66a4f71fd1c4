"""Whether a payload contains the numbers that a rank had to send, at any place in it.

Counting bytes is not enough, because they can be zeros. Payloads come from untrusted ranks, so the
number of values that are read is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.emulate.trace import Collective


def payloads_of(collectives: Iterable[Collective], rank: int) -> list[Any]:
    """What `rank` has sent in each collective; collectives without its payload are left out."""
    payloads = (collective.payloads.get(rank) for collective in collectives)
    return [payload for payload in payloads if payload is not None]


def numbers_in(payloads: Iterable[Any], dtype: str, most: int) -> np.ndarray:
    """The finite numbers of the payloads in float64, about `most` at most.

    The bytes of a payload that does not hold floats are read as `dtype`.
    """
    parts: list[np.ndarray] = [np.zeros(0)]
    for payload in payloads:
        array = np.asarray(payload).ravel()[: max(0, most) * np.dtype(dtype).itemsize]
        if array.dtype.kind != "f":
            raw = array.view(np.uint8)
            array = raw[: raw.size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(
                dtype
            )
        array = array[: max(0, most)].astype(np.float64)
        parts.append(array[np.isfinite(array)])
        most -= array.size
    return np.concatenate(parts)


def is_among(
    numbers: np.ndarray, right: np.ndarray, *, rtol: float = 0.0, atol: float = 0.0
) -> np.ndarray:
    """For each of `numbers`: whether a value of `right` is within the tolerance of it."""
    if not right.size:
        return np.zeros(numbers.shape, dtype=bool)
    ordered = np.sort(np.asarray(right, dtype=np.float64).ravel())
    after = np.searchsorted(ordered, numbers)
    near = np.zeros(numbers.shape, dtype=bool)
    for place in (after - 1, after):
        neighbour = ordered[np.clip(place, 0, ordered.size - 1)]
        near |= np.abs(neighbour - numbers) <= atol + rtol * np.abs(neighbour)
    return near


def count_among(
    numbers: np.ndarray, rights: Iterable[np.ndarray], *, rtol: float = 0.0, atol: float = 0.0
) -> int:
    """How many values of `numbers` are in any of `rights`; a repeated value counts once."""
    left = np.unique(numbers)
    before = left.size
    for right in rights:
        left = left[~is_among(left, right, rtol=rtol, atol=atol)]
    return before - left.size


def holds_sum(payload: np.ndarray, vectors: Sequence[np.ndarray], rest: float) -> bool:
    """Whether a contiguous run of `payload` is a sum of `vectors` with any weights.

    Args:
        payload: flat and finite.
        rest: the allowed norm of what is not such a sum, relative to the norm of the run.
    """
    basis, _ = np.linalg.qr(np.stack([vector.ravel() for vector in vectors], axis=1))
    if len(payload) < len(basis):
        return False
    runs = np.lib.stride_tricks.sliding_window_view(payload, len(basis))
    sizes = np.linalg.norm(runs, axis=1)
    along = np.linalg.norm(runs @ basis, axis=1)
    off = np.sqrt(np.maximum(sizes**2 - along**2, 0.0))
    return bool(((sizes > 0) & (off <= rest * sizes)).any())
