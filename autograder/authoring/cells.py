"""The Python of a notebook's code cell, without the magics around it."""

from __future__ import annotations

import ast
import re

from IPython.core.inputtransformer2 import TransformerManager

_RANK_MAGIC = re.compile(r"%%rank\b[^\n]*\n")


def split_magic(source: str) -> tuple[str, str]:
    """The line `%%rank …` with its end, if the cell begins with one, and the rest of the cell."""
    magic = _RANK_MAGIC.match(source)
    return (magic[0], source[magic.end() :]) if magic else ("", source)


def parse_cell(body: str) -> ast.Module:
    """The syntax tree of a cell below its `%%` line; magics of a line become calls.

    Raises:
        SyntaxError: it is not Python.
    """
    return ast.parse(TransformerManager().transform_cell(body))
