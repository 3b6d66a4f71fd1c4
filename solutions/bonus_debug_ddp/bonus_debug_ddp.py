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
# # Bonus · Debug a broken DDP
#
# Distributed bugs are polite. They raise no error, the loss falls, and the model is a little worse
# than it should be. Or nothing happens at all, for ever. In this notebook you get eleven broken
# programs. Every one of them has been written by somebody who knew what they were doing.
#
# **When you have finished, you can**
#
# - find four bugs in a training script of 20 lines, and the fifth that the repair brings (case 1);
# - tell what must be averaged, by what it must be divided, and how often (cases 2, 4, 5);
# - read asynchronous code for handles that nobody waits for (case 3);
# - list the state of a training run: what is shared, what each rank has for itself, what a
#   checkpoint must hold (cases 6, 8, 11);
# - get a score that does not depend on the number of GPUs (case 7);
# - see a deadlock before it happens (cases 9, 10).
#
# Plan 2 hours. You need to know `DistributedDataParallel`, as in lab 1. Nothing here
# needs a GPU.
#
# | case | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 | all |
# |---|---|---|---|---|---|---|---|---|---|---|---|---|
# | points | 18 | 10 | 11 | 8 | 11 | 8 | 9 | 9 | 4 | 7 | 5 | 100 |
#
# Each case has the same form.
#
# 1. A **symptom**, as it might be reported to you.
# 2. The **broken** program, in a cell that you cannot edit. It is there to be read and to be run.
# 3. The **contract**: what it should do. Where the code and the contract differ, there is a bug.
# 4. A cell for your **mended** version. Copy the broken one, and change what is wrong. Most bugs
#    are one line. You may also write the function anew.
# 5. A comparison of the two, and checks. Each check looks for one bug and cannot see the others.
#
# Every cell runs on two ranks. Your grade comes from the same checks with other data and on **3**
# ranks. One of the bugs cannot be seen on two ranks at all.

# %% [markdown]
# ## The idea in one picture
#
# ```
#   the run crashes ──► read the traceback. You are lucky.
#   it hangs        ──► who waits in which collective, and who never comes?
#                       look for collectives under an `if`, in a loop of another length,
#                       or in another order
#   it runs, but …
#      ranks differ ──► what did they start with (6, 11)? what was never reduced (3)?
#      ranks agree, and all are wrong
#                   ──► count the divisions (2, 4, 5), and the samples (1, 7)
#      wrong only after a restart, in epoch 2, on 3 ranks, with Adam
#                   ──► state that was forgotten (1, 8), a 2 that should be W, a mean at the
#                       wrong place (2)
# ```
#
# The tool behind all of it is a comparison. One process with the batch of all ranks is *right by
# definition*. Make the case so small that you can run both, and look for the first number that
# differs.

# %% given="imports"
import contextlib
import copy
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

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
    """torch's DistributedDataParallel around `model`, which it moves to this rank's device."""
    options = {"device_ids": [DEVICE]} if DEVICE.type == "cuda" else {}
    return DistributedDataParallel(model.to(DEVICE), **options)


def tell(*words: object) -> None:
    """Prints, on rank 0 only."""
    if IS_RANK_ZERO:
        print(*words)


def everywhere(value: object) -> list:
    """The value that each rank has brought."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector, on the CPU."""
    return torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])


@contextlib.contextmanager
def demo(needs: str) -> Iterator[None]:
    """Runs a comparison; says so if the case has not been solved yet."""
    try:
        yield
    except Exception as error:
        if not is_not_started(error):
            raise
        tell(f"Nothing to compare yet: do {needs} first.")


def show(draw: Callable, width: float = 7.5, height: float = 2.8) -> None:
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
# ## Case 1 · A script with four bugs
#
# **Symptom.** "We moved to 8 GPUs. An epoch takes as long as before. The loss goes down at first,
# then it jumps about. And now the export job says that it does not know any of our weights."
#
# The script is short, and it has four bugs. The usual repair of the second one brings a fifth.


# %% given="broken_1"
def broken_train(
    model: nn.Module,
    make_data: Callable[[torch.Generator], Batch],
    *,
    seed: int,
    num_epochs: int,
    batch_size: int,
    lr: float,
    path: Path,
) -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed + rank)
    dataset = TensorDataset(*make_data(generator))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for _ in range(num_epochs):
        for x, y in loader:
            logits = ddp_model(x.to(DEVICE))
            loss = F.cross_entropy(logits, y.to(DEVICE))
            loss.backward()
            optimizer.step()
        if rank == 0:
            torch.save(ddp_model.state_dict(), path)


