"""What a file of ours imports, read with Python's own parser."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def imports_of(path: Path, package: str = "") -> Iterator[tuple[int, str]]:
    """Every (line, dotted name) that a file imports; `from a import b` counts as a.b.

    Args:
        package: what relative imports begin from.
    """
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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
