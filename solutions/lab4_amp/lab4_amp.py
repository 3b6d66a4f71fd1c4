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
# # Lab 4 · Mixed precision
#
# A 16-bit number takes half the memory and half the network traffic of a 32-bit one, and matrix
# units work through it several times faster. But it holds less. In this lab you find out what gets
# lost, and you build the four tools that keep it: a loss scaler, an autocast loop, master weights
# and a compressed all-reduce.
#
# **When you have finished, you can**
#
# - say which numbers fp16 and bf16 lose, and pick a scale that saves them (task 1);
# - write a gradient scaler, one that keeps all ranks together when one of them overflows (task 2);
# - turn a training loop into one with automatic mixed precision: autocast, clipping,
#   accumulation, skipped steps (task 3);
# - measure what a training step keeps in memory, and tell what 16 bits save of it (task 4);
# - time a step on a device that works asynchronously (task 5);
# - choose between fp16, bf16 and neither, alike on all ranks (task 6);
# - train 16-bit weights whose updates are too small for 16 bits (task 7);
# - send gradients in 16 bits (task 8).
#
# Plan three to four hours, at most two of them for tasks 2 and 3; or do half of the tasks in one
# sitting and half in another. You should have done lab 1, up to its task 4. Nothing here needs a
# GPU; if you have one, it is worth 5 extra points.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | all |
# |---|---|---|---|---|---|---|---|---|---|
# | points | 8 | 33 | 28 | 7 | 6 | 4 | 6 | 8 | 100 |
#
# Without overflow handling (1 of amp_scaler_finds, amp_scaler_agrees) this lab gives at most 49
# points.
#
# Every cell runs on two ranks. Checks use practice data here; your grade comes from the same checks
# with other data on **3** ranks. Every task stands alone: if one of them does not work yet, go on
# with the next.

# %% [markdown]
# ## The idea in one picture
#
# ```
#   fp32 parameters ──► 16-bit copies ─► forward ─► loss ─── × S ──► S · loss
#         ▲                (autocast)                                    │
#         │                                                           backward
#         │                                                              │   16-bit gradients,
#         │                                                              ▼   too large to vanish
#         └── optimizer ◄── clip ◄── ÷ S ◄── finite on all ranks? ◄── S · gradients, fp32
#                step                         │                          (mean over ranks)
#                                             └── no: leave the step out, S ← S / 2
#                                             n good steps in a row: S ← 2 · S
# ```
#
# Three things are kept in fp32: the parameters, their gradients and the optimizer's state. What is
# computed between them is in 16 bits. The factor $S$ lifts gradients out of the region where
# fp16 loses them. It must be large enough for the small ones and small enough for the large
# ones. Nobody knows the right $S$ beforehand, so it is searched for while training goes on.

# %% given="imports"
import contextlib
import copy
import io
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder import check, is_not_started
from minidist.device import choose_backend, choose_device

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"


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


def setup() -> tuple[int, int, torch.device]:
    """Joins the process group, as in lab 1: (rank, world_size, device)."""
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(choose_backend())
    return dist.get_rank(), dist.get_world_size(), device


