"""Memory, loader, stragglers, monitor, settings, topology: planted causes are found."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from minidist.precision import MasterWeights
from minidist.profile import (
    SETTINGS,
    ArrivalTimer,
    LoaderSettings,
    MemoryTracker,
    Monitor,
    Reading,
    SettingsRow,
    WatchedLoader,
    choose_reader,
    compare_settings,
    explain,
    find_dangers,
    find_stragglers,
    overhead_rows,
    parse_topo,
    scaling_rows,
    suggest,
)
from minidist.profile.loader import FakeClock
from minidist.profile.readers import host_reader, nvml_reader, smi_reader

# ------------------------------------------------------------------------------------------- memory


def make_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 5, bias=False))
    return net, torch.optim.Adam(net.parameters())


NUM_BYTES = 4 * (10 * 20 + 20 * 5)


def test_memory_by_category_is_what_one_can_count_by_hand():
    net, optimizer = make_net()
    x = torch.ones(4, 10)
    with MemoryTracker(net, optimizer) as tracker:
        for _ in range(2):
            loss = net(x).sum()
            tracker.mark("forward")
            loss.backward()
            tracker.mark("backward")
            optimizer.step()
            tracker.mark("optimizer")
            optimizer.zero_grad()
            tracker.mark("end")
    forward, backward, update, end, second, *_ = tracker.marks
    # Saved for backward: the input (4 x 10) and the ReLU's output (4 x 20); the loss lives, too.
    assert (forward.parameters, forward.gradients, forward.optimizer) == (NUM_BYTES, 0, 0)
    assert forward.activations == 4 * (4 * 10 + 4 * 20)
    assert forward.other == 4
    assert backward.gradients == NUM_BYTES
    assert backward.activations == 4 * 4 * 10  # the batch: this function still holds it
    state = 2 * NUM_BYTES + 2 * 4  # two momenta, and a step count per parameter
    assert (update.optimizer, update.gradients) == (state, NUM_BYTES)
    assert (end.gradients, second.optimizer) == (0, state)
    assert tracker.peak.total == max(row.total for row in tracker.rows)
    assert tracker.peak_of("activations") == forward.activations
    assert tracker.peak_of("gradients") == NUM_BYTES
    assert all(row.total >= NUM_BYTES for row in tracker.rows)
    assert any(row.after.startswith("aten.mm") for row in tracker.rows)
    assert tracker.rows[0].allocated_bytes is None or torch.cuda.is_available()


def native_peak_bytes(
    step: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Peak bytes of one call of `step` by category and in "Total", by torch's own MemTracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    sums: dict[str, int] = {}
    for snapshot in tracker.get_tracker_snapshot("peak").values():
        for name, num_bytes in snapshot.items():
            key = getattr(name, "value", str(name))
            sums[key] = sums.get(key, 0) + num_bytes
    return sums


def test_memory_agrees_with_torch_where_both_count():
    net, optimizer = make_net()
    x = torch.ones(4, 10)

    def step() -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    native = native_peak_bytes(step, net, optimizer)
    with MemoryTracker(net, optimizer) as tracker:
        step()
    assert native["Parameter"] == tracker.peak_of("parameters")
    assert native["Gradient"] == tracker.peak_of("gradients")
    # torch counts the optimiser's temporaries as its state, and forgets the batch.
    assert native["Total"] + x.nbytes == tracker.peak.total


def test_checkpointing_shows_and_patches_are_undone():
    torch.manual_seed(0)
    block = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    x = torch.ones(16, 8)
    resize = torch.UntypedStorage.resize_

    def activations(forward) -> int:
        with MemoryTracker(block, keep_rows=False) as tracker:
            output = forward(x)
            mark = tracker.mark("forward")
            assert tracker.rows == []
            output.sum().backward()
            block.zero_grad()
        return mark.activations

    plain = activations(block)
    recomputed = activations(lambda x: checkpoint(block, x, use_reentrant=False))
    assert plain == 5 * x.nbytes  # the batch and four outputs
    assert recomputed == x.nbytes or recomputed == 0  # at most the block's input
    assert torch.UntypedStorage.resize_ is resize
    assert not any(p._post_accumulate_grad_hooks for p in block.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_backward_computes_once_more_is_an_activation(use_reentrant):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    x = torch.ones(16, 8, requires_grad=True)
    with MemoryTracker(block) as tracker:
        output = checkpoint(block, x, use_reentrant=use_reentrant)
        before = tracker.peak_of("activations")
        output.sum().backward()
    assert before <= x.nbytes
    # Saved when it computes again: the input and the tanh's output. Counted beside them until it
    # is freed: the output of the first linear.
    assert x.nbytes + 4 * 16 * 32 <= tracker.peak_of("activations") <= 2 * x.nbytes + 8 * 16 * 32


def test_resized_storages_and_tied_parameters_count_once():
    net = nn.Linear(4, 4, bias=False)
    net.register_parameter("tied", net.weight)
    with MemoryTracker(net) as tracker:
        x = torch.ones(100)
        x.untyped_storage().resize_(0)  # as FSDP does
        empty = tracker.mark("empty")
        x.untyped_storage().resize_(400)
        full = tracker.mark("full")
        del x
        gone = tracker.mark("gone")
    assert [row.other for row in (empty, full, gone)] == [0, 400, 0]
    assert full.parameters == 64


# ------------------------------------------------------------------------------------------- loader


class Sleepy(Dataset):
    """Takes a second per sample, on a clock of its own."""

    def __init__(self, clock: FakeClock, seconds: float = 1.0) -> None:
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.sleep(self.seconds)
        return torch.tensor(index)


@pytest.mark.parametrize(("load_s", "share"), [(3.0, 0.9), (0.01, 0.03 / 1.03)])
def test_a_slow_loader_is_found_however_quick_the_copy(load_s, share):
    clock = FakeClock()
    watched = WatchedLoader(DataLoader(Sleepy(clock, load_s), batch_size=3), clock=clock)
    for _ in range(2):  # epochs add up
        for _batch in watched:
            clock.sleep(1.0)
    result = watched.report()
    assert (result.num_batches, len(watched)) == (8, 4)
    assert result.wait_s == pytest.approx(3 * load_s)
    assert result.compute_s == pytest.approx(1.0)
    assert result.wait_fraction == pytest.approx(share)
    assert result.is_bottleneck() == (load_s > 1)


def test_breaking_off_and_synchronising():
    clock = FakeClock()
    watched = WatchedLoader(range(10), synchronize=lambda: clock.sleep(2.0), clock=clock)
    for index, _ in enumerate(watched):
        if index == 3:
            break
    assert watched.compute_s == [2.0] * 4
    with pytest.raises(ValueError, match="no batch"):
        WatchedLoader([]).report()


def make_worker_loader(clock: FakeClock, load_s: float, compute_s: float, spike_s: float = 0.0):
    """What a loader with w workers looks like to the loop: max(0, L/w - C) of waiting."""

    def make(s: LoaderSettings):
        clock.sleep(5.0)  # starting workers happens before the first batch
        wait_s = max(0.0, load_s / s.num_workers - compute_s) if s.num_workers else load_s
        for index in range(20):
            clock.sleep(wait_s + (spike_s if s.num_workers and index == 10 else 0.0))
            yield index

    return make


@pytest.mark.parametrize(("load_s", "cores", "workers"), [(3.0, 8, 3), (3.5, 8, 4), (9.0, 4, 4)])
def test_as_many_workers_as_needed_and_no_more(load_s, cores, workers):
    clock = FakeClock()
    rows = compare_settings(
        make_worker_loader(clock, load_s, 1.0),
        lambda batch: clock.sleep(1.0),
        [LoaderSettings(num_workers=w) for w in range(5)],
        num_batches=10,
        rounds=2,
        clock=clock,
    )
    assert [row.wait_s for row in rows] == pytest.approx(
        [load_s] + [max(0.0, load_s / w - 1) for w in range(1, 5)]
    )
    result = suggest(rows, cores=cores, on_gpu=True, batches_per_epoch=100)
    assert result.settings.num_workers == workers
    assert result.settings.persistent_workers
    assert result.settings.pin_memory
    text = str(result)
    assert ("make batches cheaper" in text) == (load_s == 9.0)
    assert "persistent_workers" in text


def test_suggestions_beyond_what_was_measured():
    row = SettingsRow(
        settings=LoaderSettings(), wait_s=0.0005, compute_s=1.0, worst_wait_s=0.001, start_s=0.1
    )
    assert suggest([row], cores=8).settings == LoaderSettings()  # loads in no time: no workers
    clock = FakeClock()
    rows = compare_settings(
        make_worker_loader(clock, 1.0, 1.0, spike_s=9.0),
        lambda batch: clock.sleep(1.0),
        [LoaderSettings(num_workers=2)],
        num_batches=20,
        rounds=1,
        clock=clock,
    )
    assert suggest(rows, cores=4).settings.prefetch_factor == 6  # 9 s hidden by 10 batches and more
    with pytest.raises(ValueError, match="measured rows"):
        suggest([], cores=4)
    with pytest.raises(ValueError, match="2 batches"):
        compare_settings(lambda s: [], print, [LoaderSettings()], num_batches=1)
    arguments = LoaderSettings(prefetch_factor=4, persistent_workers=True).as_arguments()
    DataLoader([1, 2], **arguments)  # torch refuses prefetch_factor without workers


# --------------------------------------------------------------------------------------- stragglers


def noisy_rows(num_ranks: int, num_steps: int = 40, seed: int = 0) -> dict[int, list[float]]:
    """About 1 s each, 2 % noise per rank, and common disturbances far larger than that."""
    rng = random.Random(seed)
    common = [1.0 + (rng.random() if rng.random() < 0.2 else 0.0) for _ in range(num_steps)]
    return {rank: [c * rng.gauss(1.0, 0.02) for c in common] for rank in range(num_ranks)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_nobody_is_late_who_is_not(num_ranks, seed):
    result = find_stragglers(noisy_rows(num_ranks, seed=seed), num_sigmas=5)
    assert result.stragglers == ()
    assert all(each.late_steps == () for each in result.ranks)
    assert result.fair_step_s == result.step_s
    assert result.wasted_rank_s == 0
    assert "no straggler" in str(result)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_late_rank_is_named_with_its_cost(num_ranks):
    rows = noisy_rows(num_ranks)
    late = num_ranks - 1
    rows[late] = [seconds * 1.3 for seconds in rows[late]]
    result = find_stragglers(rows)
    assert result.stragglers == (late,)
    assert result.ranks[late].late_fraction == pytest.approx(0.3, abs=0.05)
    assert result.ranks[late].last_fraction > 0.9
    honest = [max(row[s] for r, row in rows.items() if r != late) for s in range(40)]
    assert result.fair_step_s == pytest.approx(sum(honest) / 40, rel=0.02)
    assert result.wasted_rank_s == pytest.approx(
        (result.step_s - result.fair_step_s) * 40 * num_ranks
    )
    assert f"rank {late} is late in every step" in str(result)


def test_hiccups_are_told_from_slowness():
    rows = noisy_rows(4)
    for step in (5, 17):
        rows[2][step] += 3.0
    result = find_stragglers(rows, num_sigmas=5)
    assert result.stragglers == ()
    assert [each.late_steps for each in result.ranks] == [(), (), (5, 17), ()]
    assert (result.step_s - result.fair_step_s) * 40 == pytest.approx(6.0, abs=0.5)
    assert "now and then" in str(result)


def test_straggler_arguments():
    for rows in ({}, {0: [1.0]}, {0: [], 1: []}, {0: [1.0], 1: [1.0, 2.0]}):
        with pytest.raises(ValueError, match="two ranks or more"):
            find_stragglers(rows)
    clock = FakeClock()
    timer = ArrivalTimer(synchronize=lambda: clock.sleep(1.0), clock=clock)
    for seconds in (2.0, 3.0):
        with timer:
            clock.sleep(seconds)
    assert timer.seconds == [3.0, 4.0]  # a GPU's work is waited for inside


# ------------------------------------------------------------------------------------------ monitor


def test_monitor_sums_up_and_ends_its_thread():
    steps = iter([0.2, 0.6])
    before = threading.active_count()

    def read():
        return [Reading("gpu 0", next(steps), 10, 40, 100.0), Reading("gpu 1", None, 30, 40, None)]

    with Monitor(60, reader=read) as monitor:
        pass
    assert threading.active_count() == before
    first, second = monitor.summary()
    assert first.utilization == pytest.approx(0.4)
    assert (first.peak_utilization, first.power_w, first.num_samples) == (0.6, 100.0, 2)
    assert (second.utilization, second.peak_memory_bytes, second.energy_j) == (None, 30, None)
    assert first.energy_j == pytest.approx(
        100 * (monitor.samples[-1].time_s - monitor.samples[0].time_s)
    )


def test_monitor_samples_in_the_background_until_its_deadline():
    enough = threading.Event()
    count = 0

    def read():
        nonlocal count
        count += 1
        if count == 5:
            enough.set()
        return [Reading("host", 0.5, 1, 2, None)]

    with Monitor(0.001, reader=read) as monitor:
        assert enough.wait(30)
    assert len(monitor.samples) == count >= 5
    with Monitor(0.001, reader=read, deadline_s=1e-9) as forgotten:
        thread = forgotten._thread
        assert thread is not None
        thread.join(30)
        assert not thread.is_alive()


def test_monitor_outlives_its_reader():
    def read():
        raise OSError("the driver went away")

    with Monitor(0.001, reader=read) as monitor:
        time.sleep(0)
    assert isinstance(monitor.error, OSError)
    assert monitor.summary() == ()
    with pytest.raises(ValueError, match="above 0"):
        Monitor(0)


class FakeNvml:
    """The part of nvidia-ml-py that is used; the second GPU does not tell its power."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=50 + handle)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=2**30, total=2**33)

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle:
            raise self.NVMLError
        return 412_500


