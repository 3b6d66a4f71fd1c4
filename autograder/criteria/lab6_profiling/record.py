"""Criteria for recording with torch's profiler, and for reading what it writes.

Recording is judged by labels that the step itself writes into the trace, a new label in each call.
Reading is judged on events with drawn names and times, like those recorded on a CPU and on a GPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.common.answers import (
    as_number,
    described,
    item_of,
    naming,
    read,
    returned,
    told,
)
from autograder.criteria.common.pretending import namespace, pretending
from autograder.criteria.common.virtual_gpu import VirtualGpus
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab6_profiling.spans import (
    KINDS,
    Span,
    active_seconds,
    draw_name,
    expected_spans,
    is_same,
)

# --- profile_steps -------------------------------------------------------------------------------


def draw_record(draw: Draw) -> list[Values]:
    """The numbers of warm-up and profiled steps of two runs, and a label that only this rank knows.

    The first run has no warm-up, so it cannot stand for the warm-up of the second.
    """
    rng = draw.shared()
    runs = [
        {"warmup": warmup, "num_steps": int(rng.integers(2, 5))}
        for warmup in (0, int(rng.integers(1, 4)))
    ]
    return [
        {"runs": runs, "label": f"part_{int(draw.private(rank).integers(1 << 40)):x}"}
        for rank in range(draw.world_size)
    ]


def observe_record(profile_steps: Any, inputs: Values, context: Context) -> Values:
    """Per run the calls of step() and what the judge needs of the events; files left behind."""
    before = set(Path.cwd().iterdir())
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        runs = [_record(profile_steps, run, inputs["label"], context) for run in inputs["runs"]]
        temporary = list(Path(folder).iterdir())
        written = _phases(_own_record(Path(folder) / "own.json", context))
    left = set(Path.cwd().iterdir()) - before
    for _ in range(20):  # a different rank may still use its file in this folder
        left = {path for path in left if path.exists()}
        if left:
            time.sleep(0.05)
    names = [path.name for path in left]
    names += [f"{path.name} (in the folder for temporary files)" for path in temporary]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        asked = _asked_with_gpu(profile_steps, context)
    return {"runs": runs, "left": sorted(names)[:3], "written": written, "asked": asked}


def _asked_with_gpu(profile_steps: Any, context: Context) -> list[list[str]]:
    """What it asks torch's profiler to record where torch finds a GPU; [] if that is not seen.

    Each item has the activities of one profiler; without any, torch records all that it can.
    """
    asked: list[list[str]] = []

    class Noting(torch.profiler.profile):
        def __init__(self, *, activities: Any = None, **options: Any) -> None:
            asked.append([activity.name for activity in activities or ()])
            super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **options)

    if any(_has_activities(value) for value in namespace(profile_steps).values()):
        return []  # chosen when the cell ran, so for this machine
    weight = _weight(context)
    gpus, instead = VirtualGpus(), {(torch.profiler, "profile"): Noting}
    with suppress(Exception), gpus.found_by(profile_steps), pretending(profile_steps, instead):
        profile_steps(lambda: _train(weight), warmup=0, num_steps=1)
    return asked


def _has_activities(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and any(
        isinstance(item, torch.profiler.ProfilerActivity) for item in value
    )


def _train(weight: torch.Tensor) -> None:
    total = (weight @ weight).sum()
    total.backward()  # adds arrows (flow events) to the trace
    dist.all_reduce(total.detach())


def _weight(context: Context) -> torch.Tensor:
    return torch.randn(16, 16, device=context.device, requires_grad=True)


def _own_record(path: Path, context: Context) -> list[Values]:
    """The events that torch writes of one such step."""
    weight = _weight(context)
    with torch.profiler.profile() as recorded:
        _train(weight)
    recorded.export_chrome_trace(str(path))
    return json.loads(path.read_text())["traceEvents"]


def _phases(events: list[Values]) -> list[str]:
    return sorted({str(event.get("ph")) for event in events})


def _record(profile_steps: Any, run: Values, label: str, context: Context) -> Values:
    """One run: how often step() was called, some of the events, and every `ph` among them."""
    calls = [0]
    weight = _weight(context)

    def step() -> None:
        with torch.profiler.record_function(f"{label}/{calls[0]}"):
            _train(weight)
        calls[0] += 1

    kept = []
    with naming(f"profile_steps(step, warmup={run['warmup']}, num_steps={run['num_steps']})"):
        found = profile_steps(step, warmup=run["warmup"], num_steps=run["num_steps"])
        events = _as_events(returned(found, "profile_steps"))
    for event in events:
        name, category = str(event.get("name")), str(event.get("cat"))
        wanted = name == "step" or name.startswith(label) or name == "aten::mm"
        if event.get("ph") == "X" and category in ("user_annotation", "cpu_op") and wanted:
            kept.append([name, float(event["ts"]), float(event["dur"])])
    return {"calls": calls[0], "events": kept[:200], "phases": _phases(events)}


def _as_events(found: Any) -> list[Any]:
    """The events that profile_steps returned; raises a TypeError for anything else."""
    if isinstance(found, dict) or not hasattr(found, "__iter__"):
        raise TypeError(
            f"profile_steps returned {described(found)}, expected the list of events: what the "
            'file of export_chrome_trace has under "traceEvents"'
        )
    events = list(found)
    if wrong := [event for event in events if not isinstance(event, dict)]:
        raise TypeError(f"profile_steps returned a list with {described(wrong[0])}, not of dicts")
    return events


def judge_record(case: Case) -> Iterator[Finding]:
    """Each profiled step lies inside its own "step" event; no warm-up step is in the trace.

    Nothing is left out of the trace: it has events of every `ph` that torch writes of such a step.
    A schedule of torch's, and more options of the profiler, are right, too.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        if not is_same(answer.get("left"), []):
            yield Finding(
                f"files are left behind: {answer.get('left')}. The trace is written only to be "
                "read: tempfile.TemporaryDirectory() removes its folder and all that is in it.",
                rank,
            )
            continue
        asked = told(answer, "asked")
        for names in asked if isinstance(asked, list) else []:
            if isinstance(names, list) and names and "CUDA" not in names:
                yield Finding(
                    "where torch finds a GPU (torch.cuda is a stand-in here), the profiler records "
                    f"{', '.join(map(str, names))[:100]} alone: the GPU is ProfilerActivity.CUDA.",
                    rank,
                )
        for number, run in enumerate(inputs["runs"]):
            got = item_of(answer.get("runs"), number)
            found = got if isinstance(got, dict) else {}
            problem = _record_problem(run, inputs["label"], found) or _left_out(answer, found)
            if problem:
                yield Finding(f"warmup={run['warmup']}: {problem}", rank)
                break


