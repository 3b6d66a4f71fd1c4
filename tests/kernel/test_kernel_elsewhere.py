"""The kernel where Linux's own things are missing: no /proc, no pidfd, no prctl.

It stands in for macOS, which is not tested.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kernel_helper import kernel

PLACE = Path(__file__).resolve().parents[1] / "helpers" / "elsewhere"


@pytest.fixture
def elsewhere(monkeypatch):
    path = os.pathsep.join(filter(None, [str(PLACE), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    with kernel("--ranks", "2") as found:
        yield found


def test_cells_run_and_a_rank_that_ends_is_told(elsewhere):
    said = elsewhere.ok("import os\nprint(hasattr(os, 'pidfd_open'), os.path.exists('/proc'))")
    assert "False" in said.text()
    elsewhere.ok("import torch, torch.distributed as dist\ndist.init_process_group('gloo')")
    said = elsewhere.ok("x = torch.ones(2)\ndist.all_reduce(x)\nprint(x.tolist())")
    assert "[2.0, 2.0]" in said.text()
    ended = elsewhere.run("if dist.get_rank() == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "rank 1 ended" in str(ended.reply)
    elsewhere.ok("%restart_ranks")
    assert "again" in elsewhere.ok("print('again')").text()
