"""Collectives from point-to-point up: the schedules alone, then on real ranks against an oracle."""

from __future__ import annotations

import gc
import math
import operator
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist import collectives as c
from minidist.collectives import ddp_hooks, direct
from minidist.collectives.algorithms import (
    direct_all_gather_steps,
    direct_reduce_scatter_steps,
    tree_parents,
)
from minidist.collectives.schedule import Schedule, Transfer
from minidist.emulate import Cluster, Link
from minidist.emulate import run as run_emulated
from minidist.errors import DeadlineError, MismatchError
from minidist.launch import run

# ------------------------------------------------------------------ schedules, no ranks


def all_reduce_schedules(n):
    yield from (c.ring_steps(n), c.ring_steps(n, 3), c.direct_steps(n))
    yield from (c.halving_doubling_steps(n), c.tree_steps(n), c.tree_steps(n, 4))
    yield from (c.double_tree_steps(n), c.double_tree_steps(n, 3))
    yield from (c.hierarchical_steps(n // size, size) for size in range(1, n + 1) if n % size == 0)


def who(n, num_chunks):
    """At first every rank holds only its own contribution to every chunk."""
    return [[Counter([rank])] * num_chunks for rank in range(n)]


@pytest.mark.parametrize("n", range(1, 18))
def test_every_all_reduce_adds_every_rank_once_to_every_chunk(n):
    for schedule in all_reduce_schedules(n):
        held = c.simulate(schedule, who(n, schedule.num_chunks))
        assert all(chunk == Counter(range(n)) for row in held for chunk in row), schedule.name


@pytest.mark.parametrize("n", range(1, 10))
def test_scatters_and_gathers_leave_chunks_where_they_say(n):
    held = c.simulate(direct_reduce_scatter_steps(n, num_segments=3), who(n, 3 * n))
    assert [held[r][3 * r : 3 * r + 3] for r in range(n)] == [[Counter(range(n))] * 3] * n
    for schedule in (c.ring_reduce_scatter_steps(n), direct_reduce_scatter_steps(n)):
        held = c.simulate(schedule, who(n, n))
        assert [held[r][r] for r in range(n)] == [Counter(range(n))] * n
    for schedule in (c.ring_all_gather_steps(n), direct_all_gather_steps(n)):
        assert c.simulate(schedule, [[r] * n for r in range(n)]) == [list(range(n))] * n
    for root in range(n):
        assert c.simulate(c.broadcast_steps(n, root), [[r] for r in range(n)]) == [[root]] * n
        assert c.simulate(c.reduce_steps(n, root), who(n, 1))[root] == [Counter(range(n))]
        rows = [[r] * n for r in range(n)]
        assert c.simulate(c.gather_steps(n, root), rows)[root] == list(range(n))
        scattered = c.simulate(c.scatter_steps(n, root), rows)
        assert [scattered[r][r] for r in range(n)] == [root] * n
    # Chunk s N + d is known to rank s at first; rank d has to end up with it.
    known = [
        [(s * n + d) if s == r else None for s in range(n) for d in range(n)] for r in range(n)
    ]
    held = c.simulate(c.all_to_all_steps(n), known)
    assert all(held[d][s * n + d] == s * n + d for s in range(n) for d in range(n))


@pytest.mark.parametrize("n", range(1, 18))
def test_steps_and_bytes_are_those_of_the_formulas(n):
    rounds = math.ceil(math.log2(n)) if n > 1 else 0
    s = 1000 * n * 2**rounds
    ring = 2 * (n - 1) * s // n
    assert len(c.ring_steps(n).steps) == 2 * (n - 1)
    assert c.ring_steps(n).num_bytes_sent(s) == [ring] * n
    assert len(c.direct_steps(n).steps) == (2 if n > 1 else 0)
    assert c.direct_steps(n).num_bytes_sent(s) == [ring] * n
    if n == 2**rounds:
        assert len(c.halving_doubling_steps(n).steps) == 2 * rounds
        assert c.halving_doubling_steps(n).num_bytes_sent(s) == [ring] * n
    assert len(c.broadcast_steps(n).steps) == rounds
    # Trees: at most 3 S from one rank, 2 S with two trees; as many bytes as any tree in total.
    assert max(c.tree_steps(n, 2).num_bytes_sent(s)) <= 3 * s
    assert max(c.double_tree_steps(n, 2).num_bytes_sent(s)) <= 2 * s
    assert sum(c.tree_steps(n).num_bytes_sent(s)) == 2 * (n - 1) * s
    for k in (1, 4):
        assert len(c.tree_steps(n, k).steps) <= (2 * rounds + k - 1 if n > 1 else 0)


def test_tree_is_binary_with_even_leaves():
    for n in range(1, 70):
        parents = tree_parents(n)
        children = Counter(parent for parent in parents if parent is not None)
        assert parents.count(None) == 1
        assert max(children.values(), default=0) <= 2
        assert all(rank % 2 == 1 for rank in children)


def test_hierarchical_sends_a_shard_to_other_nodes():
    nodes, local = 3, 4
    schedule = c.hierarchical_steps(nodes, local)
    num_chunks = schedule.num_chunks
    across = [0] * schedule.world_size
    for t in (t for step in schedule.steps for t in step):
        if t.src // local != t.dst // local:
            assert t.src % local == t.dst % local
            across[t.src] += t.num_chunks
    assert across == [2 * (nodes - 1) * num_chunks // nodes // local] * schedule.world_size
    assert schedule.num_bytes_sent(1200) == [2 * 11 * 1200 // 12] * 12


def test_alpha_beta_time():
    link = {"latency_s": 3e-6, "bandwidth_bytes_per_s": 2e9}
    for n in (1, 2, 3, 8):
        ring_s = 2 * (n - 1) * 3e-6 + 2 * (n - 1) / n * 1e6 / 2e9
        assert c.ring_steps(n).time_s(1e6, **link) == pytest.approx(ring_s)
    assert c.broadcast_steps(8).time_s(1e6, **link) == pytest.approx(3 * (3e-6 + 1e6 / 2e9))
    # Latency favours trees, bandwidth the ring; many chunks bring a tree close to its 3 S.
    assert c.tree_steps(16).time_s(8, **link) < c.ring_steps(16).time_s(8, **link)
    assert c.tree_steps(16).time_s(1e9, **link) > c.ring_steps(16).time_s(1e9, **link)
    one, many = (c.double_tree_steps(16, k).time_s(1e9, **link) for k in (1, 64))
    assert many < one / 2


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    numel=st.integers(0, 40),
    seed=st.integers(0, 99),
    pick=st.integers(0, 20),
    op=st.sampled_from([operator.add, np.maximum, np.minimum, operator.mul]),
)
def test_any_buffer_on_any_schedule(n, numel, seed, pick, op):
    schedules = list(all_reduce_schedules(n))
    schedule = schedules[pick % len(schedules)]
    buffers = np.random.default_rng(seed).integers(-9, 9, (n, numel))
    offsets = c.chunk_offsets(numel, schedule.num_chunks)
    held = c.simulate(schedule, [np.split(row, offsets[1:-1]) for row in buffers], op)
    expected = buffers[0]
    for row in buffers[1:]:
        expected = op(expected, row)
    for row in held:
        np.testing.assert_array_equal(np.concatenate(row), expected)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(numel=st.integers(0, 300), num_chunks=st.integers(1, 40))
def test_chunks_are_those_of_tensor_split(numel, num_chunks):
    offsets = c.chunk_offsets(numel, num_chunks)
    sizes = [len(part) for part in torch.arange(numel).tensor_split(num_chunks)]
    assert np.diff(offsets).tolist() == sizes


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ([Transfer(0, 2, 0, "copy")], "not between two of 2 ranks"),
        ([Transfer(1, 1, 0, "copy")], "not between two of 2 ranks"),
        ([Transfer(0, 1, 3, "copy", 2)], "not within 4 chunks"),
        ([Transfer(0, 1, 0, "reduce"), Transfer(1, 0, 0, "reduce")], "sends chunk 0 while it rec"),
        ([Transfer(0, 1, 0, "reduce"), Transfer(0, 1, 0, "copy")], "rank 1 receives chunk 0 twice"),
        ([Transfer(0, 1, 0, "copy"), Transfer(0, 1, 0, "copy")], "rank 1 receives chunk 0 twice"),
    ],
)
def test_an_impossible_schedule_is_refused(step, message):
    with pytest.raises(ValueError, match=message):
        Schedule("mine", 2, 4, (tuple(step),))


def test_combinations_must_fit():
    with pytest.raises(
        ValueError, match=r"differ in \(world_size, num_chunks\): \(2, 2\), \(3, 3\)"
    ):
        c.ring_steps(2) + c.ring_steps(3)
    with pytest.raises(ValueError, match="num_segments must be at least 1"):
        c.ring_steps(2, 0)


# ------------------------------------------------------------------------- on real ranks

ALL_REDUCES = {
    "ring": c.ring_all_reduce,
    "ring in segments": partial(c.ring_all_reduce, num_segments=3),
    "tree": c.tree_all_reduce,
    "tree in chunks": partial(c.tree_all_reduce, num_chunks=4),
    "double tree": partial(c.tree_all_reduce, double=True, num_chunks=2),
    "halving-doubling": c.halving_doubling_all_reduce,
    "direct": c.direct_all_reduce,
}
OPS = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}
# Relative to the largest value; half precision is rounded at every hop of a ring.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@contextmanager
def world(backend="gloo"):
    dist.init_process_group(backend)
    yield dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()