def test_readers(monkeypatch, tmp_path):
    # NVML, where it is installed.
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    gpu0, gpu1 = nvml_reader()()
    assert gpu0 == Reading("gpu 0", 0.5, 2**30, 2**33, 412.5)
    assert gpu1 == Reading("gpu 1", 0.51, 2**30, 2**33, None)
    assert choose_reader()()[0].device == "gpu 0"
    # Else the program.
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RuntimeError, match="nvidia-ml-py"):
        nvml_reader()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '3, 7, 1024, 81559, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (reading,) = choose_reader()()
    assert reading == Reading("gpu 3", 0.07, 2**30, 81559 * 2**20, None)
    program.write_text("#!/bin/sh\necho 'No devices were found'\n")
    with pytest.raises(RuntimeError, match="expected 5 fields"):
        smi_reader()()
    # Else the host.
    program.unlink()
    for _ in range(2):
        read = host_reader() if "psutil" in sys.modules else choose_reader()
        (first,), (second,) = read(), read()
        assert first.device == "host"
        assert first.utilization is None
        assert second.utilization is None or 0 <= second.utilization <= 1
        assert 0 < second.memory_used_bytes < second.memory_total_bytes
        monkeypatch.setitem(sys.modules, "psutil", None)  # then from /proc


# ------------------------------------------------------------------------------------ NCCL settings


