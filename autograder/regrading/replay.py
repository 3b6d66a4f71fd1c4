"""`autograder replay`: runs a graded notebook again with the same draws and compares the verdicts.

Replay runs the notebook as it was graded (build/executed), so a file that was handed in later
changes nothing. Nothing is written to the journal or the gradebook.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
import torch
from nbformat import NotebookNode
from rich import box
from rich.table import Table
from rich.text import Text

from autograder.course.course import Course, CourseError
from autograder.criteria import get_lab
from autograder.criteria.criterion import Status, Verdict
from autograder.plain_text import MARKS, clean, first_line
from autograder.records.grading import Grading
from autograder.records.version import grader_version
from autograder.regrading.changes import NOTHING
from autograder.submission.attempt import run_once
from autograder.submission.class_run import ClassRun


@dataclass(frozen=True)
class ReplayedCriterion:
    """One criterion's status in the record and in the replay; `NOTHING` if it does not exist."""

    name: str
    then: str
    now: str
    message_then: str = ""
    message_now: str = ""

    @property
    def agrees(self) -> bool:
        """Whether it ended the same way."""
        return self.then == self.now


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        rows: one per criterion.
        remarks: possible causes of a difference, one line each.
    """

    grading: Grading
    rows: tuple[ReplayedCriterion, ...]
    remarks: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether every criterion ended the same way."""
        return all(row.agrees for row in self.rows)


def replay(
    grading: Grading, course: Course, *, sandboxed: bool, keep: Path | None = None
) -> Replay:
    """Runs a graded notebook again with the same draws.

    Args:
        sandboxed: run in the box.
        keep: path where the notebook of this run is written.

    Raises:
        CourseError: the notebook that was graded no longer exists.
        InfrastructureError: the grader's own failure.
    """
    torch.set_num_threads(1)  # as when it was graded
    record = grading.record
    class_run = ClassRun(course, grading.lab, record.world_size, sandboxed)
    if not grading.seed_id:
        return Replay(grading, _read_again(grading, class_run), ())
    notebook = _notebook(grading, class_run)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        executed = keep or Path(folder) / "executed.ipynb"
        verdicts = run_once(notebook, class_run, grading.seed_id, executed, lambda *_: None)
    return Replay(grading, _rows(record.by_name, verdicts), _remarks(grading, class_run))


def _notebook(grading: Grading, class_run: ClassRun) -> NotebookNode:
    """The notebook that was graded, without outputs and verdicts."""
    path = class_run.executed_path(grading.key)
    if path.is_file():
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
                cell.metadata.get("minidist", {}).pop("verdict", None)
        return notebook
    handed_in = Path(grading.record.submission)
    intake = class_run.read(handed_in)
    if intake.notebook is None or class_run.key_of(intake.sha256) != grading.key:
        raise CourseError(
            f"{path} is gone, and {handed_in} is not what was graded, or the grader has changed: "
            "it cannot be run again"
        )
    return intake.notebook


def _read_again(grading: Grading, class_run: ClassRun) -> tuple[ReplayedCriterion, ...]:
    """The rows for a file that could not be graded: the file is read again, and nothing is run."""
    path = Path(grading.record.submission)
    intake = class_run.read(path)
    now = str(Status.INVALID) if intake.notebook is None else "a notebook"
    return tuple(
        ReplayedCriterion(c.criterion, c.status, now, c.message, intake.invalid or "")
        for c in grading.record.criteria
    )


def _rows(then: dict[str, Verdict], verdicts: list[Verdict]) -> tuple[ReplayedCriterion, ...]:
    now = {verdict.criterion: verdict for verdict in verdicts}
    rows = []
    for name in dict.fromkeys([*now, *then]):
        old, new = then.get(name), now.get(name)
        rows.append(
            ReplayedCriterion(
                name,
                old.status if old else NOTHING,
                new.status if new else NOTHING,
                old.message if old else "",
                new.message if new else "",
            )
        )
    return tuple(rows)


def _remarks(grading: Grading, class_run: ClassRun) -> tuple[str, ...]:
    remarks = []
    if (now := grader_version(grading.lab)) != grading.grader_version:
        remarks.append(f"the grader has changed since (then {grading.grader_version}, now {now})")
    if grading.record.sandboxed != class_run.sandboxed:
        words = {True: "in the sandbox", False: "without a sandbox"}
        then = words[grading.record.sandboxed]
        remarks.append(f"it was graded {then} and is replayed {words[class_run.sandboxed]}")
    known = {criterion.name for criterion in get_lab(grading.lab).criteria}
    if gone := [name for name in grading.record.by_name if name not in known]:
        remarks.append(f"the lab no longer has {', '.join(gone)}")
    return tuple(remarks)


def replay_table(result: Replay) -> Table:
    """Criterion by criterion, for a terminal."""
    record = result.grading.record
    table = Table(
        title=f"{clean(record.student)}, {record.lab} on {record.world_size} ranks, "
        f"record {result.grading.key[:12]}",
        box=box.SIMPLE_HEAD,
    )
    for column in ("criterion", "record", "replay", ""):
        table.add_column(column, no_wrap=column != "")
    for row in result.rows:
        same = Text("agrees", "green") if row.agrees else Text("DIFFERS", "bold red")
        table.add_row(Text(row.name), _status(row.then), _status(row.now), same)
    return table


def _status(status: str) -> Text:
    mark = MARKS.get(status)
    return Text(f"{mark.symbol} {status}", mark.style) if mark else Text(status)


def explain(result: Replay) -> list[str]:
    """The lines below the table: messages of criteria that differ, remarks, and a summary."""
    lines = []
    for row in result.rows:
        if not row.agrees:
            lines += [
                f"{row.name}, record: {first_line(row.message_then) or row.then}",
                f"{row.name}, replay: {first_line(row.message_now) or row.now}",
            ]
    different = sum(not row.agrees for row in result.rows)
    lines += result.remarks
    if different:
        lines.append(f"{different} of {len(result.rows)} criteria differ from the record")
    else:
        lines.append(f"all {len(result.rows)} criteria agree with the record")
    return lines
