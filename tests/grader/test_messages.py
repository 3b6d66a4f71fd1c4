"""Messages between probe and referee: what is sent arrives, what is malformed is refused."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import tracemalloc

import numpy as np
import pytest

from autograder.inside import messages
from autograder.inside.messages import Message, receive, send
from minidist.errors import DeadlineError, ProtocolError
from minidist.processes import frames


@pytest.fixture
def pair():
    a, b = socket.socketpair()
    for sock in (a, b):
        sock.settimeout(5)
    yield a, b
    a.close()
    b.close()


@pytest.mark.parametrize("dtype", messages.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4)])
def test_arrays_arrive_as_they_were(pair, dtype, shape):
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)
    send(pair[0], Message("k", {"a": [1, None, "ü"]}, {"x": array, "y": array.T}))
    got = receive(pair[1])
    assert got.fields == {"a": [1, None, "ü"]}
    for name, expected in (("x", array), ("y", array.T)):
        assert got.arrays[name].dtype == expected.dtype
        assert got.arrays[name].shape == expected.shape
        np.testing.assert_array_equal(got.arrays[name], expected)


def test_an_object_array_is_not_sent(pair):
    with pytest.raises(ProtocolError, match="object"):
        send(pair[0], Message("k", {}, {"x": np.array([{}, []], dtype=object)}))


def _frame(header, body=b"", magic=frames.MAGIC, header_length=None, body_length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack(
        "!4sIQ",
        magic,
        len(raw) if header_length is None else header_length,
        len(body) if body_length is None else body_length,
    )
    return prefix + raw + body


def _header(**changes):
    return {"kind": "k", "fields": {}, "arrays": []} | changes


def _array(**changes):
    return _header(arrays=[{"name": "x", "dtype": "float32", "shape": [2]} | changes])


@pytest.mark.parametrize(
    "frame",
    [
        _frame(_header(), magic=b"EVIL"),
        _frame(b"not json"),
        _frame(b"[" * 100_000),
        _frame([1]),
        _frame(_header(kind=3)),
        _frame(_header(fields=[])),
        _frame(_header(arrays={})),
        _frame(_header(arrays=[7])),
        _frame(_header(arrays=[{}] * (messages.MAX_ARRAYS + 1))),
        _frame(_header(), header_length=1 << 31),
        _frame(_header(), body_length=1 << 60),
        _frame(_header(), b"too much"),
        _frame(_array(), b"short"),
        _frame(_array(dtype="object"), b"12345678"),
        _frame(_array(dtype=["float32"]), b"12345678"),
        _frame(_array(name=1), b"12345678"),
        _frame(_array(shape=[-2]), b"12345678"),
        _frame(_array(shape=[2.0]), b"12345678"),
        _frame(_array(shape=[True, 2]), b"12345678"),
        _frame(_array(shape=[1 << 40, 1 << 40]), b"12345678"),
        _frame(_array(shape=[1] * 9), b"1234"),
        _frame(_array(shape="2"), b"12345678"),
        _frame(_header())[:-1],
        b"",
    ],
    ids=range(24),
)
def test_a_malformed_message_is_refused(pair, frame):
    pair[0].sendall(frame)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError):
        receive(pair[1])


def test_random_bytes_are_refused():
    rng = random.Random(1)
    good = _frame(_array(), b"12345678")
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        a, b = socket.socketpair()
        with a, b:
            b.settimeout(5)
            a.sendall(damaged)
            a.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ProtocolError):
                receive(b)  # what was hit may have been the payload, or a name


def test_crumbs_take_no_more_memory_than_the_message(pair):
    frame = _frame(_array(dtype="uint8", shape=[100_000]), bytes(100_000))

    def crumble():
        for place in range(0, len(frame), 2):
            pair[0].sendall(frame[place : place + 2])

    sender = threading.Thread(target=crumble)
    tracemalloc.start()
    try:
        sender.start()
        assert receive(pair[1]).arrays["x"].nbytes == 100_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
        sender.join()


def test_silence_is_a_deadline(pair):
    pair[1].settimeout(0.1)
    with pytest.raises(DeadlineError):
        receive(pair[1])