def wrap(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model on its device, in torch's DDP."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=ids)


rank, world_size, device = setup()

# %% [markdown]
# ## Task 1 · What 16 bits can hold
#
# **Why.** A floating-point number is a sign, an exponent and a fraction. The exponent's bits decide
# how large and how small numbers can be; those of the fraction decide how close they lie together.
# fp16 and bf16 spend their 16 bits in opposite ways. The next cell asks torch.

# %% demo="see_formats"
if IS_RANK_ZERO:
    print("format       largest   smallest normal   smallest at all   gap above 1")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        info = torch.finfo(dtype)
        smallest = info.smallest_normal * info.eps
        print(
            f"{str(dtype)[6:]:<10} {info.max:9.2e} {info.smallest_normal:17.2e} "
            f"{smallest:17.2e} {info.eps:13.2e}"
        )
    print()
    for value in (1e-4, 6.1e-5, 1e-6, 6e-8, 2e-8):
        print(f"{value:7.1e} in fp16 is {torch.tensor(value).half().item():.3e}")

# %% [markdown]
# Expected: fp16 reaches from 6e-8 to 65504, bf16 as far as fp32. The price is the last column:
# above 1, bf16 has a number every 0.0078 only. You may have read that 1e-4 *underflows* in fp16,
# because its smallest normal number is 6.1e-5. It does not. First, 1e-4 is larger than that.
# Second, below 6.1e-5 come the **subnormal** numbers, which have fewer and fewer digits, down to
# 6e-8. What rounds to less than half of *that* becomes 0.
#
# **Write `lost_share(values, dtype, scale=1.0)`**: what does a format lose?
#
# - Of the entries of `values` (fp32) that are not 0: which share becomes 0 when
#   `scale * values` is stored in `dtype`? A Python `float` between 0 and 1.
# - The product is computed in the dtype that `values` has, and then rounded to `dtype`.
# - If there is no entry, or none but zeros, nothing gets lost: 0.0.
#
# **Write `safe_scale(gradients, dtype)`**: how far up can we go?
#
# - The largest power of two $2^k$ so that no entry of any tensor in the list `gradients` exceeds
#   `torch.finfo(dtype).max` in absolute value when it is multiplied with $2^k$: on **any** rank.
# - Every rank has other gradients, perhaps more or fewer of them, and gets the same answer. A
#   Python `float`, below 1 if an entry is too large as it is. Some entry of some rank is not 0;
#   another rank may have zeros only. Each rank has at least one tensor, and none is empty.
# - The gradients stay as they are.
#
# Why a power of two? Multiplying with it changes the exponent only. No digit is rounded away.
#
# <details><summary>Hint 1: lost_share</summary>
#
# `(scale * values).to(dtype) == 0` finds them. Do not forget to leave out those that were 0
# before.
# </details>
#
# <details><summary>Hint 2: safe_scale</summary>
#
# All that counts is the largest absolute value; `dist.ReduceOp.MAX` finds it over all ranks.
# For the exponent: `math.floor(math.log2(…))`.
# </details>


# %% solution="task1_formats"
def lost_share(values: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> float:
    """Share of the non-zero entries of `values` that are 0 as `dtype`, after scaling."""
    ### BEGIN SOLUTION
    alive = values[values != 0]
    if alive.numel() == 0:
        return 0.0
    stored = (alive * scale).to(dtype)
    return (stored == 0).double().mean().item()
    ### END SOLUTION


def safe_scale(gradients: list[torch.Tensor], dtype: torch.dtype) -> float:
    """The largest power of two that takes no entry of any rank out of `dtype`'s range."""
    ### BEGIN SOLUTION
    largest = torch.stack([g.abs().max() for g in gradients]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest.item()))
    ### END SOLUTION


# %% [markdown]
# The next cell makes up gradients as one finds them in a deep network: over many orders of
# magnitude. See what the scale does: it moves the whole cloud to the right.


# %% demo="see_underflow"
def draw_gradients(ax, gradients, scales):
    info = torch.finfo(torch.float16)
    bins = [10 ** (e / 4) for e in range(-48, 24)]
    for scale in scales:
        numbers = (gradients.abs() * scale).tolist()
        ax.hist(numbers, bins=bins, alpha=0.6, label=f"scale {scale:g}")
    ax.axvspan(info.smallest_normal * info.eps, info.smallest_normal, color="gold", alpha=0.3)
    ax.axvline(info.smallest_normal * info.eps, color="C3")
    ax.axvline(info.max, color="C3")
    ax.set(xscale="log", xlabel="|gradient|; fp16 ends at the red lines, yellow: subnormal")
    ax.legend()


with demo("task 1"):
    numbers = torch.Generator().manual_seed(rank)
    gradients = 10 ** (torch.randn(20_000, generator=numbers) * 1.3 - 7)
    best = safe_scale([gradients.to(device)], torch.float16)
    if IS_RANK_ZERO:
        for scale in (1.0, 2.0**10, best):
            lost = lost_share(gradients, torch.float16, scale)
            print(f"scale {scale:>8g}: fp16 loses {lost:6.1%} of these gradients")
        print(f"bf16, unscaled : it loses {lost_share(gradients, torch.bfloat16):6.1%}")
    show(partial(draw_gradients, gradients=gradients, scales=(1.0, best)))

# %% check="amp_lost_share"
check("amp_lost_share", lost_share)

# %% check="amp_safe_scale"
check("amp_safe_scale", safe_scale)

# %% [markdown]
# ## Task 2 · The loss scaler
#
# **Why.** By the chain rule, a loss that is $S$ times as large has gradients that are $S$ times as
# large, all of them, in every layer. So we multiply one number, the loss, and every 16-bit gradient
# on the way back is lifted. Before the optimizer sees them, the (fp32) gradients are divided by $S$
# again. If $S$ was too large, some gradient is inf or nan. Then there is nothing to be saved: the
# step is left out, and $S$ gets smaller. If all goes well for a while, $S$ gets larger. Leaving out
# one step in thousands costs nothing.
#
# torch has this as `torch.amp.GradScaler`. Yours has nearly the same methods:
#
# ```python
# scaler = LossScaler()
# scaler.scale(loss).backward()
# scaler.unscale_(optimizer)         # may be left out: then step does it
# taken = scaler.step(optimizer)     # False if the step was left out
# scaler.update()                    # the scale for the next step
# ```
#
# **Write `LossScaler`.**
#
# - `scale(loss)` returns the loss times the scale, in fp32, with its graph. `loss` itself stays.
# - `unscale_(optimizer)` divides every gradient of the optimizer's parameters by the scale, in
#   place. Parameters without a gradient (`None`) are left alone; at least one has a gradient. A
#   second call before `update()`, also after `step`, would divide twice: it raises `RuntimeError`.
# - `step(optimizer)` unscales, unless that has been done. Then it calls `optimizer.step()` if
#   *every entry of every gradient on every rank* is finite, and returns `True`; else it calls
#   nothing and returns `False`. Look at the entries, before or after you divide: a sum or a norm
#   can overflow though all of them are finite.
# - `update()` ends the step. Was it left out? Then the scale is multiplied by `backoff_factor`.
#   Were `growth_interval` steps *in a row* taken since the scale last changed? Then it is
#   multiplied by `growth_factor`, and the count starts again. A step that was left out starts it
#   again as well.
# - `get_scale()` returns the scale as a Python `float`. `step` is called once before each
#   `update`, and there is one optimizer.
# - `state_dict()` returns a new dict of plain numbers, which later steps do not change;
#   `load_state_dict(state)` makes a scaler go on exactly as the saved one would have, whatever
#   arguments it was made with.
#
# **All ranks together.** Behind DDP the gradients are means over all ranks, so an inf of one rank
# is an inf on all. But you must not count on it: with sharded gradients (lab 3), each rank sees its
# own part only. If one rank leaves a step out and the others take it, their weights differ from
# then on, and their scales too. So ranks agree: a step is left out if *any* of them overflowed.
#
# <details><summary>Hint 1: is everything finite?</summary>
#
# `torch.isfinite(grad).all()` is a tensor with one bool. It is False for nan as well.
# </details>
#
# <details><summary>Hint 2: how ranks agree</summary>
#
# A tensor with 1.0 on ranks that overflowed and 0.0 on others, and an all-reduce with
# `dist.ReduceOp.MAX`. Every rank has to take part, in every step: also those where nothing
# happened.
# </details>
#
# <details><summary>Hint 3: what to remember</summary>
#
# Between calls you need: the scale, the count of good steps, and a field that is `None` as long as
# this step's gradients are scaled, and `True` or `False` (was there an overflow?) after that.
# `update` sets it back to `None`.
# </details>


# %% solution="task2_scaler"
class LossScaler:
    """Scales the loss, unscales gradients, leaves out steps that overflow on any rank."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        """Remembers the settings; no step has been taken."""
        ### BEGIN SOLUTION
        self.current = init_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.good_steps = 0  # in a row, since the scale changed
        self.overflow: bool | None = None  # None: this step's gradients are still scaled
        ### END SOLUTION

    def get_scale(self) -> float:
        """The scale."""
        ### BEGIN SOLUTION
        return float(self.current)
        ### END SOLUTION

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        ### BEGIN SOLUTION
        return loss.float() * self.current
        ### END SOLUTION

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, and learns whether any rank overflowed."""
        ### BEGIN SOLUTION
        if self.overflow is not None:
            raise RuntimeError("unscale_() was called already since the last update()")
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]

        finite = torch.stack([torch.isfinite(grad).all() for grad in grads]).all()
        for grad in grads:
            grad.div_(self.current)

        # One decision for all ranks, or their weights drift apart.
        flag = (~finite).float()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.overflow = bool(flag.item())
        ### END SOLUTION

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Takes the step if all gradients of all ranks are finite; True if it was taken."""
        ### BEGIN SOLUTION
        if self.overflow is None:
            self.unscale_(optimizer)
        if self.overflow:
            return False
        optimizer.step()
        return True
        ### END SOLUTION

    def update(self) -> None:
        """Backs off after an overflow, grows after enough good steps."""
        ### BEGIN SOLUTION
        if self.overflow:
            self.current *= self.backoff_factor
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.current *= self.growth_factor
                self.good_steps = 0
        self.overflow = None
        ### END SOLUTION

    def state_dict(self) -> dict[str, float]:
        """All that a checkpoint needs."""
        ### BEGIN SOLUTION
        return {
            "scale": self.current,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "good_steps": self.good_steps,
        }
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where the saved scaler was."""
        ### BEGIN SOLUTION
        self.current = state["scale"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = int(state["growth_interval"])
        self.good_steps = int(state["good_steps"])
        ### END SOLUTION


# %% [markdown]
# The next cell lets the scaler search. The only gradient overflows as soon as the scale exceeds
# 1000. Expected: the scale climbs, falls back, and goes on between 512 and 1024.


# %% demo="see_scaler"
def draw_scales(ax, scales):
    ax.step(range(len(scales)), scales, where="post")
    ax.axhline(1000, color="C3", linestyle="--")
    ax.set(yscale="log", xlabel="step", ylabel="scale")


with demo("task 2"):
    weight = nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = LossScaler(init_scale=16.0, growth_interval=4)
    scales, skipped = [], 0
    for _ in range(60):
        scales.append(scaler.get_scale())
        weight.grad = torch.tensor([1.0 if scaler.get_scale() < 1000 else math.inf], device=device)
        skipped += not scaler.step(optimizer)
        scaler.update()
    if IS_RANK_ZERO:
        print(f"scale at the end {scaler.get_scale():g}, {skipped} of 60 steps left out")
    show(partial(draw_scales, scales=scales))

# %% check="amp_scaler_scale"
check("amp_scaler_scale", LossScaler)

# %% check="amp_scaler_unscale"
check("amp_scaler_unscale", LossScaler)

# %% check="amp_scaler_finds"
check("amp_scaler_finds", LossScaler)

# %% check="amp_scaler_agrees"
check("amp_scaler_agrees", LossScaler)

# %% check="amp_scaler_grows"
check("amp_scaler_grows", LossScaler)

# %% check="amp_scaler_state"
check("amp_scaler_state", LossScaler)

# %% [markdown]
# ## Task 3 · The training loop
#
# **Why.** `torch.autocast` chooses a dtype for every operation while it is switched on. Matrix
# products and convolutions take 16-bit copies of their inputs. Sums, exponentials and the like
# get fp32. The parameters stay what they are: never call `model.half()`. (You may meet
# `torch.cuda.amp.autocast` in older code. It is deprecated, and works on one kind of device.)
#
# Four things go wrong in practice, all of them quietly:
#
# - *The loss is computed outside.* The block ends too early, and what the loss does in matrix
#   products runs at full price.
# - *Backward runs inside.* Each operation's backward already knows the dtype of its forward. Under
#   autocast, operations that you deliberately kept in fp32 get a 16-bit backward.
# - *Clipping sees scaled gradients.* A norm of 1 is a norm of 65536 for `clip_grad_norm_`, so
#   every step is cut down to nothing.
# - *The schedule runs on* although the step was left out.
#
# **Write `train_amp(…)`.**
#
# - `model` is wrapped in DDP already. `batches` is a list of `(x, y)` on this rank's device. Each
#   goes through the model by itself.
# - Forward and `loss_fn(model(x), y)` run under autocast, for the device type of `x`, with `dtype`.
#   `dtype=None` means full precision: no autocast. Backward runs outside.
# - One optimizer step for every `accumulate` batches (`len(batches)` is a multiple of it). The
#   gradient of a step is the mean over its batches.
# - `scaler` is a scaler like yours, with `scale`, `unscale_`, `step`, `update`, `get_scale`. It
#   takes part in full precision too. Gradients are cleared before every step, the first one too (to
#   zero or to `None`), and nothing of a step that was left out reaches the next.
# - If `max_norm` is given, the norm of the *unscaled* gradient is clipped to it.
# - `scaler.update()` once per step, after `scaler.step`. The scale must not change while gradients
#   add up.
# - If there is a `scheduler`, its `step()` is called after each step that was taken, and only then.
# - Return one Python `float` per optimizer step, also for one that was left out: the mean over its
#   batches of this rank's unscaled loss. Batches may differ in size; each counts the same.
#
# <details><summary>Hint 1: autocast or not</summary>
#
# `torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None)`
# </details>
#
# <details><summary>Hint 2: accumulation</summary>
#
# Divide each loss by `accumulate` before you scale it. `unscale_`, clipping, `step` and `update`
# come after the last of the batches. (`with model.no_sync():` around the others saves all-reduces;
# lab 2 is about that. Here it is up to you.)
# </details>
#
# <details><summary>Hint 3: clipping</summary>
#
# `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, between `unscale_` and `step`.
# </details>


# %% solution="task3_loop"
def train_amp(
    model: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    *,
    dtype: torch.dtype | None,
    max_norm: float | None = None,
    accumulate: int = 1,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """Trains `model` with mixed precision; returns the unscaled loss of each optimizer step."""
    ### BEGIN SOLUTION
    losses = []
    for start in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        loss_sum = 0.0
        for x, y in batches[start : start + accumulate]:
            with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
                loss = loss_fn(model(x), y) / accumulate
            scaler.scale(loss).backward()  # DDP averages the scaled gradients in here
            loss_sum += loss.item()

        if max_norm is not None:
            scaler.unscale_(optimizer)  # the threshold is meant for the true gradient
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        taken = scaler.step(optimizer)
        scaler.update()
        if taken and scheduler is not None:
            scheduler.step()
        losses.append(loss_sum)
    return losses
    ### END SOLUTION


# %% [markdown]
# The next cell trains a small network on a loss with a small weight, as there are in sums of
# several losses: $10^{-7}$ times the squared error. (The learning rate makes up for it.) In step 60
# one batch on the last rank is broken: it has a target that is inf, as sensors have that are
# switched off.
#
# Expected: without scaling fp16 learns next to nothing, since most of its gradients are 0. With a
# scale that never gives way it learns until the broken batch, and then all is nan: it has
# *diverged*. With your scaler it learns like fp32. bf16 needs no scale at all. That steps with inf
# are left out helps in every precision.


# %% demo="see_training"
class Stubborn(LossScaler):
    """Takes every step."""

    def step(self, optimizer):
        super().unscale_(optimizer)
        optimizer.step()
        return True


def draw_losses(ax, curves):
    for (label, losses), style in zip(curves.items(), ("-", "--", "-.", "-", ":"), strict=False):
        ax.plot([min(loss, 10.0) for loss in losses], style, linewidth=2, label=label)
    ax.set(xlabel="step", ylabel="loss × 10⁷", yscale="log")
    ax.legend(fontsize=7, ncols=2)


with demo("tasks 2 and 3"):
    WEIGHT = 1e-7
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    numbers = torch.Generator().manual_seed(rank)
    batches = []
    for number in range(150):
        x = torch.rand(32, 1, generator=numbers) * 2 - 1
        y = torch.sin(3 * x)
        if number == 60 and rank == world_size - 1:
            y[0] = math.inf
        batches.append((x.to(device), y.to(device)))

    runs = {
        "fp32": (None, LossScaler(init_scale=1.0)),
        "fp16, not scaled": (torch.float16, LossScaler(init_scale=1.0)),
        "fp16, scaled, every step": (torch.float16, Stubborn(init_scale=2.0**16)),
        "fp16, your scaler": (torch.float16, LossScaler()),
        "bf16, not scaled": (torch.bfloat16, LossScaler(init_scale=1.0)),
    }
    curves = {}
    for label, (dtype, scaler) in runs.items():
        model = wrap(copy.deepcopy(network), device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3 / WEIGHT)
        losses = train_amp(
            model,
            batches,
            lambda prediction, y: WEIGHT * ((prediction - y) ** 2).mean(),
            optimizer,
            scaler,
            dtype=dtype,
        )
        curves[label] = [loss / WEIGHT for loss in losses]
        if IS_RANK_ZERO:
            first, last = curves[label][0], statistics.mean(curves[label][-10:])
            scale = scaler.get_scale()
            print(f"{label:<26} loss × 10⁷ from {first:.3f} to {last:.4f}, scale {scale:g}")
    show(partial(draw_losses, curves=curves))

# %% check="amp_loop_autocast"
check("amp_loop_autocast", train_amp)

# %% check="amp_loop_fp16"
check("amp_loop_fp16", train_amp)

# %% check="amp_loop_update"
check("amp_loop_update", train_amp)

# %% check="amp_loop_clip"
check("amp_loop_clip", train_amp)

# %% check="amp_loop_skips"
check("amp_loop_skips", train_amp)

# %% check="amp_loop_accumulates"
check("amp_loop_accumulates", train_amp)

# %% [markdown]
# ## Yours beside PyTorch's
#
# The next cell trains one network in fp16 with your scaler, with PyTorch's, and with the course's
# own, and once in fp32. All get the same weights and batches. The three scalers must agree to the
# last digit; fp32 need not. Bytes do not change: autocast computes in 16 bits, and gradients are
# fp32 like the parameters.

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
#
#
# def scaled_by(make_scaler):
#     def begin(net):
#         ddp = DistributedDataParallel(net)
#         optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
#         scaler = make_scaler(next(net.parameters()).device.type)
#
#         def step(x, y):
#             optimizer.zero_grad()
#             with torch.autocast(x.device.type, torch.float16):
#                 loss = nn.functional.mse_loss(ddp(x), y)
#             scaler.scale(loss).backward()
#             scaler.unscale_(optimizer)
#             scaler.step(optimizer)
#             scaler.update()
#             return loss
#
#         return step
#
#     return begin
#
#
# with demo("task 2"):
#     ours = find("minidist.precision:GradScaler")
#     beside(
#         {
#             "yours": scaled_by(lambda _: LossScaler()),
#             "PyTorch's": scaled_by(torch.amp.GradScaler),
#             "the course's": ours and scaled_by(lambda _: ours()),
#             "fp32": training(DistributedDataParallel),
#         },
#         device=device,
#     )

# %% [markdown]
# ## Task 4 · Measure memory
#
# **Why.** "16 bits, so half the memory" is what one reads. Which memory? A training step keeps four
# things: the parameters, their gradients, the optimizer's state, and what autograd **saves** in the
# forward pass for the backward pass, the activations. Measure each, and you see which of them
# mixed precision makes smaller.
#
# **Write `memory_report(model, optimizer, compute_loss)`.**
#
# - Clear the gradients (`optimizer.zero_grad()` is enough); call `compute_loss()` (it runs the
#   forward pass, in whatever precision); backward; one `optimizer.step()`. Then return a dict of
#   bytes, `int`s:
# - `"parameters"`: of all parameters of the model, trained or not;
# - `"gradients"`: of all gradients there are after backward;
# - `"optimizer"`: of all tensors in `optimizer.state` after the step, small ones too;
# - `"saved"`: of all that autograd saved during `compute_loss()`, whatever its dtype. Each storage
#   counts once and in full, however many tensors share it or however little of it one of them
#   shows (the output of tanh is also the next layer's input; `w.t()` is the same memory as `w`).
#   What shares its storage with a parameter does not count: the parameter is there anyway. But a
#   16-bit *copy* of a parameter does.
#
# <details><summary>Hint 1: what autograd saves</summary>
#
# `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` is a context manager. `pack(tensor)` is
# called for every tensor that is saved; return the tensor, and look at it on the way.
# </details>
#
# <details><summary>Hint 2: one storage, once</summary>
#
# `tensor.untyped_storage()` has `data_ptr()`, its address, and `nbytes()`. A dict from address to
# bytes counts each once.
# </details>


# %% solution="task4_memory"
def memory_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute_loss: Callable[[], torch.Tensor],
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and saved activations of one step."""
    ### BEGIN SOLUTION
    params = list(model.parameters())
    owned = {p.untyped_storage().data_ptr() for p in params}
    saved: dict[int, int] = {}  # address of a storage -> its bytes

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()
    loss.backward()
    optimizer.step()

    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(p.nbytes for p in params),
        "gradients": sum(p.grad.nbytes for p in params if p.grad is not None),
        "optimizer": sum(value.nbytes for value in states if torch.is_tensor(value)),
        "saved": sum(saved.values()),
    }
    ### END SOLUTION


# %% demo="see_memory"
with demo("task 4"):
    for batch_size in (16, 2048):
        x, y = (
            torch.randn(batch_size, 128, device=device),
            torch.randn(batch_size, 8, device=device),
        )
        for label in ("fp32", "autocast bf16", "all in bf16"):
            torch.manual_seed(0)
            blocks = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)]
            network = nn.Sequential(*blocks, nn.Linear(128, 8)).to(device)
            data = x
            if label == "all in bf16":
                network, data = network.to(torch.bfloat16), x.to(torch.bfloat16)
            optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
            on = torch.autocast(device.type, dtype=torch.bfloat16, enabled="auto" in label)

            def compute_loss(network=network, data=data, y=y, on=on):
                with on:
                    return ((network(data).float() - y) ** 2).mean()

            report = memory_report(network, optimizer, compute_loss)
            if IS_RANK_ZERO:
                columns = "  ".join(f"{k} {v / 1024:7.0f}" for k, v in report.items())
                print(f"batch {batch_size:<5} {label:<14} KiB: {columns}")

# %% [markdown]
# Expected: autocast leaves parameters, gradients and optimizer state as they are. Per parameter
# that is 4 + 4 + 8 = 16 bytes with AdamW, in full and in mixed precision. It halves the saved
# activations if the batch is large; with a small batch its 16-bit copies of the weights cost more
# than that saves. With all in bf16 everything is half as large, but see task 7. (fp32 copies of the
# weights take its 8 bytes to 12, and with Adam's states in fp32 it is 2 + 2 + 4 + 8 = 16 again.)

# %% check="amp_memory"
check("amp_memory", memory_report)

# %% [markdown]
# ## Task 5 · Measure speed
#
# **Why.** "Twice as fast" is easily said and easily mismeasured. A GPU works asynchronously: a
# call only puts work into a queue, and returns. A clock that is read then has timed the queueing.
# The first steps are slow for reasons of their own (memory is allocated, kernels are compiled), and
# now and then something else disturbs a step. And in a distributed job one rank's speed means
# little: all wait for the slowest.
#
# **Write `time_step(step, synchronize, device, *, warmup, repeats, clock)`.**
#
# - Call `step()` `warmup` times without timing it, then `repeats` times with.
# - `synchronize()` waits until the device has finished all of its work. Call it so that each timed
#   step begins with an empty queue and ends with one.
# - `clock()` returns seconds. Use it and no other: the check brings its own.
# - Return, on every rank, the seconds per step of the slowest rank: the largest of the ranks'
#   *medians* (of an even number, the mean of the two in the middle). `device` is where a tensor for
#   a collective has to be.
#
# <details><summary>Hint</summary>
#
# `statistics.median` for one rank; `dist.ReduceOp.MAX` over a float64 tensor for all.
# </details>


# %% solution="task5_speed"
def time_step(
    step: Callable[[], object],
    synchronize: Callable[[], object],
    device: torch.device,
    *,
    warmup: int = 3,
    repeats: int = 11,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median seconds of a step, on the slowest rank."""
    ### BEGIN SOLUTION
    for _ in range(warmup):
        step()
    synchronize()  # what the warm-up has queued must not be timed

    seconds = []
    for _ in range(repeats):
        begin = clock()
        step()
        synchronize()
        seconds.append(clock() - begin)

    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
    ### END SOLUTION


# %% [markdown]
# Now measure: a matrix product, and a training step of a small network, in three
# precisions. What comes out depends on your device. CPUs without 16-bit units are *slower* in 16
# bits. An A100 multiplies matrices at up to 19.5 TFLOP/s in fp32, 156 in TF32 and 312 in fp16 or
# bf16, so on GPUs say which fp32 you compare with. Small
# products leave a GPU's units idle in any precision, so there `SIZE` is larger.

# %% demo="see_speed"
with demo("task 5"):
    SIZE = 192 if device.type == "cpu" else 4096
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    torch.manual_seed(0)
    base = None
    for label, dtype in (("fp32", None), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(SIZE, SIZE, device=device, dtype=dtype) for _ in "ab")
        network = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 1)).to(device)
        x = torch.randn(128, SIZE, device=device)

        def train_step(network=network, x=x, dtype=dtype):
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                loss = network(x).square().mean()
            loss.backward()

        seconds = [
            time_step(step, synchronize, device, warmup=2, repeats=5)
            for step in (partial(torch.matmul, a, b), train_step)
        ]
        base = base or seconds
        exact = a.double() @ b.double()
        error = ((a @ b).double() - exact).norm() / exact.norm()
        if IS_RANK_ZERO:
            ratios = [
                f"{new * 1e3:8.2f} ms ({old / new:4.2f} ×)"
                for old, new in zip(base, seconds, strict=True)
            ]
            print(f"{label}: product {ratios[0]}, step {ratios[1]}, error {error:.0e}")

