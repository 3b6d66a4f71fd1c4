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
# # Lab 3 · Sharded training
#
# Data-parallel training keeps the whole model on every rank: all weights, all gradients, all of the
# optimizer's state. With $N$ ranks you hold everything $N$ times. In this lab you keep it once,
# spread over the ranks, and still compute the very same thing. The method is called ZeRO-3, or
# fully sharded data parallelism (FSDP). You write it, then you use PyTorch's own.
#
# **When you have finished, you can**
#
# - say how many bytes a rank holds under DDP and the three stages of ZeRO (task 1);
# - measure that, on any rank, with any sharding (task 2);
# - shard a transformer from scratch: cut, gather, free, reduce-scatter, prefetch (task 3);
# - do the same with `fully_shard`, and choose its precision and its offloading (task 4);
# - keep activations small, and train a model that is larger than your rank's memory (task 5);
# - save and load a sharded model without a deadlock (task 6);
# - measure throughput and scaling (task 7), and pick the cheapest strategy that fits (task 8).
#
# Plan five to seven hours: three for task 3, about half an hour for each of the others. You should
# have done lab 1. Nothing here needs a GPU; if you have one, it is worth 3 extra points.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | all |
# |---|---|---|---|---|---|---|---|---|---|
# | points | 6 | 5 | 46 | 14 | 10 | 11 | 4 | 4 | 100 |
#
# Without sharding (1 of fsdp_shards, fsdp_limit) this lab gives at most 49 points.
#
# Every cell runs on two ranks. Checks use practice data here; your grade comes from the same checks
# with other data on **3** ranks. Every task stands alone: if one of them does not work yet, go on
# with the next.

# %% [markdown]
# ## The idea in one picture
#
# ```
#                 unit 0    unit 1    unit 2          a unit: a block of the model
#   rank 0 keeps  [a . .]   [d . .]   [g . .]         its third of every unit: weights,
#   rank 1 keeps  [. b .]   [. e .]   [. h .]         gradients, optimizer state
#   rank 2 keeps  [. . c]   [. . f]   [. . i]
#
#   forward   gather 0 | compute 0, free 0
#                        gather 1 ........ | compute 1, free 1
#                                            gather 2 ........ | compute 2, free 2
#   backward                                                     gather 2 | backward 2, free 2 ...
#                                                                           reduce-scatter 2
#   step      each rank updates its own third, and nothing else
# ```
#
# While units compute, two or three of them are whole or on their way, on every rank. All others
# exist once, spread over the ranks. After the backward pass of a unit its
# gradients are added up over the ranks, and each rank gets the part that it keeps: that is a
# reduce-scatter.

# %% given="imports"
import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autograder import check, is_not_started
from minidist.device import (
    all_gather_single,
    choose_backend,
    choose_device,
    reduce_scatter_single,
)
from minidist.model import GPT, GPTConfig, lm_loss

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


def units_of(gpt: GPT) -> list[nn.Module]:
    """The units of a small transformer, in the order in which its forward pass calls them."""
    return [gpt.token_embedding, gpt.position_embedding, *gpt.blocks, gpt.norm, gpt.head]


rank, world_size, device = setup()

# %% [markdown]
# ## Task 1 · How much memory?
#
# **Why.** Training with Adam in fp32 keeps four numbers per parameter: the parameter, its gradient,
# and the optimizer's two running means. That is 4 + 4 + 8 = 16 bytes. Mixed precision does not make
# it less: 2 for a 16-bit parameter, 2 for its gradient, and 12 for the optimizer, which keeps an
# fp32 copy of the parameter beside its two means. Smaller numbers are of other optimizers or
# leave something out: 12 bytes per parameter are the optimizer alone.
#
# ZeRO spreads that over the ranks in three stages.
#
# | strategy | parameters | gradients | optimizer |
# |---|---|---|---|
# | `"ddp"` | whole | whole | whole |
# | `"zero1"` | whole | whole | sharded |
# | `"zero2"` | whole | sharded | sharded |
# | `"zero3"` | sharded | sharded | sharded |
#
# **Write `bytes_per_rank(num_params, world_size, strategy, mixed=False)`.**
#
# - It returns a tuple of three `int`s: the bytes of parameters, gradients and optimizer state that
#   one rank holds. With `mixed=False` a parameter costs 4, 4 and 8 bytes, else 2, 2 and 12.
# - Where the table says *whole*, all `num_params` count. Where it says *sharded*,
#   $\lceil$ `num_params` $/ N \rceil$ count, with $N$ = `world_size`, on every rank alike: if $N$
#   does not divide the number of parameters, the last shards are filled up with zeros.
# - Whole numbers only: the number of bytes is exact, however large the model is.
# - Another strategy than the four is a `ValueError`.
#
# <details><summary>Hint</summary>
#
# First the number of entries: `whole` or `shard`. Then three products. `-(-a // b)` divides and
# rounds up, in whole numbers. (`math.ceil(a / b)` goes through a float, and may be wrong where $a$
# is beyond $2^{53}$.)
# </details>


