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
# # Lab 2 · Gradient accumulation
#
# You want to train with a batch of 512. Your GPU holds 32. In this lab you train with 512 anyway,
# and you send less over the network than before.
#
# **When you have finished, you can**
#
# - cut a batch into micro-batches that give the big batch's gradient (task 1);
# - step every $k$ batches, and treat the last, smaller group right (task 2);
# - accumulate over ranks, so that gradients travel once and not $k$ times (task 3);
# - train on padded text, where micro-batches differ in their number of tokens (task 4);
# - combine all that with mixed precision and clipping (task 5);
# - compute the effective batch size, and the learning rate that goes with it (task 6);
# - show that $k$ = 1, 2, 4, 8 give the same learning curve (task 7).
#
# Plan 2 to 3 hours. Tasks 2 and 3 are half of it. You need to know
# `DistributedDataParallel`, as in lab 1. Nothing here needs a GPU.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | all |
# |---|---|---|---|---|---|---|---|---|
# | points | 19 | 25 | 23 | 10 | 12 | 5 | 6 | 100 |
#
# Without accumulation (1 of accum_scale, accum_unequal) this lab gives at most 49 points. Without
# one batch at a time (1 of accum_memory, accum_steps, accum_ddp_collectives) this lab gives at most
# 49 points.
#
# In all tasks, a micro-batch goes forward and backward before the next but one begins: never hold
# more than two micro-batches' activations, and never put micro-batches together into a large one.
# Accumulation is for batches that do not fit. Some checks measure it.
#
# Every cell runs on two ranks. A cell with `check("…", …)` tests your work with practice data. Your
# final grade comes from the same tests with other data, other numbers of micro-batches and **3**
# ranks. So never write a number where you mean $k$ or the number of ranks.

# %% [markdown]
# ## The idea in one picture
#
# ```
#   k = 4              one optimizer step
#            ┌───────────────────────────────────────┐
#   rank 0   │ F B      F B      F B      F B        │  F forward, B backward of one micro-batch
#            │  └─ + ────┴─ + ────┴─ + ────┴─► grad ─┼─┐
#   rank 1   │ F B      F B      F B      F B        │ ├─ all-reduce (mean), once ─► step
#            │  └─ + ────┴─ + ────┴─ + ────┴─► grad ─┼─┘
#            └───────────────────────────────────────┘
#              no_sync  no_sync  no_sync  sync
#
#   effective batch = samples per micro-batch × k × number of ranks
# ```
#
# `backward()` does not overwrite `p.grad`, it *adds* to it. That is all the machinery there is. The
# gradient of a sum is the sum of the gradients, so many small backward passes can do the work of a
# large one, and only one micro-batch is in memory at a time. What is left to get right is small and
# easy to get wrong: the weights of the sum, the moment of the step, and what travels.

# %% given="imports"
import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from autograder import check, is_not_started
from minidist.device import choose_backend, choose_device

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"
DEVICE = choose_device()

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets
LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # prediction, target -> mean loss


