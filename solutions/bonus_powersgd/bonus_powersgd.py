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
# # Bonus · PowerSGD
#
# A gradient of a 4096 × 4096 layer has 16.8 million numbers. PowerSGD with rank 2 sends 16,384 of
# its own making in their place, a thousandth, and training can still reach the same loss. In this
# notebook you write it: a few lines of linear algebra, and one idea without which it fails.
#
# **When you have finished, you can**
#
# - make the columns of a matrix orthonormal, also where they depend on each other (task 1);
# - take the mean of many tensors in one all-reduce (task 2);
# - compress a mean over ranks that no rank ever sees (task 3);
# - say which parameters are worth it, and compress a whole model in three all-reduces (tasks 4, 5);
# - keep what was lost and send it later, which is what makes it work (task 6), also across a
#   checkpoint (task 7);
# - predict the bytes, and the seconds that they save (task 8);
# - train with it, and see what each part is worth (task 9).
#
# Plan 2 hours. Lecture 4 has the theory. Nothing here needs a GPU.
#
# | task | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | all |
# |---|---|---|---|---|---|---|---|---|---|---|
# | points | 11 | 5 | 13 | 6 | 36 | 15 | 4 | 6 | 4 | 100 |
#
# Without compression (1 of powersgd_first, powersgd_bytes) this lab gives at most 49 points.
#
# Every cell runs on **two** ranks. Your grade comes from the same checks with other data on **3**.
# How often and how much you send is not asked of your code: the emulated cluster carries it, and
# sees it.

# %% [markdown]
# ## The idea in one picture
#
# ```
#                     m columns                    r
#                ┌─────────────────┐             ┌──┐        r rows
#                │                 │             │  │   ┌─────────────────┐
#         n rows │   gradient M    │      ≈      │ P│ × │       Qᵀ        │
#                │                 │             │  │   └─────────────────┘
#                └─────────────────┘             └──┘
#                 n · m numbers                   r · (n + m) numbers
# ```
#
# The best such pair comes from a singular value decomposition, and that is far too slow to do in
# every step. PowerSGD does **one** step of a power iteration in its place:
#
# 1. $P = MQ$, with the $Q$ of the training step before;
# 2. make the columns of $P$ orthonormal;
# 3. $Q = M^\top P$. The result is $PQ^\top$.
#
# The gradient changes slowly, so the iteration goes on from training step to training step: after a
# few of them it points where the singular vectors point. And here is what makes it *distributed*:
# with the same $Q$ everywhere, $\frac1N\sum_w M_w Q = \left(\frac1N\sum_w M_w\right) Q$. The mean
# of the thin products is the thin product of the mean. So an all-reduce of $P$, and one of $Q$, are
# all that travels.

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
# ## Task 1 · Orthonormal columns
#
# **Why.** If the columns of $P$ are orthonormal, $PP^\top M$ is the projection of $M$ on them: the
# best that can be done with these columns. If they are not, directions are counted twice, and the
# "gradient" that comes out may be a hundred times too long.
#
# And what about columns that depend on each other? A gradient of rank 1, compressed with rank 2,
# gives two columns that are parallel. Subtract the first from the second, and rounding noise is
# left; divide it by its length, and noise has become a direction. A gradient of zeros gives
# $0/0$: NaN, on all ranks, for ever.
#
# **Write `orthonormalise(matrix)`.**
#
# - `matrix` is $n × r$ with $r \le n$, float32 or float64. Return a new one of the same shape and
#   dtype; the argument stays as it is.
# - Columns of the result are orthogonal to each other, and each has length 1, or is zero. Zero is
#   for a column of which nothing is left; you may also put any other direction there that is
#   orthogonal to the rest.
# - The result spans all that the argument's columns span: $PP^\top$ does not change them.
# - Small numbers are not zero: a matrix times $10^{-6}$ has the same result.
#
# <details><summary>Hint 1: Gram-Schmidt</summary>
#
# Column by column: subtract its projection `(other @ column) * other` on every column that is
# finished already, then divide by what is left of its length.
# </details>
#
# <details><summary>Hint 2: nothing left?</summary>
#
# Compare the length that is left with the column's length *before*. Below $10^{-5}$ of it (float32
# has about seven digits), call it zero. Subtracting twice makes what is left more accurate.
# </details>


