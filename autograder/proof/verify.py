"""`autograder verify`: proves that a lab's tests are right.

Every submission of the bundled class says in its docstring which criteria it must lose. All are
graded like students' submissions, in a temporary course. The result is the kill matrix: submission
x criterion. The proof fails if a cell of the matrix differs from the docstring, if the reference
does not get full marks, if the starter gets points, or if the class has too few wrong or right
submissions.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autograder.batch.grade_class import default_jobs, grade_class
from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.criteria.criterion import Lab, Status
from autograder.inside.probe import NOT_WRITTEN
from autograder.plain_text import MARKS
from autograder.proof.zoo import ZooEntry, combine, load_zoo, write_class
from autograder.records.record import Record
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission

MIN_WRONG, MIN_RIGHT = 15, 6


@dataclass(frozen=True)
class Row:
    """One submission: the statuses that its docstring asks for, and the statuses that it got.

    `parts` names the submissions that were combined into this one.
    """

    name: str
    expected: dict[str, str]  # criterion -> status; "" accepts any status that loses
    got: dict[str, str]
    seconds: float
    messages: dict[str, str]
    parts: tuple[str, ...] = ()
    extra: frozenset[str] = frozenset()  # criteria with extra points, which may be BLOCKED here
    says: Mapping[str, str] = field(default_factory=dict)  # criterion -> words of its message

    def wrong(self) -> dict[str, str]:
        """Criterion -> what is wrong with its cell."""
        found = {}
        for name, want in self.expected.items():
            got = self.got.get(name, "")
            right = got == want if want else bool(got) and Status(got).is_lost
            if got == Status.BLOCKED and name in self.extra:
                right = True  # without the hardware, the criterion cannot be tested
            if not right:
                why = self.messages.get(name)
                found[name] = f"expected {want or 'a loss'}, got {got or 'nothing'}: {why}"
            elif got != Status.BLOCKED and (words := self.says.get(name, "")):
                said = " ".join(self.messages.get(name, "").split())
                if words not in said:
                    found[name] = f"its message does not say {words!r}: {said}"
        return found


@dataclass(frozen=True)
class Proof:
    """The result for one lab."""

    lab: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    seconds: float
    left_out: tuple[str, ...] = field(default=())

    @property
    def num_entries(self) -> int:
        """How many submissions of the bundled class were graded, alone or as a part."""
        return sum(len(row.parts) or 1 for row in self.rows)

    def record(self) -> dict[str, Any]:
        """The proof as JSON."""
        return {
            "lab": self.lab,
            "proven": not self.problems,
            "seconds": round(self.seconds, 1),
            "problems": list(self.problems),
            "left_out": list(self.left_out),
            "matrix": {row.name: row.got for row in self.rows},
            "graded_as_one": {row.name: row.parts for row in self.rows if row.parts},
        }


def verify_lab(
    name: str,
    console: Console,
    *,
    jobs: int | None = None,
    covering: bool = False,
    alone: bool = False,
    only: Sequence[str] | None = None,
    sandbox: bool = True,
) -> Proof:
    """Grades the bundled class of one lab and compares the verdicts with the docstrings.

    Submissions with different bugs are combined into one, which must lose exactly the criteria that
    its parts lose. If it does not, the parts are graded again one by one, and those results count.

    Args:
        covering: grade only a few submissions, which lose every criterion once and pass every
            criterion once; the others are named in `left_out`.
        alone: grade every submission by itself.
        only: patterns; grade the submissions with such names.
        sandbox: False runs the class without a sandbox (the class is our own code).
    """
    lab, began = get_lab(name), time.monotonic()
    checkout = Course.find().root
    entries = load_zoo(name, root=checkout)
    chosen = choose_entries(lab, entries, covering, only)
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        course = throwaway_course(Path(folder), checkout)
        class_run = ClassRun(course, name, lab.grading_world_size, sandbox)

        def rows_of(some: Sequence[ZooEntry]) -> list[Row]:
            paths = write_class(name, course.root / "class", root=checkout, entries=some)
            submissions = [Submission(e.name, path) for e, path in zip(some, paths, strict=True)]
            at_once = jobs or default_jobs(class_run.world_size, lab)
            records = grade_class(submissions, class_run, at_once, console)
            return [_row(lab, entry, r) for entry, r in zip(some, records, strict=True)]

        if alone:
            rows = rows_of(chosen)
        else:
            together = combine(chosen)
            first = dict(zip([entry.name for entry in together], rows_of(together), strict=True))
            again = [
                part for entry in together if first[entry.name].wrong() for part in entry.parts
            ]
            rows = [row for e in together if not ((row := first[e.name]).wrong() and e.parts)]
            rows += rows_of(again) if again else []
    names = {entry.name for entry in chosen}
    return Proof(
        lab=name,
        rows=tuple(sorted(rows, key=lambda row: row.name)),
        problems=tuple(find_problems(lab, entries, rows)),
        seconds=time.monotonic() - began,
        left_out=tuple(sorted({entry.name for entry in entries} - names)),
    )


def matrix_table(proof: Proof) -> Table:
    """The kill matrix for a terminal: one symbol per criterion, in the lab's order."""
    names = [c.name for c in get_lab(proof.lab).criteria]
    table = Table(
        title=f"{proof.lab}: who loses what", caption="  ".join(names), box=box.SIMPLE_HEAD
    )
    table.add_column("submission", no_wrap=True)
    table.add_column("criteria", no_wrap=True)
    table.add_column("loses")
    for row in proof.rows:
        wrong, signs = row.wrong(), Text()
        for name in names:
            mark = MARKS.get(row.got.get(name, ""), MARKS["INFRA"])
            signs.append(mark.symbol, "bold white on red" if name in wrong else mark.style)
        lost = [name for name in names if row.got.get(name) not in ("PASS", "BLOCKED")]
        short = "everything" if len(lost) == len(names) else ", ".join(lost)
        table.add_row(Text("\n".join(row.parts) or row.name), signs, Text(short))
    return table


