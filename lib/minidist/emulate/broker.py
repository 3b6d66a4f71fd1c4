"""The broker of the emulated cluster: carries every collective's data, records what each rank did.

It runs as one thread of a trusted process and serves one socket per rank. The ranks are not
trusted: whatever they send, the broker neither hangs nor dies. A message that breaks the protocol
becomes a fault of the session, and the fault names the rank.

    broker = Broker(2)
    broker.attach(0, sock_0); broker.attach(1, sock_1)
    broker.begin(plan)            # then let every rank run a block of `emulated_world`
    trace = broker.end()          # once all of them are through
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from minidist.emulate.plan import ChargePlan
from minidist.emulate.session import Session
from minidist.emulate.trace import Trace
from minidist.errors import ProtocolError
from minidist.processes import frames

_BUFFER_BYTES = 1 << 20
# Limit of the replies that a rank has not read; beyond it, the rank's connection is shut down.
_MAX_UNREAD_BYTES = 1 << 30
# Beyond this many unread replies, the broker reads nothing from the rank until it has read some.
_MAX_UNREAD_REPLIES = 1000
_FRAMES_PER_TURN = 64


class _Connection:
    """One rank's socket, with the bytes that are being received and sent."""

    def __init__(self, rank: int, sock: socket.socket, max_payload_bytes: int) -> None:
        self.rank = rank
        self.sock = sock
        self.reader = frames.FrameReader(max_payload_bytes)
        self.outgoing: deque[memoryview] = deque()
        self.unread_bytes = 0
        self.mask = selectors.EVENT_READ  # events that the socket is registered for


