"""Code from tutorials says where ranks meet; the kernel knows better, and says so."""

from __future__ import annotations

import pytest
from kernel_helper import ALL_REDUCE, SETUP, kernel

SET = "os.environ['MASTER_ADDR'] = 'localhost'\nos.environ['MASTER_PORT'] = '12355'\n"
INIT = "dist.init_process_group('gloo'{})\n"
SPAWN = """
import multiprocessing
def work(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0
    dist.destroy_process_group()
if rank == 0:
    from minidist.processes.ports import free_port
    port, fork = free_port(), multiprocessing.get_context("fork")
    children = [fork.Process(target=work, args=(r, port)) for r in range(2)]
    for child in children: child.start()
    for child in children: child.join(60)
    print([child.exitcode for child in children])
"""


@pytest.fixture(scope="module")
def ranks():
    with kernel() as it:
        it.ok(SETUP)
        yield it


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (SET + INIT.format(""), "line 2: os.environ['MASTER_PORT'] = '12355'"),
        (SET + INIT.format(", rank=rank, world_size=2"), "line 1: os.environ['MASTER_ADDR']"),
        (
            INIT.format(", init_method='tcp://127.0.0.1:29500', rank=rank, world_size=2"),
            "line 1: dist.init_process_group('gloo', init_method='tcp://",
        ),
    ],
)
def test_a_place_to_meet_is_ignored_and_named(ranks, source, line):
    result = ranks.ok(source + ALL_REDUCE)
    assert result.text() == "3.0\n[rank 1: same output]\n"
    told = result.text("stderr")
    assert "is ignored (In[" in told
    assert line in told
    assert "Delete it" in told
    ranks.ok("dist.destroy_process_group()")


def test_without_such_code_nothing_is_said(ranks):
    result = ranks.ok(INIT.format("") + ALL_REDUCE + "\ndist.destroy_process_group()")
    assert result.text("stderr") == ""


def test_processes_that_a_cell_starts_meet_where_the_cell_says(ranks):
    assert ranks.ok(SPAWN).text().startswith("[0, 0]\n")


def test_gloo_meets_on_the_loopback(ranks):
    assert ranks.ok("print(os.environ['GLOO_SOCKET_IFNAME'])").text().startswith("lo\n")
