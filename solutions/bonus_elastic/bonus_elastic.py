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
# # Bonus · Elastic training: workers join and leave
#
# A cheap GPU is one that somebody else may want back in two minutes. A large job loses a node every
# few hours. In both cases the question is the same: can training go on with the ranks that are
# left, and take in others when they come, so that nobody can tell from the loss curve? It can, but
# torchrun does only its part: it ends all workers and starts new ones, perhaps more, perhaps fewer.
# Everything else is in the script, and you write all of it here.
#
# **When you have finished, you can**
#
# - cut a global batch for any number of ranks, and weight gradients so that the update and the
#   learning rate mean the same as before (task 1);
# - go on in the middle of an epoch with another number of ranks, no sample lost or doubled (task
#   2);
# - save so that a death does no harm, and load so that all ranks begin at the same step even when
#   they do not see the same files (task 3);
# - cut an optimiser's sharded state anew, from M ranks to N (task 4);
# - let all ranks stop at the same step when one of them is told to (task 5);
# - put it together, kill workers, change their number, and show that the curve is the one of an
#   undisturbed run (task 6).
#
# Plan 3 hours. Have lecture 10 behind you; it shows all of this at work, and this is where you do
# it. It serves these points of its summary: *whole or not at all; everything that decides*, *a hang
# is a collective that somebody did not call*, *keep the global batch when the number of ranks
# changes*. Nothing here needs a GPU or a second machine.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | all |
# |---|---|---|---|---|---|---|---|
# | points | 16 | 19 | 23 | 13 | 9 | 20 | 100 |
#
# Cells run on **two** ranks. Your grade comes from the same checks with other data on **3**. Every
# task stands alone: what a check needs from another task, it brings along. What is going to be
# killed never runs on the notebook's own ranks.

# %% given="imports"
import contextlib
import copy
import io
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder import check, is_not_started
from minidist.device import choose_backend, choose_device
from minidist.launch import run
from minidist.processes.tree import descendants

# %% tags=["script-only"]
# isort: split
import jupytext

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"
if choose_device().type == "cuda":
    torch.cuda.set_device(choose_device())
if not dist.is_initialized():
    dist.init_process_group(choose_backend())


def tell(*words: object) -> None:
    """Prints, on rank 0 only."""
    if IS_RANK_ZERO:
        print(*words)


@contextlib.contextmanager
def demo(needs: str) -> Iterator[None]:
    """Runs a demonstration; says so if what it needs has not been written yet."""
    try:
        yield
    except Exception as error:
        if not is_not_started(error):
            raise
        tell(f"Nothing to see yet: do {needs} first.")


def show(draw: Callable, columns: int = 1, width: float = 7.5, height: float = 3.0) -> None:
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


# %% tags=["script-only"]
# Only when this file runs as a script under torchrun: the notebook's %%writefile cells are comments
# here, so rank 0 writes these files now, into a new folder, and all ranks work there.
LAB_FILE = Path(__file__).resolve()
where = [tempfile.mkdtemp(prefix="bonus_elastic_")] if IS_RANK_ZERO else [None]
dist.broadcast_object_list(where, src=0)
os.chdir(where[0])
if IS_RANK_ZERO:
    for cell in jupytext.read(LAB_FILE).cells:
        lines = [line for line in cell.source.splitlines() if not line.startswith("%%rank ")]
        for number, line in enumerate(lines):
            if cell.cell_type == "code" and line.startswith("%%writefile "):
                Path(line.split()[1]).write_text("\n".join(lines[number + 1 :]) + "\n")
dist.barrier()

# %% [markdown]
# ## The idea in one picture
#
# ```
#  ranks    2                       1             3
#        ┌──────┬──────┬──────┐  ┌──────┐  ┌──────┬──────┐
#  batch │ 0  1 │ 0  1 │ 0  ✗ │  │  0   │  │0 1 2 │0 1 2 │    always the same samples,
#        └──────┴──────┴──────┘  └──────┘  └──────┴──────┘    dealt out anew
#  step     1      2      3         3         4      5
#                  │       rank 1     ▲ │       ▲
#                  ▼       is killed  │ ▼       │
#              checkpoint ────────────┘ checkpoint
#              of step 2                of step 3
# ```
#
# A step of training is a function of the parameters, the optimiser's state and a **global batch**.
# How many ranks work on that batch is nobody's business but theirs. So fix the global batch, let it
# not depend on the number of ranks, and have all state in the checkpoint. Then a restart changes
# nothing but speed, and the order in which numbers are added up.
#
# The next cell computes what happens otherwise. Four ranks train a small model, two of them leave
# after 60 steps, and come back after 120. The grey curve has the same global batch all the time.
# In red each rank keeps *its* batch, as a script without further thought does it: the global
# batch halves, the gradient gets noisier, and the learning rate is too high for it. In blue the
# restarts forget the optimiser's state.


# %% demo="see_idea"
def train_alone(batch_of: Callable[[int], int], forgets_at: tuple[int, ...] = ()) -> list[float]:
    """Distances from the solution; `batch_of(step)` is the size of the global batch."""
    numbers = np.random.default_rng(0)
    right = numbers.normal(size=20)
    weight, momentum, distances = np.zeros(20), np.zeros(20), []
    for step in range(180):
        if step in forgets_at:
            momentum = np.zeros(20)
        x = numbers.normal(size=(64, 20))[: batch_of(step)]
        errors = x @ (weight - right) + numbers.normal(size=64)[: batch_of(step)]
        momentum = 0.97 * momentum + x.T @ errors / len(x)
        weight = weight - 0.004 * momentum
        distances.append(float(np.sum((weight - right) ** 2)))
    return distances


