"""The warm parent from outside: `python -m minidist.kernel.warm.client start | stop | status`.

A warm parent is a process of one user and one environment that has imported torch and waits. A
front with MINIDIST_WARM=1 asks it for a launcher, which then is there after a fork instead of an
import of torch. Where there is none, or none that would do, everything starts as without it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from minidist.kernel.warm import surroundings
from minidist.processes.tree import children

ANSWER_WITHIN_S = 3.0
READY_WITHIN_S = 120.0
IDLE_MIN = 30.0
MAX_REQUEST_BYTES = 16 * 1024 * 1024
_MAX_PATH_BYTES = 107


# -- where it listens ----------------------------------------------------------------------------


def socket_path() -> str:
    """The socket of this user's warm parent of this environment, whether there is one or not."""
    words = "\0".join((sys.prefix, os.path.realpath(sys.executable), sys.version))
    name = hashlib.sha256(words.encode()).hexdigest()[:16]
    uid = os.geteuid()
    for base in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}"):
        path = f"{base}/minidist-warm/{name}"
        if base and len(os.fsencode(path)) <= _MAX_PATH_BYTES and _is_ours(base):
            return path
    return f"/tmp/minidist-warm-{uid}/{name}"


def _is_ours(folder: str) -> bool:
    """Whether nobody else can put anything into the folder."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    private = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private


@contextlib.contextmanager
def alone(path: str, *, create: bool = False) -> Iterator[bool]:
    """Hold the lock of the socket's folder; yields False where there is no such folder.

    Raises:
        PermissionError: the folder is not only ours.
        TimeoutError: somebody holds it for long.
    """
    folder = os.path.dirname(path)
    while True:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            if create:
                raise
            yield False
            return
        try:
            if not _is_ours(folder):
                raise PermissionError(f"{folder}: expected a folder of this user with mode 0700")
            _lock(fd)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(folder), os.fstat(fd)):  # not removed in between
                    yield True
                    return
        finally:
            os.close(fd)


def _lock(fd: int) -> None:
    end = time.monotonic() + ANSWER_WITHIN_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError("the lock of the warm parent's folder is held") from None
            time.sleep(0.01)


def forget(path: str) -> None:
    """With the lock held: remove the socket, and the folder with the last one."""
    for remove, what in ((os.unlink, path), (os.rmdir, os.path.dirname(path))):
        with contextlib.suppress(OSError):
            remove(what)


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the operating system."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def connect(path: str) -> socket.socket | None:
    """A connection to this user's warm parent; None where there is none.

    The socket of one that was killed is removed.
    """
    if not _is_ours(os.path.dirname(path)):
        return None
    if (sock := _try(path)) is None and os.path.lexists(path):
        with contextlib.suppress(OSError), alone(path) as held:
            if held and (sock := _try(path)) is None:
                forget(path)
    return sock


def _try(path: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(ANSWER_WITHIN_S)
    try:
        sock.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        return None
    if peer(sock)[1] != os.geteuid():
        sock.close()
        raise PermissionError(f"{path}: another user listens there")
    return sock


# -- what is asked -------------------------------------------------------------------------------


def ask(sock: socket.socket, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """The answer to a request; empty where none came in time."""
    try:
        socket.send_fds(sock, [b"\0"], fds)
        sock.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(read_line(sock, ANSWER_WITHIN_S) or "{}")
    except (OSError, ValueError):
        return {}


def read_line(sock: socket.socket, within_s: float) -> bytes:
    """Bytes up to a newline; empty where the end or the deadline came first."""
    data, end = bytearray(), time.monotonic() + within_s
    while not data.endswith(b"\n"):
        sock.settimeout(max(0.01, end - time.monotonic()))
        more = sock.recv(1 << 16)
        if not more or len(data) > MAX_REQUEST_BYTES or time.monotonic() > end:
            return b""
        data += more
    return bytes(data)


class Launcher:
    """A launcher that a warm parent has forked, with as much of `Popen` as the front needs.

    Its own parent is a keeper, which ends it and all below it when the front ends, and the other
    way round tells of its end.
    """

    def __init__(self, sock: socket.socket, pid: int, pidfd: int, stdout: BinaryIO) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._sock, self._pidfd = sock, pidfd
        self._sock.setblocking(False)
        self._told = b""

    def poll(self) -> int | None:
        """Its exit status, as `Popen.poll`."""
        while self.returncode is None:
            try:
                data = self._sock.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._told += data
            if not data or self._told.endswith(b"\n"):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    self.returncode = int(json.loads(self._told)["code"])
                if self.returncode is None:  # the keeper itself was killed
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def end(self, within_s: float = 5.0) -> None:
        """End it and everything below it; harmless when called again."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(OSError):
            self._sock.send(b"end\n")
        waiting = select.poll()
        waiting.register(self._pidfd, select.POLLIN)
        if not waiting.poll(within_s * 1000):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.poll()
        os.close(self._pidfd)
        self._pidfd = -1
        self._sock.close()


