"""A server process that has imported torch and forks new processes, which start as fast as a fork.

Example::

    child = fork(work, "some", "arguments")  # calls work(pipe, "some", "arguments") in the child
    answer = child.pipe.recv()
    child.join(5.0)

`fork` starts a server when it is first called. Ranks of the torchrun kernel share a server that
their launcher has forked and that already has torch. A server never runs user code: it receives
open files and a single byte, and the process that it forks reads the rest. The asking process holds
the only other end of the socket, so there is no address to guess, and nothing stays on a disk.

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
# Environment variable with the number and the inode of an inherited server's socket. The inode
# shows whether the number still means that socket.
VARIABLE = "MINIDIST_FORK_SERVER"
START_TIMEOUT_S = 120.0  # a server first imports torch, perhaps on a busy machine
_INT_BYTES = 4


# -- the asking process ---------------------------------------------------------------------------


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
        """Waits for its end; returns its exit code (negative: a signal), or None if it runs."""
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
        """Closes the pipe; the process may go on."""
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
    with 1 and a traceback on its standard error if `fn` raised. It is killed when its server ends,
    and a server ends when no process holds the other end of its socket.

    Args:
        fn: what to call; pickled like its arguments, by value if they cannot be imported.
        env: its whole environment; default: this process's.
        cwd: its working folder; default: this process's.
        new_session: give it a session and a process group of its own.
        server: the server that forks it; default: the launcher's server if it was inherited, else
            this process's own.

    Raises:
        OSError: no process could be started.
    """
    place = {
        "env": dict(os.environ if env is None else env),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "cwd": os.fspath(cwd or os.getcwd()),
        "new_session": new_session,
    }
    call = cloudpickle.dumps((fn, args))
    child = server.ask() if server else _ask_inherited() or _OWN.ask()
    with contextlib.suppress(OSError):  # the child has died: its exit code shows that
        child.pipe.send(place)
        child.pipe.send_bytes(call)
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
    """The value of `VARIABLE` for processes that inherit `requests`."""
    return f"{requests.fileno()}:{os.fstat(requests.fileno()).st_ino}"


def _ask_inherited() -> Child | None:
    """A child of the launcher's server; None if this process has not inherited its socket."""
    fd, _, inode = os.environ.get(VARIABLE, "").partition(":")
    with contextlib.suppress(OSError, ValueError):
        if os.fstat(int(fd)).st_ino == int(inode):
            with socket.socket(fileno=os.dup(int(fd))) as server:
                return _ask(server)
    return None


class Server:
    """A server of this process; if it has died, it is started again when it is needed.

    Args:
        preload: modules that it imports as soon as it is started; default: PRELOAD, imported when
            it is first asked to fork.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._owner = 0  # pid of the process that started it; differs after a fork

    def start(self) -> None:
        """Starts the server, unless it runs; returns at once."""
        with self._lock:
            self._ensure()

    def ask(self) -> Child:
        """A new child of the server, which waits for its work.

        Raises:
            OSError: the server could not be started, or it died twice while it forked.
        """
        with self._lock:
            with contextlib.suppress(OSError):  # the server has just been killed
                return _ask(self._ensure())
            self._end()
            return _ask(self._ensure())

    def end(self) -> None:
        """Ends the server and what it has forked."""
        with self._lock:
            self._end()

    def _ensure(self) -> socket.socket:
        if self._requests is not None and self._owner == os.getpid():
            if self._process is not None and self._process.poll() is None:
                return self._requests
            self._end()
        requests, theirs = socket.socketpair()
        with theirs:
            # This process's sys.path, without the working folder: a checkout may be there.
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                "from minidist.processes.fork_server import main; main(*sys.argv[1:])"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), *self._preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
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
    """Lets this process's server import `preload` besides PRELOAD, from its next start on."""
    global _OWN
    _OWN.end()
    _OWN = Server([*PRELOAD, *preload])


# -- the server -----------------------------------------------------------------------------------


def main(fd: str, *preload: str) -> None:
    """Runs a server as a separate program."""
    import_for_good(preload)
    serve(socket.socket(fileno=int(fd)), preload or PRELOAD)
    os._exit(0)  # what it has forked ends with it


def fork_child(work: Callable[[], object]) -> int:
    """Forks a process that does `work` and ends with this one; returns its pid.

    It ends with code 0, or with 1 and a traceback on stderr if `work` raised.
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

    Without the garbage collector, importing takes a fifth less time. Then all objects are frozen:
    later collections do not write to, and thereby copy, memory that forked processes share.
    """
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def reseed_numpy() -> None:
    """Makes forks of one process draw different numbers; Python's `random` does so by itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def serve(requests: socket.socket, preload: Sequence[str] = PRELOAD) -> None:
    """Forks for the processes that hold the other end of `requests`, until no process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the asking processes
    signal.signal(signal.SIGCHLD, lambda *_: None)
    awake, wake = os.pipe()
    for fd in (awake, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}  # pid -> file to write its exit code to
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
    with contextlib.suppress(OSError):  # the asking process is gone
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
        with contextlib.suppress(Exception):  # ends a DataLoader's workers
            util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]


def _work(pipe: connection.Connection) -> None:
    """Takes over the asking process's environment and folder, then calls the function."""
    try:
        place, call = pipe.recv(), pipe.recv_bytes()
    except EOFError:  # the asking process has ended before it sent the work
        sys.exit(1)
    if place["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(place["env"])
    os.chdir(place["cwd"])
    sys.path[:], sys.argv = place["path"], place["argv"]
    reseed_numpy()
    fn, args = pickle.loads(call)
    fn(pipe, *args)
