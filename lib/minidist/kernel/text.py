r"""Printed text as a terminal would show it: of a line redrawn after a carriage return, the last.

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
    """What is left to see of `text`: each line's last drawing."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def fold(chunk: str) -> str:
    r"""A piece of a stream without drawings that would be gone before anybody sees them.

    Unlike `settle`, it keeps what tells that the piece redraws a line which began before it, or
    that the next piece will redraw its last line.

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
    """Text that is printed piece by piece, kept settled, so that a progress bar stays one line.

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
        """The whole lines; what has been returned once is the beginning of all later results."""
        if len(self._done) > 1:
            self._done = ["".join(self._done)]
        return self._done[0] if self._done else ""

    def text(self) -> str:
        return self.lines() + settle("".join(self._line))