def draw_idea(ax, curves):
    for label, (distances, colour, width) in curves.items():
        ax.plot(distances, color=colour, linewidth=width, label=label)
    ax.axvspan(60, 120, color="0.93")
    ax.text(90, ax.get_ylim()[1] * 0.5, "two ranks", ha="center")
    ax.set(xlabel="step", ylabel="distance from the solution", yscale="log")
    ax.legend(loc="lower left", fontsize=8)


halved = train_alone(lambda step: 32 if 60 <= step < 120 else 64)
curves = {
    "the same global batch": (train_alone(lambda step: 64), "0.6", 4.0),
    "each rank keeps its batch": (halved, "C3", 1.2),
    "momentum is forgotten": (train_alone(lambda step: 64, (60, 120)), "C0", 1.2),
}
show(partial(draw_idea, curves=curves))
ends = {label: round(distances[119], 3) for label, (distances, _, _) in curves.items()}
tell("after 120 steps:", ends)

# %% [markdown]
# ## Task 1 · The same batch at any size
#
# **Why.** The learning rate belongs to a global batch of, say, 512 samples. With 8 ranks a share is
# 64, with 7 it is 73 or 74. Nothing forces shares to be equal, but then the plain mean over ranks
# is wrong: a sample on a rank with 73 would count for more than one on a rank with 74. At the end
# of an epoch there may even be fewer samples than ranks.
#
# **Write `share_of_batch(size, world_size, rank)`.**
#
# - A `slice` of the places 0 … size-1: rank 0 takes the first ones, rank 1 the next, and so on.
# - All are taken, none twice. Shares differ by one at most. Which ranks take the larger ones is up
#   to you.
# - `size` may be smaller than `world_size`: then some shares are empty.
#
# <details><summary>Hint 1: how large</summary>
#
# `divmod(size, world_size)`: everybody gets the quotient, and as many ranks as the remainder says
# get one more.
# </details>
#
# <details><summary>Hint 2: where it begins</summary>
#
# Before rank r are r shares, and those of them that have one more: `min(rank, remainder)`.
# </details>


# %% solution="task1_share"
def share_of_batch(size: int, world_size: int, rank: int) -> slice:
    """Which places of a batch of `size` samples a rank takes."""
    ### BEGIN SOLUTION
    small, extra = divmod(size, world_size)
    begin = rank * small + min(rank, extra)
    return slice(begin, begin + small + (rank < extra))
    ### END SOLUTION


# %% demo="see_share"
with demo("the first half of task 1"):
    for ranks in (3, 4):
        tell(
            "10 samples on",
            ranks,
            "ranks:",
            [list(range(10))[share_of_batch(10, ranks, r)] for r in range(ranks)],
        )

# %% [markdown]
# Expected, up to who has one more: `[[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]` and
# `[[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]`.

# %% check="elastic_share"
check("elastic_share", share_of_batch)

# %% [markdown]
# A loss is a mean over samples, so rank r has the mean gradient $g_r$ of its own $n_r$ samples.
# Of all $n = \sum_r n_r$ samples together it is
#
# $$g = \sum_r \frac{n_r}{n}\, g_r .$$
#
# With equal shares this is the mean over ranks, and DDP computes no other.
#
# **Write `combine(parameters, loss, num_own, num_all)`**, which all ranks call after backward.
#
# - `parameters` is what `model.parameters()` gives: an iterator. `loss` is a `float`, this rank's
#   mean loss over its `num_own` samples. The global batch has `num_all` samples.
# - Afterwards every `p.grad` is the gradient of the mean loss over the global batch, on all ranks.
# - Return that mean loss, a `float` or a tensor of one number, on all ranks.
# - The model may be float64, as that of task 6 is: then nothing is rounded to float32 on its way.
# - A rank without samples (`num_own` is 0, `loss` is 0.0) has run no backward, so its gradients are
#   `None`. It makes the same calls as the others, or they hang, and it gets the same gradients,
#   or its model goes its own way.
#
# <details><summary>Hint 1: an iterator</summary>
#
# It can be gone through once. `parameters = list(parameters)` first.
# </details>
#
# <details><summary>Hint 2: no gradient</summary>
#
# Zeros in its place: `torch.zeros_like(p)`. They are multiplied by $n_r / n = 0$ anyway.
# </details>
#
# <details><summary>Hint 3: one collective</summary>
#
# You may all-reduce one parameter after the other. A single flat tensor with all gradients and, at
# its end, the loss is quicker: `torch.cat`, `dist.all_reduce`, `split`.
# </details>


# %% solution="task1_combine"
def combine(parameters: Iterable, loss: float, num_own: int, num_all: int) -> float:
    """Gradients and loss of the global batch, from each rank's means over its own samples."""
    ### BEGIN SOLUTION
    parameters = list(parameters)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(grad.flatten() for grad in grads), grads[0].new_tensor([loss])])
    flat *= num_own / num_all
    dist.all_reduce(flat)
    *pieces, mean = flat.split([*(p.numel() for p in parameters), 1])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = piece.view_as(p).clone()
    return mean.item()
    ### END SOLUTION


