"""The results of a class as a table in the terminal and as CSV; `page.py` writes the HTML page.

Some texts in records come from submissions, so all texts are made safe for a terminal, a
spreadsheet and a browser.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from autograder.criteria.criterion import Status, Verdict
from autograder.files import write_whole
from autograder.plain_text import MARKS, clean, first_line, spreadsheet
from autograder.records.record import Record

_NOT_MISSED = frozenset({Status.PASS, Status.BLOCKED})
_NOT_GRADED = frozenset({Status.INVALID, Status.INFRA})


def reason(record: Record) -> str:
    """One line on why points are missing; empty if no points are missing."""
    missed = [c for c in record.criteria if is_missed(c)]
    if not missed:
        return ""
    first = missed[0]
    said = first_line(first.message) or MARKS[first.status].meaning
    if why_ungraded(record):
        return f"{first.status}: {said}"
    more = f" (+{len(missed) - 1} more)" if len(missed) > 1 else ""
    return f"{clean(first.criterion)}{more}: {said}"


def rich_table(records: Sequence[Record]) -> Table:
    """A table for a terminal of 100 columns: one line per submission."""
    labs = sorted({f"{clean(r.lab)} on {r.world_size} ranks" for r in records})
    table = Table(
        title=", ".join(labs), box=box.SIMPLE_HEAD, expand=True, title_style="bold", pad_edge=False
    )
    widest = max([6, *(len(record.criteria) for record in records)])
    scores = max([5, *(len(score_of(record)) for record in records)])
    table.add_column("Student", no_wrap=True, min_width=8, max_width=20, overflow="ellipsis")
    table.add_column("Score", justify="right", no_wrap=True, min_width=scores)
    table.add_column("Checks", no_wrap=True, min_width=widest)
    table.add_column("Seconds", justify="right", no_wrap=True, min_width=7)
    table.add_column("Why", no_wrap=True, overflow="ellipsis", ratio=1)
    for record in records:
        marks = Text()
        for criterion in record.criteria:
            mark = MARKS[criterion.status]
            marks.append(mark.symbol, mark.style)
        table.add_row(
            Text(clean(record.student)),
            Text(score_of(record), "bold green" if share_of(record) >= 1 else "bold"),
            marks,
            f"{record.seconds:.1f}",
            Text(reason(record)),
        )
    used = {c.status for r in records for c in r.criteria}
    caption = Text(justify="left")
    if warning := unsandboxed(records):
        caption.append(f"{warning}\n", "bold red")
    for status, mark in MARKS.items():
        if status in used:
            caption.append(f"{mark.symbol} ", mark.style).append(f"{status}  ")
    if len(orders := {tuple(r.by_name) for r in records}) == 1:
        caption.append("\nchecks: " + " ".join(clean(name) for name in orders.pop()))
    table.caption = caption
    return table


def write_csv(records: Sequence[Record], path: Path) -> None:
    """Writes one row per submission, with points and status of each criterion."""
    names = criteria_of(records)
    head = ["student", "submission", "lab", "world_size", "score", "max_score", "seconds"]
    head += ["sandboxed", "reason", *names, *(f"{name} status" for name in names)]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(map(spreadsheet, head))
    for record in records:
        row = [spreadsheet(clean(each)) for each in (record.student, record.submission, record.lab)]
        row += [record.world_size, record.score, record.max_score, record.seconds]
        row += [str(record.sandboxed).lower(), spreadsheet(reason(record))]
        found = [record.by_name.get(name) for name in names]
        row += ["" if c is None or record.infra else c.points for c in found]
        row += ["" if c is None else c.status for c in found]
        writer.writerow(row)
    write_whole(path, text.getvalue().encode())


# --- helpers ----------------------------------------------------------------------------------


def criteria_of(records: Sequence[Record]) -> list[str]:
    """Names of all criteria, in the order in which they first occur."""
    return list(dict.fromkeys(name for r in records for name in r.by_name))


def share_of(record: Record) -> float:
    """Score divided by maximum score; above 1 with extra points, 0 if there is no score."""
    return (record.score or 0.0) / record.max_score if record.max_score else 0.0


def score_of(record: Record) -> str:
    """Score and maximum score as text; "–" if there is no score (INFRA)."""
    score = "–" if record.score is None else f"{record.score:g}"
    return f"{score} / {record.max_score:g}"


def is_missed(criterion: Verdict) -> bool:
    """Whether the criterion cost points; one with extra points never does."""
    return criterion.status not in _NOT_MISSED and not criterion.extra


def why_ungraded(record: Record) -> str:
    """INVALID or INFRA if all criteria have this status, else empty."""
    statuses = {c.status for c in record.criteria}
    return statuses.pop() if len(statuses) == 1 and statuses <= _NOT_GRADED else ""


def was_boxed(record: Record) -> bool:
    """Whether no code ran outside the sandbox; an invalid notebook runs no code."""
    return record.sandboxed or why_ungraded(record) == "INVALID"


def unsandboxed(records: Sequence[Record]) -> str:
    number = sum(not was_boxed(r) for r in records)
    if not number:
        return ""
    return (
        f"UNSANDBOXED: {number} of {len(records)} submissions ran with the grader's own rights. "
        "Their scores hold only if their authors are trusted."
    )
