"""What the kernel does when ranks hang, die or never start, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from kernel_helper import ALL_REDUCE, HANGS_S, JOIN, SETUP, Kernel, shared_memory, wait_gone
from kernel_helper import kernel as new_kernel

import minidist
from minidist.processes.tree import descendants


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with new_kernel() as it:
        yield it


@pytest.fixture
def fresh(kernel: Kernel) -> Kernel:
    """The same kernel with ranks that have joined a group, whatever the test before did."""
    if (
        kernel.request(action="status")["state"] != "ready"
        or kernel.request(action="status")["ranks"][2:]
    ):
        kernel.request(action="restart", ranks=2)
    kernel.request(action="deadline", seconds=None)
    kernel.ok(JOIN + "" if kernel.run("dist").reply["status"] == "error" else "1")
    return kernel


def parent(pid: int) -> int:
    """The pid of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


RUN_DIR = "import os; print(os.environ['MINIDIST_RUN_DIR'])"


def test_late_news_of_the_last_ranks_does_not_end_the_next(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("MINIDIST_PRELOAD", "late_exits")
    with new_kernel() as kernel:
        for _ in range(4):
            kernel.ok("%restart_ranks\n1")
            time.sleep(0.3)


def test_a_loaders_worker_that_is_killed_is_the_headline(fresh: Kernel) -> None:
    fresh.ok(
        "from torch.utils.data import DataLoader\n"
        "def dies(batch):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = fresh.run(
        "for _ in DataLoader(range(8), batch_size=2, num_workers=1, collate_fn=dies): pass"
    )
    assert "A worker process of a DataLoader died, not this rank" in result.reply["evalue"]
    assert "dataloader.py" not in "\n".join(result.reply["traceback"])
    # torch's own handler would raise anywhere, also where a lock has just been taken.
    handler = fresh.ok("import signal\nprint(repr(signal.getsignal(signal.SIGCHLD)))").text()
    assert "SIG_DFL" in handler


def test_a_skipped_collective_is_explained(fresh: Kernel) -> None:
    fresh.ok("g = torch.ones(1024)")
    result = fresh.run("dist.all_reduce(g)\n\nif rank == 0:\n    dist.all_reduce(g)")
    assert result.kind == "hang"
    assert result.reply["ename"] == "DistributedHang"
    count = result.reply["execution_count"]
    assert result.rank(0)["status"] == "waiting"
    assert result.rank(0)["text"] == (
        f"waits in all_reduce (float32 [1024]) at Cell In[{count}], line 4: dist.all_reduce(g)"
    )
    expected = "finished the cell after 1 collective; rank 0 has started 2"
    assert result.rank(1) == {"rank": 1, "status": "finished", "text": expected}
    assert f"rank 1: {expected}" in result.of("error")[0]["evalue"]
    again = fresh.run("1")
    assert again.kind == "rank_lost"
    assert "%restart_ranks" in again.reply["evalue"]
    assert fresh.run("%restart_ranks").reply["status"] == "ok"
    assert fresh.ok(f"{JOIN}\n{ALL_REDUCE}").text().startswith("3.0\n")


def test_different_collectives_and_errors_are_explained(fresh: Kernel) -> None:
    result = fresh.run("if rank == 0: dist.barrier()\nelse: dist.all_reduce(torch.ones(3))")
    assert result.kind == "hang"
    assert "waits in barrier at" in result.rank(0)["text"]
    assert "waits in all_reduce (float32 [3]) at" in result.rank(1)["text"]
    fresh.request(action="restart", ranks=None)
    fresh.ok(JOIN)
    code = "if rank == 1: raise ValueError('early')\nwork = dist.all_reduce(torch.ones(5), "
    result = fresh.run(code + "async_op=True)\nwork.wait()")
    assert result.kind == "hang"
    assert "waits in all_reduce (float32 [5])" in result.rank(0)["text"]
    assert result.rank(1)["status"] == "error"
    assert "ValueError: early" in result.rank(1)["text"]
    assert "ValueError" in "\n".join(result.reply["traceback"])


def test_a_hang_whose_cause_is_in_an_earlier_cell_shows_the_last_calls(fresh: Kernel) -> None:
    fresh.ok("dist.all_reduce(torch.ones(3))")
    early = fresh.ok("if rank == 1: work = dist.broadcast(torch.ones(5), 0, async_op=True)")
    result = fresh.run("if rank == 0: dist.barrier()\nelse: dist.all_reduce(torch.ones(2, 2))")
    assert result.kind == "hang"
    before = early.reply["execution_count"]
    first, now = f"In[{before - 1}]", f"In[{before + 1}]"
    assert result.reply["evalue"].endswith(
        "last collectives begun, the newest at the end:\n"
        f"rank 0: all_reduce float32 [3] in {first}; barrier in {now}\n"
        f"rank 1: all_reduce float32 [3] in {first}; broadcast float32 [5] in In[{before}]; "
        f"all_reduce float32 [2, 2] in {now}"
    )


def test_deadline_but_no_hang_while_a_rank_works(fresh: Kernel) -> None:
    assert fresh.request(action="deadline", seconds=15)["status"] == "ok"
    code = "if rank == 0: dist.barrier()\nelse:\n    while True: pass"
    result = fresh.run(code)
    assert result.kind == "deadline"
    assert result.reply["ename"] == "DeadlineExceeded"
    assert result.rank(0)["text"].startswith("waits in barrier at Cell In[")
    assert result.rank(1)["status"] == "running"
    assert "line 3: while True: pass" in result.rank(1)["text"]


def test_a_slow_rank_is_no_hang(fresh: Kernel) -> None:
    result = fresh.ok(f"if rank == 1: time.sleep(6)\n{ALL_REDUCE}")
    assert result.text().startswith("3.0\n")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("time.sleep(0.2); os._exit(7)", "exit code 7"),
        ("os._exit(0)", "exit code 0"),
        ("os.kill(os.getpid(), 9)", "signal 9 (SIGKILL)"),
    ],
)
def test_a_lost_rank_is_named_at_once(fresh: Kernel, code: str, how: str) -> None:
    result = fresh.run(f"if rank == 1:\n    {code}\ndist.barrier()")
    assert result.kind == "rank_lost"
    assert result.reply["ename"] == "RankLost"
    assert result.rank(1) == {"rank": 1, "status": "lost", "text": f"ended with {how}"}
    assert f"rank 1 ended with {how}" in result.reply["evalue"]
    assert result.seconds < 10  # 2 s is the promise; a loaded machine may take longer
    later = fresh.run("1")
    assert later.seconds < 5
    assert f"rank 1 ended with {how}" in later.reply["evalue"]