# %% [markdown]
# **The contract of `train`.**
#
# - `make_data(generator)` draws a whole dataset `(x, y)` out of a `torch.Generator`. All ranks
#   train on *one* dataset, the one that a generator seeded with `seed` gives.
# - In an epoch every sample goes through exactly one rank. (If the number of samples is no multiple
#   of the number of ranks, a few come twice: all ranks have equally many.) `batch_size` is that of
#   one rank.
# - Every epoch deals all samples out anew, in another order: no rank keeps its share.
# - Plain SGD; one step per batch, with the gradient of that batch's mean loss and nothing else,
#   also if `model` brings gradients along; the mean over ranks. `model` itself is trained.
# - After each epoch rank 0, and no other, writes the weights to `path`, with `torch.save`. Their
#   names are those of `model`: `model.load_state_dict(torch.load(path))` works without DDP.
#
# <details><summary>Hint 1: data</summary>
#
# Two lines decide who sees which sample. What does `seed + rank` do to the dataset? What does
# `shuffle=True` know of the other ranks?
# </details>
#
# <details><summary>Hint 2: the loop</summary>
#
# `backward()` adds to `p.grad`. And a `DistributedSampler` with its default settings gives the same
# order in every epoch until somebody tells it the epoch.
# </details>
#
# <details><summary>Hint 3: the file</summary>
#
# Print `list(ddp_model.state_dict())`.
# </details>


# %% solution="mend_1"
def train(
    model: nn.Module,
    make_data: Callable[[torch.Generator], Batch],
    *,
    seed: int,
    num_epochs: int,
    batch_size: int,
    lr: float,
    path: Path,
) -> None:
    """Trains `model` on all ranks; rank 0 saves its weights after each epoch."""
    ### BEGIN SOLUTION
    # The data is the same on all ranks: the sampler decides who takes what.
    dataset = TensorDataset(*make_data(torch.Generator().manual_seed(seed)))
    sampler = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    ddp_model = in_ddp(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp_model(x.to(DEVICE)), y.to(DEVICE)).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)  # the module's names, not those of the wrapper
    ### END SOLUTION


# %% [markdown]
# Two classes, two clouds of points. The mended version should have seen each of the 64 samples once
# per epoch, and end with the smaller loss. Expect 64 samples instead of 128 on two ranks, and names
# without `module.`.


# %% demo="compare_1"
class Counting(nn.Linear):
    """Notes which samples go through it, by their first column."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x[:, 0].tolist()
        return super().forward(x[:, 1:].repeat(1, 2)[:, :3])


def clouds(generator: torch.Generator) -> Batch:
    """64 points in two clouds; the first column numbers them."""
    y = torch.arange(64) % 2
    x = torch.randn(64, 2, generator=generator) + 1.5 * y[:, None]
    return torch.cat([torch.arange(64.0)[:, None], x], dim=1), y


with demo("case 1"):
    join_group()
    whole = clouds(torch.Generator().manual_seed(3))
    for name, work in (("broken", broken_train), ("mended", train)):
        torch.manual_seed(0)
        model = Counting()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.pt")
            work(model, clouds, seed=3, num_epochs=1, batch_size=4, lr=0.5, path=path)
            names = list(torch.load(path)) if path.exists() else []
        seen = [number for numbers in everywhere(model.seen) for number in numbers]
        with torch.no_grad():
            loss = F.cross_entropy(model(whole[0].to(DEVICE)), whole[1].to(DEVICE))
        tell(
            f"{name}: {len(seen)} samples seen, {len(set(seen))} different ones; loss on all data "
            f"{loss:.3f}; saved {names}"
        )

# %% check="debug_train_data"
check("debug_train_data", train)

# %% check="debug_train_shares"
check("debug_train_shares", train)

# %% check="debug_train_epochs"
check("debug_train_epochs", train)

# %% check="debug_train_zero_grad"
check("debug_train_zero_grad", train)

# %% check="debug_train_saved"
check("debug_train_saved", train)

# %% [markdown]
# ## Case 2 · The ranks agree
#
# **Symptom.** "All ranks have the same weights after every step, I have checked. With SGD our curve
# is exactly that of one GPU. With Adam it is not. On four GPUs it explodes."


# %% given="broken_2"
def broken_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= 2


# %% [markdown]
# **The contract of `train_step`.** No DDP here, everything by hand.
#
# - All ranks come with the same weights and equally many samples of their own.
# - Afterwards the weights are those that *one* process would have after `optimizer.step()` with the
#   samples of all ranks: for every optimizer, on any number of ranks.
# - Every parameter gets a gradient in every backward. What was in `p.grad` before does not count.
#
# <details><summary>Hint 1: why SGD does not mind</summary>
#
# Let a step be $w - \eta g_r$ on rank $r$. The mean of these over $r$ is $w - \eta \bar g$. So for
# plain SGD, and with momentum, the mean of the steps is the step of the mean. Adam divides by
# $\sqrt{v}$, which has squares in it.
# </details>
#
# <details><summary>Hint 2: why it explodes</summary>
#
# What is the sum of four equal weights, divided by 2?
# </details>


# %% solution="mend_2"
def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    x: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """One step with the gradient of the mean loss over the samples of all ranks."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    ### END SOLUTION


# %% [markdown]
# The comparison is with one process that has the batch of all ranks. Expect zeros (below 1e-6) in
# every row of the mended version. The broken one is right with SGD, as long as there are two ranks.

