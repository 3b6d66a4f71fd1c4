"""The files of a report: a page and a table per lab, and one of each over all labs.

    build/reports/LAB.html, LAB.csv   every student who was ever graded in the lab
    build/report.html, grades.csv     all labs

So late notebooks, or a second lab, add to a report and take nobody out of it. The bundled example
is no class: it gets the pages over all labs only while nobody else was graded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from autograder.course.course import Course
from autograder.criteria import lab_names
from autograder.records.grading import Grading, class_of
from autograder.records.record import Record
from autograder.report.page import Part, write_page
from autograder.report.terminal import write_csv


@dataclass(frozen=True, kw_only=True)
class LabReport:
    """What the pages say about the lab that was graded now.

    Attributes:
        records: the records of this grading.
        similar, suspicious: rows of `similar.rows` and `suspicious.rows`.
        left_out: student or folder without a grade -> why.
        by_person: lab -> student -> points of a person, of every lab.
    """

    lab: str
    records: Sequence[Record]
    similar: Sequence[Sequence[str]] = ()
    suspicious: Sequence[Sequence[str]] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    by_person: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    is_example: bool = False


def write_pages(course: Course, history: Sequence[Grading], report: LabReport) -> list[Path]:
    """Writes the pages and tables; returns the paths of those of the lab and over all labs.

    Args:
        history: every finished grading, this one included.
    """
    pages = course.build / "reports"
    name = f"{report.lab}.example" if report.is_example else report.lab
    page, table = pages / f"{name}.html", pages / f"{name}.csv"
    part = Part(
        report.records,
        report.similar,
        report.suspicious,
        report.left_out,
        feedback=_feedback_of(course, report.records, pages),
        by_person=report.by_person.get(report.lab, {}),
    )
    write_page([part], page)
    write_csv(report.records, table)
    others = {
        lab: records
        for lab in lab_names()
        if lab != report.lab and (records := class_of(course, history, lab))
    }
    own = class_of(course, history, report.lab)
    if report.is_example and (own or others):
        return [page, table]
    parts = [
        Part(
            _sorted(records),
            link=f"reports/{lab}.html",
            by_person=report.by_person.get(lab, {}),
        )
        for lab, records in others.items()
    ]
    part = replace(part, feedback=_feedback_of(course, report.records, course.build))
    write_page([part, *parts], course.build / "report.html")
    everything = [*report.records, *(record for each in parts for record in each.records)]
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
