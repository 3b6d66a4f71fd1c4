"""nbgrader's commands in one process: what they say, and what becomes of them if it is killed."""

from __future__ import annotations

import os
import signal

import pytest
from course import LAB, TestCourse

from autograder.course.course import Course, CourseError
from autograder.gradebook.commands import NbGrader


@pytest.fixture
def course(tmp_path):
    return Course(TestCourse.make(tmp_path / "course").root)


def test_one_command_after_the_other_and_one_that_fails(course):
    with NbGrader(course) as nbgrader:
        nbgrader.wait()  # for nothing
        nbgrader.run("db", "student", "add", "ada")
        with pytest.raises(CourseError, match=r"nbgrader autograde failed:(.|\n)*no-such-lab"):
            nbgrader.run("autograde", "no-such-lab")
        nbgrader.run("db", "student", "remove", "ada", "--force")


def test_a_process_that_was_killed_costs_nothing(course):
    release = course.build / "nbgrader" / "release"
    with NbGrader(course) as nbgrader:
        nbgrader.begin(
            *("generate_assignment", LAB, "--force"),
            f"--CourseDirectory.release_directory={release}",
        )
        os.kill(nbgrader._child.pid, signal.SIGKILL)
        nbgrader.wait()
        assert (release / LAB / f"{LAB}.ipynb").is_file()
        os.kill(nbgrader._child.pid, signal.SIGKILL)  # while it waits for a command
        nbgrader.run("db", "student", "add", "ada")
