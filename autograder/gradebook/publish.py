"""`autograder publish`: nbgrader's gradebook as files that Canvas, Moodle and Gradescope import.

The published score is nbgrader's, including a person's points and late penalties. Every student who
is left out is named. No grade goes to a student whose name only looks similar: a student and a line
of the roster match only if they have an equal id or address. If a match is not unique, nothing is
written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autograder.course.course import Course, CourseError
from autograder.criteria import get_lab, lab_names
from autograder.criteria.criterion import Status
from autograder.files import write_whole
from autograder.gradebook import not_graded
from autograder.gradebook.database import Grade, Person, graded_labs, open_gradebook, read_grades
from autograder.gradebook.lms_files import (
    Column,
    Line,
    Made,
    gradescope_result,
    write_canvas,
    write_gradescope,
    write_moodle,
    write_table,
)
from autograder.gradebook.roster import Roster
from autograder.records.grading import latest, read_history
from autograder.submission.intake import sha256_of

_WRITERS = {"csv": write_table, "canvas": write_canvas, "moodle": write_moodle}


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """What is published, and how.

    Args:
        labs: default: all labs with a submission.
        roster: a class list with the LMS's ids; without it nbgrader's ids are used.
        columns: lab -> name of its column in the LMS; needed if the roster does not show it.
        out_of: full marks in the LMS; default: the lab's own.
        zero: students without a submission get 0 instead of no grade.
        cap: no grade is above full marks.
    """

    labs: tuple[str, ...] = ()
    roster: Roster | None = None
    columns: Mapping[str, str]
    out_of: float | None = None
    zero: bool = False
    cap: bool = False


@dataclass(frozen=True, kw_only=True)
class Published:
    """The file's content, and everything that an instructor should know about it.

    Attributes:
        unknown: students with a grade who are not in the roster.
        missing: lab -> students without a submission.
        by_hand: lab -> students with cells that a person still has to grade.
        failed: lab -> students whose last submission our grader could not grade.
        num_grades: number of students who have a grade in the file.
        new_columns: columns that are not in the roster, so the LMS will create them.
    """

    made: Made
    labs: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: Mapping[str, Sequence[str]]
    by_hand: Mapping[str, Sequence[str]]
    failed: Mapping[str, Sequence[str]]
    num_grades: int
    new_columns: tuple[str, ...] = ()

    def explain(self) -> list[str]:
        """What an instructor has to know, one line for each fact."""
        made, number = self.made, len(set(self.made.written))
        said = [f"{number} students are in it, {self.num_grades or 'none'} of them with a grade"]
        if number == self.num_grades:
            said = [f"{number} students are in it"]
        for lab in self.labs:
            for what, who in (
                ("THE GRADER FAILED, so grade them again", self.failed[lab]),
                ("no submission", self.missing[lab]),
                ("still to be graded by a person", self.by_hand[lab]),
            ):
                if who:
                    said.append(f"{lab}: {what}: {', '.join(who)}")
        if self.unknown:
            said.append(f"NOT IN THE ROSTER, and so not in it: {', '.join(self.unknown)}")
        for student, why in made.left_out.items():
            if why != "no submission":
                said.append(f"LEFT OUT: {student}: {why}")
        for name in self.new_columns:
            said.append(f"the roster has no column for {name!r}: it will be new there (--column)")
        return said + made.warnings

    @property
    def complete(self) -> bool:
        """Whether everybody who has handed in is in the file with a grade."""
        graded_but_out = [why for why in self.made.left_out.values() if why != "no submission"]
        return not self.unknown and not graded_but_out and not any(self.failed.values())


def publish(course: Course, system: str, options: PublishOptions) -> Published:
    """Makes the file for one system.

    Raises:
        CourseError: there is no gradebook, it is empty, or it does not have a lab.
        ValueError: a student matches two lines of the roster, a line matches two students, or the
            options are invalid.
    """
    with open_gradebook(course) as book:
        labs = options.labs or tuple(graded_labs(book))
        if not labs:
            raise CourseError("nobody's submission is in the gradebook yet")
        grades = {lab: read_grades(book, lab) for lab in labs}
    if unknown := set(options.columns) - set(labs):
        raise ValueError(f"--column names {', '.join(sorted(unknown))}, which is not published")
    lines, unknown = _lines(grades, options.roster)
    columns, new = _columns(grades, options)
    if system in ("moodle", "gradescope") and len(labs) != 1:
        raise ValueError(f"{system}: one lab at a time; say --lab with one of {', '.join(labs)}")
    if system == "gradescope":
        made, new = _gradescope(course, lines, columns[0]), ()
    else:
        made = _WRITERS[system](lines, columns, zero=options.zero)
    failed = {lab: _failed(course, lab) for lab in labs}
    written = set(made.written)
    return Published(
        made=made,
        labs=labs,
        unknown=tuple(unknown),
        missing={
            lab: [name for name in _missing(lab, all_, lines) if name not in failed[lab]]
            for lab, all_ in grades.items()
        },
        failed=failed,
        num_grades=sum(
            line.person.id in written and any(grade.submitted for grade in line.grades.values())
            for line in lines
        ),
        by_hand={lab: [g.student for g in all_ if g.needs_person] for lab, all_ in grades.items()},
        new_columns=new if options.roster and system != "csv" else (),
    )


def save(path: Path, data: bytes, *, force: bool = False) -> None:
    """Writes the file atomically.

    Raises:
        ValueError: the file exists, and `force` is not set.
    """
    if path.exists() and not force:
        raise ValueError(f"{path} exists already: say --force to replace it, or --out FILE")
    write_whole(path, data)


# --- who is who ---------------------------------------------------------------------------------


def _lines(
    grades: Mapping[str, Sequence[Grade]], roster: Roster | None
) -> tuple[list[Line], list[str]]:
    """Everybody in the roster with their grades, and the students who are not in the roster."""
    by_student: dict[str, dict[str, Grade]] = {}
    for lab, all_ in grades.items():
        for grade in all_:
            by_student.setdefault(grade.student, {})[lab] = grade
    if roster is None:
        people = [next(iter(of.values())).person for of in by_student.values()]
        people.sort(key=lambda p: (p.last_name.casefold(), p.first_name.casefold(), p.id))
        return [Line(person=person, grades=by_student[person.id]) for person in people], []
    by_name: dict[str, list[Person]] = {}
    for person in roster.people:
        for name in person.names():
            by_name.setdefault(name, []).append(person)
    whose: dict[int, str] = {}
    unknown, problems = [], []
    for student, of in by_student.items():
        names = next(iter(of.values())).person.names()
        lines = sorted({p.line for name in names for p in by_name.get(name, ())})
        if len(lines) > 1:
            where = " and ".join(map(str, lines))
            problems.append(f"{student} could be line {where}")
        elif lines and lines[0] in whose:
            problems.append(f"line {lines[0]} could be {whose[lines[0]]} and {student}")
        elif lines:
            whose[lines[0]] = student
        elif any(grade.submitted for grade in of.values()):
            unknown.append(student)
    if problems:
        raise ValueError("\n  ".join([f"{roster.path}:", *problems]))
    return [
        Line(person=person, grades=by_student.get(whose.get(person.line, ""), {}))
        for person in roster.people
    ], unknown


def _missing(lab: str, grades: Sequence[Grade], lines: Sequence[Line]) -> list[str]:
    """Students without a submission, from both gradebook and roster."""
    handed_in = {grade.student for grade in grades if grade.submitted}
    missing = {grade.student for grade in grades} - handed_in
    missing |= {line.person.id for line in lines if lab not in line.grades}
    return sorted(missing)


def _failed(course: Course, lab: str) -> list[str]:
    """Students whose last submission our grader could not grade; an earlier grade may be there."""
    left = not_graded.read(course, lab)
    return [name for name, why in left.items() if why.startswith(not_graded.FAILED)]


# --- which column -------------------------------------------------------------------------------


def _columns(
    grades: Mapping[str, Sequence[Grade]], options: PublishOptions
) -> tuple[list[Column], tuple[str, ...]]:
    there = options.roster.columns if options.roster else ()
    columns, new = [], []
    for lab, all_ in grades.items():
        title = get_lab(lab).title if lab in lab_names() else lab
        wanted = [options.columns[lab]] if lab in options.columns else [lab, title]
        known = next(filter(None, (_find_column(name, there) for name in wanted)), None)
        if known is None:
            new.append(wanted[-1] if lab in options.columns else lab)
        points = all_[0].max_score if all_ else 0.0
        name, scale = known or new[-1], {"out_of": options.out_of, "cap": options.cap}
        columns.append(Column(lab=lab, name=name, max_score=points, **scale))
    for plain in {_plain(column.name) for column in columns}:
        same = [column for column in columns if _plain(column.name) == plain]
        names = {column.name for column in same}
        if len(same) > 1 and not (len(names) == len(same) and names <= set(there)):
            labs = ", ".join(column.lab for column in same)
            raise ValueError(
                f"one column for {labs}: name a different one with --column LAB=COLUMN"
            )
    return columns, tuple(new)


def _find_column(name: str, there: Sequence[str]) -> str:
    """The column that a name means; empty if there is none.

    Raises:
        ValueError: the name could mean several columns.
    """
    fitting = [column for column in there if column == name]
    fitting = fitting or [column for column in there if _plain(column) == _plain(name)]
    if len(fitting) > 1:  # Moodle exports a grade as number, percentage and letter
        fitting = [c for c in fitting if c.endswith("(Real)")] or fitting
    if len(fitting) > 1:
        could_be = ", ".join(map(repr, fitting))
        raise ValueError(f"{name!r} could be {could_be}: name one with --column LAB=COLUMN")
    return fitting[0] if fitting else ""


def _plain(name: str) -> str:
    """A column's name without Canvas's id, and without Moodle's prefix (kind) and suffix (form)."""
    name = re.sub(r"\s*\([^()]*\)\s*$", "", name)
    return re.sub(r"^\s*(Assignment|Quiz|Manual item)\s*:\s*", "", name).strip().casefold()


# --- Gradescope ---------------------------------------------------------------------------------


def _gradescope(course: Course, lines: Sequence[Line], column: Column) -> Made:
    lab = get_lab(column.lab)
    titles = {criterion.name: criterion.title for criterion in lab.criteria}
    graded = latest(read_history(course), lab.name, lab.grading_world_size)
    made, results = Made(b""), {}
    for line in lines:
        person, grade = line.person, line.grades.get(lab.name)
        address = person.email.strip().lower()
        if grade is None or not grade.submitted:
            made.left_out[person.id] = "no submission"
        elif not address:
            made.left_out[person.id] = "no email address"
        elif address in results:
            raise ValueError(f"two students have the address {address}: each needs their own")
        else:
            grading = graded.get(grade.student)
            criteria = grading.record.criteria if grading else ()
            messages = {c.criterion: c.message for c in criteria if c.status != Status.PASS}
            sha256 = grading.seed_id.rpartition(":")[2] if grading else ""
            if grading and not sha256:  # INVALID: no code ran, so there is no seed_id
                notebook = Path(grading.record.submission)
                sha256 = sha256_of(notebook)
            results[address] = gradescope_result(grade, column, titles, messages, sha256)
            made.written.append(person.id)
    made.data = write_gradescope(results)
    return made
