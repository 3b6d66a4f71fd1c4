"""Timelines from torch.profiler, and from its exported trace files.

Example::

    with torch.profiler.profile() as profile:
        for batch in loader:
            with record_function("step"):
                train_step(batch)                       # DDP, FSDP2, ...
    timeline = from_profiler(profile, step="step")      # this rank's
    print(overlap.report(gather_timeline(timeline)))

Phases: read the events; decide whether the host or a GPU computes; find the kind of each event;
remove from compute the operators inside a loader's or a collective's call; split into steps.

Kinds of events in a trace without GPU events (CPU, gloo):

- `compute`: operators (category `cpu_op`), on any thread. Python code between two operators does
  not count: it is idle time, like the time in which a GPU waits for its host.
- `communication`: `gloo:all_reduce` and similar annotations on gloo's own threads. Such a span
  begins when gloo starts the collective and ends when gloo has the result, **including the wait for
  slower ranks**. `c10d::allreduce_` is the host's call that queues the collective; it is a separate
  span.
- `loader`: `enumerate(DataLoader)#...__next__`, the time that the loop waits for its batch.

In a trace with GPU events the GPU computes: kernels by stream, NCCL's kernels recognised by their
name (they run until all ranks are there, so they also include the wait), copies and memsets. Host
operators only launch kernels and do not count. The steps are then the GPU's steps
(`gpu_user_annotation`).
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minidist.profile.intervals import Interval, merge, subtract
from minidist.profile.timeline import HOST_CALL, KINDS, Kind, Span, Timeline, Window

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")  # torch's profiling names of collectives
_LOADER = "enumerate(DataLoader)"
# Operators that queue a collective or wait for one. They and everything inside are no computation.
_CALLS = (HOST_CALL, "_c10d_functional::", "c10d_functional::", "record_param_comms")


def from_profiler(profile: Any, *, rank: int | None = None, step: str = "") -> Timeline:
    """This rank's timeline from a `torch.profiler.profile` that has ended.

    Args:
        rank: None means the rank that the profiler recorded (0 without a process group).
        step: name of the `record_function` block that is a step. "" means the steps that
            `profile.step()` marks, which torch does only where the profiler has a schedule.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return read_trace(path, rank=rank, step=step)


def read_trace(path: str | Path, *, rank: int | None = None, step: str = "") -> Timeline:
    """A timeline from a trace file (.json or .json.gz) of torch.profiler or `save_chrome_trace`."""
    path = Path(path)
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    return from_chrome_trace(json.loads(raw), rank=rank, step=step)


def from_chrome_trace(
    trace: Mapping[str, Any], *, rank: int | None = None, step: str = ""
) -> Timeline:
    """As `read_trace`, from the parsed JSON.

    Raises:
        ValueError: no trace events, or no step of that name.
    """
    if "traceEvents" not in trace:
        raise ValueError(
            "from_chrome_trace: no 'traceEvents'; expected what torch.profiler exports"
        )
    if "minidist" in trace:
        return _from_ours(trace)
    if rank is None:
        rank = int(trace.get("distributedInfo", {}).get("rank", 0))

    # Read complete events. Times are integer nanoseconds: a float is not exact above 2**53 ns.
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_device = any(event.get("cat") in _DEVICE for event in events)
    starts = [_ns(event["ts"]) for event in events]
    origin = min(starts, default=0)

    # Find the kind of each event.
    by_kind: dict[tuple[Kind, str], list[tuple[str, Interval]]] = defaultdict(list)
    calls: dict[str, list[Interval]] = defaultdict(list)  # per thread; nothing inside is compute
    for event, start in zip(events, starts, strict=True):
        name, lane = str(event["name"]), _lane(event)
        span = ((start - origin) / 1e9, (start - origin + _ns(event.get("dur", 0))) / 1e9)
        kind = _kind(event, name, on_device)
        if kind is not None:
            by_kind[kind, lane].append((name, span))
        if _is_call(name):
            calls[lane].append(span)

    # Remove from compute the time inside such calls.
    spans: list[Span] = []
    for (kind, lane), found in by_kind.items():
        nested = merge(calls[lane]) if kind == "compute" and not on_device else []
        for name, interval in _outermost(found) if kind == "compute" else found:
            spans += [
                Span(rank=rank, lane=lane, kind=kind, name=name, start_s=start, end_s=end)
                for start, end in (subtract([interval], nested) if nested else [interval])
            ]

    # Split into steps.
    steps = _steps(events, starts, origin, rank, step, on_device)
    unix_ns = origin + base_ns if base_ns else None
    return Timeline(tuple(sorted(spans, key=lambda s: (s.start_s, s.lane))), steps, unix_ns)