# %% solution="task1_orthonormalise"
def orthonormalise(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span what the columns of `matrix` [n, r] span."""
    ### BEGIN SOLUTION
    columns: list[torch.Tensor] = []
    for column in matrix.unbind(1):
        length = torch.linalg.vector_norm(column)
        for _ in range(2):  # what one subtraction leaves over, the second one takes
            for other in columns:
                column = column - (other @ column) * other
        left = torch.linalg.vector_norm(column)
        columns.append(column / left if left > 1e-5 * length else torch.zeros_like(column))
    return torch.stack(columns, dim=1)
    ### END SOLUTION


# %% demo="see_columns"
with demo("task 1"):
    for name, matrix in (
        ("independent", [[3.0, 1.0], [4.0, 0.0]]),
        ("parallel", [[3.0, 6.0], [4.0, 8.0]]),
        ("zero", [[0.0, 0.0], [0.0, 0.0]]),
    ):
        found = orthonormalise(torch.tensor(matrix))
        tell(f"{name + ':':12}", found.double().round(decimals=4).tolist())

# %% [markdown]
# Expected: `[[0.6, 0.8], [0.8, -0.6]]` up to rounding and signs; a second column that is zero (or
# orthogonal to the first); zeros, and no `nan`.

# %% check="powersgd_columns"
check("powersgd_columns", orthonormalise)

# %% check="powersgd_dependent"
check("powersgd_dependent", orthonormalise)

# %% [markdown]
# ## Task 2 · Many tensors, one all-reduce
#
# **Why.** The thin matrices are small. A model has a hundred of them, and an all-reduce costs its
# latency however little it carries. Two hundred latencies would eat what compression saves.
#
# **Write `packed_mean(tensors)`.**
#
# - `tensors` is a list of tensors of any shapes (also none, also `()`), of one dtype and device,
#   the same shapes on all ranks.
# - Return a list of their means over all ranks, in the same order and shapes.
# - **One** `dist.all_reduce`, however many tensors there are. None for an empty list.
# - The arguments stay as they are.
#
# <details><summary>Hint</summary>
#
# `torch.cat([t.reshape(-1) for t in tensors])` there, `flat.split([t.numel() for t in tensors])`
# and `view_as` back. Not every backend can average: sum, then divide by `dist.get_world_size()`.
# </details>


# %% solution="task2_packed_mean"
def packed_mean(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The mean over ranks of every tensor, in one all-reduce."""
    ### BEGIN SOLUTION
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    ### END SOLUTION


# %% demo="see_packed_mean"
with demo("task 2"):
    pair = [torch.full((2, 2), float(RANK)), torch.tensor(10.0 * RANK)]
    means = packed_mean([tensor.to(DEVICE) for tensor in pair])
    tell([mean.tolist() for mean in means])

# %% [markdown]
# Expected on two ranks: a 2 × 2 matrix of 0.5, and 5.0.

# %% check="powersgd_mean"
check("powersgd_mean", packed_mean)

# %% [markdown]
# ## Task 3 · One step of the power iteration
#
# **Why.** Here is the whole algorithm, a few lines of the paper. What is easy to get wrong is
# *where* the means are taken. Every rank must end with the same $P$ and the same $Q$, bit by bit,
# or replicas drift apart. And $P$ has to be orthonormalised *after* its mean: the mean of
# orthonormal matrices is not orthonormal.
#
# **Write `power_step(matrices, qs)`.**
#
# - `matrices[i]` is this rank's $n_i × m_i$ matrix, `qs[i]` the $m_i × r$ start. Both stay as they
#   are.
# - Return two lists `(ps, new_qs)`. Each $P$ has orthonormal columns and spans the mean over ranks
#   of $MQ$. Each new $Q$ is the mean over ranks of $M^\top P$. So $PQ^\top$ approximates the mean
#   of the matrices.
# - Two all-reduces in all, however many matrices there are.
#
# <details><summary>Hint</summary>
#
# `packed_mean` of all products; `orthonormalise` each; `packed_mean` of all products with the
# transposed matrices.
# </details>


# %% solution="task3_power_step"
def power_step(
    matrices: list[torch.Tensor], qs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """P (orthonormal) and the new Q of every matrix, for the mean over ranks."""
    ### BEGIN SOLUTION
    ps = packed_mean([matrix @ q for matrix, q in zip(matrices, qs, strict=True)])
    ps = [orthonormalise(p) for p in ps]
    new_qs = packed_mean([matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)])
    return ps, new_qs
    ### END SOLUTION


# %% [markdown]
# The next cell starts from random numbers and repeats the step on one and the same matrix, of which
# each rank has its own noisy copy. The error falls to that of the best approximation of this rank,
# which a singular value decomposition of the mean gives: the dashed lines.


# %% demo="see_power_step"
def noisy_matrix(seed: int) -> torch.Tensor:
    """40 × 30, singular values 0.8, 0.64, …, and noise of this rank's own."""
    shared = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(40, 30, generator=shared))
    v, _ = torch.linalg.qr(torch.randn(30, 30, generator=shared))
    own = torch.Generator().manual_seed(seed + 1 + RANK)
    noise = 0.01 * torch.randn(40, 30, generator=own)
    return ((u * 0.8 ** torch.arange(1, 31)) @ v.T + noise).to(DEVICE)


