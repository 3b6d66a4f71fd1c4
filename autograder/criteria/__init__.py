"""The criteria of every lab, one folder per lab; its `table.py` lists them.

A lab's table does not import torch: see `later`. `parts_of` names the modules of a lab.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from autograder.criteria.criterion import Criterion, Lab

__all__ = ["OURS", "find_criterion", "get_lab", "lab_names", "parts_of", "read_ours"]

OURS = "ours"  # module of a lab that students never have


def lab_names() -> tuple[str, ...]:
    """Names of all labs that have criteria, in order."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in modules if name.startswith(("lab", "bonus"))))


@cache
def get_lab(name: str) -> Lab:
    """The lab called `name`.

    Raises:
        ValueError: there is no such lab; the message lists the labs that exist.
    """
    if name not in lab_names():
        raise ValueError(f"no lab is called {name!r}; there are: {', '.join(lab_names())}")
    return importlib.import_module(_table(name)).LAB


def parts_of(lab: str) -> tuple[str, ...]:
    """Names of a lab's modules, which a process imports before it forks those that need them."""
    modules = pkgutil.iter_modules([str(Path(__path__[0], lab))], f"{__name__}.{lab}.")
    return tuple(module.name for module in modules if not module.name.endswith(f".{OURS}"))


def read_ours(lab: str) -> str:
    """The lab's own functions for `Criterion.stand_ins`, as source text."""
    return Path(__path__[0], lab, f"{OURS}.py").read_text("utf-8")


def find_criterion(name: str) -> tuple[Lab, Criterion]:
    """The criterion called `name` and its lab; names are unique over all labs.

    Raises:
        ValueError: no lab has a criterion of that name.
    """

    for lab in map(get_lab, _most_likely_first(name)):
        for criterion in lab.criteria:
            if criterion.name == name:
                return lab, criterion
    raise ValueError(f"no lab has a check called {name!r}")


def _most_likely_first(criterion: str) -> Iterator[str]:
    """All labs, first those whose tables are loaded; files are read only if these are wrong."""
    # A rank got the table that it needs from its launcher; importing all would take 40 ms.
    loaded = [lab for lab in lab_names() if _table(lab) in sys.modules]
    yield from loaded

    def lacks_it(lab: str) -> bool:
        return f'"{criterion}"' not in Path(__path__[0], lab, "table.py").read_text("utf-8")

    yield from sorted(set(lab_names()) - set(loaded), key=lacks_it)


def _table(lab: str) -> str:
    return f"{__name__}.{lab}.table"
