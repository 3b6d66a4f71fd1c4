"""The box: what student code cannot see, reach or outlive, and what it still can do."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from course import copy_package

import autograder
import minidist
from autograder.box import sandbox
from autograder.box.guard import Guard
from autograder.box.sandbox import SANDBOXES, Box, Limits, build_box, build_open, probe_support
from autograder.criteria import OURS, limits
from autograder.criteria.limits import MIB

PROJECT = Path(autograder.__file__).parent.parent
INSIDE = {"__init__.py", "criteria", "inside", "py.typed"}
needs_box = pytest.mark.usefixtures("backend")


@pytest.fixture(params=SANDBOXES)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that a box promises holds for every program that can make one."""
    monkeypatch.setenv("AUTOGRADER_SANDBOX", request.param)
    probe_support.cache_clear()
    support = probe_support()
    try:
        if not support.works:
            pytest.skip(f"no sandbox: {support.reason}")
        yield request.param
    finally:
        probe_support.cache_clear()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="md-", dir="/tmp") as folder:
        yield Path(folder)


def _run(box: Box, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*box.prefix, *command],
        env=box.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def _python(box: Box, code: str) -> str:
    done = _run(box, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_box
def test_other_files_are_not_there(run_dir: Path, backend: str):
    secret = PROJECT / f".secret-{uuid.uuid4().hex}"
    beside = Path("/tmp", f"secret-{uuid.uuid4().hex}")
    seen_inside = [PROJECT, Path(sys.prefix), Path(sys.base_prefix)]
    try:
        for file in (secret, beside):
            file.write_text("key")
        code = f"""
import glob, os
for path in {
            [
                str(secret),
                str(beside),
                "/root/.ssh",
                os.path.expanduser("~/.ssh"),
                *map(str, PROJECT.glob(f"autograder/criteria/*/{OURS}.py")),
                *map(str, PROJECT.glob(f"autograder/criteria/*/__pycache__/{OURS}.*")),
                str(PROJECT / "tests/zoo"),
                str(PROJECT / "tests"),
                str(PROJECT / "solutions"),
                str(PROJECT / ".git"),
                str(PROJECT / "build"),
                str(PROJECT / "gradebook.db"),
                "/etc/shadow",
                *(["/run"] if backend == "bwrap" else ["/run/user", "/run/lock"]),
                *(
                    folder
                    for folder in ("/home", "/opt", "/srv", "/var/lib")
                    if not any(path.is_relative_to(folder) for path in seen_inside)
                ),
            ]
        }:
    for spelling in (path, "/proc/self/root" + path, "/proc/1/root" + path, "/usr/.." + path):
        assert not os.path.lexists(spelling), spelling
print(sorted(os.listdir({str(PROJECT)!r})) if os.path.exists({str(PROJECT)!r}) else [])
print(os.getcwd(), os.listdir("."), os.path.expanduser("~"), os.uname().nodename)
"""
        lines = _python(build_box(run_dir=run_dir), code).splitlines()
    finally:
        secret.unlink()
        beside.unlink()
    assert set(eval(lines[0])) <= {".venv", "autograder", "lib"}
    assert lines[1] == "/tmp/work [] /tmp/home box"


@needs_box
def test_links_made_inside_lead_nowhere(run_dir: Path):
    target = PROJECT / "pyproject.toml"
    code = f"""
import os
os.symlink({str(target)!r}, "link"); os.symlink("/proc/1/root{target}", "other")
os.symlink("/proc/1/cwd/../../../../..{target}", "third")
for name in ("link", "other", "third"):
    try:
        open(name)
    except OSError as error:
        print(type(error).__name__)
try:
    os.link("/etc/hosts", "/tmp/work/hosts")
except OSError as error:
    print("link", error.errno == 18)
"""
    out = _python(build_box(run_dir=run_dir), code).split()
    assert out == ["FileNotFoundError"] * 3 + ["link", "True"]


@needs_box
def test_nothing_but_memory_can_be_written(run_dir: Path, backend: str):
    (run_dir / "x").write_text("mine")
    code = f"""
import os, subprocess
where = ["/", "/usr", "/etc", "/proc", "/sys", "/var", {str(PROJECT)!r}, {sys.prefix!r},
         {sys.base_prefix!r}, {str(Path(minidist.__file__).parent)!r}, {str(run_dir)!r},
         {str(Path(autograder.__file__).parent)!r}]
if {backend == "bwrap"}:
    where.append("/dev")  # an engine's is a small folder in memory, and the user's if that is root
for folder in where:
    try:
        open(folder + "/evil", "w")
        print("wrote into", folder)
    except OSError as error:
        pass
for file in ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/1/exe",
             "/proc/sysrq-trigger", "/etc/hosts", "/usr/bin/bwrap", {str(run_dir / "x")!r},
             {autograder.__file__!r}]:
    try:
        open(file, "r+b")
        print("could write", file)
    except OSError as error:
        pass
for file in ("a", "/tmp/file-b", "/dev/shm/c", os.path.expanduser("~/d")):
    open(file, "w").write("x")
attempts = ["mount -o remount,rw /usr", "umount /tmp", "unshare -Ur true",
            "unshare -Urm mount -o remount,bind,rw /usr", "unshare -Urm umount /usr"]
for attempt in attempts:
    assert subprocess.run(attempt.split(), capture_output=True).returncode != 0, attempt
"""
    wrote = _python(build_box(run_dir=run_dir), code)
    if backend != "bwrap" and PROJECT.is_relative_to("/tmp"):
        # An engine makes folders that lead to a mount in the box's own /tmp, which is memory.
        wrote = "\n".join(line for line in wrote.splitlines() if line != f"wrote into {PROJECT}")
        assert not (PROJECT / "evil").exists()
    assert wrote == ""
    assert (run_dir / "x").read_text() == "mine"


@needs_box
def test_the_network_is_only_lo(run_dir: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import os, socket
print(socket.if_nameindex(), socket.gethostbyname("box"), socket.gethostbyname("localhost"))
for address in [("127.0.0.1", {server.getsockname()[1]}), ("1.1.1.1", 53), ("10.0.0.1", 80)]:
    try:
        socket.create_connection(address, timeout=5)
        print("reached", address)
    except OSError:
        pass
with socket.create_server(("127.0.0.1", 0)) as here:
    socket.create_connection(here.getsockname(), timeout=5)
"""
        out = _python(build_box(run_dir=run_dir), code)
    assert out == "[(1, 'lo')] 127.0.0.1 127.0.0.1"


@needs_box
def test_a_socket_of_the_trusted_side_is_reached_through_a_read_only_folder(run_dir: Path):
    got: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(run_dir / "s"))
        server.listen()
        server.settimeout(60)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60)
                got.append(connection.recv(16))
                connection.sendall(b"pong")

        thread = threading.Thread(target=serve)
        thread.start()
        code = f"""
import os, socket
run_dir = {str(run_dir)!r}
s = socket.socket(socket.AF_UNIX)
s.settimeout(60)
s.connect(run_dir + "/s")
s.sendall(b"ping")
print(s.recv(16).decode())
for act in (lambda: os.unlink(run_dir + "/s"), lambda: os.rename(run_dir, "/tmp/z"),
            lambda: socket.socket(socket.AF_UNIX).bind(run_dir + "/t")):
    try:
        act()
        print("changed")
    except OSError:
        pass
"""
        out = _python(build_box(run_dir=run_dir), code)
        thread.join(60)
    assert out == "pong"
    assert got == [b"ping"]
    assert not (run_dir / "t").exists()


@needs_box
def test_what_imports_and_what_does_not(run_dir: Path):
    withheld = ["minidist.errors", "minidist.kernel.inside.launcher", "minidist.no_such_module"]
    box = build_box(run_dir=run_dir, withheld=withheld)
    code = """
import importlib, os, sys
def imports(name):
    try:
        importlib.import_module(name)
        return True
    except ModuleNotFoundError as error:
        assert error.name == name, error
        return False
import minidist
print(*(name for name in sys.argv[1:] if imports(name)))
root = os.path.dirname(minidist.__file__)
for folder, name in (("", "errors."), ("kernel/inside", "launcher.")):
    for place in (os.path.join(root, folder), os.path.join(root, folder, "__pycache__")):
        files = os.listdir(place) if os.path.isdir(place) else []
        assert not [f for f in files if f.startswith(name)], (place, files)
"""
    package = Path(autograder.__file__).parent
    trusted = {path.stem for path in package.iterdir() if path.name not in INSIDE}
    trusted.discard("__pycache__")
    assert {"box", "referee", "records", "submission", "files"} <= trusted
    names = [f"autograder.{name}" for name in sorted(trusted)]
    names += ["minidist.errors", "minidist.no_such_module"]
    # A stand-in for autograder/__init__.py, which imports what the test withholds.
    code = f"""
import sys, types
stub = sys.modules["autograder"] = types.ModuleType("autograder")
stub.__path__ = [{str(package)!r}]
{code}
import pathlib
print(*sorted(p.name for p in pathlib.Path({str(package)!r}).iterdir() if p.name != "__pycache__"))
"""
    done = _run(box, sys.executable, "-c", code, *names)
    assert done.returncode == 0, done.stderr
    imported, _, visible = done.stdout.partition("\n")
    assert imported == ""
    assert set(visible.split()) <= INSIDE


@needs_box
def test_what_the_ranks_need_imports(run_dir: Path):
    modules = ["minidist.errors", "minidist.kernel", "torch"]
    modules += ["autograder.inside.messages", "autograder.inside.probe", "autograder.criteria"]
    _python(build_box(run_dir=run_dir), "import " + ", ".join(modules))


@needs_box
def test_withheld_names_are_checked(run_dir: Path):
    for wrong in ("torch", "minidist", "minidist/../x", "minidist.", "parallel"):
        with pytest.raises(ValueError, match=r"expected 'minidist\.module'"):
            build_box(run_dir=run_dir, withheld=[wrong])
    with pytest.raises(ValueError, match="run_dir"):
        build_box(run_dir=Path("relative"))


@needs_box
def test_packages_as_installed_in_site_packages_or_below_tmp(
    run_dir: Path, monkeypatch, backend: str
):
    """The same rules when the packages lie inside another mount, and below the writable /tmp."""
    prefix = run_dir / "venv"
    site = prefix / "lib/python3/site-packages"
    for package in ("minidist", "autograder"):
        copy_package(Path(sys.modules[package].__file__ or "").parent, site / package)
    (site / "torchlike.py").write_text("")
    other = run_dir / "sockets"
    other.mkdir()
    # This environment is not the one in the box, so its base interpreter is run.
    base = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "executable", base)
    monkeypatch.setattr(minidist, "__file__", str(site / "minidist/__init__.py"))
    monkeypatch.setattr(sandbox, "_PACKAGE", site / "autograder")
    box = build_box(run_dir=other, withheld=["minidist.errors"], hide=[site / "torchlike.py"])
    code = f"""
import os
site = {str(site)!r}
print(sorted(set(os.listdir(site + "/autograder")) - {{"__pycache__"}}))
print("errors.py" in os.listdir(site + "/minidist"), os.path.getsize(site + "/torchlike.py"))
run_dir = {str(run_dir)!r}
for act in (lambda: os.rename(run_dir, "/tmp/away"), lambda: open(run_dir + "/new", "w"),
            lambda: os.rename({str(prefix)!r}, run_dir + "/w"),
            lambda: open(site + "/autograder/x.py", "w")):
    try:
        act()
        print("changed")
    except OSError:
        pass
"""
    done = _run(box, base, "-I", "-S", "-c", code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert set(eval(lines[0])) <= INSIDE
    assert lines[1] == "False 0"
    # An engine leaves what leads to its mounts to the box; that harms nobody but the box.
    assert lines[2:] == [] or backend != "bwrap"


@needs_box
def test_the_environment_is_an_allow_list(run_dir: Path, monkeypatch):
    monkeypatch.setenv("COURSE_SECRET", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # what Slurm gave the job
    for box in (build_box(run_dir=run_dir, env_extra={"A": "1"}), build_open(run_dir=run_dir)):
        code = "import os; print(dict(os.environ), open('/proc/1/environ').read())"
        out = _python(box, code) if box.sandboxed else str(box.env)
        assert "hunter2" not in out
        assert "elsewhere" not in out
        assert "'CUDA_VISIBLE_DEVICES': '1'" in out
        assert box.env["PYTHONNOUSERSITE"] == box.env["OMP_NUM_THREADS"] == "1"
        assert "MPLBACKEND" not in box.env
        assert ("A" in box.env) == box.sandboxed


def test_the_open_form(run_dir: Path):
    box = build_open(run_dir=run_dir, env_extra={"A": "1"})
    assert (box.prefix, box.sandboxed, box.env["A"]) == ([], False, "1")
    assert Path(box.cwd).is_dir()
    assert Path(box.env["HOME"]).is_dir()
    assert Path(box.cwd).is_relative_to(run_dir)
    assert build_open(run_dir=run_dir).cwd == box.cwd


@needs_box
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_a_folder_in_memory_has_a_size(run_dir: Path, folder: str):
    """Where the box itself cannot bound it, the guard ends the box."""
    limits = Limits(tmp_bytes=8 * MIB, shm_bytes=8 * MIB)
    box = build_box(run_dir=run_dir, limits=limits)
    code = f"""
import time
with open("{folder}/a", "wb", buffering=0) as file:
    for _ in range(40):
        file.write(bytes(1 << 20))
time.sleep(60)
"""
    front = "import subprocess, sys; print(subprocess.run(sys.argv[1:]).returncode, flush=True)"
    words = [sys.executable, "-c", f"{front}; input()", *box.prefix, sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=box.env, text=True, **pipes) as process:
        guard = Guard(process.pid, limits, box.container, box.sizes, every_s=0.1).start()
        try:
            ended = process.stdout.readline().strip()
            reason = guard.take_reason()
        finally:
            guard.stop()
        _, said = process.communicate("\n", timeout=30)
    if box.sizes:
        assert ended == "-9"
        assert f"in {folder}, at most 8 MiB are allowed" in reason
    else:
        assert ended == "1"
        assert "No space left on device" in said


@needs_box
@pytest.mark.parametrize("with_prlimit", [True, False])
def test_limits_hold(run_dir: Path, monkeypatch, with_prlimit: bool):
    if not with_prlimit:
        which = shutil.which
        monkeypatch.setattr(
            shutil, "which", lambda name, **k: None if name == "prlimit" else which(name, **k)
        )
    limits = Limits(
        memory_bytes=256 << 20, file_bytes=4 << 20, tmp_bytes=8 << 20, shm_bytes=2 << 20
    )
    box = build_box(run_dir=run_dir, limits=limits)
    assert ("prlimit" in box.prefix) == with_prlimit
    code = """
import errno, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def fill(path, size):
    try:
        with open(path, "wb", buffering=0) as f:
            for _ in range(size): f.write(bytes(1 << 20))
        return "no limit"
    except OSError as error:
        return errno.errorcode[error.errno]
print(fill("/dev/shm/a", 3), *(fill(f"/tmp/file-{n}", size) for n, size in enumerate((5, 3, 3))))
try:
    bytearray(400 << 20)
    print("no limit")
except MemoryError:
    print("MemoryError")
"""
    full = "no limit" if box.sizes else "ENOSPC"  # the guard's, in the test above
    expected = f"{full} EFBIG no limit {full}\n" + (
        "no limit" if list(Path("/dev").glob("nvidia*")) else "MemoryError"
    )
    assert _python(box, code) == expected


@needs_box
def test_killing_the_box_kills_a_daemon(run_dir: Path):
    mark = f"md-daemon-{uuid.uuid4().hex}"
    code = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", [{mark!r}, "300"])
    os._exit(0)
os.wait(); print("started", flush=True); time.sleep(300)
"""
    box = build_box(run_dir=run_dir)
    process = subprocess.Popen(
        [*box.prefix, sys.executable, "-c", code],
        env=box.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        deadline = time.monotonic() + 20
        while not _processes(mark) and time.monotonic() < deadline:
            time.sleep(0.02)  # from fork to exec
        assert _processes(mark)
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()  # type: ignore[union-attr]
        if box.container is not None:
            box.container.remove()
    deadline = time.monotonic() + 20  # 0.3 s when the machine is idle
    while _processes(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _processes(mark)


def _processes(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                if (entry / "cmdline").read_bytes().startswith(mark.encode()):
                    found.append(entry.name)
            except OSError:
                continue
    return found


@needs_box
def test_torchrun_works_inside(run_dir: Path):
    code = """
cat > train.py <<'END'
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print(f"sum={x.item()}", flush=True)
dist.barrier(); dist.destroy_process_group()
END
torchrun --standalone --nproc-per-node 2 train.py
"""
    done = _run(build_box(run_dir=run_dir), "bash", "-ec", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum=3.0") == 2


def test_no_key_of_the_grader_or_of_another_box_is_in_the_next(backend: str, run_dir: Path):
    """Keys outlive processes: the session keyring of a login would be one place for all boxes."""
    code = """
import ctypes, platform
syscall = ctypes.CDLL(None).syscall
syscall.restype = ctypes.c_long
add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
def leave(name):
    return syscall(add, b"user", name, b"secret", 6, -3)  # into the session keyring
def find(name):
    return syscall(keyctl, 10, -3, b"user", name, 0)
"""
    own: dict[str, Any] = {}
    exec(code, own)
    if (key := own["leave"](b"md-of-the-grader")) == -1:
        pytest.skip("no kernel keyrings")
    try:
        assert own["find"](b"md-of-the-grader") == key
        found = code + "print(find(b'md-of-the-grader'), find(b'md-left')); leave(b'md-left')"
        for name in ("a", "b"):
            (folder := run_dir / name).mkdir()
            assert _python(build_box(run_dir=folder), found).split() == ["-1", "-1"]
    finally:
        own["syscall"](own["keyctl"], 9, key, -3)  # out of the keyring again


@needs_box
def test_there_is_no_socket_to_the_host_of_a_virtual_machine(run_dir: Path):
    """It would not be in the box's network, but in all of the machine's at once."""
    code = """
import socket
for family in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_VSOCK"):
    try:
        socket.socket(getattr(socket, family), socket.SOCK_STREAM).close()
    except OSError:
        continue
    print(family)
"""
    made = _python(build_box(run_dir=run_dir), code).split()
    assert made in (["AF_UNIX", "AF_INET"], ["AF_UNIX", "AF_INET", "AF_INET6"])


@needs_box
def test_a_processor_whose_calls_have_other_numbers_has_no_filter(run_dir: Path, monkeypatch):
    """`autograder doctor` says so; all else holds."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    probe_support.cache_clear()
    assert "without a filter of system calls" in probe_support().reason
    assert _python(build_box(run_dir=run_dir), "print(1)") == "1"


@pytest.mark.parametrize(("program", "uid"), [("bwrap", "1000"), ("apptainer", "65534")])
def test_as_an_ordinary_user(program: str, uid: str):
    """The same box when the grader is not root, on the system's Python, which all can read."""
    if shutil.which(program) is None:
        pytest.skip(f"no sandbox: {program} is not installed")
    python = Path("/usr/bin/python3")
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become another user")
    version = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not python.exists() or subprocess.run([python, "-c", version]).returncode != 0:
        pytest.skip("the system's Python is older than 3.11")
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    source = Path(sandbox.__file__), Path(minidist.__file__)
    with tempfile.TemporaryDirectory(prefix="md-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        subprocess.run([python, "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        site = next(Path(folder).glob("venv/lib/python3*/site-packages"))
        copy_package(source[1].parent, site / "minidist")
        (site / "autograder/criteria").mkdir(parents=True)
        for package in ("autograder", "autograder/criteria"):
            (site / package / "__init__.py").write_text("")
        copy_package(source[0].parent, site / "autograder/box")
        shutil.copy(limits.__file__, site / "autograder/criteria")
        code = """
import pathlib, subprocess, sys, tempfile
from autograder.box.sandbox import build_box, probe_support
assert probe_support().works, probe_support()
with tempfile.TemporaryDirectory() as folder:
    box = build_box(run_dir=pathlib.Path(folder))
    probe = "import os, resource; print(os.getuid(), resource.getrlimit(resource.RLIMIT_NPROC)[1])"
    subprocess.run([*box.prefix, sys.executable, "-c", probe], env=box.env, check=True)
"""
        done = subprocess.run(
            [*drop, f"{folder}/venv/bin/python", "-c", code],
            capture_output=True,
            text=True,
            cwd="/tmp",
            env={"PATH": os.defpath, "AUTOGRADER_SANDBOX": program},
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [uid, str(Limits().num_processes)]


def test_only_gpus_that_the_job_may_open_enter_the_box(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia-caps").mkdir()
    really = os.open

    def denied(path, flags, *more):
        if Path(path).name == "nvidia1":  # as the device controller of a cgroup says it
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return really(path, flags, *more)

    monkeypatch.setattr(sandbox, "DEVICES", tmp_path)
    monkeypatch.setattr(os, "open", denied)
    found = [path.name for path in sandbox._cuda_devices.__wrapped__()]
    assert found == ["nvidia-caps", "nvidia0", "nvidiactl"]
