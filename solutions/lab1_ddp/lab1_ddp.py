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
# # Lab 1 · Data-parallel training
#
# You have a training loop that runs on one GPU. In this lab you make it run on many. First you use
# PyTorch's own tools. Then you write the central one, `DistributedDataParallel`, yourself.
#
# **When you have finished, you can**
#
# - start a process group on any machine, with or without GPUs (task 1);
# - wrap a model so that all ranks train the same weights (task 2);
# - deal a dataset out to the ranks so that no sample is lost and none is doubled (task 3);
# - turn a single-GPU training loop into a distributed one, and report a loss that is true (task 4);
# - turn a single-GPU script into one that `torchrun` starts (task 5);
# - check that the gradients of all ranks agree (task 6);
# - explain broadcast, hooks, buckets and overlap, because you wrote them (task 7).
#
# Plan 3 to 4 hours, in two sittings: tasks 1 to 6, then task 7, which is about half of it. You need
# to know how to write a PyTorch training loop. Lecture 3 has the theory. Nothing here needs a GPU.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | all |
# |---|---|---|---|---|---|---|---|---|
# | points | 5 | 5 | 18 | 17 | 8 | 7 | 40 | 100 |
#
# Without averaging (1 of ddp_gradients, ddp_tied_frozen, ddp_unused) this lab gives at most 49
# points.

# %% [markdown]
# ## How this notebook runs
#
# The kernel "torchrun × 2" starts two Python processes, called *ranks*, and runs every cell on both
# of them. What rank 0 prints looks as usual; what another rank prints carries that rank's label.
# A cell whose first line is `%%rank 0` runs on rank 0 only: use it to write files or to run shell
# commands once.
#
# Three more things are good to know.
#
# - Tensors are *not* shared. Each rank has its own memory, its own variables, its own model.
# - If one rank waits for another that never comes, the cell hangs. Interrupt it: the kernel tells
#   you which rank waits, and where. After a restart run the cells from the top.
# - A cell with `check("…", …)` tests your work with practice data on the ranks that you see here.
#   Your final grade comes from the same tests with other data on **3** ranks. So never write a 2
#   where you mean the number of ranks.

# %% [markdown]
# ## The idea in one picture
#
# ```
#              rank 0                         rank 1
#     ┌───────────────────────┐      ┌───────────────────────┐
#     │ same weights W        │      │ same weights W        │   broadcast once, at the start
#     │ samples 0 2 4 6 …     │      │ samples 1 3 5 7 …     │   a sampler deals the data out
#     │   forward → loss₀     │      │   forward → loss₁     │   no communication
#     │   backward → g₀       │      │   backward → g₁       │
#     └──────────┬────────────┘      └──────────┬────────────┘
#                └───── all-reduce (mean) ──────┘               while backward still runs
#                   g = (g₀ + g₁) / 2 on both
#     ┌──────────┴────────────┐      ┌──────────┴────────────┐
#     │ W ← W − lr · g        │      │ W ← W − lr · g        │   same step, so W stays the same
#     └───────────────────────┘      └───────────────────────┘
# ```
#
# Each rank computes the mean gradient of its own samples. If all ranks have equally many samples,
# the mean of those means is the mean over all samples: up to rounding, the gradient that one big
# GPU would have computed. (BatchNorm in training is an exception: each rank normalises with its own
# samples.) All tasks of this lab rest on that.

# %% given="imports"
import contextlib
import copy
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from autograder import check, is_not_started

# %% tags=["script-only"]
# isort: split
import shutil
import subprocess
import tempfile
from pathlib import Path

import jupytext

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"

# So that !python and !torchrun mean those of this kernel, wherever JupyterLab was started from.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")


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


def show(draw: Callable, width: float = 7.5, height: float = 2.6) -> None:
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


