"""The state of a running cell: which ranks have finished it, and how their errors are merged."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from minidist.kernel.outputs import Outputs, label

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MAX_TRACEBACK_CHARS = 64 * 1024


@dataclass
class Cell:
    """An execute request while ranks work on it.

    Attributes:
        request: the message that was sent to the ranks; idents: the client that gets the reply.
        source: the client's message that caused it: equal to `request`, except for a rerun cell.
        ranks: ranks that run the cell; count: its number In[count]; generation: the number of
        the ranks' generation.
        replies: content of the reply of each rank that has replied.
        idle: ranks whose output is complete.
        answers: what the user typed for each input(); inputs: the input() requests of each rank.
    """

    request: dict[str, Any]
    idents: list[bytes]
    ranks: list[int]
    outputs: Outputs
    count: int
    generation: int
    source: dict[str, Any]
    replies: dict[int, dict[str, Any]] = field(default_factory=dict)
    idle: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[str] = field(default_factory=list)
    asked: int = 0
    inputs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    read_bytes: Counter[int] = field(default_factory=Counter)  # per rank: output that was parsed
    interrupted: bool = False
    cut: bool = False  # whether connections of a rank were shut down to free it
    broken: dict[str, Any] | None = None  # why it ended without replies: lost, hang, deadline

    @property
    def msg_id(self) -> str:
        return self.request["header"]["msg_id"]

    @property
    def may_ask(self) -> bool:
        """Whether the client can answer input()."""
        return bool(self.source["content"].get("allow_stdin", True))

    @property
    def unfinished(self) -> list[int]:
        return [r for r in self.ranks if r not in self.replies or r not in self.idle]

    def stop(self, kind: str, ename: str, text: str, states: list[dict[str, Any]]) -> None:
        """End the cell for a reason other than the ranks' replies; only the first call counts."""
        if self.broken is None:
            self.broken = {"kind": kind, "ename": ename, "text": text, "ranks": states}
            self.changed.set()


def printable(text: str) -> str:
    """`text` with lone surrogates replaced, because a message to the notebook cannot hold them."""
    return text.encode("utf-8", "replace").decode()


def _strings(value: Any) -> list[str]:
    """A traceback from a rank, checked and bounded."""
    if not isinstance(value, list):
        return []
    lines, left = [], MAX_TRACEBACK_CHARS
    for line in value:
        if isinstance(line, str) and left > 0:
            lines.append(printable(line[:left]))
            left -= len(line)
    return lines


def failure(reply: dict[str, Any]) -> tuple[str, str]:
    """(ename, evalue) of a rank's error reply."""
    ename, evalue = reply.get("ename", "Error"), reply.get("evalue", "")
    return printable(str(ename))[:200], printable(str(evalue))[:8000]


def merge_errors(replies: dict[int, dict[str, Any]], num_ranks: int) -> dict[str, Any] | None:
    """Merge the ranks' errors into one error for the notebook; None if no rank failed.

    Ranks with the same error and traceback share one entry. With a single rank there are no labels.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in sorted(replies):
        reply = replies[rank]
        if reply.get("status") != "ok":
            trace = _COLOUR.sub("", "\n".join(_strings(reply.get("traceback"))))
            groups.setdefault((*failure(reply), trace), []).append(rank)
    if not groups:
        return None
    traceback: list[str] = []
    for number, ranks in enumerate(groups.values()):
        if num_ranks > 1:
            traceback.append(("\n" if number else "") + f"\x1b[1mon {label(ranks)}:\x1b[0m")
        traceback += _strings(replies[ranks[0]].get("traceback"))
    if num_ranks == 1:
        evalue = next(iter(groups))[1]
    else:
        by_value: dict[tuple[str, str], list[int]] = {}
        for (ename, value, _), ranks in groups.items():
            by_value.setdefault((ename, value), []).extend(ranks)
        first = next(iter(by_value))[0]
        evalue = "; ".join(
            f"[{label(ranks)}] {value if ename == first else f'{ename}: {value}'}".rstrip()
            for (ename, value), ranks in by_value.items()
        )
    return {"ename": next(iter(groups))[0], "evalue": evalue, "traceback": traceback}
