"""What the front reads of its ranks' messages, and what it does not: it has to stay awake."""

from __future__ import annotations

import json
from types import SimpleNamespace

from jupyter_client.session import Session

from minidist.kernel.cell import Cell
from minidist.kernel.client import Client
from minidist.kernel.inbox import MAX_INPUTS, MAX_READ_BYTES, MAX_REPLY_BYTES, Inbox
from minidist.kernel.outputs import MAX_RICH_BYTES, Outputs

KEY = b"k" * 32


class Notebook(Client):
    """The notebook's side, without its sockets."""

    def __init__(self) -> None:
        self.session = Session(key=KEY)
        self.sent: list[tuple[str, str, dict]] = []  # channel, kind, content

    def forward(self, channel, frames):
        message = self.read(frames)
        self.sent.append((channel, message["header"]["msg_type"], message["content"]))

    def of(self, channel):
        return [(kind, content) for where, kind, content in self.sent if where == channel]


def inbox_of(**request):
    """An inbox while rank 0 and 1 run a cell; the notebook, the cell and what ranks were sent."""
    notebook, to_ranks = Notebook(), []
    inbox = Inbox(notebook, lambda *message: to_ranks.append(message))
    content = {"code": "pass", **request}
    message = {**notebook.session.msg("execute_request", content), "parent_header": {}}
    outputs = Outputs(
        [0, 1],
        lambda kind, content: notebook.publish(kind, content),
        lambda frames: notebook.forward("iopub", frames),
    )
    inbox.cell = Cell(message, [b"x"], [0, 1], outputs, 1, 0, message)
    return inbox, notebook, inbox.cell, to_ranks


def frames(cell, kind, content, **header):
    session = Session(key=KEY)
    head = json.loads(session.pack(session.msg_header(kind))) | header
    parts = [session.pack(head), session.pack(cell.request["header"]), b"{}"]
    parts.append(content if isinstance(content, bytes) else session.pack(content))
    return [b"<IDS|MSG>", session.sign(parts), *parts]


def test_a_reply_that_is_too_large_is_an_error_and_ends_the_cell():
    inbox, _, cell, _ = inbox_of()
    brackets = b'{"status": "ok", "x": [%s[]]}' % (b"[]," * (MAX_REPLY_BYTES // 3))
    inbox.receive("shell", 0, frames(cell, "execute_reply", brackets))
    inbox.receive("shell", 1, frames(cell, "execute_reply", {"status": "ok"}))
    assert cell.replies[0]["ename"] == "ReplyTooLarge"
    assert cell.replies[1] == {"status": "ok"}


def test_the_notebooks_own_question_is_answered_even_then():
    inbox, notebook, *_ = inbox_of()
    asked = {**notebook.session.msg("inspect_request", {}), "parent_header": {}}
    inbox.expect("shell", [b"x"], asked)
    large = {"data": "x" * MAX_REPLY_BYTES}
    inbox.receive("shell", 0, frames(SimpleNamespace(request=asked), "inspect_reply", large))
    [(kind, content)] = notebook.of("shell")
    assert (kind, content["ename"]) == ("inspect_reply", "ReplyTooLarge")


def test_output_beyond_all_measure_is_not_read_but_its_end_is():
    inbox, notebook, cell, _ = inbox_of()
    data = {"text/plain": "x" * (MAX_RICH_BYTES - 10_000)}
    shown = frames(cell, "display_data", {"data": data, "metadata": {}, "transient": {}})
    for _ in range(MAX_READ_BYTES // MAX_RICH_BYTES + 3):
        inbox.receive("iopub", 0, shown)
    unreadable = frames(cell, "display_data", b"{" * 1000)
    inbox.receive("iopub", 0, unreadable)
    assert cell.read_bytes[0] <= MAX_READ_BYTES
    inbox.receive("iopub", 0, frames(cell, "status", {"execution_state": "idle"}))
    assert cell.idle == {0}
    cell.outputs.finish()
    [first, last] = notebook.of("iopub")
    assert first[0] == "display_data"
    assert "figures and other rich output cut" in last[1]["text"]
    inbox.receive("iopub", 1, frames(cell, "stream", {"name": "stdout", "text": "mine"}))
    assert cell.read_bytes[1] > 0  # each rank has its own measure


def test_a_header_that_is_too_large_is_dropped():
    inbox, notebook, cell, _ = inbox_of()
    long = frames(cell, "stream", {"name": "stdout", "text": "x"}, x="y" * (64 << 10))
    inbox.receive("iopub", 0, long)
    assert notebook.sent == []


def test_input_is_asked_only_of_who_would_answer():
    for allowed in (True, False):
        inbox, notebook, cell, to_ranks = inbox_of(allow_stdin=allowed)
        for _ in range(MAX_INPUTS + 10):
            inbox.receive("stdin", 0, frames(cell, "input_request", {"prompt": "?"}))
        assert len(cell.inputs.get(0, [])) == (MAX_INPUTS if allowed else 0)
        assert len(notebook.of("stdin")) == (MAX_INPUTS if allowed else 0)
        inbox.typed({"content": {"value": "42"}})
        assert len(to_ranks) == (1 if allowed else 0)