def iterate(rank: int, steps: int = 12) -> tuple[list[float], float]:
    """Relative error of P Qᵀ per step, and that of the best approximation."""
    matrix = noisy_matrix(3)
    mean = packed_mean([matrix])[0]
    q = torch.randn(30, rank, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    errors = []
    for _ in range(steps):
        (p,), (q,) = power_step([matrix], [q])
        errors.append(float((mean - p @ q.T).norm() / mean.norm()))
    best = torch.linalg.svdvals(mean)[rank:].norm() / mean.norm()
    return errors, float(best)


def draw_iteration(axes) -> None:
    for number, (rank, (errors, best)) in enumerate(iterations.items()):
        axes.plot(range(1, len(errors) + 1), errors, marker="o", color=f"C{number}")
        axes.axhline(best, linestyle="--", linewidth=1, color=f"C{number}")
        axes.text(len(errors), errors[-1] + 0.03, f"rank {rank}", ha="right", color=f"C{number}")
    axes.set(xlabel="step", ylabel="relative error", ylim=(0, 1), title="one matrix, many steps")


with demo("tasks 1 to 3"):
    iterations = {rank: iterate(rank) for rank in (1, 2, 4, 8)}
    show(draw_iteration)
    for rank, (errors, best) in iterations.items():
        tell(f"rank {rank}: {errors[0]:.3f}, then {errors[-1]:.3f}; the best is {best:.3f}")

# %% [markdown]
# Expected: after twelve steps within a few thousandths of the best.

# %% check="powersgd_basis"
check("powersgd_basis", power_step)

# %% check="powersgd_factor"
check("powersgd_factor", power_step)

# %% [markdown]
# ## Task 4 · Is it worth it?
#
# **Why.** A bias of 512 numbers seen as a 512 × 1 matrix would travel as 513, and lose nothing but
# time. A 3 × 3 matrix with rank 2 would take 12 numbers for 9. Both have to go as they are.
#
# **Write `matrix_shape(shape, rank)`.**
#
# - Fewer than two dimensions: `None`, such a tensor is not compressed.
# - Else the tensor is seen as a matrix of $n$ rows, its first dimension, and $m$ columns, the
#   product of all others. (A convolution's weight `[out, in, 3, 3]` has one row per output
#   channel.)
# - `None` too if $r(n+m) \ge nm$: nothing is saved.
# - Else the pair `(n, m)`.


# %% solution="task4_matrix_shape"
def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """(rows, columns) of the matrix as which a tensor is compressed; None if it is not."""
    ### BEGIN SOLUTION
    if len(shape) < 2:
        return None
    n, m = shape[0], math.prod(shape[1:])
    return (n, m) if rank * (n + m) < n * m else None
    ### END SOLUTION


# %% demo="see_matrix_shape"
with demo("task 4"):
    for shape in ((512, 512), (64, 32, 3, 3), (512,), (3, 3), (4, 4)):
        tell(f"{shape!s:16} with rank 2: {matrix_shape(shape, 2)}")

# %% [markdown]
# Expected: `(512, 512)`, `(64, 288)`, and three times `None`.

# %% check="powersgd_shapes"
check("powersgd_shapes", matrix_shape)

# %% [markdown]
# ## Task 5 · A whole model
#
# **Why not a hook of DDP?** DDP hands its hook one bucket at a time, so that communication can
# overlap with the backward pass. Compressed, there is hardly anything left to overlap, and latency
# counts. Once backward is over, all $P$s can travel together. (torch has a hook, too; "Further", at
# the end.)
#
# **Write the class `PowerSGD`.** Its error feedback comes in task 6.
#
# `PowerSGD(parameters, rank, seed=0)`
#
# - `parameters` may be an iterator, such as `model.parameters()`. All have one dtype and device.
# - For each parameter that is compressed it draws a $Q$, $m × r$, from a normal distribution:
#   **the same on all ranks**, without communication, because it depends on `seed` and on the
#   parameters' numbers and shapes alone. Another seed gives another $Q$.
# - torch's global generator stays as it was: dropout draws from it, and ranks must not all drop the
#   same.
#
# `reduce_gradients()`, called on all ranks after backward, replaces every `p.grad`:
#
# - for a parameter that is compressed (task 4) by $PQ^\top$, in the parameter's shape;
# - for the others by their exact mean over ranks.
# - The new $Q$ is where the next step starts (**warm start**).
# - At most **three** all-reduces, however many parameters there are: one of all $P$s, one of all
#   $Q$s, one of all that is not compressed. No other communication.
# - A trap: where a gradient was zero on all ranks, the new $Q$ is zero, and then the next
#   $P = MQ$ is zero whatever $M$ is. Such a layer would never learn again. A column of the new $Q$
#   that is zero is replaced by that of the old one.
#
# `q_of(i)` is the $Q$ with which parameter number `i` will start the next step, or `None` if it is
# not compressed. (The checks and the pictures ask for it.)
#
# <details><summary>Hint 1: a generator of your own</summary>
#
# `torch.randn(m, r, generator=torch.Generator().manual_seed(seed + i), dtype=p.dtype)`, then
# `.to(p.device)`: drawn on the CPU, the numbers are the same for all devices.
# </details>
#
# <details><summary>Hint 2: what to remember</summary>
#
# A list of parameters, a dict `number -> (n, m)` and a dict `number -> Q`. Keep the order of the
# numbers the same on all ranks.
# </details>
#
# <details><summary>Hint 3: columns that are zero</summary>
#
# `torch.where(new.norm(dim=0) > 0, new, old)` chooses column by column.
# </details>


# %% solution="task5_class"
class PowerSGD:
    """Averages the gradients of all ranks, matrices with low rank."""

    def __init__(self, parameters: Iterable[nn.Parameter], rank: int, seed: int = 0) -> None:
        ### BEGIN SOLUTION
        self.parameters = list(parameters)
        self.shapes: dict[int, tuple[int, int]] = {}  # of those that are compressed
        self.qs: dict[int, torch.Tensor] = {}
        for i, parameter in enumerate(self.parameters):
            shape = matrix_shape(tuple(parameter.shape), rank)
            if shape is None:
                continue
            generator = torch.Generator().manual_seed(seed + i)
            q = torch.randn(shape[1], rank, generator=generator, dtype=parameter.dtype)
            self.shapes[i], self.qs[i] = shape, q.to(parameter.device)
        ### END SOLUTION

    def reduce_gradients(self) -> None:
        """Replaces every gradient by (an approximation of) its mean over ranks."""
        ### BEGIN SOLUTION
        gradients = [parameter.grad for parameter in self.parameters]
        whole = [i for i in range(len(gradients)) if i not in self.shapes]
        for i, mean in zip(whole, packed_mean([gradients[i] for i in whole]), strict=True):
            self.parameters[i].grad = mean
        matrices = [gradients[i].reshape(shape) for i, shape in self.shapes.items()]
        ps, new_qs = power_step(matrices, list(self.qs.values()))
        for i, p, new in zip(self.shapes, ps, new_qs, strict=True):
            self.parameters[i].grad = (p @ new.T).view_as(self.parameters[i])
            self.qs[i] = torch.where(new.norm(dim=0) > 0, new, self.qs[i])
        ### END SOLUTION

    def q_of(self, i: int) -> torch.Tensor | None:
        """The Q with which parameter number `i` starts its next step."""
        ### BEGIN SOLUTION
        return self.qs.get(i)
        ### END SOLUTION


# %% demo="see_class"
with demo("tasks 1 to 5"):
    torch.manual_seed(RANK)
    layer = nn.Linear(30, 40).to(DEVICE)
    layer.weight.grad, layer.bias.grad = noisy_matrix(3), torch.ones(40, device=DEVICE)
    reducer = PowerSGD(layer.parameters(), rank=4)
    exact = packed_mean([layer.weight.grad])[0]
    reducer.reduce_gradients()
    wrong = (layer.weight.grad - exact).norm() / exact.norm()
    tell(f"the weight's gradient has rank {torch.linalg.matrix_rank(layer.weight.grad)},")
    tell(f"and is off by {100 * wrong:.0f} % of its length in this first step;")
    tell(f"Q is {tuple(reducer.q_of(0).shape)}, the bias has", reducer.q_of(1))

# %% [markdown]
# Expected: rank 4, off by about two thirds, `(30, 4)` and `None`.
#
# First what it computes.

# %% check="powersgd_seed"
check("powersgd_seed", PowerSGD)

# %% check="powersgd_first"
check("powersgd_first", PowerSGD)

# %% check="powersgd_vectors"
check("powersgd_vectors", PowerSGD)

# %% check="powersgd_warm"
check("powersgd_warm", PowerSGD)

# %% check="powersgd_revive"
check("powersgd_revive", PowerSGD)

# %% [markdown]
# Now what it sends: these checks run it on the emulated cluster.

# %% check="powersgd_calls"
check("powersgd_calls", PowerSGD)

# %% check="powersgd_bytes"
check("powersgd_bytes", PowerSGD)

# %% [markdown]
# ## Task 6 · Error feedback
#
# **Why.** Whatever does not fit into $r$ directions is thrown away, and worse, it is always the
# same: small directions, step after step. A direction that is small in every gradient, but always
# points the same way, is *signal*; uncompressed training would follow it.
#
# The remedy is bookkeeping. What was not sent stays on the rank and is added to its next gradient:
#
# $$\Delta_w = g_w + e_w, \qquad A = \text{compressed mean of all } \Delta_w, \qquad
#   e_w \leftarrow \Delta_w - A$$
#
# Nothing is lost any more, only late. Sum it up over the steps: all that was applied, plus the mean
# of what the ranks still hold, *is* the sum of the true means. That is exact, however bad the
# approximation. What a direction lacks piles up until it is among the largest.
#
# **Write the class `FeedbackPowerSGD`.** It has all that `PowerSGD` has (inherit), and
#
# - `reduce_gradients()` adds the error before, and computes the new one after. Errors start at
#   zero. $A$, what the rank *subtracts*, is the approximation of the mean, as in the paper.
# - Each rank has its own errors. They never travel.
# - A parameter that is not compressed has no error.
# - `error_of(i)` is the error of parameter number `i` on this rank, in the parameter's shape; zeros
#   where there is none.
#
# <details><summary>Hint</summary>
#
# Three steps: add the errors to the gradients and keep copies of these sums;
# `super().reduce_gradients()`; subtract the new gradients from the copies. Error feedback does not
# need to know how the compression works.
# </details>


# %% solution="task6_feedback"
class FeedbackPowerSGD(PowerSGD):
    """PowerSGD that sends later what it could not send now."""

    def __init__(self, parameters: Iterable[nn.Parameter], rank: int, seed: int = 0) -> None:
        super().__init__(parameters, rank, seed)
        ### BEGIN SOLUTION
        self.errors = {i: torch.zeros_like(self.parameters[i].data) for i in self.shapes}
        ### END SOLUTION

    def reduce_gradients(self) -> None:
        """Replaces every gradient by its mean, as far as it can be sent, errors included."""
        ### BEGIN SOLUTION
        wanted = {i: self.parameters[i].grad + error for i, error in self.errors.items()}
        for i, total in wanted.items():
            self.parameters[i].grad = total.clone()
        super().reduce_gradients()
        for i, total in wanted.items():
            self.errors[i] = total - self.parameters[i].grad
        ### END SOLUTION

    def error_of(self, i: int) -> torch.Tensor:
        """What this rank has not sent yet of parameter number `i`."""
        ### BEGIN SOLUTION
        return self.errors.get(i, torch.zeros_like(self.parameters[i].data))
        ### END SOLUTION


# %% [markdown]
# The promise of the sum, step by step. Ten different gradients, rank 1. Blue: how far the sum of
# what was *applied* is from the sum of the true means. Orange: the same, plus the mean of the
# errors.


# %% demo="see_feedback"
def follow(steps: int = 10) -> list[tuple[float, float]]:
    """Per step the relative distance of applied sums from true sums, without and with errors."""
    weight = nn.Parameter(torch.zeros(40, 30, device=DEVICE))
    reducer = FeedbackPowerSGD([weight], rank=1)
    applied, true, distances = weight.data.clone(), weight.data.clone(), []
    for step in range(steps):
        weight.grad = noisy_matrix(step)
        true += packed_mean([weight.grad])[0]
        reducer.reduce_gradients()
        applied += weight.grad
        late = packed_mean([reducer.error_of(0)])[0]
        both = ((true - applied).norm(), (true - applied - late).norm())
        distances.append(tuple(float(x / true.norm()) for x in both))
    return distances


def draw_feedback(axes) -> None:
    for number, name in enumerate(("applied", "applied + mean error")):
        values = [distance[number] for distance in distances]
        axes.plot(range(1, len(values) + 1), values, marker="o", color=f"C{number}")
        axes.text(len(values) + 0.2, values[-1], name, va="center", color=f"C{number}")
    axes.set(xlabel="step", ylabel="distance from the true sum", ylim=(-0.05, 1), xlim=(0.5, 13.5))


with demo("task 6"):
    distances = follow()
    show(draw_feedback)
    tell(f"after 10 steps: {distances[-1][0]:.2f} and {distances[-1][1]:.0e}")

# %% [markdown]
# Expected: something below 1, and rounding, about 1e-07.

# %% check="powersgd_telescope"
check("powersgd_telescope", FeedbackPowerSGD)

# %% check="powersgd_errors"
check("powersgd_errors", FeedbackPowerSGD)

# %% [markdown]
# And all of it together: five steps, held against one process in float64.

# %% check="powersgd_steps"
check("powersgd_steps", FeedbackPowerSGD)

# %% [markdown]
# ## Task 7 · A checkpoint
#
# **Why.** The reducer has become part of the training state, as momentum is. Who forgets the errors
# loses gradients; who forgets $Q$ starts the iteration from random numbers. And there is a novelty:
# the errors are **different on every rank**, so "rank 0 saves" is not enough.
#
# **Write `save_state(reducer)` and `load_state(reducer, state)`.** `reducer` is a
# `FeedbackPowerSGD`.
#
# - Each rank calls `save_state` and writes what it gets to a file of its own. What it gets is made
#   of dicts, lists, numbers, text and tensors, so that `torch.load` can read it without trust.
# - In the new job there is another model and another `FeedbackPowerSGD` (with another seed, why
#   not). After `load_state` it goes on as if nothing had happened.
#
# <details><summary>Hint</summary>
#
# A parameter's number is the same in the next job; its `id` is not.
# </details>


# %% solution="task7_state"
def save_state(reducer: FeedbackPowerSGD) -> dict:
    """What this rank has to keep."""
    ### BEGIN SOLUTION
    return {"qs": dict(reducer.qs), "errors": dict(reducer.errors)}
    ### END SOLUTION


def load_state(reducer: FeedbackPowerSGD, state: dict) -> None:
    """Puts back what `save_state` gave."""
    ### BEGIN SOLUTION
    for mine, saved in ((reducer.qs, state["qs"]), (reducer.errors, state["errors"])):
        for i, value in saved.items():
            mine[i] = value.to(reducer.parameters[i].device).clone()
    ### END SOLUTION


# %% check="powersgd_resume"
check("powersgd_resume", (FeedbackPowerSGD, save_state, load_state))

# %% [markdown]
# ## Task 8 · Bytes and seconds
#
# **Why.** "PowerSGD compresses 100-fold" says nothing. It depends on shapes and rank, and whether
# it saves *time* depends on the network: the bytes get fewer, the latencies get more, and the
# products cost something, too.
#
# **Write three functions.** `shapes` is a list of the parameters' shapes.
#
# - `numbers_sent(shapes, rank)`: how many numbers a rank puts into its all-reduces in one step:
#   $r(n+m)$ for each tensor that is compressed, all others as they are.
# - `compression_ratio(shapes, rank)`: all numbers of the model over that.
# - `seconds_saved(shapes, rank, world_size, latency_s, bandwidth, compress_s)`: seconds per step
#   without compression minus seconds with it. Negative if it does not pay. A number has 4 bytes. A
#   ring all-reduce of $b$ bytes takes $2(N-1)\left(\alpha + \frac{b}{N\beta}\right)$, with latency
#   $\alpha$ and bandwidth $\beta$ in bytes per second. Uncompressed there is one all-reduce;
#   compressed there are three, which carry `numbers_sent` together, and `compress_s` seconds of
#   products and orthonormalising.


# %% solution="task8_planning"
def numbers_sent(shapes: list[tuple[int, ...]], rank: int) -> int:
    """Numbers that go into one step's all-reduces."""
    ### BEGIN SOLUTION
    total = 0
    for shape in shapes:
        matrix = matrix_shape(tuple(shape), rank)
        total += rank * sum(matrix) if matrix else math.prod(shape)
    return total
    ### END SOLUTION


def compression_ratio(shapes: list[tuple[int, ...]], rank: int) -> float:
    """How many times fewer numbers travel."""
    ### BEGIN SOLUTION
    return sum(math.prod(shape) for shape in shapes) / numbers_sent(shapes, rank)
    ### END SOLUTION


def seconds_saved(
    shapes: list[tuple[int, ...]],
    rank: int,
    world_size: int,
    latency_s: float,
    bandwidth: float,
    compress_s: float,
) -> float:
    """Seconds per step that compression saves; negative where it costs."""
    ### BEGIN SOLUTION
    steps = 2 * (world_size - 1)
    fewer = sum(math.prod(shape) for shape in shapes) - numbers_sent(shapes, rank)
    return steps * (4 * fewer / world_size / bandwidth - 2 * latency_s) - compress_s
    ### END SOLUTION


# %% [markdown]
# A transformer of 12 blocks and width 768 on 16 ranks, for networks from 1 Gbit/s to NVLink. Assume
# that compressing takes 10 ms.


# %% demo="see_planning"
BLOCK = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
NETWORKS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9, "NVLink": 300e9}

