"""Students of the class without a grade in a lab, and why: for `publish` and for reports.

nbgrader's gradebook cannot tell a student who handed in nothing from one whom our grader failed. So
`build/nbgrader/LAB.not_graded.json` names both with the reason; in the gradebook, both are students
without a submission.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from autograder.course.course import Course
from autograder.files import write_whole
from autograder.gradebook.database import gradebook_path, open_gradebook
from autograder.gradebook.roster import may_be_id

NOTHING = "nothing handed in"
FAILED = "the grader failed"  # and nobody gets a zero for it


def note(
    course: Course,
    lab: str,
    *,
    graded: Collection[str],
    failed: Mapping[str, str],
    nothing: Mapping[str, str],
) -> None:
    """Keeps who has no grade after a grading.

    Args:
        failed: student -> why the grader failed.
        nothing: student -> why nothing of them could be graded.
    """
    found = {name: why for name, why in read(course, lab).items() if name not in graded}
    found |= {name: f"{NOTHING}: {why}" for name, why in nothing.items() if name not in graded}
    found |= {name: f"{FAILED}: {why}" for name, why in failed.items()}
    text = json.dumps(dict(sorted(found.items())), indent=1)
    write_whole(_path(course, lab), text.encode() + b"\n")
    if students := [name for name in (*failed, *nothing) if may_be_id(name)]:
        with open_gradebook(course, create=True) as book:
            for name in students:
                book.update_or_create_student(name)


def read(course: Course, lab: str) -> dict[str, str]:
    """Student -> why there is no grade of the last submission; empty if everybody has one."""
    try:
        found = json.loads(_path(course, lab).read_bytes())
        return {str(name): str(why) for name, why in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _path(course: Course, lab: str) -> Path:
    return gradebook_path(course).with_name(f"{lab}.not_graded.json")