# %% demo="see_combine"
with demo("task 1"):
    weight = nn.Parameter(torch.zeros(2, device=choose_device()))
    if dist.get_rank() == 0:  # three samples here; all others have none
        (weight * torch.tensor([1.0, 2.0], device=weight.device)).sum().backward()
    mean = combine(
        iter([weight]), 5.0 if dist.get_rank() == 0 else 0.0, 3 * (dist.get_rank() == 0), 3
    )
    tell("on all ranks:", weight.grad.tolist(), mean)

# %% [markdown]
# Expected: `[1.0, 2.0] 5.0`.

# %% check="elastic_gradient"
check("elastic_gradient", combine)

# %% check="elastic_idle"
check("elastic_idle", combine)

# %% [markdown]
# ## Task 2 · An epoch that goes on
#
# **Why.** torch's `DistributedSampler` gives rank r every W-th sample of the epoch. Stop it in the
# middle with W = 4, start it again with W = 3, and "skip the first 100 of each rank" skips 300
# samples of the 400 that were seen. 100 come twice (from 3 to 4 ranks, 100 do not come at all), and
# nothing looks wrong.
#
# The way out: the *epoch* has an order, which depends on the seed and the number of the epoch. One
# number says how far all ranks together have come. Who takes what of a batch is decided at the
# last moment.
#
# **Write the class `ElasticSampler`.**
#
# `ElasticSampler(num_samples, global_batch, seed=0, share=share_of_batch)`
#
# - Every epoch deals out the indices 0 … num_samples-1, each once, shuffled, in batches of
#   `global_batch`. What does not fill a batch is the last batch of the epoch.
# - The order depends on seed and epoch only: not on the number of ranks, nor on the process's
#   random numbers (torch's, NumPy's, Python's), which it does not change either.
# - `share(size, world_size, rank)` is task 1's function; checks bring another one.
#
# `next_batch(rank, world_size)` returns `(own, size)`
#
# - `size` is the number of samples in the next global batch, `own` the list of indices (`int`s) of
#   those that `share` gives to this rank.
# - Every rank has a sampler and calls this once per step. After the last batch of an epoch comes
#   the first of the next.
#
# `state_dict()` and `load_state_dict(state)`
#
# - Where it stands, as a dict of numbers; the same on all ranks, so that rank 0's is enough. It is
#   loaded into a new sampler, made with the same arguments, perhaps among other ranks. The dict
#   stays as it was, also when the sampler goes on.
# - It works at any place, also exactly between two epochs.
#
# <details><summary>Hint 1: two numbers</summary>
#
# The epoch, and how many samples of it all ranks *together* have taken.
# </details>
#
# <details><summary>Hint 2: an order of one's own</summary>
#
# `torch.Generator().manual_seed(…)` is independent of everything else, and `torch.randperm` takes a
# `generator`. Make one number out of two, such as `1000 * seed + epoch`.
# </details>
#
# <details><summary>Hint 3: when does an epoch end?</summary>
#
# Look at the beginning of `next_batch`: if all samples are taken, begin the next epoch.
# </details>


# %% solution="task2_sampler"
class ElasticSampler:
    """Deals out global batches to any number of ranks."""

    def __init__(
        self, num_samples: int, global_batch: int, seed: int = 0, share: Callable = share_of_batch
    ) -> None:
        ### BEGIN SOLUTION
        self.num_samples, self.global_batch = num_samples, global_batch
        self.seed, self.share = seed, share
        self.epoch, self.position = 0, 0  # samples of this epoch that all ranks have taken

    def order(self) -> list[int]:
        """All indices, as this epoch deals them out."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=generator).tolist()
        ### END SOLUTION

    def next_batch(self, rank: int, world_size: int) -> tuple[list[int], int]:
        """This rank's indices of the next global batch, and the size of that batch."""
        ### BEGIN SOLUTION
        if self.position == self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        batch = self.order()[self.position :][: self.global_batch]
        self.position += len(batch)
        return batch[self.share(len(batch), world_size, rank)], len(batch)
        ### END SOLUTION

    def state_dict(self) -> dict:
        """Where it stands."""
        ### BEGIN SOLUTION
        return {"epoch": self.epoch, "position": self.position}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        """Goes on from there."""
        ### BEGIN SOLUTION
        self.epoch, self.position = state["epoch"], state["position"]
        ### END SOLUTION


# %% demo="see_sampler"
def who_took_what(changes: dict[int, int]) -> np.ndarray:
    """Rows are steps, columns samples: which rank took it, of how many; -1 for nobody."""
    table, state, ranks = np.full((6, 24), -1), None, 1
    for step in range(6):
        ranks = changes.get(step, ranks)
        samplers = [ElasticSampler(24, 4, seed=5) for _ in range(ranks)]
        for player, sampler in enumerate(samplers):
            if state is not None:
                sampler.load_state_dict(state)
            own, _ = sampler.next_batch(player, ranks)
            table[step, own] = player
        state = samplers[0].state_dict()
    return table


def draw_table(ax, table, changes):
    ax.imshow(np.where(table < 0, np.nan, table), cmap="viridis", aspect="auto", vmin=0, vmax=3)
    for step, taker in zip(*np.nonzero(table >= 0), strict=True):
        ax.text(taker, step, table[step, taker], ha="center", va="center", color="white")
    for step, ranks in changes.items():
        ax.axhline(step - 0.5, color="0.5", linewidth=1)
        ax.text(24, step, f"{ranks} ranks", va="center")
    ax.set(xlabel="sample", ylabel="step", yticks=range(6), xticks=range(0, 24, 4))


with demo("task 2"):
    changes = {0: 2, 2: 1, 3: 4}
    table = who_took_what(changes)
    show(partial(draw_table, table=table, changes=changes))
    times = {int(count) for count in (table >= 0).sum(axis=0)}
    tell("how often each sample of the epoch was taken:", times)