# %% demo="compare_2"
with demo("case 2"):
    join_group()
    for optimizer_class in (torch.optim.SGD, torch.optim.Adam):
        for name, work in (("broken", broken_step), ("mended", train_step)):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
            one = copy.deepcopy(model)
            optimizers = [optimizer_class(m.parameters(), lr=0.02) for m in (model, one)]
            x, y = torch.randn(5, dist.get_world_size(), 6, 5, device=DEVICE).split([4, 1], dim=-1)
            for step in range(5):
                own = x[step, dist.get_rank()], y[step, dist.get_rank()]
                work(model, optimizers[0], F.mse_loss, *own)
                optimizers[1].zero_grad()
                F.mse_loss(one(x[step].flatten(0, 1)), y[step].flatten(0, 1)).backward()
                optimizers[1].step()
            gap = (flat(model) - flat(one)).abs().max().item()
            tell(f"{optimizer_class.__name__:>4}, {name}: largest difference of a weight {gap:.1e}")

# %% check="debug_step_adam"
check("debug_step_adam", train_step)

# %% check="debug_step_mean"
check("debug_step_mean", train_step)

# %% [markdown]
# ## Case 3 · Gradients in buckets
#
# **Symptom.** "Our own overlap code is fast. The ranks drift apart, but not always. With a debugger
# attached they never do. Some layers do not seem to learn together at all."


# %% given="broken_3"
def broken_reduce(params: Sequence[nn.Parameter], bucket_bytes: int) -> None:
    bucket, size, sent, work = [], 0, [], None
    for p in params:
        bucket.append(p.grad)
        size += p.grad.nbytes
        if size >= bucket_bytes:
            data = torch.cat([grad.flatten() for grad in bucket])
            work = dist.all_reduce(data, async_op=True)
            sent.append((data, bucket))
            bucket, size = [], 0
    if work is not None:
        work.wait()
    for data, grads in sent:
        parts = (data / dist.get_world_size()).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


# %% [markdown]
# **The contract of `reduce_in_buckets`.**
#
# - Every parameter in `params` has a gradient; the shapes are the same on all ranks. All
#   gradients are contiguous and have one dtype, which may be any floating-point type.
# - Gradients are packed into buckets, in their order or from the last one on. A bucket is full when
#   it holds `bucket_bytes` or more. You may also close it when the next gradient would take it
#   beyond. A gradient larger than `bucket_bytes` is never cut. A bucket travels in one asynchronous
#   all-reduce while the next one is packed.
# - When the function returns, every `p.grad` is the mean over the ranks. It may be a new tensor.
#
# <details><summary>Hint 1: count</summary>
#
# Take 5 gradients and buckets of 2. How many buckets are sent? How many handles are there, and how
# many are still known when the loop has ended?
# </details>
#
# <details><summary>Hint 2: why a debugger helps</summary>
#
# `async_op=True` means: the tensor is not yet yours. Read it before *its* `wait()`, and you get
# what you sent, or the result, or half of each. The slower you are, the more often it looks right.
# </details>


# %% solution="mend_3"
def reduce_in_buckets(params: Sequence[nn.Parameter], bucket_bytes: int) -> None:
    """Every p.grad becomes the mean over all ranks; gradients travel in buckets."""
    ### BEGIN SOLUTION
    # 1. Cut the list into buckets; what is left at the end is one too.
    buckets, size = [[]], 0
    for p in params:
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(p.grad)
        size += p.grad.nbytes

    # 2. Send them all, and keep every handle.
    sent = []
    for grads in filter(None, buckets):
        data = torch.cat([grad.flatten() for grad in grads])
        sent.append((dist.all_reduce(data, async_op=True), data, grads))

    # 3. Each is used after its own handle.
    for work, data, grads in sent:
        work.wait()
        parts = (data / dist.get_world_size()).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
    ### END SOLUTION


# %% [markdown]
# Gradient $i$ of rank $r$ is $r + i$ here, so the means are easy to tell. The rows should read
# $i + (W-1)/2$: 0.5, 1.5, 2.5, … on two ranks. On your machine the stale handle may not show. The
# check runs on an emulated cluster, where a result arrives exactly when it is waited for.

# %% demo="compare_3"
with demo("case 3"):
    join_group()
    for name, work in (("broken", broken_reduce), ("mended", reduce_in_buckets)):
        params = [nn.Parameter(torch.zeros(2, device=DEVICE)) for _ in range(5)]
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, float(dist.get_rank() + i))
        work(params, bucket_bytes=16)
        dist.barrier()
        tell(f"{name}: {[p.grad[0].item() for p in params]}")

# %% check="debug_bucket_tail"
check("debug_bucket_tail", reduce_in_buckets)

# %% check="debug_bucket_wait"
check("debug_bucket_wait", reduce_in_buckets)

# %% [markdown]
# ## Case 4 · Half the learning rate
#
# **Symptom.** "Somebody cleaned up the accumulation loop. Since then every run is slower the more
# GPUs it has, and the loss in the log does not match the one in the evaluation."


# %% given="broken_4"
def broken_accumulate(
    ddp_model: DistributedDataParallel, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    k, total = len(micro_batches), 0.0
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y)
            (loss / k / dist.get_world_size()).backward()
        total += loss.item()
    return total / k


# %% [markdown]
# **The contract of `accumulate`.**
#
# - Every rank has its own micro-batches, equally many on all ranks. All of them have equally many
#   samples. Gradients are clear at the beginning. There is no step here.
# - Afterwards every `p.grad` is the gradient of the mean loss over the samples of all ranks. How
#   often gradients travel is not judged.
# - It returns that mean loss, a `float` or a tensor of one number, the same on all ranks.
#
# <details><summary>Hint</summary>
#
# Who divides by the number of ranks? Write down every factor between a sample's loss and `p.grad`,
# and those between a sample's loss and the number in the log.
# </details>