with demo("task 8"):
    shapes = 12 * [*BLOCK, (768,), (768,), (768,), (768,)]
    for rank in (1, 2, 4, 32):
        saved = {
            name: seconds_saved(shapes, rank, 16, 1e-5, speed, 0.01)
            for name, speed in NETWORKS.items()
        }
        text = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in saved.items())
        tell(f"rank {rank:2d}: {compression_ratio(shapes, rank):5.1f} times fewer; saved: {text}")

# %% [markdown]
# Expected: ratios from about 318 with rank 1 down to 18 with rank 32, and hardly a difference in
# what they save: about five seconds per step on the slowest network, and on NVLink a loss. Once the
# bytes are few, fewer do not help.

# %% check="powersgd_numbers"
check("powersgd_numbers", (numbers_sent, compression_ratio))

# %% check="powersgd_seconds"
check("powersgd_seconds", seconds_saved)

# %% [markdown]
# ## Task 9 · Train
#
# **Write `train(model, reducer, batches, lr, loss_fn)`.**
#
# - For each `(x, y)` of `batches`, this rank's own: loss, gradients, `reducer.reduce_gradients()`,
#   then plain SGD: every parameter minus `lr` times its gradient.
# - `reducer` is anything with `reduce_gradients()`.
# - Return a list of this rank's losses, one `float` per batch, before the update.


