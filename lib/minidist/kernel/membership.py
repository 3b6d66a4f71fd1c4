"""A job of several nodes that serve one kernel: its size, its address, its secret, its keys.

Everything comes from the environment; the first variable that is set wins: MINIDIST_*, then
torchrun's own (PET_*), then Slurm's. Two key pairs are derived from one secret that all nodes
share: the front's and the nodes'. The front accepts only the nodes' key, and a node only the
front's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from minidist.kernel.link import endpoint

DEFAULT_PORT = 29500  # torchrun's
MAX_NODES = 1024
MIN_SECRET_CHARS = 32
_SIOCGIFADDR = 0x8915
# An address that no network has (RFC 5737): the system's route to it names the default interface.
_ANYWHERE = "192.0.2.1"


@dataclass(frozen=True, kw_only=True)
class MultiNodeJob:
    """Several nodes that serve one kernel.

    Attributes:
        node: this node's number; the front runs on node 0.
        host, port: where the front listens; every node can reach this address.
        secret: the secret that the launching script gave all nodes; if it is empty, secret_file
        holds the secret.
    """

    num_nodes: int
    node: int
    host: str
    port: int
    secret: str = ""
    secret_file: str = ""

    def __repr__(self) -> str:  # a secret must not reach a log
        return f"node {self.node} of {self.num_nodes} at {self.host}:{self.port}"

    @property
    def address(self) -> str:
        """The address to which nodes connect."""
        return f"tcp://{endpoint(self.host, self.port)}"

    @property
    def listen_address(self) -> str:
        """The address that the front binds: not its own host name, which may mean loopback."""
        if self.host == "localhost":
            return f"tcp://127.0.0.1:{self.port}"
        return self.address if _is_literal(self.host) else f"tcp://*:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Share:
    """One node's part of a generation: its own ranks, and the address where torch's agents meet."""

    num_nodes: int
    node: int
    first: int
    num_ranks: int
    master: str
    port: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.num_ranks)


def divide(job: MultiNodeJob, count: int, port: int) -> list[Share]:
    """Divide `count` ranks among all nodes: equally, or with one more on each of the first nodes.

    >>> job = MultiNodeJob(num_nodes=2, node=0, host="n1", port=1)
    >>> [share.ranks for share in divide(job, 5, 2)]
    [range(0, 3), range(3, 5)]
    """
    each, more = divmod(count, job.num_nodes)
    if not each:
        raise RuntimeError(f"expected at least {job.num_nodes} ranks, one a node, got {count}")
    return [
        Share(
            num_nodes=job.num_nodes,
            node=node,
            first=node * each + min(node, more),
            num_ranks=each + (node < more),
            master=job.host,
            port=port,
        )
        for node in range(job.num_nodes)
    ]


class Keys:
    """The CURVE keys of a job, derived from its secret; each end knows both pairs.

    Raises:
        ValueError, OSError: the secret is too short, or other users own or may use its file.
    """

    def __init__(self, job: MultiNodeJob) -> None:
        if not zmq.has("curve"):
            raise ValueError("several nodes need a pyzmq that was built with libsodium (CURVE)")
        self._created = ""
        text = job.secret
        if not text:
            text, created = _read_or_create(job.secret_file)
            self._created = job.secret_file if created else ""
        if len(text) < MIN_SECRET_CHARS:
            where = job.secret_file or "MINIDIST_SECRET"
            raise ValueError(
                f"{where}: expected a secret of {MIN_SECRET_CHARS} characters or more, "
                f"got {len(text)}"
            )
        self.front, self.node = (_key(text, who) for who in ("front", "node"))
        self.front_public, self.node_public = map(zmq.curve_public, (self.front, self.node))

    @property
    def is_ours(self) -> bool:
        """Whether this object has created the secret's file."""
        return bool(self._created)

    def forget(self) -> None:
        """Remove the secret's file, if this object has created it."""
        if self._created:
            with contextlib.suppress(OSError):
                os.unlink(self._created)
            self._created = ""


def _key(secret: str, who: str) -> bytes:
    return z85.encode(hmac.new(secret.encode(), who.encode(), hashlib.sha256).digest())


