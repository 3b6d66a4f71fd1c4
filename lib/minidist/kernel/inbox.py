"""Receives what ranks send, during and between cells: output, replies, input() requests.

See [Note: the life of a cell] in README.md.
"""

from __future__ import annotations

import contextlib
from typing import Any

from minidist.kernel.cell import Cell
from minidist.kernel.client import Client
from minidist.kernel.stray import Stray

# Limit of output outside of cells (threads, widgets): bytes between two cells.
MAX_STRAY_BYTES = 4 * 1024 * 1024
# Limits of input() for one rank in a cell: calls, and bytes of one call. All calls are kept until
# the cell ends.
MAX_INPUTS, MAX_INPUT_BYTES = 1000, 64 * 1024
# Parsing 20 MiB of JSON with many small parts takes a second, and the front serves nobody
# meanwhile. So there are limits on what is parsed: bytes of a reply, and bytes of a rank's output
# in a cell.
MAX_REPLY_BYTES = 8 * 1024 * 1024
MAX_READ_BYTES = 64 * 1024 * 1024
_PRINTED = ("stream", "display_data")
_TOO_LARGE = {
    "status": "error",
    "ename": "ReplyTooLarge",
    "evalue": f"the rank's reply had more than {MAX_REPLY_BYTES >> 20} MiB",
    "traceback": [],
}


class Inbox:
    """Hands each message of a rank to the cell or the client that it is for, or drops it.

    `send(channel, rank, frames)` sends a message to a rank; it does nothing if there are no ranks.

    Attributes:
        cell: the cell that the ranks run, None between cells.
    """

    def __init__(self, client: Client, send: Any) -> None:
        self.cell: Cell | None = None
        self._client, self._send = client, send
        self._pending: dict[str, tuple[str, list[bytes], dict[str, Any]]] = {}
        self._stray = Stray(client.publish)
        self._stray_left = MAX_STRAY_BYTES

    def end_cell(self) -> None:
        """The cell is over; messages that come from now on belong to no cell."""
        self.cell = None
        self._stray_left = MAX_STRAY_BYTES

    def expect(self, channel: str, idents: list[bytes], message: dict[str, Any]) -> None:
        """Remember a client's request that is sent to rank 0, so that its reply is forwarded."""
        self._pending[message["header"]["msg_id"]] = (channel, idents, message)

    def give_up(self) -> None:
        """Answer all remembered requests with `RankLost`, because no rank is left to reply."""
        for channel, idents, message in self._pending.values():
            self._client.reply(channel, idents, message, {"status": "error", "ename": "RankLost"})
            self._client.status("idle", message)
        self._pending.clear()

    def receive(self, channel: str, rank: int, frames: list[bytes]) -> None:
        """Process a message from a rank; a malformed message is dropped."""
        with contextlib.suppress(ValueError):
            if channel == "iopub":
                self._output(rank, frames)
                return
            cell, size = self.cell, sum(map(len, frames))
            if channel == "stdin" and (size > MAX_INPUT_BYTES or cell is None or not cell.may_ask):
                return
            fits = size <= MAX_REPLY_BYTES
            message = self._client.read(frames, content=fits)
            parent = message["parent_header"].get("msg_id")
            if cell is not None and parent == cell.msg_id and channel in ("stdin", "shell"):
                if rank not in cell.ranks:
                    return
                if channel == "stdin":
                    self._asks(rank, message)
                else:
                    cell.replies.setdefault(rank, message["content"] if fits else dict(_TOO_LARGE))
                    cell.changed.set()
            elif rank == 0 and (waiting := self._pending.pop(str(parent), None)):
                asked, idents, request = waiting
                if fits:
                    self._client.forward(asked, [*idents, *frames])
                else:
                    self._client.reply(asked, idents, request, _TOO_LARGE)

    def _output(self, rank: int, frames: list[bytes]) -> None:
        message = self._client.read(frames, content=False)
        kind, cell = message["header"]["msg_type"], self.cell
        if cell is None or message["parent_header"].get("msg_id") != cell.msg_id:
            size = sum(map(len, frames))
            starting = kind == "status" and not message["parent_header"]
            if size <= self._stray_left and not starting and (rank == 0 or kind in _PRINTED):
                content = self._unpack(message)  # raises ValueError if it is no JSON
                self._stray_left -= size
                if rank == 0:
                    self._client.forward("iopub", frames)
                self._stray.add(rank, kind, content, message["parent_header"])
            return
        if rank not in cell.ranks:
            return
        size = sum(map(len, frames))
        small = kind == "status" and size <= MAX_INPUT_BYTES
        if not small and cell.read_bytes[rank] + size > MAX_READ_BYTES:
            cell.outputs.drop(rank, kind, size)
            return
        cell.read_bytes[rank] += size
        content = self._unpack(message)
        if kind == "status":
            if content.get("execution_state") == "idle":
                cell.idle.add(rank)
                cell.changed.set()
        elif rank not in cell.outputs.ranks:
            return
        elif kind == "stream":
            name = "stderr" if content.get("name") == "stderr" else "stdout"
            cell.outputs.stream(rank, name, str(content.get("text", "")), frames)
        elif kind not in ("execute_input", "error"):
            cell.outputs.rich(rank, kind, content, frames)

    def _unpack(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            content = self._client.session.unpack(message["content"])
        except Exception as error:
            raise ValueError("content is not JSON") from error
        return content if isinstance(content, dict) else {}

    # -- input() ---------------------------------------------------------------------------------

    def _asks(self, rank: int, message: dict[str, Any]) -> None:
        """Show each input() of a cell to the user once; every rank gets the same answer."""
        cell = self.cell
        assert cell is not None
        waiting = cell.inputs.setdefault(rank, [])
        if len(waiting) >= MAX_INPUTS:
            return
        number = len(waiting)
        waiting.append(message)
        if number < len(cell.answers):
            self._give(rank, message, cell.answers[number])
        elif number == cell.asked:
            cell.asked += 1
            frames = self._client.frames(
                "input_request", message["content"], cell.source, ident=cell.idents
            )
            self._client.forward("stdin", frames)

    def typed(self, message: dict[str, Any]) -> None:
        """The user has answered an input(): pass the answer to the ranks that have asked."""
        cell = self.cell
        if cell is None:
            return
        cell.answers.append(str(message["content"].get("value", "")))
        number = len(cell.answers) - 1
        for rank, waiting in cell.inputs.items():
            if number < len(waiting):
                self._give(rank, waiting[number], cell.answers[number])

    def _give(self, rank: int, request: dict[str, Any], value: str) -> None:
        content = {"status": "ok", "value": value}
        self._send("stdin", rank, self._client.frames("input_reply", content, request))
