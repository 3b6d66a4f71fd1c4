"""`nbgrader zip_collect` in a course folder: what it collects is what `autograder grade` takes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile

import nbformat
from course import LAB
from made_records import make_course

from autograder.gradebook.database import handed_in_at
from autograder.submission.find import find_submissions

PATTERN = (
    r"--FileNameCollectorPlugin.named_regexp="
    r".*/?[a-z]+_(?P<student_id>\w+)_attempt_"
    r"(?P<timestamp>\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d)_(?P<file_id>lab1_ddp)"
)


def test_a_zip_becomes_submissions_with_times_that_nobody_else_reads(tmp_path):
    course = make_course(tmp_path / "course")
    archive = course.root / "downloaded" / LAB / "archive"
    archive.mkdir(parents=True)
    text = nbformat.writes(course.master(LAB))
    with zipfile.ZipFile(archive / "all.zip", "w") as file:
        file.writestr(f"ada_s1_attempt_2026-11-05-17-00-00_{LAB}.ipynb", text)
        file.writestr(f"ada_s1_attempt_2026-11-04-17-00-00_{LAB}.ipynb", "{}")
        file.writestr(f"kim_s2_attempt_2026-11-05-18-00-00_{LAB}.ipynb", text)
    (archive / f"lea_s3_attempt_2026-11-05-19-00-00_{LAB}.ipynb").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", "zip_collect", LAB, PATTERN],
        cwd=course.root,
        env=os.environ | {"AUTOGRADER_COURSE": str(course.root)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = find_submissions([course.build / "nbgrader" / "submitted"], LAB)
    assert {each.student: handed_in_at(each.path) for each in found.submissions} == {
        "s1": "2026-11-05 17:00:00 UTC",
        "s2": "2026-11-05 18:00:00 UTC",
        "s3": "2026-11-05 19:00:00 UTC",
    }
    assert found.submissions[0].path.read_text() == text  # the later of two
    assert stat.S_IMODE((course.root / "downloaded").stat().st_mode) == 0o700
