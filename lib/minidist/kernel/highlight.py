"""Colours for cells that begin with `%%rank`, on pages that pygments draws."""

from __future__ import annotations

from typing import Any

from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers.python import PythonLexer
from pygments.lexers.shell import BashLexer
from pygments.token import Operator, Text

_RANKS = r"(?s)(\s*)(%%ranks?)([^\n]*\n)"
_RULES: list[Any] = [
    (
        rf"{_RANKS}(%%writefile [^\n]*\.py\n)(.*)",
        bygroups(Text, Operator, Text, Text, using(PythonLexer)),
    ),
    (rf"{_RANKS}(%%.*)", bygroups(Text, Operator, Text, Text)),  # a cell magic: any language
    (rf"{_RANKS}(.*)", bygroups(Text, Operator, Text, using(IPython3Lexer))),
    # A command that goes on in the next line.
    (r"(!)(?!=)((?:[^\n]*\\\n)+[^\n]*)(\n)", bygroups(Operator, using(BashLexer), Text)),
]


def highlight_rank_cells() -> None:
    """Makes pygments colour such cells as Python; else all below an unknown magic would be text.

    Jupyter's tools take IPython's lexer by its class, so the rules are added to that class.
    """
    known = IPython3Lexer.tokens["root"]
    if _RULES[0] not in known:
        known[:0] = _RULES