def draw(rank, shape, dtype, salt=0):
    """A rank's tensor, the same for whoever asks."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def oracle(ranks, shape, dtype, op, salt=0):
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    if op == "avg":
        mean = OPS[op](torch.stack([draw(r, shape, dtype, salt).double() for r in ranks]))
        return mean if dtype.is_floating_point else mean.trunc()
    return OPS[op](torch.stack([draw(r, shape, dtype, salt).to(exact) for r in ranks]))


def close(got, expected, where):
    tolerance = TOLERANCE.get(got.dtype, 0.0)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        got.double(),
        expected.double().reshape(got.shape),
        rtol=0,
        atol=tolerance * max(1.0, scale),
        msg=lambda text: f"{where}: {text}",
    )


def every_algorithm():
    with world() as (_, n):
        me, everyone = dist.get_rank(), range(n)
        sizes = sorted({0, 1, n - 1, n, n + 1, 1000})
        cases = [(size, torch.float64, "sum") for size in sizes]
        cases += [(7, torch.float32, op) for op in OPS]
        cases += [(7, torch.int64, op) for op in OPS]
        dtypes = (torch.bfloat16, torch.float16, torch.int32, torch.int16, torch.uint8)
        cases += [(13, dtype, op) for dtype in dtypes for op in ("sum", "avg", "max")]
        for name, all_reduce in ALL_REDUCES.items():
            for salt, (size, dtype, op) in enumerate(cases):
                tensor = draw(me, (size,), dtype, salt)
                assert all_reduce(tensor, op).is_completed()
                where = f"{name}, {op} of {size} {dtype} on {n} ranks"
                close(tensor, oracle(everyone, (size,), dtype, op, salt), where)
        for reduce_scatter in (c.ring_reduce_scatter, c.direct_reduce_scatter):
            for salt, (size, dtype, op) in enumerate(cases):
                whole = draw(me, (size,), dtype, salt)
                before = whole.clone()
                parts = oracle(everyone, (size,), dtype, op, salt).tensor_split(n)
                output = torch.full_like(parts[me], -1, dtype=dtype)
                reduce_scatter(output, whole, op)
                close(output, parts[me], f"{reduce_scatter.__name__} {op} of {size} {dtype}")
                assert torch.equal(whole, before)
            inputs = [draw(me, (r + 1, 2), torch.float64, r) for r in everyone]
            output = torch.empty(me + 1, 2, dtype=torch.float64)
            reduce_scatter(output, inputs, "sum")
            close(output, oracle(everyone, (me + 1, 2), torch.float64, "sum", me), "lists")
        for all_gather in (c.ring_all_gather, c.direct_all_gather):
            for size in sizes:
                whole = torch.arange(size)
                output = torch.full_like(whole, -1)
                all_gather(output, whole.tensor_split(n)[me])
                assert torch.equal(output, whole)
            outputs = [torch.empty(r, 2) for r in everyone]
            all_gather(outputs, torch.full((me, 2), float(me)))
            assert [o.mean().item() for o in outputs[1:]] == list(range(1, n))
        every_rooted_collective(me, n)


def in_segments():
    """Messages cut up, and an output that is a part of the input: its own, or another rank's."""
    with world() as (me, n):
        for num_bytes in (1, 8, 100, 1 << 20):
            direct._SEGMENT_BYTES = num_bytes
            for size in (0, 1, 4 * n, 4 * n + 1):
                parts = oracle(range(n), (size,), torch.bfloat16, "avg").tensor_split(n)
                output = torch.empty_like(parts[me], dtype=torch.bfloat16)
                c.direct_reduce_scatter(output, draw(me, (size,), torch.bfloat16), "avg")
                close(output, parts[me], f"{size} elements in segments of {num_bytes} bytes")
            parts = oracle(range(n), (4 * n,), torch.float64, "sum").tensor_split(n)
            for place in range(n):
                whole = draw(me, (4 * n,), torch.float64)
                output = whole.tensor_split(n)[place]
                c.direct_reduce_scatter(output, whole)
                close(output, parts[me], f"output is part {place} of the input")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_direct_reduce_scatter_in_segments_and_within_its_input(n):
    run(in_segments, n)


