"""`make flake PART=kernel`: the tests of a part again and again on a busy machine, and a table.

Each round is a run of pytest of its own. As many processes as there are cores do nothing but count
meanwhile, in every round but each third one. The table is written anew after each round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
BUSY = "while True: pass"


@dataclass
class Test:
    """What came of a test: seconds of each run, and the rounds in which it failed."""

    seconds: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


def run_round(pytest_args: list[str], log: Path, loaded: bool) -> tuple[Path, int]:
    """Runs pytest once; its report and exit code."""
    report = log.with_suffix(".xml")
    count = len(os.sched_getaffinity(0)) if loaded else 0
    hogs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        with log.open("w") as file:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", f"--junitxml={report}"),
                    *("--hypothesis-profile=default", *pytest_args),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    return report, done.returncode


def take_in(tests: dict[str, Test], report: Path, number: int) -> None:
    """Adds a round's report."""
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        test = tests[f"{case.get('classname')}::{case.get('name')}"]
        test.seconds.append(float(case.get("time", 0)))
        if case.find("failure") is not None or case.find("error") is not None:
            test.failed.append(number)


def table(rounds: list[str], tests: dict[str, Test], slowest: int = 15) -> str:
    """Markdown: every round, then the tests that failed and the slowest ones."""
    runs = sum(len(test.seconds) for test in tests.values())
    failures = sum(len(test.failed) for test in tests.values())
    lines = [f"{len(rounds)} rounds, {len(tests)} tests, {runs} runs, {failures} failures", ""]
    lines += ["| round | load | seconds | exit code |", "|---|---|---|---|", *rounds, ""]
    lines += [
        "| test | runs | failed in round | fastest, median, slowest run in s |",
        "|---|---|---|---|",
    ]
    shown = sorted(tests.items(), key=lambda item: -median(item[1].seconds))
    for name, test in [
        *[item for item in shown if item[1].failed],
        *[item for item in shown if not item[1].failed][:slowest],
    ]:
        failed = ", ".join(map(str, test.failed)) or "none"
        seconds = f"{min(test.seconds):.1f}, {median(test.seconds):.1f}, {max(test.seconds):.1f}"
        lines.append(f"| {name} | {len(test.seconds)} | {failed} | {seconds} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "flake")
    options, pytest_args = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tests: dict[str, Test] = defaultdict(Test)
    rounds = []
    for number in range(1, options.times + 1):
        began, loaded = time.monotonic(), number % 3 != 0
        report, code = run_round(pytest_args, options.out / f"round{number:02d}.log", loaded)
        if report.exists():
            take_in(tests, report, number)
        load = "all cores" if loaded else "none"
        rounds.append(f"| {number} | {load} | {time.monotonic() - began:.0f} | {code} |")
        (options.out / "table.md").write_text(table(rounds, tests))
    return 1 if any(test.failed for test in tests.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
