"""Jobs under torchrun that lose a rank, a node, or their time, and go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minidist.checkpoint import Checkpoints, Shard
from minidist.elastic import share_of_batch, train_elastically
from minidist.launch import run
from minidist.processes.ports import free_port

SCRIPT = str(Path(__file__).parent / "elastic_script.py")
# Otherwise torchrun's rendezvous and the ranks' process groups share a store. It keeps addresses of
# lost ranks, and after a restart gloo fails with "connectFullMesh ... Connection refused" (torch
# 2.13; pytorch/pytorch issue 135712).
TORCHRUN = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable]
TORCHRUN += ["-m", "torch.distributed.run"]


@contextlib.contextmanager
def started(command, **more):
    """A process group of its own, gone at the end whatever happens."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        start_new_session=True,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )
    try:
        yield process
    finally:
        # The workers have sessions of their own, and end with their agent.
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()


def train(folder, num_steps, die, *options):
    command = [*TORCHRUN, "--standalone", *options, SCRIPT, str(folder), str(num_steps), die]
    with started(command) as process:
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return json.loads((folder / "ended.json").read_text())


def losses(folder):
    """Step -> loss, of the last run that did the step."""
    found = {}
    for path in sorted(folder.glob("losses-*.jsonl")):
        found |= dict(json.loads(line) for line in path.read_text().splitlines())
    return found


@pytest.mark.slow
def test_a_killed_rank_costs_time_and_nothing_else(tmp_path):
    """Bit for bit: dropout, AdamW's moments and the schedule go on where they stood."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert train(whole, 12, "never", "--nproc-per-node=2") == [12, 0, False, 2]
    ended = train(broken, 12, "rank 1 at 10", "--nproc-per-node=2", "--max-restarts=1")
    assert ended == [12, 8, False, 2]  # from the checkpoint of step 8
    assert losses(broken) == losses(whole)
    assert len(losses(whole)) == 12


@pytest.mark.nightly
def test_a_job_that_is_told_to_end_saves_first_and_goes_on_later(tmp_path):
    whole, told = tmp_path / "whole", tmp_path / "told"
    whole.mkdir()
    told.mkdir()
    train(whole, 9, "never", "--nproc-per-node=3")
    assert train(told, 9, "term at 5", "--nproc-per-node=3") == [6, 0, True, 3]
    assert train(told, 9, "never", "--nproc-per-node=3") == [9, 6, False, 3]
    assert losses(told) == losses(whole)


@pytest.mark.slow
def test_the_other_node_goes_on_when_one_is_lost(tmp_path):
    num_steps = 60
    port = free_port()
    commands = [
        [
            *(*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lost"),
            # Beats come up to 2 s apart: below 3 s, a node that joins late takes others for lost.
            "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=10,"
            f"is_host={int(node == 0)}",
            *("--local-addr=127.0.0.1", SCRIPT, str(tmp_path), str(num_steps), "node"),
        ]
        for node in range(2)
    ]
    with started(commands[0]) as first, started(commands[1]) as second:
        wait_until(lambda: len(losses(tmp_path)) >= 6 or first.poll() is not None, 60)
        assert (tmp_path / "losses-0-2.jsonl").exists(), "it did not begin with two ranks"
        # The whole node at once: the agent alone would leave its worker behind.
        kill_tree(second.pid)
        text, _ = first.communicate(timeout=120)
        assert first.returncode == 0, text
    step, first_step, preempted, world_size = json.loads((tmp_path / "ended.json").read_text())
    assert (step, preempted, world_size) == (num_steps, False, 1)
    assert first_step > 0
    assert first_step % 4 == 0
    # The global batch is the same at every world size, so the curve is too, up to rounding.
    alone = tmp_path / "alone"
    alone.mkdir()
    train(alone, num_steps, "no dropout")
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-9)


def sharded_run(folder, num_steps):
    """Each rank adds 1 per step to its part of 0 … 9, and keeps it in the checkpoint."""
    dist.init_process_group("gloo")
    mine = share_of_batch(10, dist.get_world_size(), dist.get_rank())
    part = torch.arange(10.0)[mine].clone()
    ended = train_elastically(
        lambda step: part.add_(1.0),
        num_steps=num_steps,
        checkpoints=Checkpoints(folder),
        shared={},
        sharded=lambda: {"x": Shard(tensor=part, global_shape=(10,), offsets=(mine.start,))},
        every=2,
    )
    dist.barrier()
    dist.destroy_process_group()
    return ended.first_step, part.tolist()


def test_sharded_state_is_cut_anew_when_ranks_are_lost(tmp_path):
    run(sharded_run, 3, str(tmp_path), 4)
    results = run(sharded_run, 2, str(tmp_path), 7)
    assert [first for first, _ in results] == [4, 4]
    assert [x for _, part in results for x in part] == [i + 7.0 for i in range(10)]


def wait_until(condition, timeout_s):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.05)


def kill_tree(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for each in [pid, *map(int, children)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch", [7, 8, 12, 100])
def test_shares_are_the_whole_batch(batch, world_size):
    shares = [share_of_batch(batch, world_size, rank) for rank in range(world_size)]
    assert [i for share in shares for i in range(batch)[share]] == list(range(batch))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_wrong_use_says_what_is_right():
    with pytest.raises(ValueError, match="at least 3 samples, got 2"):
        share_of_batch(2, 3, 0)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        train_elastically(print, num_steps=1, checkpoints=None, shared={}, every=0)


HANGS = """
import time
from minidist.elastic import Preemption
with Preemption(grace_s=0.5):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_rank_that_hangs_does_not_outlive_the_signal():
    with started([sys.executable, "-c", HANGS]) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


LISTENS = """
import os, signal, time
print(os.getpid(), flush=True)
signal.signal(signal.SIGUSR1, lambda *_: print("worker got it", flush=True) or os._exit(0))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("option", [True, False])
def test_only_an_option_makes_torchrun_hand_sigusr1_on(option, tmp_path, monkeypatch):
    """Lecture 10's word on Slurm's --signal: the variable of that name is overwritten."""
    names = "SIGTERM,SIGUSR1"
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", names)
    script = tmp_path / "listens.py"
    script.write_text(LISTENS)
    command = [*TORCHRUN, "--standalone", str(script)]
    if option:
        command.insert(-1, f"--signals-to-handle={names}")
    with started(command) as process:
        lines = iter(process.stdout.readline, "")
        worker = next(int(line) for line in lines if line.strip().isdigit())
        try:
            assert "ready\n" in lines
            process.send_signal(signal.SIGUSR1)
            assert (process.wait(100) == -signal.SIGUSR1) != option
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        assert ("worker got it\n" in process.stdout.read()) == option
