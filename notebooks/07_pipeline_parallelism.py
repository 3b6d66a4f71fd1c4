# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 4
#     language: python
#     name: torchrun-4
# ---

# %% [markdown]
# # 7 · Pipeline parallelism
#
# A model that does not fit on one GPU can be cut between its layers. The first GPU gets the first
# layers, the next GPU the next ones, and activations travel from one to the other. Each GPU then
# holds only its own **stage**. That solves the memory problem and creates another one: a stage can
# do nothing until something arrives. Everything in this lecture is about keeping stages busy.
#
# After it you can
#
# - compute how much of a step a pipeline wastes, and say *of what* a quoted "bubble" is a share;
# - read and draw the schedules GPipe, 1F1B, interleaved 1F1B and zero bubble, and say what each one
#   buys and pays;
# - say what PipeDream does differently, why it needs weight stashing, and what stale weights cost;
# - write the backward pass of a pipeline, and spot one that cannot train;
# - cut a model into stages that take equally long;
# - decide between a pipeline and data parallelism for a given network.
#
# It takes about 80 minutes. **The kernel is *torchrun × 4***: every cell runs on four ranks, and
# they will be the four stages of a real pipeline. Cells that begin with `%%rank 0` compute, draw
# and check things on one rank. Six times the lecture asks for your guess before it measures. Write
# it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: a longer run of PipeDream, and more points in the last figure

# %%
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from minidist.device import choose_backend, choose_device
from minidist.parallel.pipeline import (
    PipeDreamExecutor,
    PipelineExecutor,
    Schedule,
    StageTimes,
    balance,
    gather_timeline,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    peak_activations,
    pipedream,
    simulate,
    split_model,
    staleness,
    zb_h1,
)

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = choose_device()  # a GPU of its own where there are enough, else the CPU
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(choose_backend(), timeout=timedelta(seconds=60))

# %% [markdown]
# Rank 0 needs a few names more, to draw and to check.

# %%
# %%rank 0
# %matplotlib inline
import math
import random
from dataclasses import replace

import numpy as np
from IPython.display import display

from minidist import cost, emulate
from minidist.claims import claim
from minidist.emulate.teach import run_traced
from minidist.parallel.pipeline.program import num_messages
from minidist.plots import (
    COLOURS,
    PALETTE,
    new_figure,
    plot_bars,
    plot_lines,
    plot_pipeline,
    plot_timeline,
    style,
)
from minidist.widgets import explore, predict

# %% [markdown]
# Here is the whole lecture in one picture: the same work under four schedules. There are four ranks
# and eight micro-batches, each rank does the same amount of computing in all four rows, and
# everything light grey is a GPU that waits. Numbers name micro-batches; bold ones belong to a
# rank's second chunk of layers.


# %%
# %%rank 0
def draw_all(timelines: dict, width_s: float | None = None):
    """Several schedules below each other, on one time axis."""
    figure, _ = new_figure(8.5, 0.7 + sum(0.55 + 0.27 * len(t.spans) for t in timelines.values()))
    figure.clear()
    rows = [len(t.spans) + 1 for t in timelines.values()]
    with style():
        axes = figure.subplots(len(rows), 1, sharex=True, height_ratios=rows, squeeze=False)[:, 0]
    for ax, (title, timeline) in zip(axes, timelines.items(), strict=True):
        plot_pipeline(timeline, title=title, ax=ax)
        ax.set_xlabel("")
    axes[-1].set_xlim(0, width_s or max(t.makespan_s for t in timelines.values()))
    axes[-1].set_xlabel("time (one forward of one micro-batch on one stage = 1)")
    return figure


# %%
# %%rank 0
half = StageTimes(0.5, 0.5, 0.5)  # a chunk of half a stage takes half as long
draw_all(
    {
        "GPipe: all forwards, then all backwards": simulate(gpipe(4, 8)),
        "1F1B: the same bubble, half of the activations": simulate(one_f_one_b(4, 8)),
        "interleaved 1F1B: two chunks of layers per rank": simulate(interleaved(4, 8, 2), half),
        "ZB-H1: weight gradients fill the gaps": simulate(zb_h1(4, 8)),
    }
)

# %% [markdown]
# ## 1 · Model parallelism without a pipeline
#
# Cut the model into p stages and change nothing else. A batch passes stage 0, then stage 1, and so
# on; its gradient comes back the same way. At any moment **one** stage works.
#
# In code it is a `.to(device)` between the parts: first half, transfer, second half. Autograd
# remembers the moves and sends gradients back over them.

# %%
# %%rank 0
from minidist.model import ResNet
from minidist.parallel.pipeline import ModelParallel

two_gpus = torch.cuda.device_count() >= 2
devices = ["cuda:0", "cuda:1"] if two_gpus else ["cpu", "cpu"]  # two names, one code
torch.manual_seed(0)
resnet = ResNet(width=8).double().eval()
images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
whole_output = resnet(images).detach()
halves = ModelParallel(split_model(resnet, 2), devices)  # moves each half to its device
claim(
    "a ResNet in two halves gives the output of the whole: largest difference",
    float((halves(images).detach().cpu() - whole_output).abs().max()),
    ("<", 1e-9),
)

# %% [markdown]
# What it costs is drawn below. Gradients come back from the last GPU to the first, so a drawing
# that lets the first GPU start its backward pass first has the arrows the wrong way round.

# %%
# %%rank 0
model_parallel = simulate(naive(3), StageTimes(40, 40, 0, p2p_s=5))  # in milliseconds
figure = plot_pipeline(model_parallel, title="12 layers of 10 ms on 3 GPUs, transfers of 5 ms")
figure.axes[0].set_xlabel("time (ms)")
figure

# %% [markdown]
# A common exercise asks for the time of exactly this: 12 layers on 3 GPUs, 10 ms per layer, 5 ms
# per transfer, and a backward pass that is as long as the forward pass. Its printed answer counts
# the four layers of *one* GPU. But the GPUs work one after the other, so all twelve layers count.

# %%
# %%rank 0
example = cost.naive_model_parallel(num_layers=12, num_gpus=3, layer_s=0.010, transfer_s=0.005)
printed = "the answer printed below a common exercise"
first_backward = [
    min(s.start_s for s in row if s.action.kind == "B") for row in model_parallel.spans
]
display(
    claim(
        "forward pass of 12 layers on 3 GPUs, naive, ms",
        1e3 * example.forward_s,
        12 * 10 + 2 * 5,
        rtol=1e-9,
        status="corrected",
        said=50,
        refutes=printed,
        why="all 12 layers run one after the other, on whichever GPU they are",
    ),
    claim(
        "forward and backward, ms, from the simulator",
        model_parallel.makespan_s,
        1e3 * example.total_s,
        rtol=1e-9,
        status="corrected",
        said=100,
        refutes=printed,
        why="twice 130 ms",
    ),
    claim(
        "GPU utilisation of that, %",
        100 * (1 - model_parallel.bubble_fraction),
        100 * 240 / (3 * 260),
        rtol=1e-9,
        status="corrected",
        said=40,
        refutes=printed,
        why="240 ms of work on 3 x 260 ms; one of three GPUs at a time cannot exceed 33.3 %",
    ),
    claim(
        "stages begin their backward pass from the last to the first",
        bool(first_backward[2] < first_backward[1] < first_backward[0]),
        True,
        status="corrected",
        said=False,
        refutes="a common drawing of naive model parallelism",
        why="gradients flow from the last stage to the first",
    ),
)

# %% [markdown]
# Without transfers the utilisation is exactly 1/p: two GPUs are each idle half of the time, eight
# are idle 7/8 of the time. You often read that naive model parallelism "does not scale beyond two
# to four GPUs". There is no such threshold. It does not scale at all: p GPUs are at best as fast as
# one. What it gives you is memory.

# %%
# %%rank 0
gpu_counts = (1, 2, 4, 8, 16)
used = [1 - simulate(naive(p, 3)).bubble_fraction for p in gpu_counts]
speed_up = [p * u for p, u in zip(gpu_counts, used, strict=True)]
display(
    claim(
        "naive utilisation on 1, 2, 4, 8, 16 GPUs is 1/p",
        used,
        [1 / p for p in gpu_counts],
        rtol=1e-12,
    ),
    claim(
        "speed-up of naive model parallelism, on 2 and on 16 GPUs",
        [speed_up[1], speed_up[4]],
        [1.0, 1.0],
        rtol=1e-12,
        status="corrected",
        refutes="a common summary",
        said="scales to 2 to 4 GPUs",
        why="one GPU works at a time at any p; transfers make it slower than one GPU",
    ),
)

# %% [markdown]
# ## 2 · Micro-batches: GPipe
#
# Cut the batch into m **micro-batches**. As soon as stage 0 has passed on the first one, it takes
# the second, while stage 1 works on the first. That is a pipeline. GPipe
# ([arXiv 1811.06965](https://arxiv.org/abs/1811.06965)) does all m forward passes, then all m
# backward passes, then one optimizer step. Gradients add up over the micro-batches, as in gradient
# accumulation (`lab2_accumulation`), so the result is the gradient of the whole batch. Only layers
# that mix samples notice the cut: batch norm takes its statistics over a micro-batch.

# %%
# %%rank 0
wait_guess = predict(
    "GPipe, 3 stages, m = 4: how long does stage 0 wait before its first backward?",
    guess=None,
    unit="forwards",
)
wait_guess

# %% [markdown]
# In the figure a backward pass takes as long as two forward passes.

# %%
# %%rank 0
figure = plot_pipeline(
    simulate(gpipe(3, 4)), title="GPipe, 3 stages, 4 micro-batches, backward = 2 forwards"
)
figure.axes[0].set_xlabel("time (one forward = 1)")
figure

# %%
# %%rank 0
rows = simulate(gpipe(3, 4)).spans
wait = [rows[r][4].start_s - rows[r][3].end_s for r in range(3)]  # last forward to first backward
dealt = simulate(gpipe(4, 12))
display(
    wait_guess.reveal(wait[0]),
    claim(
        "the stage that starts its backward pass first (of 0, 1, 2)",
        int(np.argmin([row[4].start_s for row in rows])),
        2,
        status="corrected",
        said=0,
        refutes="a common drawing of GPipe",
        why="backward enters at the last stage, where the loss is, and comes back from there",
    ),
    claim(
        "waiting time between forward and backward, stages 0 to 2",
        wait,
        [6.0, 3.0, 0.0],
        atol=1e-12,
    ),
    claim(
        "micro-batches that each of 4 stages works on, of 12",
        len(dealt.spans[0]) // 2,
        12,
        status="corrected",
        said=3,
        refutes="a common drawing that deals them out, 3 to a stage",
        why="every micro-batch passes every stage; dealing them out is data parallelism",
    ),
)

