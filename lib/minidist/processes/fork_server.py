"""A process that has imported torch and forks others: they start in the time of a fork.

Example::

    child = fork(work, "some", "arguments")  # calls work(pipe, "some", "arguments") over there
    answer = child.pipe.recv()
    child.join(5.0)

`fork` starts a server when it is first called. Ranks of the torchrun kernel share one that their
launcher has forked, which has torch already. A server runs nothing of its users': it is sent open
files and a single byte, and the process that it forks reads the rest. Whoever asks holds the only
other end, so there is no address to guess, and nothing that stays on a disk.

Importing this module does not import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, util
from typing import Any

import cloudpickle

from minidist.processes.lifetime import die_with_parent

# DistributedDataParallel's constructor imports torch._dynamo: more than a second in every process.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "minidist.launch")
# Names the socket of a server that was inherited, and its inode: the number may mean another file.
VARIABLE = "MINIDIST_FORK_SERVER"
START_TIMEOUT_S = 120.0  # a server imports torch first, on a busy machine perhaps
_INT_BYTES = 4


# -- who asks -------------------------------------------------------------------------------------


class Child:
    """A process that a server has forked.

    Attributes:
        pid: its pid.
        pipe: a connection to it; the function got the other end as its first argument.
    """

    def __init__(self, pipe: connection.Connection, status: socket.socket) -> None:
        self.pipe = pipe
        self._status = status
        self._code: int | None = None
        self.pid = self._read(START_TIMEOUT_S)

    def _read(self, timeout_s: float) -> int:
        self._status.settimeout(max(timeout_s, 1e-3))
        data = self._status.recv(_INT_BYTES)
        if len(data) < _INT_BYTES:
            raise EOFError("the fork server has ended")
        return int.from_bytes(data, "little", signed=True)

    def join(self, timeout_s: float) -> int | None:
        """Waits for its end; its exit code, negative for a signal, or None if it still runs."""
        if self._code is None:
            try:
                self._code = self._read(timeout_s)
            except TimeoutError:
                return None
            except (EOFError, OSError):
                self._code = -signal.SIGKILL  # it has died with its server
        return self._code

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.join(0.0)

    def kill(self) -> None:
        """Kills it, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of the pipe, not of the process."""
        self.pipe.close()
        self._status.close()


def fork(
    fn: Callable[..., object],
    *args: Any,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    new_session: bool = False,
    server: Server | None = None,
) -> Child:
    """Calls `fn(pipe, *args)` in a new process that has torch already.

    Its standard output and error are this process's, its input is empty. It ends with code 0, or
    with 1 and a traceback on its standard error where `fn` raised; and with whoever called `fork`.

    Args:
        fn: what to call; pickled like its arguments, by value where they cannot be imported.
        env: its whole environment; default: this process's.
        cwd: its working folder; default: this process's.
        new_session: give it a session and a process group of its own.
        server: what forks it; default: the launcher's where it was inherited, else this process's.

    Raises:
        OSError: no process could be started.
    """
    place = {"env": dict(os.environ if env is None else env), "path": list(sys.path),
             "argv": list(sys.argv), "cwd": os.fspath(cwd or os.getcwd()),
             "new_session": new_session}  # fmt: skip
    job = cloudpickle.dumps((fn, args))
    child = server.ask() if server else _ask_inherited() or _OWN.ask()
    with contextlib.suppress(OSError):  # it has died: its exit code says so
        child.pipe.send(place)
        child.pipe.send_bytes(job)
    return child


def _ask(server: socket.socket) -> Child:
    ours, theirs = connection.Pipe(duplex=True)
    status, their_status = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with theirs, their_status:
            socket.send_fds(server, [b"f"], [theirs.fileno(), their_status.fileno(), 1, 2])
        return Child(ours, status)
    except (OSError, EOFError) as error:
        ours.close()
        status.close()
        raise OSError(f"the fork server did not fork: {error}") from error


def name_of(requests: socket.socket) -> str:
    """What to set `VARIABLE` to for processes that inherit `requests`."""
    return f"{requests.fileno()}:{os.fstat(requests.fileno()).st_ino}"


def _ask_inherited() -> Child | None:
    """A child of the launcher's server, where this process has its socket from its parents."""
    fd, _, inode = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(fd)).st_ino == int(inode):
            with socket.socket(fileno=os.dup(int(fd))) as server:
                return _ask(server)
    return None


