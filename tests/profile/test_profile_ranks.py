"""Profiles of real ranks over gloo: counts, identities and hangs, never how long something took."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from minidist import cost
from minidist.errors import LaunchError
from minidist.launch import run
from minidist.parallel.zero import Zero3
from minidist.profile import (
    MemoryTracker,
    dump_on_hang,
    explain_hang,
    find_mismatches,
    find_stragglers,
    find_stuck,
    fit_collective,
    from_profiler,
    gather_rows,
    gather_timeline,
    measure_collectives,
    measure_overhead,
    measure_pairs,
    measure_scaling,
    read_dumps,
    scaling_rows,
    step_shares,
    take_dump,
    write_dump,
)
from minidist.profile.interconnect import collective_row, pair_row
from minidist.profile.paired import end_rank, start_rank

NUM_STEPS, NUM_PARAMETERS = 3, 4


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))


def track_sharded(make):
    start_rank()
    torch.manual_seed(0)
    model, optimizer = make(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
    x = torch.ones(8, 32)
    with MemoryTracker(model, optimizer) as tracker:
        loss = model(x).sum()
        forward = tracker.mark("forward")
        loss.backward()
        tracker.mark("backward")
        optimizer.step()
        after = tracker.mark("optimizer")
    end_rank()
    return forward, after, tracker.peak_of("parameters")


def with_fully_shard(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def with_zero3(model):
    Zero3(model, units=list(model))  # in place
    return model, torch.optim.AdamW(model.parameters())


def profile_ddp():
    start_rank()
    timeline = profile_steps()
    rows = gather_rows([1.0, 1.0] if dist.get_rank() == 0 else [2.0, 2.0])
    end_rank()
    return timeline, rows


def profile_steps():
    # A bucket per parameter, so that the number of all-reduces is known.
    model = DistributedDataParallel(make_net(), bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(8, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()  # DDP builds its buckets anew after the first backward
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_STEPS):
            with record_function("step"):
                step()
        dist.barrier()
    return gather_timeline(from_profiler(profiler, step="step"))


@pytest.mark.parametrize("make", [with_fully_shard, with_zero3])
def test_memory_of_a_sharded_model(make):
    """A rank keeps half of everything, and gathers a layer or two at a time."""
    layer = 4 * (32 * 32 + 32)
    batch, outputs = 4 * 8 * 32, 4 * 4 * 8 * 32
    for forward, after, peak in run(track_sharded, 2, make):
        assert forward.parameters >= 2 * layer  # the last layer may still be whole
        assert forward.activations <= batch + outputs  # not the gathered parameters
        assert after.parameters == 2 * layer
        assert 2 * layer <= after.gradients <= 1.01 * 2 * layer  # Zero3 aligns its buffers
        assert 2 * 2 * layer <= after.optimizer <= 2 * 2 * layer + 8 * 4  # and step counts
        assert 2 * layer < peak <= 2 * layer + 2 * layer


def test_a_profile_of_ddp_counts_its_collectives_and_adds_up():
    (timeline, rows), (other, _) = run(profile_ddp, 2)
    assert timeline == other  # gathered: the same on all ranks
    assert timeline.ranks == (0, 1)
    for rank in (0, 1):
        windows = timeline.windows(rank)
        assert [w.name for w in windows] == ["step 0", "step 1", "step 2"]
        for window in windows:
            assert timeline.collectives(rank, window) == {"gloo:all_reduce": NUM_PARAMETERS}
        calls = [s for s in timeline.of(rank, "communication") if s.name == "c10d::allreduce_"]
        assert len(calls) == NUM_STEPS * NUM_PARAMETERS
        everything = timeline.collectives(rank)
        assert everything["gloo:all_reduce"] == NUM_STEPS * NUM_PARAMETERS
        assert everything["gloo:barrier"] == 1
        linears = [s for s in timeline.of(rank, "compute") if s.name == "aten::linear"]
        assert len(linears) == 2 * NUM_STEPS
    for part in step_shares(timeline):
        parts = part.compute_s + part.exposed_s + part.copy_s + part.loader_s + part.idle_s
        assert parts == pytest.approx(part.step_s, abs=1e-9)
        assert part.exposed_s + part.overlapped_s == pytest.approx(part.communication_s, abs=1e-9)
        assert part.compute_s > 0
        assert part.communication_s > 0
    assert rows == {0: [1.0, 1.0], 1: [2.0, 2.0]}
    assert find_stragglers(rows).stragglers == (1,)


# -------------------------------------------------------------------------------------------- hangs


def meet(store, name: str, world_size: int) -> None:
    """A barrier that is no collective."""
    store.set(f"{name}{dist.get_rank()}", "here")
    store.wait([f"{name}{rank}" for rank in range(world_size)])


def settle(num_unfinished: int) -> None:
    """Wait until the recorder knows what has ended: gloo's threads tell it a moment after."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        groups = take_dump()["pg_status"].values()
        open_ = [g["last_enqueued_collective"] - g["last_completed_collective"] for g in groups]
        if sum(open_) == num_unfinished:
            return
        time.sleep(0.001)
    raise AssertionError(f"the flight recorder never settled: {groups}")


