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
# # Bonus · A pipeline of your own
#
# A model that is too large for one GPU can be cut between its layers: the first rank gets the first
# layers, the next rank the next ones. No rank has all of the model, no rank sees all of the
# computation, and autograd ends at the border of a process. In this notebook you build what holds
# such a pipeline together: the cut, the schedule, and the program that runs any schedule on real
# ranks and ends with the gradients of a single process.
#
# **When you have finished, you can**
#
# - cut a model so that no stage holds up the others (task 1);
# - write GPipe and 1F1B as lists, and say what each keeps in memory (task 2);
# - compute a bubble, and how many micro-batches make it small enough (task 3);
# - carry a backward pass over the border between two processes (task 4);
# - train with it (task 5), and say when data parallelism would send less, or be faster (task 6).
#
# Plan 2 to 3 hours. Lecture 7 has the theory. Nothing here needs a GPU.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | all |
# |---|---|---|---|---|---|---|---|
# | points | 6 | 16 | 8 | 60 | 6 | 4 | 100 |
#
# Every cell runs on **three** ranks: a first stage, a last one, and one in the middle, which both
# receives and sends in both directions. Your grade comes from the same checks with other data on
# **4** ranks. Nobody asks your code what it has sent, or what it keeps: the emulated cluster
# carries every message, and a stage that is full refuses to work.

# %% [markdown]
# ## The words
#
# ```
#             time →                                     P = 3 stages, M = 4 micro-batches
# rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
# rank 1      F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
# rank 2         F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
#
#            activations travel down                gradients travel up
# ```
#
# A batch is cut into $M$ **micro-batches**. *F2* is the forward pass of micro-batch 2 through one
# stage, *B2* its backward pass, here twice as long. The dots are the **bubble**: time in which a
# rank has nothing to do. This order, all forwards first, is **GPipe**. Between F2 and B2 a rank has
# to keep all that autograd saved for micro-batch 2: its **activations**.
#
# Ranks, stages and micro-batches count from 0. $P$ is the number of stages, one per rank.

# %% given="imports"
import contextlib
import io
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

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

Step = tuple[str, int]  # ("forward" or "backward", number of a micro-batch)


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
# ## Task 1 · Stages
#
# **Why.** In a pipeline everybody walks at the pace of the slowest. A stage that costs 20 % more
# makes every rank 20 % slower, for all of the training. And layers do not cost the same: an
# embedding is a lookup, the head multiplies by the whole vocabulary. Equal *numbers* of layers are
# not equal stages.
#
# **Write `cut_layers(costs, num_stages)`.**
#
# - `costs` has the cost of each layer, in any unit, and stays as it is. There are at least as many
#   layers as stages. Returns a list of `num_stages` pairs `(begin, end)`: stage $s$ has the layers
#   `begin … end - 1`.
# - Stages lie one after the other, all layers are in one, and none is empty.
# - The dearest stage costs as little as it can. (Where several cuts do that, any of them is right.)
#
# <details><summary>Hint 1: guess the answer, then check it</summary>
#
# Could it be done with no stage above cost $c$? Fill each stage until the next layer would not fit.
# If that takes more than `num_stages` stages, $c$ is too small. Try every $c$ that some run of
# layers adds up to, the smallest first. Mind that no stage ends up empty: leave at least one layer
# for each that is still to come.
# </details>
#
# <details><summary>Hint 2: dynamic programming</summary>
#
# The best cut of the first $i$ layers into $s$ stages: for each $j$, the best cut of the first $j$
# layers into $s - 1$ stages, and the layers $j … i - 1$ as one more.
# </details>


# %% solution="task1_cut"
def cut_layers(costs: list[float], num_stages: int) -> list[tuple[int, int]]:
    """Contiguous stages, none of them empty, whose dearest one is as cheap as can be."""
    ### BEGIN SOLUTION
    # best[i]: (cost of the dearest stage, cuts) of the first i layers in as many stages as so far.
    best = {0: (0.0, [0])}
    for _ in range(num_stages):
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(1, len(costs) + 1):
            ways = [
                (max(dearest, sum(costs[begin:end])), [*cuts, end])
                for begin, (dearest, cuts) in best.items()
                if begin < end
            ]
            if ways:
                longer[end] = min(ways)
        best = longer
    cuts = best[len(costs)][1]
    return list(itertools.pairwise(cuts))
    ### END SOLUTION


# %% demo="see_cut"
with demo("task 1"):
    # An embedding, eight blocks, and a head that costs as much as four blocks.
    layers = [1, *[10] * 8, 40]
    for stages in (2, 4):
        cuts = cut_layers(layers, stages)
        tell(f"{stages} stages: {cuts}, they cost {[sum(layers[a:b]) for a, b in cuts]}")

# %% [markdown]
# Expected: stages of 61 and 60. With four stages the dearest is the head, 40, whatever you do: it
# is one layer and cannot be cut. That is where lecture 8 goes on.

# %% check="pipe_cut"
check("pipe_cut", cut_layers)

