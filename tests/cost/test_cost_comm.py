"""The alpha-beta model: against step-by-step simulations, the emulated cluster, and itself."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import cost

SIZES = st.integers(min_value=0, max_value=2**32)
RANKS = st.integers(min_value=1, max_value=70)
WIRES = st.builds(
    cost.Wire,
    bandwidth_bytes_per_s=st.floats(1e8, 1e12),
    latency_s=st.floats(0, 1e-3),
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(num_bytes=SIZES, num_ranks=RANKS, wire=WIRES)
def test_each_kind_takes_its_messages_and_its_bytes(
    num_bytes: int, num_ranks: int, wire: cost.Wire
):
    n, transfer_s = num_ranks, num_bytes / wire.bandwidth_bytes_per_s
    levels, part = math.ceil(math.log2(n)), (n - 1) / n
    for kinds, messages, share in (
        (("all_reduce",), 2 * (n - 1), 2 * part),
        (("all_gather", "reduce_scatter", "all_to_all"), n - 1, part),
        (("broadcast", "reduce"), levels, n > 1),
        (("gather", "scatter"), n > 1, part),
        (("barrier",), levels, 0),
        (("send",), 1, 1),
    ):
        expected = messages * wire.latency_s + share * transfer_s
        for kind in kinds:
            got = cost.collective_seconds(kind=kind, num_bytes=num_bytes, num_ranks=n, link=wire)
            assert got == pytest.approx(expected, rel=1e-12, abs=1e-18), kind


def ring_by_steps(num_bytes: float, n: int, wire: cost.Wire) -> float:
    """Rank r sends chunk r, then what it has just received: a clock per rank."""
    clock = [0.0] * n
    for _ in range(2 * (n - 1)):
        sent = [t + wire.latency_s + num_bytes / n / wire.bandwidth_bytes_per_s for t in clock]
        clock = [max(clock[r], sent[r - 1]) for r in range(n)]
    return max(clock)


def halving_doubling_by_steps(num_bytes: float, n: int, wire: cost.Wire) -> float:
    """n a power of two: partners at distance n/2, n/4, ... exchange half of what they hold."""
    seconds, held = 0.0, num_bytes
    for _ in range(n.bit_length() - 1):
        held /= 2
        seconds += 2 * (wire.latency_s + held / wire.bandwidth_bytes_per_s)
    return seconds


def tree_by_steps(num_bytes: float, n: int, wire: cost.Wire) -> float:
    """Binomial: in round k, ranks with bit k set send to the rank without it; then all back."""
    message = wire.latency_s + num_bytes / wire.bandwidth_bytes_per_s
    clock = [0.0] * n
    for k in range((n - 1).bit_length()):
        for r in range(0, n, 2 << k):
            if r + (1 << k) < n:
                clock[r] = max(clock[r], clock[r + (1 << k)]) + message
    return 2 * clock[0]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 16])
def test_all_reduce_is_what_the_steps_add_up_to(n: int):
    wire = cost.Wire(bandwidth_bytes_per_s=3e9, latency_s=7e-6)
    for size in (0, 1, 1e3, 1e9):

        def seconds(algorithm: str, size: float = size) -> float:
            return cost.all_reduce_seconds(
                num_bytes=size,
                num_ranks=n,
                link=wire,
                algorithm=algorithm,
            )

        assert seconds("ring") == pytest.approx(ring_by_steps(size, n, wire), rel=1e-9)
        assert seconds("tree") == pytest.approx(tree_by_steps(size, n, wire), rel=1e-9)
        if n & (n - 1) == 0:
            expected = halving_doubling_by_steps(size, n, wire)
            assert seconds("halving_doubling") == pytest.approx(expected, rel=1e-9)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(num_bytes=SIZES, num_ranks=st.integers(2, 70), wire=WIRES)
def test_no_all_reduce_beats_the_lower_bounds(num_bytes: int, num_ranks: int, wire: cost.Wire):
    """Any all-reduce sends 2 (n-1)/n B per rank and log2(n) rounds; more bytes take longer."""
    least_bytes = 2 * (num_ranks - 1) / num_ranks * num_bytes / wire.bandwidth_bytes_per_s
    least_rounds = math.ceil(math.log2(num_ranks)) * wire.latency_s
    for algorithm in cost.ALL_REDUCE_ALGORITHMS:
        options = {"num_ranks": num_ranks, "link": wire, "algorithm": algorithm}
        seconds = cost.all_reduce_seconds(num_bytes=num_bytes, **options)
        assert seconds >= least_bytes * (1 - 1e-9), algorithm
        assert seconds >= least_rounds * (1 - 1e-9), algorithm
        assert cost.all_reduce_seconds(num_bytes=num_bytes + 1e6, **options) >= seconds * (1 - 1e-9)
    name, best = cost.fastest_all_reduce(num_bytes=num_bytes, num_ranks=num_ranks, link=wire)
    assert name in cost.ALL_REDUCE_ALGORITHMS
    assert best == min(
        cost.all_reduce_seconds(num_bytes=num_bytes, num_ranks=num_ranks, link=wire, algorithm=a)
        for a in cost.ALL_REDUCE_ALGORITHMS
    )


def test_pipelined_trees_use_the_best_number_of_chunks():
    wire = cost.Wire(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    for size, n in itertools.product((1e2, 1e4, 1e6, 1e8), (4, 16, 33)):
        levels = math.ceil(math.log2(n))
        for algorithm, children in (("pipelined_tree", 2), ("double_tree", 1)):
            by_search = min(
                2 * (levels + k - 1) * (wire.latency_s + children * size / k / 1e9)
                for k in range(1, 4000)
            )
            ours = cost.all_reduce_seconds(
                num_bytes=size, num_ranks=n, link=wire, algorithm=algorithm
            )
            assert ours == pytest.approx(by_search, rel=5e-3)


def test_ring_against_tree_by_size_and_ranks():
    """Small buffers on many ranks: latency, so trees. Large ones: bandwidth, so rings."""
    wire = cost.Wire(bandwidth_bytes_per_s=12.5e9, latency_s=10e-6)

    def seconds(size: float, n: int, algorithm: str) -> float:
        return cost.all_reduce_seconds(num_bytes=size, num_ranks=n, link=wire, algorithm=algorithm)

    assert seconds(1e3, 256, "tree") < seconds(1e3, 256, "ring") / 10
    assert seconds(1e9, 8, "ring") < seconds(1e9, 8, "tree") / 3
    # The bytes of a ring do not grow with log n: they level off at 2 B, only the latency grows.
    free = cost.Wire(bandwidth_bytes_per_s=12.5e9, latency_s=0)
    times = [
        cost.all_reduce_seconds(num_bytes=1e9, num_ranks=n, link=free) for n in (8, 64, 512, 4096)
    ]
    assert times[-1] / times[0] < 1.15
    assert times[-1] == pytest.approx(2 * 1e9 / 12.5e9, rel=1e-3)


def test_gamma_adds_what_is_added_up():
    wire = cost.Wire(bandwidth_bytes_per_s=1e9, latency_s=0)
    for algorithm, additions in (("ring", 3 / 4), ("halving_doubling", 3 / 4), ("tree", 2)):
        options = {"num_bytes": 1e6, "num_ranks": 4, "link": wire, "algorithm": algorithm}
        extra = cost.all_reduce_seconds(**options, gamma_s_per_byte=1e-9) - cost.all_reduce_seconds(
            **options
        )
        assert extra == pytest.approx(additions * 1e-3)


def test_hierarchical_is_a_flat_ring_where_there_is_one_level():
    wire = cost.Wire(bandwidth_bytes_per_s=1e10, latency_s=1e-6)
    for n in (1, 2, 5, 8):
        flat = cost.all_reduce_seconds(num_bytes=1e7, num_ranks=n, link=wire)
        for ranks_per_node, num_nodes in ((n, 1), (1, n)):
            seconds = cost.hierarchical_all_reduce_seconds(
                num_bytes=1e7,
                ranks_per_node=ranks_per_node,
                num_nodes=num_nodes,
                intra_node=wire,
                inter_node=wire,
            )
            assert seconds == pytest.approx(flat)


def test_wrong_arguments_are_named():
    wire = cost.Wire(bandwidth_bytes_per_s=1e9, latency_s=0)
    with pytest.raises(ValueError, match="unknown algorithm 'butterfly', known are ring"):
        cost.all_reduce_seconds(num_bytes=1, num_ranks=2, link=wire, algorithm="butterfly")
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        cost.all_reduce_seconds(num_bytes=1, num_ranks=0, link=wire)
    with pytest.raises(ValueError, match="negative, got -1"):
        cost.broadcast_seconds(num_bytes=-1, num_ranks=2, link=wire)
    with pytest.raises(ValueError, match="unknown kind 'scan'"):
        cost.collective_seconds(kind="scan", num_bytes=1, num_ranks=2, link=wire)
    with pytest.raises(ValueError, match="trees do all_reduce only"):
        cost.nccl.latency_seconds(
            algorithm="tree", protocol="LL", gpus_per_node=8, num_nodes=1, kind="all_gather"
        )


# --------------------------------------------------------------------------------------------- fit


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "send", "broadcast"])
def test_fit_recovers_noisy_measurements(kind: str):
    noise = random.Random(5)
    truth = cost.Wire(bandwidth_bytes_per_s=40e9, latency_s=20e-6)
    sizes = [2.0**k for k in range(10, 28)] * 3
    messages = {"all_reduce": 6, "all_gather": 3, "send": 1, "broadcast": 3}[kind]
    factor = cost.bus_factor(kind=kind, num_ranks=4)
    times = [
        (messages * truth.latency_s + factor * b / truth.bandwidth_bytes_per_s)
        * noise.uniform(0.95, 1.05)
        for b in sizes
    ]
    fit = cost.fit_link(num_bytes=sizes, seconds=times, kind=kind, num_ranks=4)
    assert fit.link.bandwidth_bytes_per_s == pytest.approx(truth.bandwidth_bytes_per_s, rel=0.03)
    assert fit.link.latency_s == pytest.approx(truth.latency_s, rel=0.03)
    assert abs(fit.link.latency_s - truth.latency_s) < 4 * fit.latency_s_error
    assert 0.01 < fit.mean_rel_error < 0.04
    assert fit.bandwidth_rel_error < 0.03


def test_fit_refuses_what_has_no_line():
    with pytest.raises(ValueError, match="two sizes or more"):
        cost.fit_link(num_bytes=[8, 8, 8], seconds=[1, 1, 1])
    with pytest.raises(ValueError, match="not slower"):
        cost.fit_link(num_bytes=[1, 2, 3], seconds=[3, 2, 1])
    with pytest.raises(ValueError, match="positive"):
        cost.fit_link(num_bytes=[1, 2, 3], seconds=[1, 2, float("nan")])


def test_bus_bandwidth_of_an_ideal_ring_is_the_wire():
    wire = cost.Wire(bandwidth_bytes_per_s=50e9, latency_s=0)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for n in (2, 3, 8):
            t = cost.collective_seconds(kind=kind, num_bytes=1e9, num_ranks=n, link=wire)
            bus = cost.bus_bandwidth(kind=kind, num_bytes=1e9, seconds=t, num_ranks=n)
            assert bus == pytest.approx(50e9)


# ------------------------------------------------------------------------------------------- nodes


def test_which_link_a_group_uses():
    node = cost.DGX_H100
    inside = node.link_for(num_ranks=8)
    assert inside is cost.NVLINK4
    assert node.link_for(num_ranks=2, stride=4) is cost.NVLINK4
    assert node.link_for(num_ranks=4, stride=8).bandwidth_bytes_per_s == 50e9
    assert node.link_for(num_ranks=8, stride=4).bandwidth_bytes_per_s == 100e9  # 2 per node
    assert node.link_for(num_ranks=32).bandwidth_bytes_per_s == 400e9