def skip_a_collective(folder: str):
    """Ranks 1 and 2 share a group, in which rank 2 forgets the second all-reduce."""
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    dist.new_group([0, 1])  # not used by all, so that the ranks number their groups differently
    group = dist.new_group([1, 2])
    x = torch.ones(2, 3)
    dist.all_reduce(x)
    work = None
    if rank in (1, 2):
        dist.all_reduce(x, group=group)
    if rank == 1:
        work = dist.all_reduce(x, group=group, async_op=True)
    settle(1 if rank == 1 else 0)
    write_dump(folder)
    meet(store, "dumped", 3)
    if rank == 2:
        dist.all_reduce(x, group=group)
    if work is not None:
        work.wait()
    settle(0)
    healthy = take_dump()
    dist.barrier()
    dist.destroy_process_group()
    return healthy


def test_the_flight_recorder_names_the_rank_the_collective_and_the_line(tmp_path):
    healthy = run(skip_a_collective, 3, str(tmp_path))
    dumps = read_dumps(tmp_path)
    assert sorted(dumps) == [0, 1, 2]
    (stuck,) = find_stuck(dumps)
    (call,) = stuck.waiting
    assert (stuck.number, call.rank, call.name, call.shapes) == (2, 1, "gloo:all_reduce", ((2, 3),))
    lines = Path(__file__).read_text().splitlines()
    file, line = call.where.removesuffix(" in skip_a_collective").split(":")
    assert Path(file).name == "test_profile_ranks.py"
    assert "async_op=True" in lines[int(line) - 1]
    assert list(stuck.missing) == [2]
    last = stuck.missing[2]
    assert last is not None
    assert last.number == 1
    text = explain_hang(dumps)
    assert "rank 1 waits in gloo:all_reduce [[2, 3]] at " in text
    assert "rank 2 never called it; its last is 1" in text
    # A rank without a dump is said to have none.
    without = find_stuck({rank: dump for rank, dump in dumps.items() if rank != 2})
    assert without[0].unknown == (2,)
    # And once it has called it, nothing is stuck.
    assert explain_hang(dict(enumerate(healthy))) == (
        "3 ranks: every collective that was called has ended"
    )


def entry(number: int, name: str, shape: list[int], pg_id: int = 0, **more) -> dict:
    return {
        "collective_seq_id": number,
        "pg_id": pg_id,
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "input_sizes": [shape],
        "input_dtypes": ["Float"],
        "is_p2p": False,
        "frames": [{"filename": "train.py", "line": number, "name": "step"}],
        **more,
    }


def dump(*entries: dict, completed: int = 0) -> dict:
    last = max((e["collective_seq_id"] for e in entries), default=0)
    status = {"last_enqueued_collective": last, "last_completed_collective": completed}
    return {"entries": list(entries), "pg_status": {"0": status}, "groups": {"0": [0, 1]}}