# %% [markdown]
# ## Task 2 · Two schedules
#
# **Why.** What a rank does is a list: which pass, of which micro-batch, in which order. As a list
# it can be drawn, tested and compared before a single process runs.
#
# **GPipe**: all forwards in the order of the micro-batches, then all backwards, in the same order
# or in reverse, alike on all ranks. When the last forward is done, a rank keeps the activations of
# all $M$ micro-batches. (The paper recomputes them from the stage's inputs.)
#
# **1F1B** (one forward, one backward): a backward as soon as there can be one.
#
# - *Warm-up*: rank $r$ does $P - 1 - r$ forwards. So many stages lie behind it, and so many
#   micro-batches are on their way before the first gradient can be back. With fewer micro-batches
#   than that, all of them.
# - *Steady*: one forward, one backward, as long as there are forwards. Backwards are in the order
#   of the micro-batches: the oldest first.
# - *Cool-down*: the backwards that are left.
#
# **Write three functions.**
#
# - `gpipe(rank, num_stages, num_micro_batches)` and
#   `one_f_one_b(rank, num_stages, num_micro_batches)`: the list of that rank, of pairs
#   `("forward", i)` and `("backward", i)`. Each micro-batch is in it once forward, once backward.
# - `peak_kept(schedule)`: how many micro-batches a rank keeps at once, at most, in *any* schedule.
#   A micro-batch is kept from its forward to its backward. The list stays as it is.
#
# <details><summary>Hint</summary>
#
# `warm_up = min(num_stages - 1 - rank, num_micro_batches)`. In the steady part forwards go on with
# number `warm_up`, backwards begin with number 0. There are `num_micro_batches - warm_up` pairs.
# </details>


# %% solution="task2_schedules"
def gpipe(rank: int, num_stages: int, num_micro_batches: int) -> list[Step]:
    """All forwards, then all backwards."""
    ### BEGIN SOLUTION
    forwards: list[Step] = [("forward", i) for i in range(num_micro_batches)]
    return forwards + [("backward", i) for i in range(num_micro_batches)]
    ### END SOLUTION


def one_f_one_b(rank: int, num_stages: int, num_micro_batches: int) -> list[Step]:
    """A warm-up of forwards, then one forward and one backward in turn, then what is left."""
    ### BEGIN SOLUTION
    warm_up = min(num_stages - 1 - rank, num_micro_batches)
    steps: list[Step] = [("forward", i) for i in range(warm_up)]
    for i in range(num_micro_batches):
        if warm_up + i < num_micro_batches:
            steps.append(("forward", warm_up + i))
        steps.append(("backward", i))
    return steps
    ### END SOLUTION


# %% solution="task2_kept"
def peak_kept(schedule: list[Step]) -> int:
    """How many micro-batches lie between their forward and their backward at once, at most."""
    ### BEGIN SOLUTION
    now = most = 0
    for what, _ in schedule:
        now += 1 if what == "forward" else -1
        most = max(most, now)
    return most
    ### END SOLUTION


# %% [markdown]
# The next cell plays your lists: a step begins when the rank is free *and* what it needs has been
# done by its neighbour. Look for three things: the bubbles of both schedules have the same size;
# in 1F1B backwards begin early; and the numbers on the right, what each rank keeps at most.


# %% demo="see_schedules"
def play(schedules: list[list[Step]], backward_s: float = 2.0) -> list[list[tuple]]:
    """(begin, end, what, micro-batch) of every step of every rank; a forward takes 1."""
    done: dict[tuple, float] = {}
    waiting, spans = [list(steps) for steps in schedules], [[] for _ in schedules]
    clock, last, moved = [0.0] * len(schedules), len(schedules) - 1, True
    while moved:
        moved = False
        for rank, steps in enumerate(waiting):
            while steps:
                what, i = steps[0]
                forward = what == "forward"
                is_end = rank == (0 if forward else last)
                needs = ("forward", i, rank) if is_end else (what, i, rank + (-1 if forward else 1))
                if (forward and is_end) or needs in done:
                    begin = max(clock[rank], done.get(needs, 0.0))
                    clock[rank] = begin + (1.0 if forward else backward_s)
                    done[what, i, rank] = clock[rank]
                    spans[rank].append((begin, clock[rank], what, i))
                    steps.pop(0)
                    moved = True
                else:
                    break
    if any(waiting):
        raise RuntimeError(f"a deadlock: the ranks stopped before {[s[:1] for s in waiting]}")
    return spans


COLOURS = {"forward": "#7FB3D5", "backward": "#E59866"}


def draw_spans(axes, spans: list[list[tuple]], title: str, notes: list[str]) -> None:
    """Bars per rank, with the number of the micro-batch in each."""
    for rank, row in enumerate(spans):
        for begin, end, what, i in row:
            axes.barh(rank, end - begin, left=begin, color=COLOURS[what], edgecolor="white")
            axes.text((begin + end) / 2, rank, i, ha="center", va="center", fontsize=7)
        axes.text(max(e for r in spans for _, e, _, _ in r), rank, f" {notes[rank]}", va="center")
    axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
    axes.set(title=title, ylim=(len(spans) - 0.4, -0.6))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


with demo("task 2"):
    for name, build in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        lists = [build(rank, 4, 8) for rank in range(4)]
        kept = [peak_kept(steps) for steps in lists]
        show(
            lambda axes, lists=lists, kept=kept, name=name: draw_spans(
                axes,
                play(lists),
                f"{name}: 4 stages, 8 micro-batches",
                [f"keeps {k}" for k in kept],
            ),
            width=9,
            height=1.9,
        )
        end = max(span[1] for row in play(lists) for span in row)
        tell(f"{name:6} ends at {end:g}, ranks keep {kept}")

