"""What runs on the job's other nodes: `python -m minidist.kernel.nodes.agent [-- COMMAND …]`.

The same command may be run on every node. On node 0 it becomes COMMAND (papermill, JupyterLab),
which starts the front. On any other node it connects to the front, runs this node's ranks with the
same class `Ranks` that the front uses for its own, and carries their messages. The agent ends with
the front, and all its descendants end with it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Coroutine
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from minidist import __version__
from minidist.kernel.link import decode, encode
from minidist.kernel.membership import Keys, MultiNodeJob, Share, rank_environment, read_job
from minidist.kernel.nodes.hub import DATA, LINE, configure
from minidist.kernel.options import KernelOptions, make_run_dir
from minidist.kernel.ranks import CHANNELS, Ranks
from minidist.processes.lifetime import adopt_orphans
from minidist.processes.tree import kill_descendants

JOIN_WITHIN_S = 600.0
GOOD_BYE_WITHIN_S = 2.0  # after a disconnect, "bye" may still arrive on the second connection
ASK_WITHIN_S = 6.0  # the front itself waits for at most 5 s
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class NodeServer:
    """Serves one front."""

    def __init__(self, job: MultiNodeJob, keys: Keys) -> None:
        self._job, self._keys = job, keys
        self._context = zmq.asyncio.Context()
        name = secrets.token_hex(8).encode()
        self._line, self._data = self._socket(name + LINE), self._socket(name + DATA)
        self._welcomed, self._ended = asyncio.Event(), asyncio.Event()
        self._code = 0
        self._told_refusal = False
        self._ranks: Ranks | None = None
        self._idle = True  # whether no ranks run
        self._generation = -1
        self._run_dir, self._output_dir = "", ""
        self._work: asyncio.Task[None] | None = None  # a start or a stop
        self._starting = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def _socket(self, identity: bytes) -> zmq.asyncio.Socket:
        sock = self._context.socket(zmq.DEALER)
        configure(sock, self._job.host)
        sock.routing_id = identity
        sock.sndhwm = 200  # beyond that, ranks that print have to wait
        sock.reconnect_ivl, sock.reconnect_ivl_max = 100, 2000
        sock.curve_serverkey = self._keys.front_public
        sock.curve_secretkey, sock.curve_publickey = self._keys.node, self._keys.node_public
        return sock

    async def run(self, wait_s: float | None) -> int:
        """Serve until the front ends; returns the exit status: 0 if it said good-bye."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._end, f"ended by {number.name}", 128 + number)
        for sock in (self._line, self._data):
            self._spawn(self._watch(sock))
        self._spawn(self._read_line())
        self._spawn(self._read_data())
        _say(self._job, "waits for the notebook's kernel")
        try:
            waits = [self._spawn(e.wait()) for e in (self._welcomed, self._ended)]
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._welcomed.is_set():
                self._end(f"no kernel came within {wait_s} s", 1)
            await self._ended.wait()
        finally:
            self._close()
        return self._code

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            text = "".join(traceback.format_exception(task.exception()))
            self._end(f"internal error, please report it\n{text}", 1)

    def _end(self, why: str, code: int) -> None:
        if not self._ended.is_set():
            self._code = code
            self._ended.set()
            _say(self._job, why)

    def _close(self) -> None:
        self._tell({"leaving": True})
        for task in list(self._tasks):
            task.cancel()
        self._drop_ranks()
        kill_descendants(os.getpid())
        for sock in (self._line, self._data):
            sock.disable_monitor()
            sock.close(500)

    # -- the connection --------------------------------------------------------------------------

    async def _watch(self, sock: zmq.asyncio.Socket) -> None:
        """Connect, say hello to each front that answers, and end when a front disconnects."""
        monitor = sock.get_monitor_socket(_WATCHED)
        sock.connect(self._job.address)
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                host = socket.gethostname()
                hello = {"hello": self._job.node, "host": host, "version": __version__}
                sock.send(encode(hello))
            elif event & _FAILED and not self._told_refusal:
                self._told_refusal = True
                _say(self._job, "is not let in; has node 0 the same secret?")
            elif event == zmq.EVENT_DISCONNECTED and self._welcomed.is_set():
                await asyncio.sleep(GOOD_BYE_WITHIN_S)
                self._end("the notebook's kernel has gone", 1)

    def _tell(self, message: dict[str, Any]) -> None:
        self._line.send(encode(message))

    async def _read_line(self) -> None:
        while True:
            message = decode((await self._line.recv_multipart())[-1])
            do = message.get("do")
            if "welcome" in message:
                self._welcomed.set()
                _say(self._job, "has joined")
            elif "refused" in message:
                self._end(f"was refused: {message['refused']}", 1)
            elif do == "bye":
                self._end("the notebook's kernel has ended", 0)
            elif do in ("start", "stop"):
                self._order(message)
            elif "rank" in message:
                self._spawn(self._ask(message))

    async def _read_data(self) -> None:
        while True:
            frames = await self._data.recv_multipart()
            if len(frames) < 4 or self._ranks is None:
                continue
            channel, rank, generation = (frame.decode() for frame in frames[:3])
            if channel in CHANNELS and generation == str(self._generation):
                self._ranks.send(channel, int(rank), frames[3:])

    async def _ask(self, message: dict[str, Any]) -> None:
        ranks = self._ranks
        if ranks is not None:
            answer = await ranks.ask(message["rank"], message["do"], ASK_WITHIN_S)
            if answer is not None:
                # The front must not take a rank's words for the agent's: they go under `answer`.
                self._tell({"id": message["id"], "answer": answer})

    # -- ranks -----------------------------------------------------------------------------------

    def _order(self, message: dict[str, Any]) -> None:
        """Obey a start or stop after the previous order; a start that is under way is cancelled."""
        before = self._work
        if before is not None and self._starting:
            before.cancel()
        self._starting = message["do"] == "start"
        self._work = self._spawn(self._after(before, message))

    async def _after(self, before: asyncio.Task[None] | None, message: dict[str, Any]) -> None:
        if before is not None:
            await asyncio.wait([before])
        if message["do"] == "start":
            await self._start(message)
            return
        if self._ranks is not None and not await self._ranks.stop():
            self._drop_ranks()
        self._idle = True
        self._tell({"id": message.get("id"), "stopped": True})

    async def _start(self, order: dict[str, Any]) -> None:
        if not self._idle:
            self._drop_ranks()
        self._generation, self._idle = order["generation"], False
        share = Share(**order["share"])
        ranks = self._ranks = self._ranks or self._new_ranks(order)
        try:
            await ranks.start(order["count"], self._generation, share)
        except (RuntimeError, OSError) as error:
            self._drop_ranks()
            self._tell({"failed": str(error), "generation": self._generation})
        except asyncio.CancelledError:
            self._drop_ranks()
            raise
        else:
            pids = [ranks.pids.get(rank) for rank in share.ranks]
            self._tell({"started": pids, "generation": self._generation})

    def _new_ranks(self, order: dict[str, Any]) -> Ranks:
        self._run_dir, self._output_dir = make_run_dir(), _make_output_dir(order["output_dir"])
        cwd = order["cwd"] if os.path.isdir(order["cwd"]) else None
        options = KernelOptions(
            connection_file="",
            env=rank_environment(self._job, os.environ),
            cwd=cwd,
            rank_init=os.environ.get("MINIDIST_RANK_INIT"),
        )
        return Ranks(
            context=self._context,
            options=options,
            key=order["key"].encode(),
            signature_scheme=order["signature_scheme"],
            run_dir=self._run_dir,
            output_dir=self._output_dir,
            on_message=self._forward,
            on_lost=self._lost,
        )

    def _drop_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        for folder in filter(None, (self._run_dir, self._output_dir)):
            shutil.rmtree(folder, ignore_errors=True)

    def _forward(self, channel: str, rank: int, frames: list[bytes]) -> Awaitable[Any]:
        head = (channel, str(rank), str(self._generation))
        return self._data.send_multipart([*(word.encode() for word in head), *frames])

    def _lost(self, rank: int | None, text: str) -> None:
        self._tell({"lost": rank, "text": text, "generation": self._generation})


