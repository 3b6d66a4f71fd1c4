"""Grading in jobs where there is no Slurm: the local executor, `[slurm]`, and what is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from course import LAB, statuses
from made_records import hand_in, made_record, make_course
from rich.console import Console
from slurm_cluster import heed_ctrl_c, wait_until

from autograder.__main__ import main
from autograder.batch.slurm.backend import ENDED, QUEUED, RUNNING, Refused, Seen, SlurmJobs, _read
from autograder.batch.slurm.exchange_folder import (
    BatchFolder,
    Result,
    Task,
    abandoned_batches,
    new_batch,
)
from autograder.batch.slurm.on_node import run_task
from autograder.batch.slurm.runner import JobRunner
from autograder.box.sandbox import probe_support
from autograder.course.course import Course, CourseError
from autograder.course.course_toml import NAME, OptionsError, read_options
from autograder.course.slurm_options import SlurmOptions
from autograder.criteria.limits import GIB, Limits
from autograder.records.journal import Journal
from autograder.records.progress import Progress
from autograder.records.record import Record
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Submission
from autograder.submission.intake import sha256_of

needs_sandbox = pytest.mark.skipif(not probe_support().works, reason="no sandbox")


def entries(course: Course) -> list[dict]:
    return list(Journal(course.journal_path).iter_entries())


def verdicts(course: Course) -> list[str]:
    return sorted(e["record"].student for e in entries(course) if e["kind"] == "submission")


# --- [slurm] in course.toml ----------------------------------------------------------------------


def read(tmp_path: Path, text: str) -> SlurmOptions:
    (tmp_path / NAME).write_text(f"[slurm]\n{text}\n")
    return read_options(tmp_path).slurm


def test_what_a_course_asks_slurm_for(tmp_path):
    found = read(
        tmp_path,
        'partition = "gpu"\naccount = "cs336"\nqos = "low"\ngpus = 2\nmemory = "12 GiB"\n'
        'array_parallelism = 4\nsetup = ["module load cuda"]\nexclusive = true\n',
    )
    assert found == SlurmOptions(
        partition="gpu",
        account="cs336",
        qos="low",
        gpus=2,
        memory=12 * GIB,
        array_parallelism=4,
        setup=("module load cuda",),
        exclusive=True,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('partitoin = "gpu"', r"\[slurm\]: partitoin: no such key; there are: partition, account"),
        ("partition = 3", r"partition: expected a text without spaces, got 3"),
        ('partition = "a\\nb"', r"partition: expected a text without spaces"),
        ("tries = 0", r"tries: expected a whole number from 1 up, got 0"),
        ("tries = true", r"tries: expected a whole number from 1 up, got True"),
        ('memory = "12 GB"', r"memory: expected a whole number .* or a size such as"),
        ('exclusive = "yes"', r"exclusive: expected true or false, got 'yes'"),
        ('setup = "module load cuda"', r"setup: expected a list of lines"),
        ('gpus = 1\ngres = "gpu:1"', r"expected gpus or gres, got both"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, text, expected):
    with pytest.raises(OptionsError, match=expected):
        read(tmp_path, text)


def test_a_job_ends_itself_before_slurm_does():
    limits = Limits(wall_s=900, box_memory_bytes=8 * GIB)
    for options in (SlurmOptions(), SlurmOptions(time_s=7)):
        assert options.minutes(limits) * 60 >= options.seconds(limits) + 120
    assert SlurmOptions().seconds(limits) > limits.wall_s
    assert SlurmOptions().megabytes(limits) > 8 * 1024
    assert SlurmOptions(memory=GIB).megabytes(limits) == 1024


def test_what_is_asked_for_arrives_in_the_batch_script(tmp_path, monkeypatch):
    """submitit writes the script, and `sbatch` here only keeps it."""
    (tmp_path / "bin").mkdir()
    for name, text in {
        "srun": "#!/bin/sh\n",
        "sbatch": f'#!/bin/sh\ncp "$1" {tmp_path}/script\necho Submitted batch job 7\n',
    }.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    options = SlurmOptions(
        partition="gpu",
        exclude="n7",
        reservation="exam",
        gpus=1,
        array_parallelism=2,
        setup=("module load x",),
    )
    jobs = SlurmJobs("autograder-1", tmp_path / "submitit", options).ask_for(3, Limits())
    tasks = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    assert jobs.submit(tasks, avoid={"n9", "n8"}) == ["7_0", "7_1", "7_2"]
    lines = (tmp_path / "script").read_text().splitlines()
    for line in (
        "--array=0-2%2",
        "--cpus-per-task=3",
        "--gpus-per-node=1",
        "--job-name=autograder-1",
        "--mem=11264M",
        "--no-requeue",
        "--ntasks-per-node=1",
        "--partition=gpu",
        "--reservation=exam",
        "--time=27",
        "--exclude=n7,n8,n9",
    ):
        assert f"#SBATCH {line}" in lines
    assert "module load x" in lines
    assert not any("wckey" in line for line in lines)


# --- what Slurm says -----------------------------------------------------------------------------


def test_states_of_jobs_are_told_apart():
    said = "\n".join(
        [
            "1_0|PENDING||Resources",
            "1_1|RUNNING|n1|None",
            "1_2|COMPLETING|n1|None",
            "1_3|NODE_FAIL|n2|None",
            "1_4|CANCELLED by 0|n1",
            "1_5|OUT_OF_MEMORY|n1|None",
            "1_6|PENDING||launch failed requeued held",
            "1_7|PREEMPTED|n1|None",
            "1_8|TIMEOUT|n1|",
            "",
            "garbage",
        ]
    )
    found = dict(_read(said))
    assert [found[f"1_{i}"].phase for i in range(3)] == [QUEUED, RUNNING, RUNNING]
    assert found["1_0"].note == "Resources"
    assert {found[f"1_{i}"].phase for i in range(3, 9)} == {ENDED}
    assert found["1_3"].tell() == "NODE_FAIL on n2: its node failed"
    assert not found["1_4"].may_try_again
    assert all(found[f"1_{i}"].may_try_again for i in (3, 5, 6, 7, 8))
    assert len({found[f"1_{i}"].tell() for i in range(3, 9)}) == 6
    assert len(found) == 9


def test_why_jobs_are_refused():
    away = Refused("sbatch: error: Unable to contact slurm controller (connect failure)")
    assert (away.away, away.too_many) == (True, False)
    many = Refused("sbatch: error: Job violates accounting/QOS policy (job submit limit)")
    assert (many.away, many.too_many) == (False, True)
    wrong = Refused("sbatch: error: invalid partition specified: gpuu")
    assert (wrong.away, wrong.too_many) == (False, False)


# --- the run, with a scheduler that does what a test says ----------------------------------------


class Script:
    """Stands for a scheduler: `plan` says what becomes of each further job of a student."""

    array_size = capacity = 100

    def __init__(self, plan: dict[str, list[str]]) -> None:
        self.plan, self.jobs, self.cancelled = plan, {}, []
        self.arrays: list[int] = []
        self.nodes: list[str] = []
        self.limit = 100

    def submit(self, tasks, avoid=()):
        if len(tasks) > self.limit:
            raise Refused("sbatch: error: job submit limit")
        if {"n1", "n2"} <= set(avoid):
            raise Refused("sbatch: error: Requested node configuration is not available")
        node = "n2" if "n1" in avoid else "n1"
        self.arrays.append(len(tasks))
        ids = []
        for path in tasks:
            task = Task.read(path)
            job = f"7_{len(self.jobs)}"
            fate = self.plan.get(task.student, []).pop(0) if self.plan.get(task.student) else "ok"
            self.jobs[job] = Seen(ENDED, "COMPLETED" if fate in ("ok", "infra") else fate, node)
            if fate in ("ok", "infra"):
                lost = {"*": "INFRA"} if fate == "infra" else {}
                record = made_record(task.student, lost, path=Path(task.path))
                result = Result(key=task.key, host=node, seconds=1.0, record=record)
                result.write(Path(task.result))
            ids.append(job)
            self.nodes.append(node)
        return ids

    def look(self, ids):
        return {job: self.jobs[job] for job in ids if self.jobs[job].state != "LOST"}

    def cancel(self, ids=None):
        self.cancelled.append(ids)
        return True


@pytest.fixture
def course(tmp_path):
    made = make_course(tmp_path / "course")
    (made.root / NAME).write_text("[slurm]\npoll_s = 1\nsettle_s = 1\nbackoff_s = 1\n")
    return Course(made.root)


def run(course: Course, script: Script, *students: str, monkeypatch) -> dict[str, Record]:
    monkeypatch.setattr(JobRunner, "_backend", lambda *_: script)
    # No waits: a plan is through after a few looks.
    options = dataclasses.replace(course.slurm, poll_s=0, settle_s=0, backoff_s=0)
    runner = JobRunner("local", course, Console(quiet=True))
    runner.options = options
    todo = {i: Submission(s, hand_in(course, s)) for i, s in enumerate(students)}
    found: dict[str, Record] = {}

    def done(index, record):
        assert record.student not in found
        found[record.student] = record

    runner(todo, ClassRun(course, LAB, 3, True), 2, done)
    return found


def test_lost_jobs_are_submitted_again_and_then_reported(course, monkeypatch):
    script = Script(
        {
            "kim": ["NODE_FAIL", "PREEMPTED"],
            "lea": ["LOST", "TIMEOUT", "OUT_OF_MEMORY"],
            "max": ["CANCELLED"],
            "zoe": ["infra", "FAILED"],
        }
    )
    found = run(course, script, "ada", "kim", "lea", "max", "zoe", monkeypatch=monkeypatch)
    infra = {s for s, r in found.items() if r.infra}
    assert infra == {"lea", "max"}
    assert verdicts(course) == ["ada", "kim", "zoe"]
    told = found["lea"].criteria[0].message
    assert "3 jobs came to nothing" in told
    assert "OUT_OF_MEMORY on n1" in told
    assert "somebody cancelled it" in found["max"].criteria[0].message
    assert script.arrays[0] == 5
    assert len(script.jobs) == 5 + 2 + 2 + 2


@pytest.mark.parametrize("fate", ["NODE_FAIL", "LAUNCH_FAILED", "FAILED", "infra"])
def test_a_node_where_jobs_come_to_nothing_is_avoided_while_there_are_others(
    course, monkeypatch, fate
):
    script = Script({"ada": [fate, fate]})
    records = run(course, script, "ada", monkeypatch=monkeypatch)
    assert script.nodes == ["n1", "n2", "n1"]  # both were bad, so any may be tried
    assert {c.status for c in records["ada"].criteria} == {"PASS"}


@pytest.mark.parametrize("how_many", [1, 2])
def test_one_submission_alone_takes_no_node_from_the_others(course, monkeypatch, how_many):
    """Its own fault may be what fails; with a second one it is the node's."""
    students = ["ada", "kim"][:how_many]
    script = Script({student: ["infra"] for student in students})
    script.limit = 1
    nodes = {}
    submit = script.submit

    def noting(tasks, avoid=()):
        ids = submit(tasks, avoid)
        nodes.setdefault(Task.read(tasks[0]).student, []).append(script.nodes[-1])
        return ids

    script.submit = noting
    run(course, script, *students, "lea", monkeypatch=monkeypatch)
    assert nodes["ada"] == ["n1", "n2"]
    assert nodes["lea"] == [["n1"], ["n2"]][how_many - 1]


