# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: torchrun × 2
#     language: python
#     name: torchrun-2
# ---

# %% [markdown]
# # Lab 6 · Profiling and performance
#
# Your training runs on many ranks, and it is right. Is it fast? Nobody can tell by looking at the
# code. In this lab you record what a run really does, compute from the record where the time goes,
# find out what is to blame, and mend it.
#
# **When you have finished, you can**
#
# - record a training run with torch's profiler and read what it writes (task 1);
# - compute utilisation, overlap and lost time from a trace, and draw its timeline (task 2);
# - tell five causes of a slow run from each other, by their traces (task 3);
# - find out whether training waits for its data, and load ahead so that it does not (task 4);
# - plan, predict and tune gradient buckets until communication hides behind computation (task 5);
# - say how a run scales, and what communication costs (task 6).
#
# Plan 5 hours, best in two sittings: tasks 1 to 3 (3 hours), and tasks 4 to 6 (2 hours). Tasks 2, 3
# and 5 are two thirds of the work. You should have done lab 1.
# Nothing here needs a GPU; if you have one for each rank, that is worth 3 extra points.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | all |
# |---|---|---|---|---|---|---|---|
# | points | 13 | 19 | 24 | 14 | 21 | 9 | 100 |
#
# Without finding causes (3 of prof_finds_loader, prof_finds_copies, prof_finds_logging,
# prof_finds_straggler, prof_finds_buckets) this lab gives at most 49 points.
#
# Every cell runs on two ranks. Checks use practice data here; your grade comes from the same checks
# with other data on **3** ranks. None of the 100 points depends on how fast your machine is, or how
# busy. (The checks of `prefetch` give your thread some seconds for what takes milliseconds.) From
# task 1's `to_spans` on, traces are made up by the referee, with names and numbers drawn at random,
# and the efficiency of your buckets is taken in *virtual* time.

# %% [markdown]
# ## The idea in one picture
#
# ```
#             ├───────────────────────── one step ──────────────────────────┤
#   host      │▓ log ▓│
#   loader            │▒▒ next batch ▒▒│
#   copy                               │▒│
#   compute                              │██ forward ██│███ backward ███│       │█ step █│
#   network                                                  │▒▒ bucket ▒▒▒▒▒▒▒▒│
#             ╰──────── lost ────────────╯                              ╰─ lost ╯
#                                                             ╰─ free ──╯
# ```
#
# A device is paid for by the hour, and only computing is what you pay it for. Whatever happens
# *while* it computes costs little or nothing: loading the next batch, copying it, sending
# gradients, writing a log. Whatever it waits for is lost. So it does not help to know how long
# something takes. You have to know how much of it is **exposed**: how long it goes on while nothing
# computes.

# %% given="imports"
import contextlib
import io
import json
import math
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from autograder import check, is_not_started
from minidist.device import choose_backend, choose_device

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def demo(needs: str) -> Iterator[None]:
    """Runs a demonstration; says so if a task that it needs has not been done yet."""
    try:
        yield
    except Exception as error:
        if not is_not_started(error):
            raise
        if IS_RANK_ZERO:
            print(f"Nothing to see yet: do {needs} first.")


def show(draw: Callable, width: float = 7.5, height: float = 2.8, columns: int = 1) -> None:
    """Shows in the notebook, from rank 0 only, what `draw(axes)` draws."""
    if not IS_RANK_ZERO or "ipykernel" not in sys.modules:
        return
    from IPython.display import Image, display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots(1, columns))
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    display(Image(png.getvalue()))


def setup() -> tuple[int, int, torch.device]:
    """Joins the process group, as in lab 1: (rank, world_size, device)."""
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(choose_backend())
    return dist.get_rank(), dist.get_world_size(), device


