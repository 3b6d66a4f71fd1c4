"""Which part of a cell runs again on fresh ranks: all of it, or what cannot end a rank later.

A cell that has ended well may have left something behind that ends its rank some time later: a
thread, a timer, a callback. Nobody can say which cell that was. So after a loss the cells run again
without their bare calls, and, if that does not help, with their definitions only.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from IPython.core.inputtransformer2 import TransformerManager

MAX_SOURCE_CHARS = 50_000  # longer cells are skipped: time may grow with their square
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class CellToRerun:
    """A cell that fresh ranks run again.

    Attributes:
        source: what is left of the cell; number: its In[number];
        given: whether the lab gave it, so that students could not change it.
    """

    source: str
    number: int
    given: bool = False

    def defining(self) -> CellToRerun:
        return self if self.given else replace(self, source=definitions(self.source))

    def quiet(self) -> CellToRerun:
        return self if self.given else replace(self, source=without_calls(self.source))


def definitions(source: str) -> str:
    """The imports, functions and classes of a cell, without its other statements.

    >>> print(definitions("import os; x = 1\\nclass A:\\n    n = 2\\nwhile True: pass"))
    import os
    <BLANKLINE>
    class A:
        n = 2
    """
    if len(source) > MAX_SOURCE_CHARS:
        return ""
    try:
        tree = ast.parse(TransformerManager().transform_cell(source))  # magics become calls
        tree.body = [node for node in tree.body if isinstance(node, _DEFINITIONS)]
        return ast.unparse(tree)
    except Exception:  # untrusted source: too deep, with odd characters, or not Python
        return ""


def without_calls(source: str) -> str:
    """The cell without calls that are statements of their own; cells that write files stay.

    >>> print(without_calls("import threading; n = 2\\nthreading.Timer(n, exit).start()"))
    import threading
    n = 2
    """
    first, _, rest = source.lstrip().partition("\n")
    if first.split()[:1] == ["%%rank"]:
        return f"{first}\n{without_calls(rest)}"
    if first.split()[:1] == ["%%writefile"]:
        return source
    if len(source) > MAX_SOURCE_CHARS:
        return ""
    try:
        tree = ast.parse(TransformerManager().transform_cell(source))
        return ast.unparse(ast.fix_missing_locations(_WithoutCalls().visit(tree)))
    except Exception:  # as in `definitions`
        return ""


class _WithoutCalls(ast.NodeTransformer):
    """Replaces bare calls by `pass`; what functions and classes do when called stays."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_call = isinstance(node.value, ast.Call | ast.Await)
        return ast.copy_location(ast.Pass(), node) if is_call else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.generic_visit(node)
        node.body = [part for part in node.body if not isinstance(part, ast.Pass)]
        return node
