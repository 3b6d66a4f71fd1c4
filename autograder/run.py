"""One submission: box + kernel + papermill + referee -> verdicts -> a record."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
import torch
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from autograder.course import Course
from autograder.criteria import get_lab
from autograder.criteria.base import Criterion, Draw, Lab, Status, Verdict
from autograder.engine import InfrastructureError, Session
from autograder.intake import Submission, read_submission
from autograder.journal import Journal, grader_version, submission_key
from autograder.referee import Referee, draw_for
from autograder.sandbox import Box, build_box, build_open

INFRA_TRIES = 3
Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How a class is graded.

    Args:
        course: where files and key are.
        lab: name of the lab.
        world_size: number of ranks.
        sandboxed: run in the box; without it nothing holds a submission back.
    """

    course: Course
    lab: str
    world_size: int
    sandboxed: bool


def grade(submission: Submission, settings: Settings) -> Record:
    """Grades one submission; whatever it does, a record comes back.

    What the journal has for the same bytes, lab, world size and grader is not run again.
    """
    torch.set_num_threads(1)  # the oracle's models are small, and the cores belong to the ranks
    known = known_record(submission, settings)
    if known is not None:
        return known
    lab = get_lab(settings.lab)
    journal = Journal(settings.course.journal_path)
    intake = read_submission(submission.path, settings.course.master(lab.name))
    key = record_key(intake.sha256, settings)
    began = time.monotonic()
    if intake.notebook is None:
        verdicts = _all(lab, Status.INVALID, intake.invalid or "not a notebook")
        record = _record(submission, settings, verdicts, began, sandboxed=False)
        journal.append({"kind": "submission", "key": key, "record": record})
        return record
    reason = ""
    for _ in range(INFRA_TRIES):
        attempt = _Attempt(lab, settings, journal, key, submission.student)
        try:
            verdicts = attempt.run(intake.notebook, executed_path(settings.course, lab.name, key))
        except InfrastructureError as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc(limit=-3)
        else:
            record = _record(submission, settings, verdicts, began, settings.sandboxed)
            journal.append({"kind": "submission", "key": key, "record": record})
            return record
    return not_graded(
        submission, settings, f"The grader failed {INFRA_TRIES} times: {reason}", began
    )


def known_record(submission: Submission, settings: Settings) -> Record | None:
    """The journal's record of the same bytes, lab, world size and grader, if there is one."""
    sha256 = read_submission(submission.path, settings.course.master(settings.lab)).sha256
    key = record_key(sha256, settings)
    known = Journal(settings.course.journal_path).finished(key)
    if known is None:
        return None
    invalid = all(c["status"] == Status.INVALID for c in known["criteria"])
    if not invalid and not executed_path(settings.course, settings.lab, key).is_file():
        return None
    # The same notebook may have been handed in by somebody else.
    return known | {"submission": str(submission.path), "student": submission.student}


def not_graded(
    submission: Submission, settings: Settings, reason: str, began: float | None = None
) -> Record:
    """A record of our own failure; not journalled, so that it is tried again."""
    verdicts = _all(get_lab(settings.lab), Status.INFRA, reason)
    began = time.monotonic() if began is None else began
    return _record(submission, settings, verdicts, began, settings.sandboxed)


def record_key(sha256: str, settings: Settings) -> str:
    """What a record is filed under: the file's bytes, lab, world size and version of the grader."""
    version = grader_version(nbformat.writes(settings.course.master(settings.lab)).encode())
    return submission_key(sha256, settings.lab, settings.world_size, version)


def executed_path(course: Course, lab: str, key: str) -> Path:
    """The notebook as it was run, with outputs and verdicts."""
    return course.build / "executed" / lab / f"{key}.ipynb"