def draw_curves(ax, curves: dict[str, list[float]]) -> None:
    """Draws one loss curve for each label."""
    for (label, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        ax.plot(losses, style, linewidth=2.5, label=label)
    ax.set(xlabel="epoch", ylabel="mean loss", yscale="log")
    ax.legend()


# %% [markdown]
# ## Task 1 · Join the process group
#
# **Why.** A rank starts alone. `torchrun` has only put a few facts into its environment: `RANK`
# (which process am I, over all machines), `LOCAL_RANK` (which one on this machine), `WORLD_SIZE`
# (how many are there), `LOCAL_WORLD_SIZE` (how many on this machine) and the address where they
# meet. `dist.init_process_group` reads these facts and connects the ranks. Before that no
# collective works.
#
# **Write `setup_distributed()`.**
#
# - If every rank of this machine can have a GPU of its own, that is, if torch sees at least
#   `LOCAL_WORLD_SIZE` of them: backend `"nccl"`, device `cuda` with index `LOCAL_RANK`, and make it
#   the current CUDA device.
# - Otherwise: backend `"gloo"` and device `cpu`. Two ranks on one GPU do *not* work with nccl.
# - Take rank and world size from torchrun's environment. No address, port or number is hard-coded.
#   The check also pretends that there are GPUs, and two machines.
# - Calling it a second time does no harm.
# - Return `(rank, world_size, device)`: two `int`s and a `torch.device`.
#
# **Write `cleanup()`**: it leaves the process group, and does nothing if there is none.
#
# <details><summary>Hint 1: rank and world size</summary>
#
# Without further arguments `dist.init_process_group(backend)` takes everything from the
# environment. Afterwards `dist.get_rank()` and `dist.get_world_size()` answer.
# </details>
#
# <details><summary>Hint 2: which GPU</summary>
#
# On the second machine of two, ranks 8 to 15 still have GPUs 0 to 7. That is why the device comes
# from `LOCAL_RANK`, never from `RANK`.
# </details>
#
# <details><summary>Hint 3: a second call</summary>
#
# `dist.is_initialized()` tells whether this process is in a group already.
# </details>


# %% solution="task1_setup"
def setup_distributed() -> tuple[int, int, torch.device]:
    """Joins the process group that torchrun's environment describes.

    Returns (rank, world_size, device). nccl with one GPU per rank where there are enough GPUs,
    gloo on the CPU otherwise. A second call changes nothing and returns the same.
    """
    ### BEGIN SOLUTION
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    # nccl refuses two ranks on one GPU, so it needs at least as many GPUs as ranks.
    use_cuda = dist.is_nccl_available() and torch.cuda.device_count() >= local_world_size

    if use_cuda:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")

    if not dist.is_initialized():
        dist.init_process_group("nccl" if use_cuda else "gloo")
    return dist.get_rank(), dist.get_world_size(), device
    ### END SOLUTION


def cleanup() -> None:
    """Leaves the process group, if there is one."""
    ### BEGIN SOLUTION
    if dist.is_initialized():
        dist.destroy_process_group()
    ### END SOLUTION


# %% demo="see_setup"
with demo("task 1"):
    rank, world_size, device = setup_distributed()
    print(f"I am rank {rank} of {world_size}, pid {os.getpid()}, {dist.get_backend()} on {device}")

    # An all-reduce adds up what every rank brings and gives all of them the sum.
    number = torch.tensor([rank + 1], device=device)
    dist.all_reduce(number)
    expected = world_size * (world_size + 1) // 2
    print(f"1 + … + {world_size} = {number.item()} (expected {expected})")

# %% check="setup"
check("setup", (setup_distributed, cleanup))

# %% [markdown]
# ## Task 2 · Wrap the model
#
# **Why.** Ranks that start from different weights stay different for ever, however well they
# average their gradients. PyTorch's `DistributedDataParallel` copies rank 0's parameters and
# buffers to all ranks when it wraps a model. From then on it averages the gradients in every
# backward pass. In task 7 you build this class yourself; here you use it.
#
# **Write `wrap_model(model, device)`.**
#
# - Move the model to `device` *before* you wrap it.
# - Return a `torch.nn.parallel.DistributedDataParallel` around it.
# - On a GPU pass `device_ids`. On the CPU leave it out, or pass `None`.
#
# <details><summary>Hint</summary>
#
# `device_ids` is a list with one entry here: the index of this rank's GPU, `device.index`.
# </details>


# %% solution="task2_wrap"
def wrap_model(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Moves `model` to `device` and wraps it in torch's DistributedDataParallel."""
    ### BEGIN SOLUTION
    model = model.to(device)
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids)
    ### END SOLUTION


# %% demo="see_wrap"
with demo("tasks 1 and 2"):
    rank, world_size, device = setup_distributed()
    torch.manual_seed(100 + rank)  # on purpose: every rank starts from other weights
    model = nn.Linear(4, 1).to(device)

    before = [0.0] * world_size
    dist.all_gather_object(before, round(model.weight.sum().item(), 4))
    wrapped = wrap_model(model, device)
    after = [0.0] * world_size
    dist.all_gather_object(after, round(wrapped.module.weight.sum().item(), 4))
    if rank == 0:
        print("sum of the weights on each rank, before wrapping:", before)
        print("                                  after wrapping:", after)

# %% check="wrap_model"
check("wrap_model", wrap_model)

# %% [markdown]
# ## Task 3 · Deal the data out
#
# **Why.** Each rank must see its own part of the dataset. A shuffled `DataLoader` on every rank
# would not do that: with different seeds the parts overlap and some samples are never seen; with
# equal seeds all ranks see the same ones. So all ranks draw the *same* permutation, and each takes
# its share of it.
#
# The number of samples $n$ is rarely a multiple of the number of ranks $W$. There are three ways
# out, and each is right somewhere:
#
# | `tail` | each rank yields | lost | doubled | good for |
# |---|---|---|---|---|
# | `"pad"` | $\lceil n/W \rceil$ | nothing | $\lceil n/W \rceil W - n$ entries | training |
# | `"drop"` | $\lfloor n/W \rfloor$ | $n - \lfloor n/W \rfloor W$ | nothing | training |
# | `"uneven"` | $\lfloor n/W \rfloor$ or one more | nothing | nothing | evaluation |
#
# In training every rank must run equally many steps, or the last all-reduce waits for a rank that
# does not come. In evaluation a doubled sample would make the result wrong.
#
# **Write `ShardSampler`.**
#
# - `__iter__` yields this rank's dataset indices as `int`s; `__len__` says how many.
# - `shuffle=True`: one permutation of `0 … n-1` which is the same on every rank and depends only on
#   `seed` and `epoch`. Another epoch or another seed gives another order.
# - `shuffle=False`: the order is `0, 1, …, n-1`.
# - Each rank takes its share of that order, following the table. First shuffle all $n$ samples,
#   then cut or pad: what `"drop"` loses must not be the same samples in every epoch.
# - Which rank gets which sample is up to you, and so is what `"pad"` repeats, and how often. It
#   must work even if there are fewer samples than ranks.
# - `set_epoch(epoch)`: the next iteration uses this epoch. It starts with epoch 0.
# - PyTorch's global generator stays where it is: ranks use it for other things.
#
# <details><summary>Hint 1: the same order on every rank</summary>
#
# `torch.randperm(n, generator=g)` with your own `g = torch.Generator()`, seeded from seed and
# epoch. The global generator would not even do: others may have moved it on one rank.
# </details>
#
# <details><summary>Hint 2: dealing cards</summary>
#
# First make the list's length right for the tail: cut it, or repeat its beginning. Then take every
# $W$-th entry, beginning with entry `rank`. A slice with a step does it.
# </details>
#
# <details><summary>Hint 3: fewer samples than ranks</summary>
#
# With $n = 1$ and $W = 4$ the padding needs three copies of the same sample. Repeating the list
# *once* is not enough.
# </details>


# %% solution="task3_sampler"
class ShardSampler(Sampler[int]):
    """Yields the indices of one rank's share of a dataset.

    num_samples: the size of the dataset. rank, world_size: whose share, and of how many.
    shuffle: permute, in the same way on all ranks, depending on seed and epoch only.
    tail: "pad" (repeat some samples), "drop" (leave some out) or "uneven" (neither).
    """

    def __init__(
        self,
        num_samples: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: str = "pad",
    ):
        """Remembers the arguments; epoch 0."""
        ### BEGIN SOLUTION
        if tail not in ("pad", "drop", "uneven"):
            raise ValueError(f"tail must be 'pad', 'drop' or 'uneven', got {tail!r}")
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.tail = tail
        self.epoch = 0

        # How many entries all ranks yield together.
        self.total = {
            "pad": math.ceil(num_samples / world_size) * world_size,
            "drop": num_samples // world_size * world_size,
            "uneven": num_samples,
        }[tail]
        ### END SOLUTION

    def set_epoch(self, epoch: int) -> None:
        """Iterations from now on use the permutation of `epoch`."""
        ### BEGIN SOLUTION
        self.epoch = epoch
        ### END SOLUTION

    def __len__(self) -> int:
        """How many indices this rank yields."""
        ### BEGIN SOLUTION
        return len(range(self.rank, self.total, self.world_size))
        ### END SOLUTION

    def __iter__(self) -> Iterator[int]:
        """This rank's dataset indices, as ints."""
        ### BEGIN SOLUTION
        order = list(range(self.num_samples))
        if self.shuffle:
            # A generator of our own: the same numbers on every rank, and nobody else moves it.
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()

        # Make the list as long as the tail wants it. It may have to be repeated more than once.
        repeats = math.ceil(self.total / max(1, self.num_samples))
        order = (order * repeats)[: self.total]

        # Deal it out like cards: one to each rank in turn.
        return iter(order[self.rank :: self.world_size])
        ### END SOLUTION


# %% demo="see_sampler"
def draw_shares(ax, shares, num_ranks):
    from matplotlib.patches import Rectangle

    for column, (tail, share) in enumerate(shares.items()):
        seen = set()
        for r, indices in enumerate(share):
            for position, index in enumerate(indices):
                x, hatch = 5 * column + position, "////" if index in seen else None
                ax.add_patch(Rectangle((x, r), 0.9, 0.9, fc=f"C{r}", alpha=0.45, hatch=hatch))
                ax.text(x + 0.45, r + 0.45, str(index), ha="center", va="center")
                seen.add(index)
        ax.text(5 * column + 1.4, -0.2, f'tail="{tail}"', ha="center")
    ax.set(xlim=(-0.2, 14), ylim=(num_ranks, -0.8), xticks=[])
    ax.set_yticks([r + 0.45 for r in range(num_ranks)], [f"rank {r}" for r in range(num_ranks)])
    ax.set_title("Who gets which of 11 samples (hatched: a second time)")


with demo("task 3"):
    num_samples, num_ranks = 11, 4  # a sampler needs no process group: look at any world size
    shares = {
        tail: [
            list(ShardSampler(num_samples, r, num_ranks, shuffle=False, tail=tail))
            for r in range(num_ranks)
        ]
        for tail in ("pad", "drop", "uneven")
    }
    for tail, share in shares.items():
        entries = list(chain.from_iterable(share))
        lost = num_samples - len(set(entries))
        doubled = len(entries) - len(set(entries))
        if IS_RANK_ZERO:
            print(f"{tail:>6}: {len(entries)} entries, {lost} samples lost, {doubled} doubled")
    show(partial(draw_shares, shares=shares, num_ranks=num_ranks))

# %% check="sampler_partition"
check("sampler_partition", ShardSampler)

# %% check="sampler_tail"
check("sampler_tail", ShardSampler)

# %% check="sampler_epoch"
check("sampler_epoch", ShardSampler)

# %% [markdown]
# ## Task 4 · Train
#
# **Why.** This is the loop that you know. On many ranks four things change: which samples the
# loader gives, where the batch goes, that the sampler must be told the epoch, and what "the loss"
# means. The loss that a rank computes is the loss of *its* samples. A learning curve of rank 0
# alone leaves out all other samples.
#
# Here is the loop for one device.


# %% given="train_single"
def train_single(
    model: nn.Module,
    dataset: Dataset,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    num_epochs: int,
    batch_size: int,
    lr: float,
) -> list[float]:
    """Trains on one device; returns the mean loss over all samples, for each epoch."""
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(num_epochs):
        loss_sum, num_samples = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)  # the mean over this batch
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(x)  # the last batch may be smaller: weight by its size
            num_samples += len(x)
        losses.append(loss_sum / num_samples)
    return losses


