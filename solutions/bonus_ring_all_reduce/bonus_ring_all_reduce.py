# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: torchrun × 3
#     language: python
#     name: torchrun-3
# ---

# %% [markdown]
# # Bonus · Ring all-reduce
#
# `dist.all_reduce` is one line. What happens in it decides how training scales: how many bytes
# leave each GPU, how often somebody waits, and why a rank of a thousand sends less than twice what
# a rank of two does. In this notebook you write it out of sends and receives, and measure it beside
# the original.
#
# **When you have finished, you can**
#
# - cut a tensor into chunks, and say for every step of a ring who sends which of them (tasks 1, 2);
# - send and receive at the same time without a deadlock (task 3);
# - write an all-reduce that moves $2\frac{N-1}{N}$ of the tensor per rank, and say why sends and
#   receives cannot do with less (task 4);
# - predict its time from latency and bandwidth, and say when a tree is faster (task 5);
# - run DDP's gradients through your own all-reduce (task 6).
#
# Plan 2 hours. Lecture 2 has the theory. Nothing here needs a GPU.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | all |
# |---|---|---|---|---|---|---|---|
# | points | 6 | 16 | 8 | 53 | 12 | 5 | 100 |
#
# Without a ring (1 of ring_bytes, ring_neighbours, ring_messages, ring_time) this lab gives at most
# 49 points.
#
# Every cell runs on **three** ranks: on two, the next rank is also the one before, and half of all
# mistakes cannot be seen. Your grade comes from the same checks with other data on **4** ranks.
# What is sent is not asked of your code. It is seen by the emulated cluster, which carries every
# message.

# %% [markdown]
# ## The idea in one picture
#
# ```
#        chunk   0        1        2           each rank has its own numbers: a, b, c
# rank 0       a0       a1       a2
# rank 1       b0       b1       b2            and wants the sums  a0+b0+c0  a1+b1+c1  a2+b2+c2
# rank 2       c0       c1       c2
#
#   reduce-scatter: N-1 steps. Everybody sends one chunk to the right and ADDS what comes from the
#   left. The chunk that was just added to is sent on.
#
# step 0       a0→               a2+c2         rank 0 sent chunk 0, rank 1 chunk 1, rank 2 chunk 2
#              a0+b0    b1→
#                       b1+c1    c2→
#
# step 1       …        …        …             now every rank has ONE finished sum
#
#   all-gather: N-1 steps. Everybody sends a finished sum to the right, and what comes from the left
#   REPLACES what was there.
# ```
#
# In each step every rank sends one $N$-th of the tensor and receives one $N$-th. There are
# $2(N-1)$ steps, so $2\frac{N-1}{N}$ of the tensor leaves each rank, on three ranks or on three
# thousand. The simple way, "everybody sends everything to everybody", needs $N-1$ tensors.

# %% given="imports"
import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder import check, is_not_started
from minidist.device import choose_backend, choose_device

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"
DEVICE = choose_device()
if DEVICE.type == "cuda":
    torch.cuda.set_device(DEVICE)
if not dist.is_initialized():
    dist.init_process_group(choose_backend())
RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()


def tell(*words: object) -> None:
    """Prints, on rank 0 only."""
    if IS_RANK_ZERO:
        print(*words)


