"""The log of collectives: torch's and ours, on one rank and merged over all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist import collectives as c
from minidist.collectives.records import MergedLog, Record
from minidist.errors import MismatchError
from minidist.launch import run


def every_kind():
    dist.init_process_group("gloo")
    me, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(2, 3)
    flat = torch.empty(6 * n, dtype=torch.float64)
    parts = [torch.empty(2, 3) for _ in range(n)]
    try:
        dist.all_to_all(parts, [x] * n)
        has_lists = True
    except RuntimeError:  # gloo in torch 2.11
        has_lists = False
    root_parts = parts if me == 0 else None
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with c.CollectiveLog() as log:
        dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 1)
        dist.reduce(x, 0, dist.ReduceOp.PRODUCT)
        dist.all_gather(parts, x)
        gather(flat, torch.ones(6, dtype=torch.float64))
        dist.reduce_scatter(x, parts)
        scatter(torch.ones(6, dtype=torch.float64), flat)
        dist.gather(x, root_parts)
        dist.scatter(x, root_parts)
        if has_lists:
            dist.all_to_all(parts, [x] * n)
        dist.all_to_all_single(torch.empty_like(flat), flat)
        dist.barrier()
        if me == 0:
            dist.isend(x, 1).wait()
        elif me == 1:
            dist.irecv(x, 0).wait()
    dist.all_reduce(x)  # after the block: nobody's business
    records = [(r.number, r.kind, r.op, r.dtype, r.shape, r.num_bytes) for r in log.records]
    assert all(r.ranks == tuple(range(n)) for r in log.records)
    no_end = {r.kind for r in log.records if r.took_s is None}
    assert no_end <= {"reduce_scatter", "send", "recv"}  # gloo gives no future for these
    assert all(r.took_s >= 0 for r in log.records if r.took_s is not None)
    assert all(r.num_bytes_sent is None for r in log.records)
    text = str(log)
    dist.barrier()
    dist.destroy_process_group()
    return records, log.counts(), log.num_bytes("all_reduce"), text, has_lists


def test_torch_collectives():
    for rank, (records, counts, num_bytes, text, has_lists) in enumerate(run(every_kind, 3)):
        expected = [
            ("all_reduce", "max", "float32", (2, 3), 24),
            ("all_reduce", "sum", "float32", (2, 3), 24),
            ("broadcast", "", "float32", (2, 3), 24),
            ("reduce", "prod", "float32", (2, 3), 24),
            ("all_gather", "", "float32", (2, 3), 24),
            ("all_gather", "", "float64", (6,), 48),
            ("reduce_scatter", "sum", "float32", (2, 3), 3 * 24),
            ("reduce_scatter", "sum", "float64", (18,), 3 * 48),
            ("gather", "", "float32", (2, 3), 24),
            ("scatter", "", "float32", (2, 3), 24),
            *([("all_to_all", "", "float32", (2, 3), 3 * 24)] if has_lists else []),
            ("all_to_all", "", "float64", (18,), 3 * 48),
            ("barrier", "", "", (), 0),
        ]
        numbered = [(number, *row) for number, row in enumerate(expected)]
        assert records[: len(numbered)] == numbered
        message = {0: "send", 1: "recv"}.get(rank)
        messages = [row[:2] for row in records[len(numbered) :]]
        assert messages == ([(None, message)] if message else [])
        assert counts["all_reduce"] == counts["all_gather"] == 2
        assert num_bytes == 48
        lines = text.splitlines()
        assert lines[0].split()[:5] == ["group", "no", "collective", "op", "dtype"]
        assert len(lines) == 1 + len(records)
        assert lines[1].split()[1:7] == ["0", "all_reduce", "max", "float32", "2x3", "24"]


def ours():
    dist.init_process_group("gloo")
    me, n = dist.get_rank(), dist.get_world_size()
    pair: Any = dist.new_group([0, 1])
    with c.CollectiveLog() as outer:
        c.ring_all_reduce(torch.ones(1200))
        with c.CollectiveLog() as inner:
            work = c.tree_all_reduce(torch.ones(10, dtype=torch.int64), "max", async_op=True)
            if me < 2:
                c.broadcast(torch.ones(4), 0, pair)
            output = torch.empty(n, 5)
            c.ring_all_gather(list(output), torch.ones(5))
            work.wait()
        failed = c.CollectiveLog()
        with pytest.raises(MismatchError), failed:
            c.ring_all_reduce(torch.ones(2 + me), check=True)
    sent = [(r.kind, r.number, len(r.ranks), r.num_bytes, r.num_bytes_sent) for r in outer.records]
    assert all((r.took_s or 0) >= 0 and r.waited_s is not None for r in outer.records)
    assert outer.num_bytes_sent(str(pair.group_name) if me < 2 else "none") in (0, 16)
    assert failed.counts() == {"ring_all_reduce": 1}
    inner_kinds = [r.kind for r in inner.records]
    dist.barrier()
    dist.destroy_process_group()
    return sent, inner_kinds


def test_our_collectives_with_the_bytes_they_sent():
    tree = c.tree_steps(3).num_bytes_sent(80)
    for rank, (sent, inner_kinds) in enumerate(run(ours, 3)):
        assert sent[0] == ("ring_all_reduce", 0, 3, 4800, 6400)  # 2 (N-1)/N S
        assert sent[1] == ("tree_all_reduce", 1, 3, 80, tree[rank])
        if rank < 2:
            assert sent.pop(2) == ("broadcast", 0, 2, 16, 16 * (rank == 0))
            assert inner_kinds.pop(1) == "broadcast"
        assert sent[2] == ("ring_all_gather", 2, 3, 20, 40)
        assert sent[3][:2] == ("ring_all_reduce", 3)
        assert inner_kinds == ["tree_all_reduce", "ring_all_gather"]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def wrapped():
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(6, 8)
    results = {}

    ddp = DistributedDataParallel(make_model())
    results["without an end"] = 0
    for _ in range(100):  # in the second step DDP rebuilds its buckets
        with c.CollectiveLog() as log:
            ddp(x).sum().backward()
        results["without an end"] += sum(record.took_s is None for record in log.records)
    results["ddp"] = log.counts(), log.num_bytes(), [r.took_s is not None for r in log.records]

    fsdp = fully_shard(make_model(), mesh=mesh)
    with c.CollectiveLog() as log:
        fsdp(x).sum().backward()
    results["fsdp"] = log.counts(), log.num_bytes("reduce_scatter")

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(make_model(), mesh, plan)
    with c.CollectiveLog() as log:
        parallel(x).sum()
    results["tensor"] = log.counts()

    with c.CollectiveLog() as log:
        total = all_reduce(torch.ones(3), "avg", mesh.get_group()) + 1
    (record,) = log.records
    results["functional"] = total.tolist(), record.kind, record.op, record.took_s is not None
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_whoever_calls_them():
    num_bytes = 4 * sum(p.numel() for p in make_model().parameters())
    for results in run(wrapped, 2):
        assert results["ddp"] == ({"all_reduce": 1}, num_bytes, [True])  # from DDP's C++
        assert results["without an end"] == 0  # DDP returns before gloo has told everybody
        counts, scattered = results["fsdp"]
        assert counts == {"all_gather": 1, "reduce_scatter": 1}
        assert scattered == num_bytes
        assert results["tensor"] == {"all_reduce": 1}  # from DTensor
        assert results["functional"] == ([2.0] * 3, "all_reduce", "avg", True)


def late_rank():
    dist.init_process_group("gloo")
    me, n = dist.get_rank(), dist.get_world_size()
    x, token = torch.ones(4), torch.zeros(1)
    works = []
    with c.CollectiveLog() as log:
        for late, all_reduce in ((1, dist.all_reduce), (0, c.ring_all_reduce)):
            # The late rank calls only when all others have told it that they did.
            if me == late:
                for other in range(n):
                    if other != late:
                        dist.irecv(token, other).wait()
            works.append(all_reduce(x, async_op=True))
            if me != late:
                dist.isend(token, late).wait()
            works[-1].wait()
        merged = log.gather()
        dist.barrier()
    again = log.gather()
    assert len(again.meetings) == 3  # gathering itself is not recorded
    dist.barrier()
    dist.destroy_process_group()
    waited = [meeting.waited_s for meeting in merged.meetings]
    return [m.last_rank for m in merged.meetings], waited, merged, str(merged)


def test_merged_logs_tell_who_came_last():
    for last, waited, merged, text in run(late_rank, 3):
        assert last == [1, 0]
        assert waited[0][1] == waited[1][0] == 0.0
        assert all(waited[0][r] > 0 for r in (0, 2))
        assert all(waited[1][r] > 0 for r in (1, 2))
        assert sorted(meeting.last_rank for meeting in merged.meetings) == [0, 1]
        assert merged.waited_s()[2] == pytest.approx(waited[0][2] + waited[1][2])
        lines = [line.split() for line in text.splitlines()]
        assert lines[1][2:5] == ["all_reduce", "16", "1"]
        assert lines[2][2:5] == ["ring_all_reduce", "16", "0"]


def record(kind, number, op="", group="0", ranks=(0, 1), at_s=0.0):
    return Record(kind, op, group, ranks, number, "float32", (1,), 4, at_s)


def test_merging_finds_ranks_that_disagree():
    same = {r: [record("all_reduce", 0, "sum"), record("send", None)] for r in (0, 1)}
    assert len(MergedLog(same).meetings) == 1
    with pytest.raises(
        MismatchError, match=r"collective 0 .*rank 0: all_reduce sum, rank 1: barrier"
    ):
        MergedLog({0: [record("all_reduce", 0, "sum")], 1: [record("barrier", 0)]})
    with pytest.raises(MismatchError, match=r"collective 1 .*rank 0: barrier, rank 1: nothing"):
        MergedLog({0: [record("barrier", 0), record("barrier", 1)], 1: [record("barrier", 0)]})
    # Rank 1's log was not gathered: nothing is said about it.
    assert MergedLog({0: [record("barrier", 0, at_s=3.0)]}).meetings[0].arrived_s == {0: 3.0}


def test_an_empty_log():
    log = c.CollectiveLog()
    assert (log.counts(), log.num_bytes(), len(str(log).splitlines())) == ({}, 0, 1)
