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
# # Bonus · ZeRO: an optimiser in shards
#
# A rank of data parallelism with AdamW keeps 16 bytes per parameter: 4 for the parameter, 4 for
# its gradient, 8 for AdamW. All ranks keep the *same* 16 bytes. In this notebook you write the
# optimiser that does not: each rank keeps and updates its own N-th (ZeRO-1), then also keeps only
# that part of the gradient (ZeRO-2). The model's forward and backward pass do not change at all.
#
# **When you have finished, you can**
#
# - lay any set of parameters out in one vector that N ranks can cut evenly (tasks 1, 2);
# - take the norm of a gradient that no rank has (task 3);
# - write ZeRO-1 around any of torch's elementwise optimisers (task 4);
# - turn it into ZeRO-2, which reduces gradients in backward and forgets them (task 5);
# - save a share per rank, and go on with another number of ranks (task 6);
# - say what each stage costs, in memory and on the wire (task 7), and train with it (task 8).
#
# Plan 3 hours. Lab 3 does what comes next, ZeRO-3. Nothing here needs a GPU.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | all |
# |---|---|---|---|---|---|---|---|---|---|
# | points | 9 | 5 | 8 | 36 | 22 | 10 | 6 | 4 | 100 |
#
# Without sharding (1 of zero1_reduce, zero1_gather, zero1_memory) this lab gives at most 49 points.
#
# Every cell runs on **two** ranks. Your grade comes from the same checks with other data on
# **3**, so that almost nothing divides. What you send is seen by the emulated cluster that carries
# it. How much memory you take is not asked of your code: it runs under a limit of the operating
# system, and an optimiser that keeps everything does not get through.

# %% [markdown]
# ## The idea in one picture
#
# ```
#               rank 0            rank 1            rank 2
#            ┌─────────────┐   ┌─────────────┐   ┌─────────────┐
# parameters │█████████████│   │█████████████│   │█████████████│   whole on all ranks
#            └─────────────┘   └─────────────┘   └─────────────┘
#  gradients │█████████████│   │█████████████│   │█████████████│   ZeRO-1: whole
#            │████         │   │    █████    │   │         ████│   ZeRO-2: one share
#            └─────────────┘   └─────────────┘   └─────────────┘
#   AdamW's  │████         │   │    █████    │   │         ████│   one share
#   moments  └─────────────┘   └─────────────┘   └─────────────┘
#
# one step:   mean of gradients  →  each rank updates its share  →  all-gather the shares
# ```
#
# AdamW works number by number: what becomes of one parameter does not depend on any other. So
# nobody has to update all of them. Each rank updates a share, and gets the others' results.
#
# An all-reduce *is* a reduce-scatter followed by an all-gather. ZeRO-2 puts the update between the
# two halves. With one micro-batch it sends not a byte more than data parallelism does, and three
# quarters of what all ranks kept N times are kept once.

# %% given="imports"
import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from autograder import check, is_not_started
from minidist.device import (
    all_gather_single,
    choose_backend,
    choose_device,
    reduce_scatter_single,
)

# %% given="helpers"
IS_RANK_ZERO = os.environ.get("RANK", "0") == "0"
DEVICE = choose_device()
if DEVICE.type == "cuda":
    torch.cuda.set_device(DEVICE)
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


# %% [markdown]
# ## Task 1 · One vector
#
# **Why.** A model has hundreds of tensors of all sizes. Give whole tensors to ranks, and the one
# with the embedding has most of the work. Put them all into one long vector and cut *that*, and
# every rank has the same, whatever the shapes. A cut may go right through a weight.
#
# Collectives want equal parts. So the vector is **padded** at its end, with zeros: what stands
# there travels, is updated, counts in norms, and must not disturb anything.
#
# **Write two functions.**
#
# `flatten(tensors, num_parts)`
#
# - `tensors` is a list of at least one tensor, of any shapes (also `()` and `(0,)`, also not
#   contiguous), all of one dtype and device.
# - Return one new 1-D tensor: all their numbers, in order, then as few zeros as it takes for
#   `num_parts` to divide its length.
# - It shares no memory with the arguments.
#
# `unflatten(flat, tensors)`
#
# - The way back: copies the numbers of `flat` into `tensors`, in place, and ignores the padding.
#   `tensors` are as above, and may be parameters; nothing is recorded for autograd.
#
# Rank r's part of a flat vector is its r-th of `num_parts` equal pieces. You will need that often.
#
# <details><summary>Hint 1: padding</summary>
#
# `-count % num_parts` is how many zeros are missing. `new_zeros` makes a vector of the same dtype
# and device.
# </details>
#
# <details><summary>Hint 2: the way back</summary>
#
# `flat.split([...])` takes a list of sizes that add up to its length, so cut the padding off
# first. Under `torch.no_grad()`, `tensor.copy_(part.view_as(tensor))`.
# </details>


# %% solution="task1_flat"
def flatten(tensors: list[torch.Tensor], num_parts: int) -> torch.Tensor:
    """All numbers in one vector, padded with zeros so that `num_parts` divides its length."""
    ### BEGIN SOLUTION
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    missing = -sum(part.numel() for part in parts) % num_parts
    return torch.cat([*parts, parts[0].new_zeros(missing)])
    ### END SOLUTION