# %% solution="task1_formula"
def bytes_per_rank(
    num_params: int, world_size: int, strategy: str, mixed: bool = False
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state that a rank holds."""
    ### BEGIN SOLUTION
    strategies = ("ddp", "zero1", "zero2", "zero3")
    if strategy not in strategies:
        raise ValueError(f"strategy: expected one of {strategies}, got {strategy!r}")
    stage = strategies.index(strategy)
    per_param = (2, 2, 12) if mixed else (4, 4, 8)
    shard = -(-num_params // world_size)
    # Stage 1 shards the optimizer's state, 2 the gradients as well, 3 also the parameters.
    needed_stage = (3, 2, 1)
    counts = [shard if stage >= needed else num_params for needed in needed_stage]
    parameters, gradients, optimizer = (c * b for c, b in zip(counts, per_param, strict=True))
    return parameters, gradients, optimizer
    ### END SOLUTION


# %% [markdown]
# Now look at a model with 7 billion parameters on 8 ranks. Expected: 112 GB with DDP, more than
# an 80 GB GPU has, and 14 GB with ZeRO-3. The picture is without activations, which no stage
# of ZeRO touches.


# %% demo="see_formula"
def draw_memory(ax, rows: dict[str, tuple[int, int, int]]) -> None:
    left = [0.0] * len(rows)
    for part, label in enumerate(("parameters", "gradients", "optimizer")):
        sizes = [row[part] / 1e9 for row in rows.values()]
        ax.barh(list(rows), sizes, left=left, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    ax.invert_yaxis()
    ax.set(xlabel="GB per rank")
    ax.legend()


with demo("task 1"):
    table = {
        name: bytes_per_rank(7_000_000_000, 8, name, mixed=True)
        for name in ("ddp", "zero1", "zero2", "zero3")
    }
    if IS_RANK_ZERO:
        for name, row in table.items():
            print(f"{name}: {sum(row) / 1e9:6.1f} GB")
    show(partial(draw_memory, rows=table))

# %% check="fsdp_memory_formula"
check("fsdp_memory_formula", bytes_per_rank)

# %% [markdown]
# ## Task 2 · Measure it
#
# **Why.** A formula is a claim. PyTorch's sharded parameters are `DTensor`s: they *look* whole.
# `p.shape` and `p.numel()` are those of the whole parameter; only `p.to_local()` is what lies in
# this rank's memory. Whoever counts `numel()` sees no saving at all.
#
# **Write `local_bytes(params, optimizer)`.**
#
# - `params` is an iterable of parameters: ordinary ones, `DTensor`s, or both. `optimizer` is an
#   optimizer that holds some or all of them.
# - Return a tuple of three `int`s: how many bytes this rank holds of the parameters, of the
#   gradients of all of them, and of the optimizer's state (every tensor in it, small ones too).
#   `optimizer.state` maps each parameter to a dict. What is no tensor in there does not count.
# - Of a `DTensor`, count the local part: also in gradients and in the optimizer's state.
# - A gradient that is `None` counts 0. A parameter that comes twice counts once.
#
# <details><summary>Hint</summary>
#
# Write a function of one tensor first: `if isinstance(t, DTensor): t = t.to_local()`, then
# `t.numel() * t.element_size()`.
# </details>


# %% solution="task2_measure"
def local_bytes(
    params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state in this rank's memory."""

    ### BEGIN SOLUTION
    def count(tensor: torch.Tensor) -> int:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.numel() * local.element_size()

    once = list(dict.fromkeys(params))
    states = (value for state in optimizer.state.values() for value in state.values())
    return (
        sum(count(p) for p in once),
        sum(count(p.grad) for p in once if p.grad is not None),
        sum(count(value) for value in states if isinstance(value, torch.Tensor)),
    )
    ### END SOLUTION


# %% [markdown]
# Formula against measurement, for a small transformer, whole and sharded. Expected: both agree, up
# to Adam's step counters, which have four bytes for each tensor.

# %% demo="see_measure"
CONFIG = GPTConfig(vocab_size=48, context=16, width=32, num_layers=3, num_heads=4)


def random_tokens(seed: int, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for next-token prediction."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(48, (batch, 17), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def make_gpt() -> GPT:
    """The same small transformer on every rank."""
    torch.manual_seed(0)
    return GPT(CONFIG).to(device)


with demo("tasks 1 and 2"):
    for name in ("ddp", "zero3"):
        model = make_gpt()
        num_params = sum(p.numel() for p in model.parameters())
        if name == "zero3":
            mesh = init_device_mesh(device.type, (world_size,))
            for unit in [*units_of(model), model]:
                fully_shard(unit, mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y = random_tokens(rank)
        lm_loss(model(x), y).backward()
        optimizer.step()
        measured = local_bytes(model.parameters(), optimizer)
        formula = bytes_per_rank(num_params, world_size, name)
        if IS_RANK_ZERO:
            print(f"{name}: formula {formula}, measured {measured}")

# %% check="fsdp_memory_measured"
check("fsdp_memory_measured", local_bytes)

# %% [markdown]
# ## Task 3 · FSDP from scratch
#
# **Why.** `fully_shard` is one line. What it does in that line decides whether your model fits,
# and whether your GPUs wait. Write it once, and you can read its timeline ever after.
#
# ```python
# fsdp = FSDP(model, units)
# optimizer = torch.optim.AdamW(fsdp.local_parameters(), lr=1e-3)
#
# loss = loss_fn(fsdp(x), y)     # gathers each unit before it computes, frees it after
# loss.backward()                # gathers again, frees, reduce-scatters the gradients
# optimizer.step()               # on this rank's shards only
# optimizer.zero_grad()
# ```
#
# **Write `FSDP(model, units)`.** What you may count on:
#
# - All ranks have built `model` with the same values, on the right device, in fp32.
# - `units` is a list of modules of `model`. Every parameter belongs to exactly one of them, and
#   none is shared. The forward pass calls each unit once, in the order of the list, and each
#   returns one tensor. In backward every parameter gets a gradient.
#
# What is asked for:
#
# - **Shards.** `local_parameters()` returns a list of `nn.Parameter`s: this rank's shards. Together
#   the ranks hold every value of the model once; if $N$ does not divide a length, fill up with
#   zeros, whose gradients are zeros, too. Between steps a rank keeps $1/N$ of the parameters and of
#   their gradients, plus padding, and so an optimizer over `local_parameters()` keeps $1/N$ of its
#   state.
# - **Forward.** `fsdp(x)` returns what `model(x)` would have, with the shards' values of now; so
#   does `fsdp(x, y)` of a model that takes two arguments. `fsdp.eval()` reaches the model, too.
# - **Gradients.** When `backward()` returns, each shard's `.grad` is its part of the *mean* over
#   ranks. A second backward before `zero_grad()` adds to it.
# - **Memory.** A unit is freed after its forward pass, and again after its backward pass. Its whole
#   gradients go, too, once they are reduced: `p.grad` of the model's own parameters is `None` when
#   `backward()` returns. At most three units are whole or on their way at a time. That holds
#   for passes under `torch.no_grad()` and in eval mode as well.
# - **Units.** One all-gather per unit and pass, one reduce-scatter per unit, none for all of
#   them at once, and no all-reduce. An all-gather is waited for before its unit computes, a
#   reduce-scatter before `backward()` returns.
# - **Prefetch.** Before a unit computes, start the all-gather of the next one (`async_op=True`);
#   before its backward, that of the one before it.
#
# The first three can be had first; then memory; then prefetch. Each has its own check. `Unit` below
# is a place for what belongs to one unit; if you want to do without, delete it. Only `FSDP` is
# checked: its constructor, `local_parameters()` and `fsdp(x)`.
#
# <details><summary>Hint 1: how to cut</summary>
#
# Per unit one flat tensor `whole` of $N \cdot s$ entries, $s = \lceil n / N \rceil$: all the unit's
# parameters one behind the other, then zeros. Rank $r$ keeps a **clone** of entries $rs$ to
# $(r+1)s$ as its `nn.Parameter`. (A view would keep the whole alive.) Make each
# parameter of the module a view: `p.data = whole[a:b].view_as(p)`.
# `all_gather_single(whole, shard.detach())` fills `whole` in one call;
# `reduce_scatter_single(mine, flat_gradient)` is its counterpart. (Older versions of torch call
# them `all_gather_into_tensor` and `reduce_scatter_tensor`.)
# </details>
#
# <details><summary>Hint 2: how to free</summary>
#
# `p.data = torch.empty(0)` is not enough: autograd has saved the weight for backward, and so its
# memory stays. Take the memory away from below: `whole.untyped_storage().resize_(0)` frees it for
# *everybody* who has a view of it, autograd included. Before the next all-gather,
# `resize_(number_of_bytes)` brings it back, at the same place for all of them. For autograd the
# tensor has never changed; it must only be filled again before backward reads it.
# </details>
#
# <details><summary>Hint 3: which hooks</summary>
#
# - `module.register_forward_pre_hook(f)`: gather.
# - `module.register_forward_hook(f)`: free.
# - `output.register_hook(f)`, in the forward hook, on the unit's output (if it `requires_grad`):
#   called when backward reaches that output, so before the unit's own backward. Gather again.
# - `p.register_post_accumulate_grad_hook(f)` on each parameter: when it was the unit's last, free
#   the unit, copy the gradients into one flat tensor, set every `p.grad` to `None`,
#   reduce-scatter.
#
# In a loop, bind the unit's number: `lambda *_, i=i: …`.
# </details>
#
# <details><summary>Hint 4: prefetch</summary>
#
# Split "gather" in two: `start_gather` resizes and starts an asynchronous all-gather, unless one is
# under way or the unit is whole; `gather` calls it and waits. Before unit $i$ computes:
# `gather` of $i$, then `start_gather` of $i+1$. The reduce-scatter can be asynchronous too: wait
# for that of unit $i+1$ when unit $i$ starts its own, and for the one of unit 0 at once. Then
# every gradient is there when `backward()` returns.
# </details>


# %% solution="task3_fsdp"
class Unit:
    """One module's parameters: a shard that stays, and a whole that comes and goes."""

    def __init__(self, module: nn.Module):
        ### BEGIN SOLUTION
        num_ranks, me = dist.get_world_size(), dist.get_rank()
        self.params = list(module.parameters())
        self.length = sum(p.numel() for p in self.params)
        size = -(-self.length // num_ranks)
        self.whole = self.params[0].detach().new_zeros(num_ranks * size)
        begin = 0
        for p in self.params:
            view = self.whole[begin : begin + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            begin += p.numel()
        self.shard = nn.Parameter(self.whole[me * size : (me + 1) * size].clone())
        self.num_bytes = self.whole.nbytes
        self.gathering: dist.Work | None = None
        self.reducing: tuple[dist.Work, torch.Tensor] | None = None
        self.num_missing = len(self.params)  # gradients that this backward still owes
        self.free()

    def free(self) -> None:
        """Gives the memory of the whole back, also from under autograd's saved tensors."""
        self.whole.untyped_storage().resize_(0)
        self.is_whole = False

    def start_gather(self) -> None:
        """Starts the all-gather, unless it is under way or done."""
        if self.is_whole or self.gathering is not None:
            return
        self.whole.untyped_storage().resize_(self.num_bytes)
        self.gathering = all_gather_single(self.whole, self.shard.detach(), async_op=True)

    def gather(self) -> None:
        """Makes the unit whole."""
        self.start_gather()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering, self.is_whole = None, True

    def start_reduce(self) -> None:
        """Starts the reduce-scatter of this unit's gradients, and lets them go."""
        num_ranks = dist.get_world_size()
        flat = self.shard.new_zeros(num_ranks * self.shard.numel())
        torch.cat([p.grad.reshape(-1) for p in self.params], out=flat[: self.length])
        flat /= num_ranks
        for p in self.params:
            p.grad = None
        mine = torch.empty_like(self.shard)
        self.reducing = (reduce_scatter_single(mine, flat, async_op=True), mine)

    def finish_reduce(self) -> None:
        """Waits for the reduce-scatter, and adds its result to the shard's gradient."""
        if self.reducing is None:
            return
        work, mine = self.reducing
        work.wait()
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        self.reducing = None

    ### END SOLUTION


class FSDP(nn.Module):
    """Fully sharded data parallelism: a unit is whole only while it computes."""

    def __init__(self, model: nn.Module, units: list[nn.Module]):
        """Cuts every unit, keeps this rank's shards, and registers the hooks."""
        super().__init__()
        ### BEGIN SOLUTION
        self.model = model
        self.units = [Unit(module) for module in units]
        for i, module in enumerate(units):
            module.register_forward_pre_hook(lambda *_, i=i: self._prepare(i, i + 1))
            module.register_forward_hook(lambda _, __, output, i=i: self._finish(i, output))
            for p in self.units[i].params:
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._count_gradient(i))

    def _prepare(self, i: int, following: int) -> None:
        """Before unit i computes: it is whole, and the following one is on its way."""
        self.units[i].gather()
        if 0 <= following < len(self.units):
            self.units[following].start_gather()

    def _finish(self, i: int, output: torch.Tensor) -> None:
        """After unit i's forward: it is freed, and made ready when backward reaches its output."""
        self.units[i].free()
        if output.requires_grad:
            output.register_hook(lambda _: self._prepare(i, i - 1))

    def _count_gradient(self, i: int) -> None:
        """After a gradient of unit i: if it was the last one, reduces them all."""
        unit = self.units[i]
        unit.num_missing -= 1
        if unit.num_missing:
            return
        unit.num_missing = len(unit.params)
        unit.free()
        if i + 1 < len(self.units):
            self.units[i + 1].finish_reduce()  # it had all of this unit's backward to arrive
        unit.start_reduce()
        if i == 0:
            unit.finish_reduce()

    ### END SOLUTION

    def local_parameters(self) -> list[nn.Parameter]:
        """This rank's shards, for the optimizer."""
        ### BEGIN SOLUTION
        return [unit.shard for unit in self.units]
        ### END SOLUTION

    def forward(self, *args):
        """The model's forward pass."""
        ### BEGIN SOLUTION
        return self.model(*args)
        ### END SOLUTION


# %% [markdown]
# Train the small transformer, sharded, beside the same model whole in one process that sees all
# ranks' data. Expected: the same losses, and about $1/N$ of the bytes.

# %% demo="see_fsdp"
with demo("task 3"):
    whole = make_gpt()
    sharded = make_gpt()
    fsdp = FSDP(sharded, units_of(sharded))
    optimizers = [
        torch.optim.AdamW(whole.parameters(), lr=3e-3),
        torch.optim.AdamW(fsdp.local_parameters(), lr=3e-3),
    ]
    batches = [random_tokens(r) for r in range(world_size)]
    for step in range(5):
        loss = lm_loss(
            whole(torch.cat([b[0] for b in batches])), torch.cat([b[1] for b in batches])
        )
        loss.backward()
        own = lm_loss(fsdp(batches[rank][0]), batches[rank][1])
        own.backward()
        mean = own.detach() / world_size
        dist.all_reduce(mean)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if IS_RANK_ZERO:
            print(f"step {step}: one process {loss.item():.4f}, sharded {mean.item():.4f}")
    if IS_RANK_ZERO:
        num_bytes = [
            sum(p.nbytes for p in ps) for ps in (whole.parameters(), fsdp.local_parameters())
        ]
        print(f"parameters: {num_bytes[0]} bytes whole, {num_bytes[1]} on this rank")

# %% check="fsdp_shards"
check("fsdp_shards", FSDP)

# %% check="fsdp_forward"
check("fsdp_forward", FSDP)

# %% check="fsdp_gradients"
check("fsdp_gradients", FSDP)

# %% check="fsdp_accumulate"
check("fsdp_accumulate", FSDP)

# %% [markdown]
# The next check runs your class in processes of its own that *cannot* get more memory than their
# shards and three quarters of the model take. A class that forgets to free runs out of memory
# there, as it would on a GPU.

# %% check="fsdp_limit"
check("fsdp_limit", FSDP)

# %% [markdown]
# When does what travel? The next cell runs your class on the emulated cluster, where time is
# virtual, and draws what rank 0 did in its second step. Expected: gathers lie *under* the compute
# of the unit before. Without prefetch, compute and communication take turns.


# %% demo="see_timeline" tags=["active-ipynb"]
# %%rank 0
# from minidist import emulate
#
# LAYERS, WIDTH = 6, 128
# link = emulate.Link(bandwidth_bytes_per_s=1.2e8, latency_s=1e-5)
# two_devices = emulate.Cluster(
#     name="two devices",
#     nodes=1,
#     devices_per_node=2,
#     intra_node=link,
#     inter_node=link,
#     peak_flops_per_s=1e12,
#     memory_bandwidth_bytes_per_s=1e11,
# )
# costs = emulate.ChargePlan((0.5e-3,) * LAYERS, (1e-3,) * LAYERS, b"practice")
#
#
# def two_steps(wrap):
#     torch.manual_seed(0)
#     layers = [emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS)]
#     fsdp = wrap(nn.Sequential(*layers), layers)
#     for _ in range(2):
#         fsdp(torch.randn(2, WIDTH)).square().mean().backward()
#
#
# def draw_timeline(ax, timeline):
#     colours = {"compute": "C0", "communication": "C1"}
#     half = timeline.makespan_s / 2
#     for interval in timeline.intervals[0]:
#         if interval.kind in colours and interval.end_s > half:
#             ax.barh(
#                 interval.kind,
#                 (interval.end_s - interval.start_s) * 1e3,
#                 left=interval.start_s * 1e3,
#                 color=colours[interval.kind],
#                 edgecolor="white",
#             )
#     ax.set(xlabel="virtual ms")
#
#
# with demo("task 3"):
#     _, timeline = emulate.run(two_steps, 2, two_devices, FSDP, plan=costs)
#     print(f"two steps: {timeline.makespan_s * 1e3:.1f} ms, of which 18 ms compute")
#     show(partial(draw_timeline, timeline=timeline), height=1.8)

# %% check="fsdp_units"
check("fsdp_units", FSDP)

# %% tags=["script-only"]
dist.barrier()

# %% check="fsdp_prefetch_forward"
check("fsdp_prefetch_forward", FSDP)

# %% tags=["script-only"]
dist.barrier()

# %% check="fsdp_prefetch_backward"
check("fsdp_prefetch_backward", FSDP)

# %% [markdown]
# ## Task 4 · The same with `fully_shard`
#
# **Why.** In production you use torch's. Older texts show the class `FullyShardedDataParallel`,
# with `sharding_strategy=` and an auto-wrap policy. Its successor is a function:
# `fully_shard(module, mesh=…)` turns a module's parameters into `DTensor`s, in place. You call it
# once per unit, **inner modules first**, and at last on the model itself: the root takes what the
# units have left over. Call it on the root only, and the whole model is one unit.
#
# Two policies go with it.
#
# - `MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…)`: which dtype parameters are gathered and
#   computed in, and which one gradients are added up in. The shards stay fp32. So bf16 halves the
#   gathers, while sums over many ranks keep fp32's precision.
# - `CPUOffloadPolicy(pin_memory=…)`: shards, their gradients and the optimizer's state live in CPU
#   memory, and units visit the GPU. It is slow, and it fits. Pinned (page-locked) memory makes
#   copies to a GPU asynchronous; without a GPU it cannot be had.
#
# **Write `policies(device_type, mixed, offload)`.**
#
# - It returns a dict of keyword arguments for `fully_shard`: `mp_policy` and `offload_policy`.
# - `mixed`: parameters in bf16, gradients reduced in fp32; else nothing is cast.
# - `offload`: everything rests in CPU memory, pinned if and only if `device_type` is `"cuda"`;
#   else no offloading (`OffloadPolicy()`).
#
# **Write `shard_model(model, units, mesh, **options)`.**
#
# - It shards every module of `units` on its own over `mesh`, and at last the model itself, for the
#   parameters that are in no unit; in place. It returns the model.
# - `options` hold for the units and for the model itself. Units are freed after forward; only the
#   last one may stay whole, because its backward comes right after.
#
# <details><summary>Hint</summary>
#
# `reshard_after_forward=True` frees a unit between forward and backward. `False` keeps it: one
# all-gather less, and the memory of ZeRO-2.
# </details>


# %% solution="task4_fully_shard"
def policies(device_type: str, mixed: bool, offload: bool) -> dict[str, object]:
    """Keyword arguments for fully_shard: mp_policy and offload_policy."""
    ### BEGIN SOLUTION
    precision = MixedPrecisionPolicy()
    if mixed:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()
    return {"mp_policy": precision, "offload_policy": where}
    ### END SOLUTION


def shard_model(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, **options: object
) -> nn.Module:
    """The model, each unit sharded on its own over the mesh's ranks."""
    ### BEGIN SOLUTION
    for module in [*units, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, **options)
    return model
    ### END SOLUTION


# %% [markdown]
# Compare three precisions of the same start. Expected: bf16 is close to fp32, not equal, and the
# parameters that the optimizer sees are fp32 in all cases.

# %% demo="see_policies"
with demo("task 4"):
    mesh = init_device_mesh(device.type, (world_size,))
    for mixed, offload in ((False, False), (True, False), (False, True)):
        gpt = make_gpt()
        gpt = shard_model(gpt, units_of(gpt), mesh, **policies(device.type, mixed, offload))
        x, y = random_tokens(rank)
        loss = lm_loss(gpt(x).float(), y)
        loss.backward()
        shard = gpt.head.weight.to_local()
        if IS_RANK_ZERO:
            print(
                f"mixed={mixed!s:<5} offload={offload!s:<5}: loss {loss.item():.5f}, head.weight "
                f"{list(gpt.head.weight.shape)}, here {list(shard.shape)} {shard.dtype} "
                f"on {shard.device.type}"
            )

# %% check="fsdp_fully_shard"
check("fsdp_fully_shard", shard_model)

# %% tags=["script-only"]
dist.barrier()

# %% check="fsdp_precision"
check("fsdp_precision", shard_model)

# %% check="fsdp_policies"
check("fsdp_policies", policies)

# %% [markdown]
# ## Task 5 · A model that does not fit
#
# **Why.** Weights, gradients and optimizer state are sharded now. Activations are not: what forward
# keeps for backward belongs to this rank's batch, and with long sequences it is the larger part.
# *Activation checkpointing* keeps a unit's input only, and computes the rest again when its
# backward comes: a third more computing, and no other change.
#
# **Write `recompute_units(model, units)`.**
#
# - After it, each unit of `units` keeps nothing but its inputs between forward and backward. In
#   backward, units are computed again one by one, each when its turn comes. Modules that are in no
#   unit are computed once, as before.
# - It changes the model in place, and returns it. `state_dict()` keeps its names.
# - Outputs and gradients are what they were without it: with dropout, over several steps, with
#   arguments by keyword, and where a unit's input needs no gradient.
#
# <details><summary>Hint</summary>
#
# Give each unit another `forward`, which calls `checkpoint(the_old_one, *args, **kwargs)` with
# `use_reentrant=False`. In a loop, mind that a lambda sees the loop's variable as it is when it is
# called.
# </details>


# %% solution="task5_recompute"
def recompute_units(model: nn.Module, units: list[nn.Module]) -> nn.Module:
    """The model, of which each unit keeps its inputs only and computes the rest again."""
    ### BEGIN SOLUTION
    for unit in units:
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
    return model
    ### END SOLUTION


# %% [markdown]
# What backward needs of one forward pass, with your model sharded as in task 4. Expected: several
# times less, and the same loss. (Every block's input stays, and so do the embeddings and the head,
# which are no blocks.)

# %% demo="see_recompute"
with demo("tasks 4 and 5"):
    mesh = init_device_mesh(device.type, (world_size,))
    for again in (False, True):
        gpt = make_gpt()
        gpt = recompute_units(gpt, list(gpt.blocks)) if again else gpt
        gpt = shard_model(gpt, units_of(gpt), mesh)
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x, y = random_tokens(rank)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = lm_loss(gpt(x), y)
        loss.backward()
        if IS_RANK_ZERO:
            how = "computed again" if again else "kept"
            print(f"{how:<15} {sum(kept.values()) / 2**20:6.2f} MiB, loss {loss.item():.5f}")

# %% check="fsdp_recompute"
check("fsdp_recompute", recompute_units)

# %% [markdown]
# Now the memory is taken away. The check starts fresh processes, one per rank: each may use what a
# sharded training needs, and no more. On 3 ranks the model's training state (weights, gradients,
# AdamW) is nearly twice that. Plain DDP cannot do it; nor can any form in which the optimizer's
# state, or all units at once, are whole on one rank.
#
# **Write `train_large(make_model, batches, lr)`.**
#
# - `make_model()` builds an `nn.Sequential` of equal blocks on the CPU, with the same weights on
#   all ranks.
# - `batches` is a list of pairs `(x, y)` of this rank; each is one step of `torch.optim.AdamW`,
#   with `lr` and else its defaults. The loss is `nn.functional.mse_loss`.
# - Return a list with one `float` per step: the mean of the loss over all ranks, before the update.
# - There is a process group already, on the CPU. The function travels to other processes, so use
#   nothing of this notebook's that belongs to its ranks: no mesh, no group, no tensor made outside.
#   You may use what you wrote in other tasks, or torch's own.
#
# <details><summary>Hint</summary>
#
# `init_device_mesh("cpu", (dist.get_world_size(),))` inside the function, `shard_model` with each
# block as a unit, and the optimizer made *after* sharding, over the sharded parameters. Gradients
# take memory until `zero_grad()`.
# </details>


# %% solution="task5_large"
def train_large(
    make_model: Callable[[], nn.Sequential],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    lr: float,
) -> list[float]:
    """Trains sharded; per step the loss's mean over ranks."""
    ### BEGIN SOLUTION
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
    ### END SOLUTION


# %% check="fsdp_budget"
check("fsdp_budget", train_large)

# %% [markdown]
# ## Task 6 · Save and load
#
# **Why.** A sharded model's state dict is in pieces. To get a *full* one, ranks gather it: a
# collective. You will find this in many places, and it hangs:
#
# ```python
# if rank == 0:
#     state = get_full_state(model)      # rank 0 waits for ranks that never come
#     torch.save(state, "checkpoint.pt")
# ```
#
# All ranks gather; **only the writing** is rank 0's.
#
# **Write `save_checkpoint(model, optimizer, path)` and `load_checkpoint(model, optimizer, path)`.**
#
# - `model` is sharded with `fully_shard`, `optimizer` is an optimizer over its parameters, in one
#   group or several. All ranks call both functions, after the same number of steps.
# - `save_checkpoint` writes one file, on rank 0 only. It holds a dict with `"model"` and
#   `"optimizer"`. `"model"` maps the names of the unsharded model's `state_dict()` to whole,
#   ordinary CPU tensors. How `"optimizer"` looks is up to you, but all ranks' state is in it.
#   `torch.load(path)` can read all of it, so no `DTensor` is in there.
# - Saving changes nothing: training goes on as if there had been none.
# - `load_checkpoint` puts both back into a freshly made and sharded model and its fresh optimizer.
#   Training then goes on as if it had never stopped, with the options that the groups had (learning
#   rate, weight decay, betas). The file is there on rank 0 only: the others have another disk.
#
# <details><summary>Hint 1: saving</summary>
#
# `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` on
# all ranks; rank 0 gets the tensors, the others an empty dict. `get_optimizer_state_dict` takes the
# optimizer as well.
# </details>
#
# <details><summary>Hint 2: loading</summary>
#
# `set_model_state_dict` and `set_optimizer_state_dict` with
# `StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)`: rank 0 sends each rank its
# part. The other ranks pass an empty dict.
# </details>


# %% solution="task6_checkpoint"
def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Writes whole tensors into one file, on rank 0. Collective."""
    ### BEGIN SOLUTION
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    if dist.get_rank() == 0:
        torch.save(state, path)
    ### END SOLUTION


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Reads the file on rank 0, and gives each rank its shards. Collective."""
    ### BEGIN SOLUTION
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(path, map_location="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    ### END SOLUTION


# %% [markdown]
# Try it: train, save, go on; then load into a fresh model and go on from there. Expected: the same
# losses.


# %% demo="see_checkpoint"
def make_sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh(device.type, (world_size,))
    gpt = make_gpt()
    for module in [*units_of(gpt), gpt]:
        fully_shard(module, mesh=mesh)
    return gpt, torch.optim.AdamW(gpt.parameters(), lr=3e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x, y = random_tokens(rank)
    loss = lm_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


with demo("task 6"), tempfile.TemporaryDirectory() as folder:
    path = str(Path(folder, "checkpoint.pt"))
    model, optimizer = make_sharded()
    for _ in range(3):
        train_step(model, optimizer)
    save_checkpoint(model, optimizer, path)
    goes_on = [train_step(model, optimizer) for _ in range(3)]
    model, optimizer = make_sharded()
    load_checkpoint(model, optimizer, path)
    resumed = [train_step(model, optimizer) for _ in range(3)]
    if IS_RANK_ZERO:
        print("went on:", [f"{loss:.5f}" for loss in goes_on])
        print("resumed:", [f"{loss:.5f}" for loss in resumed])

# %% check="fsdp_save"
check("fsdp_save", save_checkpoint)

# %% tags=["script-only"]
dist.barrier()

# %% check="fsdp_resume"
check("fsdp_resume", (save_checkpoint, load_checkpoint))

# %% [markdown]
# ## Task 7 · Throughput and scaling
#
# **Why.** Sharding costs traffic: gathers come twice. What counts in the end is how many samples
# all ranks together finish per second, and how that grows with their number. Ranks may have
# batches of different sizes, and they wait for the slowest.
#
# **Write `throughput(step, num_samples, synchronize, device, *, warmup=2, repeats=5, clock=…)`.**
#
# - Call `step()` `warmup` times untimed, then `repeats` times timed, *together*: one look at
#   `clock()` before the first, one after the last. Call `synchronize()` right before each look:
#   a GPU works through a queue, and the clock must not be read before the queue is empty.
# - `num_samples` is how many samples *this* rank trains on in a step.
# - Return, alike on all ranks: samples of all ranks in all timed steps, divided by the seconds of
#   the slowest rank. A `float`.
#
# **Write `scaling_efficiency(alone, together, world_size)`**: the throughput of `world_size` ranks
# over `world_size` times that of one. Below 1 as a rule.
#
# <details><summary>Hint</summary>
#
# Two numbers have to meet those of the other ranks, and in different ways: samples are added up, of
# the seconds the largest counts. Both fit into tensors of one `float64` each, on `device`, for
# `dist.all_reduce`.
# </details>


# %% solution="task7_throughput"
def throughput(
    step: Callable[[], object],
    num_samples: int,
    synchronize: Callable[[], None],
    device: torch.device,
    *,
    warmup: int = 2,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Samples per second of all ranks together."""
    ### BEGIN SOLUTION
    for _ in range(warmup):
        step()
    synchronize()
    begin = clock()
    for _ in range(repeats):
        step()
    synchronize()
    seconds = torch.tensor(clock() - begin, dtype=torch.float64, device=device)
    samples = torch.tensor(num_samples * repeats, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(samples)
    return (samples / seconds).item()
    ### END SOLUTION


def scaling_efficiency(alone: float, together: float, world_size: int) -> float:
    """Share of the ideal speed-up that was reached."""
    ### BEGIN SOLUTION
    return together / (world_size * alone)
    ### END SOLUTION


# %% [markdown]
# Measure the three ways to train the small transformer here. What you see depends on your
# machine: a model this small is all overhead, and two ranks on one CPU share its memory.

# %% demo="see_throughput"
with demo("task 7"):
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    mesh = init_device_mesh(device.type, (world_size,))
    for name in ("ddp", "fully_shard, kept after forward", "fully_shard"):
        gpt = make_gpt()
        if name == "ddp":
            gpt = DistributedDataParallel(gpt)
        else:
            for module in [*units_of(gpt), gpt]:
                fully_shard(module, mesh=mesh, reshard_after_forward=name == "fully_shard")
        train = partial(train_step, gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-3))
        per_second = throughput(train, 4, synchronize, device, warmup=1, repeats=3)
        if IS_RANK_ZERO:
            print(f"{name:<32} {per_second:7.0f} samples/s")

# %% check="fsdp_throughput"
check("fsdp_throughput", (throughput, scaling_efficiency))

# %% [markdown]
# ## Task 8 · Which strategy?
#
# **Why.** A ring all-reduce of $B$ bytes makes each rank send $2\frac{N-1}{N}B$; an all-gather or
# a reduce-scatter is half of that. DDP: one all-reduce of the gradients. ZeRO-1 and ZeRO-2: a
# reduce-scatter of gradients and an all-gather of updated parameters, which is the same. ZeRO-3: a
# reduce-scatter and *two* all-gathers, so half as much again. So you shard as much as you must,
# and no more.
#
# **Write `traffic_per_rank(num_params, world_size, strategy, bytes_per_number=4)`**: the bytes that
# a rank sends in one step, as a `float`, for the four strategies of task 1.
#
# **Write `choose_strategy(num_params, world_size, budget_bytes, mixed=False)`**: the first of
# `"ddp"`, `"zero1"`, `"zero2"`, `"zero3"` whose three parts of task 1 together are at most
# `budget_bytes`; `"offload"` if none fits.
#
# <details><summary>Hint</summary>
#
# `sum(bytes_per_rank(…)) <= budget_bytes`. If task 1 does not work yet, you can do the sum here:
# the check does not use yours.
# </details>


# %% solution="task8_choice"
def traffic_per_rank(
    num_params: int, world_size: int, strategy: str, bytes_per_number: int = 4
) -> float:
    """Bytes that a rank sends in a step."""
    ### BEGIN SOLUTION
    passes = 3 if strategy == "zero3" else 2
    return passes * (world_size - 1) / world_size * num_params * bytes_per_number
    ### END SOLUTION


def choose_strategy(
    num_params: int, world_size: int, budget_bytes: int, mixed: bool = False
) -> str:
    """The strategy with the least sharding that fits."""
    ### BEGIN SOLUTION
    shard = -(-num_params // world_size)
    weight, gradient, state = (2, 2, 12) if mixed else (4, 4, 8)
    needs = {
        "ddp": num_params * (weight + gradient + state),
        "zero1": num_params * (weight + gradient) + shard * state,
        "zero2": num_params * weight + shard * (gradient + state),
        "zero3": shard * (weight + gradient + state),
    }
    return next((name for name, size in needs.items() if size <= budget_bytes), "offload")
    ### END SOLUTION


# %% [markdown]
# Three strategies side by side, on four ranks of the emulated cluster: the bytes that a rank sends
# by your formula, and the virtual time of the second step, of which 9 ms are compute. (Before the
# first, DDP also sends the weights from rank 0 to all others.) Expected: on this slow network
# ZeRO-3 takes longest. What it buys is memory, not time.

# %% demo="see_strategies" tags=["active-ipynb"]
# %%rank 0
# from minidist import emulate
#
# LAYERS, WIDTH = 6, 128
# network = emulate.Link(bandwidth_bytes_per_s=2e8, latency_s=1e-5)
# costs = emulate.ChargePlan((0.5e-3,) * LAYERS, (1e-3,) * LAYERS, b"practice")
#
#
# def run_strategy(name, num_steps):
#     torch.manual_seed(0)
#     layers = [emulate.Charged(nn.Linear(WIDTH, WIDTH), i) for i in range(LAYERS)]
#     model = nn.Sequential(*layers)
#     if name == "ddp":
#         wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)
#     else:
#         mesh = init_device_mesh("cpu", (dist.get_world_size(),))
#         for module in [*layers, model]:
#             fully_shard(module, mesh=mesh, reshard_after_forward=name == "zero3")
#         wrapped = model
#     for _ in range(num_steps):
#         wrapped(torch.randn(2, WIDTH)).square().mean().backward()
#         wrapped.zero_grad()
#
#
# with demo("task 8"):
#     cluster = emulate.Cluster(
#         name="slow",
#         nodes=1,
#         devices_per_node=4,
#         intra_node=network,
#         inter_node=network,
#         peak_flops_per_s=1e12,
#         memory_bandwidth_bytes_per_s=1e11,
#     )
#     for name in ("ddp", "zero2", "zero3"):
#         sent = traffic_per_rank(LAYERS * (WIDTH + 1) * WIDTH, 4, name)
#         one, two = (
#             emulate.run(run_strategy, 4, cluster, name, num_steps, plan=costs)[1].makespan_s
#             for num_steps in (1, 2)
#         )
#         took = (two - one) * 1e3
#         print(f"{name}: {sent / 1e3:5.0f} kB, {took:5.1f} ms, scaling efficiency {9 / took:.2f}")

# %% check="fsdp_choice"
check("fsdp_choice", (traffic_per_rank, choose_strategy))

# %% [markdown]
# ## Yours beside PyTorch's
#
# The next cell trains one network with your FSDP, with PyTorch's, and with the course's own; every
# layer is a unit. All get the same weights and batches, so the losses must agree, and the bytes
# nearly. The time of a step is measured here, where other programs disturb it, and on the emulated
# cluster, where only the order of gathers counts. DDP is there for comparison: what does sharding
# cost?

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
#
#
# def fully_sharded(net):
#     mesh = init_device_mesh(next(net.parameters()).device.type, (dist.get_world_size(),))
#     for module in [*net, net]:
#         fully_shard(module, mesh=mesh)
#     return net
#
#
# def sharded_by_the_course(net):
#     Zero3(net, list(net))
#     return net
#
#
# with demo("task 3"):
#     Zero3 = find("minidist.parallel.zero:Zero3")
#     beside(
#         {
#             "yours": training(lambda net: FSDP(net, list(net))),
#             "PyTorch's": training(fully_sharded),
#             "the course's": Zero3 and training(sharded_by_the_course),
#             "DDP": training(DistributedDataParallel),
#         },
#         device=device,
#     )

# %% [markdown]
# ## On a GPU: 3 extra points
#
# With a CUDA device, `fsdp_gpu_memory` trains 24 blocks of 1536 × 1536 with your class of task 3
# and AdamW, and looks at the most that torch's allocator held meanwhile. Parameters, gradients and
# the two states of AdamW are $4P/N$ for parameters of $P$ bytes; half of $P$ on top of that is for
# the units that are whole at a time, less than in `fsdp_limit`. If your class frees its units as
# task 3 says, there is nothing left to write. Ranks may share one GPU. Without a GPU the check says
# so and costs nothing.

# %% check="fsdp_gpu_memory"
check("fsdp_gpu_memory", FSDP)

# %% [markdown]
# ## Reflect
#
# Some things no test can judge. Answer each question in its own cell, in a few sentences: replace
# *YOUR ANSWER HERE*. Whoever runs your course reads the answers and gives up to 2 points for each,
# beyond the 100.

# %% [markdown] reflect="reflect_1"
# **1. ZeRO-3 divides the model's state by $N$. Your run on 64 GPUs still runs out of memory. What
# is left?**
#
# <!-- BEGIN SOLUTION -->
# Activations: they belong to this rank's samples, and no stage of ZeRO touches them. Then what is
# whole for a moment: the largest unit, gathered, with its gradients, twice because of prefetch. A
# huge embedding or output layer may be such a unit. Smaller micro-batches, activation
# checkpointing and finer units help; more ranks do not.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. Why units at all? One all-gather of everything has less latency.**
#
# <!-- BEGIN SOLUTION -->
# After it, every rank holds the whole model, and in backward the whole gradient: the memory of
# ZeRO-1. And nothing can overlap, because the first layer needs the gather and the gather is not
# over before the last byte has come. Units are the compromise: small enough for memory, large
# enough that bandwidth, not latency, decides.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. When is `reshard_after_forward=False` right?**
#
# <!-- BEGIN SOLUTION -->
# If the parameters fit whole beside the activations, but optimizer and gradients do not. One of
# three passes over the network is saved. Also with gradient accumulation: parameters change
# once per step, not once per micro-batch. And for the last unit always: its backward comes right
# after its forward.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_4"
# **4. Clipping the gradient norm: which line of your DDP loop breaks under sharding?**
#
# <!-- BEGIN SOLUTION -->
# The norm over `local_parameters()` is that of this rank's part only, so every rank would clip by
# another factor, and the model is no longer one. The squares of the norms have to be added up over
# the ranks first. torch's `clip_grad_norm_` does so when parameters are DTensors.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - [ ] you can write the table of bytes per parameter for DDP and ZeRO-1, -2, -3 from memory;
# - [ ] you know which collectives each of them needs, and how many bytes they move;
# - [ ] you can say why setting `p.data` does not free a weight, and what does;
# - [ ] you can find a missing prefetch in a timeline;
# - [ ] you never put a state dict of a sharded model under `if rank == 0`;
# - [ ] you can say which part of mixed precision saves memory, and which does not.
#
# ## Read next
#
# - Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
#   [arXiv 1910.02054](https://arxiv.org/abs/1910.02054). The three stages, with the formula of
#   task 1.
# - Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, [arXiv
#   2304.11277](https://arxiv.org/abs/2304.11277). What it takes to make task 3 fast: flat
#   parameters, prefetch, rate limits.
# - Rajbhandari et al., *ZeRO-Infinity*, [arXiv 2104.07857](https://arxiv.org/abs/2104.07857).
#   Offloading to CPU memory and to disks.
# - Liang et al., *TorchTitan*, [arXiv 2410.06511](https://arxiv.org/abs/2410.06511).
#   `fully_shard` beside other parallelisms in one training code.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
if IS_RANK_ZERO:
    print("lab 3 is done")