# %% check="amp_timing"
check("amp_timing", time_step)

# %% [markdown]
# ## Task 6 · fp16, bf16 or neither
#
# **Why.** bf16 has fp32's range, so it needs no scaler, but only 8 bits of precision. fp16 has 11
# bits, and needs one. Devices differ: NVIDIA GPUs have had bf16 since Ampere, and fp16 matrix units
# since Volta. And the precision must be the same on all ranks: their gradients are added up.
#
# **Write `choose_precision(has_bf16, has_fp16, largest, device)`.** The arguments are what *this*
# rank knows: whether its device computes in each format, and the largest absolute value that it has
# met in activations, in a trial run in fp32. Return `(dtype, needs_scaler)`, the same on all ranks:
#
# - `(torch.bfloat16, False)` if all ranks have bf16;
# - else `(torch.float16, True)` if all have fp16 and no rank has met more than *half* of
#   fp16's largest number (training needs room);
# - else `(None, False)`.
#
# <details><summary>Hint</summary>
#
# One all-reduce is enough. "All have it" is a minimum, which is the negative of a maximum: put
# three numbers into one tensor so that `MAX` is right for each.
# </details>


# %% solution="task6_choice"
def choose_precision(
    has_bf16: bool, has_fp16: bool, largest: float, device: torch.device
) -> tuple[torch.dtype | None, bool]:
    """(dtype for autocast or None, whether it needs a loss scaler), alike on all ranks."""
    ### BEGIN SOLUTION
    facts = torch.tensor(
        [float(not has_bf16), float(not has_fp16), largest], dtype=torch.float64, device=device
    )
    dist.all_reduce(facts, op=dist.ReduceOp.MAX)
    one_lacks_bf16, one_lacks_fp16, largest = facts.tolist()
    if not one_lacks_bf16:
        return torch.bfloat16, False
    if not one_lacks_fp16 and largest <= torch.finfo(torch.float16).max / 2:
        return torch.float16, True
    return None, False
    ### END SOLUTION