def _record_problem(run: Values, label: str, answer: Values) -> str | None:
    warmup, num_steps = run["warmup"], run["num_steps"]
    events: list[tuple[str, float, float]] = []
    came = answer.get("events")
    for event in came if isinstance(came, list) else []:
        if isinstance(event, list) and len(event) == 3 and isinstance(event[0], str):
            start, length = as_number(event[1]), as_number(event[2])
            if start is not None and length is not None:
                events.append((event[0], start, start + length))
    if not is_same(answer.get("calls"), warmup + num_steps):
        hint = ""
        if warmup and is_same(answer.get("calls"), num_steps):  # the run before had no warm-up
            hint = " No warm-up step ran here. Each call of profile_steps has its own warm-up."
        elif not warmup and is_same(answer.get("calls"), num_steps + 1):
            hint = " With warmup=0 there is no warm-up step."
        return (
            f"num_steps={num_steps}: step() was called {answer.get('calls')!r} times, expected "
            f"{warmup + num_steps}.{hint}"
        )
    seen = {name for name, _, _ in events if name.startswith(label)}
    if too_early := [n for n in range(warmup) if f"{label}/{n}" in seen]:
        return f"{len(too_early)} warm-up steps are in the trace: start the profiler after them."
    if missing := [n for n in range(warmup, warmup + num_steps) if f"{label}/{n}" not in seen]:
        return f"{len(missing)} of {num_steps} steps are not in the trace."
    steps = sorted((a, b) for name, a, b in events if name == "step")
    if len(steps) != num_steps:
        return f'expected {num_steps} events called "step", one around each step, got {len(steps)}.'
    for number, (start, end) in enumerate(steps):
        wanted = f"{label}/{warmup + number}"
        inside = [name for name, a, b in events if a >= start - 1 and b <= end + 1]
        if wanted not in inside:
            return (
                f'call {warmup + number} of step() does not lie inside the "step" number {number}.'
            )
        if "aten::mm" not in inside:
            return "no operator is in the trace: ask for ProfilerActivity.CPU."
    return None


