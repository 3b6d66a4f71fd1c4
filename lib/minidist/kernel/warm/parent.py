"""The warm parent: it has imported torch, and forks a keeper for each front that asks.

```
 warm parent ── fork ── keeper ── fork ── launcher, agent, ranks: as always
                          └── the front's connection
```

The parent reads nothing from anybody, runs no code of the user's and has one thread. The keeper
takes over the front's surroundings, and stays between: it ends everything when the front ends, and
tells the front when the launcher has. The parent ends a family whose keeper was killed; a killed
parent changes nothing for the families that are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from minidist.kernel.inside import launcher
from minidist.kernel.warm import client, surroundings
from minidist.processes.fork_server import import_for_good
from minidist.processes.lifetime import adopt_orphans
from minidist.processes.tree import children, descendants, fork_child, kill_descendants, reap

LOOK_EVERY_S = 30.0
_SERVED, _NOT_SERVED = 0, 3  # exit status of a keeper


class Parent:
    """Forks keepers until it was idle for long, is told to stop, or its files have changed."""

    def __init__(self, idle_s: float, mine: dict[str, Any]) -> None:
        self._idle_s, self._surroundings = idle_s, mine
        self._since, self._last_used = time.time(), time.monotonic()
        self._started = 0
        self._keepers: dict[int, float] = {}  # pid -> when it was forked
        self._files = {path: _stamp(path) for path in _loaded_files()}
        self._path = client.socket_path()
        self._stopped = False
        self._listener: socket.socket | None = None
        self._own = 0  # the socket's number in the file system

    def serve(self) -> int:
        """Listen and fork; returns the exit status."""
        if not self._listen():
            return 0
        listener = self._listener
        assert listener is not None
        alarm, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        alarm.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        _close_stderr()  # whoever has started this knows by that that it listens
        try:
            while not self._stopped:
                left = max(0.0, self._last_used + self._idle_s - time.monotonic())
                ready, _, _ = select.select([listener, alarm], [], [], min(LOOK_EVERY_S, left))
                if alarm in ready:
                    alarm.recv(4096)
                self._collect()
                if (not ready and not self._is_listening()) or self._has_changed():
                    break
                if listener in ready:
                    connection, _ = listener.accept()
                    with connection:
                        self._fork(connection, [listener, alarm, wakeup])
                if self._is_used():
                    self._last_used = time.monotonic()
                elif time.monotonic() - self._last_used >= self._idle_s:
                    break
        finally:
            with client.alone(self._path) as held:
                if held and self._is_listening():
                    client.forget(self._path)
        return 0

    def _stop(self, *_: Any) -> None:
        self._stopped = True

    def _listen(self) -> bool:
        """Bind the socket; False where another warm parent was quicker."""
        with client.alone(self._path, create=True):
            with contextlib.suppress(OSError):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect(self._path)
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self._path)
            os.chmod(self._path, 0o600)
            self._listener.listen(64)
            self._own = os.stat(self._path).st_ino
        return True

    def _is_listening(self) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(self._path).st_ino == self._own
        return False

    def _has_changed(self) -> bool:
        return any(_stamp(path) != stamp for path, stamp in self._files.items())

    def _is_used(self) -> bool:
        # One that was only asked for its status is soon gone.
        return any(time.monotonic() - since > 5.0 for since in self._keepers.values())

    def _collect(self) -> None:
        """Forget keepers that have ended, and end the family of one that was killed."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended
                known = self._keepers.pop(pid, None) is not None
                if known and os.waitstatus_to_exitcode(code) != _NOT_SERVED:
                    self._started += 1
                    self._last_used = time.monotonic()
        end = time.monotonic() + 3.0
        while strangers := [pid for pid in children(os.getpid()) if pid not in self._keepers]:
            if time.monotonic() > end:
                return
            for pid in [pid for one in strangers for pid in (one, *descendants(one))]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
            reap(strangers)

    def _fork(self, connection: socket.socket, others: list[socket.socket]) -> None:
        told = {
            "pid": os.getpid(),
            "since": self._since,
            "idle_s": self._idle_s,
            "running": len(self._keepers),
            "started": self._started + len(self._keepers),
        }
        try:
            pid = os.fork()
        except OSError:
            return  # too many processes, say; the front starts cold, or fails as it would have
        if pid:
            self._keepers[pid] = time.monotonic()
            return
        code = _NOT_SERVED
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for sock in others:
                sock.close()
            code = keep(connection, self._surroundings, told)
        except BaseException:
            traceback.print_exc()
        os._exit(code)


