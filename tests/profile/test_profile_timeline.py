"""Intervals, timelines and shares: against brute force, formulas and traces written by hand."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.emulate import Cluster, Event, Link, Trace, simulate
from minidist.profile import (
    Span,
    Timeline,
    Window,
    chrome_trace,
    compute_rows,
    find_bottleneck,
    from_chrome_trace,
    from_emulated,
    from_profiler,
    merge_timelines,
    read_trace,
    report,
    save_chrome_trace,
    shares,
    step_shares,
    total,
)
from minidist.profile.intervals import clip, intersect, length, merge, subtract
from minidist.profile.timeline import KINDS, shift

END = 24
bounds = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda ab: (min(ab), max(ab)))
interval_lists = st.lists(bounds, max_size=8)


def points(intervals) -> set[int]:
    """The unit cells [i, i+1) that lie inside."""
    return {i for start, end in intervals for i in range(start, end)}


@settings(derandomize=True, max_examples=200)
@given(interval_lists, interval_lists, bounds)
def test_interval_arithmetic_is_set_arithmetic(a, b, window):
    merged_a, merged_b = merge(a), merge(b)
    for result, expected in [
        (merged_a, points(a)),
        (intersect(merged_a, merged_b), points(a) & points(b)),
        (subtract(merged_a, merged_b), points(a) - points(b)),
        (clip(merged_a, *window), points(a) & points([window])),
    ]:
        assert points(result) == expected
        assert length(result) == len(expected)
        assert all(start < end for start, end in result)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(result))


def span(kind, start, end, rank=0, name="x", lane="lane") -> Span:
    return Span(rank=rank, lane=lane, kind=kind, name=name, start_s=start, end_s=end)


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(KINDS), bounds), max_size=12), bounds)
def test_shares_give_every_moment_to_the_first_kind_that_applies(rows, window):
    timeline = Timeline(tuple(span(kind, *bound) for kind, bound in rows))
    result = shares(timeline, Window(rank=0, name="w", start_s=window[0], end_s=window[1]))
    cells = {kind: points(b for k, b in rows if k == kind) & points([window]) for kind in KINDS}
    compute, communication = cells["compute"], cells["communication"]
    left = points([window]) - compute - communication
    assert result.compute_s == len(compute)
    assert result.communication_s == len(communication)
    assert result.overlapped_s == len(compute & communication)
    assert result.exposed_s == len(communication - compute)
    assert result.copy_s == len(left & cells["copy"])
    assert result.loader_s == len((left - cells["copy"]) & cells["loader"])
    assert result.idle_s == len(left - cells["copy"] - cells["loader"])
    parts = result.compute_s + result.exposed_s + result.copy_s + result.loader_s + result.idle_s
    assert parts == result.step_s == window[1] - window[0]
    assert result.bubble_s == result.step_s - result.compute_s


def test_shares_of_other_ranks_do_not_mix_and_add_up():
    timeline = Timeline(
        (span("compute", 0, 4), span("compute", 0, 1, rank=1), span("communication", 1, 4, rank=1)),
        tuple(Window(rank=r, name="step 0", start_s=0, end_s=4) for r in (0, 1)),
    )
    first, second = step_shares(timeline)
    assert (first.utilization, second.utilization) == (1.0, 0.25)
    assert (first.overlap_fraction, second.overlap_fraction) == (1.0, 0.0)
    whole = total([first, second])
    assert whole.utilization == 5 / 8
    assert whole.rank is None
    assert find_bottleneck(second, 2).limit == "communication"
    assert find_bottleneck(first, 2).limit == "compute"
    assert len(report(timeline).splitlines()) == 3


def test_spans_are_checked():
    with pytest.raises(ValueError, match="kind must be one of compute"):
        span("computing", 0, 1)
    with pytest.raises(ValueError, match="before its start"):
        span("compute", 2, 1)


# ------------------------------------------------------------------------------------ other sources


def emulated(events):
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    cluster = Cluster(
        name="test",
        nodes=1,
        devices_per_node=len(events),
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e11,
    )
    return simulate(Trace(world_size=len(events), events=events), cluster)


def backward_with_all_reduce(slow: float) -> list[Event]:
    """Backward for 2 s, an all-reduce of 3 s beside 1 s more of it, and the wait."""
    return [
        Event(kind="compute", name="backward", duration_s=2.0 + slow),
        Event(kind="issue", collective="all_reduce", key="0/0", ranks=(0, 1), nbytes=3 * 10**9),
        Event(kind="compute", name="backward", duration_s=1.0),
        Event(kind="wait", key="0/0"),
    ]


def test_emulated_timelines_give_exact_shares():
    result = emulated([backward_with_all_reduce(0.0), backward_with_all_reduce(0.0)])
    timeline = from_emulated(result)
    for part in step_shares(timeline):
        assert part.step_s == result.makespan_s == 5.0
        assert (part.compute_s, part.exposed_s, part.overlapped_s) == (3.0, 2.0, 1.0)
        assert part.idle_s == 0.0  # "idle" of the emulator is the exposed communication
    assert total(step_shares(timeline)).utilization == result.efficiency
    assert timeline.collectives(1) == {"all_reduce": 1}


def test_an_emulated_straggler_shows_as_idle_time_of_the_others():
    timeline = from_emulated(emulated([backward_with_all_reduce(0.0), backward_with_all_reduce(4)]))
    fast, slow = step_shares(timeline)
    assert (fast.idle_s, slow.idle_s) == (3.0, 0.0)  # 4 s, of which it computes for one
    assert compute_rows(timeline) == {0: [3.0], 1: [7.0]}


# ------------------------------------------------------------------------------------ Chrome traces


def test_export_and_import_are_inverse(tmp_path):
    timeline = Timeline(
        (
            span("compute", 0.25, 1.5, lane="stream 7"),
            span("communication", 1, 2, rank=1, name="ring"),
            span("idle", 0, 1, rank=3),
        ),
        (Window(rank=1, name="step 0", start_s=0, end_s=2),),
        1_795_261_538_000_000_001,
    )
    save_chrome_trace(timeline, tmp_path / "trace.json")
    back = read_trace(tmp_path / "trace.json")
    assert back == timeline
    events = chrome_trace(timeline)["traceEvents"]
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {"rank 0", "rank 1", "rank 3"}


def event(cat, name, ts, dur, tid=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 5,
        "tid": tid,
        "args": args,
    }


CPU_TRACE = {
    "distributedInfo": {"rank": 1, "backend": "gloo"},
    "baseTimeNanoseconds": 1_000_000_000,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 5, "args": {"name": "python"}},
        event("user_annotation", "step", 100, 100),
        event("user_annotation", "enumerate(DataLoader)#_Single.__next__", 100, 20),
        event("cpu_op", "aten::stack", 105, 10),  # collating is loading
        event("cpu_op", "aten::linear", 120, 20),
        event("cpu_op", "aten::addmm", 122, 16),  # nested: counts once
        event("cpu_op", "evaluate_function: AccumulateGrad", 140, 10),
        event("cpu_op", "c10d::allreduce_", 144, 4),  # nested: queueing is no computation
        event("user_annotation", "gloo:all_reduce", 146, 34, tid=2),
        event("cpu_op", "aten::copy_", 150, 5, tid=2),  # of gloo's thread
        event("cpu_op", "aten::mul", 160, 10),
        event("cpu_op", "_c10d_functional::wait_tensor", 172, 6),
        event("python_function", "train.py(3): step", 100, 100),
        event("user_annotation", "step", 210, 10),
    ],
}


def test_cpu_traces():
    timeline = from_chrome_trace(CPU_TRACE, step="step")
    assert timeline.ranks == (1,)
    assert timeline.origin_unix_ns == 1_000_000_000 + 100_000
    names = [s.name for s in timeline.of(1, "compute")]
    assert names == [
        "aten::linear",
        "evaluate_function: AccumulateGrad",
        "evaluate_function: AccumulateGrad",
        "aten::mul",
    ]
    assert timeline.collectives(1) == {"gloo:all_reduce": 1}
    first, second = step_shares(timeline)
    us = {n: round(getattr(first, n) * 1e6, 6) for n in ("compute_s", "loader_s", "idle_s")}
    # 20 + 6 + 10 of operators; 144 to 180 on communication, 10 of it beside aten::mul
    # and 2 beside what follows c10d::allreduce_ in AccumulateGrad
    assert us == {"compute_s": 36, "loader_s": 20, "idle_s": 20}
    assert first.communication_s == pytest.approx(36e-6)
    assert first.exposed_s == pytest.approx(24e-6)
    assert first.overlapped_s == pytest.approx(12e-6)
    assert second.idle_s == pytest.approx(second.step_s)
    with pytest.raises(ValueError, match="no 'epoch' in the trace"):
        from_chrome_trace(CPU_TRACE, step="epoch")
    with pytest.raises(ValueError, match="no 'traceEvents'"):
        from_chrome_trace({})


GPU_TRACE = {
    "distributedInfo": {"rank": 0, "backend": "nccl"},
    "traceEvents": [
        event("user_annotation", "ProfilerStep#1", 0, 30),
        event("cpu_op", "aten::mm", 0, 25),
        event("user_annotation", "nccl:all_reduce", 20, 2),
        event("cuda_runtime", "cudaLaunchKernel", 1, 3),
        event("gpu_user_annotation", "ProfilerStep#1", 50, 50, tid=7),
        event("gpu_user_annotation", "ProfilerStep#1", 60, 60, tid=20),
        event("gpu_user_annotation", "ProfilerStep#2", 150, 50, tid=7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 40, 20, tid=7, stream=7),
        event("kernel", "sm90_xmma_gemm_bf16", 60, 40, tid=7, stream=7),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 80, 40, tid=20, stream=20),
        event("kernel", "vectorized_elementwise_kernel", 150, 50, tid=7, stream=7),
    ],
}


def test_gpu_traces_count_kernels_and_not_their_launches(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(GPU_TRACE).encode()))
    timeline = read_trace(path)
    assert {s.lane for s in timeline.spans} == {"stream 7", "stream 20"}
    first, second = step_shares(timeline)
    assert (first.name, second.name) == ("ProfilerStep#1", "ProfilerStep#2")
    us = [
        round(getattr(first, f"{n}_s") * 1e6, 6)
        for n in ("step", "compute", "communication", "overlapped", "exposed", "copy", "idle")
    ]
    # The step lasts until the next one starts: what the GPU waits for in between is its own.
    assert us == [100, 40, 40, 20, 20, 10, 30]
    assert second.utilization == 1.0
    # A collective that outlasts the last annotation belongs to the last step.
    late = event("kernel", "ncclDevKernel_AllReduce", 190, 60, tid=20, stream=20)
    longer = GPU_TRACE | {"traceEvents": [*GPU_TRACE["traceEvents"], late]}
    _, second = step_shares(from_chrome_trace(longer))
    assert second.step_s == pytest.approx(100e-6)
    assert second.exposed_s == pytest.approx(50e-6)
    (collective,) = timeline.of(0, "communication")
    assert collective.name.startswith("ncclDevKernel_AllReduce")


def test_timelines_of_ranks_are_put_on_one_axis():
    later = dict(CPU_TRACE, baseTimeNanoseconds=2_000_000_000, distributedInfo={"rank": 0})
    one, zero = from_chrome_trace(CPU_TRACE), from_chrome_trace(later)
    merged = merge_timelines([zero, one])
    assert merged.origin_unix_ns == one.origin_unix_ns
    starts = {rank: merged.of(rank)[0].start_s for rank in (0, 1)}
    assert starts[0] - starts[1] == pytest.approx(1.0, abs=1e-12)
    # Without a wall clock, as they are.
    plain = merge_timelines([shift(zero, 1.0), one])
    assert plain.origin_unix_ns is None
    assert plain.of(0)[0].start_s == pytest.approx(1.0)


class Squares(torch.utils.data.Dataset):
    """Computes with operators while loading: that must not count as the model's computation."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.full((4,), float(index)) ** 2).cos()


def test_a_real_profile_of_a_loader():
    model = torch.nn.Linear(4, 4)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=9),
    ) as profile:
        for batch in loader:
            model(batch).sum().backward()
            profile.step()
    timeline = from_profiler(profile)
    loads = timeline.of(0, "loader")
    # The first batch is warm-up; three come, and the call that finds no fifth.
    assert len(loads) == 4
    loading = merge((s.start_s, s.end_s) for s in loads)
    computing = merge((s.start_s, s.end_s) for s in timeline.of(0, "compute"))
    assert intersect(loading, computing) == []
    names = {s.name for s in timeline.of(0, "compute")}
    assert "aten::linear" in names
    assert "aten::cos" not in names
    assert [w.name for w in timeline.windows(0)][:3] == [f"ProfilerStep#{i}" for i in (1, 2, 3)]
    for part in step_shares(timeline):
        parts = part.compute_s + part.exposed_s + part.copy_s + part.loader_s + part.idle_s
        assert parts == pytest.approx(part.step_s, abs=1e-9)