# %% [markdown]
# ### How large is the bubble?
#
# The idle time of a stage is called the **bubble**. Let a stage need t for the forward and backward
# pass of one micro-batch. Then a stage works m·t. The first micro-batch needs p − 1 further stages
# to get through, so the step takes (m + p − 1)·t, and each stage is idle for (p − 1)·t.
#
# Now divide. There are two things to divide by, and they get mixed up a lot:
#
# | idle time as a share of | formula | p = 3, m = 4 |
# |---|---|---|
# | the **step** | (p − 1) / (m + p − 1) | 1/3 |
# | the **ideal time** m·t, the step without a bubble | (p − 1) / m | 1/2 |
#
# Both are in use. Megatron-LM's paper ([arXiv 2104.04473](https://arxiv.org/abs/2104.04473),
# section 2.2) gives the second one, and says so. The mistake is to take the second one and to
# compute "efficiency = 1 − bubble".

# %%
# %%rank 0
slides = "common lecture slides"
ours = simulate(gpipe(3, 4))
worked_s = ours.busy_s(0)
display(
    claim(
        "bubble of 3 stages, 4 micro-batches, as a share of the step",
        ours.bubble_fraction,
        cost.bubble_fraction(num_stages=3, num_microbatches=4),
        rtol=1e-12,
        status="corrected",
        said=0.5,
        refutes=slides,
        why="0.5 is idle time / ideal time; of the step it is 2/6",
    ),
    claim(
        "... and as a share of the ideal time",
        (ours.makespan_s - worked_s) / worked_s,
        cost.bubble_ratio(num_stages=3, num_microbatches=4),
        rtol=1e-12,
        authority="arXiv 2104.04473, section 2.2",
    ),
    claim(
        "the two differ by the factor (m + p - 1) / m",
        0.5 / ours.bubble_fraction,
        (4 + 2) / 4,
        rtol=1e-12,
    ),
    claim(
        "bubble of the step: (2 stages, 8), (2, 4) and (3 stages, 8 micro-batches)",
        [simulate(gpipe(p, m)).bubble_fraction for p, m in ((2, 8), (2, 4), (3, 8))],
        [1 / 9, 1 / 5, 1 / 5],
        rtol=1e-12,
    ),
)

# %% [markdown]
# The error is largest when there are few micro-batches. For 4 stages and 2 micro-batches
# "1 − (p − 1)/m" gives an efficiency of *minus* 50 %.

# %%
# %%rank 0
counts = (4, 8, 16, 32)
efficiency = [100 * (1 - simulate(gpipe(4, m)).bubble_fraction) for m in counts]
for m, measured, said in zip(counts, efficiency, (25.0, 62.5, 81.25, 90.625), strict=True):
    display(
        claim(
            f"efficiency of 4 stages with {m} micro-batches, %",
            measured,
            100 * m / (m + 3),
            rtol=1e-12,
            status="corrected",
            said=said,
            refutes="a common listing",
            why="1 - (p - 1)/m is no efficiency; m / (m + p - 1) is",
        )
    )

# %%
# %%rank 0
ms = np.arange(4, 65)
plot_lines(
    ms,
    {
        "share of the step": [cost.bubble_fraction(num_stages=8, num_microbatches=m) for m in ms],
        "share of the ideal time": 7 / ms,
    },
    xlabel="micro-batches m",
    ylabel="bubble (idle time / …)",
    title="The same idle time, 8 stages, two denominators",
    ideal={"all of the step": np.ones(len(ms))},
)

# %% [markdown]
# ### Calculator: how many micro-batches do I need?

# %%
# %%rank 0
needed_guess = predict(
    "How many micro-batches does a pipeline of 8 stages need to be busy 90 % of a step?",
    guess=None,
)
needed_guess

# %% [markdown]
# Move p, the target and the number of chunks (v, section 6). The curve is the formula; the dots are
# the simulator, which knows no formula and only plays the schedule through.


# %%
# %%rank 0
def bubble_calculator(p: int = 8, target: int = 90, v: int = 1):
    """Utilisation of a pipeline against the number of micro-batches, with the target marked."""
    args = {"num_stages": p, "virtual_stages": v}
    needed = cost.microbatches_for(**args, utilization=target / 100)
    few = [m for m in (p, 2 * p, 4 * p, 8 * p) if m * p * v <= 4096]
    line = np.arange(1, max(needed, 8 * p) + 1)
    dots = [1 - simulate(interleaved(p, m, v)).bubble_fraction for m in few]
    curve = [100 * cost.pipeline_utilization(**args, num_microbatches=int(m)) for m in line]
    figure = plot_lines(
        {"formula": line, "simulated": few},
        {"formula": curve},
        xlabel="micro-batches m",
        ylabel="utilisation (%)",
        title=f"p = {p}, v = {v}: {target} % needs m = {needed}",
    )
    ax = figure.axes[0]
    ax.plot(few, [100 * d for d in dots], "o", color=COLOURS["communication"], label="simulated")
    ax.plot([0, needed, needed], [target, target, 0], "--", color="#6B6B6B", linewidth=1)
    figure.legend(frameon=False, loc="outside upper right")
    ax.set_ylim(0, 105)
    return figure


explore(
    bubble_calculator,
    p=(2, 32),
    target=[50, 80, 90, 95],
    v=[1, 2, 4],
    labels={"p": "stages p", "target": "wanted utilisation (%)", "v": "chunks per rank v"},
    alt="Utilisation rises with the number of micro-batches; simulated dots lie on the curve",
)

# %% [markdown]
# "Pipelines scale to 8 to 64 devices" is another sentence without a reason. A pipeline can have as
# many stages as the model has layers. What must grow with p is m: a constant utilisation of u needs
# m = (p − 1)·u/(1 − u), so 90 % needs nine micro-batches per further stage. So the batch grows with
# p, and how large a batch your optimizer can still use is the other limit (lecture 4).

# %%
# %%rank 0
needed = [cost.microbatches_for(num_stages=p, utilization=0.9) for p in (2, 4, 8, 64, 128)]
display(
    needed_guess.reveal(needed[2]),
    claim(
        "micro-batches for 90 % on 2, 4, 8, 64 and 128 stages are 9 (p - 1)",
        needed,
        [9 * (p - 1) for p in (2, 4, 8, 64, 128)],
        status="corrected",
        refutes="a common table",
        said="8 to 64 devices",
        authority="arXiv 2104.04473",
        why="any number of stages reaches 90 % if m grows with it",
    ),
    claim(
        "stages of the pipeline that ran 1 trillion parameters on 3,072 A100",
        64,
        status="cited",
        authority="Narayanan et al., arXiv 2104.04473, table 1",
    ),
    claim(
        "with m = 4 p the bubble is below a fifth of the step, at every p up to 64",
        [cost.bubble_fraction(num_stages=p, num_microbatches=4 * p) for p in range(2, 65)],
        ("<", 0.2),
        authority="GPipe, arXiv 1811.06965, calls it negligible from there",
    ),
)

# %% [markdown]
# ## 3 · Write it: the backward pass of a pipeline
#
# Let us build GPipe's step in one process first, with p parts of a model that could be on p
# devices. Below is how it is often written. The forward pass runs under `no_grad`, since that saves
# memory, and it stores detached outputs for a backward pass to come. `no_grad` turns out to be a
# mistake, so somebody removes it and keeps the rest.

# %%
# %%rank 0
careless_guess = predict(
    "Without no_grad, outputs detached: how many parts of 4 get a gradient?",
    guess=None,
)
careless_guess

# %% [markdown]
# Both forms are below, first with `no_grad` and then without.


# %%
def make_parts(num_parts: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).double() for _ in range(num_parts)]


def careless_forward(parts, batch, m: int, *, no_grad: bool, detach: bool):
    """A forward pass over parts that forgets how it got there."""
    outputs = []
    for x in batch.chunk(m):
        for index, part in enumerate(parts):
            with torch.set_grad_enabled(not no_grad):
                x = part(x)
            if detach and index < len(parts) - 1:
                x = x.detach()  # as if it had been copied to another device by hand
        outputs.append(x)
    return torch.cat(outputs)


def num_trained(parts) -> int:
    return sum(any(w.grad is not None for w in part.parameters()) for part in parts)


generator = torch.Generator().manual_seed(1)
batch = torch.randn(32, 16, dtype=torch.float64, generator=generator)
goal = torch.tanh(batch.flip(1))

# %%
# %%rank 0
parts = make_parts()
try:
    nn.functional.mse_loss(
        careless_forward(parts, batch, 8, no_grad=True, detach=True), goal
    ).backward()
    message = "it worked"
except RuntimeError as error:
    message = str(error).splitlines()[0]
print(message)
without_graph = num_trained(parts)

# Without no_grad it runs.
parts = make_parts()
nn.functional.mse_loss(
    careless_forward(parts, batch, 8, no_grad=False, detach=True), goal
).backward()
without_links = num_trained(parts)
display(
    careless_guess.reveal(without_links),
    claim("under no_grad, loss.backward() raises", "does not require grad" in message, True),
    claim("parts of 4 with a gradient, under no_grad", without_graph, 0),
    claim("parts of 4 with a gradient, detached between parts (it runs!)", without_links, 1),
)

# %% [markdown]
# The second form is the dangerous one. It raises nothing, the last part learns, so the loss can
# fall, and three quarters of the model stay at their random initial values.
#
# Cutting the graph at a stage boundary is right: stages live in different processes, and an
# autograd graph ends where its process ends. (Only the RPC framework's
# [distributed autograd](https://docs.pytorch.org/docs/stable/rpc/distributed_autograd.html) goes
# further.) But a cut must be **sewn together by hand**:
#
# - forward: the input of a stage becomes a *leaf* that asks for a gradient
#   (`x.detach().requires_grad_()`), and input and output are kept;
# - backward: the gradient of a stage's input is the gradient of the previous stage's output. Send
#   it there, and call backward on the kept output with it.


# %%
def forward_pipeline(parts, batch, goal, m: int):
    """Every micro-batch through every part; keeps what the backward pass needs."""
    kept = []
    for x, target in zip(batch.chunk(m), goal.chunk(m), strict=True):
        cuts = []
        for part in parts:
            x = x.detach().requires_grad_()  # a leaf: here a new graph begins
            y = part(x)
            cuts.append((x, y))
            x = y
        kept.append((cuts, nn.functional.mse_loss(y, target) / m))  # a mean: each counts 1/m
    return kept


def backward_pipeline(kept) -> None:
    """Last part first; what arrives at a part's input goes to the output of the part before."""
    for cuts, loss in kept:
        loss.backward()  # the last part, down to its leaf
        for stage in range(len(cuts) - 2, -1, -1):
            gradient = cuts[stage + 1][0].grad  # this is what a rank sends to the one before
            cuts[stage][1].backward(gradient)


# %%
# %%rank 0
def gradients(model) -> torch.Tensor:
    return torch.cat([w.grad.flatten() for w in model.parameters()])