def _read_or_create(path: str) -> tuple[str, bool]:
    """The secret, and whether this call has created its file: the first node to look creates it."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return _read(path), False
        # Write under a temporary name first, so that no node reads half of the secret.
        draft, text = f"{path}.{secrets.token_hex(8)}", secrets.token_hex(32)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
            os.link(draft, path)
            return text, True
        except FileExistsError:
            continue
        finally:
            os.unlink(draft)
    return _read(path), False


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd) as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(f"{path}: expected a file of this user with mode 0600")
        return file.read(4096).strip()


# -- from the environment ------------------------------------------------------------------------


def read_job(environment: Mapping[str, str]) -> MultiNodeJob | None:
    """The job that `environment` describes; None for a single node.

    Raises:
        ValueError: a variable is malformed, or one that several nodes need is missing.

    >>> read_job({"SLURM_JOB_NUM_NODES": "1"})
    >>> read_job({"PET_NNODES": "2", "MASTER_ADDR": "n1", "MINIDIST_SECRET_FILE": "/shared/s"})
    node 0 of 2 at n1:29500
    """
    name, text = _first(
        environment, "MINIDIST_NNODES", "PET_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"
    )
    match = re.fullmatch(r"([1-9]\d{0,3})(:\1)?", text or "1")
    if match is None or int(match[1]) > MAX_NODES:
        raise ValueError(f"{name}: expected a number of nodes from 1 to {MAX_NODES}, got {text!r}")
    num_nodes = int(match[1])
    if num_nodes == 1:
        return None
    name, text = _first(environment, "MINIDIST_NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID")
    if not re.fullmatch(r"\d{1,4}", text or "0") or int(text or 0) >= num_nodes:
        raise ValueError(f"{name}: expected a node from 0 to {num_nodes - 1}, got {text!r}")
    host, port = _endpoint(environment)
    secret, secret_file = _secret(environment)
    return MultiNodeJob(
        num_nodes=num_nodes,
        node=int(text or 0),
        host=host,
        port=port,
        secret=secret,
        secret_file=secret_file,
    )


def _first(environment: Mapping[str, str], *names: str) -> tuple[str, str]:
    """(name, value) of the first variable that is set; the last name and nothing if none is."""
    for name in names:
        if text := environment.get(name, "").strip():
            return name, text
    return names[-1], ""


def _endpoint(environment: Mapping[str, str]) -> tuple[str, int]:
    name, text = _first(environment, "MINIDIST_ENDPOINT", "PET_RDZV_ENDPOINT")
    if text:
        host, _, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "")
    else:
        name, host = _first(environment, "PET_MASTER_ADDR", "MASTER_ADDR")
        port = _first(environment, "PET_MASTER_PORT", "MASTER_PORT")[1]
        nodes = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")[1]
        host = host or first_host(nodes)
    if not port:  # depends on the job: other users' jobs may run on the same nodes
        job = environment.get("SLURM_JOB_ID", "")
        port = str(20000 + int(job) % 10000) if job.isdecimal() else str(DEFAULT_PORT)
    host = host.strip("[]")
    if (
        not re.fullmatch(r"[\w.:-]{1,255}", host)
        or not 0 < int(port if port.isdecimal() else 0) < 65536
    ):
        raise ValueError(
            "MINIDIST_ENDPOINT: expected host:port of node 0 (or MASTER_ADDR and MASTER_PORT), "
            f"got {name}={text or host!r} and port {port!r}"
        )
    return host, int(port)


def _secret(environment: Mapping[str, str]) -> tuple[str, str]:
    """(secret, path of the file that holds it): one of the two is empty."""
    if text := environment.get("MINIDIST_SECRET", "").strip():
        return text, ""
    path = environment.get("MINIDIST_SECRET_FILE", "").strip()
    folder, job = environment.get("SLURM_SUBMIT_DIR"), environment.get("SLURM_JOB_ID")
    if not path and folder and job:
        path = f"{folder}/.minidist-{job}"
    if not path:
        raise ValueError(
            "MINIDIST_SECRET: expected the same secret on every node, or the name of a file that "
            "all nodes share in MINIDIST_SECRET_FILE"
        )
    return "", path


def first_host(text: str) -> str:
    """The first host in Slurm's list of nodes, which is node 0.

    >>> first_host("gpu[003-004,007],cpu1"), first_host("n1,n2"), first_host("")
    ('gpu003', 'n1', '')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else ""


# -- what ranks need -----------------------------------------------------------------------------


def rank_environment(job: MultiNodeJob, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a launcher: without the secret, with the interface for gloo.

    By default, gloo listens at the address of the host's own name, often a loopback address.
    """
    hidden = ("MINIDIST_SECRET", "MINIDIST_SECRET_FILE")
    result = {key: value for key, value in environment.items() if key not in hidden}
    if (found := _interface(job)) is not None:
        result.setdefault("GLOO_SOCKET_IFNAME", found)
    return result


def _is_literal(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _interface(job: MultiNodeJob) -> str | None:
    """The name of the network interface that leads to the other nodes; None if none is found."""
    with contextlib.suppress(OSError):
        mine = _address_towards(job.host)
        if mine.startswith("127.") and not _is_literal(job.host) and job.host != "localhost":
            mine = _address_towards(_ANYWHERE)  # on node 0, whose name means loopback
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode())
                    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
                    if socket.inet_ntoa(answer[20:24]) == mine:
                        return name
    return None


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends nothing
        return sock.getsockname()[0]
