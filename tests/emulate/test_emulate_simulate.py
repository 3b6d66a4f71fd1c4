"""Replay against formulas, on traces written by hand: no processes, no torch."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys

import numpy as np
import pytest

from minidist.cost.comm import collective_seconds
from minidist.emulate import (
    Cluster,
    Event,
    Link,
    Trace,
    clusters,
    simulate,
)
from minidist.emulate.session import Session
from minidist.errors import ProtocolError

BANDWIDTH, LATENCY = 1e9, 1e-3


def make_cluster(devices: int, latency_s: float = LATENCY, nodes: int = 1, **links: Link):
    link = Link(bandwidth_bytes_per_s=BANDWIDTH, latency_s=latency_s)
    return Cluster(
        name="test",
        nodes=nodes,
        devices_per_node=devices,
        intra_node=links.get("intra", link),
        inter_node=links.get("inter", link),
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e11,
    )


def compute(seconds: float, **more) -> Event:
    return Event(kind="compute", name="layer", duration_s=seconds, **more)


def issue(kind: str, key: str, ranks, nbytes: int = 0, group: str = "0", **more) -> Event:
    return Event(
        kind="issue",
        collective=kind,
        key=key,
        ranks=tuple(ranks),
        nbytes=nbytes,
        group=group,
        **more,
    )


def wait(key: str) -> Event:
    return Event(kind="wait", key=key)


def replay(events, cluster):
    return simulate(Trace(world_size=len(events), events=events), cluster)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_ring_all_reduce_takes_the_textbook_time(num_ranks):
    nbytes, ranks = 1_000_000, range(num_ranks)
    events = [[issue("all_reduce", "0/0", ranks, nbytes), wait("0/0")] for _ in ranks]
    timeline = replay(events, make_cluster(num_ranks))
    n = num_ranks
    expected_s = 2 * (n - 1) / n * nbytes / BANDWIDTH + 2 * (n - 1) * LATENCY
    assert timeline.makespan_s == pytest.approx(expected_s, rel=1e-14)
    sent = 2 * (n - 1) / n * nbytes
    assert timeline.bytes_per_link == pytest.approx({f"device {r}": sent for r in ranks})


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ring_all_reduce_of_messages_takes_the_same_time(num_ranks):
    n, nbytes = num_ranks, 1_200_000
    events: list[list[Event]] = []
    for rank in range(n):
        right, left = (rank + 1) % n, (rank - 1) % n
        mine = []
        for step in range(2 * (n - 1)):
            out, into = f"0/{rank}>{right}/0/{step}", f"0/{left}>{rank}/0/{step}"
            mine += [
                issue("send", out, (rank, right), nbytes // n),
                issue("recv", into, (left, rank), nbytes // n),
                wait(into),
                wait(out),
            ]
        events.append(mine)
    link = Link(bandwidth_bytes_per_s=BANDWIDTH, latency_s=LATENCY)
    expected_s = collective_seconds(kind="all_reduce", num_bytes=nbytes, num_ranks=n, link=link)
    assert replay(events, make_cluster(n)).makespan_s == pytest.approx(expected_s, rel=1e-12)


def training_step(buckets, *, overlap: bool, backward_s: float, nbytes: int, ranks=(0, 1)):
    """Backward of `buckets` equal parts, each followed by its all-reduce, or all at the end."""
    mine: list[Event] = []
    keys = [f"0/{i}" for i in range(buckets)]
    for key in keys:
        mine.append(compute(backward_s / buckets))
        if overlap:
            mine.append(issue("all_reduce", key, ranks, nbytes // buckets))
    if not overlap:
        mine += [issue("all_reduce", key, ranks, nbytes // buckets) for key in keys]
    mine += [wait(key) for key in keys]
    return [list(mine) for _ in ranks]


def test_reduce_after_backward_is_the_sum_and_overlap_is_compute_plus_tail():
    nbytes, backward_s, buckets = 64_000_000, 0.36, 12
    cluster = make_cluster(2, latency_s=0.0)
    link = cluster.intra_node
    one_s = collective_seconds(
        kind="all_reduce", num_bytes=nbytes // buckets, num_ranks=2, link=link
    )
    after = replay(
        training_step(buckets, overlap=False, backward_s=backward_s, nbytes=nbytes), cluster
    )
    overlapped = replay(
        training_step(buckets, overlap=True, backward_s=backward_s, nbytes=nbytes), cluster
    )
    assert after.makespan_s == pytest.approx(backward_s + buckets * one_s, rel=1e-12)
    assert one_s < backward_s / buckets  # so that only the last bucket is left over
    assert overlapped.makespan_s == pytest.approx(backward_s + one_s, rel=1e-12)
    assert overlapped.efficiency == pytest.approx(backward_s / (backward_s + one_s), rel=1e-12)


def test_the_best_bucket_size_is_in_the_middle():
    cluster = make_cluster(2, latency_s=1.5e-3)
    times = [
        replay(
            training_step(buckets, overlap=True, backward_s=0.36, nbytes=240_000_000), cluster
        ).makespan_s
        for buckets in (120, 60, 24, 12, 6, 3, 1)
    ]
    best = times.index(min(times))
    assert 0 < best < len(times) - 1
    assert times[: best + 1] == sorted(times[: best + 1], reverse=True)
    assert times[best:] == sorted(times[best:])


def pipeline(stages: int, micro_batches: int, schedule: str, forward_s=1.0, backward_s=2.0):
    """Events of one step of a pipeline, one stage per rank; links take no time."""
    events = []
    for stage in range(stages):
        mine: list[Event] = []

        def forward(i, stage=stage, mine=mine):
            if stage > 0:
                key = f"0/{stage - 1}>{stage}/0/{i}"
                mine.extend([issue("recv", key, (stage - 1, stage)), wait(key)])
            mine.append(compute(forward_s))
            if stage < stages - 1:
                mine.append(issue("send", f"0/{stage}>{stage + 1}/0/{i}", (stage, stage + 1)))

        def backward(i, stage=stage, mine=mine):
            if stage < stages - 1:
                key = f"0/{stage + 1}>{stage}/1/{i}"
                mine.extend([issue("recv", key, (stage + 1, stage)), wait(key)])
            mine.append(compute(backward_s))
            if stage > 0:
                mine.append(issue("send", f"0/{stage}>{stage - 1}/1/{i}", (stage, stage - 1)))

        # 1F1B: as many forwards ahead as there are stages below, then one of each in turn.
        warm_up = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
        for i in range(warm_up):
            forward(i)
        for i in range(micro_batches - warm_up):
            forward(warm_up + i)
            backward(i)
        for i in range(micro_batches - warm_up, micro_batches):
            backward(i)
        events.append(mine)
    return events


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 8), (4, 32), (8, 8)])
def test_pipeline_bubble(schedule, stages, micro_batches):
    link = Link(bandwidth_bytes_per_s=float("inf"), latency_s=0.0)
    timeline = replay(pipeline(stages, micro_batches, schedule), make_cluster(stages, intra=link))
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert 1 - timeline.efficiency == pytest.approx(bubble, abs=1e-14)


def random_trace(seed: int, world_size: int = 4) -> list[list[Event]]:
    """Overlapping sub-groups and messages, consistent by construction."""
    draw = random.Random(seed)
    groups = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    numbers = dict.fromkeys(groups, 0)
    events: list[list[Event]] = [[] for _ in range(world_size)]
    late: list[tuple[tuple[int, ...], str]] = []
    for _ in range(60):
        for rank in range(world_size):
            events[rank].append(compute(draw.choice([0.0, 0.001, 0.002])))
        name = draw.choice(list(groups))
        key = f"{name}/{numbers[name]}"
        numbers[name] += 1
        kind = draw.choice(["all_reduce", "all_gather", "broadcast", "all_to_all", "barrier"])
        nbytes = draw.choice([0, 1_000_000, 2_000_000])
        for rank in groups[name]:
            events[rank].append(issue(kind, key, groups[name], nbytes, group=name))
        late.append((groups[name], key))
        if draw.random() < 0.6:
            ranks, key = late.pop(draw.randrange(len(late)))
            for rank in ranks:
                events[rank].append(wait(key))
    return events


@pytest.mark.parametrize("seed", range(5))
def test_the_timeline_does_not_depend_on_anything_but_the_events(seed):
    cluster = make_cluster(2, nodes=2)
    reference = replay(random_trace(seed), cluster).to_json()
    assert replay(random_trace(seed), cluster).to_json() == reference
    # The order in which collectives were completed in real time is not part of the events, but
    # dictionaries are filled rank by rank: renaming the ranks must rename the timeline.
    events = random_trace(seed)
    swap = {0: 1, 1: 0, 2: 3, 3: 2}
    renamed = [
        [Event(**{**vars(e), "ranks": tuple(swap[r] for r in e.ranks)}) for e in events[swap[rank]]]
        for rank in range(4)
    ]
    times = replay(events, cluster).event_times
    swapped = replay(renamed, cluster).event_times
    assert [swapped[swap[rank]] for rank in range(4)] == times


def test_links_are_shared_in_virtual_order():
    # Two groups over the one wire between two nodes: the second waits, whatever its name.
    fast = Link(bandwidth_bytes_per_s=1e12, latency_s=0.0)
    slow = Link(bandwidth_bytes_per_s=BANDWIDTH, latency_s=0.0)
    cluster = make_cluster(2, nodes=2, intra=fast, inter=slow)
    for first, second in itertools.permutations(["a", "b"]):
        events = [
            [issue("all_reduce", f"{first}/0", (0, 2), 10**6, group=first)],
            [compute(1e-4), issue("all_reduce", f"{second}/0", (1, 3), 10**6, group=second)],
            [issue("all_reduce", f"{first}/0", (0, 2), 10**6, group=first)],
            [issue("all_reduce", f"{second}/0", (1, 3), 10**6, group=second)],
        ]
        timeline = replay(events, cluster)
        assert timeline.event_times[0][0] == pytest.approx((0.0, 1e-3))
        assert timeline.event_times[1][1] == pytest.approx((1e-3, 2e-3))
        assert timeline.bytes_per_link["node 0"] == pytest.approx(2e6)
    # Within the nodes the same two groups would not meet at all.
    inside = [
        [issue("all_reduce", "a/0", (0, 1), 10**6, group="a")],
        [issue("all_reduce", "a/0", (0, 1), 10**6, group="a")],
        [issue("all_reduce", "b/0", (2, 3), 10**6, group="b")],
        [issue("all_reduce", "b/0", (2, 3), 10**6, group="b")],
    ]
    assert replay(inside, cluster).makespan_s == pytest.approx(1e-6)


def test_a_collective_starts_when_its_last_rank_comes():
    events = [
        [issue("barrier", "0/0", (0, 1)), wait("0/0")],
        [compute(0.5), issue("barrier", "0/0", (0, 1)), wait("0/0")],
    ]
    timeline = replay(events, make_cluster(2))
    assert timeline.event_times[0] == [(0.5, 0.5 + LATENCY), (0.0, 0.5 + LATENCY)]
    idle = [i for i in timeline.intervals[0] if i.kind == "idle"]
    assert [(i.start_s, i.end_s) for i in idle] == [(0.0, 0.5 + LATENCY)]
    assert timeline.efficiency == pytest.approx(0.5 / (2 * (0.5 + LATENCY)))


def test_what_the_ranks_report_is_charged_by_roofline():
    cluster = make_cluster(1)
    bound_by_arithmetic = Event(kind="compute", flops=2e12, num_bytes=1.0)
    bound_by_memory = Event(kind="compute", flops=1.0, num_bytes=3e11)
    timeline = replay([[bound_by_arithmetic, bound_by_memory]], cluster)
    assert timeline.event_times[0] == [(0.0, 2.0), (2.0, 5.0)]


def test_steps_are_cut_at_the_charges():
    mine = []
    for step in range(3):
        key = f"0/{step}"
        mine += [compute(0.1, layer=0, direction="forward", step=step)]
        mine += [compute(0.2, layer=0, direction="backward", step=step)]
        mine += [issue("all_reduce", key, (0, 1), 10**8), wait(key)]
    timeline = replay([list(mine), list(mine)], make_cluster(2, latency_s=0.0))
    assert [s.start_s for s in timeline.steps] == pytest.approx([0.0, 0.4, 0.8])
    assert [s.efficiency for s in timeline.steps] == pytest.approx([0.75] * 3)


def test_an_incomplete_trace_says_who_waits_for_what():
    events = [[issue("all_reduce", "0/0", (0, 1), 8), wait("0/0")], [compute(1.0)]]
    with pytest.raises(ProtocolError, match=r"rank 0 waits for all_reduce 0/0, issued by \[0\]"):
        replay(events, make_cluster(2))
    with pytest.raises(ValueError, match="3 ranks do not fit on 2 devices"):
        replay([[], [], []], make_cluster(2))


def test_ready_made_clusters():
    assert clusters.laptop(3).num_devices == 3
    assert clusters.pcie_a100(2).num_devices == 2
    assert clusters.dgx_h100().num_devices == 8
    two = clusters.dgx_h100(nodes=2)
    assert two.link_between((0, 7)).bandwidth_bytes_per_s == 450e9
    assert two.link_between((0, 8)).bandwidth_bytes_per_s == 8 * 50e9
    with pytest.raises(AttributeError):
        two.nodes = 5  # type: ignore[misc]


def test_importing_the_simulator_does_not_import_torch():
    code = (
        "import sys, minidist.emulate.clusters, minidist.emulate.simulate, minidist.launch,"
        " minidist.emulate.broker; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- streams of one device ------------------------------------------------------------------------


def on(stream: int, event: Event) -> Event:
    return dataclasses.replace(event, stream=stream)


def test_streams_run_side_by_side_and_meet_at_marks():
    # Stream 1 gathers while stream 0 computes; stream 0 waits for the mark behind the gather.
    both = [
        on(1, issue("all_gather", "0/0", (0, 1), 2 * 3_000_000)),
        on(1, wait("0/0")),
        on(1, Event(kind="record", key="mark/0")),
        compute(0.002),
        Event(kind="after", key="mark/0"),
        compute(0.001),
    ]
    timeline = replay([both, both], make_cluster(2))
    gather_s = collective_seconds(
        kind="all_gather", num_bytes=6_000_000, num_ranks=2, link=make_cluster(2).intra_node
    )
    assert gather_s > 0.002
    assert timeline.makespan_s == pytest.approx(gather_s + 0.001, rel=1e-12)
    idle = [i for i in timeline.intervals[0] if i.kind == "idle"]
    assert [(i.start_s, i.end_s) for i in idle] == [(0.002, pytest.approx(gather_s))]


def test_collectives_of_one_group_keep_the_order_of_the_program():
    # The second one is ready at once, but NCCL would run it behind the first one too.
    events = [
        compute(0.005),
        issue("all_reduce", "0/0", (0, 1), 1000),
        on(1, issue("all_gather", "0/1", (0, 1), 1000)),
    ]
    timeline = replay([events, events], make_cluster(2))
    first, second = (timeline.event_times[0][i] for i in (1, 2))
    assert first[0] == 0.005
    assert second[0] == first[1]


def test_compute_beside_stream_0_is_copying():
    events = [compute(0.001), on(3, compute(0.004))]
    timeline = replay([events], make_cluster(1))
    assert [i.kind for i in timeline.intervals[0]] == ["compute", "copy", "idle"]
    assert timeline.efficiency == pytest.approx(0.25)


def test_a_mark_that_is_never_reached_is_named():
    events = [
        on(1, wait("0/0")),
        on(1, Event(kind="record", key="mark/0")),
        Event(kind="after", key="mark/0"),
    ]
    with pytest.raises(ProtocolError, match="rank 0 waits for 0/0, which nobody has issued"):
        replay([events], make_cluster(1))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_uneven_all_to_all_takes_what_its_largest_part_takes(order):
    """Rank 0 has nothing to send, rank 1 a million numbers; who comes first changes nothing."""
    send, recv = {0: [0, 0], 1: [1_000_000, 0]}, {0: [0, 1_000_000], 1: [0, 0]}
    session = Session(
        1, 2, None, lambda *_: None, keep_payloads=True, deadline_s=30, max_bytes=1 << 30
    )
    for rank in order:
        call = {"t": "issue", "kind": "all_to_all", "g": "w", "r": [0, 1], "k": 0}
        call |= {"dtype": "float32", "shape": [sum(send[rank])]}
        call |= {"send": send[rank], "recv": recv[rank]}
        session.handle(rank, call, np.zeros(4 * sum(send[rank]), np.uint8))
    trace = session.trace()
    [record] = trace.collectives
    assert (record.completed, record.numel, record.nbytes) == (True, 1_000_000, 4_000_000)
    one_s = 4_000_000 / BANDWIDTH
    assert simulate(trace, make_cluster(2, latency_s=0.0)).makespan_s == pytest.approx(one_s / 2)
