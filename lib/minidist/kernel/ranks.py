"""One generation of ranks as the front sees it: their sockets, their launcher, their deaths."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from minidist.kernel.options import Options
from minidist.kernel.outputs import label
from minidist.kernel.process import descendants, describe_exit, kill_descendants, reap
from minidist.kernel.wire import LINK_NAME, MAX_LINE_BYTES, decode, encode, socket_name, token

START_DEADLINE_S = 60.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNELS = {"shell": zmq.DEALER, "control": zmq.DEALER, "stdin": zmq.DEALER, "iopub": zmq.PULL}
_STDERR_TAIL_BYTES = 8000


class Ranks:
    """Starts `count` ranks and carries messages to and from them.

    `on_message(channel, rank, frames)` is called for each message from a rank, and
    `on_lost(rank or None, text)` once, when a rank or the launcher has ended.
    """

    def __init__(
        self,
        *,
        context: zmq.asyncio.Context,
        options: Options,
        key: bytes,
        signature_scheme: str,
        run_dir: str,
        count: int,
        generation: int,
        on_message: Callable[[str, int, list[bytes]], None],
        on_lost: Callable[[int | None, str], None],
    ) -> None:
        self.count = count
        self.generation = generation
        self.ready: set[int] = set()
        self.pids: dict[int, int] = {}  # as the rank says; for display only, never signalled
        self._options, self._key, self._scheme = options, key, signature_scheme
        self._context, self._run_dir = context, run_dir
        self._on_message, self._on_lost = on_message, on_lost
        self._sockets: dict[tuple[str, int], zmq.asyncio.Socket] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = bytearray()
        self._exits: dict[int, int] = {}
        self._start_error = ""
        self._changed = asyncio.Event()
        self._closed = False
        self._lost = False
        self._server: asyncio.Server | None = None

    # -- start -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind, start the launcher, wait for every rank.

        Raises:
            RuntimeError: not all ranks were ready in time; the message says what is missing.
        """
        try:
            await self._bind()
            self._spawn()
            end = asyncio.get_running_loop().time() + START_DEADLINE_S
            while len(self.ready) < self.count:
                left = end - asyncio.get_running_loop().time()
                if self._start_error or self._ended() or left <= 0:
                    await asyncio.sleep(0.3)  # let the last words on stderr arrive
                    raise RuntimeError(self._why_not_ready(left <= 0))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, 0.1))
                self._changed.clear()
        except BaseException:
            self.close()
            raise
        self._send_link("launcher", {"do": "watch"})
        self._tasks.append(asyncio.create_task(self._watch_launcher()))

    async def _bind(self) -> None:
        # In a directory that the caller chose, its mode is the guard: a sandbox may run as
        # another user, who must be able to write to the sockets.
        shared = self._options.run_dir is not None
        for rank in range(self.count):
            for channel, kind in CHANNELS.items():
                sock = self._context.socket(kind)
                sock.linger = 0
                sock.sndhwm = 0
                sock.maxmsgsize = MAX_MESSAGE_BYTES
                if kind == zmq.DEALER:
                    sock.routing_id = b"front"  # one name on shell and stdin: input() needs it
                path = f"{self._run_dir}/{socket_name(self.generation, channel, rank)}"
                sock.bind(f"ipc://{path}")
                if shared:
                    os.chmod(path, 0o666)
                self._sockets[channel, rank] = sock
                if channel != "control" or rank == 0:
                    self._tasks.append(asyncio.create_task(self._read(channel, rank, sock)))
        path = f"{self._run_dir}/{LINK_NAME}"
        with contextlib.suppress(OSError):
            os.unlink(path)
        self._server = await asyncio.start_unix_server(self._serve_link, path, limit=MAX_LINE_BYTES)
        if shared:
            os.chmod(path, 0o666)

    def _spawn(self) -> None:
        options = self._options
        command = [*options.prefix, sys.executable, "-m", "minidist.kernel.launcher"]
        config = {
            "run_dir": self._run_dir,
            "remove_run_dir": options.run_dir is None,
            "key": base64.b64encode(self._key).decode(),
            "signature_scheme": self._scheme,
            "ranks": self.count,
            "generation": self.generation,
            "rank_init": options.rank_init,
        }
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=options.env,
                cwd=options.cwd if not options.prefix else None,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"the ranks' launcher could not be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(config).encode() + b"\n")
            self._process.stdin.close()
        fd = self._process.stdout.fileno()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._drain, fd)

    def _drain(self, fd: int) -> None:
        """Keep the end of what launcher and ranks write past Jupyter; it explains failed starts."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
        self._stderr += data
        del self._stderr[:-_STDERR_TAIL_BYTES]

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _why_not_ready(self, late: bool) -> str:
        if self._start_error:
            return self._start_error
        missing = sorted(set(range(self.count)) - self.ready)
        what = f"{label(missing)} of {self.count}"
        if self._process is not None and self._process.returncode is not None:
            text = f"the launcher ended with {describe_exit(self._process.returncode)}"
        elif "launcher" not in self._writers:
            text = f"the launcher did not connect to {self._run_dir}/{LINK_NAME}"
        else:
            text = "the launcher is running"
        after = f" within {START_DEADLINE_S:.0f} s" if late else ""
        tail = self.stderr_tail()
        return f"{what} did not start{after}: {text}" + (f"\nIts output:\n{tail}" if tail else "")

    def stderr_tail(self) -> str:
        return self._stderr.decode(errors="replace").strip()[-4000:]

    # -- messages --------------------------------------------------------------------------------

    async def _read(self, channel: str, rank: int, sock: zmq.asyncio.Socket) -> None:
        while True:
            try:
                frames = await sock.recv_multipart()
            except zmq.ZMQError:
                return
            if not self._closed:
                self._on_message(channel, rank, frames)

    def send(self, channel: str, rank: int, frames: list[bytes]) -> None:
        if not self._closed:
            self._sockets[channel, rank].send_multipart(frames)

    # -- the line to launcher and companions -----------------------------------------------------

    async def _serve_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = ""
        try:
            hello = decode(await asyncio.wait_for(reader.readline(), 10))
            name = str(hello.get("hello"))
            known = {"launcher", *map(str, range(self.count))}
            proof = token(self._key, name, self.generation)
            genuine = hmac.compare_digest(str(hello.get("token")).encode(), proof.encode())
            if name not in known or name in self._writers or not genuine or self._closed:
                return
            who = name
            self._writers[who] = writer
            while line := await reader.readline():
                self._link_message(who, decode(line))
        except (OSError, ValueError, TimeoutError, asyncio.CancelledError):
            pass  # ValueError: a line beyond the limit; cancelled: the front itself ends
        finally:
            writer.close()
            if who and not self._closed:
                self._changed.set()
                asyncio.get_running_loop().create_task(self._link_lost(who))

    def _link_message(self, who: str, message: dict[str, Any]) -> None:
        identifier = message.get("id")
        if isinstance(identifier, int) and (future := self._answers.pop(identifier, None)):
            if not future.done():
                future.set_result(message)
        elif who == "launcher":
            pid, code = message.get("exit"), message.get("code")
            if isinstance(pid, int) and isinstance(code, int):
                self._exits[pid] = code
            elif "failed" in message and len(self.ready) < self.count:
                self._start_error = self._start_error or (
                    f"the launcher failed: {str(message['failed'])[:4000]}\n{self.stderr_tail()}"
                )
        elif isinstance(message.get("pid"), int):
            self.pids[int(who)] = message["pid"]
        elif message.get("ready") is True:
            self.ready.add(int(who))
        elif "init_error" in message:
            text = str(message["init_error"])[-8000:]
            self._start_error = f"[rank {who}] failed while starting:\n{text}"
        self._changed.set()

    def _send_link(self, who: str, message: dict[str, Any]) -> bool:
        writer = self._writers.get(who)
        if writer is None or writer.is_closing():
            return False
        writer.write(encode(message))
        return True

    async def ask(self, rank: int, do: str, timeout_s: float = 0.5) -> dict[str, Any] | None:
        """A companion thread's answer; None when it gave none in time."""
        self._next_id += 1
        identifier = self._next_id
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[identifier] = future
        try:
            if not self._send_link(str(rank), {"id": identifier, "do": do}):
                return None
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return None
        finally:
            self._answers.pop(identifier, None)

    async def ask_all(
        self, ranks: list[int], do: str, timeout_s: float = 0.5
    ) -> dict[int, dict[str, Any] | None]:
        answers = await asyncio.gather(*(self.ask(rank, do, timeout_s) for rank in ranks))
        return dict(zip(ranks, answers, strict=True))

    # -- ends ------------------------------------------------------------------------------------

    async def _link_lost(self, who: str) -> None:
        """A line was closed, so its process has ended (or is about to)."""
        if who == "launcher" or len(self.ready) < self.count:
            return  # the watcher, or start(), sees to it
        for _ in range(20):  # the launcher's report comes within milliseconds
            code = self._exits.get(self.pids.get(int(who), -1))
            if code is not None or self._closed:
                break
            await asyncio.sleep(0.05)
        else:
            code = None
        how = "ended" if code is None else f"ended with {describe_exit(code)}"
        self._tell_lost(int(who), f"rank {who} {how}")

    async def _watch_launcher(self) -> None:
        process = self._process
        while process is not None and process.poll() is None:
            await asyncio.sleep(0.1)
            reap([p for p in descendants_to_reap() if p != process.pid])
        if process is not None:
            await asyncio.sleep(0.3)  # a rank's own end, if that was the cause, comes first
            how = describe_exit(process.returncode)
            self._tell_lost(None, f"the launcher of the ranks ended with {how}")

    def _tell_lost(self, rank: int | None, text: str) -> None:
        if not self._closed and not self._lost:
            self._lost = True
            self._on_lost(rank, text)

    def alive(self, rank: int) -> bool:
        writer = self._writers.get(str(rank))
        return not self._closed and writer is not None and not writer.is_closing()

    def close(self) -> None:
        """End launcher and ranks now and free their sockets; harmless when called again."""
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
            kill_descendants(os.getpid())
            if process.stdout is not None:
                with contextlib.suppress(Exception):
                    asyncio.get_running_loop().remove_reader(process.stdout.fileno())
                process.stdout.close()
        for writer in self._writers.values():
            writer.close()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for (channel, rank), sock in self._sockets.items():
            sock.close(0)
            with contextlib.suppress(OSError):
                os.unlink(f"{self._run_dir}/{socket_name(self.generation, channel, rank)}")
        with contextlib.suppress(OSError):
            os.unlink(f"{self._run_dir}/{LINK_NAME}")


def descendants_to_reap() -> list[int]:
    """Direct children of this process that have ended: orphans that it had adopted."""
    try:
        text = open(f"/proc/self/task/{os.getpid()}/children").read()  # noqa: SIM115
    except OSError:
        return descendants(os.getpid())
    return [int(pid) for pid in text.split()]