def join_group() -> None:
    """Joins the process group of this kernel's ranks, if this rank has not done so yet."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if not dist.is_initialized():
        dist.init_process_group(choose_backend())


def in_ddp(model: nn.Module) -> DistributedDataParallel:
    """torch's DistributedDataParallel around `model`, on this rank's device."""
    options = {"device_ids": [DEVICE]} if DEVICE.type == "cuda" else {}
    return DistributedDataParallel(model.to(DEVICE), **options)


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


# %% [markdown]
# ## Task 1 · One big batch out of small ones
#
# **Why.** Let a batch have $N$ samples. Its gradient is the mean
# $g = \frac{1}{N} \sum_{j} \nabla \ell_j$. Cut it into micro-batches of $n_1, n_2, …, n_k$ samples.
# A loss function gives you the *mean* over each, with gradient $g_i$. Put back together:
#
# $$g = \frac{n_1}{N} g_1 + \frac{n_2}{N} g_2 + … + \frac{n_k}{N} g_k$$
#
# If all micro-batches are equally large, every weight is $1/k$. That is where the well-known
# "divide the loss by the number of accumulation steps" comes from. Without it the gradient is $k$
# times too large, which for SGD is a learning rate $k$ times too large. And if they are *not*
# equally large, $1/k$ is wrong too.
#
# **Write `accumulate_gradients(model, micro_batches, loss_fn)`.** One device, no ranks yet.
#
# - `micro_batches` is a list of `(x, y)`. `loss_fn(model(x), y)` is the mean over the samples of
#   one. A sample is `x[j]`, whatever its shape. Another micro-batch may have another shape.
# - Afterwards every `p.grad` is the gradient of the mean loss over *all* samples. The gradients are
#   clear when you are called. There is no optimizer here: do not step.
# - Two layers may share a parameter. Another may be frozen: its `p.grad` stays `None`.
# - Return that mean loss, as a `float`. A tensor of one number will do.
# - Never hold more than two micro-batches' activations. The check runs you on an emulated device
#   that is out of memory at two and a half.
#
# <details><summary>Hint 1: scale what?</summary>
#
# The loss, before `backward()`. Then the gradients come out right by themselves.
# </details>
#
# <details><summary>Hint 2: memory</summary>
#
# `backward()` frees the activations of the graph that it goes through. Add up the losses first and
# call it once at the end, and all $k$ graphs are alive until then: a right gradient, no memory
# saved.
# </details>
#
# <details><summary>Hint 3: the loss to report</summary>
#
# What you scaled for the gradient is already each micro-batch's share of the mean. Add up the
# shares. Use `.item()` or `.detach()`.
# </details>


# %% solution="task1_accumulate"
def accumulate_gradients(
    model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    """Leaves in each p.grad the gradient of the mean loss over all samples of all micro-batches.

    Returns that mean loss.
    """
    ### BEGIN SOLUTION
    num_samples = sum(len(x) for x, _ in micro_batches)
    mean_loss = 0.0
    for x, y in micro_batches:
        share = loss_fn(model(x), y) * (len(x) / num_samples)
        share.backward()  # adds to p.grad, and frees this micro-batch's activations
        mean_loss += share.item()
    return mean_loss
    ### END SOLUTION


# %% [markdown]
# The next cell compares your gradient with that of the big batch. The picture shows how many bytes
# autograd keeps for backward in the course of both.


# %% demo="see_memory"
class Kept:
    """A tensor that autograd keeps for backward; `curve` gets the bytes that are kept in all."""

    def __init__(self, tensor: torch.Tensor, curve: list[int]):
        self.tensor, self.curve = tensor, curve
        curve.append(curve[-1] + tensor.nbytes)

    def __del__(self):
        self.curve.append(self.curve[-1] - self.tensor.nbytes)


def memory_curve(work: Callable[[], object]) -> list[int]:
    """Bytes that autograd keeps, while `work` runs."""
    curve = [0]
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda tensor: Kept(tensor, curve), lambda kept: kept.tensor):
        work()
    return curve


def draw_memory(ax, curves):
    for label, curve in curves.items():
        xs = [i / max(1, len(curve) - 1) for i in range(len(curve))]
        ax.plot(xs, [value / 1e3 for value in curve], label=label)
    ax.set(xlabel="progress of the step", ylabel="kB kept for backward", ylim=(0, None))
    ax.legend()


with demo("task 1"):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x, y = torch.randn(48, 8), torch.randn(48, 1)
    sizes = [16, 16, 8, 4, 4]
    pieces = list(zip(x.split(sizes), y.split(sizes), strict=True))

    whole = copy.deepcopy(network)
    big = memory_curve(lambda: F.mse_loss(whole(x), y).backward())
    small = memory_curve(lambda: accumulate_gradients(network, pieces, F.mse_loss))
    if IS_RANK_ZERO:
        error = max(
            (p.grad - q.grad).abs().max().item()
            for p, q in zip(network.parameters(), whole.parameters(), strict=True)
        )
        print(f"largest difference to the big batch's gradient: {error:.1e}  (fine: below 1e-6)")
        print(
            f"most memory: {max(big)} bytes in one batch, {max(small)} in micro-batches of {sizes}"
        )
    show(partial(draw_memory, curves={"one batch of 48": big, f"micro-batches {sizes}": small}))

# %% check="accum_scale"
check("accum_scale", accumulate_gradients)

# %% check="accum_unequal"
check("accum_unequal", accumulate_gradients)

# %% check="accum_loss"
check("accum_loss", accumulate_gradients)

# %% check="accum_memory"
check("accum_memory", accumulate_gradients)

# %% [markdown]
# ## Task 2 · A step every k batches
#
# **Why.** In a training loop batches come one by one, and every $k$ of them make a step. Five
# things belong to the step and not to the batch: clearing the gradients, clipping,
# `optimizer.step()`, the learning-rate schedule, and the count of steps. Each of them is easily
# left behind in the inner loop.
#
# Two off-by-ones are so common that it pays to look at them before you write. Let $k = 4$, with 10
# batches, numbered $i = 0 … 9$.
#
# | condition for a step | steps happen after | what goes wrong |
# |---|---|---|
# | `i % k == 0` | 0, 4, 8 | the first step has one batch, and 9 is lost |
# | `(i + 1) % k == 0` | 3, 7 | 8 and 9 are lost, or leak into the next epoch |
# | the same, and one more at the end | 3, 7, 9 | nothing, if 8 and 9 have weight $1/2$, not $1/4$ |
#
# Clipping is the other trap. `clip_grad_norm_` limits the norm of the *whole* gradient. Half of a
# sum is not a gradient that you want to limit: a clipped part and an unclipped one no longer add up
# to the direction of the batch.
#
# **Write `train_epoch(model, batches, loss_fn, optimizer, *, accumulation_steps, …)`.** Still one
# device.
#
# - `batches` has a length and yields `(x, y)`, like a `DataLoader`. All batches are equally large,
#   and there is at least one. Go through them once, as you train: a whole epoch does not fit into
#   memory. You are called once per epoch, with the same model, optimizer and scheduler. The
#   optimizer may have several groups of parameters, and some may be frozen.
# - Every `accumulation_steps` consecutive batches make one optimizer step with the gradient of
#   their mean loss. Each batch goes forward and backward by itself. What is left at the end makes a
#   step too, as the mean of the batches that are there. If nothing is left, there is no further
#   step.
# - Old gradients never enter: not those of the step before, and not what somebody has left in
#   `p.grad` before the epoch.
# - `max_norm`: if it is given, the norm of the accumulated gradient, over all parameters of the
#   model, is at most that when the optimizer steps. Clip once per step, with
#   `nn.utils.clip_grad_norm_`.
# - `scheduler`: if it is given, `scheduler.step()` once, right after each `optimizer.step()`.
# - Return the number of optimizer steps, an `int`.
#
# <details><summary>Hint 1: how large is my group?</summary>
#
# `len(batches)` tells you in advance. The group of batch `i` begins at `i - i % k`. It has `k`
# batches, or as many as are left from there.
# </details>
#
# <details><summary>Hint 2: the order within a step</summary>
#
# Last backward of the group, clip, `optimizer.step()`, `scheduler.step()`, `optimizer.zero_grad()`.
# And one `zero_grad()` before the first batch.
# </details>
#
# <details><summary>Hint 3: a different plan</summary>
#
# Collect batches in a list until it has `k`, or until there are no more, and deal with the list.
# That is right too. It keeps `k` batches in memory, though not their activations.
# </details>


# %% solution="task2_train_epoch"
def train_epoch(
    model: nn.Module,
    batches: DataLoader,
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation_steps: int,
    max_norm: float | None = None,
    scheduler: LRScheduler | None = None,
) -> int:
    """Trains on all batches, one optimizer step per group of `accumulation_steps`.

    The last group may be smaller. Returns the number of optimizer steps.
    """
    ### BEGIN SOLUTION
    num_batches, num_steps = len(batches), 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        position = i % accumulation_steps
        group_size = min(accumulation_steps, num_batches - (i - position))
        (loss_fn(model(x), y) / group_size).backward()
        if position < group_size - 1:
            continue

        # The group is complete: from here on it is one ordinary step.
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        num_steps += 1
    return num_steps
    ### END SOLUTION


# %% [markdown]
# The next cell makes visible what your loop does. Its model has one weight per batch, and the
# gradient of batch $i$ is 1 for weight $i$ and 0 for all others. So the gradient that the optimizer
# gets *is* the list of weights with which batches enter. Rows are optimizer steps, columns are
# batches. Every column should have one coloured square, and every row should sum to 1.


# %% demo="see_weights"
def weights_per_step(num_batches: int, accumulation_steps: int) -> list[list[float]]:
    """For each optimizer step the weight of each batch in its gradient."""
    model = nn.Linear(num_batches, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: rows.append(model.weight.grad[0].tolist()))
    inputs = torch.eye(num_batches)
    loader = DataLoader(TensorDataset(inputs, torch.zeros(num_batches, 1)), batch_size=1)
    train_epoch(
        model,
        loader,
        lambda output, _: output.mean(),
        optimizer,
        accumulation_steps=accumulation_steps,
    )
    return rows


def draw_weights(axes, tables):
    for ax, (title, rows) in zip(axes, tables.items(), strict=True):
        ax.imshow(rows, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for step, row in enumerate(rows):
            for batch, weight in enumerate(row):
                if weight:
                    color = "white" if weight > 0.6 else "black"
                    ax.text(
                        batch,
                        step,
                        f"{weight:.2g}",
                        ha="center",
                        va="center",
                        color=color,
                        fontsize=8,
                    )
        ax.set(title=title, xlabel="batch", yticks=range(len(rows)))
    axes[0].set_ylabel("optimizer step")


with demo("task 2"):
    tables = {f"10 batches, k = {k}": weights_per_step(10, k) for k in (2, 4)}
    if IS_RANK_ZERO:
        for title, rows in tables.items():
            sums = ", ".join(f"{sum(row):.2f}" for row in rows)
            print(f"{title}: {len(rows)} steps; their weights sum to {sums}")
    show(partial(draw_weights, tables=tables), columns=2)

# %% check="accum_steps"
check("accum_steps", train_epoch)

# %% check="accum_tail"
check("accum_tail", train_epoch)

# %% check="accum_zero_grad"
check("accum_zero_grad", train_epoch)

# %% check="accum_clip"
check("accum_clip", train_epoch)

# %% check="accum_schedule"
check("accum_schedule", train_epoch)

# %% [markdown]
# ## Task 3 · Accumulation over ranks
#
# **Why.** `DistributedDataParallel` averages gradients in every backward. With $k$ micro-batches
# that is $k$ all-reduces of the whole model, and $k - 1$ of them are for nothing: the optimizer
# looks at the sum only. The result would be right. It would only be slow.
#
# `ddp_model.no_sync()` is a context manager that turns synchronisation off. Gradients then add up
# on each rank alone. In the last micro-batch synchronisation is on, and what travels is the whole
# accumulated gradient.
#
# **What has to be inside?** DDP decides in *forward* whether the next backward will communicate.
# With only `backward()` inside `no_sync()`, it has decided already, and everything travels $k$
# times. No error, no wrong number, nothing but a slow run. Other wrappers, FSDP among them, look at
# the switch in *backward*. So put both inside, and your loop works with all of them.
#
# ```
#     with ddp_model.no_sync():
#         loss = …ddp_model(x)…      ◄── DDP asks here
#         loss.backward()            ◄── FSDP asks here
# ```
#
# **Write `accumulate_ddp(ddp_model, micro_batches, loss_fn)`.**
#
# - Every rank has its own micro-batches, equally many on each rank ($k$) and all equally large.
# - Afterwards every `p.grad`, on every rank, is the gradient of the mean loss over all samples of
#   all ranks. Gradients are clear when you are called. Do not step.
# - Go through the micro-batches in their order, each forward and backward once. Forward and
#   backward of all but the last are inside `no_sync()`. The last one is outside, unless you send
#   the gradients yourself.
# - Return the mean loss over all samples of *all* ranks, the same on every rank: a `float`, or a
#   tensor of one number.
# - Gradients travel once per call, and so does the loss. Everything has arrived when you return.
#
# <details><summary>Hint 1: now with, now without</summary>
#
# `contextlib.nullcontext()` is a context that does nothing. Choose between it and `no_sync()` in
# front of the `with`.
# </details>
#
# <details><summary>Hint 2: whose mean?</summary>
#
# DDP takes the mean over the ranks, so divide by $k$ only, and not by the number of ranks.
# </details>
#
# <details><summary>Hint 3: the loss</summary>
#
# Add up the detached losses in a tensor and all-reduce that once, after the loop. An all-reduce in
# each micro-batch, just for a log, costs a latency each time and makes fast ranks wait for slow
# ones.
# </details>


# %% solution="task3_accumulate_ddp"
def accumulate_ddp(
    ddp_model: DistributedDataParallel, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    """Leaves in each p.grad the gradient of the mean loss over the micro-batches of all ranks.

    Gradients are synchronised once. Returns that mean loss; it is the same on every rank.
    """
    ### BEGIN SOLUTION
    k = len(micro_batches)
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    for i, (x, y) in enumerate(micro_batches):
        synchronise = i == k - 1
        with contextlib.nullcontext() if synchronise else ddp_model.no_sync():
            loss = loss_fn(ddp_model(x), y) / k  # DDP decides here ...
            loss.backward()  # ... FSDP would decide here
        loss_sum += loss.detach()

    dist.all_reduce(loss_sum)
    return loss_sum.item() / dist.get_world_size()
    ### END SOLUTION


# %% [markdown]
# The next cell counts. It hangs itself into DDP with a *communication hook*, a function that DDP
# calls for each bucket that is about to travel. The first line is the naive loop; the second is
# yours.


# %% demo="see_collectives"
def counting_hook(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Notes the bytes of a bucket, then does what DDP does: an all-reduce of the mean."""
    sent.append(bucket.buffer().nbytes)
    mean = bucket.buffer() / dist.get_world_size()
    work = dist.all_reduce(mean, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def naive(ddp_model, micro_batches, loss_fn):
    for x, y in micro_batches:
        (loss_fn(ddp_model(x), y) / len(micro_batches)).backward()


with demo("task 3"):
    join_group()
    gradients = []
    for name, work in (("naive loop", naive), ("accumulate_ddp", accumulate_ddp)):
        torch.manual_seed(0)
        ddp_model, sent = in_ddp(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))), []
        ddp_model.register_comm_hook(sent, counting_hook)
        torch.manual_seed(1 + dist.get_rank())  # every rank has other data
        micro = [(torch.randn(4, 64, device=DEVICE), torch.randn(4, 8, device=DEVICE))] * 8
        work(ddp_model, micro, F.mse_loss)
        gradients.append(torch.cat([p.grad.flatten() for p in ddp_model.parameters()]))
        if IS_RANK_ZERO:
            print(f"{name:>15}: {len(sent)} all-reduces of gradients, {sum(sent)} bytes")
    if IS_RANK_ZERO:
        error = (gradients[0] - gradients[1]).abs().max().item()
        print(f"largest difference between their gradients: {error:.1e}  (fine: below 1e-6)")