@pytest.mark.parametrize("silent_s", [0.8, 3.0])
def test_a_lost_rank_is_named_when_the_launcher_is_slow(fresh: Kernel, silent_s: float) -> None:
    """How a rank ended can still be read, and is waited for, when the launcher gets to run late."""
    rank = fresh.request(action="status")["ranks"][1]["pid"]
    launcher = parent(parent(rank))

    def goes_on() -> None:
        while Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        time.sleep(silent_s)
        os.kill(launcher, signal.SIGCONT)

    timer = threading.Thread(target=goes_on, daemon=True)
    timer.start()
    code = f"os.kill({launcher}, {int(signal.SIGSTOP)}); os._exit(0)"
    result = fresh.run(f"if rank == 1:\n    {code}\ntime.sleep(60)")
    assert result.rank(1) == {"rank": 1, "status": "lost", "text": "ended with exit code 0"}
    timer.join()
    assert result.seconds < 20


def test_a_rank_that_dies_between_cells(fresh: Kernel, tmp_path: Path) -> None:
    fresh.ok(
        f"%%rank 1\nimport threading\ndef end():\n"
        f"    while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.01)\n"
        "    os._exit(5)\nthreading.Thread(target=end).start()"
    )
    (tmp_path / "end").touch()
    end = time.monotonic() + 60
    while fresh.request(action="status")["state"] != "lost" and time.monotonic() < end:
        time.sleep(0.05)
    assert "rank 1 ended with exit code 5" in fresh.run("1").reply["evalue"]


@pytest.mark.parametrize("code", ["exit()", "quit()", "def f():\n    quit()\nf()"])
def test_exit_in_a_cell_is_an_error_and_ends_nobody(fresh: Kernel, code: str) -> None:
    """One that ended by itself some time later would take a cell that is not to blame."""
    before = fresh.request(action="status")["ranks"]
    result = fresh.run(f"%%rank 1\nprint('bye')\n{code}")
    assert result.text() == "bye\n"
    assert "exit() and quit() would end this rank" in result.reply["evalue"]
    assert "%restart_ranks" in result.reply["evalue"]
    time.sleep(0.5)
    assert fresh.request(action="status")["ranks"] == before
    fresh.ok("1")


def test_an_interrupt_while_ranks_start_stops_the_cell(fresh: Kernel) -> None:
    def starts(message: dict) -> bool:
        content = message["content"]
        return message["msg_type"] == "status" and content["execution_state"] == "busy"

    result = fresh.run("%restart_ranks\nimport time; time.sleep(60)", stop=starts)
    assert result.reply["ename"] == "KeyboardInterrupt"
    assert result.seconds < 30
    assert fresh.ok("print(1)").text().startswith("1\n")