# %% solution="task9_train"
def train(
    model: nn.Module, reducer: PowerSGD, batches: Iterable, lr: float, loss_fn: Callable
) -> list[float]:
    """Plain SGD on gradients that the reducer has averaged."""
    ### BEGIN SOLUTION
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        reducer.reduce_gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses
    ### END SOLUTION


# %% check="powersgd_train"
check("powersgd_train", train)

# %% check="powersgd_converges"
check("powersgd_converges", (FeedbackPowerSGD, train))

# %% [markdown]
# Now the experiment for which all of this was done: a small classifier whose inputs have large and
# small directions, trained uncompressed, and with rank 1, 2 and 4, with and without error feedback.
# On the left the loss against steps, on the right against the numbers sent. Before you look:
# which of rank 1 *with* and rank 4 *without* feedback will be better after a hundred steps?


# %% demo="see_training"
DIM, HIDDEN, CLASSES, STEPS = 32, 48, 16, 100


class Exact:
    """Uncompressed: the mean of all gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def reduce_gradients(self) -> None:
        means = packed_mean([p.grad for p in self.parameters])
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad = mean


def draw_samples(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))
    centres *= torch.logspace(0.3, -0.5, DIM)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    x = centres[labels] + 0.4 * torch.randn(count, DIM, generator=generator)
    return x.to(DEVICE), labels.to(DEVICE)


def experiment(kind: type, rank: int) -> tuple[list[float], int]:
    """Mean loss per step over ranks, smoothed, and numbers sent per step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).to(DEVICE)
    shapes = [tuple(p.shape) for p in model.parameters()]
    reducer = kind(model.parameters(), rank) if rank else kind(model.parameters())
    generator = torch.Generator().manual_seed(100 + RANK)
    batches = [draw_samples(32, generator) for _ in range(STEPS)]
    own = train(model, reducer, batches, 0.3, nn.functional.cross_entropy)
    losses = packed_mean([torch.tensor(own, device=DEVICE)])[0]
    smooth = [losses[max(0, i - 9) : i + 1].mean().item() for i in range(STEPS)]
    sent = numbers_sent(shapes, rank) if rank else sum(math.prod(s) for s in shapes)
    return smooth, sent


