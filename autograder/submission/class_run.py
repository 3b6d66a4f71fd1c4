"""How a class is graded in one lab, with lab, master and history, which are read once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from autograder.course.course import Course
from autograder.criteria.criterion import Lab
from autograder.records.grading import Grading, latest, read_history
from autograder.records.journal import Journal
from autograder.records.record import Record
from autograder.records.version import grader_version, submission_key
from autograder.submission.intake import Intake, read_submission


@dataclass(frozen=True)
class ClassRun:
    """How a class is graded in one lab; every file, submissions included, is read only once.

    Args:
        course: where files and key are.
        lab_name: name of the lab.
        world_size: number of ranks.
        sandboxed: run in the box; without the box nothing restricts a submission.
        again: also run submissions that have a record in the journal.
    """

    course: Course
    lab_name: str
    world_size: int
    sandboxed: bool
    again: bool = False

    @cached_property
    def lab(self) -> Lab:
        """The lab, with the points and limits that the course sets."""
        return self.course.lab(self.lab_name)

    @cached_property
    def master(self) -> NotebookNode:
        """The notebook that students were given; callers must not change it."""
        return self.course.master(self.lab_name)

    @cached_property
    def solution(self) -> NotebookNode | None:
        """The lab's solution, if this course has it; callers must not change it."""
        path = self.course.root / "solutions" / self.lab_name / f"{self.lab_name}.ipynb"
        return nbformat.read(path, as_version=4) if path.is_file() else None

    @cached_property
    def journal(self) -> Journal:
        """The record of every verdict."""
        return Journal(self.course.journal_path)

    @cached_property
    def history(self) -> list[Grading]:
        """All finished gradings, oldest first; the journal is read at the first access only."""
        return read_history(self.course)

    @cached_property
    def before(self) -> Mapping[str, Grading]:
        """Student -> the last grading in `history` with this lab and world size."""
        return latest(self.history, self.lab_name, self.world_size)

    @cached_property
    def finished(self) -> Mapping[str, Record]:
        """Key -> the last record in `history` that the journal has under this key."""
        return {grading.filed_as: grading.record for grading in self.history}

    @cached_property
    def version(self) -> str:
        """Version of all that can change a verdict: the grader's code, the master, the limits."""
        code = "\n".join(cell.source for cell in self.master.cells if cell.cell_type == "code")
        limits = repr(self.lab.limits).encode()
        return grader_version(self.lab_name, _what_matters(self.master), limits, code=code.encode())

    @cached_property
    def _read(self) -> dict[Path, Intake]:
        return {}

    def read(self, path: Path) -> Intake:
        """A submission with the master's locked cells put back; callers must not change it."""
        if path not in self._read:
            self._read[path] = read_submission(path, self.master)
        return self._read[path]

    def key_of(self, sha256: str) -> str:
        """The key of a record, made from the file's bytes, lab, world size and version."""
        return submission_key(sha256, self.lab_name, self.world_size, self.version)

    def executed_path(self, key: str) -> Path:
        """Path of the executed notebook, which has outputs and verdicts."""
        return executed_path(self.course, self.lab_name, key)

    def __getstate__(self) -> dict[str, Any]:
        """The state that a worker needs, without values that may be long."""
        long = ("history", "before", "finished", "solution", "_read")
        return {k: v for k, v in self.__dict__.items() if k not in long}


def executed_path(course: Course, lab: str, key: str) -> Path:
    """Path of the executed notebook of a record."""
    return course.build / "executed" / lab / f"{key}.ipynb"


def _what_matters(master: NotebookNode) -> bytes:
    """The parts of the master that can change a verdict. Points cannot, so they are left out."""
    cells = []
    for cell in master.cells:
        nbgrader = dict(cell.metadata.get("nbgrader", {}))
        kept = {k: v for k, v in nbgrader.items() if k not in ("points", "checksum")}
        cells.append(
            [cell.get("id"), cell.cell_type, cell.source, cell.metadata | {"nbgrader": kept}]
        )
    return json.dumps(cells, sort_keys=True).encode()
