"""Reads the answers of a submission, which may hold anything."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from autograder.criteria.criterion import Values


def plain(answer: Values) -> Values:
    """The answer without its arrays, if only numbers, text and lists can be right."""
    return {key: value for key, value in answer.items() if not isinstance(value, np.ndarray)}


def item_of(values: Any, number: int) -> Any:
    """Item `number` of `values`, which should be a list; None if there is no such item."""
    return values[number] if isinstance(values, list) and number < len(values) else None


def as_number(value: Any) -> float | None:
    """A finite float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_close(got: Any, expected: float, rtol: float = 1e-6, atol: float = 1e-9) -> bool:
    """Whether `got` is a number near `expected`."""
    number = as_number(got)
    return number is not None and abs(number - expected) <= atol + rtol * abs(expected)


def number_or_none(value: Any) -> float | None:
    """`value` as a float, or None: a bad loss must not cost the points of the gradient."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    return None


def told(answer: Values, name: str) -> Any:
    """A value that a rank sent as JSON; None for an array, because `==` cannot compare arrays."""
    value = answer.get(name)
    return None if isinstance(value, np.ndarray) else value