def throwaway_course(folder: Path, checkout: Path) -> Course:
    """A course with the labs of this one and a key of its own."""
    shutil.copytree(checkout / "labs", folder / "labs")
    shutil.copy(checkout / "nbgrader_config.py", folder)
    course = Course(folder)
    course.make_key()
    return course


def expected_of(lab: Lab, entry: ZooEntry) -> dict[str, str]:
    """Criterion -> the status that the entry must get; "" for any status that loses."""
    lost = {c.name for c in lab.criteria} if entry.loses == "everything" else entry.loses
    return {
        c.name: entry.statuses.get(c.name, "") if c.name in lost else str(Status.PASS)
        for c in lab.criteria
    }


def _row(lab: Lab, entry: ZooEntry, record: Record) -> Row:
    return Row(
        name=entry.name,
        expected=expected_of(lab, entry),
        got={name: str(c.status) for name, c in record.by_name.items()},
        seconds=record.seconds,
        messages={name: c.message for name, c in record.by_name.items()},
        parts=tuple(part.name for part in entry.parts),
        extra=frozenset(c.name for c in lab.criteria if c.extra),
        says=entry.says,
    )


def find_problems(lab: Lab, entries: Sequence[ZooEntry], rows: Sequence[Row]) -> list[str]:
    """The reasons why the class and its results are no proof; empty if they are a proof."""
    problems = [
        f"{row.name}: {criterion}: {text}"
        for row in rows
        for criterion, text in row.wrong().items()
    ]
    # The message of each check of the starter must say that the code is not written yet.
    problems += [
        f"starter: {criterion}: the check does not say what is to be written yet: {message[:200]}"
        for row in rows
        if row.name == "starter"
        for criterion, message in row.messages.items()
        if NOT_WRITTEN not in message and row.got[criterion] != Status.BLOCKED
    ]
    by_name = {entry.name: entry for entry in entries}
    for name, loses in (("reference", frozenset()), ("starter", "everything")):
        if name not in by_name or by_name[name].loses != loses:
            problems.append(f"the class has no {name!r} that loses {loses or 'nothing'}")
    right = [e.name for e in entries if not e.loses and e.name != "reference"]
    wrong = [e.name for e in entries if e.loses and e.name != "starter"]
    lost = set().union(*(e.loses for e in entries if e.loses != "everything"))
    if never := sorted({c.name for c in lab.criteria} - lost):
        problems.append(f"no wrong submission loses {', '.join(never)}")
    if len(wrong) < MIN_WRONG:
        problems.append(f"{len(wrong)} wrong submissions; there should be at least {MIN_WRONG}")
    if len(right) < MIN_RIGHT:
        problems.append(f"{len(right)} right ones beside the reference; at least {MIN_RIGHT}")
    return problems


def choose_entries(
    lab: Lab, entries: Sequence[ZooEntry], covering: bool, only: Sequence[str] | None
) -> list[ZooEntry]:
    """Those with one of the names, or a few that cover every criterion, or all."""
    if only is not None:
        return [e for e in entries if any(fnmatchcase(e.name, pattern) for pattern in only)]
    return choose_covering(lab, entries) if covering else list(entries)


def choose_covering(lab: Lab, entries: Sequence[ZooEntry]) -> list[ZooEntry]:
    """Reference, starter, and a few wrong submissions that together lose every criterion.

    Criteria with extra points do not count, because most machines lack the hardware to test them.
    """
    missing = {criterion.name for criterion in lab.criteria if not criterion.extra}
    names = {"reference", "starter"}
    wrong = [e for e in entries if e.loses and e.loses != "everything"]
    while missing and wrong:
        best = max(wrong, key=lambda e: len(missing & set(e.loses)))
        if not missing & set(best.loses):
            break
        missing -= set(best.loses)
        wrong.remove(best)
        names.add(best.name)
    return [e for e in entries if e.name in names]
