# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 2
#     language: python
#     name: torchrun-2
# ---

# %% [markdown]
# # 3 · Data parallelism
#
# The model fits on one GPU, but training takes too long. So give every GPU a copy of the model and
# a part of each batch. Every GPU computes the gradient of its part, the GPUs average their
# gradients, and all of them take the same step. This is data parallelism. It is the first thing to
# try.
#
# After this lecture you can
#
# - say what data parallelism computes, and when it is *not* the gradient of the joint batch;
# - explain why `DataParallel` was given up, with bytes and seconds;
# - build distributed data parallelism (DDP) in four steps, and say what each step buys;
# - choose a bucket size, and see overlap on a timeline;
# - feed the ranks the right samples, normalise, validate and save correctly;
# - start ranks with torchrun and with `mp.spawn`, and say what each leaves to you;
# - recognise the usual mistakes by what they do.
#
# It takes about 100 minutes. **The kernel is *torchrun × 2***: every cell runs on two ranks. Cells
# that begin with `%%rank 0` compute, draw and check on one rank. Times come from the emulated
# cluster: four ranks run real PyTorch code, and a simulator says what it would have taken on a
# given network. They are the same on every machine. Seven times the lecture asks for your guess
# before it measures. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: more points in the curves

# %%
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist.device import choose_backend, choose_device
from minidist.parallel.data import (
    BucketedDDP,
    DataParallel,
    OverlappedDDP,
    average_gradients,
    average_gradients_flat,
    broadcast_state,
    check_same_model,
    clip_grad_norm,
    convert_sync_batch_norm,
)

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = choose_device()  # a GPU of its own where there are enough, else the CPU
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(choose_backend(), timeout=timedelta(seconds=60))

# %%
# %%rank 0
# %matplotlib inline
import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from IPython.display import display
from torch.utils.data import DistributedSampler

from minidist import cost, emulate
from minidist.claims import claim
from minidist.emulate.teach import run_traced
from minidist.plots import COLOURS, new_figure, plot_bars, plot_lines, plot_timeline, style
from minidist.widgets import explore, predict

# %% [markdown]
# We begin with a picture: one training step, and four ways to average the same gradients. The model
# has twelve layers of 256 × 256 weights and a bias, each of which takes 0.4 ms forward and 0.8 ms
# backward, 14.4 ms together. Four GPUs are joined by 10 Gbit/s Ethernet with a latency of 50 µs.
# The gradients have 3.2 MB. The simplest way averages them after backward, one parameter after the
# other.

# %%
# %%rank 0
naive_guess = predict("14.4 ms of compute: how long is the simplest step?", guess=None, unit="ms")
naive_guess

# %% [markdown]
# Here are the programs of the four ways. Each runs on four ranks.


# %%
# %%rank 0
WIDTH, LAYERS, FORWARD_S, BACKWARD_S = 256, 12, 0.4e-3, 0.8e-3
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4
COMPUTE_S = LAYERS * (FORWARD_S + BACKWARD_S)


def train_two_steps(way: str) -> None:
    """Runs on every rank of the emulated cluster; a Charged layer takes the time of the plan."""
    model = nn.Sequential(*(emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS)))
    wrapped = model
    if way == "overlapped":
        wrapped = OverlappedDDP(model)
    elif way == "bucketed":
        wrapped = BucketedDDP(
            model, bucket_bytes=2 * LAYER_BYTES, first_bucket_bytes=2 * LAYER_BYTES
        )
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(1, WIDTH)).square().mean().backward()
        if way == "naive":
            average_gradients(model)
        elif way == "flat":
            average_gradients_flat(model)
        elif way == "overlapped":
            wrapped.finish()


# %% [markdown]
# The ranks write down what they compute and send, and the simulator replays it on a network.


# %%
# %%rank 0
def network(bytes_per_s: float, latency_s: float, num_devices: int = 64) -> emulate.Cluster:
    link = emulate.Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s)
    return emulate.Cluster(
        name="our cluster",
        nodes=1,
        devices_per_node=num_devices,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e12,
    )


ETHERNET = network(1.25e9, 50e-6)  # 10 Gbit/s are 1.25 GB/s
plan = emulate.ChargePlan((FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS, b"lecture 3")


def last_step_s(timeline) -> float:
    return timeline.steps[-1].end_s - timeline.steps[-1].start_s


# %%
# %%rank 0
WAYS = {
    "naive": "1 · one all-reduce per parameter, after backward",
    "flat": "2 · one all-reduce of everything, after backward",
    "overlapped": "3 · one all-reduce per parameter, during backward",
    "bucketed": "4 · buckets of two layers, during backward",
}
traces = {way: run_traced(train_two_steps, 4, way, plan=plan)[1] for way in WAYS}


def draw_rank0(timelines: dict, width_s: float):
    """The last step of rank 0 of several timelines, below each other, on one time axis."""
    figure, _ = new_figure(8.5, 0.6 + 1.05 * len(timelines))
    figure.clear()
    with style():
        axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (title, timeline) in zip(axes, timelines.items(), strict=True):
        start_s = timeline.steps[-1].start_s
        one = replace(timeline, world_size=1, intervals=timeline.intervals[:1])
        took = 1e3 * last_step_s(timeline)
        plot_timeline(
            one, start_s=start_s, end_s=start_s + width_s, ax=ax, title=f"{title}: {took:.1f} ms"
        )
        ax.set_xlabel("")
        ax.set_yticks([])
    axes[-1].set_xlabel("time (ms)")
    return figure


timelines = {way: emulate.simulate(trace, ETHERNET) for way, trace in traces.items()}
step_ms = {way: 1e3 * last_step_s(timeline) for way, timeline in timelines.items()}
display(
    draw_rank0({WAYS[way]: t for way, t in timelines.items()}, 26e-3),
    naive_guess.reveal(step_ms["naive"]),
)

# %% [markdown]
# Rank 0 of 4 is shown. Blue is compute, orange is the network. The compute is the same in all rows.
# What changes is when, and in how many pieces, gradients travel. Section 3 builds these four.
#
# ## 1 · What is computed
#
# Let $L_r$ be the mean loss over the samples of rank r, and N the number of ranks. Each rank
# computes $g_r = \nabla L_r$. The all-reduce makes
#
# $$\bar g = \frac{1}{N} \sum_{r=0}^{N-1} g_r$$
#
# on every rank. The gradient of a mean is the mean of the gradients: if all ranks hold equally many
# samples, $\bar g$ *is* the gradient of the mean loss over the joint batch. Then a step on N GPUs
# is the step that one GPU would take with a batch N times as large. (BatchNorm is an exception:
# section 6.) Here it is on the two ranks of this kernel.

# %%
from minidist.data import make_regression

inputs, targets = (t.double().to(device) for t in make_regression(24, 8, 4, seed=3))
mse = nn.functional.mse_loss


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double().to(device)


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def mean_gradient(mine: slice) -> torch.Tensor:
    """The mean over ranks of the gradients of each rank's samples."""
    ddp = DistributedDataParallel(make_mlp())  # its backward averages
    mse(ddp(inputs[mine]), targets[mine]).backward()
    return gradient(ddp)


one_process = make_mlp()
mse(one_process(inputs), targets).backward()
whole = gradient(one_process)
size = 24 // world_size
even = mean_gradient(slice(rank * size, (rank + 1) * size))
uneven = mean_gradient(slice(0, 20) if rank == 0 else slice(20, 24))  # 20 and 4 samples


# %%
# %%rank 0
def relative_error(a, b) -> float:
    return float((a - b).norm() / b.norm())


display(
    claim(
        "mean of two ranks' gradients against one process on the joint batch, relative error",
        relative_error(even, whole),
        ("<", 1e-12),
    ),
    claim(
        "the same with 20 samples on rank 0 and 4 on rank 1",
        relative_error(uneven, whole),
        (">", 0.01),
    ),
    claim(
        "a global batch of 256 on 4 GPUs: samples per GPU",
        len(torch.arange(256).chunk(4)[0]),
        64,
        why="local batches; some call them micro-batches, which are parts of these (lecture 4)",
    ),
)

# %% [markdown]
# The second line shows a common error: **the mean of means is the mean only for equal parts**. In
# the uneven case, each of rank 1's four samples weighs five times as much as one of rank 0's. For a
# language model "equal" means equal numbers of *tokens*, and padding makes them unequal. The cure
# is to weigh: scale each rank's loss by its share of the samples times N.

# %%
mine, share = (slice(0, 20), 20 / 24) if rank == 0 else (slice(20, 24), 4 / 24)
weighted = DistributedDataParallel(make_mlp())
(mse(weighted(inputs[mine]), targets[mine]) * share * world_size).backward()

# %%
# %%rank 0
claim(
    "uneven batches, each loss times its share times N: relative error",
    relative_error(gradient(weighted), whole),
    ("<", 1e-12),
)

# %% [markdown]
# ## 2 · DataParallel, and why it was given up
#
# [`DataParallel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html)
# needs one line: `model = nn.DataParallel(model)`. It runs in **one process** with one thread per
# GPU. In every step
#
# 1. device 0 cuts the batch and sends each device its part;
# 2. every other device gets **all parameters** of device 0, again in every forward pass;
# 3. each device runs its replica; the threads share one Python interpreter and its lock;
# 4. outputs go to device 0, which computes the loss;
# 5. device 0 sends each device the gradient of its outputs; every device runs backward; and the
#    parameter gradients are **added up on device 0**;
# 6. the optimizer steps on device 0.
#
# A widespread drawing shows step 5 the other way round: backward on GPU 0 only, which then hands
# gradients to the others. Parameters flow out, gradients flow in. Our `DataParallel` counts the
# bytes. It needs no GPUs: its four devices here are four names for one CPU.

# %%
# %%rank 0
layer = nn.Linear(64, 64)
parallel = DataParallel(layer, devices=["cpu"] * 4)
parallel(torch.ones(16, 64)).sum().backward()
parameter_bytes = sum(p.numel() * 4 for p in layer.parameters())
crossed = parallel.traffic.bytes
print({reason: f"{num_bytes:,} bytes" for reason, num_bytes in crossed.items()})
seen = []
watched = nn.Sequential(nn.Linear(4, 4), nn.Identity())
watched[1].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
DataParallel(watched, devices=["cpu"] * 2)(torch.ones(16, 4)).sum().backward()
display(
    claim(
        "parameters sent out by device 0 per step, in models: N - 1",
        crossed["replicate"] / parameter_bytes,
        3.0,
        rtol=1e-9,
    ),
    claim(
        "gradients that arrive at device 0 in backward, in bytes",
        crossed["add gradients"],
        3 * parameter_bytes,
        status="corrected",
        said=0,
        refutes="a common drawing in which GPU 0 scatters gradients to the others",
        why="every GPU runs backward; parameter gradients flow to GPU 0 and parameters from it",
    ),
    claim("a batch of 16 on 2 devices: samples per device", seen, [8, 8]),
    claim(
        "nn.DataParallel: GPUs that it finds here",
        len(nn.DataParallel(nn.Linear(2, 2)).device_ids),
        torch.cuda.device_count(),
    ),
)

# %% [markdown]
# Where the last line says 0, `nn.DataParallel` only calls the module.
#
# Device 0 is the centre of a star, and a star does not scale: with P bytes of parameters device 0
# sends (N − 1)·P and receives (N − 1)·P per step. In a ring all-reduce *every* rank sends
# 2·(N − 1)/N·P, less than 2·P for any N (lecture 2).

# %%
# %%rank 0
gain_guess = predict(
    "4 GPUs, 10 Gbit/s: how many times as fast as DataParallel is DDP?", guess=None
)
gain_guess

# %% [markdown]
# The cell below plays the messages of the star with one rank per device. Torch's DataParallel
# differs in two points: the Python lock makes it slower, and where NCCL is there, torch hands
# parameters and gradients to NCCL's broadcast and reduce, which need not be a star.


# %%
# %%rank 0
def data_parallel_steps() -> None:
    """What crosses the links in two steps of DataParallel, with one rank in place of a thread."""
    me, others = dist.get_rank(), range(1, dist.get_world_size())
    model = nn.Sequential(*(emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS)))
    weights = list(model.parameters())
    flat = torch.cat([w.detach().flatten() for w in weights])
    for _ in range(2):
        for other in others:  # replicate
            if me == 0:
                dist.send(flat, other)
            elif me == other:
                dist.recv(flat, 0)
        output = model(torch.ones(1, WIDTH))
        back = torch.ones_like(output)
        for other in others:  # gather the outputs, return their gradients
            if me == 0:
                dist.recv(back, other)
                dist.send(back, other)
            elif me == other:
                dist.send(output.detach(), 0)
                dist.recv(back, 0)
        output.backward(back)
        for other in others:  # add the gradients up on device 0
            if me == 0:
                dist.recv(flat, other)
            elif me == other:
                dist.send(torch.cat([w.grad.flatten() for w in weights]), 0)