# %% demo="see_choice"
with demo("task 6"):
    on_cuda = device.type == "cuda"
    has_bf16 = torch.cuda.is_bf16_supported() if on_cuda else True
    dtype, needs_scaler = choose_precision(has_bf16, True, 100.0, device)
    if IS_RANK_ZERO:
        print(f"here: {dtype}, {'with' if needs_scaler else 'without'} a scaler")
    # As if rank 0 had an older device:
    dtype, needs_scaler = choose_precision(rank != 0, True, 100.0, device)
    if IS_RANK_ZERO:
        print(f"with one device that has no bf16: {dtype}, needs a scaler: {needs_scaler}")

# %% check="amp_choice"
check("amp_choice", choose_precision)

# %% [markdown]
# ## Task 7 · Master weights
#
# **Why.** Autocast keeps the parameters in fp32. What if the model itself is in 16 bits, to save
# memory and traffic? Around 1, bf16 has a number every 0.0078. An update of 0.001 rounds back to
# where it was. The next one too. The weights stand still, whatever the gradients say. So the
# optimizer keeps an fp32 copy of each parameter, its **master**, adds the updates up in there, and
# hands the model a rounded copy.
#
# **Write `MasterWeights(params, make_optimizer)`.**
#
# - `params` is a list of 16-bit parameters of a model. `make_optimizer(tensors)` makes the
#   optimizer that does the work, for tensors that you give it: the masters.
# - `step()`: every parameter's gradient goes to its master, in fp32; the optimizer steps; the
#   masters are rounded into the parameters. The parameters stay the same objects with the same
#   dtype. Where `p.grad` is `None`, the master has no gradient either.
# - The masters go on from their own value. Never read them back from the parameters: that would
#   round away what was gathered.
# - `zero_grad()` clears the parameters' gradients, to zero or to `None`.
#
# <details><summary>Hint</summary>
#
# A master is `p.detach().float().clone()`, and `requires_grad_()` so that an optimizer takes it. To
# write into a parameter: `p.copy_(master)` under `torch.no_grad()`.
# </details>


