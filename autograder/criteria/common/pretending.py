"""Puts functions of ours in place of a library's while a student's code runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def pretending(function: Any, instead: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replaces attributes of modules, also where the student's code has imported them by name."""
    originals = {getattr(module, name, None): new for (module, name), new in instead.items()}
    names = namespace(function)
    imported = {
        name: originals[value]
        for name, value in names.items()
        if isinstance(value, Callable) and _is_hashable(value) and value in originals
    }
    with ExitStack() as stack:
        for (module, name), new in instead.items():
            stack.enter_context(mock.patch.object(module, name, new, create=True))
        stack.enter_context(having(names, imported))
        yield


def namespace(written: Any) -> dict[str, Any]:
    """The global names of a function or class of the notebook; of a tuple, those of the first."""
    first = written[0] if isinstance(written, tuple) and written else written
    if inspect.isfunction(first):
        # The wrapper of torch.no_grad() has torch's names.
        return getattr(inspect.unwrap(first), "__globals__", first.__globals__)
    home = sys.modules.get(getattr(first, "__module__", ""), sys.modules["__main__"])
    return vars(home)


def in_world_of(
    function: Any, world_size: int, rank: int | None = None
) -> AbstractContextManager[None]:
    """Inside, the notebook's variables for its number of ranks and its rank have these values."""
    names = namespace(function)
    new = {"WORLD_SIZE": world_size, "world_size": world_size}
    if rank is not None:
        new |= {"RANK": rank, "rank": rank}
    return having(names, {name: value for name, value in new.items() if name in names})


@contextmanager
def having(names: Any, new: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a namespace has these values too; afterwards these names are as they were.

    `mock.patch.dict` puts back a copy of the whole namespace: what the student's code assigns
    meanwhile would be lost, and for a moment its threads would find no name at all.
    """
    before = {name: names[name] for name in new if name in names}
    names.update(new)
    try:
        yield
    finally:
        for name in new:
            if name in before:
                names[name] = before[name]
            else:
                names.pop(name, None)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