def test_names_of_torch_are_those_of_the_installed_torch():
    include = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    texts = [path.read_text() for path in include.glob("*.hpp")]
    # Two are read in a source file that is not installed.
    known = {
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_DISTRIBUTED_DEBUG",
    }
    names = {n for s in SETTINGS if s.group == "torch" for n in (s.name, *s.old_names)} - known
    assert len(names) > 10
    assert [name for name in names if not any(f'"{name}"' in text for text in texts)] == []


def test_settings_are_complete_and_unique():
    names = [name for s in SETTINGS for name in (s.name, *s.old_names)]
    assert len(set(names)) == len(names)
    assert all(s.what and s.default and s.when for s in SETTINGS)


DANGERS = [
    ({"NCCL_PROTO": "LL,LL128"}, "corrupts data"),
    ({"NCCL_ALGO": "Tree"}, "one algorithm"),
    ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "over the network"),
    ({"NCCL_P2P_DISABLE": "1"}, "no NVLink"),
    ({"NCCL_IB_DISABLE": "1"}, "TCP"),
    ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "at most 64"),
    ({"NCCL_SOCKET_IFNAME": "=lo"}, "this machine only"),
    ({"NCCL_SOCKET_IFNAME": "ens"}, "no interface here is called ens"),
    ({"NCCL_DEBUG_SUBSYS": "NET"}, "does nothing"),
    ({"NCCL_DEBUG_FILE": "/tmp/nccl.log"}, "write over"),
    ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, "hanging for ever"),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "no overlap"),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "nothing to read"),
    ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, "monitoring thread"),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30"}, "is ended"),
    ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "slow"),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "nothing overlaps"),
]


