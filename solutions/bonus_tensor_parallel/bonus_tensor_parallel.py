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
# # Bonus · A tensor-parallel transformer layer
#
# One layer of GPT-3 has 1.8 billion weights. With their gradients and the optimizer's states that
# is 29 GB, for *one* of 96 layers. So the matrices themselves are cut up: each GPU multiplies with
# its own slice, and two sums per layer make it whole again. In this notebook you write that layer,
# the way Megatron-LM does, with the backward pass, dropout, embedding and loss that belong to it.
#
# **When you have finished, you can**
#
# - write a collective that autograd understands, and say what its backward pass must be (task 1);
# - split a linear layer by columns and by rows (task 2);
# - put them together so that nothing is sent in between (tasks 3, 4);
# - say where dropout masks have to be the same on all ranks, and where they must not (tasks 5, 6);
# - compute a loss from logits that no rank has in full (task 7);
# - split what is left over, along the sequence (task 8);
# - tell when tensor parallelism is worth its messages (task 9).
#
# Plan 3 hours. Lecture 8 has the theory. Nothing here needs a GPU.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | all |
# |---|---|---|---|---|---|---|---|---|---|---|
# | points | 8 | 24 | 10 | 13 | 6 | 7 | 15 | 14 | 3 | 100 |
#
# Every cell runs on **two** ranks. Your grade comes from the same checks with other data on **4**.
# All checks compare with one process in float64, forward *and* backward. What you send is not asked
# of your code: the emulated cluster carries it, and sees it.

# %% [markdown]
# ## The idea in one picture
#
# ```
#         x  whole, the same on all ranks
#         │
#         f       forward: identity     backward: all-reduce
#         │
#    x · [A₀|A₁]  column-parallel: rank r has the features of its columns
#         │
#       GELU      feature by feature: needs nobody
#         │
#    h · [B₀;B₁]  row-parallel: rank r has a summand of every feature
#         │
#         g       forward: all-reduce   backward: identity
#         │
#         z  whole, the same on all ranks
# ```
#
# Read it from below, too: that is the backward pass. The gradient of $z$ is whole on every rank. It
# becomes the gradients of each rank's own weights without a message. But the gradient of $x$ is a
# sum: every rank has used the same $x$ in another way. So f has to do backward what g does forward.

# %% given="imports"
import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
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


class Block(nn.Module):
    """The layer in one piece: what each rank gets, and what your parts have to equal.

    The weight of `qkv` is queries, keys and values on top of each other, `width` rows each; in each
    of the three, head 0 comes first, then head 1, ...
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention of [B, T, D]."""
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, heads, T, D / heads]
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# %% [markdown]
# ## Task 1 · f and g
#
# **Why.** `dist.all_reduce` is invisible to autograd. It writes into a tensor, and no graph knows.
# Use it in a forward pass as it is, and the backward pass does whatever it likes: the gradient is
# missing, or is a share of it, and the loss still falls. So you say both directions yourself, in a
# `torch.autograd.Function`.
#
# **Write `copy_in(x)`, the paper's f, and `sum_out(x)`, its g.**
#
# | | forward | backward |
# |---|---|---|
# | `copy_in` | identity | all-reduce (sum) |
# | `sum_out` | all-reduce (sum) | identity |
#
# - Any shape and dtype, over all ranks.
# - Arguments stay as they are, and so does the gradient that comes in: somebody else may be using
#   it.
# - No division. These are sums of shares, not means over data.
#
# The two classes are a frame to fill in. In this notebook only the names that are printed bold in
# the tasks are asked for; how you come to them is up to you.
#
# <details><summary>Hint 1: identity</summary>
#
# Return `x.view_as(x)`: an autograd function should not return its argument itself.
# </details>
#
# <details><summary>Hint 2: all_reduce works in place</summary>
#
# `total = x.clone(); dist.all_reduce(total); return total`. A gradient is not always contiguous:
# `clone(memory_format=torch.contiguous_format)`.
# </details>


