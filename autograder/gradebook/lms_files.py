"""Files that Canvas, Moodle and Gradescope import, and a plain table.

Canvas    Student,ID,SIS User ID,SIS Login ID,Section,LAB…; the first line after this header has the
          points possible. An empty cell changes nothing in Canvas. Section must be the last column
          before the labs.
Moodle    A line that names no student would give its grade to the student on the line before. A
          name that Moodle does not know stops the import; a grade above 100 does, too. An empty
          grade deletes the grade in Moodle. So only lines with an email and a grade are written.
Gradescope  Imports no table of scores. It runs an autograder on every submission and reads
          results.json. Our autograder returns the result that was graded here, but only for the
          notebook that was graded.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autograder.gradebook.database import Grade, Person
from autograder.plain_text import clean, spreadsheet


@dataclass(frozen=True, kw_only=True)
class Line:
    """One student to be published: the person in the LMS, and a grade per lab."""

    person: Person
    grades: Mapping[str, Grade]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One lab: its column in the LMS, and the full marks in that column.

    Attributes:
        cap: no grade is above full marks; otherwise reflections and extra points may lift it above.
    """

    lab: str
    name: str
    max_score: float
    out_of: float | None = None
    cap: bool = False

    def cell(self, grade: Grade | None, zero: bool) -> str:
        """The grade in this column; empty, or "0" with `zero`, if there is no submission."""
        if grade is None or not grade.submitted:
            return "0" if zero else ""
        scale = self.out_of / self.max_score if self.out_of and self.max_score else 1.0
        score = min(grade.score, self.max_score) if self.cap else grade.score
        return number(score * scale)

    @property
    def points(self) -> float:
        """Full marks."""
        return self.out_of or self.max_score


@dataclass
class Made:
    """The file's content, the students in it, and the students left out, with the reason."""

    data: bytes
    written: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # student -> why
    warnings: list[str] = field(default_factory=list)


def number(value: float) -> str:
    """A score with at most two decimals and a decimal point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def safe(text: str) -> str:
    """Text on one line that a spreadsheet does not take for a formula."""
    plain = " ".join(clean(text, 500).split())
    return spreadsheet(plain)


def _is_safe(text: str) -> bool:
    return safe(text) == text


def write_table(lines: Sequence[Line], columns: Sequence[Column], *, zero: bool = False) -> Made:
    """A table for a person: one line per student and lab."""
    made = Made(b"")
    rows = [["lab", "student", "last_name", "first_name", "email", "lms_user_id", "submitted"]]
    rows[0] += ["score", "max_score", "late_penalty", "to_grade_by_hand"]
    for column in columns:
        for line in lines:
            person, grade = line.person, line.grades.get(column.lab)
            texts = (column.name, person.id, person.last_name, person.first_name, person.email)
            row = [*map(safe, texts), safe(person.lms_id)]
            row += ["yes" if grade and grade.submitted else "no", column.cell(grade, zero)]
            row += [number(column.points), number(grade.penalty if grade else 0.0)]
            row += (
                [" ".join(cell.name for cell in grade.cells if cell.needs_person)]
                if grade
                else [""]
            )
            rows.append(row)
            made.written.append(person.id)
    made.data = _csv(rows)
    return made


def write_canvas(lines: Sequence[Line], columns: Sequence[Column], *, zero: bool = False) -> Made:
    """A gradebook in the form that Canvas imports."""
    made = Made(b"")
    head = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]
    rows = [[*head, *(safe(column.name) for column in columns)]]
    rows.append(["    Points Possible", *[""] * 4, *(number(c.points) for c in columns)])
    for line in lines:
        person = line.person
        ids = [person.lms_id, person.sis_user_id, person.sis_login_id]
        if not any(ids):
            made.left_out[person.id] = "no id that Canvas knows: give --roster a Canvas export"
        elif not all(map(_is_safe, ids)):
            made.left_out[person.id] = "its Canvas id would be a formula in a spreadsheet"
        else:
            cells = [column.cell(line.grades.get(column.lab), zero) for column in columns]
            rows.append([safe(_full_name(person)), *ids, safe(person.section), *cells])
            made.written.append(person.id)
    made.data = _csv(rows)
    return made


def write_moodle(lines: Sequence[Line], columns: Sequence[Column], *, zero: bool = False) -> Made:
    """One lab's grades in Moodle's form; in Moodle, map "Email address" to "Email address"."""
    [column], made = columns, Made(b"")
    rows = [["First name", "Last name", "ID number", "Email address", safe(column.name)]]
    for line in lines:
        person, cell = line.person, column.cell(line.grades.get(column.lab), zero)
        if not cell:
            made.left_out[person.id] = "no submission"
        elif not person.email:
            made.left_out[person.id] = "no email address"
        elif not _is_safe(person.email) or not _is_safe(person.lms_id):
            made.left_out[person.id] = "its address or id would be a formula in a spreadsheet"
        else:
            names = [safe(person.first_name), safe(person.last_name)]
            rows.append([*names, person.lms_id, person.email, cell])
            made.written.append(person.id)
            if float(cell) > 100:
                made.warnings.append(
                    f"{person.id}: Moodle stops at a grade above 100 ({cell}): "
                    "say --cap, or allow it in Moodle (unlimitedgrades)"
                )
    made.data = _csv(rows)
    return made


def _full_name(person: Person) -> str:
    both = [name for name in (person.last_name, person.first_name) if name]
    return ", ".join(both) or person.id


def _csv(rows: Sequence[Sequence[str]]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue().encode()


# --- Gradescope ---------------------------------------------------------------------------------


def gradescope_result(
    grade: Grade,
    column: Column,
    titles: Mapping[str, str],
    messages: Mapping[str, str],
    sha256: str,
) -> dict:
    """A student's results.json.

    Args:
        titles: graded cell -> its title.
        messages: criterion -> what went wrong.
        sha256: hash of the notebook that was graded; empty if there was none.
    """
    tests = []
    for cell in grade.cells:
        said = [messages.get(cell.name, ""), cell.comment]
        if cell.needs_person:
            said.append("A person has not graded this yet.")
        title = titles.get(cell.name)
        full = cell.score >= cell.max_score
        if not cell.max_score:  # extra points: maximum 0, so the score says nothing about passing
            full = cell.name not in messages
        tests.append(
            {
                "name": f"{cell.name}: {title}" if title else cell.name,
                "score": round(cell.score, 2),
                "max_score": round(cell.max_score, 2),
                "status": "passed" if full else "failed",
                "output": clean("\n".join(filter(None, said))),
                "output_format": "text",
                "visibility": "visible",
            }
        )
    output = f"{number(grade.score)} of {number(grade.max_score)} points"
    if grade.penalty:
        output += f", {number(grade.penalty)} taken off for handing in late"
    return {
        "score": float(column.cell(grade, zero=False)),
        "output": output,
        "output_format": "text",
        "tests": tests,
        "extra_data": {"student": grade.student, "lab": column.lab, "sha256": sha256},
    }


def write_gradescope(results: Mapping[str, dict]) -> bytes:
    """An autograder for Gradescope that returns the results that were graded here.

    Args:
        results: email -> results.json.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        _put(archive, "setup.sh", _SETUP, 0o755)
        _put(archive, "run_autograder", _RUN, 0o755)
        for email, result in sorted(results.items()):
            text = json.dumps(result, indent=1) + "\n"
            _put(archive, f"results/{file_name(email)}.json", text, 0o644)
    return file.getvalue()


