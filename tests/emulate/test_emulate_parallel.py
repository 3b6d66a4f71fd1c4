"""FSDP2, tensor parallelism, pipelines, sub-groups and messages on the emulated cluster.

Torch's own code runs there; its numbers are compared with one process, its times with theory.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidist import emulate
from minidist.emulate import Charged, ChargePlan, Cluster, Link
from minidist.emulate.teach import run_traced

LINK = Link(bandwidth_bytes_per_s=5e9, latency_s=1e-5)
FREE = Link(bandwidth_bytes_per_s=1e30, latency_s=0.0)


def make_cluster(num_devices: int = 4, link: Link = LINK, **more) -> Cluster:
    return Cluster(
        name="test",
        nodes=1,
        devices_per_node=num_devices,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=more.get("memory", 1e12),
    )


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 258), nn.GELU(), nn.Linear(258, 64)) for _ in range(4))
    )


def train(model, inputs, steps=3):
    """Losses of a few steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def oracle(world_size, steps=3):
    """One process on the batch of all ranks."""
    model = make_model().double()
    inputs = torch.cat([inputs_of(rank) for rank in range(world_size)]).double()
    train(model, inputs, steps)
    return [p.detach() for p in model.parameters()]


def inputs_of(rank):
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(rank))


# -- FSDP2 ---------------------------------------------------------------------------------------


def fsdp(reshard, hybrid):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (2, dist.get_world_size() // 2) if hybrid else (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_model()
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    train(model, inputs_of(dist.get_rank()))
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("world_size", "reshard", "hybrid"),
    [(1, True, False), (2, True, False), (3, False, False), (4, True, True)],
)
def test_fsdp2_trains_as_one_process(world_size, reshard, hybrid):
    results, trace = run_traced(fsdp, world_size, reshard, hybrid)
    for parameters in results:
        for got, want in zip(parameters, oracle(world_size), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    if world_size == 1:
        return
    kinds = [e.collective for e in trace.events[0] if e.kind == "issue"]
    gathers = 4 * (2 if reshard else 1) * 3 - (3 if reshard else 0)  # the last block stays
    assert kinds.count("reduce_scatter") == 4 * 3
    assert gathers <= kinds.count("all_gather") - 16 <= 4 * 2 * 3  # 16 of full_tensor()


def load_from_rank0():
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    whole = {name: torch.full_like(p, 3.0) for name, p in model.state_dict().items()}
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if dist.get_rank() == 0 else {}, options=options)
    saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return all(bool((value == 3.0).all()) for value in saved.values())


@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_state_dicts_go_in_and_out_of_fsdp2(world_size):
    assert run_traced(load_from_rank0, world_size)[0] == [True] * world_size


def test_fsdp2s_streams_overlap_in_virtual_time():
    """Its all-gathers run beside the compute of the block before, as on a GPU."""
    _, trace = run_traced(fsdp, 2, True, False)
    streams = {e.stream for e in trace.events[0] if e.kind == "issue"}
    assert len(streams) >= 2, "nothing was issued beside stream 0"
    together = emulate.simulate(trace, make_cluster(memory=1e13))
    serial_trace = copy.deepcopy(trace)
    for events in serial_trace.events:
        events[:] = [
            e.__class__(**(e.__dict__ | {"stream": 0}))
            for e in events
            if e.kind not in ("record", "after")
        ]
    serial = emulate.simulate(serial_trace, make_cluster(memory=1e13))
    assert together.makespan_s < 0.9 * serial.makespan_s
    overlapped_s = sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        for a in together.intervals[0]
        for b in together.intervals[0]
        if a.kind == "compute" and b.kind == "communication"
    )
    assert overlapped_s > 0.2 * sum(
        i.end_s - i.start_s for i in together.intervals[0] if i.kind == "communication"
    )


