"""Values of `course.toml` that several of its tables have."""

from __future__ import annotations

import re
from typing import Any

from autograder.criteria.limits import GIB, MIB

_SIZE = re.compile(r"([1-9]\d{0,5}) ?([MG])iB")


class OptionsError(ValueError):
    """The file is invalid; the message names file, table, key and value."""


def whole_number(value: Any, where: str, *, or_size: bool = False) -> int:
    """The value, which must be a whole number from 1 up.

    Args:
        or_size: accept a text such as "512 MiB", too.

    Raises:
        OptionsError: it is something else.
    """
    size = _SIZE.fullmatch(value) if or_size and isinstance(value, str) else None
    number = int(size[1]) * (GIB if size[2] == "G" else MIB) if size else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        or_what = ' or a size such as "512 MiB" or "12 GiB"' if or_size else ""
        raise OptionsError(f"{where}: expected a whole number from 1 up{or_what}, got {value!r}")
    return number