# %% [markdown]
# Expected: both end at 33 (8 micro-batches of 3, and 3 × 3 of bubble). GPipe keeps 8 on every rank,
# 1F1B keeps 4, 3, 2 and 1. So 1F1B is not *faster*. It makes room for more micro-batches, and those
# make the bubble smaller.

# %% check="pipe_gpipe"
check("pipe_gpipe", gpipe)

# %% check="pipe_1f1b"
check("pipe_1f1b", one_f_one_b)

# %% check="pipe_kept"
check("pipe_kept", peak_kept)

# %% [markdown]
# ## Task 3 · The bubble
#
# **Why.** Before you buy eight GPUs you want to know how many of them will be idle on average. Let
# one micro-batch take $f$ seconds forward and $b$ seconds backward on every stage. A rank is busy
# for $M(f + b)$. Until its first forward, and after its last backward, and in between, it waits for
# the other $P - 1$ stages.
#
# Count in the picture at the top: every row has as many dots as any other, once you count those
# before its first forward and after its last backward.
#
# **Write three functions.**
#
# - `bubble_fraction(num_stages, num_micro_batches)`: the share of a *step* in which a rank is idle.
# - `idle_seconds(num_stages, num_micro_batches, forward_s, backward_s)`: the seconds of a step in
#   which a rank is idle.
# - `micro_batches_for(num_stages, most_bubble)`: the smallest number of micro-batches, at least 1,
#   whose `bubble_fraction` is `most_bubble` (above 0) or less. Where only rounding decides, one
#   more passes, too.
#
# Some papers divide the idle time by the *busy* time, and get $(P - 1) / M$. With few micro-batches
# that is more than one. It is a ratio, not a share.


# %% solution="task3_bubble"
def bubble_fraction(num_stages: int, num_micro_batches: int) -> float:
    """The share of a step in which a rank is idle."""
    ### BEGIN SOLUTION
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
    ### END SOLUTION


def idle_seconds(
    num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float
) -> float:
    """Seconds of a step in which a rank is idle."""
    ### BEGIN SOLUTION
    return (num_stages - 1) * (forward_s + backward_s)
    ### END SOLUTION


def micro_batches_for(num_stages: int, most_bubble: float) -> int:
    """The smallest number of micro-batches whose bubble is `most_bubble` or less."""
    ### BEGIN SOLUTION
    number = max(1, math.floor((num_stages - 1) * (1 - most_bubble) / most_bubble))
    while bubble_fraction(num_stages, number) > most_bubble:  # rounding must not decide
        number += 1
    return number
    ### END SOLUTION


# %% demo="see_bubble"
with demo("task 3"):
    for stages in (2, 4, 8, 16):
        row = [f"{bubble_fraction(stages, m):4.0%}" for m in (1, 4, 16, 64)]
        enough = micro_batches_for(stages, 0.1)
        tell(f"{stages:2d} stages: M = 1, 4, 16, 64: {' '.join(row)};  10 % needs M = {enough}")

# %% [markdown]
# Expected: 9 micro-batches per further stage for a bubble of 10 %, so 27 for four stages. With
# $M = 1$ all but one of the ranks are idle at any time.

# %% check="pipe_bubble"
check("pipe_bubble", (bubble_fraction, idle_seconds))

# %% check="pipe_choice"
check("pipe_choice", micro_batches_for)