def _left_out(answer: Values, of_run: Values) -> str | None:
    written, phases = answer.get("written"), of_run.get("phases")
    if not isinstance(written, list) or not isinstance(phases, list):
        return "expected a list of events."
    missing = [phase for phase in written if phase not in phases]
    if not missing:
        return None
    return (
        f"torch writes events with ph {', '.join(map(repr, missing))} as well, and none is there: "
        "return the list as export_chrome_trace writes it, with names, marks and arrows in it."
    )


# --- to_spans ------------------------------------------------------------------------------------


def draw_cpu(draw: Draw) -> list[Values]:
    """Events as from a CPU with gloo: operators, annotations, loading, and noise."""
    return _draw_events(draw, _cpu_events)


def draw_gpu(draw: Draw) -> list[Values]:
    """Events as from a GPU: kernels, copies, and host operators that only launch kernels.

    The last trace has copies and no kernel, so its operators compute.
    """
    return _draw_events(draw, _gpu_events)


def _draw_events(
    draw: Draw, make: Callable[[_Recorder, np.random.Generator, int], None]
) -> list[Values]:
    inputs = []
    for rank in range(draw.world_size):
        rng, traces = draw.private(rank), []
        begin = float(rng.integers(1 << 30)) + 0.375  # no whole microsecond
        for number in range(2 if make is _cpu_events else 3):
            # Each trace begins 1 ms before the previous one. So some of its operators lie where the
            # previous trace has a loader: code that mixes the traces fails.
            record = _Recorder(rng, begin - 1000 * number)
            record.noise(make is _cpu_events)
            make(record, rng, number)
            traces.append([record.events[i] for i in rng.permutation(len(record.events))])
        on_cpu = make is _cpu_events
        of_rank = 0 if on_cpu and rank == 1 else rank + 3  # never this rank's own number
        inputs.append({"rank": of_rank, "traces": traces, "kept": on_cpu})
    return inputs


class _Recorder:
    """Collects events in the form that torch.profiler exports."""

    def __init__(self, rng: np.random.Generator, base: float) -> None:
        self.rng, self.base = rng, base
        self.events: list[Values] = []

    def add(self, name: str, category: str, tid: int, start: float, end: float) -> None:
        """Adds a complete event from `start` to `end`, in microseconds after the base."""
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 77,
                "tid": tid,
                "ts": self.base + start,
                "dur": end - start,
                "args": {},
            }
        )

    def noise(self, lasting: bool) -> None:
        """Adds events that must not become spans; `lasting`: one of them has a length."""
        for phase in ("M", "i", "s", "f"):
            event = {"ph": phase, "name": draw_name(self.rng), "pid": 77, "tid": 1, "ts": self.base}
            # Only ph "X" makes a span, whatever the category and the length.
            extra = {"cat": "cpu_op", "dur": 8500.0} if phase == "i" and lasting else {}
            self.events.append(event | extra)
        self.add("PyTorch Profiler (0)", "Trace", 1, 0, 9000)
        self.add("step", "user_annotation", 1, 0, 8800)

    def cuts(self, begin: float, end: float, count: int) -> list[tuple[float, float]]:
        """`count` disjoint intervals between two points, in whole microseconds."""
        points = self.rng.choice(np.arange(begin + 1, end), 2 * count, replace=False)
        ordered = np.sort(points).tolist()
        return list(zip(ordered[::2], ordered[1::2], strict=True))

    def each(self, prefix: str, category: str, tid: int, begin: float, end: float, count: int):
        """Adds `count` disjoint events of one category, with drawn names."""
        for a, b in self.cuts(begin, end, count):
            self.add(prefix + draw_name(self.rng), category, tid, a, b)


