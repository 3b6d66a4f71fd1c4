r"""Printed text as a terminal would show it: of a redrawn line, only the last drawing.

A line is redrawn after a carriage return.

Example::

    >>> settle("1%\r2%\rdone\nx")
    'done\nx'
    >>> screen = Screen()
    >>> for percent in range(100):
    ...     screen.add(f"\r{percent}%")
    >>> screen.text(), screen.length
    ('99%', 3)
"""

from __future__ import annotations


def settle(text: str) -> str:
    """`text` with only the last drawing of each line."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def fold(chunk: str) -> str:
    r"""A piece of a stream without the drawings that the same piece overwrites.

    Unlike `settle`, it keeps the carriage return that redraws a line from before this piece, and
    the one at the end, which lets the next piece redraw the last line.

    >>> fold("\r1%\r2%"), fold("9%\r10%\nnext 1\rnext 2\r")
    ('\r2%', '\r10%\nnext 2\r')
    """
    if "\r" not in chunk:
        return chunk
    first, *rest = chunk.replace("\r\n", "\n").split("\n")
    body = first.rstrip("\r")
    _, redrawn, last = body.rpartition("\r")
    lines = [redrawn + last, *(line.rstrip("\r").rpartition("\r")[2] for line in rest)]
    return "\n".join(lines) + ("\r" if chunk.endswith("\r") else "")


class Screen:
    """Text that is printed piece by piece; `settle` is applied, so a progress bar stays one line.

    Attributes:
        length: characters kept.
    """

    def __init__(self) -> None:
        self._done: list[str] = []  # whole lines
        self._line: list[str] = []  # the pieces of the last line
        self._done_length = self._line_length = 0

    @property
    def length(self) -> int:
        return self._done_length + self._line_length

    def add(self, text: str) -> None:
        head, newline, tail = text.rpartition("\n")
        if newline:
            lines = settle("".join([*self._line, head, "\n"]))
            self._done.append(lines)
            self._done_length += len(lines)
            self._line, self._line_length = [], 0
        if "\r" in tail:
            line = "".join([*self._line, tail])
            # A carriage return at the end: the drawing stays until the next one comes.
            end = "\r" if line.endswith("\r") else ""
            self._line = [line.rstrip("\r").rpartition("\r")[2] + end]
            self._line_length = len(self._line[0])
        elif tail:
            self._line.append(tail)
            self._line_length += len(tail)

    def lines(self) -> str:
        """The complete lines; every later result begins with the earlier results."""
        if len(self._done) > 1:
            self._done = ["".join(self._done)]
        return self._done[0] if self._done else ""

    def text(self) -> str:
        return self.lines() + settle("".join(self._line))