def draw_training(axes) -> None:
    for (name, rank), (losses, sent) in results.items():
        style = "--" if name == "no feedback" else "-"
        colour = "black" if name == "uncompressed" else f"C{(1, 2, 4).index(rank)}"
        label = name if rank == 0 else f"rank {rank}, {name}"
        steps = range(1, STEPS + 1)
        axes[0].plot(steps, losses, style, color=colour, linewidth=1.3, label=label)
        axes[1].plot([s * sent for s in steps], losses, style, color=colour, linewidth=1.3)
    axes[0].set(xlabel="step", ylabel="loss (mean of 10 steps)", yscale="log")
    axes[1].set(xlabel="numbers sent per rank", xscale="log", yscale="log")
    axes[0].legend(fontsize=6.5, frameon=False)


with demo("all tasks"):
    results = {("uncompressed", 0): experiment(Exact, 0)}
    for rank in (1, 2, 4):
        results["feedback", rank] = experiment(FeedbackPowerSGD, rank)
        results["no feedback", rank] = experiment(PowerSGD, rank)
    show(draw_training, columns=2, width=9.5, height=3.6)
    for (name, rank), (losses, sent) in results.items():
        tell(f"rank {rank}, {name:12}: loss {losses[-1]:.3f}, {sent:5d} numbers per step")