def unflatten(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copies the numbers of `flat` back into `tensors`."""
    ### BEGIN SOLUTION
    sizes = [tensor.numel() for tensor in tensors]
    with torch.no_grad():
        for tensor, part in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))
    ### END SOLUTION


# %% demo="see_flat"
with demo("task 1"):
    pair = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor(5.0)]
    tell("for three ranks:", flatten(pair, 3).tolist())
    unflatten(torch.arange(10.0, 16.0), pair)
    tell("and back:       ", pair)

# %% [markdown]
# Expected: `[1.0, 2.0, 3.0, 4.0, 5.0, 0.0]`; then `[[10, 11], [12, 13]]` and `14`.

# %% check="zero_flatten"
check("zero_flatten", flatten)

# %% check="zero_unflatten"
check("zero_unflatten", unflatten)

# %% [markdown]
# ## Task 2 · What there is to train
#
# **Why.** `model.parameters()` holds no parameter twice, but a list that somebody has made may:
# tied weights, an embedding that is the output layer, too. In the vector twice, it would be updated
# as two. And what is frozen must not take any of the memory that we want to save.
#
# Biases and norms usually get no weight decay, so optimisers take *groups*, each with options of
# its own. A flat vector with two learning rates in it would be awkward; so there will be one flat
# vector per group. That has a second advantage: work is done group by group, and only one group at
# a time needs memory for its flat copy.
#
# **Write `trainable_groups(params)`.**
#
# - `params` is what any of torch's optimisers takes: parameters, or dicts with `"params"` (a
#   parameter or several) and options, such as `{"params": [...], "lr": 0.1}`. It may be an
#   iterator, and so may `"params"`.
# - Return a list of new dicts of that kind: `"params"` is a list, options are as they were.
#   Parameters without dicts make up one group, without options.
# - A parameter that does not require a gradient is left out. One that occurs again, in the same
#   group or in a later one, counts only the first time. Order stays. A group of which nothing is
#   left is left out.
# - The dicts that came in stay as they are.
#
# <details><summary>Hint</summary>
#
# A set of `id(parameter)`. Tensors cannot be compared with `in`: `==` goes number by number.
# </details>


# %% solution="task2_groups"
def trainable_groups(params: Iterable) -> list[dict]:
    """Groups of parameters, each of them once, without those that are frozen."""
    ### BEGIN SOLUTION
    entries = list(params)
    if not any(isinstance(entry, dict) for entry in entries):
        entries = [{"params": entries}]
    seen: set[int] = set()
    groups = []
    for entry in entries:
        inside = entry["params"]
        kept = []
        for parameter in [inside] if isinstance(inside, torch.Tensor) else inside:
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                kept.append(parameter)
        if kept:
            groups.append(entry | {"params": kept})
    return groups
    ### END SOLUTION


# %% demo="see_groups"
with demo("task 2"):
    layer, tied = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
    layer.bias.requires_grad_(False)
    for group in trainable_groups([{"params": layer.parameters()}, {"params": [tied, tied]}]):
        tell([tuple(parameter.shape) for parameter in group["params"]])

# %% [markdown]
# Expected: `[(2, 3)]` and `[(4,)]`.

# %% check="zero_groups"
check("zero_groups", trainable_groups)

# %% [markdown]
# ## Task 3 · The norm of what nobody has
#
# **Why.** Clipping needs the norm of the whole gradient, and soon every rank will have only a
# share. `nn.utils.clip_grad_norm_` would take the norm of that share: another one on every rank, so
# every rank would scale by another factor, and the update would no longer point along the gradient.
# Nothing would crash. Squares can be added up over ranks; norms cannot.
#
# **Write `clip_by_global_norm(gradients, max_norm)`.**
#
# - `gradients` is a list of this rank's shares. It may be empty on some ranks, and shares may have
#   no numbers in them.
# - Return the norm of all shares of all ranks together, as a `float`, as it was before clipping. It
#   is the same on all ranks.
# - If it is above `max_norm`, scale all shares in place so that it becomes `max_norm`. If not, they
#   stay as they are, bit by bit.
# - **One** collective, of one number, in float32 or float64.
#
# <details><summary>Hint</summary>
#
# Sum up squares on this rank, in a tensor on the right device (`DEVICE`; there may be no gradient
# to ask), then `dist.all_reduce`, then the root.
# </details>


# %% solution="task3_clip"
def clip_by_global_norm(gradients: list[torch.Tensor], max_norm: float) -> float:
    """Scales gradients whose shares lie on all ranks; returns their norm before that."""
    ### BEGIN SOLUTION
    total = torch.zeros((), dtype=torch.float32, device=DEVICE)
    for gradient in gradients:
        total += gradient.float().square().sum()
    dist.all_reduce(total)
    norm = math.sqrt(total.item())
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return norm
    ### END SOLUTION


# %% demo="see_clip"
with demo("task 3"):
    share = torch.tensor([3.0, 4.0] if dist.get_rank() == 0 else [12.0], device=DEVICE)
    norm = clip_by_global_norm([share], 1.3)
    tell(f"norm {norm:.2f}, rank 0's share", [round(value, 3) for value in share.tolist()])

# %% [markdown]
# Expected on two ranks: norm 13.00, `[0.3, 0.4]`.

# %% check="zero_norm"
check("zero_norm", clip_by_global_norm)

# %% check="zero_norm_cost"
check("zero_norm_cost", clip_by_global_norm)

# %% [markdown]
# ## Task 4 · ZeRO-1
#
# **Write the class `ZeRO1`.** It does no arithmetic of an optimiser itself. It hands a torch
# optimiser *this rank's share* of each group, and that optimiser does not know that there is more.
#
# `ZeRO1(params, optimizer_class, **options)`
#
# - `params` as in task 2; they have the same values on all ranks. `optimizer_class` is such as
#   `torch.optim.AdamW`, `options` are for it: `ZeRO1(model.parameters(), torch.optim.AdamW,
#   lr=1e-3)`.
# - Of each group's flat vector, this rank's part becomes a parameter, its **shard**. The wrapped
#   optimiser gets one group with one shard for each group of yours, with the group's options.
# - `param_groups` are those of the wrapped optimiser: a scheduler writes the learning rate there.
# - Ask `dist` for rank and number of ranks *here*, not at the top of a notebook.
#
# `reduce()`, called on all ranks after backward, for one group after the other:
#
# - takes the mean of `p.grad` over all ranks with an all-reduce; a gradient that is `None`, on this
#   rank or on all, counts as zeros (somebody else's batch may have used the parameter);
# - *adds* this rank's part of it to the gradient of its shard, if there is one already;
# - sets every `p.grad` to `None` as soon as its group is reduced.
#
# `gradients()` is the list of the shards' gradients: this rank's part of the mean gradient. A shard
# that has none is left out. `step()` uses these very tensors: clipping scales them in place.
#
# `step()`:
#
# - the wrapped optimiser makes a step;
# - the updated shards are all-gathered, one group after the other, and written into the parameters,
#   in place. Every rank sends its own share, and nothing else travels (`dist.all_gather` with a
#   list, or one broadcast per rank, will do, too).
#
# At no time, in `reduce()` or `step()`, does a rank hold a second copy of more than one group's
# parameters, or gradients. One is allowed: a flat vector beside the tensors that it was made of.
#
# `zero_grad()` forgets the shards' gradients, and every `p.grad`.
#
# <details><summary>Hint 1: what to keep</summary>
#
# For each group a list of parameters and a shard, `nn.Parameter(part.clone())`. Without `clone` the
# shard is a view, and keeps the whole flat vector alive. `flat.chunk(n)[rank]` is a part, as n
# divides the length.
# </details>
#
# <details><summary>Hint 2: the wrapped optimiser</summary>
#
# `optimizer_class([group | {"params": [shard]} ...], **options)` accepts groups with options of
# their own, and fills in the rest.
# </details>
#
# <details><summary>Hint 3: gathering</summary>
#
# `all_gather_single(flat, shard)` with `flat` made by `shard.new_empty(n * len(shard))`, then
# `unflatten`. Give it `shard.data`: a collective is nothing that autograd should see. (It is
# torch's `all_gather_into_tensor`, under the name that newer versions have for it.)
# </details>


# %% solution="task4_zero1"
class ZeRO1:
    """A torch optimiser of which each rank keeps and computes one share."""

    def __init__(self, params: Iterable, optimizer_class: type, **options: object) -> None:
        ### BEGIN SOLUTION
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.parameters: list[list[nn.Parameter]] = []  # of each group
        self.shards: list[nn.Parameter] = []
        sharded = []
        for group in trainable_groups(params):
            shard = nn.Parameter(self.part(flatten(group["params"], self.num_ranks)).clone())
            self.parameters.append(group["params"])
            self.shards.append(shard)
            sharded.append(group | {"params": [shard]})
        self.inner = optimizer_class(sharded, **options)

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat vector; a view."""
        return flat.chunk(self.num_ranks)[self.rank]

    def mean_part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over ranks."""
        dist.all_reduce(flat)
        return self.part(flat).clone() / self.num_ranks

    def reduce_group(self, number: int) -> None:
        """Adds the mean of a group's gradients to its shard's, and forgets them."""
        parameters, shard = self.parameters[number], self.shards[number]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = flatten(grads, self.num_ranks)
        for parameter in parameters:
            parameter.grad = None
        mean = self.mean_part(flat)
        shard.grad = mean if shard.grad is None else shard.grad + mean
        ### END SOLUTION

    @property
    def param_groups(self) -> list[dict]:
        """The groups of the wrapped optimiser, for schedulers."""
        ### BEGIN SOLUTION
        return self.inner.param_groups
        ### END SOLUTION

    def reduce(self) -> None:
        """Averages p.grad over ranks, adds this rank's part to its shards' gradients."""
        ### BEGIN SOLUTION
        for number in range(len(self.shards)):
            self.reduce_group(number)
        ### END SOLUTION

    def gradients(self) -> list[torch.Tensor]:
        """This rank's part of the mean gradient, one tensor per group."""
        ### BEGIN SOLUTION
        return [shard.grad for shard in self.shards if shard.grad is not None]
        ### END SOLUTION

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clips by the norm over all ranks (task 3)."""
        return clip_by_global_norm(self.gradients(), max_norm)

    def step(self) -> None:
        """Updates this rank's shards, and gathers those of the others."""
        ### BEGIN SOLUTION
        self.inner.step()
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            flat = shard.data.new_empty(self.num_ranks * shard.numel())
            all_gather_single(flat, shard.data)
            unflatten(flat, parameters)
            del flat  # before the next one is made
        ### END SOLUTION

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        ### BEGIN SOLUTION
        for parameters, shard in zip(self.parameters, self.shards, strict=True):
            for parameter in [*parameters, shard]:
                parameter.grad = None
        ### END SOLUTION


# %% demo="see_zero1"
with demo("tasks 1 to 4"):
    weight = nn.Parameter(torch.zeros(5, device=DEVICE))
    zero1 = ZeRO1([weight], torch.optim.SGD, lr=1.0)
    (weight * (dist.get_rank() + 1)).sum().backward()
    zero1.reduce()
    tell("rank 0's part of the gradient:", zero1.gradients()[0].tolist())
    zero1.step()
    tell("the parameter:", weight.tolist())

# %% [markdown]
# Expected on two ranks: `[1.5, 1.5, 1.5]`; five times -1.5.
#
# First the numbers. SGD shows whether gradients are means; AdamW would not (reflection 1).

# %% check="zero1_reduce"
check("zero1_reduce", ZeRO1)

# %% check="zero1_adamw"
check("zero1_adamw", ZeRO1)

# %% check="zero1_options"
check("zero1_options", ZeRO1)

# %% check="zero1_special"
check("zero1_special", ZeRO1)

# %% [markdown]
# Now what it sends, on the emulated cluster.

# %% check="zero1_gather"
check("zero1_gather", ZeRO1)

# %% [markdown]
# And the memory. The next check starts processes of its own, each under a limit that lets AdamW
# keep a share, and not the whole. It takes some seconds.

# %% check="zero1_memory"
check("zero1_memory", ZeRO1)

# %% [markdown]
# ## Task 5 · ZeRO-2
#
# **Why.** A rank all-reduces the whole gradient, and uses an N-th of it. A **reduce-scatter** gives
# it just that N-th, with half the traffic. But the larger part of the saving is *when*: if a group
# is reduced as soon as backward has all of its gradients, they can be forgotten at once, and the
# whole gradient never exists on any rank.
#
# There is a trap. All ranks have to call collectives in the same order, and which gradient comes
# when may differ: on some rank a layer gets no gradient at all. So the order is fixed: **last group
# first**, as backward goes, and a group waits until all groups behind it have gone. What never
# becomes complete goes in `reduce()`, at the end.
#
# **Write the class `ZeRO2`**, with all that `ZeRO1` has (inherit), and
#
# - each group is reduced **in backward**, as soon as all of its parameters have their gradients and
#   all groups behind it are reduced. Then its `p.grad` are `None`;
# - by reduce-scatter: each rank receives its part of the sum, and nothing else;
# - `reduce()` is called on all ranks after **every** backward. It reduces the groups that are left,
#   in the same order. Then all `p.grad` are `None`, and the next backward may begin;
# - with several micro-batches the parts add up in the shards, as in `ZeRO1`.
#
# <details><summary>Hint 1: a hook</summary>
#
# `p.register_post_accumulate_grad_hook(f)` calls `f(p)` in backward when `p.grad` is complete. Use
# `functools.partial` or a default argument to tell `f` the group: a `lambda` in a loop would know
# only the last one.
# </details>
#
# <details><summary>Hint 2: whose turn is it?</summary>
#
# Count per group how many gradients are missing, and keep the number of the group whose turn it is.
# When a gradient comes: count down; while the group whose turn it is lacks none, reduce it and go
# on to the one before. `reduce()` does the rest, and sets counters back.
# </details>
#
# <details><summary>Hint 3: the collective</summary>
#
# `reduce_scatter_single(part, flat)` sums; `part` has an N-th of `flat`'s numbers. (It is torch's
# `reduce_scatter_tensor`, under its newer name.)
# </details>


# %% solution="task5_zero2"
class ZeRO2(ZeRO1):
    """ZeRO-1 that keeps only this rank's share of the gradient, too."""

    def __init__(self, params: Iterable, optimizer_class: type, **options: object) -> None:
        ### BEGIN SOLUTION
        super().__init__(params, optimizer_class, **options)
        self.start_backward()
        for number, parameters in enumerate(self.parameters):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.gradient_came(number)
                )

    def start_backward(self) -> None:
        """Nothing has come yet; the last group goes first."""
        self.missing = [len(parameters) for parameters in self.parameters]
        self.turn = len(self.parameters) - 1

    def gradient_came(self, number: int) -> None:
        """Reduces all groups whose turn it is and that are complete."""
        self.missing[number] -= 1
        while self.turn >= 0 and self.missing[self.turn] == 0:
            self.reduce_group(self.turn)
            self.turn -= 1

    def mean_part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over ranks, and only that."""
        part = flat.new_empty(flat.numel() // self.num_ranks)
        reduce_scatter_single(part, flat)
        return part / self.num_ranks
        ### END SOLUTION

    def reduce(self) -> None:
        """Reduces what backward has not, and makes ready for the next one."""
        ### BEGIN SOLUTION
        for number in range(self.turn, -1, -1):
            self.reduce_group(number)
        self.start_backward()
        ### END SOLUTION


# %% demo="see_zero2"
with demo("tasks 1 to 5"):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(DEVICE)
    zero2 = ZeRO2([{"params": layer.parameters()} for layer in model], torch.optim.SGD, lr=0.1)
    model(torch.ones(3, 4, device=DEVICE)).sum().backward()
    tell("gradients after backward:", [p.grad for p in model.parameters()])
    zero2.reduce()
    tell("rank 0's shares:", [tuple(share.shape) for share in zero2.gradients()])

# %% [markdown]
# Expected: four times `None`, and on two ranks shares of 10 and 5 numbers.

# %% check="zero2_accumulate"
check("zero2_accumulate", ZeRO2)

# %% check="zero2_order"
check("zero2_order", ZeRO2)

# %% check="zero2_scatter"
check("zero2_scatter", ZeRO2)

# %% check="zero2_memory"
check("zero2_memory", ZeRO2)

# %% [markdown]
# ## Task 6 · Save a share, load with another number of ranks
#
# **Why.** AdamW's moments are twice as large as the model. Gathering them on rank 0 to save them
# would need the memory that we have just saved, and keeps N - 1 ranks waiting. So each rank writes
# its own file. But the next job may have another number of ranks: then other cuts and other padding
# are needed, and the file of rank 1 is no longer what rank 1 needs.
#
# **Write two functions.** `optimizer` is a `ZeRO1` or `ZeRO2`.
#
# `save_shard(optimizer)`
#
# - What this rank writes to its own file: dicts, lists, numbers, text and tensors, so that
#   `torch.load` can read it without trust. Of the state only this rank's share; no communication.
# - It is a copy, which later steps do not change.
# - The model is saved by others. So are learning rates and other options: `load_shards` leaves them
#   as they are.
#
# `load_shards(optimizer, saved)`
#
# - `saved` is the list of what **all** ranks of the old job have saved, in the order of their
#   ranks. Any number of them; every rank gets the whole list, and nobody needs it afterwards.
# - `optimizer` is new, made from the same parameters in the same groups, perhaps on another number
#   of ranks. After this its state is what this rank needs to go on as if nothing had happened.
# - All of it: also what is not a tensor of the shard's size, such as AdamW's count of steps.
#
# <details><summary>Hint 1: where it is</summary>
#
# The wrapped optimiser's `state` has one dict per shard: for AdamW
# `{"step", "exp_avg", "exp_avg_sq"}`. It is filled by the first step, and a new optimiser lets you
# write into it: `inner.state[shard] = {...}`.
# </details>
#
# <details><summary>Hint 2: from N parts to M</summary>
#
# Put the old parts together (`torch.cat`), cut the old padding off (how many numbers do the group's
# parameters have?), pad for the new number of ranks, take your part. `flatten` can pad.
# </details>


# %% solution="task6_save"
def save_shard(optimizer: ZeRO1) -> list[dict]:
    """This rank's share of the state, one dict per group."""
    ### BEGIN SOLUTION
    states = [optimizer.inner.state.get(shard, {}) for shard in optimizer.shards]
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for state in states
    ]
    ### END SOLUTION