# %% [markdown]
# **Write `train(…)`**, the same loop for all ranks.
#
# - `ddp_model` is wrapped already. Do not wrap it again.
# - The `DataLoader` takes its indices from `sampler`; `batch_size` is the batch of *one* rank.
# - Call `sampler.set_epoch(epoch)` before each epoch, `epoch` being 0, 1, 2, …
# - Optimizer: plain `torch.optim.SGD` with learning rate `lr`. Every batch goes to `device`.
# - `loss_fn(prediction, target)` gives the mean over a batch. Call it once per batch, before the
#   step of that batch, for the gradient and for the loss that you report.
# - Return one `float` per epoch: the mean loss over all samples of **all** ranks, each sample with
#   the same weight. Ranks have equally many batches, but not always equally many samples. Every
#   rank returns the same list.
#
# <details><summary>Hint 1: sampler and shuffle</summary>
#
# `DataLoader(dataset, batch_size=batch_size, sampler=sampler)`. The sampler shuffles, so `shuffle`
# stays out: PyTorch refuses both at once.
# </details>
#
# <details><summary>Hint 2: a true mean</summary>
#
# A mean of means is wrong as soon as the batches differ in size. Add up two numbers on each rank,
# the sum of the losses and the count of the samples; all-reduce both; divide last. One all-reduce
# per epoch is enough: put both numbers into one tensor.
# </details>
#
# <details><summary>Hint 3: it hangs</summary>
#
# Does every rank call the all-reduce? A collective under `if rank == 0:` waits for ranks that never
# come.
# </details>


# %% solution="task4_train"
def train(
    ddp_model: nn.Module,
    dataset: Dataset,
    sampler: ShardSampler,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    num_epochs: int,
    batch_size: int,
    lr: float,
    device: torch.device,
) -> list[float]:
    """Trains `ddp_model` on this rank's share of `dataset`.

    batch_size is per rank. Returns for each epoch the mean loss over the samples of all ranks; the
    list is the same on every rank.
    """
    ### BEGIN SOLUTION
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)

    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, sample count
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), y)
            loss.backward()  # DDP averages the gradients in here
            optimizer.step()
            totals[0] += loss.detach() * len(x)
            totals[1] += len(x)

        dist.all_reduce(totals)
        losses.append((totals[0] / totals[1]).item())
    return losses
    ### END SOLUTION


# %% [markdown]
# The next cell trains a small network twice: once on one device with all samples in one batch, once
# with your `train`, where the ranks share these samples out. One step over everything is the
# same step whoever computes it. So the two curves must lie on top of each other.


# %% demo="see_training"
def wave(num_samples: int) -> TensorDataset:
    """A wave to learn, y = sin(3x); x and y have shape [num_samples, 1]."""
    x = torch.linspace(-1, 1, num_samples).unsqueeze(1)
    return TensorDataset(x, torch.sin(3 * x))


with demo("tasks 1 to 4"):
    rank, world_size, device = setup_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    dataset = wave(24 * world_size)
    settings = dict(num_epochs=150, lr=0.3)

    one = train_single(
        copy.deepcopy(model), dataset, nn.MSELoss(), batch_size=len(dataset), **settings
    )
    many = train(
        wrap_model(copy.deepcopy(model), device),
        dataset,
        ShardSampler(len(dataset), rank, world_size),
        nn.MSELoss(),
        batch_size=24,
        device=device,
        **settings,
    )
    if rank == 0:
        print(f"last loss: one device {one[-1]:.6f}, {world_size} ranks {many[-1]:.6f}")
        gap = max(abs(a - b) for a, b in zip(one, many, strict=True))
        print(f"largest difference between the curves: {gap:.1e}  (fine: below 1e-5)")
    show(partial(draw_curves, curves={"one device": one, f"{world_size} ranks": many}))

# %% check="train_steps"
check("train_steps", train)

# %% check="train_epochs"
check("train_epochs", train)

# %% check="train_loss"
check("train_loss", train)

