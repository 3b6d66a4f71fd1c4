"""Several clones with one installation, and a full disk: told in a line, not a traceback."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
from course import LAB, ROOT
from made_records import hand_in, make_course, stub_grading

from autograder.__main__ import main
from autograder.cli.doctor import examine
from autograder.cli.installation import foreign_code


def test_a_clone_that_runs_with_another_installations_packages_is_told(
    tmp_path, monkeypatch, capsys
):
    assert foreign_code() == ""
    others = [str(ROOT), "/usr/lib/python3", str(Path(sys.prefix) / "lib")]
    assert f"the grader in {ROOT} runs with the packages of {sys.prefix}" in foreign_code(others)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # no box has it
    assert foreign_code([*others, str(ROOT)])
    # The folder of the clone comes first, as `python -m` puts it, and nowhere else.
    rest = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [str(ROOT), *rest])
    assert main(["grade", "--example", "--lab", LAB]) == 2
    assert "bin/autograder, which grades in any course's folder" in capsys.readouterr().err
    [check] = [each for each in examine(None) if each.what == "installation"]
    assert check.state == "missing"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_in_a_line(tmp_path, monkeypatch, capsys, number):
    course = make_course(tmp_path / "course")
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    stub_grading(monkeypatch)
    hand_in(course, "ada")

    def full(*_, **__):
        raise OSError(number, "No space left on device")

    monkeypatch.setattr("autograder.cli.grade_steps.write_pages", full)
    grade = ["grade", "--no-gradebook", "--lab", LAB, str(course.root / "handed_in")]
    assert main(grade) == 1
    said = capsys.readouterr().err
    assert "No space left on device; what was graded is kept: make room" in said
    assert "Traceback" not in said


def test_doctor_says_who_can_read_answers(tmp_path):
    course = make_course(tmp_path / "course")
    (course.root / "solutions").chmod(0o755)
    [check] = [each for each in examine(course) if each.what == "privacy"]
    assert "others on this machine can read solutions" in check.text
    course.make_private()
    assert course.readable_by_others() == []