@pytest.mark.parametrize(
    ("error", "ename", "says"),
    [
        ("KeyboardInterrupt", "KeyboardInterrupt", "before its first line"),
        (
            "RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed.')",
            "RuntimeError",
            "A worker process of a DataLoader died, not this rank",
        ),
    ],
)
def test_a_signal_before_a_cells_first_line_is_its_error(
    fresh: Kernel, error: str, ename: str, says: str
) -> None:
    """IPython catches one that comes while the cell runs; ipykernel would send no reply."""
    fresh.ok(
        "ip = get_ipython()\nplain = ip.should_run_async\ndef early(*args, **more):\n"
        f"    ip.should_run_async = plain\n    raise {error}\n"
        "ip.should_run_async = early"
    )
    result = fresh.run("1", timeout=60)
    assert result.reply["ename"] == ename
    assert says in result.reply["evalue"]
    assert fresh.ok("print(1)").text().startswith("1\n")


def test_another_number_of_ranks(fresh: Kernel) -> None:
    generation = fresh.request(action="status")["generation"]
    reply = fresh.request(action="restart", ranks=3)
    assert reply["status"] == "ok"
    assert [r["alive"] for r in reply["ranks"]] == [True] * 3
    assert reply["generation"] == generation + 1
    text = fresh.ok(f"{JOIN}\n{ALL_REDUCE}\nprint(os.environ['MINIDIST_GENERATION'])").text()
    assert text == f"6.0\n{generation + 1}\n[ranks 1, 2: same output]\n"
    assert fresh.run("%%rank 1,2\nraise KeyError").reply["evalue"] == "[ranks 1, 2]"


def test_a_folder_for_sockets_that_has_gone_is_made_again() -> None:
    """As when somebody cleans /tmp."""
    with new_kernel() as kernel:
        run_dir = Path(kernel.ok(f"%%rank 0\n{RUN_DIR}").text().strip())
        shutil.rmtree(run_dir)
        assert kernel.ok("%restart_ranks\nprint(1)").text()
        assert run_dir.stat().st_mode & 0o777 == 0o700


def test_sockets_that_cannot_be_made_are_told() -> None:
    """No cell waits for ranks that cannot be started."""
    with new_kernel() as kernel:
        run_dir = Path(kernel.ok(f"%%rank 0\n{RUN_DIR}").text().strip())
        shutil.rmtree(run_dir)
        run_dir.touch()
        assert "sockets of 2 ranks cannot be made" in kernel.run("%restart_ranks").reply["evalue"]
        assert "could not be started" in kernel.run("1").reply["evalue"]
        run_dir.unlink()
        kernel.ok("%restart_ranks\nprint(1)")


def test_strangers_on_the_link_are_turned_away(fresh: Kernel) -> None:
    run_dir = fresh.ok("%%rank 0\nprint(os.environ['MINIDIST_RUN_DIR'])").text().strip()
    for data in (b"\xff" * 1000 + b"\n", b'{"hello": "0"}\n', b"[1]\n", b"x" * 10**6):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"{run_dir}/link")
            sock.settimeout(20)
            try:
                sock.sendall(data)
                assert sock.recv(1) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass
    assert fresh.ok("rank").kind == "ok"


_LEAVE = f"""{JOIN}
import subprocess
keep = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(os.environ["MINIDIST_RUN_DIR"], sys.stdout.folder)"""


@pytest.mark.parametrize("who", ["front, politely", "front, SIGTERM", "front", "launcher"])
def test_nothing_is_left_whatever_dies_first(who: str) -> None:
    kernel = Kernel()
    try:
        folders = [Path(word) for word in kernel.ok(_LEAVE).text().splitlines()[0].split()]
        assert [folder.is_dir() for folder in folders] == [True, True]
        family = kernel.family()
        assert len(family) == 8  # front, launcher, fork server, agent, two ranks, two sleeps
        if who == "front, politely":
            kernel.close()
        elif who == "front, SIGTERM":
            os.kill(kernel.pid, signal.SIGTERM)
        elif who == "front":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            launcher = descendants(kernel.pid)[0]
            os.kill(launcher, signal.SIGKILL)
            assert wait_gone([pid for pid in family if pid != kernel.pid]) == []
            assert "launcher" in kernel.run("1").reply["evalue"]
            kernel.close()
        assert wait_gone(family) == []
        end = time.monotonic() + 10
        while any(folder.exists() for folder in folders) and time.monotonic() < end:
            time.sleep(0.05)
        assert [folder.exists() for folder in folders] == [False, False]
        assert shared_memory() == []
    finally:
        kernel.close()


