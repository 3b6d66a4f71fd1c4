"""The side of the front that faces the notebook: Jupyter's five sockets and its message format."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.session import DELIM, Session

_MAX_HEAD_BYTES = 64 * 1024  # limit for each of: a rank's header, parent header, metadata
_PORTS = {
    "shell": zmq.ROUTER,
    "control": zmq.ROUTER,
    "stdin": zmq.ROUTER,
    "hb": zmq.ROUTER,
    "iopub": zmq.XPUB,
}


class Client:
    """The sockets that Jupyter's connection file describes, bound.

    Raises:
        OSError, ValueError: the file cannot be read or is not a connection file.
    """

    def __init__(self, connection_file: str, context: zmq.asyncio.Context) -> None:
        self._file = Path(connection_file)
        info = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.key = str(info.get("key") or os.urandom(24).hex()).encode()
        self.signature_scheme = info.get("signature_scheme") or "hmac-sha256"
        self.session = Session(key=self.key, signature_scheme=self.signature_scheme)
        self.sockets: dict[str, zmq.asyncio.Socket] = {}
        self._paths: list[str] = []
        transport, ip = info.get("transport", "tcp"), info.get("ip", "127.0.0.1")
        for name, kind in _PORTS.items():
            sock = context.socket(kind)
            sock.linger = 1000
            sock.sndhwm = 0  # unlimited: output is bounded per cell; dropping could lose an `idle`
            if info.get("curve_secretkey"):
                sock.curve_secretkey = str(info["curve_secretkey"]).encode()
                sock.curve_publickey = str(info["curve_publickey"]).encode()
                sock.curve_server = True
            if kind == zmq.ROUTER and name != "hb":
                sock.router_handover = True
            port = int(info.get(f"{name}_port") or 0)
            if transport == "ipc":
                sock.bind(f"ipc://{ip}-{port}")
                self._paths.append(f"{ip}-{port}")
            elif port:
                sock.bind(f"tcp://{ip}:{port}")
            else:
                info[f"{name}_port"] = sock.bind_to_random_port(f"tcp://{ip}")
            self.sockets[name] = sock
        if not self._file.exists():
            info.update(transport=transport, ip=ip, key=self.key.decode())
            info["signature_scheme"] = self.signature_scheme
            self._write(info)

    def _write(self, info: dict[str, Any]) -> None:
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(info, file)
        self._paths.append(str(self._file))

    def parse(self, frames: list[bytes]) -> tuple[list[bytes], dict[str, Any]]:
        """(identities, message) of the notebook's signed frames.

        Raises:
            ValueError: the frames are not a message or are not signed with this kernel's key.
        """
        try:
            idents, parts = self.session.feed_identities(frames)
            message = self.session.deserialize(parts)
            _check(message)
            return list(idents), message
        except Exception as error:  # the frames may contain anything
            raise ValueError(f"not a message: {error}") from error

    def read(self, frames: list[bytes], *, content: bool = True) -> dict[str, Any]:
        """The message of a rank's signed frames; with `content=False`, the content stays packed.

        A cell has many messages, and most are only counted or forwarded. So this leaves out two
        things that `deserialize` does: converting text to dates, and remembering signatures.

        Raises:
            ValueError: the frames are not a message or are not signed with this kernel's key.
        """
        try:
            parts: list[Any] = self.session.feed_identities(frames)[1]
            signature, header, parent, metadata, packed = parts[:5]
            if max(len(header), len(parent), len(metadata)) > _MAX_HEAD_BYTES:
                raise ValueError("too much before the content")
            if not hmac.compare_digest(signature, self.session.sign(parts[1:5])):
                raise ValueError("not signed with this key")
            unpack = self.session.unpack
            message = {
                "header": unpack(header),
                "parent_header": unpack(parent),
                "metadata": unpack(metadata),
                "content": unpack(packed) if content else packed,
            }
            _check(message, content=content)
            return message
        except Exception as error:  # the frames may contain anything
            raise ValueError(f"not a message: {error}") from error

    def frames(
        self,
        msg_type: str,
        content: dict[str, Any],
        parent: dict[str, Any] | None,
        *,
        ident: list[bytes] | bytes | None = None,
    ) -> list[bytes]:
        message = self.session.msg(msg_type, content, parent=parent)
        return self.session.serialize(message, ident=ident)

    def publish(
        self, msg_type: str, content: dict[str, Any], parent: dict[str, Any] | None = None
    ) -> None:
        """Send on iopub."""
        topic = f"kernel.torchrun.{msg_type}".encode()
        self.forward("iopub", self.frames(msg_type, content, parent, ident=topic))

    def status(self, state: str, parent: dict[str, Any] | None = None) -> None:
        self.publish("status", {"execution_state": state}, parent)

    def reply(
        self,
        channel: str,
        idents: list[bytes],
        parent: dict[str, Any],
        content: dict[str, Any],
    ) -> None:
        """Answer `parent`; the reply's type follows from the request's."""
        kind = parent["header"]["msg_type"].removesuffix("_request") + "_reply"
        self.forward(channel, self.frames(kind, content, parent, ident=idents))

    def forward(self, channel: str, frames: list[bytes]) -> None:
        self.sockets[channel].send_multipart(frames)

    def welcome(self, topic: bytes) -> None:
        """Tell a new subscriber that its subscription has arrived."""
        content = {"subscription": topic.decode(errors="replace")}
        self.forward("iopub", self.frames("iopub_welcome", content, None, ident=topic or None))

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close(1000)
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _check(message: dict[str, Any], *, content: bool = True) -> None:
    """
    Raises:
        ValueError: a part of the message is not a dict, or the header lacks msg_id or msg_type.
    """
    for name in ("header", "parent_header", "content")[: 3 if content else 2]:
        if not isinstance(message[name], dict):
            raise ValueError(f"no {name}")
    for name in ("msg_id", "msg_type"):
        if not isinstance(message["header"].get(name), str):
            raise ValueError(f"no {name}")


def unaddressed(frames: list[bytes]) -> list[bytes]:
    """The frames of a message without the identities in front of it."""
    return frames[frames.index(DELIM) :]
