"""Converts course sources (jupytext percent scripts) to notebook cells, and cells back to scripts.

    # %%rank 0                       %%rank 0
    # %%writefile hello.py    <->    %%writefile hello.py
    # print("hello")                 print("hello")

In the script every magic is a comment, so that the script is Python and torchrun can run it:

- A line magic or shell command, `# %matplotlib inline` or `# !nvidia-smi`, loses one `# `.
  A comment that must stay a comment gets a second `# `: `# # !important`.
- A cell may begin with cell magics (`# %%rank 0`). If the magic's body is not this cell's Python
  (`%%writefile`, `%%bash` ...), the whole body is commented. Below any other magic, the body may be
  live Python, or commented as a whole so that the plain script does not run it.
- `# %% tags=["active-ipynb"]`, jupytext's own way, comments a whole cell.

jupytext splits the script into cells; its other rules for magics are not used, because they leave
the body of `%%writefile` commented and turn a comment like `# copy the weights` into code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import jupytext
from jupytext.stringparser import StringParser

from minidist.errors import MinidistError

FOREIGN_BODY = frozenset(
    {"writefile", "file", "bash", "sh", "script", "cmd", "html", "HTML", "javascript", "js"}
    | {"latex", "markdown", "svg", "SVG", "perl", "ruby"}
)
ACTIVE_IPYNB = "active-ipynb"
_CELL_MAGIC = re.compile(r"^%%([A-Za-z_]\w*)")
_MAGIC = re.compile(r"^\s*(?:# )*(?:%%?[A-Za-z]|![^\s=])")
_COMMENTED_MAGIC = re.compile(r"^\s*(?:# )+(?:%%?[A-Za-z]|![^\s=])")


class BuildError(MinidistError):
    """A course source that cannot become a notebook; the message names the file and the cell."""


@dataclass(kw_only=True)
class SourceCell:
    """One cell of a course source, with magics in the form of the notebook."""

    cell_type: str
    source: str
    tags: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def read_cells(text: str, *, where: str) -> tuple[list[SourceCell], dict[str, Any]]:
    """Splits a percent script into cells; also returns the metadata of its jupytext header.

    Args:
        text: the script.
        where: file name for error messages.
    """
    fmt = {"extension": ".py", "format_name": "percent", "comment_magics": False}
    notebook = jupytext.reads(text, fmt=fmt)
    cells = []
    for number, cell in enumerate(notebook.cells, 1):
        # jupytext adds lines_to_... entries, which count blank lines.
        options = {key: value for key, value in cell.metadata.items() if "lines_to" not in key}
        tags = [tag for tag in options.pop("tags", []) if tag != ACTIVE_IPYNB]
        source = cell.source
        if cell.cell_type == "code" and ACTIVE_IPYNB not in cell.metadata.get("tags", []):
            try:
                source = source_from_script(source)
            except BuildError as error:
                raise BuildError(f"{where}: cell {number}: {error}") from None
        cells.append(
            SourceCell(cell_type=cell.cell_type, source=source, tags=tags, options=options)
        )
    return cells, dict(notebook.metadata)


def source_from_script(text: str) -> str:
    """Converts a code cell's text from the form of the script to the form of the notebook."""
    lines = text.split("\n")
    head: list[str] = []
    while len(head) < len(lines) and _CELL_MAGIC.match(_uncomment(lines[len(head)])):
        head.append(_uncomment(lines[len(head)]))
    body = lines[len(head) :]
    if head:
        commented = all(line.startswith("#") for line in body if line.strip())
        if _is_foreign(head) and not commented:
            live = next(line for line in body if line.strip() and not line.startswith("#"))
            raise BuildError(f"all lines below {head[-1]!r} must be commented, but {live!r} is not")
        if commented:
            return "\n".join(head + [_uncomment(line) for line in body])
    return "\n".join(head + _each_magic(body, _COMMENTED_MAGIC, _uncomment))


def source_to_script(source: str, *, commented: bool = False) -> str:
    """The inverse of `source_from_script`; `commented` asks for a commented Python body."""
    lines = source.split("\n")
    head: list[str] = []
    while len(head) < len(lines) and _CELL_MAGIC.match(lines[len(head)]):
        head.append(lines[len(head)])
    body = lines[len(head) :]
    # A body of comments only would be taken for a commented body, so it gets a second '#'.
    only_comments = all(line.startswith("#") for line in body if line.strip())
    out = [f"# {line}" for line in head]
    if head and (commented or only_comments or _is_foreign(head)):
        return "\n".join(out + [f"# {line}" if line else "#" for line in body])
    return "\n".join(out + _each_magic(body, _MAGIC, _comment))


def has_commented_body(text: str) -> bool:
    """Whether a cell of the script has only comments."""
    return all(line.startswith("#") for line in text.split("\n") if line.strip())


def _is_foreign(head: list[str]) -> bool:
    names = (_CELL_MAGIC.match(line) for line in head)
    return any(name is not None and name[1] in FOREIGN_BODY for name in names)


def _comment(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return f"{indent}# {line.lstrip()}"


def _uncomment(line: str) -> str:
    return re.sub(r"^(\s*)# ?", r"\1", line, count=1)


def _each_magic(lines: list[str], pattern: re.Pattern[str], change: Any) -> list[str]:
    """Applies `change` to magic lines outside strings, and to their `\\` continuation lines."""
    parser = StringParser("python")
    out = []
    continued = False
    for line in lines:
        is_magic = not parser.is_quoted() and (continued or pattern.match(line) is not None)
        out.append(change(line) if is_magic else line)
        parser.read_line(line)
        continued = is_magic and line.rstrip().endswith("\\")
    return out