sewn = nn.Sequential(*make_parts())
backward_pipeline(forward_pipeline(sewn, batch, goal, 8))
whole = nn.Sequential(*make_parts())
nn.functional.mse_loss(whole(batch), goal).backward()
difference = (gradients(sewn) - gradients(whole)).abs().max() / gradients(whole).abs().max()
display(
    claim("parts of 4 with a gradient, sewn", num_trained(sewn), 4),
    claim(
        "largest difference from one backward pass of the whole batch, relative",
        float(difference),
        ("<", 1e-12),
    ),
)

# %% [markdown]
# ### The same over four ranks
#
# `PipelineExecutor` does this with one stage per rank and messages between them. What a rank does
# is a plain list, made from the schedule: computations, and exchanges of messages between them.
# Here is the list of rank 1 of 3 under 1F1B. `lib/minidist/parallel/pipeline/program.py` explains
# why no order of sends in it can ever deadlock.

# %%
# %%rank 0
from minidist.parallel.pipeline import make_program

print("\n".join(map(str, make_program(one_f_one_b(3, 3))[1])))

# %% [markdown]
# Now the four ranks of this notebook train one step of a small GPT under every schedule. Each rank
# also computes the whole batch by itself and compares its stage's gradients with it. The cell keeps
# the largest relative difference, and how many micro-batches each rank held at most.

# %%
from minidist.data import make_tokens
from minidist.model import GPT, GPTConfig, lm_loss

config = GPTConfig(vocab_size=32, context=8, width=32, num_layers=6, num_heads=4)
p = world_size
inputs, targets = (t.to(device) for t in make_tokens(4 * p, 8, 32))


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(config).double().to(device)


# %%
oracle = make_gpt()
lm_loss(oracle(inputs), targets).backward()
expected = dict(oracle.named_parameters())
errors, held = {}, {}
for schedule in (
    naive(p, 2 * p),
    gpipe(p, 2 * p),
    one_f_one_b(p, 2 * p),
    interleaved(p, 2 * p, 2),
    zb_h1(p, 2 * p),
):
    stages = split_model(make_gpt(), schedule.num_stages)[rank::p]
    result = PipelineExecutor(stages, schedule, lm_loss).step(inputs, targets)
    error = max(
        (w.grad - expected[name].grad).abs().max() / expected[name].grad.abs().max()
        for stage in stages
        for name, w in stage.named_parameters()
    )
    both = [None] * p
    dist.all_gather_object(both, (float(error), result.peak_activations))
    errors[schedule.name], held[schedule.name] = max(e for e, _ in both), [h for _, h in both]

# %% [markdown]
# All errors are rounding. What each rank held differs from schedule to schedule; section 4 says
# why.

# %%
# %%rank 0
for name, peaks in held.items():
    print(f"{name:18} largest error {errors[name]:.1e}   held at most {peaks}")
claim(
    "gradients of 5 schedules on real ranks against one process, largest relative error",
    max(errors.values()),
    ("<", 1e-9),
)

# %% [markdown]
# ### A real timeline
#
# The executor can record when each action ran. To see four stages on a machine with two cores, each
# stage below *pauses* for 15 ms in its forward pass and for 30 ms in its backward pass, in place of
# the computing that a GPU would do. Messages, order and waiting are real. Where every rank has a
# GPU the pauses are left out, and the layers are larger.


# %%
import time


class Pause(torch.autograd.Function):
    """Passes x on unchanged; takes `seconds` forward and twice that backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    def __init__(self, stage: nn.Module, seconds: float) -> None:
        super().__init__()
        self.stage, self.seconds = stage, seconds

    def forward(self, x):
        return Pause.apply(self.stage(x), self.seconds) if self.seconds else self.stage(x)


# %%
on_gpu = device.type == "cuda"
torch.manual_seed(0)
width = 2048 if on_gpu else 32
blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2 * p)))
x = torch.randn(8 * (256 if on_gpu else 2), width)
recorded = {}
for schedule in (gpipe(p, 8), one_f_one_b(p, 8), interleaved(p, 8, 2)):
    pause = 0.0 if on_gpu else 0.015 / schedule.num_chunks
    stages = [Slow(s, pause).to(device) for s in split_model(blocks, schedule.num_stages)[rank::p]]
    pipeline = PipelineExecutor(stages, schedule, nn.functional.mse_loss, record=True)
    for _ in range(2):  # the first step agrees on shapes
        result = pipeline.step(x, torch.zeros_like(x))
    recorded[schedule.name] = gather_timeline(schedule, result.spans)

# %% [markdown]
# We draw the recorded times in units of one stage's forward pass, like the simulated ones.


# %%
# %%rank 0
def in_forwards(timeline):
    """The same timeline in units of a stage's forward pass: 15 ms, or what the GPU took for it."""
    took = [s.end_s - s.start_s for row in timeline.spans for s in row if s.action.kind == "F"]
    chunks = timeline.schedule.num_chunks
    unit_s = chunks * float(np.median(took)) if on_gpu else 0.015
    rows = (
        tuple(replace(s, start_s=s.start_s / unit_s, end_s=s.end_s / unit_s) for s in row)
        for row in timeline.spans
    )
    return replace(timeline, spans=tuple(rows))


draw_all(
    {
        f"{name}, {p} real ranks: idle {100 * t.bubble_fraction:.0f} % of the step": in_forwards(t)
        for name, t in recorded.items()
    }
)

# %% [markdown]
# Real timelines have ragged edges, and a step takes longer than in theory, since messages take time
# and Python does too. But the shape is the simulator's. How far it is off depends on how busy the
# machine is, so the claim below has only a lower bound; section 8 gets exact numbers.

# %%
# %%rank 0
took = [in_forwards(t).makespan_s for t in recorded.values()]
theory = [simulate(t.schedule).makespan_s / t.schedule.num_chunks for t in recorded.values()]
print("took", [round(t, 1) for t in took], "theory", theory, "forward passes of a stage")
claim(
    "a real step takes at least the theoretical time (nobody beats the schedule)",
    [t / right for t, right in zip(took, theory, strict=True)],
    (">=", 0.9 if on_gpu else 1.0),  # on a GPU the unit is a median
)

# %% [markdown]
# ## 4 · Memory: 1F1B
#
# From the forward pass of a micro-batch until its backward pass, a stage has to keep its
# activations. Under GPipe the first backward pass comes after the last forward pass, so every stage
# keeps all m. If you raise m with micro-batches of the same size, to shrink the bubble, you pay in
# memory.

# %%
# %%rank 0
held_guess = predict(
    "1F1B, 4 ranks, m = 16: how many micro-batches does rank 0 hold at most?",
    guess=None,
)
held_guess

# %% [markdown]
# **1F1B** (one forward, one backward; [arXiv 2006.09503](https://arxiv.org/abs/2006.09503) calls it
# PipeDream-flush) starts a backward pass as soon as it can. Rank r runs p − r − 1 forward passes to
# warm up, then alternates. The bubble is the same.


# %%
# %%rank 0
def alive(schedule: Schedule, rank: int):
    """Times and numbers of micro-batches that a rank holds, from the simulator."""
    spans = simulate(schedule).spans[rank]
    last = "W" if schedule.splits_backward else "B"
    changes = sorted(
        [(s.start_s, 1) for s in spans if s.action.kind == "F"]
        + [(s.end_s, -1) for s in spans if s.action.kind == last]
    )
    times = sorted({t for t, _ in changes})  # what changes at one moment counts together
    return times, [sum(change for t, change in changes if t <= now) for now in times]


figure, ax = new_figure(7.5, 3.2)
rows = [
    ("GPipe, rank 0", gpipe(4, 16), 0),
    *((f"1F1B, rank {r}", one_f_one_b(4, 16), r) for r in (0, 3)),
]
for (name, schedule, of_rank), colour in zip(rows, PALETTE, strict=False):
    ax.step(*alive(schedule, of_rank), where="post", color=colour, linewidth=2, label=name)
ax.set(xlabel="time (one forward = 1)", ylabel="micro-batches held", yticks=range(0, 17, 4))
ax.set_title("Activations in memory, 4 stages, 16 micro-batches", loc="left", fontweight="bold")
ax.legend(frameon=False, loc="upper right")
figure

# %% [markdown]
# That was the simulator. The next cell weighs it: it runs a real step on the four ranks and counts
# the bytes that autograd keeps alive.
# [`saved_tensors_hooks`](https://docs.pytorch.org/docs/stable/autograd.html) sees every tensor that
# is saved for the backward pass, and a small object lets us see when it is dropped. Weights are not
# counted, since they are there anyway.


# %%
class Scales:
    """Bytes that autograd holds for backward passes: now, and at most."""

    def __init__(self, stages) -> None:
        self.now = self.peak = 0
        self.weights = {w.untyped_storage().data_ptr() for s in stages for w in s.parameters()}

    def pack(self, tensor):
        counted = tensor.untyped_storage().data_ptr() not in self.weights
        return Held(tensor, self, tensor.numel() * tensor.element_size() if counted else 0)


class Held:
    def __init__(self, tensor, scales: Scales, num_bytes: int) -> None:
        self.tensor, self.scales, self.num_bytes = tensor, scales, num_bytes
        scales.now += num_bytes
        scales.peak = max(scales.peak, scales.now)

    def __del__(self) -> None:
        self.scales.now -= self.num_bytes


