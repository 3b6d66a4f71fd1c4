"""Finds the weight with which each micro-batch entered a gradient.

An accumulated gradient is a sum  w_0 g_0 + w_1 g_1 + …  over micro-batches. The judge knows the
g_i, and there are more parameters than micro-batches, so least squares gives the weights. They tell
what a student's loop did to a micro-batch: 1/k is right; 1 means that the loss was not divided; 0
means that the gradient was dropped or cleared; 2/k means that the micro-batch came twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autograder.criteria.common import oracle
from autograder.criteria.criterion import Values

Gradient = list[np.ndarray]  # one array per parameter
RESIDUAL = 2e-3  # relative; float32 leaves about 1e-6
TOLERANCE = 0.02  # of a weight, relative to the largest weight


def collect(answer: Values, name: str, num_parameters: int) -> list[Any]:
    """A rank's answers `name/0`, `name/1`, …; None for each answer that is missing."""
    return [answer.get(f"{name}/{i}") for i in range(num_parameters)]


def weights_of(basis: Sequence[Gradient], got: Sequence[Any]) -> np.ndarray | None:
    """Weights w with got = sum of w_i basis_i, or None if `got` is not such a sum."""
    columns = np.stack([_flat(gradient) for gradient in basis], axis=1)
    if len(got) != len(basis[0]) or not all(
        isinstance(g, np.ndarray) and g.shape == b.shape and g.dtype.kind == "f"
        for g, b in zip(got, basis[0], strict=True)
    ):
        return None
    target = _flat(got)
    if not np.isfinite(target).all():
        return None
    sizes = np.linalg.norm(columns, axis=0) + 1e-300
    weights = np.linalg.lstsq(columns / sizes, target, rcond=None)[0] / sizes
    rest = np.linalg.norm(target - columns @ weights)
    if rest > RESIDUAL * np.linalg.norm(target) + 1e-12:
        return None
    return weights


def are_close(weights: np.ndarray, expected: Sequence[float] | np.ndarray) -> bool:
    """Whether all weights are close to the expected weights."""
    wanted = np.asarray(expected, dtype=np.float64)
    return weights.shape == wanted.shape and bool(
        (np.abs(weights - wanted) <= TOLERANCE * max(1e-9, np.abs(wanted).max())).all()
    )


def present(weights: np.ndarray) -> list[int]:
    """Indices of the micro-batches whose weight is not zero."""
    if not weights.size:
        return []
    return [int(i) for i in np.flatnonzero(np.abs(weights) > TOLERANCE * np.abs(weights).max())]


def show(weights: Sequence[float] | np.ndarray) -> str:
    """Weights as text, such as [0.25, 0.25, 0, 0]."""
    return f"[{', '.join(f'{0.0 if abs(w) < 1e-4 else w:.3g}' for w in weights)}]"


def norm(gradient: Sequence[np.ndarray]) -> float:
    """2-norm over all parameters, as gradient clipping computes it."""
    return float(np.linalg.norm(_flat(gradient)))


def batch_gradients(
    arrays: Values, batches: Sequence[tuple[np.ndarray, np.ndarray]]
) -> list[Gradient]:
    """The gradient of each micro-batch's own mean loss, in float64."""
    return [oracle.gradients(arrays, x, y) for x, y in batches]


def _flat(gradient: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(g, dtype=np.float64).ravel() for g in gradient])
