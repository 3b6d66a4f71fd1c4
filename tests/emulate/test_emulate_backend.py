"""The emulated cluster with real processes: numerics, virtual time, and what happens on errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from charged_net import DEPTH, WIDTH, Net, grading_cluster, plan_for

from minidist.device import all_gather_single
from minidist.emulate import (
    Charged,
    ChargePlan,
    CollectiveMismatch,
    PlanChannel,
    clusters,
    simulate,
)
from minidist.emulate.teach import run, run_traced
from minidist.errors import LaunchError

# ------------------------------------------------------------------ collectives


def close(got, expected):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=0, atol=0)


def every_collective(dtype_name):
    rank, n = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, dtype_name)
    mine = torch.tensor([rank + 1, rank + 2, 3], dtype=dtype)
    all_ranks = [torch.tensor([r + 1, r + 2, 3], dtype=dtype) for r in range(n)]
    stacked = torch.stack(all_ranks)
    wide = stacked.to(torch.float64)

    # all_reduce
    expected = {
        "SUM": wide.sum(0),
        "MAX": wide.amax(0),
        "MIN": wide.amin(0),
        "PRODUCT": wide.prod(0),
    }
    if dtype.is_floating_point:
        expected["AVG"] = wide.mean(0)
    for name, value in expected.items():
        t = mine.clone()
        assert dist.all_reduce(t, op=getattr(dist.ReduceOp, name)) is None
        close(t, value.to(dtype))
    t = mine.clone()
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    assert torch.equal(t, mine), "the result must not be there before wait()"
    work.wait()
    work.wait()
    close(t, expected["SUM"].to(dtype))

    # broadcast, reduce
    for root in range(n):
        t = mine.clone()
        dist.broadcast(t, src=root)
        close(t, all_ranks[root])
        t = mine.clone()
        dist.reduce(t, dst=root)
        close(t, expected["SUM"].to(dtype) if rank == root else mine)

    # all_gather, both forms and both spellings
    out = [torch.zeros_like(mine) for _ in range(n)]
    dist.all_gather(out, mine)
    close(torch.stack(out), stacked)
    for name in ("all_gather_into_tensor", "all_gather_single"):
        if hasattr(dist, name):
            flat = torch.zeros(3 * n, dtype=dtype)
            getattr(dist, name)(flat, mine)
            close(flat, stacked.reshape(-1))
    for name in ("_allgather_base", "all_gather_single"):
        flat = torch.zeros(3 * n, dtype=dtype)
        getattr(dist.group.WORLD, name)(flat, mine).wait()
        close(flat, stacked.reshape(-1))

    # reduce_scatter, both forms and both spellings
    parts = [(mine * (r + 1)).to(dtype) for r in range(n)]
    total = (wide * (rank + 1)).to(dtype).to(torch.float64).sum(0).to(dtype)
    got = torch.zeros_like(mine)
    dist.reduce_scatter(got, parts)
    close(got, total)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            got = torch.zeros_like(mine)
            getattr(dist, name)(got, torch.cat(parts))
            close(got, total)
    for name in ("_reduce_scatter_base", "reduce_scatter_single"):
        got = torch.zeros_like(mine)
        options = dist.ReduceScatterOptions()
        getattr(dist.group.WORLD, name)(got, torch.cat(parts), options).wait()
        close(got, total)

    # gather, scatter
    for root in range(n):
        out = [torch.zeros_like(mine) for _ in range(n)] if rank == root else None
        dist.gather(mine, out, dst=root)
        if out is not None:
            close(torch.stack(out), stacked)
        got = torch.zeros_like(mine)
        dist.scatter(
            got, [(t * (root + 1)).to(dtype) for t in all_ranks] if rank == root else None, src=root
        )
        close(got, (mine * (root + 1)).to(dtype))

    # all_to_all: list (uneven), single (even, and with splits)
    sends = [torch.full((rank + r + 1,), rank + 1).to(dtype) for r in range(n)]
    receives = [torch.zeros(rank + r + 1, dtype=dtype) for r in range(n)]
    dist.all_to_all(receives, sends)
    for r in range(n):
        close(receives[r], torch.full((rank + r + 1,), r + 1).to(dtype))
    got = torch.zeros(n, 2, dtype=dtype)
    dist.all_to_all_single(got, torch.full((n, 2), rank + 1).to(dtype))
    close(got[:, 0], torch.arange(1, n + 1).to(dtype))
    splits = [rank + r for r in range(n)]
    got = torch.zeros(sum(splits), 2, dtype=dtype)
    dist.all_to_all_single(got, torch.ones(sum(splits), 2).to(dtype), splits, splits)
    close(got, torch.ones(sum(splits), 2).to(dtype))

    # send and recv, alone and in a batch
    right, left = (rank + 1) % n, (rank - 1) % n
    if n > 1:
        got = torch.zeros_like(mine)
        dist.send(mine, right, tag=5)
        assert dist.recv(got, left, tag=5) == left
        close(got, all_ranks[left])
    first, second = torch.zeros_like(mine), torch.zeros_like(mine)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, first, left),
            dist.P2POp(dist.irecv, second, right, tag=1),
            dist.P2POp(dist.isend, mine, right),
            dist.P2POp(dist.isend, mine, left, tag=1),
        ]
    )
    for work in works:
        work.wait()
    close(torch.stack([first, second]), torch.stack([all_ranks[left], all_ranks[right]]))
    return dtype_name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_on_every_dtype(world_size):
    def all_dtypes():
        names = ("float32", "float64", "bfloat16", "float16", "int64", "bool")
        return [every_collective(name) for name in names]

    results, trace = run_traced(all_dtypes, world_size)
    assert len(results[0]) == 6
    assert trace.faults == []
    simulate(trace, clusters.laptop(world_size))


def odd_tensors():
    rank, n = dist.get_rank(), dist.get_world_size()
    # non-contiguous, zero-dimensional, empty, requires_grad
    t = (torch.arange(12.0).reshape(3, 4) + rank).t()
    assert not t.is_contiguous()
    dist.all_reduce(t)
    close(t, n * torch.arange(12.0).reshape(3, 4).t() + n * (n - 1) / 2)
    out = [torch.zeros(4, 3).t() for _ in range(n)]
    dist.all_gather(out, torch.full((3, 4), float(rank)))
    close(torch.stack(out)[:, 0, 0], torch.arange(float(n)))
    scalar = torch.tensor(2.0)
    dist.all_reduce(scalar)
    close(scalar, 2.0 * n)
    one = torch.full((1, 3), float(rank))[:, 1].clone()  # contiguous, with stride 3
    gathered = torch.empty(n)
    all_gather_single(gathered, one)
    close(gathered, torch.arange(float(n)))
    empty = torch.empty(0, 5)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather([torch.empty(0) for _ in range(n)], torch.empty(0))
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    version = parameter._version
    dist.broadcast(parameter.data, 0)
    dist.broadcast(parameter, 0)
    close(parameter.detach(), torch.zeros(2))
    assert parameter._version == version
    # objects
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 100 * rank})
    assert [o["rank"] for o in objects] == list(range(n))  # type: ignore[index]
    box = [("secret", 7)] if rank == n - 1 else [None]
    dist.broadcast_object_list(box, src=n - 1)
    assert box == [("secret", 7)]
    # sub-groups: overlapping, and with ranks that are not in them
    pairs = [dist.new_group([r, (r + 1) % n]) for r in range(n)]
    for r, group in enumerate(pairs):
        if rank in (r, (r + 1) % n):
            t = torch.tensor([float(rank)])
            dist.all_reduce(t, group=group)
            close(t, [float(r + (r + 1) % n)])
            assert dist.get_world_size(group) == 2
    last = dist.new_group([n - 2, n - 1])
    if rank >= n - 2:
        t = torch.tensor([float(rank)])
        dist.broadcast(t, src=n - 1, group=last)
        close(t, [float(n - 1)])
        if rank == n - 2:
            dist.send(t, n - 1, group=last)
        else:
            dist.recv(t, n - 2, group=last)
    # asynchronous, several in flight, waited for in another order
    flight = [torch.full((3,), float(i + rank)) for i in range(5)]
    works = [dist.all_reduce(t, async_op=True) for t in flight]
    for work in reversed(works):
        assert work is not None
        work.wait()
    close(torch.stack(flight)[:, 0], [n * i + n * (n - 1) / 2 for i in range(5)])
    works = [dist.barrier(async_op=True)]
    while not works[0].is_completed():
        pass
    future = dist.all_reduce(scalar, async_op=True).get_future().then(lambda f: f.value()[0] + 1)
    close(future.wait(), 2.0 * n * n + 1)
    # coalesced, as functional collectives and DTensor call them
    with dist.distributed_c10d._coalescing_manager():
        a, b = torch.ones(2), torch.ones(3) * 2
        dist.all_reduce(a)
        dist.all_reduce(b)
    close(torch.cat([a, b]), [n, n, 2 * n, 2 * n, 2 * n])
    functional = torch.distributed._functional_collectives.all_reduce(
        torch.ones(2), "sum", dist.group.WORLD
    )
    close(functional + 0, [n, n])
    # what cannot work says so here
    for call in (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.AVG),
        lambda: dist.all_gather([torch.ones(1)] * n, torch.ones(2)),
        lambda: dist.all_reduce(torch.eye(2).to_sparse()),
    ):
        with pytest.raises(ValueError, match=r"avg needs|other side|dense CPU"):
            call()
    with pytest.raises(NotImplementedError, match="any source"):
        dist.recv(torch.ones(1))
    return True


def test_odd_tensors_groups_objects_and_futures():
    results, trace = run_traced(odd_tensors, 3)
    assert results == [True] * 3
    assert trace.faults == []


@pytest.mark.parametrize("late", [0, 1])
def test_a_message_is_matched_by_its_size_as_gloo_and_nccl_do(late):
    def flat_to_matrix():
        rank, token, matrix = dist.get_rank(), torch.zeros(1), torch.empty(2, 3)
        if rank == late:
            dist.recv(token, 1 - rank, tag=1)  # so the other end has come first
        work = dist.isend(torch.arange(6.0), 1) if rank == 0 else dist.irecv(matrix, 0)
        if rank != late:
            dist.send(token, late, tag=1)
        work.wait()
        return matrix

    (_, got), trace = run_traced(flat_to_matrix, 2)
    close(got, torch.arange(6.0).reshape(2, 3))
    assert sorted(c.shape for c in trace.collectives) == [(1,), (6,)]


@pytest.mark.parametrize("wanted", [torch.empty(5), torch.empty(6, dtype=torch.float64)])
def test_a_message_of_another_size_or_dtype_is_a_mismatch(wanted):
    def ends():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(6), 1)
            return
        with pytest.raises(RuntimeError, match="disagree"):
            dist.recv(wanted, 0)

    _, trace = run_traced(ends, 2)
    (fault,) = trace.faults
    assert "message #0 from rank 0 to rank 1" in fault


def test_the_broker_keeps_payloads_when_asked():
    def reduce_twice():
        rank = dist.get_rank()
        dist.all_reduce(torch.tensor([[1.0 + rank, 2.0]], dtype=torch.bfloat16))
        dist.all_reduce(torch.tensor([float(rank)], dtype=torch.float64), op=dist.ReduceOp.MAX)

    _, trace = run_traced(reduce_twice, 2, keep_payloads=True)
    first, second = trace.collectives
    assert (first.kind, first.op, first.dtype, first.shape) == (
        "all_reduce",
        "sum",
        "bfloat16",
        (1, 2),
    )
    assert (first.nbytes, first.numel, first.arrived, first.completed) == (4, 2, (0, 1), True)
    np.testing.assert_array_equal(first.payloads[1], [2.0, 2.0])
    np.testing.assert_array_equal(first.result, [3.0, 4.0])
    assert second.op == "max"
    np.testing.assert_array_equal(second.result, [1.0])
    assert [e.kind for e in trace.events[0] if e.kind != "compute"] == [
        "issue",
        "wait",
        "issue",
        "wait",
    ]


# -------------------------------------------------------------------------- DDP


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, WIDTH, generator=generator).to(dtype)


def oracle(world_size, steps, plan, side=False, accumulate=1):
    """Mean gradients of every step in float64, one rank after the other in this process."""
    total: list[dict[str, torch.Tensor]] = [{} for _ in range(steps)]
    for rank in range(world_size):
        model = Net(PlanChannel(plan, rank), side, torch.float64)
        for step in range(steps):
            model.zero_grad()
            for part in range(accumulate):
                x = batch(rank, step * accumulate + part, torch.float64)
                model(x, step).square().mean().backward()
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                if grad is None:
                    grad = torch.zeros_like(parameter)
                total[step][name] = total[step].get(name, 0) + grad / world_size
    return total


def train_stock_ddp(steps, options, side=False, accumulate=1):
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Net(side=side)
    if rank > 0:  # wrapping has to broadcast
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    model = DistributedDataParallel(model, **options)
    grads = []
    for step in range(steps):
        model.zero_grad()
        for part in range(accumulate):
            last = part == accumulate - 1
            import contextlib

            with contextlib.nullcontext() if last else model.no_sync():
                model(batch(rank, step * accumulate + part), step).square().mean().backward()
        grads.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in model.module.named_parameters()
            }
        )
    return grads


def assert_gradients(results, expected):
    for rank, grads in enumerate(results):
        for step, (got, want) in enumerate(zip(grads, expected, strict=True)):
            for name in want:
                scale = want[name].abs().max().item()
                torch.testing.assert_close(
                    got[name].double(),
                    want[name],
                    rtol=1e-5,
                    atol=1e-5 * scale + 1e-12,
                    msg=lambda m, r=rank, s=step, n=name: f"rank {r} step {s} {n}: {m}",
                )


BUCKET = {"bucket_cap_mb": 0.002}  # about one layer
VARIANTS = {
    "plain": ({}, {}),
    "static_graph": ({"static_graph": True}, {}),
    "bucket_view": ({"gradient_as_bucket_view": True}, {}),
    "no_sync": ({}, {"accumulate": 2}),
    "find_unused": ({"find_unused_parameters": True}, {"side": True}),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stock_ddp_gradients_equal_the_oracle(world_size):
    plan = plan_for()
    for name, (options, more) in VARIANTS.items():
        steps = 3
        results, trace = run_traced(
            lambda o=options, m=more: train_stock_ddp(3, {**BUCKET, **o}, **m),
            world_size,
            plan=plan,
        )
        assert trace.faults == [], name
        side, accumulate = more.get("side", False), more.get("accumulate", 1)
        assert_gradients(results, oracle(world_size, steps, plan, side, accumulate))
        simulate(trace, clusters.laptop(world_size))


def train_by_hand(steps, how):
    """DDP as students write it. `how`: hooks, hooks_future, blocking_hooks, after."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Net()
    works = []

    def reduce(parameter):
        work = dist.all_reduce(parameter.grad, async_op=how != "blocking_hooks")
        if how == "blocking_future":
            work.get_future().wait()
        elif work is not None:
            works.append(work)

    if how != "after":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
    grads = []
    for step in range(steps):
        model.zero_grad()
        model(batch(rank, step), step).square().mean().backward()
        if how == "after":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        for work in works:
            work.wait()
        works.clear()
        grads.append({n: p.grad.clone() / world_size for n, p in model.named_parameters()})
    return grads