@pytest.mark.parametrize("fate", ["PREEMPTED", "OUT_OF_MEMORY", "TIMEOUT"])
def test_a_node_is_not_blamed_for_what_is_not_its_fault(course, monkeypatch, fate):
    script = Script({"ada": [fate]})
    run(course, script, "ada", monkeypatch=monkeypatch)
    assert script.nodes == ["n1", "n1"]


def test_a_scheduler_with_a_limit_gets_smaller_arrays(course, monkeypatch):
    script = Script({})
    script.limit = 1
    assert len(run(course, script, "ada", "kim", "lea", monkeypatch=monkeypatch)) == 3
    assert script.arrays == [1, 1, 1]
    script.limit = 0
    with pytest.raises(CourseError, match=r"Slurm does not take the jobs: .*submit limit"):
        run(course, script, "max", monkeypatch=monkeypatch)
    assert script.cancelled[-1] is None


def test_a_result_of_another_grader_is_not_taken(course, monkeypatch):
    script = Script({})
    written = Result.write

    def write(self, path):
        written(dataclasses.replace(self, key="0" * 32), path)

    monkeypatch.setattr(Result, "write", write)
    found = run(course, script, "ada", monkeypatch=monkeypatch)
    assert found["ada"].infra
    assert "expected key" in found["ada"].criteria[0].message
    assert verdicts(course) == []