def everywhere(value: object) -> list:
    """The value that each rank has brought."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def demo(needs: str) -> Iterator[None]:
    """Runs a demonstration; says so if what it needs has not been written yet."""
    try:
        yield
    except Exception as error:
        if not is_not_started(error):
            raise
        tell(f"Nothing to see yet: do {needs} first.")


def show(draw: Callable, width: float = 7.5, height: float = 3.0) -> None:
    """Shows in the notebook, from rank 0 only, what `draw(axes)` draws."""
    if not IS_RANK_ZERO or "ipykernel" not in sys.modules:
        return
    from IPython.display import Image, display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots())
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    display(Image(png.getvalue()))


# %% [markdown]
# ## Task 1 · Chunks
#
# **Why.** Every rank has to own a part of the sum, and parts of unequal size leave somebody
# waiting. Tensors rarely divide by the number of ranks. A loop that forgets the rest gives a sum
# whose last few numbers are wrong, in a tensor of millions, and nobody notices for weeks.
#
# **Write `chunk_bounds(numel, num_chunks)`.**
#
# - A list of `num_chunks` pairs `(begin, end)`: chunk $c$ is `flat[begin:end]`.
# - The chunks lie one after the other, and together they are `0 … numel`.
# - No two of them differ by more than one element. If there are fewer numbers than chunks, some are
#   empty.
#
# <details><summary>Hint</summary>
#
# `divmod(numel, num_chunks)` tells the size and how many chunks are one longer. Or: chunk $c$
# begins at `numel * c // num_chunks`.
# </details>


# %% solution="task1_chunks"
def chunk_bounds(numel: int, num_chunks: int) -> list[tuple[int, int]]:
    """Where `num_chunks` chunks of `numel` elements begin and end, as even as can be."""
    ### BEGIN SOLUTION
    cuts = [numel * c // num_chunks for c in range(num_chunks + 1)]
    return list(pairwise(cuts))
    ### END SOLUTION


# %% demo="see_chunks"
with demo("task 1"):
    for numel in (12, 10, 2):
        tell(f"{numel:2d} numbers in 4 chunks: {chunk_bounds(numel, 4)}")

# %% [markdown]
# Expected: four chunks of 3; then sizes that differ by one; then two that are empty.

# %% check="ring_chunks"
check("ring_chunks", chunk_bounds)

# %% [markdown]
# ## Task 2 · Who sends what
#
# **Why.** The whole algorithm is a table: in step $s$, which chunk does rank $r$ send to rank
# $r+1$, and which one does it receive from rank $r-1$? If the table is right, the code is four
# lines.
#
# Begin with the reduce-scatter. In step 0 rank $r$ sends chunk $r$. What comes in, chunk $r-1$, is
# added; it now holds two ranks' numbers. So in step 1 rank $r$ sends *that* one on. After $N-1$
# steps some chunk has been at every rank: it is complete. Then the all-gather hands the complete
# chunks round, and it begins with the one that has just been finished.
#
# **Write `ring_steps(rank, world_size)`.**
#
# - A list of $2(N-1)$ pairs `(sent, received)` of chunk numbers, $0 … N-1$; with one rank it is
#   empty.
# - In the first $N-1$ steps what is received will be *added*, in the other $N-1$ steps it will
#   *replace* what is there. At the end every rank has every complete chunk.
# - A rank begins the second half with the chunk whose sum the first half has left it.
# - All ranks follow their lists at the same time: what rank $r$ sends in a step is what rank $r+1$
#   receives in that step. Which chunk a rank begins with is up to you.
#
# <details><summary>Hint 1: the first half</summary>
#
# In step $s$: send chunk $(r-s)$, receive chunk $(r-s-1)$, both modulo $N$.
# </details>
#
# <details><summary>Hint 2: the second half</summary>
#
# Which chunk did rank $r$ receive in the last step of the first half? Send that one, and go on in
# the same direction.
# </details>


# %% solution="task2_steps"
def ring_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Per step the chunk that `rank` sends to the next rank, and the one that it receives."""
    ### BEGIN SOLUTION
    # One long walk against the direction of the ring: what comes in is what goes out next.
    return [
        ((rank - step) % world_size, (rank - step - 1) % world_size)
        for step in range(2 * (world_size - 1))
    ]
    ### END SOLUTION


# %% [markdown]
# The next cell plays your table for four ranks. A row is a step, a column a rank; the picture shows
# how many ranks' numbers are in each chunk. In the first half the numbers grow along diagonals; at
# half time each rank has one 4; in the second half the fours spread.


# %% demo="see_steps"
def play(world_size: int) -> list[list[list[set[int]]]]:
    """After each step, per rank and chunk: whose numbers are in it."""
    held = [[{rank} for _ in range(world_size)] for rank in range(world_size)]
    plan = [ring_steps(rank, world_size) for rank in range(world_size)]
    states = [[[set(chunk) for chunk in row] for row in held]]
    for step in range(2 * (world_size - 1)):
        moving = [set(held[rank][plan[rank][step][0]]) for rank in range(world_size)]
        for rank in range(world_size):
            chunk = plan[rank][step][1]
            came = moving[rank - 1]
            held[rank][chunk] = held[rank][chunk] | came if step < world_size - 1 else came
        states.append([[set(chunk) for chunk in row] for row in held])
    return states


