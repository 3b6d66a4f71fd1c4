"""run() and isolated_world()."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from minidist.errors import LaunchDeadlineError, LaunchError
from minidist.launch import run


def report_environment(extra):
    import torch

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLOUR")
    return [os.environ[name] for name in names] + [extra, torch.get_num_threads()]


def test_run_returns_one_result_per_rank():
    results = run(report_environment, 3, {"a": 1}, env={"COLOUR": "red"})
    assert results == [
        [str(r), str(r), "3", "3", "127.0.0.1", "red", {"a": 1}, 1] for r in range(3)
    ]
    assert "COLOUR" not in os.environ


def sum_over_gloo():
    import torch
    import torch.distributed as dist

    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total


def test_ranks_can_meet_and_return_tensors():
    assert [t.item() for t in run(sum_over_gloo, 3)] == [6.0, 6.0, 6.0]


def test_gloo_meets_on_the_loopback_unless_somebody_says_where(monkeypatch):
    """The host's own name may lead to an address of a VPN, at which nobody answers."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert run(os.getenv, 2, "GLOO_SOCKET_IFNAME") == ["lo", "lo"]
    assert run(os.getenv, 1, "GLOO_SOCKET_IFNAME", env={"GLOO_SOCKET_IFNAME": "eth7"}) == ["eth7"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    assert run(os.getenv, 1, "GLOO_SOCKET_IFNAME") == ["eth8"]


def test_ranks_meet_inside_a_process_of_torchrun_too(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # its agent serves another store
    assert [t.item() for t in run(sum_over_gloo, 2)] == [3.0, 3.0]


def test_functions_that_cannot_be_imported_run_too():
    offset = 10
    assert run(lambda: int(os.environ["RANK"]) + offset, 2) == [10, 11]


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("on purpose")
    time.sleep(600)


def test_an_exception_names_its_rank_and_ends_the_others():
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="on purpose") as caught:
        run(fail_on_rank_1, 3)
    assert time.monotonic() - begin < 50
    assert caught.value.rank == 1
    text = str(caught.value)
    assert text.startswith("[rank 1]")
    assert "in fail_on_rank_1" in text  # its traceback
    assert "killed while still running: ranks 0, 2" in text


def die(how):
    if os.environ["RANK"] == "0":
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)


@pytest.mark.parametrize(("how", "text"), [("signal", "signal SIGKILL"), ("exit", "code 3")])
def test_a_rank_that_dies_is_named(how, text):
    with pytest.raises(LaunchError, match=rf"rank 0\].*without a result \({text}\)"):
        run(die, 2, how)


