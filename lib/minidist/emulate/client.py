"""A rank's side of the connection to the broker. No torch here.

Several threads may use one client: requests carry a number, and the thread that waits first reads
the answers for all threads. An interrupt while waiting keeps the connection usable (the late answer
is dropped) but ends this session on this rank. An interrupt in the middle of a frame closes the
socket.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.errors import MinidistError, MismatchError, ProtocolError
from minidist.processes import frames

# The broker answers within its own deadline; without an answer after this much more, it is gone.
_GRACE_S = 20.0
_JOIN_S = 30.0


class CollectiveError(MinidistError, RuntimeError):
    """A collective on the emulated cluster did not happen; the message names the missing ranks."""


class CollectiveMismatch(MismatchError, RuntimeError):
    """The ranks of a group called different collectives; the message says what each rank called."""


@dataclass
class _Slot:
    answer: tuple[dict[str, Any], np.ndarray] | None = None


class Client:
    """One session of one rank.

    Args:
        sock: connected stream socket to the broker; used by one client at a time.
        rank, world_size: this rank, and how many there are.
    """

    def __init__(self, sock: socket.socket, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.session = -1
        self.charged = False
        self.stream = 0  # the device's stream that this rank is working on
        self._sock = sock
        self._deadline_s = _JOIN_S
        self._slots: dict[int, _Slot] = {}
        # Random, so that a late answer to an earlier client is not taken for an answer to this one.
        self._request = secrets.randbits(62)
        self._state = threading.Condition()
        self._reading = False
        self._sending = threading.RLock()
        self._unusable: str | None = None
        self._computes: list[list[Any]] = []

    # ----------------------------------------------------------------- session

    def join(self) -> None:
        """Enter the session that the broker has begun."""
        if self._sock.fileno() == -1:
            raise CollectiveError(
                "the connection to the broker was closed or broken by an interrupt in an earlier "
                "session; fresh ranks are needed",
                rank=self.rank,
            )
        self._sock.settimeout(60.0)  # for the rest of a frame that has begun to arrive
        answer, _ = self.call({"t": "join"})
        if answer.get("world_size") != self.world_size:
            raise ProtocolError(
                f"world_size is {self.world_size} here, {answer.get('world_size')} at the broker",
                rank=self.rank,
            )
        self.session = int(answer["s"])
        self.charged = bool(answer["charged"])
        self._deadline_s = float(answer["deadline_s"])

    def leave(self) -> None:
        """Tell the broker that this rank leaves, and wait for its answer. Never raises."""
        reason, self._unusable = self._unusable, None
        try:
            if self._sock.fileno() != -1 and self.session >= 0:
                self.call({"t": "leave"})
        except Exception:
            pass  # the broker sees a lost connection instead
        finally:
            self._unusable = reason or "this emulated_world block has ended"

    def charge(self, layer: int, direction: str) -> float:
        """Pay for a layer's forward or backward pass; returns the factor that proves payment."""
        answer, _ = self.call({"t": "charge", "layer": layer, "dir": direction})
        return float(answer["factor"])

    def compute(self, name: str, flops: float, num_bytes: float) -> None:
        """Report this rank's own compute (teaching); it is sent with the next message."""
        with self._sending:
            self._computes.append([name, flops, num_bytes, self.stream])
            if len(self._computes) >= 256:
                self._send_computes()

    # ---------------------------------------------------------------- messages

    def post(self, header: dict[str, Any], payload: memoryview | None = None) -> None:
        """Send a message that has no answer."""
        self._check()
        with self._sending:
            self._send_computes()
            self._send(header, payload)

    def call(self, header: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
        """Send a message and wait for its answer; raises the error if the broker answers one."""
        self._check()
        slot = _Slot()
        with self._state:
            self._request += 1
            request = self._request
            self._slots[request] = slot
        try:
            with self._sending:
                self._send_computes()
                self._send(header | {"q": request}, None)
            what = header["t"] if header["t"] != "fetch" else f"collective {header['key']}"
            self._wait_for(slot, str(what))
        except Exception:
            raise
        except BaseException as error:  # mainly KeyboardInterrupt
            self._unusable = self._unusable or (
                f"interrupted by {type(error).__name__} while it waited for the broker"
            )
            raise
        finally:
            with self._state:
                self._slots.pop(request, None)
        assert slot.answer is not None
        answer, payload = slot.answer
        if "error" in answer:
            kind, text = answer["error"]
            error = CollectiveMismatch if kind == "mismatch" else CollectiveError
            raise error(text, rank=self.rank)
        return answer, payload

    def _check(self) -> None:
        if self._unusable is not None:
            raise CollectiveError(
                f"the emulated cluster cannot be used any more here: {self._unusable}",
                rank=self.rank,
            )

    def _send_computes(self) -> None:
        if self._computes:
            entries, self._computes = self._computes, []
            self._send({"t": "compute", "ev": entries}, None)

    def _send(self, header: dict[str, Any], payload: memoryview | None) -> None:
        size = 0 if payload is None else payload.nbytes
        start = frames.pack(header | {"s": self.session}, size)
        with self._sending:
            try:
                self._sock.sendall(start)
                if payload is not None and size:
                    self._sock.sendall(payload)
            except BaseException as error:
                # Part of a frame may be sent: the broker would take the next bytes for its rest.
                raise self._broken(error, "sending to") from error

    def _wait_for(self, slot: _Slot, what: str) -> None:
        end_s = time.monotonic() + self._deadline_s + _GRACE_S
        while True:
            with self._state:
                while slot.answer is None and self._reading:
                    if not self._state.wait(max(0.0, end_s - time.monotonic())):
                        break
                if slot.answer is not None:
                    return
                if time.monotonic() >= end_s:
                    break
                self._check()
                self._reading = True
            try:
                self._read_frame(end_s, what)
            finally:
                with self._state:
                    self._reading = False
                    self._state.notify_all()
        raise CollectiveError(self._silent(what), rank=self.rank)

    def _silent(self, what: str) -> str:
        return f"the broker has not answered for {self._deadline_s + _GRACE_S:g} s ({what})"

    def _read_frame(self, end_s: float, what: str) -> None:
        # Nothing is read from the socket before the first byte has arrived, so an interrupt here
        # does not break a frame apart.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            left_s = end_s - time.monotonic()
            # Poll in slices, so that this thread handles a signal that a different thread received.
            if poll.poll(int(1000 * min(1.0, max(0.0, left_s)))):
                break
            if left_s <= 0:
                raise CollectiveError(self._silent(what), rank=self.rank)
        try:
            header, payload = frames.read(self._sock, 1 << 40)
        except BaseException as error:
            raise self._broken(error, "receiving from") from error
        with self._state:
            waiting = self._slots.get(header.get("q", -1))
            if waiting is not None:
                waiting.answer = (header, payload)

    def _broken(self, error: BaseException, doing: str) -> BaseException:
        """Close the socket, which may be in the middle of a frame; returns the error to raise."""
        self._unusable = f"its connection broke while {doing} the broker: {error!r}"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()
        if not isinstance(error, Exception):
            return error
        return CollectiveError(f"the emulated cluster is lost: {self._unusable}", rank=self.rank)