class Server:
    """A server of this process; where it has died, it is started anew when it is needed.

    Args:
        preload: modules that it imports as soon as it is started; default: PRELOAD, when it is
            first asked to fork.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._owner = 0  # the process that has started it: after a fork, not this one

    def start(self) -> None:
        """Starts it, unless it runs; returns at once."""
        with self._lock:
            self._ensure()

    def ask(self) -> Child:
        """A child of it that waits for what to do.

        Raises:
            OSError: it could not be started, or it died twice while it forked.
        """
        with self._lock:
            with contextlib.suppress(OSError):  # it has just been killed
                return _ask(self._ensure())
            self._end()
            return _ask(self._ensure())

    def end(self) -> None:
        """Ends it and what it has forked."""
        with self._lock:
            self._end()

    def _ensure(self) -> socket.socket:
        if self._requests is not None and self._owner == os.getpid():
            if self._process is not None and self._process.poll() is None:
                return self._requests
            self._end()
        requests, theirs = socket.socketpair()
        with theirs:
            code = (
                "import sys; from minidist.processes.fork_server import main; main(*sys.argv[1:])"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), *self._preload],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        if not self._owner:
            atexit.register(self.end)
        self._requests, self._owner = requests, os.getpid()
        return requests

    def _end(self) -> None:
        if self._requests is not None and self._process is not None and self._owner == os.getpid():
            self._requests.close()
            self._process.kill()
            self._process.wait()
            self._requests = self._process = None


_OWN = Server()


def use(*preload: str) -> None:
    """Has this process's server import more than PRELOAD, from its next start on."""
    global _OWN
    _OWN.end()
    _OWN = Server([*PRELOAD, *preload])


# -- the server -----------------------------------------------------------------------------------


def main(fd: str, *preload: str) -> None:
    """A server that is a program of its own."""
    import_for_good(preload)
    serve(socket.socket(fileno=int(fd)), preload or PRELOAD)
    os._exit(0)  # and what it has forked ends with it


def fork_child(work: Callable[[], object]) -> int:
    """Forks a process that does `work` and ends with this one; returns its pid.

    It ends with code 0, or with 1 and a traceback on stderr where `work` raised.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def import_for_good(names: Sequence[str]) -> None:
    """Imports modules in a process that will fork.

    Without the garbage collector that takes a fifth less time. What has been made stays out of its
    sight, so that its later runs do not write to, and thereby copy, what forked processes share.
    """
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def reseed_numpy() -> None:
    """Lets forks of one process draw different numbers, as Python's own `random` does by itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def serve(requests: socket.socket, preload: Sequence[str] = PRELOAD) -> None:
    """Forks for those who hold the other end of `requests`, until nobody does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who ask
    signal.signal(signal.SIGCHLD, lambda *_: None)
    awake, wake = os.pipe()
    for fd in (awake, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}  # pid -> where its exit code goes
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if awake in ready:
                os.read(awake, 4096)
                _report_ends(statuses)
            if requests not in ready:
                continue
            message, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not message:
                return
            if len(fds) < 4:  # not from `fork`
                continue
            if not sys.modules.keys() >= set(preload):
                import_for_good(preload)
            of_server = [awake, wake, requests.fileno(), *statuses.values()]
            pid = fork_child(functools.partial(_be_child, fds, of_server))
            pipe, statuses[pid], out, err = fds
            for fd in (pipe, out, err):
                os.close(fd)
            _tell(statuses[pid], pid)  # from now on, only the child holds the other end of its pipe


def _report_ends(statuses: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if (fd := statuses.pop(pid, None)) is not None:
                _tell(fd, os.waitstatus_to_exitcode(status))
                os.close(fd)


def _tell(fd: int, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked is gone
        os.write(fd, number.to_bytes(_INT_BYTES, "little", signed=True))


def _be_child(fds: list[int], of_server: list[int]) -> None:
    """What a forked process does."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pipe, status, out, err = fds
    for fd in (*of_server, status):
        os.close(fd)
    for fd, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    try:
        _work(connection.Connection(pipe))
    finally:
        with contextlib.suppress(Exception):  # a DataLoader's workers end
            util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]


def _work(pipe: connection.Connection) -> None:
    """Goes where whoever asked is, and does what was asked for."""
    try:
        place, job = pipe.recv(), pipe.recv_bytes()
    except EOFError:  # whoever asked was gone before it said what for
        sys.exit(1)
    if place["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(place["env"])
    os.chdir(place["cwd"])
    sys.path[:], sys.argv = place["path"], place["argv"]
    reseed_numpy()
    fn, args = pickle.loads(job)
    fn(pipe, *args)
