"""One cell's output: rank 0's as it comes, the others' where they differ, all of it bounded.

Rank 0 streams through untouched. What another rank prints is held back: if it turns out the same as
rank 0's there is nothing to tell but that; as soon as it differs it is shown, each line labelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# Characters of printed text per rank and cell, and bytes of figures and other rich output per cell.
MAX_TEXT = 1024 * 1024
MAX_RICH_BYTES = 32 * 1024 * 1024

Publish = Callable[[str, dict[str, Any]], None]


def label(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 1-3`, `ranks 0, 2`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return "ranks " + ", ".join(map(str, ordered))


def settle(text: str) -> str:
    """What a terminal would show: of a line redrawn by carriage returns, the last drawing."""
    if "\r" not in text:
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


class _Text:
    """What one rank has printed to one stream."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.length = 0
        self.dropped = 0
        self.shown = 0  # characters of the joined text that were shown with a label already

    def add(self, text: str) -> str:
        """Keep `text` as far as the bound allows; returns what was kept."""
        kept = text[: max(0, MAX_TEXT - self.length)]
        self.dropped += len(text) - len(kept)
        if kept:
            self.parts.append(kept)
            self.length += len(kept)
        return kept

    def joined(self) -> str:
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


class Outputs:
    """Merges the outputs of `ranks` for one cell.

    Args:
        ranks: ranks that run the cell; the lowest one's output is shown plain.
        publish: sends a message of the given type and content to the notebook.
        forward: passes a message of the plain rank on as it is.
    """

    def __init__(
        self, ranks: Iterable[int], publish: Publish, forward: Callable[[list[bytes]], None]
    ) -> None:
        self.ranks = sorted(ranks)
        self.plain = self.ranks[0]
        self._publish, self._forward = publish, forward
        self._texts: dict[tuple[int, str], _Text] = {}
        self._rich_left = MAX_RICH_BYTES
        self._rich_dropped = 0

    def _text(self, rank: int, name: str) -> _Text:
        return self._texts.setdefault((rank, name), _Text())

    def stream(self, rank: int, name: str, text: str, frames: list[bytes]) -> None:
        """`text` printed by `rank` to stdout or stderr."""
        held = self._text(rank, name)
        kept = held.add(text)
        if rank != self.plain:
            return
        if kept == text:
            self._forward(frames)
        elif kept:
            self._publish("stream", {"name": name, "text": kept})

    def rich(self, rank: int, kind: str, content: dict[str, Any], frames: list[bytes]) -> None:
        """A display, a result or anything else that is not printed text."""
        data = content.get("data")
        if kind in ("display_data", "execute_result") and isinstance(data, dict):
            plain = data.get("text/plain")
            held = self._text(rank, "stdout")
            text = f"{plain if isinstance(plain, str) else ''}\n"
            if rank == self.plain:
                held.parts.append(text[: max(0, MAX_TEXT - held.length)])
                held.length += len(held.parts[-1])
            else:
                held.add(text)
        if rank != self.plain:
            return  # widgets and redrawn displays live on the plain rank only
        size = sum(map(len, frames))
        if size > self._rich_left:
            self._rich_dropped += size
            return
        self._rich_left -= size
        self._forward(frames)

    def tick(self) -> None:
        """Show what certainly differs from the plain rank by now; called while the cell runs."""
        for (rank, name), held in list(self._texts.items()):
            if rank == self.plain or held.length == held.shown:
                continue
            own, reference = held.joined(), self._text(self.plain, name).joined()
            if held.shown or not (own.startswith(reference) or reference.startswith(own)):
                end = own.rfind("\n") + 1
                if end > held.shown:
                    self._show([rank], name, own[held.shown : end])
                    held.shown = end

    def finish(self) -> None:
        """Show what is left when the cell has ended."""
        same: set[int] = set()
        different: set[int] = set()
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in self.ranks:
            for name in ("stdout", "stderr"):
                held, plain = self._text(rank, name), self._text(self.plain, name)
                own = held.joined()
                if rank == self.plain or (not own and not plain.length):
                    continue
                if not held.shown and settle(own) == settle(plain.joined()):
                    same.add(rank)
                    continue
                different.add(rank)
                if len(own) > held.shown:
                    groups.setdefault((name, own[held.shown :]), []).append(rank)
        for (name, text), ranks in groups.items():
            self._show(ranks, name, text)
        if same - different:
            text = f"[{label(same - different)}: same output]\n"
            self._publish("stream", {"name": "stdout", "text": text})
        for (rank, name), held in self._texts.items():
            if held.dropped:
                text = f"[rank {rank}: {name} cut after {MAX_TEXT} characters]\n"
                self._publish("stream", {"name": "stdout", "text": text})
        if self._rich_dropped:
            text = f"[figures and other rich output cut after {MAX_RICH_BYTES} bytes]\n"
            self._publish("stream", {"name": "stdout", "text": text})

    def _show(self, ranks: list[int], name: str, text: str) -> None:
        mark = f"[{label(ranks)}] "
        lines = settle(text).removesuffix("\n").split("\n")
        self._publish("stream", {"name": name, "text": "".join(f"{mark}{x}\n" for x in lines)})
