"""Boxes in control groups: on a real cgroup v2 tree, below a group that the test makes itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from course import TestCourse
from kernel_helper import wait_gone

from autograder.box import cgroup
from autograder.box.cgroup import Group, find_groups_folder, make_group
from autograder.box.sandbox import probe_support
from autograder.criteria.limits import MIB, Limits
from autograder.proof.zoo import load_zoo
from autograder.submission import scratch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")

# Leaves a process that its parent knows nothing of, in a session of its own.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
"""
# What the process finds that was started in a group that is marked as systemd marks one.
FINDS = """
from autograder.box.cgroup import find_groups_folder
place = find_groups_folder()
print(place.root, open("/proc/self/cgroup").read().split("0::")[1].strip())
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A group of the test's own, chosen as the one to make others in."""
    mount = cgroup._mount()
    if mount is None or not os.access(mount / "cgroup.procs", os.W_OK):
        pytest.skip("no cgroup v2 tree that this user may write to")
    folder = mount / f"md-test-{os.getpid()}"
    folder.mkdir()
    wanted = [n for n in ("memory", "pids") if n in (mount / "cgroup.controllers").read_text()]
    for name in wanted:
        (mount / "cgroup.subtree_control").write_text(f"+{name}")
    monkeypatch.setenv(cgroup.ROOT_VARIABLE, str(folder))
    find_groups_folder.cache_clear()
    try:
        yield folder
    finally:
        find_groups_folder.cache_clear()
        for below in sorted(folder.rglob("*"), reverse=True):
            if below.is_dir():
                Group(below).remove()
        assert Group(folder).remove()


@pytest.fixture
def group(root: Path) -> Iterator[Group]:
    made = make_group("md-one", Limits())
    assert made is not None
    yield made
    made.remove()


def _start(group: Group, code: str) -> subprocess.Popen[str]:
    command = [*group.prefix, sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _processes(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def test_what_a_box_has_started_ends_with_it_wherever_it_hides(group: Group) -> None:
    with _start(group, DAEMON) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        process.wait(timeout=30)
        assert _processes(group.path) == [daemon]
        assert group.take_reason() == ""
        assert group.remove()
        assert not group.path.exists()
        assert wait_gone([daemon]) == []
    assert group.remove()  # what is gone need not be told twice


def test_a_command_that_cannot_enter_does_not_run_outside(group: Group) -> None:
    group.remove()
    with _start(group, "print('outside')") as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert out == ""
    assert "cgroup.procs" in err


@pytest.mark.skipif(not probe_support().works, reason="no sandbox")
@pytest.mark.slow
def test_a_submission_is_graded_in_a_group_of_its_own(root: Path, tmp_path: Path) -> None:
    [right] = load_zoo("lab6_profiling", "reference")
    course = TestCourse.make(tmp_path, "lab6_profiling")
    course.submit("alice", nbformat.writes(right.notebook).encode())
    seen: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            for folder in root.glob("md-*"):
                seen.add(len(_processes(folder)))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        records = course.grade(str(course.root / "handed_in"), "--no-gradebook")
    finally:
        done.set()
        looking.join()
    assert records["alice"]["score"] == records["alice"]["max_score"], records["alice"]
    assert max(seen) > records["alice"]["world_size"]  # bwrap, the launcher and the ranks
    assert list(root.glob("md-*")) == []


def test_the_group_of_a_killed_grader_goes_with_its_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "place", lambda: tmp_path)
    code = (
        "import os, subprocess, sys; from pathlib import Path\n"
        "from autograder.submission import scratch\n"
        "from autograder.box.cgroup import make_group\n"
        "from autograder.criteria.limits import Limits\n"
        f"scratch.place = lambda: Path({str(tmp_path)!r})\n"
        "with scratch.scratch_folder() as folder:\n"
        "    group = make_group(folder.name, Limits())\n"
        "    box = subprocess.Popen([*group.prefix, 'sleep', '600'])\n"
        "    print(box.pid, flush=True)\n"
        "    box.wait()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as grader:
        assert grader.stdout is not None
        box = int(grader.stdout.readline())
        assert scratch.remove_abandoned() == []  # it lives
        grader.kill()
    os.kill(box, 0)
    assert len(scratch.remove_abandoned()) == 1
    assert wait_gone([box]) == []
    assert list(root.glob("md-*")) == []


def test_a_group_that_systemd_delegates_is_found_and_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cgroup.ROOT_VARIABLE)
    scope = root / "run-1.scope"
    scope.mkdir()
    command = [*Group(scope).prefix, sys.executable, "-c", FINDS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("None /")  # not delegated: somebody else's
    os.setxattr(scope, "user.delegate", b"1")
    # Where there is nothing to bound, nothing is moved; else what is there makes room.
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    where, own = found.stdout.split()
    assert where == str(scope)
    handed_on = bool((scope / "cgroup.controllers").read_text().split())
    assert own.endswith("/run-1.scope/grader" if handed_on else "/run-1.scope")


def test_a_place_that_is_none_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cgroup.ROOT_VARIABLE, str(tmp_path))
    find_groups_folder.cache_clear()
    try:
        place = find_groups_folder()
        assert place.root is None
        assert make_group("md-one", Limits()) is None
        if cgroup._mount() is not None:
            assert place.reason == f"AUTOGRADER_CGROUP: {tmp_path} is not a cgroup v2 folder"
    finally:
        find_groups_folder.cache_clear()


def _needs(name: str) -> None:
    if name not in find_groups_folder().controllers:
        pytest.skip(f"no {name} controller in the cgroup v2 tree")


def test_memory_is_bounded_by_the_kernel_files_in_memory_included(root: Path) -> None:
    _needs("memory")
    group = make_group("md-one", Limits(box_memory_bytes=64 * MIB, tmp_bytes=MIB, shm_bytes=MIB))
    assert group is not None
    hog = "import mmap, os\nwith open('/dev/shm/md-hog', 'wb') as f: f.write(bytes(200 << 20))"
    try:
        with _start(group, hog) as process:
            assert process.wait(timeout=60) == -signal.SIGKILL
        assert "more than the 66 MiB of memory" in group.take_reason()
        assert group.take_reason() == ""  # said once
    finally:
        Path("/dev/shm/md-hog").unlink(missing_ok=True)
        group.remove()


def test_processes_are_bounded_by_the_kernel(root: Path) -> None:
    _needs("pids")
    group = make_group("md-one", Limits(num_processes=20))
    assert group is not None
    bomb = (
        "import os, time\nn = 0\ntry:\n    while n < 500:\n        if os.fork() == 0:\n"
        "            time.sleep(600)\n        n += 1\nexcept BlockingIOError:\n"
        "    print(n, flush=True)"
    )
    with _start(group, bomb) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == 20 + cgroup._SPARE_PROCESSES - 1
        finally:
            assert group.remove()