@pytest.mark.parametrize("world_size", [2, 3])
def test_efficiency_tells_overlap_from_its_absence(world_size, capsys):
    plan, steps = plan_for(), 3
    expected = oracle(world_size, steps, plan)
    parameter_bytes = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)
    compute_s = sum(plan.forward_s) + sum(plan.backward_s)
    cluster = grading_cluster(world_size, parameter_bytes, compute_s)
    efficiency = {}
    runs = {
        "stock DDP": (train_stock_ddp, BUCKET),
        "hooks": (train_by_hand, "hooks"),
        "blocking hooks": (train_by_hand, "blocking_hooks"),
        "blocking future": (train_by_hand, "blocking_future"),
        "after": (train_by_hand, "after"),
    }
    for name, (fn, option) in runs.items():
        results, trace = run_traced(fn, world_size, steps, option, plan=plan)
        assert_gradients(results, expected)
        timeline = simulate(trace, cluster)
        assert len(timeline.steps) == steps
        # DDP's first step has one bucket: judge the second and later ones.
        efficiency[name] = min(step.efficiency for step in timeline.steps[1:])
    with capsys.disabled():
        text = ", ".join(f"{name} {value:.3f}" for name, value in efficiency.items())
        print(f"\n  efficiency at N={world_size}: {text}")
    assert efficiency["hooks"] >= 0.9
    assert efficiency["stock DDP"] >= 0.9
    assert 0.66 <= efficiency["after"] <= 0.74
    assert efficiency["blocking hooks"] <= efficiency["after"] + 0.01
    assert efficiency["blocking future"] <= efficiency["after"] + 0.01


