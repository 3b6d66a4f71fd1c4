"""The grader's notebook client against output that no client expects: it goes on."""

from __future__ import annotations

import asyncio
import atexit
import json
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.session import Session
from nbformat.v4 import new_code_cell, new_notebook

from autograder.submission.engine import InfrastructureError, _Client, _Run

KEY = b"k" * 32
CELL = "cell"  # id of the request
DEEP = b"[" * 600 + b"]" * 600
HELLO = {"name": "stdout", "text": "hello"}


def frames(kind="stream", content=HELLO, header=(), parent=()):
    """Signed frames of a rank."""
    session = Session(key=KEY)
    head = json.loads(session.pack(session.msg_header(kind))) | dict(header)
    packed = content if isinstance(content, bytes) else json.dumps(content).encode()
    parts = [json.dumps(head).encode(), json.dumps({"msg_id": CELL} | dict(parent)).encode()]
    parts += [b"{}", packed]
    return [session.sign(parts), *parts]


class Channel:
    """What has been sent to the client, in its order."""

    def __init__(self) -> None:
        self.session, self.queue = Session(key=KEY), asyncio.Queue()

    async def get_msg(self, timeout=None):
        return self.session.deserialize(await self.queue.get())


def run(*cells, kept=None):
    """Runs a cell for each list of output messages, and keeps so many of its outputs."""
    notebook = new_notebook(cells=[new_code_cell("pass") for _ in cells])

    async def execute():
        client = _Client(notebook, allow_errors=True, coalesce_streams=False)
        iopub, shell, sent = Channel(), Channel(), iter(cells)

        def send(*_, **__):
            for message in next(sent):
                iopub.queue.put_nowait(message)
            iopub.queue.put_nowait(frames("status", {"execution_state": "idle"}))
            shell.queue.put_nowait(frames("execute_reply", {"status": "ok"}))
            return CELL

        client.kc = SimpleNamespace(
            iopub_channel=iopub, shell_channel=shell, execute=send, is_alive=lambda: True
        )
        client.reset_execution_trackers()
        for index, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, index)
            client.forget_displays()
            if kept is not None:
                del cell.outputs[kept:]

    asyncio.run(asyncio.wait_for(execute(), 60))
    return notebook


TWICE = frames()
ODD = {
    "the same frames twice": [TWICE, TWICE],
    "a date that is none": [frames(header={"date": "2020-99-99T99:99:99"})],
    "a date of the parent that is none": [frames(parent={"date": "2020-99-99T99:99:99"})],
    "another version": [frames(header={"version": 5})],
    "no version": [frames(header={"version": None})],
    "an old version": [frames("display_data", {}, header={"version": "4.1"})],
    "a deep header": [frames(header={"x": json.loads("[" * 400 + "]" * 400)})],
    "deep content": [
        frames("display_data", b'{"data":{"application/json":' + DEEP + b'},"metadata":{}}')
    ],
    "content that is no object": [frames("display_data", b"[]")],
    "an unknown state": [frames("status", {})],
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_message_costs_nothing_but_itself(name):
    [cell] = run([*ODD[name], frames(content={"name": "stdout", "text": "and on"})]).cells
    assert "and on" in "".join(output.get("text", "") for output in cell.outputs)


def display(kind, text):
    data = {"text/plain": text}
    return frames(kind, {"data": data, "metadata": {}, "transient": {"display_id": "bar"}})


def test_a_display_of_a_cell_that_has_ended_stays_as_it_was():
    """Its outputs have been tidied: there may be fewer, and they can be written."""
    many = [frames(), display("display_data", "1 %")]
    notebook = run(
        [display("display_data", "1 %")], many, [display("update_display_data", "\ud800")]
    )
    assert notebook.cells[0].outputs[0].data == {"text/plain": "1 %"}
    assert nbformat.writes(notebook).encode()


def test_a_kernel_that_does_not_start_leaves_nothing_for_the_end_of_the_grader(
    tmp_path, monkeypatch
):
    spec = tmp_path / "kernels" / "dies" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text('{"argv": ["false", "{connection_file}"], "display_name": "", "language": ""}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    limits = SimpleNamespace(wall_s=60.0, output_bytes=1000)
    session = SimpleNamespace(
        lab=SimpleNamespace(limits=limits, cell_deadline_s=60.0),
        kernel_arguments=(),
        connection_file=str(tmp_path / "connection.json"),
    )
    left = []
    monkeypatch.setattr(atexit, "register", lambda function, *_: left.append(function))
    monkeypatch.setattr(atexit, "unregister", left.remove)
    with pytest.raises(InfrastructureError, match="the kernel failed"):
        asyncio.run(_Run(SimpleNamespace(nb=new_notebook()), "dies", session).run())
    assert not [f for f in left if isinstance(getattr(f, "__self__", None), _Client)]