def every_rooted_collective(me, n):
    for root in range(n):
        for size in (0, 1, n + 1, 1000):
            tensor = draw(me, (size,), torch.float32)
            c.broadcast(tensor, src=root)
            assert torch.equal(tensor, draw(root, (size,), torch.float32))
            for op in OPS:
                tensor = draw(me, (size,), torch.float64)
                c.reduce(tensor, dst=root, op=op)
                if me == root:
                    close(tensor, oracle(range(n), (size,), torch.float64, op), f"reduce {op}")
                else:
                    assert torch.equal(tensor, draw(me, (size,), torch.float64))
            parts = [torch.empty(size + r) for r in range(n)] if me == root else None
            c.gather(draw(me, (size + me,), torch.float32), parts, dst=root, check=True)
            for r, part in enumerate(parts or []):
                assert torch.equal(part, draw(r, (size + r,), torch.float32))
            tensor = torch.empty(size + me)
            c.scatter(tensor, parts, src=root, check=True)
            assert torch.equal(tensor, draw(me, (size + me,), torch.float32))
    # From s to d go s + 2 d elements, all of them 10 s + d.
    inputs = [torch.full((me + 2 * d,), 10 * me + d) for d in range(n)]
    outputs = [torch.empty(s + 2 * me, dtype=torch.int64) for s in range(n)]
    c.all_to_all(outputs, inputs)
    assert all(torch.equal(o, torch.full_like(o, 10 * s + me)) for s, o in enumerate(outputs))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_algorithm_against_the_oracle(n):
    run(every_algorithm, n)


def run_cases(cases):
    with world() as (rank, n):
        for salt, (name, shape, dtype, op) in enumerate(cases):
            tensor = draw(rank, shape, dtype, salt)
            ALL_REDUCES[name](tensor, op)
            close(tensor, oracle(range(n), shape, dtype, op, salt), f"{name} {op} {shape} {dtype}")


def test_any_shape_dtype_and_op():
    case = st.tuples(
        st.sampled_from(sorted(ALL_REDUCES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.int64, torch.int8, torch.bfloat16]),
        st.sampled_from(["sum", "avg", "max", "min"]),
    )
    drawn = []

    @settings(derandomize=True, max_examples=8, deadline=None)
    @given(st.lists(case, min_size=5, max_size=25))
    def collect(cases):
        drawn.extend(cases)

    collect()
    for n in (2, 3):
        run(run_cases, n, drawn)