def busy(seconds_file):
    while not seconds_file.is_set():
        math.factorial(2000)


def test_the_timeline_is_the_same_every_time_and_under_load():
    import multiprocessing

    cluster = grading_cluster(3, 4 * DEPTH * (WIDTH * WIDTH + WIDTH), 0.24)
    jobs = [(train_stock_ddp, BUCKET), (train_by_hand, "hooks")]

    def timelines():
        return [
            simulate(run_traced(fn, 3, 2, how, plan=plan_for())[1], cluster).to_json()
            for fn, how in jobs
        ]

    reference = timelines()
    assert timelines() == reference
    context = multiprocessing.get_context("forkserver")
    stop = context.Event()
    loads = [context.Process(target=busy, args=(stop,), daemon=True) for _ in range(3)]
    for load in loads:
        load.start()
    try:
        assert timelines() == reference
    finally:
        stop.set()
        for load in loads:
            load.join(30)


# ----------------------------------------------------------------------- charges


def test_charged_layers_multiply_by_the_plans_factors():
    plan = plan_for(2)

    def train():
        generator = torch.Generator().manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        charged = Charged(layer, 1)
        out = []
        for _ in range(2):
            layer.zero_grad()
            x = torch.ones(1, 3, requires_grad=True)
            y = charged(x)
            y.sum().backward()
            out.append(
                (y.detach(), layer(x).detach(), layer.bias.grad, x.grad, layer.weight.detach())
            )
        return out

    results, trace = run_traced(train, 2, plan=plan)
    for rank in range(2):
        for n, (y, plain, bias_grad, x_grad, weight) in enumerate(results[rank]):
            f = plan.factor(rank, 1, "forward", n)
            g = plan.factor(rank, 1, "backward", n)
            torch.testing.assert_close(y, f * plain)
            torch.testing.assert_close(bias_grad, torch.full((2,), f * g))
            torch.testing.assert_close(x_grad, f * g * weight.sum(0, keepdim=True))
    what = [(e.direction, e.layer, e.step, e.duration_s) for e in trace.events[1]]
    assert what == [
        ("forward", 1, 0, 0.01),
        ("backward", 1, 0, 0.02),
        ("forward", 1, 1, 0.01),
        ("backward", 1, 1, 0.02),
    ]


