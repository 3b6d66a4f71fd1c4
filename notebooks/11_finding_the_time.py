# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 2
#     language: python
#     name: torchrun-2
# ---

# %% [markdown]
# # 11 · Finding the time
#
# Training runs on eight GPUs and is five times as fast as on one. Where did the other three go?
# Guessing is expensive: a faster network does not help a job that waits for its data. This lecture
# is about looking first: how to measure a step, how to read a timeline, which five culprits come up
# again and again, and what it takes to reach 90 %.
#
# **After it you can**
#
# - measure throughput without fooling yourself;
# - take a profile of a distributed step, and compute its utilisation and overlap;
# - tell a slow loader, small buckets, needless synchronisation, a straggler and copies apart;
# - say what `torch.compile` does beside DDP and FSDP2, and what a CUDA graph needs and saves;
# - compute strong and weak scaling, and say what a communication share means for the speedup;
# - bring a job to 90 % efficiency, and say which of its steps bought how much.
#
# It takes about 80 minutes. The kernel is *torchrun × 2*: cells run on two ranks, and those that
# begin with `%%rank 0` on one. Times of the real ranks depend on your machine, so nothing is
# claimed about them but what holds everywhere. What is exact comes from the emulated cluster. Nine
# times the lecture asks for your guess before it measures. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: more steps and finer figures
seed = 0

# %%
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from minidist import device as devices
from minidist.profile import (
    ArrivalTimer,
    Monitor,
    Span,
    Timeline,
    WatchedLoader,
    Window,
    compute_rows,
    find_bottleneck,
    find_stragglers,
    from_emulated,
    from_profiler,
    gather_rows,
    gather_timeline,
    measure_scaling,
    overhead_rows,
    read_trace,
    report,
    save_chrome_trace,
    scaling_rows,
    step_shares,
    total,
)

torch.manual_seed(seed)
device = devices.choose_device()
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(devices.choose_backend())
rank, world_size = dist.get_rank(), dist.get_world_size()


@contextlib.contextmanager
def watch():
    """A torch.profiler, without the two lines that it writes to stderr."""
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        with torch.profiler.profile() as profile:
            yield profile
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


# %%
# %%rank 0
# %matplotlib inline
from dataclasses import replace

import numpy as np
from IPython.display import display
from matplotlib.patches import Patch

from minidist import cost, emulate
from minidist.claims import claim
from minidist.emulate.teach import run_traced
from minidist.plots import COLOURS, PALETTE, new_figure, plot_bars, plot_lines, plot_stacked, style
from minidist.plots.style import FAINT
from minidist.profile.loader import FakeClock
from minidist.widgets import explore, predict

LANES = {
    "loader": (0.1, 0.8),
    "compute": (0.1, 0.4),
    "copy": (0.5, 0.1),
    "communication": (0.6, 0.3),
}


def draw(timeline, window=None, title="", names=None, kinds=None):
    """What each rank did when; from a profiler, an emulated cluster or our own spans."""
    start_s, end_s = (window or timeline).start_s, (window or timeline).end_s
    unit_s, unit = (1e-3, "ms") if end_s - start_s > 2e-3 else (1e-6, "µs")
    figure, ax = new_figure(9, 1.2 + 0.5 * len(timeline.ranks))
    names_of = {kind: kind for kind in (*LANES, "idle")} | (kinds or {})
    shown = [kind for kind in LANES if any(s.kind == kind for s in timeline.spans)]
    with style():
        for row, r in enumerate(timeline.ranks):
            ax.axhspan(row + 0.1, row + 0.9, color=COLOURS["idle"], linewidth=0)
            for kind, (low, height) in LANES.items():
                bars = [
                    ((s.start_s - start_s) / unit_s, (s.end_s - s.start_s) / unit_s)
                    for s in timeline.of(r, kind)
                    if s.end_s > start_s and s.start_s < end_s
                ]
                ax.broken_barh(
                    bars,
                    (row + low, height),
                    color=COLOURS[kind],
                    edgecolor="white",
                    linewidth=0.3 if len(bars) < 60 else 0,
                )
        ax.set_yticks(
            np.arange(len(timeline.ranks)) + 0.5, names or [f"rank {r}" for r in timeline.ranks]
        )
        ax.set(
            xlim=(0, (end_s - start_s) / unit_s),
            ylim=(len(timeline.ranks), 0),
            title=title,
            xlabel=f"time ({unit})",
        )
        ax.tick_params(axis="y", length=0)
        squares = [Patch(color=COLOURS[kind], label=names_of[kind]) for kind in (*shown, "idle")]
        figure.legend(handles=squares, loc="outside upper right", ncols=5, frameon=False)
    return figure


# %% [markdown]
# ## 1 · One step, seen
#
# We wrap six layers in DDP, with buckets of 2 MiB, and let
# [`torch.profiler`](https://docs.pytorch.org/docs/stable/profiler.html) watch both ranks. The
# profiler is started after a few steps: the first ones pay for allocations, and DDP rearranges its
# buckets after the first. `record_function` marks what a step is. (`watch()` is
# `torch.profiler.profile()` without its messages.)

# %%
torch.manual_seed(seed)
width, batch = 512, 128 if quick else 512
net = nn.Sequential(
    *(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(6))
).to(device)
ddp = DDP(net, bucket_cap_mb=2)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
x = torch.randn(batch, width, device=device)


def train_step():
    """Forward, backward with its all-reduces, update."""
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()


for _ in range(3):
    train_step()

# %%
with watch() as profile:
    for _ in range(4):
        with torch.profiler.record_function("step"):
            train_step()
timeline = gather_timeline(from_profiler(profile, step="step"))  # all ranks, on all ranks

# %%
# %%rank 0
draw(timeline, timeline.windows(0)[1], "One step of DDP on this machine, from torch.profiler")

# %% [markdown]
# Blue is the rank's own computation, orange are its all-reduces, grey is neither. The first orange
# bar begins in the middle of the backward pass: DDP sends a bucket as soon as it is full. Where
# orange lies below blue, the rank does not wait. (It may compute a little more slowly, since both
# use the same processor and memory.) Where orange lies below grey, the rank waits: that is
# **exposed** communication.
#
# `report` turns the picture into numbers. Each moment of a step is given to the first of these that
# applies: compute, exposed communication, copy, loader, idle. So they add up to the step.

# %%
# %%rank 0
print(report(timeline))
parts = step_shares(timeline)
buckets = str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")
reduces = [
    sum(
        count
        for name, count in timeline.collectives(0, window).items()
        if "allreduce" in name.lower().replace("_", "")
    )
    for window in timeline.windows(0)
]
display(
    claim(
        "in each step there are as many all-reduces as DDP has buckets",
        reduces,
        [len(buckets)] * len(reduces),
    ),
)

# %% [markdown]
# A timeline is written to a file and opened in [Perfetto](https://ui.perfetto.dev), with all ranks
# below each other. There you can zoom down to a single kernel. torch's own
# `profile.export_chrome_trace(path)` does the same for one rank.

# %%
# %%rank 0
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "trace.json"
    save_chrome_trace(timeline, path)
    again = read_trace(path)
    print(f"{len(timeline.spans)} spans, {path.stat().st_size / 1000:.0f} kB")
claim(
    "what is read back from the file has the same spans and steps",
    [len(again.spans), len(again.steps)],
    [len(timeline.spans), len(timeline.steps)],
)

# %% [markdown]
# ## 2 · Measuring without fooling yourself
#
# Before any profile comes a number: samples per second. It is easy to get wrong.
#
# **Whose samples?** Rank 0 prints what it has counted itself. That is the throughput of *one* GPU.

# %%
counted = torch.tensor(float(x.shape[0]), device=device)
mine = counted.item()
dist.all_reduce(counted)
whole_job = counted.item()

# %%
# %%rank 0
display(
    claim(
        "samples per step of the job, relative to what rank 0 counts",
        whole_job / mine,
        float(world_size),
        rtol=1e-9,
        status="corrected",
        refutes="a common lesson",
        said=1,
        why="a lesson prints rank 0's own tokens as the throughput of the job",
    ),
)

# %% [markdown]
# **Is the work done when the clock stops?** A GPU works on a queue. A call returns when its work
# has been *queued*. Whoever reads the clock then has timed the queue. The same happens with an
# asynchronous collective, also on a CPU. Broken on purpose:

