"""Functions that are imported when they are first called.

A lab's table names the functions of its criteria. Most commands only read names, titles and points
from it; without torch, which the functions import, they answer more than a second sooner.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Later:
    """A module, or a function in it, by its dotted path; a function can be called."""

    path: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Later(f"{self.path}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.find()(*args, **options)

    def find(self) -> Any:
        """The function itself; imports its module.

        Raises:
            ImportError, AttributeError: there is no such module, or nothing of that name in it.
        """
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def later(package: str, names: str) -> Iterator[Any]:
    """The modules of a package with these names, which blanks separate."""
    return (Later(f"{package}.{name}") for name in names.split())
