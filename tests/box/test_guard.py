"""The guard adds up a whole box: real processes, counted and stopped from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from autograder.box.guard import Guard, living, memory_of
from autograder.criteria.limits import MIB, Limits
from minidist.processes.tree import below

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Stands for the front: starts one program in the place of the box, and says how it ended.
FRONT = """
import subprocess, sys
box = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(box.wait(), flush=True)
sys.stdin.read()
"""
THREADS = """
import threading, time
for _ in range(60):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)
"""
FORKS = """
import os, time
for _ in range(400):
    if os.fork():
        break
    time.sleep(0.005)
time.sleep(60)
"""
TWO_HALVES = """
import os, time
os.fork()
mine = b"x" * (80 << 20)
time.sleep(60)
"""
FILES = """
import os, time
files = [os.memfd_create(str(number)) for number in range(4)]
for file in files:
    os.write(file, b"x" * (40 << 20))
time.sleep(60)
"""
TABLES = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
size, huge_pages_off = 80 << 30, 15
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
start = libc.mmap(None, size, 1, 0x4022, -1, 0)  # to be read, and never counted
libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), huge_pages_off)
for place in range(start, start + size, 2 << 20):
    ctypes.c_char.from_address(place).value
time.sleep(60)
"""
OPEN_FILES = """
import os, time
for _ in range(2):
    os.fork()
for _ in range(600):
    os.dup(0)
time.sleep(60)
"""
HEADLESS = """
import ctypes, platform, subprocess, threading, time
def work():
    time.sleep(0.5)
    held = b"x" * (200 << 20)
    subprocess.run(["sleep", "60"])
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
SHARED = """
import os, time
everybodys = b"x" * (80 << 20)
print("ready", flush=True)
os.fork() and os.fork()
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator:
    """Starts a front with a box; everything is gone at the end."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, **limits: int) -> tuple[subprocess.Popen[str], Guard]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        front = subprocess.Popen(
            [sys.executable, "-c", FRONT, code], text=True, start_new_session=True, **pipes
        )
        started.append(front)
        return front, Guard(front.pid, Limits(**limits), every_s=0.1).start()

    yield run
    for front in started:
        # With no pid namespace around this box, some of it has lost its parent and lives on.
        os.killpg(front.pid, signal.SIGKILL)
        front.wait()
        for pipe in (front.stdin, front.stdout):
            pipe.close()


@pytest.mark.parametrize("code", [THREADS, FORKS])
def test_too_many_processes_end_the_box(start, code):
    front, guard = start(code, num_processes=40)
    assert front.stdout.readline().strip() == "-9"
    reason = guard.take_reason()
    assert reason.startswith("the submission had ")
    assert "at most 40 are allowed" in reason
    guard.stop()
    deadline = time.monotonic() + 10
    while living(below(front.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not living(below(front.pid))


def test_memory_is_added_up_over_processes(start):
    front, guard = start(TWO_HALVES, box_memory_bytes=120 * MIB)
    assert front.stdout.readline().strip() == "-9"
    assert "MiB of memory, at most 120 MiB are allowed for all its ranks" in guard.take_reason()
    assert guard.take_reason() == ""
    guard.stop()


def test_files_in_memory_count_though_nobody_has_mapped_them(start):
    front, guard = start(FILES, box_memory_bytes=120 * MIB)
    assert front.stdout.readline().strip() == "-9"
    assert "MiB of memory, at most 120 MiB are allowed" in guard.take_reason()
    guard.stop()


def test_tables_that_say_where_memory_is_are_memory(start):
    front, guard = start(TABLES, box_memory_bytes=120 * MIB)
    assert front.stdout.readline().strip() == "-9"
    assert "MiB of memory, at most 120 MiB are allowed" in guard.take_reason()
    guard.stop()


def test_open_files_of_a_box_are_bounded(start, monkeypatch):
    monkeypatch.setattr("autograder.box.guard.MAX_FILES", 2000)
    front, guard = start(OPEN_FILES)
    assert front.stdout.readline().strip() == "-9"
    assert guard.take_reason() == "the submission had over 2000 files open at once"
    guard.stop()


def test_nobody_hides_behind_a_first_thread_that_has_ended(start):
    """Of such a process the kernel says that it has ended; what it has started lives on."""
    front, guard = start(HEADLESS, box_memory_bytes=120 * MIB)
    assert front.stdout.readline().strip() == "-9"
    assert guard.take_reason() == ""
    guard.stop()


def test_what_is_shared_counts_once(start):
    front, guard = start(SHARED, box_memory_bytes=150 * MIB)
    assert front.stdout.readline().strip() == "ready"
    deadline = time.monotonic() + 20
    while len(inside := living(below(front.pid))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [process.pid for process in inside]
    assert len(pids) == 3
    assert memory_of(pids, enough=1 << 40) > 3 * 80 * MIB
    assert 80 * MIB < memory_of(pids, enough=150 * MIB) < 150 * MIB
    while not set(pids) <= guard._seen.keys():
        assert time.monotonic() < deadline + 20
        time.sleep(0.05)
    time.sleep(0.5)  # five rounds of the guard
    assert guard.take_reason() == ""
    assert set(guard.stop()) == set(pids)  # a box that is still there at the end goes


def test_gpu_memory_is_added_up_as_the_driver_counts_it(start, tmp_path, monkeypatch):
    """With a program in the driver's place, which says that each process in here holds 600 MiB."""
    smi = tmp_path / "nvidia-smi"
    (tmp_path / "smi.py").write_text(
        "import os, sys\nassert '--query-compute-apps' in sys.argv[1]\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')): print(f'{pid}, 600')\n"
    )
    smi.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/smi.py" "$@"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    front, guard = start(TWO_HALVES, gpu_memory_bytes=1000 * MIB)
    assert front.stdout.readline().strip() == "-9"
    reason = guard.take_reason()
    assert reason.startswith("the submission held 1200 MiB of GPU memory, at most 1000 MiB are")
    guard.stop()
    smi.write_text("#!/bin/sh\nexit 9\n")  # as it ends where there is no driver
    front, guard = start("import time; time.sleep(2)", gpu_memory_bytes=1)
    assert front.stdout.readline().strip() == "0"
    assert guard.take_reason() == ""
    guard.stop()


def test_within_the_limits_nothing_happens(start):
    front, guard = start("print('done')")
    assert front.stdout.readline().strip() == "done"
    assert front.stdout.readline().strip() == "0"
    assert guard.stop() == []
    assert guard.take_reason() == ""
    assert front.poll() is None
