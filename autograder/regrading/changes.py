"""Grading again: which students' scores have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autograder.plain_text import MARKS, clean
from autograder.records.grading import Grading, class_of, latest, read_history
from autograder.records.record import Record
from autograder.submission.class_run import ClassRun

NOTHING = "–"  # shown for a criterion that one of the gradings does not have


@dataclass(frozen=True)
class Change:
    """The differences between two gradings of one student.

    Attributes:
        criteria: criterion -> (status, points) before and after, for criteria that differ.
        cause: why the gradings differ: a new notebook, a changed grader, and so on.
    """

    student: str
    score: tuple[float, float]
    max_score: tuple[float, float]
    criteria: dict[str, tuple[tuple[str, float], tuple[str, float]]]
    cause: str


@dataclass(frozen=True)
class Regrading:
    """The gradings before and after a class is graded, for comparison."""

    class_run: ClassRun

    @property
    def before(self) -> Mapping[str, Grading]:
        """Student -> the last grading before this one."""
        return self.class_run.before

    @cached_property
    def history(self) -> list[Grading]:
        """Every finished grading; read this only after the class was graded."""
        return read_history(self.class_run.course)

    @property
    def now(self) -> Mapping[str, Grading]:
        """Student -> the last grading."""
        return latest(self.history, self.class_run.lab_name, self.class_run.world_size)

    def show(self, records: Sequence[Record], console: Console) -> None:
        """Prints whose verdicts have changed, if any record differs from the one before."""
        again = {r.student for r in records} & self.before.keys()
        now = self.now
        if not any(now[name].record != self.before[name].record for name in again):
            return
        changes = find_changes(
            {name: self.before[name] for name in again}, {name: now[name] for name in again}
        )
        if changes:
            console.print(changes_table(changes))
        console.print(summary(changes, len(again)), markup=False, highlight=False)

    def whole_class(self, records: Sequence[Record]) -> list[Record]:
        """The last record of everybody graded in the lab; `records` replace older ones."""
        run = self.class_run
        by_student = class_of(run.course, self.history, run.lab_name, run.world_size)
        by_student |= {record.student: record for record in records}
        return [by_student[name] for name in sorted(by_student)]


def find_changes(before: Mapping[str, Grading], after: Mapping[str, Grading]) -> list[Change]:
    """Students who were graded before, and whose verdicts or points are different now."""
    changes = []
    for student in sorted(before.keys() & after.keys()):
        old, new = before[student], after[student]
        then, now = _verdicts(old.record), _verdicts(new.record)
        missing = (NOTHING, 0.0)
        criteria = {
            name: (then.get(name, missing), now.get(name, missing))
            for name in dict.fromkeys([*now, *then])
            if then.get(name) != now.get(name)
        }
        maxima = (old.record.max_score, new.record.max_score)
        if criteria or maxima[0] != maxima[1]:
            scores = (old.record.score or 0.0, new.record.score or 0.0)
            changes.append(Change(student, scores, maxima, criteria, _cause(old, new)))
    return changes


def _verdicts(record: Record) -> dict[str, tuple[str, float]]:
    return {c.criterion: (c.status, c.points) for c in record.criteria}


def _cause(old: Grading, new: Grading) -> str:
    if old.key == new.key:
        then, now = _verdicts(old.record), _verdicts(new.record)
        same = all(now[name][0] == status for name, (status, _) in then.items() if name in now)
        return "points of criteria" if same else "graded again"
    if not old.seed_id or old.seed_id != new.seed_id:
        return "a different notebook"
    if old.grader_version != new.grader_version:
        return "the grader has changed"
    return "the lab has changed"


def changes_table(changes: Sequence[Change]) -> Table:
    """Old -> new, for a terminal: one line per student, and each criterion that differs."""
    table = Table(title="changed since the last record", box=box.SIMPLE_HEAD)
    table.add_column("student", no_wrap=True)
    table.add_column("score", no_wrap=True)
    table.add_column("criteria")
    table.add_column("what is different")
    for change in changes:
        old, new = change.score
        style = "green" if new > old else "red" if new < old else ""
        score = f"{old:g} → {new:g}"
        if change.max_score[0] != change.max_score[1]:
            score = f"{old:g}/{change.max_score[0]:g} → {new:g}/{change.max_score[1]:g}"
        lines = Text("\n").join(
            Text(f"{clean(name)} {_say(then, now)}")
            for name, (then, now) in change.criteria.items()
        )
        table.add_row(Text(clean(change.student)), Text(score, style), lines, change.cause)
    return table


def _say(then: tuple[str, float], now: tuple[str, float]) -> str:
    if then[0] == now[0]:
        return f"{_sign(now[0])} {then[1]:g} → {now[1]:g} points"
    return f"{_sign(then[0])} → {_sign(now[0])}"


def _sign(status: str) -> str:
    return f"{MARKS[status].symbol} {status}" if status in MARKS else status


def summary(changes: Sequence[Change], graded_before: int) -> str:
    """One line: how many of the students who were graded before have a different score now."""
    scores = sum(change.score[0] != change.score[1] for change in changes)
    verdicts = len(changes) - scores
    also = f"; {verdicts} with other verdicts but the same score" if verdicts else ""
    return f"{scores} of {graded_before} scores that were there before have changed{also}"
