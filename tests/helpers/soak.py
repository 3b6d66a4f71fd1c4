"""`make soak`: right submissions, graded over and over with every core busy, must lose no point.

Those that change different cells are graded as one. Each time the notebook differs by a remark, so
the journal has no record of it. Busy loops, one per core, run beside the grader all the while.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import nbformat
from course import TestCourse, statuses

from autograder.criteria import lab_names
from autograder.proof.zoo import ZooEntry, combine, load_zoo
from autograder.report.terminal import score_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lab", action="append", choices=lab_names(), help="default: every lab")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="one submission, such as reference")
    options = parser.parse_args()
    lost = 0
    for lab in options.lab or lab_names():
        chosen = [e for e in load_zoo(lab) if not e.loses and options.only in (None, e.name)]
        if not chosen:
            parser.error(f"--only: {lab} has no right submission called {options.only!r}")
        lost += soak(lab, combine(chosen), options.times, options.jobs)
    return 1 if lost else 0


def soak(lab: str, chosen: list[ZooEntry], times: int, jobs: int) -> int:
    """Number of gradings that lost a point."""
    with tempfile.TemporaryDirectory() as folder:
        course = TestCourse.make(Path(folder), lab)
        for entry in chosen:
            for turn in range(times):
                remark = nbformat.v4.new_markdown_cell(f"turn {turn}", id=f"turn-{turn}")
                entry.notebook.cells.append(remark)
                course.submit(f"{entry.name}-{turn}", nbformat.writes(entry.notebook).encode())
                entry.notebook.cells.pop()
        busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(_num_cores())]
        for process in busy:
            process.start()
        try:
            records = course.grade(
                str(course.root / "handed_in"),
                "--no-gradebook",
                "--jobs",
                str(jobs),
                deadline_s=120.0 * len(chosen) * times,
            )
        finally:
            for process in busy:
                process.kill()
    scores = Counter(score_of(r) for r in records.values())
    print(f"{lab}: {len(records)} gradings with {len(busy)} cores busy: {dict(scores)}", flush=True)
    for name, record in records.items():
        for criterion in record["criteria"]:
            if statuses(record)[criterion["name"]] not in ("PASS", "BLOCKED"):
                print(f"{name} lost {criterion['name']}: {criterion['status']}")
                print(criterion["message"])
    return sum((r["score"] or 0) < r["max_score"] for r in records.values())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    sys.exit(main())