# %% [markdown]
# ## Task 5 · A script for `torchrun`
#
# **Why.** Real training does not run in a notebook. It runs as a script that `torchrun` starts once
# per GPU, on your machine or on a hundred. Below is a script for a single GPU. You convert it.
#
# The next two cells make a data file and write the script that is to be converted. They run on
# rank 0 only, because a file should be written once.

# %% tags=["script-only"]
# Only when this file runs as a script under torchrun: the notebook's %%writefile cells are comments
# here, so rank 0 writes these files now, into a new folder, and all ranks work there.
setup_distributed()
LAB_FILE = Path(__file__).resolve()
where = [tempfile.mkdtemp(prefix="lab1_ddp_")] if IS_RANK_ZERO else [None]
dist.broadcast_object_list(where, src=0)
os.chdir(where[0])
if IS_RANK_ZERO:
    for cell in jupytext.read(LAB_FILE).cells:
        lines = cell.source.splitlines()
        for number, line in enumerate(lines):
            if cell.cell_type == "code" and line.startswith("%%writefile "):
                Path(line.split()[1]).write_text("\n".join(lines[number + 1 :]) + "\n")

# %% given="make_data"
if IS_RANK_ZERO:
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(64, 4)).astype(np.float32)
    np.savez(
        "regression.npz",
        x=x,
        y=np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32),
        # The model's initial parameters, so that every run starts from the same point.
        p0=numbers.normal(size=(16, 4)).astype(np.float32) / 2,
        p1=np.zeros(16, dtype=np.float32),
        p2=numbers.normal(size=(1, 16)).astype(np.float32) / 4,
        p3=np.zeros(1, dtype=np.float32),
    )

# %% given="train_single_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_single.py
# """Trains a small regression network on one device."""
#
# import argparse
#
# import numpy as np
# import torch
# from torch import nn
# from torch.utils.data import DataLoader, TensorDataset
#
#
# def main():
#     parser = argparse.ArgumentParser()
#     parser.add_argument("--data", required=True)  # .npz with x, y and p0 … p3
#     parser.add_argument("--out", required=True)  # .npz for the trained p0 … p3 and the losses
#     parser.add_argument("--epochs", type=int, required=True)
#     parser.add_argument("--batch-size", type=int, required=True)
#     parser.add_argument("--lr", type=float, required=True)
#     args = parser.parse_args()
#
#     device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#     data = np.load(args.data)
#     dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = model.to(device)
#
#     loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
#     optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
#     loss_fn = nn.MSELoss()
#     losses = []
#     for _ in range(args.epochs):
#         loss_sum, num_samples = 0.0, 0
#         for x, y in loader:
#             x, y = x.to(device), y.to(device)
#             optimizer.zero_grad()
#             loss = loss_fn(model(x), y)
#             loss.backward()
#             optimizer.step()
#             loss_sum += loss.item() * len(x)
#             num_samples += len(x)
#         losses.append(loss_sum / num_samples)
#
#     params = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
#     np.savez(args.out, losses=np.array(losses), **params)
#
#
# if __name__ == "__main__":
#     main()

# %% [markdown]
# **Write `train_ddp.py`**, the same training on all ranks. It is a file of its own: it cannot use
# what you defined in this notebook. Keep the first two lines of the cell: they write it to disk,
# on rank 0.
#
# - Same arguments, same data file, same model with the same initial parameters.
# - Use PyTorch's own tools this time: `DistributedDataParallel` and
#   `torch.utils.data.distributed.DistributedSampler` with its default settings, and tell the
#   sampler the epoch. `--batch-size` is the batch of one rank.
# - MSE loss and SGD, as before.
# - Rank 0, and only rank 0, saves `p0 … p3` and `losses` (length: epochs) to `--out`. A loss is the
#   mean over the samples of all ranks; one that the sampler gives to two ranks counts twice.
# - It must run with any number of ranks on any number of machines, with or without GPUs: nccl or
#   gloo, as in task 1.
# - The file is written and closed when the program ends without an error on all ranks.
#
# <details><summary>Hint 1: what changes</summary>
#
# Join the group first; device from `LOCAL_RANK`; the model wrapped after its parameters are set;
# the sampler instead of `shuffle=True`; `set_epoch`; the loss all-reduced; saving on rank 0; leave
# the group at the end. Everything else stays as it is.
# </details>
#
# <details><summary>Hint 2: names of the parameters</summary>
#
# The wrapped model keeps yours as `.module`. The order of `parameters()` is the same.
# </details>

# %% solution="task5_script" tags=["active-ipynb"]
# %%rank 0
# %%writefile train_ddp.py
# """Trains a small regression network on all ranks that torchrun starts."""
#
# import argparse
# import os
#
# import numpy as np
# import torch
# import torch.distributed as dist
# from torch import nn
# from torch.nn.parallel import DistributedDataParallel
# from torch.utils.data import DataLoader, TensorDataset
# from torch.utils.data.distributed import DistributedSampler
#
#
# def main():
#     parser = argparse.ArgumentParser()
#     parser.add_argument("--data", required=True)  # .npz with x, y and p0 … p3
#     parser.add_argument("--out", required=True)  # .npz for the trained p0 … p3 and the losses
#     parser.add_argument("--epochs", type=int, required=True)
#     parser.add_argument("--batch-size", type=int, required=True)  # of one rank
#     parser.add_argument("--lr", type=float, required=True)
#     args = parser.parse_args()
#     ### BEGIN SOLUTION
#     local_rank = int(os.environ["LOCAL_RANK"])
#     use_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
#     device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
#     if use_cuda:
#         torch.cuda.set_device(device)
#     dist.init_process_group("nccl" if use_cuda else "gloo")
#
#     data = np.load(args.data)
#     dataset = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
#     hidden, inputs = data["p0"].shape
#     model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
#     with torch.no_grad():
#         for i, param in enumerate(model.parameters()):
#             param.copy_(torch.from_numpy(data[f"p{i}"]))
#     model = DistributedDataParallel(
#         model.to(device), device_ids=[local_rank] if use_cuda else None
#     )
#
#     sampler = DistributedSampler(dataset)
#     loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
#     optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
#     loss_fn = nn.MSELoss()
#     losses = []
#     for epoch in range(args.epochs):
#         sampler.set_epoch(epoch)
#         totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss sum, sample count
#         for x, y in loader:
#             x, y = x.to(device), y.to(device)
#             optimizer.zero_grad()
#             loss = loss_fn(model(x), y)
#             loss.backward()
#             optimizer.step()
#             totals[0] += loss.detach() * len(x)
#             totals[1] += len(x)
#         dist.all_reduce(totals)
#         losses.append((totals[0] / totals[1]).item())
#
#     if dist.get_rank() == 0:
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
# Now launch both. `torchrun --standalone --nproc-per-node 2` starts two new processes of its own,
# which have nothing to do with the two ranks of this notebook. It takes some ten seconds.