def load_shards(optimizer: ZeRO1, saved: list[list[dict]]) -> None:
    """Takes from the shares of all ranks of an old job what this rank needs."""
    ### BEGIN SOLUTION
    for number, shard in enumerate(optimizer.shards):
        numel = sum(parameter.numel() for parameter in optimizer.parameters[number])
        old = [share[number] for share in saved]
        state = {}
        for name, value in old[0].items():
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                whole = torch.cat([each[name] for each in old])[:numel]
                part = optimizer.part(flatten([whole], optimizer.num_ranks))
                state[name] = part.to(shard.device).clone()
        optimizer.inner.state[shard] = state
    ### END SOLUTION


# %% demo="see_save"
with demo("tasks 1 to 6"):
    weight = nn.Parameter(torch.ones(7, device=DEVICE))
    zero2 = ZeRO2([weight], torch.optim.AdamW, lr=0.1)
    (weight * torch.arange(7.0, device=DEVICE)).sum().backward()
    zero2.reduce()
    zero2.step()
    tell("rank 0 saves", save_shard(zero2))

# %% [markdown]
# Expected on two ranks, in whatever form you have chosen: step 1, and of both moments the first
# four of seven (`exp_avg` is `[0.0, 0.1, 0.2, 0.3]`).

# %% check="zero_saved"
check("zero_saved", (ZeRO2, save_shard))

