"""Ranks that give one collective different sizes: gloo would end a rank by SIGABRT."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_helper import JOIN, Kernel
from kernel_helper import kernel as new_kernel

from minidist.errors import LaunchError
from minidist.launch import run

APART = "the ranks called different collectives: "
CALLS = [
    (
        "dist.all_reduce(torch.ones(10 + 1000 * rank))",
        "rank 0: all_reduce float32 [10]; rank 1: all_reduce float32 [1010]",
    ),
    (
        "dist.all_reduce(torch.ones(9, dtype=[torch.float64, torch.float32][rank]))",
        "rank 0: all_reduce float64 [9]; rank 1: all_reduce float32 [9]",
    ),
    (
        "work = dist.all_reduce(torch.ones(10 + 1000 * rank), async_op=True); work.wait()",
        "rank 0: all_reduce float32 [10]; rank 1: all_reduce float32 [1010]",
    ),
]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with new_kernel() as it:
        yield it


@pytest.mark.parametrize(("code", "said"), CALLS)
def test_a_cell_says_which_rank_called_what(kernel: Kernel, code: str, said: str) -> None:
    kernel.ok(f"%restart_ranks\n{JOIN}\ndist.all_reduce(torch.ones(3))")
    result = kernel.run(code)
    assert result.reply["ename"] == "DistributedHang"
    assert result.reply["evalue"].splitlines()[0] == APART + said
    for rank in range(2):
        op, dtype, shape = said.split("; ")[rank].removeprefix(f"rank {rank}: ").split()
        assert result.rank(rank)["text"].startswith(f"waits in {op} ({dtype} {shape}) at Cell In[")
    assert "gloo" not in result.reply["evalue"]


def test_a_collective_that_one_rank_never_calls_is_still_told_as_such(kernel: Kernel) -> None:
    kernel.ok(f"%restart_ranks\n{JOIN}")
    result = kernel.run("if rank == 0: dist.all_reduce(torch.ones(4))")
    assert result.reply["evalue"].startswith("the ranks wait for each other forever\n")


def test_a_rank_that_has_failed_is_named_first(kernel: Kernel) -> None:
    kernel.ok(f"%restart_ranks\n{JOIN}")
    result = kernel.run("if rank == 1: raise ValueError('no')\ndist.all_reduce(torch.ones(4))")
    assert result.reply["evalue"].startswith("rank 1 failed, and others wait forever\n")


def mismatch(code: str, timeout_s: float = 60.0) -> None:
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.ones(3))
    exec(code, {"torch": torch, "dist": dist, "rank": int(os.environ["RANK"])})
    dist.barrier()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("code", "said"), CALLS)
def test_launch_says_which_rank_called_what(code: str, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        run(mismatch, 2, code)
    rank = caught.value.rank
    assert str(caught.value).splitlines()[0] == f"[rank {rank}] {APART}{said}"


@pytest.mark.usefixtures("patient")
def test_launch_names_the_one_of_four_that_differs() -> None:
    with pytest.raises(LaunchError) as caught:
        # Not all ranks meet the fault: gloo's timeout ends those that only wait.
        run(mismatch, 4, "dist.all_reduce(torch.ones(10 if rank == 2 else 5000))", 10.0)
    assert "rank 2: all_reduce float32 [10]" in str(caught.value).splitlines()[0]


def test_launch_does_not_call_it_a_mismatch_when_a_rank_fails_by_itself() -> None:
    with pytest.raises(LaunchError) as caught:
        run(mismatch, 2, "if rank == 1: raise KeyError('own')\ndist.all_reduce(torch.ones(3))")
    assert str(caught.value).startswith("[rank 1] failed in run()")


OVERSIZED = "a message came that is larger than the tensor which receives it"
MESSAGES = [
    ("if rank: dist.send(torch.ones(1000), 0)", "else: dist.recv(torch.ones(10), 1)"),
    ("if rank: dist.isend(torch.ones(9).double(), 0).wait()", "else: dist.recv(torch.ones(9), 1)"),
    (
        "ops = [dist.P2POp(dist.isend, torch.ones(1 + 9 * rank), 1 - rank)]",
        "ops += [dist.P2POp(dist.irecv, torch.ones(1), 1 - rank)]",
        "for work in dist.batch_isend_irecv(ops): work.wait()",
    ),
]


@pytest.mark.parametrize("lines", MESSAGES)
def test_a_cell_says_that_a_message_is_too_large_and_where(kernel: Kernel, lines: list) -> None:
    kernel.ok(f"%restart_ranks\n{JOIN}\ndist.all_reduce(torch.ones(3))")
    result = kernel.run("\n".join(lines))
    assert result.reply["ename"] == "DistributedHang"
    assert result.reply["evalue"].startswith(f"rank 0: {OVERSIZED}")
    assert f"line {len(lines)}: {lines[-1]}" in result.rank(0)["text"]


def test_a_cell_ends_while_other_ranks_work_on(kernel: Kernel) -> None:
    kernel.ok(f"%restart_ranks\n{JOIN}\nimport time")
    receives = "else: dist.recv(torch.ones(10), 1)"
    result = kernel.run(f"if rank: dist.send(torch.ones(50), 0); time.sleep(60)\n{receives}")
    assert result.reply["evalue"].startswith(f"rank 0: {OVERSIZED}")
    assert result.seconds < 30


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("lines", MESSAGES)
def test_launch_says_that_a_message_is_too_large_and_where(lines: list) -> None:
    with pytest.raises(LaunchError) as caught:
        run(mismatch, 2, "\n".join(lines))
    assert str(caught.value).startswith(f"[rank 0] {OVERSIZED}")
    assert f'File "<string>", line {len(lines)}' in str(caught.value)


ABORTS_IN_A_THREAD = """
import ctypes, threading
# std::terminate without an exception, as when a thread of torch cannot have memory
threading.Thread(target=ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]).start()
"""


def test_a_rank_that_ends_for_another_reason_is_lost_at_once(kernel: Kernel) -> None:
    kernel.ok(f"%restart_ranks\n{JOIN}")
    result = kernel.run(f"if rank == 0: {'exec(' + repr(ABORTS_IN_A_THREAD) + ')'}\ndist.barrier()")
    assert result.reply["ename"] == "RankLost"
    assert "rank 0 ended with signal 6 (SIGABRT)" in result.reply["evalue"]
    assert result.seconds < 15
