"""`make nightly`: parts of the grader are killed at random points of a class; nobody else pays.

Kills, one after the other, the grader itself, one of its workers (referee and broker live there),
a kernel's front, a launcher or a rank, until the class is graded. Then every submission must have
exactly one verdict, and the one that it has earned: all but those whose own ranks were killed,
which nobody can tell from ranks that killed themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import psutil
from course import LAB, TestCourse
from leftovers import find_leftovers

from autograder.course.course import Course
from autograder.proof.zoo import ZooEntry, load_zoo
from autograder.records.journal import Journal

KINDS = ("grader", "forks workers", "worker", "front", "launcher", "rank")
# Three starters cost as much as one reference; what matters is that scores differ.
CLASS = ("reference", "starter", "wrong_no_set_epoch", "starter", "starter")
START_S, END_S = 120.0, 3600.0


@dataclass
class Outcome:
    """What a class with faults came to."""

    kills: list[str] = field(default_factory=list)
    hit: set[str] = field(default_factory=set)  # students whose launcher or rank was killed
    records: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class FaultyClass:
    """A class of students, and somebody who kills.

    Args:
        course: an empty course; its folder `handed_in` is filled.
        students, faults: how many of each.
        seed: of the choice of moments and victims.
    """

    def __init__(self, course: TestCourse, students: int, faults: int, seed: int, jobs: int = 2):
        self.course, self.faults, self.jobs = course, faults, jobs
        self.random = random.Random(seed)
        entries = {entry.name: entry for entry in load_zoo(LAB, *CLASS)}
        self.expected: dict[str, ZooEntry] = {}
        for number in range(students):
            entry = entries[CLASS[number % len(CLASS)]]
            student = f"student-{number:03d}"
            remark = nbformat.v4.new_markdown_cell(student, id=student)
            entry.notebook.cells.append(remark)
            course.submit(student, nbformat.writes(entry.notebook).encode())
            entry.notebook.cells.pop()
            self.expected[student] = entry
        self.outcome = Outcome()
        self._last_seen: list[psutil.Process] = []  # what the grader had started

    def run(self) -> Outcome:
        """Grades the class with faults, then once more without."""
        before = find_leftovers()
        kinds = [KINDS[i % len(KINDS)] for i in range(self.faults)]
        self.random.shuffle(kinds)
        # All through the class: after which number of verdicts each of them comes. Enough are left
        # for the last one to find somebody to kill.
        most = len(self.expected) - 4 * self.jobs
        due = sorted(self.random.uniform(0, most) for _ in kinds)
        ends_at = time.monotonic() + END_S
        while kinds:
            assert time.monotonic() < ends_at, f"too slow: {self.outcome.kills}"
            grader = self._start()
            try:
                while kinds and grader.poll() is None:
                    if count_entries(self.course)["submission"] < due[len(self.outcome.kills)]:
                        time.sleep(0.3)
                        continue
                    time.sleep(self.random.uniform(0.0, 3.0))
                    if grader.poll() is None and self._kill(grader, kinds[0]):
                        kinds.pop(0)
            finally:
                self._wait(grader, END_S if not kinds else 0.0)
            if grader.returncode == 0 and kinds:
                self.outcome.problems.append(f"the class was done before all faults: {kinds}")
                break
        self.outcome.records = self.course.grade(
            str(self.course.root / "handed_in"), "--no-gradebook", "--jobs", str(self.jobs)
        )
        self._check()
        left = find_leftovers() - before
        self.outcome.problems += [f"left behind: {what}" for what in sorted(left)]
        return self.outcome

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "autograder",
                "grade",
                str(self.course.root / "handed_in"),
                "--lab",
                LAB,
                "--no-gradebook",
                "--jobs",
                str(self.jobs),
            ],
            cwd=self.course.root,
            env=os.environ | {"AUTOGRADER_COURSE": str(self.course.root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _wait(self, grader: subprocess.Popen[bytes], deadline_s: float) -> None:
        """Until it has ended with everything that it had started; kills it at the deadline."""
        try:
            children = psutil.Process(grader.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = self._last_seen
        try:
            grader.wait(deadline_s)
        except subprocess.TimeoutExpired:
            grader.kill()
            grader.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        self.outcome.problems += [f"outlived the grader: {process}" for process in alive]

    def _kill(self, grader: subprocess.Popen[bytes], kind: str) -> bool:
        """Kills a part of this kind, if there is one now."""
        below = self._last_seen = psutil.Process(grader.pid).children(recursive=True)
        if kind == "grader":
            if not of_kind(below, "launcher"):
                return False  # it has not begun yet
            grader.kill()
            grader.wait()
            self.outcome.kills.append("grader")
            return True
        victims = of_kind(below, kind)
        if not victims:
            return False
        victim = self.random.choice(victims)
        if kind in ("rank", "launcher"):
            student = self._student_of(victim)
            if student is None:
                return False
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return False
        if kind in ("rank", "launcher"):
            self.outcome.hit.add(student)
        self.outcome.kills.append(kind)
        return True

    def _student_of(self, process: psutil.Process) -> str | None:
        """Whose run a process belongs to: the last attempt of the worker above it."""
        try:
            above = {parent.pid for parent in process.parents()}
        except psutil.NoSuchProcess:
            return None
        attempts = [e for e in self._journal() if e["kind"] == "attempt" and e["pid"] in above]
        return attempts[-1]["student"] if attempts else None

    def _journal(self) -> list[dict[str, Any]]:
        return journal_of(self.course)

    def _check(self) -> None:
        found, problems = self.outcome.records, self.outcome.problems
        if set(found) != set(self.expected):
            problems.append(f"lost or invented: {sorted(set(found) ^ set(self.expected))}")
        verdicts = Counter(
            e["record"].student for e in self._journal() if e["kind"] == "submission"
        )
        problems += [f"{s}: {n} verdicts" for s, n in verdicts.items() if n != 1]
        for student, record in found.items():
            statuses = {c["name"]: c["status"] for c in record["criteria"]}
            if "INFRA" in statuses.values():
                problems.append(f"{student}: INFRA: {record['criteria'][0]['message'][:300]}")
            elif student not in self.outcome.hit:
                entry = self.expected[student]
                lost = {name for name, status in statuses.items() if status != "PASS"}
                wanted = set(statuses) if entry.name == "starter" else set(entry.loses)
                if lost != wanted:
                    problems.append(f"{student} ({entry.name}): lost {sorted(lost ^ wanted)}")


def journal_of(course: TestCourse) -> list[dict[str, Any]]:
    """All that its journal holds."""
    return list(Journal(Course(course.root).journal_path).iter_entries())


def count_entries(course: TestCourse) -> Counter[str]:
    """How many attempts, verdicts and finished submissions the journal has."""
    kinds = Counter(entry["kind"] for entry in journal_of(course))
    return Counter({kind: kinds[kind] for kind in ("attempt", "verdict", "submission")})


def of_kind(processes: list[psutil.Process], kind: str) -> list[psutil.Process]:
    """Those of the grader's processes that are of this kind."""
    found = []
    for process in processes:
        try:
            words = " ".join(process.cmdline())
            above = sum(map(_is_launcher, process.parents()))
            inside = any(map(_forks_workers, process.parents()))
        except psutil.Error:
            continue
        if (
            (kind == "forks workers" and _forks_workers(process) and not inside)
            or (kind == "worker" and _forks_workers(process) and inside)
            or (kind == "front" and "-m minidist.kernel --ranks" in words)
            or (kind == "launcher" and _is_launcher(process) and above < 2)
            or (kind == "rank" and _is_launcher(process) and above == 2)
        ):
            found.append(process)
    return found


def _forks_workers(process: psutil.Process) -> bool:
    """What workers are forked from, or one of them; they share a command line."""
    try:
        return "autograder.submission.attempt" in process.cmdline()
    except psutil.Error:
        return False


def _is_launcher(process: psutil.Process) -> bool:
    """The launcher or what it has forked; a sandbox only has its name among its arguments."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "minidist.kernel.inside.launcher" in words and "bwrap" not in words[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--students", type=int, default=200)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        course = TestCourse.make(Path(folder) / "course")
        outcome = FaultyClass(
            course, options.students, options.faults, options.seed, options.jobs
        ).run()
    print(f"{options.students} submissions, killed: {dict(Counter(outcome.kills))}")
    print(f"whose own ranks were killed: {sorted(outcome.hit)}")
    for problem in outcome.problems:
        print("BAD", problem)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
