"""Lab 5: the reference solution as a script, and what the criteria's own arithmetic rests on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
from lab_helper import SameUnderEveryKey, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.common import deaths
from autograder.criteria.criterion import Case, Draw
from autograder.criteria.lab5_multinode import hierarchy, lost, network, nodes, places
from autograder.criteria.lab5_multinode.nodes import kill_trees
from autograder.referee.referee import draw_for
from minidist.emulate import Cluster, Link, Trace, simulate
from minidist.emulate.trace import Event
from minidist.processes.tree import descendants

LAB = "lab5_multinode"

# The others' judges look at the emulated cluster's trace first.
WITHOUT_TRACE = [c for c in get_lab(LAB).criteria if not c.name.endswith("_bytes")]


def _draw(criterion: str, world_size: int, attempt: str = "0") -> Draw:
    return draw_for(b"test", LAB, criterion, attempt, world_size)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    assert "losses equal bit for bit: True" in run_solution(LAB, num_ranks, tmp_path)


@pytest.mark.parametrize("criterion", WITHOUT_TRACE, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_a_judge_survives_rubbish(criterion, world_size):
    inputs = criterion.draw(_draw(criterion.name, world_size))
    everything = ("text", [None], np.full((2, 2), np.nan), np.zeros((2, 2), bool), 1e300, {})
    for value in (None, *everything):
        answers = [SameUnderEveryKey(value) for _ in range(world_size)]
        assert criterion.findings(Case(world_size, inputs, answers))


@pytest.mark.parametrize("criterion", get_lab(LAB).criteria, ids=lambda c: c.name)
def test_draws_are_secret_and_serve_every_world_size(criterion):
    for world_size in (1, 2, 3, 4, 6, 8):
        assert len(criterion.draw(_draw(criterion.name, world_size))) == world_size
    one, two = (criterion.draw(_draw(criterion.name, 4, attempt)) for attempt in "01")
    assert str(one) != str(two)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["torchrun", "--nnodes=2", "--nproc-per-node=3", "x.py"], "10.0.0.1:5"),
        (["torchrun", "--standalone", "x.py"], "--standalone"),
        (["torchrun", "--nnodes 2", "x.py"], "--nnodes is"),
        (["torchrun", "--nnodes=2", "--no-such-option"], "refuses"),
        (["torchrun", "--help"], "end."),
        (["python", "x.py"], "must begin with torchrun"),
        ([], "must begin with torchrun"),
    ],
)
def test_commands_are_read_as_torchrun_reads_them(command, says, capsys):
    job = {
        "num_nodes": 2,
        "local_size": 3,
        "head": "10.0.0.1",
        "port": 5,
        "run_id": "r",
        "max_restarts": 0,
        "script": ["x.py"],
    }
    case = Case(1, [job], [{"commands": [command, command]}])
    findings = list(places.judge_command(case))
    assert len(findings) == 1
    assert says in findings[0].message


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth1", {"eth1", "eth10"}),
        ("=eth1", {"eth1"}),
        ("eth", {"eth0", "eth1", "eth10"}),
        ("^lo,docker", {"eth0", "eth1", "eth10"}),
        ("^=eth1", {"lo", "docker0", "eth0", "eth10"}),
        ("eth0,eth10", {"eth0", "eth10"}),
        ("", set()),
    ],
)
def test_nccl_names_are_read_as_nccl_reads_them(value, names):
    there = ["lo", "docker0", "eth0", "eth1", "eth10"]
    assert network._admitted(value, there) == names


def _left(save, before, place):
    """Per death of a save: when it came, and the files that it has left, by name."""
    found = []
    for death in deaths.deaths(save, before, place):
        assert death.ended == "killed"
        found.append((death.when, {p.name: p.read_bytes() for p in place.iterdir()}))
    return found


def test_a_save_dies_at_every_call_that_changes_a_file(tmp_path):
    """Whatever can be left: around each call, and with a part of each large file."""

    before, place = tmp_path / "before", tmp_path / "now"
    before.mkdir()

    def save():
        (place / "part").write_bytes(bytes(2 * deaths.WRITE_LIMIT_BYTES))
        shutil.copyfile(place / "part", place / "final")
        (place / "part").unlink()

    left = {
        (
            when.partition(",")[0],
            *sorted((name, len(data) // deaths.WRITE_LIMIT_BYTES) for name, data in files.items()),
        )
        for when, files in _left(save, before, place)
    }
    written, half = "in the middle of a write", ("part", 1)
    assert left == {
        ("before it had opened part to write",),
        ("right after it had opened part to write", ("part", 0)),
        ("before it had opened final to write", ("part", 2)),
        ("right after it had opened final to write", ("final", 0), ("part", 2)),
        ("before it had deleted part", ("final", 2), ("part", 2)),
        ("right after it had deleted part", ("final", 2)),
        (written, half),
        (written, ("final", 1), ("part", 2)),
    }
    save()  # this process has no such limit


@pytest.mark.parametrize(
    ("finish", "says"),
    [
        (lambda file: (file.seek(0), file.write(b"12"), file.flush()), "flush()"),
        (lambda file: (file.seek(0), file.write(b"12"), file.close()), "close()"),
        (lambda file: (file.seek(0), os.write(file.fileno(), b"12")), "write()"),
        (lambda file: os.pwrite(file.fileno(), b"12", 0), "pwrite()"),
        (lambda file: file.truncate(1), "truncate()"),
        (lambda file: os.truncate(file.fileno(), 1), "it had cut off"),
        (lambda file: np.memmap(file, dtype=np.uint8)[:].fill(1), "fill()"),
        (lambda file: _in_a_thread(partial(os.pwrite, file.fileno(), b"12", 0)), "()"),
        (lambda file: subprocess.run(["dd", "conv=notrunc"], input=b"1", stdout=file), "()"),
    ],
)
def test_a_save_dies_between_a_rename_and_what_an_open_file_gets_then(tmp_path, finish, says):
    before, place = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    (before / "final").write_bytes(b"old")

    def save():
        with (place / "part").open("wb+") as file:
            file.write(b"00")
            file.flush()
            os.replace(place / "part", place / "final")
            finish(file)

    left = _left(save, before, place)
    renamed, done = (number for number, (_, files) in enumerate(left[1:], 1) if _new(left, number))
    when, files = left[renamed]
    assert when == "right after it had renamed part to final" or when.startswith("before it had ")
    assert files == {"final": b"00"}
    when, files = left[done]
    assert when.startswith("right after ")
    assert says in when
    assert files["final"] not in (b"old", b"00")


def _new(left, number):
    """Whether a death has left other content of `final` than the death before."""
    return left[number][1]["final"] != left[number - 1][1]["final"]


def _in_a_thread(function):
    (thread := threading.Thread(target=function)).start()
    thread.join()


def test_a_save_of_many_writes_dies_a_few_times(tmp_path):
    before, place = tmp_path / "before", tmp_path / "now"
    before.mkdir()

    def save():
        with (place / "part").open("wb", buffering=0) as file:
            for _ in range(500):
                file.write(b"0")
        os.replace(place / "part", place / "final")

    whens = [when for when, _ in _left(save, before, place)]
    assert whens == [
        "before it had opened part to write",
        "right after it had opened part to write",
        "right after write(), when part was changed",
        "before it had renamed part to final",
        "right after it had renamed part to final",
    ]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_bytes_between_nodes_are_those_of_the_simulator(kind):
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    cluster = Cluster(
        name="2 x 3",
        nodes=2,
        devices_per_node=3,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1.0,
        memory_bandwidth_bytes_per_s=1.0,
    )
    ranks = tuple(range(6))
    event = Event(kind="issue", key="1", collective=kind, ranks=ranks, nbytes=6000, root=0)
    timeline = simulate(Trace(world_size=6, events=[[event] for _ in ranks]), cluster)
    for node in range(2):
        outside = sum(
            hierarchy.sent_bytes([event], rank, 3)[1] for rank in ranks[3 * node : 3 * node + 3]
        )
        assert outside == pytest.approx(timeline.bytes_per_link.get(f"node {node}", 0.0))


def test_a_killed_node_leaves_nobody_behind():
    sleeps = "import time; time.sleep(600)"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {sleeps!r}], "
    code += f"start_new_session=True)\nprint('up', flush=True)\n{sleeps}"
    node = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert node.stdout is not None
    assert node.stdout.readline() == "up\n"
    (child,) = descendants(node.pid)
    kill_trees([node.pid])
    assert node.wait(10) == -signal.SIGKILL
    end_s = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < end_s
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _seed(number: int, purpose: str) -> int:
    return 1000 * number + len(purpose)


def test_a_node_dies_in_every_step_up_to_the_one_after_a_save():
    """In each draw once in a forward pass, and once around an update."""
    first, *others = nodes.DEATHS
    seen = set()
    for number in range(400):
        job, _ = lost.draw_lost(Draw(2, seed=partial(_seed, number)))
        forward, update = job["deaths"]
        assert (forward["moment"], update["moment"] in others) == (first, True)
        seen |= {(job["job"]["every"], d["step"], d["moment"]) for d in job["deaths"]}
    assert seen == {
        (every, number, moment)
        for every in (2, 3, 4)
        for number in range(1, every + 2)
        for moment in nodes.DEATHS
        if (number, moment) != (1, first)
    }