def test_factors():
    plan = plan_for()
    drawn = [
        plan.factor(r, i, d, n)
        for r in range(3)
        for i in range(4)
        for n in range(50)
        for d in ("forward", "backward")
    ]
    assert all(0.5 <= f <= 1.5 for f in drawn)
    assert all(f == np.float32(f) for f in drawn)
    assert len(set(drawn)) > 1100
    assert 0.97 < sum(drawn) / len(drawn) < 1.03
    assert plan.factor(0, 0, "forward", 0) != plan_for(secret=b"x" * 16).factor(0, 0, "forward", 0)
    with pytest.raises(ValueError, match="direction"):
        plan.factor(0, 0, "sideways", 0)
    with pytest.raises(ValueError, match="one entry per layer"):
        ChargePlan((1.0,), (1.0, 2.0), b"")


def test_charges_from_many_threads_are_each_counted_once():
    plan = plan_for(4)

    def charge_in_threads():
        import threading

        from minidist.emulate import current_client

        client, got = current_client(), []

        def work():
            for _ in range(25):
                factor = client.charge(2, "backward")
                got.append(factor)
                dist.get_rank()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        t = torch.ones(1)
        dist.all_reduce(t)
        for thread in threads:
            thread.join()
        return sorted(got), t.item()

    results, trace = run_traced(charge_in_threads, 2, plan=plan)
    for rank, (got, total) in enumerate(results):
        assert total == 2.0
        assert got == sorted(plan.factor(rank, 2, "backward", n) for n in range(200))
        steps = [e.step for e in trace.events[rank] if e.kind == "compute"]
        assert steps == list(range(200))