# %%
def weigh(schedule: Schedule) -> list[int]:
    """Peak bytes per rank of one step of a small multi-layer perceptron."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2 * p)))
    stage = split_model(model, p)[rank].to(device)
    scales = Scales([stage])
    with torch.autograd.graph.saved_tensors_hooks(scales.pack, lambda held: held.tensor):
        x = torch.randn(16 * schedule.num_micro_batches, 64)
        PipelineExecutor(stage, schedule, nn.functional.mse_loss).step(x, torch.zeros_like(x))
    peaks = [None] * p
    dist.all_gather_object(peaks, scales.peak)
    return peaks


peak_bytes = {
    (name, m): weigh(make(p, m))
    for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b))
    for m in (1, 8, 16)
}

# %% [markdown]
# The bytes of a single micro-batch (m = 1) are the unit. The last rank's are larger, since it also
# keeps what the loss needs.

# %%
# %%rank 0
one = peak_bytes["1F1B", 1]  # bytes of a single micro-batch, per rank
for (name, m), row in peak_bytes.items():
    print(f"{name}, m = {m:2}: {[num_bytes // 1024 for num_bytes in row]} KiB")


def in_units(name: str, m: int) -> list[float]:
    return [num_bytes / o for num_bytes, o in zip(peak_bytes[name, m], one, strict=True)]


def bubble_of(make, p: int, m: int) -> float:
    return simulate(make(p, m)).bubble_fraction


sizes = [(p, m) for p in range(1, 9) for m in range(1, 13)]
display(
    held_guess.reveal(in_units("1F1B", 16)[0]),
    claim(
        "GPipe, m = 16: bytes held, in micro-batches, per rank",
        in_units("GPipe", 16),
        [16.0] * p,
        rtol=0.02,
    ),
    claim(
        "1F1B, m = 16: bytes held, in micro-batches, per rank: p - r",
        in_units("1F1B", 16),
        [float(p - r) for r in range(p)],
        rtol=0.02,
    ),
    claim(
        "1F1B holds no more with m = 16 than with m = 8",
        peak_bytes["1F1B", 16],
        list(peak_bytes["1F1B", 8]),
    ),
    claim(
        "executor, simulator and formula agree on 1F1B",
        [held["1F1B"], list(peak_activations(one_f_one_b(p, 2 * p)))],
        [[min(p - r, 2 * p) for r in range(p)]] * 2,
        exact=True,
    ),
    claim(
        "bubble of 1F1B minus bubble of GPipe, largest over p and m up to 12",
        max(abs(bubble_of(one_f_one_b, *size) - bubble_of(gpipe, *size)) for size in sizes),
        0.0,
        atol=1e-12,
    ),
)

# %% [markdown]
# Rank r holds at most p − r micro-batches, *however large m is*. So with 1F1B you can afford a
# large m, and a large m is what makes the bubble small. Rank 0 still holds p micro-batches, and the
# last rank one: most memory is needed at the front. A deeper pipeline does not lower rank 0's
# activation memory: it holds p micro-batches of 1/p of the layers. GPipe's own answer was
# **recomputation**: keep the input of a stage, and run its forward pass again before the backward
# pass (lecture 5). It goes together with any schedule.

# %% [markdown]
# ### Schedule explorer
#
# Choose a schedule, p, m, v, and how long a backward pass takes compared with a forward pass. The
# title says how long the step is, how much of it is idle, and how many micro-batches the fullest
# rank holds; the schedule is played through again each time. (v only concerns the interleaved one,
# and there m is rounded down to a multiple of p.)

# %%
# %%rank 0
BUILDERS = {
    "naive": naive,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "interleaved 1F1B": interleaved,
    "ZB-H1": zb_h1,
    "PipeDream": pipedream,
}


# %%
# %%rank 0
def schedule_explorer(name: str = "1F1B", p: int = 4, m: int = 8, v: int = 2, ratio: float = 2.0):
    """A pipeline schedule drawn, with its bubble and its memory in the title."""
    if name == "interleaved 1F1B":
        m = max(p, m // p * p)
        schedule = interleaved(p, m, v)
    else:
        schedule, v = BUILDERS[name](p, m), 1
    update_s = 0.2 if name == "PipeDream" else 0.0
    timeline = simulate(schedule, StageTimes(1 / v, ratio / 2 / v, ratio / 2 / v, update_s))
    title = (
        f"{name}, m = {m}: {timeline.makespan_s:g} long, {100 * timeline.bubble_fraction:.1f} % "
        f"idle, holds {max(timeline.peak_activations):g} micro-batches"
    )
    figure = plot_pipeline(timeline, title=title)
    figure.axes[0].set_xlabel("time (one forward = 1)")
    return figure


explore(
    schedule_explorer,
    name=list(BUILDERS),
    p=(1, 8),
    m=(1, 32),
    v=[1, 2, 3, 4],
    ratio=[0.5, 1.0, 2.0, 3.0],
    labels={
        "name": "schedule",
        "p": "ranks p",
        "m": "micro-batches m",
        "v": "chunks per rank v",
        "ratio": "backward / forward time",
    },
    alt="Timeline of the chosen pipeline schedule, one row per rank, idle time in grey",
)

# %% [markdown]
# ## 5 · PipeDream: no flush, old weights
#
# GPipe and 1F1B drain the pipeline before each optimizer step: the **flush**. The bubble is its
# price. PipeDream ([arXiv 1806.03377](https://arxiv.org/abs/1806.03377)) does not flush. When the
# gradient of a mini-batch comes back to a stage, that stage updates its weights at once, and goes
# on. After the start nobody waits, if stages take equally long.
#
# A drawing that goes around shows "PipeDream" as GPipe with the backward passes in reverse order,
# and says that this makes the bubble smaller. It does not. That drawing *is* GPipe, whose paper
# draws it that way too.


# %%
# %%rank 0
def gpipe_reversed(p: int, m: int) -> Schedule:
    """GPipe whose backward passes run from the newest micro-batch to the oldest."""
    base = gpipe(p, m)
    rows = tuple((*row[:m], *reversed(row[m:])) for row in base.actions)
    return replace(base, name="GPipe, reversed", actions=rows)


def one_after_another(timeline, times: int):
    """The same schedule several times: each step begins when the one before is over."""
    m, length = timeline.schedule.num_micro_batches, timeline.makespan_s
    rows = [
        tuple(
            replace(
                span,
                action=replace(span.action, micro_batch=span.action.micro_batch + k * m),
                start_s=span.start_s + k * length,
                end_s=span.end_s + k * length,
            )
            for k in range(times)
            for span in row
        )
        for row in timeline.spans
    ]
    return replace(timeline, spans=tuple(rows))


# %%
# %%rank 0
draw_all(
    {
        "GPipe drawn backwards is GPipe": one_after_another(simulate(gpipe_reversed(4, 4)), 2),
        "1F1B: a flush after every 4 micro-batches": one_after_another(
            simulate(one_f_one_b(4, 4)), 2
        ),
        "PipeDream: no flush, an update after every mini-batch": simulate(
            pipedream(4, 8), StageTimes(update_s=0.25)
        ),
    }
)

# %% [markdown]
# Does the reversed order change the bubble or the memory of GPipe?

# %%
# %%rank 0
backwards, forwards = simulate(gpipe_reversed(2, 4)), simulate(gpipe(2, 4))
display(
    claim(
        "bubble of GPipe drawn backwards, 2 stages, 4 micro-batches",
        backwards.bubble_fraction,
        forwards.bubble_fraction,
        rtol=1e-12,
        status="corrected",
        said="smaller than GPipe's",
        refutes="a common slide that calls it PipeDream",
        why="it is GPipe; PipeDream has no flush but keeps several versions of the weights",
    ),
    claim(
        "... and it holds as many micro-batches as GPipe",
        backwards.peak_activations,
        list(forwards.peak_activations),
        exact=True,
    ),
    claim(
        "idle share of PipeDream on 4 stages after 10, 100 and 1000 mini-batches",
        [simulate(pipedream(4, m)).bubble_fraction for m in (10, 100, 1000)],
        [3 / (m + 3) for m in (10, 100, 1000)],
        rtol=1e-9,
    ),
)

# %% [markdown]
# The price is paid elsewhere. Follow mini-batch 5 on rank 0 of the last drawing. It goes forward
# with some weights; before it comes back, mini-batches 2, 3 and 4 have updated them. Two different
# problems follow.
#
# ### Problem 1: forward with old weights, backward with new ones
#
# The chain rule multiplies activations by weights, and both must be of the same version. Plain
# PyTorch even notices: it counts in-place changes of tensors that it saved.

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
start = {name: w.detach().clone() for name, w in net.named_parameters()}
first, second = torch.randn(2, 64, 8, dtype=torch.float64)


def loss_of(x, weights=None):
    y = net(x) if weights is None else torch.func.functional_call(net, weights, (x,))
    return (y - x.sum(1, keepdim=True)).square().mean()


# The gradient of the second batch, at the weights that its forward pass used.
loss_of(second).backward()
right = [w.grad.clone() for w in net.parameters()]

# Two batches are under way; the first one comes back, and its update is made.
net.zero_grad()
first_loss, second_loss = loss_of(first), loss_of(second)
first_loss.backward()
torch.optim.SGD(net.parameters(), lr=0.1).step()
net.zero_grad()
try:
    second_loss.backward()
    refused = ""
except RuntimeError as error:
    refused = str(error)

# %%
# %%rank 0
print(refused[:150], "...")
claim("PyTorch refuses a backward pass through weights that changed", "inplace" in refused, True)

# %% [markdown]
# An engine that changes weights behind autograd's back (`.data`, or a kernel of its own) gets no
# such error. It gets a wrong gradient. **Weight stashing** is the cure: the forward pass of each
# mini-batch takes a snapshot of the weights, and its backward pass uses the same snapshot.


# %%
def second_gradient(stash: bool) -> float:
    """Relative error of the second batch's gradient, with and without a snapshot."""
    with torch.no_grad():
        for name, w in net.named_parameters():
            w.copy_(start[name])
    net.zero_grad()
    used = {
        n: w.detach().clone().requires_grad_() if stash else w for n, w in net.named_parameters()
    }
    first_loss, second_loss = loss_of(first), loss_of(second, used)
    first_loss.backward()
    with torch.no_grad():
        for w in net.parameters():
            w.data.sub_(0.1 * w.grad)  # .data: autograd does not see it
    net.zero_grad()
    got = torch.autograd.grad(second_loss, list(used.values()))
    wrong = sum((a - b).square().sum() for a, b in zip(got, right, strict=True))
    return float((wrong / sum(b.square().sum() for b in right)).sqrt())


unstashed, stashed = second_gradient(stash=False), second_gradient(stash=True)

# %%
# %%rank 0
display(
    claim("relative error of the gradient without stashing", unstashed, (">", 0.01)),
    claim("relative error with stashing", stashed, ("<", 1e-12)),
)

# %% [markdown]
# ### Problem 2: the gradient is old
#
# With stashing the gradient is a true gradient, but of weights that are out of date by the time it
# is applied. On rank r, p − r − 1 updates happen between forward and backward. And each stage is
# out of date by a different amount:
#
# $$w^{(t+1)} = w^{(t)} - \eta\,\nabla
#   f\big(w_0^{(t-p+1)}, w_1^{(t-p+2)}, \ldots, w_{p-1}^{(t)}\big)$$
#
# Now all four ranks run PipeDream for real, with stashing and without, and we compare their weights
# with one process that computes exactly this formula.

# %%
num_batches = 24 if quick else 96
xs = torch.randn(num_batches * 8, 16, generator=torch.Generator().manual_seed(2)).double()
ys = torch.tanh(xs.flip(1))
mse = nn.functional.mse_loss