def wrap(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model on its device, in torch's DDP."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=ids)


def synchronize() -> None:
    """Waits until the device has done all that was queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


rank, world_size, device = setup()

# %% [markdown]
# ## Task 1 · Record a run
#
# **Why.** `torch.profiler` notes when each operator, each GPU kernel and each collective began and
# ended. It costs time itself, and the first steps of any run are unlike all others: memory is
# allocated, libraries choose their algorithms, DDP rebuilds its buckets. So one profiles *few*
# steps, and not the first ones.
#
# **Write `profile_steps(step, warmup, num_steps)`.**
#
# - Call `step()` `warmup` times. These calls must not be in the trace.
# - Then call it `num_steps` times under `torch.profiler.profile`, each call inside a
#   `record_function("step")` of its own. Record the CPU, and the GPU if there is one.
# - Return the list of events, as `profile.export_chrome_trace(path)` writes them: the file is JSON,
#   and the list is under `"traceEvents"`. Leave no file behind.
#
# Each event is a dict. These fields matter:
#
# | field | |
# |---|---|
# | `ph` | `"X"`: something with a beginning and a length. All others are names, marks and arrows |
# | `cat`, `name` | what it is |
# | `ts`, `dur` | when it began and how long it took, in **microseconds** |
# | `pid`, `tid` | process and thread (of a GPU: the device and the stream) |
#
# <details><summary>Hint 1: activities</summary>
#
# `profile(activities=[ProfilerActivity.CPU])`, and `ProfilerActivity.CUDA` as well if
# `torch.cuda.is_available()`. It is a context manager; what ran inside is exported *after* the
# block.
# </details>
#
# <details><summary>Hint 2: a file that goes away</summary>
#
# `with tempfile.TemporaryDirectory() as folder:` removes the folder and all that is in it.
# </details>


# %% solution="task1_profile"
def profile_steps(step: Callable[[], object], warmup: int, num_steps: int) -> list[dict]:
    """The events of `num_steps` profiled calls of `step`, after `warmup` calls without profiler."""
    ### BEGIN SOLUTION
    for _ in range(warmup):
        step()

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for _ in range(num_steps):
            with record_function("step"):
                step()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]
    ### END SOLUTION


# %% [markdown]
# The next cell profiles a real training run on your ranks: torch's DDP, a loader, a log line. The
# last two are marked with `record_function`, so that they can be found again. It prints what kinds
# of events there are. Expected: hundreds of `cpu_op` or more, and a `gloo:all_reduce` (or NCCL
# kernels) in each step.


# %% demo="see_events"
def make_training(sleep_s: float = 0.004) -> Callable[[], None]:
    """One step of a small network, with a loader and a log that take their time."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    model = wrap(nn.Sequential(*layers), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        with record_function("enumerate(DataLoader)#by_hand.__next__"):
            x = torch.randn(64, 256)
            time.sleep(sleep_s)
        x = x.to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        with record_function("host: log"):
            loss.item()  # waits for the device, and then the host does something else
            time.sleep(sleep_s / 4)

    return step


with demo("profile_steps"):
    events = profile_steps(make_training(), warmup=3, num_steps=3)
    if IS_RANK_ZERO:
        counts: dict[str, int] = {}
        for event in events:
            if event.get("ph") == "X":
                counts[event["cat"]] = counts.get(event["cat"], 0) + 1
        print("events by category:", counts)
        names = sorted({e["name"] for e in events if str(e.get("name", "")).startswith("gloo:")})
        print("collectives:", names)

# %% check="prof_record"
check("prof_record", profile_steps)

# %% [markdown]
# Thousands of events are too many to think about. We want to know one thing of each: is it
# computing, or what else? The next cell defines what we keep.


# %% given="span"
KINDS = ("compute", "communication", "copy", "loader", "host")


@dataclass(frozen=True)
class Span:
    """Something that took a while, on one rank. Times are in seconds."""

    rank: int
    kind: str  # one of KINDS
    name: str
    start: float
    end: float


def step_windows(events: list[dict]) -> list[tuple[float, float]]:
    """When each "step" began and ended, in seconds."""
    steps = [e for e in events if e.get("ph") == "X" and e["name"] == "step"]
    steps = [e for e in steps if e["cat"] == "user_annotation"]
    return sorted((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in steps)


# %% [markdown]
# **Write `to_spans(events, rank)`**: a list of `Span`, in any order. Events whose `ph` is not `"X"`
# are none. Of the others:
#
# | `cat` | `name` | kind |
# |---|---|---|
# | any | begins with `enumerate(DataLoader)` | `"loader"`: the loop waits for its batch |
# | `kernel` | begins with `nccl` | `"communication"` |
# | `kernel` | any other | `"compute"` |
# | `gpu_memcpy`, `gpu_memset` | any | `"copy"` |
# | `user_annotation` | begins with `gloo:` | `"communication"` |
# | `user_annotation` | begins with `host:` | `"host"`: our own mark |
# | `cpu_op` | begins with `c10d::` | no span: the call that hands a collective over |
# | `cpu_op` | any other | `"compute"`, with two exceptions |
# | all others | | no span |
#
# The two exceptions:
#
# - If the trace has any `kernel`, the GPU is the device, and a `cpu_op` only launches work on it.
#   Then no `cpu_op` is compute.
# - An operator that lies within a loader's event *on the same thread* (`tid`) is no span: the
#   loader's event covers it. It stacks samples to a batch.
#
# `start` and `end` are in seconds, on the axis of `ts` (`start` is `ts / 1e6`). Operators that
# other operators called lie inside them. You may keep them or leave them out. Leave the events
# themselves as they are, without new entries: others read them, too.
#
# <details><summary>Hint</summary>
#
# Two passes. The first finds out whether there is a `kernel`, and collects the loader's events as
# `(tid, start, end)`. The second goes through the table from top to bottom.
# </details>


# %% solution="task1_spans"
def to_spans(events: list[dict], rank: int) -> list[Span]:
    """What the events of a profiler's trace mean."""
    ### BEGIN SOLUTION
    complete = [e for e in events if e.get("ph") == "X"]
    on_gpu = any(e["cat"] == "kernel" for e in complete)
    loading = [
        (e["tid"], e["ts"], e["ts"] + e["dur"])
        for e in complete
        if e["name"].startswith("enumerate(DataLoader)")
    ]

    def kind_of(event: dict) -> str | None:
        category, name = event["cat"], event["name"]
        if name.startswith("enumerate(DataLoader)"):
            return "loader"
        if category == "kernel":
            return "communication" if name.startswith("nccl") else "compute"
        if category in ("gpu_memcpy", "gpu_memset"):
            return "copy"
        if category == "user_annotation":
            if name.startswith("gloo:"):
                return "communication"
            return "host" if name.startswith("host:") else None
        if category != "cpu_op" or on_gpu or name.startswith("c10d::"):
            return None
        start, end = event["ts"], event["ts"] + event["dur"]
        if any(tid == event["tid"] and a <= start and end <= b for tid, a, b in loading):
            return None
        return "compute"

    return [
        Span(rank, kind, e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in complete
        if (kind := kind_of(e)) is not None
    ]
    ### END SOLUTION


# %% [markdown]
# Now the same run as a timeline. Each row is a kind. Look for moments in which the row "compute" is
# empty: something else is going on, and you see what.


# %% demo="see_timeline"
COLORS = dict(zip(KINDS, ("C0", "C1", "C3", "C2", "C4"), strict=True))


def draw_timeline(ax, spans: list[Span], start: float, end: float) -> None:
    """One row per rank and kind, in milliseconds from `start`."""
    ranks = sorted({s.rank for s in spans})
    rows = {(r, kind): 6 * i + k for i, r in enumerate(ranks) for k, kind in enumerate(KINDS)}
    for s in spans:
        if s.end > start and s.start < end:
            left, right = max(s.start, start), min(s.end, end)
            row = rows[s.rank, s.kind]
            ax.barh(row, (right - left) * 1e3, left=(left - start) * 1e3, color=COLORS[s.kind])
    ax.set_yticks(list(rows.values()), [f"{kind}, rank {r}" for r, kind in rows])
    ax.set(xlabel="milliseconds", ylim=(max(rows.values()) + 0.7, -0.7))


@cache
def profile_own_run() -> tuple[list[Span], list[tuple[float, float]]]:
    """Spans of this rank, and the windows of the steps, of one run of three steps."""
    events = profile_steps(make_training(), warmup=3, num_steps=3)
    return to_spans(events, rank), step_windows(events)


with demo("task 1"):
    own_spans, windows = profile_own_run()
    if IS_RANK_ZERO:
        for kind in KINDS:
            chosen = [s for s in own_spans if s.kind == kind]
            print(f"{kind:>13}: {len(chosen):4} spans")
    show(partial(draw_timeline, spans=own_spans, start=windows[0][0], end=windows[-1][1]))

# %% check="prof_spans_cpu"
check("prof_spans_cpu", to_spans)

# %% check="prof_spans_gpu"
check("prof_spans_gpu", to_spans)

# %% [markdown]
# ## Task 2 · Where the time goes
#
# **Why.** A picture of one step is nice. A number can be compared, logged and argued about. Three
# numbers are asked for most often.
#
# All functions of this task get the spans of **one** rank, in any order, and a window from `start`
# to `end`. Only what happens inside the window counts. A span may begin before it or end after it.
#
# **Write `utilisation(spans, start, end)`**: the share of the window in which the device computes.
# Kernels of two streams may run at the same time, and operators lie inside operators. A moment in
# which *anything* computes counts once.
#
# **Write `overlap(spans, start, end)`**: the share of the communication that hides. Of all the time
# in which a collective is under way, how much has computation beside it? 1.0 if there is no
# communication: nothing is exposed.
#
# **Write `breakdown(spans, start, end)`**: where did the window go? Each moment belongs to the
# first of these that is going on: compute, communication, copy, loader, host. If none of them is,
# the device is idle. Return a dict with the keys `"compute"`, `"communication"`, `"copy"`,
# `"loader"`, `"host"`, `"idle"`, in seconds. They add up to `end - start`. So `"communication"` is
# here what is *exposed* of it.
#
# All three follow from a helper, `covered(spans, kinds, start, end)`: how many seconds of the
# window have at least one span of these kinds. It is there to be filled in. It is not checked for
# itself, and you may do without.
#
# <details><summary>Hint 1: covered</summary>
#
# Cut the spans to the window and sort them by start. Go through them, and remember how far you have
# come. Of each span only what lies beyond that point is new.
# </details>
#
# <details><summary>Hint 2: breakdown by subtraction</summary>
#
# Compute is what `{"compute"}` covers. Exposed communication is what `{"compute", "communication"}`
# covers, minus that. And so on down the list.
# </details>
#
# <details><summary>Hint 3: overlap from the same helper</summary>
#
# What two sets have in common is as long as both together, minus their union.
# </details>


# %% solution="task2_shares"
def covered(spans: list[Span], kinds: Iterable[str], start: float, end: float) -> float:
    """Seconds of the window in which a span of at least one of the kinds is going on."""
    ### BEGIN SOLUTION
    chosen = [(max(s.start, start), min(s.end, end)) for s in spans if s.kind in kinds]
    seconds, reached = 0.0, start
    for a, b in sorted(chosen):
        if b > max(a, reached):
            seconds += b - max(a, reached)  # only what no earlier span has covered
            reached = b
    return seconds
    ### END SOLUTION


def utilisation(spans: list[Span], start: float, end: float) -> float:
    """Share of the window in which something computes."""
    ### BEGIN SOLUTION
    return covered(spans, {"compute"}, start, end) / (end - start)
    ### END SOLUTION


def overlap(spans: list[Span], start: float, end: float) -> float:
    """Share of the communication that has computation beside it; 1.0 without communication."""
    ### BEGIN SOLUTION
    communication = covered(spans, {"communication"}, start, end)
    if communication == 0:
        return 1.0
    compute = covered(spans, {"compute"}, start, end)
    either = covered(spans, {"compute", "communication"}, start, end)
    return (compute + communication - either) / communication
    ### END SOLUTION


def breakdown(spans: list[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of the window by what goes on: the first that applies, and "idle"."""
    ### BEGIN SOLUTION
    parts, before = {}, 0.0
    for number, kind in enumerate(KINDS):
        now = covered(spans, KINDS[: number + 1], start, end)
        parts[kind] = now - before
        before = now
    parts["idle"] = (end - start) - before
    return parts
    ### END SOLUTION


# %% [markdown]
# Here are these numbers for your own run. Expected, on two ranks that share a laptop: the loader
# takes somewhat more than 4 ms of each step and the log about 1 ms, and all of both is exposed.
# "Compute" is several milliseconds; the rest is idle: Python between two operators. (On a busy
# machine that rest is large, and the first step much slower than the others.)

# %% demo="see_breakdown"
with demo("tasks 1 and 2"):
    own_spans, windows = profile_own_run()
    rows = ["step   " + "".join(f"{part:>15}" for part in (*KINDS, "idle")) + "   overlap"]
    for number, (start, end) in enumerate(windows):
        parts = breakdown(own_spans, start, end)
        row = "".join(f"{seconds * 1e3:12.2f} ms" for seconds in parts.values())
        rows.append(f"{number:>4}   {row} {overlap(own_spans, start, end):9.0%}")
    share = utilisation(own_spans, windows[0][0], windows[-1][1])
    if IS_RANK_ZERO:
        print("\n".join(rows))
        print(f"utilisation over all steps: {share:.0%}")

# %% check="prof_utilisation"
check("prof_utilisation", utilisation)

# %% check="prof_overlap"
check("prof_overlap", overlap)

# %% check="prof_breakdown"
check("prof_breakdown", breakdown)

# %% [markdown]
# **Draw the timeline.** For a whole run on many ranks a viewer that can zoom beats any picture.
# Perfetto (https://ui.perfetto.dev) and chrome://tracing read the format that you know from task 1.
# Now you write it.
#
# **Write `chrome_trace(spans)`**: a dict with a list under `"traceEvents"`. For each span one event
# with `ph` `"X"`, the span's `name`, `cat` (its kind), `ts` and `dur` (microseconds, not rounded),
# `pid` (its rank) and `tid`. A viewer draws what has the same `pid` and `tid` in one row, and
# assumes that two events of a row are one inside the other or apart. So spans of one rank whose
# kinds differ need different `tid`s. (Spans of one kind may share a row, even if they overlap.
# Events with another `ph`, such as names for the rows, may be there as well.) The dict must be one
# that `json.dump` can write.
#
# <details><summary>Hint</summary>
#
# The place of a kind in `KINDS` is a good row number. A span knows seconds, the format wants
# microseconds.
# </details>


# %% solution="task2_export"
def chrome_trace(spans: list[Span]) -> dict:
    """The spans in the trace format of Chrome and Perfetto: a process per rank, a row per kind."""
    ### BEGIN SOLUTION
    rows = {kind: number for number, kind in enumerate(KINDS)}
    events = [
        {
            "ph": "X",
            "name": s.name,
            "cat": s.kind,
            "pid": s.rank,
            "tid": rows[s.kind],
            "ts": s.start * 1e6,
            "dur": (s.end - s.start) * 1e6,
        }
        for s in spans
    ]
    return {"traceEvents": events}
    ### END SOLUTION


# %% demo="write_trace" tags=["active-ipynb"]
# with demo("tasks 1 and 2"):
#     everyone = [None] * world_size
#     dist.all_gather_object(everyone, profile_own_run()[0])
#     if IS_RANK_ZERO:
#         trace = chrome_trace([span for spans in everyone for span in spans])
#         Path("my_run.json").write_text(json.dumps(trace))
#         print("open my_run.json on https://ui.perfetto.dev (it does not leave your browser)")

# %% check="prof_export"
check("prof_export", chrome_trace)

# %% [markdown]
# ## Task 3 · Find the bottleneck
#
# **Why.** "It is slow" has few causes, and each has its own remedy. A faster loader does nothing
# for a run that waits for a slow rank. So find the cause first. In data parallelism one more thing
# makes it hard: all ranks meet in each all-reduce, so whatever holds up *one* rank holds up all of
# them. On all others it looks like slow communication: a collective's span begins when *this* rank
# calls it, and contains the wait for the last one.
#
# The next cell makes up runs to practise with: three ranks, four steps, and a fault, or none.


# %% given="made_up_runs"
CAUSES = ("loader", "copies", "logging", "straggler", "buckets")


def made_up_run(cause: str, seed: int) -> tuple[list[Span], list[tuple[float, float]]]:
    """(spans of all ranks, windows of the steps) of a run with that fault, or "none"."""
    rng = random.Random(seed)
    spans: list[Span] = []
    steps = []
    now, guilty = 0.0, rng.randrange(3)
    for number in range(4):
        begin, ready = now, []
        for r in range(3):
            lost = {kind: rng.uniform(0.5, 2) * 1e-3 for kind in ("host", "loader", "copy")}
            if cause == "loader":
                lost["loader"] += 40e-3
            if cause == "copies":
                lost["copy"] += 40e-3
            if cause == "logging" and r == guilty:
                lost["host"] += 40e-3
            if number == 0 and r == guilty:
                lost["loader"] += 150e-3  # its workers start
            t = begin
            for kind, seconds in lost.items():
                spans.append(Span(r, kind, f"{kind} {number}", t, t + seconds))
                t += seconds
            compute = 0.14 if cause == "straggler" and r == guilty else 0.09
            spans.append(Span(r, "compute", "forward", t, t + compute / 3))
            spans.append(Span(r, "compute", "backward", t + compute / 3, t + compute))
            for kind in ("loader", "copy", "host"):  # for the next step, beside computation
                a = t + rng.uniform(0, 0.03)
                spans.append(Span(r, kind, f"{kind} ahead", a, a + 0.055))
            ready.append((t + compute / 3, t + compute))
        count, each = (40, 2.45e-3) if cause == "buckets" else (12, 2.5e-3)
        free = [0.0] * 3
        for k in range(count):
            called = [a + (k + 1) / count * (b - a) for a, b in ready]
            starts = [max(f, c) for f, c in zip(free, called, strict=True)]
            end = max(starts) + each
            spans += [Span(r, "communication", "all_reduce", a, end) for r, a in enumerate(starts)]
            free = [end] * 3
        now = free[0] + 0.008
        spans += [Span(r, "compute", "optimizer", free[0], now) for r in range(3)]
        steps.append((begin, now))
    return spans, steps


# %% [markdown]
# Five runs, one with each fault, in an order that you do not know. Look at the second step of each
# before you write any code. Which is which? Much of what you see runs beside computation and costs
# nothing.


# %% demo="see_five_runs"
def draw_runs(axes, runs) -> None:
    for ax, (letter, (spans, steps)) in zip(axes, runs.items(), strict=True):
        start, end = steps[1]
        draw_timeline(ax, spans, start, end)
        ax.set_title(f"run {letter}")
        if letter != "A":
            ax.set_yticks([])


order = random.Random(2026).sample(CAUSES, 5)
five_runs = {letter: made_up_run(cause, 7) for letter, cause in zip("ABCDE", order, strict=True)}
show(partial(draw_runs, runs=five_runs), width=14, height=4.5, columns=5)

# %% [markdown]
# **Write `find_bottleneck(spans, steps)`.** `spans` are those of all ranks, on one clock, in any
# order. There may be any number of ranks. `steps` is the list of `(start, end)` of the steps, at
# least two, the same for all ranks; each begins where the one before it ends. The first step is for
# warming up: **leave it out**. Return one of these:
#
# | answer | the loss, in seconds |
# |---|---|
# | `"loader"` | exposed loading (as in `breakdown`), on the rank that has most of it |
# | `"copies"` | exposed copies, on the rank that has most of them |
# | `"logging"` | exposed host work, on the rank that has most of it |
# | `"straggler"` | computation (as in `breakdown`): the rank with most minus the rank with least |
# | `"buckets"` | exposed communication, on the rank that has **least** of it |
# | `"none"` | if no loss is more than 10 % of the time of the steps that count |
#
# Each loss is a sum over all steps that count: for each rank add up the seconds of these steps, and
# then take the rank with most, or least, of them. The answer is the largest loss. Why the *least*
# for communication? The last rank to arrive waits for nobody. What it has of exposed communication
# is the network's own time; all that the others have on top is waiting for that rank.
# (Communication that is exposed on every rank has small
# buckets as its cause in this lab. It may also be a slow network: look at the number and the size
# of the all-reduces.)
#
# <details><summary>Hint 1: per rank</summary>
#
# Sort the spans by rank first. `breakdown` gives the seconds of one rank in one step.
# </details>
#
# <details><summary>Hint 2: the answer</summary>
#
# Put the five losses into a dict; `max(losses, key=losses.get)` is the name of the largest one.
# </details>


# %% solution="task3_bottleneck"
def find_bottleneck(spans: list[Span], steps: list[tuple[float, float]]) -> str:
    """What the ranks lose most time with: one of CAUSES, or "none"."""
    ### BEGIN SOLUTION
    measured = steps[1:]  # the first one warms up
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)

    # Per part, the seconds of every rank.
    seconds: dict[str, list[float]] = {}
    for own in by_rank.values():
        rows = [breakdown(own, start, end) for start, end in measured]
        for part in rows[0]:
            seconds.setdefault(part, []).append(sum(row[part] for row in rows))

    losses = {
        "loader": max(seconds["loader"]),
        "copies": max(seconds["copy"]),
        "logging": max(seconds["host"]),
        "straggler": max(seconds["compute"]) - min(seconds["compute"]),
        "buckets": min(seconds["communication"]),
    }
    worst = max(losses, key=lambda cause: losses[cause])
    total = sum(end - start for start, end in measured)
    return worst if losses[worst] > 0.1 * total else "none"
    ### END SOLUTION


# %% demo="see_causes"
with demo("tasks 2 and 3"):
    for letter, (spans, steps) in five_runs.items():
        if IS_RANK_ZERO:
            print(f"run {letter}: {find_bottleneck(spans, steps)}")
    if IS_RANK_ZERO:
        print("a healthy run:", find_bottleneck(*made_up_run("none", 8)))

# %% [markdown]
# <details><summary>The solution for runs A to E</summary>
#
# A: the loader. B: logging. C: a straggler. D: buckets. E: copies.
# </details>

# %% check="prof_finds_loader"
check("prof_finds_loader", find_bottleneck)

# %% check="prof_finds_copies"
check("prof_finds_copies", find_bottleneck)

# %% check="prof_finds_logging"
check("prof_finds_logging", find_bottleneck)

# %% check="prof_finds_straggler"
check("prof_finds_straggler", find_bottleneck)

# %% check="prof_finds_buckets"
check("prof_finds_buckets", find_bottleneck)

# %% check="prof_finds_nothing"
check("prof_finds_nothing", find_bottleneck)

# %% [markdown]
# ## Task 4 · Load data ahead
#
# **Why.** If making a batch takes $L$ seconds and a step takes $C$, a loop that does one after the
# other takes $L + C$. Made ahead, beside the step, it takes $\max(L, C)$. With $w$ workers it is
# $\max(L/w, C)$, so $w = L/C$ of them are enough, if there are as many free cores.
#
# First measure. You will find code on the web that times `batch.cuda()` and calls it the loading
# time. It is not: when that line runs, the batch has been loaded. The time of loading passes in the
# line `for batch in loader`.
#
# **Write `loader_wait(loader, step, synchronize, clock=time.perf_counter)`.**
#
# - Go once through `loader`, which has two batches or more, and call `step(batch)` for each.
# - Return two floats: mean seconds per batch that the loop waits for its batch, and mean seconds
#   that it works on it.
# - Leave the **first** batch out of both: it pays for the start of the workers.
# - `step` may only queue its work on a device. `synchronize()` waits until the device is done. Call
#   it before you read the clock, so that the work is counted as work.
# - Both means are in the unit of `clock()`, seconds.
# - Take times from `clock()` only.
#
# <details><summary>Hint</summary>
#
# Read the clock before the loop; at the top of the loop's body (the batch has come); and at its
# end. The last reading is the beginning of the next wait.
# </details>


# %% solution="task4_wait"
def loader_wait(
    loader: Iterable,
    step: Callable[[object], object],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Mean seconds per batch of (waiting for it, working on it), without the first batch."""
    ### BEGIN SOLUTION
    waits, works = [], []
    asked = clock()
    for batch in loader:
        came = clock()
        step(batch)
        synchronize()
        done = clock()
        waits.append(came - asked)
        works.append(done - came)
        asked = done
    return statistics.fmean(waits[1:]), statistics.fmean(works[1:])
    ### END SOLUTION


# %% check="prof_loader_wait"
check("prof_loader_wait", loader_wait)

# %% [markdown]
# **Write `prefetch(batches, depth)`**: the repair. It is a generator around any source of batches.
# A thread of its own takes batches from `batches` and puts them into a queue, while the loop works.
#
# - It yields the batches of `batches`, all of them, in their order. `None` and `0` are batches,
#   too.
# - While the loop works on a batch, the next `depth` batches get ready (`depth` is 1 or more).
#   Beyond these, at most two more are made: memory is not endless.
# - If the source raises an error, the loop gets the good batches first and then that error.
# - If the loop breaks off (the generator is closed), the thread ends.
#
# `DataLoader(num_workers=…)` does the same with processes, which Python needs for work that holds
# its lock. A thread is enough for reading files, for decoders that release the lock, and for copies
# to the GPU.
#
# <details><summary>Hint 1: the queue</summary>
#
# `queue.Queue(maxsize=depth)`: `put` waits while it is full, `get` waits while it is empty. Put
# pairs into it: what it is (a batch, the end, an error), and the thing itself.
# </details>
#
# <details><summary>Hint 2: how the thread ends</summary>
#
# A thread that waits in `put` for ever cannot notice that the loop has gone. Give `put` a timeout,
# catch `queue.Full`, and look at a `threading.Event` in between. Set the event in a `finally:` of
# your generator. Python runs it when the loop is through, and when the generator is closed.
# </details>


# %% solution="task4_prefetch"
def prefetch(batches: Iterable, depth: int) -> Iterator:
    """Yields the batches, while a thread makes `depth` more of them ahead."""
    ### BEGIN SOLUTION
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(what: str, thing: object) -> bool:
        while not stopped.is_set():
            try:
                ready.put((what, thing), timeout=0.05)
                return True
            except queue.Full:
                pass
        return False

    def fill() -> None:
        try:
            for batch in batches:
                if not put("batch", batch):
                    return  # nobody wants it any more
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while True:
            what, thing = ready.get()
            if what == "end":
                return
            if what == "error":
                raise thing
            yield thing
    finally:
        stopped.set()
        thread.join()
    ### END SOLUTION


# %% [markdown]
# Try it: batches that take 6 ms to make, steps that take 6 ms. Expected: about 12 ms per batch one
# after the other, and about half of it with `prefetch`, since the loop hardly waits any more.


# %% demo="see_prefetch"
def slow_batches(count: int, seconds: float) -> Iterator[torch.Tensor]:
    """Batches that have to be read from somewhere."""
    for _ in range(count):
        time.sleep(seconds)
        yield torch.zeros(8)


with demo("task 4"):
    for label, source in (
        ("one after the other", slow_batches(12, 0.006)),
        ("made ahead", prefetch(slow_batches(12, 0.006), 2)),
    ):
        wait_s, work_s = loader_wait(source, lambda batch: time.sleep(0.006), synchronize)
        if IS_RANK_ZERO:
            print(
                f"{label:>20}: waits {wait_s * 1e3:4.1f} ms, works {work_s * 1e3:4.1f} ms per batch"
            )

# %% check="prof_prefetch"
check("prof_prefetch", prefetch)

# %% check="prof_prefetch_ends"
check("prof_prefetch_ends", prefetch)

# %% [markdown]
# **Write `loader_settings(load_s, step_s, cores, ranks_per_node, device)`**: what to give to a
# `DataLoader`. `load_s` is what *one* worker needs for a batch, `step_s` what a step takes, `cores`
# how many cores the node has. Return a dict with four entries:
#
# - `num_workers`: the smallest number that keeps up, $\lceil L/C \rceil$, but not more than this
#   rank's share of the cores. All ranks of the node start workers! The share is
#   `cores // ranks_per_node`, and may be 0.
# - `pin_memory`: `True` if `device` (a `torch.device`) is a GPU. Only from pinned memory can a copy
#   run beside computation (with `non_blocking=True`).
# - `persistent_workers`: `True` if there are workers; else each epoch starts them anew.
# - `prefetch_factor`: 2 if there are workers, else `None`: without workers `DataLoader` refuses a
#   number.
#
# <details><summary>Hint</summary>
#
# `min` of two numbers, one of them rounded up with `math.ceil`. The last two entries depend on
# whether the first one is 0.
# </details>


# %% solution="task4_settings"
def loader_settings(
    load_s: float, step_s: float, cores: int, ranks_per_node: int, device: torch.device
) -> dict:
    """Keyword arguments for a DataLoader that keeps up, if the cores allow it."""
    ### BEGIN SOLUTION
    workers = min(math.ceil(load_s / step_s), cores // ranks_per_node)
    return {
        "num_workers": workers,
        "pin_memory": device.type == "cuda",
        "persistent_workers": workers > 0,
        "prefetch_factor": 2 if workers > 0 else None,
    }
    ### END SOLUTION


# %% check="prof_loader_settings"
check("prof_loader_settings", loader_settings)

# %% [markdown]
# ## Task 5 · Buckets that fit the network
#
# **Why.** In lab 1 you built a DDP with buckets of 25 MiB, because that is torch's default. Is it
# right for your model and your network? A ring all-reduce of $B$ bytes on $N$ ranks takes
#
# $$t(B) = 2(N-1)\,\alpha + \frac{2(N-1)}{N} \cdot \frac{B}{\beta}$$
#
# with the latency $\alpha$ of a hop and the bandwidth $\beta$ of a link. The first term is paid per
# *bucket*, so many buckets are expensive. The last bucket is complete only when backward ends, and
# all of it is exposed, so large buckets are expensive as well. The best size is mostly in between,
# and where depends on the model and on the network. In this task you plan buckets, predict what a
# plan costs, choose the best one, and make it run.
#
# Gradients are numbered as `list(module.parameters())` is. A **plan** is a list of buckets; a
# bucket is a list of those numbers. The plan's order is the order in which buckets travel.
#
# **Write `plan_buckets(sizes, cap)`.** `sizes[i]` is how many bytes gradient $i$ has.
#
# - Take the gradients from the last to the first: so backward delivers them.
# - A bucket has at most `cap` bytes, and takes in as many gradients as fit, one after another. A
#   gradient that is larger than `cap` gets a bucket of its own. No bucket is empty.
#
# **Write `predict_step(plan, sizes, backward_s, forward_s, all_reduce_s)`**: seconds of a step.
#
# - Forward takes `forward_s`. Then backward takes `backward_s[i]` for gradient $i$, from the last
#   to the first, without a pause; when it is through with $i$, gradient $i$ is there.
# - A bucket starts when all of its gradients are there **and** the bucket before it in the plan has
#   arrived: the network carries one at a time. It takes `all_reduce_s(bytes)`.
# - The step ends when backward has ended and the last bucket has arrived. (A plan may leave
#   gradients out: those do not travel.)
#
# **Write `tune_plan(sizes, measure)`**: the best plan. `measure(plan)` returns the seconds of a
# step with that plan. Where it has them from is not your business: from `predict_step`, from an
# emulated cluster, from a real one. You may call it at most 64 times.
#
# - The plan that you return may cost at most 4 % more time than the best one that has equal caps
#   (best over `cap = sum(sizes) / k` for all numbers `k`; with a very large one each gradient is
#   alone). On all networks of the check that best one has an efficiency above 90 %.
# - Gradients have from 2 kB to 400 MB: no fixed number of megabytes will do.
#
# <details><summary>Hint 1: predict_step</summary>
#
# First a loop over the gradients, backwards, that notes when each is there. Then a loop over the
# buckets: `free = max(free, when its last gradient is there) + all_reduce_s(its bytes)`.
# </details>
#
# <details><summary>Hint 2: tune_plan</summary>
#
# Do not be clever. Make the plans for `sum(sizes) / k` with many `k`, measure each, and take the
# best. With up to about 60 gradients you can afford every `k`. Caps that differ by a factor of
# 1.2 from one to the next would do as well.
# </details>


# %% solution="task5_plan"
def plan_buckets(sizes: list[int], cap: float) -> list[list[int]]:
    """Gradients from last to first, in buckets of at most `cap` bytes."""
    ### BEGIN SOLUTION
    plan: list[list[int]] = []
    room = 0.0
    for index in reversed(range(len(sizes))):
        if not plan or sizes[index] > room:
            plan.append([])
            room = cap
        plan[-1].append(index)
        room -= sizes[index]
    return plan
    ### END SOLUTION


# %% check="prof_bucket_plan"
check("prof_bucket_plan", plan_buckets)


# %% solution="task5_predict"
def predict_step(
    plan: list[list[int]],
    sizes: list[int],
    backward_s: list[float],
    forward_s: float,
    all_reduce_s: Callable[[float], float],
) -> float:
    """Seconds of a step in which the buckets of the plan travel while backward goes on."""
    ### BEGIN SOLUTION
    now, there = forward_s, [0.0] * len(sizes)
    for index in reversed(range(len(sizes))):
        now += backward_s[index]
        there[index] = now

    free = 0.0  # when the network has delivered all buckets so far
    for bucket in plan:
        start = max(free, max(there[index] for index in bucket))
        free = start + all_reduce_s(sum(sizes[index] for index in bucket))
    return max(now, free)
    ### END SOLUTION


# %% check="prof_bucket_predict"
check("prof_bucket_predict", predict_step)


# %% solution="task5_tune"
def tune_plan(sizes: list[int], measure: Callable[[list[list[int]]], float]) -> list[list[int]]:
    """The plan with the shortest step among those with equal caps; at most 64 measurements."""
    ### BEGIN SOLUTION
    num_caps = min(len(sizes), 60)
    caps = [sum(sizes) * (1 + 1e-9) / (k + 1) for k in range(num_caps)]
    plans = [plan_buckets(sizes, cap) for cap in caps]
    plans.append(plan_buckets(sizes, 0))  # each gradient alone
    return min(plans, key=measure)
    ### END SOLUTION


# %% [markdown]
# Here is the efficiency for each cap: 24 layers of 4 MB, on three networks. Expected: the best
# number of buckets is 6, 8 and 24. Read the figure from right (one bucket for all) to left.


# %% demo="see_u_shape"
LAYER_MB, LAYERS = 4, 24
sizes = [LAYER_MB * 10**6] * LAYERS
compute = dict(sizes=sizes, backward_s=[2e-3] * LAYERS, forward_s=24e-3)


def ring(num_ranks: int, latency_s: float, bandwidth: float) -> Callable[[float], float]:
    """Seconds of a ring all-reduce, by the number of bytes."""
    hops = 2 * (num_ranks - 1)
    return lambda nbytes: hops * latency_s + hops / num_ranks * nbytes / bandwidth


NETWORKS = {
    "10 GB/s, 0.3 ms": ring(8, 0.3e-3, 10e9),
    "5 GB/s, 0.1 ms": ring(8, 0.1e-3, 5e9),
    "4 GB/s, 5 µs": ring(8, 5e-6, 4e9),
}


def draw_u(ax, curves) -> None:
    for label, (caps, efficiencies) in curves.items():
        ax.plot(caps, efficiencies, "o-", label=label)
    ax.axhline(0.9, color="gray", linestyle="--")
    ax.set(xscale="log", xlabel="cap, MB", ylabel="efficiency")
    ax.legend()


with demo("task 5, up to tune_plan"):
    curves = {}
    step_s = compute["forward_s"] + sum(compute["backward_s"])
    for label, all_reduce_s in NETWORKS.items():
        cost = partial(predict_step, **compute, all_reduce_s=all_reduce_s)
        caps = [LAYER_MB * k for k in (1, 2, 3, 4, 6, 8, 12, 24)]
        curves[label] = caps, [step_s / cost(plan_buckets(sizes, cap * 1e6)) for cap in caps]
        best = tune_plan(sizes, cost)
        if IS_RANK_ZERO:
            print(f"{label:>16}: best with {len(best):2} buckets, {step_s / cost(best):.1%}")
    show(partial(draw_u, curves=curves))

# %% check="prof_bucket_tune"
check("prof_bucket_tune", tune_plan)

# %% [markdown]
# **Write `GradientBuckets`**: now the plan runs. You know the parts from lab 1. This time all that
# is awkward is left out: every parameter gets a gradient in every backward, all have one dtype, and
# the ranks start from the same weights. In return you follow the plan exactly.
#
# ```python
# buckets = GradientBuckets(module, plan)
# loss.backward()        # buckets travel while this runs
# buckets.finish()       # every p.grad is the mean over ranks
# ```
#
# - One all-reduce per bucket, with the bucket's gradients and nothing else in it.
# - All-reduces start in the plan's order, each as soon as its gradients are there and all buckets
#   before it have *started*. Nothing waits before `finish()`.
# - It works for step after step, with one `backward()` per `finish()`, whether gradients are set to
#   `None` or to zero in between.
#
# <details><summary>Hint 1: the hook</summary>
#
# `param.register_post_accumulate_grad_hook(hook)` calls `hook(param)` when `param.grad` is
# complete. Count down how many gradients its bucket still waits for. Then start as many buckets as
# you can, beginning with the first that has not started.
# </details>
#
# <details><summary>Hint 2: flat and back</summary>
#
# `flat = torch.cat([p.grad.flatten() for p in bucket])` when the bucket is complete. After the
# all-reduce, `flat.split([p.numel() for p in bucket])` gives the pieces.
# </details>


# %% solution="task5_buckets"
class GradientBuckets:
    """Averages a module's gradients over all ranks, in the buckets of a plan."""

    def __init__(self, module: nn.Module, plan: list[list[int]]):
        """plan: lists of indices into list(module.parameters()), in the order of travel."""
        ### BEGIN SOLUTION
        params = list(module.parameters())
        self.buckets = [[params[index] for index in bucket] for bucket in plan]
        self._reset()
        for number, bucket in enumerate(self.buckets):
            for param in bucket:
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, number))

    def _reset(self) -> None:
        """Ready for the next step: nothing has come, nothing travels."""
        self.missing = [len(bucket) for bucket in self.buckets]
        self.travelling: list[tuple[torch.Tensor, dist.Work]] = []

    def _on_gradient(self, number: int, param: nn.Parameter) -> None:
        """Hook: a gradient of bucket `number` is complete."""
        self.missing[number] -= 1
        while (first := len(self.travelling)) < len(self.buckets) and self.missing[first] == 0:
            flat = torch.cat([p.grad.flatten() for p in self.buckets[first]])
            self.travelling.append((flat, dist.all_reduce(flat, async_op=True)))
        ### END SOLUTION

    def finish(self) -> None:
        """Returns when every p.grad is the mean over all ranks."""
        ### BEGIN SOLUTION
        for bucket, (flat, work) in zip(self.buckets, self.travelling, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for param, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad.copy_(piece.view_as(param))
        self._reset()
        ### END SOLUTION


# %% [markdown]
# Now all of it together, on an emulated cluster: your buckets run for real, in new processes, and
# time is computed. The network is slow and has a high latency. Expected: one bucket for all, and
# one for each gradient, both give 0.79. Your tuned plan gives 0.935. Emulated and predicted times
# are the same.

# %% given="emulated_training"
NUM_LAYERS, WIDTH = 16, 128
FORWARD_S, BACKWARD_S = 1e-3, 2e-3
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def train_emulated(buckets_class: type, plan: list[list[int]], num_steps: int = 3) -> None:
    """A few steps of a network whose layers cost FORWARD_S and BACKWARD_S; runs on every rank."""
    from minidist import emulate

    torch.manual_seed(0)
    layers = [
        emulate.Charged(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()), i)
        for i in range(NUM_LAYERS)
    ]
    model = nn.Sequential(*layers)
    buckets = buckets_class(model, plan)
    for _ in range(num_steps):
        model.zero_grad()
        model(torch.randn(2, WIDTH)).square().mean().backward()
        buckets.finish()


def emulated_step(num_ranks: int, buckets_class: type, plan: list[list[int]]):
    """(timeline, seconds of the last step, its efficiency) on `num_ranks` emulated devices."""
    from minidist import emulate

    link = emulate.Link(bandwidth_bytes_per_s=100e6, latency_s=1e-3)
    cluster = emulate.Cluster(
        name="slow network",
        nodes=1,
        devices_per_node=num_ranks,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e11,
    )
    costs = emulate.ChargePlan((FORWARD_S,) * NUM_LAYERS, (BACKWARD_S,) * NUM_LAYERS, b"practice")
    _, timeline = emulate.run(train_emulated, num_ranks, cluster, buckets_class, plan, plan=costs)
    last = timeline.steps[-1]
    return timeline, last.end_s - last.start_s, last.efficiency


def draw_emulated(ax, timeline) -> None:
    """The last step on all ranks, in virtual milliseconds."""
    last = timeline.steps[-1]
    spans = [
        Span(r, i.kind, i.name, i.start_s, i.end_s)
        for r, intervals in enumerate(timeline.intervals)
        for i in intervals
        if i.kind in ("compute", "communication")
    ]
    draw_timeline(ax, spans, last.start_s, last.end_s)


# %% demo="see_efficiency" tags=["active-ipynb"]
# %%rank 0
# with demo("task 5"):
#     weights = [WEIGHT_BYTES] * NUM_LAYERS
#     cost = partial(
#         predict_step,
#         sizes=weights,
#         backward_s=[BACKWARD_S] * NUM_LAYERS,
#         forward_s=FORWARD_S * NUM_LAYERS,
#         all_reduce_s=ring(2, 1e-3, 100e6),
#     )
#     plans = {
#         "one for all": plan_buckets(weights, sum(weights)),
#         "one for each": plan_buckets(weights, 0),
#         "tuned": tune_plan(weights, cost),
#     }
#     for label, plan in plans.items():
#         timeline, seconds, efficiency = emulated_step(2, GradientBuckets, plan)
#         print(
#             f"{label:>12}: {len(plan):2} buckets, predicted {cost(plan) * 1e3:.2f} ms, "
#             f"emulated {seconds * 1e3:.2f} ms, efficiency {efficiency:.3f}"
#         )
#     show(partial(draw_emulated, timeline=timeline), height=3.2)

# %% check="prof_bucket_mean"
check("prof_bucket_mean", GradientBuckets)

# %% check="prof_bucket_sends"
check("prof_bucket_sends", GradientBuckets)

# %% check="prof_efficiency"
check("prof_efficiency", GradientBuckets)

# %% [markdown]
# **Yours beside PyTorch's.** The next cell trains one network in your buckets, with PyTorch's DDP,
# and with the course's own; all cut at the same size. They get the same weights and batches, so the
# losses must agree, and the bytes, too. The time of a step is measured here, where other programs
# disturb it, and on the emulated cluster, where only overlap and buckets count.

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
#
#
# class InYourBuckets(nn.Module):
#     def __init__(self, net):
#         super().__init__()
#         self.net = net
#         sizes = [p.nbytes for p in net.parameters()]
#         self.buckets = GradientBuckets(net, plan_buckets(sizes, 600_000))
#
#     def forward(self, x):
#         return self.net(x)
#
#     def finish_gradient_synchronization(self):
#         self.buckets.finish()
#
#
# with demo("task 5"):
#     ours = find("minidist.parallel.data:BucketedDDP")
#     beside(
#         {
#             "yours": training(InYourBuckets),
#             "PyTorch's": training(lambda net: DistributedDataParallel(net, bucket_cap_mb=0.6)),
#             "the course's": ours and training(lambda net: ours(net, bucket_bytes=600_000)),
#         },
#         device=device,
#     )

# %% [markdown]
# ## Task 6 · How it scales
#
# **Why.** "Twice the GPUs, 1.9 times as fast" is the number that people ask for. There are two of
# it. **Weak** scaling: every rank keeps its batch, so $N$ ranks do $N$ times the work per step.
# **Strong** scaling: the batch of all ranks together stays, so each rank does $1/N$ of it. Write
# down which one you mean: the same seconds mean very different things.
#
# **Write `scaling(step_s, mode)`.** `step_s` maps a number of ranks to seconds per step; `mode` is
# `"weak"` or `"strong"`. Return a dict: number of ranks to `(speed-up, efficiency)`.
#
# - The smallest number of ranks $b$ is the base, and has efficiency 1. It may be larger than 1,
#   where one GPU cannot hold the model.
# - Weak: $E_N = t_b / t_N$. Strong: $E_N = b\,t_b / (N\,t_N)$.
# - The speed-up is $N \cdot E_N$ in both: samples per second, against one rank of the base.
#
# <details><summary>Hint</summary>
#
# `min(step_s)` is the base. Try your function in your head on `{1: 1.0, 2: 0.5}`: in strong scaling
# two ranks halve the time, which is an efficiency of 1. The same numbers in weak scaling would mean
# that two ranks do twice the work in half of the time.
# </details>


# %% solution="task6_scaling"
def scaling(step_s: dict[int, float], mode: str) -> dict[int, tuple[float, float]]:
    """Number of ranks -> (speed-up, efficiency), against the smallest number of ranks."""
    ### BEGIN SOLUTION
    base = min(step_s)
    rows = {}
    for num_ranks, seconds in step_s.items():
        efficiency = step_s[base] / seconds
        if mode == "strong":
            efficiency *= base / num_ranks
        rows[num_ranks] = num_ranks * efficiency, efficiency
    return rows
    ### END SOLUTION


# %% [markdown]
# Weak scaling of the training above on 1, 2 and 4 emulated ranks: time, speed-up, efficiency and
# utilisation. Expected: 94 % on two ranks and 78 % on four with tuned plans, 79 % and 69 % with one
# bucket for all. A ring of four has three times as many hops as one of two, and no plan makes up
# for all of that latency.


# %% demo="see_scaling" tags=["active-ipynb"]
# %%rank 0
# def draw_scaling(axes, results):
#     for label, (seconds, busy) in results.items():
#         rows = scaling(seconds, "weak")
#         ranks = sorted(rows)
#         curves = (
#             [seconds[n] * 1e3 for n in ranks],
#             [rows[n][0] for n in ranks],
#             [rows[n][1] for n in ranks],
#             [busy[n] for n in ranks],
#         )
#         for ax, values in zip(axes, curves, strict=True):
#             ax.plot(ranks, values, "o-", label=label)
#     axes[1].plot([1, 4], [1, 4], ":", color="gray", label="ideal")
#     for ax, title in zip(
#         axes, ("ms per step", "speed-up", "efficiency", "utilisation"), strict=True
#     ):
#         ax.set(title=title, xlabel="ranks", xticks=[1, 2, 4])
#     for ax in axes[2:]:
#         ax.set_ylim(0, 1.05)
#     axes[0].legend()
#
#
# with demo("tasks 5 and 6"):
#     weights = [WEIGHT_BYTES] * NUM_LAYERS
#     results = {"tuned": ({}, {}), "one for all": ({}, {})}
#     for num_ranks in (1, 2, 4):
#         cost = partial(
#             predict_step,
#             sizes=weights,
#             backward_s=[BACKWARD_S] * NUM_LAYERS,
#             forward_s=FORWARD_S * NUM_LAYERS,
#             all_reduce_s=ring(num_ranks, 1e-3, 100e6),
#         )
#         for label, plan in (
#             ("tuned", tune_plan(weights, cost)),
#             ("one for all", plan_buckets(weights, sum(weights))),
#         ):
#             _, seconds, busy = emulated_step(num_ranks, GradientBuckets, plan)
#             results[label][0][num_ranks], results[label][1][num_ranks] = seconds, busy
#     for label, (seconds, _) in results.items():
#         rows = scaling(seconds, "weak")
#         print(label, {n: f"{speedup:.2f} × ({e:.0%})" for n, (speedup, e) in rows.items()})
#     show(partial(draw_scaling, results=results), width=12, columns=4)

# %% check="prof_scaling"
check("prof_scaling", scaling)

# %% [markdown]
# **And on a real clock?** There no two steps take equally long. So one measures in rounds: in each
# round every number of ranks takes a step, and a slow moment of the machine hits all of them. A
# report says how far the rounds are apart, and anybody can check it against the log.
#
# **Write `scaling_report(log)`.** A log has one line per round and number of ranks, in any order: a
# dict of `"round"`, `"ranks"`, `"batch_per_rank"` and `"seconds"` (of a step, on the slowest rank).
# Return a dict: number of ranks to a dict of two triples, each *(smallest, median, largest)* of all
# rounds.
#
# - `"samples_per_s"`: of all ranks together.
# - `"efficiency"`: the base is the fewest ranks of the log. In each round take the samples per
#   second **and rank**, and divide them by those of the base in that round. That holds for weak and
#   for strong scaling. Measurements get cut off: a round that lacks one of the two gives no
#   efficiency. (One round or more has both.)


# %% solution="task6_report"
def scaling_report(log: list[dict]) -> dict[int, dict[str, tuple[float, float, float]]]:
    """Number of ranks -> samples per second and efficiency, with their spread over rounds."""
    ### BEGIN SOLUTION
    rates: dict[int, dict[int, float]] = {}  # ranks -> round -> samples per second
    for line in log:
        rate = line["ranks"] * line["batch_per_rank"] / line["seconds"]
        rates.setdefault(line["ranks"], {})[line["round"]] = rate
    base = min(rates)
    report = {}
    for n, of_rounds in rates.items():
        both = of_rounds.keys() & rates[base].keys()
        shares = [of_rounds[i] / n / (rates[base][i] / base) for i in both]
        report[n] = {
            name: (min(values), statistics.median(values), max(values))
            for name, values in (("samples_per_s", of_rounds.values()), ("efficiency", shares))
        }
    return report
    ### END SOLUTION


# %% [markdown]
# Your own training on 1, 2 and 4 ranks of this machine, 9 rounds of it. Put your network in, if you
# like. Expected: no two rounds agree. Where there are fewer cores than ranks, ranks take turns, and
# their efficiency says nothing about a network.


# %% demo="see_report" tags=["active-ipynb"]
# %%rank 0
# def my_training(group, batch_size: int):
#     """Makes a model on each rank of the group; returns a function that trains it for one step."""
#     here = choose_device()
#     layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
#     model = DistributedDataParallel(nn.Sequential(*layers).to(here), process_group=group)
#     x = torch.randn(batch_size, 256, device=here)
#
#     def step() -> None:
#         model.zero_grad()
#         model(x).square().mean().backward()
#
#     return step
#
#
# with demo("task 6"), tempfile.TemporaryDirectory() as folder:
#     scaling_report([{"round": 0, "ranks": 1, "batch_per_rank": 1, "seconds": 1.0}])
#     from minidist.profile import measure_scaling
#
#     path = Path(folder) / "log.jsonl"
#     measure_scaling(my_training, [1, 2, 4], mode="weak", batch_size=256, rounds=9, log=path)
#     log = [json.loads(line) for line in path.read_text().splitlines()]
#     for num_ranks, row in sorted(scaling_report(log).items()):
#         low, middle, high = row["samples_per_s"]
#         shares = " to ".join(f"{share:.0%}" for share in row["efficiency"][::2])
#         print(
#             f"{num_ranks} ranks: {middle:,.0f} samples/s ({low:,.0f} to {high:,.0f}), "
#             f"efficiency {row['efficiency'][1]:.0%} ({shares})"
#         )

# %% check="prof_report"
check("prof_report", scaling_report)

# %% [markdown]
# **What does communication cost?** On real devices you cannot look it up in a plan, so you measure:
# a step with communication, and the same step without it (DDP's `no_sync()`). The machine is never
# the same for two minutes: others use it, it gets hot. So the two kinds take turns, and you compare
# within each turn.
#
# **Write `communication_overhead(step, step_alone, synchronize, device, rounds, clock)`.**
#
# - In each round run `step()` once and `step_alone()` once, and time each. `synchronize()` before
#   every reading of the clock, that at the beginning, too: the device may still be at work.
# - Ranks wait for each other, so the slowest one counts. Take the maximum over all ranks of the
#   time of `step`, and of the time of `step_alone`, in every round.
# - The share of a round is $1 - t_\text{alone} / t_\text{step}$. Return the median over the rounds:
#   a `float`, the same on all ranks.
#
# <details><summary>Hint</summary>
#
# Both times fit into one tensor on `device`, and one all-reduce with `dist.ReduceOp.MAX`. Use
# float64.
# </details>


# %% solution="task6_overhead"
def communication_overhead(
    step: Callable[[], object],
    step_alone: Callable[[], object],
    synchronize: Callable[[], None],
    device: torch.device,
    rounds: int = 11,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Share of a step that is communication: the median over rounds, of the slowest ranks."""
    ### BEGIN SOLUTION
    shares = []
    for _ in range(rounds):
        seconds = []
        for run in (step, step_alone):
            synchronize()
            begin = clock()
            run()
            synchronize()
            seconds.append(clock() - begin)
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        with_s, alone_s = slowest.tolist()
        shares.append(1 - alone_s / with_s)
    return statistics.median(shares)
    ### END SOLUTION


# %% [markdown]
# Your own machine, for once on a real clock. Expected: with a small batch, gradients cost a good
# part of the step; with a batch 16 times as large, far less of it. On a GPU or a server the figures
# are others, and that is the point of measuring. (On real GPUs, go for an efficiency of 90 %: 10 %
# or less of overhead.)


# %% demo="see_overhead"
def make_steps(batch: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step with gradients that travel, and one without."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    model, x = wrap(nn.Sequential(*layers), device), torch.randn(batch, 256, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def step_alone() -> None:
        with model.no_sync():
            step()

    for _ in range(3):
        step()
        step_alone()
    return step, step_alone


with demo("task 6"):
    for batch in (32, 512):
        share = communication_overhead(*make_steps(batch), synchronize, device)
        if IS_RANK_ZERO:
            print(f"batch of {batch:3} per rank: communication is {share:.0%} of a step")

# %% check="prof_overhead"
check("prof_overhead", communication_overhead)

# %% [markdown]
# ## On several GPUs: 3 extra points
#
# Virtual time is exact; real time is what you pay for. With a CUDA device for each rank,
# `prof_gpu_efficiency` trains ten layers of 2048 × 2048 with your `GradientBuckets`, one bucket for
# each layer. It first measures how long the mean of all gradients takes, packing included, and then
# takes a batch whose step computes six times as long. Whoever sends after backward has an
# efficiency of 0.86 or so; the check asks for **0.9**. With fewer GPUs than ranks it says so and
# costs nothing.
#
# On a GPU `all_reduce(…, async_op=True)` is put into a queue of its own and `work.wait()` makes the
# computing queue wait, not Python. So your class stays as it is, unless something in it waits for
# the GPU: `.item()`, `print`, a copy to the CPU.

# %% check="prof_gpu_efficiency"
check("prof_gpu_efficiency", GradientBuckets)

# %% [markdown]
# ## Reflect
#
# Some things no test can judge. Answer each question in its own cell, in a few sentences: replace
# *YOUR ANSWER HERE*. Whoever runs your course reads the answers and gives up to 2 points for each,
# beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. Somebody raises the utilisation of a cluster from 60 % to 90 % and says that this saves 50 %
# of the cost. Right?**
#
# <!-- BEGIN SOLUTION -->
# No. The same work takes 60/90 of the time, so a third is saved. In the same *time* it is 50 % more
# work. From 60 % to 95 % it is 58 % more work, and 37 % saved. Say which of the two you mean.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. `nvidia-smi` shows a utilisation of 100 %. Can the run be slow all the same?**
#
# <!-- BEGIN SOLUTION -->
# Yes. It shows the share of time in which *some* kernel runs. An NCCL kernel that spins while it
# waits for a straggler counts. So does a kernel that uses one of a hundred multiprocessors. Your
# `utilisation` leaves out communication, so it sees the first; it does not see the second. For that
# one compares the floating-point operations per second that the model needs with the peak of the
# device (model FLOPs utilisation).
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. The trace of rank 0 shows 40 % exposed all-reduce. A colleague wants faster network cards.
# What do you look at first?**
#
# <!-- BEGIN SOLUTION -->
# The traces of the *other* ranks. If one of them has almost no exposed communication, it is the one
# that all wait for, and the network is innocent. Then look at what that rank does meanwhile: loads,
# logs, computes longer (a larger share of the batch, longer sequences, a hot GPU). If all ranks
# have it, look at number and size of the all-reduces before you buy anything.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_4"
# **4. Why can your tuner not simply take the plan with the fewest exposed bytes?**
#
# <!-- BEGIN SOLUTION -->
# The smallest last bucket is a single gradient. With each gradient alone the latency is paid for
# each, the network cannot keep up with backward, and buckets queue: in the end far more is exposed
# than the last one. What counts is the end of the *queue*. (A plan with large buckets at first
# and small ones at the end is better than equal caps. Try it: your `predict_step` can judge it.)
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_5"
# **5. Weak scaling on 64 ranks is 95 %, and still the model takes as many days as before. How?**
#
# <!-- BEGIN SOLUTION -->
# Weak scaling counts samples per second. With 64 times the batch there are 64 times fewer steps per
# epoch. If the batch was large enough before, or the learning rate was not adapted (linear rule,
# warm-up), the training needs many more epochs. Time to a given *loss* is what counts in the end.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - [ ] you can profile ten steps of any training script, and know why not the first ten;
# - [ ] you ask of everything in a trace first whether it is exposed;
# - [ ] you can tell waiting for a rank from waiting for the network;
# - [ ] you can say how many loader workers a run needs, and how many its node can bear;
# - [ ] you know both reasons why a bucket can have the wrong size;
# - [ ] you say "weak" or "strong" with every efficiency, and have reached 90 %.
#
# ## Read next
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, [arXiv
#   2006.15704](https://arxiv.org/abs/2006.15704). Bucket sizes measured, with NCCL and with gloo.
# - Jiang et al., *MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs*,
#   [arXiv 2402.15627](https://arxiv.org/abs/2402.15627). Stragglers, data loading and diagnosis
#   on a real cluster.
# - Chowdhery et al., *PaLM: Scaling Language Modeling with Pathways*, [arXiv
#   2204.02311](https://arxiv.org/abs/2204.02311). Where model FLOPs utilisation comes from
#   (appendix B).
# - Mohan et al., *Analyzing and Mitigating Data Stalls in DNN Training*, [arXiv
#   2007.06775](https://arxiv.org/abs/2007.06775). How much training waits for data, and why.
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, [arXiv
#   1706.02677](https://arxiv.org/abs/1706.02677). What a larger batch needs to be worth its
#   speed.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
if IS_RANK_ZERO:
    print("lab 6 is done")
