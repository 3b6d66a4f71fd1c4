"""The link from the front to the launcher or a rank's companion thread: JSON lines of bounded size.

The link is a plain unix socket, not zmq, because the operating system closes it when the process at
the other end dies. So the front notices a lost rank at once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from typing import Any

MAX_LINE_BYTES = 256 * 1024
LINK_NAME = "link"


def token(key: bytes, who: str, generation: int) -> str:
    """Proof that the peer was given this kernel's key; keeps other users' processes out."""
    return hmac.new(key, f"{who}/{generation}".encode(), hashlib.sha256).hexdigest()


def socket_name(generation: int, channel: str, rank: int) -> str:
    """File name of a rank's zmq socket; each generation has different names."""
    return f"{generation}-{channel}-{rank}"


def endpoint(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def encode(message: dict[str, Any]) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        line = json.dumps({"id": message.get("id"), "too_long": len(line)}).encode() + b"\n"
    return line


def decode(line: bytes) -> dict[str, Any]:
    """The message in `line`, or an empty message if `line` is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


class Link:
    """The blocking end of the link, used by the launcher and by each rank's companion thread."""

    def __init__(self, run_dir: str, key: bytes, who: str, generation: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(20)
        self._socket.connect(f"{run_dir}/{LINK_NAME}")
        self._socket.settimeout(None)
        self._reader = self._socket.makefile("rb")
        proof = token(key, who, generation)
        self.send({"hello": who, "generation": generation, "token": proof})

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(encode(message))

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the front is gone."""
        try:
            line = self._reader.readline(MAX_LINE_BYTES)
        except OSError:
            return None
        return decode(line) if line.endswith(b"\n") else None