def run_pipedream(stash: bool):
    stage = make_parts(p)[rank].to(device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
    executor = PipeDreamExecutor(
        stage, pipedream(p, num_batches), mse, optimizer, stash_weights=stash
    )
    result = executor.step(xs, ys)
    return stage, result


# %% [markdown]
# The formula in one process: every version of the weights is kept, and each part's gradient is
# taken at the version that its rank would have used.


# %%
def one_process_with_delays() -> nn.Sequential:
    """Plain SGD whose gradient for part r is taken at weights of p - r - 1 updates ago."""
    newest = nn.Sequential(*make_parts(p))
    versions = [[{n: w.detach().clone() for n, w in part.named_parameters()} for part in newest]]
    for t, (x, y) in enumerate(zip(xs.chunk(num_batches), ys.chunk(num_batches), strict=True)):
        old = [versions[max(0, t - (p - r - 1))][r] for r in range(p)]
        leaves = {
            f"{r}.{n}": w.clone().requires_grad_() for r in range(p) for n, w in old[r].items()
        }
        mse(torch.func.functional_call(newest, leaves, (x,)), y).backward()
        with torch.no_grad():
            for name, w in newest.named_parameters():
                w -= 1.0 * leaves[name].grad
        versions.append([{n: w.detach().clone() for n, w in q.named_parameters()} for q in newest])
    return newest


# %%
delayed = one_process_with_delays()
found = {}
for stash in (True, False):
    stage, result = run_pipedream(stash)
    pairs = zip(stage.parameters(), delayed[rank].parameters(), strict=True)
    error = max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in pairs)
    rows = [None] * p
    dist.all_gather_object(rows, (error, result.staleness, result.peak_versions))
    found[stash] = rows

# %% [markdown]
# Besides the weights we compare how many updates old each gradient was, and how many versions of
# its weights each rank kept.

# %%
# %%rank 0
display(
    claim(
        "with stashing: largest difference of any weight from the formula, all ranks",
        max(e for e, _, _ in found[True]),
        ("<", 1e-9),
        authority="arXiv 1806.03377, on weight stashing",
    ),
    claim(
        "without stashing: the first rank's weights are elsewhere", found[False][0][0], (">", 1e-4)
    ),
    claim(
        "staleness per rank, in updates: measured, at the end of the run",
        [s[-1] for _, s, _ in found[True]],
        [p - r - 1 for r in range(p)],
    ),
    claim(
        "staleness of every mini-batch on every rank: min(i, p - r - 1)",
        [list(s) for _, s, _ in found[True]],
        [[min(i, p - r - 1) for i in range(num_batches)] for r in range(p)],
    ),
    claim(
        "... and so says the simulator",
        list(map(list, staleness(pipedream(p, num_batches)))),
        [list(s) for _, s, _ in found[True]],
    ),
    claim(
        "versions of the weights kept, per rank: p - r",
        [v for _, _, v in found[True]],
        [p - r for r in range(p)],
    ),
)

# %% [markdown]
# How bad is a stale gradient? Take the simplest loss, a parabola with curvature h. Gradient descent
# with a delay of d updates, w ← w − η·h·w(d updates ago), is stable only up to a learning rate that
# shrinks with d: η·h < 2·sin(π / (4d + 2)) ([arXiv 1910.05124](https://arxiv.org/abs/1910.05124)).

# %%
# %%rank 0
stale_guess = predict(
    "First of 8 stages: its largest stable rate, in % of the rate without delay?",
    guess=None,
    unit="%",
)
stale_guess

# %% [markdown]
# The next cell finds the limit from the roots of the recurrence, and compares.


# %%
# %%rank 0
def largest_stable_rate(delay: int) -> float:
    """By bisection: all roots of z^(d+1) - z^d + a = 0 must lie inside the unit circle."""
    low, high = 0.0, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        roots = np.roots(
            [1.0, -1.0, *[0.0] * (delay - 1), middle] if delay else [1.0, middle - 1.0]
        )
        low, high = (middle, high) if np.abs(roots).max() < 1 else (low, middle)
    return low


delays = list(range(16))
limits = [largest_stable_rate(d) for d in delays]
formula = [2 * math.sin(math.pi / (4 * d + 2)) for d in delays]
display(
    stale_guess.reveal(100 * limits[7] / limits[0]),
    claim(
        "largest stable learning rate x curvature for delays 0 to 15",
        limits,
        formula,
        rtol=1e-6,
        authority="arXiv 1910.05124",
    ),
    claim(
        "8 stages: the first stage's limit, as a share of that without delay",
        limits[7] / limits[0],
        math.sin(math.pi / 30),
        rtol=1e-6,
    ),
)
plot_lines(
    delays,
    {"largest stable rate": limits},
    xlabel="delay (updates); the first of p stages has p − 1",
    ylabel="learning rate × curvature",
    title="Stale gradients force small steps",
    ideal={"2 sin(π/(4d+2))": formula},
)

# %% [markdown]
# With a flush there is no delay, and the schedules of the other sections all flush. PipeDream's
# descendants shrink the delay: PipeDream-2BW keeps two versions and a delay of one
# ([arXiv 2006.09503](https://arxiv.org/abs/2006.09503)). The same paper's PipeDream-flush is what
# is called 1F1B today.

# %% [markdown]
# ## 6 · Interleaved 1F1B: a smaller bubble, more messages
#
# Give each rank v chunks of layers that are *not* next to each other: with p = 4 and v = 2, rank 0
# gets stages 0 and 4. A micro-batch passes all ranks v times. A chunk takes 1/v of the time, so the
# pipeline fills v times faster, and the bubble takes 1/v of the time. That is (p − 1)/(v·m + p − 1)
# of the step ([arXiv 2104.04473](https://arxiv.org/abs/2104.04473)). Every boundary between chunks
# is a message per micro-batch, though: p v − 1 instead of p − 1 each way. And with m = 2 p or more
# rank 0 holds p + (p − 1)/v micro-batches instead of p: 5.5 instead of 4 with p = 4 and v = 2.

# %%
# %%rank 0
deep, deeper = (interleaved(16, 64, v) for v in (1, 2))
idle = [
    simulate(s, StageTimes(1 / s.num_chunks, 1 / s.num_chunks, 1 / s.num_chunks))
    for s in (deep, deeper)
]
display(
    claim(
        "two chunks per rank halve the bubble time of p = 16, m = 64",
        (idle[1].makespan_s - 192) / (idle[0].makespan_s - 192),
        0.5,
        rtol=1e-9,
        authority="arXiv 2104.04473, section 2.2",
    ),
    claim(
        "bubble of the step with v = 2, p = 4, m = 8",
        simulate(interleaved(4, 8, 2), half).bubble_fraction,
        3 / (2 * 8 + 3),
        rtol=1e-9,
    ),
    claim(
        "messages of a step: 2 m (p v - 1), for v = 1, 2, 4 (p = 4, m = 8)",
        [num_messages(interleaved(4, 8, v)) for v in (1, 2, 4)],
        [2 * 8 * (4 * v - 1) for v in (1, 2, 4)],
    ),
    claim(
        "micro-batches held by rank 0 with v = 1, 2, 3 (p = 4, m = 8)",
        [peak_activations(interleaved(4, 8, v))[0] for v in (1, 2, 3)],
        [4.0, 4 + 3 / 2, 4 + 3 / 3],
        rtol=1e-12,
        authority="arXiv 2205.05198: p (1 + (p-1)/(p v))",
    ),
)

# %% [markdown]
# ### What a message costs
#
# A message over a boundary is one activation: micro-batch × tokens × width numbers. "Expensive
# transfer" is what a common comment says beside the line that moves it. We compute it for half of a
# 7-billion-parameter model per GPU, over PCIe.

# %%
# %%rank 0
llama = cost.LLAMA2_7B
message_bytes = 1 * llama.context * llama.width * 2  # one sequence, bf16
message_s = message_bytes / 32e9 + 5.7e-6  # PCIe 4.0 x16, one direction
stage_s = llama.forward_flops_per_token() / 2 * llama.context / (0.5 * 312e12)  # A100 at 50 %
print(f"{message_bytes / 1e6:.1f} MB take {1e3 * message_s:.2f} ms")
print(f"a stage computes for {1e3 * stage_s:.0f} ms")
claim(
    "one activation over PCIe, as a share of a stage's forward pass",
    message_s / stage_s,
    ("<", 0.01),
)

# %% [markdown]
# Pipelines send little, and only to neighbours. The time is not always negligible: with many chunks
# or a slow network it takes back what interleaving gained. And in 1F1B's steady state neighbours
# wait for each other's messages in turn, so every slow message delays both. In the figure a stage's
# forward pass takes 1, and each message takes what the axis says.

# %%
# %%rank 0
wires = np.linspace(0, 1.0, 11).tolist()


def step_time(make, v: int, p2p_s: float) -> float:
    return simulate(make, StageTimes(1 / v, 1 / v, 1 / v, p2p_s=p2p_s)).makespan_s


kinds = {"GPipe": (gpipe(4, 8), 1), "1F1B": (one_f_one_b(4, 8), 1)}
kinds |= {f"interleaved, v = {v}": (interleaved(4, 8, v), v) for v in (2, 4)}
curves = {name: [step_time(s, v, w) for w in wires] for name, (s, v) in kinds.items()}
plot_lines(
    wires,
    curves,
    xlabel="time of one message (one forward = 1)",
    ylabel="time of a step\n(one forward = 1)",
    title="4 ranks, 8 micro-batches: slow wires take back what interleaving gave",
    ideal={"no bubble": np.full(len(wires), 24.0)},
)

# %%
# %%rank 0
extra = {name: curve[5] - curve[0] for name, curve in curves.items()}
display(
    claim(
        "GPipe pays each message time 2 (p - 1) times per step",
        extra["GPipe"],
        2 * 3 * wires[5],
        rtol=1e-9,
    ),
    claim(
        "1F1B pays more: a message delays every forward-backward pair of the steady state",
        extra["1F1B"] / extra["GPipe"],
        (">", 1.0),
    ),
    claim(
        "free messages: v = 4 beats 1F1B", curves["interleaved, v = 4"][0] < curves["1F1B"][0], True
    ),
    claim(
        "messages as long as a forward pass: v = 4 loses to 1F1B",
        curves["interleaved, v = 4"][-1] > curves["1F1B"][-1],
        True,
    ),
)

# %% [markdown]
# ## 7 · Zero bubble: cut the backward pass in two
#
# A backward pass does two things: **B**, the gradient of the stage's *input*, and **W**, the
# gradient of its *weights*. The previous stage waits for B only. Nobody waits for W until the
# optimizer step. So run B first, send its result, and do W when there would be nothing else to do
# ([arXiv 2401.10241](https://arxiv.org/abs/2401.10241)). Schedule ZB-H1 does that with no more
# memory on any rank than 1F1B needs on rank 0.
#
# In PyTorch the halves come from calling autograd twice, on different ends of the same graph;
# `lib/minidist/parallel/pipeline/backward.py` shows how to do it without computing anything twice.

# %%
# %%rank 0
from torch.utils.flop_counter import FlopCounterMode

from minidist.parallel.pipeline.backward import SplitBackward

layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
x64 = torch.randn(32, 64, requires_grad=True)
flops = {}
with FlopCounterMode(display=False) as counter:
    y64 = layers(x64)
flops["forward"] = counter.get_total_flops()
split = SplitBackward(x64, y64)
with FlopCounterMode(display=False) as counter:
    split.input_gradient(torch.ones_like(y64))
