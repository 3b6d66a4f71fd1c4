"""The launcher's process as the front sees it: its start, its last output, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from minidist.kernel.options import KernelOptions
from minidist.processes.tree import describe_exit, kill_descendants

_TAIL_BYTES = 8000


class LauncherProcess:
    """A launcher: a new process, inside the sandbox if there is one."""

    def __init__(self, options: KernelOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = bytearray()

    @property
    def started(self) -> bool:
        return self._process is not None

    async def start(self, config: dict[str, Any]) -> None:
        """Start the launcher; `launcher.py` reads `config` from its standard input.

        Raises:
            RuntimeError: the process could not be started.
        """
        options = self._options
        try:
            self._process = process = subprocess.Popen(
                [*options.prefix, sys.executable, "-m", "minidist.kernel.inside.launcher"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=options.env,
                cwd=options.cwd if not options.prefix else None,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"the ranks' launcher could not be started: {error}") from error
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(config).encode() + b"\n")
            process.stdin.close()
        assert process.stdout is not None
        fd = process.stdout.fileno()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._drain, fd)

    def _drain(self, fd: int) -> None:
        """Keep the end of what launcher and ranks print directly: it explains failed starts."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
        self._stderr += data
        del self._stderr[:-_TAIL_BYTES]

    def tail(self) -> str:
        """The end of what launcher and ranks have written."""
        return self._stderr.decode(errors="replace").strip()[-4000:]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def exit(self) -> str | None:
        """How the launcher has ended, in words; None before its start and while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        return describe_exit(self._process.poll() or 0)

    def end(self) -> None:
        """Kill the launcher's process group and all descendants of this process."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
        kill_descendants(os.getpid())
        if process.stdout is not None:
            with contextlib.suppress(Exception):
                asyncio.get_running_loop().remove_reader(process.stdout.fileno())
            process.stdout.close()
