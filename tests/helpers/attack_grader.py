"""Grades the attack corpus and says what came of it that must not.

A course of its own, with things in it that nobody may reach: another student's work, a gradebook,
a journal with a verdict in it, the solutions, the key. All of them, the grader's environment and
its memory hold a mark that begins with "canary-", which some attacks look for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import secrets
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attack_corpus import CRITERIA, LAB, ROOT, Attack, load_attacks

import autograder.submission.attempt
from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.criteria.criterion import Lab
from autograder.records.record import Record
from autograder.submission.choose_box import choose_sandbox
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.intake import sha256_of

CANARY = f"canary-{secrets.token_hex(8)}"
MAX_EXECUTED_BYTES = 80 << 20
MAX_RESIDENT_BYTES = 4 << 30  # of any process that grading has started
QUICK_S = 20.0  # honest work takes a tenth; only attacks that hang wait for it


class QuickCourse(Course):
    """Its labs have shorter deadlines, so that what hangs does not take minutes."""

    def lab(self, name: str) -> Lab:
        lab = super().lab(name)
        criteria = [
            dataclasses.replace(c, deadline_s=min(c.deadline_s, 2 * QUICK_S)) for c in lab.criteria
        ]
        return dataclasses.replace(lab, criteria=tuple(criteria), cell_deadline_s=QUICK_S)


@dataclass
class Outcome:
    """What became of one attack."""

    attack: Attack
    record: Record
    seconds: float
    problems: list[str] = field(default_factory=list)


class AttackCourse:
    """A course in which the corpus is graded."""

    def __init__(self, root: Path) -> None:
        self.course = QuickCourse(root)
        self.class_run = ClassRun(self.course, LAB, get_lab(LAB).grading_world_size, True)

    @classmethod
    def make(cls, root: Path) -> AttackCourse:
        """Makes the folder, with what is not to be reached."""
        assert choose_sandbox(False, False)
        os.environ["COURSE_CANARY"] = CANARY
        root.mkdir(exist_ok=True)
        shutil.copytree(ROOT / "labs", root / "labs")
        shutil.copy(ROOT / "nbgrader_config.py", root)
        made = cls(root)
        made.course.make_key()
        for place in made._guarded():
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix == ".db":
                with sqlite3.connect(place) as database:
                    database.execute("create table grade (student text, auto_score real)")
                    database.execute("insert into grade values (?, 7)", (CANARY,))
            elif not place.exists():
                place.write_text(CANARY)
        line = {"kind": "verdict", "key": CANARY, "name": "setup", "points": 0.0}
        made.course.journal_path.write_text(json.dumps(line) + "\n")
        made.before = made.state()
        return made

    before: dict[str, bytes]

    def _guarded(self) -> list[Path]:
        root = self.course.root
        return [
            root / "solutions" / LAB / f"{LAB}.py",
            root / "handed_in" / "somebody_else" / LAB / f"{LAB}.ipynb",
            root / "build" / "nbgrader" / "gradebook.db",
            root / "build" / "grades.csv",
        ]

    def state(self) -> dict[str, bytes]:
        """Content of everything that has to stay as it is."""
        files = [*self._guarded(), self.course.key_path, self.course.root / "nbgrader_config.py"]
        files += (self.course.root / "labs").rglob("*.ipynb")
        return {str(path): path.read_bytes() for path in files}

    def grade(self, attack: Attack) -> Outcome:
        """Hands it in, grades it, and holds the result against its docstring."""
        student = attack.title.replace("/", "-")
        path = attack.write(self.course.root / "handed_in" / student)
        journal = self.course.journal_path.read_bytes()
        began = time.monotonic()
        record = autograder.submission.attempt.grade(Submission(student, path), self.class_run)
        outcome = Outcome(attack, record, time.monotonic() - began)
        outcome.problems += wrong_verdicts(attack, record)
        outcome.problems += self._leaks(attack, path, record)
        resident = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        if resident > MAX_RESIDENT_BYTES:
            outcome.problems.append(f"a process had {resident >> 20} MiB of memory")
        if not self.course.journal_path.read_bytes().startswith(journal):
            outcome.problems.append("the journal was changed")
        return outcome

    def _leaks(self, attack: Attack, path: Path, record: Record) -> Iterator[str]:
        told = json.dumps(record.to_json())
        key = self.course.key_path.read_text().strip()
        executed = ""
        graded = {c.status for c in record.criteria} & {"INFRA", "INVALID"} == set()
        if graded:
            file = self.class_run.executed_path(self.class_run.key_of(sha256_of(path)))
            if file.stat().st_size > MAX_EXECUTED_BYTES:
                yield f"the notebook as it was run has {file.stat().st_size >> 20} MiB"
            cells = json.loads(file.read_text("utf-8"))["cells"]
            executed = json.dumps([cell.get("outputs") for cell in cells])
        for word in ("LEAKED", "POISON", CANARY, key):
            if word in told or word in executed:
                at = (told + executed).find(word)
                yield f"{(told + executed)[at : at + 120]!r}"

    def finish(self) -> list[str]:
        """What is wrong at the end: something guarded was changed, or the journal is."""
        found = [
            f"{path} was changed"
            for path, old in self.before.items()
            if self.state().get(path) != old
        ]
        lines = self.course.journal_path.read_bytes().splitlines()
        keys = [
            entry["key"]
            for entry in map(json.loads, lines)  # every line is whole
            if entry["kind"] == "submission"
        ]
        found += [f"{key} has more than one verdict" for key in set(keys) if keys.count(key) > 1]
        return found


def wrong_verdicts(attack: Attack, record: Record) -> Iterator[str]:
    """Where the record is not what the docstring says."""
    found = {name: str(c.status) for name, c in record.by_name.items()}
    why = {name: c.message[:300] for name, c in record.by_name.items()}
    passed = {name for name, status in found.items() if status == "PASS"}
    if "INFRA" in found.values():
        yield f"our own failure: {why['setup']}"
        return
    if attack.invalid:
        if set(found.values()) != {"INVALID"} or attack.invalid not in why["setup"]:
            yield f"expected INVALID ({attack.invalid}), got {why['setup']!r}"
        return
    if not record.sandboxed:
        yield "it ran without a sandbox"
    for name in CRITERIA:
        if name in passed - attack.passes:
            yield f"{name}: passed, and was not earned"
        elif name in attack.passes - passed:
            yield f"{name}: should have passed: {found[name]}: {why[name]}"
    for name, status in attack.statuses.items():
        if found[name] != status:
            yield f"{name}: expected {status}, got {found[name]}: {why[name]}"
    if record.score != sum(get_lab(LAB)[name].points for name in passed):
        yield f"the score is {record.score}"


def reference() -> Attack:
    """The reference solution, as what is graded after an attack: its hundred points are safe."""
    return Attack(
        name="reference",
        group="after",
        docstring="",
        passes=frozenset(CRITERIA),
        base="reference",
    )


def main() -> int:
    """`python attack_grader.py FOLDER [GROUP | GROUP/NAME | all | ci …]`: one at a time."""
    wanted = sys.argv[2:] or ["ci"]
    course = AttackCourse.make(Path(sys.argv[1]))
    outcomes = []
    for attack in [*load_attacks(), reference()]:
        named = {"all", attack.group, attack.title, "ci" if attack.in_ci else ""} & set(wanted)
        if named or attack.group == "after":
            outcome = course.grade(attack)
            outcomes.append(outcome)
            passed = sum(c.status == "PASS" for c in outcome.record.criteria)
            print(
                f"{'ok ' if not outcome.problems else 'BAD'} {outcome.seconds:6.1f} s "
                f"{outcome.record.score or 0:5.0f} {passed:3d} {attack.title} "
                f"({resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10} MiB)",
                *(f"\n      {problem}" for problem in outcome.problems),
                flush=True,
            )
    for problem in course.finish():
        print("BAD", problem)
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