def test_status_shows_queued_jobs():
    progress = Progress()
    about = {"lab": LAB, "time": 1.0, "world_size": 3, "pid": 1, "born": "", "host": "", "jobs": 2}
    progress.feed([{"kind": "batch", "students": ["ada", "kim"], "known": [], **about}])
    progress.feed([{"kind": "queued", "lab": LAB, "jobs": {"ada": "7_0", "kim": "7_1"}}])
    [batch] = progress.shown()
    assert batch.count("queued") == 2
    progress.feed([{"kind": "attempt", "lab": LAB, "student": "ada", "try": 1, "time": 2.0}])
    failed = {"kind": "infra", "lab": LAB, "student": "kim", "message": "job 7_1: NODE_FAIL"}
    progress.feed([failed | {"state": "waiting"}])
    assert {s: run.state for s, run in batch.runs.items()} == {"ada": "running", "kim": "waiting"}


# --- files ---------------------------------------------------------------------------------------


def test_the_results_of_a_grader_that_was_killed_are_taken_over(course):
    submission = Submission("ada", hand_in(course, "ada"))
    class_run = ClassRun(course, LAB, 3, True)
    key = class_run.key_of(sha256_of(submission.path))
    with new_batch(course.build, "local") as folder:
        assert list(abandoned_batches(course.build, "local")) == []  # it has an owner
        record = made_record("ada", path=submission.path)
        result = Result(key=key, host="n1", seconds=1.0, record=record)
        result.write(folder.result_path(0, 1))
        lost = Result(
            key="0" * 32, host="n1", seconds=1.0, record=made_record("kim", {"*": "INFRA"})
        )
        lost.write(folder.result_path(1, 1))
        failed = Result(key="1" * 32, host="n1", seconds=1.0, failure="over its time")
        failed.write(folder.result_path(2, 1))
        folder.result_path(0, 1).with_suffix(".ipynb").write_bytes(submission.path.read_bytes())
    assert list(abandoned_batches(course.build, "slurm")) == []  # not theirs
    found = {}
    runner = JobRunner("local", course, Console(quiet=True))
    runner({0: submission}, class_run, 1, found.__setitem__)
    assert found[0] == record
    assert verdicts(course) == ["ada"]
    assert not folder.path.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"key": "a"}', '{"key": 1, "record": {}, "x": 2}'])
