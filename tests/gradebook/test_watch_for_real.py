"""`autograder watch` as a process of its own: real ranks, nbgrader's exchange, kills."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from course import LAB, TestCourse

from autograder.course.course import Course
from autograder.proof.zoo import write_class
from autograder.records.journal import Journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN_S = 400.0


class Exchange:
    """A course with an exchange, whose students use nbgrader's commands in folders of their own."""

    def __init__(self, root):
        self.course = TestCourse.make(root / "course")
        self.root, self.exchange = root, root / "exchange"
        self.exchange.mkdir()
        self.exchange.chmod(0o777)
        self.config = f"\nc.Exchange.root = {str(self.exchange)!r}\n"
        with (self.course.root / "nbgrader_config.py").open("a") as file:
            file.write(self.config)
        write_class(LAB, root / "class")

    def student(self, name, *command):
        home = self.root / name
        (home / "work").mkdir(parents=True, exist_ok=True)
        (home / "work" / "nbgrader_config.py").write_text(
            f"c = get_config()\nc.CourseDirectory.course_id = 'minidist'{self.config}"
        )
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", *command, f"--CourseDirectory.student_id={name}"],
            cwd=home / "work",
            env=os.environ | {"HOME": str(home), "JUPYTER_DATA_DIR": str(home / "data")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def hand_in(self, name, like, more=""):
        folder = self.root / name / "work" / LAB
        folder.mkdir(parents=True, exist_ok=True)
        notebook = nbformat.read(self.root / "class" / like / LAB / f"{LAB}.ipynb", as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(f"whose = {name + more!r}"))
        nbformat.write(notebook, folder / f"{LAB}.ipynb")
        self.student(name, "submit", LAB)

    def feedback(self, name):
        """The texts that this student can fetch, oldest submission first."""
        self.student(name, "fetch_feedback", LAB)
        pages = (self.root / name / "work" / LAB / "feedback").glob(f"*/{LAB}.html")
        return [page.read_text("utf-8") for page in sorted(pages)]

    def released(self):
        return len(list((self.exchange / "minidist" / "feedback").glob("*.html")))


@contextlib.contextmanager
def watching(course, *options):
    with open(course.root / "watch.log", "a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "autograder", "watch", *options],
            cwd=course.root,
            env=os.environ | {"AUTOGRADER_COURSE": str(course.root)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(30)


def wait_until(condition, course):
    ends_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < ends_at, (course.root / "watch.log").read_text()
        time.sleep(0.2)


def entries(course, kind):
    journal = Journal(Course(course.root).journal_path)
    return [each for each in journal.iter_entries() if each.get("kind") == kind]


def graded(course):
    return sorted(each["record"].student for each in entries(course, "submission"))


@pytest.mark.nightly
def test_an_exchange_is_watched_killed_and_watched_on(tmp_path):
    term = Exchange(tmp_path)
    course = term.course
    course.run("-m", "nbgrader", "release_assignment", LAB)
    term.hand_in("ada", "reference")
    term.hand_in("kim", "starter")
    words = ("exchange", "--lab", LAB, "--jobs", "1", "--per-day", "1", "--every", "1")
    with watching(course, *words) as process:
        wait_until(lambda: entries(course, "attempt"), course)
        process.kill()  # in the midst of the first
    # What nbgrader stumbles over stops nobody: everybody may write to inbound/.
    (term.exchange / "minidist" / "inbound" / f"eve+{LAB}+no time+x").mkdir()
    with watching(course, *words) as process:
        wait_until(lambda: term.released() == 2, course)
        assert graded(course) == ["ada", "kim"]
        assert "<dd>100 of 100</dd>" in term.feedback("ada")[0]
        assert "<dd>0 of 100</dd>" in term.feedback("kim")[0]
        term.hand_in("ada", "reference", "again")
        wait_until(lambda: term.released() == 3, course)
        first, second = term.feedback("ada")
        assert "<dd>100 of 100</dd>" in first
        assert "graded once within 24 hours" in second
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert graded(course) == ["ada", "kim"]
    said = (course.root / "watch.log").read_text()
    assert "eve cannot be collected" in said
    assert "ended, as asked" in said
    state = course.root / "build" / "watch" / f"{LAB}.json"
    known = json.loads(state.read_text())
    known["ada"]["graded_at"] = []  # a day later
    state.write_text(json.dumps(known))
    course.run("-m", "autograder", "watch", *words, "--once", code=None)
    assert graded(course) == ["ada", "ada", "kim"]
    assert all("<dd>100 of 100</dd>" in page for page in term.feedback("ada"))


def test_one_notebook_in_a_folder_is_graded_by_a_process(tmp_path):
    course = TestCourse.make(tmp_path / "course")
    write_class(LAB, tmp_path / "class")
    folder = tmp_path / "handed_in" / "kim"
    folder.mkdir(parents=True)
    shutil.copy(tmp_path / "class" / "starter" / LAB / f"{LAB}.ipynb", folder)
    words = ("watch", str(tmp_path / "handed_in"), "--lab", LAB, "--once", "--settle", "0.1")
    course.run("-m", "autograder", *words)
    assert "<dd>0 of 100</dd>" in (folder / f"{LAB}.feedback.html").read_text("utf-8")
    assert graded(course) == ["kim"]
