# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 2
#     language: python
#     name: torchrun-2
# ---

# %% [markdown]
# # 4 · Big batches
#
# Data parallelism makes the batch larger: N GPUs with b samples each take steps on N·b samples.
# Sometimes that is more than training can use, sometimes less than it wants. This lecture shows how
# to make a batch larger than memory allows, what a larger batch does to training, and how to send
# less when the all-reduce is what you wait for.
#
# After it you can
#
# - accumulate gradients so that the result is that of the joint batch, tail and padding included;
# - use `no_sync` correctly, and count what it saves;
# - scale the learning rate with the batch, warm it up, and say when the rule ends;
# - estimate the critical batch size from gradients that data parallelism has anyway;
# - choose a gradient compression, and say why it needs error feedback;
# - train over a wire between data centres with local SGD and DiLoCo;
# - explain what an asynchronous parameter server gains, and what a stale gradient costs.
#
# It takes about 80 minutes. The kernel is *torchrun × 2* as in most lectures, but here each cell
# begins with `%%rank 0`: where several ranks are needed, a cell starts fresh ones, as plain
# processes (`minidist.launch`) or on the emulated cluster (real processes, exact virtual time).
# Networks are trained on GPUs where there are any; the emulated cluster needs none. Seven times the
# lecture asks for your guess before it measures. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: longer trainings and more points

# %%
# %%rank 0
# %matplotlib inline
import math
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from IPython.display import display
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist import cost, emulate
from minidist.claims import claim
from minidist.device import choose_backend, choose_device
from minidist.emulate.teach import run_traced
from minidist.launch import run
from minidist.lr import lr_at, scale_lr
from minidist.parallel.accumulation import accumulate, accumulate_step, micro_batch_groups
from minidist.parallel.data import BucketedDDP
from minidist.plots import COLOURS, PALETTE, new_figure, plot_bars, plot_lines, plot_timeline, style
from minidist.widgets import explore, predict

torch.set_num_threads(1)
cross_entropy = nn.functional.cross_entropy
device = choose_device(local_rank=0, local_world_size=1)  # of what needs one process: any GPU


def join() -> torch.device:
    """On a fresh rank: make the default group, and return the device that goes with it."""
    mine = choose_device()  # a GPU of its own where there are enough, else the CPU
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    dist.init_process_group(choose_backend())
    return mine


print(f"one process: {device}; two ranks: {choose_backend(local_world_size=2)}")


# %% [markdown]
# One step with a batch of four micro-batches on each of four GPUs, in three ways. The network has
# 2.5 Gbit/s; each of the eight layers takes 0.2 ms forward and 0.4 ms backward for a micro-batch.


# %%
# %%rank 0
WIDTH, LAYERS, MICRO = 256, 8, 4
FORWARD_S, BACKWARD_S = 0.2e-3, 0.4e-3
plan = emulate.ChargePlan((FORWARD_S,) * LAYERS, (BACKWARD_S,) * LAYERS, b"lecture 4")


def accumulated_steps(way: str) -> list[float]:
    """Norms of the gradients after two steps of four micro-batches, on one rank."""
    torch.manual_seed(0)
    layers = (emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS))
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        for index in range(MICRO):
            x = torch.randn(1, WIDTH, generator=generator)
            quiet = ddp.no_sync() if index < MICRO - 1 else nullcontext()
            if way == "no_sync":
                with quiet:
                    ddp(x).square().mean().backward()
            elif way == "no_sync around backward":
                loss = ddp(x).square().mean()
                with quiet:
                    loss.backward()
            else:
                ddp(x).square().mean().backward()
    return [float(p.grad.norm()) for p in ddp.parameters()]


# %%
# %%rank 0
WAYS = ("sync in every backward", "no_sync around backward", "no_sync")
norms, traces = {}, {}
for way in WAYS:
    norms[way], traces[way] = run_traced(accumulated_steps, 4, way, plan=plan)


def ethernet(gbit: float, latency_s: float = 50e-6) -> emulate.Cluster:
    link = emulate.Link(bandwidth_bytes_per_s=gbit * 1e9 / 8, latency_s=latency_s)
    return emulate.Cluster(
        name=f"{gbit:g} Gbit/s",
        nodes=1,
        devices_per_node=64,
        intra_node=link,
        inter_node=link,
        peak_flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=1e12,
    )


def second_step(timeline) -> tuple[float, float]:
    """Start and end of the second optimizer step: after 4 of 8 passes."""
    return timeline.steps[MICRO].start_s, timeline.makespan_s


def draw_rank0(timelines: dict, window_s: float):
    figure, _ = new_figure(8.5, 0.6 + 1.05 * len(timelines))
    figure.clear()
    with style():
        axes = figure.subplots(len(timelines), 1, sharex=True)
    for ax, (way, timeline) in zip(axes, timelines.items(), strict=True):
        start_s, end_s = second_step(timeline)
        one = emulate.Timeline(
            cluster="",
            world_size=1,
            makespan_s=end_s,
            intervals=timeline.intervals[:1],
            event_times=[],
        )
        title = f"{way}: {1e3 * (end_s - start_s):.1f} ms"
        plot_timeline(one, start_s=start_s, end_s=start_s + window_s, title=title, ax=ax)
        ax.set(xlabel="", yticks=[])
    axes[-1].set_xlabel("time (ms)")
    return figure


timelines = {way: emulate.simulate(trace, ethernet(2.5)) for way, trace in traces.items()}
longest_s = max(end - start for start, end in map(second_step, timelines.values()))
draw_rank0(timelines, 1.02 * longest_s)

# %% [markdown]
# All three compute the same gradient. Only the third sends it once; in the second `no_sync` has no
# effect, and section 2 says why.
#
# ## 1 · Accumulation: a large batch from small ones
#
# The batch you want does not fit into memory. So cut it into k **micro-batches**, run forward and
# backward for one after the other, and let gradients add up in `p.grad`, which is what `backward()`
# does anyway. Then one optimizer step. Activations live only from a forward pass to its backward
# pass, so you need memory for the activations of one micro-batch.
#
# One line is easy to forget. Gradients of *sums* add up to the gradient of the union. Loss
# functions return *means*: for k equal parts the mean over the union is the mean of the k means, so
# each loss is divided by k.

# %%
# %%rank 0
from minidist.data import make_images

images, labels = make_images(512, num_classes=10, size=4, seed=1)
images = images.flatten(1)  # data stay on the CPU: ranks get a copy, and take them where they are