def ddp_steps() -> None:
    """Three steps of torch's DDP, with buckets of two layers; the second orders them anew."""
    model = nn.Sequential(*(emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=2 * LAYER_BYTES / 2**20)
    for _ in range(3):
        ddp(torch.ones(1, WIDTH)).square().mean().backward()


# %%
# %%rank 0
sizes = (2, 3, 4) if quick else (2, 4, 8)
star_traces = {n: run_traced(data_parallel_steps, n, plan=plan)[1] for n in sizes}
star = {n: emulate.simulate(trace, ETHERNET) for n, trace in star_traces.items()}
ring_traces = {n: run_traced(ddp_steps, n, plan=plan)[1] for n in sizes}
ring = {n: emulate.simulate(trace, ETHERNET) for n, trace in ring_traces.items()}
start_s = star[4].steps[-1].start_s - LAYERS * LAYER_BYTES / 1.25e9  # its first message
plot_timeline(star[4], start_s=start_s, title="DataParallel on 4 GPUs: all wires lead to device 0")


# %% [markdown]
# Between two steps all four devices wait for the wires of device 0. In speed-up:


# %%
# %%rank 0
def period_s(timeline) -> float:
    """From the first forward pass of one step to that of the next: all messages are in it."""
    return timeline.steps[1].start_s - timeline.steps[0].start_s


speed_up = {
    "DDP": [n * COMPUTE_S / last_step_s(ring[n]) for n in sizes],
    "DataParallel": [n * COMPUTE_S / period_s(star[n]) for n in sizes],
}
plot_lines(
    sizes,
    speed_up,
    xlabel="GPUs",
    ylabel="speed-up",
    ticks=sizes,
    title="Fixed batch per GPU, 10 Gbit/s, emulated",
    ideal={"linear": sizes},
)


# %%
# %%rank 0
def gain(bytes_per_s: float) -> float:
    """How many times as fast as DataParallel DDP is, on 4 GPUs."""
    cluster = network(bytes_per_s, 50e-6)
    slow, fast = (emulate.simulate(t[4], cluster) for t in (star_traces, ring_traces))
    return period_s(slow) / last_step_s(fast)


P = LAYERS * LAYER_BYTES
wire = cost.Wire(bandwidth_bytes_per_s=1.25e9, latency_s=50e-6)
display(
    gain_guess.reveal(gain(1.25e9)),
    claim(
        "bytes that leave device 0 per step and byte of parameters, DataParallel: N - 1",
        [star[n].bytes_per_link["device 0"] / 2 / P for n in sizes],
        [n - 1 for n in sizes],
        rtol=0.01,
    ),
    claim(
        "exposed communication of DDP on 4 GPUs, ms: the all-reduce of one bucket of two layers",
        1e3 * (last_step_s(ring[4]) - COMPUTE_S),
        1e3 * cost.all_reduce_seconds(num_bytes=2 * LAYER_BYTES, num_ranks=4, link=wire),
        rtol=1e-6,
    ),
    claim(
        "DDP / DataParallel grows with the number of GPUs",
        bool(np.all(np.diff([a / b for a, b in zip(*speed_up.values(), strict=True)]) > 0)),
        True,
    ),
    claim(
        "DDP against DataParallel on 4 GPUs, 400 Gbit/s, x",
        gain(50e9),
        ("<", 1.2),
        status="corrected",
        said="1.5 to 2",
        refutes="a common figure for every model",
        why="no general figure: it depends on model, network and the number of GPUs",
    ),
    claim("... and at 1 Gbit/s", gain(0.125e9), (">", 2.2)),
)

# %% [markdown]
# With two GPUs this cell times torch's own two classes on them; elsewhere it says that it cannot.


# %%
def ms_per_step(model: nn.Module, samples: torch.Tensor, steps: int = 20) -> float:
    """The median time of a training step, in ms, by the clock of the GPU."""
    took = []
    for _ in range(5 + steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        model.zero_grad()
        model(samples).square().mean().backward()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return sorted(took[5:])[steps // 2]


def time_both_classes(per_gpu: int = 256, width: int = 2048) -> dict[str, float]:
    """DDP on all ranks, then DataParallel on rank 0 with the same GPUs and as many samples each."""

    def wide_mlp() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(12))).to(device)

    samples = torch.randn(per_gpu * world_size, width, device=device)
    ddp = DistributedDataParallel(wide_mlp(), device_ids=[device.index])
    found = {"DDP": ms_per_step(ddp, samples[:per_gpu])}
    waiting = dist.new_group(backend="gloo")  # a barrier of NCCL would keep the other GPU busy
    if rank == 0:
        parallel = nn.DataParallel(wide_mlp(), device_ids=list(range(world_size)))
        found["DataParallel"] = ms_per_step(parallel, samples)
    dist.barrier(group=waiting)
    return found


if device.type == "cuda":
    classes_ms = time_both_classes()
    if rank == 0:
        print({name: f"{took:.2f} ms per step" for name, took in classes_ms.items()})
elif rank == 0:
    print(f"{torch.cuda.device_count()} GPUs here, {world_size} needed: nothing is timed.")

# %% [markdown]
# How much DDP gains depends on how large gradients are compared with compute, and on N. Two figures
# that are passed around without a source, "50 to 70 % GPU utilisation with DataParallel" and "90 to
# 95 % with DDP", are therefore not facts about the two classes. (And what `nvidia-smi` calls
# utilisation is the share of time in which *any* kernel runs, also one that waits.)
#
# A table that goes with them, also without a source, shows images per second on 1, 2, 4 and 8 GPUs.
# From such a table you can compute the scaling efficiency:

# %%
# %%rank 0
dp_rate, ddp_rate = {1: 100, 2: 150, 4: 250, 8: 350}, {1: 100, 2: 190, 4: 380, 8: 750}


def efficiency(rates: dict, n: int) -> float:
    return cost.throughput_efficiency(rate_one=rates[1], rate_n=rates[n], num_gpus=n)


display(
    claim(
        "DDP / DP on 2, 4, 8 GPUs in that table, which names no source",
        [ddp_rate[n] / dp_rate[n] for n in (2, 4, 8)],
        [1.3, 1.5, 2.1],
        rtol=0.03,
    ),
    claim(
        "scaling efficiency on 8 GPUs: DDP, DP",
        [efficiency(r, 8) for r in (ddp_rate, dp_rate)],
        [0.9375, 0.4375],
        rtol=1e-9,
    ),
    claim(
        "4 GPUs, communication exposed for 10 % of the step: speed-up",
        cost.speedup_with_communication(num_gpus=4, compute_s=90, communication_s=10),
        3.6,
        rtol=1e-9,
        status="corrected",
        said=4.0,
        refutes="a common text",
        why="4 times would need all communication hidden; the same text gives it 10 %",
    ),
)

# %% [markdown]
# So: one process per GPU. That removes the shared interpreter, the star, the special device 0 that
# runs out of memory first, and the limit to one machine. One bottleneck remains: every step waits
# for the slowest rank. Section 4 shows how much.
#
# ## 3 · DDP from scratch, in four steps
#
# ### Step 0: start equal
#
# Replicas stay equal because they start equal and take equal steps. So the parameters of rank 0 go
# to all ranks once, buffers too. Before that, the ranks compare names, shapes and types: do they
# hold the same model at all?

# %%
from minidist.errors import MismatchError

torch.manual_seed(100 + rank)  # another initialisation on every rank
model = nn.Linear(4, 2).to(device)
before = [torch.empty_like(model.weight) for _ in range(world_size)]
dist.all_gather(before, model.weight.detach())
check_same_model(model)
broadcast_state(model)
after = [torch.empty_like(model.weight) for _ in range(world_size)]
dist.all_gather(after, model.weight.detach())
try:
    check_same_model(nn.Linear(4, 2 + rank).to(device))
    complaint = ""
except MismatchError as error:
    complaint = str(error)

# %%
# %%rank 0
print(complaint)
display(
    claim("replicas are equal before the broadcast", torch.equal(before[0], before[1]), False),
    claim("... and after it", torch.equal(after[0], after[1]), True),
)

# %% [markdown]
# ### Step 1: one all-reduce per parameter
#
# This is the shortest form. The other three steps compute the same, in less time on most networks.

# %%
# %%rank 0
print(inspect.getsource(average_gradients))

# %% [markdown]
# In the picture at the top it takes longest. Each layer has a weight and a bias: 24 messages. A
# ring all-reduce of B bytes on N ranks takes
# $2\frac{N-1}{N}\cdot\frac{B}{\text{bandwidth}} + 2(N-1)\cdot\text{latency}$, and a bias of 1 kB
# pays the full latency.
#
# ### Step 2: one message
#
# Copy all gradients into one flat tensor, reduce it, copy back (`flat.py` in
# `lib/minidist/parallel/data/`). 24 latencies become one. The network still waits for backward to
# end, and then the GPUs wait for the network.
#
# ### Step 3: during backward
#
# Backward makes the gradient of the *last* layer first. It is final, so why wait? A hook on each
# parameter (`register_post_accumulate_grad_hook`) starts an asynchronous all-reduce when the
# gradient is there, and `finish()` waits for all. While layer 11 travels, layer 10 is computed:
# **overlap**. One detail decides between right and wrong: collectives pair up by the order of the
# calls, so all ranks must launch in **one fixed order**, whatever order their gradients come in.
#
# ### Step 4: buckets
#
# Step 3 has 24 latencies again, and here the network is slower than backward, so they show. Put
# gradients that come after each other into a bucket, and reduce a bucket when it is full:
# few latencies *and* overlap. This is what torch's DDP does
# ([arXiv 2006.15704](https://arxiv.org/abs/2006.15704)).
#
# All four must give the same gradients. Here they are on the two real ranks, beside torch's DDP:


# %%
def run_way(way: str) -> torch.Tensor:
    """The averaged gradient of this rank's half of the batch."""
    model = make_mlp()
    mine = slice(rank * size, (rank + 1) * size)
    wrapped = {
        "overlapped": OverlappedDDP,
        "bucketed": BucketedDDP,
        "torch": DistributedDataParallel,
    }.get(way, lambda m: m)(model)
    mse(wrapped(inputs[mine]), targets[mine]).backward()
    if way == "naive":
        average_gradients(model)
    elif way == "flat":
        average_gradients_flat(model)
    elif way == "overlapped":
        wrapped.finish()
    return gradient(model)


errors = {
    way: float((run_way(way) - whole).norm() / whole.norm())
    for way in ("naive", "flat", "overlapped", "bucketed", "torch")
}

# %%
# %%rank 0
print({way: f"{error:.0e}" for way, error in errors.items()})
bandwidth_s = 2 * 3 / 4 / 1.25e9  # seconds per byte of a ring all-reduce on 4 ranks
latency = 2 * 3 * 50e-6
per_layer = LAYER_BYTES * bandwidth_s + 2 * latency  # weight and bias on their own
expected_ms = {
    "naive": COMPUTE_S + LAYERS * per_layer,
    "flat": COMPUTE_S + P * bandwidth_s + latency,
    # The first all-reduce can start when one layer's backward is over; then the network is busy.
    "overlapped": LAYERS * FORWARD_S + BACKWARD_S + LAYERS * per_layer,
    "bucketed": COMPUTE_S + 2 * LAYER_BYTES * bandwidth_s + latency,  # only the last is exposed
}
display(
    claim(
        "four steps and torch's DDP against one process: largest relative error",
        max(errors.values()),
        ("<", 1e-12),
    ),
    *(
        claim(f"{WAYS[way]}: ms per step", step_ms[way], 1e3 * expected_ms[way], rtol=0.01)
        for way in WAYS
    ),
    claim(
        "each step is faster than the one before",
        list(step_ms.values()) == sorted(step_ms.values(), reverse=True),
        True,
    ),
)

# %% [markdown]
# The formulas in words: step 1 pays compute plus all messages; step 2 pays compute, all bytes and
# one latency; in step 3 the network is slower than backward, so it pays forward, one layer's
# backward and then all messages; step 4 pays compute and the last bucket.
#
# Is it always so? Replay the four programs on another network. The ranks do not run again: a
# recorded trace is enough. Can you find a network on which flat beats overlapped? One on which
# buckets do not help?


# %%
# %%rank 0
def four_ways(gbit: int = 10, latency_us: int = 50):
    """Step time of the four ways on the chosen network."""
    cluster = network(gbit * 1e9 / 8, latency_us * 1e-6)
    bars = {WAYS[w]: 1e3 * last_step_s(emulate.simulate(t, cluster)) for w, t in traces.items()}
    return plot_bars(
        bars,
        xlabel="ms per step (dashed: compute alone)",
        limit=1e3 * COMPUTE_S,
        form="{:.1f}",
        title=f"{gbit} Gbit/s, latency {latency_us} µs",
    )


explore(
    four_ways,
    gbit=[1, 5, 10, 25, 100, 400],
    latency_us=[1, 10, 50, 200, 1000],
    labels={"gbit": "network (Gbit/s)", "latency_us": "latency (µs)"},
    alt="Four bars: time of a step for the four ways to average gradients",
)


# %%
# %%rank 0
def ms_on(way: str, gbit: float, latency_us: float) -> float:
    cluster = network(gbit * 1e9 / 8, latency_us * 1e-6)
    return 1e3 * last_step_s(emulate.simulate(traces[way], cluster))


display(
    claim(
        "latency 1 ms: per-parameter overlap is slower than one flat message",
        ms_on("overlapped", 10, 1000) > ms_on("flat", 10, 1000),
        True,
    ),
    claim(
        "400 Gbit/s and 1 µs: what all four lose to communication, as a share of compute",
        max(ms_on(way, 400, 1) for way in WAYS) / (1e3 * COMPUTE_S) - 1,
        ("<", 0.05),
    ),
)

# %% [markdown]
# ## 4 · Buckets and overlap on a real timeline
#
# Now the two real ranks, recorded by
# [torch's profiler](https://docs.pytorch.org/docs/stable/profiler.html). The model has eight layers
# of 512 × 512, in torch's DDP; buckets take two layers. A communication hook writes down the order
# of events as well.

# %%
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.profiler import ProfilerActivity, profile, record_function

from minidist.profile.timeline import gather_timeline
from minidist.profile.trace import from_profiler

torch.manual_seed(0)
deep = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(device)
diary = []


def reduce_and_note(state, bucket: dist.GradBucket):
    diary.append("bucket")
    return default_hooks.allreduce_hook(state, bucket)


for index, each in enumerate(deep):  # these run before DDP's own hooks
    each.weight.register_post_accumulate_grad_hook(lambda w, index=index: diary.append(index))
ddp = DistributedDataParallel(deep, bucket_cap_mb=2 * (512 * 512 + 512) * 4 / 2**20)
ddp.register_comm_hook(None, reduce_and_note)

# %% [markdown]
# Three steps to settle, and one that is recorded:

# %%
x = torch.randn(256, 512, device=device)


def one_step() -> None:
    ddp.zero_grad()
    ddp(x).square().mean().backward()


for _ in range(3):
    one_step()  # the second step orders the buckets anew
diary.clear()
activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
with profile(activities=activities) as profiler, record_function("step"):
    one_step()
    if device.type == "cuda":
        torch.cuda.synchronize()
recorded = gather_timeline(from_profiler(profiler, step="step"))

# %%
# %%rank 0
window = recorded.windows(0)[0]
rows = [
    sorted(recorded.of(r, "compute", "communication"), key=lambda s: s.start_s)
    for r in range(world_size)
]
shown = SimpleNamespace(world_size=world_size, intervals=rows, makespan_s=window.end_s)
print("layer whose gradient arrived, or bucket launched:", *diary)
plot_timeline(
    shown,
    start_s=window.start_s,
    end_s=window.end_s,
    title="DDP on two real processes: all-reduces run beside backward",
)

# %% [markdown]
# White lines separate operators. The orange stretches contain the wait for the other rank, and two
# processes on one machine disturb each other, so do not read milliseconds off this figure. Read its
# *shape*: the network starts in the middle of backward. The order of events does not depend on the
# machine, so it can be checked:

# %%
# %%rank 0
first_launch = diary.index("bucket")
display(
    claim(
        "gradients arrive from the last layer to the first",
        [entry for entry in diary if entry != "bucket"],
        [7, 6, 5, 4, 3, 2, 1, 0],
    ),
    claim("buckets launched", diary.count("bucket"), 4),
    claim(
        "gradients that arrive after the first bucket was launched",
        sum(entry != "bucket" for entry in diary[first_launch:]),
        6,
    ),
    claim(
        "all-reduces in the profile of one step, at least",
        sum(recorded.collectives(0, window).values()),
        (">=", 4),
    ),
)

# %% [markdown]
# ### How large should a bucket be?
#
# A large bucket pays few latencies and starts late. A small one starts early and pays many. To try
# many sizes we write down what DDP does as a trace by hand, and check it against the run above. The
# model is a transformer of 70 million parameters, cut into 48 equal layers of 5.6 MiB, with 29 ms
# of compute per step. Torch's default is 25 MiB.

# %%
# %%rank 0
bucket_guess = predict("8 GPUs, 32 GB/s, latency 50 µs: the best bucket?", guess=None, unit="MiB")
bucket_guess

# %% [markdown]
# We try ten sizes, at three latencies.


# %%
# %%rank 0
def ddp_trace(n: int, layers: int, layer_bytes: float, per_bucket: int, forward_s, backward_s):
    """What N ranks of bucketed DDP do in a step: compute, issue a bucket, wait at the end."""
    Event, events = emulate.Event, []
    for _ in range(n):
        todo = [Event(kind="compute", name="forward", duration_s=forward_s, step=0)] * layers
        waits = []
        for first in range(0, layers, per_bucket):
            count = min(per_bucket, layers - first)
            todo += [Event(kind="compute", name="backward", duration_s=backward_s)] * count
            todo.append(
                Event(
                    kind="issue",
                    key=f"b{first:04}",
                    collective="all_reduce",
                    group="dp",
                    ranks=tuple(range(n)),
                    nbytes=round(count * layer_bytes),
                )
            )
            waits.append(Event(kind="wait", key=f"b{first:04}", name="all_reduce"))
        events.append(todo + waits)
    return emulate.Trace(world_size=n, events=events)


def written_ms(cluster, per_bucket: int, n: int = 4) -> float:
    trace = ddp_trace(n, LAYERS, LAYER_BYTES, per_bucket, FORWARD_S, BACKWARD_S)
    return 1e3 * emulate.simulate(trace, cluster).makespan_s


benchmark = 2 * 50257 * 512 + 512 * 512 + 6 * (12 * 512**2 + 13 * 512)  # parameters
per_bucket = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]