# %% [markdown]
# ## Task 4 · The pipeline
#
# **Why.** Autograd's graph ends at the border of the process. A stage gets numbers, not a graph.
# So you have to do by hand at each border what autograd does inside: keep input and output of the
# stage, and when the gradient of the *output* comes, go backward from there, and hand the gradient
# of the *input* to the rank before.
#
# ```
#        rank r                                      rank r + 1
#   x ── stage ──→ y ─────────── send ──────────────→ x ── stage ──→ y ──→ …
#   x.grad ←── y.backward(g) ←── send ── x.grad ←──────── y.backward(g) ←── …
# ```
#
# **Write `run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer)`.**
#
# - Every rank calls it with its own `stage` (a module) and its own `schedule` (a list as in
#   task 2), in the default process group. Do the steps in the order of the list, each for the
#   micro-batch that it names. You may use `RANK` and `WORLD_SIZE`: they are right in every check.
# - `micro_batches`: on the first rank a list of $M$ tensors, the inputs; `None` elsewhere. They may
#   be integers (tokens), which have no gradient.
# - `targets`: on the last rank a list of $M$ tensors; `None` elsewhere. There
#   `loss_fn(output, target)` is the *mean* loss of one micro-batch.
# - `buffer(i)` is a new tensor with the shape and dtype of the activation that this rank receives
#   for micro-batch `i`; `None` on the first rank.
# - Afterwards the gradient of the **batch's** mean loss has been *added* to the `.grad` of the
#   stage's parameters. Micro-batches of equal size count $1/M$ each. In general one with $n$ of $N$
#   samples (`len(target)`) counts $n/N$.
# - Returns the batch's mean loss, as a tensor of one number without a graph, on **every** rank. How
#   it gets there is up to you.
# - One message per activation and per gradient, to the neighbour. A gradient has shape and dtype of
#   its activation. What is sent has to be contiguous, and so has what is received into; the output
#   of a stage need not be, nor is `torch.empty_like` of it then.
# - A rank does not wait for what it *sends* while it has steps to do. Before it returns, it waits
#   until everything has left.
# - After a backward pass nothing of that micro-batch is kept, but what is being sent, and what a
#   variable of your loop still holds until the next step.
# - Any schedule works in which neighbours have the same order of forwards, and the same order of
#   backwards. With one rank there is nobody to talk to.
#
# <details><summary>Hint 1: where do I begin?</summary>
#
# With a loop over `schedule` and a dict `kept` from micro-batch to `(x, y)`. In a forward, get `x`
# (from the list, or by `dist.recv(buffer)`), compute `y`, send it, keep both. In a backward, take
# them out with `pop`, receive the gradient of `y`, go backward, send `x.grad`.
# </details>
#
# <details><summary>Hint 2: the received activation</summary>
#
# It is a leaf of this rank's graph, and must ask for a gradient *before* the stage uses it, but
# *after* the data has come in: `dist.recv(x, rank - 1)`, then `x.requires_grad_()`.
# </details>
#
# <details><summary>Hint 3: sending without waiting</summary>
#
# `dist.isend(tensor, dst)` returns a handle at once. Put it in a list, *with* the tensor, which
# must neither change nor be freed until it has left; `wait()` for all of them at the end. Under
# 1F1B two neighbours often send to each other at the same moment. If both wait, they wait for ever.
# (What is sent carries no graph: `y.detach()`.)
# </details>
#
# <details><summary>Hint 4: the last rank</summary>
#
# Keep the weighted *loss* as its `y`: then `y.backward()` needs no gradient from anybody. Add up
# `loss.detach()`, and `dist.broadcast(total, src)` at the end tells all ranks. The others need a
# tensor of the same dtype to receive it: a `torch.float32` scalar, on the device of the stage.
# </details>


# %% solution="task4_pipeline"
def run_pipeline(
    stage: nn.Module,
    schedule: list[Step],
    micro_batches: list[torch.Tensor] | None,
    targets: list[torch.Tensor] | None,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    buffer: Callable[[int], torch.Tensor] | None,
) -> torch.Tensor:
    """One batch through all stages and back; adds gradients, returns the loss on every rank."""
    ### BEGIN SOLUTION
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    device = next(stage.parameters()).device
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    leaving: list[tuple] = []  # handles, and the tensors that they still need
    batch_loss = torch.zeros((), device=device)
    samples = sum(len(target) for target in targets) if targets is not None else 0

    def send(tensor: torch.Tensor, to: int) -> None:
        tensor = tensor.detach().contiguous()
        leaving.append((dist.isend(tensor, to), tensor))

    for what, i in schedule:
        if what == "forward":
            if micro_batches is not None:
                x = micro_batches[i]
            else:
                x = buffer(i)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if targets is not None:
                y = loss_fn(y, targets[i]) * (len(targets[i]) / samples)
                batch_loss += y.detach()
            else:
                send(y, rank + 1)
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            if targets is not None:
                y.backward()
            else:
                gradient = torch.empty(y.shape, dtype=y.dtype, device=device)
                dist.recv(gradient, rank + 1)
                y.backward(gradient)
            if rank > 0:
                send(x.grad, rank - 1)
            del x, y
    for handle, _ in leaving:
        handle.wait()
    dist.broadcast(batch_loss, last)
    return batch_loss
    ### END SOLUTION


# %% demo="see_pipeline"
def small_pipeline(seed: int = 0, micro: int = 4) -> tuple:
    """A stage per rank, 2 samples in each micro-batch, and what run_pipeline wants to know."""
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DEVICE) for _ in range(WORLD_SIZE)]
    x = torch.randn(2 * micro, 8).to(DEVICE)
    y = torch.randn(2 * micro, 8).to(DEVICE)
    ends = (
        list(x.chunk(micro)) if RANK == 0 else None,
        list(y.chunk(micro)) if RANK == WORLD_SIZE - 1 else None,
    )
    buffer = None if RANK == 0 else lambda i: torch.empty(2, 8, device=DEVICE)
    return stages, x, y, ends, buffer


with demo("tasks 2 and 4"):
    stages, x, y, (inputs, targets), buffer = small_pipeline()
    steps = one_f_one_b(RANK, WORLD_SIZE, 4)
    loss = run_pipeline(stages[RANK], steps, inputs, targets, nn.functional.mse_loss, buffer)
    ours = stages[RANK][0].weight.grad.clone()
    # The same in one process: all stages are here, too, with the same weights.
    nn.functional.mse_loss(nn.Sequential(*stages)(x), y).backward()
    alone = stages[RANK][0].weight.grad - ours  # backward() has added its own to yours
    ratios = [f"{each:.4f}" for each in everywhere((ours.norm() / alone.norm()).item())]
    tell(f"loss {loss.item():.4f}; your gradients over those of one process, by rank: {ratios}")

# %% [markdown]
# Expected: a loss of about 1.1, and a ratio of 1.0000 on every rank.
#
# First the values. The checks below disregard a factor that all gradients share: the loss has
# checks of its own. All but one compute in float32.