def file_name(email: str) -> str:
    """The address as a file name; special characters are written as % and their hex code."""
    return re.sub(r"[^a-z0-9@._-]", lambda m: f"%{ord(m[0]):x}", email.strip().lower())


def _put(archive: zipfile.ZipFile, name: str, text: str, mode: int) -> None:
    entry = zipfile.ZipInfo(name, date_time=(2000, 1, 1, 0, 0, 0))  # the same bytes every time
    entry.external_attr = (0o100000 | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, text)


_SETUP = """#!/usr/bin/env bash
command -v python3 > /dev/null || { apt-get update && apt-get install -y python3; }
"""
# Runs on Gradescope, where our packages are not installed. It hashes the notebook, never runs it.
_RUN = '''#!/usr/bin/env python3
"""Hands out the result of the course's own grader for this notebook."""

import hashlib
import json
import os
import re
import sys
from pathlib import Path

root = Path(os.environ.get("AUTOGRADER_ROOT", "/autograder"))
users = json.loads((root / "submission_metadata.json").read_text())["users"]
emails = [user["email"].strip().lower() for user in users]
names = [re.sub(r"[^a-z0-9@._-]", lambda m: f"%{ord(m[0]):x}", email) for email in emails]
files = [root / "source" / "results" / f"{name}.json" for name in names]
found = [json.loads(file.read_text()) for file in files if file.is_file()]
if not found:
    sys.exit(f"No result for {', '.join(emails)}: grade this notebook and upload a new autograder.")
handed_in = {
    hashlib.sha256(path.read_bytes()).hexdigest()
    for path in (root / "submission").rglob("*.ipynb")
}
same = [each for each in found if each["extra_data"]["sha256"] in (handed_in or {""})]
if not same:
    sys.exit("This is not the notebook that was graded: grade it and upload a new autograder.")
(root / "results").mkdir(exist_ok=True)
(root / "results" / "results.json").write_text(json.dumps(same[0], indent=1))
'''