# %% [markdown]
# Expected: `{1}`, each of the 24 once, though the number of ranks went from 2 to 1 to 4.

# %% check="elastic_epoch"
check("elastic_epoch", ElasticSampler)

# %% check="elastic_order"
check("elastic_order", ElasticSampler)

# %% check="elastic_resize"
check("elastic_resize", ElasticSampler)

# %% [markdown]
# ## Task 3 · One state for all
#
# **Why.** A worker may die at any moment, and at some moments it is writing. And after a restart
# the ranks may not see the same files: a file system's cache on another node is a second behind, a
# node has only its own disk, one file cannot be read here. If rank 0 then loads step 40 and rank 1
# step 30, all shapes fit, all collectives meet, and two different models average their gradients.
#
# **Write `save_together(folder, step, state, keep=3)`**, which all ranks call, with the same step.
#
# - The checkpoint of step 12 is `FOLDER/step-00000012.pt`, eight digits. Rank 0 writes it and
#   leaves no other file, and nobody else writes anything. Make the folder if it is not there.
# - A file of that name is always whole, whenever the process is killed in a save: in the middle
#   of a write, before any call that opens, renames or deletes a file, or after any that has changed
#   one. If there was a file of that name before, then at any time there is the old one or the new
#   one. What is not whole has a name of another form: no `step-….pt`. What an earlier death has
#   left does no harm.
# - Write nothing outside of `folder`: from another disk, a file that is moved gets copied.
# - Then, when the new file has its name, the `keep` highest steps are left and older ones deleted.
#   Other files stay.
# - On no rank does it return before the new file is there.
#
# **Write `load_together(folder)`**, which all ranks call.
#
# - On all ranks `(step, state)` with the same step: the highest one whose file is whole on **all**
#   ranks. `None` on all ranks if there is none, also at a job's first start: then there is no
#   folder. Other files than checkpoints may be in it.
# - Files may be missing on some ranks, or cut off, or empty. Tensors come to the CPU.
# - `state` is a dict of tensors, numbers, text, `None`, lists, tuples and dicts.
#
# <details><summary>Hint 1: whole or not at all</summary>
#
# Write to another name in the same folder, then `os.replace(temporary, path)`: within one file
# system a name changes at once.
# </details>
#
# <details><summary>Hint 2: which step?</summary>
#
# The lowest of everybody's newest is wrong: rank 0 has 10, 20 and 30, rank 1 has 10, 20 and 40. The
# lowest newest is 30, and rank 1 has no 30. Exchange *sets* of steps (`dist.all_gather_object`) and
# intersect them.
# </details>
#
# <details><summary>Hint 3: is it whole?</summary>
#
# `torch.load` raises if half of a file is missing. Try the highest common step on all ranks, and
# ask all whether it went well: `dist.all_reduce(flag, op=dist.ReduceOp.MIN)` with a flag on
# `choose_device()`. If not, the next one, again on all ranks.
# </details>


# %% solution="task3_saving"
def save_together(folder: str | Path, step: int, state: dict, keep: int = 3) -> None:
    """Rank 0 writes the checkpoint of a step; all wait for it."""
    ### BEGIN SOLUTION
    if dist.get_rank() == 0:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{step:08d}.pt"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the data first, then the name
        os.replace(temporary, path)
        for old in sorted(folder.glob("step-*.pt"))[:-keep]:
            old.unlink()
    dist.barrier()
    ### END SOLUTION


def load_together(folder: str | Path) -> tuple[int, dict] | None:
    """(step, state) of the newest checkpoint that all ranks can read; None without one."""
    ### BEGIN SOLUTION
    files = {int(path.stem.removeprefix("step-")): path for path in Path(folder).glob("step-*.pt")}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, set(files))
    for step in sorted(set.intersection(*everyone), reverse=True):
        try:
            state = torch.load(files[step], map_location="cpu", weights_only=True)
        except Exception:  # whatever is wrong with the file
            state = None
        whole = torch.tensor(float(state is not None), device=choose_device())
        dist.all_reduce(whole, op=dist.ReduceOp.MIN)
        if whole.item():
            return step, state
    return None
    ### END SOLUTION


# %% demo="see_saving"
with demo("task 3"), tempfile.TemporaryDirectory() as own:
    shared = [own]
    dist.broadcast_object_list(shared, src=0)
    for step in (10, 20, 30):
        save_together(shared[0], step, {"value": step})
    for path in Path(shared[0]).glob("*.pt"):  # each rank gets a folder of its own
        if dist.get_rank() != 0 and path.stem != "step-00000030":
            shutil.copy(path, own)
    tell("rank 0 has", sorted(path.name for path in Path(own).iterdir()))
    print(f"all load {load_together(own)}")  # one write, so that ranks do not mix their words
    dist.barrier()

# %% [markdown]
# Expected: three files, and `(20, {'value': 20})` on every rank: the others do not have step 30.
# (With one rank it is step 30.)

# %% check="elastic_atomic"
check("elastic_atomic", save_together)

# %% check="elastic_writer"
check("elastic_writer", save_together)

# %% check="elastic_keep"
check("elastic_keep", save_together)

# %% check="elastic_agree"
check("elastic_agree", (save_together, load_together))

# %% check="elastic_damaged"
check("elastic_damaged", (save_together, load_together))