@pytest.mark.parametrize(("env", "text"), DANGERS)
def test_dangers_are_named(env, text):
    rows = explain(env, interfaces=["lo", "eth0"])
    assert [row.name for row in rows] == sorted(env)
    assert any(text in warning for row in rows for warning in row.warnings)


def test_sound_settings_are_not_dangerous():
    env = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "GRAPH",
        "NCCL_DEBUG_FILE": "nccl.%h.%p",
        "NCCL_PROTO": "^LL128",
        "NCCL_ALGO": "^Tree",
        "NCCL_SOCKET_IFNAME": "eth",
        "NCCL_IB_DISABLE": "0",
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    assert find_dangers(env, interfaces=["lo", "eth0"]) == []
    assert find_dangers({}) == []
    (row,) = explain({"NCCL_SOKCET_IFNAME": "eth0", "HOME": "/root"})
    assert "misspelt" in row.what
    (row,) = explain({"TORCH_NCCL_TRACE_BUFFER_SIZE": "100"})
    assert row.warnings == ("an old name of TORCH_FR_BUFFER_SIZE",)


# ----------------------------------------------------------------------------------------- topology

TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tPIX\tSYS\t0-31\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tNV2\tPXB\tSYS\t0-31\t0\t\tN/A\n"
    "GPU2\tSYS\tNV2\t X \tSYS\tPIX\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPIX\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)