# %% check="pipe_gradients"
check("pipe_gradients", run_pipeline)

# %% check="pipe_orders"
check("pipe_orders", run_pipeline)

# %% check="pipe_tokens"
check("pipe_tokens", run_pipeline)

# %% check="pipe_scale"
check("pipe_scale", run_pipeline)

# %% check="pipe_uneven"
check("pipe_uneven", run_pipeline)

# %% check="pipe_accumulate"
check("pipe_accumulate", run_pipeline)

# %% check="pipe_loss"
check("pipe_loss", run_pipeline)

# %% [markdown]
# Now how it works. These checks run your function on the emulated cluster. One reads the record of
# messages, and runs your function on a single rank, too. One gives rank $r$ room for the
# activations of $P - r$ micro-batches, and a stage that has no room raises a `MemoryError`. One
# measures in virtual time, where a message takes half as long as a forward: whoever waits for a
# message to arrive before going on pays for it every time.

# %% check="pipe_messages"
check("pipe_messages", run_pipeline)

# %% check="pipe_limit"
check("pipe_limit", run_pipeline)

# %% check="pipe_time"
check("pipe_time", run_pipeline)

# %% [markdown]
# And now look at it. The next cell runs your schedules with your pipeline on four ranks of an
# emulated cluster, in new processes (some seconds). What is drawn was not computed from the lists:
# it is when each stage was really asked to work. A message takes a fifth of a forward.

# %% demo="see_timeline" tags=["active-ipynb"]
# %%rank 0
# from minidist import emulate
#
# STAGES, MICRO, SIDE = 4, 8, 64
# link = emulate.Link(bandwidth_bytes_per_s=4 * SIDE * 2 / 0.19e-3, latency_s=1e-5)
# four_devices = emulate.Cluster(
#     name="four devices",
#     nodes=1,
#     devices_per_node=STAGES,
#     intra_node=link,
#     inter_node=link,
#     peak_flops_per_s=1e12,
#     memory_bandwidth_bytes_per_s=1e11,
# )
# costs = emulate.ChargePlan((1e-3,) * STAGES, (2e-3,) * STAGES, b"practice")
#
#
# def one_batch(build, pipeline):
#     rank = dist.get_rank()
#     stage = emulate.Charged(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()), rank)
#     inputs = [torch.randn(2, SIDE) for _ in range(MICRO)] if rank == 0 else None
#     targets = [torch.randn(2, SIDE) for _ in range(MICRO)] if rank == STAGES - 1 else None
#     buffer = None if rank == 0 else lambda i: torch.empty(2, SIDE)
#     steps = build(rank, STAGES, MICRO)
#     pipeline(stage, steps, inputs, targets, nn.functional.mse_loss, buffer)
#     return steps
#
#
# with demo("tasks 2 to 4"):
#     bubble_fraction(STAGES, MICRO)
#     for name, build in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
#         lists, timeline = emulate.run(
#             one_batch, STAGES, four_devices, build, run_pipeline, plan=costs, deadline_s=150
#         )
#         spans = []
#         for rank, steps in enumerate(lists):
#             worked = [i for i in timeline.intervals[rank] if i.kind == "compute"]
#             bars = zip(worked, steps, strict=True)
#             spans.append([(1e3 * i.start_s, 1e3 * i.end_s, *step) for i, step in bars])
#         end = max(row[-1][1] for row in spans)
#         idle = 1 - MICRO * 3.0 / end
#         kept = [f"keeps {peak_kept(steps)}" for steps in lists]
#         show(lambda axes: draw_spans(axes, spans, name, kept), width=9, height=1.9)
#         theory = bubble_fraction(STAGES, MICRO)
#         print(f"{name:6} {end:.2f} ms, idle {idle:.1%}; without messages {theory:.1%}")

# %% [markdown]
# Expected: GPipe takes 34.2 ms and idles 29.8 % of them, a little more than the formula's 27.3 %,
# by the messages that the first and the last micro-batch wait for. 1F1B takes 36.2 ms and idles
# 33.7 %: in its steady part each rank waits for an answer to what it has just sent, there and back.
# A rank with one more forward in its warm-up has work meanwhile, and keeps one micro-batch more.

# %% [markdown]
# ## Task 5 · Training
#
# **Why.** Every rank has an optimizer for its own stage, and nobody for the whole. It works because
# a step of the optimizer needs the gradients of the batch, and after `run_pipeline` each rank has
# those of its own parameters.
#
# **Write `train_step(stage, optimizer, schedule, micro_batches, targets, loss_fn, buffer)`.**
#
# - One step of training with the batch: from its gradients only, none that are older, also in the
#   first call.
# - One step of the optimizer, after *all* micro-batches: a stage whose weights change in between
#   goes backward through other weights than it went forward.
# - Returns the loss, as `run_pipeline` does: a tensor.