def test_calls_that_do_not_fit_together():
    a, b = entry(1, "gloo:all_reduce", [4]), entry(2, "gloo:broadcast", [4])
    (found,) = find_mismatches({0: dump(a, b), 1: dump(a, entry(2, "gloo:all_reduce", [4]))})
    assert (found.number, [call.name for call in found.calls]) == (
        2,
        ["gloo:broadcast", "gloo:all_reduce"],
    )
    (found,) = find_mismatches({0: dump(a), 1: dump(entry(1, "gloo:all_reduce", [8]))})
    assert "rank 1: gloo:all_reduce [[8]] at train.py:1 in step" in str(found)
    # Shapes of a gather, and messages, may differ.
    same = {0: dump(entry(1, "gloo:gather", [4])), 1: dump(entry(1, "gloo:gather", [8]))}
    assert find_mismatches(same) == []
    p2p = entry(1, "gloo:send", [4], is_p2p=True)
    assert find_mismatches({0: dump(p2p), 1: dump(a)}) == []
    # A group that rank 1 has not used yet.
    (stuck,) = find_stuck({0: dump(a), 1: dump()})
    assert stuck.missing == {1: None}
    assert "nor any other of this group" in str(stuck)


def hang_for_a_moment(folder: str):
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    with dump_on_hang(folder + "/never", after_s=3600):
        dist.barrier()
    with dump_on_hang(folder, after_s=0.01):
        if rank == 1:  # comes once rank 0's dump is there
            store.wait(["dumped"])
        else:
            work = dist.barrier(async_op=True)
            while not (Path(folder) / "rank0.json").exists():
                time.sleep(0.005)
            store.set("dumped", "yes")
            work.wait()
        if rank == 1:
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def test_a_dump_is_written_while_the_block_goes_on(tmp_path):
    run(hang_for_a_moment, 2, str(tmp_path))
    assert not (tmp_path / "never").exists()
    written = json.loads((tmp_path / "rank0.json").read_text())
    assert written["rank"] == 0
    assert [path for path in tmp_path.iterdir() if path.suffix == ".part"] == []


# ------------------------------------------------------------------------------------- interconnect


def measure():
    dist.init_process_group("gloo")
    sizes = (4, 1000, 100_000)
    pairs = measure_pairs(sizes, rounds=2)
    rows = measure_collectives(num_bytes=(10, 1000), rounds=1)
    half = dist.new_group([0, 2])
    inner = measure_pairs(sizes, rounds=1, group=half) if dist.get_rank() != 1 else None
    dist.barrier()
    dist.destroy_process_group()
    return pairs, rows, inner


def test_every_pair_and_every_collective_is_measured():
    results = run(measure, 3)
    pairs, rows, inner = results[0]
    assert all(result[:2] == (pairs, rows) for result in results)
    assert [(p.source, p.target) for p in pairs] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(p.latency_s >= 0 and p.bandwidth_bytes_per_s > 0 for p in pairs)
    assert all(len(p.seconds) == 3 and min(p.seconds) > 0 for p in pairs)
    assert [(p.source, p.target) for p in inner] == [(0, 2), (2, 0)]
    assert results[1][2] is None
    assert len(rows) == 5 * 2
    for row in rows:
        factor = cost.bus_factor(kind=row.kind, num_ranks=3)
        assert row.num_bytes % 12 == 0  # whole float32 of three ranks, rounded up
        assert row.algorithm_bytes_per_s == pytest.approx(row.num_bytes / row.seconds)
        assert row.bus_bytes_per_s == pytest.approx(factor * row.algorithm_bytes_per_s)