# %% solution="mend_4"
def accumulate(
    ddp_model: DistributedDataParallel, micro_batches: Sequence[Batch], loss_fn: LossFn
) -> float:
    """Leaves in p.grad the gradient of the mean loss over all ranks; returns that loss."""
    ### BEGIN SOLUTION
    k = len(micro_batches)
    total = torch.zeros((), device=micro_batches[0][0].device)
    for i, (x, y) in enumerate(micro_batches):
        with ddp_model.no_sync() if i < k - 1 else contextlib.nullcontext():
            loss = loss_fn(ddp_model(x), y) / k  # DDP divides by the number of ranks, once
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
    ### END SOLUTION


# %% demo="compare_4"
with demo("case 4"):
    join_group()
    for name, work in (("broken", broken_accumulate), ("mended", accumulate)):
        ddp_model = in_ddp(nn.Linear(1, 1, bias=False))
        rank = dist.get_rank()
        micro = [(torch.ones(2, 1, device=DEVICE), torch.zeros(2, 1, device=DEVICE))] * 3
        # The loss is (rank + 1) times the weight, so its gradient is rank + 1 on each rank.
        loss = work(ddp_model, micro, lambda out, _, r=rank: (r + 1) * out.mean())
        weight, world_size = ddp_model.module.weight.item(), dist.get_world_size()
        gradient = ddp_model.module.weight.grad.item()
        tell(
            f"{name}: gradient {gradient:.3f}, loss / weight {loss / weight:.3f}  "
            f"(expected {(world_size + 1) / 2:.3f} for both)"
        )

# %% check="debug_accumulate_scale"
check("debug_accumulate_scale", accumulate)

# %% check="debug_accumulate_loss"
check("debug_accumulate_loss", accumulate)

# %% [markdown]
# ## Case 5 · A scaler of our own
#
# **Symptom.** "We replaced `GradScaler` by ten lines that we understand. Training works, but there
# is a kink in the curve every 2000 steps, and clipping makes the model learn nothing at all."
#
# `LossScaler` itself is right. The step that uses it is not.


# %% given="broken_5"
class LossScaler:
    """The factor that keeps small fp16 gradients alive.

    It doubles after `growth_interval` good steps in a row, and halves after an overflow.
    """

    def __init__(self, scale: float, growth_interval: int) -> None:
        self.scale, self.growth_interval = scale, growth_interval
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """To be called once per step."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale /= 2
        elif self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0


def broken_amp_step(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    loss: torch.Tensor,
    *,
    max_norm: float,
) -> None:
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    grads = [p.grad for p in ddp_model.parameters()]
    overflow = not all(grad.isfinite().all() for grad in grads)
    scaler.update(overflow)
    nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
    for grad in grads:
        grad /= scaler.scale
    if not overflow:
        optimizer.step()


# %% [markdown]
# **The contract of `amp_step`.**
#
# - One step with the gradient of `loss` (the mean over ranks, as DDP gives it). The loss travels
#   through backward times `scaler.scale`; the optimizer gets the true gradient.
# - `max_norm` limits the norm of the *true* gradient, over all parameters.
# - If a gradient is not finite, nobody steps. `scaler.update(overflow)` is called once per step.
# - Every parameter gets a gradient in every backward.
#
# <details><summary>Hint 1: a kink every 2000 steps</summary>
#
# What happens in the scaler every `growth_interval` steps? By which number has the loss been
# multiplied in that step, and by which is the gradient divided?
# </details>
#
# <details><summary>Hint 2: clipping</summary>
#
# Let the true norm be 1, the scale 65536 and `max_norm` 1. What is left of the gradient?
# </details>


# %% solution="mend_5"
def amp_step(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    loss: torch.Tensor,
    *,
    max_norm: float,
) -> None:
    """One optimizer step with a scaled loss."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    grads = [p.grad for p in ddp_model.parameters()]
    overflow = not all(grad.isfinite().all() for grad in grads)
    if not overflow:
        for grad in grads:
            grad /= scaler.scale  # the scale that is in them ...
        nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)
        optimizer.step()
    scaler.update(overflow)  # ... so it may change only now
    ### END SOLUTION


# %% [markdown]
# The true gradient is 1 here, the learning rate 1, and the scale doubles in steps 2, 4 and 6. Every
# step should move the weight by 1, and by 0.5 if clipped to 0.5.

# %% demo="compare_5"
with demo("case 5"):
    join_group()
    for limit in (1e30, 0.5):
        for name, work in (("broken", broken_amp_step), ("mended", amp_step)):
            ddp_model = in_ddp(nn.Linear(1, 1, bias=False))
            optimizer = torch.optim.SGD(ddp_model.parameters(), lr=1.0)
            scaler, moves = LossScaler(1024.0, growth_interval=2), []
            for _ in range(6):
                before = ddp_model.module.weight.item()
                loss = ddp_model(torch.ones(1, 1, device=DEVICE)).mean()
                work(ddp_model, optimizer, scaler, loss, max_norm=limit)
                moves.append(round(before - ddp_model.module.weight.item(), 4))
            tell(f"max_norm {limit:g}, {name}: steps of {moves}")

