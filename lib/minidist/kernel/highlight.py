"""Colours for cells that begin with `%%rank`, on pages that pygments draws."""

from __future__ import annotations

from typing import Any

from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, using
from pygments.lexers.python import PythonLexer
from pygments.token import Operator, Text

_RULE: Any = (
    r"(?s)(\s*)(%%ranks?)([^\n]*\n)(.*)",
    bygroups(Text, Operator, Text, using(PythonLexer)),
)


def highlight_rank_cells() -> None:
    """Tells pygments that such a cell is Python; below a magic that it does not know, it sees text.

    Jupyter's tools take IPython's lexer by its class, so the rule is added there.
    """
    rules = IPython3Lexer.tokens["root"]
    if _RULE not in rules:
        rules.insert(0, _RULE)
