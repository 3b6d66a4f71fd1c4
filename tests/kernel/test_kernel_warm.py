"""Kernels whose launcher a warm parent has forked: as after a cold start, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_helper import ALL_REDUCE, JOIN, SETUP, Kernel, alive, wait_gone
from kernel_helper import kernel as new_kernel

from minidist.kernel.warm import client, surroundings
from minidist.processes.tree import descendants

_CAN_BE_ANOTHER = os.geteuid() == 0 and os.path.exists("/usr/bin/python3")
ROOT_ONLY = pytest.mark.skipif(not _CAN_BE_ANOTHER, reason="needs root to act as another user")
OTHER_USER = 65534


def tell(*words: str, **env: str) -> tuple[int, str]:
    """Exit status and output of `python -m minidist.kernel.warm.client`."""
    done = subprocess.run(
        [sys.executable, "-m", "minidist.kernel.warm.client", *words],
        capture_output=True, text=True, timeout=100, env={**os.environ, **env},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def parent_pid() -> int:
    """The warm parent's process, from the operating system."""
    sock = client.connect(client.socket_path())
    assert sock is not None
    with sock:
        return client.peer(sock)[0]


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Iterator[Path]:
    """A runtime folder of its own, in which no warm parent outlives the test."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    tell("stop")
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A warm parent for the whole module."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run")
        folder.chmod(0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("MINIDIST_WARM", "1")
        assert tell("start")[0] == 0
        pid = parent_pid()
        try:
            yield pid
        finally:
            tell("stop")
            assert wait_gone([pid]) == []
            assert list(folder.iterdir()) == []


def family(kernel: Kernel, parent: int) -> list[int]:
    """Front, keeper, launcher and all below, of a kernel that the warm parent has started."""
    assert len(descendants(kernel.pid)) == 0, "it has started cold"
    return [kernel.pid, *descendants(parent)]


# What a cell can see of the process that it runs in.
_SEEN = """\
import json, locale, multiprocessing, numpy, resource, signal
def to(fd):
    path = f"/proc/self/fd/{fd}"
    return os.readlink(path).split(":")[0] if os.path.lexists(path) else ""
def seen():
    no = ("MINIDIST_RUN_DIR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
          "JPY_SESSION_NAME", "MINIDIST_WARM", "JPY_PARENT_PID", "MINIDIST_FORK_SERVER")
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    kept = ("Umask", "Groups", "CapEff", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "SigCgt",
            "Cpus_allowed_list")
    blas = open("/proc/self/maps").read().count("openblas") and [
        getattr(__import__("ctypes").CDLL(path), name)()
        for path in {w.split(None, 5)[5].strip()
                     for w in open("/proc/self/maps") if "openblas" in w}
        for name in ("scipy_openblas_get_num_threads64_",)]
    return {
        "environment": {k: v for k, v in sorted(os.environ.items()) if k not in no},
        "status": {k: status[k].strip() for k in kept},
        "cwd": os.getcwd(), "path": sys.path, "argv": sys.argv, "executable": sys.executable,
        "hook": getattr(sys, "hooked", None), "preloaded": "wave" in sys.modules,
        "limits": [resource.getrlimit(n) for n in range(16)],
        "niceness": os.nice(0), "stdin": os.readlink("/proc/self/fd/0"),
        "out": [to(1), to(2)],
        "fds": sorted(where for where in map(to, os.listdir("/proc/self/fd"))
                      if where in ("pipe", "socket", "anon_inode")),
        "locale": locale.getlocale(), "zone": time.tzname,
        "gc": __import__("gc").isenabled(), "start": multiprocessing.get_start_method(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), blas],
        "main": __name__, "flags": list(sys.flags), "cuda": torch.cuda.is_initialized(),
    }
