"""Bytes that are no message: wrong magic, JSON too deep, numbers too long, shapes below zero.

base: reference
passes: everything
"""

# %% put="before setup"
import json
import socket
import struct


def _say(header, body=b"", magic=b"AGW1"):
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(2.0)
        sock.connect(os.environ["MINIDIST_REFEREE"])
        sock.sendall(struct.pack("!4sIQ", magic, len(header), len(body)) + header + body)
        return sock.recv(1000)


_hello = {"kind": "hello", "fields": {"rank": 0, "channel": "check"}, "arrays": []}
for _change in (
    {"arrays": [{"name": "a", "dtype": "object", "shape": [1]}]},
    {"arrays": [{"name": "a", "dtype": "float64", "shape": [-1]}]},
    {"arrays": [{"name": "a", "dtype": "float64", "shape": [2**40, 2**40]}]},
    {"arrays": [{}] * 5000},
    {"fields": {"rank": True, "channel": "check"}},
    {"fields": {"rank": 1.0, "channel": ["check"]}},
    {"fields": {"rank": -1, "channel": "check"}},
    {"kind": ["hello"]},
):
    if b"welcome" in (_say(json.dumps(_hello | _change).encode(), b"x" * 8) or b""):
        print("LEAKED: welcomed after", _change)
for _raw in (b"[" * 200_000, b"9" * 100_000, b'{"kind": "hello"', b"\xff" * 100, b"null", b"{}"):
    _say(_raw)
_say(b"{}", magic=b"GET ")
