"""Finished gradings, as read from the journal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.records.journal import Journal
from autograder.records.record import Record


@dataclass(frozen=True)
class Grading:
    """One finished grading.

    Attributes:
        key: key of the record of what was graded.
        record: its verdicts.
        seed_id: the id from which its draws were made; empty if nothing was run.
        grader_version: version of the grader that judged it; empty if nothing was run.
        filed_as: key of this record in the journal; differs from `key` if `fill` has filed the
            record again for a stand-in file.
    """

    key: str
    record: Record
    seed_id: str = ""
    grader_version: str = ""
    filed_as: str = ""

    @property
    def student(self) -> str:
        """The student who handed the notebook in."""
        return self.record.student

    @property
    def lab(self) -> str:
        """Name of the lab."""
        return self.record.lab


def read_history(course: Course) -> list[Grading]:
    """Every finished grading, oldest first; says on stderr which records cannot be read."""
    found: list[Grading] = []
    # key -> seed_id -> grader_version; two students' equal notebooks may be graded at the same time
    ran: dict[str, dict[str, str]] = {}
    journal = Journal(course.journal_path)
    for entry in journal.iter_entries():
        key = str(entry.get("key", ""))
        if entry.get("kind") == "verdict":
            of = ran.setdefault(key, {})
            of[str(entry.get("seed_id", ""))] = str(entry.get("grader_version", ""))
        elif entry.get("kind") == "submission":
            record: Record = entry["record"]
            seeds = ran.get(key, {"": ""})
            own = [seed for seed in seeds if seed.startswith(f"{record.student}:")]
            seed = own[-1] if own else list(seeds)[-1]
            grading = Grading(key, record, seed, seeds[seed], key)
            if not grading.seed_id:  # `fill` files a record again, under the key of a stand-in file
                same = (g for g in reversed(found) if g.record == grading.record and g.seed_id)
                if twin := next(same, None):
                    grading = replace(twin, filed_as=key)
            found.append(grading)
    for problem in journal.problems:
        if ": record" in problem:
            _tell(problem)
    return found


@functools.cache  # a command may read the journal several times
def _tell(problem: str) -> None:
    print(f"autograder: {problem}", file=sys.stderr)


def latest(history: Iterable[Grading], lab: str, world_size: int) -> dict[str, Grading]:
    """Student -> the last grading in a lab with this world size."""
    return {
        grading.student: grading
        for grading in history
        if grading.lab == lab and grading.record.world_size == world_size
    }


def class_of(
    course: Course, history: Iterable[Grading], lab: str, world_size: int | None = None
) -> dict[str, Record]:
    """Student -> last record, of everybody who was ever graded in the lab; without the example."""
    wanted = world_size or get_lab(lab).grading_world_size
    records = {name: g.record for name, g in latest(history, lab, wanted).items()}
    return {name: record for name, record in records.items() if not _is_example(course, record)}


def _is_example(course: Course, record: Record) -> bool:
    """Whether a record is of the bundled class."""
    return Path(record.submission).is_relative_to(course.build / "class")
