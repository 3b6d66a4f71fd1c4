"""Processes that are forked from one that has torch: how they start, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from minidist.processes import fork_server
from minidist.processes.fork_server import fork


def tell(pipe, *args):
    import numpy as np

    pipe.send(
        {
            "args": [arg() if callable(arg) else arg for arg in args],
            "torch": "torch" in sys.modules,
            "cwd": os.getcwd(),
            "colour": os.environ.get("COLOUR"),
            "input": sys.stdin.read(),
            "session": os.getsid(0) == os.getpid(),
            "drawn": np.random.rand(),
            "parent": os.getppid(),
            "path": list(sys.path),
            "interrupted": signal.getsignal(signal.SIGINT),
        }
    )


def told(*args, **more):
    child = fork(tell, *args, **more)
    try:
        answer = child.pipe.recv()
        assert child.join(30) == 0
        return answer
    finally:
        child.close()


def test_a_child_stands_where_its_asker_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.syspath_prepend(str(tmp_path))
    offset = 1
    answer = told(2, lambda: offset)
    assert answer["args"] == [2, 1]
    assert answer["torch"]
    assert answer["cwd"] == os.getcwd()
    assert answer["colour"] == "red"
    assert answer["path"] == sys.path
    assert answer["input"] == ""
    assert answer["interrupted"] is signal.default_int_handler
    assert not answer["session"]


@pytest.mark.parametrize("package", ["minidist", "autograder"])
def test_its_code_is_ours_whatever_lies_in_the_working_folder(tmp_path, package):
    """Such as another checkout of the course, in which somebody calls this one's `autograder`."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "asks.py"
    script.write_text(
        "from minidist.processes.fork_server import fork\n"
        "def where(pipe):\n"
        "    import autograder, minidist\n"
        "    pipe.send([autograder.__file__, minidist.__file__])\n"
        "print(fork(where).pipe.recv())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert str(tmp_path) not in done.stdout
    assert done.stdout.count("__init__.py") == 2, done.stderr


def test_or_where_it_is_sent(tmp_path):
    answer = told(env={"COLOUR": "blue"}, cwd=tmp_path, new_session=True)
    assert (answer["cwd"], answer["colour"], answer["session"]) == (str(tmp_path), "blue", True)


def test_children_of_one_server_draw_different_numbers():
    one, two = told(), told()
    assert one["parent"] == two["parent"] != os.getpid()
    assert one["drawn"] != two["drawn"]


def end(pipe, how):
    print("out", flush=True)
    if how == "raise":
        raise KeyError("on purpose")
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(how)


@pytest.mark.parametrize(
    ("how", "code"), [(None, 0), (7, 7), ("no", 1), ("raise", 1), ("signal", -signal.SIGKILL)]
)
def test_it_says_how_it_ended(how, code, capfd):
    child = fork(end, how)
    assert child.join(60) == code
    assert child.poll() == code  # and again
    child.kill()  # too late, and nobody else is hit
    child.close()
    captured = capfd.readouterr()
    assert captured.out == "out\n"
    assert ("KeyError: 'on purpose'" in captured.err) is (how == "raise")


def wait(pipe):
    pipe.send(os.getpid())
    time.sleep(600)


def test_who_still_runs_can_be_killed():
    child = fork(wait)
    assert child.pipe.recv() == child.pid
    assert child.poll() is None
    child.kill()
    assert child.join(30) == -signal.SIGKILL
    child.close()


def test_a_server_that_was_killed_takes_its_children_and_the_next_call_starts_another():
    child = fork(wait)
    child.pipe.recv()
    os.kill(psutil.Process(child.pid).ppid(), signal.SIGKILL)
    assert child.join(30) == -signal.SIGKILL
    child.close()
    assert told(1)["args"] == [1]


ASKER = """
import sys, time
sys.path.insert(0, {folder!r})
import test_fork_server
child = test_fork_server.fork(test_fork_server.wait)
print(child.pipe.recv(), flush=True)
time.sleep(600)
"""


def test_nothing_outlives_whoever_asked():
    code = ASKER.format(folder=str(Path(__file__).parent))
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(asker.stdout.readline()))
    server = child.parent()
    asker.kill()
    asker.wait()
    assert psutil.wait_procs([child, server], timeout=30)[1] == []


@pytest.mark.parametrize("value", ["", "x", "999999:1", "0:1", "-1:5", "{inherited}"])
def test_a_name_that_leads_to_no_server_is_passed_over(value, monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:  # the number is right, the file is not a server
        own = f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}"
        monkeypatch.setenv(fork_server.VARIABLE, value.format(inherited=own))
        assert told(3)["args"] == [3]
