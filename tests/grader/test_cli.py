"""The command line: what it accepts, what it refuses, and what becomes of broken files."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time

import psutil
import pytest
from course import LAB, ROOT, TestCourse

from autograder.box.sandbox import probe_support
from autograder.course.course import Course, CourseError
from autograder.gradebook.database import open_gradebook
from autograder.gradebook.fill import fill_gradebook
from autograder.proof.bundled import is_bundled
from autograder.proof.zoo import write_class
from autograder.submission.choose_box import choose_sandbox
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission

MASTER = ROOT / "labs" / LAB / f"{LAB}.ipynb"


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    made = TestCourse.make(tmp_path_factory.mktemp("course"))
    made.submit("empty", b"")
    return made


def _changed(**changes):
    return json.dumps(json.loads(MASTER.read_text()) | changes).encode()


BROKEN = {
    "not_json": (b"{ this is not JSON", "JSON"),
    "latin1": ('{"cells": "é"}'.encode("latin-1"), "UTF-8"),
    "empty": (b"", "empty"),
    "no_cells": (_changed(cells=[]), "cell"),
    "nbformat_3": (_changed(nbformat=3), "format is 3"),
    "a_list": (b"[]", "notebook"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "nest"),
}


@pytest.mark.slow
def test_broken_notebooks_get_a_record_and_the_rest_is_graded(course):
    for student, (content, _) in BROKEN.items():
        course.submit(student, content)
    huge = course.submit("huge", b"")
    with open(huge, "wb") as file:
        file.truncate(200 << 20)
    course.submit("starter", MASTER.read_bytes())
    (course.root / "handed_in" / "nothing").mkdir()
    records = course.grade(str(course.root / "handed_in"))
    nothing = records.pop("nothing")
    assert (nothing["score"], nothing["criteria"]) == (None, [])
    assert "no lab1_ddp.ipynb" in nothing["left_out"]
    assert nothing["left_out"] in (course.root / "build" / "report.html").read_text()
    assert set(records) == {*BROKEN, "huge", "starter"}
    for student, (_, reason) in (BROKEN | {"huge": (b"", "MiB")}).items():
        criteria = records[student]["criteria"]
        assert {c["status"] for c in criteria} == {"INVALID"}, student
        assert reason.lower() in criteria[0]["message"].lower(), criteria[0]["message"]
        assert records[student]["score"] == 0
        assert records[student]["max_score"] == 100
    assert {c["status"] for c in records["starter"]["criteria"]} == {"STUDENT_ERROR"}
    assert "not written yet" in records["starter"]["criteria"][0]["message"]
    feedback = course.root / "build" / "nbgrader" / "feedback"
    assert "could not be graded" in (feedback / "latin1" / LAB / f"{LAB}.html").read_text()
    again = ["handed_in", "--lab", LAB, "--no-gradebook", "--json", "a/new/folder.json"]
    course.run("-m", "autograder", "grade", *again)
    assert len(json.loads((course.root / "a/new/folder.json").read_text())) == len(records) + 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["grade", "nowhere", "--lab", LAB], "nowhere"),
        (["grade", "--lab", LAB], "name a notebook"),
        (["grade", ".", "--lab", "lab9"], "lab9"),
        (["grade", "--example", "--lab", LAB, "--ranks", "0"], "at least 1"),
        (["verify", "--json", "build"], "build is a folder"),
        (["verify", "--json", "nbgrader_config.py/a.json"], "no folder nbgrader_config.py"),
        (["frobnicate"], "frobnicate"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_exit_code_2(course, arguments, says):
    done = course.run("-m", "autograder", *arguments, code=2)
    assert says in done.stderr


def test_records_go_to_standard_output_whatever_may_be_written_here(course):
    (course.root / "-").mkdir()
    options = ["handed_in/empty", "--lab", LAB, "--no-gradebook", "--json", "-"]
    done = course.run("-m", "autograder", "grade", *options)
    assert len(json.loads(done.stdout)) == 1


def test_a_terminal_that_lacks_our_signs_stops_nothing(course, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    options = ["handed_in/empty", "--lab", LAB, "--no-gradebook"]
    assert "empty" in course.run("-m", "autograder", "grade", *options).stdout


def test_a_file_in_place_that_nbgrader_cannot_read_is_left_out(course, monkeypatch, capsys):
    """Both lie where nbgrader has them; it would stop at the one, and the other had no feedback."""
    with open_gradebook(Course(course.root), create=True) as book:
        book.update_or_create_assignment(LAB)
    submissions = []
    for student, content in (("good", MASTER.read_bytes()), ("odd", b"{ no notebook")):
        path = course.root / "build" / "nbgrader" / "submitted" / student / LAB / f"{LAB}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        submissions.append(Submission(student, path))
    calls = []
    monkeypatch.setattr(
        "autograder.gradebook.commands.NbGrader.begin", lambda _, *words: calls.append(words)
    )
    fill_gradebook(submissions, [{}, {}], ClassRun(Course(course.root), LAB, 3, True))
    assert "not in the gradebook" in capsys.readouterr().err
    autograde, feedback = (call for call in calls if call[0] != "generate_assignment")
    for call in (autograde, feedback):
        [left_out] = [word for word in call if "student_id_exclude" in word]
        assert "odd" in left_out.rpartition("=")[2].split(",")
        assert "good" not in left_out.rpartition("=")[2].split(",")


@pytest.mark.slow
def test_a_record_can_be_found_again_from_elsewhere(course):
    """`--student`, the report's advice and a regrade read the file once more."""
    record = course.grade("handed_in/empty", "--no-gradebook")["empty"]
    assert record["submission"] == str(course.root / "handed_in" / "empty" / f"{LAB}.ipynb")