def benchmark_ms(latency_s: float, count: int) -> float:
    trace = ddp_trace(8, 48, benchmark * 4 / 48, count, 0.2e-3, 0.4e-3)
    return 1e3 * emulate.simulate(trace, network(32e9, latency_s)).makespan_s


curves = {
    f"latency {us} µs": [benchmark_ms(us * 1e-6, k) for k in per_bucket] for us in (10, 50, 200)
}
plot_lines(
    per_bucket,
    curves,
    xlabel="layers per bucket (5.6 MiB each)",
    ylabel="ms per step",
    logx=True,
    title="Not the smallest, not the largest (8 GPUs, 32 GB/s)",
    ticks=per_bucket,
    ideal={"compute alone": [48 * 0.6] * len(per_bucket)},
)

# %%
# %%rank 0
best = {name: per_bucket[int(np.argmin(curve))] for name, curve in curves.items()}
layer_mib = benchmark * 4 / 48 / 2**20
best_mib = [k * layer_mib for k in best.values()]
print("best bucket, MiB:", {name: round(k * layer_mib) for name, k in best.items()})
display(
    bucket_guess.reveal(round(best_mib[1])),
    claim(
        "the written trace takes as long as torch's DDP on real ranks, ms",
        written_ms(ETHERNET, 2),
        1e3 * last_step_s(ring[4]),
        rtol=1e-6,
    ),
    claim(
        "the best bucket is neither the smallest nor the largest",
        all(1 < k < 48 for k in best.values()),
        True,
        why="a large bucket exposes its own transfer at the end; the curve falls and rises again",
    ),
    claim(
        "the best bucket with latencies of 10, 50 and 200 µs per step of the ring, MiB",
        best_mib,
        [11.2, 44.9, 89.8],
        rtol=0.005,
    ),
    claim(
        "50 µs: what buckets of 22 MiB (torch's default: 25) cost against the best, % of the step",
        100 * (benchmark_ms(50e-6, 4) / min(curves["latency 50 µs"]) - 1),
        8.0,
        rtol=0.01,
    ),
    claim(
        "torch's bucket_cap_mb by default, MiB (the first bucket is 1 MiB)",
        25,
        status="cited",
        authority="documentation of torch.nn.parallel.DistributedDataParallel",
    ),
    claim(
        "parameters of a benchmark transformer (6 layers, width 512), million",
        benchmark / 1e6,
        70.6,
        rtol=0.002,
    ),
    claim(
        "its gradients in fp32 fill this many buckets of 25 MiB, at least",
        math.ceil(benchmark * 4 / (25 * 2**20)),
        11,
    ),
)

