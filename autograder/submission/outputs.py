"""Cleans a cell's outputs so that a notebook can hold them, whatever student code sent.

Ranks sign their messages with a key that student code can read, so a message may hold anything:
text that no file can hold, structures nested deeper than Python recurses, numbers in place of text.
Also, the limits of one cell do not bound a notebook: the sum over all cells could fill the grader's
memory and disk.
"""

from __future__ import annotations

import math
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_output

from autograder.criteria.limits import Limits
from minidist.kernel.cell import printable

MAX_DEPTH = 20
_TEXT = {"stream": ("name", "text"), "error": ("ename", "evalue")}


class Tidier:
    """Cleans the outputs of one submission's cells, one cell after the other."""

    def __init__(self, max_bytes: int = Limits().output_bytes) -> None:
        self.max_bytes = max_bytes
        self.left = max_bytes

    def tidy(self, cell: NotebookNode) -> None:
        """Keeps only those outputs of the cell that are well formed and fit into the bytes left."""
        kept = []
        for clean in _joined([_output(output) for output in cell.outputs]):
            size = _size(clean)
            if size <= self.left:
                self.left -= size
                kept.append(clean)
            else:
                self.left = 0
        if self.left == 0:
            text = f"[outputs beyond {self.max_bytes >> 20} MiB in one notebook are not kept]\n"
            kept.append(new_output("stream", name="stderr", text=text))
        cell.outputs = kept
        if type(cell.get("execution_count")) is not int:
            cell.execution_count = None


def _joined(outputs: list[NotebookNode | None]) -> list[NotebookNode]:
    """All of stdout as one output and all of stderr as another, as a terminal would show them."""
    kept: list[NotebookNode] = []
    texts: dict[str, list[str]] = {}
    for output in outputs:
        if output is None:
            continue
        if output.output_type != "stream":
            kept.append(output)
        elif output.name in texts:
            texts[output.name].append(output.text)
        else:
            texts[output.name] = [output.text]
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = settled("".join(texts[output.name]))
    return kept


def settled(text: str) -> str:
    r"""Applies carriage returns and backspaces to text, in time proportional to its length.

    >>> settled("10 %\r20 %\nab\bc\r\n")
    '20 %\nac\r\n'
    """
    if "\r" not in text and "\b" not in text:
        return text
    return "\n".join(map(_settled_line, text.split("\n")))


def _settled_line(line: str) -> str:
    body = line.rstrip("\r")
    shown: list[str] = []
    for character in body.rpartition("\r")[2]:
        if character != "\b":
            shown.append(character)
        elif shown:
            shown.pop()
    return "".join(shown) + line[len(body) :]


def _output(output: Any) -> NotebookNode | None:
    """The output with plain values; None if the output has no known form."""
    clean = _plain(output, 0)
    if not isinstance(clean, dict):
        return None
    kind = clean.get("output_type")
    if kind in _TEXT:
        if not all(isinstance(clean.get(key), str) for key in _TEXT[kind]):
            return None
        if kind == "error" and not _is_lines(clean.get("traceback")):
            return None
    elif kind in ("display_data", "execute_result"):
        if not isinstance(clean.get("data"), dict):
            return None
        clean["data"] = NotebookNode(
            {kind: value for kind, value in clean["data"].items() if _fits(kind, value)}
        )
        if not isinstance(clean.get("metadata"), dict):
            clean["metadata"] = {}
        if kind == "execute_result" and type(clean.get("execution_count")) is not int:
            clean["execution_count"] = None
    else:
        return None
    return NotebookNode(clean)


def _fits(kind: str, value: Any) -> bool:
    """Whether a display's value is text, or its MIME type allows JSON."""
    json = kind == "application/json" or (kind.startswith("application/") and kind[-5:] == "+json")
    return json or isinstance(value, str) or _is_lines(value)


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return printable(value)
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return NotebookNode({printable(str(k)): _plain(v, depth + 1) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 1 << 63 else str(value.bit_length()) + " bits"
    return value if value is None or isinstance(value, bool) else printable(str(value))


def _size(value: Any) -> int:
    """Rough size: the characters of all text in the value, plus 16 for every part."""
    if isinstance(value, str):
        return len(value) + 16
    if isinstance(value, dict):
        return 16 + sum(_size(k) + _size(v) for k, v in value.items())
    if isinstance(value, list):
        return 16 + sum(map(_size, value))
    return 16