_START_AND_DIE = """
import json, os, signal, sys
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name="torchrun-2")
arguments = []
if len(sys.argv) > 1:
    with open(sys.argv[1], "w") as file:
        json.dump({"client": os.getpid()}, file)
    arguments = ["--launcher", sys.argv[1]]
manager.start_kernel(extra_arguments=arguments)
print(manager.provisioner.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("told", [True, False])
def test_a_front_whose_client_dies_while_it_starts_ends_too(tmp_path: Path, told: bool) -> None:
    """It has not begun to watch its parent then; a grader tells it who that was."""
    words = [sys.executable, "-c", _START_AND_DIE, *([str(tmp_path / "l.json")] if told else [])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    front = int(done.stdout)
    family = [front, *descendants(front)]
    try:
        assert wait_gone(family) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(front, signal.SIGTERM)


def test_a_kernel_started_through_another_program_serves() -> None:
    """Its client is not its parent: that alone is no reason to end."""
    manager = KernelManager(kernel_name="torchrun-2")
    manager.kernel_spec.argv[:1] = ["sh", "-c", '"$@"; true', "wrapper", sys.executable]
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=HANGS_S)
        time.sleep(2.5)  # it looks every second
        reply = client.execute_interactive("1", timeout=HANGS_S)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def _start_error(tmp_path: Path, code: str, **launcher: object) -> str:
    """The error of the first cell where ranks do not start."""
    (tmp_path / "my_hook.py").write_text(code)
    file = tmp_path / "launcher.json"
    file.write_text(json.dumps(launcher))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "MINIDIST_RANK_INIT": "my_hook:run"}
    with new_kernel("--launcher", str(file), env=env) as kernel:
        return kernel.run("1").reply["evalue"]


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    text = _start_error(tmp_path, "def run(): raise OSError('no such thing')")
    assert "rank" in text
    assert "OSError: no such thing" in text
    text = _start_error(tmp_path, "import os\ndef run(): os._exit(3)")
    assert "ended with exit code 3 before all ranks were ready" in text
    words = ["sh", "-c", "echo the sandbox is broken >&2; exit 3"]
    text = _start_error(tmp_path, "", prefix=words)
    assert "ranks 0, 1 of 2 did not start: the launcher ended with exit code 3" in text
    assert "the sandbox is broken" in text


def _works_in_a_box() -> bool:
    probe = "bwrap --ro-bind / / --unshare-all --die-with-parent true >/dev/null 2>&1"
    return shutil.which("bwrap") is not None and os.system(probe) == 0


@pytest.mark.skipif(not _works_in_a_box(), reason="needs bubblewrap")
def test_ranks_in_a_sandbox(tmp_path: Path) -> None:
    run_dir = tempfile.mkdtemp(prefix="kt-", dir="/tmp")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost box\n")
    (tmp_path / "my_hook.py").write_text("def run():\n    import builtins; builtins.hooked = 1")
    prefix = ["bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    prefix += ["--tmpfs", "/tmp", "--ro-bind", run_dir, run_dir]
    for path in (sys.prefix, str(Path(minidist.__file__).parent.parent)):  # perhaps below /tmp
        prefix += ["--ro-bind", path, path]
    prefix += ["--ro-bind", str(tmp_path), "/mnt", "--ro-bind", str(tmp_path / "hosts")]
    prefix += ["/etc/hosts", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONPATH", "/mnt"]
    prefix += ["--unshare-all", "--hostname", "box", "--die-with-parent", "--new-session"]
    prefix += ["--cap-drop", "ALL", "--chdir", "/tmp"]
    env = {"PATH": os.environ["PATH"], "MINIDIST_RANK_INIT": "my_hook:run"}
    file = tmp_path / "launcher.json"
    file.write_text(json.dumps({"prefix": prefix, "run_dir": run_dir, "env": env}))
    try:
        with new_kernel("--launcher", str(file)) as kernel:
            code = f"{JOIN}\n{ALL_REDUCE}\nprint(hooked, os.getpid() < 100)"
            assert kernel.ok(code).text().startswith("3.0\n1 True\n")
            family = kernel.family()
            lost = kernel.run("if rank == 1: os._exit(4)\ntime.sleep(60)")
            assert "rank 1 ended with exit code 4" in lost.reply["evalue"]
            assert kernel.ok(f"%restart_ranks\n{SETUP}\nprint('again')").text().count("again") == 1
        assert wait_gone(family) == []
        assert os.listdir(run_dir) == []
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def test_the_front_imports_no_torch() -> None:
    code = "import minidist.kernel.front, sys; print(*(m in sys.modules for m in sys.argv[1:]))"
    command = f"'{sys.executable}' -c '{code}' torch ipykernel numpy"
    with os.popen(command) as pipe:
        assert pipe.read().split() == ["False"] * 3
