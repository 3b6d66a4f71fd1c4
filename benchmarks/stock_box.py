"""Runs stock graders on one attack, each in a course of its own in a box that keeps this machine.

The box is around grader and submission together. It takes nothing from what a submission can do
to its grader: both are one user, in one folder, with one list of processes. It only keeps both
from the machine: own process ids, no network, nothing but the course and /tmp to write to.

    course/  source/ submitted/ autograded/ gradebook.db     nbgrader's
             handed_in/ autograder.zip results/              otter's
             home/                                           HOME of both
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stock_notebooks import LAB, Grader, Notebook, nbgrader_source, otter_archive

ROOT = Path(__file__).resolve().parent.parent
INSIDE = "/course"
CELL_DEADLINE_S = 120  # a loaded machine needs more than the 30 s that nbgrader gives
SHARED_MEMORY_BYTES = 1 << 30
SECRET = "canary-0123456789abcdef"  # the word that attacks look for
MAX_SAID = 2_000  # characters of what a grader printed that are kept

_CONFIG = f"""\
c = get_config()
c.CourseDirectory.course_id = "stock"
c.CourseDirectory.root = "{INSIDE}"
c.Execute.timeout = {CELL_DEADLINE_S}
c.Execute.startup_timeout = 120
c.Execute.iopub_timeout = 60
"""
# otter's own function for grading without containers; a grade and the notebook as it was run.
_OTTER = """\
import json, sys
from otter.api import grade_submission
results = grade_submission(sys.argv[1], "autograder.zip", quiet=True)
scores = {name: results.get_score(name) for name in results.test_files}
said = [cell.get("outputs", []) for cell in results.notebook.cells]
found = {"scores": scores, "error": repr(results.catastrophic_error), "said": said}
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
"""


@dataclass
class Graded:
    """What a stock grader made of one student.

    Attributes:
        scores: criterion -> points; empty if there is no grade.
        said: what the cells printed, as JSON.
    """

    scores: dict[str, float] = field(default_factory=dict)
    said: str = ""

    @property
    def total(self) -> float:
        """All points together."""
        return sum(self.scores.values())


@dataclass
class Run:
    """One run of a stock grader over students, in a fresh copy of a course."""

    graded: dict[str, Graded]
    seconds: float
    stopped: bool  # by our deadline
    said: str  # the end of what the grader printed itself


class StockCourse:
    """A course from which every run takes a copy; made once per grader.

    Args:
        folder: an empty folder of ours.
        grader: which one.
        python: the interpreter that the grader is installed for.
        ranks: number of ranks of the kernel.
        solution: the lab with its solution marks, as plain JSON.
    """

    def __init__(
        self, folder: Path, grader: Grader, python: str, ranks: int, solution: Notebook
    ) -> None:
        self.folder, self.python = folder, python
        self.grader: Grader = grader
        template = self._template = folder / "template"
        for name in ("home", "results", "handed_in", "submitted"):
            (template / name).mkdir(parents=True)
        if grader == "otter":
            (template / "autograder.zip").write_bytes(otter_archive(solution))
            return
        (template / "nbgrader_config.py").write_text(_CONFIG)
        source = template / "source" / LAB / f"{LAB}.ipynb"
        source.parent.mkdir(parents=True)
        source.write_text(json.dumps(nbgrader_source(solution, ranks)))
        code, said = self._execute(template, ["-m", "nbgrader", "generate_assignment", LAB], 120)
        if code != 0:
            raise RuntimeError(f"nbgrader generate_assignment: {said[-MAX_SAID:]}")

    def submit(self, course: Path, student: str) -> Path:
        """The folder that `student` of the copy `course` hands in to."""
        if self.grader == "otter":
            return course / "handed_in" / student
        return course / "submitted" / student / LAB

    def copy(self, name: str) -> Path:
        """A fresh copy of the course."""
        return Path(shutil.copytree(self._template, self.folder / name, symlinks=True))

    def keep(self, course: Path) -> None:
        """Makes `course`, in which somebody was graded already, what copies are taken from."""
        shutil.rmtree(self._template)
        course.rename(self._template)

    def grade(self, course: Path, students: Sequence[str], deadline_s: float) -> Run:
        """Grades `students` one after the other, as their grader does it for a class."""
        began = time.monotonic()
        if self.grader == "nbgrader":
            code, said = self._execute(course, ["-m", "nbgrader", "autograde", LAB], deadline_s)
        else:
            # otter has no command for a class without containers: a loop, in one box.
            runs = " ; ".join(
                f'{self.python} -c "$OTTER" handed_in/{s}/{LAB}.ipynb results/{s}.json'
                for s in students
            )
            code, said = self._execute(course, runs, deadline_s)
        graded = {student: self.read(course, student) for student in students}
        return Run(graded, time.monotonic() - began, code is None, said[-MAX_SAID:])

    def read(self, course: Path, student: str) -> Graded:
        """The grade that is there now."""
        return _read_otter(course, student) if self.grader == "otter" else _read(course, student)

    def _execute(
        self, course: Path, command: str | Sequence[str], deadline_s: float
    ) -> tuple[int | None, str]:
        """Runs Python with arguments, or a line of shell, in the box; None when it was stopped."""
        inner = ["sh", "-c", command] if isinstance(command, str) else [self.python, *command]
        process = subprocess.Popen(
            [*box(course, self.python), *inner],
            env=_environment(self.python),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the box's processes end with bwrap
            said, _ = process.communicate(timeout=60)
            return None, said.decode(errors="replace")
        return process.returncode, said.decode(errors="replace")


def box(course: Path, python: str) -> list[str]:
    """The start of a command line: what follows sees `course` and little else of the machine."""
    shown = {Path(path) for path in ("/usr", "/bin", "/lib", "/lib64", "/etc", "/opt")}
    shown |= {ROOT / "lib", ROOT / "autograder", Path(sys.prefix), Path(sys.base_prefix)}
    shown |= {Path(python).parent.parent}
    command = ["bwrap", "--die-with-parent", "--unshare-all", "--dev", "/dev", "--proc", "/proc"]
    for path in sorted(path for path in shown if path.exists()):
        command += ["--ro-bind", str(path), str(path)]
    command += ["--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/tmp"]
    command += ["--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    return [*command, "--bind", str(course), INSIDE, "--chdir", INSIDE]


def find_bwrap() -> str:
    """Empty if the box can be made here, else why not."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed: apt-get install bubblewrap"
    done = subprocess.run(
        [*box(Path("/usr"), sys.executable), "true"], capture_output=True, timeout=60
    )
    return done.stderr.decode(errors="replace").strip()[:300]