# ------------------------------------------------------------------------ errors


def mismatched(how):
    rank = dist.get_rank()
    t = torch.ones(4)
    dist.all_reduce(t)
    if how == "op":
        work = dist.all_reduce(
            t, op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank % 2], async_op=True
        )
    elif how == "shape":
        work = dist.all_reduce(torch.ones(4 + rank % 2), async_op=True)
    elif how == "dtype":
        dtype = [torch.float32, torch.float64][rank % 2]
        work = dist.all_reduce(torch.ones(4, dtype=dtype), async_op=True)
    else:  # order
        a, b = torch.ones(2, 3), torch.ones(3, 2)
        first, second = (a, b) if rank % 2 == 0 else (b, a)
        work = dist.all_reduce(first, async_op=True)
        dist.all_reduce(second, async_op=True)
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    with pytest.raises(RuntimeError, match="disagree"):  # the session is over, and says so at once
        dist.all_reduce(t)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("how", ["op", "shape", "dtype", "order"])
def test_a_mismatch_is_raised_on_every_rank_and_says_who_called_what(how):
    results, trace = run_traced(mismatched, 3, how)
    first, second = {
        "op": ("all_reduce(float32[4], sum)", "all_reduce(float32[4], max)"),
        "shape": ("all_reduce(float32[4], sum)", "all_reduce(float32[5], sum)"),
        "dtype": ("all_reduce(float32[4], sum)", "all_reduce(float64[4], sum)"),
        "order": ("all_reduce(float32[2, 3], sum)", "all_reduce(float32[3, 2], sum)"),
    }[how]
    for rank, (name, text) in enumerate(results):
        assert name == "CollectiveMismatch"
        assert text.startswith(f"[rank {rank}] ")
        assert "collective #1" in text
        for other, called in enumerate((first, second, first)):
            assert f"rank {other} called {called}" in text
    assert len(trace.faults) == 1


