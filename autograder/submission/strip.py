"""Drops the outputs of a notebook while its file is read, whatever their size.

Outputs are dropped anyway, and one picture too many must not cost a grade. So the size limit is for
the file without outputs. The reader goes over the bytes once, keeps no output in memory, and
knows just enough JSON to find the list "outputs" of a cell; `json` reads the rest afterwards.
"""

from __future__ import annotations

import re

_NEXT = re.compile(rb'["\[\]{}]')
# Python 3.11.4 matches possessive groups wrongly; so groups backtrack, at most 1000 times.
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+){0,1000}', re.DOTALL)
# Whole strings and all between them, for speed: outputs may have a million short ones.
_NO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+){0,1000}"){0,1000}', re.DOTALL)
_KEY = b"outputs"
_IN_CELL = b"{[{"  # the brackets that are open in a cell


class TooBigError(Exception):
    """More than the limit is left without outputs, or the outputs have too many parts."""


class Stripper:
    """Takes a file piece by piece.

    Attributes:
        kept: the file so far, with empty lists in place of outputs.
    """

    def __init__(self, max_kept: int, max_parts: int) -> None:
        """The limits: bytes that are kept, and brackets in outputs, which bound the time."""
        self.kept = bytearray()
        self._max_kept, self._parts_left = max_kept, max_parts
        self._depth = 0
        self._open = bytearray()  # the first brackets that are open
        self._list = b""  # the key of the list that is open in the notebook: "cells", or another
        self._outside = 0  # depth of the outputs' list while in it, else 0
        self._string: bytearray | None = None  # start of the current string
        self._last = b""  # the last string; at an opening bracket, the key of the value
        self._escape = b""  # a backslash at the end of a piece

    def feed(self, piece: bytes) -> None:
        """Reads one more piece.

        Raises:
            TooBigError: a limit is exceeded.
        """
        piece, self._escape = self._escape + piece, b""
        at = begin = 0  # `begin`: start of the part that is not copied yet
        while at < len(piece):
            if self._string is not None:
                at = self._read_string(piece, at)
                continue
            if self._outside and (skipped := _NO_BRACKET.match(piece, at)):
                at = skipped.end()
            found = _NEXT.search(piece, at)
            if found is None:
                break
            at = found.end()
            sign = found[0]
            if sign == b'"':
                self._string = bytearray()
            elif sign in b"[{":
                if self._outside:
                    self._count()
                elif self._begins_outputs(sign):
                    self._keep(piece[begin:at])
                    self._outside = self._depth + 1
                if self._depth < len(_IN_CELL):
                    self._open += sign
                if self._depth == 1:
                    self._list = self._last
                self._depth += 1
            else:
                if self._outside == self._depth:
                    self._outside, begin = 0, at - 1
                self._depth -= 1
                del self._open[max(0, self._depth) :]
        if not self._outside:
            self._keep(piece[begin : len(piece) - len(self._escape)])

    def _begins_outputs(self, sign: bytes) -> bool:
        return (
            sign == b"["
            and self._depth == len(_IN_CELL)
            and self._open == _IN_CELL
            and self._list == b"cells"
            and self._last == _KEY
        )

    def _read_string(self, piece: bytes, at: int) -> int:
        assert self._string is not None
        found = _IN_STRING.match(piece, at)
        assert found is not None  # the pattern also matches an empty string
        room = len(_KEY) + 1 - len(self._string)
        self._string += piece[at : min(found.end(), at + room)]
        at = found.end()
        if at < len(piece) and piece[at : at + 1] == b'"':
            self._last, self._string = bytes(self._string), None
            return at + 1
        if at < len(piece) - 1:  # more escapes than one match takes
            return at
        self._escape = piece[at:]  # nothing, or a backslash
        return len(piece)

    def _count(self) -> None:
        self._parts_left -= 1
        if self._parts_left < 0:
            raise TooBigError("the outputs have too many parts")

    def _keep(self, part: bytes) -> None:
        self.kept += part
        if len(self.kept) > self._max_kept:
            raise TooBigError("too big without its outputs")