# %% check="zero_resume"
check("zero_resume", (ZeRO2, save_shard, load_shards))

# %% check="zero_reshard"
check("zero_reshard", (ZeRO2, save_shard, load_shards))

# %% [markdown]
# ## Task 7 · What it costs
#
# **Why.** "ZeRO-2 is free" is nearly true, and the exceptions are what you plan for. Accumulating
# over micro-batches is one: data parallelism can leave reductions out until the last one, and
# ZeRO-2 cannot, for there is no place to keep the sum.
#
# **Write two functions.** `sizes` are the numbers of parameters in each group; all are fp32, the
# optimiser is AdamW. $P$ is their sum, and $S = \sum \lceil \text{size} / N \rceil$ a rank's share.
# Stage 0 is plain data parallelism, 3 is `fully_shard`.
#
# `memory_per_rank(sizes, num_ranks, stage)` is the tuple of bytes that a rank keeps of parameters,
# gradients and the optimiser.
#
# - Parameters: $4P$, from stage 3 on $4S$. Gradients: $4P$, from stage 2 on $4S$.
# - Optimiser: $8P$ in stage 0 and $8S$ in stage 3, for two moments. In stages 1 and 2 it is $12S$:
#   the shard is a copy of its part of the parameters. (In mixed precision it is the fp32 master
#   copy, which stage 0 needs, too.)
#
# `bytes_sent(sizes, num_ranks, stage, micro_batches)` is what a rank sends in one optimiser step,
# with ring algorithms. An all-gather or a reduce-scatter of the padded vectors sends $4(N-1)S$
# bytes, an all-reduce twice that.
#
# - Stage 0: one all-reduce, after the last micro-batch. Stage 1: the same, and one all-gather, as
#   in task 4. (Lab 3 counts a reduce-scatter there, with which stage 1 sends what stage 0 sends.)
# - Stage 2: a reduce-scatter per micro-batch, and one all-gather.
# - Stage 3: two all-gathers (forward, backward) and a reduce-scatter per micro-batch.