def draw_steps(axes) -> None:
    states = play(4)
    for number, state in enumerate(states):
        for rank, row in enumerate(state):
            for chunk, who in enumerate(row):
                x, y = 5 * rank + chunk, -number
                shade = 1 - 0.2 * len(who)
                colour = (shade, shade + 0.1 * (1 - shade), 0.75)
                axes.bar(x, 0.9, width=0.94, bottom=y, align="edge", color=colour)
                axes.text(x + 0.47, y + 0.42, len(who), ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.3, 19.3), ylim=(-len(states) + 0.8, 1.4), title="ranks in each chunk")
    axes.set_xticks([5 * r + 2 for r in range(4)], [f"rank {r}" for r in range(4)])
    axes.set_yticks(
        [0.45 - i for i in range(len(states))],
        ["start", *(f"step {i}" for i in range(len(states) - 1))],
    )
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


with demo("task 2"):
    ring_steps(0, 4)
    show(draw_steps, width=9, height=3.2)
    tell("rank 0 of 4 sends chunks", [sent for sent, _ in ring_steps(0, 4)])

# %% check="ring_plan_reduce"
check("ring_plan_reduce", ring_steps)

# %% check="ring_plan_gather"
check("ring_plan_gather", ring_steps)

# %% [markdown]
# ## Task 3 · The exchange
#
# **Why.** "Send to the right, then receive from the left" is how one would say it, and it may hang:
# a send may wait until the other side receives, and here the other side is busy sending. Then
# everybody waits for their right neighbour, all around the ring.
#
# **Write `exchange(outgoing, incoming)`.**
#
# - It sends `outgoing` to the next rank. When it returns, what the rank before sends is in
#   `incoming`, and `outgoing` may be changed again. Rank $N-1$'s next rank is 0. You may use `RANK`
#   and `WORLD_SIZE`, here and later: they are right in every check.
# - All ranks call it at the same time, with tensors of any size and dtype; `incoming` has the size
#   and dtype of what comes. Both are 1-D and contiguous.
# - Sending and receiving go on at the same time: neither begins only when the other has ended.
# - With one rank there is nobody to talk to: `incoming` gets a copy.
#
# <details><summary>Hint 1: without waiting</summary>
#
# `dist.isend(tensor, dst)` and `dist.irecv(tensor, src)` return at once with a handle. Start both,
# then call `wait()` on both.
# </details>
#
# <details><summary>Hint 2: on GPUs</summary>
#
# NCCL wants the two in one group: `dist.batch_isend_irecv([dist.P2POp(dist.isend, …),
# dist.P2POp(dist.irecv, …)])` returns a list of handles, and works on gloo, too.
# </details>