def test_topology_of_gpus():
    topology = parse_topo(TOPO)
    assert topology.gpus == ("GPU0", "GPU1", "GPU2")
    assert topology.link("GPU1", "GPU2") == "NV2"
    assert topology.slowest() == ("GPU0", "GPU2", "SYS")
    assert topology.affinity == {"GPU0": "0-31", "GPU1": "0-31", "GPU2": "32-63"}
    assert topology.numa["GPU2"] == "1"
    assert topology.nics == {"NIC0": "mlx5_0", "NIC1": "mlx5_1"}
    with pytest.raises(ValueError, match="topo -m"):
        parse_topo("nvidia-smi: command not found")


# ------------------------------------------------------------------------------------------ scaling


def test_scaling_rows_are_ratios_within_a_round():
    # The machine is twice as slow in the second round: nothing changes but the times.
    seconds = {1: [8.0, 16.0, 8.0], 2: [5.0, 10.0, 5.0], 4: [4.0, 8.0, 4.0]}
    one, two, four = scaling_rows(seconds, mode="strong", batch_size=8)
    assert (one.speedup, one.efficiency) == (1.0, 1.0)
    assert (two.speedup, two.speedup_low, two.speedup_high) == (1.6, 1.6, 1.6)
    assert (four.speedup, four.efficiency, four.batch_size) == (2.0, 0.5, 2)
    assert (two.low_s, two.step_s, two.high_s) == (5.0, 5.0, 7.5)
    weak = scaling_rows(seconds, mode="weak", batch_size=8, cores=2)
    assert [row.efficiency for row in weak] == [1.0, 1.6, 2.0]
    assert [row.batch_size for row in weak] == [8, 8, 8]
    assert [bool(row.note) for row in weak] == [False, True, True]
    assert "take turns" in weak[2].note
    # A model that does not fit one rank starts at two.
    assert scaling_rows({2: [4.0], 4: [2.0]}, mode="strong", batch_size=4)[1].efficiency == 1.0
    ratios = [row.ratio for row in overhead_rows({"plain": [1.0, 2.0], "ddp": [1.5, 3.0]})]
    assert ratios == [1.0, 1.5]


def test_scaling_arguments():
    with pytest.raises(ValueError, match="does not divide over 3"):
        scaling_rows({1: [1.0], 3: [1.0]}, mode="strong", batch_size=8)
    with pytest.raises(ValueError, match="equally many rounds"):
        scaling_rows({1: [1.0], 2: [1.0, 2.0]})
    with pytest.raises(ValueError, match="mode"):
        scaling_rows({1: [1.0]}, mode="medium")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="world sizes"):
        scaling_rows({})


def test_masters_count_as_the_optimizers_memory():
    model = nn.Linear(2, 2).to(torch.bfloat16)  # 6 parameters
    optimizer = MasterWeights(model.parameters(), torch.optim.Adam)
    with MemoryTracker(model, optimizer) as tracker:
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    last = tracker.rows[-1]
    assert last.parameters == 6 * 2
    assert last.optimizer == 6 * 4 + 2 * 6 * 4 + 2 * 4  # masters, moments, two counts of steps
    assert tracker.peak_of("gradients") >= 6 * 4  # those of the masters