# %% solution="task1_f_and_g"
class CopyIn(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
        ### END SOLUTION


class SumOut(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return gradient
        ### END SOLUTION


def copy_in(x: torch.Tensor) -> torch.Tensor:
    """f: hands a whole tensor to ranks that each use it in their own way."""
    return CopyIn.apply(x)


def sum_out(x: torch.Tensor) -> torch.Tensor:
    """g: makes one whole tensor of summands."""
    return SumOut.apply(x)


# %% demo="see_f_and_g"
with demo("task 1"):
    for operator in (copy_in, sum_out):
        x = torch.full((2,), RANK + 1.0, device=DEVICE, requires_grad=True)
        y = operator(x)
        y.backward(torch.full((2,), 10.0 * (RANK + 1), device=DEVICE))
        told = everywhere((y.tolist(), x.grad.tolist()))
        tell(f"{operator.__name__:8} forward and backward on each rank:", told)

# %% [markdown]
# Expected on two ranks: `copy_in` gives 1 and 2 forward and 30 on both ranks backward, `sum_out`
# gives 3 on both forward, 10 and 20 backward.

# %% check="btp_f"
check("btp_f", copy_in)

# %% check="btp_g"
check("btp_g", sum_out)

# %% [markdown]
# ## Task 2 · Two linear layers
#
# **Why.** There are two ways to cut a matrix. Cut by **columns**, each rank has *all of the sum for
# some features*. Cut by **rows**, each has *some of the sum for all features*. (`nn.Linear` stores
# the transpose: the columns of the mathematics are rows of `weight`.)
#
# **Write `ColumnParallelLinear(full, gather_output=False, enter=copy_in)`.**
#
# - `full` is an `nn.Linear`, the same on all ranks. Rank r of N keeps the r-th of N equal slices of
#   its output features, as the parameters `weight` [out / N, in] and `bias` [out / N] (`None` if
#   `full` has none): copies, in the dtype and on the device of `full`, so that the whole layer can
#   go. Nothing else is a parameter.
# - `ValueError`, on all ranks, if the output features do not divide by N.
# - `forward(x)`: `x` [..., in] is whole and the same on all ranks. Returns this rank's features
#   [..., out / N], or with `gather_output=True` all of them [..., out], on every rank.
# - Backward: the gradient of `x` is whole on every rank. With `gather_output=True` the gradient
#   that comes in is whole, and the same on all ranks.
# - `enter` is what it does with `x` first. Nobody will hand you another one before task 8.
#
# **Write `RowParallelLinear(full, input_is_parallel=True, leave=sum_out)`.**
#
# - It keeps the r-th slice of the *input* features, `weight` [out, in / N], and the **whole**
#   `bias` [out]. `ValueError` if the input features do not divide.
# - `forward(x)`: `x` [..., in / N] is this rank's features; with `input_is_parallel=False` it is
#   whole, [..., in], and the same on all ranks. Returns [..., out], whole, on every rank.
# - The bias counts **once**, and every rank has its whole gradient.
# - Backward: the gradient of `x` is this rank's features', or the whole one for a whole input.
# - `leave` is what it does with its summand.
#
# Why a slice of the full weight, and not a small random one? Because the layer then starts where
# the unsplit one starts, whatever N is, and because a small layer's usual initialisation looks at
# its own fan-in: row-parallel, it would be $\sqrt N$ times too large.
#
# <details><summary>Hint 1: slices</summary>
#
# `full.weight.detach().chunk(n, dim=0)[rank].clone()`, in an `nn.Parameter`. But `chunk` does not
# complain when sizes do not divide.
# </details>
#
# <details><summary>Hint 2: the bias of the row-parallel layer</summary>
#
# Added before the sum it counts N times. Added by rank 0 after the sum, the ranks differ. Add it on
# every rank, after the sum.
# </details>
#
# <details><summary>Hint 3: gathering and splitting with f and g alone</summary>
#
# To gather: put your features into their place in a tensor of zeros, and `sum_out`. What do the
# gradients do? To split: take your slice of `copy_in(x)`. (An all-gather would send half as much.
# Neither is needed inside the layer, so it does not matter here.)
# </details>


# %% solution="task2_linear"
def my_slice(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's slice of a dimension; ValueError if it does not divide."""
    ### BEGIN SOLUTION
    n = dist.get_world_size()
    if tensor.shape[dim] % n:
        raise ValueError(f"{tensor.shape[dim]} features cannot be split over {n} ranks")
    return tensor.chunk(n, dim)[dist.get_rank()]
    ### END SOLUTION


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter with a copy of these values."""
    return nn.Parameter(tensor.detach().clone())


class ColumnParallelLinear(nn.Module):
    """A linear layer of which this rank has some output features."""

    def __init__(
        self, full: nn.Linear, gather_output: bool = False, enter: Callable = copy_in
    ) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.weight = parameter(my_slice(full.weight, 0))
        self.bias = None if full.bias is None else parameter(my_slice(full.bias, 0))
        self.gather_output, self.enter = gather_output, enter
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        y = F.linear(self.enter(x), self.weight, self.bias)
        if not self.gather_output:
            return y
        whole = y.new_zeros(*y.shape[:-1], y.shape[-1] * dist.get_world_size())
        whole.narrow(-1, y.shape[-1] * dist.get_rank(), y.shape[-1]).copy_(y)
        return sum_out(whole)
        ### END SOLUTION


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank has some input features."""

    def __init__(
        self, full: nn.Linear, input_is_parallel: bool = True, leave: Callable = sum_out
    ) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.weight = parameter(my_slice(full.weight, 1))
        self.bias = None if full.bias is None else parameter(full.bias)
        self.input_is_parallel, self.leave = input_is_parallel, leave
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        if not self.input_is_parallel:
            x = my_slice(copy_in(x), -1)
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias
        ### END SOLUTION


# %% demo="see_linear"
with demo("task 2"):
    torch.manual_seed(0)  # the same layers everywhere
    hidden = 4 * WORLD_SIZE
    wide, narrow = nn.Linear(6, hidden).to(DEVICE), nn.Linear(hidden, 6).to(DEVICE)
    x = torch.randn(5, 6, device=DEVICE)
    column, row = ColumnParallelLinear(wide), RowParallelLinear(narrow)
    with torch.no_grad():
        wrong = (row(column(x)) - narrow(wide(x))).abs().max().item()
    tell("weights on each rank:", tuple(column.weight.shape), "and", tuple(row.weight.shape))
    tell("column, then row, against both in one piece, differ by less than 1e-5:", wrong < 1e-5)

# %% [markdown]
# Expected on two ranks: `(4, 6)` and `(6, 4)`, and `True`.

# %% check="btp_slices"
check("btp_slices", (ColumnParallelLinear, RowParallelLinear))

# %% check="btp_column"
check("btp_column", ColumnParallelLinear)

# %% check="btp_gather"
check("btp_gather", ColumnParallelLinear)

# %% check="btp_row"
check("btp_row", RowParallelLinear)

# %% check="btp_scatter"
check("btp_scatter", RowParallelLinear)

# %% [markdown]
# ## Task 3 · The MLP
#
# **Why.** What the column-parallel layer gives, split by features, is just what the row-parallel
# one wants. GELU works on each feature alone, so it does not mind. The other order would need a sum
# before GELU, since $\mathrm{GELU}(a+b) \ne \mathrm{GELU}(a) + \mathrm{GELU}(b)$.
#
# **Write `ParallelMLP(up, down, p=0.0, stream=None, enter=copy_in, leave=sum_out)`.**
#
# - `up` and `down` are whole `nn.Linear`s. The module has its parts as `self.up`, column-parallel,
#   and `self.down`, row-parallel; between them GELU (`F.gelu`).
# - Input and output are whole and the same on all ranks.
# - **One** all-reduce of the output's size forward, **one** backward. No other communication.
# - `p` and `stream` are for task 6; `enter` and `leave`, for task 8, go to the two layers.


# %% solution="task3_mlp"
class ParallelMLP(nn.Module):
    """Column-parallel, GELU, row-parallel."""

    def __init__(
        self,
        up: nn.Linear,
        down: nn.Linear,
        p: float = 0.0,
        stream: "RankStream | None" = None,
        enter: Callable = copy_in,
        leave: Callable = sum_out,
    ) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.up = ColumnParallelLinear(up, enter=enter)
        self.down = RowParallelLinear(down, leave=leave)
        self.p, self.stream = p, stream
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        hidden = F.gelu(self.up(x))
        if self.p > 0 and self.training:
            with self.stream.fork():
                hidden = F.dropout(hidden, self.p)
        return self.down(hidden)
        ### END SOLUTION


# %% [markdown]
# Before you run the next cell: take f away, and nothing else. Is the *output* still right? The
# gradients of `up` and `down`? The gradient of `x`?


# %% demo="see_mlp"
def mlp_errors(**operators: Callable) -> dict[str, float]:
    """Relative errors on this rank: output, a weight's gradient, the input's gradient."""
    torch.manual_seed(0)
    hidden = 32 * WORLD_SIZE
    up, down = nn.Linear(16, hidden).to(DEVICE), nn.Linear(hidden, 16).to(DEVICE)
    x = torch.randn(3, 5, 16, device=DEVICE)
    mine, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
    mlp = ParallelMLP(up, down, **operators)
    y, right = mlp(mine), down(F.gelu(up(whole)))
    y.square().sum().backward()
    right.square().sum().backward()
    pairs = {
        "output": (y, right),
        "gradient of up": (mlp.up.weight.grad, up.weight.grad.chunk(WORLD_SIZE)[RANK]),
        "gradient of x": (mine.grad, whole.grad),
    }
    return {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


with demo("tasks 1 to 3"):
    for name, operators in {"with f": {}, "without f": {"enter": lambda x: x}}.items():
        errors = mlp_errors(**operators)
        tell(f"{name:10}", {what: f"{error:.0e}" for what, error in errors.items()})

# %% [markdown]
# Expected: rounding everywhere with f, about 1e-07. Without it the output and the gradients of this
# MLP's own weights are still right, and the gradient of `x` is off by more than half of its length.
# The mistake does its harm *below*: in norms, embeddings and all earlier layers. That is why it
# lives so long.

# %% check="btp_mlp"
check("btp_mlp", ParallelMLP)

# %% [markdown]
# Now on the emulated cluster, which sees every collective: one each way, and the input's gradient.

# %% check="btp_mlp_traffic"
check("btp_mlp_traffic", ParallelMLP)

# %% [markdown]
# ## Task 4 · Attention
#
# **Why.** A head needs nothing of the other heads. So heads are what is split: with 8 heads on 4
# ranks each has two, with their queries, keys and values. The output projection is row-parallel,
# and its sum is the only message.
#
# There is a trap in `qkv`. It is one matrix for three things: queries, keys and values on top of
# each other. The first quarter of its rows is not a quarter of the queries, of the keys and of the
# values. It is three quarters of the queries.
#
# **Write `ParallelAttention(qkv, out, num_heads, enter=copy_in, leave=sum_out)`.**
#
# - `qkv` [D to 3D] and `out` [D to D] are whole, as in `Block`. The module has its parts as
#   `self.qkv` and `self.out`, both with `weight` and `bias`. `self.qkv.weight` [3D / N, D] is the
#   queries of this rank's heads, then their keys, then their values. Rank r has the r-th N-th of
#   the heads, neighbours in the order of `Block`. `self.out` is row-parallel.
# - `ValueError`, on all ranks and before anything is sent, if the *heads* do not divide by N. (That
#   `D` divides is not enough. With 6 heads on 4 ranks, one head would lie on two.)
# - Causal, as in `Block`. **One** all-reduce forward, **one** backward.
#
# <details><summary>Hint: the slice of qkv</summary>
#
# `full.weight.chunk(3)`, your slice of each of the three, `torch.cat`. If you put the result into
# an `nn.Linear` of the right order (or order the rows before you hand it to
# `ColumnParallelLinear`), task 2 does the rest: what order of rows makes "the r-th slice" come out
# right?
# </details>


# %% solution="task4_attention"
class ParallelAttention(nn.Module):
    """Causal self-attention with this rank's heads."""

    def __init__(
        self,
        qkv: nn.Linear,
        out: nn.Linear,
        num_heads: int,
        enter: Callable = copy_in,
        leave: Callable = sum_out,
    ) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        n = dist.get_world_size()
        if num_heads % n:
            raise ValueError(f"{num_heads} heads cannot be split over {n} ranks")
        self.num_heads = num_heads // n
        rows = torch.arange(qkv.out_features, device=qkv.weight.device)
        thirds = [third.chunk(n) for third in rows.chunk(3)]
        rows = torch.cat([third[rank] for rank in range(n) for third in thirds])
        ordered = nn.Linear(1, 1, bias=qkv.bias is not None)  # its rows: all of rank 0's first
        ordered.weight = parameter(qkv.weight[rows])
        if qkv.bias is not None:
            ordered.bias = parameter(qkv.bias[rows])
        self.qkv = ColumnParallelLinear(ordered, enter=enter)
        self.out = RowParallelLinear(out, leave=leave)
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
        ### END SOLUTION


# %% demo="see_attention"
with demo("task 4"):
    width = 4 * WORLD_SIZE
    whole = Block(width, num_heads=2 * WORLD_SIZE).to(DEVICE)
    with torch.no_grad():  # row i of qkv has the number i everywhere
        whole.qkv.weight.copy_(torch.arange(3.0 * width).unsqueeze(1).expand(-1, width))
    attention = ParallelAttention(whole.qkv, whole.out, whole.num_heads)
    rows = everywhere([int(number) for number in attention.qkv.weight[:, 0].tolist()])
    for rank, numbers in enumerate(rows):
        tell(f"rank {rank} has the rows {numbers}")

# %% [markdown]
# Expected on two ranks: rows 0 to 3, 8 to 11, 16 to 19 on rank 0; on rank 1 the others.

# %% check="btp_heads"
check("btp_heads", ParallelAttention)

# %% check="btp_attention"
check("btp_attention", ParallelAttention)

# %% check="btp_attention_traffic"
check("btp_attention_traffic", ParallelAttention)

# %% [markdown]
# ## Task 5 · Dropout
#
# **Why.** Outside of f ... g all ranks hold the same activations, and compute the same with them. A
# dropout mask is part of that: with a mask of its own on each rank, the replicas are no replicas
# any more. Between f and g each rank holds *other* features. With the same mask everywhere, feature
# 3 of rank 0 would always be dropped together with feature 3 of rank 1: far fewer masks than there
# should be.
#
# So there are two streams of random numbers. The common one is torch's own, seeded alike on all
# ranks. The other one you write.
#
# **Write the class `RankStream(seed)`** with one method, `fork()`, a context manager:
#
# - Inside `with stream.fork():` torch's generator (the one of `DEVICE`, which `F.dropout` uses)
#   draws from this rank's own stream. It depends on `seed` and the rank, on nothing else: a run can
#   be repeated.
# - The next `fork()` of the same stream **goes on** where the last one stopped.
# - Afterwards torch's generator is where it was before, however much was drawn inside, and also if
#   an exception leaves the block. Making a `RankStream` does not move it either.
#
# <details><summary>Hint</summary>
#
# `torch.get_rng_state()` and `torch.set_rng_state(state)` (with `torch.cuda.` in front for a GPU).
# A first state: `torch.Generator(DEVICE).manual_seed(...).get_state()`. Keep a state in the object;
# swap on the way in, and swap back in a `finally`. `contextlib.contextmanager` makes a context
# manager of a method with `yield`.
# </details>


# %% solution="task5_stream"
class RankStream:
    """A stream of random numbers that is another one on every rank."""

    def __init__(self, seed: int) -> None:
        ### BEGIN SOLUTION
        own = seed * 1_000 + dist.get_rank() + 1
        self.state = torch.Generator(DEVICE).manual_seed(own).get_state()
        ### END SOLUTION

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Inside, torch draws from this stream."""
        ### BEGIN SOLUTION
        random = torch.cuda if DEVICE.type == "cuda" else torch
        common = random.get_rng_state()
        random.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = random.get_rng_state()
            random.set_rng_state(common)
        ### END SOLUTION


# %% demo="see_stream"
with demo("task 5"):
    torch.manual_seed(0)
    stream, ones = RankStream(1), torch.ones(12, device=DEVICE)
    outside = F.dropout(ones, 0.5)
    with stream.fork():
        inside = F.dropout(ones, 0.5)
    for name, mask in (("outside", outside), ("inside", inside)):
        text = "".join("x" if value else "." for value in mask.tolist())
        tell(f"{name:8}", everywhere(text))

# %% [markdown]
# Expected: outside the same pattern on all ranks, inside another on each.

# %% check="btp_masks_inside"
check("btp_masks_inside", RankStream)

# %% check="btp_masks_outside"
check("btp_masks_outside", RankStream)

# %% [markdown]
# ## Task 6 · The layer
#
# **Write `ParallelBlock(full, p=0.0, stream=None, enter=copy_in, leave=sum_out)`.**
#
# - `full` is a `Block` (anything with its attributes). The module has `norm1` and `norm2`, whole
#   LayerNorms with copies of `full`'s weights (and its `eps`), `attention` (task 4) and `mlp`
#   (task 3). It computes what `full` computes.
# - The norms come *before* f. All ranks have the same input there, so their gradients are whole
#   without a message, if f is where it belongs.
# - Dropout with probability `p`, in training mode only, in three places: on the hidden features of
#   the MLP, after GELU (**inside**: from `stream`), and on what attention and MLP return, before it
#   is added to `x` (**outside**). Go back to `ParallelMLP` for the first one.
# - With `p=0` nothing is drawn, and `stream` may be `None`.
#
# <details><summary>Hint</summary>
#
# `copy.deepcopy(full.norm1)` is a copy of a norm. `F.dropout(y, p, self.training)` does nothing in
# eval mode.
# </details>


# %% solution="task6_block"
class ParallelBlock(nn.Module):
    """The transformer layer with this rank's heads and hidden features."""

    def __init__(
        self,
        full: Block,
        p: float = 0.0,
        stream: RankStream | None = None,
        enter: Callable = copy_in,
        leave: Callable = sum_out,
    ) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.norm1, self.norm2 = copy.deepcopy(full.norm1), copy.deepcopy(full.norm2)
        self.attention = ParallelAttention(full.qkv, full.out, full.num_heads, enter, leave)
        self.mlp = ParallelMLP(full.up, full.down, p, stream, enter, leave)
        self.p = p
        ### END SOLUTION

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        x = x + F.dropout(self.attention(self.norm1(x)), self.p, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.p, self.training)
        ### END SOLUTION


# %% check="btp_block"
check("btp_block", ParallelBlock)

# %% check="btp_block_dropout"
check("btp_block_dropout", (ParallelBlock, RankStream))

# %% [markdown]
# Three layers on top of each other, trained: split, and in one piece. All ranks see the **same**
# batch. (Data parallelism gives each rank other data. Here a sum over ranks of different sentences
# would be nonsense.)


# %% demo="see_training"
def train(layers: nn.Module, width: int, steps: int = 60) -> list[float]:
    """Losses of learning the mean of all tokens so far, times two."""
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    batches = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 12, width, generator=batches).to(DEVICE)
        counts = torch.arange(1, 13, device=DEVICE).unsqueeze(1)
        loss = (layers(x) - 2 * x.cumsum(1) / counts).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


with demo("tasks 1 to 6"):
    torch.manual_seed(0)
    width = 8 * WORLD_SIZE
    wholes = [Block(width, num_heads=2 * WORLD_SIZE).to(DEVICE) for _ in range(3)]
    parts = nn.Sequential(*(ParallelBlock(block) for block in wholes))
    split, single = train(parts, width), train(nn.Sequential(*wholes), width)
    apart = max(abs(a - b) for a, b in zip(split, single, strict=True))
    held = sum(p.numel() for p in parts.parameters())
    share = held / sum(p.numel() for block in wholes for p in block.parameters())
    tell(f"loss {split[0]:.2f}, then {split[-1]:.2f}; in one piece the same: {apart < 1e-3}")
    tell(f"a rank holds {100 * share:.0f} % of the parameters")

# %% [markdown]
# Expected: from 1.38 to about 0.2, the same to rounding, with 51 % of the parameters on each of two
# ranks.

# %% [markdown]
# ## Task 7 · The vocabulary
#
# **Why.** The embedding and the output layer are the largest matrices of a model that is not huge:
# 50,000 rows. The output layer is column-parallel, so rank r has the logits of the r-th part of the
# vocabulary. Gathering them would send 50,000 numbers per token, as much as several layers. But the
# loss needs only three numbers per token of all that:
#
# $$\text{loss} = m + \log\sum_v e^{z_v - m} - z_\text{target}, \qquad m = \max_v z_v$$
#
# **Write `VocabParallelEmbedding(full)`.**
#
# - `full` is an `nn.Embedding`, V × D. The module keeps the r-th slice of rows as its parameter
#   `weight`; `ValueError` if V does not divide by N.
# - `forward(tokens)`: int64 of any shape [...], the same on all ranks, to [..., D], whole, on every
#   rank. A rank puts zeros for what it does not have, and the ranks' results are summed.
#
# **Write `vocab_parallel_cross_entropy(logits, targets)`.**
#
# - `logits` [B, T, V / N] are this rank's columns; `targets` [B, T], int64, are numbers of the
#   whole vocabulary, the same on all ranks. Returns the mean over all tokens, a scalar with the
#   same value on all ranks.
# - Backward: the gradient of this rank's logits, $(\text{softmax} - \text{one-hot}) / (BT)$ times
#   the gradient that comes in.
# - Right for logits of ±1000, where `exp` overflows or vanishes.
# - A few numbers per token travel, forward and backward together at most 6. Never the logits.
# - `logits` and `targets` stay as they are.
#
# <details><summary>Hint 1: tokens that are elsewhere</summary>
#
# `local = tokens - first` and `mine = (local >= 0) & (local < rows)`. Look up
# `local.masked_fill(~mine, 0)`, then make the rows of the others zero.
# </details>
#
# <details><summary>Hint 2: who differentiates?</summary>
#
# Either you write an autograd function with the formula above. Or you let autograd do it: the
# maximum is a constant (`detach`), and `sum_out` of the sum of exponentials and of the target's
# logit has the right backward pass.
# </details>
#
# <details><summary>Hint 3: a maximum over ranks</summary>
#
# `dist.all_reduce(largest, op=dist.ReduceOp.MAX)`. Each rank with the maximum of its own columns
# would be summing exponentials of different scales.
# </details>


# %% solution="task7_vocabulary"
def owned(ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers within this rank's rows (0 where the row is elsewhere), and which are here."""
    ### BEGIN SOLUTION
    local = ids - dist.get_rank() * rows
    mine = (local >= 0) & (local < rows)
    return local.masked_fill(~mine, 0), mine
    ### END SOLUTION


class VocabParallelEmbedding(nn.Module):
    """An embedding of which this rank has some rows."""

    def __init__(self, full: nn.Embedding) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        self.weight = parameter(my_slice(full.weight, 0))
        ### END SOLUTION

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        local, mine = owned(tokens, self.weight.shape[0])
        return sum_out(F.embedding(local, self.weight) * mine.unsqueeze(-1))
        ### END SOLUTION


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits of which this rank has some columns."""
    ### BEGIN SOLUTION
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    shifted = logits - largest.unsqueeze(-1)
    local, mine = owned(targets, logits.shape[-1])
    at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
    total, at_target = sum_out(torch.stack([shifted.exp().sum(-1), at_target]))
    return (total.log() - at_target).mean()
    ### END SOLUTION


# %% demo="see_vocabulary"
with demo("task 7"):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 8 * WORLD_SIZE, device=DEVICE)
    targets = torch.randint(8 * WORLD_SIZE, (2, 3), device=DEVICE)
    loss = vocab_parallel_cross_entropy(logits.chunk(WORLD_SIZE, -1)[RANK], targets)
    right = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    tell(f"{loss.item():.4f}, in one piece {right.item():.4f}")

# %% [markdown]
# Expected: the same number twice.

# %% check="btp_embedding"
check("btp_embedding", VocabParallelEmbedding)

# %% check="btp_loss"
check("btp_loss", vocab_parallel_cross_entropy)

# %% check="btp_loss_gradient"
check("btp_loss_gradient", vocab_parallel_cross_entropy)

# %% check="btp_loss_stable"
check("btp_loss_stable", vocab_parallel_cross_entropy)

# %% check="btp_loss_traffic"
check("btp_loss_traffic", vocab_parallel_cross_entropy)

# %% [markdown]
# ## Task 8 · Sequence parallelism
#
# **Why.** Outside of f ... g, every rank still does the same: norms, dropout, residual sums, on all
# tokens, and all ranks keep the same activations for the backward pass. Those operations work on
# each token alone. So give each rank T / N of the tokens there. On the way in, tokens are gathered;
# on the way out, summed and cut up again. An all-reduce *is* a reduce-scatter and an all-gather. So
# nothing more is sent: the two halves only change places with the norm.
#
# **Write `gather_in(x)` and `scatter_out(x)`**, the second pair of conjugate operators.
#
# | | forward | backward |
# |---|---|---|
# | `gather_in` | all-gather, [B, T / N, D] to [B, T, D] | reduce-scatter (sum) |
# | `scatter_out` | reduce-scatter (sum), [B, T, D] to [B, T / N, D] | all-gather |
#
# - Rank r has the r-th of N equal parts of the tokens, dimension **1**.
#
# **Write `SequenceParallelBlock(full)`**, without dropout.
#
# - The parts are where `ParallelBlock` has them. `forward(x)` takes this rank's tokens
#   [B, T / N, D] and returns this rank's tokens of the output.
# - `finish_gradients()` is called by all ranks after backward, once per step (also if a step has
#   several backward passes, whose gradients add up). Then **all** gradients are right. Which are
#   not, before? Whatever is replicated and has seen this rank's tokens only: both norms (weight and
#   bias), and the biases of the two row-parallel layers, which are added *after* the
#   reduce-scatter. Their gradients have to be summed. Forget it, and the norms of the ranks drift
#   apart, silently.
# - No all-reduce of activations, neither forward nor backward: two all-gathers and two
#   reduce-scatters each way.
#
# <details><summary>Hint 1: collectives cut the first dimension</summary>
#
# `all_gather_single(whole, part)` puts the parts one after another along dimension 0, and
# `reduce_scatter_single(part, whole)` cuts there. Move the tokens to the front (`movedim(1, 0)`),
# make it contiguous, and move them back.
# </details>
#
# <details><summary>Hint 2: the block</summary>
#
# Inherit from `ParallelBlock`, and hand other operators to its `__init__`.
# </details>
#
# <details><summary>Hint 3: finish_gradients</summary>
#
# One flat all-reduce is enough: `torch.cat` of the six gradients, and back. Or apply `copy_in` to
# these six *parameters* in the forward pass: its backward pass is that sum, and nothing is left to
# do.
# </details>


# %% solution="task8_sequence"
def all_gather_tokens(part: torch.Tensor) -> torch.Tensor:
    """The tokens of all ranks. Autograd does not see it."""
    ### BEGIN SOLUTION
    front = part.movedim(1, 0).contiguous()
    whole = front.new_empty(front.shape[0] * dist.get_world_size(), *front.shape[1:])
    all_gather_single(whole, front)
    return whole.movedim(0, 1).contiguous()
    ### END SOLUTION


def reduce_scatter_tokens(whole: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of the sum over ranks. Autograd does not see it."""
    ### BEGIN SOLUTION
    front = whole.movedim(1, 0).contiguous()
    part = front.new_empty(front.shape[0] // dist.get_world_size(), *front.shape[1:])
    reduce_scatter_single(part, front)
    return part.movedim(0, 1).contiguous()
    ### END SOLUTION


class GatherIn(torch.autograd.Function):
    """All-gather, and its conjugate."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return all_gather_tokens(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return reduce_scatter_tokens(gradient)
        ### END SOLUTION


class ScatterOut(torch.autograd.Function):
    """Reduce-scatter, and its conjugate."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return reduce_scatter_tokens(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        return all_gather_tokens(gradient)
        ### END SOLUTION


def gather_in(x: torch.Tensor) -> torch.Tensor:
    """The tokens of all ranks, for ranks that each use them in their own way."""
    return GatherIn.apply(x)


def scatter_out(x: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' summands, this rank's tokens of it."""
    return ScatterOut.apply(x)


class SequenceParallelBlock(ParallelBlock):
    """The layer with this rank's heads, hidden features, and, in between, tokens."""

    def __init__(self, full: Block) -> None:
        ### BEGIN SOLUTION
        super().__init__(full, enter=gather_in, leave=scatter_out)
        ### END SOLUTION

    def finish_gradients(self) -> None:
        """Sums the gradients of what is replicated."""
        ### BEGIN SOLUTION
        replicated = [*self.norm1.parameters(), *self.norm2.parameters()]
        replicated += [self.attention.out.bias, self.mlp.down.bias]
        flat = torch.cat([p.grad for p in replicated])
        dist.all_reduce(flat)
        for p, total in zip(replicated, flat.split([p.numel() for p in replicated]), strict=True):
            p.grad.copy_(total)
        ### END SOLUTION


# %% check="btp_sequence_operators"
check("btp_sequence_operators", (gather_in, scatter_out))

# %% check="btp_sequence"
check("btp_sequence", SequenceParallelBlock)

# %% check="btp_sequence_norms"
check("btp_sequence_norms", SequenceParallelBlock)

# %% check="btp_sequence_traffic"
check("btp_sequence_traffic", SequenceParallelBlock)

# %% [markdown]
# ## Task 9 · The price
#
# **Write two functions** for one `Block` in one training step. A ring all-reduce of $b$ bytes makes
# each of N ranks send $2\frac{N-1}{N}b$.
#
# - `tensor_parallel_bytes(batch, tokens, width, itemsize, num_ranks)`: what a rank sends for the
#   four all-reduces of activations, forward and backward. (With sequence parallelism it is the
#   same.)
# - `data_parallel_bytes(width, itemsize, num_ranks)`: what it would send if the layer were
#   replicated, for the all-reduce of all gradients of a `Block`: weights, biases and norms.


# %% solution="task9_price"
def tensor_parallel_bytes(
    batch: int, tokens: int, width: int, itemsize: int, num_ranks: int
) -> float:
    """Bytes that a rank sends for one layer in one step, split."""
    ### BEGIN SOLUTION
    return 4 * 2 * (num_ranks - 1) / num_ranks * batch * tokens * width * itemsize
    ### END SOLUTION


def data_parallel_bytes(width: int, itemsize: int, num_ranks: int) -> float:
    """Bytes that a rank sends for one layer in one step, replicated."""
    ### BEGIN SOLUTION
    parameters = 12 * width**2 + 13 * width
    return 2 * (num_ranks - 1) / num_ranks * parameters * itemsize
    ### END SOLUTION


# %% demo="see_price"
with demo("task 9"):
    for width, name in ((768, "GPT-2 small"), (12288, "GPT-3")):
        shards = tensor_parallel_bytes(1, 2048, width, 2, 8)
        replicas = data_parallel_bytes(width, 2, 8)
        tell(
            f"{name:12} one sequence of 2048 tokens: {shards / 1e6:5.0f} MB; gradients: "
            f"{replicas / 1e6:5.0f} MB, {replicas / shards:.0f} times as much"
        )

# %% [markdown]
# Expected: 22 MB against 25 MB, and 352 MB against 6342 MB: eighteen sequences' worth. But
# gradients travel once per step, and behind the backward pass; activations in every layer, and
# everybody waits for them.

# %% check="btp_paper"
check("btp_paper", (tensor_parallel_bytes, data_parallel_bytes))

# %% [markdown]
# ## What was really sent, and by torch's own
#
# `torch.distributed.tensor.parallel` has all of this: `parallelize_module` takes a plan and puts
# the collectives in. The next cell runs one layer on four ranks of an emulated cluster, in new
# processes (some seconds): your `ParallelBlock`, your `SequenceParallelBlock`, the course's (once
# this lab is over), and torch's plan twice. There queries, keys and values are three layers, as
# `ColwiseParallel` knows nothing of thirds. Once each of them enters the parallel region on its
# own, once together. The dashed line is your formula.
#
# Before you run it: how many all-reduces will the first of torch's plans need backward?

# %% demo="see_traffic" tags=["active-ipynb"]
# %%rank 0
# from minidist.beside import find
# from minidist.emulate.teach import run_traced
# from minidist.model import Block as PlainBlock
# from minidist.model import GPTConfig
#
# RANKS, WIDTH, TOKENS, SEQUENCES = 4, 64, 64, 4
#
#
# class Three(nn.Module):
#     """Attention with three layers for queries, keys and values, for torch's plan."""
#
#     def __init__(self, full):
#         super().__init__()
#         self.heads = full.num_heads
#         for name in ("query", "key", "value"):
#             setattr(self, name, nn.Linear(WIDTH, WIDTH))
#         self.out = full.out
#
#     def forward(self, x):
#         layers = (self.query, self.key, self.value)
#         parts = [layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers]
#         y = F.scaled_dot_product_attention(*parts, is_causal=True)
#         return self.out(y.transpose(1, 2).flatten(2))
#
#
# class Plain(nn.Module):
#     """The layer that torch splits."""
#
#     def __init__(self, full):
#         super().__init__()
#         self.norm1, self.attention, self.norm2 = full.norm1, Three(full), full.norm2
#         self.mlp = nn.Sequential(full.up, nn.GELU(), full.down)
#
#     def forward(self, x):
#         x = x + self.attention(self.norm1(x))
#         return x + self.mlp(self.norm2(x))
#
#
# def by_torch(full, together):
#     from torch.distributed.tensor import Replicate
#     from torch.distributed.tensor.parallel import (
#         ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module,
#     )
#
#     model = Plain(full)
#     plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
#     plan |= {"attention.out": RowwiseParallel(), "mlp.0": ColwiseParallel()}
#     plan["mlp.2"] = RowwiseParallel()
#     if together:
#         plan["attention"] = PrepareModuleInput(
#             input_layouts=Replicate(), desired_input_layouts=Replicate()
#         )
#     mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
#     parallelize_module(model, mesh, plan)
#     model.attention.heads //= dist.get_world_size()
#     return model
#
#
# def one_step(kind, variants):
#     torch.manual_seed(0)
#     full = Block(WIDTH, num_heads=8)
#     x = torch.randn(SEQUENCES, TOKENS, WIDTH)
#     if kind.startswith("torch"):
#         model = by_torch(full, together="together" in kind)
#     else:
#         model = variants[kind](full)
#     if kind == "sequence":
#         x = x.chunk(RANKS, 1)[dist.get_rank()]
#     dist.barrier()  # marks where the forward pass begins
#     y = model(x.clone().requires_grad_())
#     dist.barrier()  # and the backward pass
#     y.square().sum().backward()
#     if kind == "sequence":
#         model.finish_gradients()
#
#
# def sent_by(trace):
#     """Per direction: what kinds of collectives, and bytes that a rank of a ring sends."""
#     found, calls = {"forward": [], "backward": []}, None
#     for event in trace.events[0]:
#         if event.kind == "issue" and event.collective == "barrier":
#             calls = found["forward" if calls is None else "backward"]
#         elif event.kind == "issue" and calls is not None and event.nbytes > 4096:
#             trips = 2 if event.collective == "all_reduce" else 1
#             calls.append((event.collective, trips * (RANKS - 1) / RANKS * event.nbytes))
#     return found
#
#
# def draw_sent(axes):
#     for row, (name, found) in enumerate(results.items()):
#         left = 0.0
#         for direction, colour in (("forward", "C0"), ("backward", "C1")):
#             for kind, num_bytes in found[direction]:
#                 axes.barh(row, num_bytes / 1e3, left=left, color=colour, edgecolor="white")
#                 short = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS"}
#                 label = short.get(kind, kind)
#                 axes.text(left + num_bytes / 2e3, row, label, ha="center", va="center",
#                           color="white", fontsize=8)
#                 left += num_bytes / 1e3
#     paper = tensor_parallel_bytes(SEQUENCES, TOKENS, WIDTH, 4, RANKS)
#     axes.axvline(paper / 1e3, linestyle="--", color="black", linewidth=1)
#     axes.set(yticks=range(len(results)), yticklabels=list(results), xlabel="kB sent per rank",
#              title="one layer, one step: forward (blue), backward (orange)")
#     axes.invert_yaxis()
#
#
# with demo("all tasks"):
#     tensor_parallel_bytes(1, 1, 1, 1, 2)
#     variants = {"tensor": ParallelBlock, "sequence": SequenceParallelBlock}
#     layer = find("minidist.parallel.tensor.block:ParallelBlock")
#     split = find("minidist.parallel.tensor.config:TensorParallel")
#     if layer and split:
#         plain = GPTConfig(width=WIDTH, num_heads=8)
#         variants["the course's"] = lambda _: layer(PlainBlock(plain), split())
#     results = {}
#     for kind in (*variants, "torch, each on its own", "torch, together"):
#         _, trace = run_traced(one_step, RANKS, kind, variants, deadline_s=150)
#         results[kind] = sent_by(trace)
#     show(draw_sent, width=9, height=2.8)
#     for name, found in results.items():
#         total = sum(num_bytes for calls in found.values() for _, num_bytes in calls)
#         counts = [len(calls) for calls in found.values()]
#         print(f"{name:22} {counts[0]} forward, {counts[1]} backward, {total / 1e3:.0f} kB")

# %% [markdown]
# Expected: 393 kB for your first layer, in 2 + 2 all-reduces, and the same 393 kB for the second,
# in 4 + 4 collectives. The course's sends what your first sends. torch's plan needs 4 all-reduces
# backward, 590 kB, if queries, keys and values enter one by one: each reduces its own share of the
# same gradient. Together it needs 2, as yours.

# %% [markdown]
# ## Reflect
#
# Two points each, beyond the hundred, read by a person.

# %% [markdown] reflect="reflect_1"
# **1. f is forgotten in one layer of a deep model. Which gradients are wrong? Why does the loss
# still fall, and how would you find the mistake in a running job?**
#
# <!-- BEGIN SOLUTION -->
# Right are the gradients of that layer's own split weights and of all that comes after it. Wrong is
# the gradient of its input: each rank has only the share of its own columns. So everything below on
# that path is wrong, in the norm in front of it, in earlier layers, in the embedding, and differs
# from rank to rank. The residual path around it still carries a right gradient, and a share of the
# right one has roughly its direction, so the loss falls, only more slowly. What is replicated
# (norms, row-parallel biases) gets different gradients on different ranks and drifts apart: compare
# a norm's weight or its gradient between ranks, once per some hundred steps. A comparison with one
# process, backward included, on a tiny model finds it at once.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. A colleague clips gradients by their norm under tensor parallelism, with
# `clip_grad_norm_(model.parameters(), 1.0)` on each rank. What goes wrong, and what would be
# right?**
#
# <!-- BEGIN SOLUTION -->
# Each rank computes the norm of what it holds. Split weights differ, so the norms differ, and the
# ranks scale by different factors: replicated parameters, which had equal gradients, go apart.
# Right: sum the squares of split parameters over the ranks (all-reduce), add the squares of
# replicated ones once (not N times), take the root, and scale by the same factor everywhere.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. Why is tensor parallelism kept within a node, and why does nobody hide its all-reduces as DDP
# hides those of gradients? What does sequence parallelism change: bytes, messages, memory?**
#
# <!-- BEGIN SOLUTION -->
# g stands between two operations that depend on each other: the next layer cannot begin before the
# sum is there, and it comes four times per layer and micro-batch. A gradient's all-reduce has
# nobody waiting until the optimizer's step. So bandwidth and latency count in full, and only links
# inside a node are fast enough. (Parts can be hidden: the weight's gradient is computed while the
# input's travels; a batch cut in two lets one half compute while the other is sent.) Sequence
# parallelism sends the same bytes in twice as many messages, and a few small sums for what is
# replicated; it divides the activations of norms, dropout and residuals by N, which is what tensor
# parallelism leaves whole.
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - you can draw f and g into a transformer layer and give both directions of each;
# - you can say where the bias of a row-parallel layer goes, and what happens in the other places;
# - you can find your slice of a fused `qkv`, and say which numbers have to divide;
# - you know of every dropout whether its mask is common or not;
# - you can derive the loss from three numbers per token;
# - you can name the six gradients that sequence parallelism leaves unfinished.
#
# ## Further
#
# - **Groups.** Tensor parallelism is one axis of a mesh. Give every class a `group`, and run two
#   tensor-parallel pairs as two data-parallel replicas. Which gradients are averaged over which
#   ranks?
# - **Overlap.** In the backward pass of a column-parallel layer, start the all-reduce of the
#   input's gradient with `async_op=True`, compute the weight's gradient meanwhile, then wait.
# - **A vocabulary that does not divide.** Pad it. What must the logits of the padding be, so that
#   the loss does not see them?
# - **Checkpoints.** Write `full_state(block)` that gathers the parts in the order of the whole
#   layer, and load it with another N.
#
# ## Read next
#
# - M. Shoeybi and others, *Megatron-LM: Training Multi-Billion Parameter Language Models Using
#   Model Parallelism*, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053). Section 3 is tasks 1
#   to 4 and 7, its appendix on random numbers task 5.
# - V. Korthikanti and others, *Reducing Activation Recomputation in Large Transformer Models*,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198). Section 4 is task 8.
# - D. Narayanan and others, *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473). What to combine it with.
# - Y. Xu and others, *GSPMD*, [arXiv 2105.04663](https://arxiv.org/abs/2105.04663). A compiler
#   that finds f and g by itself.
# - In this repository: lecture 8, and `lib/minidist/parallel/tensor/`.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
tell("the bonus is done")