flops["B"] = counter.get_total_flops()
with FlopCounterMode(display=False) as counter:
    split.weight_gradients()
flops["W"] = counter.get_total_flops()
claim(
    "FLOPs of B and of W in linear layers, as multiples of the forward pass",
    [flops["B"] / flops["forward"], flops["W"] / flops["forward"]],
    [1.0, 1.0],
    rtol=1e-9,
)

# %% [markdown]
# The bubble shrinks from (p − 1)(t_F + t_B + t_W) to (p − 1)(t_F + t_B − t_W). That is a third, if
# the three take equally long. In a real block W is the shortest, since attention's products have no
# weights.
#
# The paper publishes the times that its authors measured for a 1.5-billion-parameter model on 8
# stages (its table 9), and the bubble rates that follow (table 5). We give those times to our
# simulator.

# %%
# %%rank 0
PUBLISHED = [  # m, tF, tB, tW, message (ms), bubble rates: 1F1B, interleaved (3 chunks), ZB-H1
    (24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585),
    (32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242),
    (64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674),
]


def bubble_rate(schedule: Schedule, t_f: float, t_b: float, t_w: float, wire: float) -> float:
    v = schedule.num_chunks
    took = simulate(schedule, StageTimes(t_f / v, t_b / v, t_w / v, p2p_s=wire)).makespan_s
    return 1 - schedule.num_micro_batches * (t_f + t_b + t_w) / took


paper = "Qi et al., arXiv 2401.10241, tables 4, 5 and 9"
simulated = {"1F1B": [], "interleaved": [], "ZB-H1": []}
for m, *times, in_1f1b, _, in_zb in PUBLISHED:
    simulated["1F1B"].append(bubble_rate(one_f_one_b(8, m), *times))
    simulated["interleaved"].append(bubble_rate(interleaved(8, m, 3), *times))
    simulated["ZB-H1"].append(bubble_rate(zb_h1(8, m), *times))
    for name, stated in (("1F1B", in_1f1b), ("ZB-H1", in_zb)):
        display(
            claim(
                f"bubble rate of {name}, 8 stages, {m} micro-batches, to four digits",
                simulated[name][-1],
                stated,
                atol=5.1e-5,
                authority=paper,
            )
        )

# %%
# %%rank 0
figure = plot_lines(
    [row[0] for row in PUBLISHED],
    {name: [100 * rate for rate in rates] for name, rates in simulated.items()},
    xlabel="micro-batches m",
    ylabel="bubble (% of the step)",
    ticks=[24, 32, 64],
    markers=False,
    title="Lines: our simulator. Circles: arXiv 2401.10241",
)
for column in (5, 6, 7):
    figure.axes[0].plot(
        [row[0] for row in PUBLISHED],
        [100 * row[column] for row in PUBLISHED],
        "o",
        markersize=9,
        markerfacecolor="none",
        markeredgecolor="black",
    )
figure

# %% [markdown]
# 1F1B and ZB-H1 agree in all four published digits. The interleaved line comes within 5 %: the
# paper cuts 22 layers and both ends of the model into 24 pieces, and we took 24 equal ones. Are
# such rates worth anything on real GPUs? The paper measured throughput too (table 4): 11.8 samples
# per second and GPU with 1F1B, 13.1 interleaved, and 12.9 with ZB-1p, whose memory is that of ZB-H1
# (m = 24).

# %%
# %%rank 0
*_, in_1f1b, in_interleaved, in_zb = PUBLISHED[0]
promised = {
    "ZB-H1": (1 - in_zb) / (1 - in_1f1b),
    "interleaved": (1 - in_interleaved) / (1 - in_1f1b),
}
_, t_f, t_b, t_w, *_ = PUBLISHED[2]
equal_times = {"num_stages": 8, "forward_s": 1, "backward_s": 2}
display(
    claim(
        "interleaved 1F1B with three chunks: simulated / published",
        [s / row[6] for s, row in zip(simulated["interleaved"], PUBLISHED, strict=True)],
        [1.0] * 3,
        rtol=0.05,
        authority=paper,
    ),
    claim(
        "samples per second and GPU, 1F1B and ZB-1p (memory as ZB-H1), m = 24",
        [11.8, 12.9],
        status="cited",
        authority=paper,
    ),
    claim(
        "the bubble rates predict that gain",
        promised["ZB-H1"],
        12.9 / 11.8,
        rtol=0.03,
        authority=paper,
    ),
    claim(
        "interleaved: gain that the rates promise / gain that the paper measured",
        promised["interleaved"] / (13.1 / 11.8),
        1.065,
        rtol=0.01,
        authority=paper,
    ),
    claim(
        "closed form of ZB-H1 without messages, m = 64",
        cost.bubble_fraction(
            num_stages=8,
            num_microbatches=64,
            schedule="zb_h1",
            forward_s=t_f,
            backward_s=t_b + t_w,
            weight_backward_s=t_w,
        ),
        bubble_rate(zb_h1(8, 64), t_f, t_b, t_w, 0.0),
        rtol=1e-9,
    ),
    claim(
        "bubble of ZB-H1 / bubble of 1F1B for equal times",
        cost.bubble_seconds(schedule="zb_h1", weight_backward_s=1, **equal_times)
        / cost.bubble_seconds(**equal_times),
        1 / 3,
        rtol=1e-12,
    ),
)

# %% [markdown]
# The rates predict ZB's gain over 1F1B within 2 %. They promise 18 % for interleaving, and the
# paper measured 11 %.
#
# Spend twice the memory, put off the optimizer's global checks, and the bubble vanishes if F, B and
# W take equally long (ZB-H2, same paper). ZB-V (its section 6) gets there with 1F1B's memory: each
# rank has two chunks, one from the front half of the model and one from the back half, so that the
# pipeline folds back like a V. Other V's need half of that memory
# ([arXiv 2405.15362](https://arxiv.org/abs/2405.15362)). DeepSeek's DualPipe feeds the pipeline
# from both ends ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437)).

# %% [markdown]
# ## 8 · PyTorch's own pipelines, in exact time
#
# The class `torch.distributed.pipeline.sync.Pipe` of many older listings no longer exists. Its
# successor is
# [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).
# On the emulated cluster its code runs unchanged: the ranks and the messages are real, and time is
# virtual, so the answer is the same on every machine.
#
# `Charged` is a layer with a price: here one second forward and two backward.


# %%
# %%rank 0
def torch_pipeline(name: str, m: int, v: int) -> None:
    from torch.distributed import pipelining

    rank, p = dist.get_rank(), dist.get_world_size()
    stages = [
        pipelining.PipelineStage(
            emulate.Charged(nn.Linear(8, 8), rank), c * p + rank, p * v, torch.device("cpu")
        )
        for c in range(v)
    ]
    kind = getattr(pipelining, name)
    schedule = kind(stages if v > 1 else stages[0], m, loss_fn=nn.functional.mse_loss)
    x = torch.ones(m, 8)
    for _ in range(2):  # the first step runs one more forward pass, to learn shapes
        if rank == 0:
            schedule.step(x)
        elif rank == p - 1:
            schedule.step(target=torch.zeros_like(x))
        else:
            schedule.step()


# %% [markdown]
# The wires of the first cluster are free, so that only the schedule counts. On those of the second
# a message takes a while.

# %%
# %%rank 0
import importlib.util

free = emulate.Link(bandwidth_bytes_per_s=1e30, latency_s=0.0)
box = emulate.Cluster(
    name="free wires",
    nodes=1,
    devices_per_node=4,
    intra_node=free,
    inter_node=free,
    peak_flops_per_s=1e12,
    memory_bandwidth_bytes_per_s=1e12,
)


def with_latency(seconds: float) -> emulate.Cluster:
    link = emulate.Link(bandwidth_bytes_per_s=1e30, latency_s=seconds)
    return replace(box, name=f"{seconds} s wires", intra_node=link, inter_node=link)


def last_step(timeline, m: int, v: int) -> tuple[float, float]:
    """Start and end of the second step: the last 2 m v computations of each rank."""
    rows = [[i for i in r if i.kind == "compute"][-2 * m * v :] for r in timeline.intervals]
    return min(r[0].start_s for r in rows), max(r[-1].end_s for r in rows)


# %%
# %%rank 0
chosen = [("ScheduleGPipe", 8, 1), ("Schedule1F1B", 8, 1), ("ScheduleInterleaved1F1B", 8, 2)]
plan = emulate.ChargePlan((1.0,) * 4, (2.0,) * 4, b"secret")
emulated = {}
for name, m, v in chosen:
    _, trace = run_traced(torch_pipeline, 4, name, m, v, plan=plan)
    emulated[name] = emulate.simulate(trace, box)
    if name == "Schedule1F1B":  # the same run again, on wires on which a message takes 0.3 s
        slow_wires = emulate.simulate(trace, with_latency(0.3))
bubbles = [
    1 - emulated[name].efficiency_between(*last_step(emulated[name], m, v)) for name, m, v in chosen
]
display(
    claim(
        "bubble of torch's GPipe, 1F1B, interleaved 1F1B (p = 4, m = 8, v = 2)",
        bubbles,
        [3 / 11, 3 / 11, 3 / (2 * 8 + 3)],
        atol=1e-9,
    ),
    claim(
        "torch.distributed.pipeline.sync.Pipe can be imported",
        importlib.util.find_spec("torch.distributed.pipeline") is not None,
        False,
        status="corrected",
        said=True,
        refutes="common listings",
        why="it was removed; use torch.distributed.pipelining",
    ),
)

# %% [markdown]
# And 1F1B on the slow wires:

# %%
# %%rank 0
start_s, end_s = last_step(slow_wires, 8, 1)
plot_timeline(
    slow_wires,
    start_s=start_s,
    end_s=end_s,
    title="PyTorch's Schedule1F1B, emulated, a message takes 0.3 s",
)

# %% [markdown]
# It has the shape of the simulator's 1F1B at the top, but this one comes from messages that PyTorch
# sent, and you see the messages (orange) and what waiting for them costs.
# `minidist.parallel.pipeline.native.NativePipeline` puts torch's schedules behind the interface of
# our executor; the tests of this course hold both to the same gradients.
#
# | schedule | torch.distributed.pipelining | Megatron-LM | DeepSpeed |
# |---|---|---|---|
# | GPipe | `ScheduleGPipe` | | |
# | 1F1B | `Schedule1F1B` | `--pipeline-model-parallel-size` | `PipelineModule` |
# | interleaved | `ScheduleInterleaved1F1B` | `--num-layers-per-virtual-pipeline-stage` | |
# | zero bubble | `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` | | |
# | DualPipe, folded into a V | `ScheduleDualPipeV` | | |
#
# (The last two columns: [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) and
# [DeepSpeed](https://www.deepspeed.ai/tutorials/pipeline/).)
#
# One more listing to repair: with a DeepSpeed `PipelineModule`, `engine(data)`, `engine.backward()`
# and `engine.step()` all raise. The schedule has to see all micro-batches at once, so the only
# entry for training is `engine.train_batch(data_iterator)`. And its number of micro-batches is the
# number of accumulation steps: with `train_batch_size` 32 and micro-batches of 4 on one pipeline,
# 8.

