"""Gradings that were finished, as the journal tells them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from autograder.course.course import Course
from autograder.records.journal import Journal

Record = dict[str, Any]


@dataclass(frozen=True)
class Grading:
    """One grading that was finished.

    Attributes:
        key: what its record is filed under.
        record: as `autograder grade --json` writes it.
        seed_id: what its draws were made from; empty where nothing was run.
        grader_version: of the grader that judged it; empty where nothing was run.
    """

    key: str
    record: Record
    seed_id: str = ""
    grader_version: str = ""

    @property
    def student(self) -> str:
        """Who handed it in."""
        return self.record["student"]

    @property
    def lab(self) -> str:
        """Name of the lab."""
        return self.record["lab"]


def read_history(course: Course) -> list[Grading]:
    """Every grading that was finished, oldest first."""
    found: list[Grading] = []
    # key -> seed_id -> grader_version; the same bytes may have been graded for two at once
    ran: dict[str, dict[str, str]] = {}
    for entry in Journal(course.journal_path).iter_records():
        key = str(entry.get("key", ""))
        if entry.get("kind") == "verdict":
            of = ran.setdefault(key, {})
            of[str(entry.get("seed_id", ""))] = str(entry.get("grader_version", ""))
        elif entry.get("kind") == "submission" and _is_record(entry.get("record")):
            seeds = ran.get(key, {"": ""})
            own = [seed for seed in seeds if seed.startswith(f"{entry['record']['student']}:")]
            seed = own[-1] if own else list(seeds)[-1]
            grading = Grading(key, entry["record"], seed, seeds[seed])
            if not grading.seed_id:  # filed a second time, under the key of its stand-in
                same = (g for g in reversed(found) if g.record == grading.record and g.seed_id)
                if twin := next(same, None):
                    grading = replace(twin)
            found.append(grading)
    return found


def latest(history: Iterable[Grading], lab: str, world_size: int) -> dict[str, Grading]:
    """Student -> the last grading in a lab on so many ranks."""
    return {
        grading.student: grading
        for grading in history
        if grading.lab == lab and grading.record["world_size"] == world_size
    }


def _is_record(value: object) -> bool:
    wanted = {"student", "lab", "world_size", "score", "max_score", "criteria", "submission"}
    return isinstance(value, dict) and wanted <= set(value)