# %% demo="launch_scripts" tags=["active-ipynb"]
# %%rank 0
# !rm -f single.npz ddp.npz
# with open("train_ddp.py") as file:
#     is_written = "NotImplementedError" not in file.read()
# if is_written:
#     !python train_single.py \
#         --data regression.npz --out single.npz --epochs 30 --batch-size 64 --lr 0.1
#     !torchrun --standalone --nproc-per-node 2 train_ddp.py \
#         --data regression.npz --out ddp.npz --epochs 30 --batch-size 32 --lr 0.1
# else:
#     print("Nothing to launch yet: do task 5 first.")

# %% tags=["script-only"]
# The same launches, without the notebook's shell commands.
if IS_RANK_ZERO:
    arguments = "--data regression.npz --epochs 30 --lr 0.1 --out"
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 train_ddp.py"
    for command in (
        f"train_single.py {arguments} single.npz --batch-size 64",
        f"{launch} {arguments} ddp.npz --batch-size 32",
    ):
        subprocess.run([sys.executable, *command.split()], check=True, timeout=300)
dist.barrier()

# %% demo="see_script"
if os.path.exists("single.npz") and os.path.exists("ddp.npz"):
    with np.load("single.npz") as single, np.load("ddp.npz") as ddp:
        script_curves = {"train_single.py": single["losses"], "train_ddp.py × 2": ddp["losses"]}
        largest = max(np.abs(single[f"p{i}"] - ddp[f"p{i}"]).max() for i in range(4))
    if IS_RANK_ZERO:
        print(f"largest difference between their parameters: {largest:.1e}  (fine: below 1e-4)")
    show(partial(draw_curves, curves=script_curves))
elif IS_RANK_ZERO:
    print("Nothing to see yet: do task 5 and run the cell above.")

# %% check="script"
check("script", "train_ddp.py")

# %% [markdown]
# ## Task 6 · Are the gradients in sync?
#
# **Why.** Ranks that drift apart raise no error, and the loss still falls. So you need a function
# that you can call after any `backward()`: it compares the gradients of all ranks.
#
# **Write `gradients_in_sync(model, tol=1e-6)`.**
#
# - `True` if every parameter's gradient is the same on all ranks, `False` if not. Same means: no
#   two ranks' entries differ by more than `tol`, an absolute number. Compare float64 gradients in
#   float64: `tol` may be 1e-12. No gradient holds NaN or inf.
# - All ranks return the same answer, also when only one rank differs. A Python `bool`.
# - A gradient that is `None` counts as equal only if it is `None` on all ranks.
# - It changes no gradient.
#
# <details><summary>Hint 1: how far apart are the ranks?</summary>
#
# If you know the largest and the smallest value of an entry over all ranks, you know how far
# apart they are. `dist.ReduceOp.MAX` and `dist.ReduceOp.MIN` give both. Comparing each rank with
# rank 0 only is weaker: two ranks may lie `tol` above and `tol` below.
# </details>
#
# <details><summary>Hint 2: None</summary>
#
# If rank 0 has a gradient and rank 1 has none, they must still call the same collectives with
# the same shapes. So first agree on *which* gradients there are: all-reduce a vector of zeros
# and ones. Only if all ranks have the same ones, compare the values.
# </details>


# %% solution="task6_in_sync"
def gradients_in_sync(model: nn.Module, tol: float = 1e-6) -> bool:
    """Whether every parameter's gradient is the same, within `tol`, on all ranks.

    Every rank has to call it, and every rank gets the same answer. None is the same as None only.
    """
    ### BEGIN SOLUTION
    params = list(model.parameters())
    if not params:
        return True

    # 1. Which gradients are there? The same ones on every rank, or we must not compare values.
    counts = torch.tensor([float(p.grad is not None) for p in params], device=params[0].device)
    dist.all_reduce(counts)
    if not ((counts == 0) | (counts == dist.get_world_size())).all():
        return False

    # 2. The largest value and the negated smallest one of each entry, in one all-reduce.
    grads = [p.grad.detach().double().flatten() for p in params if p.grad is not None]
    if not grads:
        return True
    flat = torch.cat(grads)
    extremes = torch.stack([flat, -flat])
    extremes.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # NaN is never in sync
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return bool((extremes.sum(dim=0) <= tol).all())
    ### END SOLUTION


# %% demo="see_sync"
with demo("tasks 1, 2 and 6"):
    rank, world_size, device = setup_distributed()
    torch.manual_seed(0)
    plain = nn.Linear(4, 1).to(device)
    wrapped = wrap_model(copy.deepcopy(plain), device)
    x = torch.full((8, 4), float(rank + 1), device=device)  # every rank has other data

    plain(x).pow(2).mean().backward()
    wrapped(x).pow(2).mean().backward()
    answers = gradients_in_sync(plain), gradients_in_sync(wrapped)
    if rank == 0:
        print(f"without DDP: {answers[0]}  (expected {world_size == 1})")
        print(f"with DDP:    {answers[1]}  (expected True)")

# %% check="gradients_in_sync"
check("gradients_in_sync", gradients_in_sync)