# %%
big = torch.ones((16 << 20) // 4, device=device)
queued_s, done_s = [], []
for _ in range(5):
    dist.barrier()
    began = time.perf_counter()
    work = dist.all_reduce(big, async_op=True)
    queued_s.append(time.perf_counter() - began)  # broken: the all-reduce has only begun
    work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    done_s.append(time.perf_counter() - began)  # mended
print(f"queued after {1e3 * min(queued_s):.2f} ms, done after {1e3 * min(done_s):.2f} ms")

# %%
# %%rank 0
claim(
    "the clock read too early shows only a part of the time",
    min(queued_s) / min(done_s),
    ("<", 0.5),
)

# %% [markdown]
# On a GPU: `torch.cuda.synchronize()` before *both* readings of the clock, or CUDA events. Only
# there, though: in the training loop itself every synchronisation costs (section 4).
#
# **Which rank's time?** All wait for the slowest one, so its time is that of the step. And in what
# unit? A monitor that divides by 1024³ and prints "GB" is 7 % off.
#
# **What if the machine changes meanwhile?** Absolute times drift by tens of percent. So measure two
# variants *in turn* and take the ratio within each round. Here the machine becomes half as fast
# after the third round; variant B truly costs 20 % more.

# %%
# %%rank 0
speed = [1, 1, 1, 2, 2, 2]  # seconds of variant A in each round
in_turn = {"A": [1.0 * s for s in speed], "B": [1.2 * s for s in speed]}
one_after_the_other = {"A": in_turn["A"][:3], "B": in_turn["B"][3:]}  # first all A, then all B
display(
    claim(
        "measured one after the other: wrong by the drift",
        overhead_rows(one_after_the_other)[1].ratio,
        2.4,
        rtol=1e-9,
        kind="arithmetic",  # the drift is made up
    ),
    claim("a GiB that is labelled GB holds so many GB", cost.GIB / cost.GB, 1.074, rtol=1e-3),
)

# %% [markdown]
# The same for real: what does DDP's communication cost on this machine? Forward and backward with
# all-reduces and without (`no_sync`), in turn, each as slow as its slowest rank. The difference is
# **communication overhead**. It is not the communication's own time: some of it is hidden.


# %%
def slowest(seconds):
    """The longest time of all ranks."""
    t = torch.tensor(seconds, device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def forward_backward(sync):
    """With all-reduces, or each rank for itself. No update in either: only they may differ."""
    optimizer.zero_grad()
    with contextlib.nullcontext() if sync else ddp.no_sync():
        ddp(x).square().mean().backward()


seconds = {"no_sync": [], "all-reduced": []}
for _ in range(8 if quick else 40):
    for name in seconds:
        dist.barrier()
        began = time.perf_counter()
        forward_backward(sync=name == "all-reduced")
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name].append(slowest(time.perf_counter() - began))

# %%
# %%rank 0
for row in overhead_rows(seconds):
    print(
        f"{row.name:>12}: {1e3 * row.step_s:6.2f} ms, {row.ratio:.2f} times "
        f"(quartiles {row.low:.2f} … {row.high:.2f})"
    )

# %% [markdown]
# If the quartiles lie far apart, your machine is busy, and more rounds would be needed.
#
# ## 3 · Overlap, exactly
#
# Now without noise: the **emulated cluster**. Twelve layers take 10 ms forward and 20 ms backward
# each; four GPUs, 256 KiB of gradients per layer, links of 25 MB/s with 1 ms latency. (Real layers
# are a thousand times larger, and so are real links: only the ratio counts.) The program is run
# once for real, and its trace is replayed on a virtual clock.

# %%
# %%rank 0
LAYERS, WIDTH, RANKS = 12, 256, 4
FORWARD_S, BACKWARD_S = 0.01, 0.02


def emulated_net():
    """Layers that have a price."""
    return nn.Sequential(
        *(emulate.Charged(nn.Linear(WIDTH, WIDTH, bias=False), i) for i in range(LAYERS))
    )


def reduce_after_backward():
    """First compute everything, then send everything, layer by layer."""
    layers = emulated_net()
    for _ in range(3):
        layers.zero_grad()
        layers(torch.ones(4, WIDTH)).square().mean().backward()
        for p in layers.parameters():
            dist.all_reduce(p.grad)


def with_ddp(bucket_mib, accumulate=1):
    """PyTorch's DDP with a bucket size; all-reduces in the last of `accumulate` micro-batches."""
    wrapped = DDP(emulated_net(), bucket_cap_mb=bucket_mib)
    for step in range(3 * accumulate):
        wrapped.require_backward_grad_sync = (step + 1) % accumulate == 0  # what no_sync() sets
        wrapped(torch.ones(4, WIDTH)).square().mean().backward()


# %% [markdown]
# `trace_of` runs a program on four ranks and keeps its trace, `machine` is the network, and
# `last_step` replays a trace on a network. All ranks do the same here, so rank 0 stands for all.


# %%
# %%rank 0
def trace_of(fn, *args, ranks=RANKS, share=1.0):
    """Run it on the emulated cluster; every rank has `share` of the usual work."""
    plan = emulate.ChargePlan((share * FORWARD_S,) * LAYERS, (share * BACKWARD_S,) * LAYERS, b"any")
    return run_traced(fn, ranks, *args, plan=plan)[1]


def machine(mb_per_s=25.0, latency_ms=1.0, ranks=RANKS):
    """GPUs joined by links of some bandwidth and latency."""
    link = emulate.Link(bandwidth_bytes_per_s=1e6 * mb_per_s, latency_s=1e-3 * latency_ms)
    return replace(emulate.clusters.pcie_a100(ranks), intra_node=link, inter_node=link)


COMPUTE_S = LAYERS * (FORWARD_S + BACKWARD_S)


def last_step(trace, cluster):
    """The last step: timeline and window."""
    line = from_emulated(emulate.simulate(trace, cluster))
    return line, line.windows(0)[-1]


def seconds_of(window):
    return window.end_s - window.start_s


def utilization(line, window):
    """Share of the step in which rank 0 computes."""
    return COMPUTE_S / seconds_of(window)


def hidden(line, window):
    """Share of the communication that is not exposed; a step takes its compute and the exposed."""
    sent_s = sum(seconds_of(s) for s in line.of(0, "communication") if s.start_s >= window.start_s)
    return 1 - (seconds_of(window) - COMPUTE_S) / sent_s


after = trace_of(reduce_after_backward)

# %%
# %%rank 0
caps = {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 6: 1.5, 12: 3.0}  # layers per bucket -> MiB
bucketed = {layers: trace_of(with_ddp, mib) for layers, mib in caps.items()}

# %% [markdown]
# First without overlap, then with DDP and two layers per bucket.

# %%
# %%rank 0
hidden_guess = predict("DDP: which part of the communication is hidden?", guess=None, unit="%")
hidden_guess

# %%
# %%rank 0
serial, overlapped = last_step(after, machine()), last_step(bucketed[2], machine())
draw(*serial, f"All-reduce after backward: {utilization(*serial):.1%} of the time computes")

# %%
# %%rank 0
draw(*overlapped, f"DDP, two layers per bucket: {utilization(*overlapped):.1%}")

# %% [markdown]
# The same bytes, the same machine. In the second picture all buckets but the last hide behind the
# backward pass. The last one is complete when backward ends, and nothing is left to hide behind. So
# the step takes *compute + one bucket*, as long as the others fit underneath.

# %%
# %%rank 0
layer_bytes = 4 * WIDTH**2


def all_reduce_s(layers):
    """One all-reduce of the gradients of some layers, by the formula of a ring."""
    return 2 * (RANKS - 1) * 1e-3 + 2 * (RANKS - 1) / RANKS * layers * layer_bytes / 25e6


display(
    hidden_guess.reveal(100 * hidden(*overlapped)),
    claim(
        "after backward: compute + 12 all-reduces, seconds",
        seconds_of(serial[1]),
        COMPUTE_S + 12 * all_reduce_s(1),
        rtol=1e-9,
    ),
    claim(
        "DDP with two layers per bucket: compute + one bucket, seconds",
        seconds_of(overlapped[1]),
        COMPUTE_S + all_reduce_s(2),
        rtol=1e-9,
    ),
    claim(
        "utilisation rises from 58 % to 91 %",
        [utilization(*serial), utilization(*overlapped)],
        [0.580, 0.906],
        rtol=2e-3,
    ),
    claim(
        "share of the communication that is hidden: 5 of 6 buckets",
        hidden(*overlapped),
        5 / 6,
        rtol=1e-6,
    ),
)

# %% [markdown]
# `step_shares` finds the same from any timeline, without being told what the layers take.

# %%
# %%rank 0
part = [p for p in step_shares(overlapped[0]) if p.rank == 0][-1]
claim(
    "step_shares: utilisation and hidden share",
    [part.utilization, part.overlap_fraction],
    [utilization(*overlapped), hidden(*overlapped)],
    rtol=1e-6,
)

# %% [markdown]
# ### The best bucket
#
# Small buckets pay the latency again and again. Large ones are ready late, and the last one, which
# nothing hides, is large. In between lies an optimum, and it moves with the latency.

# %%
# %%rank 0
bucket_guess = predict("Which bucket is best with 1 ms of latency?", guess=None, unit="layers")
bucket_guess

# %%
# %%rank 0
latencies = (0.1, 1.0, 3.0)
curves = {
    f"{latency:g} ms": [
        utilization(*last_step(bucketed[k], machine(latency_ms=latency))) for k in caps
    ]
    for latency in latencies
}
best = {name: list(caps)[int(np.argmax(values))] for name, values in curves.items()}
display(
    bucket_guess.reveal(best["1 ms"]),
    claim("the best bucket for 0.1, 1 and 3 ms of latency: layers", list(best.values()), [1, 2, 3]),
    claim(
        "with a single bucket nothing is hidden",
        hidden(*last_step(bucketed[12], machine())),
        0.0,
        atol=1e-9,
    ),
)
plot_lines(
    list(caps),
    curves,
    xlabel="layers per bucket",
    ylabel="utilisation",
    ticks=list(caps),
    logx=True,
    title="Neither small nor large, for three latencies",
)


# %%
# %%rank 0
def bucket_explorer(layers_per_bucket=1, mb_per_s=25, latency_ms=1.0):
    """Timeline of a DDP step for a bucket size on some network."""
    step = last_step(bucketed[layers_per_bucket], machine(mb_per_s, latency_ms))
    return draw(
        *step,
        f"{1e3 * seconds_of(step[1]):.0f} ms, utilisation {utilization(*step):.1%}, "
        f"hidden {hidden(*step):.0%}",
    )


explore(
    bucket_explorer,
    layers_per_bucket=list(caps),
    mb_per_s=[5, 10, 25, 50, 100, 1000],
    latency_ms=[0.0, 0.1, 1.0, 3.0, 10.0],
    labels={
        "layers_per_bucket": "layers per bucket",
        "mb_per_s": "bandwidth (MB/s)",
        "latency_ms": "latency (ms)",
    },
    alt="Timeline of one DDP step on four emulated GPUs: compute, all-reduces, idle",
)

# %% [markdown]
# At 5 MB/s no bucket size is good: the communication takes about four times as long as the backward
# pass behind which it could hide. Then the bytes have to shrink, or there must be more computation
# per all-reduce (section 7).
#
# ## 4 · Five suspects
#
# Communication is one way to lose time. There are few others, and each leaves its own trace. To see
# them one by one we write a job on paper: each rank waits for its batch, copies it, computes
# forward (12 ms) and backward (24 ms), and sends its gradients in buckets (8 ms in all, if there
# were no latency). As in a real profile, an orange bar begins when the rank *joins* the all-reduce.


# %%
# %%rank 0
def job(wait=0.0, copy=0.0, log=0.0, slow=1.0, buckets=6, latency=0.3, ranks=4, steps=3):
    """Spans of a data-parallel job; all in ms. `slow` is how much longer the last rank computes."""
    spans, steps_of, begin = [], [], 0.0

    def note(r, kind, start, end):
        if end > start:
            spans.append(
                Span(rank=r, lane=kind, kind=kind, name=kind, start_s=start / 1e3, end_s=end / 1e3)
            )
        return end

    for number in range(steps):
        ready = {}
        for r in range(ranks):
            factor = slow if r == ranks - 1 else 1.0
            t = note(r, "loader", begin, begin + wait)
            t = note(r, "copy", t, t + copy)
            t = note(r, "compute", t, t + 12 * factor)
            for b in range(buckets):
                t = ready[r, b] = note(r, "compute", t, t + 24 * factor / buckets)
        end = 0.0
        for b in range(buckets):
            before, start = end, max(end, *(ready[r, b] for r in range(ranks)))
            end = start + latency + 8 / buckets
            for r in range(ranks):
                note(r, "communication", max(before, ready[r, b]), end)
        end += log  # all ranks stand still while something is written
        steps_of += [
            Window(rank=r, name=f"step {number}", start_s=begin / 1e3, end_s=end / 1e3)
            for r in range(ranks)
        ]
        begin = end
    return Timeline(tuple(spans), tuple(steps_of))


# %%
# %%rank 0
suspects = {
    "healthy": {},
    "slow loader": {"wait": 20},
    "tiny buckets": {"buckets": 96},
    "synchronous logging": {"log": 15},
    "a straggler": {"slow": 1.5},
    "copies on the way": {"copy": 12},
}


def bar(shares_of_all, ranks=4, steps=3):
    """Milliseconds of a step of an average rank."""
    named = {
        "compute": "compute_s",
        "communication": "exposed_s",
        "loader": "loader_s",
        "idle": "idle_s",
    }
    values = {kind: getattr(shares_of_all, name) for kind, name in named.items()}
    values["loader"] += shares_of_all.copy_s
    return {kind: 1e3 * value / ranks / steps for kind, value in values.items()}


summed = {name: total(step_shares(job(**change))) for name, change in suspects.items()}
plot_stacked(
    {name: bar(part) for name, part in summed.items()},
    form="{:.0f}",
    xlabel="ms of a step, average rank (communication: exposed only; loader: copies, too)",
    title="One job, and five ways to lose time",
)

# %% [markdown]
# `find_bottleneck` reads such a bar and names what limits the job. Then look at each fault as a
# timeline, weaker or stronger.

# %%
# %%rank 0
limits = {name: find_bottleneck(part, 4).limit for name, part in summed.items()}
display(
    claim(
        "what limits: healthy, loader, buckets, logging, copies",
        " ".join(limits[name] for name in suspects if name != "a straggler"),
        "compute loader communication idle loader",
    ),
    claim(
        "efficiency of the healthy job: 36 ms of computation, one bucket exposed",
        summed["healthy"].utilization,
        36 / (36 + 0.3 + 8 / 6),
        rtol=1e-9,
    ),
)


# %%
# %%rank 0
def suspect(case="a straggler", strength=1.0):
    """Timeline of one step of a job with one of the five faults, weaker or stronger."""
    usual = {"wait": 0.0, "copy": 0.0, "log": 0.0, "slow": 1.0, "buckets": 6}
    change = {
        key: usual[key] + strength * (value - usual[key]) for key, value in suspects[case].items()
    }
    if "buckets" in change:
        change["buckets"] = max(1, round(change["buckets"]))
    line = job(**change)
    part = total(step_shares(line))
    return draw(
        line,
        line.windows(0)[1],
        f"{case}: utilisation {part.utilization:.0%}, step {1e3 * part.step_s / 12:.1f} ms",
    )


explore(
    suspect,
    case=list(suspects),
    strength=[0.0, 0.25, 0.5, 1.0, 2.0],
    labels={"case": "what is wrong", "strength": "how much of it"},
    alt="Timeline of a step on four ranks with one planted fault",
)

# %% [markdown]
# Learn the signatures:
#
# | culprit | what you see | what helps |
# |---|---|---|
# | loader | red before every forward pass, on all ranks | workers, prefetching, cheaper decoding |
# | tiny buckets | a comb of short all-reduces that goes on after backward | larger buckets |
# | synchronisation | grey between steps or between kernels | fewer `.item()`, `print`, `barrier` |
# | straggler | long orange on all ranks **but one** | mend or replace that one |
# | copies | a gap before forward, with a copy in it | pinned memory, `non_blocking`, a stream |
#
# Now each of them in more detail.
#
# ### The loader
#
# A loader with workers runs beside the training loop. So it must not be judged alone: what counts
# is how long the loop stands still in `next(loader)`. A well-known recipe times the *copy* of each
# batch to the GPU, compares it with 10 ms, and recommends more workers. It never measures loading.
# Broken on purpose, on a loader that takes at least 15 ms per batch:


# %%
# %%rank 0
def slow_loader(num_batches=8, seconds=0.015):
    """Batches that take their time."""
    for _ in range(num_batches):
        time.sleep(seconds)
        yield torch.zeros(32, 64)


copied_s = []
for data in slow_loader():
    began = time.perf_counter()
    data.to(device)  # broken: this is the copy, and the wait is over by now
    copied_s.append(time.perf_counter() - began)
picture = cost.Wire(
    bandwidth_bytes_per_s=0.5 * cost.pcie(generation=4).bandwidth_bytes_per_s, latency_s=0
)
copy_ms = 1e3 * 32 * 3 * 224 * 224 * 4 / picture.bandwidth_bytes_per_s
display(
    claim(
        "the recipe sees of the loader's time a share of",
        statistics.median(copied_s) / 0.015,
        ("<", 0.2),
    ),
    claim(
        "32 images of 3 x 224 x 224 in fp32 over PCIe 4.0 at half speed: ms",
        copy_ms,
        1.2,
        rtol=0.03,
        status="corrected",
        refutes="a common checklist",
        said=10,
        why="no fixed threshold tells a slow copy: bytes / bandwidth is the yardstick",
    ),
)

# %% [markdown]
# `WatchedLoader` stands between loader and loop, and times each `next`:

# %%
# %%rank 0
watched = WatchedLoader(slow_loader())
for data in watched:
    data.square().sum()  # stands for a training step
print(watched.report())
clock = FakeClock()
by_clock = WatchedLoader((clock.sleep(0.030) for _ in range(10)), clock=clock)
for _ in by_clock:
    clock.sleep(0.010)
display(
    claim(
        "the loop waits for each batch, in ms", 1e3 * watched.report().median_wait_s, (">=", 15.0)
    ),
    claim(
        "without workers the loop waits for all of it: 30 ms beside 10 ms of work is a share of",
        by_clock.report().wait_fraction,
        0.75,
        rtol=1e-9,
    ),
)

# %% [markdown]
# So the loader is slow, and it needs workers. How many are enough? Let a worker need 60 ms to make
# a batch, and a step 20 ms to use it.

# %%
# %%rank 0
wait_guess = predict("Two workers: how long does the loop wait per batch?", guess=None, unit="ms")
wait_guess

# %% [markdown]
# If one batch takes L seconds to make and a step takes C seconds, then w workers make a batch every
# L / w seconds, and the loop waits **max(0, L/w − C)** per batch. So w = L / C workers are enough,
# if there are cores for them. We check the rule on a simulated loader whose workers prefetch.


# %%
# %%rank 0
def loading(make_ms, step_ms, workers, num_batches=24, prefetch=2):
    """Spans of the workers (ranks 1, 2, …) and of the training loop (rank 0), in seconds."""
    spans, free, used = [], [0.0] * workers, []
    now = 0.0
    for n in range(num_batches):
        w, room = n % workers, n - workers * prefetch  # a worker may be `prefetch` batches ahead
        start = max(free[w], used[room] if room >= 0 else 0.0)
        free[w] = start + make_ms / 1e3
        spans.append(
            Span(rank=1 + w, lane="w", kind="loader", name="make", start_s=start, end_s=free[w])
        )
        begin = max(now, free[w])
        now = begin + step_ms / 1e3
        used.append(begin)
        spans.append(
            Span(rank=0, lane="loop", kind="compute", name="step", start_s=begin, end_s=now)
        )
    return Timeline(tuple(spans))


def loop_wait_ms(make_ms, step_ms, workers):
    """Waiting per batch when the start is over, over whole rounds: each worker's turn as often."""
    rounds = 10
    steps = loading(make_ms, step_ms, workers, 2 * rounds * workers + 1).of(0)
    span_s = steps[-1].start_s - steps[rounds * workers].start_s
    return 1e3 * span_s / (rounds * workers) - step_ms


# %%
# %%rank 0
rule = [max(0.0, 60 / w - 20) for w in (1, 2, 4)]
display(
    wait_guess.reveal(loop_wait_ms(60, 20, 2)),
    claim(
        "60 ms to make a batch, 20 ms to use it: waits with 1, 2 and 4 workers, ms",
        [loop_wait_ms(60, 20, w) for w in (1, 2, 4)],
        rule,
        atol=1e-6,
    ),
)

# %% [markdown]
# Two workers make a batch every 30 ms and a step uses one every 20 ms. Try other numbers.


# %%
# %%rank 0
def loader_explorer(make_ms=60, step_ms=20, workers=2):
    """The training loop and its workers."""
    line = loading(make_ms, step_ms, workers)
    return draw(
        line,
        Window(rank=0, name="", start_s=0, end_s=0.4),
        f"{workers} workers: the loop waits {loop_wait_ms(make_ms, step_ms, workers):.0f} "
        "ms per batch",
        ["loop", *(f"worker {w}" for w in range(workers))],
        {"loader": "makes a batch", "compute": "trains on it"},
    )


explore(
    loader_explorer,
    make_ms=(5, 120, 5),
    step_ms=(5, 60, 5),
    workers=(1, 6),
    labels={
        "make_ms": "to make a batch (ms)",
        "step_ms": "a training step (ms)",
        "workers": "workers",
    },
    alt="Timeline of a training loop and the workers that prepare its batches",
)

# %% [markdown]
# Settings of a `DataLoader` that matter: `num_workers` (by the rule, and no more than the cores
# that a rank has: 8 ranks of 16 workers on 64 cores fight each other), `prefetch_factor` (evens out
# batches that take unequally long, and costs memory), `pin_memory=True` (the GPU can then fetch by
# itself), `persistent_workers=True` (or they are started again in every epoch).
# `minidist.profile.compare_settings` tries settings on your loop and `suggest` chooses.
#
# ### Synchronisation: host and device
#
# The host queues kernels, the GPU works them off. While the host is ahead, the GPU never waits.
# `loss.item()`, `print(loss)`, `torch.cuda.synchronize()`, a blocking copy or `if mask.any()`
# make the host wait for the device. Then the queue runs empty. Two clocks are enough to see it.


# %%
# %%rank 0
def two_clocks(launch_us=10, kernel_us=14, sync_every=0, num_kernels=40):
    """Timeline of a host (rank 0) that launches and a device (rank 1) that computes."""
    host = dev = 0.0
    spans = []
    for n in range(1, num_kernels + 1):
        spans.append((0, "copy", host, host + launch_us))
        host += launch_us
        spans.append((1, "compute", max(host, dev), max(host, dev) + kernel_us))
        dev = max(host, dev) + kernel_us
        if sync_every and n % sync_every == 0:
            host = dev  # .item(): the host stands still until the device is done
    return Timeline(
        tuple(
            Span(rank=r, lane="", kind=kind, name=kind, start_s=a * 1e-6, end_s=b * 1e-6)
            for r, kind, a, b in spans
        )
    )


def device_us(**settings):
    """Microseconds until the device has finished."""
    return 1e6 * max(span.end_s for span in two_clocks(**settings).of(1))


display(
    claim(
        "the host runs ahead: K kernels of d take h + K d, microseconds",
        device_us(),
        10 + 40 * 14,
        rtol=1e-9,
    ),
    claim(
        "synchronised after every kernel: K (h + d)",
        device_us(sync_every=1),
        40 * (10 + 14),
        rtol=1e-9,
    ),
    claim(
        "kernels shorter than their launch: K h + d, whatever the GPU",
        device_us(kernel_us=2),
        40 * 10 + 2,
        rtol=1e-9,
    ),
)


# %%
# %%rank 0
def sync_explorer(launch_us=10, kernel_us=14, sync_every=4):
    """Host and device; the host's launches are drawn as thin bars."""
    line = two_clocks(launch_us, kernel_us, sync_every)
    busy = 40 * kernel_us / (1e6 * line.end_s)
    return draw(
        line,
        None,
        f"the device is busy for {busy:.0%} of the time",
        ["host", "device"],
        {"copy": "launch", "compute": "kernel"},
    )


explore(
    sync_explorer,
    launch_us=(1, 40),
    kernel_us=(1, 40),
    sync_every=[0, 1, 2, 4, 8, 20],
    labels={
        "launch_us": "launch of a kernel (µs)",
        "kernel_us": "kernel (µs)",
        "sync_every": "synchronise every … kernels (0: never)",
    },
    alt="Timeline of host and device: launches above, kernels below, gaps where the device waits",
)

# %% [markdown]
# So log every hundredth step, keep running sums on the device, and read them when you print. If
# kernels are shorter than their launch, give each kernel more work with a larger batch, or let
# `torch.compile` fuse several into one, or launch many at once: a CUDA graph.
#
# ### `torch.compile` beside DDP and FSDP2
#
# [`torch.compile`](https://docs.pytorch.org/docs/stable/torch.compiler.html) traces the forward
# pass into graphs, and makes few large kernels of each, forward and backward. The backward of a
# graph is **one** node for autograd: all of its gradients arrive at its end. One graph for the
# whole model would leave DDP nothing to overlap. So torch cuts the graph where DDP's buckets end
# ([DDPOptimizer](https://docs.pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer)).
# We count graphs with a backend that compiles nothing, on both ranks: a small layer and six blocks
# of 2 MiB.


# %%
class Residual(nn.Module):
    """A block with 2 MiB of weights."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 256, bias=False)
        self.blocks = nn.ModuleList(Residual() for _ in range(6))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


# %%
# %%rank 0
graph_guess = predict(
    "With buckets of 4 MiB: into how many graphs is the forward pass cut?", guess=None
)
graph_guess

# %%
import logging

import torch._dynamo
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard

torch._logging.set_logs(all=logging.ERROR)  # what Dynamo tells developers
batch_of_two = torch.ones(2, 256, device=device)


def graphs_of(wrap) -> list[int]:
    """Operations in each graph that torch.compile traces in one pass, in the order of tracing."""
    sizes = []

    def backend(graph, inputs):
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    wrapped = wrap(Stack().to(device), backend)
    wrapped(batch_of_two).sum().backward()
    return sizes


def buckets_of(cap_mb: int | None) -> int:
    """Buckets that DDP sends in a pass that nothing compiles."""
    sent = []
    ddp = DDP(Stack().to(device), bucket_cap_mb=cap_mb)
    ddp.register_comm_hook(
        None, lambda _, bucket: (sent.append(bucket.index()), allreduce_hook(None, bucket))[1]
    )
    ddp(batch_of_two).sum().backward()
    sent.clear()  # the first pass sends one bucket, and notes in which order gradients come
    ddp(batch_of_two).sum().backward()
    return len(sent)


def sharded(model, backend, *, by_block: bool):
    """FSDP2 around each block and the rest; compiled block by block, or as a whole."""
    for block in model.blocks:
        if by_block:
            block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)
    return model if by_block else torch.compile(model, backend=backend)


def compiled_ddp(model, backend, *, cap_mb: int | None):
    return torch.compile(DDP(model, bucket_cap_mb=cap_mb), backend=backend)


caps = (None, 8, 4, 2)  # None: torch's own 25 MiB, and 1 MiB for the first bucket
cut = {cap: graphs_of(partial(compiled_ddp, cap_mb=cap)) for cap in caps}
buckets = {cap: buckets_of(cap) for cap in caps}
inside = graphs_of(lambda m, b: DDP(torch.compile(m, backend=b), bucket_cap_mb=4))
whole = graphs_of(lambda m, b: torch.compile(m, backend=b))
per_block, fsdp_whole = (graphs_of(partial(sharded, by_block=way)) for way in (True, False))

# %%
# %%rank 0
print(f"{'alone':<24}{whole}")
for cap in caps:
    print(f"{f'DDP, {cap or 25} MiB':<24}{cut[cap]}, {buckets[cap]} buckets")
print(f"{'FSDP2, block by block':<24}{per_block}\n{'FSDP2, as a whole':<24}{fsdp_whole}")
display(
    graph_guess.reveal(len(cut[4])),
    claim("graphs of the model alone", len(whole), 1),
    claim("graphs with DDP as it is, and its buckets", [len(cut[None]), buckets[None]], [2, 2]),
    claim("graphs with buckets of 8, 4 and 2 MiB", [len(cut[cap]) for cap in (8, 4, 2)], [3, 4, 7]),
    claim("DDP's buckets of 8, 4 and 2 MiB", [buckets[cap] for cap in (8, 4, 2)], [2, 4, 7]),
    claim("DDP around the compiled model: the same graphs", inside, cut[4]),
    claim("operations in all graphs together are those of one", sum(cut[2]), sum(whole)),
    claim("FSDP2, block by block: one graph for all six", per_block, [4]),
    claim("FSDP2, compiled as a whole: no more than that", fsdp_whole, per_block),
)

# %% [markdown]
# A bucket's gradients come from one graph, arrive together, and travel while the graph before is
# still in backward. Smaller buckets mean more overlap and less to fuse. The cuts are torch's guess
# at the buckets: it always makes the first one 1 MiB, while DDP with a `bucket_cap_mb` has no small
# first bucket. So with 8 MiB there is a graph more. Both orders of wrapping give the same cuts; the
# tutorials write `torch.compile(DDP(model))`.
#
# FSDP2 runs Python in hooks before and after each block (gather, free, reduce). No graph goes
# across them, whether you compile the blocks or the whole. So compile **each block**, then shard
# it: the six blocks are the same code, which is traced and compiled once, however many there are.
#
# ### CUDA graphs
#
# A [CUDA graph](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs) is a recording of
# kernels with all of their arguments. Replaying it is one launch. So whatever the recording cannot
# see must not change:
#
# | needed | because | so |
# |---|---|---|
# | the same shapes | sizes are arguments | pad the last batch |
# | the same addresses | pointers are arguments | copy each batch into the first one's tensor |
# | no `.item()`, no `if` on a value | the host is not there | use `torch.where` |
# | no Python that matters | it does not run again | a rate is a tensor (`capturable=True`) |
#
# `torch.compile(mode="reduce-overhead")` records by itself. What does it save? We count the
# operations of a step of the stack, and measure how long this machine's host needs to issue one.

# %%
# %%rank 0
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts operations that compute something; views and detached aliases launch nothing."""

    launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.launches += not func.is_view and "detach" not in str(func)
        return func(*args, **(kwargs or {}))


def issue_us(repeats: int = 2000) -> float:
    """Microseconds of the host per operation on a tensor so small that nothing else counts."""
    one, times = torch.ones(1, device=device), []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats):
            one + one
        times.append(1e6 * (time.perf_counter() - began) / repeats)
    return min(times)