# %% check="debug_amp_order"
check("debug_amp_order", (amp_step, LossScaler))

# %% check="debug_amp_clip"
check("debug_amp_clip", (amp_step, LossScaler))

# %% [markdown]
# ## Case 6 · The same start
#
# **Symptom.** "Training is fine on all ranks. In evaluation rank 3 is two points worse than rank 0.
# It has the same trainable weights, to the last bit."


# %% given="broken_6"
def broken_broadcast(model: nn.Module) -> None:
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=0)


# %% [markdown]
# **The contract of `broadcast_model`.** Afterwards the forward pass of `model` is the same function
# on all ranks: rank 0's. The structure of the model is the same everywhere.
#
# <details><summary>Hint</summary>
#
# What enters a forward pass and is no trainable parameter? `BatchNorm` has some. Not all of it is
# in the `state_dict()`: look up `persistent=False`.
# </details>


# %% solution="mend_6"
def broadcast_model(model: nn.Module) -> None:
    """Every rank gets rank 0's parameters and buffers."""
    ### BEGIN SOLUTION
    for p in model.parameters():  # frozen ones too: they are used, if not trained
        dist.broadcast(p.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    ### END SOLUTION


# %% demo="compare_6"
with demo("case 6"):
    join_group()
    for name, work in (("broken", broken_broadcast), ("mended", broadcast_model)):
        torch.manual_seed(dist.get_rank())  # on purpose: another start on each rank
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(DEVICE)
        model[0].requires_grad_(False)
        model(10 * torch.rand(64, 4, device=DEVICE))  # moves the running mean
        work(model.eval())
        outputs = everywhere(round(model(torch.ones(1, 4, device=DEVICE)).item(), 4))
        tell(f"{name}: the same input gives {outputs} on the ranks")

# %% check="debug_broadcast_buffers"
check("debug_broadcast_buffers", broadcast_model)

# %% check="debug_broadcast_frozen"
check("debug_broadcast_frozen", broadcast_model)

# %% [markdown]
# ## Case 7 · The score depends on the cluster
#
# **Symptom.** "The same checkpoint scores 71.3 on one GPU, 71.4 on 4 and 71.9 on 64. Reviewers have
# asked."


# %% given="broken_7"
def broken_evaluate(model: nn.Module, dataset: Dataset, loss_fn: LossFn, batch_size: int) -> float:
    sampler = DistributedSampler(dataset, shuffle=False)
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE))
            totals[1] += 1
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


# %% [markdown]
# **The contract of `evaluate`.**
#
# - Every rank has the whole dataset. Each sample is looked at once, by one rank; the shares are as
#   even as they can be. There may be fewer samples than ranks.
# - It returns the mean loss over all samples, each with the same weight, on all ranks.
#   `loss_fn` gives the mean over a batch. At most `batch_size` samples go through the model at
#   once.
#
# <details><summary>Hint 1: samples</summary>
#
# Print `list(DistributedSampler(range(5), num_replicas=2, rank=r))` for both ranks.
# </details>
#
# <details><summary>Hint 2: weights</summary>
#
# A batch of 3 and one of 32 enter `totals` alike. Who has noticed?
# </details>
#
# <details><summary>Hint 3: another sampler</summary>
#
# In evaluation nothing forces ranks to make equally many steps. `range(rank, n, world_size)` is a
# fine sampler. `torch.utils.data.Subset` takes it.
# </details>


# %% solution="mend_7"
def evaluate(model: nn.Module, dataset: Dataset, loss_fn: LossFn, batch_size: int) -> float:
    """The mean loss over all samples of the dataset, computed by all ranks together."""
    ### BEGIN SOLUTION
    own = range(dist.get_rank(), len(dataset), dist.get_world_size())  # no padding
    totals = torch.zeros(2, dtype=torch.float64, device=DEVICE)  # sum of losses, samples
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=own):
            totals[0] += loss_fn(model(x.to(DEVICE)), y.to(DEVICE)) * len(x)
            totals[1] += len(x)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()
    ### END SOLUTION


# %% demo="compare_7"
with demo("case 7"):
    join_group()
    targets = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])[:, None]
    hard_ones = TensorDataset(torch.zeros(11, 1), targets)  # the "loss" of sample i is i
    for name, work in (("broken", broken_evaluate), ("mended", evaluate)):
        means = [
            work(nn.Identity(), hard_ones, lambda out, y: (y - out).mean(), size)
            for size in (1, 4, 16)
        ]
        tell(f"{name}: {[round(mean, 4) for mean in means]}  (expected 5.0 each)")

# %% check="debug_evaluate_tail"
check("debug_evaluate_tail", evaluate)

# %% check="debug_evaluate_batches"
check("debug_evaluate_batches", evaluate)

# %% [markdown]
# ## Case 8 · The bump after the restart
#
# **Symptom.** "After every restart the loss jumps up and needs an hour to come back. And two runs
# from the same checkpoint never agree with the run that was not interrupted."


# %% given="broken_8"
def broken_save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "step": step}, folder / "checkpoint.pt")
    dist.barrier()


def broken_load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = torch.load(folder / "checkpoint.pt", map_location=DEVICE)
    model.load_state_dict(state["model"])
    return state["step"]