def _ns(microseconds: float) -> int:
    return round(float(microseconds) * 1000)


def _lane(event: Mapping[str, Any]) -> str:
    if event.get("cat") in _DEVICE:
        return f"stream {event.get('args', {}).get('stream', event.get('tid'))}"
    return f"thread {event.get('tid')}"


def _kind(event: Mapping[str, Any], name: str, on_device: bool) -> Kind | None:
    """Kind of an event, or None for events that do not count, such as calls that only launch."""
    category = event.get("cat")
    if name.startswith(_LOADER) and category in ("cpu_op", "user_annotation"):
        return "loader"
    if category == "user_annotation" and name.startswith(_BACKENDS):
        # For NCCL this annotation is the host's part, and only the kernel counts.
        return None if on_device and name.startswith("nccl:") else "communication"
    if on_device:
        if category == "kernel":
            return "communication" if name.lower().startswith("nccl") else "compute"
        return "copy" if category in _DEVICE else None
    if category != "cpu_op":
        return None
    if name.startswith(HOST_CALL):
        return "communication"
    return None if name.startswith(_CALLS) else "compute"


def _is_call(name: str) -> bool:
    """Whether operators inside this event, on the same thread, do not count as computation."""
    if name.startswith(_BACKENDS):
        # gloo's threads copy and cast with operators, which are no computation. But send and recv
        # are recorded on the calling thread, which continues to compute meanwhile.
        return not name.endswith((":send", ":recv"))
    return name.startswith((*_CALLS, _LOADER))


def _outermost(found: list[tuple[str, Interval]]) -> Iterable[tuple[str, Interval]]:
    """The operators of one thread that are not inside a different operator."""
    end = float("-inf")
    for name, span in sorted(found, key=lambda each: (each[1][0], -each[1][1])):
        if span[1] > end:
            end = span[1]
            yield name, span


def _steps(
    events: list[Any], starts: list[int], origin: int, rank: int, name: str, on_device: bool
) -> tuple[Window, ...]:
    """Windows of the annotation `name`, or of ProfilerStep#0, #1, ….

    A GPU's step lasts until the next step starts, so that it includes the wait between the steps.
    """
    category = "user_annotation"
    if on_device and any(e.get("cat") == "gpu_user_annotation" for e in events):
        category = "gpu_user_annotation"
    found: dict[str, list[Interval]] = defaultdict(list)
    for event, start in zip(events, starts, strict=True):
        label = str(event["name"])
        if event.get("cat") == category and (
            label == name if name else label.startswith("ProfilerStep#")
        ):
            found[label].append((start - origin, start - origin + _ns(event["dur"])))
    if name and not found:
        raise ValueError(f"no {name!r} in the trace: wrap each step in record_function({name!r})")
    # A GPU repeats an annotation on each of its streams: overlapping annotations are one step.
    windows = sorted((*each, label) for label, spans in found.items() for each in merge(spans))
    if category == "gpu_user_annotation":
        # No step follows the last step. Its annotation ends with its own stream, but other streams
        # may still run, so the last step ends with the last GPU event.
        ends = [
            start - origin + _ns(event["dur"])
            for event, start in zip(events, starts, strict=True)
            if event.get("cat") in _DEVICE
        ]
        last = [max(end, *ends) for _, end, _ in windows[-1:]]
        following = [start for start, _, _ in windows[1:]] + last
        windows = [
            (s, after, label) for (s, _, label), after in zip(windows, following, strict=True)
        ]
    return tuple(
        Window(
            rank=rank,
            name=f"{name} {index}" if name else label,
            start_s=start / 1e9,
            end_s=end / 1e9,
        )
        for index, (start, end, label) in enumerate(windows)
    )


def _from_ours(trace: Mapping[str, Any]) -> Timeline:
    """A timeline from the output of `timeline.chrome_trace`."""
    lanes: dict[tuple[Any, Any], str] = {}
    spans: list[Span] = []
    steps: list[Window] = []
    for event in trace["traceEvents"]:
        at = (event["pid"], event["tid"])
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                lanes[at] = event["args"]["name"]
            continue
        start_s = event["ts"] / 1e6
        where: Any = {
            "rank": event["pid"],
            "name": event["name"],
            "start_s": start_s,
            "end_s": start_s + event["dur"] / 1e6,
        }
        if event["cat"] in KINDS:
            spans.append(Span(lane=lanes[at], kind=event["cat"], **where))
        else:
            steps.append(Window(**where))
    return Timeline(tuple(spans), tuple(steps), trace["minidist"]["origin_unix_ns"])