# %% check="accum_ddp_gradients"
check("accum_ddp_gradients", accumulate_ddp)

# %% check="accum_ddp_loss"
check("accum_ddp_loss", accumulate_ddp)

# %% check="accum_ddp_collectives"
check("accum_ddp_collectives", accumulate_ddp)

# %% check="accum_ddp_backward"
check("accum_ddp_backward", accumulate_ddp)

# %% [markdown]
# What is it worth? The next cell runs both loops on an *emulated cluster*: the code runs for real
# in new processes, but time is computed, from the cost of each layer and from a slow network. On
# this network one synchronisation takes longer than a micro-batch. Blue and green are compute,
# orange is the network. *Efficiency* is the share of the time in which the devices compute. Expect
# about 0.5 for the naive loop, however well it overlaps, and over 0.9 for yours.

# %% demo="see_timeline" tags=["active-ipynb"]
# %%rank 0
# from minidist import emulate
#
# LAYERS, WIDTH, MICRO_BATCHES = 4, 128, 12
# GRADIENT_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 4
# link = emulate.Link(bandwidth_bytes_per_s=GRADIENT_BYTES / 16e-3, latency_s=20e-6)
# slow_network = emulate.Cluster(
#     name="two devices on a slow network",
#     nodes=2,
#     devices_per_node=1,
#     intra_node=link,
#     inter_node=link,
#     peak_flops_per_s=1e12,
#     memory_bandwidth_bytes_per_s=1e11,
# )
# costs = emulate.ChargePlan((1e-3,) * LAYERS, (2e-3,) * LAYERS, b"practice")
#
#
# def two_steps(work):
#     layers = [emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS)]
#     model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.07)
#     micro = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH))] * MICRO_BATCHES
#     for _ in range(2):
#         model.zero_grad()
#         work(model, micro, F.mse_loss)
#
#
# def draw_timelines(ax, timelines):
#     colors = {"forward": "C2", "backward": "C0", "all_reduce": "C1"}
#     for row, timeline in enumerate(timelines.values()):
#         first = min(i.start_s for i in timeline.intervals[0] if i.kind == "compute")
#         for i in timeline.intervals[0]:
#             color = colors.get(i.name.split()[0])
#             if color and i.start_s >= first and i.kind != "idle":
#                 place = 2.4 * row + (i.kind == "communication")
#                 start, span = (i.start_s - first) * 1e3, (i.end_s - i.start_s) * 1e3
#                 ax.barh(place, span, left=start, color=color, alpha=0.85)
#     rows = [f"{name}, {what}" for name in timelines for what in ("compute", "network")]
#     ax.set_yticks([0, 1, 2.4, 3.4], rows)
#     ax.set(xlabel="virtual milliseconds, rank 0, two optimizer steps", ylim=(4.1, -0.7))
#
#
# with demo("task 3"):
#     timelines = {}
#     for name, work in (("naive", naive), ("yours", accumulate_ddp)):
#         _, timelines[name] = emulate.run(two_steps, 2, slow_network, work, plan=costs)
#         print(f"{name}: efficiency {timelines[name].efficiency:.2f}")
#     show(partial(draw_timelines, timelines=timelines), height=3.2)