# %% solution="task5_train"
def train_step(
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: list[Step],
    micro_batches: list[torch.Tensor] | None,
    targets: list[torch.Tensor] | None,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    buffer: Callable[[int], torch.Tensor] | None,
) -> torch.Tensor:
    """One step of the optimizer with the gradients of one batch."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    loss = run_pipeline(stage, schedule, micro_batches, targets, loss_fn, buffer)
    optimizer.step()
    return loss
    ### END SOLUTION


# %% demo="see_training"
with demo("tasks 2, 4 and 5"):
    stages, x, y, (inputs, targets), buffer = small_pipeline()
    steps = one_f_one_b(RANK, WORLD_SIZE, 4)
    adam = torch.optim.AdamW(stages[RANK].parameters(), lr=0.02)
    given = (steps, inputs, targets, nn.functional.mse_loss, buffer)
    losses = [float(train_step(stages[RANK], adam, *given)) for _ in range(40)]
    tell("loss after 0, 10, 20, 30 steps:", [f"{losses[k]:.3f}" for k in (0, 10, 20, 30)])

# %% [markdown]
# Expected: it falls, on all ranks at once, though no rank has the whole model.

# %% check="pipe_train"
check("pipe_train", train_step)

# %% [markdown]
# ## Task 6 · Against data parallelism
#
# **Why.** The same ranks could each hold the whole model (if it fits) and share the batch. Then
# nobody has a bubble, and gradients are all-reduced. A pipeline sends activations instead, and
# those do not grow with the model's depth. On a slow network that decides.
#
# **Write two functions**, each for one step and in bytes that the rank *sends* that sends most.
#
# - `pipeline_bytes(num_stages, num_micro_batches, activation_bytes)`: `activation_bytes` is what
#   crosses one border for one micro-batch. A gradient is as large as its activation.
# - `data_parallel_bytes(num_ranks, parameter_bytes)`: a ring all-reduce of all gradients, which
#   sends $2\frac{N-1}{N}$ of them.
#
# Mind the ends: not every rank has two neighbours. (The loss is small enough to forget.)


# %% solution="task6_bytes"
def pipeline_bytes(num_stages: int, num_micro_batches: int, activation_bytes: int) -> float:
    """Bytes that the busiest rank of a pipeline sends in a step."""
    ### BEGIN SOLUTION
    directions = min(num_stages - 1, 2)  # in the middle activations go on and gradients back
    return directions * num_micro_batches * activation_bytes
    ### END SOLUTION


def data_parallel_bytes(num_ranks: int, parameter_bytes: int) -> float:
    """Bytes that each rank sends in a ring all-reduce of the gradients."""
    ### BEGIN SOLUTION
    return 2 * (num_ranks - 1) / num_ranks * parameter_bytes
    ### END SOLUTION


# %% demo="see_bytes"
with demo("task 6"):
    # 7 billion parameters of 2 bytes; width 4096; 8 ranks; batches of 2,048-token sequences
    for sequences in (8, 64, 512, 4096):
        border = 2048 * 4096 * 2  # one sequence is one micro-batch
        gigabytes = pipeline_bytes(8, sequences, border) / 1e9
        ring = data_parallel_bytes(8, 14 * 10**9) / 1e9
        tell(f"{sequences:5d} sequences: pipeline {gigabytes:6.1f} GB, gradients {ring:.1f} GB")

# %% [markdown]
# Expected: the pipeline sends a hundredth for 8 sequences, and more than data parallelism from some
# 730 on. Gradients cost the same whatever the batch; activations grow with it.

# %% check="pipe_bytes"
check("pipe_bytes", (pipeline_bytes, data_parallel_bytes))

# %% [markdown]
# Bytes are not seconds. The next cell trains one model of four equal layers on four ranks of the
# emulated cluster: once under PyTorch's `DistributedDataParallel`, where each rank has all layers
# and a quarter of the samples, and once with your `train_step`, a layer per rank, under each of
# your schedules. Then it replays what they did on a fast network and on a slow one. The batch is
# the same, and so is the computing: 24 ms per rank.
#
# First with a pencil. A layer's gradients are 263 kB. Under DDP their all-reduce begins when the
# layer's backward pass (4 ms) is over, and the all-reduces come one after another.
#
# 1. All forwards take 8 ms. From which bandwidth down is DDP slower than GPipe, which needs about
#    34 ms on any network that is not very slow?
# 2. Twice as many samples, in twice as many micro-batches: which numbers of the table grow, and
#    which do not?

# %% demo="see_against" tags=["active-ipynb"]
# %%rank 0
# import dataclasses
#
# from minidist.beside import find
# from minidist.emulate.teach import run_traced
#
# SAMPLES, WIDE = 8, 256  # samples in a micro-batch; numbers in an activation of one sample
#
#
# class Kept:
#     """Bytes that autograd keeps for backward passes: now, and at most. Weights do not count."""
#
#     def __init__(self, model):
#         self.now = self.most = 0
#         self.weights = {w.data_ptr() for w in model.parameters()}
#
#     def keep(self, tensor):
#         return Held(self, tensor)
#
#
# class Held:
#     def __init__(self, kept, tensor):
#         self.kept, self.tensor = kept, tensor
#         self.num_bytes = 0 if tensor.data_ptr() in kept.weights else tensor.nbytes
#         kept.now += self.num_bytes
#         kept.most = max(kept.most, kept.now)
#
#     def __del__(self):
#         self.kept.now -= self.num_bytes
#
#
# def two_steps(model, step):
#     """Trains twice. Bytes of weights, gradients and AdamW's state; bytes kept at most."""
#     adam, kept = torch.optim.AdamW(model.parameters()), Kept(model)
#     with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda held: held.tensor):
#         for _ in range(2):
#             step(adam)
#     states = [s for state in adam.state.values() for s in state.values() if s.dim() > 0]
#     owned = [*model.parameters(), *(w.grad for w in model.parameters()), *states]
#     return sum(tensor.nbytes for tensor in owned), kept.most
#
#
# def charged_layer(number):
#     return emulate.Charged(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()), number)
#
#
# def with_ddp():
#     # A bucket for each layer, which the gradients live in; no copies of the first weights.
#     options = {"bucket_cap_mb": 0.25, "gradient_as_bucket_view": True, "init_sync": False}
#     model = nn.Sequential(*map(charged_layer, range(STAGES)))
#     replica = nn.parallel.DistributedDataParallel(model, **options)
#     x, y = torch.randn(2, MICRO * SAMPLES // STAGES, WIDE)
#
#     def step(adam):
#         adam.zero_grad()
#         nn.functional.mse_loss(replica(x), y).backward()
#         adam.step()
#
#     return two_steps(model, step)
#
#
# def with_pipeline(build, train):
#     rank = dist.get_rank()
#     batch = list(torch.randn(MICRO, SAMPLES, WIDE))
#     ends = batch if rank == 0 else None, batch if rank == STAGES - 1 else None
#     buffer = None if rank == 0 else lambda i: torch.empty(SAMPLES, WIDE)
#     stage, steps = charged_layer(rank), build(rank, STAGES, MICRO)
#     given = (steps, *ends, nn.functional.mse_loss, buffer)
#     return two_steps(stage, lambda adam: train(stage, adam, *given))
#
#
# def with_the_courses(executor, schedule, spec):
#     stage = charged_layer(dist.get_rank())
#     specs = [spec((SAMPLES, WIDE), torch.float32)] * STAGES
#     pipeline = executor(stage, schedule(STAGES, MICRO), nn.functional.mse_loss, specs=specs)
#     x, y = torch.randn(2, MICRO * SAMPLES, WIDE)
#
#     def step(adam):
#         adam.zero_grad()
#         pipeline.step(x, y)
#         adam.step()
#
#     return two_steps(stage, step)
#
#
# def replay(trace, bytes_per_s):
#     """kB that leave each rank's link in a step, and the milliseconds of the second step."""
#     link = emulate.Link(bandwidth_bytes_per_s=bytes_per_s, latency_s=2e-5)
#     network = dataclasses.replace(four_devices, intra_node=link, inter_node=link)
#     timeline, begins = emulate.simulate(trace, network), []
#     for events, times in zip(trace.events, timeline.event_times, strict=True):
#         worked = [span for e, span in zip(events, times, strict=True) if e.kind == "compute"]
#         begins.append(worked[len(worked) // 2][0])  # the first step is half of the work
#     sent = [timeline.bytes_per_link[f"device {r}"] / 2 / 1e3 for r in range(STAGES)]
#     return sent, 1e3 * (timeline.makespan_s - min(begins))
#
#
# def draw_against(axes):
#     speeds = [10 ** (k / 8) for k in range(8, 33)]
#     for name, (_, trace) in runs.items():
#         axes.plot(speeds, [replay(trace, 1e6 * speed)[1] for speed in speeds], label=name)
#     axes.axhline(24, linestyle="--", color="gray", linewidth=1)
#     axes.text(speeds[-1], 22, "computing alone", color="gray", ha="right", va="top")
#     axes.set(xscale="log", ylim=(0, 120), xlabel="network (MB/s)", ylabel="ms per step")
#     axes.legend()
#
#
# def listed(numbers):
#     return ", ".join(f"{number:.0f}" for number in numbers)
#
#
# with demo("tasks 2, 4, 5 and 6"):
#     border = pipeline_bytes(STAGES, MICRO, 4 * SAMPLES * WIDE)
#     ring = data_parallel_bytes(STAGES, STAGES * 4 * (WIDE * WIDE + WIDE))
#     # A replica takes a quarter of the batch at once: as much as two micro-batches.
#     double = emulate.ChargePlan((2e-3,) * STAGES, (4e-3,) * STAGES, b"practice")
#     runs = {"DDP": run_traced(with_ddp, STAGES, plan=double, deadline_s=150)}
#     for name, build in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
#         given = (with_pipeline, STAGES, build, train_step)
#         runs[name] = run_traced(*given, plan=costs, deadline_s=150)
#     parts = ("executor:PipelineExecutor", "schedule:one_f_one_b", "p2p:TensorSpec")
#     ours = [find(f"minidist.parallel.pipeline.{part}") for part in parts]
#     if all(ours):
#         given = (with_the_courses, STAGES, *ours)
#         runs["course's 1F1B"] = run_traced(*given, plan=costs, deadline_s=150)
#     head = "memory per rank, kB           sent per step, kB                ms per step"
#     print(14 * " " + head)
#     head = "owned   kept, by rank         by rank                formula  1 GB/s  20 MB/s"
#     print(14 * " " + head)
#     for name, (memory, trace) in runs.items():
#         owned, kept = zip(*memory, strict=True)
#         (sent, fast_ms), (_, slow_ms) = (replay(trace, speed) for speed in (1e9, 2e7))
#         formula = (ring if name == "DDP" else border) / 1e3
#         memory_columns = f"{max(owned) / 1e3:5.0f}   {listed(k / 1e3 for k in kept):20}"
#         sent_columns = f"{listed(sent):22} {formula:6.0f}"
#         print(f"{name:13} {memory_columns}  {sent_columns} {fast_ms:8.1f} {slow_ms:8.1f}")
#     show(draw_against, width=8, height=2.8)