def odd_tensors():
    with world() as (me, n):
        total = n * (n + 1) // 2
        for name, all_reduce in ALL_REDUCES.items():
            rows = torch.arange(12.0).reshape(3, 4)
            base = rows.clone() * (me + 1)
            all_reduce(base.t())  # strided: only a view is reduced, in its own memory
            close(base, rows * total, name)
            base = torch.arange(10.0) * (me + 1)
            all_reduce(base[::3])
            assert base[1] == me + 1
            close(base[::3], torch.arange(10.0)[::3] * total, name)
            images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) * (me + 1)
            all_reduce(images)
            close(images, torch.full((2, 3, 4, 5), total), name)
            scalar = torch.tensor(me + 1.0, requires_grad=True)
            version = scalar._version
            all_reduce(scalar)
            assert (scalar.item(), scalar._version) == (total, version)
            waves = torch.full((3,), 1j * (me + 1))
            all_reduce(waves.conj())
            assert torch.equal(waves, torch.full((3,), 1j * total))
            one = torch.full((1, 3), me + 1.0)[:, 1].clone()  # contiguous, with stride 3
            all_reduce(one)
            assert one.item() == total
            flags = torch.tensor([me == 0, False])
            all_reduce(flags, "max")
            assert flags.tolist() == [True, False]
            with torch.inference_mode():
                frozen = torch.ones(3)
                all_reduce(frozen, async_op=True).wait()
                assert frozen.tolist() == [n] * 3
            bits = torch.tensor([1 << me])
            all_reduce(bits, "bor")
            assert bits.item() == (1 << n) - 1
        negative = torch.tensor([-1 if me == 0 else 0])
        c.ring_all_reduce(negative, dist.ReduceOp.AVG)  # toward zero, as NCCL
        assert negative.item() == (-1 if n == 1 else 0)
        out = torch.zeros(n, 4).t()
        mine = torch.zeros(4, n)[:, ::n]
        c.ring_all_gather([out[:, r] for r in range(n)], mine.squeeze(1) + me)
        assert out[0].tolist() == list(range(n))


def test_tensors_of_any_layout():
    run(odd_tensors, 3)
    run(odd_tensors, 1)


def half_precision():
    """0.1 of every rank, 4 ranks; exact sums in fp64 of what bfloat16 holds."""
    with world() as (me, n):
        shape, errors = (4096,), {}
        exact = oracle(range(n), shape, torch.bfloat16, "sum")
        rounded = exact.to(torch.bfloat16)
        for name, all_reduce in {
            "ring": c.ring_all_reduce,
            "ring in float32": partial(c.ring_all_reduce, accumulate_dtype=torch.float32),
            "direct": c.direct_all_reduce,
        }.items():
            tensor = draw(me, shape, torch.bfloat16)
            all_reduce(tensor)
            errors[name] = (tensor != rounded).sum().item()
        large = torch.full((3,), 60000.0, dtype=torch.float16)
        c.direct_all_reduce(large, "max")
        wide = large.clone()
        c.ring_all_reduce(wide, "avg", accumulate_dtype=torch.float32)
        assert torch.equal(wide, large)  # the sum is beyond float16, the average is not
        return errors


def test_half_precision_is_rounded_once_where_it_can_be():
    for errors in run(half_precision, 4):
        assert errors["ring"] > 400  # three roundings
        assert errors["direct"] == errors["ring in float32"] == 0


def same_bits():
    with world() as (me, _):
        results = []
        for all_reduce in ALL_REDUCES.values():
            tensor = draw(me, (1003,), torch.float32)
            all_reduce(tensor, "avg")
            results.append(tensor)
        return results


def test_all_ranks_get_the_same_bits():
    first, *others = run(same_bits, 3)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)


def subgroups():
    with world() as (me, n):
        members = [[0, 2], [1, 3], [3, 1, 2]]
        groups: list[Any] = [dist.new_group(ranks) for ranks in members]
        for ranks, group in zip(members, groups, strict=True):
            if me not in ranks:
                with pytest.raises(ValueError, match=f"rank {me} is not in the group"):
                    c.ring_all_reduce(torch.ones(3), group=group)
                continue
            for name, all_reduce in ALL_REDUCES.items():
                tensor = draw(me, (11,), torch.float64)
                all_reduce(tensor, "sum", group)
                close(tensor, oracle(ranks, (11,), torch.float64, "sum"), f"{name} in {ranks}")
            for root in ranks:
                tensor = torch.tensor([me])
                c.broadcast(tensor, root, group)
                assert tensor.item() == root
                tensor = torch.tensor([me])
                c.broadcast(tensor, group=group, group_src=0)
                assert tensor.item() == dist.get_global_rank(group, 0)
            outsider = next(rank for rank in range(n) if rank not in ranks)
            with pytest.raises(ValueError, match=f"root dst={outsider} is not in the group of"):
                c.reduce(torch.ones(2), outsider, group=group)
        # Groups at work at the same time, on a rank that is in both.
        works = [
            c.ring_all_reduce(torch.full((1000,), float(me)), group=group, async_op=True)
            for ranks, group in zip(members, groups, strict=True)
            if me in ranks
        ]
        for work, ranks in zip(works, [r for r in members if me in r], strict=True):
            assert work.result()[0][0].item() == sum(ranks)
        local, cross = c.node_groups(2)
        for size in (0, 1, 3, 1000):
            for op in ("sum", "avg", "max"):
                tensor = draw(me, (size,), torch.float64)
                axes: Any = {"local_group": local, "cross_group": cross}
                c.hierarchical_all_reduce(tensor, op, async_op=op == "avg", **axes).wait()
                close(tensor, oracle(range(n), (size,), torch.float64, op), "hierarchical")
        with pytest.raises(ValueError, match="4 ranks are no whole number of nodes of 3"):
            c.node_groups(3)
        # With check=True all ranks of all nodes hear of a deviant, whichever node it is in.
        for deviant in range(n):
            for others, its in (
                ((torch.float32, (5,), "sum"), (torch.float64, (5,), "sum")),
                ((torch.float32, (5,), "sum"), (torch.float32, (6,), "sum")),
                ((torch.float32, (5,), "sum"), (torch.float32, (5,), "max")),
            ):
                dtype, shape, op = its if me == deviant else others
                rest = ", ".join(str(rank) for rank in range(n) if rank != deviant)
                tensor = torch.ones(shape, dtype=dtype)
                with pytest.raises(MismatchError, match="the ranks do not agree") as caught:
                    c.hierarchical_all_reduce(tensor, op, check=True, **axes)
                assert caught.value.rank == me
                assert f"rank {rest}: " in str(caught.value)
                assert f"rank {deviant}: " in str(caught.value)
        # Groups that form no grid: one node of two ranks, and two of one rank each.
        of_node: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [2], [3])]
        across: list[Any] = [dist.new_group(ranks) for ranks in ([0, 2, 3], [1])]
        crooked = {"local_group": of_node[max(0, me - 1)], "cross_group": across[me == 1]}
        with pytest.raises(MismatchError, match="ranks_per_node"):
            c.hierarchical_all_reduce(torch.ones(7), check=True, **crooked)
        tensor = torch.full((7,), me + 1.0)
        c.hierarchical_all_reduce(tensor, check=True, async_op=True, **axes).wait()
        assert tensor.tolist() == [n * (n + 1) / 2] * 7


