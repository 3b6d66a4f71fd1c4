"""Slurm with accounting, as clusters have it: who is charged, and jobs that it has forgotten."""

from __future__ import annotations

import json

import pytest
from course import TestCourse, statuses
from slurm_accounting import AccountedCluster, why_no_accounting
from slurm_cluster import job_states, running, wait_until, why_not

from autograder.batch.slurm.backend import Refused, SlurmJobs
from autograder.box.sandbox import probe_support
from autograder.course.slurm_options import SlurmOptions
from autograder.criteria.limits import Limits

WHY_NOT = why_not() or why_no_accounting()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.skipif(not probe_support().works, reason="no sandbox"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(AccountedCluster(tmp_path_factory.mktemp("slurm") / "c")) as made:
        yield made


@pytest.fixture(autouse=True)
def chosen(cluster, monkeypatch):
    """Our commands speak to this cluster."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])


def test_a_class_is_charged_to_the_account_and_qos_that_the_course_names(cluster, tmp_path):
    course = TestCourse.make(tmp_path / "course")
    (course.root / "course.toml").write_text(
        "[slurm]\npoll_s = 1\naccount = 'course'\nqos = 'grading'\ncpus = 1\n"
    )
    for student in ("ada", "kim"):
        course.submit(student, json.dumps({"not a notebook": student}).encode())
    records = course.grade("handed_in", "--executor", "slurm", "--no-gradebook")
    assert {status for r in records.values() for status in statuses(r).values()} == {"INVALID"}

    def charged() -> list[str]:
        said = cluster.say("sacct", "-X", "-n", "-P", "-o", "Account,QOS,State")
        return [line for line in said.splitlines() if line.startswith("course|grading|")]

    wait_until(lambda: charged() == ["course|grading|COMPLETED"] * 2, 60, lambda: str(charged()))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (SlurmOptions(account="physics"), "Invalid account or account/partition combination"),
        (SlurmOptions(qos="urgent"), "Invalid qos specification"),
    ],
    ids=["account", "qos"],
)
def test_what_slurm_refuses_is_said_in_its_words(cluster, options, reason, tmp_path):
    jobs = SlurmJobs("refused", tmp_path, options).ask_for(1, Limits())
    with pytest.raises(Refused, match=reason):
        jobs.submit([tmp_path / "task.json"])


def test_what_the_controller_has_forgotten_is_looked_up(cluster, tmp_path):
    ids = {
        state: cluster.submit(command, "-w", "n2", "-J", "lost")
        for state, command in [
            ("COMPLETED", "true"),
            ("FAILED", "exit 3"),
            ("CANCELLED", "sleep 600"),
        ]
    }
    cluster.say("scancel", ids["CANCELLED"])
    jobs = SlurmJobs("lost", tmp_path, SlurmOptions())
    same = {state: state for state in ids}
    wait_until(lambda: job_states(jobs, ids) == same, 60, lambda: str(job_states(jobs, ids)))
    accounted = ("sacct", "-X", "-n", "-P", "-o", "State", "-j", ",".join(ids.values()))
    wait_until(
        lambda: {state.split()[0] for state in cluster.say(*accounted).splitlines()} == set(ids),
        60,
        lambda: cluster.say(*accounted),
    )
    cluster.stop("slurmctld")
    cluster.start_controller("-c")  # forgets every job
    wait_until(
        lambda: "UP" in cluster.say("scontrol", "ping", check=False), 60, "the controller is not up"
    )
    assert cluster.say("squeue", "-h", "--states=all") == ""
    assert job_states(jobs, ids) == same
    seen = jobs.look(ids.values())
    assert seen is not None
    assert {seen[ids[state]].node for state in ("COMPLETED", "FAILED")} == {"n2"}
