"""The kernel as VS Code's Jupyter extension uses it.

The extension starts the kernel of a kernelspec itself, without a server, and speaks to it over zmq
(its sources: github.com/microsoft/vscode-jupyter, src/kernels). Unlike the other clients, it runs
code of its own that the notebook never shows and reads what that prints, it interrupts with a
message on the shell channel, and to end a kernel it sends SIGTERM to everything below it and then
to the kernel.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from jupyter_client.kernelspec import KernelSpecManager
from kernel_helper import ALL_REDUCE, HANGS_S, JOIN, wait_gone

from minidist.processes.tree import descendants

# Of this kind is what fills the list of variables and the pages of a table: it prints JSON.
VARIABLES = """
import json as _editor_json
print(_editor_json.dumps({n: type(v).__name__ for n, v in globals().items() if n == 'rank'}))
del _editor_json
"""


class Editor:
    """What the extension does, with one notebook."""

    def __init__(self, folder: Path) -> None:
        spec = KernelSpecManager().get_kernel_spec("torchrun-2")
        file, _ = write_connection_file(
            str(folder / "kernel-v2-1.json"), key=uuid.uuid4().hex.encode()
        )
        argv = [sys.executable, *spec.argv[1:]]
        command = [part.replace("{connection_file}", file) for part in argv]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | spec.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.client = BlockingKernelClient(connection_file=file)
        self.client.load_connection_file()
        self.client.start_channels(hb=False)  # a busy machine misses a beat, and lives

    def cell(self, code: str, *, shown: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A cell, or code of the editor's own; the reply and the messages that belong to it."""
        messages: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(
            code,
            timeout=HANGS_S,
            silent=False,
            store_history=shown,
            stop_on_error=False,
            allow_stdin=False,
            output_hook=messages.append,
        )
        return reply["content"], messages

    def printed(self, code: str, *, shown: bool = True) -> str:
        reply, messages = self.cell(code, shown=shown)
        assert reply["status"] == "ok", reply
        return "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")

    def interrupt(self) -> str:
        """The request's id."""
        message = self.client.session.msg("interrupt_request", {})
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def dispose(self) -> list[int]:
        """Ends the kernel as the extension does; returns the pids of what has to go."""
        family = [self.process.pid, *descendants(self.process.pid)]
        for pid in family[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self.process.terminate()
        self.client.stop_channels()
        return family


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    it = Editor(tmp_path)
    try:
        yield it
    finally:
        it.dispose()
        it.process.communicate(timeout=HANGS_S)


def test_a_notebook_from_start_to_end(editor: Editor, tmp_path: Path) -> None:
    client = editor.client
    client.wait_for_ready(timeout=HANGS_S)  # kernel_info, again and again until it is answered
    # Before the first cell: versions, the notebook's path, its folder, a style for figures.
    assert editor.printed("import ipywidgets as w; print('v', w.__version__); del w", shown=False)
    notebook = tmp_path / "lab.ipynb"
    editor.printed(f"__vsc_ipynb_file__ = {str(notebook)!r}\n%matplotlib inline", shown=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    editor.printed(f"import os\n%cd {elsewhere}", shown=False)
    editor.printed("import matplotlib\nmatplotlib.style.use('default')", shown=False)

    reply, _ = editor.cell(f"{JOIN}\nprint('first', os.getcwd())")
    assert reply["execution_count"] == 1  # what the editor ran does not count
    # The folder is that of every rank.
    assert editor.printed("print(os.getcwd())") == f"{elsewhere}\n[rank 1: same output]\n"
    assert editor.printed(ALL_REDUCE).startswith("3.0\n")

    # Its list of variables is read as JSON, although every rank has one of its own.
    assert json.loads(editor.printed(VARIABLES, shown=False)) == {"rank": "int"}
    # A list that cannot be made on rank 1 alone is no error for the editor.
    unequal = "print('{}') if rank == 0 else 1 / 0"
    assert editor.printed(unequal, shown=False) == "{}\n"
    reply, messages = editor.cell("1 / 0 if rank == 0 else None", shown=False)
    assert reply["ename"] == "ZeroDivisionError"
    assert [m["content"]["ename"] for m in messages if m["msg_type"] == "error"] == [
        "ZeroDivisionError"
    ]
    reply, _ = editor.cell("print(rank)")
    assert reply["execution_count"] == 4

    family = editor.dispose()
    assert wait_gone(family) == []
    out, err = editor.process.communicate(timeout=HANGS_S)
    assert (out, err) == (b"", b"")  # the extension shows both as the kernel's complaint


def test_the_stop_button_sends_a_message_on_the_shell_channel(editor: Editor) -> None:
    client = editor.client
    client.wait_for_ready(timeout=HANGS_S)
    editor.printed(JOIN)
    blocks = "if rank == 0: dist.all_reduce(torch.ones(3))\nelse: time.sleep(1000)"
    waiting = client.execute(f"print('now', flush=True)\n{blocks}", allow_stdin=False)
    while client.get_iopub_msg(timeout=HANGS_S)["msg_type"] != "stream":
        pass
    time.sleep(0.3)  # the last line that prints is not yet the one that blocks
    began = time.monotonic()
    asked = editor.interrupt()
    replies: dict[str, Any] = {}
    while not {asked, waiting} <= set(replies):
        message = client.get_shell_msg(timeout=HANGS_S)
        replies[message["parent_header"]["msg_id"]] = message
    assert time.monotonic() - began < 10
    assert replies[asked]["msg_type"] == "interrupt_reply"
    assert replies[asked]["content"]["status"] == "ok"
    assert replies[waiting]["content"]["ename"] == "KeyboardInterrupt"
    again = f"if not dist.is_initialized(): dist.init_process_group('gloo')\n{ALL_REDUCE}"
    assert editor.printed(again).startswith("3.0\n")