# %% [markdown]
# Expected:
#
# ```
#               memory per rank, kB           sent per step, kB                ms per step
#               owned   kept, by rank         by rank                formula  1 GB/s  20 MB/s
# DDP            4211   164, 164, 164, 164    1579, 1579, 1579, 1579   1579     24.5     91.4
# GPipe          1053   131, 131, 131, 262    66, 131, 131, 66          131     33.2     35.6
# 1F1B           1053   66, 49, 33, 33        66, 131, 131, 66          131     33.5     39.9
# course's 1F1B  1053   66, 49, 33, 33        66, 131, 131, 66          131     33.5     39.9
# ```
#
# (The course's is handed out when this lab is over.)
#
# On the fast network DDP hides nearly all that it sends behind its backward pass, and the pipelines
# pay for their bubble. On the slow one DDP waits for its gradients; the pipelines hardly notice. A
# rank of a pipeline owns a quarter, on any network: often that alone decides. (The last rank's loss
# keeps something, too.)
#
# <details><summary>Answer 1</summary>
#
# A ring sends 2 · 3/4 · 263 kB = 395 kB for a layer, in t = 395 kB / bandwidth. Where t is longer
# than the 4 ms of the next layer's backward pass, the link is the bottleneck from the end of the
# first backward pass on: 8 + 4 + 4 t = 34 ms, so t = 5.5 ms and 72 MB/s. The figure says the same.
# </details>
#
# <details><summary>Answer 2</summary>
#
# What DDP keeps and what it computes; what the pipelines send, and what GPipe keeps. Gradients stay
# as large as they were, and 1F1B keeps as much as before. The pipelines' steps grow by less than
# twice, 3 · (16 + 3) = 57 ms and not 66, since the bubble stays. DDP has 8 ms to hide each layer's
# all-reduce now, so it loses to GPipe only below some 50 MB/s.
# </details>

