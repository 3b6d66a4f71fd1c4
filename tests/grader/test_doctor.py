"""`autograder doctor` tells what is missing, and how to get it."""

from __future__ import annotations

import io
import os

import pytest
from course import ROOT
from rich.console import Console

from autograder.box.sandbox import Support
from autograder.cli import doctor
from autograder.course.course import Course


@pytest.fixture
def course(tmp_path):
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    (tmp_path / "nbgrader_config.py").touch()
    made = Course(tmp_path)
    made.make_key()
    return made


def states(findings):
    return {finding.what: finding.state for finding in findings}


def test_a_machine_that_can_grade(course):
    found = doctor.examine(course)
    assert "missing" not in states(found).values(), found
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(doctor.doctor_table(found))
    shown = console.export_text()
    assert all(what in shown for what in ("torch", "kernels", "sandbox", "course key", "disk"))


def test_what_is_missing_comes_with_its_remedy(course, monkeypatch):
    monkeypatch.setattr(
        doctor, "probe_support", lambda: Support(None, False, "bwrap is not installed")
    )
    os.chmod(course.key_path, 0o644)
    found = {finding.what: finding for finding in doctor.examine(course)}
    assert found["sandbox"].state == "limited"
    assert "install bubblewrap" in found["sandbox"].mend
    assert found["course key"].state == "missing"
    course.key_path.unlink()
    assert states(doctor.examine(course))["course key"] == "missing"
    assert states(doctor.examine(None))["course"] == "missing"


def test_a_network_file_system_is_named(course, monkeypatch):
    monkeypatch.setattr(doctor, "_file_system", lambda place: "nfs4")
    assert states(doctor.examine(course))["gradebook"] == "limited"


def test_the_file_system_of_a_path_is_the_deepest_mount(tmp_path, monkeypatch):
    text = f"a / ext4 rw 0 0\nb {tmp_path} nfs4 rw 0 0\nc {tmp_path}/x xfs rw 0 0\n"
    monkeypatch.setattr(doctor.Path, "read_text", lambda *args, **kwargs: text)
    assert doctor._file_system(tmp_path / "y") == "nfs4"
    assert doctor._file_system(tmp_path / "x" / "z") == "xfs"