# %% [markdown]
# **The contract of `save_checkpoint` and `load_checkpoint`.**
#
# - All ranks call both. `folder` is one folder that all of them see. Model and optimizer are the
#   same on all ranks. There are as many ranks at loading as there were at saving.
# - After `load_checkpoint`, with a new model and a new optimizer of the same kind, the run goes on
#   as if it had never stopped: the same weights, the same optimizer, and on *each* rank the
#   same random numbers of torch's default CPU generator.
# - `load_checkpoint` returns the step that was saved last, which need not be the largest.
# - When `save_checkpoint` returns, on whatever rank, all files are there.
#
# <details><summary>Hint 1: what has a memory?</summary>
#
# Adam has two moments per weight. A generator has a state: `torch.get_rng_state()`. What else would
# there be in a real run? Scheduler, scaler, sampler's epoch.
# </details>
#
# <details><summary>Hint 2: whose state?</summary>
#
# Weights are the same on all ranks, so one file will do. Random states are not: dropout draws
# another mask on each rank. One file per rank, or gather them first.
# </details>
#
# <details><summary>Hint 3: an error about a ByteTensor</summary>
#
# Random states belong on the CPU. `map_location=DEVICE` moves them too.
# </details>


# %% solution="mend_8"
def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Writes all that the run needs to go on as if nothing had happened."""
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    torch.save(torch.get_rng_state(), folder / f"random_{rank}.pt")  # every rank has its own
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()  # when anybody goes on, all files are there
    ### END SOLUTION


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restores model, optimizer and this rank's random state; returns the step."""
    ### BEGIN SOLUTION
    state = torch.load(folder / "checkpoint.pt", map_location=DEVICE)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(torch.load(folder / f"random_{dist.get_rank()}.pt"))
    return state["step"]
    ### END SOLUTION


# %% [markdown]
# A hundred steps with Adam, and a restart after 60. Without its moments Adam takes small gradients
# for large ones, and jumps. The mended run lies on the uninterrupted curve.


# %% demo="compare_8"
def descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model.weight**2 * torch.tensor([[1.0, 30.0]], device=DEVICE)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw_restarts(ax, curves):
    for (label, losses), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        ax.plot(range(100 - len(losses), 100), losses, style, linewidth=2, label=label)
    ax.set(xlabel="step", ylabel="loss", yscale="log")
    ax.legend()


with demo("case 8"):
    join_group()
    folders = [tempfile.mkdtemp() if IS_RANK_ZERO else ""]
    dist.broadcast_object_list(folders, src=0, device=DEVICE)
    pairs = {"broken": (broken_save, broken_load), "mended": (save_checkpoint, load_checkpoint)}

    def new_run() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False).to(DEVICE)
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    curves = {}
    for name, (save, load) in pairs.items():
        folder = Path(folders[0], name)  # rank 0 may save the next while others load this one
        folder.mkdir(exist_ok=True)
        run = new_run()
        first = descend(*run, 60)
        save(folder, *run, 60)
        curves["uninterrupted"] = first + descend(*run, 40)
        run = new_run()
        load(folder, *run)
        curves[name] = descend(*run, 40)
    whole = curves["uninterrupted"][60:]
    for name in pairs:
        gap = max(abs(a - b) / b for a, b in zip(curves[name], whole, strict=True))
        tell(f"{name}: largest relative difference to the uninterrupted run {gap:.1e}")
    show(lambda ax: draw_restarts(ax, curves))
    dist.barrier()
    shutil.rmtree(folders[0], ignore_errors=True)

# %% check="debug_resume_optimizer"
check("debug_resume_optimizer", (save_checkpoint, load_checkpoint))

# %% check="debug_resume_random"
check("debug_resume_random", (save_checkpoint, load_checkpoint))

# %% [markdown]
# ## Case 9 · Once is enough
#
# **Symptom.** "The first start on a new machine always fails: ranks 1 to 7 cannot open the
# tokenised data, and rank 0 hangs until somebody kills it. The second start hangs, too."


# %% given="broken_9"
def broken_prepare(build: Callable[[], object], load: Callable[[], object]) -> object:
    if dist.get_rank() == 0:
        build()
        dist.barrier()
    return load()


# %% [markdown]
# **The contract of `prepare_once`.**
#
# - `build()` is called once, by rank 0. It may take an hour.
# - Afterwards every rank calls `load()` once, and the function returns what that gave. No `load()`
#   begins before `build()` has returned.
# - Ranks meet in a collective, not by sleeping or by looking for files.
#
# Do not try the broken version here: it would hang the notebook. The check can, because the
# emulated cluster knows that the others will never come.
#
# <details><summary>Hint</summary>
#
# Every collective must be reached by every rank. Which ranks reach this barrier?
# </details>


# %% solution="mend_9"
def prepare_once(build: Callable[[], object], load: Callable[[], object]) -> object:
    """Rank 0 builds, then all ranks load; returns what `load` gave."""
    ### BEGIN SOLUTION
    if dist.get_rank() == 0:
        build()
    dist.barrier()  # the others wait here until rank 0 has built
    return load()
    ### END SOLUTION


# %% check="debug_once"
check("debug_once", prepare_once)