def _make_output_dir(wanted: str) -> str:
    """A folder, if possible with the path of the front's: then one path is right on both nodes."""
    try:
        os.mkdir(wanted, 0o700)
        return wanted
    except OSError:
        return tempfile.mkdtemp(prefix="minidist-output-")


def _say(job: MultiNodeJob, text: str) -> None:
    print(f"minidist.kernel.nodes.agent: {job!r} {text}", file=sys.stderr, flush=True)


async def _run(job: MultiNodeJob, keys: Keys, wait_s: float | None) -> int:
    return await NodeServer(job, keys).run(wait_s)


def main(argv: list[str]) -> int:
    """Be this node of the job; returns the exit status (2: wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="python -m minidist.kernel.nodes.agent", allow_abbrev=False
    )
    parser.add_argument(
        "--wait", type=float, default=JOIN_WITHIN_S, help="seconds in which the kernel must come"
    )
    parser.add_argument(
        "--stay", action="store_true", help="after a kernel wait for the next one, without limit"
    )
    parser.add_argument("command", nargs="*", help="what node 0 runs, such as papermill")
    known = parser.parse_args(argv)
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        return 0  # one agent per node, even if Slurm has started several tasks there
    try:
        job = read_job(os.environ)
        if job is None or job.node == 0:
            if not known.command:
                raise ValueError("on node 0, expected the command to run there after --")
            os.execvp(known.command[0], known.command)
        adopt_orphans()
        # A secret file that this process created stays until the process ends: the next front may
        # have read it already.
        made = keys = Keys(job)
        try:
            code = asyncio.run(_run(job, keys, None if known.stay else known.wait))
            while known.stay and code < 128:
                time.sleep(1.0)  # a front that refused this agent may refuse it again
                keys = Keys(job)
                made = keys if keys.is_ours else made
                code = asyncio.run(_run(job, keys, None))
        finally:
            made.forget()
        return code
    except (ValueError, OSError) as error:
        print(f"minidist.kernel.nodes.agent: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