# %% solution="task7_planning"
def memory_per_rank(sizes: list[int], num_ranks: int, stage: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients, optimiser that lie on a rank."""
    ### BEGIN SOLUTION
    whole, share = sum(sizes), sum(-(-size // num_ranks) for size in sizes)
    parameters = share if stage >= 3 else whole
    gradients = share if stage >= 2 else whole
    optimizer = (2 * whole, 3 * share, 3 * share, 2 * share)[stage]
    return 4 * parameters, 4 * gradients, 4 * optimizer
    ### END SOLUTION


def bytes_sent(sizes: list[int], num_ranks: int, stage: int, micro_batches: int = 1) -> int:
    """Bytes that a rank sends in one optimiser step."""
    ### BEGIN SOLUTION
    once = 4 * (num_ranks - 1) * sum(-(-size // num_ranks) for size in sizes)
    return once * (2, 3, micro_batches + 1, 3 * micro_batches)[stage]
    ### END SOLUTION


# %% demo="see_planning"
with demo("task 7"):
    for stage in range(4):
        gigabytes = [number / 1e9 for number in memory_per_rank([7_000_000_000], 8, stage)]
        text = " + ".join(f"{number:5.1f}" for number in gigabytes)
        sent = [bytes_sent([7_000_000_000], 8, stage, k) / 1e9 for k in (1, 8)]
        tell(
            f"stage {stage}: {text} = {sum(gigabytes):6.2f} GB, sent {sent[0]:6.1f} GB,"
            f" with 8 micro-batches {sent[1]:6.1f} GB"
        )

# %% [markdown]
# Expected, for 7 billion parameters on 8 ranks: 112, 66.5, 42 and 14 GB. Sent: 49, 73.5, 49 and
# 73.5 GB; with eight micro-batches 49, 73.5, 220.5 and 588 GB.

# %% check="zero_memory"
check("zero_memory", memory_per_rank)

# %% check="zero_bytes"
check("zero_bytes", bytes_sent)

# %% [markdown]
# ## Task 8 · Train
#
# **Write `train_step(model, optimizer, micro_batches, loss_fn, max_norm)`.**
#
# - `micro_batches` is a list of `(x, y)`, this rank's own. `optimizer` has the methods of `ZeRO2`,
#   so `reduce()` comes after **every** backward.
# - The gradient is that of the mean loss over all micro-batches of all ranks. The optimiser takes
#   the mean over ranks; the mean over micro-batches is yours.
# - Clipped (`optimizer.clip_grad_norm(max_norm)`), then one step. Afterwards all gradients are
#   forgotten.
# - Return `(loss, norm)`, each a `float` or a tensor of one number: the mean loss of this rank's
#   micro-batches, and the norm before clipping.


# %% solution="task8_train"
def train_step(
    model: nn.Module, optimizer: ZeRO2, micro_batches: list, loss_fn: Callable, max_norm: float
) -> tuple[float, float]:
    """One step over several micro-batches; this rank's mean loss, and the norm."""
    ### BEGIN SOLUTION
    total = 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) / len(micro_batches)
        loss.backward()
        optimizer.reduce()
        total += loss.item()
    norm = optimizer.clip_grad_norm(max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm
    ### END SOLUTION


# %% check="zero_train"
check("zero_train", train_step)

# %% [markdown]
# ## The comparison
#
# One model, trained by four of them: torch's DDP, your two stages, and `fully_shard` (stage 3).
# Bars show what lies on rank 0 after backward, found by looking for tensors in the objects
# themselves; crosses show your formula. The model has seven groups, each a layer.
#
# Before you look: will the four loss curves be equal, or only alike?


# %% demo="see_comparison"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, DEPTH, STEPS, MICRO_BATCHES = 64, 7, 30, 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(*layers).to(DEVICE)


def find_tensors(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that hang on an object, each once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from find_tensors(key, seen)
            yield from find_tensors(value, seen)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from find_tensors(each, seen)
    elif hasattr(thing, "__dict__") and not isinstance(thing, nn.Module | type):
        yield from find_tensors(vars(thing), seen)


def count_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]
    return sum(t.numel() * t.element_size() for t in local if t.numel() > 1)


def measure(model: nn.Module, optimizer: object) -> tuple[int, int, int]:
    """Bytes of parameters, gradients, optimiser on this rank."""
    parameters = list(model.parameters())
    shares = optimizer.gradients() if isinstance(optimizer, ZeRO1) else []
    grads = [*(p.grad for p in parameters if p.grad is not None), *shares]
    known = {id(tensor) for tensor in [*parameters, *grads]}
    rest = list(find_tensors(optimizer, known))
    return count_bytes(parameters), count_bytes(grads), count_bytes(rest)


def draw_batches() -> list:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x = torch.randn(STEPS, MICRO_BATCHES, 16, WIDTH, generator=generator).to(DEVICE)
    return [[(part, part.flip(-1).tanh()) for part in step] for step in x]


def run(stage: int) -> tuple[list[float], tuple[int, int, int]]:
    """Mean loss over ranks of every step, and bytes before the last update."""
    model = make_model()
    if stage in (1, 2):
        groups = [{"params": layer.parameters()} for layer in model]
        optimizer = (ZeRO1, ZeRO2)[stage - 1](groups, torch.optim.AdamW, lr=3e-3)
    else:
        if stage == 0:
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
            for module in [*model, model]:
                fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, size = [], (0, 0, 0)
    for micro_batches in draw_batches():
        total = torch.zeros((), device=DEVICE)
        for x, y in micro_batches:
            loss = nn.functional.mse_loss(model(x), y) / MICRO_BATCHES
            loss.backward()
            if stage == 2:
                optimizer.reduce()
            total += loss.detach()
        if stage == 1:  # before reduce(): this is what backward leaves on the rank
            size = measure(model, optimizer)
            optimizer.reduce()
        else:
            size = measure(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, size


def draw_comparison(axes) -> None:
    names = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")
    bottom = [0.0] * 4
    for part, label in enumerate(("parameters", "gradients", "optimiser")):
        height = [measured[stage][part] / 1e3 for stage in range(4)]
        axes[0].bar(names, height, bottom=bottom, label=label, color=f"C{part}", width=0.6)
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    predicted = [sum(planned[stage]) / 1e3 for stage in range(4)]
    axes[0].plot(names, predicted, "kx", label="formula")
    axes[0].set(ylabel="kB on rank 0")
    axes[0].legend(fontsize=7, frameon=False)
    counts = (1, 2, 4, 8)
    for stage, name in enumerate(names):
        sent = [bytes_sent(sizes, dist.get_world_size(), stage, k) / 1e3 for k in counts]
        axes[1].plot(counts, sent, marker="o", label=name)
    axes[1].set(
        xlabel="micro-batches per step",
        ylabel="kB sent per step",
        xscale="log",
        yscale="log",
        xticks=counts,
        xticklabels=counts,
    )
    axes[1].minorticks_off()
    axes[1].legend(fontsize=7, frameon=False)


with demo("all tasks"):
    sizes = [WIDTH * WIDTH + WIDTH] * DEPTH
    planned = [memory_per_rank(sizes, dist.get_world_size(), stage) for stage in range(4)]
    results = [run(stage) for stage in range(4)]
    measured = [size for _, size in results]
    if dist.get_world_size() > 1:
        show(draw_comparison, columns=2, width=9.0, height=3.4)
    for stage, (losses, size) in enumerate(results):
        tell(
            f"stage {stage}: measured {sum(size):7d} bytes {size}, formula {sum(planned[stage])};"
            f" loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        )
    apart = max(
        abs(a - b) for losses, _ in results for a, b in zip(losses, results[0][0], strict=True)
    )
    tell(f"the losses are at most {apart:.0e} apart")

# %% [markdown]
# Expected on two ranks: measured bytes are those of the formula (465,920 for DDP, 407,680, 349,440
# and 232,960), and the four losses agree to about seven digits: all four compute the same update.
# With two ranks at most half is saved; the formula tells you what eight would. On three ranks
# `fully_shard` has a little more than its formula: it cuts by rows, which three do not divide.

# %% [markdown]
# ## Yours beside the course's
#
# The next cell trains one network with both of your stages, with the course's own, and with DDP.
# All get the same weights and batches, so the losses must agree. Compare calls and bytes of a step:
# what does a reduce-scatter save? The time is measured here, where other programs disturb it, and
# on the emulated cluster, where only the network and overlap count.

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
#
#
# def stage(make_optimizer):
#     def begin(net):
#         optimizer = make_optimizer([{"params": layer.parameters()} for layer in net])
#
#         def step(x, y):
#             loss = nn.functional.mse_loss(net(x), y)
#             loss.backward()
#             if hasattr(optimizer, "reduce"):  # yours; the course's does it in backward or step
#                 optimizer.reduce()
#             optimizer.step()
#             optimizer.zero_grad()
#             return loss
#
#         return step
#
#     return begin
#
#
# with demo("all tasks"):
#     sgd = torch.optim.SGD
#     first = find("minidist.parallel.zero:ShardedOptimizer")
#     second = find("minidist.parallel.zero:Zero2Optimizer")
#     beside(
#         {
#             "yours, ZeRO-1": stage(lambda groups: ZeRO1(groups, sgd, lr=0.1)),
#             "yours, ZeRO-2": stage(lambda groups: ZeRO2(groups, sgd, lr=0.1)),
#             "the course's, 1": first
#             and stage(lambda groups: first(groups, sgd, average_gradients=True, lr=0.1)),
#             "the course's, 2": second and stage(lambda groups: second(groups, sgd, lr=0.1)),
#             "DDP": training(DistributedDataParallel),
#         },
#         device=DEVICE,
#     )

# %% [markdown]
# ## Reflect
#
# Two points each, beyond the hundred, read by a person.

# %% [markdown] reflect="reflect_1"
# **1. A colleague forgets to divide by the number of ranks: gradients are summed. With AdamW the
# loss curve looks the same as before. Why? Which two settings would give the mistake away?**
#
# <!-- BEGIN SOLUTION -->
# AdamW divides the mean of gradients by the root of the mean of their squares. A factor N in all
# gradients is in both and cancels, but for eps. What shows is whatever compares a gradient with
# something absolute: the norm before clipping is N times as large, so a threshold that never bit
# clips every step; and eps, where gradients are about as small as it is. (Weight decay of AdamW is
# decoupled and does not see it; that of Adam, added to the gradient, does. SGD trains with N times
# the learning rate.) The other way round, averaging parameters in place of gradients is invisible
# with SGD, for its update is linear in the gradient, and wrong with AdamW.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. Somebody wants LAMB in place of AdamW: it scales each layer's update by the norm of the
# layer's weights over the norm of its update. What breaks in `ZeRO1`, and what is the least that
# would mend it?**
#
# <!-- BEGIN SOLUTION -->
# A shard is a piece of one flat vector. It may hold the end of one layer and the beginning of the
# next, and no layer as a whole, so the wrapped LAMB would take one norm over parts of several
# layers, another one on each rank. Results would depend on the number of ranks. What is needed: for
# each layer its two sums of squares, of the parts that lie on this rank, and one all-reduce of all
# these pairs (two numbers per layer), before the update is applied. Or whole tensors per rank, as
# torch's ZeroRedundancyOptimizer has them, at the price of an uneven balance. The same goes for
# Shampoo and Muon, which see a weight as a matrix.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. With eight micro-batches per step ZeRO-2 sends more than ZeRO-1. When would you still take
# it? What would you change to pay for the reduction once only, and what does that cost?**
#
# <!-- BEGIN SOLUTION -->
# When the gradient does not fit: 4 bytes per parameter, or 2 in bf16, whole on each rank. And when
# reductions hide under backward, so that the extra bytes cost no time. To reduce once, the sum over
# micro-batches has to be kept somewhere, whole, as every rank has its own: that is ZeRO-1's memory
# (torch's FSDP does it with set_requires_gradient_sync(False)). In between: on the device in bf16,
# in host memory, or sharded within the node, where links are fast, and reduced between the nodes
# once (hybrid sharding).
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - you can draw which collective stands where in DDP, ZeRO-1, ZeRO-2 and FSDP, and say which two of
#   them send half as much again as the others if there is one micro-batch;
# - you can say what padding is for, and name three places where it could do harm;
# - you can explain why the order of groups is fixed, and what happens on a rank that has no
#   gradient for one;
# - you can take a checkpoint of 64 ranks to 48.
#
# ## Further
#
# - Let the reduce-scatter run while backward goes on (`async_op=True`), and wait in `reduce()`.
#   What must stay alive until then, and how much memory does that cost?
# - All-gather group by group *while the next forward begins*, in the order in which it needs them.
# - bf16 parameters, and shards in fp32: what is all-gathered then, and what do 16 bytes per
#   parameter become?
# - Compare with `torch.distributed.optim.ZeroRedundancyOptimizer`: how does it choose who owns
#   which tensor, and on which model is its balance worst?
#
# ## Read next
#
# - S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory Optimizations Toward Training
#   Trillion Parameter Models*, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054). Sections 5
#   and 7 are tasks 4, 5 and 7.
# - S. Rajbhandari and others, *ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
#   Learning*, [arXiv 2104.07857](https://arxiv.org/abs/2104.07857).
# - Y. Zhao and others, *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, [arXiv
#   2304.11277](https://arxiv.org/abs/2304.11277).
# - Y. Xu and others, *Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
#   Training*, [arXiv 2004.13336](https://arxiv.org/abs/2004.13336). The same idea, found by a
#   compiler.
# - In this repository: lab 3, and `lib/minidist/parallel/zero/`.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
tell("the bonus is done")