# %%
# %%rank 0
from torch.distributed import pipelining

in_the_table = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
claim(
    "schedules of the table that this PyTorch has",
    sum(hasattr(pipelining, f"Schedule{name}") for name in (*in_the_table, "DualPipeV")),
    6,
)

# %% [markdown]
# ## 9 · Cut the model well
#
# All formulas above assume equal stages. If they differ, the slowest one sets the pace, and every
# other stage waits for it *in every micro-batch*. No schedule can repair that.
#
# Counting layers is not enough. 18 layers on 3 GPUs are 6 each, 12 are 4 each; but the output layer
# of a language model multiplies by a matrix of width × vocabulary, and with a large vocabulary that
# is worth several blocks. Counting *parameters* is not enough either: the input embedding has as
# many as the output layer, and costs next to nothing, for it is a look-up.
#
# `balance` finds the best contiguous cut for any list of costs. Move the sliders.


# %%
# %%rank 0
def unit_costs(
    vocabulary: int, num_layers: int, width: int = 4096
) -> tuple[list[float], list[float]]:
    """Embedding, blocks, output layer: FLOPs per token and parameters."""
    model = cost.Transformer(
        vocab_size=vocabulary, context=4096, width=width, num_layers=num_layers, num_heads=32
    )
    blocks = model.forward_flops_per_token(head=False) / num_layers
    head = model.forward_flops_per_token() - model.forward_flops_per_token(head=False)
    weights = vocabulary * width
    return (
        [0.0, *[blocks] * num_layers, head],
        [weights, *[model.block_parameters] * num_layers, weights],
    )


def cut(costs, parts) -> list[float]:
    return [sum(costs[i] for i in part) for part in parts]


def equal_layers(num_layers: int, p: int) -> list[range]:
    """The same number of blocks everywhere; embedding in front, output layer at the end."""
    edges = [1 + num_layers * r // p for r in range(p + 1)]
    edges[0], edges[-1] = 0, num_layers + 2
    return [range(edges[r], edges[r + 1]) for r in range(p)]


# %%
# %%rank 0
def balance_explorer(vocabulary: int = 256, p: int = 8, num_layers: int = 32, m: int = 32):
    """Work of each pipeline stage with equal layers and balanced, and the utilisation of both."""
    flops, _ = unit_costs(1000 * vocabulary, num_layers)
    figure, _ = new_figure(8.0, 3.4)
    figure.clear()
    with style():
        axes = figure.subplots(1, 2, sharey=True, sharex=True)
    ways = {"equal layers": equal_layers(num_layers, p), "balanced by FLOPs": balance(flops, p)}
    for ax, (name, parts) in zip(axes, ways.items(), strict=True):
        work = [w / flops[1] for w in cut(flops, parts)]
        used = 1 - simulate(one_f_one_b(p, m), StageTimes(work, work, work)).bubble_fraction
        ax.barh(range(p), work, color=COLOURS["compute"], height=0.7)
        ax.axvline(sum(work) / p, color="black", linestyle=(0, (4, 3)), linewidth=1)
        ax.set_title(f"{name}: {100 * used:.0f} % used", loc="left", fontweight="bold")
        ax.set_xlabel("work (blocks); dashed: mean")
    axes[0].set(ylabel="stage", yticks=range(p))
    axes[0].invert_yaxis()
    return figure


explore(
    balance_explorer,
    vocabulary=[8, 32, 64, 128, 256],
    p=[2, 4, 8, 16],
    num_layers=[16, 32, 64],
    m=[8, 32, 128],
    labels={
        "vocabulary": "vocabulary (thousand tokens)",
        "p": "stages p",
        "num_layers": "layers",
        "m": "micro-batches m",
    },
    alt="Bars of work per stage; with equal layers the last stage sticks out",
)

# %% [markdown]
# The next cell puts numbers to the case in which the sliders begin.

# %%
# %%rank 0
flops, weights = unit_costs(256_000, 32)
equal, by_flops, by_weights = (
    cut(flops, parts) for parts in (equal_layers(32, 8), balance(flops, 8), balance(weights, 8))
)
mean = sum(flops) / 8
uneven = simulate(one_f_one_b(8, 256), StageTimes(equal, equal, equal))
display(
    claim(
        "layers per stage: 18 on 3 GPUs and 12 on 3 GPUs",
        [len(part) for n in (18, 12) for part in balance([1] * n, 3)],
        [6] * 3 + [4] * 3,
    ),
    claim(
        "an output layer of 256,000 x 4,096 is worth this many blocks",
        flops[-1] / flops[1],
        (">", 4.0),
    ),
    claim("equal layers, 8 stages: slowest stage / mean stage", max(equal) / mean, (">", 1.7)),
    claim("balanced by FLOPs: slowest stage / mean stage", max(by_flops) / mean, ("<", 1.2)),
    claim("balanced by parameters: slowest stage / mean", max(by_weights) / mean, (">", 1.25)),
    claim(
        "with many micro-batches the step takes m x the slowest stage",
        uneven.makespan_s / (256 * 3 * max(equal)),
        1.0,
        rtol=0.03,
    ),
)

# %% [markdown]
# `split_model` weighs units by their parameters unless you give it `costs`. Measure the seconds of
# each unit and pass them.
#
# ## 10 · Pipeline or data parallelism?
#
# Both use p GPUs for one batch, and both give the same gradient. They differ in what they send,
# what they hold and when they wait.
#
# | per GPU | data parallelism | pipeline |
# |---|---|---|
# | model state held | all of it | 1/p |
# | sent per step | 2(p − 1)/p · gradients | activations on, their gradients back |
# | idle | exposed part of the all-reduce | (p − 1)/(m + p − 1) |
# | batch it wants | a sample per GPU or more | many micro-batches |
# | changes to the model | none | it must cut into stages of equal time |
#
# First the proof that they train alike, on the four ranks: five steps with the same global batch.

# %%
from torch.nn.parallel import DistributedDataParallel

replica = DistributedDataParallel(make_gpt())
stage = split_model(make_gpt(), p)[rank]
pipeline = PipelineExecutor(stage, one_f_one_b(p, p), lm_loss)
optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (replica, stage)]
curves_by_rank = []
for step in range(5):
    tokens, answers = (t.to(device) for t in make_tokens(4 * p, 8, 32, seed=step))
    for optimizer in optimizers:
        optimizer.zero_grad()
    mine = slice(4 * rank, 4 * rank + 4)
    loss = lm_loss(replica(tokens[mine]), answers[mine])
    loss.backward()
    mean_loss = loss.detach().clone()
    dist.all_reduce(mean_loss)
    in_pipeline = pipeline.step(tokens, answers).loss
    for optimizer in optimizers:
        optimizer.step()
    pair = [None] * p
    dist.all_gather_object(pair, None if in_pipeline is None else float(in_pipeline))
    curves_by_rank.append((float(mean_loss) / p, pair[-1]))
full = sum(w.numel() for w in replica.parameters())
shares = [None] * p
dist.all_gather_object(shares, sum(w.numel() for w in stage.parameters()) / full)

# %%
# %%rank 0
display(
    claim(
        "five losses of the pipeline against data parallelism",
        [b for _, b in curves_by_rank],
        [a for a, _ in curves_by_rank],
        rtol=1e-7,
    ),
    claim("parameters per rank of the pipeline add up to one model", sum(shares), 1.0, rtol=1e-12),
    claim("the largest stage's share of the parameters", max(shares), ("<", 1 / p + 0.1)),
)

# %% [markdown]
# Now the time, on the emulated cluster. The model has four layers of 256 × 256 weights (1 MB in
# all), the batch has 8 micro-batches of 4 samples. One run of each program is recorded; then its
# trace is replayed on networks of any speed. The compute of both is the same: 24 seconds per rank.

# %%
# %%rank 0
slow_guess = predict(
    "At 10 kB/s: by which factor is the pipeline faster than data parallelism?",
    guess=None,
)
slow_guess

# %% [markdown]
# The two programs, and one recorded run of each:


# %%
# %%rank 0
WIDTH, NUM_MICRO, MICRO = 256, 8, 4


def as_pipeline() -> None:
    from minidist.parallel.pipeline import TensorSpec

    layer = emulate.Charged(nn.Linear(WIDTH, WIDTH, bias=False), dist.get_rank())
    specs = [TensorSpec((MICRO, WIDTH), torch.float32)] * 4
    x = torch.ones(NUM_MICRO * MICRO, WIDTH)
    PipelineExecutor(layer, one_f_one_b(4, NUM_MICRO), mse, specs=specs).step(x, x)