def make_mlp(seed: int = 0) -> nn.Module:
    """The same weights on every device; drawn on the CPU."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def accumulated(parts, divide_by: float, reduction: str = "mean") -> torch.Tensor:
    """The gradient after a backward pass for each of the parts (lists of samples)."""
    model = make_mlp().to(device, torch.float64)
    x, y = images.to(device, torch.float64), labels.to(device)
    for part in parts:
        loss = cross_entropy(model(x[part]), y[part], reduction=reduction)
        (loss / divide_by).backward()
    return gradient(model).cpu()


batch = torch.arange(128)
whole = accumulated([batch], 1)
whole_sum = accumulated([batch], 1, "sum")


def error(got, right) -> float:
    return float((got - right).norm() / right.norm())


# %%
# %%rank 0
halves, quarters = batch.chunk(2), batch.chunk(4)
display(
    claim(
        "4 micro-batches of 32, each loss divided by 4, against one batch of 128: error",
        error(accumulated(quarters, 4), whole),
        ("<", 1e-12),
    ),
    claim(
        "without dividing the gradient is longer by a factor of",
        float(accumulated(quarters, 1).norm() / whole.norm()),
        4.0,
        rtol=1e-9,
    ),
    claim(
        "sum losses: the gradients of two batches add up to that of the union, error",
        error(accumulated(halves, 1, "sum"), whole_sum),
        ("<", 1e-12),
    ),
    claim(
        "mean losses: what the sum of the two gradients has to be multiplied by",
        float(whole @ accumulated(halves, 1) / accumulated(halves, 1).square().sum()),
        0.5,
        rtol=1e-9,
        status="corrected",
        said=1.0,
        refutes="a common explanation: the gradients of two batches add up to that of the union",
        why="true for sums; for means the union has the mean of the two",
    ),
)

# %% [markdown]
# How large is the batch then? Micro-batch × accumulation steps × data-parallel ranks. And the
# number of tokens, which is what people quote for language models, is that times the context.

# %%
# %%rank 0
display(
    claim(
        "32 samples x 4 accumulation steps",
        cost.tokens_per_step(micro_batch=32, context=1, accumulation_steps=4),
        128,
        rtol=1e-12,
    ),
    claim(
        "... on 4 GPUs and on 8 GPUs",
        [
            cost.tokens_per_step(micro_batch=32, context=1, accumulation_steps=4, dp=n)
            for n in (4, 8)
        ],
        [512, 1024],
        rtol=1e-12,
    ),
)

# %% [markdown]
# ### What it saves, weighed
#
# `saved_tensors_hooks` sees every tensor that autograd keeps for backward. We count their bytes for
# one batch of 512, and for 4, 8, … micro-batches. What does not shrink is the model's state, and so
# accumulation helps only as far as activations are the problem.


# %%
# %%rank 0
class Weigh:
    """Bytes that autograd keeps: now, and at most."""

    def __init__(self, model) -> None:
        self.now = self.peak = 0
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(self, tensor):
        counted = tensor.untyped_storage().data_ptr() not in self.weights
        return Kept(tensor, self, tensor.numel() * tensor.element_size() * counted)


class Kept:
    def __init__(self, tensor, scales: Weigh, num_bytes: int) -> None:
        self.tensor, self.scales, self.num_bytes = tensor, scales, num_bytes
        scales.now += num_bytes
        scales.peak = max(scales.peak, scales.now)

    def __del__(self) -> None:
        self.scales.now -= self.num_bytes


def peak_bytes(k: int) -> int:
    model, x, y = make_mlp().to(device), images.to(device), labels.to(device)
    scales = Weigh(model)
    with torch.autograd.graph.saved_tensors_hooks(scales.pack, lambda kept: kept.tensor):
        for part in torch.arange(512).chunk(k):
            (cross_entropy(model(x[part]), y[part]) / k).backward()
    return scales.peak


counts = (1, 2, 4, 8, 16)
peaks = [peak_bytes(k) for k in counts]
claim(
    "activations of a batch in 1, 2, 4, 8, 16 micro-batches, as a share of one batch",
    [p / peaks[0] for p in peaks],
    [1 / k for k in counts],
    rtol=0.02,
)

# %% [markdown]
# ### Two broken loops
#
# Two conditions are in circulation, `i % 4 == 0` and `(i + 1) % 4 == 0`. Ten micro-batches arrive,
# i = 0 to 9, and a step is wanted after every four.

# %%
# %%rank 0
loop_guess = predict("`if i % 4 == 0`: after how many micro-batches are the steps?", guess=None)
loop_guess

# %% [markdown]
# We run both, and a third that also steps at the end:


# %% tags=["open"]
# %%rank 0
def steps_of(condition, num: int = 10) -> list[int]:
    """After how many micro-batches each optimizer step comes."""
    return [i + 1 for i in range(num) if condition(i)]


loops = {
    "i % 4 == 0": steps_of(lambda i: i % 4 == 0),
    "(i + 1) % 4 == 0": steps_of(lambda i: (i + 1) % 4 == 0),
    "... or the last one": steps_of(lambda i: (i + 1) % 4 == 0 or i + 1 == 10),
}
figure, ax = new_figure(7.5, 2.2)
for row, steps in enumerate(loops.values()):
    for i in range(10):
        lost = i + 1 > (steps[-1] if steps else 0)
        ax.barh(row, 0.9, left=i, height=0.7, color=COLOURS["idle" if lost else "backward"])
        ax.text(i + 0.45, row, i + 1, ha="center", va="center")
    for step in steps:
        ax.plot([step - 0.05] * 2, [row - 0.45, row + 0.45], color="black", linewidth=3)
ax.set_yticks(range(3), list(loops))
ax.invert_yaxis()
ax.set(xlabel="micro-batch (black: optimizer step; grey: never used)", xticks=[])
figure

# %%
# %%rank 0
running_loss = [i for i in range(10_000) if (i + 1) % 4 == 0 and i % 100 == 0]
display(
    loop_guess.reveal(loops["i % 4 == 0"]),
    claim(
        "a loop that should step after 4 micro-batches: its first step",
        loops["(i + 1) % 4 == 0"][0],
        4,
        status="corrected",
        said=loops["i % 4 == 0"][0],
        refutes="a common listing with `if i % 4 != 0: no_sync`",
        why="0 % 4 is 0: it steps after one micro-batch, then after 5 and 9",
    ),
    claim(
        "micro-batches of 10 whose gradient is thrown away or leaks into the next epoch",
        10 - loops["(i + 1) % 4 == 0"][-1],
        2,
    ),
    claim("... when the last step takes the tail", 10 - loops["... or the last one"][-1], 0),
    claim(
        "prints in 10,000 micro-batches that log at i % 100 == 0 inside the update branch",
        len(running_loss),
        0,
        status="corrected",
        said=100,
        refutes="a common listing, which wants one every 100",
        why="i = 3 mod 4 and i = 0 mod 100 never hold together",
    ),
    claim(
        "groups that micro_batch_groups makes of 10",
        [len(g) for g in micro_batch_groups(range(10), 4)],
        [4, 4, 2],
    ),
)

# %% [markdown]
# The tail has two micro-batches, so they must be divided by 2 and not by 4. `micro_batch_groups`
# gives groups, and the divisor is `len(group)`.
#
# ### Unequal micro-batches
#
# 1/k is right for equal sizes only. With padded sequences, a mean over tokens is a mean over
# *different numbers* of tokens. Then each micro-batch must be weighed by its tokens. No error is
# raised if you forget it, and the loss still falls. `accumulate_step(weights=…)` sums the weights
# over all ranks and micro-batches first.

# %%
# %%rank 0
lengths = (100, 4, 12, 12)  # tokens that count in each micro-batch
parts = batch.split(lengths)
weighted_model = make_mlp().to(device, torch.float64)
x, y = images.to(device, torch.float64), labels.to(device)
accumulate_step(
    weighted_model,
    parts,
    lambda model, part: cross_entropy(model(x[part]), y[part]),
    torch.optim.SGD(weighted_model.parameters(), lr=0.0),
    weights=lengths,
)
display(
    claim(
        "100, 4, 12 and 12 tokens, each mean divided by 4: relative error of the gradient",
        error(accumulated(parts, 4), whole),
        (">", 0.1),
    ),
    claim(
        "each mean weighed by its tokens",
        error(gradient(weighted_model).cpu(), whole),
        ("<", 1e-12),
    ),
    claim(
        "weight of a token in the micro-batch of 4, against one in that of 100",
        (1 / 4 / lengths[1]) / (1 / 4 / lengths[0]),
        25.0,
        rtol=1e-12,
    ),
)

# %% [markdown]
# Accumulation cannot reproduce BatchNorm of the joint batch: its statistics are those of a
# micro-batch. And the order of the rest matters: sum over micro-batches, then synchronise, then
# (with fp16) unscale, then clip, then step.
#
# ## 2 · Accumulation with DDP: `no_sync`
#
# DDP reduces gradients in **every** backward. With k micro-batches each bucket is reduced k times
# per step, and k − 1 times in vain. Under `no_sync()` gradients stay local and add up; the next
# backward outside reduces the sum. Two facts decide whether it works:
#
# - **The forward decides.** DDP prepares the reduction at the end of forward. `no_sync` around
#   `backward()` alone does nothing at all, and nothing tells you.
# - The last micro-batch of a group runs outside.


# %%
# %%rank 0
def all_reduces(way: str) -> int:
    """All-reduces of gradients in the second step, seen by the network."""
    start_s, _ = second_step(timelines[way])
    found = [i for i in timelines[way].intervals[0] if i.kind == "communication"]
    return sum(i.name.startswith("all_reduce") and i.start_s >= start_s for i in found)


ms = {
    way: 1e3 * (end - start)
    for way, (start, end) in ((w, second_step(t)) for w, t in timelines.items())
}
compute_ms = 1e3 * MICRO * LAYERS * (FORWARD_S + BACKWARD_S)
display(
    claim(
        "norms of the gradients, in the three ways and on each rank: largest relative difference",
        float(np.abs(np.array(list(norms.values())) / norms["no_sync"][0] - 1).max()),
        ("<", 1e-4),
    ),
    claim(
        "all-reduces per step under no_sync: one for each bucket of two layers",
        all_reduces("no_sync"),
        LAYERS // 2,
    ),
    claim(
        "... without it, and with no_sync around backward only: as many in each backward",
        [all_reduces("sync in every backward"), all_reduces("no_sync around backward")],
        [MICRO * LAYERS // 2] * 2,
    ),
    claim(
        "time of a step beyond compute, in ms: wasted / no_sync",
        (ms["sync in every backward"] - compute_ms) / (ms["no_sync"] - compute_ms),
        (">", 2.0),
    ),
    claim(
        "no_sync makes the step faster by more than",
        ms["sync in every backward"] / ms["no_sync"],
        (">", 1.2),
    ),
)

# %% [markdown]
# Is the gradient right as well? On two real ranks: two micro-batches each, against one process with
# all four.


# %%
# %%rank 0
def two_ranks(way: str) -> list[float]:
    mine = join()
    rank = dist.get_rank()
    ddp = DistributedDataParallel(make_mlp().to(mine, torch.float64))
    x, y = images.to(mine, torch.float64), labels.to(mine)
    parts = quarters[2 * rank : 2 * rank + 2]
    if way == "ours":
        for part, _ in accumulate(parts, ddp):
            (cross_entropy(ddp(x[part]), y[part]) / 2).backward()
    else:  # the d-i-y form: local sums under no_sync, reduced by hand and never divided
        with ddp.no_sync():
            for part in parts:
                (cross_entropy(ddp(x[part]), y[part]) / 2).backward()
        for p in ddp.parameters():
            dist.all_reduce(p.grad)
    return gradient(ddp).tolist()


ours, summed = (
    torch.tensor(run(two_ranks, 2, way)[1], dtype=torch.float64) for way in ("ours", "by hand")
)
display(
    claim(
        "2 ranks x 2 micro-batches under no_sync against one process, error",
        error(ours, whole),
        ("<", 1e-12),
    ),
    claim(
        "reduced by hand, without dividing by the number of ranks: factor",
        float(summed.norm() / whole.norm()),
        2.0,
        rtol=1e-9,
    ),
)

# %% [markdown]
# So accumulation also sends less: one all-reduce per k micro-batches. It is the simplest cure for a
# slow network, as long as the batch may grow. Choose a network: where does accumulation pay?


# %%
# %%rank 0
def exposed_s(gbit: float, gpus: int) -> float:
    """How long a step lasts beyond its compute."""
    link = cost.Wire(bandwidth_bytes_per_s=gbit * 1e9 / 8, latency_s=50e-6)
    bucket_bytes, others = 2 * (WIDTH * WIDTH + WIDTH) * 4, LAYERS // 2 - 1
    one = cost.all_reduce_seconds(num_bytes=bucket_bytes, num_ranks=gpus, link=link)
    # In the last backward an all-reduce follows the one before it, or its bucket's gradients.
    return one + max(0.0, others * (one - 2 * BACKWARD_S))


def accumulation_explorer(gbit: float = 2.5, micro: int = 4, gpus: int = 4):
    """Share of the step that is compute, for 1 to 32 micro-batches per step."""
    ks = np.arange(1, 33)
    compute = ks * LAYERS * (FORWARD_S + BACKWARD_S)
    efficiency = 100 * compute / (compute + exposed_s(gbit, gpus))
    figure = plot_lines(
        ks,
        {"compute share": efficiency},
        xlabel="micro-batches per step",
        markers=False,
        ylabel="share of the step (%)",
        ideal={"100 %": np.full(32, 100.0)},
        title=f"{gpus} GPUs, {gbit:g} Gbit/s: {efficiency[micro - 1]:.0f} % with {micro}",
    )
    figure.axes[0].plot(micro, efficiency[micro - 1], "o", color=PALETTE[1], markersize=9)
    figure.axes[0].set_ylim(0, 105)
    return figure


explore(
    accumulation_explorer,
    gbit=[0.5, 1.0, 2.5, 10.0, 100.0],
    micro=(1, 32),
    gpus=[2, 4, 8, 64],
    labels={"gbit": "network (Gbit/s)", "micro": "micro-batches per step", "gpus": "GPUs"},
    alt="Share of compute in a step rises with the number of micro-batches per step",
)

# %%
# %%rank 0
claim(
    "time beyond compute as the explorer has it, 2.5 Gbit/s and 4 GPUs, / that of the first figure",
    1e3 * exposed_s(2.5, 4) / (ms["no_sync"] - compute_ms),
    1.0,
    rtol=0.01,
)

# %% [markdown]
# ## 3 · What a large batch does to training
#
# A gradient over B samples is the true gradient plus noise. The noise's variance falls as 1/B, so
# its norm falls as 1/√B. A larger batch makes the direction of a step better. It does not make the
# step longer; a larger learning rate does.

# %%
# %%rank 0
generator = torch.Generator().manual_seed(3)
train_x, train_y = make_images(4096, num_classes=10, size=4, seed=2)
train_x = train_x.flatten(1)
here_x, here_y = train_x.to(device), train_y.to(device)


def batch_gradient(model, size: int) -> torch.Tensor:
    pick = torch.randint(len(train_x), (size,), generator=generator)
    model.zero_grad()
    cross_entropy(model(here_x[pick]), here_y[pick]).backward()
    return gradient(model)


model = make_mlp().to(device)
sizes = (4, 16, 64, 256, 1024)
draws = {b: torch.stack([batch_gradient(model, b) for _ in range(40)]) for b in sizes}
noise = [float(d.var(0).sum().sqrt()) for d in draws.values()]
slope = np.polyfit(np.log(sizes), np.log(noise), 1)[0]
display(
    claim("exponent with which gradient noise falls with the batch size", slope, -0.5, atol=0.05)
)
plot_lines(
    sizes,
    {"noise": noise, "true gradient": [float(draws[1024].mean(0).norm())] * 5},
    xlabel="batch size",
    ylabel="norm",
    logx=True,
    logy=True,
    ticks=sizes,
    title="The gradient of a batch: signal and noise",
)

# %% [markdown]
# ### The linear scaling rule
#
# Take k small steps with learning rate η. As long as the weights change little, the k gradients are
# about those at the start, and the sum of the steps is η·(g₁ + … + g_k) = kη · (mean of the g's).
# That is **one** step on the joint batch with learning rate kη. So: k times the batch, k times the
# learning rate ([arXiv 1706.02677](https://arxiv.org/abs/1706.02677)). The argument also says when
# the rule fails: when k steps change the weights much.
#
# First without the rule: 16 times the batch, the same samples, the same learning rate.

# %%
# %%rank 0
same_guess = predict("The final loss grows by a factor of", guess=None)
same_guess

# %% [markdown]
# Plain SGD sees 16,384 samples in batches of 16, 64, 256 and 2,048, each with the rate of the
# smallest batch and with the scaled one.


# %%
# %%rank 0
def train(k: int, lr: float, *, warmup: float = 0.0, inputs=here_x, seed: int = 1):
    """Plain SGD with batches of 16 k; loss per step, and the loss on all data at the end."""
    model, generator = make_mlp().to(device), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    steps, losses = 16_384 // (16 * k), []
    for step in range(steps):
        schedule = {"warmup_steps": int(warmup * steps), "decay": "constant"}
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, peak_lr=lr, total_steps=steps, **schedule)
        pick = torch.randint(len(inputs), (16 * k,), generator=generator)
        loss = cross_entropy(model(inputs[pick]), here_y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, cross_entropy(model(inputs), here_y).item()


same = {k: train(k, 0.02) for k in (1, 4, 16, 128)}
scaled = {k: train(k, 0.02 * k) for k in (1, 4, 16, 128)}


# %%
# %%rank 0
def smooth(losses: list[float], width: int = 8) -> np.ndarray:
    kernel = np.ones(min(width, len(losses))) / min(width, len(losses))
    return np.convolve(losses, kernel, mode="valid")


shown = {
    "batch 16, rate 0.02": (1, same),
    "batch 256, rate 0.02": (16, same),
    "batch 256, rate 0.32": (16, scaled),
}
lines = {name: smooth(runs[k][0]) for name, (k, runs) in shown.items()}
plot_lines(
    {name: 16 * k * np.arange(1, len(lines[name]) + 1) for name, (k, _) in shown.items()},
    lines,
    xlabel="samples seen",
    ylabel="training loss",
    markers=False,
    title="Same samples, same learning rate: the large batch stays behind",
)

# %% [markdown]
# The final losses on all data, also those with 4 and 128 times the batch:

# %%
# %%rank 0
final = {
    name: [runs[k][1] for k in (1, 4, 16, 128)]
    for name, runs in (("same rate", same), ("linear rule", scaled))
}
print({name: [round(v, 3) for v in values] for name, values in final.items()})
display(
    same_guess.reveal(final["same rate"][2] / final["same rate"][0]),
    claim(
        "final loss after the same samples, 16 x batch and the same rate, / small batch",
        final["same rate"][2] / final["same rate"][0],
        (">", 3.0),
    ),
    claim(
        "final loss with 4 x and 16 x batch under the linear rule / small batch",
        [final["linear rule"][i] / final["linear rule"][0] for i in (1, 2)],
        ("<", 1.25),
    ),
    claim(
        "... and with 128 x: the rule has ended",
        not final["linear rule"][3] < 1.5 * final["linear rule"][0],
        True,
    ),
    claim(
        "rate 0.001 at batch 32, for batch 128",
        scale_lr(0.001, batch_size=128, base_batch_size=32),
        0.004,
        rtol=1e-12,
        authority="arXiv 1706.02677",
    ),
    claim(
        "... and under the square-root rule (often with Adam)",
        scale_lr(0.001, batch_size=128, base_batch_size=32, rule="sqrt"),
        0.002,
        rtol=1e-12,
    ),
    claim(
        "on 8 GPUs with a fixed batch per GPU the linear rule multiplies the rate by",
        scale_lr(1.0, batch_size=8 * 32, base_batch_size=32),
        8.0,
        rtol=1e-12,
    ),
)

# %% [markdown]
# "Forgetting to scale the learning rate" is often listed as a mistake. Such a run is not wrong, it
# is slow, as the figure shows. When batches differ, compare runs by samples: at the same number of
# steps the larger batch has seen more of them.
#
# ### Warm-up
#
# At the start the weights change fast, so the linear rule is worst there. **Warm-up** begins with a
# small rate and raises it to the peak over the first part of training. A popular loop for it,
# `lr = target * epoch / warmup_epochs`, starts at a rate of 0, so its first epoch trains nothing.
# `lr_at` starts above 0, and counts steps, so that the rate rises in small parts:

# %%
# %%rank 0
warmup_epochs, peak = 5, 1.0
popular = [peak * epoch / warmup_epochs for epoch in range(warmup_epochs)]
better = [lr_at(e, peak_lr=peak, total_steps=30, warmup_steps=5) for e in range(6)]
print("popular", popular, "ours", [round(v, 3) for v in better])
display(
    claim(
        "steps with a rate of 0: the popular loop, ours",
        [popular.count(0.0), better.count(0.0)],
        [1, 0],
    ),
    claim("ours starts at this share of the peak", better[0], 1 / 6, rtol=1e-9),
    claim(
        "and rises by equal parts, up to the peak",
        np.diff(better),
        np.full(5, 1 / 6),
        rtol=1e-9,
    ),
)

# %% [markdown]
# Now a case on the edge: inputs three times as large, batch 256, rate 1.0. Three seeds without
# warm-up, and three with a quarter of the training as warm-up.

# %%
# %%rank 0
steep = 3 * here_x
cold, warm = (
    [train(16, 1.0, inputs=steep, warmup=share, seed=seed)[0] for seed in (1, 2, 3)]
    for share in (0.0, 0.25)
)
figure, ax = new_figure(7.5, 3.2)
for name, runs, colour in (("no warm-up", cold, PALETTE[5]), ("warm-up", warm, PALETTE[0])):
    for index, losses in enumerate(runs):
        ax.plot(
            np.arange(1, len(losses) + 1),
            losses,
            color=colour,
            linewidth=1.3,
            label=None if index else name,
        )
ax.set(yscale="log", xlabel="step (256 samples each)", ylabel="training loss")
ax.set_title("The same peak rate, with and without warm-up", loc="left", fontweight="bold")
ax.legend(frameon=False)
figure


# %%
# %%rank 0
def peak_of(runs) -> float:
    return float(np.median([max(losses) for losses in runs]))


display(
    claim(
        "largest loss of the training, median of three seeds: without / with warm-up",
        peak_of(cold) / peak_of(warm),
        (">", 1.8),
    ),
    claim(
        "ImageNet in one hour: batch 8192, so the rate is 0.1 x 8192 / 256",
        scale_lr(0.1, batch_size=8192, base_batch_size=256),
        3.2,
        rtol=1e-12,
        authority="arXiv 1706.02677",
    ),
    claim(
        "... warm-up epochs, GPUs, scaling efficiency (%)",
        [5, 256, 90],
        status="cited",
        authority="Goyal et al., arXiv 1706.02677",
    ),
)


# %% [markdown]
# Warm-up, peak and decay together make a schedule. Here is one for 90 epochs of ImageNet on 1 to
# 1,024 GPUs. (The paper divides the rate by 10 after 30, 60 and 80 epochs in place of a smooth
# decay.)


# %%
# %%rank 0
def schedule_explorer(
    ranks: int = 8, warmup: float = 0.05, decay: str = "cosine", rule: str = "linear"
):
    """Learning rate over a training of 90 epochs of ImageNet, with its peak."""
    batch = 32 * ranks
    total = 90 * 1_281_167 // batch
    peak = scale_lr(0.1, batch_size=batch, base_batch_size=256, rule=rule)
    at = np.linspace(0, total, 200).astype(int)
    rates = [
        lr_at(
            int(s), peak_lr=peak, total_steps=total, warmup_steps=int(warmup * total), decay=decay
        )
        for s in at
    ]
    return plot_lines(
        at,
        {"rate": rates},
        xlabel="optimizer step",
        ylabel="learning rate",
        markers=False,
        title=f"{ranks} GPUs x 32: batch {batch}, peak {peak:.3g}, {total:,} steps",
    )


explore(
    schedule_explorer,
    ranks=[1, 8, 32, 256, 1024],
    warmup=[0.0, 0.02, 0.05, 0.1, 0.2],
    decay=["cosine", "linear", "constant"],
    rule=["linear", "sqrt"],
    labels={
        "ranks": "GPUs (32 samples each)",
        "warmup": "warm-up, share of the training",
        "decay": "decay",
        "rule": "scaling rule",
    },
    alt="Learning rate over the steps of a training: warm-up, peak, decay",
)

# %% [markdown]
# ### The critical batch size
#
# When noise is much larger than the signal, twice the batch halves the number of steps: nearly for
# free on twice the GPUs. When it is much smaller, twice the batch buys next to nothing. In between
# lies the **critical batch size** ([arXiv 1812.06162](https://arxiv.org/abs/1812.06162)).

# %%
# %%rank 0
steps_guess = predict(
    "Batch 1,024 in place of 256, with the best rate for each: how many times fewer steps?",
    guess=None,
)
steps_guess

# %% [markdown]
# We search the best learning rate for each batch size and count the steps to a loss of 0.6. The
# grid of rates must be wide enough: at its edge the rate, and not the batch, would set the limit.
# The dashed curve is the paper's law, steps = S · (1 + B/batch), through two of the points: S is
# the smallest number of steps, B the critical batch size.


# %%
# %%rank 0
def steps_to(target: float, size: int, lr: float, limit: int) -> int:
    model, generator = make_mlp().to(device), torch.Generator().manual_seed(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    every = 5 if size < 32 else 1  # small batches take many steps
    for step in range(limit):
        pick = torch.randint(len(train_x), (size,), generator=generator)
        loss = cross_entropy(model(here_x[pick]), here_y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every == every - 1:
            with torch.no_grad():
                if cross_entropy(model(here_x[:512]), here_y[:512]) < target:
                    return step + 1
    return limit


batch_sizes = tuple(2**k for k in range(1, 11 if quick else 12))
rates = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
needed, best_rates, limit = [], [], 400
for size in batch_sizes:
    fewest, best_rate = min((steps_to(0.6, size, lr, limit), lr) for lr in rates)
    needed.append(fewest)
    best_rates.append(best_rate)
    limit = fewest + 20  # a larger batch never needs many more
print(dict(zip(batch_sizes, needed, strict=True)))

# %%
# %%rank 0
critical = cost.critical_batch_size(
    batches=(batch_sizes[1], batch_sizes[-1]), steps=(needed[1], needed[-1])
)
least = needed[-1] / (1 + critical / batch_sizes[-1])
fit = [
    cost.steps_and_examples(batch=b, critical_batch=critical, min_steps=least)[0]
    for b in batch_sizes
]
display(
    steps_guess.reveal(needed[7] / needed[9]),
    claim(
        "the smallest and the largest of the best rates: inside the grid",
        [min(best_rates), max(best_rates)],
        lambda found: rates[0] < found[0] and found[1] < rates[-1],
    ),
    claim("from batch 2 to 8 the steps fall by a factor of", needed[0] / needed[2], (">", 2.2)),
    claim("from batch 256 to 1,024 only by a factor of", needed[7] / needed[9], ("<", 1.5)),
    claim(
        "samples needed with batch 1,024 / with batch 4",
        1024 * needed[9] / (4 * needed[1]),
        (">", 6.0),
    ),
)
plot_lines(
    batch_sizes,
    {"measured": needed},
    xlabel="batch size",
    ylabel="steps to loss 0.6",
    logx=True,
    logy=True,
    ticks=batch_sizes,
    ideal={"S(1 + B/batch)": fit},
    title=f"More data per step: a gain, then hardly any (critical batch about {critical:.0f})",
)

# %% [markdown]
# Such a search is expensive, and there is an estimate without it. Data parallelism has two
# gradients at hand: a rank's own (small batch) and the all-reduced one (large batch). From their
# squared norms follows the **noise scale** tr(Σ)/|G|². Take it as an order of magnitude: it treats
# all directions alike, although the loss is steeper in some.


# %%
# %%rank 0
def noise_scale_of(model, ranks: int = 32, local: int = 32, tries: int = 24) -> float:
    small, big = [], []
    for _ in range(tries):
        grads = torch.stack([batch_gradient(model, local) for _ in range(ranks)])
        small.append(float(grads.square().sum(1).mean()))
        big.append(float(grads.mean(0).square().sum()))
    return cost.noise_scale(
        grad_sq_small=float(np.mean(small)),
        grad_sq_big=float(np.mean(big)),
        small=local,
        big=ranks * local,
    )


scales, trained = [], make_mlp().to(device)
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
for _ in range(4):
    scales.append(noise_scale_of(trained))
    for _ in range(60):
        batch_gradient(trained, 64)
        optimizer.step()
print("noise scale after 0, 60, 120, 180 steps:", [round(s) for s in scales])
display(
    claim(
        "noise scale at the start / critical batch size of the search",
        scales[0] / critical,
        3,
        rtol=0.2,
    ),
    claim("the noise scale grows during training by more than", scales[-1] / scales[0], (">", 2)),
)

# %% [markdown]
# At the start it is three times what the search found. It grows while the loss falls, so late in
# training larger batches pay. Far beyond the critical batch more GPUs in data parallelism hardly
# help, whatever the network. Then the other kinds of parallelism are needed (lectures 7 to 9).
#
# ## 4 · Send fewer bytes: gradient compression
#
# | compressor | on the wire | what gets lost |
# |---|---|---|
# | fp16, bf16 | 2 bytes per number | range, or precision |
# | int8 | 1 byte per number | all but 255 levels |
# | top-k | 8 bytes per number that is sent | small numbers |
# | PowerSGD | r·(n + m) numbers for an n × m matrix | small singular values |
#
# First a mistake to avoid: `model.half()` is sometimes listed as gradient compression. It halves
# the traffic and *trains in fp16*: weights, updates and all (lecture 6 shows what happens then).
# Compression changes what travels; weights and updates stay in fp32. DDP has a place for it, the
# [communication hook](https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html).
#
# Two real ranks have one gradient of a 512 × 512 matrix each, a matrix of rank 8 and noise. Every
# compressor averages it: how many times fewer bytes does it send, and how large is the error?
# (PowerSGD, [arXiv 1905.13727](https://arxiv.org/abs/1905.13727), does it twice, since its second
# step starts from the factors of the first.)


# %%
# %%rank 0
def compress_once() -> dict:
    from minidist.parallel import compression as c

    mine = join()
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    common = torch.Generator().manual_seed(9)
    thin = torch.randn(512, 8, generator=common) @ torch.randn(8, 512, generator=common)
    own = (thin + 0.3 * torch.randn(512, 512, generator=generator)).flatten().to(mine)
    exact = c.Cast(torch.float32).reduce(own)
    found = {}
    for name, compressor in {
        "fp16": c.Cast(torch.float16),
        "bf16": c.Cast(torch.bfloat16),
        "int8": c.Int8(),
        "top 10 %": c.TopK(0.1),
        "top 1 %": c.TopK(0.01),
        "PowerSGD, r = 1": c.PowerSGD(1),
        "PowerSGD, r = 8": c.PowerSGD(8),
    }.items():
        segments = [c.Segment("w", (512, 512))]
        mean = compressor.reduce(own, segments)
        if name.startswith("PowerSGD"):  # its second step starts from better factors
            compressor.error_feedback = False
            mean = compressor.reduce(own, segments)
        wrong = float((mean - exact).norm() / exact.norm())
        found[name] = (compressor.traffic.ratio, wrong, float(mean.double().sum()), rank)
    return found


once = run(compress_once, 2)
ratios = {name: values[0] for name, values in once[0].items()}
wrongs = {name: values[1] for name, values in once[0].items()}

# %%
# %%rank 0
figure, ax = new_figure(7.5, 3.4)
for (name, ratio), colour in zip(ratios.items(), PALETTE, strict=False):
    ax.plot(ratio, wrongs[name], "o", color=colour, markersize=9)
    ax.annotate(name, (ratio, wrongs[name]), (7, 4), textcoords="offset points", color=colour)
ax.set(
    xscale="log",
    yscale="log",
    xlabel="times fewer bytes than fp32",
    ylabel="relative error of the mean",
)
ax.set_xlim(1.5, 900)
ax.set_title("One gradient, two ranks", loc="left", fontweight="bold")
figure

# %% [markdown]
# PowerSGD with r = 8 does well because this gradient nearly has rank 8.

# %%
# %%rank 0
n = 1024
display(
    claim(
        "bytes saved by fp16 and int8, x", [ratios["fp16"], ratios["int8"]], [2.0, 4.0], rtol=0.01
    ),
    claim(
        "bf16 errs more than fp16 on well-scaled gradients",
        wrongs["bf16"] / wrongs["fp16"],
        (">", 3.0),
    ),
    claim(
        "PowerSGD with rank 8 on a matrix of rank 8 and noise: error",
        wrongs["PowerSGD, r = 8"],
        ("<", 0.2),
    ),
    claim(
        "all ranks got the same bits from every compressor",
        all(once[0][name][2] == once[1][name][2] for name in ratios),
        True,
    ),
    claim(
        "PowerSGD, rank 1, on 1024 x 1024: compression",
        n * n / (n + n),
        512.0,
        rtol=1e-12,
        status="corrected",
        said="2 to 10",
        refutes="a common text",
        why="n m / (r (n + m)) per matrix: it depends on rank and shapes",
    ),
    claim(
        "PowerSGD, rank 1, on our 512 x 512, counted",
        ratios["PowerSGD, r = 1"],
        512 * 512 / (512 + 512),
        rtol=0.02,
    ),
)

# %% [markdown]
# On two ranks top 1 % sends 50 times fewer bytes than fp32. But ranks choose *different* elements,
# so their pairs of value and index cannot be added on the way: every rank must get those of all
# others.

# %%
# %%rank 0
top_guess = predict("Top 1 % on 100 ranks: how many times fewer bytes than fp32?", guess=None)
top_guess

# %% [markdown]
# We count the bytes that a rank sends: an all-gather of pairs beside an all-reduce of numbers.


# %%
# %%rank 0
def top_k_ratio(density: float, n: int, numel: int = 1_000_000) -> float:
    """fp32 ring all-reduce / all-gather of 8-byte pairs, bytes sent per rank."""
    return (2 * (n - 1) / n * numel * 4) / ((n - 1) * density * numel * 8)


display(
    top_guess.reveal(top_k_ratio(0.01, 100)),
    claim(
        "top 1 % on 2 ranks, counted by the compressor",
        ratios["top 1 %"],
        top_k_ratio(0.01, 2),
        rtol=0.01,
    ),
    claim(
        "top 1 % saves, on 8 and on 100 ranks, x",
        [top_k_ratio(0.01, n) for n in (8, 100)],
        [12.5, 1.0],
        rtol=1e-9,
    ),
)

# %% [markdown]
# The traffic of top-k grows with N, while an all-reduce's stays below twice the gradient.
#
# ### Error feedback
#
# So far a number that is never among the top 1 % never travels. With **error feedback** the rank
# keeps what did not travel and adds it to the next gradient
# ([arXiv 1901.09847](https://arxiv.org/abs/1901.09847)).

# %%
# %%rank 0
feedback_guess = predict("Top 1 %: the final loss without feedback / with it?", guess=None)
feedback_guess

# %% [markdown]
# Two ranks train the small network, with top 1 % with and without feedback. int8 and PowerSGD train
# beside them, ours and torch's own hook. (Torch's keeps state per bucket and leaves the first two
# steps uncompressed, until the buckets have been arranged.)


# %%
# %%rank 0
def train_compressed(kind: str, steps: int) -> tuple[list[float], float]:
    """The loss after each step, and how many times fewer bytes than fp32 were sent."""
    from minidist.parallel import compression as c

    mine = join()
    ddp, x, y = DistributedDataParallel(make_mlp().to(mine)), train_x.to(mine), train_y.to(mine)
    compressor = {
        "fp32": c.Cast(torch.float32),
        "int8": c.Int8(),
        "top 1 %, error feedback": c.TopK(0.01),
        "top 1 %, no feedback": c.TopK(0.01, error_feedback=False),
        "PowerSGD, r = 1": c.PowerSGD(1),
        "torch's PowerSGD, r = 1": None,
    }[kind]
    if compressor is None:
        state = c.register_torch_hook(ddp, "powersgd", rank=1)
    else:
        ddp.register_comm_hook(c.HookState(compressor), c.compression_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        pick = torch.randint(len(train_x), (32,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(ddp(x[pick]), y[pick]).backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(cross_entropy(ddp.module(x[:512]), y[:512]).item())
    return losses, state.compression_stats()[0] if compressor is None else compressor.traffic.ratio


kinds = (
    "fp32",
    "int8",
    "top 1 %, error feedback",
    "top 1 %, no feedback",
    "PowerSGD, r = 1",
    "torch's PowerSGD, r = 1",
)
# Beside fewer GPUs than ranks: torch's PowerSGD hook waits for a GPU that it sees, and fails.
env = {} if choose_backend(local_world_size=2) == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
trained = {
    kind: run(train_compressed, 2, kind, 200 if quick else 600, env=env)[0] for kind in kinds
}
compressed = {kind: losses for kind, (losses, _) in trained.items()}
plot_lines(
    np.arange(1, len(compressed["fp32"]) + 1),
    compressed,
    xlabel="step",
    ylabel="loss",
    markers=False,
    title="1 % of the numbers is enough, if nothing is lost",
)

# %%
# %%rank 0
layers = [(48, 128), (128, 128), (128, 10)]  # of the network, each with a bias
at_end = {kind: float(np.mean(losses[-10:])) for kind, losses in compressed.items()}
display(
    feedback_guess.reveal(at_end["top 1 %, no feedback"] / at_end["top 1 %, error feedback"]),
    claim("int8 against fp32: final loss", at_end["int8"] / at_end["fp32"], 1.0, rtol=0.1),
    claim(
        "top 1 %: final loss without error feedback / with it",
        at_end["top 1 %, no feedback"] / at_end["top 1 %, error feedback"],
        (">", 1.15),
    ),
    claim(
        "PowerSGD of rank 1: final loss against fp32",
        at_end["PowerSGD, r = 1"] / at_end["fp32"],
        ("<", 1.1),
    ),
    claim(
        "... against torch's hook",
        at_end["PowerSGD, r = 1"] / at_end["torch's PowerSGD, r = 1"],
        1.0,
        rtol=0.05,
    ),
    claim(
        "... and its bytes: times fewer than fp32, biases sent as they are",
        trained["PowerSGD, r = 1"][1],
        sum(n * m + m for n, m in layers) / sum(n + m + m for n, m in layers),
        rtol=1e-9,
    ),
)

# %% [markdown]
# Does it make training faster? Only if you wait for the network, and compressing itself takes time
# (choosing a top-k or orthonormalising columns is not free; none of that is in the figure below).
# Inside a node with NVLink it seldom pays. torch brings hooks for fp16, bf16 and PowerSGD. This is
# fp16's:
#
# ```python
# from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
# ddp.register_comm_hook(state=None, hook=default_hooks.fp16_compress_hook)
# ```


# %%
# %%rank 0
def hooked_steps(hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    layers = (emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS))
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    if hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for _ in range(2):
        ddp(torch.ones(1, WIDTH)).square().mean().backward()


hooked = {hook: run_traced(hooked_steps, 4, hook, plan=plan)[1] for hook in ("fp32", "fp16")}


def hooked_ms(hook: str, gbit: float) -> float:
    step = emulate.simulate(hooked[hook], ethernet(gbit)).steps[-1]
    return 1e3 * (step.end_s - step.start_s)


gradient_bytes = {
    hook: sum(e.nbytes for e in trace.events[0] if e.collective == "all_reduce")
    for hook, trace in hooked.items()
}
speeds = [0.5, 1, 2.5, 5, 10, 25, 50, 100]
display(
    claim(
        "bytes of all gradient all-reduces: fp16 hook / fp32",
        gradient_bytes["fp16"] / gradient_bytes["fp32"],
        0.5,
        rtol=0.01,
    ),
    claim(
        "step with the fp16 hook / step without, 0.5 Gbit/s",
        hooked_ms("fp16", 0.5) / hooked_ms("fp32", 0.5),
        ("<", 0.75),
    ),
    claim("... and on 100 Gbit/s", hooked_ms("fp16", 100) / hooked_ms("fp32", 100), (">", 0.95)),
)
plot_lines(
    speeds,
    {hook: [hooked_ms(hook, s) for s in speeds] for hook in hooked},
    logx=True,
    ticks=speeds,
    xlabel="network (Gbit/s)",
    ylabel="ms per step",
    title="Half of the bytes help where the network is slow (4 GPUs)",
    ideal={"compute alone": [1e3 * LAYERS * (FORWARD_S + BACKWARD_S)] * len(speeds)},
)

# %% [markdown]
# ## 5 · Send less often: local SGD
#
# Or let every rank take H optimizer steps of its own, and then average the *parameters*
# ([arXiv 1805.09767](https://arxiv.org/abs/1805.09767)). That makes H times fewer messages and H
# times fewer waits. It is another algorithm, though: in between, replicas differ, and gradients are
# taken at different points. Even H = 1 is the same as DDP only if the optimizer's step is linear in
# the gradient.


# %%
# %%rank 0
def local_sgd(kind: str, period: int) -> tuple[list[float], float]:
    """Weights after 12 steps, and the share of DDP's bytes that was sent."""
    from minidist.parallel.local_sgd import LocalSGD

    mine = join()
    model, rank = make_mlp().to(mine, torch.float64), dist.get_rank()
    x, y = train_x.to(mine, torch.float64), train_y.to(mine)
    make = torch.optim.Adam if kind == "Adam" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.01)
    if period:
        stepper, call = LocalSGD(model, optimizer, period), model
    else:
        stepper = call = BucketedDDP(model)
    for step in range(12):
        first = 64 * (2 * step + rank)
        part = slice(first % 4096, first % 4096 + 64)
        optimizer.zero_grad()
        cross_entropy(call(x[part]), y[part]).backward()
        stepper.step() if period else optimizer.step()
    sent = stepper.sent_bytes if period else 1
    total = stepper.sent_bytes + stepper.saved_bytes if period else 1
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), sent / total