def test_subgroups_and_hierarchies():
    run(subgroups, 4)


def in_flight():
    with world() as (me, n):
        total = n * (n + 1) // 2
        local, cross = c.node_groups(1)
        tensors, works = [], []
        for k in range(12):
            tensor = torch.full((100 + 37 * k,), float(k * (me + 1)))
            all_reduce = list(ALL_REDUCES.values())[k % len(ALL_REDUCES)]
            if k % 4 == 3:
                groups: Any = {"local_group": local, "cross_group": cross}
                works.append(c.hierarchical_all_reduce(tensor, async_op=True, **groups))
            else:
                works.append(all_reduce(tensor, async_op=True))
            tensors.append(tensor)
        # Meanwhile: torch's own collectives and messages on the same group, and a blocking one.
        other = torch.tensor([me + 1.0])
        dist.all_reduce(other)
        received = torch.zeros(50)
        ops = [
            dist.P2POp(dist.isend, torch.full((50,), float(me)), (me + 1) % n),
            dist.P2POp(dist.irecv, received, (me - 1) % n),
        ]
        for request in dist.batch_isend_irecv(ops) if n > 1 else ():
            request.wait()
        blocking = torch.tensor([me + 1])
        c.halving_doubling_all_reduce(blocking)
        assert (other.item(), blocking.item()) == (total, total)
        assert torch.equal(received, torch.full((50,), float((me - 1) % n)))
        assert works[2].is_completed()  # it came before the blocking one
        order = list(range(12))
        for k in order[::-2] + order[::2] + order:
            assert works[k].wait()
            assert works[k].is_completed()
            assert works[k].is_success()
            assert torch.equal(tensors[k], torch.full_like(tensors[k], float(k * total)))
        # Futures, chained.
        tensor = torch.ones(3)
        future = c.ring_all_reduce(tensor, async_op=True).get_future()
        assert torch.equal(
            future.then(lambda f: f.value()[0] * 2).wait(), torch.full((3,), 2.0 * n)
        )
        # A callback in the channel's thread must not start a collective there. Rank 0 registers
        # one before any other rank has called, so that the operation cannot be over yet.
        if me == 0 and n > 1:
            work = c.ring_all_reduce(torch.ones(1), async_op=True)
            nested = work.get_future().then(lambda _: c.ring_all_reduce(torch.ones(1)))
            assert repr(work) == "<ring_all_reduce: under way, 0 bytes sent>"
            with pytest.raises(
                DeadlineError, match=r"rank 0\] ring_all_reduce of group '0' was not"
            ):
                work.wait(timedelta(seconds=0.01))
            dist.barrier()
            with pytest.raises(RuntimeError, match="would wait for itself"):
                nested.wait()
        else:
            dist.barrier()
            c.ring_all_reduce(torch.ones(1), async_op=True).wait()
        # Nobody waits for this one; it gets done all the same, before the next blocking one.
        forgotten = torch.ones(5)
        c.ring_all_reduce(forgotten, async_op=True)
        c.ring_all_reduce(torch.ones(1))
        assert forgotten.tolist() == [n] * 5


@pytest.mark.parametrize("n", [1, 2, 3])
def test_several_in_flight_waited_for_in_any_order(n):
    run(in_flight, n)


DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
)
ONLY_COPIED = (torch.float8_e4m3fn, torch.uint16)  # torch cannot add these