def as_replicas() -> None:
    layers = [emulate.Charged(nn.Linear(WIDTH, WIDTH, bias=False), i) for i in range(4)]
    replica = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.25)
    for _ in range(2):  # DDP arranges its buckets in the first step
        replica(torch.ones(NUM_MICRO * MICRO // 4, WIDTH)).square().mean().backward()


share = NUM_MICRO / 4  # a replica's quarter of the batch is worth this many micro-batches
_, pipeline_trace = run_traced(as_pipeline, 4, plan=plan)
_, replica_trace = run_traced(
    as_replicas, 4, plan=emulate.ChargePlan((share,) * 4, (2 * share,) * 4, b"secret")
)


# %%
# %%rank 0
def network(bytes_per_s: float, latency_s: float = 1e-3) -> emulate.Cluster:
    link = emulate.Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s)
    return replace(box, name=f"{bytes_per_s:.3g} B/s", intra_node=link, inter_node=link)


def step_of(trace, bytes_per_s: float, latency_s: float = 1e-3) -> float:
    """Seconds of the last step: DDP's second one, the pipeline's only one."""
    timeline = emulate.simulate(trace, network(bytes_per_s, latency_s))
    computing = [i.start_s for r in timeline.intervals for i in r if i.kind == "compute"]
    begin = timeline.steps[-1].start_s if trace is replica_trace else min(computing)
    return timeline.makespan_s - begin


speeds = np.geomspace(1e4, 1e7, 13 if quick else 49).tolist()
versus = {
    "data parallel": [step_of(replica_trace, s) for s in speeds],
    "pipeline, 1F1B": [step_of(pipeline_trace, s) for s in speeds],
}
plot_lines(
    [speed / 1e6 for speed in speeds],
    versus,
    logx=True,
    xlabel="network (MB/s)",
    ylabel="time of a step (s)",
    title="A slow network favours the pipeline, a fast one data parallelism",
    ideal={"compute alone": np.full(len(speeds), 24.0)},
)

# %% [markdown]
# On the right the network is fast: data parallelism hides its all-reduce behind the backward pass
# and comes close to the compute time, while the pipeline keeps its bubble of 3/11. On the left the
# all-reduce of all gradients takes over. The pipeline sends activations only, and its step becomes
# a fifth longer.

# %%
# %%rank 0
sent = emulate.simulate(pipeline_trace, network(1e9)).bytes_per_link
middle = sent["device 1"]  # a stage with two neighbours: activations on, gradients back
ring = 2 * 3 / 4 * 4 * WIDTH * WIDTH * 4
display(
    slow_guess.reveal(versus["data parallel"][0] / versus["pipeline, 1F1B"][0]),
    claim(
        "bytes a middle stage sends: 2 x micro-batches x activation",
        middle,
        2 * NUM_MICRO * MICRO * WIDTH * 4,
        rtol=0.01,
    ),
    claim(
        "a replica of the same model sends this many times as much", ring / middle, 24.0, rtol=0.01
    ),
    claim(
        "fast network: step of the pipeline / step of data parallelism",
        versus["pipeline, 1F1B"][-1] / versus["data parallel"][-1],
        11 / 8,
        rtol=0.03,
    ),
    claim(
        "slow network: the pipeline is faster by a factor of",
        versus["data parallel"][0] / versus["pipeline, 1F1B"][0],
        (">", 2.0),
    ),
    claim(
        "slowest network / fastest: step of the pipeline",
        versus["pipeline, 1F1B"][0] / versus["pipeline, 1F1B"][-1],
        1.2,
        rtol=0.05,
    ),
)

# %% [markdown]
# Change the network yourself: each bar is a replay of a recorded trace. Latency hurts as well.


# %%
# %%rank 0
def choose(log_speed: float = 5.0, latency_ms: int = 1):
    """Time of a step under data parallelism and under a pipeline, on the chosen network."""
    speed, latency_s = 10.0**log_speed, latency_ms / 1e3
    bars = {
        "data parallel": step_of(replica_trace, speed, latency_s),
        "pipeline, 1F1B": step_of(pipeline_trace, speed, latency_s),
    }
    return plot_bars(
        bars,
        xlabel="seconds per step",
        limit=24.0,
        limit_label="compute alone",
        form="{:.1f}",
        title=f"{speed / 1e6:.3g} MB/s, {latency_ms} ms",
    )


explore(
    choose,
    log_speed=(4.0, 7.0, 0.25),
    latency_ms=[0, 1, 10, 100, 300],
    labels={"log_speed": "network, log10 of bytes/s", "latency_ms": "latency (ms)"},
    alt="Two bars: time of a step under data parallelism and under a pipeline",
)

# %% [markdown]
# In practice you do not choose one. Pipelines go **between** nodes, where links are slow; tensor
# parallelism goes inside a node (lecture 8); data parallelism takes all GPUs that are left (lecture
# 9). A pipeline also divides the gradients that each data-parallel group has to reduce by p.
#
# ## Now you
#
# Write a function that gives the **smallest m** with which an interleaved pipeline of p ranks with
# v chunks each is idle at most a share `idle` **of the step**. Interleaving wants m to be a
# multiple of p. The cell after it tries your function on twenty pipelines, in the simulator.


# %%
def fewest_micro_batches(p: int, v: int, idle: float) -> int | None:
    """Your turn. The idle share of a step is (p - 1) / (v m + p - 1)."""
    return None


# %%
# %%rank 0
def check(answer) -> str:
    dice = random.Random(0)
    for _ in range(20):
        p, v, idle = dice.randint(2, 8), dice.randint(1, 3), dice.uniform(0.1, 0.4)
        case, m = f"p = {p}, v = {v}, idle {idle:.2f}", answer(p, v, idle)
        if m is None:
            return "Not written yet."
        if m < 1 or m % p:
            return f"{case}: {m} is no multiple of p."
        m = int(m)
        if m > 9 * p:  # enough for the smallest `idle`, 0.1
            return f"{case}: m = {m} is larger than needed."
        if simulate(interleaved(p, m, v)).bubble_fraction > idle:
            return f"{case}: with m = {m} it is idle longer."
        if m > p and simulate(interleaved(p, m - p, v)).bubble_fraction <= idle:
            return f"{case}: m = {m} is larger than needed."
    return "Right, in all 20 cases."


def one_answer(p: int, v: int, idle: float) -> int:
    return math.ceil((p - 1) * (1 - idle) / (idle * v) / p) * p


def of_ideal_time(p: int, v: int, idle: float) -> int:
    return math.ceil((p - 1) / (idle * v) / p) * p


print(check(fewest_micro_batches))
display(
    claim("(p - 1)(1 - idle) / (idle v), rounded up", check(one_answer), "Right, in all 20 cases."),
    claim(
        "the share of the ideal time, (p - 1) / (v m), asks for too many",
        check(of_ideal_time),
        lambda got: "larger than needed" in got,
    ),
    claim("m = p is too few", check(lambda p, v, idle: p), lambda got: "idle longer" in got),
    claim("as a float", check(lambda *x: np.float64(one_answer(*x))), "Right, in all 20 cases."),
    claim("10,000 p, at once", check(lambda p, v, idle: 10_000 * p), lambda got: "needed" in got),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Solve idle = (p − 1)/(v m + p − 1) for m: it is (p − 1)(1 − idle)/(idle · v). Round it up to a
# multiple of p: `math.ceil((p - 1) * (1 - idle) / (idle * v) / p) * p`.
#
# </details>
#
# ## Summary
#
# - Layers on p GPUs without micro-batches: utilisation 1/p, at every p.
# - With m micro-batches the bubble is (p − 1)/(m + p − 1) **of the step**. (p − 1)/m is the same
#   idle time **compared with the ideal time**. Efficiency is m/(m + p − 1).
# - GPipe and 1F1B have the same bubble. 1F1B holds min(p − r, m) micro-batches instead of m.
# - Interleaving divides the bubble's time by v, and multiplies the messages by v or more.
# - Zero bubble splits backward into B and W; ZB-H1 has a third of the bubble for equal times.
# - PipeDream has no flush. It needs a stash of p − r weight versions, and lives with gradients that
#   are p − r − 1 updates old.
# - Stages must take equally long; the slowest one sets the pace. Balance seconds, not layers.
# - Between stages, cut the graph *and* pass gradients on. Detached outputs do not train.
#
# ## Questions
#
# 1. A slide says: "4 stages, 4 micro-batches: bubble 75 %, so efficiency 25 %". What is right?
#
# <details><summary>Answer</summary>
#
# The idle time is 75 % *of the ideal time* (3/4). Of the step it is 3/7 = 43 %, so the efficiency
# is 57 %.
#
# </details>
#
# 2. You double m at the same global batch (micro-batches half as large). Name one thing that gets
#    better and two that can get worse.
#
# <details><summary>Answer</summary>
#
# The bubble shrinks. Small micro-batches use the GPU less well, since matrix products get thin and
# kernel launches weigh more; and there are twice as many messages, each with its latency. Under
# GPipe memory stays the same (twice as many, half as large); under 1F1B it halves, if m was at
# least p.
#
# </details>
#
# 3. Why does rank 0 hold more activations than the last rank under 1F1B, and what does that say
#    about where to put the embedding?
#
# <details><summary>Answer</summary>
#
# A micro-batch that left rank 0 returns after it has passed all other stages, and p − 1 more have
# started by then. On the last rank the backward pass follows at once. So memory is tightest in
# front: a large embedding there hurts most, while the last stage has memory to spare but more
# compute (output layer, loss).
#
# </details>
#
# 4. In PipeDream, does the last stage need weight stashing?
#
# <details><summary>Answer</summary>
#
# No. Its backward pass follows its forward pass directly: staleness 0, one version. Rank r needs
# p − r.
#
# </details>
#
# 5. `zb_h1` runs W of a micro-batch up to r backward passes later on rank r. What does it pay?
#
# <details><summary>Answer</summary>
#
# Activations live until W, so every rank holds up to p micro-batches, where 1F1B's rank r holds
# p − r. The *largest* rank holds as many as before, which is why the paper says "no more memory".
#
# </details>
#
# 6. Tied embeddings: input embedding and output layer share one matrix. What does a pipeline have
#    to do about it?
#
# <details><summary>Answer</summary>
#
# Both ends hold a copy, and each computes a part of its gradient. Before the optimizer step the two
# ranks must add their parts (an all-reduce of two ranks); see
# `lib/minidist/parallel/pipeline/ties.py`.
#
# </details>
#
# ## Try it
#
# - Write a `Schedule` of your own and give it to `simulate`. `check_schedule` tells you what is
#   wrong with it. Can you find one for p = 2, m = 2 that deadlocks?
# - In section 10 use `gpipe` in `as_pipeline`. Which curve moves, and where?
# - Set `pause` to other values per rank in section 3. What does one slow stage do to the others?
#
# Then do it yourself. [**lab2_accumulation**](../labs/lab2_accumulation/lab2_accumulation.ipynb)
# has the micro-batches and their gradients. In the bonus notebook
# [**bonus_pipeline**](../labs/bonus_pipeline/bonus_pipeline.ipynb) you write GPipe and 1F1B, and
# the program that runs them: its gradients are compared with one process, and the order of its
# operations, its idle time and the micro-batches that it keeps with sections 2 and 4.
#
# ## What to read
#
# - *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*,
#   [arXiv 1811.06965](https://arxiv.org/abs/1811.06965)
# - *PipeDream: Fast and Efficient Pipeline Parallel DNN Training*,
#   [arXiv 1806.03377](https://arxiv.org/abs/1806.03377)
# - *Memory-Efficient Pipeline-Parallel DNN Training* (PipeDream-2BW and PipeDream-flush),
#   [arXiv 2006.09503](https://arxiv.org/abs/2006.09503)
# - *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (interleaving,
#   the two bubbles), [arXiv 2104.04473](https://arxiv.org/abs/2104.04473)
# - *Zero Bubble Pipeline Parallelism* (ZB-H1, ZB-H2, ZB-V),
#   [arXiv 2401.10241](https://arxiv.org/abs/2401.10241), and
#   *Pipeline Parallelism with Controllable Memory* (other V's),
#   [arXiv 2405.15362](https://arxiv.org/abs/2405.15362)
# - *PipeMare: Asynchronous Pipeline Parallel DNN Training* (what staleness does to stability),
#   [arXiv 1910.05124](https://arxiv.org/abs/1910.05124)
# - *Reducing Activation Recomputation in Large Transformer Models* (activation memory of
#   pipelines), [arXiv 2205.05198](https://arxiv.org/abs/2205.05198)
# - *DeepSeek-V3 Technical Report* (DualPipe), [arXiv 2412.19437](https://arxiv.org/abs/2412.19437)