def launch(
    config: dict[str, Any], environment: dict[str, str] | None, cwd: str | None
) -> Launcher | None:
    """A launcher with this configuration from the warm parent; None where it has to start cold."""
    try:
        sock = connect(socket_path())
    except OSError:
        return None
    if sock is None:
        return None
    out, inside = os.pipe()
    answer: dict[str, Any] = {}
    try:
        request = {"config": config, **surroundings.describe(environment, cwd)}
        answer = ask(sock, {"do": "launch", **request}, [inside])
        pidfd = _open_keeper(answer.get("keeper"), peer(sock)[0])
    except OSError:
        pidfd = None
    finally:
        os.close(inside)
    if pidfd is None:
        sock.close()  # it ends what it has forked, if it was only late
        os.close(out)
        return None
    return Launcher(sock, answer["keeper"], pidfd, open(out, "rb", buffering=0))


def _open_keeper(pid: Any, parent: int) -> int | None:
    """A pidfd of the keeper, if that is what the number means."""
    if not isinstance(pid, int):
        return None
    pidfd = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        if pid in children(parent):
            return pidfd
    os.close(pidfd)
    return None


# -- the command line ----------------------------------------------------------------------------


def _status() -> tuple[socket.socket | None, dict[str, Any]]:
    """A connection to the warm parent, if there is one, and what it says of itself."""
    sock = connect(socket_path())
    if sock is None:
        return None, {}
    return sock, ask(sock, {"do": "status", **surroundings.describe()}, [])


def start(idle_min: float) -> int:
    """Start a warm parent and wait until it can serve; 0 if one is there that would do."""
    end = time.monotonic() + READY_WITHIN_S
    sock, told = _status()
    while sock is not None and not told and time.monotonic() < end:
        sock.close()  # it ends, as its files have changed
        time.sleep(0.1)
        sock, told = _status()
    if sock is not None:
        return _say(told)
    environment = {**os.environ, **dict.fromkeys(surroundings.THREADS, "1")}
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "minidist.kernel.warm.parent", str(idle_min * 60)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment, cwd="/", start_new_session=True,
    )  # fmt: skip
    text = _until_closed(process)
    sock, told = _status()
    if sock is None:
        print(f"no warm parent: {text.strip()}", file=sys.stderr)
        return 1
    return _say(told)


def _until_closed(process: subprocess.Popen[bytes]) -> str:
    """What the process writes to stderr, which it closes when it listens."""
    assert process.stderr is not None
    with process.stderr as stderr:
        text, end = b"", time.monotonic() + READY_WITHIN_S
        while select.select([stderr], [], [], max(0.0, end - time.monotonic()))[0]:
            data = os.read(stderr.fileno(), 4096)
            if not data:
                return text.decode(errors="replace")
            text += data
    process.kill()
    return f"not ready within {READY_WITHIN_S:.0f} s"


def stop() -> int:
    """End the warm parent; kernels that it has started go on."""
    sock, _ = _status()
    if sock is None:
        print(f"no warm parent of {sys.prefix}")
        return 0
    pid = peer(sock)[0]
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        if (again := connect(socket_path())) is not None and peer(again)[0] == pid:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        if not waiting.poll(ANSWER_WITHIN_S * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            waiting.poll(ANSWER_WITHIN_S * 1000)
    connect(socket_path())  # clears the socket of one that was killed
    print(f"ended the warm parent {pid} of {sys.prefix}")
    return 0


def status() -> int:
    """Print whether there is a warm parent; 0 if a kernel from here would be started by it."""
    sock, told = _status()
    if sock is None:
        print(f"no warm parent of {sys.prefix}")
        return 1
    return _say(told)


def _say(told: dict[str, Any]) -> int:
    if not told:
        print(f"the warm parent of {sys.prefix} does not answer")
        return 1
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(told["since"]))
    print(
        f"warm parent {told['pid']} of {sys.prefix}: since {since}, {told['running']} of "
        f"{told['started']} kernels run; it ends after {told['idle_s'] / 60:g} min without one"
    )
    if told["refuses"]:
        print(f"a kernel from here would start without it: {told['refuses']}")
        return 1
    if os.environ.get("MINIDIST_WARM") != "1":
        print("kernels use it where MINIDIST_WARM=1 is set")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minidist.kernel.warm.client", allow_abbrev=False
    )
    parser.add_argument("do", choices=("start", "stop", "status"))
    parser.add_argument(
        "--idle", type=float, default=IDLE_MIN, metavar="MIN", help="end after so many minutes"
    )
    known = parser.parse_args(argv)
    try:
        return {"start": lambda: start(known.idle), "stop": stop, "status": status}[known.do]()
    except OSError as error:
        print(f"minidist.kernel.warm.client: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