def test_planted_links_are_recovered():
    sizes = [2**k for k in range(4, 24, 4)]
    row = pair_row(0, 1, sizes, [7e-6 + size / 3e9 for size in sizes])
    assert (row.latency_s, row.bandwidth_bytes_per_s) == pytest.approx((7e-6, 3e9))
    backwards = pair_row(0, 1, (4, 8, 16), (3.0, 2.0, 1.0))
    assert not backwards.is_fit
    assert (backwards.latency_s, backwards.bandwidth_bytes_per_s) == (3.0, 16.0)
    wire = cost.Wire(bandwidth_bytes_per_s=2e9, latency_s=1e-5)
    rows = [
        collective_row(
            "all_gather", 4, size, cost.all_gather_seconds(num_bytes=size, num_ranks=4, link=wire)
        )
        for size in sizes
    ]
    link = fit_collective(rows, "all_gather").link
    assert (link.latency_s, link.bandwidth_bytes_per_s) == pytest.approx((1e-5, 2e9))


def refuse():
    dist.init_process_group("gloo")
    messages = []
    for bad in (
        lambda: measure_pairs((4, 8)),
        lambda: measure_pairs((8, 4, 2)),
        lambda: measure_pairs(rounds=0),
        lambda: measure_collectives(("all_reduce", "gossip")),
        lambda: measure_collectives(num_bytes=()),
    ):
        try:
            bad()
        except ValueError as error:
            messages.append(str(error))
    dist.destroy_process_group()
    return messages


def test_bad_arguments_are_refused_before_anything_is_sent():
    (messages,) = run(refuse, 1)
    assert len(messages) == 5
    assert "gossip" in messages[3]


# ------------------------------------------------------------------------------------------ scaling


def make_step(group: dist.ProcessGroup, batch_size: int):
    expected = {1: 12, 2: 6, 3: 4}[dist.get_world_size(group)]
    if batch_size != expected:
        raise AssertionError(f"batch of {batch_size} on {dist.get_world_size(group)} ranks")
    model = DistributedDataParallel(make_net(), process_group=group)
    x = torch.ones(batch_size, 32)
    return lambda: model(x).square().mean().backward()


def test_strong_scaling_of_ddp_in_one_world(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = measure_scaling(
        make_step, [1, 3, 2], mode="strong", batch_size=12, rounds=3, warmup=1, log=path
    )
    assert [(row.world_size, row.batch_size) for row in rows] == [(1, 12), (2, 6), (3, 4)]
    assert rows[0].speedup == rows[0].efficiency == 1.0
    for row in rows:
        assert 0 < row.low_s <= row.step_s <= row.high_s
        assert 0 < row.speedup_low <= row.speedup <= row.speedup_high
        assert row.efficiency == pytest.approx(row.speedup / row.world_size)
        assert row.samples_per_s == pytest.approx(12 / row.step_s)
    log = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["round"], line["ranks"]) for line in log] == [
        (i, size) for i in range(3) for size in (1, 2, 3)
    ]
    assert all(line["ranks"] * line["batch_per_rank"] == 12 for line in log)
    times = {n: [line["seconds"] for line in log if line["ranks"] == n] for n in (1, 2, 3)}
    assert scaling_rows(times, mode="strong", batch_size=12) == [replace(r, note="") for r in rows]
    with pytest.raises(ValueError, match="does not divide"):
        measure_scaling(make_step, [1, 5], mode="strong", batch_size=12)
    with pytest.raises(LaunchError, match="batch of 7 on 1 ranks"):
        measure_scaling(make_step, [1], mode="weak", batch_size=7)


def make_steps():
    plain, ddp = make_net(), DistributedDataParallel(make_net())
    x = torch.ones(4, 32)
    return {
        "plain": lambda: plain(x).sum().backward(),
        "ddp": lambda: ddp(x).sum().backward(),
    }


def test_ddp_beside_plain_training():
    plain, ddp = measure_overhead(make_steps, 2, rounds=3)
    assert (plain.name, plain.ratio, plain.low, plain.high) == ("plain", 1.0, 1.0, 1.0)
    assert ddp.name == "ddp"
    assert 0 < ddp.low <= ddp.ratio <= ddp.high
    with pytest.raises(ValueError, match="rounds=0"):
        measure_overhead(make_steps, 2, rounds=0)