# %% [markdown]
# A bucket's all-reduce should take no longer than the backward pass of the next bucket: then only
# the last bucket is exposed, and it should be small. So a long latency asks for large buckets; a
# long backward pass or fast links allow small ones. The advice to try 50 or 100 MB fits where a
# collective starts slowly: over a network, or with many ranks. At 10 µs 11 MiB is best.
#
# Move the slider and watch what is left on the right when backward has ended.


# %%
# %%rank 0
NETWORKS = {
    "NVLink, 300 GB/s, 3 µs": network(300e9, 3.4e-6),
    "PCIe 4.0, 32 GB/s, 6 µs": network(32e9, 5.7e-6),
    "100 Gbit/s, 10 µs": network(12.5e9, 9.6e-6),
    "25 Gbit/s, 50 µs": network(3.1e9, 50e-6),
}


def bucket_explorer(layers: int = 4, gpus: int = 4, net: str = "PCIe 4.0, 32 GB/s, 6 µs"):
    """Timeline of one DDP step with the chosen bucket size, and how much of it is compute."""
    trace = ddp_trace(gpus, 48, benchmark * 4 / 48, layers, 0.2e-3, 0.4e-3)
    timeline = emulate.simulate(trace, NETWORKS[net])
    size_mib = layers * benchmark * 4 / 48 / 2**20
    title = (
        f"buckets of {size_mib:.0f} MiB on {gpus} GPUs: {1e3 * timeline.makespan_s:.1f} ms, "
        f"{100 * timeline.efficiency:.0f} % compute"
    )
    return plot_timeline(
        replace(timeline, world_size=1, intervals=timeline.intervals[:1]), title=title
    )


explore(
    bucket_explorer,
    layers=(1, 48),
    gpus=[2, 4, 8, 32],
    net=list(NETWORKS),
    labels={"layers": "layers per bucket (5.6 MiB each)", "gpus": "GPUs", "net": "network"},
    alt="Timeline of a rank: compute above, all-reduces of buckets below, idle time in grey",
)

# %% [markdown]
# ### One slow rank
#
# An all-reduce cannot end before the last rank has joined. So one rank that computes slower (a hot
# GPU, a busy host, longer sequences) slows all of them. More ranks make it more likely.

# %%
# %%rank 0
straggler_guess = predict(
    "One of 4 ranks computes 1.5 x slower: how much longer is everybody's step?",
    guess=None,
    unit="%",
)
straggler_guess

# %% [markdown]
# Does overlap hide a part of it?


# %%
# %%rank 0
def with_straggler(slowness: float) -> emulate.Timeline:
    """One DDP step of four ranks, of which rank 2 computes slower."""
    trace = ddp_trace(4, LAYERS, LAYER_BYTES, 2, FORWARD_S, BACKWARD_S)
    trace.events[2] = [
        replace(e, duration_s=slowness * e.duration_s) if e.kind == "compute" else e
        for e in trace.events[2]
    ]
    return emulate.simulate(trace, ETHERNET)


even_s, slow_s = (with_straggler(slowness).makespan_s for slowness in (1.0, 1.5))
busy_s = sum(i.end_s - i.start_s for i in with_straggler(1.5).intervals[0] if i.kind == "compute")
display(
    straggler_guess.reveal(100 * (slow_s / even_s - 1)),
    claim(
        "one of 4 ranks is 1.5 x slower: time added to everybody's step / its extra compute",
        (slow_s - even_s) / (0.5 * COMPUTE_S),
        1.0,
        rtol=1e-9,
    ),
    claim(
        "share of this longer step in which a rank that is not slow computes",
        busy_s / slow_s,
        COMPUTE_S / (even_s + 0.5 * COMPUTE_S),
        rtol=1e-9,
    ),
)
plot_timeline(with_straggler(1.5), title="Rank 2 is slow, and everybody waits")

# %% [markdown]
# Overlap hides none of it: the whole extra compute shows in everybody's step.
#
# [torch's DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html) has the same parts under other
# names. `minidist.parallel.data.DDPOptions` says each option in a line:
#
# | option or method of `DistributedDataParallel` | what it does | when |
# |---|---|---|
# | `bucket_cap_mb=25` | bucket size | tune on slow networks |
# | `gradient_as_bucket_view=True` | `p.grad` is a view of the bucket | saves memory and a copy |
# | `find_unused_parameters=True` | looks for parameters without gradient | skipped branches |
# | `static_graph=True` | every step uses the same parameters | with checkpointing |
# | `forward_sync_buffers=True` | before a forward, buffers become those of rank 0 | default |
# | `no_sync()` | leave gradients local | accumulation (lecture 4) |
#
# Before torch 2.13 `forward_sync_buffers` was called `broadcast_buffers`. The first step of DDP
# uses a guessed order of parameters. The second step begins with new buckets, in the order in which
# gradients really came. So leave the first two steps out when you measure.
#
# **Clipping** comes after backward, when all ranks hold the same mean gradients: every rank
# computes the same norm and nothing needs to be sent.

