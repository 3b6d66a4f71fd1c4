"""Which GPUs submissions have that are graded at once."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from made_records import hand_in, keep, made_record, make_course, stub_grading

from autograder.batch import grade_class, pool
from autograder.batch.grade_class import default_jobs
from autograder.batch.slurm import backend as slurm_jobs
from autograder.box.gpus import ALL, VISIBLE, divide, most_jobs, num_gpus, visible_gpus
from autograder.criteria import get_lab
from autograder.submission.find import Submission
from autograder.submission.without_run import known_record


@pytest.fixture
def machine(monkeypatch):
    """Sets how many GPUs torch sees, and cores there are."""

    def has(gpus: int, cores: int = 64, visible: str | None = None) -> None:
        monkeypatch.setattr("autograder.box.gpus._count", lambda: gpus)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        for name in (VISIBLE, ALL):
            monkeypatch.delenv(name, raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return has


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (0, None, []),
        (0, "", []),
        (0, "-1", []),
        (0, "3", []),
        (2, None, ["0", "1"]),
        (2, "5, 3", ["5", "3"]),
        (1, "GPU-abc,no-such", ["GPU-abc"]),
    ],
)
def test_gpus_have_the_names_that_they_were_given(machine, gpus, visible, expected):
    machine(gpus, visible=visible)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("gpus", "jobs", "expected"),
    [
        (0, 3, [None] * 3),
        (1, 2, ["0", "0"]),
        (3, 2, ["0,1", "2"]),
        (4, 4, ["0", "1", "2", "3"]),
        (8, 3, ["0,1,2", "3,4,5", "6,7"]),
        (3, 5, ["0", "1", "2", "0", "1"]),
    ],
)
def test_each_job_has_its_own(gpus, jobs, expected):
    shares = divide([str(n) for n in range(gpus)], jobs)
    assert [share.get("CUDA_VISIBLE_DEVICES") for share in shares] == expected
    assert {share.get("AUTOGRADER_NUM_GPUS") for share in shares} == {str(gpus) if gpus else None}


@pytest.mark.parametrize(
    ("gpus", "cores", "lab", "expected"),
    [
        (0, 64, "lab4_amp", 21),
        (0, 1, "lab4_amp", 2),
        (1, 64, "lab4_amp", 1),  # its speed is measured on a GPU that ranks share
        (2, 64, "lab4_amp", 2),
        (1, 64, "lab1_ddp", 21),  # on the CPU: there is no GPU for every rank
        (3, 64, "lab1_ddp", 1),
        (8, 64, "lab1_ddp", 2),
        (64, 6, "lab1_ddp", 2),
        (1, 64, None, 1),
    ],
)
def test_as_many_at_once_as_cores_and_gpus_allow(machine, gpus, cores, lab, expected):
    machine(gpus, cores)
    assert default_jobs(3, get_lab(lab) if lab else None) == expected
    if expected == most_jobs(gpus, 3):  # then nobody shares one, or falls back to the CPU
        shares = [s["CUDA_VISIBLE_DEVICES"] for s in divide(visible_gpus(), expected)]
        names = [name for share in shares for name in share.split(",")]
        assert len(names) == len(set(names))
        assert gpus < 3 or all(len(share.split(",")) >= 3 for share in shares)


def seen(folder: str) -> tuple[int, str | None, int]:
    """What a worker sees, once there are two of them."""
    open(f"{folder}/{os.getpid()}", "w").close()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.05)
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), num_gpus()


def test_workers_take_different_places(tmp_path):
    results = {}
    todo = dict.fromkeys(range(4), str(tmp_path))
    pool.run_pool(seen, todo, divide(["4", "7", "9"], 2), results.__setitem__)
    assert {gpus for _, gpus, _ in results.values()} == {"4,7", "9"}
    assert len({(pid, gpus) for pid, gpus, _ in results.values()}) == 2
    assert {count for *_, count in results.values()} == {3}


def test_the_pool_is_given_what_the_machine_has(machine, monkeypatch, tmp_path):
    machine(4)
    given = []
    monkeypatch.setattr(pool, "begin", lambda *_: None)
    monkeypatch.setattr(pool, "run_pool", lambda work, todo, places, done: given.append(places))
    grade_class._run_pool({}, stub_grading.class_run(make_course(tmp_path)), 2, print)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in given[0]] == ["0,1", "2,3"]


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["", "in the background"])
def ctrl_c(request):
    """What a program does on Ctrl-C; the shell has those in the background ignore it."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_jobs_without_slurm_have_their_own_too(machine, monkeypatch, tmp_path):
    def show(task: str) -> None:  # nested, so that submitit's process need not import this file
        import os
        import time
        from pathlib import Path

        path = Path(task)
        names = ("CUDA_VISIBLE_DEVICES", "AUTOGRADER_NUM_GPUS")
        path.with_suffix(".part").write_text(" ".join(os.environ[name] for name in names))
        path.with_suffix(".part").rename(path)
        while not path.with_name("end").exists():
            time.sleep(0.05)

    def seen(number: int) -> str:
        while not (tmp_path / str(number)).exists():
            time.sleep(0.05)
        return (tmp_path / str(number)).read_text()

    machine(3)
    monkeypatch.setattr(slurm_jobs, "run_task", show)
    monkeypatch.setenv(ALL, "")  # the next line sets it; so it is as before afterwards
    backend = slurm_jobs.LocalJobs(tmp_path / "jobs", 2, 60)
    try:
        ids = [backend.submit([tmp_path / str(number)])[0] for number in range(2)]
        assert [seen(0), seen(1)] == ["0,1 3", "2 3"]
        assert backend.cancel(ids[1:])
        backend.submit([tmp_path / "2"])
        assert seen(2) == "2 3"
        (tmp_path / "end").touch()
    finally:
        assert backend.cancel()


def test_what_was_blocked_is_graded_again_where_there_are_more(machine, monkeypatch, tmp_path):
    """Not each time anew because a worker has only some of them."""
    course = make_course(tmp_path)
    class_run = replace(stub_grading.class_run(course), lab_name="lab1_ddp")
    submission = Submission("ada", hand_in(course, "ada"))
    record = made_record("ada", {"setup": "BLOCKED"}, path=submission.path)
    keep(class_run, submission, replace(record, num_gpus=2))
    machine(2)
    assert known_record(submission, class_run) is not None
    machine(1)
    monkeypatch.setenv("AUTOGRADER_NUM_GPUS", "2")
    assert known_record(submission, class_run) is not None
    monkeypatch.setenv("AUTOGRADER_NUM_GPUS", "3")
    assert known_record(submission, class_run) is None