# %% [markdown]
# ## Reflect
#
# Two points each, beyond the hundred, read by a person.

# %% [markdown] reflect="reflect_1"
# **1. 1F1B and GPipe have the same bubble. Why does nearly everybody use 1F1B, and which rank would
# run out of memory first with it?**
#
# <!-- BEGIN SOLUTION -->
# The bubble shrinks with M. GPipe keeps the activations of all M micro-batches, so memory limits M.
# 1F1B keeps P - rank of them, whatever M is, so M can grow until the batch is as large as the
# optimiser can use. Rank 0 keeps most, P micro-batches. The first stage also has the embedding; so
# it gets fewer layers in practice, or its activations are recomputed.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. Somebody forgets `requires_grad_()` on the received activation. Training runs on three ranks,
# and the loss falls, if slowly. What has happened, and how would you notice?**
#
# <!-- BEGIN SOLUTION -->
# Depending on the code, x.grad is None (and sending it raises), or zeros are sent. In the second
# case only the last stage learns; the others keep their random weights, and a random network with a
# trained last stage still lowers the loss. One notices by looking at the norm of each stage's
# gradients, or by comparing them once with a single process, as the checks do.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. Your stages have batch norm. Do pipeline and single process still compute the same?**
#
# <!-- BEGIN SOLUTION -->
# No. Batch norm takes mean and variance over what it is given, which now is a micro-batch. Its
# output and its running statistics differ from those of the whole batch, and with M. Layer norm
# looks at one sample (or token) alone and does not mind. It is the same with gradient accumulation.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - you can write 1F1B for rank 1 of 4 with 5 micro-batches without looking;
# - you can say for each tensor at a border who keeps it, and until when;
# - you know of what a quoted bubble is a share;
# - you can say why two neighbours that both wait for their send wait for ever.
#
# ## Further, if you like
#
# - **NCCL.** It runs the messages between two ranks in the order in which they were issued. Under
#   1F1B one of the ranks sends first while the other one receives first; large messages may then
#   block each other. Put the send and the receive that meet into one `dist.batch_isend_irecv`, or
#   give each direction a process group of its own.
# - **Interleaving.** Let each rank have two stages, $r$ and $r + P$. What has to change in
#   `run_pipeline`? The bubble is halved; what doubles?
# - **Zero bubble.** Split the backward pass: the gradient of the input is wanted by the rank
#   before, the gradients of the weights by nobody until the end of the step.
#
# ## Read next
#
# - Y. Huang et al., *GPipe: efficient training of giant neural networks using pipeline
#   parallelism*, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965).
# - D. Narayanan et al., *Memory-efficient pipeline-parallel DNN training*, [arXiv
#   2006.09503](https://arxiv.org/abs/2006.09503). 1F1B with a flush, as you have written it.
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using
#   Megatron-LM*, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473). Interleaving, and the
#   bubble as a ratio.
# - P. Qi et al., *Zero bubble pipeline parallelism*, [arXiv
#   2401.10241](https://arxiv.org/abs/2401.10241).
# - In this repository: lecture 7, and `lib/minidist/parallel/pipeline/`.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
tell("the bonus is done")
