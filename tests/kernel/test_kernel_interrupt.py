"""Deadlock, interrupt, a new process group, a right sum: again and again in one notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed.distributed_c10d as c10d
from kernel_helper import SETUP, Kernel, Result, says_now
from kernel_helper import kernel as new_kernel

from minidist.kernel.inside import recover

NUM_ROUNDS = 50
# Each blocks at least one rank for ever in what SIGINT alone does not break off.
DEADLOCKS = (
    "if rank == 0: dist.all_reduce(x)\nelse: time.sleep(1000)",
    "if rank == 1: dist.barrier()\nelse: time.sleep(1000)",
    "if rank == 0: dist.recv(x, src=1)\nelse: time.sleep(1000)",
    "if rank == 0: dist.all_reduce(x)\nelse: dist.broadcast(x, src=0)",
    "dist.recv(x, src=1 - rank)",
    "if rank == 0: dist.all_reduce(x, async_op=True).wait()\nelse: time.sleep(1000)",
)


def _interrupted(kernel: Kernel, code: str) -> Result:
    """Run `code` and interrupt it as soon as both ranks are about to block."""
    # The ranks meet in the store, so that what is printed means that both have come so far.
    meet = (
        "import torch.distributed.distributed_c10d as c10d\n"
        "store = c10d._get_default_store()\n"
        "store.set(f'{rank}', ''); store.wait([f'{1 - rank}'])\n"
        "if rank == 0: print('now', flush=True)\n"
    )
    return kernel.run(meet + code, stop=says_now)


@pytest.mark.nightly
def test_fifty_deadlocks_in_one_notebook() -> None:
    cut = 0
    with new_kernel() as kernel:
        kernel.ok(f"{SETUP}\nx = torch.zeros(1000)\nrounds = 0")
        kernel.request(action="deadline", seconds=30)
        generation = kernel.request(action="status")["generation"]
        for number in range(3 * NUM_ROUNDS):
            # Values that differ in every round: what is left over from one would show.
            right = kernel.ok(
                "if not dist.is_initialized(): dist.init_process_group('gloo')\n"
                "rounds += 1; y = torch.full((1000,), float(rounds * (rank + 1)))\n"
                "dist.all_reduce(y); print(y.unique().tolist(), dist.get_world_size())"
            )
            assert right.text() == f"[{3.0 * (number + 1)}] 2\n[rank 1: same output]\n"
            if cut == NUM_ROUNDS:
                break
            code = DEADLOCKS[number % len(DEADLOCKS)]
            result = _interrupted(kernel, code)
            assert result.kind == "error", (code, result.reply)
            # Where the interrupt came before the collective, there was nothing to cut: once more.
            cut += "destroyed on every rank" in result.text("stderr")
        assert cut == NUM_ROUNDS
        assert kernel.request(action="status")["generation"] == generation


def test_communicators_of_nccl_are_aborted_and_no_others(monkeypatch):
    """With groups that only note it: there is no nccl without a GPU."""
    aborted = []

    class Group:
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def abort(self) -> None:
            aborted.append(self.name)
            if self.fails:
                raise RuntimeError("communicator is gone")

    found = {
        Group("gloo"): ("gloo", None),
        Group("broken", fails=True): ("nccl", None),
        Group("both"): ("cpu:gloo,cuda:nccl", None),
    }
    monkeypatch.setattr(type(c10d._world), "pg_map", property(lambda _: found))
    assert recover.abort_nccl() == 2
    assert aborted == ["broken", "both"]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with new_kernel() as it:
        it.ok(SETUP)
        yield it


SLOW_LOADER = """from torch.utils.data import DataLoader
class Slow:
    def __len__(self): return 1000
    def __getitem__(self, i): time.sleep(0.3); return i
for batch in DataLoader(Slow(), num_workers=2): pass"""


@pytest.mark.parametrize(
    "code",
    ["import asyncio; await asyncio.sleep(100)", SLOW_LOADER],
    ids=["a cell that awaits", "a loader that ends its workers"],
)
def test_ranks_survive_an_interrupt(kernel: Kernel, code: str) -> None:
    for _ in range(2):
        late = "threading.Timer(1, print, ['now'], {'flush': True}).start()"
        late = f"import threading\nif rank == 0: {late}"
        [error] = kernel.run(f"{late}\n{code}", stop=says_now).of("error")
        assert error["ename"] == "KeyboardInterrupt"
        assert error["evalue"] == "[ranks 0, 1] the cell was interrupted"
        assert kernel.ok("print('on')").text().startswith("on\n")
