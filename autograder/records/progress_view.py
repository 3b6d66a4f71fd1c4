"""The output of `autograder status`: text for a terminal, or JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autograder.course.course import Course, CourseError
from autograder.plain_text import clean, listed
from autograder.records.progress import Batch, Progress, Run, Tail

MAX_NAMES = 12


class ProgressView:
    """The batches of a course's journal; every `refresh` reads the new entries."""

    def __init__(self, course: Course, lab: str | None = None) -> None:
        self.course, self.lab = course, lab
        self._tail, self._progress = Tail(course.journal_path), Progress()

    def refresh(self) -> list[Batch]:
        """The batches to show, with their current state."""
        entries, anew = self._tail.read()
        if anew:
            self._progress = Progress()
        self._progress.feed(entries)
        shown = self._progress.shown(self.lab)
        for batch in shown:
            batch.criteria = batch.criteria or _checks(self.course, batch.lab)
        return shown

    def view(self, batches: Sequence[Batch], now: float) -> RenderableType:
        """The batches as text for a terminal."""
        if batches:
            return Group(*(_view(batch, now) for batch in batches))
        which = f" of {self.lab}" if self.lab else ""
        return Text(
            f"no grading{which} is noted in {self.course.journal_path} "
            f"({self._progress.num_records} records)"
        )


def watch(
    status: ProgressView, console: Console, every_s: float, clock: Callable[[], float]
) -> None:
    """Shows the status every `every_s` seconds, until no grader is at work."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            batches = status.refresh()
            live.update(status.view(batches, clock()), refresh=True)
            if not any(_is_busy(batch) for batch in batches):
                return
            time.sleep(every_s)


def to_json(batches: Sequence[Batch], now: float) -> list[dict[str, Any]]:
    """The batches as JSON, for a program."""
    return [
        {
            "lab": batch.lab,
            "world_size": batch.world_size,
            "pid": batch.pid,
            "host": batch.host,
            "alive": batch.alive(),
            "ended": batch.ended is not None,
            "seconds": round((batch.ended or now) - batch.began, 1),
            "seconds_left": None if (left := batch.left_s(now)) is None else round(left, 1),
            "students": [
                {
                    "student": run.student,
                    "state": run.state,
                    "tries": run.tries,
                    "seconds": round(now - run.began, 1) if run.state == "running" else None,
                    "at": run.at(batch.criteria),
                    "message": run.message,
                }
                for run in batch.runs.values()
            ],
        }
        for batch in batches
    ]


def _is_busy(batch: Batch) -> bool:
    return batch.alive() is not False if batch.ended is None else batch.alive() is True


def _checks(course: Course, lab: str) -> tuple[str, ...]:
    """The lab's checks in the order of its notebook."""
    try:
        cells = course.master(lab).cells
    except CourseError:
        return ()
    metas = [c.metadata.get("nbgrader", {}) for c in cells if c.cell_type == "code"]
    return tuple(meta["grade_id"] for meta in metas if meta.get("grade"))


def _view(batch: Batch, now: float) -> RenderableType:
    total, known = len(batch.runs), batch.count("known")
    done = batch.count("done", "known")
    parts = [f"{done} of {total} done" + (f" ({known} known before)" if known else "")]
    for state in ("running", "queued", "waiting", "INFRA"):
        if number := batch.count(state):
            parts.append(f"{number} {state}")
    head = Text(f"{clean(batch.lab)} on {batch.world_size} ranks: ", "bold")
    lines: list[RenderableType] = [head.append(", ".join(parts)), _who(batch, now)]
    rows = [run for run in batch.runs.values() if run.state in ("running", "INFRA")]
    if rows:
        lines.append(_table(batch, rows, now))
    for state in ("queued", "waiting"):
        if those := [clean(run.student) for run in batch.runs.values() if run.state == state]:
            lines.append(Text(f"{state}: {listed(those, MAX_NAMES)}"))
    return Group(*lines)


def _who(batch: Batch, now: float) -> Text:
    """Which process is grading, since when, and how long it will still take."""
    alive, who = batch.alive(), f"process {batch.pid} on {clean(batch.host)}"
    took = _clock((batch.ended or now) - batch.began)
    if batch.ended is not None:
        ago = f"graded in {took}, {_clock(now - batch.ended)} ago"
        if alive:
            return Text(f"{ago}; {who} is at gradebook and feedback")
        return Text(f"{ago}, by {who}")
    if alive is False:
        return Text(
            f"{who} is gone, and was not through: run the same command again, what was graded is "
            "kept",
            "bold red",
        )
    state = "alive" if alive else "cannot be seen from here"
    left = batch.left_s(now)
    eta = f", about {_clock(left)} left" if left is not None else ""
    return Text(f"{who} ({state}), for {took}{eta}, {batch.jobs} at once")


def _table(batch: Batch, rows: Sequence[Run], now: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("student", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("try", justify="right")
    table.add_column("at")
    for run in rows:
        seconds = f"{now - run.began:.0f}" if run.state == "running" else ""
        at = run.at(batch.criteria)
        if run.message:
            failed = clean(run.message).strip().splitlines() or ["?"]
            at = f"{at} (before: {failed[-1]})" if at else failed[-1]
        style = "bold yellow" if run.state == "INFRA" else ""
        table.add_row(
            Text(clean(run.student)), Text(run.state, style), seconds, str(run.tries), Text(at)
        )
    return table


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