# %% [markdown]
# ## Task 4 · From M ranks to N
#
# **Why.** State that is the same everywhere is easy: load it. With ZeRO or FSDP each rank has a
# part of its own. Say all parameters lie in one flat vector, padded so that M divides it, and rank
# r keeps AdamW's moments of the r-th of M equal parts. N ranks need other cuts and other padding:
#
# ```
#   7 numbers on 2 ranks    [a b c d][e f g ·]         · is padding: what stands there is no number
#          on 3 ranks       [a b c][d e f][g · ·]      of yours, and not always a zero
# ```
#
# **Write `reshard(states, numel, num_ranks)`.**
#
# - `states` has one dict per old rank, in the order of ranks, such as AdamW keeps for its shard:
#   `{"step": tensor(5.), "exp_avg": tensor([…]), "exp_avg_sq": tensor([…])}`. 1-D tensors are
#   parts, of any name; all else is the same on all ranks, and every new rank gets it.
# - `numel` is the number of parameters without padding.
# - Return one such dict per new rank. Parts are equally long, as short as can be; the new
#   padding is zeros. dtypes stay.
# - Each part has memory of its own (`torch.save` writes *all* of what a view looks at). The old
#   states stay as they are.
#
# <details><summary>Hint</summary>
#
# For each name: `torch.cat` of all old parts, `[:numel]`, copy that into a vector of zeros of
# `num_ranks` times the new length (`-(-numel // num_ranks)` rounds up), `split`, `clone`.
# </details>


# %% solution="task4_reshard"
def reshard(states: list[dict], numel: int, num_ranks: int) -> list[dict]:
    """The states of `num_ranks` ranks, from those of an old job."""
    ### BEGIN SOLUTION
    size = -(-numel // num_ranks)
    fresh: list[dict] = [{} for _ in range(num_ranks)]
    for name, value in states[0].items():
        parts = [copy.deepcopy(value) for _ in fresh]
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            padded = value.new_zeros(num_ranks * size)
            padded[:numel] = torch.cat([state[name] for state in states])[:numel]
            parts = [part.clone() for part in padded.split(size)]
        for state, part in zip(fresh, parts, strict=True):
            state[name] = part
    return fresh
    ### END SOLUTION


# %% demo="see_reshard"
with demo("task 4"):
    old = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6, 7, 99])]
    for state in reshard([{"step": 9, "exp_avg": part} for part in old], 7, 3):
        tell(state)

# %% [markdown]
# Expected: `[1, 2, 3]`, `[4, 5, 6]` and `[7, 0, 0]`, each with step 9. The 99 was padding.

# %% check="elastic_reshard"
check("elastic_reshard", reshard)

# %% check="elastic_own"
check("elastic_own", reshard)

# %% check="elastic_adam"
check("elastic_adam", reshard)

# %% [markdown]
# ## Task 5 · Stop together
#
# **Why.** Before a machine is taken away, its processes get a SIGTERM and some time: 30 s from
# Slurm by default, 30 s to two minutes from a cloud. Time enough to save, if all do it at the same
# step. But the signal comes to *one* machine, between any two lines of Python. A rank that leaves
# at once lets the others hang. One that saves at once calls a collective that the others do not.
#
# So the handler only makes a note, and after each step all ranks ask each other.
#
# **Write the class `Preemption`**, for `with Preemption() as preemption:`.
#
# - Inside the `with`, a SIGTERM ends nothing and raises nothing, however often it comes.
# - `requested()`, which all ranks call after each step, is `False` on all ranks until one of them
#   has got the signal, and then `True` on all ranks, also when it is called again.
# - After the `with`, SIGTERM has the handler that it had before, also when an error came through,
#   and that error goes on.
# - Each `with` begins anew: what an earlier one was told is over.
#
# <details><summary>Hint 1: handlers</summary>
#
# `signal.signal(signal.SIGTERM, self.note)` returns the handler that was there before. A handler is
# called with two arguments, the number of the signal and a frame.
# </details>
#
# <details><summary>Hint 2: agree</summary>
#
# An all-reduce with `dist.ReduceOp.MAX` of a flag on `choose_device()`. `requested` returns a
# `bool`, no tensor.
# </details>