# %%
clipped = DistributedDataParallel(make_mlp())
mine = slice(rank * size, (rank + 1) * size)
mse(clipped(inputs[mine]), targets[mine]).backward()
norm = clip_grad_norm(clipped.parameters(), max_norm=0.01)
norms = [None] * world_size
dist.all_gather_object(norms, float(norm))

# %%
# %%rank 0
display(
    claim("every rank computed the same norm", norms[1], norms[0], exact=True),
    claim(
        "... which is that of the joint batch's gradient", norms[0], float(whole.norm()), rtol=1e-9
    ),
)

# %% [markdown]
# ## 5 · Which samples does a rank see?
#
# The ranks must cut one epoch into disjoint parts. `DistributedSampler`
# ([torch's](https://docs.pytorch.org/docs/stable/data.html) and ours) draws **one** order of the
# whole data set, the same on all ranks (seed + epoch, so nothing is sent), and rank r takes every
# N-th index from r on. Three things to decide or remember:
#
# - the **tail**: if N does not divide the number of samples, either some samples come twice (pad,
#   torch's default), or some never (drop), or ranks get unequal numbers (uneven, for validation);
# - `set_epoch(epoch)` before each epoch, or every epoch has the same order;
# - only data-parallel ranks get different samples; ranks that share a model (tensor, pipeline) must
#   see the same ones.


# %%
# %%rank 0
def sampler_explorer(
    samples: int = 11, ranks: int = 4, tail: str = "pad", shuffle: bool = False, epoch: int = 0
):
    """Which sample each rank sees at which position; samples that come twice are orange."""
    figure, ax = new_figure(7.5, 0.9 + 0.38 * ranks)
    seen = set()
    parts = []
    for r in range(ranks):
        drop = tail == "drop"
        sampler = DistributedSampler(range(samples), ranks, r, shuffle=shuffle, drop_last=drop)
        sampler.set_epoch(epoch)
        part = list(sampler)
        parts.append(part[: math.ceil((samples - r) / ranks)] if tail == "uneven" else part)
    for column in range(max(map(len, parts))):
        for r, part in enumerate(parts):
            if column < len(part):
                again = part[column] in seen
                seen.add(part[column])
                colour = COLOURS["communication" if again else "backward"]
                ax.barh(r, 0.94, left=column, height=0.86, color=colour)
                ax.text(column + 0.47, r, part[column], ha="center", va="center")
    never = samples - len(seen)
    ax.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
    ax.invert_yaxis()
    ax.set(xlabel="position in the rank's epoch", xticks=[])
    ax.set_title(
        f"{samples} samples, tail = {tail}: {sum(map(len, parts)) - len(seen)} twice, "
        f"{never} never",
        loc="left",
        fontweight="bold",
    )
    return figure


explore(
    sampler_explorer,
    samples=(1, 40),
    ranks=(1, 8),
    tail=["pad", "drop", "uneven"],
    shuffle=True,
    epoch=(0, 5),
    labels={
        "samples": "samples in the data set",
        "ranks": "ranks N",
        "tail": "tail",
        "shuffle": "shuffle",
        "epoch": "epoch given to set_epoch",
    },
    alt="A grid: one row per rank with the numbers of its samples; repeated samples in orange",
)

# %% [markdown]
# What happens without it? The usual mistake is a plain `DataLoader(shuffle=True)` on every rank. It
# walks through the whole data set on every rank, so an "epoch" is N epochs of work. And its order
# comes from torch's default generator. A script often seeds all ranks alike, to build the same
# model on each.

# %%
# %%rank 0
shared_guess = predict(
    "No sampler, the same seed: of a batch of 32, how many samples do two ranks share?", guess=None
)
shared_guess

# %% [markdown]
# Both ranks of this notebook draw a batch, first with the same seed, then with a seed each.

# %%
from torch.utils.data import DataLoader


def plain_loader(seed: int) -> tuple[list[int], int]:
    """First batch of a DataLoader without a sampler, and its steps per epoch."""
    torch.manual_seed(seed)
    loader = DataLoader(range(1000), batch_size=32, shuffle=True)
    return next(iter(loader)).tolist(), len(loader)


drawn = [None] * world_size
dist.all_gather_object(drawn, (plain_loader(42), plain_loader(42 + rank)))

# %%
# %%rank 0
N, NUM, BATCH = 4, 1000, 32
alike, apart = ([batch for batch, _ in each] for each in zip(*drawn, strict=True))
samplers = [DistributedSampler(range(NUM), N, r) for r in range(N)]
epochs = []
for epoch in (0, 0, 1):  # as if set_epoch had been forgotten, then with it
    samplers[0].set_epoch(epoch)
    epochs.append(list(samplers[0]))
dealt = [list(sampler) for sampler in samplers]
display(
    shared_guess.reveal(len(set(alike[0]) & set(alike[1]))),
    claim(
        "no sampler, one seed: all ranks draw the same batch",
        all(batch == alike[0] for batch in alike),
        True,
    ),
    claim(
        "no sampler, a seed each: samples of a batch of 32 that ranks 0 and 1 share",
        len(set(apart[0]) & set(apart[1])),
        ("<", 8),
    ),
    claim(
        "steps of an epoch without a sampler / with one on 4 ranks",
        drawn[0][0][1] / math.ceil(len(dealt[1]) / BATCH),
        4.0,
        rtol=1e-9,
    ),
    claim("with it: samples that two ranks share", len(set(dealt[1]) & set(dealt[2])), 0),
    claim("steps per epoch: 1000 samples, 4 ranks, batch 32", math.ceil(len(dealt[1]) / BATCH), 8),
    claim("without set_epoch two epochs have the same order", epochs[0] == epochs[1], True),
    claim("... and with set_epoch", epochs[0] == epochs[2], False),
)


# %% [markdown]
# With one seed N GPUs compute one gradient N times. With a seed each, the batches of a step overlap
# by chance, and an epoch still takes N times the steps. The sampler repairs both, and then the
# steps of an epoch can be computed:


# %%
# %%rank 0
def steps_per_epoch(num: int, ranks: int, batch: int, drop: bool) -> int:
    part = len(DistributedSampler(range(num), ranks, rank=0, drop_last=drop))
    return part // batch if drop else math.ceil(part / batch)


display(
    claim(
        "10,000 samples, 4 ranks, batch 32: steps with padding and with drop_last",
        [steps_per_epoch(10_000, 4, 32, drop) for drop in (False, True)],
        [79, 78],
    ),
    claim("8,192 samples, 4 ranks, batch 32: steps", steps_per_epoch(8192, 4, 32, False), 64),
    claim(
        "32 sequences of 256 tokens: tokens per GPU and step",
        cost.tokens_per_step(micro_batch=32, context=256),
        8192,
        rtol=1e-12,
    ),
)

# %% [markdown]
# `minidist.sampler.make_loader` has sound settings for the loader itself: workers per rank (all
# ranks of a node share its cores), `persistent_workers`, `pin_memory` with `non_blocking=True`
# copies, `drop_last` in training. Whether loading is your bottleneck is a question for lecture 11:
# a loop that times only the copy to the GPU never sees the loader.
#
# ### Seeds
#
# Two kinds of random numbers: initial weights must be the **same** on all ranks (or broadcast),
# dropout and augmentation must be **different**. One seed for both is wrong either way. So seed
# twice.

# %%
from minidist.seeding import seed_all

seed_all(42)  # the same everywhere: build the model
net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
same_mask = net[1](torch.ones(64)) != 0
seed_all(42, rank)  # from here on every rank draws its own
own_mask = net[1](torch.ones(64)) != 0
views = [None] * world_size
dist.all_gather_object(views, (net[0].weight.detach(), same_mask, own_mask))

# %%
# %%rank 0
display(
    claim("initial weights agree", torch.equal(views[0][0], views[1][0]), True),
    claim(
        "one seed everywhere: both ranks drop the same neurons",
        torch.equal(views[0][1], views[1][1]),
        True,
    ),
    claim(
        "seeded again with the rank: the masks are the same",
        torch.equal(views[0][2], views[1][2]),
        False,
        why="first one seed for the initialisation, then one per rank; seed + rank before it "
        "starts every rank elsewhere, which only a broadcast repairs",
    ),
)

# %% [markdown]
# ## 6 · BatchNorm
#
# Nearly every layer treats samples one by one, so cutting the batch changes nothing. BatchNorm does
# not: it normalises with mean and variance *of the batch*, and each rank has its own batch. With
# two images per rank those are very noisy, and training on N ranks is no longer training with the
# joint batch. **SyncBatchNorm** computes the statistics over all ranks, and its backward pass sums
# over all ranks too.
# [torch's](https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html)
# `nn.SyncBatchNorm.convert_sync_batchnorm` works on GPUs only; ours works anywhere.