class Broker:
    """Serves `world_size` ranks, session after session.

    Args:
        world_size: number of ranks.
        keep_payloads: keep the sent data and the results in `Trace.collectives`.
        deadline_s: seconds that a rank may wait for other ranks in one collective.
        max_payload_bytes: largest payload of one collective on one rank.
        max_session_bytes: most that the ranks may send in one session, all together.
        max_session_events: most charges, calls and waits of one rank in one session.
    """

    def __init__(
        self,
        world_size: int,
        *,
        keep_payloads: bool = False,
        deadline_s: float = 30.0,
        max_payload_bytes: int = frames.MAX_PAYLOAD_BYTES,
        max_session_bytes: int = 1 << 32,
        max_session_events: int = 1_000_000,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"Broker: world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.deadline_s = deadline_s
        self._keep_payloads = keep_payloads
        self._max_payload_bytes = max_payload_bytes
        self._max_session_bytes = max_session_bytes
        self._max_session_events = max_session_events
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._sessions = 0
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._selector.register(self._wake_receive, selectors.EVENT_READ, None)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="broker", daemon=True)
        self._thread.start()

    # --------------------------------------------------- for the trusted caller

    def attach(self, rank: int, sock: socket.socket) -> None:
        """Serve a connected stream socket for that rank; it replaces the rank's previous socket."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"attach: rank {rank} is not in 0 to {self.world_size - 1}")
        with self._lock:
            self.detach(rank)
            sock.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
            connection = _Connection(rank, sock, self._max_payload_bytes)
            self._connections[rank] = connection
            self._selector.register(sock, connection.mask, connection)
        self._wake()

    def detach(self, rank: int) -> None:
        """Close a rank's socket, if there is one; this is not a fault."""
        with self._lock:
            connection = self._connections.get(rank)
            if connection is not None:
                self._drop(connection)

    def attached(self) -> list[int]:
        """Ranks that have a working connection."""
        with self._lock:
            return sorted(self._connections)

    def begin(self, plan: ChargePlan | None = None) -> None:
        """Start a session with an empty trace; ranks that wait in the previous one get an error."""
        with self._lock:
            self._abort("a new session has begun")
            self._sessions += 1
            self._session = Session(
                self._sessions,
                self.world_size,
                plan,
                self._reply,
                keep_payloads=self._keep_payloads,
                deadline_s=self.deadline_s,
                max_bytes=self._max_session_bytes,
                max_events=self._max_session_events,
            )
        self._wake()

    def end(self) -> Trace:
        """Finish the session and return what happened in it.

        Call it when the ranks have left their `emulated_world` blocks; a rank that has not left
        gets an error from its next collective.
        """
        with self._lock:
            session = self._session
            if session is None:
                raise ValueError("end: no session has begun")
            trace = session.trace()
            self._abort("the session has ended")
            return trace

    @property
    def faults(self) -> list[str]:
        """What has gone wrong so far in the running session."""
        with self._lock:
            return [] if self._session is None else list(self._session.faults)

    def close(self) -> None:
        """Stop serving and close every socket. Harmless when called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake()
        self._thread.join(10)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------- the serving thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_send.send(b"x")

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    break
                timeout_s = self._check_deadline()
            for key, events in self._selector.select(timeout_s):
                connection = key.data
                if connection is None:
                    with contextlib.suppress(OSError):
                        self._wake_receive.recv(4096)
                    continue
                with self._lock:
                    # It may have been replaced since select() returned.
                    if self._connections.get(connection.rank) is not connection:
                        continue
                    if events & selectors.EVENT_READ:
                        self._receive(connection)
                    if events & selectors.EVENT_WRITE:
                        self._send(connection)
        with self._lock:
            self._abort("the broker has closed")
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._wake_receive.close()
            self._wake_send.close()

    def _check_deadline(self) -> float | None:
        """Seconds until the next deadline of the session, None if no rank waits."""
        if self._session is None:
            return None
        try:
            return self._session.check_deadline(time.monotonic())
        except Exception as error:  # our own error must not end the thread
            self._session.fail("lost", f"the deadline could not be checked: {error!r}")
            return None

    def _receive(self, connection: _Connection) -> None:
        # A rank that sends without pause must not keep the others from being served.
        for _ in range(_FRAMES_PER_TURN):
            try:
                count = connection.sock.recv_into(connection.reader.buffer())
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lost(connection, f"its connection broke: {error}")
                return
            if count == 0:
                inside = "" if connection.reader.idle else " in the middle of a frame"
                self._lost(connection, f"it closed its connection{inside}")
                return
            try:
                frame = connection.reader.advance(count)
                if frame is not None:
                    self._handle(connection.rank, *frame)
            except ProtocolError as error:
                self._lost(connection, f"it broke the protocol: {error}", always=True)
                return
            except Exception as error:  # our own error, caused by a rank, must not end the thread
                self._lost(connection, f"its frame could not be handled: {error!r}", always=True)
                return
            if self._connections.get(connection.rank) is not connection:
                return

    def _handle(self, rank: int, header: dict[str, Any], payload: np.ndarray) -> None:
        session = self._session
        kind, request = header.get("t"), header.get("q")
        if session is not None and (kind == "join" or header.get("s") == session.number):
            session.handle(rank, header, payload)
            return
        # A late frame of an earlier session is dropped, but a request is answered with an error.
        if type(request) is int and 0 <= request <= 1 << 64:
            text = "no session has begun" if kind == "join" else "this session has ended"
            self._reply(rank, {"q": request, "error": ["ended", text]}, None)

    def _reply(self, rank: int, header: dict[str, Any], payload: np.ndarray | None) -> None:
        connection = self._connections.get(rank)
        if connection is None:
            return
        size = 0 if payload is None else payload.nbytes
        start = frames.pack(header, size)
        connection.outgoing.append(memoryview(start))
        if payload is not None and size:
            connection.outgoing.append(frames.view_of(np.ascontiguousarray(payload)))
        connection.unread_bytes += len(start) + size
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        outgoing = connection.outgoing
        try:
            while outgoing:
                count = connection.sock.send(outgoing[0])
                connection.unread_bytes -= count
                if count == len(outgoing[0]):
                    outgoing.popleft()
                else:
                    outgoing[0] = outgoing[0][count:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # The next read reports the error. A fault reported here could come in the middle of
            # handling a different fault.
            outgoing.clear()
        if connection.unread_bytes > _MAX_UNREAD_BYTES:
            outgoing.clear()
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        mask = selectors.EVENT_WRITE if outgoing else 0
        mask |= selectors.EVENT_READ if len(outgoing) <= _MAX_UNREAD_REPLIES else 0
        if mask != connection.mask:
            connection.mask = mask
            with contextlib.suppress(KeyError, ValueError):
                self._selector.modify(connection.sock, mask, connection)

    def _lost(self, connection: _Connection, what: str, *, always: bool = False) -> None:
        """Drop an unusable connection; a fault if `always`, or if the rank has not left yet."""
        self._drop(connection)
        session, rank = self._session, connection.rank
        if session is not None and (always or rank not in session.left):
            session.fail("lost", f"rank {rank} is lost: {what}")

    def _drop(self, connection: _Connection) -> None:
        if self._connections.get(connection.rank) is connection:
            del self._connections[connection.rank]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _abort(self, why: str) -> None:
        if self._session is not None:
            self._session.close(why)
            self._session = None
