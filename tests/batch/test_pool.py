"""The pool: whatever of it is killed, at any moment, a task is done once or told to be lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time

import psutil
import pytest

from autograder.batch import pool
from minidist.processes import fork_server
from minidist.processes.fork_server import Server

TASKS = {number: number for number in range(6)}
TIMES = 5


@pytest.fixture(autouse=True)
def server(monkeypatch):
    """One that imports next to nothing, so that it may die often."""
    made = Server(["autograder.batch.pool"])
    monkeypatch.setattr(pool, "_servers", {True: made})
    yield made
    made.end()


def square(number: int) -> int:
    return number * number


def run(work, todo=TASKS, jobs=2):
    results: dict[int, int] = {}

    def done(number, result):
        assert number not in results
        results[number] = result

    lost = pool.run_pool(work, todo, [{}] * jobs, done)
    assert results.keys() | lost.keys() == todo.keys()
    assert not results.keys() & lost.keys()
    assert {n: r for n, r in results.items() if r != todo[n] ** 2} == {}
    return lost


def kill(pid):
    """Kills it, and waits until it is dead."""
    ends_at = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < ends_at
            time.sleep(0.001)


def test_every_task_is_done():
    assert run(square, jobs=1) == run(square, jobs=3) == run(square, jobs=9) == {}


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("moment", ["before it is asked", "while it forks"])
def test_the_server_dies_as_a_worker_starts(server, monkeypatch, moment, nth):
    """It takes the worker before with it, and one that it had just forked."""
    ask, read = Server.ask, fork_server.Child._read

    def kill_at_nth():
        asked.append(server._process.pid)
        if len(asked) == nth:
            kill(server._process.pid)

    def ask_later(self):
        server.start()
        kill_at_nth()
        return ask(self)

    def read_later(self, timeout_s):
        if timeout_s == fork_server.START_TIMEOUT_S:  # its pid is to come
            kill_at_nth()
        return read(self, timeout_s)

    if moment == "while it forks":
        monkeypatch.setattr(fork_server.Child, "_read", read_later)
    else:
        monkeypatch.setattr(Server, "ask", ask_later)
    for _ in range(TIMES):
        asked: list[int] = []
        assert len(run(square)) <= (nth - 1) + (moment == "while it forks")
        assert len(asked) >= 2
        assert len(set(asked)) == 2


def falls(number: int) -> int:
    if number % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_a_worker_dies_in_its_task_and_another_takes_its_place():
    for _ in range(TIMES):
        assert run(falls).keys() == {0, 3}
        assert run(falls, jobs=1).keys() == {0, 3}


def takes_the_server(number: int) -> int:
    if number == 2:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # and its worker falls with it
    return number * number


def test_the_server_dies_in_a_task():
    """The workers fall with it; those that come after have a new server."""
    for _ in range(TIMES):
        lost = run(takes_the_server)
        assert 2 in lost
        assert len(lost) <= 2


def test_the_server_dies_while_a_worker_is_replaced(server, monkeypatch):
    ask = Server.ask

    def ask_later(self):
        started.append(True)
        if len(started) == 3:
            kill(server._process.pid)
        return ask(self)

    monkeypatch.setattr(Server, "ask", ask_later)
    for _ in range(TIMES):
        started: list[bool] = []
        lost = run(falls)
        assert lost.keys() >= {0, 3}
        assert len(lost) <= 3


def test_an_idle_worker_dies(monkeypatch):
    """Its next task goes to another one, and nothing is lost."""
    begin = pool._Worker.begin

    def begin_later(self, number, task):
        if number in doomed:
            doomed.remove(number)
            kill(self.child.pid)
        return begin(self, number, task)

    monkeypatch.setattr(pool._Worker, "begin", begin_later)
    for _ in range(TIMES):
        doomed = {0, 3, 4}
        assert run(square, jobs=1) == {}


def slow_square(number: int) -> int:
    time.sleep(0.02)
    return number * number


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_whatever_dies_at_any_moment(jobs):
    """Somebody kills what there is, at random; each task is done or lost, and the pool ends."""
    rng = random.Random(jobs)
    over = threading.Event()
    kills = []

    def storm():
        while len(kills) < 10 and not over.wait(rng.uniform(0.0, 0.2)):
            with contextlib.suppress(psutil.Error):  # it has just ended by itself
                found = psutil.Process().children(recursive=True)
                found = [p for p in found if "autograder.batch.pool" in p.cmdline()]
                if found:
                    rng.choice(found).kill()
                    kills.append(time.monotonic())

    storming = threading.Thread(target=storm)
    storming.start()
    try:
        lost = run(slow_square, dict(zip(range(60), range(60), strict=True)), jobs)
    finally:
        over.set()
        storming.join()
    assert kills
    assert len(lost) <= jobs * len(kills)


def refuses(number: int) -> int:
    if number == 1:
        raise ValueError("no such task")
    return number * number


def test_an_error_of_a_task_comes_out_with_its_traceback():
    with pytest.raises(ValueError, match="no such task") as caught:
        run(refuses)
    assert "in refuses" in caught.value.__notes__[0]


def test_where_no_worker_can_be_started_every_task_is_told(server, monkeypatch):
    def ask(self):
        raise OSError("no more processes")

    monkeypatch.setattr(Server, "ask", ask)
    lost = run(square)
    assert lost.keys() == TASKS.keys()
    assert "could not be started (no more processes)" in lost[0]


def tell_torch(pipe):
    pipe.send("torch" in sys.modules)


def test_torch_is_there_for_grading_only(monkeypatch):
    """A login node, whose cluster grades, forks nbgrader from a server without torch."""
    servers: dict[bool, Server] = {}
    monkeypatch.setattr(pool, "_servers", servers)
    try:
        for labs in ((), ("lab1_ddp",)):
            pool.begin(*labs)
            child = pool.fork(tell_torch)
            assert child.pipe.recv() is bool(labs)
            child.close()
    finally:
        for server in servers.values():
            server.end()
