"""Messages between a rank's probe and the referee: a JSON header, then raw arrays, no pickles.

[Note: the referee's protocol] lists the kinds. A message is a kind, a dict of JSON fields and a
dict of named NumPy arrays:

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

import math
import socket
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.errors import DeadlineError, ProtocolError
from minidist.processes import frames

MAX_ARRAY_BYTES = 128 << 20
MAX_ARRAYS = 4096
MAX_DIMS = 8
DTYPES = ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")


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
    header = {"kind": message.kind, "fields": message.fields, "arrays": described}
    body = b"".join(payload)
    if len(body) > MAX_ARRAY_BYTES:
        raise ProtocolError(
            f"{message.kind}: arrays of {len(body)} bytes; at most {MAX_ARRAY_BYTES} are accepted"
        )
    sock.sendall(frames.pack(header, len(body)) + body)


def receive(sock: socket.socket, *, max_array_bytes: int = MAX_ARRAY_BYTES) -> Message:
    """Reads one message; the socket's timeout is the deadline.

    Raises:
        ProtocolError: the bytes are not a message, or the peer closed the connection.
        DeadlineError: nothing came in time.
    """
    try:
        header, body = frames.read(sock, max_array_bytes, nan=True)  # a student's answer may be nan
    except TimeoutError:
        raise DeadlineError("a message did not come in time") from None
    except OSError as error:
        raise ProtocolError(f"connection lost: {error}") from None
    if (
        not isinstance(header.get("kind"), str)
        or not isinstance(header.get("fields"), dict)
        or not isinstance(header.get("arrays"), list)
        or len(header["arrays"]) > MAX_ARRAYS
    ):
        raise ProtocolError("header must have a kind (text), fields (object) and arrays (list)")
    return Message(
        header["kind"], header["fields"], _arrays(header["arrays"], frames.view_of(body))
    )


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
