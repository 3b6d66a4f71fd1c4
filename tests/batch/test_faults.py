"""What happens to a class when something that is nobody's fault goes wrong."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from course import LAB, ROOT, TestCourse, statuses
from faults import KINDS, FaultyClass, count_entries, of_kind
from nbgrader.api import Gradebook
from slurm_cluster import heed_ctrl_c, wait_until

import autograder.submission.attempt
from autograder.box.sandbox import probe_support
from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.records.journal import Journal
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.scratch import remove_abandoned

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not probe_support().works, reason="no sandbox"),
]
MASTER = ROOT / "labs" / LAB / f"{LAB}.ipynb"
FULL_BYTES = 100_000  # of a file: a lab's notebook as it was run has more


@pytest.mark.slow
def test_every_part_is_killed_in_a_class(tmp_path):
    """Every part is killed once; each submission has one verdict, and the one it has earned."""
    course = TestCourse.make(tmp_path / "course")
    seed = random.randrange(1000)
    outcome = FaultyClass(course, students=13, faults=len(KINDS), seed=seed).run()
    assert outcome.problems == [], (seed, outcome.kills)
    assert sorted(outcome.kills) == sorted(KINDS)
    assert len(outcome.records) == 13
    assert len(outcome.hit) <= 2

    before = count_entries(course)
    course.grade(str(course.root / "handed_in"), "--no-gradebook")
    assert count_entries(course) == before  # nothing was graded anew


def test_folders_of_the_dead_are_taken_away_and_those_of_the_living_are_not():
    held = "with scratch_folder() as f: print(f, flush=True); input()"
    code = f"from autograder.submission.scratch import scratch_folder\n{held}"
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    dead, alive = (Path(owner.stdout.readline().strip()) for owner in owners)
    owners[0].kill()
    owners[0].wait()
    try:
        removed = remove_abandoned()
        assert dead in removed
        assert not dead.exists()
        assert alive not in removed
        assert alive.is_dir()
    finally:
        owners[1].communicate("\n", timeout=60)
    assert not alive.exists()


@pytest.fixture
def course(tmp_path):
    """A course with one student, who has not begun."""
    made = TestCourse.make(tmp_path / "course")
    made.submit("one", MASTER.read_text().encode())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "its parent is killed"])
def test_a_worker_that_is_told_to_end_does_not_begin_anew(course, how):
    notebook = nbformat.read(MASTER, as_version=4)
    nap = nbformat.v4.new_code_cell("import time; time.sleep(10)", id="nap")
    notebook.cells.insert(0, nap)
    course.submit("one", nbformat.writes(notebook).encode())
    (course.root / "course.toml").write_text(f"[limits.{LAB}]\nwall_s = 60\n")  # of each try
    grader = subprocess.Popen(
        _words(course, "--no-gradebook"),
        cwd=course.root,
        env=_env(course),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=heed_ctrl_c,
    )

    def below(kind: str) -> list[psutil.Process]:
        return of_kind(psutil.Process(grader.pid).children(recursive=True), kind)

    try:
        num_ranks = get_lab(LAB).grading_world_size
        wait_until(lambda: len(below("rank")) >= num_ranks, 400, "no ranks")
        (worker,) = below("worker")
        if how == "Ctrl-C":
            grader.send_signal(signal.SIGINT)
        else:
            worker.parent().kill()
        worker.wait(timeout=120)
        assert grader.wait(timeout=300) == (130 if how == "Ctrl-C" else 0)
    finally:
        grader.kill()
        grader.wait()
    entries = list(Journal(Course(course.root).journal_path).iter_entries())
    assert [e["kind"] for e in entries if e.get("pid") == worker.pid] == ["attempt"]
    assert [e for e in entries if e["kind"] == "infra"] == []
    assert count_entries(course)["submission"] == (0 if how == "Ctrl-C" else 1)


def test_a_worker_that_is_told_to_end_many_times_ends_once():
    """By who made it, by the pool, by the grader: a signal must not wait for the one before it."""
    code = """
import time
from autograder.batch import pool
pool._prepare()
try:
    print("ready", flush=True)
    while True:
        pass
finally:
    time.sleep(3)
    print("tidy", flush=True)
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "ready\n"
        began = time.monotonic()
        while time.monotonic() < began + 0.5:  # it must be over before the interpreter ends
            worker.terminate()
            time.sleep(0.001)
        said, _ = worker.communicate(timeout=60)
        assert (said, worker.returncode) == ("tidy\n", 128 + signal.SIGTERM)
    finally:
        worker.kill()


def _words(course: TestCourse, *options: str) -> list[str]:
    folder = str(course.root / "handed_in")
    return [sys.executable, "-m", "autograder", "grade", folder, "--lab", LAB, *options]


def _env(course: TestCourse) -> dict[str, str]:
    return os.environ | {"AUTOGRADER_COURSE": str(course.root)}


def _grade(course: TestCourse, *options: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _words(course, *options),
        cwd=course.root,
        env=_env(course),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **more,
    )


@pytest.mark.nightly
def test_a_full_disk_is_told_and_costs_nobody_a_point(course):
    """A limit on the size of files fails where a full disk does, and needs no disk to be full."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))

    done = _grade(course, "--no-gradebook", preexec_fn=fill)
    assert done.returncode == 1
    assert "INFRA" in done.stdout + done.stderr
    assert "File too large" in done.stdout + done.stderr
    records = course.grade(str(course.root / "handed_in"), "--no-gradebook")
    assert set(statuses(records["one"]).values()) <= {"STUDENT_ERROR", "NOT_RUN", "WRONG"}


@pytest.mark.slow
def test_a_locked_gradebook_loses_no_verdict(course):
    """Somebody has the database open: grading says so, and the next time only it is left to do."""
    path = course.root / "build" / "nbgrader" / "gradebook.db"
    path.parent.mkdir(parents=True)
    Gradebook(f"sqlite:///{path}").close()
    database = sqlite3.connect(path)
    try:
        database.execute("begin exclusive")
        done = _grade(course)
    finally:
        database.close()
    assert done.returncode == 2
    assert "database is locked" in done.stdout + done.stderr
    before = count_entries(course)
    assert before["submission"] == 1
    course.grade(str(course.root / "handed_in"))
    assert count_entries(course) == before


def test_a_clock_that_jumps_changes_nothing(course, monkeypatch):
    """A day forth and back at every look, as when a machine's clock is set while it grades."""
    clock, jumps = time.time, itertools.cycle((0.0, 86400.0, -86400.0))
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    class_run = ClassRun(Course(course.root), LAB, get_lab(LAB).grading_world_size, True)
    path = course.root / "handed_in" / "one" / f"{LAB}.ipynb"
    record = autograder.submission.attempt.grade(Submission("one", path), class_run)
    assert set(statuses(record.to_json()).values()) <= {"STUDENT_ERROR", "NOT_RUN", "WRONG"}