# %% solution="task5_preemption"
class Preemption:
    """Notices SIGTERM, and lets all ranks know at the same step."""

    def __enter__(self) -> "Preemption":
        ### BEGIN SOLUTION
        self.told = False
        self.before = signal.signal(signal.SIGTERM, self.note)
        return self

    def note(self, number: int, frame: object) -> None:
        """The handler: nothing but a note, for it may run between any two lines."""
        self.told = True
        ### END SOLUTION

    def __exit__(self, *error: object) -> None:
        ### BEGIN SOLUTION
        signal.signal(signal.SIGTERM, self.before)
        ### END SOLUTION

    def requested(self) -> bool:
        """Has any rank been told to stop? The same answer on all ranks."""
        ### BEGIN SOLUTION
        flag = torch.tensor(float(self.told), device=choose_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
        ### END SOLUTION


# %% demo="see_preemption"
def nobody(number: int, frame: object) -> None:
    """Below yours, in case yours is not there yet: this notebook's ranks should live."""


with demo("task 5"):
    before = signal.signal(signal.SIGTERM, nobody)
    answers = []
    try:
        with Preemption() as preemption:
            for step in range(5):
                if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                answers.append(preemption.requested())
    finally:
        signal.signal(signal.SIGTERM, before)
    print(answers)

# %% [markdown]
# Expected, on every rank: `[False, False, False, True, True]`. Only the last rank got the signal.

# %% check="elastic_stop"
check("elastic_stop", Preemption)

# %% check="elastic_handler"
check("elastic_handler", Preemption)

# %% [markdown]
# ## Task 6 · The whole script
#
# Now a script that torchrun may kill and start at any time, with any number of ranks. It imports
# what you have written from `elastic_parts.py`, which a later cell makes. (The checks put parts of
# their own there, which keep an eye on you.)
#
# **Write the rest of `main()` in `train_elastic.py`.** Arguments and `make_training` are there.
#
# - Join the process group: `dist.init_process_group(choose_backend())`, this rank on
#   `choose_device()`. Make an `ElasticSampler` for the samples in `x`, with `--batch-size` and
#   `--seed`.
# - `load_together(args.checkpoints)`. If there is a state, go on from it: model, optimizer,
#   sampler, and the losses so far.
# - A step: `next_batch`, mean squared error over this rank's samples (if it has any), backward,
#   `combine`, one step of the optimizer. The loss that counts is what `combine` returns. (The
#   checks' own returns a `float`.)
# - Every `--every` steps, and after the last one, `save_together`. Like `load_together` and
#   `requested` it is for all ranks.
# - After every step ask `preemption.requested()`. If it says so, save this step, **once**, and
#   leave the loop: the script ends well, without `--out`.
# - When all `--steps` are done, rank 0 writes `--out`: the trained `p0 … p3`, and `losses` with one
#   number per step, those of earlier runs included. An earlier run may have done, and saved, all
#   steps, and died before it wrote.
# - Do not catch what a collective raises when a rank has died. Let the process end; it will be
#   started anew.
#
# <details><summary>Hint 1: how many steps are done?</summary>
#
# As many as there are losses.
# </details>
#
# <details><summary>Hint 2: a state</summary>
#
# A dict with four entries: three `state_dict()`s and the list of losses.
# </details>
#
# <details><summary>Hint 3: a rank without samples</summary>
#
# The mean over no samples is nan. Skip forward and backward, with a loss of 0.0; skip nothing else.
# </details>
#
# <details><summary>Hint 4: saved once</summary>
#
# One `if` with three conditions: told to stop, a multiple of `--every`, or the last step.
# </details>

# %% solution="task6_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_elastic.py
# """Trains a small regression network on as many ranks as there are, from the newest checkpoint."""
#
# import argparse
#
# import numpy as np
# import torch
# import torch.distributed as dist
# from elastic_parts import ElasticSampler, Preemption, combine, load_together, save_together
# from torch import nn
#
# from minidist.device import choose_backend, choose_device
#
#
# def make_training(data, lr, device):
#     """Model and optimizer as they are before the first step, in float64."""
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = model.to(device)
#     return model, torch.optim.AdamW(model.parameters(), lr=lr)
#
#
# def main():
#     parser = argparse.ArgumentParser()
#     parser.add_argument("--data", required=True)  # .npz with x, y and p0 … p3
#     parser.add_argument("--out", required=True)  # .npz for the trained p0 … p3 and all losses
#     parser.add_argument("--checkpoints", required=True)  # a folder that all ranks see
#     parser.add_argument("--steps", type=int, required=True)  # in all, earlier runs included
#     parser.add_argument("--every", type=int, required=True)  # steps between checkpoints
#     parser.add_argument("--batch-size", type=int, required=True)  # of all ranks together
#     parser.add_argument("--lr", type=float, required=True)
#     parser.add_argument("--seed", type=int, required=True)  # of the sampler
#     args = parser.parse_args()
#     data = np.load(args.data)
#     device = choose_device()
#     x, y = (torch.from_numpy(data[name]).double().to(device) for name in "xy")
#     model, optimizer = make_training(data, args.lr, device)
#     ### BEGIN SOLUTION
#     if device.type == "cuda":
#         torch.cuda.set_device(device)
#     dist.init_process_group(choose_backend())
#     rank, world_size = dist.get_rank(), dist.get_world_size()
#     sampler = ElasticSampler(len(x), args.batch_size, seed=args.seed)
#     losses = []
#
#     # Resume.
#     found = load_together(args.checkpoints)
#     if found is not None:
#         _, state = found
#         model.load_state_dict(state["model"])
#         optimizer.load_state_dict(state["optimizer"])
#         sampler.load_state_dict(state["sampler"])
#         losses = state["losses"]
#
#     # Train and save.
#     with Preemption() as preemption:
#         stop = False
#         while len(losses) < args.steps and not stop:
#             own, size = sampler.next_batch(rank, world_size)
#             optimizer.zero_grad()
#             loss = 0.0
#             if own:
#                 mean = nn.functional.mse_loss(model(x[own]), y[own])
#                 mean.backward()
#                 loss = mean.item()
#             losses.append(combine(model.parameters(), loss, len(own), size))
#             optimizer.step()
#
#             stop = preemption.requested()
#             done = len(losses)
#             if stop or done % args.every == 0 or done == args.steps:
#                 state = {
#                     "model": model.state_dict(),
#                     "optimizer": optimizer.state_dict(),
#                     "sampler": sampler.state_dict(),
#                     "losses": losses,
#                 }
#                 save_together(args.checkpoints, done, state)
#
#     # Write.
#     if rank == 0 and len(losses) == args.steps:
#         params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#         np.savez(args.out, losses=np.array(losses), **params)
#     dist.barrier()  # nobody leaves before the file is there
#     dist.destroy_process_group()
#     ### END SOLUTION
#
#
# if __name__ == "__main__":
#     main()

# %% [markdown]
# The next cell puts your functions into a file, and writes the `elastic_parts.py` that fetches
# them. It has one more use: the environment variable `ACCIDENT` makes a rank kill itself, or get a
# SIGTERM, when it asks for a certain batch, so that you can watch. Run the cell again after you
# have changed one of the tasks 1 to 5.

# %% given="write_parts"
ELASTIC_PARTS = '''"""What the tasks 1 to 5 have defined, and accidents for the rehearsal."""

import os
import signal
from pathlib import Path

import cloudpickle

globals().update(cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes()))

# ACCIDENT="KILL 1 25": the 26th batch that rank 1 asks for kills it; after a restart nothing does.
accident, victim, at = os.environ.get("ACCIDENT", "none -1 -1").split()
if os.environ["RANK"] == victim and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    deal, asked = ElasticSampler.next_batch, []

    def next_batch(self, rank, world_size):
        if len(asked) == int(at):
            os.kill(os.getpid(), getattr(signal, f"SIG{accident}"))
        asked.append(rank)
        return deal(self, rank, world_size)

    ElasticSampler.next_batch = next_batch
'''
if IS_RANK_ZERO:
    parts = (ElasticSampler, Preemption, combine, load_together, save_together)
    data = cloudpickle.dumps({part.__name__: part for part in parts})
    Path("elastic_parts.pkl").write_bytes(data)
    Path("elastic_parts.py").write_text(ELASTIC_PARTS)

    numbers = np.random.default_rng(0)
    inputs = numbers.normal(size=(200, 4))
    np.savez(
        "samples.npz",
        x=inputs,
        y=np.sin(inputs.sum(axis=1, keepdims=True)),
        p0=numbers.normal(size=(16, 4)) / 2,
        p1=np.zeros(16),
        p2=numbers.normal(size=(1, 16)) / 4,
        p3=np.zeros(1),
    )

# %% [markdown]
# **The rehearsal**, about 20 seconds. First one rank trains 120 steps and nothing happens. Then the
# same with accidents:
#
# 1. torchrun starts 2 ranks. Rank 1 is killed in step 25; torchrun notices, ends the other rank and
#    starts both anew (`--max-restarts=1`). They go on from step 20.
# 2. The job goes on with 1 rank, and is told to stop in its 20th step.
# 3. The job goes on with 3 ranks, to the end.
#
# A batch has 32 samples and there are 200, so the last batch of an epoch has 8, and 3 ranks never
# have equal shares.


# %% given="rehearsal"
def script_arguments(name: str, steps: int = 120) -> list[str]:
    """The script's arguments for a job whose files are called after `name`."""
    files = ["--data=samples.npz", f"--out={name}.npz", f"--checkpoints={name}"]
    return [*files, f"--steps={steps}", "--every=10", "--batch-size=32", "--lr=0.01", "--seed=3"]


def outside() -> dict[str, str]:
    """The environment without what torchrun has told this notebook's ranks."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    # After a restart gloo must not find the addresses of workers that are gone.
    return env | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def with_torchrun(num_ranks: int, arguments: list[str], accident: str, max_restarts: int) -> str:
    """Runs the script under torchrun, to its end; what it has said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    env = outside() | {"ACCIDENT": accident}
    with tempfile.TemporaryFile() as log:
        agent = subprocess.Popen(
            [*command, "train_elastic.py", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            code = agent.wait(timeout=300)
        finally:
            for pid in [*descendants(agent.pid), agent.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if code != 0:
        raise RuntimeError(f"torchrun ended with code {code}:\n{said[-2000:]}")
    return said


def as_a_rank(arguments: list[str]) -> None:
    """What each rank of `with_run` does: it runs the script."""
    sys.argv = ["train_elastic.py", *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_path("train_elastic.py", run_name="__main__")


def with_run(num_ranks: int, arguments: list[str], accident: str = "none -1 -1") -> None:
    """The same with minidist's launcher: ranks without an agent, which start in no time."""
    run(as_a_rank, num_ranks, arguments, env={"ACCIDENT": accident}, deadline_s=120.0)


# %% demo="see_rehearsal"
def draw_rehearsal(ax, calm, elastic, places):
    ax.plot(calm, linewidth=5, alpha=0.35, label="one rank, undisturbed")
    ax.plot(elastic, linewidth=1, label="killed, restarted, stopped, resized")
    for step, text in places.items():
        ax.axvline(step, color="gray", linewidth=1)
        ax.text(step + 1, max(calm) * 0.8, text, fontsize=8)
    ax.set(xlabel="step", ylabel="loss of the global batch", yscale="log")
    ax.legend(fontsize=8)


with demo("tasks 1, 2, 3, 5 and 6"):
    if IS_RANK_ZERO:
        for name in ("calm", "elastic"):
            shutil.rmtree(name, ignore_errors=True)
            Path(f"{name}.npz").unlink(missing_ok=True)
        with_run(1, script_arguments("calm"))
        with_torchrun(2, script_arguments("elastic", steps=60), "KILL 1 25", max_restarts=1)
        done = sorted(path.stem for path in Path("elastic").glob("step-*.pt"))
        print("after torchrun's restart:", done[-1])
        with_run(1, script_arguments("elastic"), "TERM 0 19")
        done = sorted(path.stem for path in Path("elastic").glob("step-*.pt"))
        print("after the SIGTERM:       ", done[-1])
        with_run(3, script_arguments("elastic"))
        calm, elastic = (np.load(f"{name}.npz")["losses"] for name in ("calm", "elastic"))
        largest = float(np.abs(elastic / calm - 1).max())
        print(f"{len(elastic)} losses, largest relative difference {largest:.0e}")
        print("the curves are the same:", largest < 1e-9)
        places = {0: "2 ranks", 25: "killed", 60: "1 rank", 80: "3 ranks"}
        show(partial(draw_rehearsal, calm=calm, elastic=elastic, places=places))

# %% [markdown]
# Expected: `step-00000060` after the restart, `step-00000080` after the SIGTERM, 120 losses, and
# `True`. The largest difference is far below 1e-12: other shares, other order of additions.

# %% check="elastic_script"
check("elastic_script", "train_elastic.py")

# %% check="elastic_rejoin"
check("elastic_rejoin", "train_elastic.py")

# %% check="elastic_preempted"
check("elastic_preempted", "train_elastic.py")

# %% [markdown]
# On several nodes it is the same script. `torchrun --nnodes=2:4 --max-restarts=10 …` accepts two to
# four nodes: when one is lost or a new one comes, all agents meet again, and all workers start
# anew. So every change costs what lies between the last checkpoint and now, plus the meeting. Where
# changes are announced, as with a SIGTERM, the first part is zero.
#
# ## Reflect
#
# Some things no test can judge. Answer each question in its own cell, in a few sentences: replace
# *YOUR ANSWER HERE*. Whoever runs your course reads the answers and gives up to 2 points for each,
# beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. A job on 64 ranks loses 16 of them for an hour. It could keep the global batch, or keep each
# rank's batch and scale the learning rate. What speaks for each?**
#
# <!-- BEGIN SOLUTION -->
# Keeping the global batch: the same update, schedule and number of steps as planned, so the run can
# be compared and repeated. It costs memory (shares grow by a third; if they do not fit, accumulate
# over more micro-batches) and 4/3 of the time per step. Keeping the rank's batch: no memory
# problem, the same time per step; but noise, learning rate, warm-up and everything that counts
# steps instead of samples change in the middle of the run, and scaling rules are only rules of
# thumb. For one hour of many it is not worth it.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. The resumed run agrees with the undisturbed one to about 1e-12, and at the same number of
# ranks bit for bit. Why not always bit for bit? And what would have to be the case in a model with
# dropout?**
#
# <!-- BEGIN SOLUTION -->
# Floating-point addition is not associative: other shares mean other partial sums, and an
# all-reduce over other ranks adds in another order. With the same ranks everything is added in the
# same order. Dropout draws from each rank's random numbers; their states belong to a rank and fit
# no other number of ranks. Either accept another (equally good) mask after a change, or derive
# masks from (seed, step, index of the sample), so that they belong to the sample and not to the
# rank.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. In your `save_together`, rank 0's disk is full and it raises. What do the other ranks do, for
# how long, and what would you do about it?**
#
# <!-- BEGIN SOLUTION -->
# They wait in the barrier until rank 0's process has ended and the connection breaks, or, if
# somebody catches the error there, until the group's timeout (minutes). Better: rank 0 catches the
# error, all ranks exchange "did it work?" in place of the barrier, and all raise the same error, or
# all go on without this checkpoint and say so.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_4"
# **4. Asking `requested()` after every step costs an all-reduce of one number. When does that
# matter, and how would you make it cheaper without losing agreement?**
#
# <!-- BEGIN SOLUTION -->
# It costs latency, and on a GPU `.item()` makes the CPU wait for the GPU: a few per cent of a step
# of milliseconds, nothing in one of seconds. Ask every k-th step (the time that is left must cover
# k steps); or let the flag travel with something that is reduced anyway, such as the loss; or start
# the all-reduce in the background and look at its result one step later, which is the same step on
# all ranks.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - [ ] you can say which quantities of a run must not depend on the number of ranks;
# - [ ] you know why the mean over ranks is wrong when shares are unequal, and by how much;
# - [ ] you can name two ways in which ranks that load a checkpoint may end up at different steps;
# - [ ] you can cut a sharded state anew, on paper, with padding;
# - [ ] you know what a signal handler may do in a distributed program, and what it must not;
# - [ ] you have killed a worker, changed the number of ranks, and got the same curve;
# - [ ] you can answer lecture 10's question: *after a restart with half of the ranks the loss
#   jumps. What was forgotten?*
#
# ## Read next
#
# - Thorpe et al., *Bamboo: Making Preemptible Instances Resilient for Affordable Training of
#   Large DNNs*, [arXiv 2204.12013](https://arxiv.org/abs/2204.12013). What it takes when machines
#   leave every few minutes.
# - Jang et al., *Oobleck: Resilient Distributed Training of Large Models Using Pipeline
#   Templates*, [arXiv 2309.08125](https://arxiv.org/abs/2309.08125). Going on without a restart,
#   when pipelines lose stages.
# - Athlur et al., *Varuna: Scalable, Low-cost Training of Massive Deep Learning Models*, [arXiv
#   2111.04007](https://arxiv.org/abs/2111.04007). Changing the number of workers, and keeping the
#   global batch.
# - Shukla et al., *Singularity: Planet-Scale, Preemptive and Elastic Scheduling of AI Workloads*,
#   [arXiv 2202.07848](https://arxiv.org/abs/2202.07848). The scheduler's side.
# - In PyTorch:
#   [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html),
#   which cuts sharded state anew as task 4 does.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
if IS_RANK_ZERO:
    os.chdir("/")
    shutil.rmtree(where[0])
    print("the bonus is done")
