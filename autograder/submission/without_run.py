"""A submission's record without a run: from the journal, or of the grader's own failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from autograder.box.gpus import num_gpus
from autograder.course.gates import apply_gates
from autograder.criteria.criterion import Lab, Status, Verdict
from autograder.records.grading import Grading
from autograder.records.record import Record
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.intake import sha256_of

INFRA_BACKOFF_S = 2.0  # wait after the grader's first failure; doubles with each further failure


def known_record(
    submission: Submission,
    class_run: ClassRun,
    last: Mapping[str, Grading] | None = None,
    finished: Mapping[str, Record] | None = None,
) -> Record | None:
    """The journal's record of the same bytes, lab, world size and grader, if there is one.

    Args:
        last: student -> last grading, from `grading.latest`. If the student's last grading is a
            different one, the found record is journalled as this student's. This happens if
            somebody else handed in the same bytes, or the student handed in an earlier version.
        finished: key -> record, for callers that ask for many records: reading the journal is
            slow.
    """
    if class_run.again:
        return None
    key, journal = class_run.key_of(sha256_of(submission.path)), class_run.journal
    known = journal.finished(key) if finished is None else finished.get(key)
    if known is None or list(known.by_name) != [c.name for c in class_run.lab.criteria]:
        return None
    blocked = any(c.status == Status.BLOCKED for c in known.criteria)
    if blocked and num_gpus() > known.num_gpus:
        return None  # the machine that graded it had too few GPUs; this machine has more
    invalid = all(c.status == Status.INVALID for c in known.criteria)
    if not invalid and not class_run.executed_path(key).is_file():
        return None
    # Somebody else may have handed in the same notebook, and points may have changed since.
    found = replace(
        known,
        submission=str(submission.path.absolute()),
        student=submission.student,
        criteria=_with_points(known.criteria, class_run.lab),
    )
    own = last.get(submission.student) if last is not None else None
    is_last = own is not None and (own.key, own.record.criteria) == (key, found.criteria)
    if found.criteria != known.criteria or (last is not None and not is_last):
        with contextlib.suppress(OSError):  # on a full disk the next grading writes it
            journal.append_record(key, found)
    return found


def _with_points(verdicts: tuple[Verdict, ...], lab: Lab) -> tuple[Verdict, ...]:
    """The verdicts with the current points of criteria, and the current gates."""
    now = []
    for verdict in verdicts:
        most = lab[verdict.criterion].points
        points = most if verdict.status == Status.PASS else 0.0
        now.append(replace(verdict, points=points, max_points=most))
    return apply_gates(lab, now)


def not_graded(
    submission: Submission, class_run: ClassRun, reason: str, began: float | None = None
) -> Record:
    """A record of the grader's failure (INFRA), without points.

    The record is not journalled, so that the submission is graded again.
    """
    verdicts = all_with(class_run.lab, Status.INFRA, reason)
    began = time.monotonic() if began is None else began
    return make_record(submission, class_run, verdicts, began, class_run.sandboxed)


def all_with(lab: Lab, status: Status, message: str) -> list[Verdict]:
    """The same verdict for every criterion."""
    return [Verdict(c.name, status, 0.0, c.points, message, extra=c.extra) for c in lab.criteria]


def make_record(
    submission: Submission,
    class_run: ClassRun,
    verdicts: list[Verdict],
    began: float,
    sandboxed: bool,
) -> Record:
    """The record of verdicts that were given since `began`, a time of `time.monotonic`."""
    return Record(
        submission=str(submission.path.absolute()),
        student=submission.student,
        lab=class_run.lab_name,
        world_size=class_run.world_size,
        seconds=round(time.monotonic() - began, 2),
        sandboxed=sandboxed,
        criteria=apply_gates(class_run.lab, verdicts),
        num_gpus=num_gpus(),
    )


def back_off(failures: int) -> None:
    """Waits after this many failures of the grader in a row, in case a resource was short."""
    time.sleep(INFRA_BACKOFF_S * 2 ** (failures - 1))
