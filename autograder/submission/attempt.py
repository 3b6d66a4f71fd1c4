"""Grades one submission: box + kernel + papermill + referee -> verdicts -> a record."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nbformat
import papermill
import torch
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from autograder.box.cgroup import make_group
from autograder.box.sandbox import Box, build_box, build_open
from autograder.criteria import parts_of
from autograder.criteria.criterion import Criterion, Draw, Lab, Status, Verdict
from autograder.files import write_whole
from autograder.records.record import Record
from autograder.records.version import grader_version
from autograder.referee.referee import Referee, draw_for
from autograder.submission.class_run import ClassRun
from autograder.submission.engine import InfrastructureError, Session
from autograder.submission.find import Submission
from autograder.submission.scratch import scratch_folder
from autograder.submission.without_run import (
    all_with,
    back_off,
    known_record,
    make_record,
    not_graded,
)

INFRA_TRIES = 3


def grade(submission: Submission, class_run: ClassRun) -> Record:
    """Grades one submission; returns a record whatever the submission does.

    If the journal has a record of the same bytes, lab, world size and grader, nothing is run.
    """
    torch.set_num_threads(1)  # judging uses small models, and the ranks need the cores
    known = known_record(submission, class_run)
    if known is not None:
        return known
    lab, journal = class_run.lab, class_run.journal
    intake = class_run.read(submission.path)
    key = class_run.key_of(intake.sha256)
    began = time.monotonic()
    if intake.notebook is None:
        verdicts = all_with(lab, Status.INVALID, intake.invalid or "not a notebook")
        record = make_record(submission, class_run, verdicts, began, sandboxed=False)
        return _filed(submission, class_run, key, record)
    reason, seed_id = "", f"{submission.student}:{intake.sha256}"
    entry = {"key": key, "seed_id": seed_id, "grader_version": grader_version(lab.name)}

    def note(verdict: Verdict, seconds: float) -> None:
        """Writes a verdict to the journal; it is on disk before the next cell runs."""
        kind = {"kind": "verdict", "seconds": round(seconds, 3)}
        journal.append(entry | kind | verdict.record())

    executed = class_run.executed_path(key)
    for number in range(1, INFRA_TRIES + 1):
        about = {"key": key, "lab": lab.name, "student": submission.student, "try": number}
        try:
            now = {"kind": "attempt", "pid": os.getpid(), "time": time.time()}
            journal.append(about | now)
            verdicts = run_once(intake.notebook, class_run, seed_id, executed, note)
        except InfrastructureError as error:
            reason = str(error)
        except Exception:
            reason = traceback.format_exc(limit=-3)
        else:
            record = make_record(submission, class_run, verdicts, began, class_run.sandboxed)
            return _filed(submission, class_run, key, record)
        with contextlib.suppress(OSError):  # on a full disk only the record tells of the failure
            journal.append(about | {"kind": "infra", "time": time.time(), "message": reason})
        if number < INFRA_TRIES:
            back_off(number)
    return not_graded(
        submission, class_run, f"The grader failed {INFRA_TRIES} times: {reason}", began
    )


def _filed(submission: Submission, class_run: ClassRun, key: str, record: Record) -> Record:
    """Writes the record to the journal and returns it.

    If the journal cannot be written (a full disk), returns an INFRA record instead, so that the
    submission is graded again.
    """
    try:
        class_run.journal.append_record(key, record)
    except OSError as error:
        return not_graded(submission, class_run, f"The record could not be kept: {error}")
    return record


def run_once(
    notebook: NotebookNode,
    class_run: ClassRun,
    seed_id: str | Callable[[Criterion], str],
    executed: Path,
    note: Callable[[Verdict, float], None],
) -> list[Verdict]:
    """Runs a notebook that intake has read; returns the verdicts and writes no journal entry.

    Args:
        seed_id: the same seed_id gives the same draws, if course key and criteria are the same. A
            function is called each time that a check is opened.
        executed: path where the executed notebook is written.
        note: called with each verdict and its cell's time in seconds, before the next cell runs.

    Raises:
        InfrastructureError: the grader's own failure.
    """
    lab = class_run.lab
    if torch.cuda.device_count():
        lab = replace(lab, limits=lab.limits.with_gpus(class_run.world_size))
    return _Attempt(lab, class_run, seed_id, note).run(notebook, executed)


class _Attempt:
    """One try at grading; its temporary files and processes are gone when `run` returns."""

    def __init__(
        self,
        lab: Lab,
        class_run: ClassRun,
        seed_id: str | Callable[[Criterion], str],
        note: Callable[[Verdict, float], None],
    ) -> None:
        self.lab, self.class_run, self.seed_id, self._note = lab, class_run, seed_id, note

    def run(self, notebook: NotebookNode, executed: Path) -> list[Verdict]:
        with scratch_folder() as folder:
            return self._run(notebook, executed, folder)

    def _run(self, notebook: NotebookNode, executed: Path, folder: Path) -> list[Verdict]:
        run_dir, front_dir = folder / "r", folder / "f"
        run_dir.mkdir(mode=0o700)
        front_dir.mkdir(mode=0o700)  # files of the kernel's front, outside the box
        referee = Referee(run_dir / "referee.sock", self.class_run.world_size, self._draw)
        wall = None
        try:
            box = self._box(run_dir, referee)
            prefix, wall = box.prefix, box.container
            if box.sandboxed and wall is None:
                wall = make_group(folder.name, self.lab.limits)
                prefix = [*(wall.prefix if wall else ()), *prefix]
            launcher = {"prefix": prefix, "env": box.env, "run_dir": str(run_dir)}
            launcher["client"] = os.getpid()
            launcher["fixed_ranks"] = True  # only the engine may ask for fresh ranks, no cell
            if not box.sandboxed:
                launcher["cwd"] = box.cwd
            (front_dir / "launcher.json").write_text(json.dumps(launcher))
            session = Session(
                lab=self.lab,
                world_size=self.class_run.world_size,
                referee=referee,
                kernel_arguments=[
                    "--ranks",
                    str(self.class_run.world_size),
                    "--launcher",
                    str(front_dir / "launcher.json"),
                ],
                on_verdict=self._note,
                connection_file=str(front_dir / "kernel.json"),
                wall=wall,
                sizes=box.sizes,
            )
            source, output = front_dir / "in.ipynb", front_dir / "out.ipynb"
            nbformat.write(notebook, source)
            # papermill raises this only after all cells have run.
            with contextlib.suppress(PapermillExecutionError):
                papermill.execute_notebook(
                    source,
                    output,
                    engine_name="referee",
                    kernel_name="torchrun-2",
                    progress_bar=False,
                    request_save_on_cell_execute=False,
                    session=session,
                )
            _keep(output, session, executed)
            return [session.verdicts.get(c.name) or _not_run(c) for c in self.lab.criteria]
        finally:
            referee.stop()
            if wall is not None:
                wall.remove()

    def _draw(self, criterion: Criterion) -> Draw:
        key, seed_id = self.class_run.course.key(), self.seed_id
        attempt = seed_id if isinstance(seed_id, str) else seed_id(criterion)
        return draw_for(key, self.lab.name, criterion.name, attempt, self.class_run.world_size)

    def _box(self, run_dir: Path, referee: Referee) -> Box:
        env = {
            "MINIDIST_REFEREE": str(referee.path),
            "MINIDIST_RANK_INIT": "autograder.inside.probe:attach",
            # The launcher imports these once, so ranks need not: the first DDP needs torch._dynamo.
            "MINIDIST_PRELOAD": ",".join(("torch._dynamo", *parts_of(self.lab.name))),
        }
        if self.class_run.sandboxed:
            return build_box(
                run_dir=run_dir, withheld=self.lab.withheld, limits=self.lab.limits, env_extra=env
            )
        return build_open(run_dir=run_dir, env_extra=env)


def _keep(output: Path, session: Session, executed: Path) -> None:
    """Saves the executed notebook, with each check's verdict in the metadata of its cell."""
    notebook = nbformat.read(output, as_version=4)
    # papermill inserts marker cells before a cell that failed
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
    write_whole(executed, f"{nbformat.writes(notebook)}\n".encode(), mode=0o644)


def _not_run(criterion: Criterion) -> Verdict:
    message = (
        "the check was not reached: its cell is missing, or the time for the notebook was used up"
    )
    return Verdict(
        criterion.name, Status.NOT_RUN, 0.0, criterion.points, message, extra=criterion.extra
    )
