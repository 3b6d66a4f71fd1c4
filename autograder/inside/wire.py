"""Messages between a rank's probe and the referee: a JSON header, then raw arrays, no pickles.

A message is a kind, a dict of JSON fields and a dict of named NumPy arrays:

>>> import socket
>>> a, b = socket.socketpair()
>>> send(a, Message("answer", {"criterion": "setup"}, {"sum": np.arange(3.0)}))
>>> message = receive(b)
>>> message.kind, message.fields["criterion"], message.arrays["sum"].tolist()
('answer', 'setup', [0.0, 1.0, 2.0])

The reader does not trust the writer: it checks lengths against limits before it allocates memory,
checks types and shapes before it makes an array, and raises `ProtocolError` for anything invalid.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.errors import DeadlineError, ProtocolError

MAX_HEADER_BYTES = 1 << 20
MAX_ARRAY_BYTES = 128 << 20
MAX_ARRAYS = 4096
MAX_DIMS = 8
DTYPES = ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")
_PREFIX = struct.Struct("!4sIQ")
_MAGIC = b"AGW1"


@dataclass
class Message:
    """One message: `kind` says what it is, `fields` is plain JSON, `arrays` is raw data."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def send(sock: socket.socket, message: Message) -> None:
    """Writes one message.

    Raises:
        ProtocolError: an array's dtype cannot be sent, or the message is larger than peers accept.
    """
    described, payload = [], []
    for name, value in message.arrays.items():
        array = np.asarray(value)
        if array.dtype.name not in DTYPES:
            raise ProtocolError(f"array {name!r}: expected one of {DTYPES}, got {array.dtype.name}")
        described.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape)})
        payload.append(array.tobytes())
    header = json.dumps(
        {"kind": message.kind, "fields": message.fields, "arrays": described}
    ).encode()
    body = b"".join(payload)
    if len(header) > MAX_HEADER_BYTES or len(body) > MAX_ARRAY_BYTES:
        raise ProtocolError(
            f"{message.kind}: header of {len(header)} and arrays of {len(body)} bytes; "
            f"at most {MAX_HEADER_BYTES} and {MAX_ARRAY_BYTES} are accepted"
        )
    sock.sendall(_PREFIX.pack(_MAGIC, len(header), len(body)) + header + body)


def receive(sock: socket.socket, *, max_array_bytes: int = MAX_ARRAY_BYTES) -> Message:
    """Reads one message; the socket's timeout is the deadline.

    Raises:
        ProtocolError: the bytes are not a message, or the peer closed the connection.
        DeadlineError: nothing came in time.
    """
    magic, header_length, body_length = _PREFIX.unpack(_read(sock, _PREFIX.size))
    if magic != _MAGIC:
        raise ProtocolError(f"expected a message that begins with {_MAGIC!r}, got {magic!r}")
    if header_length > MAX_HEADER_BYTES or body_length > max_array_bytes:
        raise ProtocolError(f"message too large: {header_length} + {body_length} bytes")
    header = _parse_header(bytes(_read(sock, header_length)))
    body = _read(sock, body_length)
    return Message(header["kind"], header["fields"], _arrays(header["arrays"], body))


def _parse_header(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"header is not JSON: {error}") from None
    if (
        not isinstance(header, dict)
        or not isinstance(header.get("kind"), str)
        or not isinstance(header.get("fields"), dict)
        or not isinstance(header.get("arrays"), list)
        or len(header["arrays"]) > MAX_ARRAYS
    ):
        raise ProtocolError("header must have a kind (text), fields (object) and arrays (list)")
    return header


def _arrays(described: list[Any], body: memoryview) -> dict[str, np.ndarray]:
    arrays, offset = {}, 0
    for item in described:
        if not isinstance(item, dict):
            raise ProtocolError("an array's description must be an object")
        name, dtype, shape = item.get("name"), item.get("dtype"), item.get("shape")
        if not isinstance(name, str) or dtype not in DTYPES or not _is_shape(shape):
            raise ProtocolError(f"array {name!r}: bad dtype {dtype!r} or shape {shape!r}")
        assert isinstance(shape, list)
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if offset + size > len(body):
            raise ProtocolError(
                f"array {name!r}: {size} bytes announced, {len(body) - offset} came"
            )
        flat = np.frombuffer(body, dtype=dtype, count=math.prod(shape), offset=offset)
        try:
            arrays[name] = flat.reshape(shape).copy()
        except ValueError as error:  # an empty array whose other sizes overflow when multiplied
            raise ProtocolError(f"array {name!r}: {error}") from None
        offset += size
    if offset != len(body):
        raise ProtocolError(f"{len(body) - offset} bytes more than the arrays need")
    return arrays


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= MAX_DIMS
        and all(type(size) is int and 0 <= size <= MAX_ARRAY_BYTES for size in shape)
    )


def _read(sock: socket.socket, count: int) -> memoryview:
    """Reads `count` bytes into one buffer, even if they arrive in many small pieces."""
    data, came = np.empty(count, np.uint8).data, 0
    while came < count:
        try:
            length = sock.recv_into(data[came:])
        except TimeoutError:
            raise DeadlineError(f"{count - came} of {count} bytes did not come in time") from None
        except OSError as error:
            raise ProtocolError(f"connection lost: {error}") from None
        if not length:
            raise ProtocolError("the peer closed the connection")
        came += length
    return data