def skip(how):
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        if how == "leaves":
            return "left"
        if how == "dies":
            import os

            os._exit(9)
        if how == "other":  # never comes back to the group's next collective
            import time

            time.sleep(5)
            return "late"
    try:
        dist.all_reduce(torch.ones(7))
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_a_rank_that_skips_a_collective_is_named_at_once_when_it_has_left():
    results, trace = run_traced(skip, 3, "leaves")
    for rank in (0, 2):
        assert "all_reduce(float32[7], sum)" in results[rank]
        assert "rank 1 has left the emulated cluster; its last call was barrier()" in results[rank]
    assert len(trace.faults) == 1


def test_a_group_is_named_by_its_ranks_and_a_message_by_its_other_end():
    def wait_in_vain():
        rank, group = dist.get_rank(), dist.new_group([0, 2])
        if rank == 2:
            dist.isend(torch.ones(1), 1)
        if rank:
            return "left"
        try:
            dist.all_reduce(torch.ones(7), group=group)
        except RuntimeError as error:
            return str(error)
        return "nothing raised"

    results, _ = run_traced(wait_in_vain, 3)
    assert "all_reduce(float32[7], sum) #0 of the group of the ranks [0, 2];" in results[0]
    assert "its last call was send(float32[1]) to rank 1" in results[0]


