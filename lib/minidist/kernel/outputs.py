"""Merges the ranks' output of one cell, within bounds.

The output of the lowest rank passes through at once, unchanged. What the other ranks print is held
back. If it is the same as the lowest rank's, only this fact is shown; as soon as it differs, it is
shown with a label on each line. Figures and HTML of the other ranks are shown, if they differ,
folded under the cell.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable
from typing import Any

from minidist.kernel.text import Screen

# Limits of printed text, in characters per stream, rank and cell: as it stands on the screen, and
# as it was sent (redrawn lines included). Limit of figures and other rich output, in bytes per
# cell: one for the lowest rank, one for all other ranks together.
MAX_TEXT = 1024 * 1024
MAX_RAW_TEXT = 16 * MAX_TEXT
MAX_RICH_BYTES = 32 * 1024 * 1024

# If a rank's output begins with this many lines of the lowest rank, or more, they are not repeated.
MIN_SAME_LINES = 5
# Calls of `tick` for which other ranks' lines wait until the lowest rank ends a line it has begun.
MAX_WAITED = 10

# What differs when two processes draw the same figure or page: ids and the date in an SVG of
# matplotlib, UUIDs (animations, plotly), ids of a pandas Styler.
_DRAWN = re.compile(
    r"<dc:date>[^<]*|"
    r"(?<![0-9a-zA-Z+/])(?:[a-z][0-9a-f]{10}|image[0-9a-f]{10}|T_[0-9a-f]{5})(?![0-9a-zA-Z+/])|"
    r"[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
# What differs between processes in text: `<C object at 0x7f…>`, `/tmp/ipykernel_123/45.py:1: …`.
_OF_A_PROCESS = re.compile(r"(?<= at 0x)[0-9a-f]+(?=>)|(?<=/ipykernel_)\d+(?=/)")

Publish = Callable[[str, dict[str, Any]], None]


def label(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 1-3`, `ranks 0, 2`."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return "ranks " + ", ".join(map(str, ordered))


class _Text:
    """What one rank has printed to one stream."""

    def __init__(self) -> None:
        self.screen = Screen()
        self.came = 0  # characters, redrawn lines included
        self.dropped = 0
        self.shown = 0  # characters of the text that were shown with a label already

    def add(self, text: str) -> str:
        """Keep `text` as far as the bounds allow; returns what was kept."""
        room = min(MAX_TEXT - self.screen.length, MAX_RAW_TEXT - self.came)
        kept = text[: max(0, room)]
        self.came += len(kept)
        self.dropped += len(text) - len(kept)
        self.screen.add(kept)
        return kept


def _comparable(text: str) -> str:
    """`text` without what differs by process only: addresses in default reprs, names of cells."""
    return _OF_A_PROCESS.sub("", text) if " at 0x" in text or "ipykernel_" in text else text


def _num_same_lines(own: str, reference: str) -> int:
    """Number of lines at the beginning that need not be repeated; 0 if they are few."""
    low, high = 0, min(len(own), len(reference))  # bisection: comparing slices is fast
    while low < high:
        middle = (low + high + 1) // 2
        if own[low:middle] == reference[low:middle]:
            low = middle
        else:
            high = middle - 1
    num_lines = own.count("\n", 0, low)
    return num_lines if num_lines >= MIN_SAME_LINES else 0


def _after(text: str, num_lines: int) -> str:
    """`text` without its first lines."""
    return text.split("\n", num_lines)[-1]


def _picture(data: dict[str, Any]) -> str:
    """HTML of a display that is more than text, or an empty string."""
    for kind in ("image/png", "image/jpeg", "image/gif"):
        if isinstance(image := data.get(kind), str):
            return f'<img src="data:{kind};base64,{html.escape("".join(image.split()))}">'
    for kind in ("image/svg+xml", "text/html"):
        if isinstance(text := data.get(kind), str):
            return text
    return ""


def _without_drawn(picture: str) -> str:
    """`picture` with a number in place of each id and date that differs between processes."""
    numbers: dict[str, str] = {}
    return _DRAWN.sub(lambda found: numbers.setdefault(found[0], f"#{len(numbers)}"), picture)


class Outputs:
    """Merges the outputs of `ranks` for one cell.

    Args:
        ranks: ranks that run the cell; the output of the lowest one has no labels.
        publish: sends a message of the given type and content to the notebook.
        forward: passes a message of the lowest rank on unchanged.
    """

    def __init__(
        self, ranks: Iterable[int], publish: Publish, forward: Callable[[list[bytes]], None]
    ) -> None:
        self.ranks = sorted(ranks)
        self.lowest = self.ranks[0]
        self._publish, self._forward = publish, forward
        self._texts: dict[tuple[int, str], _Text] = {}
        self._pictures: dict[int, list[str]] = {rank: [] for rank in self.ranks}
        self._rich_left = {True: MAX_RICH_BYTES, False: MAX_RICH_BYTES}  # True: of the lowest rank
        self._rich_dropped = 0
        self._open: set[str] = set()  # streams in which the lowest rank is in the middle of a line
        self._waited = 0

    def _text(self, rank: int, name: str) -> _Text:
        return self._texts.setdefault((rank, name), _Text())

    def stream(self, rank: int, name: str, text: str, frames: list[bytes]) -> None:
        """`text` printed by `rank` to stdout or stderr."""
        kept = self._text(rank, name).add(text)
        if rank != self.lowest:
            return
        if kept:
            (self._open.discard if kept.endswith("\n") else self._open.add)(name)
        if kept == text:
            self._forward(frames)
        elif kept:
            self._publish("stream", {"name": name, "text": kept})

    def rich(self, rank: int, kind: str, content: dict[str, Any], frames: list[bytes]) -> None:
        """A display, a result or anything else that is not printed text."""
        size = sum(map(len, frames))
        fits = size <= self._rich_left[rank == self.lowest]
        data = content.get("data")
        if kind in ("display_data", "execute_result") and isinstance(data, dict):
            plain = data.get("text/plain")
            text = f"{plain if isinstance(plain, str) else ''}\n"
            held = self._text(rank, "stdout")
            if rank == self.lowest:  # the display itself is shown, so the cut loses nothing
                text = text[: max(0, MAX_TEXT - held.screen.length)]
            held.add(text)
            if picture := _picture(data) if fits else "":
                self._pictures[rank].append(picture)
        elif kind == "clear_output":
            self._pictures[rank].clear()
        if rank != self.lowest and kind not in ("display_data", "execute_result"):
            return  # widgets and redrawn displays live on the lowest rank only
        if not fits:
            self._rich_dropped += size
            return
        self._rich_left[rank == self.lowest] -= size
        if rank == self.lowest:
            self._open.clear()  # text after a figure begins a new line
            self._forward(frames)

    def drop(self, rank: int, kind: str, size: int) -> None:
        """Count `size` bytes of output that were not read, because the rank had sent too much."""
        if rank not in self.ranks:
            return
        if kind == "stream":
            self._text(rank, "stdout").dropped += size
        else:
            self._rich_dropped += size

    def tick(self) -> None:
        """Show output that already differs from the lowest rank's; called while the cell runs."""
        self._waited = self._waited + 1 if self._open else 0
        for (rank, name), held in list(self._texts.items()):
            if rank == self.lowest or held.screen.length == held.shown:
                continue
            if name in self._open and self._waited <= MAX_WAITED:
                continue  # do not print into the middle of a line
            lines = held.screen.lines()
            own = _comparable(lines)
            reference = _comparable(self._text(self.lowest, name).screen.lines())
            differs = held.shown or not (own.startswith(reference) or reference.startswith(own))
            if differs and len(lines) > held.shown:
                same = 0 if held.shown else _num_same_lines(own, reference)
                self._show([rank], name, _after(lines[held.shown :], same), same)
                held.shown = len(lines)

    def finish(self) -> None:
        """Show what is left when the cell has ended."""
        same: set[int] = set()
        different: set[int] = set()
        groups: dict[tuple[str, str, int], list[int]] = {}
        for rank in self.ranks:
            for name in ("stdout", "stderr"):
                held, plain = self._text(rank, name), self._text(self.lowest, name)
                text = held.screen.text()
                own, reference = _comparable(text), _comparable(plain.screen.text())
                if rank == self.lowest or (not own and not reference):
                    continue
                if not held.shown and own == reference:
                    same.add(rank)
                    continue
                different.add(rank)
                if len(text) > held.shown:
                    num_lines = 0 if held.shown else _num_same_lines(own, reference)
                    rest = _after(text[held.shown :], num_lines)
                    groups.setdefault((name, rest, num_lines), []).append(rank)
        for (name, text, num_lines), ranks in groups.items():
            self._show(ranks, name, text, num_lines)
        different |= self._show_pictures()
        if same - different:
            self.tell(f"{label(same - different)}: same output")
        for (rank, name), held in self._texts.items():
            if held.dropped:
                self.tell(f"rank {rank}: {name} cut after {MAX_TEXT} characters")
        if self._rich_dropped:
            self.tell(f"figures and other rich output cut after {MAX_RICH_BYTES} bytes")

    def _show_pictures(self) -> set[int]:
        """Show, folded, the other ranks' displays that differ; returns the ranks that differ."""
        plain = self._pictures[self.lowest]
        different = {r: own for r, own in self._pictures.items() if own and own != plain}
        if not different:  # as most often: no picture has to be searched
            return set()
        groups: dict[tuple[str, ...], list[int]] = {}
        for rank, pictures in different.items():
            groups.setdefault(tuple(map(_without_drawn, pictures)), []).append(rank)
        groups.pop(tuple(map(_without_drawn, plain)), None)
        for ranks in groups.values():
            pictures = self._pictures[ranks[0]]
            who, count = label(ranks), len(pictures)
            what = f"[{who}: {count} display{'' if count == 1 else 's'}]"
            body = "".join(f"<div>{picture}</div>" for picture in pictures)
            page = f"<details><summary>{what}</summary>{body}</details>"
            data = {"text/plain": what, "text/html": page}
            self._publish("display_data", {"data": data, "metadata": {}, "transient": {}})
        return {rank for ranks in groups.values() for rank in ranks}

    def _show(self, ranks: list[int], name: str, text: str, num_same_lines: int) -> None:
        """Show `text` with labels; the `num_same_lines` lines before it are only counted."""
        mark = f"[{label(ranks)}] "
        lines = text.removesuffix("\n").split("\n") if text else []
        if num_same_lines:
            lines.insert(0, f"(the first {num_same_lines} lines: same)")
        self._line(name, "".join(f"{mark}{x}\n" for x in lines))

    def tell(self, text: str) -> None:
        """Shows a remark of the kernel's own."""
        self._line("stdout", f"[{text}]\n")

    def _line(self, name: str, text: str) -> None:
        """Publish `text` at the beginning of a line."""
        if name in self._open:
            self._open.discard(name)
            text = f"\n{text}"
        self._publish("stream", {"name": name, "text": text})