outcome = {
    (kind, period): run(local_sgd, 2, kind, period)[0]
    for kind in ("SGD", "Adam")
    for period in (0, 1)
}
share = run(local_sgd, 2, "SGD", 4)[0][1]


def apart(kind: str) -> float:
    a, b = (torch.tensor(outcome[kind, p][0], dtype=torch.float64) for p in (0, 1))
    return float((a - b).abs().max())


display(
    claim("period 1 with SGD: largest difference from DDP", apart("SGD"), ("<", 1e-12)),
    claim("period 1 with Adam: largest difference from DDP", apart("Adam"), (">", 1e-4)),
    claim("period 4: share of DDP's bytes that is sent", share, 1 / 4, rtol=0.01),
)

# %% [markdown]
# ### Two data centres: DiLoCo
#
# How far can H go? Between two data centres one would like hundreds of steps without a message. The
# plain mean has no memory: at each meeting the ranks agree on a direction, and the next meeting
# knows nothing of it. **DiLoCo** ([arXiv 2311.08105](https://arxiv.org/abs/2311.08105)) remembers.
# The mean move of the ranks is a gradient for a second, *outer* optimizer: SGD with Nesterov
# momentum. AdamW does the inner steps. This is the meeting:

# %%
# %%rank 0
import inspect

