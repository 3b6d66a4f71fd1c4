"""Compares a measured value with what is expected of it, and says whether the comparison can fail.

Values are numbers, words, truth values, arrays, tensors and nested sequences of these. torch and
numpy need not be installed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "!=": lambda a, b: a != b,
}
ROUNDING = 1e-6  # a relative tolerance for floating-point rounding only


def compare(
    measured: Any, expected: Any, rtol: float | None, atol: float | None, status: str
) -> tuple[bool, str]:
    """Whether the measured value is as expected, and the expected value as text.

    `expected` is a value, `(operator, bound)` or a function that returns a bool. NaN never is as
    expected; a cited figure always is."""
    if status == "cited":
        return True, ""
    if any(isinstance(value, float) and math.isnan(value) for value in flat(measured)):
        return False, show(expected) if not callable(expected) else "a number"
    if callable(expected):
        name = getattr(expected, "__name__", "a condition")
        shown = "the condition to hold" if name == "<lambda>" else name
        return plain(expected(measured)) is True, shown
    if is_comparison(expected):
        operator, bound = expected
        values = flat(measured)
        holds = bool(values) and all(_ordered(operator, float(v), float(bound)) for v in values)
        return holds, f"{operator} {show(bound)}"
    return looks_equal(measured, expected, rtol, atol), show(expected)


def can_fail(measured: Any, expected: Any, rtol: float | None, atol: float | None) -> bool:
    """Whether a true claim turns false when its measured value is moved.

    Each number is moved by twice its tolerance, or past its bound; if `expected` is a function, by
    more and more. Of a list, each of the first 64 numbers is moved alone."""
    measured = plain(measured)
    if callable(expected):
        return any(
            not _holds(expected, moved)
            for factor in (0.01, 0.5, 10.0, 1e6)
            for moved in _moved(measured, lambda value, f=factor: f * (abs(value) or 1.0))
        )

    def step(value: float) -> float:
        if is_comparison(expected):
            return abs(value - float(expected[1])) * 2 + 1e-6 * (abs(value) or 1.0)
        return 2 * ((atol or 0.0) + (rtol or 0.0) * abs(value)) or 1e-6 * (abs(value) or 1.0)

    found = list(_moved(measured, step))
    return bool(found) and any(
        not compare(moved, expected, rtol, atol, "verified")[0] for moved in found
    )


def _holds(condition: Callable[[Any], Any], value: Any) -> bool:
    try:
        return plain(condition(value)) is True
    except Exception:  # a value of a form that the condition does not know is not accepted
        return False


def _moved(value: Any, step: Callable[[float], float]) -> Iterable[Any]:
    """The value with one number, word or truth value changed at a time."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield from ("", f"{value}?", value[::-1])
    elif isinstance(value, numbers.Integral):
        by = max(1, math.ceil(step(float(value))))
        yield from (int(value) + by, int(value) - by)
    elif isinstance(value, numbers.Real):
        number = float(value)
        if math.isinf(number):
            yield from (0.0, -number)
        else:
            yield from (number + step(number), number - step(number))
    elif isinstance(value, Sequence):
        for i in range(min(len(value), 64)):
            for moved in _moved(plain(value[i]), step):
                yield [*value[:i], moved, *value[i + 1 :]]
        yield list(value)[:-1]
    else:
        yield None


def _ordered(operator: str, value: float, bound: float) -> bool:
    if math.isnan(value) or math.isnan(bound):
        return False
    return _COMPARE[operator](value, bound)


def looks_equal(a: Any, b: Any, rtol: float | None, atol: float | None) -> bool:
    """Whether a is b within atol + rtol |b|, in the same shape; words and truth values exactly."""
    a, b = plain(a), plain(b)
    if isinstance(a, str | bool) or isinstance(b, str | bool):
        return type(a) is type(b) and a == b  # True is not 1, and "1" is not 1
    if _shape(a) != _shape(b):
        return False
    pairs = zip(flat(a), flat(b), strict=True)
    return all(_close(x, y, rtol or 0.0, atol or 0.0) for x, y in pairs)


def _close(x: Any, y: Any, rtol: float, atol: float) -> bool:
    if isinstance(x, numbers.Integral) and isinstance(y, numbers.Integral) and not (rtol or atol):
        return int(x) == int(y)
    x, y = float(x), float(y)
    if math.isnan(x) or math.isnan(y):
        return False
    if math.isinf(x) or math.isinf(y):
        return x == y
    return abs(x - y) <= atol + rtol * abs(y)


def plain(value: Any) -> Any:
    """Tensors and arrays as Python lists and numbers."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return value.tolist() if hasattr(value, "tolist") else value


def flat(value: Any) -> list[Any]:
    """All numbers and words of nested sequences, in order."""
    value = plain(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def _shape(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_shape(item) for item in value]
    return None


def same_object(a: Any, b: Any) -> bool:
    """Whether a and b are the same object, or two arrays over the same memory.

    Small integers, bools and strings never count as the same object, because Python shares these
    objects between unrelated expressions."""
    if isinstance(a, bool | str) or (isinstance(a, int) and -5 <= a <= 256):
        return False
    if a is b:
        return True

    def address(value: Any) -> Any:
        if hasattr(value, "data_ptr"):
            return value.data_ptr(), tuple(value.shape)
        # Arrays only: each access to a NumPy scalar's interface allocates a new buffer and frees
        # it at once, so equal addresses of two scalars mean nothing.
        is_array = any(base.__name__ == "ndarray" for base in type(value).__mro__)
        interface = getattr(value, "__array_interface__", None) if is_array else None
        return interface and (interface["data"][0], tuple(value.shape))

    return address(a) is not None and address(a) == address(b)


def is_comparison(expected: Any) -> bool:
    """Whether an expectation is a pair like (">=", 0.9)."""
    return isinstance(expected, tuple) and len(expected) == 2 and expected[0] in _COMPARE


def show(value: Any) -> str:
    """A value in few characters: five digits of floats, six items of sequences."""
    value = plain(value)
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}" if abs(int(value)) >= 10_000 else str(int(value))
    if isinstance(value, numbers.Real):
        return f"{float(value):.5g}"
    if isinstance(value, Sequence):
        items = [show(item) for item in value[:6]]
        return f"[{', '.join(items)}{', ...' if len(value) > 6 else ''}]"
    return str(value)[:80]


def tolerance_text(rtol: float | None, atol: float | None, exact: bool, measured: Any) -> str:
    """The tolerance of a claim in words; "" where nothing but equality makes sense."""
    if rtol and rtol <= ROUNDING and not atol:
        return "exactly"
    parts = [f"± {100 * rtol:.2g} %"] if rtol else []
    parts += [f"± {atol:.2g}"] if atol else []
    return " ".join(parts) or ("exactly" if exact or not isinstance(measured, bool | str) else "")
