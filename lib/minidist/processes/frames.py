"""Frames between processes: magic, two lengths, a JSON header, raw bytes.

The reader does not trust the writer: it checks lengths before it allocates anything, and it never
unpickles.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, cast

import numpy as np

from minidist.errors import ProtocolError

MAGIC = b"mdf1"
PREFIX = struct.Struct(">4sIQ")
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 28


def pack(header: dict[str, Any], payload_bytes: int = 0) -> bytes:
    """The start of a frame; `payload_bytes` raw bytes have to follow it.

    Raises:
        ProtocolError: the header is larger than readers accept.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(text)} bytes, allowed are {MAX_HEADER_BYTES}")
    return PREFIX.pack(MAGIC, len(text), payload_bytes) + text


def read(
    sock: socket.socket, max_payload_bytes: int = MAX_PAYLOAD_BYTES, *, nan: bool = False
) -> tuple[dict[str, Any], np.ndarray]:
    """Waits for one frame; returns header and payload.

    Args:
        nan: whether numbers of the header may be nan and infinite.

    Raises:
        ProtocolError: the bytes are not a frame.
        OSError: the connection is lost, or the socket's timeout is over.
    """
    start = view_of(_exactly(sock, PREFIX.size))
    header_bytes, payload_bytes = unpack_prefix(start, max_payload_bytes)
    header = unpack_header(view_of(_exactly(sock, header_bytes)), nan=nan)
    return header, _exactly(sock, payload_bytes)


def _exactly(sock: socket.socket, count: int) -> np.ndarray:
    """The next bytes in one buffer, even if they arrive in many small pieces."""
    data = np.empty(count, dtype=np.uint8)
    view, filled = view_of(data), 0
    while filled < count:
        got = sock.recv_into(view[filled:])
        if got == 0:
            raise ConnectionError("the peer has closed the connection")
        filled += got
    return data


def view_of(array: np.ndarray) -> memoryview:
    """An array's bytes, to be read or filled; the array has to be contiguous."""
    return memoryview(cast(Any, array)).cast("B") if array.size else memoryview(b"")


def unpack_prefix(
    data: bytes | bytearray | memoryview, max_payload_bytes: int = MAX_PAYLOAD_BYTES
) -> tuple[int, int]:
    """Lengths of header and payload; ProtocolError if the magic is wrong or a length too large."""
    magic, header_bytes, payload_bytes = PREFIX.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(f"a frame has to start with {MAGIC!r}, got {bytes(magic)!r}")
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {header_bytes} bytes, allowed are 2 to {MAX_HEADER_BYTES}")
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(f"payload of {payload_bytes} bytes, allowed are {max_payload_bytes}")
    return header_bytes, payload_bytes


def unpack_header(data: bytes | bytearray | memoryview, *, nan: bool = False) -> dict[str, Any]:
    """The header as a dictionary; ProtocolError if it is anything else."""
    try:
        header = json.loads(bytes(data), parse_constant=None if nan else _no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError(f"the header must be a JSON object, got {type(header).__name__}")
    return header


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


class FrameReader:
    """Assembles frames from bytes as they arrive; never blocks.

    `buffer()` is the space for the next bytes. Call `advance(n)` after n bytes have arrived; it
    returns a frame if the frame is complete.
    """

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._reset()

    def _reset(self) -> None:
        self._stage = 0  # 0 prefix, 1 header, 2 payload
        self._view = memoryview(bytearray(PREFIX.size))
        self._filled = 0
        self._payload_bytes = 0
        self._header: dict[str, Any] = {}

    @property
    def idle(self) -> bool:
        """True between two frames."""
        return self._stage == 0 and self._filled == 0

    def buffer(self) -> memoryview:
        return self._view[self._filled :]

    def advance(self, count: int) -> tuple[dict[str, Any], np.ndarray] | None:
        self._filled += count
        while self._filled == len(self._view):
            if self._stage == 0:
                header_bytes, self._payload_bytes = unpack_prefix(
                    self._view, self._max_payload_bytes
                )
                self._start(1, memoryview(bytearray(header_bytes)))
            elif self._stage == 1:
                self._header = unpack_header(self._view)
                # numpy does not touch the pages, so a claimed length alone costs no memory.
                self._payload = np.empty(self._payload_bytes, dtype=np.uint8)
                self._start(2, view_of(self._payload))
            else:
                frame = (self._header, self._payload)
                self._reset()
                return frame
        return None

    def _start(self, stage: int, view: memoryview) -> None:
        self._stage, self._view, self._filled = stage, view, 0