# %% solution="task3_exchange"
def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Sends `outgoing` to the next rank while `incoming` arrives from the rank before."""
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        incoming.copy_(outgoing)
        return
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    ### END SOLUTION


# %% demo="see_exchange"
with demo("task 3"):
    mine = torch.full((3,), float(RANK), device=DEVICE)
    got = torch.empty_like(mine)
    exchange(mine, got)
    tell("what came from the rank before:", [each.tolist() for each in everywhere(got.cpu())])

# %% [markdown]
# Expected on three ranks: rank 0 has the twos of rank 2, rank 1 the zeros of rank 0, rank 2 the
# ones.

# %% check="ring_exchange"
check("ring_exchange", exchange)

# %% [markdown]
# ## Task 4 · The all-reduce
#
# **Why it cannot be done with less.** Ranks that only send to each other need $N-1$ messages to
# form the sum of a chunk, whatever the algorithm, and $N-1$ more to know it everywhere. For $N$
# chunks of $1/N$ that makes $2(N-1)$ tensors in all, per rank $2\frac{N-1}{N}$. The ring reaches
# it, and all links are busy all the time. (A switch that adds can do with less.)
#
# **Write `ring_all_reduce(tensor, op="sum")`.**
#
# - `op` is `"sum"`, `"mean"` or `"max"`, over all ranks. The result is written into `tensor`, which
#   is returned. What another `op` does is left to you.
# - Contiguous tensors of any shape and size, also with fewer numbers than ranks, or none. They hold
#   floats of any size or integers; a mean is taken of floats only.
# - Sends and receives only, to the next and from the previous rank. No rank sends more than
#   $2\frac{N-1}{N}$ of the tensor (rounded up to whole chunks), or anything besides. No message is
#   larger than one chunk.
# - It keeps one chunk beside the tensor, not a second tensor. (A second chunk for a moment, as in
#   `a + b`, is all right.)
#
# <details><summary>Hint 1: the loop</summary>
#
# `flat = tensor.view(-1)`, and `chunks = [flat[b:e] for b, e in chunk_bounds(…)]` are views: what
# you write into them is in the tensor. For each pair of `ring_steps`: exchange, then add (or take
# the maximum of) what has come, in the first half; copy it in the second.
# </details>
#
# <details><summary>Hint 2: what comes in</summary>
#
# It needs a tensor of its own, as long as the chunk that is received. One that is as long as the
# longest chunk, cut down to size, will do for all steps. In the second half it may also come
# directly into its place.
# </details>
#
# <details><summary>Hint 3: the mean</summary>
#
# Divide once, at the end. (Or before the first step; but not in every step.)
# </details>


# %% solution="task4_all_reduce"
def ring_all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """All-reduces `tensor` in place around the ring of all ranks; returns it."""
    ### BEGIN SOLUTION
    if op not in ("sum", "mean", "max"):
        raise ValueError(f"op must be 'sum', 'mean' or 'max', got {op!r}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    chunks = [flat[begin:end] for begin, end in chunk_bounds(flat.numel(), world_size)]
    spare = flat.new_empty(max(chunk.numel() for chunk in chunks))
    for step, (sent, received) in enumerate(ring_steps(rank, world_size)):
        target = chunks[received]
        if step >= world_size - 1:  # finished sums come directly into their place
            exchange(chunks[sent], target)
            continue
        arrived = spare[: target.numel()]
        exchange(chunks[sent], arrived)
        if op == "max":
            torch.maximum(target, arrived, out=target)
        else:
            target += arrived
    if op == "mean":
        flat /= world_size
    return tensor
    ### END SOLUTION


# %% demo="see_all_reduce"
with demo("task 4"):
    numbers = torch.arange(7.0, device=DEVICE) + 100 * RANK
    ours = ring_all_reduce(numbers.clone())
    dist.all_reduce(numbers)
    tell("yours: ", ours.tolist())
    tell("torch: ", numbers.tolist())

# %% [markdown]
# First the values.

# %% check="ring_sum"
check("ring_sum", ring_all_reduce)

# %% check="ring_ops"
check("ring_ops", ring_all_reduce)

# %% check="ring_small"
check("ring_small", ring_all_reduce)

# %% [markdown]
# Now what it sends. These checks run your function on the emulated cluster, and look at its
# messages.

# %% check="ring_bytes"
check("ring_bytes", ring_all_reduce)

# %% check="ring_neighbours"
check("ring_neighbours", ring_all_reduce)

# %% check="ring_messages"
check("ring_messages", ring_all_reduce)

# %% check="ring_time"
check("ring_time", ring_all_reduce)

# %% [markdown]
# ## Task 5 · Seconds
#
# **Why.** One message takes a latency $\alpha$ and then its bytes at the bandwidth $\beta$. From
# that alone follows which algorithm a library should choose:
#
# - **ring**: $2(N-1)$ steps of one $N$-th of the tensor;
# - **tree**: the whole tensor up a binary tree to its root, and down again: $2\lceil\log_2 N\rceil$
#   steps of the whole tensor. (Real libraries cut it into pieces that follow one another. Not
#   here.)
#
# The ring wins where bytes count, the tree where latencies do.
#
# **Write four functions.** `latency_s` is of one message in seconds, `bandwidth` in bytes per
# second of one link.
#
# - `ring_seconds(num_bytes, world_size, latency_s, bandwidth)`
# - `tree_seconds(num_bytes, world_size, latency_s, bandwidth)`
# - `choose(num_bytes, world_size, latency_s, bandwidth)`: `"ring"` or `"tree"`, whichever is
#   faster; either, where both take equally long.
# - `bus_bandwidth(num_bytes, world_size, seconds)`: what a measurement says of the *links*. A
#   tensor of `num_bytes` was all-reduced in `seconds`; each link has carried $2\frac{N-1}{N}$ of
#   it. That number, unlike `num_bytes / seconds`, can be compared between clusters of different
#   size, and with what is printed on the cable.


# %% solution="task5_seconds"
def ring_seconds(num_bytes: int, world_size: int, latency_s: float, bandwidth: float) -> float:
    """Time of a ring all-reduce in the α–β model."""
    ### BEGIN SOLUTION
    return 2 * (world_size - 1) * (latency_s + num_bytes / world_size / bandwidth)
    ### END SOLUTION


def tree_seconds(num_bytes: int, world_size: int, latency_s: float, bandwidth: float) -> float:
    """Time of a reduction up a binary tree and a broadcast down it."""
    ### BEGIN SOLUTION
    return 2 * math.ceil(math.log2(world_size)) * (latency_s + num_bytes / bandwidth)
    ### END SOLUTION


def choose(num_bytes: int, world_size: int, latency_s: float, bandwidth: float) -> str:
    """ "ring" or "tree", whichever is faster."""
    ### BEGIN SOLUTION
    arguments = (num_bytes, world_size, latency_s, bandwidth)
    return "ring" if ring_seconds(*arguments) < tree_seconds(*arguments) else "tree"
    ### END SOLUTION


def bus_bandwidth(num_bytes: int, world_size: int, seconds: float) -> float:
    """Bytes per second on every link, from a measured all-reduce."""
    ### BEGIN SOLUTION
    return 2 * (world_size - 1) / world_size * num_bytes / seconds
    ### END SOLUTION


# %% [markdown]
# Look at both for a cluster of 64 ranks, and then measure: your ring beside torch's all-reduce on
# this machine. They are timed in turn, round by round, and each is shown as the bus bandwidth of
# its median. Do not expect to win: yours is Python, and copies through the same sockets.


# %% demo="see_seconds"
def draw_model(axes) -> None:
    sizes = [2**k for k in range(8, 34)]
    for name, seconds in (("ring", ring_seconds), ("tree", tree_seconds)):
        axes.plot(sizes, [seconds(b, 64, 5e-6, 50e9) for b in sizes], label=name)
        axes.text(sizes[-1], seconds(sizes[-1], 64, 5e-6, 50e9), f" {name}", va="center")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes",
        ylabel="seconds",
        title="64 ranks, 5 µs, 50 GB/s",
    )


def measure(sizes: list[int], rounds: int = 7) -> dict[str, list[float]]:
    """Median seconds of both, per size, each round timing both of them."""
    found: dict[str, list[float]] = {"yours": [], "torch": []}
    for numel in sizes:
        tensor = torch.ones(numel, device=DEVICE)
        times: dict[str, list[float]] = {"yours": [], "torch": []}
        for _ in range(rounds):
            for name, work in (("yours", ring_all_reduce), ("torch", dist.all_reduce)):
                dist.barrier()
                begin = time.perf_counter()
                work(tensor)
                if DEVICE.type == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - begin)
            tensor.fill_(1.0)
        for name, seconds in times.items():
            slowest = [max(each) for each in zip(*everywhere(seconds), strict=True)]
            found[name].append(sorted(slowest)[rounds // 2])
    return found


def draw_measured(axes, sizes: list[int], found: dict[str, list[float]]) -> None:
    for name, seconds in found.items():
        speeds = [
            bus_bandwidth(4 * numel, WORLD_SIZE, s) / 1e9
            for numel, s in zip(sizes, seconds, strict=True)
        ]
        axes.plot([4 * numel for numel in sizes], speeds, marker="o")
        axes.text(4 * sizes[-1], speeds[-1], f" {name}", va="center")
    axes.set(
        xscale="log",
        xlabel="bytes",
        ylabel="bus bandwidth (GB/s)",
        ylim=(0, None),
        title=f"measured on {WORLD_SIZE} ranks of this machine",
    )


with demo("tasks 4 and 5"):
    ring_seconds(1, 2, 1.0, 1.0)
    show(draw_model)
    measured_sizes = [2**k for k in (12, 15, 18, 21)]
    measured = measure(measured_sizes)
    show(lambda axes: draw_measured(axes, measured_sizes, measured))
    ratio = measured["yours"][-1] / measured["torch"][-1]
    tell(f"{4 * measured_sizes[-1]:,} bytes: yours takes {ratio:.1f} times as long as torch's")

# %% check="ring_seconds"
check("ring_seconds", (ring_seconds, tree_seconds))

# %% check="ring_choice"
check("ring_choice", choose)

# %% check="ring_bus"
check("ring_bus", bus_bandwidth)

# %% [markdown]
# ## Task 6 · DDP
#
# **Why.** DDP hands its buckets to whatever you register as a **communication hook**. With yours, a
# model trains over the ring that you wrote.
#
# **Write `ring_hook(state, bucket)`.**
#
# - `bucket.buffer()` is a 1-D tensor with the gradients of one bucket, of this rank.
# - Return a `torch.futures.Future` whose value is the mean over ranks, a tensor of the same size. A
#   future that is finished already is fine.
# - Use `ring_all_reduce`. Do not annotate the arguments: DDP compares annotations with its own.
#
# <details><summary>Hint</summary>
#
# `future = torch.futures.Future()` and `future.set_result(tensor)`.
# </details>
#
# (Yours blocks until the bucket has gone round, so nothing overlaps with the backward pass. Lab 1
# is about that.)


# %% solution="task6_hook"
def ring_hook(state, bucket):
    """Averages a bucket of gradients over the ring."""
    ### BEGIN SOLUTION
    future = torch.futures.Future()
    future.set_result(ring_all_reduce(bucket.buffer(), "mean"))
    return future
    ### END SOLUTION


# %% demo="see_hook"
with demo("task 6"):
    torch.manual_seed(0)
    ids = [DEVICE] if DEVICE.type == "cuda" else None
    model = DistributedDataParallel(nn.Linear(4, 2).to(DEVICE), device_ids=ids)
    model.register_comm_hook(None, ring_hook)
    model(torch.full((1, 4), float(RANK), device=DEVICE)).sum().backward()
    tell("gradient of the first weight:", model.module.weight.grad[0, 0].item())

# %% [markdown]
# Expected: the mean of 0, 1 and 2 on three ranks, 1.0.

# %% check="ring_hook"
check("ring_hook", ring_hook)

# %% [markdown]
# ## Yours beside PyTorch's
#
# The next cell trains one network over your ring, over the course's, and with DDP's own all-reduce.
# All get the same weights and batches, so the losses must agree up to rounding, and the bytes, too.
# On the emulated cluster you see what it costs that a ring of sends and receives does not run
# behind the backward pass, as DDP's own all-reduce does.

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
#
#
# def hooked(hook):
#     def wrap(net):
#         ddp = DistributedDataParallel(net, bucket_cap_mb=0.6)
#         ddp.register_comm_hook(None, hook)
#         return ddp
#
#     return training(wrap)
#
#
# with demo("task 6"):
#     ours = find("minidist.collectives.ddp_hooks:ring_hook")
#     beside(
#         {
#             "yours": hooked(ring_hook),
#             "the course's": ours and hooked(ours),
#             "PyTorch's": training(lambda net: DistributedDataParallel(net, bucket_cap_mb=0.6)),
#         },
#         device=DEVICE,
#     )

# %% [markdown]
# ## Reflect
#
# Two points each, beyond the hundred, read by a person.

# %% [markdown] reflect="reflect_1"
# **1. "A ring over 1,024 ranks sends the same bytes per rank as one over 8, so it takes the same
# time." What is wrong with that, and what do libraries do about it?**
#
# <!-- BEGIN SOLUTION -->
# The bytes per rank grow by 14 % only. But 2 (N - 1) steps mean 2,046 latencies instead of 14. With
# 10 µs that is 20 ms, however small the tensor. Besides, every step waits for the slowest rank. So
# libraries use trees or recursive doubling for small tensors, and hierarchies for many nodes:
# inside a node over fast links, and only a part of the tensor between nodes.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. Your ring adds the numbers of a chunk in another order than your neighbour's ring adds those
# of another chunk. Do all ranks end with the same bits? Would they if everybody gathered everything
# and added it up in the order of arrival?**
#
# <!-- BEGIN SOLUTION -->
# In the ring, yes: each chunk is summed along one path, and the finished sum is copied to
# everybody. Different chunks are added in different orders, but any one of them only once. If every
# rank adds up for itself in the order of arrival, ranks add the same numbers in different orders
# and get sums that differ in the last bits; replicas then drift apart.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - you can draw the table of a ring for four ranks without looking;
# - you can say why "send, then receive" may hang, and on which sizes it does not;
# - you divide a measured all-reduce by $2\frac{N-1}{N}$ without thinking.
#
# ## Read next
#
# - P. Patarasuk, X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*,
#   [JPDC 69 (2009)](https://doi.org/10.1016/j.jpdc.2008.09.002). The proof of task 4.
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations in
#   MPICH*, [IJHPCA 19 (2005)](https://doi.org/10.1177/1094342005051521). Which algorithm for which
#   size.
# - A. Sergeev, M. Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*,
#   [arXiv 1802.05799](https://arxiv.org/abs/1802.05799). Baidu's ring for deep learning, made easy.
# - In this repository: lecture 2, and `lib/minidist/collectives/ring.py`.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
tell("the bonus is done")
