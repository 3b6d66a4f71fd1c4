"""Runs on a node: grades one submission, in the job that was submitted for it.

    run_task("tasks/0007.1.json")     the job: keeps the time and writes the result
    python -m autograder.batch.slurm.on_node TASK FOLDER
                                      its child: grades, in a folder of the node's own disk

There are two processes, so that the job writes a result even if the child hangs, is killed or runs
out of memory. A job that is told to end (cancelled, preempted) writes no result, because only Slurm
knows the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from autograder.batch.slurm.exchange_folder import COPIED, Result, Task
from autograder.files import write_whole
from autograder.signals import handling
from autograder.submission.scratch import remove_abandoned, scratch_folder
from minidist.processes.tree import describe_exit

# Only the child imports torch and nbgrader: it may be killed, which frees its memory at once.

STOP_WITHIN_S = 15.0  # box and kernel normally end much sooner
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_ANSWER, _EXECUTED = "answer.json", "executed.ipynb"
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)


def run_task(path: str) -> None:
    """Grades the task's submission and writes the result file.

    Returns nothing, so that submitit has no return value to pickle.

    Raises:
        SystemExit: the job was told to end.
    """
    task = Task.read(Path(path))
    began = time.monotonic()
    remove_abandoned()  # earlier jobs that were killed on this node could not clean up
    told: list[int] = []
    # submitit's own handlers would requeue the job.
    with handling(_ENDING, lambda which, _: told.append(which)), scratch_folder() as folder:
        failure = _grade_in_child(task, path, folder, told)
        if failure is None:
            raise SystemExit(128 + signal.SIGTERM)
        result = _failed(task, failure) if failure else Result.read(folder / _ANSWER)
        if (folder / _EXECUTED).exists() and not result.failure:
            notebook = Path(task.result).with_suffix(".ipynb")
            write_whole(notebook, (folder / _EXECUTED).read_bytes())
        seconds = round(time.monotonic() - began, 2)
        replace(result, seconds=seconds).write(Path(task.result))


def _failed(task: Task, why: str) -> Result:
    return Result(key=task.key, host=_node(), seconds=0.0, failure=why)


def _node() -> str:
    """This node's name in Slurm, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _grade_in_child(task: Task, path: str, folder: Path, told: list[int]) -> str | None:
    """Runs the child; returns "" if it left an answer, else why not; None if the job must end."""
    ends_at = time.monotonic() + task.time_s
    child = subprocess.Popen(
        [sys.executable, "-m", "autograder.batch.slurm.on_node", path, str(folder)],
        stdin=subprocess.PIPE,  # the system closes it when this process dies; see _end_with_job
        env=os.environ | {"AUTOGRADER_COURSE": task.root},
    )
    try:
        while not told and time.monotonic() < ends_at:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout=0.5)
                if told or code in _STOPPED:  # Slurm sends a signal to all processes of a job
                    return None
                there = (folder / _ANSWER).exists()
                return "" if code == 0 and there else f"the grader ended with {describe_exit(code)}"
    finally:
        _stop(child)
    if told:
        return None
    return (
        f"the job was over its time of {task.time_s} s; `time_s` of [slurm] in course.toml, or the "
        f"lab's wall_s, sets it"
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    for end in (child.terminate, child.kill):
        if child.poll() is None:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=STOP_WITHIN_S)
    if child.stdin is not None:
        child.stdin.close()


# --- the child ----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Grades, and writes an answer to the folder: a record, or the reason why there is none."""
    path, folder = map(Path, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job's process says when to end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_end_with_job, daemon=True).start()
    _grade(Task.read(path), folder).write(folder / _ANSWER)
    return 0


def _end_with_job() -> None:
    """Ends this process when the job's process ends, which closes our standard input.

    Nobody writes to our standard input.
    """
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _grade(task: Task, folder: Path) -> Result:
    from autograder.box.sandbox import probe_support
    from autograder.course.course import Course, CourseError
    from autograder.records.journal import Journal
    from autograder.submission.attempt import grade
    from autograder.submission.class_run import ClassRun
    from autograder.submission.find import Submission
    from autograder.submission.intake import sha256_of

    @dataclass(frozen=True)
    class JobCourse(Course):
        """The course, with a build folder that belongs to this job alone.

        So the course's journal has one writer, and grading does not wait for a slow shared file
        system.
        """

        folder: Path

        @property
        def build(self) -> Path:
            return self.folder

        @property
        def key_path(self) -> Path:
            return Course(self.root).key_path

    host = _node()
    course = JobCourse(Path(task.root), folder / "build")
    support = probe_support()
    if not support.works and not task.trusted:
        return _failed(task, f"{host}: no sandbox on this node: {support.reason}")
    class_run = ClassRun(course, task.lab, task.world_size, sandboxed=support.works)
    try:
        submission = Submission(task.student, Path(task.path))
        found = sha256_of(submission.path)
        key = class_run.key_of(found)
    except CourseError as error:
        return _failed(task, f"{host}: {error}")
    if found != task.sha256:
        return _failed(
            task,
            f"{host}: {task.path} is not the file that was to be graded: it has changed since, or "
            "this node does not see it; expected a folder that all nodes share",
        )
    if key != task.key:
        return _failed(
            task,
            f"{host}: this node has a different version of grader, lab, Python or torch than "
            f"the login node: expected {task.key}, got {key}",
        )
    record = grade(submission, class_run)
    entries = [e for e in Journal(course.journal_path).iter_entries() if e["kind"] in COPIED]
    executed = class_run.executed_path(key)
    if executed.is_file():
        shutil.move(executed, folder / _EXECUTED)
    return Result(key=key, host=host, seconds=0.0, record=record, entries=tuple(entries))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