stack = Stack().to(device)
stack_sgd = torch.optim.SGD(stack.parameters(), lr=0.1, foreach=False)
with Counted() as in_forward:
    stack_loss = stack(batch_of_two).sum()
with Counted() as in_the_rest:
    stack_loss.backward()
    stack_sgd.step()
kernels, issue = in_forward.launches + in_the_rest.launches, issue_us()
print(f"{kernels} operations in a step, {issue:.1f} µs of this host for each: ", end="")
print(f"a graph would save it {(kernels - 1) * issue:.0f} µs of launches")
display(
    claim(
        "operations that forward and loss launch - those of the traced graph",
        in_forward.launches - sum(whole),
        1,
    ),
    claim(
        "as a CUDA graph / one by one, with kernels of 2 µs and launches of 10 µs",
        (10 + 2 * kernels) / device_us(launch_us=10, kernel_us=2, num_kernels=kernels),
        0.2,
        rtol=0.1,
    ),
)

# %% [markdown]
# So a graph replaces K launches by one. With launches of h and shorter kernels of d, the step takes
# h + K d in place of K h + d: a fifth, in that example. Where kernels are longer than their launch,
# the host is ahead anyway, and a graph saves only the short gaps between kernels. The next cell
# measures it if there is a GPU.


# %%
# %%rank 0
def replay_gain(kernels: int = 100, repeats: int = 50) -> tuple[float, float]:
    """Milliseconds of small kernels on the GPU, launched one by one and replayed as a graph."""
    x = torch.ones(1024, device="cuda")

    def work():
        y = x
        for _ in range(kernels):
            y = y * 1.01
        return y

    def milliseconds(call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats

    side = torch.cuda.Stream()  # warm up where nothing else runs
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return milliseconds(work), milliseconds(graph.replay)


if torch.cuda.is_available():
    print("100 kernels, ms: one by one {:.3f}, replayed {:.3f}".format(*replay_gain()))
else:
    print("no GPU here")
MEASURED = "this course's make gpu, one H100, 2026-11-27"
claim(
    "H100: a kernel of one number, launched one by one, and replayed in a graph",
    "7.9 µs, 1.2 µs",
    status="cited",
    authority=MEASURED,
)

# %% [markdown]
# ### The straggler
#
# One of four ranks takes 50 % longer to compute: a hot GPU, a noisy neighbour, more data than the
# others. Everybody waits for it. `find_bottleneck` gets the sum over all ranks.

# %%
# %%rank 0
blame_guess = predict("Compute, communication, loader or idle: which does it name?", guess=None)
blame_guess

# %%
# %%rank 0
late = job(slow=1.5)
verdict = find_stragglers(compute_rows(late))
print(report(late))
print(verdict)
slow_step, usual_step = (job(slow=s).windows(0)[0].end_s for s in (1.5, 1.0))
display(
    blame_guess.reveal(limits["a straggler"]),
    claim("the shares of all ranks blame", limits["a straggler"], "communication"),
    claim("each rank's own time shows who it is", list(verdict.stragglers), [3]),
    claim(
        "everybody pays: the step takes so many times as long",
        slow_step / usual_step,
        1.48,
        rtol=0.01,
    ),
)

# %% [markdown]
# The healthy ranks wait *inside the all-reduce*. So the profile of each of them shows a lot of
# communication, and the sum over all ranks blames the network. Each rank's own time names the right
# one.
#
# Now on the real ranks. Rank 1 sleeps 60 ms in every step. `ArrivalTimer` times what a rank does
# *before* the collective.

# %%
# %%rank 0
rank_guess = predict("Whose profile shows more communication, rank 0's or 1's?", guess=None)
rank_guess

# %%
timer = ArrivalTimer()
with watch() as profile:
    for _ in range(8):
        dist.barrier()
        with torch.profiler.record_function("step"):
            with timer:
                loss = net(x).square().mean()
                if rank == 1:
                    time.sleep(0.06)
            dist.all_reduce(loss.detach())
late_line = gather_timeline(from_profiler(profile, step="step"))
rows = gather_rows(timer.seconds)

# %%
# %%rank 0
waits = {
    r: statistics.median(p.exposed_s for p in step_shares(late_line) if p.rank == r) for r in (0, 1)
}
print(find_stragglers(rows))
display(
    rank_guess.reveal(max(waits, key=lambda r: waits[r])),
    claim(
        "real ranks: communication of the healthy one, ms per step; 4 bytes are sent",
        1e3 * waits[0],
        (">", 20),
    ),
    claim(
        "rank 1's own time is longer than rank 0's by, ms",
        1e3 * find_stragglers(rows).ranks[1].late_s,
        (">", 20),
    ),
)
draw(late_line, late_line.windows(0)[2], "Rank 1 sleeps, rank 0 'communicates'")

# %% [markdown]
# ### Copies
#
# A batch that is copied in the ordinary way makes the host wait, and the GPU with it. From *pinned*
# memory, with `non_blocking=True` and on a stream of its own, the copy of the next batch runs
# beside the computation on this one. As long as it is shorter, nobody waits for it. The loader has
# to pin (`pin_memory=True`): from ordinary memory the driver first copies into a pinned buffer of
# its own, and the host waits for that, `non_blocking` or not.
#
# ## 5 · Utilisation: which one?
#
# "Aim for 90 % GPU utilisation" is common advice. `nvidia-smi` calls utilisation the share of time
# in which *some* kernel ran, be it on one multiprocessor out of 108. A NCCL kernel that waits for a
# straggler counts as 100 %. So the number says "not idle", no more. `Monitor` samples it, on a GPU
# or, without one, the host's processors:

# %%
# %%rank 0
with Monitor(interval_s=0.05) as monitor:
    for _ in range(3):
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            net(x)
        time.sleep(0.3)
print(monitor.summary())
first = monitor.samples[0].reading.device
seen = [
    (sample.time_s, 100 * sample.reading.utilization)
    for sample in monitor.samples
    if sample.reading.device == first and sample.reading.utilization is not None
]
display(
    claim("every 50 ms for about 2 s: samples", len(monitor.samples), (">", 5)),
)
plot_lines(
    [t for t, _ in seen],
    {first: [u for _, u in seen]},
    xlabel="time (s)",
    ylabel="utilisation (%)",
    title="Work for 0.3 s, sleep for 0.3 s, three times",
    markers=True,
)

# %% [markdown]
# (On a GPU the readings come from [NVML](https://docs.nvidia.com/deploy/nvml-api/), by the package
# `nvidia-ml-py`; the module `nvidia_smi` of older listings is out of date. Memory per GPU:
# `torch.cuda.max_memory_allocated()` is what tensors took at most, `memory_reserved()` what the
# allocator keeps. Both are in bytes.)
#
# We need a number that says how much was computed: **MFU** = FLOPs that the model needs / (seconds
# × peak of all GPUs). For N parameters and D tokens these are 6 N D (lecture 1) and attention,
# which adds a quarter for Llama 3 8B at 8,192 tokens. Good runs reach 40 to 60 %, such as those of
# [torchtitan](https://github.com/pytorch/torchtitan). Some published figures count recomputed
# operations, too; then they are *hardware* utilisation (HFU), which is larger.

# %%
# %%rank 0
TITAN = "pytorch/torchtitan, docs/performance.md, 64 A100, FSDP2"
titan = {"Llama 3 8B": 56.8, "Llama 3 70B": 51.7, "Llama 2 13B": 61.1, "Llama 2 70B": 50.8}
llama3 = cost.LLAMA3_8B.flops_per_token()
mfu_8b = cost.utilization(
    flops_per_token=llama3, tokens_per_s=2904 * 64, num_gpus=64, peak_flops_per_s=cost.A100.peak()
)
lookup = 6 * 128_256 * 4096 * 2904 / cost.A100.peak()  # FLOPs of a product that is none
megatron_hfu = 140e12 / cost.A100.peak()
llama2 = cost.training_flops(num_parameters=70e9, tokens=2e12) / (1_720_320 * 3600 * 312e12)
display(
    claim(
        "Llama 3 8B, 2904 tokens/s per GPU: MFU in %, counted as they do",
        100 * (mfu_8b + lookup),
        titan["Llama 3 8B"],
        rtol=2e-3,
        authority=TITAN,
    ),
    claim(
        "and without the table of embeddings, which is looked up and not multiplied",
        100 * mfu_8b,
        53.9,
        rtol=2e-3,
    ),
    claim(
        "by 6 N D alone, without attention over 8,192 tokens",
        100 * 6 * cost.LLAMA3_8B.num_parameters * 2904 / cost.A100.peak(),
        44.8,
        rtol=2e-3,
    ),
    claim(
        "the best MFU in these published runs, %",
        max(*titan.values(), 100 * llama2, 75 * megatron_hfu),
        61.1,
        rtol=1e-6,
        authority=TITAN,
        status="corrected",
        refutes="a common rule",
        said=90,
        why="90 % is 'a kernel ran'; of the peak, 40 to 60 % is good",
    ),
    claim(
        "GPT-3 with Megatron, 140 TFLOP/s per A100: HFU, and MFU without the recomputed quarter",
        [megatron_hfu, 0.75 * megatron_hfu],
        [0.449, 0.337],
        rtol=2e-3,
        authority="Narayanan et al., arXiv:2104.04473",
    ),
    claim(
        "GPT-2 medium on one H100, bf16, eager and compiled: MFU",
        "32 %, 43 %",
        status="cited",
        authority=MEASURED,
        why="of the data sheet's peak; of what large products reach there, 50 % and 62 %",
    ),
)

# %% [markdown]
# ## 6 · Scaling
#
# Two questions, two efficiencies:
#
# - **strong scaling**: the *same* batch on N GPUs. Speedup t₁ / t_N, efficiency t₁ / (N t_N).
# - **weak scaling**: the same batch *per GPU*. Efficiency t₁ / t_N.
#
# Strong scaling is harder: each GPU has less to compute, while the gradients stay as large. Here
# are both on the emulated cluster. The job is that of section 3, two layers per bucket.

# %%
# %%rank 0
strong_guess = predict("Strong scaling, 4 GPUs: efficiency?", guess=None, unit="%")
strong_guess

# %%
# %%rank 0
counts = [1, 2, 4] if quick else [1, 2, 4, 8]
step_of = {}
for mode in ("weak", "strong"):
    for n in counts:
        trace = trace_of(with_ddp, 0.5, ranks=n, share=1 / n if mode == "strong" else 1.0)
        step_of[mode, n] = seconds_of(last_step(trace, machine(ranks=n))[1])
rows = {
    mode: scaling_rows({n: [step_of[mode, n]] for n in counts}, mode=mode, batch_size=64)
    for mode in ("weak", "strong")
}
for mode, table in rows.items():
    print(mode, [f"{row.world_size}: {row.speedup:.2f} x, {row.efficiency:.0%}" for row in table])
efficiency = {mode: [row.efficiency for row in table] for mode, table in rows.items()}
display(
    strong_guess.reveal(100 * efficiency["strong"][2]),
    claim(
        "weak scaling on 4 emulated GPUs",
        efficiency["weak"][2],
        COMPUTE_S / (COMPUTE_S + all_reduce_s(2)),
        rtol=1e-9,
    ),
    claim("strong scaling is worse, 4 GPUs: efficiency", efficiency["strong"][2], ("<", 0.5)),
    claim("weak scaling loses least", efficiency["weak"][2] / efficiency["strong"][2], (">", 2)),
)
plot_lines(
    counts,
    {mode: [row.speedup for row in table] for mode, table in rows.items()},
    ideal={"ideal": counts},
    logx=True,
    ticks=counts,
    xlabel="GPUs",
    ylabel="speedup",
    title="The same program, the same network: weak and strong scaling",
)

# %% [markdown]
# The emulated cluster gives the same numbers every time. Your machine does not: it also runs a
# browser, its clock speed changes, and ranks share memory and caches. So measure every size many
# times, and report how far the numbers spread.
#
# ### Your training, on the real clock
#
# `minidist.profile.measure_scaling` starts as many processes as the largest size has. In a round,
# each size takes one step, on a group of so many ranks, while the others wait. A slow moment of the
# machine then hits all sizes of a round, and the ratio within a round stays. Put your own network
# and data into `my_training`, and `"strong"` in place of `"weak"`.


# %% tags=["open"]
# %%rank 0
def my_training(group, batch_size: int):
    """Make a model on each rank of the group; return a function that trains it for one step."""
    mine = devices.choose_device()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(mine)
    ddp = DDP(net, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    x = torch.randn(batch_size, 256, device=mine)

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    return step


# %%
# %%rank 0
real_guess = predict("Weak scaling, 2 ranks of this machine: efficiency?", guess=None, unit="%")
real_guess

# %% tags=["open"]
# %%rank 0
ROUNDS = 11 if quick else 51
with tempfile.TemporaryDirectory() as folder:
    log_file = Path(folder) / "scaling.jsonl"
    measured = measure_scaling(
        my_training,
        [1, 2, 4],
        mode="weak",
        batch_size=512,
        rounds=ROUNDS,
        log=log_file,
    )
    log = [json.loads(line) for line in log_file.read_text().splitlines()]
print("a line of the log:", log[0])

# %% [markdown]
# A dot is a round. Had you timed each size once, you would have one dot of each, any of them.

# %%
# %%rank 0
seconds, batch_of = {}, {}  # number of ranks -> of each round; samples of all ranks in a step
for line in log:
    seconds.setdefault(line["ranks"], []).append(line["seconds"])
    batch_of[line["ranks"]] = line["ranks"] * line["batch_per_rank"]
rates = {n: [batch_of[n] / s for s in times] for n, times in seconds.items()}
names = [f"{n} rank{'s' * (n > 1)}" for n in rates]
for name, row, each in zip(names, measured, rates.values(), strict=True):
    print(
        f"{name}: {row.samples_per_s:,.0f} samples/s, from {min(each):,.0f} to {max(each):,.0f}; "
        f"efficiency {row.efficiency:.0%}. {row.note}"
    )
figure, ax = new_figure(8, 3.4)
with style():
    for place, (row, each) in enumerate(zip(measured, rates.values(), strict=True)):
        aside = place + np.linspace(-0.12, 0.12, len(each))
        ax.plot(aside, [r / 1e3 for r in each], "o", color=PALETTE[0], markersize=4, alpha=0.7)
        for value, colour, dashes in (
            (row.samples_per_s, PALETTE[1], "-"),
            (row.world_size * measured[0].samples_per_s, FAINT, "--"),
        ):
            ax.hlines(value / 1e3, place - 0.25, place + 0.25, color=colour, linestyle=dashes)
    ax.plot([], [], "o", color=PALETTE[0], markersize=4, label="one round")
    ax.plot([], [], color=PALETTE[1], label="median step")
    ax.plot([], [], "--", color=FAINT, label="ideal: so many times one rank")
    ax.set_xticks(range(len(names)), names)
    ax.set(ylabel="thousand samples/s", ylim=(0, None), xlim=(-0.5, len(names) - 0.5))
    ax.set_title(f"The same training, {ROUNDS} times in turn")
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
two = measured[1].world_size
per_round = [100 * b / (two * a) for a, b in zip(rates[1], rates[two], strict=True)]
print(f"one round of {names[1]} would have said {min(per_round):.0f} % or {max(per_round):.0f} %")
display(
    real_guess.reveal(100 * measured[1].efficiency),
    claim("lines of the log: one per round and size", len(log), len(measured) * ROUNDS),
    claim(
        "samples per second of the table, from the log's median seconds",
        [batch_of[n] / statistics.median(times) for n, times in seconds.items()],
        [row.samples_per_s for row in measured],
        rtol=1e-9,
    ),
    claim(
        "efficiency on 2 ranks in %, the median of all rounds",
        statistics.median(per_round),
        100 * measured[1].efficiency,
        rtol=1e-9,
    ),
)
figure

# %% [markdown]
# With more ranks than cores, ranks take turns: such a row says nothing about scaling, and the note
# says so. Lab 6 makes a report of such a log, which anybody can check.
#
# ### Tables of efficiency, checked
#
# Here are tables that are handed around, and what their own numbers give. They are examples, not
# measurements: nobody says on which machine.

# %%
# %%rank 0
strong = {2: 520, 4: 270, 8: 145, 16: 80, 32: 50}  # seconds per epoch; 1000 on one GPU
weak = {2: 1020, 4: 1050, 8: 1100, 16: 1180, 32: 1300}
resnet = {2: 52, 4: 27, 8: 15, 16: 9, 32: 6}  # 100 s on one GPU
images = {2: 190, 4: 360, 8: 680}  # per second; 100 on one GPU
samples = {2: 220, 4: 400}  # 120 on one GPU
fixed = {
    n: cost.strong_scaling_efficiency(time_one_s=1000, time_n_s=t, num_gpus=n)
    for n, t in strong.items()
}
grown = {n: cost.weak_scaling_efficiency(time_one_s=1000, time_n_s=t) for n, t in weak.items()}
EXAMPLE = "arithmetic of an example without a source"


def percent(values):
    """In percent, as a list."""
    return [100 * value for value in values]


display(
    claim(
        "strong scaling, 2 to 32 GPUs: efficiency in %",
        percent(fixed.values()),
        [96.2, 92.6, 86.2, 78.1, 62.5],
        rtol=2e-3,
    ),
    claim(
        "and speedup",
        [1000 / t for t in strong.values()],
        [1.92, 3.70, 6.90, 12.5, 20.0],
        rtol=2e-3,
    ),
    claim(
        "weak scaling, 2 to 32 GPUs: efficiency in %",
        percent(grown.values()),
        [98.0, 95.2, 90.9, 84.7, 76.9],
        rtol=2e-3,
    ),
    claim(
        "ResNet-50, 2 to 32 GPUs: efficiency in %",
        percent(
            cost.strong_scaling_efficiency(time_one_s=100, time_n_s=t, num_gpus=n)
            for n, t in resnet.items()
        ),
        [96, 93, 83, 69, 52],
        rtol=0.01,
    ),
    claim(
        "190, 360, 680 images/s on 2, 4, 8 GPUs, 100 on one: efficiency in %",
        percent(
            cost.throughput_efficiency(rate_one=100, rate_n=r, num_gpus=n)
            for n, r in images.items()
        ),
        [95.0, 90.0, 85.0],
        rtol=1e-9,
    ),
    claim(
        "2 x 110 and 4 x 100 samples/s, 120 on one: efficiency in %",
        percent(
            cost.throughput_efficiency(rate_one=120, rate_n=r, num_gpus=n)
            for n, r in samples.items()
        ),
        [92, 83],
        rtol=5e-3,
    ),
)

# %% [markdown]
# ### Amdahl's law, and where it does not apply
#
# **Amdahl**: if a share f of the *one-GPU* time cannot be parallelised, then the speedup is at most
# 1 / (f + (1 − f) / N). A popular calculator puts in the share of *communication*, measured on N
# GPUs. Let a step on 8 GPUs spend 90 s computing and 10 s communicating.

# %%
# %%rank 0
speedup_guess = predict("How many times as fast as one GPU is that?", guess=None)
speedup_guess

# %%
# %%rank 0
nine_to_one = cost.bottleneck(compute_s=90, communication_s=10, num_gpus=8)
six_to_four = cost.bottleneck(compute_s=60, communication_s=40, num_gpus=8)
WHY = "the share was measured on 8 GPUs; it is no serial share of the one-GPU time"
slide = cost.speedup_with_communication(num_gpus=8, compute_s=0.100, communication_s=0.010)
display(
    speedup_guess.reveal(nine_to_one.speedup),
    claim(
        "90 s computing, 10 s communicating on 8 GPUs: speedup",
        nine_to_one.speedup,
        7.2,
        rtol=1e-9,
        status="corrected",
        refutes=EXAMPLE,
        said=4.71,
        why=WHY,
    ),
    claim(
        "60 s and 40 s",
        six_to_four.speedup,
        4.8,
        rtol=1e-9,
        status="corrected",
        refutes=EXAMPLE,
        said=2.11,
        why=WHY,
    ),
    claim(
        "the calculator's numbers are Amdahl's, with f = 0.1 and 0.4",
        [cost.amdahl_speedup(serial_fraction=f, num_gpus=8) for f in (0.1, 0.4)],
        [4.71, 2.11],
        rtol=3e-3,
    ),
    claim(
        "100 ms and 10 ms, nothing hidden: speedup and efficiency of 8 GPUs",
        [slide, slide / 8],
        [7.27, 0.91],
        rtol=2e-3,
    ),
    claim(
        "speedup on N GPUs with C = 0.1, as a share of N",
        slide / 8,
        1 / 1.1,
        rtol=1e-9,
        status="corrected",
        refutes="a common text",
        said=1.0,
        why="'linear with more GPUs' needs C near 0",
    ),
    claim(
        "without any loss 1, 2, 4, 8 GPUs give",
        [100 * cost.amdahl_speedup(serial_fraction=0, num_gpus=n) for n in (1, 2, 4, 8)],
        [100.0, 200.0, 400.0, 800.0],
        rtol=1e-9,
    ),
)

# %% [markdown]
# Communication is no part of the one-GPU time. Each of the 8 GPUs computes in 90 % of its time, so
# the speedup is 8 · 0.9 = 7.2. In general **S = N / (1 + C)**, with C = exposed communication /
# computation.
#
# Which loss is it, then, if you only have times? **Karp and Flatt**: solve Amdahl's formula for f.
# If f stays the same with N, there is a serial part. If it *grows*, so does the overhead: the
# latencies of a longer ring, say. If it *falls*, the loss came with the second GPU and hardly grew
# since. Exposed communication in weak scaling is like that.

# %%
# %%rank 0
ALPHA = 4e-4  # latency, as a share of the one-GPU time
times = {
    "the strong-scaling table": {n: t / 1000 for n, t in strong.items()},
    "5 % serial": {n: 0.05 + 0.95 / n for n in strong},
    "latencies of a ring": {n: 1 / n + 2 * (n - 1) * ALPHA for n in strong},
    "weak, C = 0.1": {n: 1.1 / n for n in strong},
}
flatt = {
    name: [cost.karp_flatt(speedup=1 / t, num_gpus=n) for n, t in of.items()]
    for name, of in times.items()
}
change = {name: values[-1] / values[0] for name, values in flatt.items()}
display(
    claim(
        "latencies of a ring look like a share of 2 alpha N: from 2 to 32 GPUs it grows by",
        change["latencies of a ring"],
        16.0,
        rtol=1e-9,
    ),
    claim(
        "constant C in weak scaling looks like C / (N - 1): it falls to",
        change["weak, C = 0.1"],
        1 / 31,
        rtol=1e-9,
    ),
    claim(
        "the table's share falls, too: a fixed serial part is at most what is left, a share of",
        change["the strong-scaling table"],
        ("<", 0.6),
    ),
)
plot_lines(
    list(strong),
    flatt,
    logx=True,
    ticks=list(strong),
    xlabel="GPUs",
    ylabel="serial share that explains it",
    title="Karp and Flatt: what kind of loss is it?",
)

# %% [markdown]
# ### No threshold, no number of parameters
#
# Rules of thumb say: communication is the bottleneck above 20 % (or above 30 %), models below a
# billion parameters scale nearly linearly, from tens of millions on you get over 80 %. None of
# these can be right: the *same* model of 50 million parameters reaches 7 % or 99 % on 8 GPUs,
# depending on the batch per GPU and the link (below). Try it.


# %%
# %%rank 0
def efficiency_at(n, million, batch_ms, link, overlap, strong=False):
    """Efficiency of data parallelism on N GPUs; fp16 gradients over a ring."""
    compute = batch_ms / 1e3 / (n if strong else 1)
    sent = cost.all_reduce_seconds(num_bytes=2e6 * million, num_ranks=n, link=cost.LINKS[link])
    speedup = cost.speedup_with_communication(
        num_gpus=n, compute_s=compute, communication_s=sent, overlap_fraction=overlap
    )
    return speedup / n


def scaling_explorer(million=100, batch_ms=100, link="Ethernet 100 Gbit/s", overlap=0.5):
    """Weak and strong scaling over the number of GPUs."""
    many = [2**k for k in range(11)]
    lines = {
        name: [efficiency_at(n, million, batch_ms, link, overlap, name == "strong") for n in many]
        for name in ("weak", "strong")
    }
    figure = plot_lines(
        many,
        lines,
        ideal={"90 %": [0.9] * 11},
        logx=True,
        ticks=many,
        xlabel="GPUs",
        ylabel="efficiency",
        title=f"{million} M parameters, {batch_ms} ms of computing on one GPU, {link}",
    )
    figure.axes[0].set_ylim(0, 1.05)
    return figure


explore(
    scaling_explorer,
    million=[10, 25, 100, 340, 1000, 7000],
    batch_ms=[10, 30, 100, 300, 1000],
    link=list(cost.LINKS),
    overlap=[0.0, 0.25, 0.5, 0.75, 0.9],
    labels={
        "million": "parameters (millions)",
        "batch_ms": "computing per step on one GPU (ms)",
        "link": "link",
        "overlap": "share of communication that is hidden",
    },
    alt="Efficiency of weak and strong scaling from 1 to 1024 GPUs, with a line at 90 %",
)

# %%
# %%rank 0
same_model = [
    efficiency_at(8, 50, ms, link, 0.0)
    for ms, link in ((10, "Ethernet 10 Gbit/s"), (1000, "NVLink 4"))
]
at = {c: cost.bottleneck(compute_s=100 - c, communication_s=c, num_gpus=8) for c in (10, 20, 30)}
display(
    claim(
        "50 million parameters, 8 GPUs, much computing, NVLink: efficiency",
        same_model[1],
        (">", 0.99),
    ),
    claim(
        "the same model, little computing, 10 Gbit/s",
        same_model[0],
        0.0664,
        rtol=0.01,
        why="'above 80 % from tens of millions of parameters' "
        "cannot hold: communication / computation decides, not the size",
    ),
    claim(
        "nothing special happens at 20 or 30 % of communication: speedup of 8 GPUs",
        [at[c].speedup for c in (10, 20, 30)],
        [7.2, 6.4, 5.6],
        rtol=1e-9,
        why="two texts draw the line at 20 and at "
        "30 %; every percent costs the same, and the largest loss is the one to work on",
    ),
)

# %% [markdown]
# ## 7 · What 90 % takes
#
# S = N / (1 + C) says it: exposed communication, waiting and all else together may cost at most one
# ninth of the computation. We bring the job of section 3 there, one change at a time. Every bar is
# a real run of real code on the emulated cluster.

# %%
# %%rank 0
ladder = {  # a trace, and its compute in ordinary batches per optimiser step
    "all-reduce after backward": (after, 1),
    "DDP, one bucket": (bucketed[12], 1),
    "DDP, two layers per bucket": (bucketed[2], 1),
    "and twice the batch per GPU": (trace_of(with_ddp, 0.5, share=2.0), 2),
    "or 4 micro-batches per all-reduce": (trace_of(with_ddp, 0.5, 4), 4),
}


def reached(trace, batches):
    """Share of compute in the last of three optimiser steps."""
    windows = from_emulated(emulate.simulate(trace, machine())).windows(0)
    return batches * COMPUTE_S / sum(map(seconds_of, windows[2 * len(windows) // 3 :]))


reached_by = {name: reached(*case) for name, case in ladder.items()}
display(
    claim("before: less than 60 %", reached_by["all-reduce after backward"], ("<", 0.6)),
    claim("tuned buckets alone reach 90 %", reached_by["DDP, two layers per bucket"], (">", 0.9)),
    claim(
        "four micro-batches per all-reduce: 4 computations, one exposed bucket",
        reached_by["or 4 micro-batches per all-reduce"],
        4 * COMPUTE_S / (4 * COMPUTE_S + all_reduce_s(2)),
        rtol=1e-9,
    ),
    claim(
        "ResNet-50 from 8 to 256 GPUs: scaling efficiency",
        "about 90 %",
        status="cited",
        authority="Goyal et al., arXiv:1706.02677",
    ),
)
plot_bars(
    {name: 100 * value for name, value in reached_by.items()},
    limit=90,
    limit_label="90 %",
    xlabel="utilisation (%)",
    form="{:.1f}",
    title="From 58 % up",
    colours={name: PALETTE[0 if value < 0.9 else 2] for name, value in reached_by.items()},
)

# %% [markdown]
# The order to work in:
#
# 1. **Measure** throughput on one GPU and on N, weak and strong, in turn.
# 2. **Loader first.** It is the cheapest to mend, and it hides everything else.
# 3. **One GPU.** If a single one is slow, N of them are, too: MFU, launch gaps, synchronisation.
# 4. **Stragglers.** Each rank's own time, before you blame the network.
# 5. **Overlap**, then buckets.
# 6. **Fewer bytes per computation**: a larger batch per GPU, accumulation, 16-bit gradients,
#    compression (lecture 4). They change the training: mind the learning rate.
# 7. **A faster link**, last. It costs money, and it only helps what 2 to 6 have left exposed.
#
# Change one thing at a time, and keep the number before and after.
#
# ## Now you
#
# Write a function that gives the **fewest workers** with which the loop never waits, if a worker
# needs `make_ms` for a batch and a step takes `step_ms`. The cell after it tries your function in
# the simulated loader of section 4, on twenty jobs: with your number the loop must not wait, and
# with one worker less it must.


# %%
def fewest_workers(make_ms: float, step_ms: float) -> int | None:
    """Your turn. The rule of section 4; a worker cannot be halved."""
    return None


# %%
# %%rank 0
def check(answer) -> str:
    for make_ms in (5, 20, 60, 75, 200):
        for step_ms in (5, 20, 40, 90):
            workers, job = answer(make_ms, step_ms), f"{make_ms} ms per batch, {step_ms} per step"
            if workers is None:
                return "Not written yet."
            if not isinstance(workers, int | float | np.number) or not 1 <= workers < math.inf:
                return f"{job}: {workers} is no number of workers."
            if workers != int(workers):
                return f"{job}: {workers:.2f} workers? A worker cannot be halved."
            workers = int(workers)
            if loop_wait_ms(make_ms, step_ms, min(workers, 100)) > 1e-6:
                return f"{job}: with {workers} workers the loop waits."
            if workers > 1 and loop_wait_ms(make_ms, step_ms, min(workers, 100) - 1) < 1e-6:
                return f"{job}: {workers} workers are more than needed."
    return "Right, in all 20 cases."


print(check(fewest_workers))
display(
    claim(
        "L / C, rounded up",
        check(lambda make, step: np.ceil(make / step)),
        lambda got: "Right" in got,
    ),
    claim(
        "L / C, not rounded",
        check(lambda make, step: max(1, make / step)),
        lambda got: "halved" in got,
    ),
    claim(
        "L / C, rounded",
        check(lambda make, step: max(1, round(make / step))),
        lambda got: "waits" in got,
    ),
    claim(
        "one more, to be safe",
        check(lambda make, step: make // step + 1),
        lambda got: "more than" in got,
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `math.ceil(make_ms / step_ms)`. The rank needs as many cores for them.
#
# </details>
#
# ## Summary
#
# - Synchronise before reading a clock; count all ranks' samples; compare in turn.
# - A step is compute + exposed communication + copies + loader + idle. Nobody waits for overlapped
#   communication.
# - With DDP a step takes compute + the last bucket, if the others fit under backward. The best
#   bucket is neither small nor large.
# - `torch.compile` cuts DDP's graph where buckets end; with FSDP2 compile block by block. A CUDA
#   graph replaces all launches by one, and needs fixed shapes, fixed addresses and no host.
# - A profile shows a straggler as communication on all *other* ranks.
# - "GPU utilisation" only says that something ran. MFU says what you get; 40 to 60 % is good.
# - S = N / (1 + C). Amdahl's f is a share of the one-GPU time, not the communication share on N.
# - 90 % means: all losses together take at most one ninth of the time of the computation.
#
# ## Questions
#
# **1.** All ranks but number 5 show 40 % exposed communication, number 5 shows 3 %. What do you do?
#
# <details><summary>Answer</summary>
#
# Number 5 is the straggler: the others wait for it inside the all-reduce. Look at its own time:
# clock speed, temperature, its share of the data, what else runs on that host. A faster network
# would change nothing.
#
# </details>
#
# **2.** A step computes for 80 ms; 40 ms of communication, 30 of them hidden. Speedup on 16 GPUs?
#
# <details><summary>Answer</summary>
#
# C = 10 / 80 = 0.125, so 16 / 1.125 = 14.2, 89 %. Without overlap: 16 / 1.5 = 10.7.
#
# </details>
#
# **3.** A batch takes 200 ms to decode, a step takes 40 ms. How many workers, and what if the rank
# has only three cores?
#
# <details><summary>Answer</summary>
#
# L / C = 5 workers. With three cores a batch comes every 67 ms, and the loop waits 27 ms of each.
# Then decode less: smaller images on disk, a faster decoder, or decode on the GPU.
#
# </details>
#
# **4.** `nvidia-smi` shows 99 %, your MFU is 12 %. How can both be true?
#
# <details><summary>Answer</summary>
#
# Some kernel always runs, but a small one, or one that waits in NCCL, or one bound by memory. Look
# at the timeline: which kernels, and how long?
#
# </details>
#
# **5.** You set `bucket_cap_mb=1` on a cluster with 10 ms of latency. What do you see?
#
# <details><summary>Answer</summary>
#
# A comb of short all-reduces, each of them nearly all latency, going on long after backward. Larger
# buckets. How large: until the last one costs more than the latencies that are saved.
#
# </details>
#
# **6.** A job that is 95 % efficient on 8 GPUs in weak scaling: what about the same batch spread
# over 64?
#
# <details><summary>Answer</summary>
#
# That is strong scaling from 8 to 64: each GPU computes an eighth, while the bytes stay. C goes
# from 0.053 to 0.42 or more, since less can hide, and efficiency to 70 % or less.
#
# </details>
#
# **7.** With `torch.compile(DDP(model))` the profile shows all all-reduces after backward. Which
# setting do you look for?
#
# <details><summary>Answer</summary>
#
# `torch._dynamo.config.optimize_ddp = False`, or one bucket for the whole model: the backward is
# then a single graph, and no gradient is there before its end.
#
# </details>
#
# ## Try it
#
# In [**lab6_profiling**](../labs/lab6_profiling/lab6_profiling.ipynb) you get five slow runs. Each
# has one planted bottleneck, and you find it from the trace. Then you mend a loader, write and tune
# bucketing, compute utilisation and overlap yourself, and bring a job to 90 % on the emulated
# cluster.
#
# Here, try: set `batch` to 16 in section 1 and run all again. Which share of the step grows?
#
# ## Read
#
# - P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
#   [arXiv 1706.02677](https://arxiv.org/abs/1706.02677): 90 % on 256 GPUs, and what it took.
# - S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
#   [arXiv 2006.15704](https://arxiv.org/abs/2006.15704): buckets and overlap, measured.
# - A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways",
#   [arXiv 2204.02311](https://arxiv.org/abs/2204.02311), appendix B: model FLOPs utilisation.
# - D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM", [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): FLOP/s on 32 to 3,072 GPUs.
# - A. H. Karp, H. P. Flatt, "Measuring parallel processor performance",
#   [CACM 33 (1990)](https://doi.org/10.1145/78607.78614).
# - J. Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
#   Transformation and Graph Compilation", [ASPLOS 2024](https://doi.org/10.1145/3620665.3640366).
# - W. Liang et al., "TorchTitan", [arXiv 2410.06511](https://arxiv.org/abs/2410.06511): FSDP2 with
#   compilation per block.
# - PyTorch documentation: [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html),
#   [CUDA graphs](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs);
#   [Perfetto's documentation](https://perfetto.dev/docs/).