def _cpu_events(record: _Recorder, rng: np.random.Generator, number: int) -> None:
    for begin in (0, 500):
        a = begin + float(rng.integers(1, 100))
        b = a + float(rng.integers(200, 350))
        loader = f"enumerate(DataLoader)#_{draw_name(rng)}.__next__"
        record.add(loader, "user_annotation", 1, a, b)
        record.add(loader, "user_annotation", 4, a + 12, a + 16)  # another thread loads, too
        record.add("aten::stack", "cpu_op", 1, a + 20, b - 30)  # collate: inside the loader
        record.add("aten::empty", "cpu_op", 1, a, a + 10)  # begins or ends with the loader
        record.add("aten::cat", "cpu_op", 1, b - 20, b)
        record.add("aten::" + draw_name(rng), "cpu_op", 2, a + 50, a + 90)  # on a different thread
        # No operators, so the loader does not cover them.
        record.add("host: " + draw_name(rng), "user_annotation", 1, a + 30, a + 40)
        record.add("gloo:" + draw_name(rng), "user_annotation", 1, a + 100, a + 110)
        # They begin or end in the loader's event, and do not lie within it.
        record.add("aten::" + draw_name(rng), "cpu_op", 1, a - 1.5, a + 5)
        record.add("aten::" + draw_name(rng), "cpu_op", 1, b - 5, b + 15)
    record.add("aten::" + draw_name(rng), "cpu_op", 1, 1110, 1190)
    record.each("aten::", "cpu_op", 1, 1200, 3000, 5)
    record.each("aten::", "cpu_op", 2, 1500, 3500, 3)
    record.each("gloo:", "user_annotation", 9, 2000, 4000, 4)
    record.each("c10d::", "cpu_op", 1, 4000, 5000, 2)
    record.each("", "user_annotation", 1, 4000, 5000, 2)
    record.each("host: ", "user_annotation", 1, 5000, 6000, 2)
    record.add("enumerate(DataLoader)#by_hand", "cpu_op", 3, 8600, 8700)  # of any category
    record.add("aten::stack", "cpu_op", 3, 8620, 8680)
    record.each("gloo:", "cpu_op", 1, 8700, 8740, 2)  # counts as a user_annotation only
    record.each("host: ", "cpu_op", 1, 8740, 8780, 2)
    record.add("aten::" + draw_name(rng), "cpu_op", 1, 8785, 8785.5)  # shorter than a microsecond
    record.each("about host: ", "user_annotation", 1, 6000, 7000, 2)  # only contains host:
    record.each("before gloo:", "user_annotation", 1, 7000, 8000, 2)
    record.each("aten::c10d::", "cpu_op", 1, 8000, 8500, 2)


def _gpu_events(record: _Recorder, rng: np.random.Generator, number: int) -> None:
    if number < 2:
        record.each("ncclDevKernel_", "kernel", 13, 1000, 4000, 4)
    if number == 0:  # trace 1 has only nccl kernels, and still counts as one of a GPU
        record.each("kernel_", "kernel", 7, 0, 3000, 6)
        record.each("copy_for_nccl_", "kernel", 7, 3000, 3500, 2)
    record.each("Memcpy HtoD ", "gpu_memcpy", 9, 3000, 5000, 3)
    record.each("Memset ", "gpu_memset", 7, 5000, 5500, 2)
    record.each("aten::", "cpu_op", 1, 5500, 7000, 5)  # only launch kernels
    record.each("cudaLaunchKernel ", "cuda_runtime", 1, 5500, 7000, 5)
    record.each("nccl:", "user_annotation", 1, 6000, 7000, 2)
    record.each("gloo:", "user_annotation", 1, 4000, 5000, 2)
    for prefix in ("nccl:", "gloo:", "host: ", ""):  # torch's copies of annotations, on the GPU
        record.each(prefix, "gpu_user_annotation", 7, 8500, 8780, 2)
    record.each("host: ", "user_annotation", 1, 7000, 8000, 2)
    record.each("enumerate(DataLoader)#", "user_annotation", 1, 8000, 8500, 2)


def observe_spans(to_spans: Any, inputs: Values, context: Context) -> Values:
    """The spans that the function makes of each list of events."""
    answer: Values = {}
    for number, events in enumerate(inputs["traces"]):
        before = _read(events)
        where = f"trace {number + 1} of {len(inputs['traces'])}, {len(events)} events"
        with naming(f"to_spans(events, rank={inputs['rank']}): {where}"):
            found = to_spans(events, inputs["rank"])
            spans = read(found, _as_spans, "to_spans", "a list of Span")
        if inputs["kept"] and _read(events) != before:
            raise ValueError(
                "to_spans has changed the events that it was given: leave them as they are, "
                "without new entries, because others read them, too"
            )
        answer[f"{number}/kinds"] = [s.kind for s in spans]
        answer[f"{number}/names"] = [s.name[:200] for s in spans]
        answer[f"{number}/ranks"] = sorted({s.rank for s in spans})
        answer[f"{number}/times"] = np.array([[s.start, s.end] for s in spans], dtype=np.float64)
    return answer


def _as_spans(found: Any) -> list[Span]:
    return [
        Span(int(s.rank), str(s.kind), str(s.name), float(s.start), float(s.end)) for s in found
    ]


def _read(events: list[Values]) -> list[str]:
    """All that is in the events, whatever their order."""
    return sorted(repr(sorted(event.items(), key=repr)) for event in events)


