"""The front's server for the job's other nodes: one encrypted tcp port that requires the secret.

Each node has two connections: the *line* for short JSON messages, so that a question never waits
behind a figure, and *data* for the frames of its ranks. A node counts as present while both
connections stand; zmq's heartbeats close a connection whose other end has vanished silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sys
import traceback
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from minidist import __version__
from minidist.kernel.link import MAX_LINE_BYTES, decode
from minidist.kernel.membership import Keys, MultiNodeJob

JOIN_DEADLINE_S = 120.0
PING_EVERY_S = 0.5
# Without a sign of life from the other machine for this long, its connection is closed.
SILENCE_MS = 10_000
MAX_FRAME_BYTES = 64 * 1024 * 1024 + 4096  # a rank's largest frame, encrypted
# Most connections with the right key that are not yet a node: more are an error or an attack.
MAX_GUESTS = 64
LINE, DATA = b"L", b"D"


class Listener(Protocol):
    """Gets the messages and departures of the nodes."""

    def node_says(self, node: int, message: dict[str, Any]) -> None: ...
    def node_sends(self, node: int, frames: list[bytes]) -> None: ...
    def node_left(self, node: int, text: str) -> None: ...


def configure(sock: zmq.Socket[Any], host: str) -> None:
    """Set the options that both ends of a connection need."""
    sock.linger = 500
    sock.maxmsgsize = MAX_FRAME_BYTES
    sock.heartbeat_ivl = 1000
    sock.heartbeat_timeout = SILENCE_MS
    sock.ipv6 = ":" in host


class Hub:
    """Knows which nodes are present, and carries messages to and from them.

    Attributes:
        listener: gets what the nodes send; changed: set when a node has joined.
    """

    def __init__(self, job: MultiNodeJob) -> None:
        self.job = job
        self.listener: Listener | None = None
        self.changed = asyncio.Event()
        self._keys: Keys | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._names = {0: _clean(socket.gethostname())}
        self._nodes: dict[int, bytes] = {}  # node -> the prefix of its two connections' names
        self._parted: dict[int, bytes] = {}  # the same for nodes that have left
        self._numbers: dict[bytes, int] = {}
        self._guests: dict[bytes, dict[bytes, dict[str, Any]]] = {}

    def open(self) -> None:
        """Listen; harmless when called again.

        Raises:
            RuntimeError: the address cannot be bound, or there is no usable secret.
        """
        if self._socket is not None:
            return
        # A separate zmq context: in the notebook's context, our authenticator would also check the
        # keys of Jupyter's encrypted sockets.
        context = zmq.asyncio.Context()
        sock = context.socket(zmq.ROUTER)
        try:
            self._keys = self._keys or Keys(self.job)
            self._authenticator = AsyncioAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=self)
            configure(sock, self.job.host)
            sock.sndhwm = 0
            sock.router_mandatory = True  # sending to a node that has gone is an error
            sock.curve_server = True
            sock.curve_secretkey, sock.curve_publickey = self._keys.front, self._keys.front_public
            sock.bind(self.job.listen_address)
        except (zmq.ZMQError, ValueError, OSError) as error:
            if self._authenticator is not None:
                self._authenticator.stop()
            sock.close(0)
            where = self.job.listen_address
            raise RuntimeError(f"no door for the other nodes at {where}: {error}") from error
        self._context, self._socket = context, sock
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._receive()), loop.create_task(self._ping())]

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may connect; zmq calls this."""
        return self._keys is not None and key == self._keys.node_public

    def close(self) -> None:
        """Tell the nodes that the kernel has ended, and free the port."""
        for task in self._tasks:
            task.cancel()
        if self._keys is not None:
            self._keys.forget()  # first: a node that waits for the next kernel must not find it
        bye = json.dumps({"do": "bye"}).encode()
        for name in {*self._nodes.values(), *self._parted.values()}:
            self._try([name + LINE, bye])  # one connection of a node that has left may still live
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._context is not None:
            self._context.destroy(500)  # sends the last messages before the process may end
            self._context = self._socket = None

    # -- nodes -----------------------------------------------------------------------------------

    async def all_joined(self) -> None:
        """Wait for every node of the job.

        Raises:
            RuntimeError: not all nodes have joined in time; the message says what to do.
        """
        end = asyncio.get_running_loop().time() + JOIN_DEADLINE_S
        while missing := [n for n in range(1, self.job.num_nodes) if n not in self._nodes]:
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                who = ", ".join(map(str, missing))
                raise RuntimeError(
                    f"node {who} of {self.job.num_nodes} did not join within {JOIN_DEADLINE_S:.0f} "
                    "s. Run python -m minidist.kernel.nodes.agent there, with node 0's secret, "
                    f"MINIDIST_NNODES={self.job.num_nodes}, MINIDIST_NODE_RANK={missing[0]} and "
                    f"MINIDIST_ENDPOINT={self.job.host}:{self.job.port}; or set MINIDIST_NNODES=1 "
                    "and restart the kernel to use this node alone"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), left)
            self.changed.clear()

    def name(self, node: int) -> str:
        """A node's name for messages; the host name that the node reported is only displayed."""
        name = self._names.get(node)
        return f"node {node} ({name})" if name else f"node {node}"

    def is_here(self, node: int) -> bool:
        return node in self._nodes

    def tell(self, node: int, message: dict[str, Any]) -> bool:
        """Send on the line; False if the node is not present."""
        return self._post(node, LINE, [json.dumps(message).encode()])

    def send(self, node: int, frames: list[bytes]) -> bool:
        return self._post(node, DATA, frames)

    def _post(self, node: int, kind: bytes, frames: list[bytes]) -> bool:
        name = self._nodes.get(node)
        return name is not None and self._try([name + kind, *frames])

    def _try(self, frames: list[bytes]) -> bool:
        if self._socket is None:
            return False
        sent: Any = self._socket.send_multipart(frames)
        sent.add_done_callback(lambda it: it.cancelled() or it.exception())
        return not (sent.done() and not sent.cancelled() and sent.exception() is not None)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S)
            for node, name in list(self._nodes.items()):
                if not all(self._try([name + kind, b"{}"]) for kind in (LINE, DATA)):
                    self._left(node, "ended, or its connection has broken")
            for name in [g for g, seen in self._guests.items() if self._is_gone(g, seen)]:
                del self._guests[name]

    def _is_gone(self, name: bytes, seen: dict[bytes, dict[str, Any]]) -> bool:
        return not all(self._try([name + kind, b"{}"]) for kind in seen)

    def _left(self, node: int, how: str) -> None:
        name = self._nodes.pop(node, None)
        if name is not None:
            self._parted[node] = name
            self._numbers.pop(name, None)
            if self.listener is not None:
                self.listener.node_left(node, f"{self.name(node)} {how}")

    # -- what comes in ---------------------------------------------------------------------------

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                identity, *frames = await self._socket.recv_multipart()
            except zmq.ZMQError:
                return
            try:
                self._take(identity[:-1], identity[-1:], frames)
            except Exception:  # our own error must not stop the messages of other nodes
                text = traceback.format_exc()
                print(f"minidist.kernel: internal error, please report it\n{text}", file=sys.stderr)

    def _take(self, name: bytes, kind: bytes, frames: list[bytes]) -> None:
        node = self._numbers.get(name)
        if node is None:
            self._guest(name, kind, frames)
        elif kind == DATA and self.listener is not None:
            self.listener.node_sends(node, frames)
        elif kind == LINE and len(frames) == 1 and len(frames[0]) <= MAX_LINE_BYTES:
            message = decode(frames[0])
            if "leaving" in message:
                self._left(node, "was ended")
            elif self.listener is not None:
                self.listener.node_says(node, message)

    def _guest(self, name: bytes, kind: bytes, frames: list[bytes]) -> None:
        """Take the hello of a connection; a node joins after both of its connections said hello."""
        hello = decode(frames[0]) if len(frames) == 1 and len(frames[0]) < 4096 else {}
        node = hello.get("hello")
        if not isinstance(node, int) or kind not in (LINE, DATA):
            return
        if len(self._guests) >= MAX_GUESTS and name not in self._guests:
            return
        seen = self._guests.setdefault(name, {})
        seen[kind] = hello
        if len(seen) < 2:
            return
        del self._guests[name]
        if refused := self._why_not(node, seen):
            self._try([name + LINE, json.dumps({"refused": refused}).encode()])
            return
        self._nodes[node], self._numbers[name] = name, node
        self._parted.pop(node, None)
        self._names[node] = _clean(seen[LINE].get("host"))
        self.tell(node, {"welcome": node})
        self.changed.set()

    def _why_not(self, node: int, seen: dict[bytes, dict[str, Any]]) -> str:
        if not 1 <= node < self.job.num_nodes or any(h.get("hello") != node for h in seen.values()):
            return f"expected a node from 1 to {self.job.num_nodes - 1}, got {node}"
        version = str(seen[LINE].get("version"))[:40]
        if version != __version__:
            return f"node 0 has minidist {__version__}, and node {node} has {version}"
        if node in self._nodes and not self._post(node, LINE, [b"{}"]):
            self._left(node, "ended, or its connection has broken")  # now it has come back
        return f"there is a node {node} already" if node in self._nodes else ""


def _clean(name: Any) -> str:
    return re.sub(r"[^\w.-]", "", name, flags=re.ASCII)[:64] if isinstance(name, str) else ""
