"""The files of a report: a page and a table per lab, and one of each over all labs.

    build/reports/LAB.html, LAB.csv   every student who was ever graded in the lab
    build/report.html, grades.csv     all labs

So late notebooks, or a second lab, add to a report and remove nobody. The bundled example
is no class: it gets the pages over all labs only while nobody else was graded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from autograder.course.course import Course
from autograder.criteria import lab_names
from autograder.records.grading import Grading, class_of
from autograder.records.record import Record
from autograder.report.page import Part, write_page
from autograder.report.terminal import write_csv


def write_pages(
    course: Course,
    history: Sequence[Grading],
    lab: str,
    part: Part,
    by_person: Mapping[str, Mapping[str, str]],
    *,
    is_example: bool = False,
) -> list[Path]:
    """Writes the pages and tables; returns the paths of those of the lab and over all labs.

    Args:
        history: every finished grading, this one included.
        lab: the lab that was graded now.
        part: the lab's records and findings; feedback and points by a person are added here.
        by_person: lab -> student -> points that a person gave, of every lab.
    """
    pages = course.build / "reports"
    name = f"{lab}.example" if is_example else lab
    page, table = pages / f"{name}.html", pages / f"{name}.csv"
    feedback = _feedback_of(course, part.records, pages)
    part = replace(part, feedback=feedback, by_person=by_person.get(lab, {}))
    write_page([part], page)
    write_csv(part.records, table)
    others = {
        other: records
        for other in lab_names()
        if other != lab and (records := class_of(course, history, other))
    }
    if is_example and (others or class_of(course, history, lab)):
        return [page, table]
    parts = [
        Part(_sorted(records), link=f"reports/{other}.html", by_person=by_person.get(other, {}))
        for other, records in others.items()
    ]
    part = replace(part, feedback=_feedback_of(course, part.records, course.build))
    write_page([part, *parts], course.build / "report.html")
    everything = [*part.records, *(record for each in parts for record in each.records)]
    write_csv(everything, course.build / "grades.csv")
    return [page, table, course.build / "report.html", course.build / "grades.csv"]


def _feedback_of(course: Course, records: Sequence[Record], folder: Path) -> dict[str, str]:
    """Student -> address of the feedback page, seen from a page in `folder`."""
    found = {}
    for record in records:
        page = course.feedback_page(record.lab, record.student)
        if page.is_file():
            found[record.student] = quote(os.path.relpath(page, folder))
    return found


def _sorted(records: Mapping[str, Record]) -> list[Record]:
    return [records[name] for name in sorted(records)]