def test_what_is_not_a_result_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "0001.1.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected"):
        Result.read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "../../journal"}, "result.key: expected letters and digits"),
        ({"record": made_record("ada").to_json() | {"lab": "../.."}}, "record.lab: expected a lab"),
        ({"entries": ["x"]}, r"result.entries\[0\]: expected an object"),
        ({"entries": [{"kind": "submission", "key": "0"}]}, r"got 'submission'"),
        ({"entries": [{"kind": "verdict", "key": "1"}]}, r"expected .* of 0, got 'verdict'"),
        ({"seconds": float("nan")}, "result.seconds: expected a number"),
    ],
)
def test_a_result_can_harm_no_other_submission(tmp_path, changes, message):
    """A job is outside the box, but on a machine that runs submissions."""
    path = tmp_path / "0001.1.json"
    Result(key="0", host="n1", seconds=1.0, record=made_record("ada")).write(path)
    assert Result.read(path).record == made_record("ada")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        Result.read(path)


# --- the local executor --------------------------------------------------------------------------


@needs_sandbox
@pytest.mark.slow
def test_a_class_in_local_jobs(course, monkeypatch, tmp_path):
    """A notebook, and a file that is none; then nothing is left to do."""
    monkeypatch.setenv("AUTOGRADER_COURSE", str(course.root))
    with (course.root / NAME).open("a") as file:
        file.write(f"[limits.{LAB}]\nwall_s = 4\n")  # checks after that are NOT_RUN
    hand_in(course, "ada")
    (course.root / "handed_in" / "eve").mkdir()
    (course.root / "handed_in" / "eve" / f"{LAB}.ipynb").write_text("{}")
    grade = [
        "grade",
        str(course.root / "handed_in"),
        "--lab",
        LAB,
        "--executor",
        "local",
        "--no-gradebook",
        "--json",
        str(tmp_path / "records.json"),
    ]
    assert main(grade) == 0
    first = json.loads((tmp_path / "records.json").read_text())
    ada, eve = first
    assert set(statuses(ada).values()) <= {"STUDENT_ERROR", "NOT_RUN", "WRONG"}
    assert ada["sandboxed"]
    assert set(statuses(eve).values()) == {"INVALID"}
    assert verdicts(course) == ["ada", "eve"]
    assert list((course.build / "jobs").iterdir()) == []
    attempts = [e for e in entries(course) if e["kind"] == "attempt"]
    assert main(grade) == 0
    assert json.loads((tmp_path / "records.json").read_text()) == first
    assert [e for e in entries(course) if e["kind"] == "attempt"] == attempts