def streams_in_a_charged_session():
    """Claims that an all-reduce needs none of what was computed before it."""
    layer = Charged(nn.Linear(4, 4), 0)
    layer(torch.ones(1, 4))
    with torch.cpu.stream(torch.cpu.Stream()):
        dist.all_reduce(torch.ones(1000))
    layer(torch.ones(1, 4))


def test_a_stream_cannot_outrun_what_was_charged():
    plan = ChargePlan((1.0,), (1.0,), b"s" * 16)
    _, timeline = emulate.run(streams_in_a_charged_session, 2, make_cluster(), plan=plan)
    sent = [i for i in timeline.intervals[0] if i.kind == "communication"]
    assert [i.start_s for i in sent] == [1.0]
    # But stream 0 does not wait for it either: nobody asked it to.
    assert [i.end_s for i in timeline.intervals[0] if i.kind == "compute"] == [1.0, 2.0]


def test_torch_cpu_is_itself_again_afterwards():
    assert torch.cpu.Stream is torch.cpu.__dict__["Stream"]
    assert torch.cpu.Stream.__module__ == "torch.cpu"
    assert isinstance(torch.cpu.current_stream(), torch.cpu.Stream)


# -- tensor parallelism --------------------------------------------------------------------------


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    plan = {f"{i}.0": ColwiseParallel() for i in range(4)}
    plan |= {f"{i}.2": RowwiseParallel() for i in range(4)}
    parallelize_module(model, mesh, plan)
    train(model, inputs_of(0))
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtensor_tensor_parallelism_trains_as_one_process(world_size):
    results, trace = run_traced(tensor_parallel, world_size)
    for parameters in results:
        for got, want in zip(parameters, oracle(1), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    reduces = [e for e in trace.events[0] if e.collective == "all_reduce"]
    # One forward per block; backward one per block but the first, whose input needs no gradient.
    assert len(reduces) == 3 * (4 + 3)


# -- pipelines -----------------------------------------------------------------------------------


def pipeline(schedule_name, num_microbatches):
    from torch.distributed import pipelining

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = Charged(nn.Linear(8, 8), rank)
    stage = pipelining.PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = getattr(pipelining, schedule_name)(
        stage, num_microbatches, loss_fn=nn.functional.mse_loss
    )
    x = torch.randn(num_microbatches, 8, generator=torch.Generator().manual_seed(7))
    for _ in range(2):
        module.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=torch.zeros_like(x))
        else:
            schedule.step()
    return module.module.weight.grad


@pytest.mark.parametrize("schedule_name", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 4), (3, 3), (4, 8)])
def test_torchs_pipelines_have_the_bubble_of_theory(schedule_name, num_stages, num_microbatches):
    p, m = num_stages, num_microbatches
    plan = ChargePlan((1.0,) * p, (2.0,) * p, b"s" * 16)
    _, timeline = emulate.run(pipeline, p, make_cluster(link=FREE), schedule_name, m, plan=plan)
    # The first step runs an extra forward to learn shapes: take the second one.
    last = [[i for i in rank if i.kind == "compute"][-2 * m :] for rank in timeline.intervals]
    start_s, end_s = min(r[0].start_s for r in last), max(r[-1].end_s for r in last)
    bubble = 1 - timeline.efficiency_between(start_s, end_s)
    assert bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)


# -- sub-groups and messages -----------------------------------------------------------------------


def groups_and_messages():
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value, group=rows[rank // 2])
    dist.all_reduce(value, group=columns[rank % 2], op=dist.ReduceOp.MAX)
    got = torch.zeros(1)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, value * 10 + rank, (rank + 1) % 4),
            dist.P2POp(dist.irecv, got, (rank - 1) % 4),
        ]
    ):
        work.wait()
    names = [None] * 4
    dist.all_gather_object(names, {"rank": rank})
    return value.item(), got.item(), names


def test_sub_groups_messages_and_objects():
    results, _ = run_traced(groups_and_messages, 4)
    for rank, (value, got, names) in enumerate(results):
        assert value == 7.0
        assert got == 70 + (rank - 1) % 4
        assert names == [{"rank": r} for r in range(4)]