# %% [markdown]
# ## Case 10 · An accuracy of 1.5
#
# **Symptom.** "Our dashboard shows an accuracy of 1.5. Only in some runs, and then the loss is too
# low. Since we log the number of bad samples where there are any, some runs hang as well."


# %% given="broken_10"
def broken_metrics(metrics: dict[str, float]) -> dict[str, float]:
    reduced = {}
    for name, value in metrics.items():
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        reduced[name] = total.item() / dist.get_world_size()
    return reduced


# %% [markdown]
# **The contract of `reduce_metrics`.**
#
# - `metrics` has what this rank has measured, finite numbers. Other ranks may have noted the same
#   names in another order, and a rank may lack some names, or all, or have some that no other has.
# - Every rank gets all names that *any* rank has, each with its mean over the ranks that have it.
#
# (On the check's emulated cluster tensors are on the CPU, as they are here.)
#
# <details><summary>Hint 1: order</summary>
#
# Nothing in an all-reduce says "loss". The first of one rank meets the first of the other. Two
# dictionaries with equal content may well differ in their order.
# </details>
#
# <details><summary>Hint 2: missing ones</summary>
#
# Before ranks can loop over the same names they have to agree on them. `dist.all_gather_object`
# takes any Python object; for a few numbers per step it is good enough.
# </details>


