"""The cells that were run, so that fresh ranks can rerun them.

A kernel does not know which cells a notebook has, nor their order; it only gets execute requests.
JupyterLab names the cell in each request: then the history has each cell once, with the code of
its last run, at the position of its first run. Other clients give no name, so each of their
requests counts as a separate cell.

Example::

    >>> history = History()
    >>> history.note("a", 1, "x = 1", ok=True)
    >>> history.note("b", 2, "y = x", ok=True)
    >>> history.note("a", 3, "x = 2", ok=True)
    >>> [cell.code for cell in history.above("new")]
    ['x = 2', 'y = x']
    >>> history.above("a")
    []
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_CELLS = 1000


@dataclass(frozen=True)
class Past:
    """The last run of a cell: its number In[number], its code, and whether it succeeded."""

    number: int
    code: str
    ok: bool


class History:
    """Attributes: forgotten: how many cells were dropped, the oldest first, to bound memory."""

    def __init__(self) -> None:
        self._cells: dict[str, Past] = {}  # in the order in which they were first run
        self.forgotten = 0

    def note(self, key: str, number: int, code: str, *, ok: bool) -> None:
        """Record that cell `key` was run; if its code is empty, only its position matters."""
        self._cells[key] = Past(number, code, ok)
        if len(self._cells) > MAX_CELLS:
            del self._cells[next(iter(self._cells))]
            self.forgotten += 1

    def above(self, key: str) -> list[Past]:
        """Cells with code that were first run before `key`, or all if `key` is new."""
        cells: list[Past] = []
        for name, past in self._cells.items():
            if name == key:
                break
            if past.code.strip():
                cells.append(past)
        return cells


def key_of(request: dict[str, Any]) -> str:
    """The name of the request's cell: the client's, if it gives one."""
    name = request.get("metadata", {}).get("cellId")
    return f"cell {name}" if isinstance(name, str) else str(request["header"]["msg_id"])