def task(course: Course, folder: BatchFolder, **changes) -> Path:
    path = hand_in(course, "ada")
    sha256 = sha256_of(path)
    made = Task(
        root=str(course.root),
        lab=LAB,
        world_size=3,
        student="ada",
        path=str(path),
        sha256=sha256,
        key=ClassRun(course, LAB, 3, True).key_of(sha256),
        trusted=True,
        time_s=300,
        result=str(folder.result_path(0, 1)),
    )
    where = folder.task_path(0, 1)
    dataclasses.replace(made, **changes).write(where)
    return where


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"time_s": 0}, "over its time of 0 s"),
        ({"trusted": False}, "no sandbox on this node: bwrap is not installed"),
        ({"path": "/not/here.ipynb"}, "/not/here.ipynb is not the file that was to be graded"),
    ],
)
def test_a_job_that_cannot_grade_says_why(course, changes, expected, monkeypatch):
    """A file that the node does not see would otherwise be an invalid notebook, and a zero."""
    monkeypatch.setenv("PATH", "/nowhere")
    with new_batch(course.build, "local") as folder:
        assert run_task(str(task(course, folder, **changes))) is None
        result = Result.read(folder.result_path(0, 1))
    assert expected in result.failure
    assert result.record is None
    assert not course.journal_path.exists()


@pytest.mark.slow
def test_ctrl_c_ends_the_jobs(course):
    hand_in(course, "ada")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "autograder",
            "grade",
            str(course.root / "handed_in"),
            "--lab",
            LAB,
            "--executor",
            "local",
            "--no-gradebook",
            "--trusted",
        ],
        cwd=course.root,
        env=os.environ | {"AUTOGRADER_COURSE": str(course.root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    try:
        wait_until(
            lambda: any(e["kind"] == "queued" for e in entries(course)), 200, "no job is submitted"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate(timeout=20)
    # That no process runs on, conftest sees.
    assert verdicts(course) == []
