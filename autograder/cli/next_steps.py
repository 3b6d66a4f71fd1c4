"""What an instructor does after `autograder grade`, as this class needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbgrader.api import MissingEntry

from autograder.course.course import Course, CourseError
from autograder.criteria.criterion import Status
from autograder.gradebook.database import gradebook_path, open_gradebook, read_grades
from autograder.plain_text import listed
from autograder.records.record import Record

_SHOWN = 5


def next_steps(
    course: Course, lab: str, records: Sequence[Record], *, example: bool
) -> Iterator[str]:
    """One line per step, in the order to take them."""
    if example:
        yield "put your class into the gradebook: autograder roster FILE.csv"
        yield f"take what it handed in: autograder collect DOWNLOAD --lab {lab}"
        return
    if failed := [record.student for record in records if record.infra]:
        yield f"run the same command again, for whom our grader failed: {listed(failed, _SHOWN)}"
    invalid = {
        record.student
        for record in records
        if any(each.status == Status.INVALID for each in record.criteria)
    }
    if invalid:
        yield f"ask for a notebook that can be read: {listed(sorted(invalid), _SHOWN)}"
    if not gradebook_path(course).is_file():
        return
    try:
        with open_gradebook(course) as book:
            grades = [grade for grade in read_grades(book, lab) if grade.submitted]
    except (CourseError, MissingEntry):  # the lab is not in the gradebook, so there is no step
        return
    by_hand = [g.student for g in grades if g.needs_person and g.student not in invalid]
    if by_hand:
        names = listed(by_hand, _SHOWN)
        yield f"grade by hand, in formgrader (jupyter lab, in this folder): {names}"
    if grades:
        yield f"publish: autograder publish --lab {lab} --to canvas|moodle|gradescope|csv"
