# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 4
#     name: torchrun-4
# ---

# %% [markdown]
# # 2 · Collectives and interconnects
#
# Ranks that train one model talk in **collectives**: operations that all ranks of a group call
# together. How long a collective takes decides which parallelism pays on which machine, so the rest
# of the course leans on this lecture.
#
# **After it you can**
#
# - say what each collective gives to each rank, and write it without a hang;
# - draw a ring and a tree step by step, and count what they send;
# - predict the time of a collective from two numbers of a link, latency and bandwidth;
# - read a data sheet (bits or bytes? one direction or both?) and a table of nccl-tests;
# - find the rank that did not come when an all-reduce hangs.
#
# It takes about 80 minutes. The notebook runs on the kernel *torchrun × 4* (named after
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html)): each cell runs on four
# ranks, and a cell that begins with `%%rank 0` runs on rank 0 only. Five times the lecture asks
# for your guess before it measures. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: larger messages and more rounds
seed = 0

# %%
import math
import re
import time

import torch
import torch.distributed as dist
from IPython.display import display

import minidist.collectives as mc
import minidist.cost as cost
import minidist.emulate as emulate
from minidist import device as devices
from minidist import launch
from minidist.claims import claim
from minidist.errors import LaunchError, MismatchError

torch.manual_seed(seed)
device = devices.choose_device()
if device.type == "cuda":
    torch.cuda.set_device(device)
if not dist.is_initialized():
    dist.init_process_group(devices.choose_backend())
rank, world_size = dist.get_rank(), dist.get_world_size()
dist.get_backend(), world_size, device.type

# %% [markdown]
# ## A picture to explain
#
# These are measurements that others have published
# ([ml-engineering](https://github.com/stas00/ml-engineering/blob/master/network/README.md)): one
# all-reduce, from 32 KiB to 16 GiB, on three machines. The vertical axis is *bus bandwidth*, which
# section 6 defines; for now read it as "how fast the wires seem to be".

# %%
# %%rank 0
# %matplotlib inline
from matplotlib.figure import Figure

from minidist.plots import (
    PALETTE,
    new_figure,
    plot_bars,
    plot_lines,
    plot_step,
    plot_steps,
    plot_timeline,
    style,
)
from minidist.widgets import explore, predict

ML_ENGINEERING = "stas00/ml-engineering, network/README.md, measured with NCCL"
sweep_bytes = [2.0**power for power in range(15, 35)]
sweeps = {  # bus bandwidth in GB/s, one figure per size
    "one node, 8 x A100": "1.31 2.45 4.43 7.47 11.41 18.0 36.18 72.33 109.93 106.16 138.49 171.54 "
    "176.92 194.07 222.72 229.04 231.41 233.88 234.61 234.89",
    "one node, 8 x H200": "1.44 2.93 5.73 11.74 23.94 39.93 64.53 107.16 155.53 219.89 275.84 "
    "346.51 401.93 436.15 450.29 463.58 469.17 473.1 477.45 482.26",
    "four nodes, 32 x B200": "0.01 0.04 0.45 1.33 2.84 5.37 10.38 18.9 35.12 64.43 91.19 156.74 "
    "197.94 229.09 326.9 361.99 372.42 377.34 380.39 381.8",
}
sweeps = {name: [float(number) for number in text.split()] for name, text in sweeps.items()}
mib = [num_bytes / 2**20 for num_bytes in sweep_bytes]
figure, _ = new_figure(7.5, 5.6)
figure.clear()
with style():
    upper, lower = figure.subplots(2, 1)
axes = {"xlabel": "message (MiB)", "ylabel": "bus bandwidth (GB/s)", "logx": True}
plot_lines(mib, sweeps, **axes, logy=True, title="One all-reduce, as published", ax=upper)
plot_lines(
    mib[10:],
    {name: curve[10:] for name, curve in sweeps.items()},
    **axes,
    ideal={"450: wires of an H200": [450] * len(mib[10:])},
    title="Its right half on a plain scale",
    ax=lower,
)
figure

# %% [markdown]
# Four things want an explanation. Why does a small message see a hundredth of the bandwidth, or
# less? Why does each curve level off, and at that height? Why is the curve of four nodes so far
# below the others on the left, and so near on the right? And how can eight H200 seem faster than
# their wires, the dashed line of 450 GB/s in each direction? By the end you can answer all four.
#
# ## 1. What each collective does
#
# A **group** is a set of ranks; the default group holds all of them. All ranks of the group call
# the collective, in the same order, with tensors of the same dtype and matching shapes, the same
# root and the same operation. Section 9 breaks most of these rules.
#
# | collective | every rank gives | who gets what |
# |---|---|---|
# | broadcast | (only the root gives) | all: the root's tensor |
# | reduce | a tensor | the root: the sum |
# | **all-reduce** | a tensor | all: the sum |
# | scatter | (only the root gives N parts) | rank r: part r |
# | gather | a tensor | the root: all of them |
# | **all-gather** | a tensor | all: all of them |
# | **reduce-scatter** | N parts | rank r: the sum of all parts r |
# | all-to-all | N parts | rank r: part r of everyone |
# | barrier | nothing | nothing: nobody goes on before all have come |
# | send, receive | a tensor | one rank gives, one gets |
#
# Instead of the sum you may ask for the average, the product, the smallest or the largest
# ([`op=dist.ReduceOp.AVG`](https://docs.pytorch.org/docs/stable/distributed.html) and so on).
#
# The next two cells run all but the last. Rank r starts with the four numbers 10(r+1), 10(r+1)+1,
# …, so each number tells where it came from.

# %%
before, after = {}, {}
mine = 10.0 * (rank + 1) + torch.arange(world_size, device=device)
nothing = mine[:0]


def note(name, given, got):
    """Keep what this rank gave and what it got."""
    before[name], after[name] = given.tolist(), got.tolist()


x = mine.clone() if rank == 0 else torch.zeros_like(mine)
dist.broadcast(x, src=0)
note("broadcast", mine if rank == 0 else nothing, x)

x = mine.clone()
dist.reduce(x, dst=0)
note("reduce", mine, x if rank == 0 else nothing)

x = mine.clone()
dist.all_reduce(x)
note("all-reduce", mine, x)

x = torch.empty(1, device=device)
dist.scatter(x, list(mine.split(1)) if rank == 0 else None, src=0)
note("scatter", mine if rank == 0 else nothing, x)

# %% [markdown]
# The other four give out or collect parts of one number each.

# %%
parts = [torch.empty(1, device=device) for _ in range(world_size)]
dist.gather(mine[:1], parts if rank == 0 else None, dst=0)
note("gather", mine[:1], torch.cat(parts) if rank == 0 else nothing)

x = torch.empty_like(mine)
devices.all_gather_single(x, mine[:1])
note("all-gather", mine[:1], x)

x = torch.empty(1, device=device)
devices.reduce_scatter_single(x, mine)
note("reduce-scatter", mine, x)

x = torch.empty_like(mine)
dist.all_to_all_single(x, mine)
note("all-to-all", mine, x)

dist.barrier()
tables = [None] * world_size
dist.all_gather_object(tables, (before, after))  # any Python object: pickled, so slow

# %% [markdown]
# Each rank now knows what all have given and got, so rank 0 can draw it.