def judge_spans(case: Case) -> Iterator[Finding]:
    """The spans of each kind cover the right times. Nested operators may be kept or left out."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number in range(len(inputs["traces"])):
            if problem := _spans_problem(inputs, answer, number):
                yield Finding(problem, rank)
                break


def _spans_problem(inputs: Values, answer: Values, number: int) -> str | None:
    kinds, times = answer.get(f"{number}/kinds"), answer.get(f"{number}/times")
    if not isinstance(kinds, list) or not isinstance(times, np.ndarray):
        return "expected a list of Span."
    if times.shape != (len(kinds), 2) or not np.isfinite(times).all():
        return "a span has a start or an end that is no number." if kinds else "no span came back."
    if unknown := sorted({str(k) for k in kinds} - set(KINDS)):
        return f"kind {unknown[0]!r}: expected one of {', '.join(KINDS)}."
    if not is_same(answer.get(f"{number}/ranks"), [inputs["rank"]]):
        told_ranks = str(answer.get(f"{number}/ranks"))[:100]
        return (
            f"to_spans was given rank {inputs['rank']}, and its spans have the ranks {told_ranks}."
        )
    names = answer.get(f"{number}/names")
    known = {str(event.get("name"))[:200] for event in inputs["traces"][number]}
    if not isinstance(names, list) or not set(map(str, names)) <= known:
        return "a span has a name that no event has: it is the event's."
    got = [Span(0, k, "", a, b) for k, (a, b) in zip(kinds, times.tolist(), strict=True)]
    right = expected_spans(inputs["traces"][number])
    for kind in KINDS:
        if problem := _kind_problem(kind, got, right):
            which = f"in trace {number + 1} of {len(inputs['traces'])}, " * (number > 0)
            if _is_rounded(kind, got, right):
                return f"{which}{kind}: times are off by less than a microsecond: do not round."
            example = _example(kind, got, right, inputs["traces"][number])
            return f"{which}{problem} {example}".strip()
    return None


def _example(
    kind: str, got: list[Span], right: list[Span], events: Sequence[dict[str, Any]]
) -> str:
    """An event that is of this kind in one of the two lists only."""
    wanted, given = (_times(kind, spans) for spans in (right, got))
    for only, what in (
        (given - wanted, f"became {kind} and is none"),
        (wanted - given, f"is {kind} by the table, and no {kind} span of yours has its times"),
    ):
        for event in events:
            begin, length = as_number(event.get("ts")), as_number(event.get("dur"))
            if begin is None or length is None:
                continue
            if (round(begin, 2), round(begin + length, 2)) in only:
                shown = {k: event[k] for k in ("name", "cat", "ph", "tid", "ts") if k in event}
                return f"The event {shown}, for example, {what}."
    return ""


def _times(kind: str, spans: list[Span]) -> set[tuple[float, float]]:
    """Begin and end of each span of a kind, in microseconds."""
    return {(round(s.start * 1e6, 2), round(s.end * 1e6, 2)) for s in spans if s.kind == kind}


def _is_rounded(kind: str, got: list[Span], right: list[Span]) -> bool:
    """Whether the spans of a kind are right up to fractions of a microsecond."""
    wanted, given = (sorted(_times(kind, spans)) for spans in (right, got))
    pairs = list(zip(wanted, given, strict=False))
    return len(wanted) == len(given) and all(
        abs(a - b) < 1 for one, other in pairs for a, b in zip(one, other, strict=True)
    )


def _kind_problem(kind: str, got: list[Span], right: list[Span]) -> str | None:
    ours, theirs = ([s for s in spans if s.kind == kind] for spans in (right, got))
    begin, end = min(s.start for s in right) - 1, max(s.end for s in right) + 1
    if far := [s for s in theirs if not begin <= s.start <= s.end <= end]:
        return (
            f"a {kind} span lasts from {far[0].start:.9g} to {far[0].end:.9g} s, and the events "
            f"lie between {begin + 1:.9g} and {end - 1:.9g} s: start is ts / 1e6, and end is "
            "(ts + dur) / 1e6."
        )
    relabelled = [Span(0, "right", "", s.start, s.end) for s in ours]
    found = active_seconds([*theirs, *relabelled], begin, end)
    missing = found.get(frozenset({"right"}), 0.0)
    extra = found.get(frozenset({kind}), 0.0)
    if missing <= 1e-7 and extra <= 1e-7:
        return None
    return (
        f"{kind}: the table makes {len(ours)} events {kind}. Of their time {missing * 1e6:.0f} "
        f"microseconds are missing, and {extra * 1e6:.0f} that are something else were added."
    )
