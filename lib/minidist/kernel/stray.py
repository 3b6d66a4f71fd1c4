"""What ranks other than rank 0 print after their cell has ended: threads, tasks, child processes.

Rank 0's output passes through, under the cell that it comes from. The other ranks' is held back for
a moment; lines that rank 0 prints as well are left out, the others are shown with a label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from minidist.kernel.cell import printable
from minidist.kernel.outputs import label
from minidist.kernel.text import settle

_HELD_S = 0.5

Publish = Callable[[str, dict[str, Any], dict[str, Any]], None]
Key = tuple[str, str]  # id of the message that caused the output; stdout or stderr


class Stray:
    """Collects such output; `publish(kind, content, parent)` sends a message to the notebook."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._texts: dict[Key, dict[int, str]] = {}
        self._parents: dict[str, dict[str, Any]] = {}
        self._before: dict[Key, set[str]] = {}  # lines of rank 0 in the moment before
        self._timer: asyncio.TimerHandle | None = None

    def add(self, rank: int, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        """Keep printed text, or the text form of a display, until `show`."""
        name = "stderr" if content.get("name") == "stderr" else "stdout"
        text = content.get("text")
        if kind == "display_data" and isinstance(data := content.get("data"), dict):
            text = f"{data.get('text/plain', '')}\n"
        if not isinstance(text, str) or kind not in ("stream", "display_data"):
            return
        key = str(parent.get("msg_id")), name
        self._parents[key[0]] = parent
        texts = self._texts.setdefault(key, {})
        texts[rank] = texts.get(rank, "") + text
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_HELD_S, self.show)

    def show(self) -> None:
        """Show what is held back."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        held, self._texts = self._texts, {}
        known, self._before = self._before, {}
        for key, texts in held.items():
            own = set(settle(texts.pop(0, "")).split("\n"))
            self._before[key] = own
            groups: dict[tuple[str, ...], list[int]] = {}
            for rank, text in texts.items():
                lines = settle(text).removesuffix("\n").split("\n")
                new = [line for line in lines if line not in own | known.get(key, set())]
                groups.setdefault(tuple(new), []).append(rank)
            for lines, ranks in groups.items():
                text = "".join(f"[{label(ranks)}] {printable(line)}\n" for line in lines)
                if text:
                    content = {"name": key[1], "text": text}
                    self._publish("stream", content, {"header": self._parents[key[0]]})
        self._parents.clear()