def all_in_the_background():
    """Every collective, of every dtype, also of nothing: all in flight before the first wait."""
    with world() as (me, n):
        local, cross = c.node_groups(n if n % 2 else 2)
        flights = []
        for dtype in DTYPES:
            for size in (0, 1, 5):
                op = "max" if dtype == torch.bool else "sum"
                one = torch.ones(size).to(dtype)
                total = 1 if op == "max" else n
                ones, parts = [one] * n, [torch.empty_like(one) for _ in range(n)]
                root = size % n
                if dtype not in ONLY_COPIED:
                    for all_reduce in (*ALL_REDUCES.values(), None):
                        tensor = one.clone()
                        if all_reduce is None:
                            groups: Any = {"local_group": local, "cross_group": cross}
                            work = c.hierarchical_all_reduce(tensor, op, True, **groups)
                        else:
                            work = all_reduce(tensor, op, async_op=True)
                        flights.append((work, [tensor], total))
                    for scatter in (c.ring_reduce_scatter, c.direct_reduce_scatter):
                        tensor = torch.empty_like(one)
                        flights.append((scatter(tensor, ones, op, async_op=True), [tensor], total))
                    tensor = one.clone()
                    work = c.reduce(tensor, root, op, async_op=True)
                    flights.append((work, [tensor], total if me == root else 1))
                tensor = one * (me == root) if dtype not in ONLY_COPIED else one.clone()
                flights.append((c.broadcast(tensor, root, async_op=True), [tensor], 1))
                for gather in (c.ring_all_gather, c.direct_all_gather):
                    tensor = torch.empty(n * size, dtype=dtype)
                    flights.append((gather(tensor, one, async_op=True), [tensor], 1))
                work = c.gather(one, parts if me == root else None, root, async_op=True)
                flights.append((work, parts if me == root else [], 1))
                tensor = torch.empty_like(one)
                work = c.scatter(tensor, ones if me == root else None, root, async_op=True)
                flights.append((work, [tensor], 1))
                outputs = [torch.empty_like(one) for _ in range(n)]
                flights.append((c.all_to_all(outputs, ones, async_op=True), outputs, 1))
        for work, tensors, expected in flights:
            work.wait()
            for tensor in tensors:
                assert (tensor.to(torch.complex128) == expected).all(), (work, tensor, expected)
        with pytest.raises(ValueError, match=r"sum of torch.uint16: .*\(rank \d of \d\)"):
            c.ring_all_reduce(torch.ones(3).to(torch.uint16))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_collective_of_every_dtype_in_the_background(n):
    run(all_in_the_background, n)


def bytes_sent():
    with world():
        sent = {}
        for numel in (0, 1, 5, 1200):
            for dtype in (torch.float32, torch.bfloat16):
                for name, all_reduce in ALL_REDUCES.items():
                    work = all_reduce(torch.ones(numel, dtype=dtype), async_op=True)
                    work.wait()
                    sent[name, numel, dtype.itemsize] = work.num_bytes_sent
        return sent


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bytes_on_the_wire_are_those_of_the_schedule(n):
    schedules = {
        "ring": c.ring_steps(n),
        "ring in segments": c.ring_steps(n, 3),
        "tree": c.tree_steps(n),
        "tree in chunks": c.tree_steps(n, 4),
        "double tree": c.double_tree_steps(n, 2),
        "halving-doubling": c.halving_doubling_steps(n),
        "direct": c.direct_steps(n),
    }
    for rank, sent in enumerate(run(bytes_sent, n)):
        for (name, numel, itemsize), num_bytes in sent.items():
            expected = schedules[name].num_bytes_sent(numel * itemsize, itemsize)
            assert num_bytes == expected[rank], (name, numel)
        assert sent["ring", 1200, 4] * n == 2 * (n - 1) * 4800  # 2 (N-1)/N S


# ----------------------------------------------------------------------------- wrong use


def wrong_use():
    with world() as (me, n):
        one = torch.ones(3)
        not_one: Any = "gloo"
        for message, call in {
            "op must be one of sum, avg.*got 'median'": lambda: c.ring_all_reduce(one, "median"),
            "bor of torch.float32": lambda: c.ring_all_reduce(one, "bor"),
            "avg of torch.bool: truth values": lambda: c.tree_all_reduce(one > 0, "avg"),
            "max of torch.complex64": lambda: c.direct_all_reduce(one * 1j, "max"),
            "root src=7 is not in the group": lambda: c.broadcast(one, 7),
            "not both": lambda: c.broadcast(one, 0, group_src=0),
            f"group_dst=-1 is not in a group of {n}": lambda: c.reduce(one, group_dst=-1),
            "expanded tensor": lambda: c.ring_all_reduce(one[:1].expand(4)),
            "must be dense": lambda: c.ring_all_reduce(one.to_sparse()),
            "one dtype": lambda: c.ring_all_gather(one, one.double()),
            "output must have 1 elements, got 3": lambda: c.ring_reduce_scatter(one, one[:n]),
            "input must have 1 elements, got 3": lambda: c.direct_all_gather(one[:n], one),
            f"inputs must have one tensor per rank, {n} of": lambda: c.all_to_all([one] * n, [one]),
            r"outputs\[\d\] must have 1 elements": lambda: c.all_to_all([one] * n, [one[:1]] * n),
            "num_segments must be at least 1": lambda: c.ring_all_reduce(one, num_segments=0),
            "or it is none: 'gloo'": lambda: c.ring_all_reduce(one, group=not_one),
        }.items():
            with pytest.raises(ValueError, match=message):
                call()
        with pytest.raises(ValueError, match="gather_list"):
            c.gather(one, None if me == 0 else [one] * n)
        with pytest.raises(ValueError, match="scatter_list"):
            c.scatter(one, [one] if me == 0 else [one] * n)
        # What only a comparison shows, with the ranks named; the group stays usable.
        me_0 = "rank 0: .*; rank " + ", ".join(map(str, range(1, n))) + ": "
        last = n - 1
        for call in (
            lambda: c.ring_all_reduce(torch.ones(3 + (me == 0)), check=True),
            lambda: c.tree_all_reduce(torch.ones(3), "max" if me else "sum", check=True),
            lambda: c.direct_all_reduce(
                one.double() if me else one, check=True, async_op=True
            ).wait(),
            lambda: c.tree_all_reduce(torch.ones(9), double=bool(me), check=True),
            lambda: c.ring_all_reduce(torch.ones(99), num_segments=1 + (me == 0), check=True),
            lambda: c.ring_all_reduce(
                one.half(), accumulate_dtype=torch.float32 if me else None, check=True
            ),
            lambda: (c.broadcast if me else c.reduce)(one, check=True),
            lambda: c.broadcast(one, 0 if me else last, check=True),
        ):
            with pytest.raises(MismatchError, match=me_0) as caught:
                call()
            assert caught.value.rank == me
        # So are sizes that may differ from rank to rank.
        odd, parts = torch.ones(3 + (me == 1)), [torch.ones(3)] * n
        wide = [torch.ones(3 + (me == 1 and rank == 2)) for rank in range(n)]
        for message, call in {
            "rank 1 sends 4 elements to rank 0, which expects 3": lambda: c.gather(
                odd, parts if me == 0 else None, check=True
            ),
            "rank 0 sends 3 elements to rank 1, which expects 4": lambda: c.scatter(
                odd, parts if me == 0 else None, check=True
            ),
            "rank 2 sends 3 elements to rank 1, which expects 4": lambda: c.all_to_all(
                wide, parts, check=True
            ),
        }.items():
            with pytest.raises(MismatchError, match=message) as caught:
                call()
            assert caught.value.rank == me
        c.ring_all_reduce(one, check=True)
        assert one.tolist() == [n] * 3
        # Descriptions that are too long for a message are compared by their digests.
        shape = (1,) * 40
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minidist.collectives.agreement._DESCRIPTION_BYTES", 128)
            c.ring_all_reduce(torch.ones(shape), check=True)
            with pytest.raises(MismatchError, match=me_0):
                c.ring_all_reduce(torch.ones((*shape, 1 + (me == 0))), check=True)


