"""Whether what was sent holds the numbers that had to be sent, wherever in a message they lie.

Bytes alone can be zeros. Payloads come from a stranger's ranks: how much of them is read is
bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.emulate.trace import Collective


def payloads_of(collectives: Iterable[Collective], rank: int) -> list[Any]:
    """What `rank` has put into each of them, where it has."""
    payloads = (collective.payloads.get(rank) for collective in collectives)
    return [payload for payload in payloads if payload is not None]


def numbers_in(payloads: Iterable[Any], dtype: str, most: int) -> np.ndarray:
    """Finite numbers in float64, no more than about `most`; bytes are read as `dtype`."""
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
    """For each of `numbers` whether one of `right` is that close to it."""
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
    """How many different ones of `numbers` are in any of `rights`: a constant counts once."""
    left = np.unique(numbers)
    before = left.size
    for right in rights:
        left = left[~is_among(left, right, rtol=rtol, atol=atol)]
    return before - left.size


def holds_sum(payload: np.ndarray, vectors: Sequence[np.ndarray], rest: float) -> bool:
    """Whether a run of `payload`, flat and finite, is a sum of `vectors` with whatever weights.

    Args:
        rest: how much of it may be no such sum, relative to its length.
    """
    basis, _ = np.linalg.qr(np.stack([vector.ravel() for vector in vectors], axis=1))
    if len(payload) < len(basis):
        return False
    runs = np.lib.stride_tricks.sliding_window_view(payload, len(basis))
    sizes = np.linalg.norm(runs, axis=1)
    along = np.linalg.norm(runs @ basis, axis=1)
    off = np.sqrt(np.maximum(sizes**2 - along**2, 0.0))
    return bool(((sizes > 0) & (off <= rest * sizes)).any())