def test_the_key_is_private_and_kept(course):
    key = course.root / "build" / "course.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_text()
    assert "kept" in course.run("-m", "autograder", "init").stdout
    assert key.read_text() == before


def test_grading_needs_a_key_that_nobody_else_can_read(tmp_path):
    course = TestCourse.make(tmp_path)
    key = tmp_path / "build" / "course.key"
    key.chmod(0o644)
    grade = ("-m", "autograder", "grade", "--example", "--lab", LAB)
    assert "chmod 600" in course.run(*grade, code=2).stderr
    key.unlink()
    assert "autograder init" in course.run(*grade, code=2).stderr


@pytest.fixture
def no_bubblewrap(monkeypatch, tmp_path):
    """A machine without a sandbox: bwrap is not on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    probe_support.cache_clear()
    yield
    probe_support.cache_clear()


@pytest.mark.slow
def test_without_a_sandbox_strangers_are_refused_unless_trusted(no_bubblewrap, tmp_path):
    course = TestCourse.make(tmp_path / "course")
    path = str(course.submit("starter", MASTER.read_bytes()))
    grade = ("-m", "autograder", "grade", path, "--lab", LAB, "--no-gradebook")
    refused = course.run(*grade, code=2)
    assert "bubblewrap" in refused.stderr
    assert "--trusted" in refused.stderr
    record = course.grade(path, "--no-gradebook", "--trusted")["starter"]
    assert record["sandboxed"] is False
    assert {c["status"] for c in record["criteria"]} == {"STUDENT_ERROR"}
    assert "UNSANDBOXED" in (course.root / "build" / "report.html").read_text()


def test_without_a_sandbox_the_bundled_class_is_graded(no_bubblewrap, tmp_path):
    bundled, *_ = write_class(LAB, tmp_path, only_example=True)
    assert is_bundled(bundled, LAB)
    assert choose_sandbox(trusted=False, bundled=True) is False
    changed = tmp_path / "changed.ipynb"
    changed.write_bytes(bundled.read_bytes() + b"\n")
    assert not is_bundled(changed, LAB)
    with pytest.raises(CourseError, match="no sandbox here"):
        choose_sandbox(trusted=False, bundled=False)


def test_outside_a_course_it_says_so(tmp_path):
    course = TestCourse(tmp_path)
    done = course.run("-m", "autograder", "init", code=2)
    assert "nbgrader_config.py" in done.stderr


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "labs").mkdir()
    (tmp_path / "nbgrader_config.py").touch()
    (tmp_path / "build").touch()
    done = TestCourse(tmp_path).run("-m", "autograder", "init", code=1)
    assert done.stderr == f"autograder: {tmp_path / 'build'}: File exists\n"


def test_a_grader_that_is_killed_takes_all_with_it(course):
    folder = course.root / "killed"
    for name in ("one", "two", "three"):
        path = folder / name / f"{LAB}.ipynb"
        path.parent.mkdir(parents=True)
        text = MASTER.read_text().replace("# Lab 1", f"# {name}", 1)
        path.write_text(text)
    grader = subprocess.Popen(
        [sys.executable, "-m", "autograder", "grade", str(folder), "--lab", LAB, "--no-gradebook"],
        cwd=course.root,
        env=os.environ | {"AUTOGRADER_COURSE": str(course.root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends_at = time.monotonic() + 120
        while len(started := psutil.Process(grader.pid).children(recursive=True)) < 10:
            assert time.monotonic() < ends_at, "no submission was begun"
            time.sleep(0.2)
    finally:
        grader.kill()
        grader.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
