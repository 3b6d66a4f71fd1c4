"""What a file of ours imports, read with Python's own parser."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def imports_of(path: Path, package: str = "") -> tuple[tuple[int, str], ...]:
    """Every (line, dotted name) that a file imports; `from a import b` counts as a.b.

    Args:
        package: what relative imports begin from.
    """
    return _read(path.read_text("utf-8"), package)


@cache
def _read(text: str, package: str) -> tuple[tuple[int, str], ...]:
    return tuple(_imports(ast.parse(text), package))


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"
