"""`make soak`: right submissions, graded over and over with every core busy, must lose no point.

Each time the notebook differs by a remark, so the journal has no record of it. Busy loops, one per
core, run beside the grader all the while.
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
from course import LAB, TestCourse, statuses

from autograder.zoo import load_zoo


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="one submission, such as reference")
    options = parser.parse_args()
    right = [entry for entry in load_zoo(LAB) if not entry.loses]
    chosen = [entry for entry in right if options.only in (None, entry.name)]
    if not chosen:
        parser.error(f"--only: expected one of {[entry.name for entry in right]}")
    with tempfile.TemporaryDirectory() as folder:
        course = TestCourse.make(Path(folder))
        for entry in chosen:
            for turn in range(options.times):
                remark = nbformat.v4.new_markdown_cell(f"turn {turn}", id=f"turn-{turn}")
                entry.notebook.cells.append(remark)
                course.submit(f"{entry.name}-{turn}", nbformat.writes(entry.notebook).encode())
                entry.notebook.cells.pop()
        busy = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(_num_cores())]
        for process in busy:
            process.start()
        try:
            records = course.grade(
                str(course.root / "handed_in"), "--no-gradebook", "--jobs", str(options.jobs),
                deadline_s=7200,
            )  # fmt: skip
        finally:
            for process in busy:
                process.kill()
    scores = Counter(f"{r['score']:g}/{r['max_score']:g}" for r in records.values())
    print(f"{len(records)} gradings with {len(busy)} cores busy: {dict(scores)}")
    for name, record in records.items():
        for criterion in record["criteria"]:
            if statuses(record)[criterion["name"]] != "PASS":
                print(f"{name} lost {criterion['name']}: {criterion['status']}")
                print(criterion["message"])
    return 0 if set(scores) == {"100/100"} else 1


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    sys.exit(main())