# %% [markdown]
# The last check of this task does the same with its own model. It asks for an efficiency of 0.75.

# %% check="accum_ddp_time"
check("accum_ddp_time", accumulate_ddp)

# %% [markdown]
# ## Task 4 · Every token counts the same
#
# **Why.** Language models train on sequences that differ in length. The short ones are padded, and
# padding does not count: its targets are `IGNORED`. So micro-batches have different numbers of
# tokens, and the mean over *their own* tokens gives a token in a sparse micro-batch more say than
# one in a full one. This bug sat in widely used training libraries for years. Few noticed: the loss
# falls all the same, just not as it would have with one large batch.
#
# Over ranks it is the same again. Let rank $r$ and micro-batch $i$ have $n_{ri}$ tokens and
# mean-loss gradient $g_{ri}$. What you want is
#
# $$g = \frac{1}{N} \sum_r \sum_i n_{ri} \, g_{ri}, \qquad N = \sum_r \sum_i n_{ri}$$
#
# and what DDP gives is the mean over $W$ ranks of what each rank has accumulated. So a factor $W$
# has to be put in somewhere, to cancel DDP's $1/W$.
#
# **Write `accumulate_tokens(ddp_model, micro_batches, loss_fn)`.**
#
# - A micro-batch is `(tokens, targets)`; a target of `IGNORED` does not count. Each micro-batch has
#   at least one that does. All ranks have equally many micro-batches. Their shapes may differ.
# - `loss_fn(ddp_model(tokens), targets)` is the mean over the tokens of that micro-batch that
#   count.
# - Afterwards every `p.grad` is the gradient of the mean over all counted tokens of all ranks.
#   Return that mean, the same on every rank.
# - As in task 3, gradients are clear when you are called and travel once, and each micro-batch goes
#   forward and backward by itself. How counts and the loss travel is up to you. Do not step.
#
# <details><summary>Hint 1: what you need to know first</summary>
#
# $N$, before the first backward. Count your own targets, then one all-reduce of one number.
# </details>
#
# <details><summary>Hint 2: the scale of a loss</summary>
#
# $W \, n_{ri} / N$. Check it: with equal counts it is $1/k$.
# </details>


