"""Reads the answers of a submission, which may hold anything."""

from __future__ import annotations

import contextlib
import math
import numbers
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar

import numpy as np

from autograder.criteria.criterion import Values, integer

T = TypeVar("T")


def plain(answer: Values) -> Values:
    """The answer without its arrays, if only numbers, text and lists can be right."""
    return {key: value for key, value in answer.items() if not isinstance(value, np.ndarray)}


def item_of(values: Any, number: int) -> Any:
    """Item `number` of `values`, which should be a list; None if there is no such item."""
    return values[number] if isinstance(values, list) and number < len(values) else None


def unchanged(call: str, what: str, now: list[Any], before: list[Any]) -> None:
    """Raises a ValueError if a call of the student's has changed a list that it was given."""
    if now != before:
        raise ValueError(
            f"{call} has changed its argument {what}, and the next call gets it as it is then: "
            f"it was {before}, now {now}"
        )


def is_floats(value: Any, shape: Sequence[int] | None = None) -> TypeGuard[np.ndarray]:
    """Whether `value` is an array of floating-point numbers, of `shape` if one is given."""
    is_array = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return is_array and (shape is None or value.shape == tuple(shape))


def finite_floats(value: Any, shape: Sequence[int]) -> np.ndarray | None:
    """`value` in float64 if it is an array of finite floating-point numbers of this shape."""
    return (
        value.astype(np.float64) if is_floats(value, shape) and np.isfinite(value).all() else None
    )


def same_array(got: Any, expected: Any) -> bool:
    """Whether `got` is an array with the shape and values of `expected`, in any dtype."""
    return isinstance(got, np.ndarray) and np.array_equal(got, expected)


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


def short(value: Any) -> str:
    """A number with six digits at most; anything else as it is printed."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def number_or_none(value: Any) -> float | None:
    """`value` as a float, or None: a bad loss must not cost the points of the gradient."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    return None


def told(answer: Values, name: str) -> Any:
    """A value that a rank sent as JSON; None for an array, because `==` cannot compare arrays."""
    value = answer.get(name)
    return None if isinstance(value, np.ndarray) else value


def returned(value: Any, what: str) -> Any:
    """`value`, unless a student's function has returned nothing. For use in the ranks.

    Raises:
        TypeError: the function called `what` has returned None.
    """
    if value is None:
        raise TypeError(f"{what} returned None: is a `return` missing?")
    return value


def read(value: Any, reader: Callable[[Any], T], what: str, expected: str) -> T:
    """What `reader` makes of a value that a student's function has returned. For use in the ranks.

    An iterator is read to its end first: an error in a student's generator is the student's own.

    Raises:
        TypeError: the function called `what` has returned None, or what `reader` cannot read.
    """
    items = list(value) if isinstance(value, Iterator) else returned(value, what)
    try:
        return reader(items)
    except Exception:
        raise TypeError(f"{what}: expected {expected}, got {_printed(value)}") from None


def read_number(value: Any, what: str) -> float:
    """`read` for a number, which may be a tensor or array of one, but no text."""
    return read(value, lambda v: float("" if isinstance(v, str) else v), what, "a number")


def read_array(value: Any, what: str) -> np.ndarray:
    """`read` for a tensor of a dtype that NumPy has: a copy of its numbers."""
    return read(value, lambda t: t.detach().cpu().numpy().copy(), what, "a tensor")


def read_tensor(value: Any, what: str) -> Any:
    """The value if it is a tensor; raises TypeError if it is not. For use in the ranks."""
    import torch

    if not isinstance(returned(value, what), torch.Tensor):
        raise TypeError(f"{what}: expected a tensor, got {_printed(value)}")
    return value


def read_pairs(values: Any, what: str, first: Callable[..., Any] = integer) -> list[list[Any]]:
    """`read` for pairs of what `first` reads, by default an int, and an int."""

    def reader(pairs: Any) -> list[list[Any]]:
        return [[first(a, what), integer(b, what)] for a, b in pairs]

    return read(values, reader, what, "a list of pairs")


def _printed(value: Any) -> str:
    """The value as text if that shows its type; else its type, dtype and shape."""
    if isinstance(value, bool | int | float | complex | str | list | tuple | dict):
        return reprlib.repr(value)[:100]
    dtype = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    return f"{described(value)}{dtype}{shape}"


@contextlib.contextmanager
def naming(call: str) -> Iterator[None]:
    """An error that is raised inside says from which call it came. For use in the ranks."""
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        error.add_note(f"The call was {call}.")
        raise


def described(value: Any) -> Any:
    """A number as it is, anything else in words: "nothing", "a Tensor". For use in the ranks.

    So a message can say what came back; a `float()` in the grader would only fail.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if value is None:
        return "nothing (None)"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def described_scalar(value: Any) -> Any:
    """`described`, for which a tensor or array without dimensions is a number, too."""
    return described(value.item() if getattr(value, "ndim", None) == 0 else value)


def described_numbers(values: Any) -> Any:
    """`described` for each item of a list or tuple; for anything else what it is."""
    return [described(v) for v in values] if isinstance(values, list | tuple) else described(values)


def unit_hint(got: Any, expected: Any) -> str:
    """A sentence if `got` is `expected` in a different unit, otherwise "".

    Numbers or arrays of them: a power of 1,000 (ms for s) or of 1,024 (KiB for bytes). 8 (bits) may
    as well be a count of something, so it is no unit here.
    """
    if isinstance(got, np.ndarray):
        got = got if got.dtype.kind in "fiu" else None
    else:
        got = as_number(got)
    if got is None or np.shape(got) != np.shape(expected) or not np.any(expected):
        return ""
    for factor in (1e3, 1e6, 1e9, 2**10, 2**20, 2**30):
        for times, how in ((factor, f"{factor:,.0f} times"), (1 / factor, f"1/{factor:,.0f} of")):
            if np.allclose(got, np.multiply(expected, times), rtol=1e-6, atol=0.0):
                return f"That is {how} the right value: look at the unit."
    return ""
