"""A class graded on a real Slurm that these tests start: what runs, what is lost, what is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import nbformat
import pytest
from course import LAB, ROOT, TestCourse, statuses
from slurm_cluster import SlurmCluster, heed_ctrl_c, job_states, running, wait_until, why_not

from autograder.batch.slurm.backend import SlurmJobs
from autograder.box.sandbox import probe_support
from autograder.course.course import Course
from autograder.course.slurm_options import SlurmOptions
from autograder.proof.zoo import load_zoo
from autograder.records.journal import Journal
from minidist.processes.ports import free_port

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(not probe_support().works, reason="no sandbox"),
]
MASTER = ROOT / "labs" / LAB / f"{LAB}.ipynb"
# Checks that are not reached in this time are NOT_RUN, which is enough to tell who was graded.
SHORT = f"[limits.{LAB}]\nwall_s = 8\n"
SLURM = "[slurm]\npoll_s = 1\nsettle_s = 3\nbackoff_s = 2\n"
OPTIONS = SHORT + SLURM
WITHIN_S = 600
STATES = "autograder-states"  # the name of jobs that are no grader's
HONEST = {"STUDENT_ERROR", "NOT_RUN", "WRONG"}  # what a starter that was graded ends with


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(SlurmCluster(tmp_path_factory.mktemp("slurm") / "c")) as made:
        yield made


@pytest.fixture
def course(tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    cluster.say("scancel", "--user=root", check=False)  # what a test that failed has left
    cluster.wait_idle()
    made = TestCourse.make(tmp_path / "course")
    (made.root / "course.toml").write_text(OPTIONS)
    return made


def hand_in(course: TestCourse, *students: str) -> None:
    """Untouched labs, each a file of its own."""
    for student in students:
        course.submit(student, MASTER.read_text().replace("# Lab 1", f"# {student}", 1).encode())


class Grading:
    """`autograder grade`, or `watch`, with Slurm, while a test does something to the cluster."""

    def __init__(self, course: TestCourse, cluster: SlurmCluster, command: str = "grade") -> None:
        self.course, self.cluster = course, cluster
        self.log = course.root / "said.txt"
        words = [command, str(course.root / "handed_in"), "--lab", LAB, "--executor", "slurm"]
        if command == "grade":
            words += ["--no-gradebook", "--json", str(course.root / "records.json")]
        else:
            words += ["--settle", "0.1", "--every", "0.5"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "autograder", *words],
                cwd=course.root,
                env=os.environ | {"AUTOGRADER_COURSE": str(course.root)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=heed_ctrl_c,
            )

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_running(self, number: int) -> dict[str, tuple[str, str]]:
        """Waits until so many submissions run; student -> (job, node)."""
        seen: dict[str, tuple[str, str]] = {}

        def enough() -> bool:
            seen.clear()
            seen.update(self._running())
            return self.process.poll() is not None or len(seen) >= number

        wait_until(
            enough,
            240,
            lambda: f"not {number} jobs run: {self.cluster.say('squeue')}{self.said}",
        )
        assert self.process.poll() is None, self.said
        return seen

    def _running(self) -> dict[str, tuple[str, str]]:
        said = self.cluster.say("squeue", "-h", "-r", "--states=RUNNING", "-o", "%i|%N")
        nodes = dict(line.split("|") for line in said.split())
        found = {}
        for entry in entries(self.course):
            if entry["kind"] == "queued":
                found |= {s: (j, nodes[j]) for s, j in entry["jobs"].items() if j in nodes}
        return found

    def wait(self, code: int) -> dict[str, dict]:
        """Waits for the end; student -> record."""
        ended = self.process.wait(timeout=WITHIN_S)
        assert ended == code, self.said
        path = self.course.root / "records.json"
        records = json.loads(path.read_text()) if path.exists() else []
        return {record["student"]: record for record in records}


def entries(course: TestCourse) -> list[dict]:
    return list(Journal(Course(course.root).journal_path).iter_entries())


def verdicts(course: TestCourse) -> Counter[str]:
    """How many finished gradings each student has."""
    return Counter(e["record"].student for e in entries(course) if e["kind"] == "submission")


def failures(course: TestCourse) -> dict[str, list[str]]:
    """student -> what the journal says of his lost jobs."""
    found: dict[str, list[str]] = {}
    for entry in entries(course):
        if entry["kind"] == "infra":
            found.setdefault(entry["student"], []).append(entry["message"])
    return found


def told_states(course: TestCourse) -> set[str]:
    """The states that `autograder status` tells of the class."""
    said = course.run("-m", "autograder", "status", "--json").stdout
    return {run["state"] for run in json.loads(said)[0]["students"]}


def all_jobs(cluster: SlurmCluster) -> set[str]:
    """Every job that there has been."""
    return set(cluster.say("squeue", "-h", "-r", "--states=all", "-o", "%i").split())


def was_graded(record: dict) -> bool:
    return record["sandboxed"] and set(statuses(record).values()) <= HONEST


@pytest.mark.slow
def test_a_class_on_two_nodes_gets_the_records_of_the_pool(course, cluster, tmp_path):
    (course.root / "course.toml").write_text(SLURM)
    hand_in(course, "ada", "kim")
    [reference] = load_zoo(LAB, "reference")
    solved = {cell.id: cell.source for cell in reference.notebook.cells}
    partly = json.loads(MASTER.read_text())
    for cell in partly["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("solution") and len(solved[cell["id"]]) < 700:
            cell["source"] = solved[cell["id"]]
    course.submit("zoe", json.dumps(partly).encode())
    course.submit("eve", b'{"no": "notebook"}')
    pool = TestCourse(shutil.copytree(course.root, tmp_path / "pool"), LAB)  # with the same key

    with Grading(course, cluster) as grading:
        running = grading.wait_running(2)
        assert {node for _, node in running.values()} == {"n1", "n2"}
        # The grader asks Slurm every second, so it may know of a running job later than this test.
        wait_until(
            lambda: {"running", "queued"} <= told_states(course),
            60,
            lambda: f"{told_states(course)}: {grading.said}",
        )
        records = grading.wait(0)

    expected = pool.grade(str(pool.root / "handed_in"), "--no-gradebook")
    assert set(records) == set(expected) == {"ada", "eve", "kim", "zoe"}
    for student, record in records.items():
        assert statuses(record) == statuses(expected[student]), student
        for name in ("score", "max_score", "sandboxed", "world_size"):
            assert record[name] == expected[student][name], (student, name)
    assert records["zoe"]["score"] > 0
    assert verdicts(course) == dict.fromkeys(records, 1)
    executed = [path.name for path in (course.root / "build" / "executed" / LAB).iterdir()]
    assert sorted(executed) == sorted(
        path.name for path in (pool.root / "build" / "executed" / LAB).iterdir()
    )
    assert list((course.root / "build" / "jobs").iterdir()) == []
    # Nothing is left to do, and no job is submitted for it.
    before = all_jobs(cluster)
    assert course.grade(str(course.root / "handed_in"), "--executor", "slurm") == records
    assert all_jobs(cluster) == before


@pytest.mark.slow
def test_more_gpus_than_a_node_has_are_refused(course, cluster):
    (course.root / "course.toml").write_text(OPTIONS + "gpus = 3\n")
    hand_in(course, "ann")
    with Grading(course, cluster) as grading:
        grading.wait(2)
        assert "Requested node configuration is not available" in grading.said


@pytest.mark.slow
def test_a_cancelled_job_is_told_and_graded_the_next_time(course, cluster):
    hand_in(course, "ada", "kim")
    with Grading(course, cluster) as grading:
        job, _ = grading.wait_running(2)["ada"]
        cluster.say("scancel", job)
        records = grading.wait(1)
    [criterion, *_] = records["ada"]["criteria"]
    assert set(statuses(records["ada"]).values()) == {"INFRA"}
    assert f"job {job}: CANCELLED" in criterion["message"]
    assert "somebody cancelled it" in criterion["message"]
    assert "ada was not graded" in grading.said
    assert was_graded(records["kim"])
    assert verdicts(course) == {"kim": 1}
    records = course.grade(str(course.root / "handed_in"), "--executor", "slurm", "--no-gradebook")
    assert was_graded(records["ada"])
    assert verdicts(course) == {"ada": 1, "kim": 1}


@pytest.mark.slow
def test_a_node_that_dies_costs_nobody_a_point(course, cluster):
    hand_in(course, "ada", "kim")
    with Grading(course, cluster) as grading:
        running = grading.wait_running(2)
        [student] = [student for student, (_, node) in running.items() if node == "n2"]
        cluster.kill_node("n2")
        try:
            cluster.say("scontrol", "update", "nodename=n2", "state=down", "reason=test")
            records = grading.wait(0)
        finally:
            cluster.start_node("n2")
            cluster.say("scontrol", "update", "nodename=n2", "state=resume", check=False)
            cluster.wait_idle()
    [told] = failures(course)[student]
    assert "NODE_FAIL" in told
    assert "its node failed" in told
    assert all(was_graded(record) for record in records.values())
    assert verdicts(course) == {"ada": 1, "kim": 1}


@pytest.mark.slow
def test_a_controller_that_is_away_for_a_while_stops_nothing(course, cluster):
    hand_in(course, "ada", "kim")
    with Grading(course, cluster) as grading:
        grading.wait_running(2)
        cluster.stop("slurmctld")
        time.sleep(5)  # several questions have no answer
        assert grading.process.poll() in (None, 0), grading.said  # results are files
        cluster.start_controller()
        records = grading.wait(0)
    assert all(was_graded(record) for record in records.values())
    assert failures(course) == {}
    assert verdicts(course) == {"ada": 1, "kim": 1}


@pytest.mark.slow
def test_a_job_that_has_to_make_room_is_submitted_again(course, cluster):
    hand_in(course, "ada")
    with Grading(course, cluster) as grading:
        grading.wait_running(1)
        cluster.say(
            "sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"
        )
        records = grading.wait(0)
    [told] = failures(course)["ada"]
    assert "PREEMPTED" in told
    assert was_graded(records["ada"])
    assert verdicts(course) == {"ada": 1}


@pytest.mark.slow
def test_a_job_over_its_time_says_so_itself(course, cluster):
    hand_in(course, "ada")
    (course.root / "course.toml").write_text(f"{OPTIONS}time_s = 3\ntries = 2\n")
    with Grading(course, cluster) as grading:
        records = grading.wait(1)
    assert set(statuses(records["ada"]).values()) == {"INFRA"}
    assert "2 jobs came to nothing" in records["ada"]["criteria"][0]["message"]
    assert all("over its time of 3 s" in told for told in failures(course)["ada"])
    assert len(failures(course)["ada"]) == 2
    assert verdicts(course) == {}
    (course.root / "course.toml").write_text(OPTIONS)
    records = course.grade(str(course.root / "handed_in"), "--executor", "slurm", "--no-gradebook")
    assert was_graded(records["ada"])


@pytest.fixture(scope="module")
def ends(cluster):
    """Jobs by the state that they come to; they end while the test before looks at something else.

    TIMEOUT takes over a minute, as Slurm counts time limits by the minute.
    """
    ids = {}
    for name, command, more in [
        ("COMPLETED", "true", []),
        ("FAILED", "exit 3", []),
        ("TIMEOUT", "sleep 600", []),
        ("CANCELLED", "sleep 600", []),
        ("PENDING", "true", ["--begin=now+1hour"]),
        ("RUNNING", "sleep 7200", ["--time=120"]),
    ]:
        ids[name] = cluster.submit(command, f"--job-name={STATES}", "--time=1", "-w", "n2", *more)
    cluster.say("scancel", ids["CANCELLED"])
    return ids


@pytest.mark.timeout(7200)  # of a thousand; of nine, WITHIN_S is the limit
@pytest.mark.slow
@pytest.mark.parametrize(
    ("students", "within_s"), [(9, WITHIN_S), pytest.param(1000, 3600, marks=pytest.mark.nightly)]
)
def test_tiny_jobs_are_one_array_and_few_questions(
    course, cluster, request, tmp_path, monkeypatch, students, within_s
):
    """What the grader calls is counted on its way to the real command; the test calls others.

    Each job asks for one of the nodes' made-up GPUs, and says which one it got.
    """
    request.getfixturevalue("ends")  # not as an argument: `course` waits for nodes without jobs
    given = tmp_path / "given"
    (course.root / "course.toml").write_text(
        "[slurm]\npoll_s = 4\nsettle_s = 3\narray_parallelism = 3\ncpus = 1\ngpus = 1\n"
        f"setup = ['echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES >> {given}']\n"
    )
    for number in range(students):
        course.submit(f"s{number:03d}", json.dumps({"not a notebook": number}).encode())
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "sbatch", "sacct", "scontrol"):
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\necho {name} >> {calls}\nexec {shutil.which(name)} "$@"\n')
        shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    began = time.monotonic()
    with Grading(course, cluster) as grading:
        most = 0
        while grading.process.poll() is None:
            assert time.monotonic() - began < within_s, grading.said
            said = cluster.say("squeue", "-h", "-r", "--states=RUNNING", "-o", "%j").split()
            most = max(most, sum(name != STATES for name in said))
            time.sleep(1)
        records = grading.wait(0)
    seconds = time.monotonic() - began
    asked = Counter(calls.read_text().split())
    assert len(records) == students
    assert {status for r in records.values() for status in statuses(r).values()} == {"INVALID"}
    assert set(verdicts(course).values()) == {1}
    assert 1 < most <= 3
    assert asked["sbatch"] == 1
    assert 2 <= asked["squeue"] <= seconds / 4 + 2
    assert asked["scontrol"] == 1
    gpus = Counter(given.read_text().splitlines())
    assert gpus.total() == students
    assert {"n1 0", "n1 1"} <= set(gpus) <= {"n1 0", "n1 1", "n2 0", "n2 1"}


@pytest.mark.slow
def test_what_slurm_says_of_jobs_that_wrote_nothing(cluster, ends, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    ids, jobs = ends, SlurmJobs(STATES, tmp_path, SlurmOptions())
    other = cluster.submit("sleep 300")
    same = {name: name for name in ids}
    wait_until(lambda: job_states(jobs, ids) == same, 150, lambda: str(job_states(jobs, ids)))
    assert jobs.look([*ids.values(), "999999"]).keys() == set(ids.values())
    assert jobs.cancel()
    assert job_states(jobs, ids)["PENDING"] == job_states(jobs, ids)["RUNNING"] == "CANCELLED"
    assert cluster.say("squeue", "-h", "-j", other, "-o", "%T").strip() == "RUNNING"
    cluster.say("scancel", other)


@pytest.mark.slow
def test_after_ctrl_c_only_what_is_left_is_graded(course, cluster):
    hand_in(course, "ada", "kim", "lea")
    (course.root / "course.toml").write_text(f"{OPTIONS}array_parallelism = 1\n")
    other = cluster.submit("sleep 600", "-c1")
    with Grading(course, cluster) as grading:
        wait_until(
            lambda: sum(verdicts(course).values()) >= 1, 300, lambda: f"none done: {grading.said}"
        )
        grading.wait_running(1)
        grading.process.send_signal(signal.SIGINT)
        assert grading.process.wait(timeout=90) == 130, grading.said
    assert cluster.say("squeue", "-h", "-o", "%i").split() == [other]
    done = verdicts(course)
    assert 1 <= len(done) < 3
    cluster.say("scancel", other)
    attempts = len([e for e in entries(course) if e["kind"] == "attempt"])
    (course.root / "course.toml").write_text(OPTIONS)
    records = course.grade(str(course.root / "handed_in"), "--executor", "slurm", "--no-gradebook")
    assert all(was_graded(record) for record in records.values())
    assert verdicts(course) == {"ada": 1, "kim": 1, "lea": 1}
    again = [e for e in entries(course) if e["kind"] == "attempt"][attempts:]
    assert not {e["student"] for e in again} & set(done)


@pytest.mark.slow
def test_a_folder_is_watched_and_graded_by_jobs(course, cluster):
    def feedback(student):
        return course.root / "handed_in" / student / f"{LAB}.feedback.html"

    hand_in(course, "ada")
    before = all_jobs(cluster)
    with Grading(course, cluster, "watch") as watch:
        wait_until(feedback("ada").exists, 300, lambda: f"no feedback: {watch.said}")
        assert len(all_jobs(cluster) - before) == 1
        hand_in(course, "kim")
        watch.wait_running(1)
        watch.process.send_signal(signal.SIGTERM)
        assert watch.process.wait(timeout=90) == 0, watch.said
    assert "the next watch goes on from there" in watch.said
    assert cluster.say("squeue", "-h") == ""
    assert verdicts(course) == {"ada": 1}
    with Grading(course, cluster, "watch") as watch:
        wait_until(feedback("kim").exists, 300, lambda: f"no feedback: {watch.said}")
    assert verdicts(course) == {"ada": 1, "kim": 1}


@pytest.mark.slow
def test_a_grader_that_was_killed_leaves_its_results_to_the_next(course, cluster):
    hand_in(course, "ada", "kim")
    with Grading(course, cluster) as grading:
        grading.wait_running(2)
        grading.process.kill()
        grading.process.wait(timeout=20)
    results = course.root / "build" / "jobs"
    wait_until(
        lambda: len(list(results.glob("*/results/*.json"))) == 2,
        300,
        lambda: f"jobs do not end: {cluster.say('squeue')}",
    )
    assert verdicts(course) == {}
    before = all_jobs(cluster)
    with Grading(course, cluster) as grading:
        records = grading.wait(0)
    assert "2 results were there already" in grading.said
    assert all(was_graded(record) for record in records.values())
    assert verdicts(course) == {"ada": 1, "kim": 1}
    assert all_jobs(cluster) == before
    assert list(results.iterdir()) == []


def script(name: str) -> str:
    return str(ROOT / "autograder" / "batch" / "slurm" / name)


@pytest.mark.slow
def test_the_script_that_grades_a_class_cancels_its_jobs_and_goes_on(course, cluster, monkeypatch):
    hand_in(course, "ada", "kim")
    monkeypatch.chdir(course.root)
    command = [
        "sbatch",
        "--parsable",
        f"--export=ALL,PYTHON={sys.executable}",
        script("grade_class.sbatch"),
        LAB,
        str(course.root / "handed_in"),
        "--no-gradebook",
    ]

    def states() -> list[str]:
        return cluster.say("squeue", "-h", "-r", "-o", "%T %j").splitlines()

    job = cluster.say(*command).strip()
    wait_until(
        lambda: sum("RUNNING autograder-" in line for line in states()) >= 1,
        120,
        lambda: f"no job runs: {states()}",
    )
    cluster.say("scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: not states(), 120, lambda: f"still there: {states()}")
    log = course.root / f"grade-class-{job}.log"
    assert "interrupted; what was graded is kept" in log.read_text()

    job = cluster.say(*command).strip()
    wait_until(lambda: not states(), WITHIN_S, lambda: f"still there: {states()}")
    assert verdicts(course) == {"ada": 1, "kim": 1}, log.with_name(
        f"grade-class-{job}.log"
    ).read_text()


def test_the_script_that_runs_a_notebook_on_two_nodes(course, cluster, monkeypatch, tmp_path):
    cell = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbformat.write(notebook, tmp_path / "in.ipynb")
    monkeypatch.chdir(tmp_path)
    # Both nodes are this machine, whose name for itself is another one.
    given = f"--export=ALL,PYTHON={sys.executable},MINIDIST_ENDPOINT=127.0.0.1:{free_port()}"
    job = cluster.say(
        "sbatch", "--parsable", given, script("notebook_on_nodes.sbatch"), "in.ipynb", "out.ipynb"
    ).strip()
    log = tmp_path / f"notebook-{job}.log"
    wait_until(lambda: not cluster.say("squeue", "-h"), 200, "the job does not end")
    assert (tmp_path / "out.ipynb").exists(), log.read_text()
    done = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    said = "".join(output.get("text", "") for output in done.cells[-1].outputs)
    assert all(f"rank {rank} of 4" in said for rank in range(4)), said + log.read_text()
    assert not list(tmp_path.glob(".minidist-*"))  # the secret