# %% [markdown]
# Expected: with feedback all three end near the uncompressed loss. Without it rank 1 is far behind,
# ten times and more, and even rank 4 has not caught up with rank 1 *with* feedback, which sends a
# third as much.

# %% [markdown]
# ## Yours beside the course's
#
# The course has PowerSGD as a hook of DDP. The next cell trains one network with yours and with
# that, both with rank 8, and once uncompressed. Each draws its first $Q$ in its own way, so their
# losses are close, not equal.

# %% demo="see_beside" tags=["active-ipynb"]
# from minidist.beside import beside, find, training
# from torch.nn.parallel import DistributedDataParallel
#
#
# class Reduced:
#     """A network whose gradients your class averages."""
#
#     def __init__(self, net):
#         self.net, self.reducer = net, FeedbackPowerSGD(net.parameters(), 8)
#
#     def __call__(self, x):
#         return self.net(x)
#
#     def finish_gradient_synchronization(self):
#         self.reducer.reduce_gradients()
#
#
# def by_hook(net):
#     ddp = DistributedDataParallel(net)
#     ddp.register_comm_hook(state(compressor(rank=8)), ours)
#     return ddp
#
#
# with demo("task 6"):
#     ours = find("minidist.parallel.compression.hook:compression_hook")
#     state = find("minidist.parallel.compression.hook:HookState")
#     compressor = find("minidist.parallel.compression.powersgd:PowerSGD")
#     beside(
#         {
#             "yours": training(Reduced),
#             "the course's": ours and training(by_hook),
#             "uncompressed": training(DistributedDataParallel),
#         },
#         device=DEVICE,
#     )