class _Attempt:
    """One try: everything that it makes is gone when it returns."""

    def __init__(
        self, lab: Lab, settings: Settings, journal: Journal, key: str, student: str
    ) -> None:
        self.lab, self.settings, self.journal, self.key = lab, settings, journal, key
        self.seed_id = f"{student}:{key}"

    def run(self, notebook: NotebookNode, executed: Path) -> list[Verdict]:
        # Short, because a unix socket's path has at most 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="md-", dir="/tmp"))
        try:
            return self._run(notebook, executed, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, notebook: NotebookNode, executed: Path, folder: Path) -> list[Verdict]:
        run_dir, front_dir = folder / "r", folder / "f"
        run_dir.mkdir(mode=0o700)
        front_dir.mkdir(mode=0o700)  # the notebook's side of the front; not in the box
        referee = Referee(run_dir / "referee.sock", self.settings.world_size, self._draw)
        try:
            box = self._box(run_dir, referee)
            launcher = {"prefix": box.prefix, "env": box.env, "run_dir": str(run_dir)}
            if not box.sandboxed:
                launcher["cwd"] = box.cwd
            (front_dir / "launcher.json").write_text(json.dumps(launcher))
            session = Session(
                lab=self.lab, world_size=self.settings.world_size, referee=referee,
                kernel_arguments=["--ranks", str(self.settings.world_size),
                                  "--launcher", str(front_dir / "launcher.json")],
                on_verdict=self._note, connection_file=str(front_dir / "kernel.json"),
            )  # fmt: skip
            source, output = front_dir / "in.ipynb", front_dir / "out.ipynb"
            nbformat.write(notebook, source)
            # That a cell raised, papermill says after all of them have run.
            with contextlib.suppress(PapermillExecutionError):
                papermill.execute_notebook(
                    source, output, engine_name="referee", kernel_name="torchrun-2",
                    progress_bar=False, request_save_on_cell_execute=False, session=session,
                )  # fmt: skip
            _keep(output, session, executed)
            return [session.verdicts.get(c.name) or _not_run(c) for c in self.lab.criteria]
        finally:
            referee.stop()

    def _draw(self, criterion: Criterion) -> Draw:
        key = self.settings.course.key()
        return draw_for(key, self.lab.name, criterion.name, self.seed_id, self.settings.world_size)

    def _box(self, run_dir: Path, referee: Referee) -> Box:
        env = {
            "MINIDIST_REFEREE": str(referee.path),
            "MINIDIST_RANK_INIT": "autograder.probe:attach",
            # Imported once by the launcher, not by every rank: the first DDP needs torch._dynamo.
            "MINIDIST_PRELOAD": ",".join(
                ("torch._dynamo", "matplotlib.pyplot", f"autograder.criteria.{self.lab.name}")
            ),
        }
        if self.settings.sandboxed:
            return build_box(run_dir=run_dir, withheld=self.lab.withheld, env_extra=env)
        return build_open(run_dir=run_dir, env_extra=env)

    def _note(self, verdict: Verdict, seconds: float) -> None:
        """On disk before the next cell runs."""
        self.journal.append({
            "kind": "verdict", "key": self.key, "seed_id": self.seed_id,
            "grader_version": grader_version(), "seconds": round(seconds, 3), **verdict.record(),
        })  # fmt: skip


def _keep(output: Path, session: Session, executed: Path) -> None:
    """Saves the run notebook with every check cell's verdict in its metadata."""
    notebook = nbformat.read(output, as_version=4)
    # papermill puts markers of its own before a cell that failed
    notebook.cells = [
        c for c in notebook.cells if "minidist" in c.metadata or c.cell_type != "code"
    ]
    notebook.cells = [
        c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])
    ]
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        meta = cell.metadata.get("minidist", {})
        if meta.get("kind") == "check" and meta["grade_id"] in session.verdicts:
            meta["verdict"] = session.verdicts[meta["grade_id"]].record()
    notebook.metadata.pop("papermill", None)
    executed.parent.mkdir(parents=True, exist_ok=True)
    partial = executed.with_name(f"{executed.stem}.{os.getpid()}.partial")
    nbformat.write(notebook, partial)
    partial.replace(executed)


def _not_run(criterion: Criterion) -> Verdict:
    message = (
        "the check was not reached: its cell is missing, or the time for the notebook was used up"
    )
    return Verdict(criterion.name, Status.NOT_RUN, 0.0, criterion.points, message)


def _all(lab: Lab, status: Status, message: str) -> list[Verdict]:
    return [Verdict(c.name, status, 0.0, c.points, message) for c in lab.criteria]


def _record(
    submission: Submission, settings: Settings, verdicts: list[Verdict], began: float,
    sandboxed: bool,
) -> Record:  # fmt: skip
    counted = [v for v in verdicts if v.status != Status.BLOCKED]
    return {
        "submission": str(submission.path),
        "student": submission.student,
        "lab": settings.lab,
        "world_size": settings.world_size,
        "score": sum(v.points for v in counted),
        "max_score": sum(v.max_points for v in counted),
        "seconds": round(time.monotonic() - began, 2),
        "sandboxed": sandboxed,
        "criteria": [v.record() for v in verdicts],
    }
