"""One generation of ranks as the front sees it: their sockets, their launcher, their deaths."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import os
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict
from typing import Any

import zmq
import zmq.asyncio

from minidist.kernel.launcher_process import LauncherProcess
from minidist.kernel.link import LINK_NAME, MAX_LINE_BYTES, decode, encode, socket_name, token
from minidist.kernel.membership import Share
from minidist.kernel.options import KernelOptions
from minidist.kernel.outputs import label
from minidist.processes.tree import (
    allow_more_files,
    count_open_files,
    descendants,
    describe_exit,
    reap,
)

START_DEADLINE_S = 60.0
# Many nodes that read torch from one file system at once take longer.
NODES_START_DEADLINE_S = 180.0
# A closed link shows that a rank has ended. Only the launcher says how, and on a busy machine that
# may take this long.
LAST_WORD_S = 10.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Messages of a rank that may wait in the front; further messages wait in the rank. zmq counts
# messages, not bytes: its default of 1000 could take 60 GiB of the front's memory.
MAX_WAITING = {"iopub": 16, "shell": 4, "control": 4, "stdin": 4}
MAX_NAMELESS = 32  # links whose other end has not yet said who it is
# zmq ends the whole process if it cannot accept a connection. So the ranks are ended before that.
MAX_FILES, FILES_PER_RANK = 512, 32
CHANNELS = {"shell": zmq.DEALER, "control": zmq.DEALER, "stdin": zmq.DEALER, "iopub": zmq.PULL}

_CROWDED = "the ranks were ended: their processes had opened hundreds of connections to the kernel"


class Ranks:
    """Starts ranks and carries messages to and from them; one launcher serves many generations.

    `on_message(channel, rank, frames)` is called for each message from a rank; if it returns an
    awaitable, the next message is read after that. `on_lost(rank or None, text)` is called once per
    generation, when a rank or the launcher has ended. If there are several nodes, these are this
    node's ranks.
    """

    def __init__(
        self,
        *,
        context: zmq.asyncio.Context,
        options: KernelOptions,
        key: bytes,
        signature_scheme: str,
        run_dir: str,
        output_dir: str | None,
        on_message: Callable[[str, int, list[bytes]], Awaitable[Any] | None],
        on_lost: Callable[[int | None, str], None],
    ) -> None:
        self.count = 0  # on all nodes
        self.generation = -1
        self._here = range(0)  # the ranks of this node
        self._deadline_s = START_DEADLINE_S
        self.ready: set[int] = set()
        self.pids: dict[int, int] = {}  # as the rank says; for display only, never signalled
        self._options, self._key, self._scheme = options, key, signature_scheme
        self._context, self._run_dir, self._output_dir = context, run_dir, output_dir
        self._on_message, self._on_lost = on_message, on_lost
        self._sockets: dict[tuple[str, int], zmq.asyncio.Socket] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._watcher: asyncio.Task[None] | None = None
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._answers: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._next_id = 0
        self._launcher = LauncherProcess(options)
        self._start_error = ""
        self._changed = asyncio.Event()
        self._closed = False
        self._running = False  # whether the present generation is started, and not lost or stopped
        self._nameless = 0
        self._server: asyncio.Server | None = None

    # -- start -----------------------------------------------------------------------------------

    @property
    def _awaited(self) -> Collection[int]:
        """The ranks that must be ready before a cell can run."""
        return self._here

    def _complete(self) -> bool:
        return len(self.ready) == len(self._awaited)

    async def start(self, count: int, generation: int, share: Share | None = None) -> None:
        """Bind sockets, start the launcher if there is none, let it start ranks, wait for them all.

        Args:
            share: this node's part of the `count` ranks, if there are several nodes.

        Raises:
            RuntimeError: not all ranks were ready in time; the message says what is missing.
        """
        self.count, self.generation = count, generation
        self._here = range(count) if share is None else share.ranks
        self.ready, self.pids, self._start_error = set(), {}, ""
        self._running = True
        self._deadline_s = START_DEADLINE_S if share is None else NODES_START_DEADLINE_S
        end = asyncio.get_running_loop().time() + self._deadline_s
        try:
            self._bind()
            if not self._launcher.started:
                await self._open_link()
                await self._spawn()
                self._watcher = asyncio.create_task(self._watch_launcher())
            await self._until(lambda: "launcher" in self._writers, end)
            order = {"do": "start", "ranks": len(self._here), "generation": generation}
            self._send_link("launcher", order | ({"share": asdict(share)} if share else {}))
            await self._until(self._complete, end)
            self._unlink()
        except BaseException:
            self.close()
            raise

    async def _until(self, reached: Callable[[], bool], end: float) -> None:
        while not reached():
            left = end - asyncio.get_running_loop().time()
            if self._start_error or self._launcher.exit() or left <= 0:
                await asyncio.sleep(0.3)  # let the last words on stderr arrive
                raise RuntimeError(self._why_not_ready(left <= 0))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, 0.1))
            self._changed.clear()

    def _bind(self) -> None:
        """Bind all sockets; raises RuntimeError if one of them cannot be bound."""
        try:
            self._bind_all()
        except zmq.ZMQError as error:  # not an OSError
            raise RuntimeError(
                f"The sockets of {len(self._here)} ranks cannot be made in {self._run_dir}: {error}"
            ) from None

    def _bind_all(self) -> None:
        # In a directory that the caller chose, the mode of the directory protects the sockets: a
        # sandbox may run as a different user, who must be able to write to them.
        shared = self._options.run_dir is not None
        if not shared:  # somebody may have cleaned /tmp
            with contextlib.suppress(OSError):
                os.mkdir(self._run_dir, 0o700)
        for rank in self._here:
            for channel, kind in CHANNELS.items():
                sock = self._context.socket(kind)
                sock.linger = 0
                sock.sndhwm = 0
                sock.rcvhwm = MAX_WAITING[channel]
                sock.maxmsgsize = MAX_MESSAGE_BYTES
                if kind == zmq.DEALER:
                    sock.routing_id = b"front"  # the same on shell and stdin: input() needs it
                path = f"{self._run_dir}/{socket_name(self.generation, channel, rank)}"
                sock.bind(f"ipc://{path}")
                if shared:
                    os.chmod(path, 0o666)
                self._sockets[channel, rank] = sock
                if channel != "control" or rank == 0:
                    self._readers.append(asyncio.create_task(self._read(channel, rank, sock)))

    def has_link(self) -> bool:
        """Whether the link's socket file, which new ranks need, is still there.

        Somebody may have cleaned its folder away.
        """
        return os.path.exists(f"{self._run_dir}/{LINK_NAME}")

    async def _open_link(self) -> None:
        path = f"{self._run_dir}/{LINK_NAME}"
        with contextlib.suppress(OSError):
            os.unlink(path)
        if self._options.run_dir is not None:
            allow_more_files()
        self._server = await asyncio.start_unix_server(self._serve_link, path, limit=MAX_LINE_BYTES)
        if self._options.run_dir is not None:
            os.chmod(path, 0o666)

    async def _spawn(self) -> None:
        options = self._options
        await self._launcher.start(
            {
                "run_dir": self._run_dir,
                "remove": [] if options.run_dir else [self._run_dir, self._output_dir],
                "output_dir": self._output_dir,
                "key": base64.b64encode(self._key).decode(),
                "signature_scheme": self._scheme,
                "ranks": len(self._here),
                "rank_init": options.rank_init,
            }
        )

    def _why_not_ready(self, late: bool) -> str:
        if self._start_error:
            return self._start_error
        missing = sorted(set(self._awaited) - self.ready)
        what = f"{label(missing)} of {self.count}"
        if how := self._launcher.exit():
            text = f"the launcher ended with {how}"
        elif "launcher" not in self._writers:
            text = f"the launcher did not connect to {self._run_dir}/{LINK_NAME}"
        else:
            text = "the launcher is running"
        after = f" within {self._deadline_s:.0f} s" if late else ""
        tail = self._launcher.tail()
        return f"{what} did not start{after}: {text}" + (f"\nIts output:\n{tail}" if tail else "")

    # -- messages --------------------------------------------------------------------------------

    async def _read(self, channel: str, rank: int, sock: zmq.asyncio.Socket) -> None:
        while True:
            try:
                frames = await sock.recv_multipart()
            except zmq.ZMQError:
                return
            if self._running and (work := self._on_message(channel, rank, frames)) is not None:
                await work

    def send(self, channel: str, rank: int, frames: list[bytes]) -> None:
        if self._running:
            self._sockets[channel, rank].send_multipart(frames)

    # -- the line to launcher and companions -----------------------------------------------------

    async def _serve_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = ""
        self._nameless += 1
        try:
            if self._nameless > MAX_NAMELESS:
                return
            hello = decode(await asyncio.wait_for(reader.readline(), 10))
            name = str(hello.get("hello"))
            known = {"launcher", *map(str, self._here)}
            generation = 0 if name == "launcher" else self.generation
            proof = token(self._key, name, generation)
            genuine = hmac.compare_digest(str(hello.get("token")).encode(), proof.encode())
            if name not in known or name in self._writers or not genuine or self._closed:
                return
            who = name
            self._nameless -= 1
            self._writers[who] = writer
            self._changed.set()
            while line := await reader.readline():
                self._link_message(who, decode(line))
                await asyncio.sleep(0)  # reading lines that are here already lets no other task run
        except (OSError, ValueError, TimeoutError, asyncio.CancelledError):
            pass  # ValueError: a line beyond the limit; cancelled: the front itself ends
        finally:
            writer.close()
            self._nameless -= not who
            if who and self._writers.get(who) is writer:
                del self._writers[who]
                self._changed.set()
                if who != "launcher" and self._running and self._complete():
                    task = asyncio.get_running_loop().create_task(self._link_lost(int(who)))
                    self._readers.append(task)

    def _link_message(self, who: str, message: dict[str, Any]) -> None:
        if self._is_answer({who}, message):
            pass
        elif who == "launcher":
            pid, code = message.get("exit"), message.get("code")
            if isinstance(pid, int) and message.get("generation") == self.generation:
                is_agent = message.get("agent") is True
                self._exited(pid, code if isinstance(code, int) else None, is_agent)
        elif isinstance(message.get("pid"), int):
            self.pids[int(who)] = message["pid"]
        elif message.get("ready") is True:
            self.ready.add(int(who))
        elif "init_error" in message:
            text = str(message["init_error"])[-8000:]
            self._start_error = f"[rank {who}] failed while starting:\n{text}"
        self._changed.set()

    def _is_answer(self, who: Collection[str], message: dict[str, Any]) -> bool:
        """Whether the message answers an open question; the task that waits for it then gets it.

        The answer counts only if the question was put to one of `who`.
        """
        identifier = message.get("id")
        if not isinstance(identifier, int) or identifier not in self._answers:
            return False
        asked, future = self._answers[identifier]
        if asked in who and not future.done():
            future.set_result(message)
        return True

    def _send_link(self, who: str, message: dict[str, Any]) -> bool:
        writer = self._writers.get(who)
        if writer is None or writer.is_closing():
            return False
        writer.write(encode(message))
        return True

    async def ask(self, rank: int, do: str, timeout_s: float = 0.5) -> dict[str, Any] | None:
        """A companion thread's answer; None if it gave none in time."""
        return await self._ask(str(rank), do, timeout_s)

    async def _ask(self, who: str, do: str, timeout_s: float) -> dict[str, Any] | None:
        self._next_id += 1
        identifier = self._next_id
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[identifier] = who, future
        try:
            if not self._send_link(who, {"id": identifier, "do": do}):
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

    def _exited(self, pid: int, code: int | None, is_agent: bool) -> None:
        """The launcher says that a process of this generation has ended."""
        how = "ended" if code is None else f"ended with {describe_exit(code)}"
        rank = next((r for r in self._here if self.pids.get(r) == pid), None)
        if not self._running:
            return
        if self._complete():
            if rank is not None:
                self._tell_lost(rank, f"rank {rank} {how}")
        else:  # the agent, or a rank: either way this start has failed
            unknown = "torch's agent" if is_agent else "a rank"
            who = unknown if rank is None else f"rank {rank}"
            text = f"{who} {how} before all ranks were ready.\n{self._launcher.tail()}"
            self._start_error = self._start_error or text

    async def _link_lost(self, rank: int) -> None:
        """A rank's link was closed, so the rank has ended; the launcher may still say how."""
        # The launcher's report ends the generation, and this task with it.
        await asyncio.sleep(LAST_WORD_S)
        self._tell_lost(rank, f"rank {rank} ended")

    async def _watch_launcher(self) -> None:
        while (how := self._launcher.exit()) is None:
            await asyncio.sleep(0.1)
            reap([p for p in descendants_to_reap() if p != self._launcher.pid])
            if count_open_files() > MAX_FILES + FILES_PER_RANK * len(self._here):
                self._launcher.end()
                self._start_error = f"{_CROWDED} while the ranks started"
                self._tell_lost(None, _CROWDED)
                return
        await asyncio.sleep(0.3)  # if a rank's end was the cause, report that first
        self._tell_lost(None, f"the launcher of the ranks ended with {how}")

    def _tell_lost(self, rank: int | None, text: str) -> None:
        if self._running and self._complete():
            self._running = False
            self._on_lost(rank, text)

    def node_of(self, rank: int) -> str:
        """The name of the node that the rank runs on; empty if there is only this node."""
        return ""

    def alive(self, rank: int) -> bool:
        writer = self._writers.get(str(rank))
        return self._running and writer is not None and not writer.is_closing()

    async def stop(self) -> bool:
        """End the ranks; returns whether the launcher confirmed it and can start fresh ranks."""
        self._unbind()
        if self._closed or self._launcher.exit():
            return False
        answer = await self._ask("launcher", "stop", 5.0)
        return answer is not None and answer.get("stopped") is True

    def _unbind(self) -> None:
        """Close sockets, readers and links of the present generation."""
        self._running = False
        for task in self._readers:
            task.cancel()
        self._readers.clear()
        self._unlink()
        for sock in self._sockets.values():
            sock.close(0)
        self._sockets.clear()
        for who in [who for who in self._writers if who != "launcher"]:
            self._writers.pop(who).close()

    def _unlink(self) -> None:
        """Remove the sockets' files, so that no process that is not connected yet can connect."""
        for channel, rank in self._sockets:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._run_dir}/{socket_name(self.generation, channel, rank)}")

    def close(self) -> None:
        """End launcher and ranks now and free their sockets; harmless when called again."""
        if self._closed:
            return
        self._closed = True
        self._unbind()
        if self._server is not None:
            self._server.close()
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            self._watcher.cancel()
        self._launcher.end()
        for writer in self._writers.values():
            writer.close()
        with contextlib.suppress(OSError):
            os.unlink(f"{self._run_dir}/{LINK_NAME}")


def descendants_to_reap() -> list[int]:
    """Direct children of this process, adopted orphans included; `reap` takes those that ended."""
    try:
        text = open(f"/proc/self/task/{os.getpid()}/children").read()  # noqa: SIM115
    except OSError:
        return descendants(os.getpid())
    return [int(pid) for pid in text.split()]
