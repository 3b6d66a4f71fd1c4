"""Several nodes from the environment or Slurm, and the secret that they share."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from minidist.kernel import options
from minidist.kernel.membership import Keys, MultiNodeJob, divide, rank_environment, read_job
from minidist.kernel.nodes import hub

SECRET = "x" * 32
JOB = MultiNodeJob(num_nodes=2, node=0, host="127.0.0.1", port=1, secret=SECRET)
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[07-08,12]",
    "SLURM_NODEID": "2",
    "SLURM_SUBMIT_DIR": "/shared",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"MINIDIST_NNODES": "1", **SLURM}, None),
        ({"SLURM_STEP_NUM_NODES": "1", **SLURM}, None),
        (SLURM, (3, 2, "gpu07", 23456, "", "/shared/.minidist-123456")),
        (
            {**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            (3, 2, "a", 5, "", "/shared/.minidist-123456"),
        ),
        (
            {**SLURM, "MINIDIST_SECRET": SECRET, "MINIDIST_NODE_RANK": "0"},
            (3, 0, "gpu07", 23456, SECRET, ""),
        ),
        (
            {
                "PET_NNODES": "2:2",
                "PET_NODE_RANK": "1",
                "PET_RDZV_ENDPOINT": "h:7",
                "MINIDIST_SECRET_FILE": "/s",
            },
            (2, 1, "h", 7, "", "/s"),
        ),
        (
            {
                "MINIDIST_NNODES": "2",
                "MINIDIST_ENDPOINT": "[fe80::1]:9",
                "MINIDIST_SECRET_FILE": "s",
            },
            (2, 0, "fe80::1", 9, "", "s"),
        ),
        (
            {"MINIDIST_NNODES": "2", "MINIDIST_ENDPOINT": "n1", "MINIDIST_SECRET_FILE": "s"},
            (2, 0, "n1", 29500, "", "s"),
        ),
    ],
)
def test_the_job_from_the_environment(environment: dict[str, str], found: tuple | None) -> None:
    job = read_job(environment)
    have = job and (job.num_nodes, job.node, job.host, job.port, job.secret, job.secret_file)
    assert have == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MINIDIST_NNODES", "two"),
        ("MINIDIST_NNODES", "9999"),
        ("PET_NNODES", "1:4"),
        ("SLURM_NODEID", "3"),
        ("MINIDIST_NODE_RANK", "-1"),
        ("MINIDIST_ENDPOINT", "a b:1"),
        ("MINIDIST_ENDPOINT", "a:99999"),
        ("MASTER_PORT", "x"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"expected.*{text}"):
        read_job({**SLURM, name: text})
    with pytest.raises(ValueError, match="MINIDIST_ENDPOINT"):
        read_job({"MINIDIST_NNODES": "2", "MINIDIST_SECRET": SECRET})
    with pytest.raises(ValueError, match="MINIDIST_SECRET: expected"):
        read_job({"MINIDIST_NNODES": "2", "MASTER_ADDR": "a"})


def test_the_front_is_node_zero_and_counts_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {**SLURM, "MINIDIST_RANKS": "4", "MINIDIST_SECRET": SECRET}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=r"expected node 0 .* got node 2"):
        options.parse(["-f", "c.json", "--ranks", "auto"])
    assert options.parse(["-f", "c.json", "--ranks", "2"]).job is None
    monkeypatch.setenv("SLURM_NODEID", "0")
    found = options.parse(["-f", "c.json", "--ranks", "auto"])
    assert (found.num_ranks, found.job and found.job.num_nodes) == (12, 3)
    assert found.env is not None
    assert "MINIDIST_SECRET" not in found.env
    assert SECRET not in repr(found)


def test_ranks_are_divided() -> None:
    assert [s.ranks for s in divide(replace(JOB, num_nodes=3), 7, 9)] == [
        range(3),
        range(3, 5),
        range(5, 7),
    ]
    with pytest.raises(RuntimeError, match="at least 2 ranks"):
        divide(JOB, 1, 9)


def test_gloo_is_told_the_interface() -> None:
    assert rank_environment(JOB, {"A": "b"}) == {"A": "b", "GLOO_SOCKET_IFNAME": "lo"}
    given = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert rank_environment(JOB, given) == given


def test_the_secret_is_ours_alone(tmp_path: Path) -> None:
    job = replace(JOB, secret="", secret_file=str(tmp_path / "key"))
    first, second = Keys(job), Keys(job)
    assert (first.front, first.node) == (second.front, second.node)
    assert first.front != first.node
    assert os.stat(job.secret_file).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["key"]
    second.forget()
    assert os.listdir(tmp_path) == ["key"]  # who has made it removes it
    first.forget()
    assert os.listdir(tmp_path) == []
    assert Keys(job).front != second.front
    os.chmod(job.secret_file, 0o640)
    with pytest.raises(ValueError, match="mode 0600"):
        Keys(job)
    os.chmod(job.secret_file, 0o600)
    os.symlink(job.secret_file, tmp_path / "link")
    with pytest.raises(OSError, match="link"):
        Keys(replace(job, secret_file=str(tmp_path / "link")))
    with pytest.raises(ValueError, match="32 characters or more, got 5"):
        Keys(replace(JOB, secret="short"))


def test_nodes_that_do_not_come_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "JOIN_DEADLINE_S", 0.1)

    async def wait(port: int) -> None:
        door = hub.Hub(replace(JOB, port=port))
        try:
            door.open()
            await door.all_joined()
        finally:
            door.close()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"no door .*:{port}: Address already in use"):
            asyncio.run(wait(port))
    with pytest.raises(RuntimeError, match=r"node 1 of 2 did not join .*minidist\.kernel\.node"):
        asyncio.run(wait(port))