# %% [markdown]
# ## Task 7 · `DistributedDataParallel` from scratch
#
# Now you build what you have used. Your class has this contract; other labs use the same one.
#
# ```python
# model = DDP(module, bucket_cap_mb=25.0)    # all ranks now have rank 0's parameters and buffers
# loss = loss_fn(model(x), y)                # calling it runs the module
# loss.backward()                            # gradients travel while this runs
# model.finish_gradient_synchronization()    # returns when every p.grad is the mean over ranks
# optimizer.step()
# ```
#
# Take it in six steps. After each step run the checks below: more and more of them pass.
#
# ### Step 1: the same start
#
# In `__init__` send rank 0's parameters to all ranks, with `dist.broadcast`. Do the same for the
# *buffers*: state that is not trained, such as the running mean of a BatchNorm. Forget them and
# the ranks evaluate different models. No gradient will ever repair that.
#
# ### Step 2: the mean
#
# After backward, all-reduce each gradient and divide by the number of ranks. With
# $g = \frac{1}{W} \sum_r g_r$ the step of $W$ ranks is the step that one device would take
# with all their samples. With the sum alone, SGD's learning rate is $W$ times too large. Write
# this first, in `finish_gradient_synchronization`; it already gives right gradients.
#
# ### Step 3: hooks
#
# Backward computes the last layer's gradients first. They could travel while the earlier
# layers are still being computed. `param.register_post_accumulate_grad_hook(hook)` calls
# `hook(param)` as soon as `param.grad` is complete. Start an all-reduce there with
# `work = dist.all_reduce(tensor, async_op=True)`: it returns at once, and the data travels in the
# background. `work.wait()` in `finish_gradient_synchronization` waits for it. Do not wait in the
# hook, or nothing overlaps.
#
# ### Step 4: the awkward parameters
#
# - **Tied**: one parameter used in two places. `module.parameters()` yields it once, and its hook
#   is called once, when both contributions are in `p.grad`. Nothing to do, if you go by parameters.
# - **Of any shape**: a single number has shape `()`. A transposed weight is not contiguous, and
#   neither are the weights of a convolution in `channels_last`: `view(-1)` raises there, and NCCL,
#   which GPUs use, refuses them.
# - **Frozen** (`requires_grad=False`): it never has a gradient and can have no hook.
# - **Unused** in this forward pass: its hook is not called. Perhaps on another rank it *is* called:
#   that rank then starts an all-reduce, and waits for you. So every rank has to take part: a rank
#   without a gradient brings zeros. After `finish_gradient_synchronization` every rank has the
#   mean. (If no rank used it, zeros and `None` are both fine.)
#
# ### Step 5: buckets
#
# Each all-reduce costs some fixed time, however small it is (its *latency*). A model has
# hundreds of small parameters. So gradients travel together, in **buckets**:
#
# - copy gradients one after another into one flat tensor, and all-reduce that one: one
#   all-reduce per bucket;
# - a bucket holds at most `bucket_cap_mb` MB of gradients (count $10^6$ or $2^{20}$ bytes, as you
#   like). The cap is in bytes, and a float64 has 8. So before a parameter would pass the cap, begin
#   the next bucket; a parameter that is larger by itself gets one of its own;
# - fill a bucket as far as it goes. Smaller ones pass `ddp_buckets`, but each pays the latency, and
#   `ddp_scaling` measures that;
# - fill the buckets in *reverse* order of `module.parameters()`: that is about the order in which
#   gradients come;
# - one bucket holds one dtype. Another dtype may close a bucket, or begin one beside it.
#
# ### Step 6: overlap, in the same order everywhere
#
# Start a bucket's all-reduce as soon as its last gradient is there. But beware: collectives are
# matched by *order*. The first all-reduce of rank 0 meets the first one of rank 1, whatever you
# meant. If ranks use different parts of the model, their buckets fill up in different orders. So
# launch the buckets in one fixed order on all ranks: a bucket that is full early waits for those
# before it.
#
# The picture below is computed, not measured. Six layers of equal size; the backward of each takes
# 1 s. An all-reduce takes 0.5 s, whatever it carries, and 0.75 s more for each layer in it. Steps 5
# and 6 together win.


# %% demo="see_overlap_idea"
def schedule(bucket_sizes: list[int], overlap: bool, reduce_s: float = 0.75, latency_s=0.5):
    """[(layers, start, end)] of the all-reduces; backward of a layer takes one second."""
    backward_end = sum(bucket_sizes)
    bars, layers_done, network_free = [], 0, 0.0
    for layers in bucket_sizes:
        layers_done += layers
        start = max(network_free, layers_done if overlap else backward_end)
        network_free = start + latency_s + reduce_s * layers
        bars.append((layers, start, network_free))
    return bars


def draw_schedules(ax, schedules):
    for row, bars in enumerate(schedules.values()):
        for layer in range(6):
            ax.barh(2.5 * row, 0.96, left=layer, color="C0", alpha=0.7)
            ax.text(layer + 0.48, 2.5 * row, f"g{6 - layer}", ha="center", va="center")
        for _, start, end in bars:
            ax.barh(2.5 * row + 0.9, end - start - 0.04, left=start, color="C1", alpha=0.8)
        ax.text(bars[-1][2] + 0.1, 2.5 * row + 0.9, f"{bars[-1][2]:.1f} s", va="center")
    ax.set_yticks([2.5 * row + 0.45 for row in range(len(schedules))], list(schedules))
    ax.set(xlim=(0, 15), xlabel="seconds", ylim=(2.5 * len(schedules) - 1, -0.7))
    ax.set_title("blue: backward of layers 6 to 1; orange: all-reduce")


schedules = {
    "after backward,\neach layer alone": schedule([1] * 6, overlap=False),
    "after backward,\nall in one bucket": schedule([6], overlap=False),
    "overlap,\neach layer alone": schedule([1] * 6, overlap=True),
    "overlap,\ntwo layers per bucket": schedule([2] * 3, overlap=True),
}
show(partial(draw_schedules, schedules=schedules), height=4.0)

# %% [markdown]
# Buckets that are too large have nothing to hide behind; buckets that are too small pay the latency
# each time. PyTorch's default is 25 MiB; the best size depends on the model and the network.
#
# The next cell gives you a record for a bucket. Use it, change it in your own cell, or leave it.


# %% given="bucket"
@dataclass
class Bucket:
    """Parameters whose gradients travel together in one all-reduce."""

    flat: torch.Tensor  # one-dimensional; all the gradients of this bucket, one after another
    slots: dict[nn.Parameter, torch.Tensor]  # parameter -> its part of `flat`, in its own shape
    waiting: set[nn.Parameter] = field(default_factory=set)  # whose gradient has not come yet
    work: dist.Work | None = None  # the all-reduce, once it has started


# %% [markdown]
# **Write `DDP`.** `forward` is there already. Add methods of your own as you like.
#
# - Works for any number of ranks, one included, and for step after step. There is one `backward()`
#   before each `finish_gradient_synchronization()`.
# - Gradients are cleared before each backward. It must not matter whether with
#   `zero_grad(set_to_none=True)` or `False`.
#
# <details><summary>Hint 1: where is a parameter's slot?</summary>
#
# `flat[start : start + p.numel()].view_as(p)` is a view: what you copy into it lands in `flat`,
# and after the all-reduce you read the result from it.
# </details>
#
# <details><summary>Hint 2: what the hook does</summary>
#
# Copy `param.grad` into its slot. Take the parameter off the bucket's `waiting` set. Then launch
# as many buckets as you can: look at the first bucket that is not launched yet; if nothing is
# missing in it, launch it and look at the next one.
# </details>
#
# <details><summary>Hint 3: what finish does</summary>
#
# Write zeros for all that are still waiting. Launch the buckets that are left, in order.
# Then, bucket by bucket: wait, divide, copy each slot back into `p.grad`. Last, make ready for the
# next step: everybody is waiting again, nothing is launched.
# </details>
#
# <details><summary>Hint 4: p.grad is None</summary>
#
# A parameter that this rank did not use has no gradient to copy into. Give it a new tensor, a clone
# of its slot.
# </details>


