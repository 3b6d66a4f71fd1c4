"""What happens to a class when something that is nobody's fault goes wrong."""

from __future__ import annotations

import itertools
import os
import random
import resource
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from course import LAB, ROOT, TestCourse, statuses
from faults import KINDS, FaultyClass

import autograder.run
from autograder.course import Course
from autograder.criteria import get_lab
from autograder.intake import Submission
from autograder.journal import Journal
from autograder.run import Settings
from autograder.sandbox import probe_support
from autograder.scratch import remove_abandoned

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not probe_support().works, reason="no sandbox"),
]
MASTER = ROOT / "labs" / LAB / f"{LAB}.ipynb"
FULL_BYTES = 100_000  # of a file: a lab's notebook as it was run has more


def test_every_part_is_killed_in_a_class_of_twenty(tmp_path):
    """Every part is killed once; each submission has one verdict, and the one it has earned."""
    course = TestCourse.make(tmp_path / "course")
    seed = random.randrange(1000)
    outcome = FaultyClass(course, students=20, faults=len(KINDS), seed=seed).run()
    assert outcome.problems == [], (seed, outcome.kills)
    assert sorted(outcome.kills) == sorted(KINDS)
    assert len(outcome.records) == 20
    assert len(outcome.hit) <= 2

    before = _count(course)
    course.grade(str(course.root / "handed_in"), "--no-gradebook")
    assert _count(course) == before  # nothing was graded anew


def test_folders_of_the_dead_are_taken_away_and_those_of_the_living_are_not():
    held = "with scratch_folder() as f: print(f, flush=True); input()"
    code = f"from autograder.scratch import scratch_folder\n{held}"
    owners = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
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


def _count(course: TestCourse) -> Counter[str]:
    """How many attempts, verdicts and finished submissions the journal has."""
    kinds = Counter(e["kind"] for e in Journal(Course(course.root).journal_path).iter_records())
    return Counter({kind: kinds[kind] for kind in ("attempt", "verdict", "submission")})


def _grade(course: TestCourse, *options: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autograder", "grade", str(course.root / "handed_in"),
         "--lab", LAB, *options],
        cwd=course.root, env=os.environ | {"AUTOGRADER_COURSE": str(course.root)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, **more,
    )  # fmt: skip


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


def test_a_locked_gradebook_loses_no_verdict(course):
    """Somebody has the database open: grading says so, and the next time only it is left to do."""
    folder = str(course.root / "handed_in")
    course.grade(folder)
    path = course.root / "handed_in" / "one" / f"{LAB}.ipynb"
    path.write_text(path.read_text().replace("# Lab 1", "# Lab 1, again", 1))
    database = sqlite3.connect(course.root / "build" / "nbgrader" / "gradebook.db")
    try:
        database.execute("begin exclusive")
        done = _grade(course)
    finally:
        database.close()
    assert done.returncode == 2
    assert "database is locked" in done.stdout + done.stderr
    before = _count(course)
    assert before["submission"] == 2
    course.grade(folder)
    assert _count(course) == before


def test_a_clock_that_jumps_changes_nothing(course, monkeypatch):
    """A day forth and back at every look, as when a machine's clock is set while it grades."""
    clock, jumps = time.time, itertools.cycle((0.0, 86400.0, -86400.0))
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    settings = Settings(Course(course.root), LAB, get_lab(LAB).grading_world_size, True)
    path = course.root / "handed_in" / "one" / f"{LAB}.ipynb"
    record = autograder.run.grade(Submission("one", path), settings)
    assert set(statuses(record).values()) <= {"STUDENT_ERROR", "NOT_RUN", "WRONG"}
