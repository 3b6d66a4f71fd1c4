"""The front: the process that the notebook talks to. It outlives its ranks and does not trust them.

It imports neither torch nor ipykernel, so it answers within a fraction of a second, and a crash of
the ranks cannot take it down. `cell_runner.py` runs cells and `generations.py` keeps ranks; this
file handles all other messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import traceback
from typing import Any

import zmq
import zmq.asyncio

from minidist import __version__
from minidist.kernel.cell import printable
from minidist.kernel.cell_runner import CellRunner
from minidist.kernel.client import Client, unaddressed
from minidist.kernel.options import KernelOptions, make_run_dir, parse
from minidist.processes.lifetime import adopt_orphans
from minidist.processes.tree import kill_descendants

# Answers to requests that need a rank, while there are no ranks.
_WITHOUT_RANKS: dict[str, dict[str, Any]] = {
    "complete_request": {"status": "ok", "matches": [], "metadata": {}},
    "inspect_request": {"status": "ok", "found": False, "data": {}, "metadata": {}},
    "history_request": {"status": "ok", "history": []},
    "is_complete_request": {"status": "unknown"},
    "comm_info_request": {"status": "ok", "comms": {}},
}
_NOT_OURS = ("debug_request", "create_subshell_request", "delete_subshell_request")


class Front:
    """Serves one kernel until `stop` is set."""

    def __init__(self, options: KernelOptions) -> None:
        self._options = options
        self._context = zmq.asyncio.Context()
        self.client = Client(options.connection_file, self._context)
        self.run_dir = options.run_dir or make_run_dir()
        # For output that is too long to show; a sandbox cannot use a folder outside of itself.
        self._output_dir = None if options.run_dir else tempfile.mkdtemp(prefix="minidist-output-")
        self.stop = asyncio.Event()
        self._queue: asyncio.Queue[tuple[list[bytes], dict[str, Any], list[bytes]]]
        self._queue = asyncio.Queue()
        self._working = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.runner = CellRunner(
            client=self.client,
            options=options,
            context=self._context,
            run_dir=self.run_dir,
            output_dir=self._output_dir,
        )
        self._generations = self.runner.generations

    async def run(self) -> None:
        """Serve until told to stop, then end all descendants and remove the files made here."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop.set)
        loop.add_signal_handler(signal.SIGINT, lambda: self._spawn(self.runner.interrupt()))
        self.client.status("starting")
        self._spawn(self._generations.restart())
        for name in ("shell", "control", "stdin", "hb", "iopub"):
            self._spawn(self._serve(name))
        self._spawn(self._work())
        if self._options.client is not None or os.environ.get("JPY_PARENT_PID"):
            self._spawn(self._watch_parent())
        try:
            await self.stop.wait()
        finally:
            self.close()

    def close(self) -> None:
        self._generations.close()
        kill_descendants(os.getpid())
        for task in self._tasks:
            task.cancel()
        self.client.close()
        if self._options.run_dir is None:
            shutil.rmtree(self.run_dir, ignore_errors=True)
        if self._output_dir is not None:
            shutil.rmtree(self._output_dir, ignore_errors=True)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            text = "".join(traceback.format_exception(task.exception()))
            print(f"minidist.kernel: internal error, please report it\n{text}", file=sys.stderr)

    async def _watch_parent(self) -> None:
        """Stop when the client has ended, even if it ended before this process could look."""
        parent, client = os.getppid(), self._options.client
        if client is None:
            # A different program may start kernels for the client; then that program is the
            # parent. But jupyter_client makes each kernel lead a session: if this process leads
            # one and its parent is init, then the client has ended and init has adopted the kernel.
            adopted = parent == 1 and os.getsid(0) == os.getpid()
            client = int(os.environ["JPY_PARENT_PID"]) if adopted else parent
        while os.getppid() == client:
            await asyncio.sleep(1.0)
        self.stop.set()

    # -- messages from the notebook --------------------------------------------------------------

    async def _serve(self, name: str) -> None:
        sock = self.client.sockets[name]
        while True:
            frames = await sock.recv_multipart()
            if name == "hb":
                self.client.forward("hb", frames)
            elif name == "iopub":
                if frames[0][:1] == b"\x01":
                    self.client.welcome(frames[0][1:])
            else:
                # A malformed or unsigned message from the network gets no answer.
                with contextlib.suppress(ValueError):
                    idents, message = self.client.parse(frames)
                    self._dispatch(name, idents, message, frames)

    def _dispatch(
        self, channel: str, idents: list[bytes], message: dict[str, Any], frames: list[bytes]
    ) -> None:
        kind = message["header"]["msg_type"]
        if channel == "stdin":
            if kind == "input_reply":
                self.runner.inbox.typed(message)
        elif kind == "execute_request" and channel == "shell":
            self._queue.put_nowait((idents, message, frames))
        elif kind == "kernel_info_request":
            self._answer(channel, idents, message, self._kernel_info())
        elif kind == "interrupt_request":
            self._spawn(self._later(channel, idents, message, self.runner.interrupt()))
        elif kind == "shutdown_request":
            restart = bool(message["content"].get("restart"))
            content = {"status": "ok", "restart": restart}
            self._answer(channel, idents, message, content)
            self.client.publish("shutdown_reply", content, message)
            self.stop.set()
        elif kind == "minidist_request":
            self._spawn(self._later(channel, idents, message, self._ours(message["content"])))
        elif kind in _NOT_OURS:
            error = {"status": "error", "ename": "NotImplementedError", "traceback": []}
            self._answer(channel, idents, message, {**error, "evalue": f"no {kind} here"})
        elif channel == "shell" and (self._working or not self._generations.settled):
            if self._queue.empty() and self._generations.settled:
                self._to_rank(channel, idents, message, frames)  # e.g. a widget, while a cell runs
            else:
                self._queue.put_nowait((idents, message, frames))
        else:
            self._to_rank(channel, idents, message, frames)

    def _answer(
        self, channel: str, idents: list[bytes], message: dict[str, Any], content: dict[str, Any]
    ) -> None:
        self.client.status("busy", message)
        self.client.reply(channel, idents, message, content)
        self.client.status("idle", message)

    async def _later(
        self, channel: str, idents: list[bytes], message: dict[str, Any], work: Any
    ) -> None:
        content = await work
        self._answer(channel, idents, message, content or {"status": "ok"})

    def _to_rank(
        self, channel: str, idents: list[bytes], message: dict[str, Any], frames: list[bytes]
    ) -> None:
        """Forward a message to rank 0 unchanged; its reply and output come back unchanged."""
        if self.runner.to_rank_zero(channel, idents, message, unaddressed(frames)):
            return
        kind = message["header"]["msg_type"]
        if kind.endswith("_request"):
            content = dict(_WITHOUT_RANKS.get(kind, {"status": "error", "ename": "RankLost"}))
            if kind == "complete_request":
                at = message["content"].get("cursor_pos", 0)
                content.update(cursor_start=at, cursor_end=at)
            self._answer(channel, idents, message, content)
        else:
            self.client.status("busy", message)
            self.client.status("idle", message)

    def _kernel_info(self) -> dict[str, Any]:
        version = platform.python_version()
        return {
            "status": "ok",
            "protocol_version": "5.3",
            "implementation": "torchrun",
            "implementation_version": __version__,
            "language_info": {
                "name": "python",
                "version": version,
                "mimetype": "text/x-python",
                "codemirror_mode": {"name": "ipython", "version": sys.version_info[0]},
                "pygments_lexer": "ipython3",
                "nbconvert_exporter": "python",
                "file_extension": ".py",
            },
            "banner": f"torchrun × {self._generations.count}: every cell runs on every rank, each "
            f"a Python {version}. %%rank 0 runs a cell on one, %restart_ranks N starts afresh.",
            "help_links": [],
            "supported_features": [],
        }

    async def _ours(self, content: dict[str, Any]) -> dict[str, Any]:
        action = content.get("action")
        if action == "status":
            return self.runner.status()
        if action == "deadline":
            seconds = content.get("seconds")
            if seconds is None or (isinstance(seconds, int | float) and seconds > 0):
                self.runner.deadline_s = seconds
                return {"status": "ok"}
            return _refused(f"deadline: expected seconds > 0 or null, got {seconds!r}")
        if action == "restart":
            ranks = content.get("ranks")
            if ranks is not None and (not isinstance(ranks, int) or not 1 <= ranks <= 1024):
                return _refused(f"restart: expected a number of ranks or null, got {ranks!r}")
            failed = await self._generations.restart(ranks)
            return _refused(failed) if failed else self.runner.status()
        return _refused(f"action: expected restart, deadline or status, got {action!r}")

    # -- one cell after the other ----------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            idents, message, frames = await self._queue.get()
            self._working = True
            try:
                if message["header"]["msg_type"] == "execute_request":
                    if await self._execute(idents, message):
                        await asyncio.sleep(0)
                        self._abort_waiting()
                else:
                    await self._generations.until_settled()
                    self._to_rank("shell", idents, message, frames)
            finally:
                self._working = False

    async def _execute(self, idents: list[bytes], message: dict[str, Any]) -> bool:
        """Run a cell; after an internal error it still gets a reply, and the next cell can run."""
        try:
            return await self.runner.execute(idents, message)
        except Exception as error:
            print(f"minidist.kernel: internal error\n{traceback.format_exc()}", file=sys.stderr)
            content = _refused(printable(f"{type(error).__name__}: {error}"[:1000]))
            self.client.reply("shell", idents, message, content)
            self.client.status("idle", message)
            return True

    def _abort_waiting(self) -> None:
        """After a cell's error, abort the cells that are queued already."""
        others = []
        while not self._queue.empty():
            idents, message, frames = self._queue.get_nowait()
            if message["header"]["msg_type"] == "execute_request":
                self.client.status("busy", message)
                self.client.reply("shell", idents, message, {"status": "aborted"})
                self.client.status("idle", message)
            else:
                others.append((idents, message, frames))
        for item in others:
            self._queue.put_nowait(item)


def _refused(text: str) -> dict[str, Any]:
    return {"status": "error", "ename": "KernelError", "evalue": text, "traceback": []}


async def _serve(options: KernelOptions) -> None:
    await Front(options).run()


def main(argv: list[str]) -> int:
    """Run the kernel; returns the process's exit status (2: wrong usage)."""
    try:
        options = parse(argv)
    except (ValueError, OSError, json.JSONDecodeError) as error:
        print(f"minidist.kernel: {error}", file=sys.stderr)
        return 2
    adopt_orphans()
    asyncio.run(_serve(options))
    return 0