# %%
# %%rank 0
def draw_collective(ax, name):
    """Left what each rank gave, right what it got; one colour per giver, black for sums."""
    for side, shift in ((0, 0.0), (1, world_size + 1.2)):
        for r, table in enumerate(tables):
            for c, value in enumerate(table[side][name]):
                summed = side == 1 and "reduce" in name
                colour = "#000000" if summed else PALETTE[(int(value) // 10 - 1) % 5]
                ax.barh(r, 0.92, left=shift + c, height=0.8, color=colour)
                ax.text(
                    shift + c + 0.46,
                    r,
                    f"{value:g}",
                    color="white",
                    ha="center",
                    va="center",
                    fontsize=8,
                )
    ax.set(title=name, ylim=(world_size - 0.4, -0.6), xlim=(-0.1, 2 * world_size + 1.3), xticks=[])
    ax.set_yticks(range(world_size), [f"rank {r}" for r in range(world_size)], fontsize=8)
    ax.annotate("→", (world_size + 0.55, (world_size - 1) / 2), ha="center", va="center")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


# %%
# %%rank 0
with style():
    figure = Figure(figsize=(11, 5), layout="constrained")
    for ax, name in zip(figure.subplots(2, 4).flatten(), tables[0][0], strict=True):
        draw_collective(ax, name)
    figure.suptitle("Before → after, on real ranks", x=0.01, ha="left", fontweight="bold")
figure

# %% [markdown]
# Cover the right half of each panel and say what comes. The three in bold type in the table are
# those of training: all-reduce for gradients (lecture 3), reduce-scatter and all-gather for sharded
# models (lecture 5).
#
# The same in numbers: a broadcast of (1, 2, 3), a sum of vectors (1, 2, 3), (4, 5, 6), …, the sum
# of the rank numbers, and an average.

# %%
vector = torch.tensor([1.0, 2.0, 3.0], device=device) if rank == 0 else torch.zeros(3).to(device)
dist.broadcast(vector, src=0)
x = 3.0 * rank + vector
dist.all_reduce(x)
numbers = torch.tensor(rank, device=device)
dist.all_reduce(numbers)
mean = torch.tensor(rank + 1.0, device=device)
dist.all_reduce(mean)
mean /= world_size
everyone = [None] * world_size
dist.all_gather_object(everyone, vector.tolist())
print(x.tolist(), numbers.item(), mean.item())

# %%
# %%rank 0
N = world_size
display(
    claim("broadcast gives (1, 2, 3) to every rank", everyone, [[1.0, 2.0, 3.0]] * N, rtol=1e-9),
    claim(
        "all-reduce adds the ranks' vectors element by element",
        x.cpu().numpy(),
        [sum(3 * r + i for r in range(N)) for i in (1, 2, 3)],
        rtol=1e-6,
    ),
    claim("all-reduce of the rank numbers gives N(N-1)/2", numbers.item(), N * (N - 1) // 2),
    claim("the mean of 1, 2, …, N is the sum divided by N", mean.item(), (N + 1) / 2, rtol=1e-6),
)

# %% [markdown]
# **Started, not finished.** With `async_op=True` a collective returns at once with a handle. The
# tensor is not yours again until `wait()` has returned. Between the two, the rank computes: that is
# how training hides communication (lecture 3).

# %%
x = torch.ones(1000, device=device)
work = dist.all_reduce(x, async_op=True)
busy = sum(i * i for i in range(1000))  # something useful meanwhile; x must not be touched
work.wait()
print(x[0].item(), "after wait()")

# %% [markdown]
# ## 2. All-reduce is reduce-scatter, then all-gather
#
# After a reduce-scatter each rank holds one part of the sum. An all-gather brings the parts to
# everyone. Together they are an all-reduce. The ring, halving-doubling and the hierarchical
# all-reduce of this lecture are built that way; the tree of section 4 is not.
#
# You may read that reduce-scatter is the *inverse* of all-gather. It is not: first all-gather and
# then reduce-scatter gives N times the start, because N equal copies are added up. The two are
# **dual**: each is the backward pass of the other.

# %%
x = torch.randn(8 * world_size, device=device)
expected = x.clone()
dist.all_reduce(expected)
part = torch.empty(8, device=device)
devices.reduce_scatter_single(part, x)
both = torch.empty_like(x)
devices.all_gather_single(both, part)

shard = torch.full((2,), rank + 1.0, device=device)
everything = torch.empty(2 * world_size, device=device)
devices.all_gather_single(everything, shard)
back = torch.empty(2, device=device)
devices.reduce_scatter_single(back, everything)

# %%
# %%rank 0
display(
    claim(
        "reduce-scatter followed by all-gather is an all-reduce",
        both.cpu().numpy(),
        expected.cpu().numpy(),
        rtol=1e-4,
    ),
    claim(
        "all-gather followed by reduce-scatter multiplies by N",
        (back / shard).cpu().numpy(),
        [float(world_size)] * 2,
        rtol=1e-6,
        status="corrected",
        refutes="a common summary",
        said=1.0,
        why="it is called the inverse, but it adds N equal copies: it is the dual",
    ),
    claim(
        "before an all-gather among four ranks each holds a quarter of the result",
        shard.numel() / everything.numel(),
        1 / world_size,
        rtol=1e-9,
    ),
)

# %% [markdown]
# ## 3. Which bytes go where: the ring
#
# The simplest all-reduce: every rank sends its whole buffer of D bytes to every other, and each
# adds up what it has got. An all-to-all does that if each of its N parts is the whole buffer. We
# count the bytes on the way: `CollectiveLog` records every collective of a block, and for those of
# `minidist.collectives`, which are made of sends and receives, every byte that this rank sent.

# %%
D = 4 * 1200 * world_size  # bytes: 1200 N float32
x = torch.full((D // 4,), rank + 1.0, device=device)
copies = [torch.empty_like(x) for _ in range(world_size)]
with mc.CollectiveLog() as naive_log:
    mc.all_to_all(copies, [x] * world_size)
total = torch.stack(copies).sum(0)
print(f"each rank holds {total[0].item():g}, and this one sent {naive_log.num_bytes_sent() / D} D")

# %%
# %%rank 0
display(
    claim(
        "naive all-reduce: each rank sends (N-1) D",
        naive_log.num_bytes_sent() / D,
        world_size - 1.0,
        rtol=1e-9,
    ),
    claim(
        "over all ranks that is N(N-1) D",
        naive_log.num_bytes_sent() * world_size // D,
        world_size * (world_size - 1),
        status="corrected",
        refutes="a lab sheet",
        said=3,
        why="it says 3 D per GPU on 4 GPUs and 3 D in total, but 3 D from each of 4 are 12 D",
    ),
)

# %% [markdown]
# The **ring** sends far less. Each rank talks to its two neighbours only. The buffer is cut into N
# chunks. In each of the first N−1 steps a rank sends one chunk to the right and adds the one that
# comes from the left: a reduce-scatter. After them each rank has one finished chunk. In another N−1
# steps the finished chunks go around: an all-gather.
#
# In `minidist.collectives` an algorithm is *data*: a list of steps, each a list of messages. The
# same list is executed, drawn and costed, so the picture cannot disagree with the program.
# (`schedule.py` and `algorithms.py` in `lib/minidist/collectives/` are worth reading; so is
# `transport.py`, the one loop that runs them all.)

# %%
# %%rank 0
print(mc.ring_steps(4))

# %% [markdown]
# Read the first entry as "rank 0 sends chunk 3 to rank 1, which adds it to its own". Now the same
# list drawn. Numbers, in the boxes and on the arrows, are those of chunks. The light blue in a box
# is the share of ranks that are summed up in it so far; dark blue chunks are done.

# %%
# %%rank 0
plot_steps(mc.ring_steps(4), columns=4, title="Ring all-reduce of four ranks")

# %% [markdown]
# Step through it yourself, also with other numbers of ranks and other algorithms: *direct* sends
# every chunk straight to the rank that adds it up. *Halving-doubling* swaps half of the buffer with
# the rank at distance N/2, then a quarter with the one at N/4, and so on, and goes the same way
# back. Trees are the subject of section 4. Before each step, say which chunk leaves rank 0.

# %%
# %%rank 0
ALGORITHMS = {
    "ring": mc.ring_steps,
    "halving-doubling": mc.halving_doubling_steps,
    "tree": mc.tree_steps,
    "double tree": mc.double_tree_steps,
    "direct": mc.direct_steps,
}


def stepper(algorithm="ring", num_ranks=5, step=1):
    """What each rank holds before one step of an all-reduce, and the messages of that step."""
    schedule = ALGORITHMS[algorithm](num_ranks)
    return plot_step(schedule, min(step - 1, len(schedule.steps)))


explore(
    stepper,
    algorithm=list(ALGORITHMS),
    num_ranks=(2, 8),
    step=(1, 15),
    labels={"algorithm": "algorithm", "num_ranks": "ranks", "step": "step (beyond: the end)"},
    alt="Ranks in a circle, each with its chunks, and arrows for the messages of one step",
)

# %% [markdown]
# The naive all-reduce sent 3 buffers from each of four ranks. What does the ring send?

# %%
# %%rank 0
ring_guess = predict("Ring of four: how much does each rank send?", guess=None, unit="buffers")
ring_guess

# %% [markdown]
# The schedule is executed on the four ranks, and its bytes are counted on the way.

# %%
x = torch.randn(D // 4, device=device)
expected = x.clone()
dist.all_reduce(expected)
again = x.clone()
mc.ring_all_reduce(again)
with mc.CollectiveLog() as ring_log:
    mc.ring_all_reduce(x)
if rank == 0:
    print(ring_log)
error = (x - expected).abs().max().item()

# %%
# %%rank 0
display(
    ring_guess.reveal(ring_log.num_bytes_sent() / D),
    claim("our ring gives what torch's all-reduce gives", error, ("<", 1e-5)),
    claim(
        "and the same bits every time: its order of additions is fixed", torch.equal(x, again), True
    ),
    claim(
        "ring: each rank sends 2(N-1)/N of the buffer, counted message by message",
        ring_log.num_bytes_sent() / D,
        2 * (N - 1) / N,
        rtol=1e-12,
        authority="Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)",
    ),
    claim(
        "on 4 ranks that is 1.5 D",
        mc.ring_steps(4).num_bytes_sent(4000)[0] / 4000,
        1.5,
        rtol=1e-12,
        status="corrected",
        refutes="a lab sheet",
        said=2.0,
        why="2 D is the limit for many ranks; on 4 ranks it is a quarter less",
    ),
    claim("the ring takes 2(N-1) steps: 14 on 8 ranks", len(mc.ring_steps(8).steps), 2 * (8 - 1)),
    claim(
        "reduce-scatter sends (N-1)/N of the buffer, all-gather as much again",
        [
            mc.ring_reduce_scatter_steps(8).num_bytes_sent(8000)[0] / 8000,
            mc.ring_all_gather_steps(8).num_bytes_sent(8000)[0] / 8000,
        ],
        [7 / 8, 7 / 8],
        rtol=1e-12,
    ),
)

# %% [markdown]
# Can an all-reduce send less? With messages between pairs of ranks, no: 2(N−1)/N of the buffer for
# the busiest rank is a lower bound
# ([Patarasuk and Yuan](https://doi.org/10.1016/j.jpdc.2008.09.002) prove it), and the ring reaches
# it. It is **bandwidth optimal**. Some notes quote the factor as (N−1)/N, "near 1". That is one
# half of the way, the reduce-scatter.

# %%
# %%rank 0
ranks = [2, 4, 8, 16, 32, 64]
busiest = {
    name: [max(steps(n).num_bytes_sent(4096 * n)) / (4096 * n) for n in ranks]
    for name, steps in ALGORITHMS.items()
    if name != "direct"
}
display(
    claim(
        "the busiest rank of a ring of 8 sends 1.75 buffers",
        busiest["ring"][2],
        1.75,
        rtol=1e-12,
        status="corrected",
        refutes="a calculator's comment",
        said=7 / 8,
        why="(N-1)/N is one way around, and an all-reduce goes around twice",
    ),
    claim(
        "on 1000 ranks it is nearly 2",
        cost.bus_factor(kind="all_reduce", num_ranks=1000),
        1.998,
        rtol=1e-6,
    ),
    claim(
        "halving-doubling sends as little as the ring where N is a power of two",
        busiest["halving-doubling"],
        busiest["ring"],
        rtol=1e-12,
    ),
    claim("inner ranks of one binary tree send 3 buffers", max(busiest["tree"]), 3.0, rtol=1e-12),
)
same = busiest["ring"] == busiest["halving-doubling"]  # then one line stands for both
drawn = {name: sent for name, sent in busiest.items() if name != "halving-doubling" or not same}
plot_lines(
    ranks,
    {name + ", halving-doubling" * (same and name == "ring"): v for name, v in drawn.items()},
    xlabel="ranks",
    ylabel="sent by the busiest rank (buffers)",
    logx=True,
    ticks=ranks,
    title="Bytes level off as ranks are added",
)

# %% [markdown]
# ## 4. The tree: fewer steps
#
# A **tree** adds up from the leaves to the root and sends the result back down. It needs about
# 2 log₂ N steps instead of 2(N−1). But each message is the whole buffer.
#
# Drawn from the schedule again, this time with the ranks in places that suit a tree. The number in
# a box says how many ranks are summed up there. Ranks are numbered from left to right, so rank 3 is
# the root. Orange messages are added, green ones copied.


# %%
# %%rank 0
def draw_schedule(schedule, places, columns=5):
    """One panel per step: in each rank's chunks how many ranks are summed up, and the messages."""
    n, rows = schedule.world_size, math.ceil((len(schedule.steps) + 1) / columns)
    figure = Figure(figsize=(2.7 * columns, 2.1 * rows), layout="constrained")
    gap = 10 + 3 * schedule.num_chunks  # points between an arrow and the middle of a box
    arrow = {"arrowstyle": "-|>", "lw": 1.8, "shrinkA": gap, "shrinkB": gap}
    for step, ax in enumerate(figure.subplots(rows, columns).flatten()):
        past = mc.Schedule("past", n, schedule.num_chunks, schedule.steps[:step])
        held = mc.simulate(past, [[{r}] * past.num_chunks for r in range(n)], set.union)
        for r, (x, y) in places.items():
            done = all(len(chunk) == n for chunk in held[r])
            box = {"boxstyle": "round", "facecolor": PALETTE[0] if done else "white"}
            text = " ".join(str(len(chunk)) for chunk in held[r])
            ax.text(x, y, text, ha="center", va="center", color="wk"[not done], bbox=box)
        for t in schedule.steps[step] if step < len(schedule.steps) else ():
            colour = PALETTE[5] if t.action == "reduce" else PALETTE[2]
            look = arrow | {"color": colour, "connectionstyle": "arc3,rad=0.18"}
            ax.annotate("", places[t.dst], places[t.src], arrowprops=look)
        xs, ys = zip(*places.values(), strict=True)
        ax.set(xlim=(min(xs) - 0.7, max(xs) + 0.7), ylim=(min(ys) - 0.5, max(ys) + 0.5))
        ax.set_title(f"step {step + 1}" if step < len(schedule.steps) else "the end", fontsize=10)
        ax.axis("off")
    return figure


heights = {0: 0, 1: 1, 2: 0, 3: 2, 4: 0, 5: 1, 6: 0}
draw_schedule(mc.tree_steps(7), {rank: (rank, y) for rank, y in heights.items()})

# %% [markdown]
# Two tricks make trees good for large messages too, and NCCL uses both. Cut the buffer into pieces
# that follow each other through the tree (*pipelining*). And use **two trees**, each for one half
# of the buffer, so that a rank that is a leaf in one is an inner rank in the other: then nobody
# sends much more than 2 buffers.

# %%
# %%rank 0
display(
    claim(
        "a reduce and a broadcast over 8 ranks in binomial trees take 2 log2(8) = 6 steps",
        len(mc.reduce_steps(8).steps) + len(mc.broadcast_steps(8).steps),
        6,
    ),
    claim(
        "a full binary tree of 63 ranks takes 10 steps up and down, a ring 124",
        [len(mc.tree_steps(63).steps), len(mc.ring_steps(63).steps)],
        [2 * 5, 2 * 62],
    ),
    claim(
        "with two trees on 64 ranks nobody sends much more than 2 buffers",
        busiest["double tree"][-1],
        ("<", 2.5),
    ),
)

# %% [markdown]
# ## 5. Time: two numbers of a link
#
# A message of B bytes takes **α + B β**: a latency α however short it is, and β = 1 / bandwidth for
# each byte. With S bytes and N ranks:
#
# | all-reduce | latency | transfer |
# |---|---|---|
# | ring | 2(N−1) α | 2 (N−1)/N · S β |
# | halving-doubling | 2 log₂N α | 2 (N−1)/N · S β |
# | tree | 2 log₂N α | 2 log₂N · S β |
# | double tree, k pieces | 2 (log₂N + k − 1) α | 2 (log₂N + k − 1)/k · S β |
#
# Is that right? We can try it without a cluster. The **emulated cluster** runs the program on real
# processes, carries the data, and replays what was sent on links of any speed with a virtual clock.
# The clock knows single messages only; nobody told it the formula for a ring. We execute schedules
# on it: 4 ranks, 4 MiB. The devices of this cluster add in no time, so that only links count.

# %%
# %%rank 0
from minidist.collectives.reduction import Reduction
from minidist.emulate.teach import run_traced

NUMEL = 1 << 20  # 4 MiB of float32


def execute(schedule, numel):
    """One rank's part of any all-reduce schedule."""
    x = torch.full((numel,), dist.get_rank() + 1.0)
    chunks = mc.even_chunks(x, schedule.num_chunks)
    mc.run_steps(schedule, chunks, mc.Transport(dist.group.WORLD), Reduction.of("sum", x.dtype))
    return x[0].item(), x[-1].item()


def cluster(intra, inter=None, nodes=1):
    """Four devices that compute in no time, on `nodes` nodes."""
    return emulate.Cluster(
        name=f"{nodes} x {4 // nodes}",
        nodes=nodes,
        devices_per_node=4 // nodes,
        intra_node=intra,
        inter_node=inter or intra,
        peak_flops_per_s=1e30,
        memory_bandwidth_bytes_per_s=1e30,
    )


pcie4 = emulate.Link(bandwidth_bytes_per_s=32e9, latency_s=5.7e-6)
results, ring_trace = run_traced(execute, 4, mc.ring_steps(4), NUMEL)
ring_timeline = emulate.simulate(ring_trace, cluster(pcie4))
print(results)

# %%
# %%rank 0
display(
    claim(
        "the emulated ring of 4 ranks takes 6 (alpha + S/4 beta), to the last digit",
        ring_timeline.makespan_s,
        6 * (5.7e-6 + 4 * NUMEL / 4 / 32e9),
        rtol=1e-9,
    ),
    claim(
        "the cost model says the same",
        ring_timeline.makespan_s,
        cost.all_reduce_seconds(num_bytes=4 * NUMEL, num_ranks=4, link=pcie4),
        rtol=1e-9,
    ),
    claim("and every rank has the sum 1 + 2 + 3 + 4", results, [(10.0, 10.0)] * 4, rtol=1e-9),
)
plot_timeline(ring_timeline, title="Six steps of a ring on an emulated cluster, 4 MiB over PCIe")

# %% [markdown]
# All links are busy all the time: that is what makes the ring good at large messages.
#
# ### Bits are not bytes
#
# Networks are sold in *bits* per second, memory in *bytes*. A calculator that forgets this is wrong
# by a factor of 8, and one that takes 1024 MB for a GB by another 2.4 %. Both happened in a
# calculator that is still passed around. Here are its five cases, mended: a 100 Gbit/s network
# carries 12.5 GB/s.

# %%
# %%rank 0
cases = [  # MB, Gbit/s, ranks, algorithm, what the old calculator prints, the right ms
    (100, 100, 8, "ring", 1.71, 14.0),
    (100, 100, 8, "tree", 5.86, 48.0),
    (100, 400, 8, "ring", 0.427, 3.5),
    (1000, 100, 8, "ring", 17.1, 140.0),
    (100, 100, 64, "ring", 1.92, 15.75),
]
for mb, gbit, n, algorithm, said, right in cases:
    wire = cost.Wire(bandwidth_bytes_per_s=cost.gbit_per_s(gbit), latency_s=0)
    ms = 1e3 * cost.all_reduce_seconds(
        num_bytes=mb * 1e6, num_ranks=n, link=wire, algorithm=algorithm
    )
    display(
        claim(
            f"{mb} MB over {gbit} Gbit/s on {n} ranks, {algorithm}: milliseconds",
            ms,
            right,
            rtol=1e-3,
            status="corrected",
            refutes="a common calculator",
            said=said,
            why="bits taken for bytes (factor 8), and 1024 MB for a GB (2.4 %)",
        )
    )
claim(
    "100 MB is 0.1 GB",
    100e6 / cost.GB,
    0.1,
    rtol=1e-9,
    status="corrected",
    refutes="a common calculator",
    said=100 / 1024,
    why="GB is 10^9 bytes wherever bandwidths are; GiB is 2^30",
)

# %% [markdown]
# ### Which algorithm is fastest?
#
# Latency decides for small messages, bandwidth for large ones. So neither ring nor tree is best for
# all, and NCCL chooses again for every size.

# %%
# %%rank 0
NAMES = {
    "ring": "ring",
    "halving_doubling": "halving-doubling",
    "tree": "tree",
    "double_tree": "double tree",
}
sizes = [2.0**power for power in range(8, 33)]


def compare(log2_bytes=16, num_ranks=64, link="InfiniBand NDR 400 Gbit/s"):
    """Time of an all-reduce over message size, one line per algorithm, and the best of NCCL's."""
    wire, here = cost.LINKS[link], 2.0**log2_bytes
    times = {
        shown: [
            1e6
            * cost.all_reduce_seconds(
                num_bytes=size, num_ranks=num_ranks, link=wire, algorithm=name
            )
            for size in sizes
        ]
        for name, shown in NAMES.items()
    }
    seconds, best = min(
        (cost.all_reduce_seconds(num_bytes=here, num_ranks=num_ranks, link=wire, algorithm=a), a)
        for a in ("ring", "double_tree")
    )
    figure = plot_lines(
        sizes,
        times,
        xlabel="message (bytes)",
        ylabel="time (µs)",
        logx=True,
        logy=True,
        markers=False,
        title=f"{here:,.0f} bytes on {num_ranks} ranks, ring or double tree: "
        f"{NAMES[best]}, {1e6 * seconds:,.0f} µs",
    )
    figure.axes[0].axvline(here, color="#6B6B6B", linestyle=":")
    return figure


explore(
    compare,
    log2_bytes=(8, 32),
    num_ranks=[2, 4, 8, 16, 64, 256, 1024],
    link=list(cost.LINKS),
    labels={
        "log2_bytes": "message: 2 to the power of (bytes)",
        "num_ranks": "ranks",
        "link": "link",
    },
    alt="Time over message size for ring, halving-doubling, tree and double tree, on log axes",
)

# %% [markdown]
# Try 8 ranks on NVLink 4, 1024 ranks on InfiniBand, and 10 Gbit/s Ethernet. From which size on is
# the ring the faster one, if at all?
#
# On paper halving-doubling is never slower than the ring (for powers of two). NCCL's all-reduce has
# none: in a ring each rank keeps its two neighbours, so a ring can be laid along the wires. In
# halving-doubling each rank has another partner in every step, and some partners are far away.
# Section 8 counts what that costs.
#
# One more guess, now that bandwidth and latency compete. Eight A100 are joined by 300 GB/s.

# %%
# %%rank 0
latency_guess = predict(
    "Ring of 8 x A100, NVLink 3, 64 KiB: how much of the time is latency?", guess=None, unit="%"
)
latency_guess

# %% [markdown]
# On a ring, latency and transfer take equally long at S = N α / β.


# %%
# %%rank 0
def latency_share(num_bytes, link, n=8):
    """Share of a ring all-reduce that is latency."""
    seconds = cost.all_reduce_seconds(num_bytes=num_bytes, num_ranks=n, link=link)
    return 2 * (n - 1) * link.latency_s / seconds


half = cost.half_bandwidth_bytes(num_ranks=8, link=cost.NVLINK3)
print(f"8 x A100 on NVLink 3: half of the time is latency at {half / 1e6:.2f} MB")
against_ring = [
    cost.all_reduce_seconds(
        num_bytes=size, num_ranks=64, link=cost.INFINIBAND_NDR, algorithm="halving_doubling"
    )
    / cost.all_reduce_seconds(num_bytes=size, num_ranks=64, link=cost.INFINIBAND_NDR)
    for size in sizes
]
display(
    latency_guess.reveal(100 * latency_share(2**16, cost.NVLINK3)),
    claim(
        "on paper halving-doubling is at no size slower than the ring: 64 ranks, time / time",
        max(against_ring),
        ("<=", 1.0),
    ),
    claim(
        "at S = N alpha / beta, latency is half of the time",
        latency_share(half, cost.NVLINK3),
        0.5,
        rtol=1e-9,
    ),
    claim(
        "1 GB on 8 A100: bandwidth decides, latency is under 1 %",
        latency_share(1e9, cost.NVLINK3),
        0.008,
        rtol=0.02,
    ),
    claim("64 KiB: latency is 99 %", latency_share(2**16, cost.NVLINK3), 0.99, rtol=0.01),
)

# %% [markdown]
# Hence a rule of thumb: gradients of a whole model are large, so data parallelism asks for
# bandwidth and copes with the latency of a network, and it computes meanwhile. Tensor parallelism
# all-reduces activations four times per block (50 MB each for a sequence of GPT-3) and waits for
# each, so it stays inside a node, where bandwidth is highest (lecture 8). And small tensors are put
# together into **buckets** before they are sent (lecture 3).
#
# ### Does an all-reduce get slower with log N?
#
# That is often said. From 8 to 64 ranks log N doubles.

# %%
# %%rank 0
growth_guess = predict(
    "Ring, 1 GB, 400 Gbit/s: how many times as long on 64 ranks as on 8?", guess=None
)
growth_guess

# %% [markdown]
# For a ring, log N is wrong twice. The transfer does not grow without bound: it levels off at
# 2 S β. And the latency grows faster than log N: it is proportional to N−1. For 1 GB it shows only
# beyond a hundred ranks.

# %%
# %%rank 0
ranks = [2**power for power in range(1, 11)]
link = cost.INFINIBAND_NDR
large, small = 1e9, 64e3


def relative(num_bytes, algorithm):
    """Time relative to 2 ranks."""
    times = [
        cost.all_reduce_seconds(num_bytes=num_bytes, num_ranks=n, link=link, algorithm=algorithm)
        for n in ranks
    ]
    return [t / times[0] for t in times]


growth = {
    "ring, 1 GB": relative(large, "ring"),
    "ring, 64 KB": relative(small, "ring"),
    "double tree, 1 GB": relative(large, "double_tree"),
    "double tree, 64 KB, as log₂ N": relative(small, "double_tree"),
}
plot_lines(
    ranks,
    growth,
    logx=True,
    logy=True,
    ticks=ranks,
    xlabel="ranks",
    ylabel="time / time of 2 ranks",
    title="A large ring all-reduce does not grow with log N",
)


# %%
# %%rank 0
def ring_bytes(n):
    """Buffers that each rank of a ring sends, from the schedule."""
    return max(mc.ring_steps(n).num_bytes_sent(64 * n)) / (64 * n)


display(
    growth_guess.reveal(growth["ring, 1 GB"][5] / growth["ring, 1 GB"][2]),
    claim(
        "large all-reduce, from 8 to 64 ranks on a ring: factor in bytes, hence in time",
        ring_bytes(64) / ring_bytes(8),
        1.125,
        rtol=1e-9,
        status="corrected",
        refutes="a common lesson",
        said=2.0,
        why="log N would double from 8 to 64; the bytes of a ring level off at two buffers",
    ),
    claim(
        "tiny all-reduce, from 8 to 64 ranks on a ring: number of latencies",
        len(mc.ring_steps(64).steps) / len(mc.ring_steps(8).steps),
        9.0,
        rtol=1e-9,
    ),
    claim(
        "tiny all-reduce on a double tree: time relative to 2 ranks, over log2 N",
        [
            t / math.log2(n)
            for t, n in zip(growth["double tree, 64 KB, as log₂ N"], ranks, strict=True)
        ],
        [1.0] * len(ranks),
        rtol=0.02,
    ),
)

# %% [markdown]
# ## 6. Measure, then fit
#
# Where do α and β come from? You measure, and lay a straight line through the times.
# `minidist.profile.interconnect` times collectives on the ranks of this notebook: the best of a few
# rounds, because other programs only ever make it slower.

# %%
from minidist.profile.interconnect import fit_collective, measure_collectives

powers = range(10, 25 if quick else 27, 2)
rows = measure_collectives(
    ("all_reduce", "all_gather"), [2**power for power in powers], rounds=12 if quick else 30
)

# %%
# %%rank 0
reduces = [row for row in rows if row.kind == "all_reduce"]
fit = fit_collective(rows, "all_reduce")
alpha_us, gb_per_s = 1e6 * fit.link.latency_s, fit.link.bandwidth_bytes_per_s / 1e9
print(f"{dist.get_backend()}, {world_size} ranks: {alpha_us:.0f} µs per step, {gb_per_s:.2f} GB/s")
line_us = [
    1e6 * cost.all_reduce_seconds(num_bytes=row.num_bytes, num_ranks=world_size, link=fit.link)
    for row in reduces
]
off = [100 * (t / (1e6 * row.seconds) - 1) for t, row in zip(line_us, reduces, strict=True)]
print("the line misses the times by, %:", " ".join(f"{each:+.0f}" for each in off))
plot_lines(
    [row.num_bytes for row in reduces],
    {
        "measured": [1e6 * row.seconds for row in reduces],
        "fitted line": line_us,
    },
    logx=True,
    logy=True,
    xlabel="message (bytes)",
    ylabel="time of an all-reduce (µs)",
    title=f"Measured here: {dist.get_backend()}, {world_size} ranks; "
    f"the line is off by {100 * fit.mean_rel_error:.0f} % on average",
)

# %% [markdown]
# The shape is that of section 5: flat on the left, where latency decides, and a straight slope on
# the right. The fitted α holds everything that a step costs: a system call, waking a process that
# sleeps, a core that is shared. It is not the latency of a wire. And no single β suits all sizes:
# large buffers leave the cache. The fit weighs relative errors alike, so a point may lie off the
# line by a third, also the largest; the list above says by how much.

# %%
# %%rank 0
per_byte = [row.seconds / row.num_bytes for row in reduces]
claim(
    "here too a byte of the smallest message costs several times one of the largest",
    per_byte[0] / per_byte[-1],
    (">", 5),
)

# %% [markdown]
# Change the two numbers and watch which side of the curve moves. At 1 × and 1 × you see the fit:
# the sum of its squared relative errors is the smallest.


# %%
# %%rank 0
def by_hand_fit(alpha=4.0, bandwidth=0.5):
    """Measured times of an all-reduce and the line of a chosen latency and bandwidth."""
    wire = cost.Wire(
        bandwidth_bytes_per_s=bandwidth * fit.link.bandwidth_bytes_per_s,
        latency_s=alpha * max(fit.link.latency_s, 1e-7),
    )
    model = [
        cost.all_reduce_seconds(num_bytes=row.num_bytes, num_ranks=world_size, link=wire)
        for row in reduces
    ]
    off = [abs(m / row.seconds - 1) for m, row in zip(model, reduces, strict=True)]
    return plot_lines(
        [row.num_bytes for row in reduces],
        {"measured": [1e6 * row.seconds for row in reduces], "model": [1e6 * m for m in model]},
        logx=True,
        logy=True,
        xlabel="message (bytes)",
        ylabel="time (µs)",
        title=f"α = {1e6 * wire.latency_s:.0f} µs, {wire.bandwidth_bytes_per_s / 1e9:.2f} GB/s: "
        f"off by {100 * sum(off) / len(off):.0f} % on average",
    )


factors = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
explore(
    by_hand_fit,
    alpha=factors,
    bandwidth=factors,
    labels={"alpha": "latency α (× fitted)", "bandwidth": "bandwidth 1/β (× fitted)"},
    alt="Measured times and the line of the model, over message size",
)

# %% [markdown]
# Does the fit find the truth? On a real machine nobody knows it. On the emulated cluster we do:
# give its times to the fit, and it must return the link that we built.


# %%
# %%rank 0
def many_sizes(numels):
    for numel in numels:
        dist.all_reduce(torch.zeros(numel))


numels = [2**power for power in range(6, 19, 3)]
_, sizes_trace = run_traced(many_sizes, 4, numels)
timeline = emulate.simulate(sizes_trace, cluster(pcie4))
spans = [each for each in timeline.intervals[0] if each.kind == "communication"]
found = cost.fit_link(
    num_bytes=[4 * numel for numel in numels],
    seconds=[span.end_s - span.start_s for span in spans],
    num_ranks=4,
).link
display(
    claim(
        "the fit finds the emulated latency, 5.7 microseconds",
        1e6 * found.latency_s,
        5.7,
        rtol=1e-6,
    ),
    claim(
        "and the emulated bandwidth, 32 GB/s", found.bandwidth_bytes_per_s / 1e9, 32.0, rtol=1e-6
    ),
)

# %% [markdown]
# ### Algorithm bandwidth and bus bandwidth
#
# [nccl-tests](https://github.com/NVIDIA/nccl-tests) prints two bandwidths. **Algorithm bandwidth**
# is the size of the buffer divided by the time: what your program sees. But it falls when ranks are
# added, though no wire got slower. **Bus bandwidth** multiplies it by what the busiest wire has to
# carry per byte of the buffer: 2(N−1)/N for all-reduce, (N−1)/N for all-gather, reduce-scatter and
# all-to-all, 1 for broadcast, reduce and send. So it can be compared with the speed of a wire,
# whatever the collective and the number of ranks. Careful: for all-gather and reduce-scatter the
# "size" is that of the *whole* buffer, N times a rank's share.

# %%
# %%rank 0
H200_GIB = {4: 363.3, 5: 364.4, 6: 365.1, 7: 365.7, 8: 365.6}  # bus bandwidth, ring, 8 GiB
algorithm = {
    n: bus / cost.bus_factor(kind="all_reduce", num_ranks=n) for n, bus in H200_GIB.items()
}
by_kind = {"all-reduce": 367.2, "all-gather": 361.4, "reduce-scatter": 362.9}  # ring, 16 GiB
a_100_s = cost.seconds_from_bus_bandwidth(
    kind="all_reduce", num_bytes=2**34, bus_bytes_per_s=234.89e9, num_ranks=8
)
display(
    claim(
        "H200, ring: from 4 to 8 GPUs the bus bandwidth stays",
        H200_GIB[8] / H200_GIB[4],
        1.0,
        rtol=0.01,
        authority=ML_ENGINEERING,
    ),
    claim(
        "while the algorithm bandwidth falls by 1/7",
        algorithm[8] / algorithm[4],
        6 / 7,
        rtol=0.01,
        authority=ML_ENGINEERING,
    ),
    claim(
        "three collectives read alike: the slowest is within 2 % of the fastest",
        min(by_kind.values()) / max(by_kind.values()),
        (">", 0.98),
        authority=ML_ENGINEERING,
    ),
    claim("16 GiB on 8 A100 take 0.128 s", a_100_s, 0.128, rtol=0.001, authority=ML_ENGINEERING),
)

# %% [markdown]
# On the kernel's own ranks, the figures that nccl-tests would print:

# %%
# %%rank 0
print(f"{'':>11}{'bytes':>12}{'µs':>10}{'algbw GB/s':>12}{'busbw GB/s':>12}")
for row in rows:
    print(
        f"{row.kind:>11}{row.num_bytes:>12,}{1e6 * row.seconds:>10.0f}"
        f"{row.algorithm_bytes_per_s / 1e9:>12.3f}"
        f"{row.bus_bytes_per_s / 1e9:>12.3f}"
    )

# %% [markdown]
# ## 7. The wires
#
# - **PCIe** is in every machine. Each generation doubles: version 3.0 carries 15.8 GB/s in each
#   direction over 16 lanes, 4.0 twice as much, 5.0 again.
# - **NVLink** joins GPUs directly, by several links of 25 or 50 GB/s each way per GPU.
# - **NVSwitch** joins the NVLinks of all GPUs of a node, so that each pair has all of them. AMD's
#   *Infinity Fabric* has no switch: a link of 64 GB/s each way to each of the seven other GPUs.
# - **InfiniBand** and **Ethernet** join nodes. With RDMA the network adapter reads and writes
#   memory by itself, with GPUDirect RDMA the GPU's own. Ethernet with RDMA (RoCE) comes near
#   InfiniBand; through the kernel's TCP stack a message costs many times as much, so a latency
#   "of Ethernet" does not exist: it is that of the software. Measure it.
#
# Data sheets set two traps. NVLink is sold by the sum of **both directions**, and NVIDIA's sheets
# often list PCIe so, too; InfiniBand is sold by one. A ring sends one way on each wire, so only one
# direction counts. And networks are sold in bits. Here all are in bytes per second, one direction:

# %%
# %%rank 0
figure = plot_bars(
    {name: link.bandwidth_bytes_per_s / 1e9 for name, link in cost.LINKS.items()},
    xlabel="GB/s in one direction, nominal (logarithmic)",
    title="What a GPU can send",
    colours={
        name: PALETTE[2] if "NVLink" in name else PALETTE[0] if "PCIe" in name else PALETTE[1]
        for name in cost.LINKS
    },
)
figure.axes[0].set_xscale("log")
figure.axes[0].set_xlim(1, 3000)
figure

# %% [markdown]
# A common lesson gives eight figures for these links. Here they are beside the data sheets:

# %%
# %%rank 0
GB, SHEETS = 1e9, "NVIDIA data sheets, via stas00/ml-engineering"
BOTH_WAYS = "that is the sum of both directions"
nvlink = {g: getattr(cost, f"NVLINK{g}") for g in (2, 3, 4, 5)}
slots = {g: cost.pcie(generation=g) for g in (3, 4, 5)}
rows_of_links = [  # statement, GB/s or ratio, right, said, why
    (
        "PCIe 4.0 x16: 16 lanes of 16 GT/s, one way",
        slots[4].bandwidth_bytes_per_s / GB,
        31.5,
        16,
        "16 GB/s is PCIe 3.0",
    ),
    ("PCIe 5.0 x16, one way", slots[5].bandwidth_bytes_per_s / GB, 63.0, 32, "32 GB/s is PCIe 4.0"),
    ("NVLink of an A100, one way", nvlink[3].bandwidth_bytes_per_s / GB, 300, 600, BOTH_WAYS),
    ("NVLink of an H100, one way", nvlink[4].bandwidth_bytes_per_s / GB, 450, 900, BOTH_WAYS),
    (
        "NVLink of an A100, one way, in Gbit/s",
        nvlink[3].bandwidth_bytes_per_s * 8 / GB,
        2400,
        400,
        "400 Gbit/s is one port of InfiniBand NDR",
    ),
    (
        "NVLink 3 is so many times as fast as PCIe 4.0",
        nvlink[3].bandwidth_bytes_per_s / slots[4].bandwidth_bytes_per_s,
        9.5,
        "10 to 20",
        "that compares both directions of NVLink with one of PCIe",
    ),
    (
        "a copy between two H100 over NVLink can reach at most",
        nvlink[4].bandwidth_bytes_per_s / GB,
        450,
        "200 to 300",
        "that is an A100: it depends on the GPU",
    ),
    (
        "a copy between GPUs over PCIe 4.0, about 80 % of nominal",
        slots[4].attainable.bandwidth_bytes_per_s / GB,
        25.2,
        "10 to 20",
        "that is PCIe 3.0, of which 80 % are 12.6",
    ),
]
for text, value, right, said, why in rows_of_links:
    display(
        claim(
            text,
            value,
            right,
            rtol=0.01,
            status="corrected",
            refutes="a common lesson",
            said=said,
            why=why,
            authority=SHEETS,
        )
    )

# %%
# %%rank 0
display(
    claim(
        "NVLink of V100 and H100 as sold, both directions",
        [nvlink[2].bidirectional_bytes_per_s / GB, nvlink[4].bidirectional_bytes_per_s / GB],
        [300, 900],
        rtol=1e-9,
        authority=SHEETS,
    ),
    claim(
        "InfiniBand NDR: 400 Gbit/s are 50 GB/s each way",
        cost.INFINIBAND_NDR.bandwidth_bytes_per_s / GB,
        400 / 8,
        rtol=1e-9,
    ),
    claim(
        "GPUs that NVSwitch joins: 8 in DGX A100 and H100, 16 in DGX-2, 72 in NVL72, 256 in DGX "
        "GH200; a lecture's 64 is no product's limit",
        "8 to 256",
        status="cited",
        authority="NVIDIA product pages",
    ),
)

# %% [markdown]
# **Latency** has two meanings, and texts mix them. A network's wire with its adapters needs about
# 1 µs. One *hop of a collective* over it needs 2.7 to 14 µs: GPUs synchronise, and a proxy thread
# and the adapter take part. Over NVLink a hop needs 0.6 to 4 µs. NCCL keeps such numbers for its
# choices ([`src/graph/tuning.cc`](https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc)),
# and they change with its version. Two versions, in µs per hop, the newer one below. (The old 28
# and 50 µs of *tree, Simple* contain the transfer of a chunk of 256 KB.)

# %%
# %%rank 0
from minidist.cost import nccl

print(f"{'':26}" + "".join(f"{protocol:>8}" for protocol in nccl.PROTOCOLS))
for version, constants in nccl.VERSIONS.items():
    for wire in ("NVLINK", "NET"):
        for algorithm in nccl.ALGORITHMS:
            hops = constants.hop_latency_us[wire][algorithm]
            name = f"NCCL {version:<8}{wire:<7} {algorithm}"
            print(f"{name:26}" + "".join(f"{hop:8.2f}" for hop in hops))


def small_us(algorithm: str, protocol: str, version: str) -> float:
    """Microseconds that NCCL's model gives 1 KiB on four nodes of eight GPUs."""
    return 1e6 * nccl.predict(
        num_bytes=1024,
        gpus_per_node=8,
        num_nodes=4,
        bus_bytes_per_s=200e9,
        algorithm=algorithm,
        protocol=protocol,
        version=version,
    )


display(
    claim(
        "1 KiB on 4 nodes of 8, a tree with Simple: the model of NCCL 2.7.5 / that of 2.28.7",
        small_us("tree", "Simple", "2.7.5") / small_us("tree", "Simple", "2.28.7"),
        (">", 4.0),
        authority="NVIDIA/nccl, src/graph/tuning.cc",
    ),
    claim(
        "the same by a ring with Simple, whose network hops went from 9.6 to 14 µs",
        small_us("ring", "Simple", "2.28.7") - small_us("ring", "Simple", "2.7.5"),
        6 * (14.0 - 9.6),
        rtol=1e-6,
        authority="NVIDIA/nccl, src/graph/tuning.cc",
    ),
)

# %% [markdown]
# ### What joins my GPUs?
#
# `nvidia-smi topo -m` prints a matrix. `NV12` means twelve NVLinks, `PIX` one PCIe bridge, `PHB`
# the way through the CPU, `SYS` through both CPUs and the bus between them. A ring is as fast as
# its slowest hop, so look for the pair that stands out. `minidist.profile.topology` reads the
# matrix; this one has a GPU in the wrong slot.

# %%
# %%rank 0
from minidist.profile.topology import describe_link, parse_topo

matrix = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV12\tNV12\nGPU1\tNV12\t X \tSYS\nGPU2\tNV12\tSYS\t X \n"
worst = parse_topo(matrix).slowest()
print("the slowest pair:", *worst[:2], "by", describe_link(worst[2]))
claim("the pair in the wrong slot, found in the matrix", " ".join(worst), "GPU1 GPU2 SYS")

# %% [markdown]
# ### Test a link, in the right unit
#
# A popular test copies "1000 MB" a hundred times and divides by 1024. It counts MiB, divides to get
# GiB, and prints GB. The mended one below counts bytes and divides by 10⁹. It copies between two
# GPUs where there are two, else within this machine's memory.


# %%
# %%rank 0
def copy_bytes_per_s(num_bytes, repeats=5):
    """Bandwidth of a copy: between two GPUs if there are two, else in memory."""
    gpus = torch.cuda.device_count()
    places = ("cuda:0", "cuda:1") if gpus > 1 else ("cuda:0",) * 2 if gpus else ("cpu",) * 2
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=p) for p in places)
    best = math.inf
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        target.copy_(source)
        if gpus:
            for place in set(places):
                torch.cuda.synchronize(place)
        best = min(best, time.perf_counter() - start)
    return num_bytes / best, places


speed, places = copy_bytes_per_s(32 << 20 if quick else 1 << 30)
print(f"{places[0]} → {places[1]}: {speed / 1e9:.1f} GB/s = {speed / 2**30:.1f} GiB/s")

# %% [markdown]
# ## 8. Several nodes: order and hierarchy
#
# Inside a node links carry hundreds of GB/s, between nodes tens. A collective should send as little
# as it can over the slow ones. Two nodes of two GPUs show what matters: 300 GB/s inside, one port
# of 100 Gbit/s per node outside. Five ways to do the same all-reduce:
#
# - a ring in rank order, 0-1-2-3, which crosses between the nodes once each way;
# - a ring in bad order, 0-2-1-3, in which *every* hop crosses;
# - halving-doubling, *far first*: a rank swaps halves with a rank of the other node, then quarters
#   with its neighbour;
# - the same *near first*: halves with the neighbour, then quarters with the other node;
# - **hierarchical**: reduce-scatter in each node, all-reduce across nodes (each GPU with its
#   counterpart, for its part only), all-gather in each node.
#
# Here is the last one: node 0 on the left, node 1 on the right; each rank has four chunks.

# %%
# %%rank 0
draw_schedule(mc.hierarchical_steps(2, 2), {0: (0, 1), 1: (0, 0), 2: (2, 1), 3: (2, 0)})

# %% [markdown]
# All of them run on the emulated cluster, with real data; then their traces are replayed.

# %%
# %%rank 0
order_guess = predict("Ring 0-2-1-3: how many times as long as 0-1-2-3?", guess=None)
order_guess

# %% [markdown]
# The links inside a node are 24 times as fast as the port between nodes, so count crossings.

# %%
# %%rank 0
schedules = {
    "ring 0-1-2-3": mc.ring_steps(4),
    "ring 0-2-1-3": mc.ring_steps(4).moved(rank=[0, 2, 1, 3].__getitem__),
    "halving-doubling, far first": mc.halving_doubling_steps(4),
    "halving-doubling, near first": mc.halving_doubling_steps(4).moved(
        rank=[0, 2, 1, 3].__getitem__
    ),
    "hierarchical": mc.hierarchical_steps(2, 2),
}
traces = {"ring 0-1-2-3": ring_trace}
for name, schedule in schedules.items():
    if name not in traces:
        values, traces[name] = run_traced(execute, 4, schedule, NUMEL)
        assert values == [(10.0, 10.0)] * 4
nvlink_wire = emulate.Link(bandwidth_bytes_per_s=300e9, latency_s=3.4e-6)


def replay(name, gbit=100):
    """A trace on two nodes of two GPUs with one network port each."""
    port = emulate.Link(bandwidth_bytes_per_s=cost.gbit_per_s(gbit), latency_s=9.6e-6)
    return emulate.simulate(traces[name], cluster(nvlink_wire, port, nodes=2))


timelines = {name: replay(name) for name in schedules}
plot_bars(
    {name: 1e3 * timeline.makespan_s for name, timeline in timelines.items()},
    xlabel="time (ms)",
    title="All-reduce of 4 MiB on two nodes of two GPUs, emulated",
)

# %%
# %%rank 0
S = 4 * NUMEL
out = {name: timeline.bytes_per_link["node 0"] / S for name, timeline in timelines.items()}
flat, bad, tiers = (
    timelines[name].makespan_s for name in ("ring 0-1-2-3", "ring 0-2-1-3", "hierarchical")
)
display(
    order_guess.reveal(bad / flat),
    claim(
        "ring in rank order: 2(N-1)/N buffers leave each node", out["ring 0-1-2-3"], 1.5, rtol=1e-9
    ),
    claim("ring in bad order: twice as many", out["ring 0-2-1-3"], 3.0, rtol=1e-9),
    claim("so the bad order takes twice as long as the good one", bad / flat, 2.0, rtol=1e-9),
    claim("hierarchical: 2(M-1)/M buffers on M = 2 nodes", out["hierarchical"], 1.0, rtol=1e-9),
    claim(
        "halving-doubling, far first and near first: buffers",
        [out[f"halving-doubling, {order} first"] for order in ("far", "near")],
        [2.0, 1.0],
        rtol=1e-9,
    ),
    claim(
        "the hierarchical all-reduce takes less than 3/4 of the good ring",
        tiers / flat,
        ("<", 0.75),
    ),
    claim(
        "halving-doubling, near first: time / hierarchical",
        timelines["halving-doubling, near first"].makespan_s / tiers,
        1.0,
        rtol=1e-9,
    ),
)

# %% [markdown]
# Whatever the algorithm: let large pieces go to near ranks, and only small ones to far ranks.
#
# Ranks are numbered node by node for this reason: torchrun does it, and NCCL finds good rings by
# itself, but a mesh with its axes in the wrong order undoes it (lecture 9).
#
# Look at the timelines. What happens as the network gets as fast as the links inside?


# %%
# %%rank 0
def two_nodes(schedule="hierarchical", gbit=100):
    """Messages of an all-reduce on two nodes of two GPUs, per rank."""
    timeline = replay(schedule, gbit)
    return plot_timeline(
        timeline,
        title=f"{schedule}, {gbit} Gbit/s between nodes: {1e3 * timeline.makespan_s:.3f} ms",
    )


explore(
    two_nodes,
    schedule=list(schedules),
    gbit=[10, 25, 100, 200, 400, 800, 2400],
    labels={"schedule": "schedule", "gbit": "port of a node (Gbit/s)"},
    alt="Timeline of four ranks: when each of them sends or receives",
)

# %% [markdown]
# Real GPU nodes have a port *per GPU*. Then a hierarchical all-reduce uses all of them: each
# carries 1/8 of the buffer. A flat ring over one port would leave seven idle. NCCL therefore builds
# a ring per port, each for a part of the buffer. That fills them as well, and all the time, while
# the three phases of the hierarchy follow one another. What remains of the hierarchy's advantage is
# latency: far fewer steps. Four DGX A100, 1 GB:

# %%
# %%rank 0
ports_guess = predict(
    "1 GB on 4 x 8 A100: time of eight rings, divided by the hierarchy's?", guess=None
)
ports_guess

# %% [markdown]
# The hierarchy sends less through each port, 2(M−1)/M of an eighth on M nodes, but its ports rest
# while NVLink works.

# %%
# %%rank 0
node = cost.DGX_A100
wires = {
    "inside": cost.Wire(bandwidth_bytes_per_s=node.intra_node.bandwidth_bytes_per_s, latency_s=0),
    "one port": cost.Wire(bandwidth_bytes_per_s=node.network.bandwidth_bytes_per_s, latency_s=0),
    "eight ports": cost.Wire(
        bandwidth_bytes_per_s=8 * node.network.bandwidth_bytes_per_s, latency_s=0
    ),
}
flat_ms = {
    name: 1e3 * cost.all_reduce_seconds(num_bytes=1e9, num_ranks=32, link=wires[name])
    for name in ("one port", "eight ports")
}
tiers_ms = 1e3 * cost.hierarchical_all_reduce_seconds(
    num_bytes=1e9,
    ranks_per_node=8,
    num_nodes=4,
    intra_node=wires["inside"],
    inter_node=wires["one port"],
)
display(
    ports_guess.reveal(flat_ms["eight ports"] / tiers_ms),
    claim("one flat ring over one port: milliseconds", flat_ms["one port"], 77.5, rtol=1e-3),
    claim(
        "hierarchical, a port per GPU", tiers_ms, 2 * 7 / 8 / 0.3 + 2 * 3 / 4 / 8 / 0.025, rtol=1e-6
    ),
    claim("eight rings, a port each", flat_ms["eight ports"], 77.5 / 8, rtol=1e-3),
    claim(
        "steps of the hierarchy, and of a flat ring",
        [len(mc.hierarchical_steps(4, 8).steps), len(mc.ring_steps(32).steps)],
        [2 * 7 + 2 * 3, 2 * 31],
    ),
)

# %% [markdown]
# ## Published measurements against the model
#
# Back to the first picture. For the A100 we have the data sheet (300 GB/s), the share of it that
# this curve reaches on the right (78 %), and a latency per hop from NCCL's source code. Nothing is
# fitted to the curve's left side. NCCL has a model of its own, by which it chooses algorithm and
# protocol: `minidist.cost.nccl`. Its **protocols** are *LL* (4 bytes of flag beside every 4 bytes
# of data: lowest latency, half of the bandwidth), *LL128* (92 %) and *Simple* (all of the
# bandwidth, highest latency).

# %%
# %%rank 0
measured = sweeps["one node, 8 x A100"]
measured_s = [
    cost.seconds_from_bus_bandwidth(
        kind="all_reduce", num_bytes=b, bus_bytes_per_s=g * 1e9, num_ranks=8
    )
    for b, g in zip(sweep_bytes, measured, strict=True)
]
ring_s = [
    cost.all_reduce_seconds(num_bytes=b, num_ranks=8, link=cost.NVLINK3.attainable)
    for b in sweep_bytes
]
eight = {"gpus_per_node": 8, "num_nodes": 1, "bus_bytes_per_s": 235e9}
choices = [nccl.choose(num_bytes=b, **eight) for b in sweep_bytes]


def bus(seconds):
    """Bus bandwidth in GB/s."""
    return [
        cost.bus_bandwidth(kind="all_reduce", num_bytes=b, seconds=s, num_ranks=8) / 1e9
        for b, s in zip(sweep_bytes, seconds, strict=True)
    ]


plot_lines(
    mib,
    {
        "measured": measured,
        "α–β ring": bus(ring_s),
        "NCCL's model": bus([c.seconds for c in choices]),
    },
    logx=True,
    logy=True,
    xlabel="message (MiB)",
    ylabel="bus bandwidth (GB/s)",
    title="8 x A100: published measurements and two models",
)

# %%
# %%rank 0
ratio = [model / real for model, real in zip(ring_s, measured_s, strict=True)]
of_nccl = [choice.seconds / real for choice, real in zip(choices, measured_s, strict=True)]
picks = [f"{choice.algorithm} {choice.protocol}" for choice in choices]
published = cost.fit_link(num_bytes=sweep_bytes, seconds=measured_s, num_ranks=8)
print("NCCL's model chooses:", ", then ".join(dict.fromkeys(picks)))
print(
    f"a line through the measurements: {1e6 * published.link.latency_s:.1f} µs per step, "
    f"{published.link.bandwidth_bytes_per_s / 1e9:.0f} GB/s"
)
display(
    claim(
        "from 512 MiB on, the alpha-beta ring is within 5 % of the measured time",
        max(abs(r - 1) for r in ratio[14:]),
        ("<", 0.05),
        authority=ML_ENGINEERING,
    ),
    claim(
        "around 1 MiB it predicts about half of the measured time",
        min(ratio),
        0.54,
        rtol=0.02,
        authority=ML_ENGINEERING,
    ),
    claim(
        "NCCL's own model promises up to 512 KiB in about a third of the measured time at most",
        max(of_nccl[:5]),
        0.354,
        rtol=0.01,
        authority=ML_ENGINEERING,
    ),
    claim(
        "LL in NCCL's model carries this share of what Simple carries (1 GiB)",
        nccl.predict(num_bytes=2**30, **eight, algorithm="ring", protocol="Simple")
        / nccl.predict(num_bytes=2**30, **eight, algorithm="ring", protocol="LL"),
        0.5,
        rtol=0.01,
    ),
    claim(
        "a fitted line is off by 15 % on average",
        published.mean_rel_error,
        0.155,
        rtol=0.02,
        authority=ML_ENGINEERING,
    ),
)

# %% [markdown]
# Two numbers predict large messages well, and all others within a factor of two. NCCL's own
# constants are still further off on the left: they are there to *rank* algorithms, not to tell the
# time. For a decision this is often enough; for small messages, measure.
#
# The questions of the beginning:
#
# - **Left:** a ring has 14 steps of a few microseconds each, whatever the size. On 32 ranks there
#   are more of them, over a network.
# - **Right:** eight A100 level off at 235 GB/s, 78 % of one direction of their wires.
# - **Four nodes** level off at 382 GB/s: eight ports of 50 GB/s per node are 400 GB/s. That is
#   near what the NVLink of an H200 carries inside a node, and under half of a B200's.
# - **Faster than the wire?** No ring can read above 450. On H200 the NVSwitch adds up itself
#   (*NVLink SHARP*), so each GPU sends its data about once instead of twice, and the factor
#   2(N−1)/N credits it with bytes that were never sent.

# %%
# %%rank 0
claim(
    "H200 with a ring: 82 % of 450 GB/s",
    by_kind["all-reduce"] / (nvlink[4].bandwidth_bytes_per_s / GB),
    0.816,
    rtol=0.001,
    authority=ML_ENGINEERING,
)

# %% [markdown]
# ### NCCL's settings
#
# The first rule is to leave them alone: NCCL looks at the machine and chooses well. NVIDIA's
# [guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) tells apart *system
# configuration*, which may stay in a script, and *debugging*, which may not.
#
# | set | when |
# |---|---|
# | `NCCL_DEBUG=WARN` | always; `INFO` to see rings, adapters and versions once |
# | `NCCL_SOCKET_IFNAME` | several interfaces of which only some reach the other nodes |
# | `NCCL_IB_HCA` | InfiniBand adapters that must not carry gradients |
# | `NCCL_ALGO`, `NCCL_PROTO` | for experiments only |
#
# Here are the "tuning" lines of a lecture, as `minidist.profile.nccl` explains them. Which would
# you keep?

# %%
# %%rank 0
from minidist.profile.nccl import explain

tuning = {
    "NCCL_P2P_LEVEL": "NVL",  # "use all NVLink bandwidth"
    "NCCL_ALGO": "Tree",  # "algorithm selection"
    "NCCL_NCHANNELS_PER_NET_PEER": "4",  # "parallel streams"
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "eth0",
}
for row in explain(tuning):
    print(f"{row.name}={row.value}\n    {row.what}\n    when: {row.when}")
    for warning in row.warnings:
        print("    careful:", warning)

# %% [markdown]
# `NCCL_P2P_LEVEL=NVL` does not add NVLink bandwidth: it *forbids* direct copies over PCIe.
# `NCCL_ALGO=Tree` makes large messages slower where rings or the switch are better. The third
# concerns sends and receives: NCCL makes an all-to-all of these, but no all-reduce. What is right
# depends on the machine, so a script that carries such lines to the next one makes it slow without
# a word.

# %%
# %%rank 0
pinned = {
    algorithm: min(
        nccl.predict(
            num_bytes=2**30,
            gpus_per_node=8,
            num_nodes=1,
            bus_bytes_per_s=235e9,
            algorithm=algorithm,
            protocol=protocol,
        )
        for protocol in nccl.PROTOCOLS
    )
    for algorithm in nccl.ALGORITHMS
}
claim(
    "by NCCL's model, forcing the tree on 8 A100 makes 1 GiB slower, by 2 / 1.75 at least",
    pinned["tree"] / pinned["ring"],
    (">=", 2 / 1.75),
    authority="NVIDIA/nccl, src/graph/tuning.cc",
)

# %% [markdown]
# ## 9. Broken on purpose
#
# Here rules of section 1 are broken, in fresh processes with a short deadline, so that nothing
# stays stuck. `launch.run(fn, n)` calls a function on n new ranks.

# %%
# %%rank 0
from datetime import timedelta


def join():
    """Make the default group and return the rank. On CPUs also where there are GPUs: gloo's timeout
    is an exception that can be shown, NCCL's watchdog ends the process."""
    dist.init_process_group("gloo")
    return dist.get_rank()


def attempt(fn, run=launch.run, *args, deadline_s=60.0):
    """Run on two ranks; show the result, or the lines of the error that matter."""
    try:
        print("result per rank:", run(fn, 2, *args, deadline_s=deadline_s))
    except LaunchError as failure:
        lines = [line for line in str(failure).splitlines() if not line.startswith(" ")]
        told = re.compile(r"[\w.]*(Error|Mismatch)\b|also|.*(ended|had not|stood)")
        errors = [line for line in lines if told.match(line)]
        print("\n".join(line[:400] for line in errors))
        return str(failure)
    return ""


# %% [markdown]
# ### An all-reduce under `if rank == 0`
#
# The classic. Someone wants to log the average loss, and only rank 0 logs.


# %%
# %%rank 0
def log_loss_wrong():
    loss = torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # the others never come
    return loss.item()


text = attempt(log_loss_wrong, emulate.run, emulate.clusters.pcie_a100(2))
claim(
    "the emulated cluster names the rank that is missing",
    "rank 0 waits in all_reduce" in text and "missing: rank 1" in text,
    True,
)

# %% [markdown]
# That was the emulated cluster, whose broker sees all ranks. On real gloo or NCCL, rank 0 waits
# until a timeout (10 minutes by default with NCCL, 30 with gloo), and its error says nothing about
# the culprit. The log does: keep a `CollectiveLog` on every rank, and compare them. (Torch's own is
# the flight recorder: lecture 10. And this kernel does the like by itself: put the line in a cell,
# and it says which rank waits where.)


# %%
# %%rank 0
def log_loss_recorded():
    r, loss, message = join(), torch.ones(1), "went on, and did something else"
    with mc.CollectiveLog() as log:
        if r == 0:
            work = dist.all_reduce(loss, async_op=True)
            try:
                work.wait(timedelta(seconds=2))  # to see it: a plain all_reduce waits for minutes
            except RuntimeError as failure:
                message = str(failure).split("]")[-1][:90]
        else:
            time.sleep(3)
    return log.records, message


per_rank = launch.run(log_loss_recorded, 2)
for r, (_, message) in enumerate(per_rank):
    print(f"rank {r}: {message}")
try:
    mc.MergedLog({r: records for r, (records, _) in enumerate(per_rank)})
    text = "the logs agree"
except MismatchError as mismatch:
    text = str(mismatch)
print("the logs:", text)
claim("the logs name the rank that did not call", "rank 1: nothing" in text, True)

# %% [markdown]
# Mended: *all* ranks call the collective, and only the `print` stands under `if`. The same holds
# for `barrier`, for `new_group` (all ranks of the world, also those outside the new group), and for
# everything that calls collectives inside: gathering a sharded `state_dict`, evaluating with
# synchronised metrics, a `save` that begins with a barrier.


# %%
# %%rank 0
def log_loss_right():
    join()
    loss = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    if dist.get_rank() == 0:
        print("average loss", loss.item())
    return loss.item()


means = launch.run(log_loss_right, 2)
display(
    claim("every rank has the average loss", means, [1.5, 1.5], rtol=1e-6),
    claim(
        "gloo waits 30 minutes by default",
        dist.constants.default_pg_timeout.total_seconds() / 60,
        30.0,
        rtol=1e-9,
    ),
    claim(
        "NCCL's default timeout in torch",
        "10 minutes",
        status="cited",
        authority="PyTorch documentation, torch.distributed.init_process_group",
    ),
)

# %% [markdown]
# ### Shapes that do not match
#
# An uneven last batch, and the ranks all-reduce 4 and 5 elements. Plain gloo does not compare
# shapes: what happens depends on who comes first, from an aborted process to a wrong result on one
# rank. (NCCL does not compare them either.) Checks exist, and cost a little: the emulated cluster
# always compares, our collectives do with `check=True`, and torch does with
# `TORCH_DISTRIBUTED_DEBUG=DETAIL`.


# %%
# %%rank 0
def uneven():
    dist.all_reduce(torch.ones(4 + dist.get_rank()))


def uneven_checked():
    mc.ring_all_reduce(torch.ones(4 + join()), check=True)


text = attempt(uneven, emulate.run, emulate.clusters.pcie_a100(2))
checked = attempt(uneven_checked)
display(
    claim(
        "the emulated cluster says who called what",
        "float32[4]" in text and "float32[5]" in text,
        True,
    ),
    claim(
        "so does check=True on real ranks",
        '"shape": [4]' in checked and '"shape": [5]' in checked,
        True,
    ),
)

# %% [markdown]
# ### The same shapes in another order: no error at all
#
# A rank iterates over a `set`, or a hook fires in another order. Collectives are matched by
# *number*, not by name. With equal shapes nobody can notice: the loss of one rank is added to the
# accuracy of the other.


# %%
# %%rank 0
def swapped():
    r, loss, accuracy = join(), torch.tensor([1.0]), torch.tensor([100.0])
    for metric in (loss, accuracy) if r == 0 else (accuracy, loss):
        dist.all_reduce(metric)
    return loss.item(), accuracy.item()


values = launch.run(swapped, 2)
print("loss and accuracy per rank:", values)
claim(
    "sums that should be 2 and 200 are both 101, and no error is raised",
    values,
    [(101.0, 101.0)] * 2,
    rtol=1e-6,
)

# %% [markdown]
# ### A buffer that is used again too early
#
# With `async_op=True` a collective returns before anything has left. Who packs the next bucket into
# the same buffer now changes what the network has yet to read. gloo and NCCL do not notice, and
# often it goes well: in tests, that is, where messages are small. The emulated cluster looks.


# %%
# %%rank 0
def reuse_too_early():
    buffer = torch.ones(4)
    work = dist.all_reduce(buffer, async_op=True)
    buffer.fill_(7.0)  # the next bucket; mended: behind the next line, or in another buffer
    work.wait()


text = attempt(reuse_too_early, emulate.run, emulate.clusters.pcie_a100(2))
claim(
    "the emulated cluster says which tensor was written to",
    "all_reduce(float32[4]) was under way when" in text,
    True,
)

# %% [markdown]
# ### Mixed dtypes
#
# `torch.tensor([rank])` holds an integer, `torch.zeros(1)` a float. A lesson gathers one into the
# other. It raises, on the root only; the other rank is left alone with its half of the collective.
# Give the buffers the dtype of what is sent.


# %%
# %%rank 0
def gather_mixed():
    r = join()
    parts = [torch.zeros(1) for _ in range(2)] if r == 0 else None
    dist.gather(torch.tensor([r]), parts, dst=0)


text = attempt(gather_mixed) or "it works"
claim(
    "gather of int64 into float32",
    "raises" if "different dtypes" in text else text,
    "raises",
    status="corrected",
    refutes="a common listing",
    said="works",
    why="torch.tensor([rank]) is int64, torch.zeros(1) is float32",
)

# %% [markdown]
# ### Both send first
#
# Two neighbours swap tensors. Each sends, then receives. A blocking `send` returns when its data is
# taken, so each waits for a receive that the other never reaches. With MPI small messages often get
# through, because they are buffered, and the program hangs on the day when they grow. On gloo it
# hangs at four bytes.


# %%
# %%rank 0
def swap_blocking():
    r = join()
    given, got = torch.tensor([float(r)]), torch.zeros(1)
    dist.send(given, 1 - r)  # both ranks wait here
    dist.recv(got, 1 - r)
    return got.item()


def swap_batched():
    r = join()
    given, got = torch.tensor([float(r)]), torch.zeros(1)
    both = [dist.P2POp(dist.isend, given, 1 - r), dist.P2POp(dist.irecv, got, 1 - r)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return got.item()


text = attempt(swap_blocking, deadline_s=4.0)
received = launch.run(swap_batched, 2)
display(
    claim("both ranks are stuck in send until they are killed", "had not finished" in text, True),
    claim("posted together, both messages arrive", received, [1.0, 0.0], rtol=1e-9),
)

# %% [markdown]
# `batch_isend_irecv` posts both before it waits for either. A ring of sends needs the same: if
# every rank sends first, all wait. That is why `transport.py` posts its receives before its sends.
#
# ## Now you
#
# Section 3 printed the schedule of a ring. Write the formula behind it: **which chunk does a rank
# send in which step?** Ranks, chunks and steps count from 0, and there are 2(N−1) steps. The cell
# after it compares your function with the schedules of 2 to 9 ranks, message by message.


# %%
def chunk_to_send(rank: int, step: int, num_ranks: int) -> int | None:
    """Your turn. Rank 0 of four sends chunk 3 in step 0, and chunk 2 in step 1."""
    return None


# %%
# %%rank 0
def check(answer) -> str:
    for n in range(2, 10):
        for step, transfers in enumerate(mc.ring_steps(n).steps):
            for t in transfers:
                chunk = answer(t.src, step, n)
                if chunk is None:
                    return "Not written yet."
                if chunk != t.chunk:
                    return f"Rank {t.src} of {n}, step {step}: chunk {t.chunk}, got {chunk!r}."
    return "Right, for 2 to 9 ranks."


print(check(chunk_to_send))
display(
    claim(
        "one formula gives both halves of the ring",
        check(lambda rank, step, n: (rank - 1 - step) % n),
        "Right, for 2 to 9 ranks.",
    ),
    claim(
        "a ring that begins with a rank's own chunk is another one",
        check(lambda rank, step, n: (rank - step) % n),
        lambda got: got.startswith("Rank 0 of 2, step 0"),
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `(rank - 1 - step) % num_ranks`. What a rank sends is what it got in the step before, so the
# number falls by one in each step. After N−1 steps it has reached `rank`: that chunk is finished
# there, and the all-gather goes on with it by the same formula.
#
# </details>
#
# ## Summary
#
# - Collectives are matched by their order in a group. All ranks call all of them, or some rank
#   waits.
# - All-reduce = reduce-scatter + all-gather. On a ring each rank sends 2(N−1)/N of the buffer, the
#   least possible, in 2(N−1) steps. Trees need few steps.
# - Time = steps · α + bytes · β. Small messages: latency. Large ones: bandwidth, and then the time
#   of a ring hardly depends on N, as long as S is much larger than N α / β.
# - One direction, in bytes. Algorithm bandwidth is what the program sees; bus bandwidth compares
#   with the wire.
# - Across nodes, what counts is the bytes that leave a node: keep neighbours together.
# - Leave NCCL's settings alone, but read what it says with `NCCL_DEBUG=INFO`.
#
# ## Questions
#
# **1.** A gradient of 14 GB is all-reduced on 8 GPUs over 25 GB/s links. How long does it take? And
# on 64 such GPUs, each with its own port?
#
# <details><summary>Answer</summary>
#
# 2 · 7/8 · 14 / 25 = 0.98 s on 8. On 64: 2 · 63/64 · 14 / 25 = 1.10 s, 12.5 % more. The latencies
# (14 or 126 steps of 10 µs) do not matter at this size.
#
# </details>
#
# **2.** nccl-tests on 16 GPUs prints an algorithm bandwidth of 100 GB/s for all-gather, 1 GiB. What
# is the bus bandwidth, and how many bytes does each rank contribute?
#
# <details><summary>Answer</summary>
#
# 100 · 15/16 = 93.75 GB/s. The size is that of the whole buffer, so each rank gives 64 MiB.
#
# </details>
#
# **3.** Your model has 300 parameter tensors of 10 kB. You all-reduce each gradient as it comes, on
# 64 ranks, α = 10 µs, ring. What would one message of 3 MB save at 12.5 GB/s?
#
# <details><summary>Answer</summary>
#
# Each message pays 126 α = 1.26 ms: 378 ms for latency alone, and 0.47 ms for all the bytes. One
# message takes 1.26 + 0.47 = 1.7 ms, about 220 times less. This is why DDP has buckets.
#
# </details>
#
# **4.** Rank 3 of 8 has one batch more than the others. What happens, and when is it noticed?
#
# <details><summary>Answer</summary>
#
# In its extra step rank 3 calls all-reduces that nobody answers, and waits. The others have left
# the loop; if they go on to another collective of the same group (a validation metric, a barrier),
# it pairs with rank 3's gradient. With equal shapes that gives wrong numbers, otherwise an error or
# a timeout. Give all ranks equally many batches (lecture 3).
#
# </details>
#
# **5.** Why is a ring in the order 0-2-1-3 no slower inside one node with an NVSwitch?
#
# <details><summary>Answer</summary>
#
# The switch gives every pair the full bandwidth, so all orders are alike. Order matters where some
# links are slower: between nodes, or between GPUs without NVLink.
#
# </details>
#
# **6.** Someone reports a bus bandwidth of 500 GB/s on H100 nodes. Broken clock?
#
# <details><summary>Answer</summary>
#
# Not necessarily. With reduction in the NVSwitch the factor 2(N−1)/N counts bytes that are not
# sent, so figures above the 450 GB/s of one direction are possible. With `NCCL_ALGO=Ring` they are
# not.
#
# </details>
#
# ## Then do it yourself
#
# In [**lab1_ddp**](../labs/lab1_ddp/lab1_ddp.ipynb) you average gradients with these collectives,
# and its checks hold you to the rules: every rank calls, in the same order, whatever the shapes.
#
# To go further, write a ring all-reduce of your own out of sends and receives, in the bonus
# notebook [**bonus_ring_all_reduce**](../labs/bonus_ring_all_reduce/bonus_ring_all_reduce.ipynb):
# it checks sums of every size, looks at each message that you send, and times yours beside torch's.
#
# ## Read
#
# - P. Patarasuk, X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*,
#   J. Parallel Distrib. Comput. 69 (2009),
#   [doi 10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002): the ring, and why
#   nothing sends less.
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of collective communication operations in
#   MPICH*, Int. J. High Perform. Comput. Appl. 19 (2005),
#   [doi 10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521): α, β, γ for every
#   collective.
# - P. Sanders, J. Speck, J. L. Träff, *Two-tree algorithms for full bandwidth broadcast, reduction
#   and scan*, Parallel Computing 35 (2009),
#   [doi 10.1016/j.parco.2009.09.001](https://doi.org/10.1016/j.parco.2009.09.001): NCCL's trees.
# - A. Sergeev, M. Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*,
#   [arXiv 1802.05799](https://arxiv.org/abs/1802.05799): how rings came to deep learning.
# - H. Mikami et al., *Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash*,
#   [arXiv 1811.05233](https://arxiv.org/abs/1811.05233): a hierarchical all-reduce, a ring along
#   each axis of a grid, on thousands of GPUs.
# - NVIDIA: [NCCL's environment
#   variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html); [nccl-tests on
#   bus bandwidth](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