def find_otter(python: str) -> str:
    """Empty if `python` can run otter-grader and our kernel, else what to do."""
    install = (
        "python -m venv OTTER && OTTER/bin/pip install -e '.[stock]', then --otter OTTER/bin/python"
    )
    if not python:
        return install
    done = subprocess.run(
        [python, "-c", "import otter.api, minidist, autograder, torch, ipykernel"],
        capture_output=True,
        timeout=120,
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it ended at once'}; {install}"


def version_of(package: str, python: str) -> str:
    """Name and version of what `python` has installed; only the name if there is none."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python or "false", "-c", code], capture_output=True, timeout=60)
    return f"{package} {done.stdout.decode().strip()}".strip()


def _environment(python: str) -> dict[str, str]:
    return {
        "COURSE_SECRET": SECRET,  # as graders are given tokens; no submission should see it
        "HOME": f"{INSIDE}/home",
        "JUPYTER_PATH": str(Path(sys.prefix) / "share" / "jupyter"),
        "LANG": "C.UTF-8",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "OTTER": _OTTER,
        "PATH": f"{Path(python).parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _read_otter(course: Path, student: str) -> Graded:
    try:
        found: dict[str, Any] = json.loads((course / "results" / f"{student}.json").read_text())
        scores = {name: float(points) for name, points in found["scores"].items()}
        return Graded(scores, json.dumps(found["said"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Graded()


def _read(course: Path, student: str) -> Graded:
    query = (
        "select b.name, g.auto_score from grade g join base_cell b on b.id = g.cell_id"
        " join submitted_notebook n on n.id = g.notebook_id"
        " join submitted_assignment s on s.id = n.assignment_id where s.student_id = ?"
    )
    scores: dict[str, float] = {}
    try:
        with closing(sqlite3.connect(course / "gradebook.db", timeout=5)) as database:
            rows = database.execute(query, (student,)).fetchall()
        scores = {str(name): float(points) for name, points in rows if points is not None}
    except (sqlite3.Error, ValueError, TypeError):
        return Graded()
    path = course / "autograded" / student / LAB / f"{LAB}.ipynb"
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        return Graded(scores, json.dumps([cell.get("outputs", []) for cell in cells]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Graded(scores)