from minidist.parallel.local_sgd import DiLoCo, LocalSGD

print(inspect.getsource(DiLoCo.average).split('"""')[2])

# %% [markdown]
# We train on four ranks of the emulated cluster, two in each data centre. A step computes for one
# second. Between the centres are 20 ms, and a wire on which one copy of our small network takes
# 3.2 s, as a billion fp32 parameters do at 10 Gbit/s.

# %%
# %%rank 0
far_guess = predict(
    "H = 20: how many times as many steps per hour as DDP, over this wire?", guess=None, unit="x"
)
far_guess


# %%
# %%rank 0
PERIOD, FAR_STEPS = 20, 120 if quick else 240


def far_apart(way: str, steps: int) -> list[float]:
    """Loss after every fifth step, on a rank; the rank's own model between two meetings."""
    torch.set_num_threads(1)
    net = make_mlp()
    model = emulate.Charged(net, 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
    take_step = optimizer.step
    if way == "DDP":
        model = DistributedDataParallel(model)
    else:
        take_step = {"local SGD": LocalSGD, "DiLoCo": DiLoCo}[way](net, optimizer, PERIOD).step
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(1, steps + 1):
        pick = torch.randint(len(train_x), (16,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(train_x[pick]), train_y[pick]).backward()
        take_step()
        if step % 5 == 0:
            with torch.no_grad():
                losses.append(cross_entropy(net(train_x[:1024]), train_y[:1024]).item())
    return losses


near = emulate.Link(bandwidth_bytes_per_s=50e9, latency_s=10e-6)
model_bytes = 4 * sum(p.numel() for p in make_mlp().parameters())
far = emulate.Link(bandwidth_bytes_per_s=model_bytes / (4e9 / 1.25e9), latency_s=20e-3)
centres = emulate.Cluster(
    name="two data centres",
    nodes=2,
    devices_per_node=2,
    intra_node=near,
    inter_node=far,
    peak_flops_per_s=1e12,
    memory_bandwidth_bytes_per_s=1e12,
)
one_second = emulate.ChargePlan((0.3,), (0.7,), b"lecture 4, far apart")
far_losses, far_times = {}, {}
for way in ("DDP", "local SGD", "DiLoCo"):
    every_rank, trace = run_traced(far_apart, 4, way, FAR_STEPS, plan=one_second)
    far_losses[way] = every_rank[0]
    far_times[way] = [step.end_s for step in emulate.simulate(trace, centres).steps][4::5]
plot_lines(
    far_times,
    far_losses,
    markers=False,
    xlabel="seconds on the emulated cluster",
    ylabel="loss",
    title="Three trainings of as many steps",
)


# %%
# %%rank 0
def step_s(way: str) -> float:
    """Seconds per step after the first meeting; before it, rank 0's weights are sent to all."""
    return (far_times[way][-1] - far_times[way][PERIOD // 5 - 1]) / (FAR_STEPS - PERIOD)


def seconds_to(way: str, loss: float) -> float:
    return next(t for t, found in zip(far_times[way], far_losses[way], strict=True) if found < loss)


display(
    far_guess.reveal(step_s("DDP") / step_s("DiLoCo")),
    claim(
        "seconds per step with DDP: 1 for compute, the rest is a ring of four over the wire",
        step_s("DDP"),
        1 + 2 * 3 / 4 * 3.2 + 6 * 0.02,
        rtol=0.01,
    ),
    claim(
        "... with DiLoCo: that ring every 20 steps",
        step_s("DiLoCo"),
        1 + (2 * 3 / 4 * 3.2 + 6 * 0.02) / PERIOD,
        rtol=0.01,
    ),
    claim(
        "loss after as many steps: DiLoCo / local SGD",
        far_losses["DiLoCo"][-1] / far_losses["local SGD"][-1],
        ("<", 0.6),
    ),
    claim("... DiLoCo / DDP", far_losses["DiLoCo"][-1] / far_losses["DDP"][-1], ("<", 0.9)),
    claim(
        "seconds to a loss of 0.5: DDP / DiLoCo",
        seconds_to("DDP", 0.5) / seconds_to("DiLoCo", 0.5),
        (">", 4),
    ),
    claim(
        "steps between two meetings in the paper, with 8 workers as good as synchronous training",
        500,
        status="cited",
        authority="Douillard et al., arXiv 2311.08105",
    ),
)

# %% [markdown]
# Local SGD and DiLoCo take the same time. The outer momentum makes the difference in loss: it acts
# like a larger learning rate on what all ranks agree on. At this small inner rate it even needs
# fewer steps than DDP; at a large one it overshoots ("Try it"). With outer rate 1 and no
# momentum DiLoCo *is* local SGD. In a real cluster each "rank" is a whole data centre, with DDP or
# FSDP inside. [Streaming DiLoCo](https://arxiv.org/abs/2501.18512) sends the model in parts beside
# the inner steps, so that no step waits.

# %% [markdown]
# ## 6 · Wait for nobody: the asynchronous parameter server
#
# All of the above is **synchronous**: at each step, or at each meeting, all ranks wait for the
# slowest. A **parameter server** holds the parameters; workers fetch them, compute a gradient, and
# send it back. Then there is a choice:
#
# - *synchronous*: the server waits for all workers and takes one step with the mean;
# - *asynchronous*: it takes a step with every gradient that arrives, and nobody waits. But when a
#   gradient arrives, others have changed the parameters since. It is **stale**;
# - in between: bound how far the fastest may run ahead, or throw away the slowest (backup workers).
#
# Under each rule everything passes through the server's link. We count the messages of rank 0 in a
# round on the emulated cluster, beside a ring all-reduce of the same numbers:


# %%
# %%rank 0
def one_round(way: str) -> None:
    from minidist.collectives import ring_all_reduce

    numbers, n = torch.ones(12_000), dist.get_world_size()
    if way == "ring":
        ring_all_reduce(numbers)
    elif dist.get_rank() == 0:
        for worker in range(1, n):  # gradients come in
            dist.recv(torch.empty_like(numbers), worker)
        for worker in range(1, n):  # parameters go out
            dist.send(numbers, worker)
    else:
        dist.send(numbers, 0)
        dist.recv(numbers, 0)


SIZES = [2, 3, 4, 6]


def copies_through_rank_0(way: str, n: int) -> float:
    """Bytes of rank 0's messages, in copies of the model."""
    events = run_traced(one_round, n, way)[1].events[0]
    return sum(e.nbytes for e in events if e.collective in ("send", "recv")) / (4 * 12_000)


through_rank_0 = {way: [copies_through_rank_0(way, n) for n in SIZES] for way in ("server", "ring")}
display(
    claim(
        "bytes in and out of a server's link on n ranks / bytes of the model",
        through_rank_0["server"],
        [2.0 * (n - 1) for n in SIZES],
        rtol=1e-9,
    ),
    claim(
        "... of any rank's link in a ring: never more than 4",
        through_rank_0["ring"],
        [4 * (n - 1) / n for n in SIZES],
        rtol=1e-9,
    ),
)
plot_lines(
    SIZES,
    through_rank_0,
    xlabel="ranks",
    ylabel="bytes through rank 0's link\n(times the model)",
    ticks=SIZES,
    title="A server's link carries everybody's gradients",
)

# %% [markdown]
# So a server is split over several machines, each with a part of the parameters. If every worker's
# machine also serves an equal part, the bytes per link are those of a reduce-scatter and an
# all-gather: the ring's.
#
# Now the time. While a worker computes, other gradients arrive and change the parameters.

# %%
# %%rank 0
stale_guess = predict(
    "5 equal workers, asynchronous: how many updates does a gradient miss on average?", guess=None
)
stale_guess

# %% [markdown]
# A simulator with a virtual clock runs real training under these rules. First worker 0 is three
# times as slow as the other four; for the guess all five are equal.

# %%
# %%rank 0
from minidist.parallel.parameter_server import Asynchronous, Synchronous, replay, simulate

WORKERS = 5
shape_of = make_mlp()
start = torch.cat([p.detach().flatten() for p in shape_of.parameters()])
names = [(name, p.shape, p.numel()) for name, p in shape_of.named_parameters()]


def loss_at(parameters, part) -> torch.Tensor:
    pieces = parameters.split([numel for _, _, numel in names])
    tensors = {n: p.view(s) for (n, s, _), p in zip(names, pieces, strict=True)}
    return cross_entropy(
        torch.func.functional_call(shape_of, tensors, train_x[part]), train_y[part]
    )


def worker_gradient(parameters, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    part = torch.randint(len(train_x), (32,), generator=generator)
    leaf = parameters.detach().requires_grad_()
    return torch.autograd.grad(loss_at(leaf, part), leaf)[0]


def serve_virtually(consistency, slow: float = 3.0, updates: int = 150, lr: float = 0.05):
    return simulate(
        worker_gradient,
        start,
        lambda p: torch.optim.SGD(p, lr=lr),
        num_workers=WORKERS,
        num_updates=updates,
        consistency=consistency,
        compute_s=lambda w, step, rng: rng.uniform(0.9, 1.1) * (slow if w == 0 else 1.0),
        evaluate=lambda p: loss_at(p, slice(0, 256)).item(),
    )


RULES = {
    "synchronous": Synchronous(),
    "synchronous, 1 backup": Synchronous(num_backups=1),
    "at most 2 ahead": Asynchronous(max_ahead=2),
    "asynchronous": Asynchronous(),
}
served = {name: serve_virtually(rule) for name, rule in RULES.items()}

# %%
# %%rank 0
figure, _ = new_figure(8.0, 5.6)
figure.clear()
with style():
    axes = figure.subplots(len(RULES), 1, sharex=True)
for ax, (name, result) in zip(axes, served.items(), strict=True):
    for each in result.intervals:
        if each.begin_s < 20:
            ax.broken_barh(
                [(each.begin_s, each.end_s - each.begin_s)],
                (each.worker + 0.1, 0.8),
                color=COLOURS["compute"],
                edgecolor="white",
            )
    ax.set_facecolor(COLOURS["idle"])
    done = sum(i.end_s <= 20 for i in result.intervals)
    ax.set_title(f"{name}: {done} gradients computed in 20 s", loc="left", fontweight="bold")
    ax.set(xlim=(0, 20), ylim=(WORKERS, 0), yticks=[0.5, 4.5], yticklabels=["slow", "worker 4"])
axes[-1].set_xlabel("virtual time (s); grey: waiting")
figure

# %% [markdown]
# Nobody waits under the asynchronous rule. But its gradients are old when they arrive:

# %%
# %%rank 0
figure, ax = new_figure(7.5, 3.0)
for index, (name, result) in enumerate(served.items()):
    histogram = result.report.histogram()
    total = sum(count for _, count in histogram)
    ax.bar(
        [missed + 0.2 * index - 0.3 for missed, _ in histogram],
        [count / total for _, count in histogram],
        0.2,
        color=PALETTE[index],
        label=name,
    )
ax.set(xlabel="staleness (updates missed)", ylabel="share of gradients")
ax.set_title("How old gradients are when they are applied", loc="left", fontweight="bold")
ax.set_xlim(-0.6, 16)
ax.legend(frameon=False)
figure

# %%
# %%rank 0
stale = {name: result.report for name, result in served.items()}
done_by = {n: sum(i.end_s <= 20 for i in r.intervals) for n, r in served.items()}
equal = serve_virtually(Asynchronous(), slow=1.0)
display(
    stale_guess.reveal(equal.report.mean_staleness),
    claim("synchronous: staleness of every gradient", max(stale["synchronous"].staleness), 0),
    claim(
        "synchronous: share of the workers' time that is waiting",
        served["synchronous"].idle_share,
        (">", 0.45),
    ),
    claim("asynchronous: share of waiting", served["asynchronous"].idle_share, 0.0, atol=1e-12),
    claim(
        "gradients in 20 s, asynchronous / synchronous",
        done_by["asynchronous"] / done_by["synchronous"],
        (">", 2.0),
    ),
    claim(
        "equal workers, asynchronous: mean staleness is about the number of other workers",
        equal.report.mean_staleness,
        WORKERS - 1,
        rtol=0.05,
    ),
    claim(
        "at most s = 2 ahead: the largest staleness is at most (n - 1)(2 s + 1)",
        max(stale["at most 2 ahead"].staleness),
        ("<=", (WORKERS - 1) * 5),
    ),
    claim(
        "one backup worker: gradients thrown away",
        stale["synchronous, 1 backup"].num_dropped,
        (">", 0),
    ),
)

# %% [markdown]
# The asynchronous server gets more gradients per second, but worse ones. A stale gradient is the
# gradient at another point, and it limits the learning rate: for a parabola with curvature h and a
# delay of d updates, gradient descent is stable only up to η·h = 2·sin(π/(4d + 2)) ([arXiv
# 1910.05124](https://arxiv.org/abs/1910.05124)). A fair comparison gives both the rate that suits
# them: a synchronous step averages five gradients, so its batch is five times as large, and it
# bears a larger rate (section 3). So the explorer opens with five times the rate for it (four with
# a backup worker); untick the box to see the comparison that flatters asynchronous training. Then
# raise the learning rate, or slow worker 0 down.


# %%
# %%rank 0
def server_explorer(
    rule: str = "asynchronous", slow: float = 3.0, lr: float = 0.05, fair: bool = True
):
    """Loss over virtual time under the chosen rule, beside the synchronous one."""
    figure, ax = new_figure(7.5, 3.2)
    for name in dict.fromkeys(("synchronous", rule)):
        averaged = {"synchronous": WORKERS, "synchronous, 1 backup": WORKERS - 1}.get(name, 1)
        rate = lr * averaged if fair else lr
        result = serve_virtually(RULES[name], slow, 40 if name[0] == "s" else 120, rate)
        times, losses = zip(*result.values, strict=True)
        colour = PALETTE[list(RULES).index(name)]
        ax.plot(times, losses, color=colour)
        stale = result.report.mean_staleness
        label = f"{name}, rate {rate:g}: mean staleness {stale:.1f}"
        ax.plot([], [], color=colour, label=label)
    ax.set(xlabel="virtual time (s)", ylabel="loss", ylim=(0, 4), xlim=(0, 40))
    ax.set_title(f"worker 0 is {slow:g} x slower", loc="left", fontweight="bold")
    ax.legend(frameon=False)
    return figure


explore(
    server_explorer,
    rule=list(RULES),
    slow=[1.0, 2.0, 3.0, 10.0],
    lr=[0.02, 0.05, 0.1, 0.2, 0.4],
    fair=True,
    labels={
        "rule": "consistency",
        "slow": "slowness of worker 0 (x)",
        "lr": "learning rate",
        "fair": "rate times the gradients that an update averages",
    },
    alt="Loss over virtual time for a synchronous server and the chosen rule",
)


# %%
# %%rank 0
def last_loss(rule, lr: float, updates: int) -> float:
    losses = [value for _, value in serve_virtually(rule, 1.0, updates, lr).values]
    return float(np.mean(losses[-10:]))


unstable = last_loss(Asynchronous(), 0.8, 100)
stable = last_loss(Synchronous(), 0.8, 100)
print(f"rate 0.8 after 100 updates: synchronous {stable:.2f}, asynchronous {unstable:.2f}")
display(
    claim("a rate that a synchronous server can use: loss", stable, ("<", 1.0)),
    claim("... with asynchronous workers, loss against it", not unstable < 1.5 * stable, True),
    claim(
        "largest stable rate at delay 4 (5 equal workers) / without delay",
        2 * math.sin(math.pi / 18) / (2 * math.sin(math.pi / 2)),
        0.1736,
        rtol=1e-3,
        authority="arXiv 1910.05124",
    ),
)

# %% [markdown]
# ### With real processes
#
# The same server with four real processes: rank 0 serves, three work. The order of arrivals is not
# reproducible, but it is written down, and replaying it in one process gives the same parameters,
# up to rounding. Two details that common listings get wrong: the *server* owns the optimizer
# (taking `lr` from a worker's `defaults` ignores schedules and momentum), and workers are
# processes, since the threads of one Python process share an interpreter lock.


# %%
# %%rank 0
def serve_or_work():
    from minidist.parallel.parameter_server import serve, work

    # On the CPU also where there are GPUs: the server takes whichever gradient comes first, and
    # NCCL can receive only from a rank that is named before.
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        return serve(
            start, lambda p: torch.optim.SGD(p, lr=0.05), num_updates=40, consistency=Asynchronous()
        )
    return work(worker_gradient, start)


real_parameters, report = run(serve_or_work, 4)[0]
again, _ = replay(
    worker_gradient,
    start,
    lambda p: torch.optim.SGD(p, lr=0.05),
    num_workers=3,
    arrivals=report.arrivals,
    consistency=Asynchronous(),
)
print("arrivals:", *report.arrivals[:20], "...  mean staleness", round(report.mean_staleness, 2))
claim(
    "real run and replay: largest difference",
    float((real_parameters - again).abs().max()),
    0.0,
    atol=1e-6,
)

# %% [markdown]
# Large models are trained synchronously today: with equal GPUs and fast networks nobody waits long,
# a run can be repeated, and staleness costs quality. Asynchronous training is used where workers
# differ or come and go.
#
# ## Which one first?
#
# Steps are too slow because of communication. A sensible order: overlap (lecture 3), then
# accumulation if the batch may grow, then fp16 or bf16 gradients, then PowerSGD or local SGD
# between slow nodes. Only the first changes nothing in the training.

# %%
# %%rank 0
bars = {
    "DDP, fp32": hooked_ms("fp32", 1),
    "DDP, fp16 hook": hooked_ms("fp16", 1),
    "4 micro-batches, no_sync (per micro-batch)": (lambda s: 1e3 * (s[1] - s[0]) / MICRO)(
        second_step(emulate.simulate(traces["no_sync"], ethernet(1)))
    ),
}
plot_bars(
    bars,
    xlabel="ms per micro-batch of 4 GPUs on 1 Gbit/s",
    form="{:.1f}",
    limit=1e3 * LAYERS * (FORWARD_S + BACKWARD_S),
    limit_label="compute alone",
)

# %% [markdown]
# ## Now you
#
# Three tasks, each with a cell that tries your answer.
#
# ### The noise scale
#
# Section 3 computed the noise scale with `cost.noise_scale`. Write it yourself. The squared norm of
# a gradient over B samples is |G|² + tr(Σ)/B on average. You are given this average for a small and
# for a large batch; solve for tr(Σ)/|G|². The cell after it tries your function on five cases.


# %%
# %%rank 0
def noise_scale(sq_small: float, sq_big: float, small: int, big: int) -> float | None:
    """Your turn. Two equations, two unknowns: |G|^2 and tr(Sigma)."""
    return None


# %%
# %%rank 0
CASES = [(0.5, 40.0, 8, 64), (2.0, 3.0, 1, 2), (1e-3, 5.0, 32, 1024), (7.0, 7.0, 4, 16)]
CASES += [(0.1, 90.0, 16, 4096)]  # |G|^2, tr(Sigma), small and large batch


def check_noise_scale(answer) -> str:
    for signal, trace, small, big in CASES:
        got = answer(signal + trace / small, signal + trace / big, small, big)
        if got is None:
            return "Not written yet."
        if not isinstance(got, int | float | np.number | torch.Tensor):
            return f"{got!r} is no number."
        if not math.isclose(got, trace / signal, rel_tol=1e-6):
            return f"|G|^2 = {signal}, tr = {trace}: expected {trace / signal:.6g}, got {got:.6g}."
    return f"Right, in all {len(CASES)} cases."


def by_library(sq_small: float, sq_big: float, small: int, big: int) -> float:
    return cost.noise_scale(grad_sq_small=sq_small, grad_sq_big=sq_big, small=small, big=big)


print(check_noise_scale(noise_scale))
display(
    claim("the library's answer", check_noise_scale(by_library), "Right, in all 5 cases."),
    claim(
        "tr / |G|^2 with the large batch's norm in place of |G|^2",
        check_noise_scale(lambda s, b, small, big: (s - b) / (1 / small - 1 / big) / b),
        lambda got: "expected" in got,
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `trace = (sq_small - sq_big) / (1 / small - 1 / big)`, and then
# `signal = sq_big - trace / big` and `return trace / signal`. The norm of the large batch's
# gradient alone is not |G|²: it still has tr(Σ)/B of noise in it.
#
# </details>
#
# ### int8 that loses nothing
#
# In section 4, error feedback kept what top-k did not send. Do the same for int8. A rank has a
# gradient and a residual, what it still owes. It sends their sum as whole numbers from −127 to 127
# times one step, the largest magnitude of the sum divided by 127; what rounding leaves is the next
# residual. The cell after it lets your function send a hundred gradients of three kinds. Mind the
# gradient that is zero everywhere.


# %%
# %%rank 0
def send_int8(gradient, residual) -> tuple | None:
    """Your turn. Return levels (a torch.int8 tensor), the step, and the new residual."""
    return None


# %%
# %%rank 0
def gradients_to_send() -> dict:
    generator = torch.Generator().manual_seed(4)
    small = torch.full((1000,), 1e-3)
    small[0] = 1.0  # makes the step 1/127: everything else is far below half of it
    return {
        "random": [torch.randn(1000, generator=generator) for _ in range(100)],
        "one large, 999 small": [small] * 100,
        "zero": [torch.zeros(10)] * 100,
    }


def one_send(where: str, owed, sent) -> str:
    """What is wrong with (levels, step, residual) for what was owed; "" if nothing."""
    if not isinstance(sent, tuple | list) or len(sent) != 3:
        return f"{where}: three values are wanted: levels, step and residual."
    levels, step, residual = sent[0], float(sent[1]), sent[2]
    for name, each in (("levels", levels), ("residual", residual)):
        if not isinstance(each, torch.Tensor) or each.shape != owed.shape:
            return f"{where}: {name}: a tensor like the gradient is wanted."
    if levels.dtype != torch.int8:
        return f"{where}: levels are {levels.dtype}."
    if int(levels.min()) < -127:
        return f"{where}: the level {int(levels.min())} has no positive counterpart."
    value = levels.float() * step
    if not (torch.isfinite(value).all() and torch.isfinite(residual).all()):
        return f"{where}: the step is {step:g}, and not all is finite."
    lost = (owed - value - residual).abs()
    k = int(lost.argmax())
    if lost[k] > 1e-5 * owed.abs().max():
        return (
            f"{where}: element {k} is {owed[k]:.4g} with the residual before. {value[k]:.4g} "
            f"travels and {residual[k]:.4g} stays: {owed[k] - value[k] - residual[k]:.2g} is lost."
        )
    k = int(residual.abs().argmax())
    if residual[k].abs() > 0.501 * step:
        return f"{where}: {residual[k]:.4g} stays of element {k}, half a step is {step / 2:.4g}."
    largest = float(owed.abs().max())
    if largest and not math.isclose(step, largest / 127, rel_tol=1e-4):
        return f"{where}: the step is {step:.4g}, {largest:.4g} / 127 is {largest / 127:.4g}."
    return ""


def check_int8(answer) -> str:
    arrived = torch.zeros(1000)
    for name, gradients in gradients_to_send().items():
        residual = torch.zeros_like(gradients[0])
        for number, gradient in enumerate(gradients, 1):
            sent = answer(gradient.clone(), residual.clone())
            if sent is None and name == "random":
                return "Not written yet."
            problem = one_send(f"{name}, gradient {number}", gradient + residual, sent)
            if problem:
                return problem
            residual = sent[2]
            if name.startswith("one large"):
                arrived += sent[0].float() * float(sent[1])
    return f"Right: of 100 times 0.001, {arrived[1:].mean():.3f} has arrived."


def with_int8(keep: str = "all", to_level=torch.round):
    def send(gradient, residual):
        owed = gradient if keep == "nothing" else gradient + residual
        step = owed.abs().max() / 127
        levels = to_level(owed / step).nan_to_num(0.0).to(torch.int8)
        left = (gradient if keep == "of the last" else owed) - levels * step
        return levels, step, torch.zeros_like(owed) if keep == "nothing" else left

    return send


print(check_int8(send_int8))
display(
    claim(
        "rounded, and the rest kept",
        check_int8(with_int8()),
        lambda got: got.startswith("Right: of 100 times 0.001, 0.1"),
    ),
    claim(
        "a residual of another shape",
        check_int8(lambda g, r: (*with_int8()(g, r)[:2], r[:1])),
        lambda got: "residual: a tensor like the gradient is wanted" in got,
    ),
    claim(
        "without a residual", check_int8(with_int8("nothing")), lambda got: got.endswith("lost.")
    ),
    claim(
        "the rest of this gradient only, without what was owed before",
        check_int8(with_int8("of the last")),
        lambda got: "gradient 2" in got and got.endswith("lost."),
    ),
    claim(
        "cut off instead of rounded",
        check_int8(with_int8(to_level=torch.trunc)),
        lambda got: "half a step" in got,
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# ```python
# owed = gradient + residual
# step = owed.abs().max() / 127
# levels = (owed / step).round().nan_to_num(0.0).to(torch.int8)  # 0 / 0 where all is zero
# return levels, step, owed - levels * step
# ```
#
# Without `nan_to_num` the answer is right where a NaN becomes 0 in int8, which is so on most CPUs
# and nowhere promised. An element of 0.001 beside one of 1 is below half a step of 1/127. It
# travels when its residual has grown above that, every eighth time or so; after a hundred gradients
# the sum is right but for half a step. `minidist.parallel.compression.Int8` agrees on the step with
# the other ranks first, so that levels of different ranks can be added.
#
# </details>
#
# ### A push to the server
#
# Section 6 used a server with bounded staleness. Write its heart: what happens when a gradient
# arrives. The server has
#
# - `parameters`, and `lr` of plain SGD;
# - `num_updates`, and `read[w]`: what `num_updates` was when worker w last took the parameters;
# - `finished[w]`, the gradients of worker w so far, and `max_ahead`;
# - `waiting`, the set of workers that have pushed and may not go on yet.
#
# Apply the gradient at once. Then let all waiting workers go on, the sender among them, who have
# finished at most `max_ahead` gradients more than the slowest worker; they take the new parameters.
# The cell after it pushes 180 gradients to your server and to the library's.


# %%
# %%rank 0
def push(server, worker: int, gradient) -> tuple[int, list[int]] | None:
    """Your turn. Return how many updates the gradient had missed, and who goes on, sorted."""
    return None


# %%
# %%rank 0
from types import SimpleNamespace

from minidist.parallel.parameter_server import Server


def check_push(answer) -> str:
    generator = torch.Generator().manual_seed(6)
    for ahead in (0, 1, None):
        theirs = Server(
            torch.ones(3), lambda p: torch.optim.SGD(p, lr=0.1), 4, Asynchronous(max_ahead=ahead)
        )
        server = SimpleNamespace(
            parameters=torch.ones(3),
            lr=0.1,
            num_updates=0,
            read=[0] * 4,
            finished=[0] * 4,
            max_ahead=math.inf if ahead is None else ahead,
            waiting=set(),
        )
        read, finished, free = [0] * 4, [0] * 4, {0, 1, 2, 3}
        for number in range(60):
            choice = sorted(free)[int(torch.randint(len(free), (), generator=generator))]
            gradient = torch.randn(3, generator=generator)
            got = answer(server, choice, gradient.clone())
            if got is None:
                return "Not written yet."
            if not isinstance(got, tuple | list) or len(got) != 2:
                return "Two values are wanted: how many were missed, and who goes on."
            where = f"max_ahead {server.max_ahead}, push {number + 1}, worker {choice}"
            missed = number - read[choice]
            if got[0] != missed:
                return (
                    f"{where}: it read after update {read[choice]}, {number} were made: "
                    f"{missed} missed, you say {got[0]}."
                )
            released = theirs.push(choice, gradient)
            finished[choice] += 1
            free = (free - {choice}) | set(released)
            for w in released:
                read[w] = number + 1
            if list(got[1] or ()) != released:
                return f"{where}: finished {finished}: {released} go on, you release {got[1]}."
            if not torch.allclose(server.parameters, theirs.parameters, atol=1e-5):
                first = f"{server.parameters[0]:.4g}, expected {theirs.parameters[0]:.4g}"
                return f"{where}: the first parameter is {first}."
    return "Right, in all 180 pushes."


def one_push(server, worker: int, gradient, fault: str = ""):
    missed = server.num_updates - server.read[worker] + (fault == "counts itself")
    server.parameters = server.parameters - server.lr * gradient
    server.num_updates += 1
    server.finished[worker] += 1
    server.waiting.add(worker)
    limit = min(server.finished) + server.max_ahead
    asked = {worker} if fault == "forgets who waits" else server.waiting
    released = sorted(w for w in asked if server.finished[w] <= limit)
    for w in released:
        server.waiting.discard(w)
        if fault != "old parameters":
            server.read[w] = server.num_updates
    return missed, released


def with_fault(fault: str) -> str:
    return check_push(lambda *arguments: one_push(*arguments, fault=fault))


print(check_push(push))
display(
    claim(
        "beside the library's server, the two values in a list",
        check_push(lambda *arguments: list(one_push(*arguments))),
        "Right, in all 180 pushes.",
    ),
    claim(
        "its own update counts as missed",
        with_fault("counts itself"),
        lambda got: "push 1," in got and "0 missed, you say 1" in got,
    ),
    claim(
        "only the sender may go on: the others wait for ever",
        with_fault("forgets who waits"),
        lambda got: "max_ahead 0" in got and "[0, 1, 2, 3] go on" in got,
    ),
    claim(
        "nobody notes what a worker has read",
        with_fault("old parameters"),
        lambda got: "missed, you say" in got,
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# ```python
# missed = server.num_updates - server.read[worker]
# server.parameters -= server.lr * gradient
# server.num_updates += 1
# server.finished[worker] += 1
# server.waiting.add(worker)
# limit = min(server.finished) + server.max_ahead
# released = sorted(w for w in server.waiting if server.finished[w] <= limit)
# for w in released:
#     server.waiting.discard(w)
#     server.read[w] = server.num_updates
# return missed, released
# ```
#
# With `max_ahead` 0 the workers go in lockstep, and still a gradient misses updates: those of the
# workers that were faster in this round.
#
# </details>
#
# ## Summary
#
# - Accumulated gradients of equal micro-batches, each loss divided by k, are the gradient of the
#   joint batch. For unequal ones weigh by tokens. Step at `(i + 1) % k == 0`, and flush the tail.
# - `no_sync` around forward *and* backward of all but the last micro-batch: a k-th of the traffic.
# - Noise falls as 1/√B. k times the batch bears k times the rate (SGD) or √k times (Adam), with
#   warm-up, up to the critical batch size.
# - Warm-up starts above 0 and reaches the peak.
# - Compression helps where the network is the bottleneck. Error feedback keeps what did not travel.
#   Top-k's traffic grows with N.
# - Local SGD sends parameters every H steps. It is another algorithm. DiLoCo adds an outer
#   optimizer with momentum, and works over a slow wire between data centres.
# - Asynchronous servers do not wait, and pay with stale gradients, which need small rates.
#
# ## Questions
#
# 1. You train on 8 GPUs, 16 samples each, and get only 2 GPUs. How do you keep the batch, and what
#    changes?
#
# <details><summary>Answer</summary>
#
# Accumulate over 4 micro-batches of 16 on each of the 2 GPUs: 2 · 4 · 16 = 128. Gradients, learning
# rate and schedule stay. Time per step grows about fourfold. BatchNorm normalises over 16 samples
# as before (its running statistics now move four times per step); with SyncBatchNorm it saw 128 and
# now sees 32.
#
# </details>
#
# 2. A loop divides the loss by k, uses `no_sync` rightly, and clips after *every* backward. What
#    happens?
#
# <details><summary>Answer</summary>
#
# Partial sums are clipped, on each rank by its own norm, and again with the next micro-batch. The
# result is neither the mean nor a clipped mean. Clip once, after the synchronised backward.
#
# </details>
#
# 3. The tail group has 2 of 4 micro-batches. A colleague divides by 4 there too. What does it
#    amount to?
#
# <details><summary>Answer</summary>
#
# With SGD it is a step with half the learning rate. Adam ignores a factor that *all* steps have,
# but not a factor that one step has: this gradient enters its first average with half of its
# weight, and its square enters the second with a quarter. Training survives it; dividing by
# `len(group)` is right.
#
# </details>
#
# 4. Why does fp16 compression divide by N *before* the all-reduce?
#
# <details><summary>Answer</summary>
#
# The sum of N numbers may pass 65,504 though their mean does not. The price: numbers fall below
# fp16's smallest one N times earlier.
#
# </details>
#
# 5. PowerSGD sends two thin matrices. Why can they be all-reduced, while top-k's pairs cannot?
#
# <details><summary>Answer</summary>
#
# M·Q is linear in M and all ranks use the same Q, so the mean of the products is the product of the
# mean. Top-k elements of different ranks sit at different places.
#
# </details>
#
# 6. Twice the GPUs, twice the batch, and the loss after the same *number of samples* is worse. Is
#    data parallelism broken?
#
# <details><summary>Answer</summary>
#
# No. Half as many steps were taken. The learning rate was not scaled, or the batch is beyond its
# critical size, or both.
#
# </details>
#
# 7. DiLoCo needs H times fewer bytes than DDP. What does a rank pay for it?
#
# <details><summary>Answer</summary>
#
# Two more numbers per parameter (the weights of the last meeting, and the outer momentum), three
# numbers to tune (H, the outer rate and momentum), and replicas that differ between meetings:
# evaluate and save after one.
#
# </details>
#
# ## Try it
#
# - Give DiLoCo an inner rate of 0.003 in section 5. What does the outer momentum do now, and which
#   `outer_lr` mends it?
# - Train with 4, 8 and 16 accumulation steps at the same global batch. Are the loss curves the
#   same? To how many digits?
# - Replace SGD by Adam in section 3. Which rule, linear or square root, keeps the curves together?
# - Give `PowerSGD` ranks 1 to 32 in section 4 and draw error against bytes. Or write it yourself:
#   [**bonus_powersgd**](../labs/bonus_powersgd/bonus_powersgd.ipynb) asks for the power iteration,
#   error feedback and a checkpoint, and counts what you send.
# - Let worker 0 die (`compute_s` of 10⁶) under each rule of section 6.
#
# Then do it yourself:
# [**lab2_accumulation**](../labs/lab2_accumulation/lab2_accumulation.ipynb) asks for the loop, the
# tail, `no_sync`, weights and the combination with clipping and mixed precision, and judges the
# traffic on the emulated cluster.
#
# ## What to read
#
# - *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*,
#   [arXiv 1706.02677](https://arxiv.org/abs/1706.02677)
# - *An Empirical Model of Large-Batch Training*,
#   [arXiv 1812.06162](https://arxiv.org/abs/1812.06162)
# - *PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization*,
#   [arXiv 1905.13727](https://arxiv.org/abs/1905.13727)
# - *Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training*
#   (top-k), [arXiv 1712.01887](https://arxiv.org/abs/1712.01887)
# - *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*,
#   [arXiv 1901.09847](https://arxiv.org/abs/1901.09847)
# - *Local SGD Converges Fast and Communicates Little*,
#   [arXiv 1805.09767](https://arxiv.org/abs/1805.09767)
# - *DiLoCo: Distributed Low-Communication Training of Language Models*,
#   [arXiv 2311.08105](https://arxiv.org/abs/2311.08105)
# - *Revisiting Distributed Synchronous SGD* (backup workers),
#   [arXiv 1604.00981](https://arxiv.org/abs/1604.00981)
# - *PipeMare: Asynchronous Pipeline Parallel DNN Training* (the delay's limit on the rate),
#   [arXiv 1910.05124](https://arxiv.org/abs/1910.05124)
