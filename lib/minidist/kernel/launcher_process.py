"""The launcher's process as the front sees it: how it was started, its last words, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from minidist.kernel.options import Options
from minidist.kernel.warm import client
from minidist.processes.tree import describe_exit, kill_descendants

_TAIL_BYTES = 8000


class LauncherProcess:
    """A launcher, forked by the warm parent if there is one that would do, else a new process."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | client.Launcher | None = None
        self._stderr = bytearray()
        self._unwanted = False

    @property
    def started(self) -> bool:
        return self._process is not None

    async def start(self, config: dict[str, Any]) -> None:
        """Start it with what `launcher.py` reads from its standard input.

        Raises:
            RuntimeError: it could not be started, or was ended meanwhile.
        """
        if self._options.warm:
            self._process = await self._ask_warm_parent(config)
        if self._process is None:
            self._process = self._start_cold(config)
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._drain, fd)

    async def _ask_warm_parent(self, config: dict[str, Any]) -> client.Launcher | None:
        """A thread of its own asks, as one that does not answer must not hold the notebook up."""
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(
            None, client.launch, config, self._options.env, self._options.cwd
        )
        try:
            found = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda done: (it := done.result()) and it.end())
            raise
        if self._unwanted and found is not None:
            found.end()
            raise RuntimeError("the ranks were ended while they started")
        return found

    def _start_cold(self, config: dict[str, Any]) -> subprocess.Popen[bytes]:
        options = self._options
        try:
            process = subprocess.Popen(
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
        return process

    def _drain(self, fd: int) -> None:
        """Keep the end of what launcher and ranks write past Jupyter; it explains failed starts."""
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
        """How it has ended, in words; None while it runs, or before it was started."""
        if self._process is None or self._process.poll() is None:
            return None
        return describe_exit(self._process.poll() or 0)

    def end(self) -> None:
        """End it and everything below it."""
        self._unwanted = True
        process = self._process
        if process is None:
            return
        if isinstance(process, client.Launcher):
            process.end()
        else:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(3)
        kill_descendants(os.getpid())
        if process.stdout is not None:
            with contextlib.suppress(Exception):
                asyncio.get_running_loop().remove_reader(process.stdout.fileno())
            process.stdout.close()
