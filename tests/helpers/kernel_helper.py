"""A kernel under test: start it, run a cell, look at what came back."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jupyter_client.manager import KernelManager

from minidist.processes.tree import descendants

SETUP = "import os, sys, time, torch, torch.distributed as dist\nrank = int(os.environ['RANK'])"
JOIN = SETUP + "\ndist.init_process_group('gloo')"
ALL_REDUCE = "x = torch.tensor([rank + 1.0]); dist.all_reduce(x); print(x.item())"
HANGS_S = 500.0  # a kernel that has not answered by then never will


@dataclass
class Result:
    reply: dict[str, Any]
    seconds: float
    messages: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [m["content"] for m in self.messages if m["msg_type"] == kind]

    def text(self, name: str = "stdout") -> str:
        return "".join(c["text"] for c in self.of("stream") if c["name"] == name)

    @property
    def kind(self) -> str:
        return self.reply["minidist"]["kind"]

    def rank(self, rank: int) -> dict[str, Any]:
        return next(r for r in self.reply["minidist"]["ranks"] if r["rank"] == rank)


def place_of_sockets() -> str:
    """Where a kernel with transport "ipc" has its sockets, in place of an address.

    A port that is free when jupyter looks may be taken by the time that the kernel has started.
    """
    return f"{tempfile.gettempdir()}/{uuid.uuid4().hex[:8]}"


def says_now(message: dict[str, Any]) -> bool:
    """Whether a cell has printed "now"."""
    return message["msg_type"] == "stream" and "now" in message["content"]["text"]


def kernel_for_diagnose(*, executing: bool = True) -> SimpleNamespace:
    """What `diagnose.where` asks a rank's kernel; no frame belongs to a cell."""
    compiler = SimpleNamespace(format_code_name=lambda name: None)
    shell = SimpleNamespace(compile=compiler)
    return SimpleNamespace(executing=executing, collectives_before=0, cells_begun=[], shell=shell)


class Kernel:
    """A running front with its client."""

    def __init__(
        self,
        *arguments: str,
        name: str = "torchrun-2",
        manager: type[KernelManager] = KernelManager,
        **options: Any,
    ) -> None:
        self.manager = manager(kernel_name=name, transport="ipc", ip=place_of_sockets())
        self.manager.start_kernel(extra_arguments=list(arguments), **options)
        self.manager.shutdown_wait_time = 60.0
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=HANGS_S)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid  # type: ignore[union-attr]

    def run(
        self,
        code: str,
        *,
        timeout: float = HANGS_S,
        stop: Callable[[dict[str, Any]], bool] = lambda message: False,
        **options: Any,
    ) -> Result:
        """Runs a cell, and interrupts it at a message for which `stop` is true."""
        messages: list[dict[str, Any]] = []

        def take(message: dict[str, Any]) -> None:
            messages.append(message)
            if stop(message) and not any(map(stop, messages[:-1])):
                self.manager.interrupt_kernel()

        start = time.monotonic()
        options.setdefault("allow_stdin", False)
        reply = self.client.execute_interactive(code, timeout=timeout, output_hook=take, **options)
        return Result(reply["content"], time.monotonic() - start, messages)

    def ok(self, code: str, **options: Any) -> Result:
        result = self.run(code, **options)
        assert result.reply["status"] == "ok", result.reply
        return result

    def request(self, timeout: float = HANGS_S, **content: Any) -> dict[str, Any]:
        """A `minidist_request` on the control channel."""
        message = self.client.session.msg("minidist_request", content)
        self.client.control_channel.send(message)
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            reply = self.client.get_control_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                assert reply["msg_type"] == "minidist_reply"
                return reply["content"]
        raise TimeoutError(f"no reply to {content}")

    def ask(self, msg_id: str, timeout: float = HANGS_S) -> dict[str, Any]:
        """The shell reply to a request that was sent with `client.complete(…)` and the like."""
        while True:
            reply = self.client.get_shell_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") == msg_id:
                return reply["content"]

    def family(self) -> list[int]:
        """Pids of the front and everything below it."""
        return [self.pid, *descendants(self.pid)]

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=False)


@contextmanager
def kernel(*arguments: str, **options: Any) -> Iterator[Kernel]:
    it = Kernel(*arguments, **options)
    try:
        yield it
    finally:
        it.close()


def alive(pid: int) -> bool:
    """Whether `pid` is a process that is not just waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_gone(pids: list[int], deadline_s: float = 60) -> list[int]:
    """Those of `pids` that are still alive after the deadline."""
    end = time.monotonic() + deadline_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def shared_memory() -> list[Path]:
    """Shared memory of ours that has a name, which only a rank that was killed could leave."""
    return list(Path("/dev/shm").glob("minidist-*"))