# -- the keeper ----------------------------------------------------------------------------------


def keep(connection: socket.socket, mine: dict[str, Any], told: dict[str, Any]) -> int:
    """Answer one front; if it wants a launcher, fork it and stay until one of the two has ended."""
    if client.peer(connection)[1] != os.geteuid():
        return _NOT_SERVED
    connection.settimeout(client.ANSWER_WITHIN_S)
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    request = json.loads(client.read_line(connection, client.ANSWER_WITHIN_S) or "null")
    if not isinstance(request, dict):
        return _NOT_SERVED
    refuses, setters = surroundings.difference(mine, request), None
    if not refuses:
        try:
            surroundings.take_over(request, mine["added"])
            setters = _blas_setters()
        except (OSError, ValueError) as error:
            refuses = str(error)
    if request["do"] == "status":
        _tell(connection, {**told, "refuses": refuses})
        return _NOT_SERVED
    if refuses or not fds or setters is None:
        _tell(connection, {"refuses": refuses})
        return _NOT_SERVED
    os.setsid()
    adopt_orphans()
    _tell(connection, {"keeper": os.getpid()})
    pid = _fork_launcher(connection, request["config"], fds[0], setters)
    os.close(fds[0])
    return _watch(connection, pid, request["config"].get("remove", []))


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _watch(connection: socket.socket, pid: int, remove: list[str]) -> int:
    pidfd = os.pidfd_open(pid)
    ready, _, _ = select.select([connection, pidfd], [], [])
    code = -signal.SIGKILL
    if pidfd in ready:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kill_descendants(os.getpid())
    connection.setblocking(False)
    try:
        gone = not connection.recv(16)
    except BlockingIOError:
        gone = False
    except OSError:
        gone = True
    if gone:  # the front was killed
        for path in remove:
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        _tell(connection, {"code": code})
    return _SERVED


def _fork_launcher(
    connection: socket.socket,
    config: dict[str, Any],
    output: int,
    setters: list[Callable[[int], Any]],
) -> int:
    def launch() -> None:
        connection.close()
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # Each process has its own; of random numbers, ranks and their children take care.
        multiprocessing.current_process().authkey = os.urandom(32)
        gc.enable()
        launcher.set_environment(config)
        cores = len(os.sched_getaffinity(0))
        for set_threads in setters:
            set_threads(min(cores, int(os.environ["OPENBLAS_NUM_THREADS"])))
        sys.argv = [str(launcher.__file__)]
        launcher.run(config)

    return fork_child(launch)


def _blas_setters() -> list[Callable[[int], Any]]:
    """What tells each loaded OpenBLAS its number of threads; it has read that as it was loaded.

    OpenMP and MKL are told by each rank's `torch.set_num_threads`.

    Raises:
        ValueError: one cannot be told.
    """
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "openblas" in line}
    found = []
    for path in sorted(paths):
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        names = [f"{a}openblas_set_num_threads{b}" for a in ("scipy_", "") for b in ("64_", "")]
        setter = next((getattr(library, name) for name in names if hasattr(library, name)), None)
        if setter is None:
            raise ValueError(f"{path} cannot be told a number of threads")
        found.append(setter)
    return found


# -- start ---------------------------------------------------------------------------------------


def _loaded_files() -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({file for file in files if file and os.path.isabs(file)})


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _close_stderr() -> None:
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def main(argv: list[str]) -> int:
    mine = surroundings.describe()
    launcher.load()
    before = mine["environment"]
    mine["added"] = {name: os.environ[name] for name in os.environ if name not in before}
    # By DDP's constructor, for more than a second. It also names a folder in the environment, which
    # may be another one for other kernels, and which torch finds again by itself.
    import_for_good(["torch._dynamo"])
    gc.disable()  # a page that nobody writes to stays shared
    if sys.modules["torch"].cuda.is_initialized():
        print("an import has initialised CUDA, which does not survive a fork", file=sys.stderr)
        return 1
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        print(f"expected one thread after the imports, got {num_threads}", file=sys.stderr)
        return 1
    adopt_orphans()
    parent = Parent(float(argv[0]), mine)
    gc.collect()
    gc.freeze()
    try:
        return parent.serve()
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
