"""Lab 1's script runs as torchrun would run it, however it ends, and a student reads why."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from autograder.criteria.common import virtual_cluster
from autograder.criteria.criterion import Context, Draw
from autograder.criteria.lab1_ddp import script
from autograder.criteria.lab5_multinode.nodes import be_rank
from minidist.processes.fork_server import fork

SAVE = """
    import argparse, os, sys
    import numpy as np
    parser = argparse.ArgumentParser()
    for name in ("--data", "--out", "--epochs", "--batch-size", "--lr"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    def save(value):
        if rank == 0:
            np.savez(args.out, losses=np.array(value, dtype=float))
"""


@pytest.fixture
def observe(tmp_path, monkeypatch):
    """Runs a script's lines on `world_size` ranks; what rank 0 saved."""
    monkeypatch.chdir(tmp_path)

    def run(lines: str, world_size: int = 2):
        (tmp_path / "s.py").write_text(textwrap.dedent(SAVE) + textwrap.dedent(lines))
        inputs = script.draw_script(Draw(world_size, seed=len))[0]
        context = Context(0, world_size, torch.device("cpu"))
        return script.observe_script("s.py", inputs, context)

    return run


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_has_what_torchrun_gives_it(observe, world_size):
    Path("neighbour.py").touch()
    saved = observe(
        """
        import torch, torch.distributed as dist
        import neighbour
        dist.init_process_group("gloo")
        ours = torch.tensor([[
            dist.get_rank(), dist.get_world_size(), dist.is_torchelastic_launched(),
            *(int(os.environ[n]) for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")),
            __name__ == "__main__", any(n.startswith("MINIDIST_") for n in os.environ),
        ]], dtype=torch.float64)
        parts = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, ours)
        save(torch.cat(parts).numpy())
        dist.destroy_process_group()
        """,
        world_size,
    )
    expected = [[r, world_size, 1, r, world_size - 1, 0, 1, 0] for r in range(world_size - 1)]
    # The last one is alone on its machine, the second one where there are others.
    expected += [[world_size - 1, world_size, 1, 0, 1, int(world_size > 1), 1, 0]]
    np.testing.assert_array_equal(saved["losses"], expected)


def test_a_loader_may_have_workers(observe):
    saved = observe(
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(8.0))
        save(sorted(float(x) for (batch,) in DataLoader(data, 3, num_workers=2) for x in batch))
        """
    )
    np.testing.assert_array_equal(saved["losses"], np.arange(8))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "end", ["sys.exit()", "sys.exit(3)", "os._exit(5)", "os.abort()", "raise ValueError('late')"]
)
def test_what_was_saved_counts_however_the_script_ends(observe, end):
    assert observe(f"save([1.5])\n{end}")["losses"] == [1.5]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "def load(x):\n    return x / 0\nif rank == 1:\n    load(1)\n",
            ["failed on rank 1 (ZeroDivisionError", "rank 1: Traceback", "in load", "return x / 0"],
        ),
        ("print('so far', rank)\nos.abort()", ["SIGABRT", "so far 1"]),
        ("sys.exit('no data')", ["(no data)", "\nno data"]),
        ("sys.exit(7)", ["(exit code 7)"]),
        ("os.write(2, b'from C')\nparser.error('what is --x')", ["from C", "error: what is --x"]),
        ("print('done')", ["ended and wrote no file to --out", "done"]),
        ("x = (", ["SyntaxError", "x = ("]),
    ],
)
def test_a_failure_says_where_and_what(observe, lines, words):
    with pytest.raises(RuntimeError) as error:
        observe(lines)
    text = str(error.value)
    assert text.startswith("s.py under torchrun ")
    for word in words:
        assert word in text
    assert "runpy" not in text  # frames of ours tell a student nothing
    assert "autograder" not in text


def test_not_written_yet(observe):
    with pytest.raises(NotImplementedError):
        observe("raise NotImplementedError()")


def test_one_that_never_ends_is_ended(observe, monkeypatch):
    monkeypatch.setattr(script, "SCRIPT_DEADLINE_S", 8.0)
    with pytest.raises(TimeoutError, match=r"s\.py was still running after 8 s"):
        observe("import time\nsave([1.0])\nif rank == 1:\n    time.sleep(600)")


def test_a_backend_outlives_what_the_script_destroys(observe):
    """Else its last owner, DDP's reducer, joins gloo's thread with the GIL held: a rare hang."""
    saved = observe(
        """
        import weakref, torch, torch.distributed as dist
        def train():
            dist.init_process_group("gloo")
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            ddp(torch.ones(3, 2)).sum().backward()
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            dist.destroy_process_group()
            assert not dist.is_initialized()
            return weakref.ref(backend)
        save([train()() is not None])
        """
    )
    assert saved["losses"] == [1]


@pytest.mark.parametrize(
    ("lines", "backends"),
    [
        ("dist.init_process_group('gloo')", ["gloo", "gloo"]),
        ("dist.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')", ["nccl"] * 2),
        # It needs a real GPU before it joins, so nothing is known of it.
        ("torch.ones(1, device='cuda')\ndist.init_process_group('nccl')", ["", ""]),
        ("os._exit(3)", []),
        (
            "store = dist.TCPStore('10.0.0.7', 23456, 6, False)\n"
            "dist.init_process_group('gloo', store=store, rank=3, world_size=6)",
            ["gloo"] * 2,
        ),
        # The first one counts, and the world is torchrun's.
        (
            "try:\n    dist.init_process_group('nccl')\n"
            "except:\n    dist.init_process_group('gloo')",
            ["nccl"] * 2,
        ),
        (
            "dist.init_process_group('gloo' if dist.is_torchelastic_launched() else 'nccl')",
            ["gloo"] * 2,
        ),
        (
            "dist.init_process_group('nccl' if os.environ['ROLE_RANK'] == '3' else 'gloo')",
            ["nccl"] * 2,
        ),
    ],
)
def test_which_backend_a_script_names_where_there_are_gpus(tmp_path, lines, backends):
    (tmp_path / "s.py").write_text(f"import os, torch, torch.distributed as dist\n{lines}\n")
    joins = virtual_cluster.find_joins(tmp_path / "s.py", [], tmp_path)
    assert [join["backend"] for join in joins] == backends


@pytest.mark.parametrize(
    ("lines", "gpu"),
    [
        ("torch.cuda.set_device(0)\ndist.init_process_group('nccl')", 0),
        ("torch.cuda.set_device(int(os.environ['RANK']))\ndist.init_process_group('nccl')", 3),
        ("d = torch.device('cuda', 3)\ndist.init_process_group('nccl', device_id=d)", 3),
        ("dist.init_process_group('nccl')\ntorch.cuda.set_device(3)", -1),
    ],
)
def test_which_gpu_a_script_chooses_before_it_joins(tmp_path, lines, gpu):
    (tmp_path / "s.py").write_text(f"import os, torch, torch.distributed as dist\n{lines}\n")
    _, join = virtual_cluster.find_joins(tmp_path / "s.py", [], tmp_path)
    assert join == {"backend": "nccl", "gpu": gpu}
    right = {"backend": "gloo", "gpu": -1}
    assert [f.message for f in virtual_cluster.judge_joins([right, join])] == (
        [
            "on the second of two nodes of 3 ranks and 3 GPUs each, rank 3, which is local rank 0 "
            "there, took cuda:3: each node counts its own GPUs, so LOCAL_RANK chooses one."
        ]
        if gpu == 3
        else []
    )


def test_a_script_that_never_joins_where_there_are_gpus_has_named_no_backend(tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(virtual_cluster, "JOINING_DEADLINE_S", 2.0)
    assert virtual_cluster.find_joins(tmp_path / "s.py", [], tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        ("print(__name__, sys.argv[1])", 0, "__main__ one"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data')", 1, "no data"),
        (
            "1 / 0",
            1,
            "line 2, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_worker_of_torchrun_ends_as_its_script_does(tmp_path, lines, code, words):
    (tmp_path / "s.py").write_text(f"import sys\n{lines}\n")
    log = tmp_path / "log.txt"
    child = fork(be_rank, log, "s.py", ["one"], cwd=tmp_path)
    ended = child.join(60)
    child.close()
    said = log.read_text()
    assert ended == code, said
    assert said.count(words) == (1 if words else len(said) + 1), said
    assert "runpy" not in said