# %% given="tokens"
IGNORED = -100


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the targets that count: logits [B, T, V], targets [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


# %% solution="task4_accumulate_tokens"
def accumulate_tokens(
    ddp_model: DistributedDataParallel, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    """Leaves in each p.grad the gradient of the mean loss over all counted tokens of all ranks.

    Returns that mean loss; it is the same on every rank.
    """
    ### BEGIN SOLUTION
    # How many tokens are there in all? Everybody has to know before the first backward.
    counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    device = micro_batches[0][0].device
    num_tokens = torch.tensor(float(sum(counts)), dtype=torch.float64, device=device)
    dist.all_reduce(num_tokens)
    scale = dist.get_world_size() / num_tokens.item()  # DDP will divide by the number of ranks

    loss_sum = torch.zeros((), device=device)
    last = len(micro_batches) - 1
    for i, ((tokens, targets), count) in enumerate(zip(micro_batches, counts, strict=True)):
        with ddp_model.no_sync() if i < last else contextlib.nullcontext():
            share = loss_fn(ddp_model(tokens), targets) * (count * scale)
            share.backward()
        loss_sum += share.detach()

    dist.all_reduce(loss_sum)
    return (loss_sum / dist.get_world_size()).item()
    ### END SOLUTION


# %% demo="see_tokens"
with demo("task 4"):
    join_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)).to(DEVICE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    padded = []
    for length in (32, 3 + dist.get_rank()):  # a full micro-batch and a sparse one
        tokens, targets = torch.randint(20, (2, 2, 16), generator=generator)
        targets.view(-1)[length:] = IGNORED
        padded.append((tokens.to(DEVICE), targets.to(DEVICE)))

    means = torch.stack([token_loss(model(a), b).detach() for a, b in padded]).mean()
    dist.all_reduce(means)
    loss = accumulate_tokens(in_ddp(copy.deepcopy(model)), padded, token_loss)
    if IS_RANK_ZERO:
        print(f"mean of the micro-batches' means: {means.item() / dist.get_world_size():.4f}")
        print(f"mean over all tokens:             {loss:.4f}")

# %% check="accum_token_gradients"
check("accum_token_gradients", accumulate_tokens)

# %% check="accum_token_loss"
check("accum_token_loss", accumulate_tokens)

# %% check="accum_token_traffic"
check("accum_token_traffic", accumulate_tokens)

# %% [markdown]
# ## Task 5 · With mixed precision
#
# **Why.** In half precision most activations take half the memory, and a GPU with tensor cores can
# multiply matrices at least twice as fast. `torch.autocast` chooses the precision of each operation
# in forward. In fp16 small gradients would vanish, so a `GradScaler` multiplies the loss by a large
# number, its *scale*, and divides the gradients by it before the optimizer steps. If a gradient
# overflows, it skips the step and halves the scale; after 2,000 good steps in a row it doubles it.
#
# What does accumulation change? Everything that the scaler does *per step* must stay outside the
# loop over micro-batches:
#
# | per micro-batch | per step, after the last one |
# |---|---|
# | `autocast` around forward and loss | `scaler.unscale_(optimizer)`, if you clip |
# | `scaler.scale(loss).backward()` | `clip_grad_norm_` |
# | | `scaler.step(optimizer)` |
# | | `scaler.update()` |
#
# If the scale changed between two micro-batches, their gradients would add up in different units.
# And a limit on the norm means nothing while gradients are 65536 times too large: hence unscale,
# then clip.
#
# **Write `amp_step(ddp_model, micro_batches, loss_fn, optimizer, scaler, *, dtype,
# max_norm=None)`.**
#
# - One optimizer step from $k$ equal micro-batches per rank, as in task 3.
# - Forward and loss run under `torch.autocast` in `dtype` (fp16 or bf16), on the device of the
#   data. Backward does not belong there: autocast must be off again when you call it.
# - `scaler` is a `torch.amp.GradScaler`. For bf16 it is a disabled one, which neither scales nor
#   skips a step: you need no second branch.
# - `max_norm`: if it is given, it limits the norm of the true, unscaled gradient.
# - An overflow on *one* rank skips the step on *all* of them. If gradients are synchronised as they
#   should be, you need not do anything for it. Why?
# - Gradients are clear when you are called. Afterwards they may hold anything. Return nothing.
#
# <details><summary>Hint: which device?</summary>
#
# `x.device.type` is `"cuda"` or `"cpu"`; `torch.autocast` wants it as its first argument.
# </details>


# %% solution="task5_amp_step"
def amp_step(
    ddp_model: DistributedDataParallel,
    micro_batches: Sequence[Batch],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    dtype: torch.dtype,
    max_norm: float | None = None,
) -> None:
    """One optimizer step in mixed precision from the micro-batches of all ranks."""
    ### BEGIN SOLUTION
    k = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            with torch.autocast(x.device.type, dtype=dtype):
                loss = loss_fn(ddp_model(x), y) / k
            scaler.scale(loss).backward()

    if max_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    scaler.step(optimizer)  # unscales, if that has not been done; skips the step after an overflow
    scaler.update()
    optimizer.zero_grad()
    ### END SOLUTION


# %% [markdown]
# The next cell trains a few steps in fp16. In step 3 the last rank gets inputs that fp16 cannot
# hold. Watch the scale, and watch that the weights of all ranks stay the same.

# %% demo="see_amp"
with demo("task 5"):
    join_group()
    torch.manual_seed(0)
    ddp_model = in_ddp(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**12, growth_interval=2)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(6):
        before = next(ddp_model.parameters()).detach().clone()
        micro = [(torch.randn(4, 8, device=DEVICE), torch.randn(4, 1, device=DEVICE))] * 3
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            micro = [(x * 1e6, y) for x, y in micro]
        optimizer.zero_grad()
        amp_step(ddp_model, micro, F.mse_loss, optimizer, scaler, dtype=torch.float16, max_norm=1.0)
        weights = next(ddp_model.parameters()).detach()
        told = "skipped" if torch.equal(weights, before) else "done"
        if IS_RANK_ZERO:
            print(f"step {step}: {told:>7}, scale is now {scaler.get_scale():g}")
    sums = [0.0] * dist.get_world_size()
    dist.all_gather_object(sums, round(weights.sum().item(), 6))
    if IS_RANK_ZERO:
        print("sum of the weights on each rank:", sums)

# %% check="accum_amp_update"
check("accum_amp_update", amp_step)

# %% check="accum_amp_scaler"
check("accum_amp_scaler", amp_step)

# %% check="accum_amp_clip"
check("accum_amp_clip", amp_step)

# %% check="accum_amp_traffic"
check("accum_amp_traffic", amp_step)

# %% [markdown]
# ## Task 6 · The effective batch size
#
# **Why.** Three numbers multiply: samples per micro-batch, micro-batches per step, ranks. A recipe
# names their product, the *effective* or *global* batch size, and the learning rate that goes with
# it. Your hardware fixes two of the three, and $k$ has to make up the rest. If you move from 8 GPUs
# to 2 and forget $k$, you have another training run, not a slower one.
#
# When the effective batch changes all the same, the usual rule for SGD is linear: twice the batch,
# twice the learning rate, with a warm-up at the start. It holds for moderate batches. For Adam the
# square root is often closer.
#
# **Write three small functions.**
#
# - `effective_batch_size(micro_batch_size, accumulation_steps, world_size)`: an `int`.
# - `accumulation_steps_for(global_batch_size, micro_batch_size, world_size)`: the $k$ that gives
#   *exactly* this global batch, an `int`. Raise a `ValueError` if there is none. Rounding would
#   silently change the recipe.
# - `scaled_lr(base_lr, base_batch_size, batch_size)`: by the linear rule.
#
# <details><summary>Hint</summary>
#
# All ranks together do `micro_batch_size * world_size` samples before anybody accumulates anything.
# `%` tells whether that fits into the global batch a whole number of times. Think of a global batch
# that is smaller than it, too.
# </details>


# %% solution="task6_batch_size"
def effective_batch_size(micro_batch_size: int, accumulation_steps: int, world_size: int) -> int:
    """How many samples enter one optimizer step, over all ranks."""
    ### BEGIN SOLUTION
    return micro_batch_size * accumulation_steps * world_size
    ### END SOLUTION


def accumulation_steps_for(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """How many micro-batches per rank make a step of `global_batch_size` samples.

    Raises:
        ValueError: no whole number does.
    """
    ### BEGIN SOLUTION
    per_round = micro_batch_size * world_size
    if global_batch_size % per_round or global_batch_size < per_round:
        raise ValueError(
            f"a global batch of {global_batch_size} is no multiple of {micro_batch_size} samples "
            f"on {world_size} ranks"
        )
    return global_batch_size // per_round
    ### END SOLUTION


def scaled_lr(base_lr: float, base_batch_size: int, batch_size: int) -> float:
    """The learning rate for `batch_size`, if `base_lr` suits `base_batch_size`: linear rule."""
    ### BEGIN SOLUTION
    return base_lr * batch_size / base_batch_size
    ### END SOLUTION


# %% demo="see_batch_size"
with demo("task 6"):
    rows = ["micro-batch    k  ranks   effective   learning rate (0.1 at 256)"]
    for micro_batch_size, k, ranks in [(32, 1, 1), (32, 4, 1), (32, 1, 8), (32, 4, 4), (8, 4, 16)]:
        size = effective_batch_size(micro_batch_size, k, ranks)
        assert accumulation_steps_for(size, micro_batch_size, ranks) == k
        rate = scaled_lr(0.1, 256, size)
        rows.append(f"{micro_batch_size:>11} {k:>4} {ranks:>6} {size:>11} {rate:>15.4g}")
    if IS_RANK_ZERO:
        print("\n".join(rows))

# %% check="accum_batch_size"
check("accum_batch_size", (effective_batch_size, accumulation_steps_for, scaled_lr))

# %% [markdown]
# ## Task 7 · Convergence
#
# **Why.** "Does accumulation hurt convergence?" is asked often. The answer depends on what is kept
# fixed. At the same *global* batch, $k$ changes nothing without BatchNorm and dropout: same
# samples, same gradients, same curve, up to rounding. At the same *micro-batch*, a larger $k$ is a
# larger batch and an epoch has fewer steps: another curve, of course. A fair comparison keeps the
# global batch, and begins every run with the same weights and the same data.
#
# **Write `compare_convergence(make_model, train_step, x, y, *, …)`.** It returns a dict: $k$ → the
# loss of each step.
#
# - `make_model()` gives a new model; all begin with the same weights. One model per $k$.
# - In step $s$ the ranks train together on samples $sG$ to $(s+1)G$ of `x` and `y`, where $G$ is
#   `global_batch_size`. Every rank takes $G/W$ of them, each sample on one rank only, and cuts its
#   own into $k$ equal micro-batches. Which sample on which rank is up to you. All numbers divide.
# - `train_step(model, micro_batches)` makes one optimizer step from a list of $k$ pairs `(x, y)`
#   and returns the loss. It communicates, so all ranks must call it equally often. It does its own
#   arithmetic: hand it unscaled data.
# - `num_steps` steps for every $k$ in `accumulation_steps`.
#
# <details><summary>Hint</summary>
#
# `x[a:b].chunk(k)` cuts rows into $k$ equal pieces.
# </details>


# %% solution="task7_convergence"
def compare_convergence(
    make_model: Callable[[], nn.Module],
    train_step: Callable[[nn.Module, list[Batch]], float],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    global_batch_size: int,
    num_steps: int,
    accumulation_steps: Sequence[int],
    rank: int,
    world_size: int,
) -> dict[int, list[float]]:
    """Trains once per k, at the same global batch; returns the loss of every step, per k."""
    ### BEGIN SOLUTION
    per_rank = global_batch_size // world_size
    curves: dict[int, list[float]] = {}
    for k in accumulation_steps:
        model = make_model()
        curves[k] = []
        for step in range(num_steps):
            begin = step * global_batch_size + rank * per_rank
            own = slice(begin, begin + per_rank)
            micro_batches = list(zip(x[own].chunk(k), y[own].chunk(k), strict=True))
            curves[k].append(train_step(model, micro_batches))
    return curves
    ### END SOLUTION


# %% [markdown]
# On the left your function at work, with your `accumulate_ddp` in the training step: four curves,
# of which you should see one. On the right the unfair comparison: the micro-batch stays, and the
# global batch grows with $k$. There the curves differ. Scaling the learning rate (dashed) brings
# the one for $k = 8$ back near that for $k = 1$, per *sample* seen.


# %% demo="see_convergence"
BASE_LR = 0.03


def sgd_step(model: nn.Module, micro_batches: list[Batch], lr: float = BASE_LR) -> float:
    """One step of SGD with `accumulate_ddp`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.zero_grad()
    loss = accumulate_ddp(model, micro_batches, F.mse_loss)
    optimizer.step()
    return loss


def new_model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return in_ddp(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))


def draw_convergence(axes, fair, unfair, batch):
    for k, losses in fair.items():
        axes[0].plot(losses, label=f"k = {k}", linewidth=10 / (k + 1))
    axes[0].set(title=f"global batch {batch} for all", xlabel="step", ylabel="loss", yscale="log")
    for (label, style), losses in unfair.items():
        axes[1].plot([batch * (i + 1) for i in range(len(losses))], losses, style, label=label)
    axes[1].set(title="micro-batch of 4 for all", xlabel="samples seen", yscale="log")
    for ax in axes:
        ax.legend()


with demo("tasks 3, 6 and 7"):
    join_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = 32 * world_size
    num_steps = 48
    generator = torch.Generator().manual_seed(5)
    x = 3 * torch.rand(batch * num_steps, 2, generator=generator).to(DEVICE) - 1.5
    y = torch.sin(x.sum(dim=1, keepdim=True))
    run = partial(compare_convergence, new_model, x=x, y=y, rank=rank, world_size=world_size)

    fair = run(
        sgd_step, global_batch_size=batch, num_steps=num_steps, accumulation_steps=(1, 2, 4, 8)
    )
    unfair = {}
    for k, growth, style in ((1, 1, "-"), (8, 1, "-"), (8, 8, "--")):
        size = effective_batch_size(4, k, world_size)
        lr = scaled_lr(BASE_LR, batch, batch * growth)
        curve = run(
            partial(sgd_step, lr=lr),
            global_batch_size=size,
            num_steps=len(x) // size,
            accumulation_steps=(k,),
        )[k]
        # A point for every `batch` samples, whatever the size of a step.
        points = torch.tensor(curve).reshape(num_steps, -1).mean(dim=1).tolist()
        unfair[f"k = {k}, lr {lr:g}", style] = points
        if IS_RANK_ZERO:
            last = sum(points[-8:]) / 8
            print(f"micro-batch of 4, k = {k}, lr {lr:g}: {len(curve)} steps, at last {last:.4f}")
    if IS_RANK_ZERO:
        gap = max(abs(a - b) for k in fair for a, b in zip(fair[1], fair[k], strict=True))
        losses = ", ".join(f"k={k}: {curve[-1]:.5f}" for k, curve in fair.items())
        print(f"last loss at the same global batch of {batch}: {losses}")
        print(f"largest difference between these curves: {gap:.1e}  (fine: below 1e-5)")
    show(
        partial(draw_convergence, fair=fair, unfair=unfair, batch=batch),
        width=9,
        height=3.2,
        columns=2,
    )

# %% check="accum_convergence"
check("accum_convergence", compare_convergence)

# %% [markdown]
# ## Yours beside the others
#
# The next cell takes the same steps, of four micro-batches each, in three ways: with your
# `accumulate_ddp`, with the course's own loop, and with a loop that synchronises in every backward.
# The losses must agree. Which numbers differ, and why?

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find
#
#
# def accumulating(add_gradients):
#     """Steps of SGD; `add_gradients(ddp, micro_batches)` returns the loss."""
#
#     def begin(net):
#         ddp = DistributedDataParallel(net)
#         optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
#
#         def step(x, y):
#             optimizer.zero_grad()
#             micro_batches = list(zip(x.chunk(4), y.chunk(4), strict=True))
#             loss = add_gradients(ddp, micro_batches)
#             optimizer.step()
#             return torch.as_tensor(loss, device=x.device)
#
#         return step
#
#     return begin
#
#
# def synchronise_each_time(ddp, micro_batches):
#     total = 0.0
#     for x, y in micro_batches:
#         loss = F.mse_loss(ddp(x), y) / len(micro_batches)
#         loss.backward()
#         total += loss.detach()
#     return total
#
#
# def by_the_course(ddp, micro_batches):
#     total = 0.0
#     for (x, y), _ in accumulate(micro_batches, ddp):
#         loss = F.mse_loss(ddp(x), y) / len(micro_batches)
#         loss.backward()
#         total += loss.detach()
#     return total
#
#
# with demo("task 3"):
#     join_group()
#     accumulate = find("minidist.parallel.accumulation:accumulate")
#     beside(
#         {
#             "yours": accumulating(partial(accumulate_ddp, loss_fn=F.mse_loss)),
#             "the course's": accumulate and accumulating(by_the_course),
#             "in every backward": accumulating(synchronise_each_time),
#         },
#         device=DEVICE,
#     )

# %% [markdown]
# ## Reflect
#
# Some things no test can judge. Answer each question in its own cell, in a few sentences: replace
# *YOUR ANSWER HERE*. Whoever runs your course reads the answers and gives up to 2 points for each,
# beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. Your model has BatchNorm. Is training with $k$ micro-batches still the same as with one big
# batch?**
#
# <!-- BEGIN SOLUTION -->
# No. BatchNorm normalises with the mean and the variance of the micro-batch that goes through it,
# so a sample's output depends on its neighbours, and the loss is no longer a mean of terms that
# know nothing of each other. The running statistics are updated $k$ times as well. LayerNorm and
# GroupNorm look at one sample only and are not affected. Dropout is not affected on average, but
# draws other masks, so curves agree only statistically.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. Accumulation saves communication per sample. Why not always take $k = 64$?**
#
# <!-- BEGIN SOLUTION -->
# The effective batch grows with $k$. Beyond a critical size more samples per step hardly improve
# the gradient, so training needs nearly as many steps, each $k$ times as dear. At a *fixed* global
# batch a larger $k$ means smaller micro-batches or fewer ranks: smaller micro-batches use a device
# badly, and fewer ranks take longer. Accumulation is for memory and for slow networks. It makes no
# step faster.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. Under `no_sync()` every rank holds its whole accumulated gradient. With FSDP, which shards
# gradients, what does it cost, and what would you do on a machine that is short of memory?**
#
# <!-- BEGIN SOLUTION -->
# FSDP reduces and shards each gradient as it comes, and keeps $1/W$ of it. Without synchronisation
# there is nothing to shard: every rank keeps the full gradient until the last micro-batch, and what
# sharding the gradients had saved is gone. When memory is what you lack, synchronise every
# micro-batch and accumulate the shards; it costs $k$ reduce-scatters. It is the same trade in the
# other direction.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_4"
# **4. The scale of a `GradScaler` must not change within a step. Which innocent-looking line would
# change it?**
#
# <!-- BEGIN SOLUTION -->
# `scaler.update()` inside the loop over micro-batches. The first micro-batches' gradients are then
# in `p.grad` times the old scale, the later ones' times the new one, and `unscale_` divides their
# sum by the new one. Most of the time the two are the same, which is why this bug lives long.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - you can say for any loop with which weight each sample enters a step;
# - you can tell how a loop loses the last batches of an epoch;
# - you know what must be inside `no_sync()`, and why nothing breaks if it is not;
# - you can turn a recipe for 64 GPUs into one for 4.
#
# ## Read next
#
# - Ott et al., *Scaling Neural Machine Translation*, [arXiv
#   1806.00187](https://arxiv.org/abs/1806.00187). Accumulation used to hide slow networks and
#   uneven sentence lengths, with half precision.
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, [arXiv
#   2006.15704](https://arxiv.org/abs/2006.15704). Where `no_sync` comes from, with measurements.
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, [arXiv
#   1706.02677](https://arxiv.org/abs/1706.02677). The linear rule, warm-up, and a section on
#   pitfalls that you now know.
# - McCandlish et al., *An Empirical Model of Large-Batch Training*, [arXiv
#   1812.06162](https://arxiv.org/abs/1812.06162). How large a batch is still worth it.
# - Micikevicius et al., *Mixed Precision Training*, [arXiv
#   1710.03740](https://arxiv.org/abs/1710.03740). Why the loss is scaled.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
if IS_RANK_ZERO:
    print("lab 2 is done")