# %% solution="mend_10"
def reduce_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The mean of each metric over the ranks that have it, the same on all ranks."""
    ### BEGIN SOLUTION
    # 1. Agree on the names, in an order that does not depend on the rank.
    names_per_rank = [None] * dist.get_world_size()
    dist.all_gather_object(names_per_rank, list(metrics))
    names = sorted(set().union(*names_per_rank))

    # 2. One all-reduce of sums and counts; who lacks a metric brings zeros.
    totals = torch.zeros(2, len(names), dtype=torch.float64)
    for i, name in enumerate(names):
        if name in metrics:
            totals[0, i], totals[1, i] = metrics[name], 1
    dist.all_reduce(totals)
    return dict(zip(names, (totals[0] / totals[1]).tolist(), strict=True))
    ### END SOLUTION


# %% demo="compare_10"
with demo("case 10"):
    join_group()
    if DEVICE.type == "cpu":  # nccl cannot reduce these tensors
        measured = {"loss": 2.3, "accuracy": 0.7}
        if dist.get_rank() % 2:
            measured = dict(reversed(measured.items()))
        for name, work in (("broken", broken_metrics), ("mended", reduce_metrics)):
            tell(f"{name}: {work(measured)}")

# %% check="debug_metrics_order"
check("debug_metrics_order", reduce_metrics)

# %% check="debug_metrics_missing"
check("debug_metrics_missing", reduce_metrics)

# %% [markdown]
# ## Case 11 · Seeds
#
# **Symptom.** "We do not use DDP's broadcast, we seed. Every rank has other weights. And somebody
# has found out that all ranks drop the very same units in every step."


# %% given="broken_11"
def broken_build(make_model: Callable[[], nn.Module], seed: int, rank: int) -> nn.Module:
    torch.manual_seed(seed + rank)
    model = make_model()
    torch.manual_seed(seed)
    return model


# %% [markdown]
# **The contract of `build_model`.** There is no communication in it.
#
# - `make_model()` draws initial weights from torch's default generator. They are the same on
#   every rank, and depend on `seed` alone.
# - After the call the default generator gives other numbers on each rank, for dropout. They depend
#   on both `seed` and `rank`, and on nothing else: a second run gets the same ones. A rank may draw
#   again the numbers that the weights came from.
#
# <details><summary>Hint</summary>
#
# Both lines are needed. They are not where they should be.
# </details>


# %% solution="mend_11"
def build_model(make_model: Callable[[], nn.Module], seed: int, rank: int) -> nn.Module:
    """A model with the same weights on all ranks; afterwards each has random numbers of its own."""
    ### BEGIN SOLUTION
    torch.manual_seed(seed)  # the same start everywhere ...
    model = make_model()
    torch.manual_seed(seed + 1 + rank)  # ... then each for itself
    return model
    ### END SOLUTION


# %% demo="compare_11"
with demo("case 11"):
    for name, work in (("broken", broken_build), ("mended", build_model)):
        for rank in range(3):  # no process group is needed to look at three ranks
            weights = work(lambda: nn.Linear(3, 1), 7, rank).weight.flatten().tolist()
            mask = F.dropout(torch.ones(12), 0.5).bool().int().tolist()
            tell(f"{name}, rank {rank}: weights {[round(w, 2) for w in weights]}, mask {mask}")

# %% check="debug_seed_weights"
check("debug_seed_weights", build_model)

# %% check="debug_seed_dropout"
check("debug_seed_dropout", build_model)

# %% [markdown]
# ## Reflect
#
# A mended line is worth little to somebody who does not know why. Answer each question in its own
# cell, in a few sentences: replace *YOUR ANSWER HERE*. Whoever runs your course reads the answers
# and gives up to 2 points for each, beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. Explain the bugs of case 1, one sentence each: what it does, and what you would have seen in
# a training log. One of them is often described as "all ranks see the same samples". Is that so?**
#
# <!-- BEGIN SOLUTION -->
# The dataset is drawn with another seed on each rank, so there are W datasets; on made-up data the
# loss curve looks normal. Without a DistributedSampler every rank goes through the whole dataset,
# so an epoch takes as long as on one device. It is not so that all ranks see the same samples: each
# loader shuffles for itself, so at a given step ranks have different, overlapping samples. Without
# zero_grad each step holds all gradients so far: the loss falls, then it oscillates. The wrapper's
# state dict has "module." before each name; loading fails, or with strict=False loads nothing. And
# a sampler that is never told the epoch repeats one order.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. In case 2 the ranks agree after every step, and still the result is wrong. In case 3 they
# disagree. Which check would you put into every training run to notice each of them, and what would
# it not see?**
#
# <!-- BEGIN SOLUTION -->
# Disagreement is found by comparing a checksum of the weights (or the minimum and maximum over
# ranks of a few sums) every few hundred steps. It sees case 3, forgotten broadcasts and unequal
# seeds. It cannot see anything that is wrong in the same way everywhere: a wrong divisor, averaged
# weights, a loss divided twice. For these one needs a reference: a few steps of a tiny model on W
# ranks compared with one process that has the batch of all ranks, at more than one W, with the
# real optimizer.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. Cases 9 and 10 can hang. Give a rule for reading code that finds both, and say why a timeout
# alone does not.**
#
# <!-- BEGIN SOLUTION -->
# On every path that a rank can take there must be the same collectives in the same order; so look
# at each collective and ask which conditions, loop lengths, orders and exceptions above it may
# differ between ranks. Anything that depends on the rank, on local data or on a local dictionary is
# suspect. A timeout tells only that somebody waited, on the rank that did nothing wrong, long
# after; and where shapes happen to fit, as in case 10, nothing waits at all and the numbers are
# mixed.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_4"
# **4. In case 4 a factor is there twice, in case 5 a factor changes between multiplying and
# dividing. List every factor between the loss of one sample and the number that the optimizer
# sees, with W ranks, k micro-batches and a scaler. Why do curves with Adam hide an error in a
# constant factor, and which setting brings it out?**
#
# <!-- BEGIN SOLUTION -->
# 1/batch from the mean in the loss, 1/k from accumulation, times the scale before backward and by
# the same scale after it, 1/W from DDP's average; clipping comes last and wants the true size.
# Adam divides by the root of its second moment, so a constant factor cancels (but for epsilon and
# weight decay that is part of the loss); SGD's step is smaller by the factor. Clipping brings it
# out too, since it compares the norm with a number that was not scaled. A factor that *changes*,
# as after a doubled scale, is no constant and shows with any optimizer as a kink.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_5"
# **5. Cases 6 and 8 both forget state. Make a table of what a training run remembers from one
# step to the next: is it the same on all ranks or does each have its own, and where does it have
# to be copied: at the start, into a checkpoint?**
#
# <!-- BEGIN SOLUTION -->
# Same everywhere: trainable and frozen parameters, buffers (running means, also those that are
# not in the state dict), optimizer moments, scheduler, scaler's scale and counter, epoch and
# step. All are broadcast or built equally at the start and saved once. Each its own: random
# generators (CPU, GPU, NumPy, Python's, loader workers), the place in the data, error feedback of
# compression, and under sharding the shard. These are saved per rank, and need a rule for another
# number of ranks. The buffers of BatchNorm are between the two: without SyncBatchNorm each rank
# moves its own.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_6"
# **6. In case 7 the score depends on the number of ranks; in case 11 the ranks are equal where
# they should differ. For each of these say whether it must be equal on all ranks, must differ, or
# does not matter, and why: initial weights, order of the dataset, samples of a step, dropout
# masks, evaluation shares, the reported score.**
#
# <!-- BEGIN SOLUTION -->
# Initial weights: equal, since only gradients are averaged. Order of the dataset: equal, because
# the sampler cuts one common order into shares. Samples of a step: different, or W ranks do the
# work of one. Dropout masks: different; equal ones correlate the noise, and averaging over ranks
# no longer reduces it (in tensor parallelism the mask of a replicated activation must be equal,
# though). Evaluation shares: different and without padding; who has which does not matter. The
# score: equal and independent of W, as sums and counts are reduced, not means.
# <!-- END SOLUTION -->


# %% [markdown]
# ## You're ready when
#
# - you can say for each of the eleven what you would have seen, and on which number of ranks;
# - you look at a collective and ask at once who else reaches it;
# - you compare with one process before you compare with yesterday.
#
# ## Read next
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, [arXiv
#   2006.15704](https://arxiv.org/abs/2006.15704). Why DDP averages gradients and not weights, and
#   what it does about order.
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, [arXiv
#   1706.02677](https://arxiv.org/abs/1706.02677). Its section on pitfalls is a list of bugs like
#   these.
# - Micikevicius et al., *Mixed Precision Training*, [arXiv
#   1710.03740](https://arxiv.org/abs/1710.03740). Loss scaling, in order.
# - Zhang et al., *OPT: Open Pre-trained Transformer Language Models*, [arXiv
#   2205.01068](https://arxiv.org/abs/2205.01068). A log of what goes wrong in a long run, and how
#   often one has to restart.

# %% tags=["script-only"]
join_group()
dist.barrier()
dist.destroy_process_group()
tell("the bonus is done")