# %%
def batch_norm_gradient(sync: bool, joint: bool, num: int = 4):
    """Output and input gradient of BatchNorm for this rank's half of a batch, or the whole."""
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(3).double().to(device)
    x = torch.randn(num, 3, dtype=torch.float64) * torch.linspace(0.5, 2, num)[:, None]
    goal = torch.randn(num, 3, dtype=torch.float64).to(device)
    mine = slice(None) if joint else slice(rank * num // 2, (rank + 1) * num // 2)
    if sync:
        norm = convert_sync_batch_norm(norm)
    x = x.to(device)[mine].requires_grad_()
    y = norm(x)
    ((y - goal[mine]) ** 2).sum().backward()
    return [y.detach()[: num // 2], x.grad[: num // 2]]


results = {
    name: batch_norm_gradient(**how)
    for name, how in {
        "one process": {"sync": False, "joint": True},
        "plain": {"sync": False, "joint": False},
        "sync": {"sync": True, "joint": False},
    }.items()
}


# %%
# %%rank 0
def differences(name: str) -> list[float]:
    return [
        float((a - b).abs().max())
        for a, b in zip(results[name], results["one process"], strict=True)
    ]


generator = torch.Generator().manual_seed(0)
local = (2, 4, 8, 16, 32, 64, 128)
noise = [
    float(torch.randn(2000, b, generator=generator).var(1, unbiased=False).std()) for b in local
]
display(
    claim(
        "plain BatchNorm on 2 + 2 samples: output and gradient differ from 4 samples by",
        differences("plain"),
        (">", 0.05),
    ),
    claim("SyncBatchNorm: output and gradient differ by", differences("sync"), ("<", 1e-9)),
    claim("spread of the variance with 128 samples against 2", noise[-1] / noise[0], ("<", 0.25)),
)
plot_lines(
    local,
    {"spread": noise},
    xlabel="samples per rank",
    ylabel="std of the batch variance",
    logx=True,
    ticks=local,
    title="Batch variance of standard normal data: noisy for small batches",
)

# %% [markdown]
# Use it when local batches are small (detection, segmentation, video). It costs two more
# collectives per layer, in the midst of forward and backward. LayerNorm and RMSNorm, which language
# models use, have no such problem.
#
# ## 7 · Validation and metrics
#
# The ranks share the work in validation too. Two things go wrong there: padding counts some samples
# twice, and the mean of the ranks' means is wrong if the ranks have different numbers of samples.
# The right way: each sample once (an uneven tail), and every metric is a **sum** and a **count**,
# reduced once at the end.

# %%
from torch.utils.data import DistributedSampler

from minidist.metrics import WeightedMean, reduce_metrics

torch.manual_seed(1)
losses = torch.rand(7, dtype=torch.float64)  # the loss of each of 7 validation samples
own = list(range(rank, 7, world_size))
padded = list(DistributedSampler(range(7), world_size, rank, shuffle=False))

metric = WeightedMean()
for index in own:
    metric.update(losses[index], weight=1)
right = reduce_metrics({"loss": metric})["loss"]  # one all-reduce, on every rank


def mean_of_means(indices: list[int]) -> float:
    mean = losses[indices].mean().to(device)
    dist.all_reduce(mean)
    return float(mean) / world_size


wrong = {"mean of means": mean_of_means(own), "padded": mean_of_means(padded)}

# %%
# %%rank 0
true_loss = float(losses.mean())
display(
    claim("validation loss of 7 samples on 2 ranks, sums and counts", right, true_loss, rtol=1e-12),
    claim("error of the mean of means", abs(wrong["mean of means"] - true_loss), (">", 1e-3)),
    claim("error with a padded sample", abs(wrong["padded"] - true_loss), (">", 1e-3)),
)

# %% [markdown]
# Print on rank 0 only (`minidist.metrics.log0`), but **reduce on all ranks**: an all-reduce inside
# `if rank == 0` waits for a partner, or takes a wrong one (section 9). And a printed `loss.item()`
# is the loss of this rank's samples, not of the batch.
#
# ## 8 · Checkpoints
#
# All replicas are equal, so one rank writes: rank 0. Four rules:
#
# - save the *inner* module: the wrapper's names begin with `module.`, and a plain model does not
#   know them;
# - write to a temporary name, then rename: a job that dies while it writes must not leave half a
#   file;
# - a barrier (or any collective) after writing, before another rank reads;
# - save what training needs to go on: optimizer, scheduler, step, sampler position, and each rank's
#   own random state.
#
# `minidist.checkpoint.Checkpoints` does these. We test it: train four steps; train two, save,
# forget everything, load and train two more.

# %%
import shutil
import tempfile

from minidist.checkpoint import Checkpoints

kernels = os.environ.get("MINIDIST_RUN_DIR")  # a folder that goes when the kernel ends
box = [tempfile.mkdtemp(dir=kernels) if rank == 0 else None]
dist.broadcast_object_list(box)
folder = box[0]


def train(first: int, last: int, checkpoints=None) -> DistributedDataParallel:
    """Steps first … last - 1 with Adam; goes on from a checkpoint if there is one."""
    ddp = DistributedDataParallel(make_mlp())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    state = {"model": ddp.module, "optimizer": optimizer}
    if checkpoints and first:
        assert checkpoints.load(shared=state) == first
    for _ in range(first, last):
        optimizer.zero_grad()
        mse(ddp(inputs[mine]), targets[mine]).backward()
        optimizer.step()
    if checkpoints:
        checkpoints.save(last, shared=state)
    return ddp


straight = train(0, 4)
checkpoints = Checkpoints(folder)
train(0, 2, checkpoints)
resumed = train(2, 4, checkpoints)


# %% [markdown]
# The weights of both must agree. And we look at the names that a wrapper gives:


# %%
def flat_weights(ddp) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in ddp.module.parameters()])


agree = torch.equal(flat_weights(straight), flat_weights(resumed))
wrapper_keys = list(DistributedDataParallel(make_mlp()).state_dict())
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)
try:
    make_mlp().load_state_dict(dict.fromkeys(wrapper_keys))
    refusal = ""
except RuntimeError as error:
    refusal = str(error)

# %%
# %%rank 0
print(refusal[:170], "...")
display(
    claim("resumed training gives the weights of uninterrupted training, bit for bit", agree, True),
    claim(
        "keys of the wrapper begin with",
        " and ".join({key.split(".")[0] for key in wrapper_keys}),
        "module",
    ),
    claim("a plain model refuses them", "Missing key" in refusal, True),
)

# %% [markdown]
# When you load with plain
# [`torch.load`](https://docs.pytorch.org/docs/stable/generated/torch.load.html), give
# `map_location="cpu"` (or this rank's device): a file written by rank 0 remembers `cuda:0`, and all
# ranks of a node would load into that GPU.
#
# ## 9 · Broken live, then mended
#
# Each cell below starts two fresh processes with `minidist.launch.run`, so that a hang costs
# seconds and not your kernel.
#
# ### A collective that not every rank calls
#
# "Average the loss for printing" inside `if rank == 0`. Afterwards training goes on, and the next
# collective is the gradient's. The losses are 10 and 11, the gradients 1 and 2, so that their sum
# is 3.

# %%
# %%rank 0
paired_guess = predict("Only rank 0 reduces the loss: which gradient does rank 1 get?", guess=None)
paired_guess

# %% [markdown]
# Two ranks try it, with a timeout of two seconds.


# %%
# %%rank 0
from minidist.launch import run


def on_two_ranks(program, mended: bool) -> list:
    """One result per rank. The broken programs below use gloo and the CPU also where there are
    GPUs: gloo's timeout is an exception that can be shown, NCCL's watchdog ends the process."""
    return run(program, 2, mended, deadline_s=30)


# %%
# %%rank 0
def log_on_rank_0(mended: bool):
    import time

    dist.init_process_group("gloo")
    group, rank = dist.new_group(timeout=timedelta(seconds=2)), dist.get_rank()
    loss, grad = torch.tensor([10.0 + rank]), torch.tensor([1.0 + rank])
    try:
        if mended or rank == 0:
            dist.all_reduce(loss, group=group)
        dist.all_reduce(grad, group=group)  # the gradients of the next step
    except RuntimeError as error:
        return f"rank {rank}: {str(error).split(']')[-1].strip()[:60]}"
    time.sleep(0 if mended else 3)
    return grad.item()


broken = on_two_ranks(log_on_rank_0, False)
mended = on_two_ranks(log_on_rank_0, True)
print("broken:", *broken, sep="\n  ")
display(
    paired_guess.reveal(broken[1]),
    claim("rank 0 times out", isinstance(broken[0], str), True),
    claim(
        "rank 1 goes on, with loss + gradient of two steps added up",
        broken[1],
        10.0 + 2.0,
        exact=True,
    ),
    claim(
        "mended: every rank reduces, one prints; gradient sum on both",
        mended,
        [3.0, 3.0],
        exact=True,
    ),
)

# %% [markdown]
# Rank 1 did not hang: its gradient was paired with rank 0's *loss*, and it would have taken a step
# with 12 in place of 3. Collectives have no names. They pair by order.
#
# ### More batches on one rank than on the other
#
# Rank 0 has three batches, rank 1 two. In the third step rank 0's all-reduce waits for a partner
# that has left the loop. Mend it with equal numbers (`drop_last=True` for sampler and loader), or
# with a `Join` block, in which a rank without data answers with zeros (ours:
# `minidist.parallel.data.join`).


# %%
# %%rank 0
def uneven_batches(mended: bool):
    import contextlib
    import time

    from torch.distributed.algorithms.join import Join

    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(seconds=2))
    ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
    steps = 0
    try:
        with Join([ddp]) if mended else contextlib.nullcontext():
            for _ in range(3 - dist.get_rank()):
                ddp(torch.ones(1, 2)).sum().backward()
                steps += 1
    except RuntimeError as error:
        return f"stopped after {steps} steps: {str(error).split(']')[-1].strip()[:60]}"
    time.sleep(0 if mended else 3)
    return f"{steps} steps"


broken = on_two_ranks(uneven_batches, False)
mended = on_two_ranks(uneven_batches, True)
print("broken:", broken, "\nmended:", mended)
display(
    claim("broken: rank 0 is stopped in its third step", "stopped after 2" in broken[0], True),
    claim("mended: both ranks leave the loop", mended == ["3 steps", "2 steps"], True),
)

# %% [markdown]
# ### A parameter that gets no gradient
#
# A layer that forward does not use: its gradient never comes, its bucket never fills. torch's DDP
# notices in the *next* step. `find_unused_parameters=True` mends it, and costs a walk over the
# graph.