def sleep_on_rank_1(path):
    with open(f"{path}/{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    if os.environ["RANK"] == "1":
        time.sleep(600)


def test_the_deadline_names_who_had_not_finished_and_kills(tmp_path):
    with pytest.raises(LaunchDeadlineError, match="rank 1 had not finished after 15 s") as caught:
        run(sleep_on_rank_1, 2, str(tmp_path), deadline_s=15)
    assert caught.value.rank == 1
    pid = int((tmp_path / "1").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for_nobody():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(1))
    elif dist.get_rank() == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        time.sleep(600)


def test_the_deadline_says_where_ranks_stood():
    with pytest.raises(LaunchDeadlineError) as caught:
        run(wait_for_nobody, 3, deadline_s=20)
    lines = str(caught.value).splitlines()
    assert "ranks 1, 2 had not finished after 20 s (of 3 ranks)" in lines[0]
    assert lines[0].endswith("killed; rank 0 had returned, so nothing that waits for it ends")
    [where] = lines[1:]  # rank 1 does not answer
    begin, _, code = where.partition(": ")
    line = wait_for_nobody.__code__.co_firstlineno + 6
    expected = f"all_reduce, called by wait_for_nobody, test_launch.py line {line}"
    assert begin == f"rank 2 stood in {expected}"
    assert code == "dist.all_reduce(torch.ones(1))"


def destroys_its_group():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    gone, backend = weakref.ref(group), group._get_backend(torch.device("cpu"))
    del group
    before = sys.getrefcount(backend)
    dist.destroy_process_group()
    gc.collect()
    return gone() is None, sys.getrefcount(backend) > before


def test_a_destroyed_group_goes_and_its_backend_stays():
    """What is bound to the group ends with it; no destructor joins the backend's threads."""
    assert run(destroys_its_group, 2) == [(True, True)] * 2


def needs_rank_0_later():
    import torch.distributed as dist

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    globals()["kept"] = store
    if rank:
        time.sleep(0.5)
        store.set("late", str(rank))


def test_the_store_is_there_until_every_rank_is_done():
    """Rank 0 serves it, and may be done long before the others have met."""
    assert run(needs_rank_0_later, 3) == [None] * 3


def unpicklable_result():
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(LaunchError, match="pickle"):
        run(unpicklable_result, 1)
    with pytest.raises(ValueError, match="nprocs must be at least 1"):
        run(unpicklable_result, 0)


def all_reduce_of_rank():
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total.item()


def nest_worlds(existing, rounds):
    import sys

    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.nn.parallel import DistributedDataParallel

    from minidist.launch import isolated_world

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if existing:
        dist.init_process_group("gloo")
        side = dist.new_group(list(range(world_size)))
        shared = dist.distributed_c10d._get_default_store()
    else:
        shared = dist.TCPStore(host, port, world_size, rank == 0)
    hook = sys.excepthook

    def isolated(number, base=None):
        store = dist.PrefixStore(f"round {number}", shared)
        base = 100 * (number + 1) if base is None else base
        return isolated_world("gloo", store=store, rank=rank, world_size=world_size, base=base)

    def unchanged():
        assert dist.is_initialized() == existing
        assert sys.excepthook is hook
        assert len(c10d._world.pg_map) == (2 if existing else 0)
        if existing:
            assert all_reduce_of_rank() == 3.0
            total = torch.ones(1)
            dist.all_reduce(total, group=side)
            assert total.item() == world_size
            # By name, as functional collectives find their group.
            functional = torch.distributed._functional_collectives.all_reduce(
                torch.ones(1), "sum", dist.group.WORLD
            )
            assert functional.sum().item() == world_size

    # 1. Many rounds, each with a group of its own and a stock DDP.
    for number in range(rounds):
        with isolated(number) as group:
            assert dist.group.WORLD is group
            assert all_reduce_of_rank() == 3.0
            sub = dist.new_group([0, 1])
            dist.barrier(group=sub)
            if number % 5 == 0:
                model = DistributedDataParallel(torch.nn.Linear(2, 2))
                model(torch.ones(1, 2) * rank).sum().backward()
                weights = model.module.weight
                assert weights.grad is not None
                assert weights.grad[0, 0].item() == 0.5
    unchanged()

    # 2. After an error inside, and nested.
    try:
        with isolated(1000):
            raise KeyError("student")
    except KeyError:
        pass
    unchanged()
    with isolated(1001):
        with isolated(1002):
            assert all_reduce_of_rank() == 3.0
        assert all_reduce_of_rank() == 3.0

    # 3. Code inside that destroys, and makes another default group.
    with isolated(1003):
        dist.destroy_process_group()
        assert not dist.is_initialized()
    unchanged()
    with isolated(1004):
        dist.destroy_process_group()
        store = dist.PrefixStore("of the student", shared)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        assert all_reduce_of_rank() == 3.0
    unchanged()
    with isolated(1005):
        try:
            dist.init_process_group("gloo", store=shared, rank=rank, world_size=world_size)
            raise AssertionError("a second default group was accepted")
        except ValueError:
            pass
        assert all_reduce_of_rank() == 3.0
    unchanged()

    # 4. A failing start leaves no trace either.
    with (
        pytest.raises((ValueError, AttributeError, RuntimeError, AssertionError), match="no such"),
        isolated_world("no such backend", store=shared, rank=rank, world_size=2, base=7),
    ):
        raise KeyError("not reached")
    unchanged()
    return "done"


@pytest.mark.parametrize("existing", [True, False])
def test_isolated_world(existing):
    assert run(nest_worlds, 2, existing, 20, deadline_s=100) == ["done", "done"]


def sum_by_workers() -> float:
    from torch.utils.data import DataLoader

    loader = DataLoader(list(range(10)), batch_size=3, num_workers=2)
    return float(sum(batch.sum() for batch in loader))


def test_a_rank_may_have_loader_workers():
    assert run(sum_by_workers, 2, deadline_s=60) == [45.0, 45.0]


UNGUARDED = """
import os
from minidist.launch import run

print("the script runs")

class Half:
    def __init__(self, x):
        self.x = x / 2

def half(x):
    return Half(x + int(os.environ["RANK"])).x

print(run(half, 2, 4))
"""


@pytest.mark.parametrize("start", [["script.py"], ["-m", "script"]])
def test_a_script_without_a_guard_is_not_run_once_more(start, tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, *start], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "the script runs\n[2.0, 2.5]\n", done.stderr