# %% solution="task7_masters"
class MasterWeights:
    """An optimizer for 16-bit parameters that adds up its updates in fp32 copies."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ):
        """Makes an fp32 master of each parameter, and the optimizer over the masters."""
        ### BEGIN SOLUTION
        self.params = list(params)
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.optimizer = make_optimizer(self.masters)
        ### END SOLUTION

    @torch.no_grad()
    def step(self) -> None:
        """One step of the masters; the parameters become their rounded values."""
        ### BEGIN SOLUTION
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)
        ### END SOLUTION

    def zero_grad(self) -> None:
        """Clears the gradients of the parameters."""
        ### BEGIN SOLUTION
        for p in self.params:
            p.grad = None
        ### END SOLUTION


# %% demo="see_masters"
with demo("task 7"):
    plain = nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device=device))
    careful = nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device=device))
    make_sgd = partial(torch.optim.SGD, lr=0.001)
    optimizers = make_sgd([plain]), MasterWeights([careful], make_sgd)
    for _ in range(300):
        for p, optimizer in zip((plain, careful), optimizers, strict=True):
            p.grad = -torch.ones_like(p)
            optimizer.step()
    if IS_RANK_ZERO:
        print(f"1 + 300 × 0.001 in bf16: {plain.item():.4f}, with a master {careful.item():.4f}")

# %% check="amp_masters"
check("amp_masters", MasterWeights)

# %% [markdown]
# ## Task 8 · Gradients travel in 16 bits
#
# **Why.** Under autocast the gradients are fp32, so DDP all-reduces four bytes per parameter. Two
# would do: the mean of a few 16-bit numbers is about as good as each of them. Calling
# `model.half()` is not the way: it changes the weights. DDP has **communication hooks** instead: a
# function that is given each bucket, and reduces it as it likes.
#
# With fp16 two dangers come back. Small gradients vanish; but in the bucket they are still
# *scaled*, so the scaler protects them here as well. And large ones overflow: $W$ ranks add up to
# $W$ times as much. The order of dividing and adding decides.
#
# **Write `make_compress_hook(dtype)`.** It returns a function `hook(state, bucket)`:
#
# - `bucket.buffer()` is the bucket's flat fp32 tensor of this rank's gradients. You may write into
#   it.
# - One all-reduce per bucket, of a tensor in `dtype`. Start it with `async_op=True`: a hook that
#   waits holds up the backward pass. (No check looks at that.) Several buckets may travel at the
#   same time.
# - It returns a `torch.futures.Future` of the mean over all ranks, flat and in the buffer's dtype.
# - As long as no rank's gradients exceed 90 % of the largest number of `dtype`, nothing on the way
#   may overflow, on any number of ranks. What is inf on one rank stays inf or nan: the scaler has
#   to see it.
# - The second argument has to be called `bucket`: DDP checks that.
#
# <details><summary>Hint</summary>
#
# `dist.all_reduce(tensor, async_op=True).get_future()` is a future of a list with the reduced
# tensor in it. `.then(f)` makes a new one; `f` gets the first and calls `.value()` on it.
# </details>


# %% solution="task8_hook"
def make_compress_hook(dtype: torch.dtype) -> Callable:
    """A DDP communication hook that all-reduces the mean gradient in `dtype`."""
    ### BEGIN SOLUTION

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        # Divided before it is added up: the sum over many ranks may be too large for fp16.
        small = (buffer / dist.get_world_size()).to(dtype)
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(buffer.dtype))

    return hook
    ### END SOLUTION


# %% [markdown]
# The next cell counts, on the emulated cluster: bytes that travel in a step, and the virtual time
# of the step. Expected: 16 bits halve the bytes. The step gets shorter, by less than half:
# computing takes as long as before.

# %% demo="see_bytes" tags=["active-ipynb"]
# %%rank 0
# from minidist import emulate
#
# LAYERS, WIDTH = 6, 256
# network = emulate.Link(bandwidth_bytes_per_s=5e8, latency_s=5e-5)
# slow_network = emulate.Cluster(
#     name="two devices on a slow network",
#     nodes=2,
#     devices_per_node=1,
#     intra_node=network,
#     inter_node=network,
#     peak_flops_per_s=1e12,
#     memory_bandwidth_bytes_per_s=1e11,
# )
# costs = emulate.ChargePlan((0.2e-3,) * LAYERS, (0.4e-3,) * LAYERS, b"practice")
#
#
# def one_step(make_hook, dtype):
#     layers = [emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS)]
#     model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.6)
#     if dtype is not None:
#         model.register_comm_hook(None, make_hook(dtype))
#     model(torch.randn(2, WIDTH)).square().mean().backward()
#
#
# with demo("task 8"):
#     for dtype in (None, torch.float16, torch.bfloat16):
#         trace, timeline = emulate.run(
#             one_step, 2, slow_network, make_compress_hook, dtype, plan=costs
#         )
#         print(f"{dtype or 'no hook'}: {timeline.makespan_s * 1e3:.1f} ms")

# %% check="amp_hook_mean"
check("amp_hook_mean", make_compress_hook)

# %% check="amp_hook_bytes"
check("amp_hook_bytes", make_compress_hook)

# %% [markdown]
# ## On a GPU: 5 extra points
#
# With a CUDA device, your loop of task 3 has to keep what mixed precision promises. The checks run
# one step on 8 wide layers and a large batch: with your `train_amp` in bf16 (fp16 where
# the GPU has no fast bf16), and with a plain loop in fp32, TF32 off, in turn.
#
# - `amp_gpu_speed`: yours is at least **twice** as fast.
# - `amp_gpu_memory`: at its peak it holds at most **three quarters** of the memory.
#
# If your loop passes the checks of task 3, there is nothing left to write. Without a GPU the checks
# say so and cost nothing.

# %% check="amp_gpu_speed"
check("amp_gpu_speed", train_amp)

# %% check="amp_gpu_memory"
check("amp_gpu_memory", train_amp)

# %% [markdown]
# ## Reflect
#
# Some things no test can judge. Answer each question in its own cell, in a few sentences: replace
# *YOUR ANSWER HERE*. Whoever runs your course reads the answers and gives up to 2 points for each,
# beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. Your scaler asks all ranks in every step. torch's `GradScaler` asks nobody. Why does that go
# well with DDP, and when does it not?**
#
# <!-- BEGIN SOLUTION -->
# With DDP the gradients that the scaler looks at are the same on all ranks: the all-reduce has
# spread every inf and nan. All scalers see the same and decide alike. With sharded gradients, or
# with layers split over ranks, each rank sees a part; for those torch has `ShardedGradScaler`,
# which asks. It also does not go well if the all-reduce hides an overflow, as a hook could that
# clamps.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. Adam divides by the size of the gradients, so their scale cancels. Why unscale at all?**
#
# <!-- BEGIN SOLUTION -->
# It cancels only as long as the scale is constant: Adam's averages reach back over many steps, and
# after the scale has changed, old and new ones do not fit. Besides, epsilon is meant for true
# gradients, clipping and logging too, and gradients that are scaled by $2^{16}$ have squares that
# are scaled by $2^{32}$.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. A run in fp16 leaves out every step after some hours, and the scale has fallen to 1e-3. What
# has happened?**
#
# <!-- BEGIN SOLUTION -->
# The overflow does not come from the scale. Something is inf or nan in the forward pass:
# activations beyond 65504, a logarithm of 0, a broken batch that comes in every step, or weights
# that are nan already. No scale repairs that. Look for the first layer whose output is not finite.
# A scaler that falls for long is an alarm, so log the scale.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_4"
# **4. With bf16, what would a scaler change?**
#
# <!-- BEGIN SOLUTION -->
# Almost nothing: the exponent of bf16 has as many bits as that of fp32, so what survives in fp32
# survives in bf16, scaled or not. One side effect would remain, and can be had without
# scaling: that a step with inf or nan is left out.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - [ ] you can say what 1e-4, 1e-7 and 1e-9 become in fp16 and in bf16;
# - [ ] you can write the order of one AMP step from memory: zero, autocast, scale, backward,
#       unscale, clip, step, update;
# - [ ] you know which memory autocast halves, and which it does not;
# - [ ] you can say why one rank's overflow concerns all, and what happens if it does not;
# - [ ] you put the scaler's state into every checkpoint;
# - [ ] you can time a GPU without timing its queue.
#
# ## Read next
#
# - Micikevicius et al., *Mixed Precision Training*, [arXiv
#   1710.03740](https://arxiv.org/abs/1710.03740). Where loss scaling and master weights come
#   from.
# - Kalamkar et al., *A Study of BFLOAT16 for Deep Learning Training*, [arXiv
#   1905.12322](https://arxiv.org/abs/1905.12322). Why range beats precision.
# - Zamirai et al., *Revisiting BFloat16 Training*, [arXiv
#   2010.06192](https://arxiv.org/abs/2010.06192). Training without fp32 copies: stochastic
#   rounding and Kahan summation.
# - Micikevicius et al., *FP8 Formats for Deep Learning*, [arXiv
#   2209.05433](https://arxiv.org/abs/2209.05433). The next step down.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
if IS_RANK_ZERO:
    print("lab 4 is done")