def test_an_error_in_the_midst_of_ddps_backward_reaches_the_student():
    def train():
        from torch.nn.parallel import DistributedDataParallel

        rank = dist.get_rank()
        model = DistributedDataParallel(Net())
        if rank == 1:
            return "left"
        try:
            model(batch(rank, 0)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "nothing raised"

    results, _ = run_traced(train, 2, plan=plan_for())
    assert "rank 1 has left the emulated cluster" in results[0]


def test_a_rank_that_dies_is_named():
    with pytest.raises(LaunchError, match="without a result") as caught:
        run(skip, 3, clusters.laptop(3), "dies")
    assert caught.value.rank == 1


def misuse():
    rank, n = dist.get_rank(), dist.get_world_size()
    t = torch.ones(2)
    dist.all_reduce(t)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return t[0].item() == n and rank < n


def test_destroying_the_group_inside_is_harmless():
    assert run(misuse, 2, clusters.laptop(2))[0] == [True, True]


def test_teaching_charges_every_operation():
    def train():
        model = torch.nn.Linear(64, 64)
        model(torch.ones(8, 64)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    _, timeline = run(train, 2, clusters.pcie_a100(2))
    names = {i.name for i in timeline.intervals[0] if i.kind == "compute"}
    assert "addmm" in names
    assert "mm" in names
    assert 0 < timeline.efficiency < 1
    device = clusters.pcie_a100(2)
    addmm = next(i for i in timeline.intervals[0] if i.name == "addmm")
    num_bytes = 4 * (8 * 64 + 64 * 64 + 64 + 8 * 64)
    expected_s = device.roofline_seconds(2 * 8 * 64 * 64, num_bytes)
    assert addmm.end_s - addmm.start_s == pytest.approx(expected_s)


# ------------------------------------------------------------------ races


def write_in_flight(what, beside):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(20.0).reshape(2, 10)
    sent, other = whole
    if what == "isend":
        got = torch.empty(10)
        work = dist.isend(sent, (rank + 1) % n)
        dist.recv(got, (rank - 1) % n)
    elif what == "all_gather":
        work = dist.all_gather_into_tensor(torch.empty(10 * n), sent, async_op=True)
    else:
        work = dist.all_reduce(sent, async_op=True)
    (other if beside else sent[3:5]).add_(1)
    work.wait()
    work.wait()
    if what == "all_reduce":
        close(sent, torch.arange(10.0) * n)
    return whole.tolist()


@pytest.mark.parametrize("what", ["isend", "all_gather", "all_reduce"])
def test_what_is_under_way_must_not_be_written_to(what):
    with pytest.raises(LaunchError, match=r"float32\[10\]\) was under way when the tensor"):
        run_traced(write_in_flight, 2, what, False)
    run_traced(write_in_flight, 3, what, True)


# ------------------------------------------------------------------ groups


def group_by_members():
    """Each rank makes only the groups that it belongs to, as people often do."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1] if rank < 2 else [2, 3])
    try:
        dist.all_reduce(torch.ones(2), group=group)
    except CollectiveMismatch as error:
        return str(error)
    return "went well"


def test_whoever_makes_only_its_own_groups_reads_why_that_fails():
    texts, trace = run_traced(group_by_members, 4)
    # The pair that came first may have its sum before the other pair names its group.
    told = "all ranks have to call new_group for all groups"
    assert sum(told in text for text in texts) >= 2
    assert all(told in text or text == "went well" for text in texts)
    assert told in trace.faults[0]
