"""Two nodes for a test: the kernel is node 0, and an agent on the same machine is node 1."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kernel_helper import Kernel
from kernel_helper import kernel as new_kernel

from minidist.processes.ports import free_port
from minidist.processes.tree import descendants

AGENT = [sys.executable, "-m", "minidist.kernel.nodes.agent"]
SECRET = "two nodes of one test share this text"


def environment(node: int, port: int, **more: str) -> dict[str, str]:
    """What one of two nodes with two ranks each finds."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("MINIDIST_", "SLURM_"))},
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "MINIDIST_NNODES": "2",
        "MINIDIST_NODE_RANK": str(node),
        "MINIDIST_ENDPOINT": f"127.0.0.1:{port}",
        "MINIDIST_SECRET": SECRET,
        "MINIDIST_RANKS": "2",
        **more,
    }


class Pair:
    """A kernel of two nodes."""

    def __init__(self, kernel: Kernel, port: int, agent_port: int) -> None:
        self.kernel, self.port, self.agent_port = kernel, port, agent_port
        self.agents: list[subprocess.Popen[str]] = []

    @property
    def agent(self) -> subprocess.Popen[str]:
        return self.agents[-1]

    def start_agent(self, *arguments: str) -> None:
        env = environment(1, self.agent_port)
        command = [*AGENT, *arguments]
        self.agents.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))

    def family(self) -> list[int]:
        """Pids of both nodes."""
        agent = self.agent.pid
        return [*self.kernel.family(), agent, *descendants(agent)]

    def close(self) -> None:
        self.kernel.close()
        for agent in self.agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(15)
            agent.kill()
            assert agent.stderr is not None
            agent.stderr.close()
            agent.wait()


@contextmanager
def two_nodes(
    *arguments: str, agent_port: int | None = None, port: int | None = None
) -> Iterator[Pair]:
    """A kernel with two ranks on each of two nodes; the agent may reach it by another port."""
    port = port or free_port()
    with new_kernel(name="torchrun-auto", env=environment(0, port)) as kernel:
        pair = Pair(kernel, port, agent_port or port)
        pair.start_agent(*arguments)
        try:
            yield pair
        finally:
            pair.close()


class Wire:
    """The network between two nodes: carries what comes to `port` to `target`, and keeps a copy."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = bytearray()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def cut_newest(self) -> None:
        """One connection only."""
        self._ends[-1].shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """As if a cable were pulled, except that both ends see it at once."""
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def wait_until_lost(kernel: Kernel, deadline_s: float = 20) -> float:
    """Seconds until the kernel knows that its ranks are no more."""
    start = time.monotonic()
    while kernel.request(action="status")["state"] != "lost":
        assert time.monotonic() - start < deadline_s
        time.sleep(0.05)
    return time.monotonic() - start


@contextmanager
def networks() -> Iterator[list[int]]:
    """Two processes, each in a network of its own; a cable joins the two."""
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "600"]) for _ in range(2)]
    pids = [holder.pid for holder in holders]
    name = f"md{os.getpid() % 10**6}"
    try:
        here = os.readlink("/proc/self/ns/net")
        end = time.monotonic() + 10
        while any(os.readlink(f"/proc/{pid}/ns/net") == here for pid in pids):
            assert time.monotonic() < end
            assert all(holder.poll() is None for holder in holders), "unshare is not permitted"
            time.sleep(0.01)
        _call("ip", "link", "add", f"{name}x0", "type", "veth", "peer", "name", f"{name}x1")
        for number, pid in enumerate(pids):
            inside = ["nsenter", "-t", str(pid), "-n", "ip"]
            _call("ip", "link", "set", f"{name}x{number}", "netns", str(pid))
            _call(*inside, "link", "set", f"{name}x{number}", "name", "cable")
            _call(*inside, "addr", "add", f"10.83.0.{number + 1}/24", "dev", "cable")
            _call(*inside, "link", "set", "cable", "up")
            _call(*inside, "link", "set", "lo", "up")
        yield pids
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def may_make_networks() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    if os.geteuid() != 0 or not tools:
        return False
    with contextlib.suppress(OSError, AssertionError, subprocess.SubprocessError), networks():
        return True
    return False