# %% solution="task7_ddp"
class DDP(nn.Module):
    """Data parallelism: the same module on every rank, gradients averaged while backward runs.

    Wrapping makes parameters and buffers those of rank 0. After `loss.backward()` call
    `finish_gradient_synchronization()`; then every p.grad is the mean over all ranks.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0):
        """Wraps `module`; gradients travel in buckets of at most `bucket_cap_mb` MB."""
        super().__init__()
        self.module = module
        ### BEGIN SOLUTION
        self.world_size = dist.get_world_size()

        # Step 1: all ranks start from rank 0's state. Tied tensors come once.
        for tensor in chain(module.parameters(), module.buffers()):
            whole = tensor.detach().contiguous()  # NCCL sends nothing else
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)

        # Step 5: buckets, in about the order in which backward delivers. It is the same order on
        # all ranks, because it depends on the model only.
        self.buckets: list[Bucket] = []
        self.num_launched = 0  # buckets[:num_launched] are on their way
        cap_bytes = bucket_cap_mb * 2**20
        group: list[nn.Parameter] = []
        for param in reversed([p for p in module.parameters() if p.requires_grad]):
            full = sum(p.nbytes for p in group) + param.nbytes > cap_bytes
            if group and (full or param.dtype != group[0].dtype):
                self.buckets.append(self._make_bucket(group))
                group = []
            group.append(param)
        if group:
            self.buckets.append(self._make_bucket(group))

        # Step 3: be told of each gradient when it is complete.
        for bucket in self.buckets:
            for param in bucket.slots:
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket))

    @staticmethod
    def _make_bucket(params: list[nn.Parameter]) -> Bucket:
        """One flat tensor for the gradients of `params`, and each one's place in it."""
        flat = torch.cat([torch.zeros_like(p).flatten() for p in params])
        pieces = flat.split([p.numel() for p in params])
        slots = {p: piece.view(p.shape) for p, piece in zip(params, pieces, strict=True)}
        return Bucket(flat, slots, waiting=set(params))

    def _on_gradient(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Hook: during backward, `param.grad` has just become complete."""
        if param not in bucket.waiting:
            raise RuntimeError("call finish_gradient_synchronization() before the next backward()")
        bucket.slots[param].copy_(param.grad)
        bucket.waiting.remove(param)
        self._launch_full_buckets()

    def _launch_full_buckets(self) -> None:
        """Starts the all-reduce of every bucket that is full, never one before its predecessor.

        Step 6: collectives are matched by order, so this order must not depend on the rank.
        """
        for bucket in self.buckets[self.num_launched :]:
            if bucket.waiting:
                return
            bucket.work = dist.all_reduce(bucket.flat, op=dist.ReduceOp.SUM, async_op=True)
            self.num_launched += 1
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        """Runs the module."""
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Returns when every p.grad is the mean of this step's gradients over all ranks."""
        ### BEGIN SOLUTION
        with torch.no_grad():
            # Step 4: whoever still waits was not used here. Other ranks may have used it, so this
            # rank brings zeros (or what the gradient was before, if it was not cleared).
            for bucket in self.buckets:
                for param in bucket.waiting:
                    if param.grad is None:
                        bucket.slots[param].zero_()
                    else:
                        bucket.slots[param].copy_(param.grad)
                bucket.waiting.clear()
            self._launch_full_buckets()

            for bucket in self.buckets:
                bucket.work.wait()
                bucket.flat /= self.world_size  # step 2: the mean
                for param, slot in bucket.slots.items():
                    if param.grad is None:
                        param.grad = slot.clone()
                    else:
                        param.grad.copy_(slot)

                # Ready for the next step.
                bucket.work = None
                bucket.waiting.update(bucket.slots)
            self.num_launched = 0
        ### END SOLUTION


# %% [markdown]
# The next cell does two things. It compares your gradients with the mean, computed the slow way.
# And it writes down in which order things happen on rank 0: a blue dot when a gradient of the
# model is complete, an orange diamond when an all-reduce starts. Orange diamonds between blue
# dots are overlap. All diamonds at the end mean that the network is idle during backward.


# %% demo="see_ddp"
@contextlib.contextmanager
def recorded(model: nn.Module, events: list[str]) -> Iterator[None]:
    """Notes in `events` each complete gradient and each all-reduce that starts."""
    original = dist.all_reduce

    def all_reduce(*args, **kwargs):
        events.append("all-reduce starts")
        return original(*args, **kwargs)

    hooks = [
        p.register_post_accumulate_grad_hook(lambda _: events.append("gradient complete"))
        for p in model.parameters()
    ]
    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original
        for hook in hooks:
            hook.remove()


def draw_events(ax, events):
    kinds = {"gradient complete": ("o", "C0"), "all-reduce starts": ("D", "C1")}
    for row, (kind, (marker, color)) in enumerate(kinds.items()):
        xs = [i for i, event in enumerate(events) if event == kind]
        ax.plot(xs, [row] * len(xs), marker, color=color, markersize=9)
    if "backward has ended" in events:
        ax.axvline(events.index("backward has ended"), color="gray", linestyle="--")
        ax.text(events.index("backward has ended"), 1.35, "backward has ended ", ha="right")
    ax.set_yticks(range(len(kinds)), list(kinds))
    ax.set(ylim=(-0.6, 1.7), xlabel="order of events on rank 0")


with demo("tasks 1 and 7"):
    rank, world_size, device = setup_distributed()
    torch.manual_seed(0)
    network = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    alone = copy.deepcopy(network).to(device)  # the same weights, but no synchronisation
    torch.manual_seed(rank)  # every rank has other data
    x = torch.randn(8, 32, device=device)
    events = []
    with recorded(network.to(device), events):
        model = DDP(network, bucket_cap_mb=2 * 33 * 32 * 4 / 1e6)  # two layers per bucket
        events.clear()
        model(x).pow(2).mean().backward()
        events.append("backward has ended")
        model.finish_gradient_synchronization()

    alone(x).pow(2).mean().backward()
    error = 0.0
    for mine, own in zip(network.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(own.grad)
        error = max(error, (mine.grad - own.grad / world_size).abs().max().item())
    if rank == 0:
        early = events[: events.index("backward has ended")].count("all-reduce starts")
        print(f"largest error of a gradient on rank 0: {error:.1e}  (fine: below 1e-6)")
        print(f"{events.count('all-reduce starts')} all-reduces for 12 parameters, {early} of them")
        print("started before backward had ended")
    show(partial(draw_events, events=events))

# %% check="ddp_weights"
check("ddp_weights", DDP)

# %% check="ddp_buffers"
check("ddp_buffers", DDP)

# %% check="ddp_gradients"
check("ddp_gradients", DDP)

# %% check="ddp_tied_frozen"
check("ddp_tied_frozen", DDP)

# %% check="ddp_unused"
check("ddp_unused", DDP)

# %% check="ddp_buckets"
check("ddp_buckets", DDP)

# %% check="ddp_overlap"
check("ddp_overlap", DDP)

# %% [markdown]
# Is overlap worth it? On your laptop you cannot measure that: two processes that share a few cores
# disturb each other too much. So the next cell runs your class on an *emulated cluster*. The code
# runs for real, in new processes, but time is computed: from the cost of each layer, and from the
# bandwidth and latency of a network given as data. It is the same on every laptop. It takes a few
# seconds. *Efficiency* is the share of the time in which the devices compute. See what buckets cost
# that are too small (0.1 MB: every parameter travels alone) or too large (25 MB: one for all).

# %% demo="see_timeline" tags=["active-ipynb"]
# %%rank 0
# from minidist import emulate
#
# NUM_LAYERS, WIDTH = 8, 512  # the gradients of a layer are about 1 MB
# network = emulate.Link(bandwidth_bytes_per_s=1e9, latency_s=2e-4)
# slow_network = emulate.Cluster(
#     name="two devices on a slow network",
#     nodes=2,
#     devices_per_node=1,
#     intra_node=network,
#     inter_node=network,
#     peak_flops_per_s=1e12,
#     memory_bandwidth_bytes_per_s=1e11,
# )
# costs = emulate.ChargePlan((0.6e-3,) * NUM_LAYERS, (1.2e-3,) * NUM_LAYERS, b"practice")
#
#
# def one_step(ddp_class, bucket_cap_mb):
#     layers = [emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(NUM_LAYERS)]
#     model = ddp_class(nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)
#     model(torch.randn(2, WIDTH)).square().mean().backward()
#     model.finish_gradient_synchronization()
#
#
# def draw_timeline(ax, timeline):
#     first = min(i.start_s for i in timeline.intervals[0] if i.kind == "compute")
#     colors = {"forward": "C2", "backward": "C0", "all_reduce": "C1"}
#     for rank, intervals in enumerate(timeline.intervals):
#         for i in intervals:
#             color = colors.get(i.name.split()[0])
#             if i.start_s >= first and i.kind != "idle" and color:
#                 row = 2.4 * rank + (i.kind == "communication")
#                 span, start = (i.end_s - i.start_s) * 1e3, (i.start_s - first) * 1e3
#                 ax.barh(row, span, left=start, color=color, alpha=0.8, edgecolor="white")
#     rows = [f"rank {rank}, {what}" for rank in (0, 1) for what in ("compute", "network")]
#     ax.set_yticks([0, 1, 2.4, 3.4], rows)
#     ax.set(xlabel="virtual milliseconds", ylim=(4.1, -0.7))
#     ax.set_title("green: forward, blue: backward, orange: all-reduce (buckets of 2.2 MB)")
#
#
# with demo("task 7"):
#     timelines = {}
#     for cap in (0.1, 2.2, 25.0):
#         _, timelines[cap] = emulate.run(one_step, 2, slow_network, DDP, cap, plan=costs)
#         print(f"bucket_cap_mb={cap:<5} efficiency {timelines[cap].efficiency:.2f}")
#     show(partial(draw_timeline, timeline=timelines[2.2]), height=3.0)

# %% [markdown]
# The last check does the same on another cluster and with its own model: equal layers that take
# unequal time, and a cap that holds two of them. If communication hides behind backward, the
# efficiency is above 0.9. All-reduces after backward land near 0.6, one for each layer near 0.8,
# and so does a hook that waits for the bucket before.

# %% check="ddp_scaling"
check("ddp_scaling", DDP)

# %% [markdown]
# ## Yours beside PyTorch's
#
# The next cell trains one network with your DDP, with PyTorch's, and with the course's own. All get
# the same weights and batches, so the losses must agree, and the bytes, too. The time of a step is
# measured twice: here, where other programs disturb it, and on the emulated cluster, where only
# overlap and buckets count. How close do you come?

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
#
# with demo("tasks 1 and 7"):
#     _, _, device = setup_distributed()
#     ours = find("minidist.parallel.data:BucketedDDP")
#     beside(
#         {
#             "yours": training(lambda net: DDP(net, bucket_cap_mb=0.6)),
#             "PyTorch's": training(lambda net: DistributedDataParallel(net, bucket_cap_mb=0.6)),
#             "the course's": ours and training(lambda net: ours(net, bucket_bytes=600_000)),
#         },
#         device=device,
#     )

# %% [markdown]
# ## Reflect
#
# Some things no test can judge. Answer each question in its own cell, in a few sentences: replace
# *YOUR ANSWER HERE*. Whoever runs your course reads the answers and gives up to 2 points for each,
# beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. Your 8 ranks use the learning rate and the batch size per rank of the single-GPU run. What
# has changed for the optimiser?**
#
# <!-- BEGIN SOLUTION -->
# The global batch is 8 times larger, so an epoch has an eighth of the steps, and each step has a
# less noisy gradient. To follow the single-GPU run exactly, divide the batch per rank by 8. To use
# the larger batch well, one usually raises the learning rate (linearly, for SGD and moderate
# batches) and warms it up. The mean over ranks alone does neither.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. One rank gets 10 batches, another 11. What happens with DDP, and what can you do?**
#
# <!-- BEGIN SOLUTION -->
# In step 11 the second rank starts an all-reduce that the first never joins. It waits until the
# time limit of the process group, or it meets a *later* collective of the first rank, say the one
# for the loss, and both get rubbish or an error. Ways out: pad or drop, so that all ranks have
# equally many batches; or let a rank that has finished join the remaining all-reduces with zeros
# (torch's `Join`).
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. Your DDP brings zeros for unused parameters. PyTorch's DDP, asked to
# `find_unused_parameters`, leaves `p.grad` at `None` if *no* rank used the parameter. What does it
# need for that, and when does the difference matter?**
#
# <!-- BEGIN SOLUTION -->
# It needs to know what the other ranks used: one more all-reduce, over a vector with one entry per
# parameter. The difference matters for optimisers that do something even with a zero gradient:
# weight decay shrinks the weight, and momentum keeps moving it. With `None` the optimiser
# leaves the parameter alone.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - you can turn a training script for one GPU into one for many, and say why each line changed;
# - you can tell from two runs whether every sample was used, and whether ranks drifted apart;
# - you can say what `DataParallel`, the older way (one process, a thread per GPU, the model copied
#   to all GPUs in every step), does differently, and why nobody should use it;
# - you can explain why a bucket that is too large and one that is too small both cost time.
#
# ## Read next
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020,
#   [arXiv 2006.15704](https://arxiv.org/abs/2006.15704). The design that you rebuilt: buckets,
#   overlap, unused parameters.
# - Sergeev and Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*,
#   [arXiv 1802.05799](https://arxiv.org/abs/1802.05799). Baidu's ring all-reduce, made a library.
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*,
#   [arXiv 1706.02677](https://arxiv.org/abs/1706.02677). Learning rate and warm-up for large global
#   batches.
# - McCandlish et al., *An Empirical Model of Large-Batch Training*,
#   [arXiv 1812.06162](https://arxiv.org/abs/1812.06162). How large a batch is still useful.

# %% tags=["script-only"]
dist.barrier()
cleanup()
if IS_RANK_ZERO:
    os.chdir("/")
    shutil.rmtree(where[0])
    print("lab 1 is done")