# %%
# %%rank 0
class Detour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def unused_parameter(mended: bool):
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(Detour(), find_unused_parameters=mended)
    for step in range(3):
        try:
            ddp(torch.ones(1, 2)).sum().backward()
        except RuntimeError as error:
            return f"step {step}: {str(error).split('.')[0]}"
    return "3 steps"


broken = on_two_ranks(unused_parameter, False)
mended = on_two_ranks(unused_parameter, True)
print(broken[0])
display(
    claim("step in which torch's DDP complains", int(broken[0].split(":")[0][-1]), 1),
    claim("with find_unused_parameters", mended == ["3 steps", "3 steps"], True),
)

# %% [markdown]
# ### Around the wrapper
#
# `ddp.module(x)` works, trains, and prints a falling loss. But DDP prepares its reduction in *its*
# forward. Called around it, gradients stay local and the replicas drift apart in silence.


# %%
# %%rank 0
def around_the_wrapper(mended: bool):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    call = ddp if mended else ddp.module
    call(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    return ddp.module.weight.grad[0, 0].item()


display(
    claim(
        "gradient on ranks 0 and 1 after ddp.module(x)",
        on_two_ranks(around_the_wrapper, False),
        [1.0, 2.0],
        exact=True,
    ),
    claim("... after ddp(x)", on_two_ranks(around_the_wrapper, True), [1.5, 1.5], exact=True),
)

# %% [markdown]
# ### A script with four bugs
#
# A popular exercise has a script like this one and says that it has three bugs. Find them before
# you open the answer. There is a fourth.
#
# ```python
# dist.init_process_group("nccl")
# gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
# net = DDP(nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).to(gpu))
# sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
# images, labels = torch.rand(6_000, 1, 28, 28), torch.randint(10, [6_000])
# for image, label in 5 * [*DataLoader([*zip(images, labels)], 50, shuffle=True)]:
#     loss = F.cross_entropy(net(image.to(gpu)), label.to(gpu))
#     loss.backward()
#     sgd.step()
# if dist.get_rank() == 0:
#     torch.save(net.state_dict(), "digits.pt")
# ```
#
# <details><summary>Answer</summary>
#
# 1. No `DistributedSampler` (and so no `set_epoch`): every rank walks through all samples. And the
#    list of batches is drawn once, so that all five epochs have the same order.
# 2. No `sgd.zero_grad()`: gradients of all steps add up. DDP makes it neither better nor worse:
#    what is left from the step before is the same on every rank, so its mean is itself.
# 3. `net.state_dict()`: names with `module.`.
# 4. `torch.rand` without a common seed: each rank *makes its own data set*. A sampler then deals
#    out indices of N different data sets.
#
# </details>

# %%
torch.manual_seed(1000 + rank)  # what a fresh process does: its own random state
own_data = torch.randn(1000, 256)
fingerprints = [None] * world_size
dist.all_gather_object(fingerprints, float(own_data.sum()))
accumulated = make_mlp()
for _ in range(3):  # no zero_grad
    mse(accumulated(inputs), targets).backward()

# %%
# %%rank 0
bugs = [
    drawn[0][0][1] * BATCH * N > 2 * NUM,  # an epoch processes more samples than there are
    float(gradient(accumulated).norm() / whole.norm()) > 1.5,  # gradients pile up
    all(key.startswith("module.") for key in wrapper_keys),  # a plain model refuses them
    fingerprints[0] != fingerprints[1],  # the ranks hold different data sets
]
display(
    claim(
        "bugs that show",
        sum(bugs),
        4,
        status="corrected",
        said=3,
        refutes="a common exercise",
        why="every rank also draws a random data set of its own",
    ),
    claim(
        "gradient after three backwards without zero_grad, in gradients",
        float(gradient(accumulated).norm() / whole.norm()),
        3.0,
        rtol=1e-9,
    ),
)

# %% [markdown]
# ## 10 · What it costs, measured rightly
#
# A common way to measure "communication overhead": time training steps with DDP, time them with the
# plain model, subtract. The difference is the **exposed** communication. It is what you lose, but
# not how long the network works: the exposed part can be small while the network works for most of
# the step. On the emulated cluster both are known exactly.

# %%
# %%rank 0
from minidist.profile.overlap import shares
from minidist.profile.timeline import Window, from_emulated

parts = {}
for way, timeline in timelines.items():
    step = timeline.steps[-1]
    part = Window(rank=0, name=way, start_s=step.start_s, end_s=step.end_s)
    parts[way] = shares(from_emulated(timeline), part)
subtracted = {way: step_ms[way] - 1e3 * COMPUTE_S for way in WAYS}
one_gpu = 32 / COMPUTE_S  # samples per second with 32 samples per step
four_gpus = 4 * 32 / (step_ms["bucketed"] / 1e3)
display(
    claim(
        "step with DDP minus step without is the exposed communication, ms",
        list(subtracted.values()),
        [1e3 * p.exposed_s for p in parts.values()],
        rtol=1e-6,
    ),
    claim(
        "bucketed: share of the network's time that is hidden",
        parts["bucketed"].overlap_fraction,
        (">", 0.8),
    ),
    claim(
        "scaling efficiency of the bucketed one on 4 GPUs, from samples per second",
        cost.throughput_efficiency(rate_one=one_gpu, rate_n=four_gpus, num_gpus=4),
        parts["bucketed"].utilization,
        rtol=1e-6,
    ),
)

# %% [markdown]
# Real measurements, warm-up and what to do about the loss are the subject of lecture 11.
#
# ### How to start it all
#
# ```bash
# torchrun --standalone --nproc-per-node 4 train.py        # one machine
# ```
#
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) starts the **script** once per
# rank and sets `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and the address to meet at. In the program
# `init_process_group("nccl")` reads them, and `torch.cuda.set_device(LOCAL_RANK)` takes the GPU.
# (`torch.distributed.launch` is its deprecated predecessor. Several machines: lecture 10.)
#
# [`mp.spawn`](https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses)
# starts ranks from inside a program: `mp.spawn(train, args, nprocs=4)` calls the **function**
# `train(rank, *args)` in four new processes of this machine.

# %%
# %%rank 0
found_guess = predict(
    "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: how many does a spawned rank find?", guess=None
)
found_guess

# %% [markdown]
# We start one script both ways. In it rank 1 is killed after an all-reduce, as Linux kills a
# process when memory runs out.

# %%
# %%rank 0
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from minidist.launch import free_port

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def say(text):                       # in one write, so that the lines of two ranks do not mix
    os.write(1, f"{text}\\n".encode())

def look():
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    say(f"found {sum(name in os.environ for name in names)}")

def work():
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    say(f"sum {total.item():.0f}")
    if dist.get_rank() == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)

def train(rank, world_size, port):   # a spawned rank gets its number; all else is ours to tell
    look()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    work()

if __name__ == "__main__":           # spawn imports this file again in every rank
    if "spawn" in sys.argv:
        mp.spawn(train, args=(2, int(sys.argv[2])), nprocs=2)
    else:
        look()
        dist.init_process_group("gloo")
        work()
"""
# This notebook runs under a torchrun itself; its variables must not reach the new ranks.
INHERITED = ("TORCHELASTIC", "TORCH_", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_", "MASTER_")
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED)}


def start(*words: str) -> subprocess.CompletedProcess:
    """Run the script in a folder of its own until all of its ranks have ended."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.py").write_text(SCRIPT)
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=CLEAN | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


ended = {"spawn": start("job.py", "spawn", str(free_port()))}
last_words = {"spawn": ended["spawn"].stderr.strip().splitlines()[-1]}
print(last_words["spawn"])

# %% [markdown]
# The parent ends with this exception. And the script under torchrun:

# %%
# %%rank 0
torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ended["torchrun"] = start(*torchrun, "job.py")
last_words["torchrun"] = ended["torchrun"].stderr.partition("Root Cause")[2]
print("Root Cause" + last_words["torchrun"].rstrip())

# %%
# %%rank 0
found = {way: [w for w in ended[way].stdout.splitlines() if "found" in w] for way in ended}
sums = {way: [w for w in ended[way].stdout.splitlines() if "sum" in w] for way in ended}
rows = [line.split(" : ") for line in last_words["torchrun"].splitlines() if " : " in line]
blamed = ", ".join(text for name, text in rows if name.strip() in ("rank", "traceback"))
display(
    found_guess.reveal(int(found["spawn"][0].split()[1])),
    claim("spawn: what each rank finds of the four", " ".join(found["spawn"]), "found 0 found 0"),
    claim("torchrun: what each finds", " ".join(found["torchrun"]), "found 4 found 4"),
    claim(
        "both ways make a process group: sum of the ranks",
        " ".join(sums["spawn"] + sums["torchrun"]),
        "sum 1 sum 1 sum 1 sum 1",
    ),
    claim(
        "spawn names the rank that died, and the signal",
        last_words["spawn"],
        lambda text: "process 1 terminated with signal SIGKILL" in text,
    ),
    claim("torchrun, too", blamed, lambda text: "1 (local" in text and "(SIGKILL)" in text),
    claim(
        "both end the rank that is left, by SIGTERM",
        ["SIGTERM" in ended[way].stderr for way in ended],
        [True, True],
    ),
)

# %% [markdown]
# Both notice a death at once, say who died and end the others. torchrun does more: it finds a free
# port (with `--standalone`), counts over several machines, and starts all ranks again if
# `--max-restarts` allows it (lecture 10). With spawn your program is the parent. It gets an
# exception, as from a function call, and the traceback if a rank raised one.
#
# One thing does not work: spawning a function of a notebook. A new process is a new Python, and
# `pickle` sends it the *name* of the function and of its module, not the code:


# %%
# %%rank 0
import pickle

import torch.multiprocessing as mp


def greet(rank: int = 0) -> str:
    return f"hello from rank {os.environ.get('RANK')}"


sent = pickle.dumps(greet)
print(sent)
try:
    mp.spawn(greet, nprocs=1)
    spawned = "it ran"
except mp.ProcessExitedException as error:
    spawned = str(error)
display(
    claim("a pickled function is its module and its name, bytes", len(sent), ("<", 60)),
    claim("mp.spawn of a notebook's function", spawned, "process 0 terminated with exit code 1"),
    claim("minidist.launch.run sends the code", run(greet, 1)[0], "hello from rank 0"),
)

# %% [markdown]
# The new process looks for `greet` in its own `__main__`, where nobody has defined it. Put the
# function into a file and import it, or let [cloudpickle](https://github.com/cloudpipe/cloudpickle)
# send the code, as `minidist.launch.run` does in section 9. (`mp.start_processes` can fork instead:
# then the child has the function, but a fork after CUDA has started cannot use the GPU.)
#
# ## Now you
#
# Section 4 says: a bucket should be large enough that its all-reduce takes no longer than the
# backward pass of as many layers. Write a function that gives the **smallest number of layers per
# bucket** for which this holds, for N GPUs in a ring. The cell after it replays DDP with your
# number: only the last bucket may be exposed, and with one layer less per bucket more must be.


# %%
# %%rank 0
def layers_per_bucket(
    layer_bytes: float, backward_s: float, num_gpus: int, bytes_per_s: float, latency_s: float
) -> int | None:
    """Your turn. Step 1 of section 3 has the time of a ring all-reduce; math.ceil rounds up."""
    return None


# %%
# %%rank 0
CASES = [  # GPUs, bytes/s, latency; always layers of 4 MB and 0.8 ms
    (2, 12.5e9, 50e-6),
    (4, 12.5e9, 200e-6),
    (2, 10e9, 400e-6),
    (8, 12.5e9, 50e-6),
    (8, 50e9, 200e-6),
]


def keeps_up(count: int, num_gpus: int, bytes_per_s: float, latency_s: float) -> bool:
    """Whether DDP with four buckets of so many layers exposes the last one only."""
    trace = ddp_trace(num_gpus, 4 * count, 4e6, count, 0.4e-3, 0.8e-3)
    took_s = emulate.simulate(trace, network(bytes_per_s, latency_s)).makespan_s
    link = cost.Wire(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s)
    last_s = cost.all_reduce_seconds(num_bytes=4e6 * count, num_ranks=num_gpus, link=link)
    return math.isclose(took_s, 4 * count * 1.2e-3 + last_s, rel_tol=1e-9)


def check(answer) -> str:
    for case in CASES:
        count = answer(4e6, 0.8e-3, *case)
        if count is None:
            return "Not written yet."
        if not isinstance(count, int | float | np.number) or not 1 <= count < math.inf:
            return f"{case}: {count!r} is no number of layers."
        if count != int(count):
            return f"{case}: {count:.2f} layers? A layer cannot be halved."
        count = int(count)
        if not keeps_up(count, *case):
            return f"{case}: with {count} layers the network does not keep up."
        if count > 1 and keeps_up(count - 1, *case):
            return f"{case}: {count} layers are more than needed."
    return f"Right, in all {len(CASES)} cases."


def not_rounded(layer_bytes, backward_s, num_gpus, bytes_per_s, latency_s):
    sent_s = 2 * (num_gpus - 1) / num_gpus * layer_bytes / bytes_per_s
    return 2 * (num_gpus - 1) * latency_s / (backward_s - sent_s)


print(check(layers_per_bucket))
display(
    claim(
        "the formula of the answer",
        check(lambda *case: max(1, math.ceil(not_rounded(*case)))),
        "Right, in all 5 cases.",
    ),
    claim(
        "rounded down, plus one",
        check(lambda *case: int(not_rounded(*case)) + 1),
        lambda got: "3 layers are more than needed" in got,
    ),
    claim("one layer per bucket", check(lambda *case: 1), lambda got: "not keep up" in got),
    claim("half a layer", check(lambda *case: 1.5), lambda got: "halved" in got),
    claim("12 layers per bucket", check(lambda *case: 12), lambda got: "than needed" in got),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# k layers keep up if 2(N − 1)/N · k · bytes / bandwidth + 2(N − 1) · latency ≤ k · backward. So
# `sent_s = 2 * (num_gpus - 1) / num_gpus * layer_bytes / bytes_per_s`, and then
# `max(1, math.ceil(2 * (num_gpus - 1) * latency_s / (backward_s - sent_s)))`. If `sent_s` is not
# below `backward_s`, no bucket size helps: the network cannot carry the bytes in the time.
#
# </details>
#
# ## Summary
#
# - Data parallelism averages gradients. For equal local batches that is the gradient of the joint
#   batch; for unequal ones, weigh.
# - DataParallel sends all parameters out and all gradients in through device 0, in every step. In
#   DDP every rank sends 2(N − 1)/N of the gradients' bytes.
# - Many messages pay many latencies, and a message after backward hides behind nothing. Buckets
#   during backward avoid both. If the network keeps up, only the last bucket is exposed. Too small
#   a bucket costs time, and so does too large a one.
# - One order of samples for all ranks, cut into disjoint parts; `set_epoch`; think about the tail.
# - Same seed for the initialisation, different ones afterwards.
# - BatchNorm sees only the local batch; SyncBatchNorm sees all.
# - Metrics are sums and counts. Checkpoints hold the inner module, and rank 0 writes them.
# - Collectives pair by order. Every rank calls every one of them, or somebody waits, or adds
#   numbers that do not belong together.
# - torchrun starts a script and puts each rank's place into its environment. `mp.spawn` calls a
#   function that can be imported and gives it its rank; all else is yours. Both end all ranks when
#   one dies.
#
# ## Questions
#
# 1. You go from 1 to 8 GPUs and keep the batch of 256 in total. Does DDP still give the same
#    gradients as before? Does it give 8 times the speed?
#
# <details><summary>Answer</summary>
#
# The same gradients, up to rounding: 32 samples each, averaged. Not 8 times the speed: compute per
# GPU shrinks to an eighth, the all-reduce does not shrink at all. That is strong scaling. With 256
# *per GPU* communication weighs less, but the batch is 2,048 and the learning rate has to be
# thought about (lecture 4).
#
# </details>
#
# 2. Why does a hook that launches gradients in the order in which they arrive work in every test on
#    one model, and fail on another?
#
# <details><summary>Answer</summary>
#
# With the same graph on all ranks gradients arrive in the same order. If the model branches on its
# data, the ranks' orders differ, and the k-th all-reduce of one rank is added to that of another
# parameter on the other rank: silently, if the shapes agree.
#
# </details>
#
# 3. Half of your parameters are in one embedding whose gradient comes last. What happens to the
#    overlap?
#
# <details><summary>Answer</summary>
#
# Nothing is left to hide its all-reduce behind: half of the bytes are exposed, whatever the bucket
# size. Tying it to the output layer does not help (its gradient is complete only at the end);
# accumulation and a faster network do.
#
# </details>
#
# 4. Rank 1 computes validation with 5 batches, rank 0 with 6, and DDP's forward is used under
#    `torch.no_grad()`. Does it hang?
#
# <details><summary>Answer</summary>
#
# Not with torch's DDP: there is no backward, and buffers are broadcast only in the first forward
# after a training step. But that one broadcast is a collective too: a rank *without* validation
# batches does not take part, and its next collective is paired with it. Use `ddp.module` for
# validation, and call `eval()`: then no forward communicates.
#
# </details>
#
# 5. Clipping inside `no_sync`, before gradients are averaged: what goes wrong?
#
# <details><summary>Answer</summary>
#
# Every rank clips by its own norm. The mean of clipped gradients is not the clipped mean, and which
# samples count how much depends on who sat beside them on a rank.
#
# </details>
#
# 6. A colleague starts 8 ranks with `mp.spawn` and a fixed port. The second job on the same machine
#    ends at once. Why, and why does it not happen with `torchrun --standalone`?
#
# <details><summary>Answer</summary>
#
# The first job's rank 0 listens at that port, so the second cannot. `--standalone` takes a free
# port for each job. With spawn the parent has to find one and to hand it to all ranks.
#
# </details>
#
# ## Try it
#
# - Take a training loop of your own for one GPU and make it data-parallel. The list: process group,
#   device, sampler and `set_epoch`, wrap, metrics, rank 0 for printing and saving.
# - In section 3 give `train_two_steps` other bucket sizes. When does step 4 become step 3, when
#   step 2?
# - Measure tokens per second on 1, 2 and 4 ranks of your machine, and plot speed-up and efficiency.
#   How much does it vary from run to run?
#
# Then write it yourself: [**lab1_ddp**](../labs/lab1_ddp/lab1_ddp.ipynb) asks for the sampler, the
# four steps and the loop, and checks them on the emulated cluster.
#
# ## What to read
#
# - *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*,
#   [arXiv 2006.15704](https://arxiv.org/abs/2006.15704)
# - *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*,
#   [arXiv 1706.02677](https://arxiv.org/abs/1706.02677)
# - *Horovod: fast and easy distributed deep learning in TensorFlow*,
#   [arXiv 1802.05799](https://arxiv.org/abs/1802.05799)
# - *Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift*,
#   [arXiv 1502.03167](https://arxiv.org/abs/1502.03167)
# - PyTorch: [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html),
#   [`torch.multiprocessing`](https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses)
# - The tutorial [Getting Started with Distributed Data
#   Parallel](https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html)
# - The library: `lib/minidist/parallel/data/`, in the order that its `__init__.py` gives.