print(json.dumps(seen()))
"""


def _seen(kernel: Kernel) -> dict[str, object]:
    return json.loads(kernel.ok(f"{SETUP}\n{_SEEN}").text().splitlines()[0])


def test_a_cell_cannot_tell_it_from_a_cold_start(parent: int, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_hook.py").write_text("import sys\ndef run(): sys.hooked = 'yes'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MINIDIST_RANK_INIT", "my_hook:run")
    monkeypatch.setenv("MINIDIST_PRELOAD", "wave")
    monkeypatch.setenv("OF_THE_TEST", "ä \udcff =\n'")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    limited = ["sh", "-c", 'umask 027; ulimit -n 777; exec nice -n 3 "$@"', "sh"]
    found = []
    for word in ("0", "1"):
        monkeypatch.setenv("MINIDIST_WARM", word)
        manager_arguments = {"cwd": str(tmp_path)}
        with _with_prefix(limited, manager_arguments) as kernel:
            assert kernel.ok(f"{JOIN}\n{ALL_REDUCE}").text() == "3.0\n[rank 1: same output]\n"
            assert bool(descendants(kernel.pid)) == (word == "0")
            found.append(_seen(kernel))
    cold, hot = found
    assert cold["cwd"] == str(tmp_path)
    assert cold["hook"] == "yes"
    assert hot == cold


def _with_prefix(words: list[str], options: dict[str, str]):
    """A kernel that is started through another command."""
    from jupyter_client.manager import KernelManager

    class Manager(KernelManager):
        def format_kernel_cmd(self, extra_arguments=None):
            return [*words, *super().format_kernel_cmd(extra_arguments)]

    return new_kernel(manager=Manager, **options)


def test_two_notebooks_at_once(parent: int) -> None:
    with new_kernel() as one, new_kernel(name="torchrun-3") as two:
        assert one.ok(f"{JOIN}\n{ALL_REDUCE}").text().startswith("3.0\n")
        assert two.ok(f"{JOIN}\n{ALL_REDUCE}").text().startswith("6.0\n")
        draw = "%%rank 0\nimport numpy, random; print(numpy.random.rand(), random.random())"
        drawn = [kernel.ok(draw).text() for kernel in (one, two)]
        assert not {*drawn[0].split()} & {*drawn[1].split()}
        code, text = tell("status")
        assert code == 0
        assert f"warm parent {parent} of {sys.prefix}" in text
        assert "2 of" in text
        first = family(one, parent)
        one.close()
        assert two.ok(ALL_REDUCE).text().startswith("6.0\n")
        assert set(wait_gone(first, 0.5)) <= set(family(two, parent))


def test_other_ranks_and_an_interrupt(parent: int) -> None:
    with new_kernel() as kernel:
        kernel.ok(SETUP)
        started = family(kernel, parent)

        def interrupt(message: dict) -> None:
            if message["msg_type"] == "stream":
                kernel.manager.interrupt_kernel()

        reply = kernel.client.execute_interactive(
            "kept = 5\nprint('now', flush=True)\ntime.sleep(100)",
            timeout=60, output_hook=interrupt, allow_stdin=False,
        )  # fmt: skip
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert kernel.ok("print(kept)").text().startswith("5\n")
        text = kernel.ok(f"%restart_ranks 3\n{JOIN}\n{ALL_REDUCE}").text()
        assert "6.0\n" in text
        assert descendants(parent)[:2] == started[1:3]  # the same keeper and launcher
    assert wait_gone([*started, *descendants(parent)]) == []


def test_a_rank_that_cannot_start_says_why(parent: int, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_hook.py").write_text("def run(): raise OSError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MINIDIST_RANK_INIT", "my_hook:run")
    with new_kernel() as kernel:
        assert "OSError: no such thing" in kernel.run("1").reply["evalue"]
    monkeypatch.delenv("MINIDIST_RANK_INIT")
    monkeypatch.setenv("MINIDIST_PRELOAD", "no_such_module")
    with new_kernel() as kernel:
        text = kernel.run("1").reply["evalue"]
        assert "the launcher ended with exit code 1" in text
        assert "No module named 'no_such_module'" in text
    assert wait_gone(descendants(parent)) == []


_LEAVE = f"""{JOIN}
import subprocess
keep = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.environ["MINIDIST_RUN_DIR"], sys.stdout.folder)"""


@pytest.mark.parametrize("who", ["front, politely", "front", "launcher", "keeper"])
def test_nothing_is_left_whatever_dies_first(parent: int, who: str) -> None:
    with new_kernel() as kernel:
        folders = [Path(word) for word in kernel.ok(_LEAVE).text().splitlines()[0].split()]
        assert [folder.is_dir() for folder in folders] == [True, True]
        every = family(kernel, parent)
        assert len(every) == 9  # front, keeper, launcher, server, agent, two ranks, two sleeps
        if who == "front, politely":
            kernel.close()
        elif who == "front":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            os.kill(every[2 if who == "launcher" else 1], signal.SIGKILL)
            assert wait_gone(every[1:]) == []
            assert "launcher" in kernel.run("1").reply["evalue"]
            again = kernel.ok(f"%restart_ranks\n{JOIN}\n{ALL_REDUCE}").text()
            assert "3.0\n" in again
            every += family(kernel, parent)
            kernel.close()
        assert wait_gone(every) == []
        end = time.monotonic() + 10
        while any(folder.exists() for folder in folders) and time.monotonic() < end:
            time.sleep(0.05)
        assert [folder.exists() for folder in folders] == [False, False]
    assert alive(parent)


def test_what_is_graded_never_uses_it(parent: int, tmp_path: Path) -> None:
    (tmp_path / "launcher.json").write_text("{}")
    with new_kernel("--launcher", str(tmp_path / "launcher.json")) as kernel:
        kernel.ok("1")
        assert len(descendants(kernel.pid)) == 5
        assert descendants(parent) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TORCH_LOGS", "+dynamo", "another TORCH_LOGS"),
        ("LC_TIME", "C", "another LC_TIME"),
        ("OMP_NUM_THREADS", "2,2", "OMP_NUM_THREADS is not a number"),
        ("PYTHONPATH", "HIDES", "hides the module numpy"),
        ("SLURM_JOB_ID", "7", "another SLURM_JOB_ID"),
    ],
)
def test_other_surroundings_start_cold(
    parent: int, tmp_path: Path, name: str, value: str, words: str
) -> None:
    (tmp_path / "numpy.py").touch()
    code, text = tell("status", **{name: str(tmp_path) if value == "HIDES" else value})
    assert (code, words in text) == (1, True), text


def test_another_control_group_is_entered_or_refused() -> None:
    mine = surroundings.describe()
    with pytest.raises(ValueError, match="another control group"):
        surroundings.take_over({**mine, "cgroup": "1:name=systemd:/x\n0::/\n"}, {})
    with pytest.raises(OSError, match="cgroup"):
        surroundings.take_over({**mine, "cgroup": "0::/no/such/group\n"}, {})


def test_a_folder_that_is_gone_starts_cold(parent: int, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    # Of a fresh process: other tests have changed this one's path and environment.
    code = "import json\nfrom minidist.kernel.warm import surroundings\nprint(json.dumps("
    code += "surroundings.describe(cwd='/')))"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    wanted = {**json.loads(told.stdout), "cwd": str(gone)}
    sock = client.connect(client.socket_path())
    assert sock is not None
    with sock:
        answer = client.ask(sock, {"do": "status", **wanted}, [])
    assert "No such file or directory" in answer["refuses"]


def test_what_cannot_be_taken_over(tmp_path: Path) -> None:
    mine = surroundings.describe()
    assert surroundings.difference(mine, surroundings.describe()) == ""
    for key, value in {
        "python": ["other"],
        "options": [["error"], {}],
        "rights": {"Uid": "1"},
        "namespaces": {"pid": "pid:[1]"},
        "scheduler": -1,
        "path": ["/nowhere"],
    }.items():
        assert surroundings.difference(mine, {**mine, key: value}) != "", key
    end = len(mine["path"])
    path = [*mine["path"][: end - 1], "/nowhere", *mine["path"][end - 1 :]]
    assert surroundings.difference(mine, {**mine, "path": path}) == ""
    (tmp_path / "__main__.py").touch()  # no module that anybody imports
    assert surroundings.difference(mine, {**mine, "path": [*path, str(tmp_path)]}) == ""
    added = {**mine, "environment": {**mine["environment"], "NEW": "1", "OMP_NUM_THREADS": "9"}}
    assert surroundings.difference(mine, added) == ""


def test_a_silent_or_senseless_client_holds_nobody_up(parent: int) -> None:
    socks = []
    for data in (b"", b"\0", b"\0{", b"\0[]\n", b"\0" + b"\xff" * 5000 + b"\n", b"\0{}\n"):
        sock = client.connect(client.socket_path())
        assert sock is not None
        sock.send(data)
        socks.append(sock)
    assert tell("status")[0] == 0
    for sock in socks:
        sock.settimeout(20)
        assert sock.recv(100) == b""
        sock.close()
    assert wait_gone(descendants(parent)) == []


def test_one_is_enough(parent: int) -> None:
    code, text = tell("start")
    assert (code, f"warm parent {parent} of" in text) == (0, True), text
    assert stat.S_IMODE(os.stat(client.socket_path()).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(client.socket_path())).st_mode) == 0o700


@ROOT_ONLY
def test_another_user_is_not_served(parent: int) -> None:
    path = Path(client.socket_path())
    places = [path, *(place for place in path.parents if len(place.parts) > 2)]  # not /tmp
    modes = [place.stat().st_mode for place in places]
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        's.send(b\'\\0{"do": "status"}\\n\'); s.settimeout(20); print(s.recv(100))'
    )
    try:
        for place in places:
            place.chmod(0o777)
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code, str(path)],
            user=OTHER_USER, cwd="/", capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        for place, mode in zip(places, modes, strict=True):
            place.chmod(stat.S_IMODE(mode))
    assert done.stdout == "b''\n" or "ConnectionResetError" in done.stderr, done.stderr


def test_a_killed_parent_changes_nothing_for_those_that_run(runtime: Path, monkeypatch) -> None:
    monkeypatch.setenv("MINIDIST_WARM", "1")
    assert tell("start")[0] == 0
    pid = parent_pid()
    with new_kernel() as kernel:
        kernel.ok(JOIN)
        every = family(kernel, pid)
        os.kill(pid, signal.SIGKILL)
        assert wait_gone([pid]) == []
        assert kernel.ok(ALL_REDUCE).text().startswith("3.0\n")
        assert "3.0\n" in kernel.ok(f"%restart_ranks\n{JOIN}\n{ALL_REDUCE}").text()
        with new_kernel() as other:
            assert other.ok(f"{JOIN}\n{ALL_REDUCE}").text().startswith("3.0\n")
            assert len(descendants(other.pid)) == 5  # cold
        # That start has removed the dead one's socket.
        assert list(runtime.glob("minidist-warm*")) == []
        every += descendants(every[1])
        os.kill(kernel.pid, signal.SIGKILL)
        assert wait_gone(every) == []


def test_it_ends_when_idle_or_changed(runtime: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert tell("start", "--idle", "0.03")[0] == 0
    pid = parent_pid()
    assert wait_gone([pid], 30) == []
    assert list(runtime.iterdir()) == []

    assert tell("start")[0] == 0
    pid = parent_pid()
    (tmp_path / "sitecustomize.py").write_text("import os")
    assert tell("status")[0] == 1
    assert wait_gone([pid]) == []
    assert tell("status") == (1, f"no warm parent of {sys.prefix}\n")
    assert tell("stop")[0] == 0


def test_sockets_of_others_and_of_the_dead_are_left_alone(runtime: Path) -> None:
    path = Path(client.socket_path())
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    assert client.launch({}, None, None) is None
    assert list(runtime.iterdir()) == []  # nobody listened there
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        path.parent.chmod(0o755)
        assert client.launch({}, None, None) is None
        code, text = tell("start")
        assert code == 1
        assert "mode 0700" in text
        assert "Traceback" not in text
        path.parent.chmod(0o700)
        began = time.monotonic()
        assert client.launch({}, None, None) is None  # it does not answer
        assert time.monotonic() - began < 30
    path.unlink()
    path.parent.rmdir()


@ROOT_ONLY
def test_a_listener_of_another_user_is_refused(runtime: Path, tmp_path: Path) -> None:
    path, elsewhere = Path(client.socket_path()), Path("/tmp") / f"warm-{os.getpid()}"
    path.parent.mkdir(mode=0o700)
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
        "print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        ["/usr/bin/python3", "-c", code, str(elsewhere)],
        user=OTHER_USER, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        elsewhere.rename(path)
        assert client.launch({}, None, None) is None
        assert "another user listens there" in tell("status")[1]
        process.kill()
    path.unlink()
    path.parent.rmdir()