def test_wrong_use_raises_and_never_hangs():
    with pytest.raises(ValueError, match="init_process_group first"):
        c.ring_all_reduce(torch.ones(1))
    run(wrong_use, 3)


def a_rank_stays_away():
    with world() as (me, n):
        group: Any = dist.new_group(timeout=timedelta(seconds=10))
        if me != n - 1:
            work = c.ring_all_reduce(torch.ones(3), group=group, async_op=True)
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                work.wait()
            assert (work.is_completed(), work.is_success()) == (True, False)
        first = threading.active_count()
        c.ring_all_reduce(torch.ones(3), async_op=True).wait()
        assert threading.active_count() == first + 1
    # The channel's thread ends with its group.
    gc.collect()
    end_s = time.monotonic() + 20
    while any(t.name == "minidist collectives of 0" for t in threading.enumerate()):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_rank_that_stays_away_is_an_error_after_the_timeout_of_the_group():
    run(a_rank_stays_away, 2)


# -------------------------------------------------------------------- in place of torch's

STEPS, BATCH = 10, 12


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 5, generator=generator), torch.randn(BATCH, 3, generator=generator)


def train(model, rank, n, dtype=torch.float32):
    """Losses, the first step's gradients and the last parameters; `rank` sees its share of data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients = []
    for x, y in batches():
        x, y = (t.to(dtype).tensor_split(n)[rank] for t in (x, y))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        gradients = gradients or [full(p.grad).clone() for p in model.parameters()]
        optimizer.step()
    return gradients, [full(p.detach()) for p in model.parameters()]


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trains_like_one_process(results):
    gradients, parameters = train(make_model().double(), 0, 1, torch.float64)
    for got_gradients, got_parameters in results:
        for got, expected in zip(got_gradients, gradients, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)
        for got, expected in zip(got_parameters, parameters, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def ddp_with_hooks():
    with world() as (rank, n):
        local, cross = c.node_groups(2 if n % 2 == 0 else 1)
        cases = {
            "plain": None,
            "ring": (None, ddp_hooks.ring_hook),
            "tree": (None, ddp_hooks.tree_hook),
            "double tree": (dist.group.WORLD, ddp_hooks.double_tree_hook),
            "halving-doubling": (None, ddp_hooks.halving_doubling_hook),
            "direct": (None, ddp_hooks.direct_hook),
            "hierarchical": ((local, cross), ddp_hooks.hierarchical_hook),
            "segments": (None, ddp_hooks.make_hook(c.ring_all_reduce, num_segments=2)),
        }
        results = {}
        for name, hook in cases.items():
            ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.001)  # several buckets
            if hook is not None:
                ddp.register_comm_hook(*hook)
            results[name] = train(ddp, rank, n)
        return results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ddp_with_our_hooks_trains_like_one_process(n):
    results = run(ddp_with_hooks, n)
    for name in results[0]:
        trains_like_one_process([result[name] for result in results])
    for mine, plain in zip(results[0]["ring"][1], results[0]["plain"][1], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def stock_training_on_our_backend():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    c.register()
    c.register()
    with world("minidist") as (rank, n):
        assert dist.get_backend() == "minidist"
        with c.CollectiveLog() as ddp_log:
            ddp = train(DistributedDataParallel(make_model(), bucket_cap_mb=0.001), rank, n)
        mesh = init_device_mesh("cpu", (n,))
        model = make_model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with c.CollectiveLog() as fsdp_log:
            fsdp = train(model, rank, n)
        return ddp, fsdp, ddp_log.counts(), fsdp_log.counts()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_stock_ddp_and_fsdp_run_on_our_backend(n):
    results = run(stock_training_on_our_backend, n)
    trains_like_one_process([result[0] for result in results])
    trains_like_one_process([result[1] for result in results])
    for _, _, ddp_counts, fsdp_counts in results:
        assert ddp_counts["ring_all_reduce"] >= 1 + 2 * (STEPS - 1)  # one bucket at first
        if n > 1:  # one rank has nothing to scatter or to gather
            assert fsdp_counts["ring_reduce_scatter"] >= 3 * STEPS
            assert fsdp_counts["ring_all_gather"] >= 3 * STEPS


def every_torch_collective():
    c.register()
    with world("minidist") as (me, n):
        everyone = range(n)
        mine = torch.tensor([me + 1.0, 2.0])
        stacked = torch.stack([torch.tensor([r + 1.0, 2.0]) for r in everyone])
        for op, expected in {
            dist.ReduceOp.SUM: stacked.sum(0),
            dist.ReduceOp.AVG: stacked.mean(0),
            dist.ReduceOp.MAX: stacked.amax(0),
            dist.ReduceOp.MIN: stacked.amin(0),
            dist.ReduceOp.PRODUCT: stacked.prod(0),
        }.items():
            tensor = mine.clone()
            dist.all_reduce(tensor, op)
            close(tensor, expected, str(op))
            tensor = mine.clone()
            dist.reduce(tensor, n - 1, op)
            close(tensor, expected if me == n - 1 else mine, str(op))
        tensor = mine.clone()
        dist.broadcast(tensor, n - 1)
        assert torch.equal(tensor, stacked[-1])
        parts = [torch.empty(2) for _ in everyone]
        dist.all_gather(parts, mine)
        assert torch.equal(torch.stack(parts), stacked)
        whole = torch.empty(2 * n)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(whole, mine)
        assert torch.equal(whole, stacked.flatten())
        output = torch.empty(2)
        dist.reduce_scatter(output, [mine + r for r in everyone])
        assert torch.equal(output, stacked.sum(0) + n * me)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(output, mine.repeat(n), async_op=True).wait()
        assert torch.equal(output, stacked.sum(0))
        parts = [torch.empty(2) for _ in everyone] if me == 0 else None
        dist.gather(mine, parts)
        dist.scatter(output, parts)
        assert torch.equal(output, mine)
        dist.all_to_all_single(whole, torch.arange(2.0 * n) + 100 * me)
        assert whole[::2].tolist() == [100 * r + 2 * me for r in everyone]
        sizes = [me + r for r in everyone]
        received = torch.empty(sum(sizes))
        dist.all_to_all_single(received, torch.full((sum(sizes),), float(me)), sizes, sizes)
        assert received.tolist() == [float(r) for r in everyone for _ in range(me + r)]
        outputs = [torch.empty(1) for _ in everyone]
        dist.all_to_all(outputs, [torch.tensor([10.0 * me + r]) for r in everyone])
        assert [o.item() for o in outputs] == [10 * r + me for r in everyone]
        objects = [None] * n
        dist.all_gather_object(objects, {"rank": me})
        assert objects == [{"rank": r} for r in everyone]
        received = torch.empty(2)
        for request in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (me + 1) % n),
                dist.P2POp(dist.irecv, received, (me - 1) % n),
            ]
        ):
            request.wait()
        assert torch.equal(received, stacked[(me - 1) % n])
        pair = dist.new_group([0, n - 1])
        if me in (0, n - 1):
            tensor = mine.clone()
            dist.all_reduce(tensor, group=pair)
            assert tensor[0] == n + 1
        tensor = mine.clone()
        tensors = [tensor, mine.repeat(2)]
        dist.all_reduce_coalesced(tensors)
        assert torch.equal(tensors[0], stacked.sum(0))
        assert torch.equal(tensors[1], stacked.sum(0).repeat(2))
        dist.barrier()


def test_torch_collectives_on_our_backend():
    run(every_torch_collective, 3)


# ------------------------------------------------------------- on the emulated cluster


def ring_in_virtual_time(numel):
    tensor = torch.full((numel,), float(dist.get_rank()))
    c.ring_all_reduce(tensor)
    work = c.ring_all_reduce(tensor, "max", async_op=True)
    work.wait()
    return tensor[0].item()


def test_the_emulated_cluster_takes_as_long_as_the_schedule_says():
    n, numel, latency_s, bandwidth = 4, 4000, 1e-3, 1e6
    link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
    cluster = Cluster(
        name="slow",
        nodes=1,
        devices_per_node=n,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e30,
        memory_bandwidth_bytes_per_s=1e30,
    )
    results, timeline = run_emulated(ring_in_virtual_time, n, cluster, numel)
    assert results == [6.0] * n
    terms = {"latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth}
    expected_s = 2 * c.ring_steps(n).time_s(4 * numel, **terms)
    assert timeline.makespan_s == pytest.approx(expected_s, rel=1e-3)


# ------------------------------------------------------------------------------- on a GPU


def cuda_tensors():
    """One GPU is enough: gloo carries the messages, so they are staged through the CPU."""
    torch.cuda.set_device(0)
    with world() as (me, n):
        for all_reduce in ALL_REDUCES.values():
            for size in (0, 1, n + 1, 1000):
                tensor = draw(me, (size,), torch.float32).cuda()
                work = all_reduce(tensor * 1, "sum", async_op=True)
                close(work.result()[0].cpu(), oracle(range(n), (size,), torch.float32, "sum"), "")
        inputs = [torch.full((2,), 10 * me + d, device="cuda") for d in range(n)]
        outputs = [torch.empty_like(t) for t in inputs]
        c.all_to_all(outputs, inputs)
        assert [o[0].item() for o in outputs] == [10 * s + me for s in range(n)]


@pytest.mark.gpu
def test_cuda_tensors():
    run(cuda_tensors, 2)


def nccl_alone():
    torch.cuda.set_device(0)
    with world("nccl"):
        for all_reduce in ALL_REDUCES.values():
            tensor = torch.ones(5, device="cuda")
            work = all_reduce(tensor, "avg", async_op=True)
            work.wait()
            assert tensor.tolist() == [1.0] * 5
            assert work.get_future().value()[0] is tensor


@pytest.mark.gpu
def test_nccl():
    run(nccl_alone, 1)
