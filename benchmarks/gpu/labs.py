"""The labs' solutions, graded with the autograder as a student's notebook is, where GPUs are seen.

A lab's ranks use GPUs where there is one for each of them, and gloo on the CPU otherwise: that a
GPU is there must not cost a point either way.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from gpu.device import num_gpus
from gpu.recorder import NotHereError, Recorder
from gpu.rows import ROOT
from gpu.sizes import Sizes

LABS = (
    "lab1_ddp",
    "lab2_accumulation",
    "lab3_fsdp",
    "lab4_amp",
    "lab5_multinode",
    "lab6_profiling",
)
GOAL_S = 60.0
LIMIT_S = 180.0  # of one lab
# What grading imports that torch does not bring.
PACKAGES = (
    "ipykernel",
    "jupyter_client",
    "nbclient",
    "nbformat",
    "nbgrader",
    "papermill",
    "rich",
    "zmq",
)
# Grades without a sandbox, where there might be one.
GRADE_OPENLY = """
import json, sys
from pathlib import Path
from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.submission.find import Submission
from autograder.submission.attempt import grade
from autograder.submission.class_run import ClassRun
root, lab, notebook, out, ranks = sys.argv[1:]
ranks = int(ranks) or get_lab(lab).grading_world_size
class_run = ClassRun(Course(Path(root)), lab, ranks, sandboxed=False)
record = grade(Submission("solution", Path(notebook)), class_run)
Path(out).write_text(json.dumps([record.to_json()]))
"""


def measure(recorder: Recorder, sizes: Sizes, labs: tuple[str, ...] = LABS) -> None:
    """All rows of the part."""
    gpus = num_gpus() if sizes.device == "cuda" else 0
    with tempfile.TemporaryDirectory(prefix="labs-") as folder:
        course = Path(folder)
        for lab in labs:
            measured = functools.partial(grade, recorder, course, lab, gpus)
            # Cut off in the middle it would look like a grader that hangs.
            recorder.measure(lab, measured, needs_s=GOAL_S / 2)


def grade(recorder: Recorder, course: Path, lab: str, gpus: int) -> None:
    """Grade one lab's solution; rows: does it get full marks, and in what time.

    Raises:
        NotHereError: packages that grading needs are not installed.
        RuntimeError: the grader failed.
        TimeoutError: it took too long.
    """
    require_packages()
    make_course(course)
    out = course / f"{lab}.json"
    start_s = time.perf_counter()
    # Ours, and read by many: it may run where there is no sandbox.
    command = [
        "-m",
        "autograder",
        "grade",
        str(solution_of(lab)),
        "--lab",
        lab,
        "--trusted",
        "--no-gradebook",
        "--json",
        str(out),
    ]
    if not is_installed():  # a sandbox would not have what PYTHONPATH leads to
        command = openly(course, lab, out)
    run_python(course, command, min(LIMIT_S, recorder.left_s - 5))
    seconds = time.perf_counter() - start_s
    record = json.loads(out.read_text("utf-8"))[0]
    report(recorder, lab, record, seconds, gpus)


def openly(course: Path, lab: str, out: Path, ranks: int = 0) -> list[str]:
    """Arguments of a Python that grades the lab's solution without a sandbox.

    Args:
        ranks: 0 for as many as a class is graded on.
    """
    return ["-c", GRADE_OPENLY, str(course), lab, str(solution_of(lab)), str(out), str(ranks)]


def solution_of(lab: str) -> Path:
    """The notebook."""
    return ROOT / "solutions" / lab / f"{lab}.ipynb"


def report(recorder: Recorder, lab: str, record: dict[str, Any], seconds: float, gpus: int) -> None:
    """Rows of a graded lab.

    Args:
        record: the grader's.
        seconds: from starting the grader to its end.
    """
    statuses = {each["name"]: each["status"] for each in record["criteria"]}
    # What a GPU is needed for and is not here does not count, for a student either.
    lost = {name: status for name, status in statuses.items() if status not in ("PASS", "BLOCKED")}
    detail = {
        "ranks": record["world_size"],
        "gpus": gpus,
        "a_gpu_per_rank": gpus >= record["world_size"],
        "sandboxed": record["sandboxed"],
        "criteria": len(statuses),
        "blocked": [name for name, status in statuses.items() if status == "BLOCKED"],
    }
    full = f"{lab}: the solution gets full marks"
    recorder.check(full, not lost, f"it loses {lost}", **detail)
    recorder.figure(
        f"{lab}: the grader, from its start to its end",
        seconds,
        "s",
        at_most=GOAL_S,
        submission_s=record["seconds"],
        **detail,
    )


def require_packages() -> None:
    """
    Raises:
        NotHereError: it names what is not installed.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHereError(f"not installed here: {', '.join(missing)}")


def make_course(folder: Path) -> None:
    """A course of its own, so that no record of the course that this is comes in touch with it."""
    if (folder / "labs").is_dir():
        return
    for name in ("nbgrader_config.py", "course.toml"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "labs", folder / "labs")
    run_python(folder, ["-m", "autograder", "init"], 60.0)


def is_installed() -> bool:
    """Whether this Python has the course with its kernels, as `pip install` leaves them."""
    return Path(sys.prefix, "share", "jupyter", "kernels", "torchrun-2").is_dir()


def python_of(course: Path) -> Path:
    """A Python that has the course installed: this one, or one of its own in the course's folder.

    What only PYTHONPATH names does not reach a submission's ranks, which get a small environment.
    """
    if is_installed():
        return Path(sys.executable)
    folder = course / "python"
    if not folder.exists():
        venv.create(folder, symlinks=True)
        [site] = folder.glob("lib/python*/site-packages")
        here = [path for path in sys.path if Path(path).is_dir() and Path(path).is_absolute()]
        (site / "here.pth").write_text("\n".join([*here, str(ROOT / "lib"), str(ROOT)]) + "\n")
        kernels = ROOT / "lib" / "minidist" / "kernel" / "kernelspecs"
        shutil.copytree(kernels, folder / "share" / "jupyter" / "kernels")
    return folder / "bin" / "python"


def run_python(course: Path, arguments: list[str], timeout_s: float) -> None:
    """Runs Python in the course.

    Raises:
        RuntimeError: it failed; with the end of what it said.
        TimeoutError: it took longer than `timeout_s`.
    """
    command = [str(python_of(course)), *arguments]
    env = dict(os.environ) | {"AUTOGRADER_COURSE": str(course)}
    process = subprocess.Popen(
        command,
        cwd=course,
        env=env,
        stdin=subprocess.DEVNULL,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, timeout_s))
    except subprocess.TimeoutExpired:
        # Asked first: it ends its ranks, and what a kill would leave in the sandbox's folders.
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise TimeoutError(f"the autograder took over {timeout_s:.0f} s") from None
    if process.returncode:
        last = " | ".join(said.strip().splitlines()[-3:])
        raise RuntimeError(f"the autograder ended with {process.returncode}: {last}")