# %% [markdown]
# ## Reflect
#
# Two points each, beyond the hundred, read by a person.

# %% [markdown] reflect="reflect_1"
# **1. A colleague subtracts each rank's *own* approximation, $e_w \leftarrow \Delta_w - P(M_w^\top
# P)^\top$, in place of that of the mean. Do the updates change? Does anything else?**
#
# <!-- BEGIN SOLUTION -->
# The updates do not change. Errors enter P and Q only through their mean over ranks, and the mean
# of the own approximations is the approximation of the mean, since P is the same everywhere. So the
# mean error is the same. What differs is what each rank holds: subtracting the mean, it also keeps
# how far its own gradient was from the others', step after step. These parts cancel in the mean,
# but not on the rank; where data differ between ranks they grow, cost precision, and matter when a
# rank is lost or the number of ranks changes.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_2"
# **2. A job was saved on 4 ranks and goes on with 3. What becomes of the errors? What must stay
# true?**
#
# <!-- BEGIN SOLUTION -->
# What counts is the mean of the errors: applied updates + mean error = sum of the true means.
# Handing the files of ranks 0 to 2 to the three ranks changes it: what rank 3 kept is lost, and the
# rest is weighted anew. Take the mean of the four errors and give it to each of the three ranks (or
# three times the mean to one of them and zeros to the others). Dropping all errors is the cheap
# way, and costs a few steps' worth of small directions. Q is the same on all ranks, so any file's
# will do.
# <!-- END SOLUTION -->

# %% [markdown] reflect="reflect_3"
# **3. Why can the thin matrices be all-reduced, while the pairs (index, value) of top-k cannot? And
# why must $P$ be averaged before it is orthonormalised?**
#
# <!-- BEGIN SOLUTION -->
# M Q is linear in M, and all ranks use the same Q, so sums of products are products of sums, in any
# order on the way: what an all-reduce needs. Top-k elements of different ranks sit in different
# places; their sum has up to N k of them, so everybody must get everybody's. Orthonormalising is
# not linear. If every rank did it to its own P, each would project on other columns, the mean of
# which is neither orthonormal nor spans what the mean of M Q spans; P Q^T would be no projection of
# anything. (Summing in place of averaging is alright for P: orthonormalising forgets the factor.)
# <!-- END SOLUTION -->

# %% [markdown]
# ## You're ready when
#
# - you can write the lines of the algorithm, with both all-reduces in the right place;
# - you can say what would break with a different $Q$ on each rank, and when it would mend itself;
# - you can prove that error feedback loses nothing, in two lines;
# - you can say for a model and a network whether it pays.
#
# ## Further
#
# - What is not compressed can travel with the $P$s: two all-reduces per step in place of three.
# - A gradient that is not finite (mixed precision) would poison $Q$ and errors for good. What has
#   to be kept out of the state, and how do all ranks come to the same decision?
# - Run it inside DDP: `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook` with
#   `start_powerSGD_iter`. Why does it begin uncompressed, and why must the start be at least 2?
#   Then set a layer's gradient to zero in its first step, and look at its $Q$.
#
# ## Read next
#
# - T. Vogels, S. P. Karimireddy, M. Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for
#   Distributed Optimization*, [arXiv 1905.13727](https://arxiv.org/abs/1905.13727). Algorithms 1
#   and 2 are tasks 3 and 6.
# - S. P. Karimireddy and others, *Error Feedback Fixes SignSGD and other Gradient Compression
#   Schemes*, [arXiv 1901.09847](https://arxiv.org/abs/1901.09847).
# - S. Agarwal and others, *On the Utility of Gradient Compression in Distributed Training
#   Systems*, [arXiv 2103.00543](https://arxiv.org/abs/2103.00543). When it pays, measured; often
#   it does not.
# - In this repository: lecture 4, and `lib/minidist/parallel/compression/powersgd.py`.

# %% tags=["script-only"]
dist.barrier()
dist.destroy_process_group()
tell("the bonus is done")
