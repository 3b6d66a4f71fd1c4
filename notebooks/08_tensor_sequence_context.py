# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 4
#     language: python
#     name: torchrun-4
# ---

# %% [markdown]
# # 8 · Tensor, sequence and context parallelism
#
# A pipeline cuts a model between its layers. **Tensor parallelism** cuts the layers themselves:
# every rank holds a part of every weight matrix, and all ranks work on the same tokens at the same
# time. **Sequence parallelism** goes with it and cuts what tensor parallelism leaves whole.
# **Context parallelism** cuts one long sequence over ranks, attention included.
#
# After this lecture you can
#
# - split a matrix by columns and by rows, and say why an MLP does first one, then the other;
# - write f and g, the two operators that make the backward pass right, and spot code without them;
# - count the communication of a block, forward and backward, and say why it wants NVLink;
# - say what sequence parallelism saves, and what it costs;
# - read a DTensor's placements, and say which message a change of them sends;
# - hide that message behind a product by cutting both in chunks, and say when it does not pay;
# - explain ring attention and the zig-zag order, and choose between a ring and Ulysses.
#
# It takes about 100 minutes. **The kernel is *torchrun × 4***: every cell runs on four ranks; a
# cell that begins with `%%rank 0` computes, draws and checks on one of them. Eight times the
# lecture asks for your guess before it measures. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: longer training of the split GPT

# %%
import copy
import dataclasses
import logging
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist.collectives import CollectiveLog, torch_backend
from minidist.data import make_tokens
from minidist.device import choose_backend, choose_device
from minidist.model import GPT, MLP, Block, GPTConfig, lm_loss
from minidist.parallel.tensor import (
    ColumnParallelLinear,
    ParallelBlock,
    RowParallelLinear,
    TensorParallel,
    parallelize_gpt,
    reduce_from,
    vocab_parallel_cross_entropy,
)

warnings.filterwarnings("ignore", category=FutureWarning)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = choose_device()  # a GPU of its own where there are enough, else the CPU
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(choose_backend(), timeout=timedelta(seconds=60))

# %% [markdown]
# Rank 0 needs a few names more, to draw and to check.

# %%
# %%rank 0
# %matplotlib inline
import numpy as np
from IPython.display import display

from minidist import cost
from minidist.claims import claim
from minidist.plots import (
    PALETTE,
    new_figure,
    plot_bars,
    plot_lines,
    plot_stacked,
    plot_timeline,
    style,
)
from minidist.widgets import explore, predict

MEGATRON = "Shoeybi et al., Megatron-LM, arXiv 1909.08053"
KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198"

# %% [markdown]
# The lecture in one picture: one layer of GPT-3 (175B), forward and backward, for one sequence of
# 2,048 tokens, on A100 GPUs. The work is divided by the number of tensor-parallel ranks; the
# messages are not. Inside a node (NVLink) that pays. Between nodes (InfiniBand, a port for each
# GPU), half of the time goes to them on 8 GPUs.


# %%
# %%rank 0
def layer_ms(model, tp: int, link, *, tokens=None, efficiency: float = 0.6):
    """Compute and communication of one layer, forward and backward, of one sequence."""
    tokens = tokens or model.context
    flops = 3 * tokens * (2 * model.block_weights + 4 * tokens * model.width) / tp
    message = 2 * tokens * model.width  # bf16
    once = cost.all_reduce_seconds(num_bytes=message, num_ranks=tp, link=link) if tp > 1 else 0.0
    return 1e3 * flops / (efficiency * cost.A100.peak()), 1e3 * 4 * once


nvlink, infiniband = cost.NVLINK3, cost.INFINIBAND_HDR
bars = {"1 GPU": layer_ms(cost.GPT3_175B, 1, nvlink)}
for tp in (2, 4, 8):
    bars[f"{tp} GPUs, NVLink"] = layer_ms(cost.GPT3_175B, tp, nvlink)
    bars[f"{tp} GPUs, InfiniBand"] = layer_ms(cost.GPT3_175B, tp, infiniband)
plot_stacked(
    {name: {"compute": a, "communication": b} for name, (a, b) in bars.items()},
    xlabel="ms per layer",
    title="One layer of GPT-3 under tensor parallelism",
    form="{:.1f}",
)

# %% [markdown]
# ## 1 · Two ways to split a matrix
#
# Take y = x W, with x of shape (tokens, in) and W of shape (in, out).
#
# - **By columns**: W = [W₀ | W₁]. Rank i computes xWᵢ: *some features of the output*. Every rank
#   needs all of x. The parts are put side by side.
# - **By rows**: W = [W₀; W₁] on top of each other. Rank i computes xᵢWᵢ, where xᵢ is its part of
#   the input features: *a partial sum of all output features*. The parts are added.
#
# PyTorch's `nn.Linear` stores Wᵀ, so "columns of W" are *rows* of `weight`.

# %%
torch.manual_seed(0)  # the same numbers on all ranks
x = torch.randn(6, 8, dtype=torch.float64, device=device)
W = torch.randn(8, 16, dtype=torch.float64, device=device)


def all_gather(part, dim: int = -1):
    """The parts of all ranks side by side. Autograd does not see it."""
    parts = [torch.empty_like(part) for _ in range(world_size)]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


by_columns = x @ W.chunk(world_size, dim=1)[rank]  # (6, 4): some features
by_rows = x.chunk(world_size, dim=1)[rank] @ W.chunk(world_size, dim=0)[rank]  # (6, 16): a summand
joined = all_gather(by_columns)
summed = by_rows.clone()
dist.all_reduce(summed)

# %%
# %%rank 0
gpt = cost.Transformer(vocab_size=1, context=1, width=1024, num_layers=1, num_heads=8)
display(
    claim(
        "columns side by side are x W: largest difference",
        (joined - x @ W).abs().max().item(),
        ("<", 1e-12),
    ),
    claim(
        "row products added up are x W: largest difference",
        (summed - x @ W).abs().max().item(),
        ("<", 1e-12),
    ),
    claim(
        "share of the weight that a column-parallel layer holds on 4 ranks",
        ColumnParallelLinear(nn.Linear(8, 16).to(device), TensorParallel()).weight.numel()
        / (8 * 16),
        0.25,
        rtol=1e-9,
    ),
    claim(
        "columns of an H x 4H matrix on each of 2 GPUs, in H",
        gpt.mlp_width / gpt.width / 2,
        2,
        rtol=1e-9,
    ),
    claim(
        "query, key and value together are this many H wide",
        (gpt.width + 2 * gpt.kv_width) / gpt.width,
        3,
        rtol=1e-9,
    ),
)

# %% [markdown]
# ## 2 · f and g: collectives that autograd understands
#
# That was the forward pass. Here is a column-parallel layer as many tutorials write it: multiply,
# then `dist.all_gather`, then concatenate. It gives the right output.

# %%
# %%rank 0
tutorial_guess = predict("What does backward() give the weight of that layer?", guess=None)
tutorial_guess

# %% [markdown]
# We call `backward` on the sum of the output.

# %%
weight = W.chunk(world_size, dim=1)[rank].clone().requires_grad_()
y = all_gather(x @ weight)  # as in many tutorials
try:
    y.sum().backward()
    tutorial = "a gradient"
except RuntimeError as error:
    tutorial = f"RuntimeError: {error}"
print(tutorial)

# %% [markdown]
# There is none. `dist.all_gather` writes into tensors that autograd knows nothing of. In a real
# model it is worse: there are other paths to the loss, `backward` raises nothing, and some weights
# never move.
#
# [Megatron-LM](https://github.com/NVIDIA/Megatron-LM)
# ([arXiv 1909.08053](https://arxiv.org/abs/1909.08053)) has a pair of operators for it, called f
# and g. Each says what it does in both directions:
#
# | | forward | backward | where |
# |---|---|---|---|
# | **f** | identity | all-reduce | in front of a column-parallel layer |
# | **g** | all-reduce | identity | behind a row-parallel layer |
#
# Why does f all-reduce? Every rank uses the *same* x in another way (its own columns), so each
# rank's gradient of x is a partial sum. Why does g do nothing backward? Its output is the same on
# all ranks, each rank's gradient of it is already whole, and dz/dyᵢ = 1 for each summand.


# %%
class f(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class g(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, y):
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# %% [markdown]
# Try them on an MLP: z = GELU(x A) B, with A split by columns and B by rows. The oracle is one
# process with whole matrices. We compute the gradient of the *input* three times: with f and g,
# without f, and with an all-reduce in both directions of g, which is what you get from
# `torch.distributed.nn.functional.all_reduce`.

# %%
# %%rank 0
twice_guess = predict(
    "All-reduce in both directions of g, 4 ranks: how many times too large?",
    guess=None,
)
twice_guess

# %% [markdown]
# The gradients of the three ways, against one process:


# %%
class g_twice(g):
    """What a collective does that is its own backward pass."""

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def identity(x):
    return x


torch.manual_seed(0)  # a cell for rank 0 alone may have drawn numbers: agree again
A = 0.3 * torch.randn(8, 32, dtype=torch.float64, device=device)
B = 0.3 * torch.randn(32, 8, dtype=torch.float64, device=device)
A_part, B_part = A.chunk(world_size, 1)[rank], B.chunk(world_size, 0)[rank]
whole = x.clone().requires_grad_()
(F.gelu(whole @ A) @ B).square().sum().backward()
wrong_by = {}
for name, before, after in (
    ("f and g", f.apply, g.apply),
    ("no f", identity, g.apply),
    ("all-reduce twice", f.apply, g_twice.apply),
):
    mine = x.clone().requires_grad_()
    z = after(F.gelu(before(mine) @ A_part) @ B_part)
    z.square().sum().backward()
    wrong_by[name] = (mine.grad - whole.grad).norm().item() / whole.grad.norm().item()
    ratio = (mine.grad.norm() / whole.grad.norm()).item()
    wrong_by[name + ", size"] = ratio

# %%
# %%rank 0
display(
    tutorial_guess.reveal(tutorial),
    twice_guess.reveal(wrong_by["all-reduce twice, size"]),
    claim(
        "column-parallel by dist.all_gather: backward",
        tutorial,
        lambda got: got.startswith("RuntimeError"),
        status="corrected",
        said="a gradient",
        refutes="common listings of ColumnParallelLinear",
        why="the output of dist.all_gather does not require a gradient",
    ),
    claim("f and g: relative error of the input's gradient", wrong_by["f and g"], ("<", 1e-12)),
    claim("without f: relative error of the input's gradient", wrong_by["no f"], (">", 0.3)),
    claim(
        "all-reduce in both directions of g: gradient too large by",
        wrong_by["all-reduce twice, size"],
        float(world_size),
        rtol=1e-9,
    ),
)

# %% [markdown]
# Without f nothing crashes. Every rank has another gradient of x, so below this layer the replicas
# of norms and embeddings become different, and no message says so. In `minidist.parallel.tensor` f
# is `copy_to` and g is `reduce_from` (`mappings.py` has all six operators, with both directions of
# each in one table).
#
# ## 3 · Why column, then row
#
# The output of the column-parallel layer is split by features. That is exactly the input that a
# row-parallel layer wants. **So nothing is sent between them.** GELU works on each element alone,
# so it may be applied to a part. The whole MLP needs one all-reduce forward (g) and one backward
# (f).
#
# The other order, row then column, would need an all-reduce *before* GELU: a partial sum must be
# completed first, because GELU(a + b) is not GELU(a) + GELU(b). And gathering the column-parallel
# layer's output before a row-parallel layer, as a common listing does, sends four times the width
# for nothing. It does not even run.

# %%
tp = TensorParallel()
config = GPTConfig(vocab_size=64, context=64, width=64, num_layers=2, num_heads=8)
torch.manual_seed(0)
mlp = MLP(config).to(device, torch.float64)
tokens_BTD = torch.randn(2, 64, 64, dtype=torch.float64, device=device)
up, down = ColumnParallelLinear(mlp.up, tp), RowParallelLinear(mlp.down, tp)
with CollectiveLog() as forward_log:
    z = down(F.gelu(up(tokens_BTD)))
gathering = ColumnParallelLinear(mlp.up, tp, gather_output=True)
try:
    down(F.gelu(gathering(tokens_BTD)))
    listing = "runs"
except ValueError as error:
    listing = str(error)
print(listing)
sum_of_gelus = F.gelu(by_rows)
dist.all_reduce(sum_of_gelus)
gelu_error = (sum_of_gelus - F.gelu(summed)).abs().max().item()
mlp_error = (z - mlp(tokens_BTD)).abs().max().item()

# %%
# %%rank 0
display(
    claim(
        "column then row: collectives in the forward pass of an MLP",
        sum(forward_log.counts().values()),
        1,
        status="corrected",
        said=2,
        refutes="a common listing that gathers in between",
        why="the row-parallel layer wants the split output; gathered, it has the wrong width",
    ),
    claim("column then row: result against the whole MLP", mlp_error, ("<", 1e-12)),
    claim(
        "gathered output into a row-parallel layer",
        listing,
        lambda got: "expected this rank's 64 of 256 input features, got 256" in got,
    ),
    claim("GELU of a sum is not the sum of GELUs: largest difference", gelu_error, (">", 0.1)),
    claim(
        "the MLP is this many times as wide as the model", gpt.mlp_width / gpt.width, 4, rtol=1e-9
    ),
)

# %% [markdown]
# ### The bias of a row-parallel layer
#
# Where is it added? Below are four ways. Look at what each does to the output, and whether the
# ranks still agree.

# %%
bias = torch.ones(8, dtype=torch.float64, device=device)
part = F.gelu(x @ A_part) @ B_part
zero = torch.zeros_like(bias)
first = bias if rank == 0 else zero
outputs = {
    "each rank, before the sum": reduce_from(part + bias),
    "rank 0, after the sum": reduce_from(part) + first,
    "rank 0, before the sum": reduce_from(part + first),
    "each rank, after the sum": reduce_from(part) + bias,
}
right = F.gelu(x @ A) @ B + bias
errors = {}
for name, y in outputs.items():
    found = torch.tensor([(y - right).abs().max().item()], device=device)
    found = [t.item() for t in all_gather(found, 0)]
    errors[name] = found

# %%
# %%rank 0
plot_bars(
    {name: max(found) for name, found in errors.items()},
    xlabel="largest error on any rank (the bias is 1)",
    form="{:.2g}",
    title="Where to add a bias of 1",
)

# %% [markdown]
# The ranks agree on a wrong output in the first way, and disagree in the second.

# %%
# %%rank 0
display(
    claim(
        "added by each rank before the sum: counted this many times too often",
        errors["each rank, before the sum"][0],
        float(world_size - 1),
        rtol=1e-9,
    ),
    claim(
        "added on rank 0 only, after the sum: error on ranks 0 and 1",
        errors["rank 0, after the sum"][:2],
        [0.0, 1.0],
        atol=1e-12,
        status="corrected",
        said=[0.0, 0.0],
        refutes="a common listing with the bias on rank 0",
        why="the other ranks lack it: from here on the replicas differ",
    ),
    claim(
        "added by each rank after the sum: error",
        max(errors["each rank, after the sum"]),
        ("<", 1e-12),
        authority=MEGATRON,
    ),
)

# %% [markdown]
# "Rank 0, before the sum" gives the right output, but then rank 0 has a parameter that no other
# rank has. Clipping, weight decay and checkpoints have to know. Keep the bias replicated, and add
# it after g.
#
# ## 4 · Attention, and a whole block
#
# Attention heads are independent, so they are what is split: 8 heads on 4 ranks, two each. Query,
# key and value are column-parallel (each rank computes its heads' columns), the output projection
# is row-parallel. Note what the all-reduce adds up. You may read that it "combines the heads'
# outputs". Heads are *concatenated*; that happens inside the row-parallel product, whose partial
# products are summed.

# %%
torch.manual_seed(1)
block = Block(config).to(device, torch.float64)
logs, block_error = {}, {}
ways = {
    "tensor": {},
    "sequence": {"sequence_parallel": True},
    "sequence, again": {"sequence_parallel": True, "overlap": True},  # section 6 explains it
}
for name, options in ways.items():
    parallel = ParallelBlock(block, TensorParallel(**options))
    here = tokens_BTD if name == "tensor" else tokens_BTD.chunk(world_size, 1)[rank]
    here = here.clone().requires_grad_()
    with CollectiveLog() as forward_log:
        out = parallel(here)
    with CollectiveLog() as backward_log:
        out.sum().backward()
    logs[name] = (forward_log.counts(), backward_log.counts())
    expected = block(tokens_BTD)
    expected = expected if name == "tensor" else expected.chunk(world_size, 1)[rank]
    block_error[name] = (out - expected).abs().max().item()
for name, (forward, backward) in logs.items():
    print(f"{name:16} forward {forward}, backward {backward}")

# %%
# %%rank 0
display(
    claim(
        "tensor-parallel block: collectives forward",
        logs["tensor"][0].get("all_reduce", 0),
        2,
        status="corrected",
        said=4,
        refutes="a common listing: a gather after each column split",
        why="column then row needs no gather: one all-reduce after attention, one after the MLP",
    ),
    claim("... and backward", logs["tensor"][1].get("all_reduce", 0), 2, authority=MEGATRON),
    claim(
        "what that listing sends / what Megatron sends, in units of (t-1)/t b s h",
        (3 * gpt.width + gpt.mlp_width + 2 * 2 * gpt.width) / (2 * 2 * gpt.width),
        2.75,
        rtol=1e-9,
        kind="arithmetic",  # the width cancels
        why="gathering 3h and 4h and reducing h twice: 3 + 4 + 2 + 2 against 2 + 2",
    ),
    claim(
        "the split block against the whole one, largest difference",
        block_error["tensor"],
        ("<", 1e-12),
    ),
)

# %% [markdown]
# ### A whole GPT
#
# `parallelize_gpt` splits embeddings and output layer, too, along the vocabulary. The loss is then
# computed without ever gathering the logits: each rank finds the maximum and the sum of
# exponentials of its own part, and three numbers per token are reduced instead of V.

# %%
NUM_STEPS = 5 if quick else 50
torch.manual_seed(0)
reference = GPT(config).to(device, torch.float64)
split = parallelize_gpt(reference)
split_sp = parallelize_gpt(reference, sequence_parallel=True)
curves = {}
for name, model in (("one rank", reference), ("tensor", split), ("sequence", split_sp)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curves[name] = []
    for step in range(NUM_STEPS):
        tokens, answers = (t.to(device) for t in make_tokens(4, 64, 64, seed=step))  # on all ranks
        optimizer.zero_grad()
        loss = (
            lm_loss(model(tokens), answers) if name == "one rank" else model.loss(tokens, answers)
        )
        loss.backward()
        optimizer.step()
        curves[name].append(loss.item())
held = sum(p.numel() for p in split.parameters()) / sum(p.numel() for p in reference.parameters())
logits_part = torch.randn(4, 64, 64 // world_size, device=device)
with CollectiveLog() as vocabulary_log:
    vocab_parallel_cross_entropy(logits_part, answers)
loss_bytes = vocabulary_log.num_bytes()

# %%
# %%rank 0
display(
    claim(
        "losses of the split GPT against one rank", curves["tensor"], curves["one rank"], rtol=1e-9
    ),
    claim("the same with sequence parallelism", curves["sequence"], curves["one rank"], rtol=1e-9),
    claim("share of the parameters that a rank of 4 holds", held, (">", 0.25)),
    claim(
        "... and at most (norms, row-parallel biases and positions are whole)", held, ("<", 0.32)
    ),
    claim(
        "bytes reduced for the loss / bytes of the logits, vocabulary of 64",
        loss_bytes / (4 * 64 * 64 * 4),
        ("<", 0.08),
    ),
)

# %% [markdown]
# The batch is the **same** on all tensor-parallel ranks. Feed each rank its own data, as data
# parallelism does, and the partial products of different sentences are added up. `ParallelGPT`
# compares the tokens in its first call for that reason.
#
# ## 5 · What it costs
#
# A block of b sequences of s tokens and width h has messages of N = 2 b s h bytes (bf16). It
# all-reduces four of them, two forward and two backward. A ring sends 2(t−1)/t · N for each:
#
# $$ 8 \cdot \frac{t-1}{t} \cdot 2\,b\,s\,h \ \text{bytes per block, micro-batch and rank.} $$
#
# Two things make that harder to hide than a gradient all-reduce. It is on the **critical path**:
# the next layer cannot begin before g has ended. And it comes with every micro-batch, not once per
# step.

# %%
# %%rank 0
sequences_guess = predict(
    "GPT-3, 8 ranks: after how many sequences has tensor parallelism sent as much as one "
    "all-reduce of the gradients?",
    guess=None,
)
sequences_guess

# %% [markdown]
# We count for GPT-3, with gradients of 16 bits.

# %%
# %%rank 0
from minidist.parallel.tensor import block_traffic, wire_bytes

h, s = 12288, 2048
traffic = block_traffic(batch=1, num_tokens=s, width=h, itemsize=2)
per_block = wire_bytes(traffic, 8)
gradients = 2 * (8 - 1) / 8 * 2 * cost.GPT3_175B.block_weights  # bytes, if 8 replicas had it
compute, communication = layer_ms(cost.GPT3_175B, 8, nvlink)
_, slow = layer_ms(cost.GPT3_175B, 8, infiniband)
display(
    sequences_guess.reveal(gradients / per_block),
    claim(
        "bytes that a rank of 8 sends per block of GPT-3 and sequence, in MB",
        per_block / 1e6,
        8 * 7 / 8 * 2 * s * h / 1e6,
        rtol=1e-9,
    ),
    claim(
        "sequences after which tensor parallelism has sent as much as a gradient all-reduce",
        gradients / per_block,
        3 * h / s,
        rtol=1e-3,
    ),
    claim(
        "communication / compute of a block on 8 GPUs, NVLink", communication / compute, ("<", 0.5)
    ),
    claim("communication / compute of a block on 8 GPUs, InfiniBand", slow / compute, (">", 0.9)),
    claim(
        "GPT of 8.3 billion parameters: efficiency of 8-way tensor parallelism, %",
        77,
        status="cited",
        authority=f"{MEGATRON}, figure 5 (weak scaling from 1 to 8 V100)",
    ),
)

# %% [markdown]
# Compute per message grows with the width: forward, a block does about 24 b s h² FLOPs for two
# all-reduces of 2 b s h bytes. So wide models split better. Move width, tokens and link below.

# %%
# %%rank 0
LINKS = {
    "NVLink 3 (A100)": nvlink,
    "NVLink 4 (H100)": cost.NVLINK4,
    "InfiniBand HDR": infiniband,
    "Ethernet 100": cost.ETHERNET_100,
}


def split_explorer(width: int = 4096, tokens: int = 4096, link: str = "NVLink 3 (A100)"):
    """Time of one block for 1 to 16 tensor-parallel ranks, compute and communication."""
    heads = max(1, width // 128)
    model = cost.Transformer(
        vocab_size=1, context=tokens, width=width, num_layers=1, num_heads=heads
    )
    bars = {}
    for tp in (1, 2, 4, 8, 16):
        compute, communication = layer_ms(model, tp, LINKS[link], tokens=tokens)
        bars[f"tp {tp}"] = {"compute": compute, "communication": communication}
    return plot_stacked(
        bars,
        xlabel="ms per block and sequence, A100",
        form="{:.2f}",
        title=f"width {width:,}, {tokens:,} tokens, {link}",
    )


explore(
    split_explorer,
    width=[1024, 2048, 4096, 8192, 12288, 20480],
    tokens=[1024, 2048, 4096, 8192, 32768],
    link=list(LINKS),
    labels={"width": "width h", "tokens": "tokens s", "link": "link"},
    alt="Bars: compute and communication of a block for 1 to 16 tensor-parallel ranks",
)

# %% [markdown]
# ## 6 · Sequence parallelism
#
# Tensor parallelism leaves something whole on every rank: the norms, dropouts and residual
# additions between the split layers. All ranks compute the same there, and keep the same
# activations. These operations work on each token alone. So give each rank s/t tokens there.
#
# To get from tokens to features one needs all tokens: an **all-gather** in front of a
# column-parallel layer. To get back, sum and keep the own tokens: a **reduce-scatter** behind a
# row-parallel layer. Together they are the all-reduce that was there before, cut in two, so they
# cost the same bytes.
#
# One activation is still whole: the gathered input of a column-parallel layer, which the gradient
# of its weight needs. [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) keeps only the rank's
# part and gathers once more in the backward pass, while it computes another gradient (section 4.2.2
# of [arXiv 2205.05198](https://arxiv.org/abs/2205.05198)). Our layers do so with
# `TensorParallel(overlap=True)`. Then everything that a block keeps is divided by t, and it sends a
# quarter more.

# %%
# %%rank 0
counts = logs["sequence"]
large_calls = {
    name: sum(calls.get("all_gather", 0) + calls.get("reduce_scatter", 0) for calls in logs[name])
    for name in ("sequence", "sequence, again")
}
small = {"batch": 1, "num_tokens": 2048, "width": 1024, "itemsize": 2}
sequence_traffic = block_traffic(**small, sequence_parallel=True)
display(
    claim(
        "sequence-parallel block forward: all-gathers and reduce-scatters",
        [counts[0].get("all_gather", 0), counts[0].get("reduce_scatter", 0)],
        [2, 2],
        authority=KORTHIKANTI,
    ),
    claim(
        "... backward: all-gathers, reduce-scatters, small all-reduces",
        [counts[1].get(k, 0) for k in ("all_gather", "reduce_scatter", "all_reduce")],
        [2, 2, 6],
    ),
    claim(
        "bytes on the wire, with / without sequence parallelism (the small ones left out)",
        wire_bytes(sequence_traffic[:-1], 4) / wire_bytes(block_traffic(**small), 4),
        1.0,
        rtol=1e-9,
    ),
    claim(
        "the small ones' share of the bytes",
        wire_bytes(sequence_traffic[-1:], 4) / wire_bytes(sequence_traffic, 4),
        ("<", 0.01),
    ),
    claim(
        "... backward with the inputs gathered again: all-gathers",
        logs["sequence, again"][1].get("all_gather", 0),
        4,
        authority=KORTHIKANTI,
    ),
    claim(
        "large messages of a block, all of one size, with the inputs gathered again / without",
        large_calls["sequence, again"] / large_calls["sequence"],
        1.25,
        rtol=1e-9,
    ),
    claim(
        "the block against the whole one, both ways",
        [block_error["sequence"], block_error["sequence, again"]],
        ("<", 1e-12),
    ),
)

# %% [markdown]
# The six small all-reduces are gradients of what is replicated but has seen only a part of the
# tokens: two norms (weight and bias) and two row-parallel biases. Forget them, and the norms of the
# ranks drift apart: the classic mistake here. Watch it. We train the split GPT once as it is, and
# once with those reductions taken out.

# %%
from minidist.parallel.tensor import gather_from
from minidist.parallel.tensor import layers as tensor_layers

careful = tensor_layers.replicated
drifts = {}
for name in ("reduced", "forgotten"):
    model = parallelize_gpt(reference, sequence_parallel=True)
    tensor_layers.replicated = careful if name == "reduced" else (lambda parameter, tp: parameter)
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(3):
            tokens, answers = (t.to(device) for t in make_tokens(4, 64, 64, seed=step))
            optimizer.zero_grad()
            model.loss(tokens, answers).backward()
            optimizer.step()
    finally:
        tensor_layers.replicated = careful
    norm = model.blocks[0].norm1.weight.detach()
    together = gather_from(norm.unsqueeze(0), 0)
    drifts[name] = (together - together[0]).abs().max().item()

# %%
# %%rank 0
display(
    claim(
        "a norm's weight after 3 steps, largest difference between ranks",
        drifts["reduced"],
        ("<", 1e-12),
    ),
    claim(
        "the same when its gradient is not summed over the ranks", drifts["forgotten"], (">", 1e-4)
    ),
)

# %% [markdown]
# What is saved? Bytes of activations per block with 16-bit numbers, t tensor ranks and a heads are
# ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198), table 2):
#
# | | bytes / (s b h) |
# |---|---|
# | no parallelism | 34 + 5 a s/h |
# | tensor | 10 + 24/t + 5 a s/(h t) |
# | tensor + sequence | 34/t + 5 a s/(h t) |
# | + selective recomputation | 34/t |
# | full recomputation | 2 |
#
# The 10 is what sequence parallelism divides. With t = 8 it is 10 of the 13 that are left once the
# scores are recomputed.

# %%
# %%rank 0
both_guess = predict(
    "22B, 8 ranks: what do sequence parallelism and selective recomputation leave, in % of "
    "tensor parallelism alone?",
    guess=None,
    unit="%",
)
both_guess

# %% [markdown]
# `cost.activation_bytes_per_layer` has the formulas of the table.

# %%
# %%rank 0
model_22b = cost.Transformer(
    vocab_size=51200, context=2048, width=6144, num_layers=48, num_heads=64
)
WAYS = {
    "tensor": {},
    "tensor + sequence": {"sequence_parallel": True},
    "tensor, selective": {"recompute": "selective"},
    "tensor + sequence, selective": {"sequence_parallel": True, "recompute": "selective"},
    "full recomputation": {"recompute": "full"},
}


def share_of_tensor(model) -> dict:
    """Activations per block as a share of what plain tensor parallelism keeps, 8 ranks, %."""
    need = {
        name: cost.activation_bytes_per_layer(model=model, micro_batch=1, tp=8, **options)
        for name, options in WAYS.items()
    }
    return {name: 100 * each / need["tensor"] for name, each in need.items()}


shares = share_of_tensor(model_22b)
plot_bars(
    shares,
    xlabel="% of plain tensor parallelism",
    form="{:.0f}",
    title="Activations of a 22B model, 8 tensor ranks",
)

# %%
# %%rank 0
one = {"model": model_22b, "micro_batch": 1}
whole_bytes = cost.activation_bytes_per_layer(**one)
display(
    both_guess.reveal(shares["tensor + sequence, selective"]),
    claim(
        "22B, % of tensor parallelism: sequence, selective, both, full",
        list(shares.values())[1:],
        [66.84, 49.42, 16.18, 7.64],
        rtol=0.01,
        authority=f"{KORTHIKANTI}, figure 7",
    ),
    claim(
        "tensor + sequence divides activations by the number of ranks",
        whole_bytes / cost.activation_bytes_per_layer(**one, tp=8, sequence_parallel=True),
        8.0,
        rtol=1e-9,
    ),
    claim(
        "tensor parallelism alone divides them by less",
        whole_bytes / cost.activation_bytes_per_layer(**one, tp=8),
        ("<", 5.5),
    ),
    claim(
        "sequence parallelism, time of one layer of 22B, % faster",
        3,
        status="cited",
        authority=f"{KORTHIKANTI}, table 4: 19.6 ms to 19.0 ms",
    ),
)

# %% [markdown]
# ## 7 · DTensor and DeviceMesh
#
# So far a rank's tensor was plain. Whether it was a part, a copy or a summand, only our code knew.
# A [**DTensor**](https://docs.pytorch.org/docs/stable/distributed.tensor.html) keeps that with the
# tensor: it has a local tensor, a mesh of ranks, and one *placement* for each dimension of the
# mesh.
#
# | placement | a rank holds | in section 1 |
# |---|---|---|
# | `Shard(d)` | its part along dimension d | xᵢ and Wᵢ; what a split by columns gives |
# | `Replicate()` | all of it | x |
# | `Partial()` | a summand of it | what a split by rows gives |
#
# Here are the two products of section 1 again, written as one process would write them:

# %%
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

mesh = dist.init_device_mesh(device.type, (world_size,), mesh_dim_names=("tp",))
copied_x = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
some_columns = distribute_tensor(W, mesh, [Shard(1)])
some_rows = distribute_tensor(W, mesh, [Shard(0)])
split_y = copied_x @ some_columns
summand_y = copied_x.redistribute(placements=[Shard(1)]) @ some_rows
split_y.sum().backward()
gradient_of_x = copied_x.grad
print(split_y.placements, summand_y.placements, gradient_of_x.placements)

# %% [markdown]
# Torch has found all three: a split by columns gives parts, a split by rows gives summands, and the
# gradient of a copied x is a partial sum. So f and g of section 2 are one change of placement,
# **Partial → Replicate**: g makes it forward, f backward.
#
# A change of placement is a message, and `redistribute` sends it.

# %%
# %%rank 0
change_guess = predict("Partial → Shard(0): which collective does redistribute call?", guess=None)
change_guess

# %% [markdown]
# We change a matrix of N bytes from each placement to each other one. Our own backend carries the
# messages here, since it counts what a rank really sends.

# %%
torch_backend.register()
counting = dist.new_group(backend="minidist")
counted_mesh = dist.DeviceMesh.from_group(counting, "cpu", mesh_dim_names=("tp",))
# On a CPU DTensor takes no all-to-all; it warns, and gathers instead.
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
torch.manual_seed(3)
matrix = torch.randn(8, 16, dtype=torch.float64)
PLACED = {
    "Shard(0)": Shard(0),
    "Shard(1)": Shard(1),
    "Replicate": Replicate(),
    "Partial": Partial(),
}
LOCAL = {
    "Shard(0)": matrix.chunk(world_size, 0)[rank],
    "Shard(1)": matrix.chunk(world_size, 1)[rank].contiguous(),
    "Replicate": matrix,
    "Partial": matrix / world_size,
}
changes, change_error = {}, 0.0
for before in PLACED:
    for after in PLACED:
        if before == after:
            continue
        tensor = DTensor.from_local(LOCAL[before], counted_mesh, [PLACED[before]])
        try:
            with CollectiveLog() as log:
                changed = tensor.redistribute(placements=[PLACED[after]]).to_local()
        except RuntimeError:
            changes[before, after] = ("refused", 0.0)
            continue
        expected = matrix / world_size if after == "Partial" else LOCAL[after]
        change_error = max(change_error, (changed - expected).abs().max().item())
        called = next((r.kind for r in log.records if r.num_bytes_sent is None), "nothing")
        changes[before, after] = (called, log.num_bytes_sent() / (matrix.numel() * 8))
if rank == 0:
    for (before, after), (called, share) in changes.items():
        print(f"{before:>9} → {after:9} {called:15} {share:5.2f} N")

# %%
# %%rank 0
part = (world_size - 1) / world_size
sent_by = {change: share for change, (_, share) in changes.items()}
display(
    change_guess.reveal(changes["Partial", "Shard(0)"][0]),
    claim(
        "parts of x W as DTensor and as in section 1: largest difference",
        (split_y.to_local() - by_columns).abs().max().item(),
        ("<", 1e-12),
    ),
    claim(
        "placements of the two products and of the gradient of x",
        [
            split_y.placements == (Shard(1),),
            summand_y.placements == (Partial(),),
            gradient_of_x.placements == (Partial(),),
        ],
        [True, True, True],
    ),
    claim("changed tensors against the matrix: largest difference", change_error, ("<", 1e-12)),
    claim(
        "Partial → Replicate, bytes that a rank sends / N: an all-reduce, 2 (n - 1)/n",
        sent_by["Partial", "Replicate"],
        2 * part,
        rtol=1e-9,
    ),
    claim(
        "Partial → Shard, Shard → Replicate: half of it, (n - 1)/n",
        [sent_by["Partial", "Shard(0)"], sent_by["Shard(0)", "Replicate"]],
        [part, part],
        rtol=1e-9,
    ),
    claim(
        "Replicate → Shard: bytes sent",
        [sent_by["Replicate", "Shard(0)"], sent_by["Replicate", "Shard(1)"]],
        [0.0, 0.0],
        atol=1e-12,
    ),
    claim(
        "Shard(0) → Shard(1) on a CPU: an all-gather, n times the (n - 1)/n² of an all-to-all",
        sent_by["Shard(0)", "Shard(1)"] / (part / world_size),
        float(world_size),
        rtol=1e-9,
    ),
    claim(
        "changes that redistribute refuses, to Shard(0), Shard(1), Replicate, Partial",
        [
            sum(called == "refused" for (_, after), (called, _) in changes.items() if after == end)
            for end in PLACED
        ],
        [0, 0, 0, 3],
    ),
)

# %% [markdown]
# Going from copies to parts is free: each rank cuts its own copy. Going from one split to another
# is an all-to-all on GPUs; on a CPU DTensor gathers everything and cuts. `redistribute` refuses
# `Partial`: it arises where a product is left unfinished.
#
# ### A block by plan
#
# [`parallelize_module`](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html)
# takes a plan for a module that knows nothing of ranks. An entry says how a layer's weight is
# placed and which placements its input and output have. Where they do not fit, torch redistributes.
# This is the block of section 6, with norms that see a part of the tokens, beside our own layers:

# %%
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

PLAN = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
planned = parallelize_module(copy.deepcopy(block), mesh, PLAN)
planned.attention.num_heads //= world_size  # the attention sees this rank's heads
from_scratch = ParallelBlock(block, TensorParallel(sequence_parallel=True))
torch.manual_seed(4)
goal_BTD = torch.randn_like(tokens_BTD)
block_loss, block_calls = {}, {}
for name, module in (("torch", planned), ("ours", from_scratch)):
    here, goal = (t.chunk(world_size, 1)[rank] for t in (tokens_BTD, goal_BTD))
    with CollectiveLog() as log:
        loss = F.mse_loss(module(here), goal)
        loss.backward()
    block_loss[name], block_calls[name] = loss.item(), log.counts()
gradient_error, still_partial = 0.0, []
for (name, theirs), mine in zip(planned.named_parameters(), from_scratch.parameters(), strict=True):
    if theirs.grad.placements == (Partial(),):
        still_partial.append(name)
    gradient = theirs.grad.redistribute(placements=theirs.placements).to_local()
    gradient_error = max(gradient_error, (gradient - mine.grad).abs().max().item())
with CollectiveLog() as step_log:
    torch.optim.AdamW(planned.parameters()).step()
if rank == 0:
    print(block_calls, "\nstill Partial:", still_partial)

# %%
# %%rank 0
large = ("all_gather", "reduce_scatter")
display(
    claim(
        "loss of a rank's tokens, by plan / by our layers",
        block_loss["torch"] / block_loss["ours"],
        1.0,
        rtol=1e-12,
    ),
    claim("gradients of all weights: largest difference", gradient_error, ("<", 1e-12)),
    claim(
        "all-gathers and reduce-scatters of a block, by plan and by our layers",
        [block_calls[way].get(kind, 0) for way in ("torch", "ours") for kind in large],
        [4, 4, 4, 4],
    ),
    claim(
        "small all-reduces in backward, by plan and by our layers",
        [block_calls[way].get("all_reduce", 0) for way in ("torch", "ours")],
        [0, 6],
    ),
    claim(
        "gradients that are Partial after backward",
        " ".join(still_partial),
        "norm1.weight norm1.bias norm2.weight norm2.bias",
    ),
    claim(
        "all-reduces of these four in AdamW's step",
        step_log.counts().get("all_reduce", 0),
        (">=", 4),
    ),
)

# %% [markdown]
# The same loss, the same gradients, the same large messages. The six small all-reduces of section 6
# are not forgotten: torch takes two biases' gradients from the gathered gradient, and leaves those
# of the norms `Partial`. Whoever reads them sums them, here the optimizer.
#
# A plan has a trap. Query, key and value are *three* column-parallel layers with one input. Without
# `PrepareModuleInput` each of them reduces the gradient of that input: three all-reduces where one
# will do. With it, the input is one DTensor, and the three gradients are added before they are
# sent.

# %%
from minidist.parallel.tensor.native import loss_parallel, parallelize_gpt_native

native_counts = {}
for one_input in (True, False):
    torch.manual_seed(0)
    native = parallelize_gpt_native(GPT(config).to(device), mesh, one_input=one_input)
    tokens, answers = (t.to(device) for t in make_tokens(2, 64, 64, seed=0))
    with loss_parallel():
        native_loss = lm_loss(native(tokens), answers)
        with CollectiveLog() as log:
            native_loss.backward()
    native_counts[one_input] = log.counts().get("all_reduce", 0)

# %%
# %%rank 0
display(
    claim(
        "a plan with three separate inputs: further all-reduces per block backward",
        (native_counts[False] - native_counts[True]) / config.num_layers,
        2.0,
        rtol=1e-9,
    ),
)

# %% [markdown]
# ### Two dimensions
#
# A mesh may have several dimensions with names, and then a tensor has a placement for each. A name
# cuts out a rank's own line of the mesh, with its process group: `mesh_2d["tp"]` is what
# `parallelize_module` takes, and `mesh_2d["dp"]` what `fully_shard` takes. Here W is split by
# columns over tp, once copied over dp, once split by rows over dp as well.

# %%
mesh_2d = dist.init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
tp_only = distribute_tensor(W, mesh_2d, [Replicate(), Shard(1)])
both = distribute_tensor(W, mesh_2d, [Shard(0), Shard(1)])
with CollectiveLog() as fsdp_log:
    gathered_W = both.redistribute(placements=tp_only.placements)
    unsharding_error = (gathered_W.to_local() - tp_only.to_local()).abs().max().item()
mine = {
    "place": mesh_2d.get_coordinate(),
    "dp": mesh_2d["dp"].mesh.tolist(),
    "tp": mesh_2d["tp"].mesh.tolist(),
    "copied over dp": tuple(tp_only.to_local().shape),
    "split over both": tuple(both.to_local().shape),
    "calls": [(r.kind, list(r.ranks)) for r in fsdp_log.records],
    "error": unsharding_error,
}
lines = [None] * world_size
dist.all_gather_object(lines, mine)
if rank == 0:
    for number, line in enumerate(lines):
        print(f"rank {number}:", {key: line[key] for key in list(line)[:-2]})

# %%
# %%rank 0
display(
    claim(
        "numbers of W that a rank holds: split over tp, split over both",
        [tp_only.to_local().numel() / W.numel(), both.to_local().numel() / W.numel()],
        [2 / world_size, 1 / world_size],
        rtol=1e-9,
    ),
    claim(
        "from both to tp only: every rank calls one all-gather, among its dp ranks",
        all(line["calls"] == [("all_gather", line["dp"])] for line in lines),
        True,
    ),
    claim("... and has the columns", [line["error"] for line in lines], ("<", 1e-12)),
)

# %% [markdown]
# That all-gather is what FSDP does before it uses a layer (lecture 5): with DTensors, FSDP × tensor
# parallelism is two placements. Lecture 9 says which ranks belong on which dimension.

# %% [markdown]
# ## 8 · Async tensor parallelism
#
# A data-parallel all-reduce hides behind the backward pass of other layers. Of the messages of
# section 6 only some backward ones hide, behind the gradients of the weights. Forward none can: the
# product needs the gathered tokens, and the scatter needs the product. But *one chunk* of the
# tokens needs only its own messages. So cut the tokens in chunks: while one chunk is multiplied,
# the next one is gathered and the last one scattered.

# %%
# %%rank 0
chunks_guess = predict(
    "Messages 209 µs, products 351 µs, not cut: 560 µs. What is the shortest step with chunks?",
    guess=None,
    unit="µs",
)
chunks_guess

# %% [markdown]
# This MLP does it, on the emulated cluster of four GPUs. Each has its part of the tokens, and its
# columns and rows of the weights.


# %%
# %%rank 0
from minidist import emulate
from minidist.emulate.teach import run_traced


def mlp_in_chunks(num_chunks: int, num_tokens: int, width: int):
    """One rank's tokens through an MLP; each chunk is gathered, multiplied and scattered."""
    from minidist.device import all_gather_single, reduce_scatter_single

    n, r = dist.get_world_size(), dist.get_rank()
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, width, generator=numbers).chunk(n)[r]
    A = torch.randn(width, 4 * width, generator=numbers).chunk(n, 1)[r]
    B = torch.randn(4 * width, width, generator=numbers).chunk(n, 0)[r]
    dist.barrier()
    gathers, scatters = [], []
    for part in x.chunk(num_chunks):
        tokens = torch.empty(n * len(part), width)
        gathers.append((tokens, all_gather_single(tokens, part, async_op=True)))
    for tokens, gathering in gathers:
        gathering.wait()
        summand = F.gelu(tokens @ A) @ B
        out = torch.empty(len(summand) // n, width)
        scatters.append((out, reduce_scatter_single(out, summand, async_op=True)))
    for _, scattering in scatters:
        scattering.wait()
    return [out for out, _ in scatters]


CHUNKS, LONG, SHORT, MLP_WIDTH = (1, 2, 4, 8), 512, 64, 128
runs = {
    (num_tokens, c): run_traced(mlp_in_chunks, 4, c, num_tokens, MLP_WIDTH)
    for num_tokens in (LONG, SHORT)
    for c in CHUNKS
}

# %% [markdown]
# We replay the traces on GPUs of 0.1 TFLOP/s that take 5 µs to start an operation, with links of 2
# GB/s and 2 µs: slow enough that these small products take the time of large ones.


# %%
# %%rank 0
SLOW_LINK = emulate.Link(bandwidth_bytes_per_s=2e9, latency_s=2e-6)
SLOW_GPUS = emulate.Cluster(
    name="four slow GPUs",
    nodes=1,
    devices_per_node=4,
    intra_node=SLOW_LINK,
    inter_node=SLOW_LINK,
    peak_flops_per_s=1e11,
    memory_bandwidth_bytes_per_s=1e15,
    launch_s=5e-6,
)


def after_start(num_tokens: int, c: int):
    """The timeline of a run, and when its inputs are there, in seconds."""
    _, trace = runs[num_tokens, c]
    timeline = emulate.simulate(trace, SLOW_GPUS)
    barrier = next(i for i, e in enumerate(trace.events[0]) if e.collective == "barrier")
    return timeline, timeline.event_times[0][barrier][1]


step_us, product_us = {}, {}
for key in runs:
    timeline, start_s = after_start(*key)
    step_us[key] = 1e6 * (timeline.makespan_s - start_s)
    product_us[key] = 1e6 * sum(
        each.end_s - each.start_s
        for each in timeline.intervals[0]
        if each.kind == "compute" and each.start_s >= start_s
    )
figure, _ = new_figure(8.5, 4.6)
figure.clear()
with style():
    axes = figure.subplots(4, 1, sharex=True)
for ax, c in zip(axes, CHUNKS, strict=True):
    timeline, start_s = after_start(LONG, c)
    one = dataclasses.replace(timeline, world_size=1, intervals=timeline.intervals[:1])
    name = f"{c} chunk{'s' * (c > 1)}: {step_us[LONG, c]:.0f} µs"
    plot_timeline(one, start_s=start_s, end_s=start_s + 565e-6, ax=ax, title=name)
    ax.set(xlabel="", yticks=[])
axes[-1].set_xlabel("time (µs)")
display(figure, chunks_guess.reveal(min(step_us[LONG, c] for c in CHUNKS)))

# %% [markdown]
# What stays exposed is the first chunk's gather and the last chunk's scatter, and smaller chunks
# make both shorter. But every chunk pays the latency of its messages and the start of its
# operations, so eight chunks are slower than four. With c chunks, G and S seconds for the bytes of
# all gathers and scatters, λ for the latency of one collective, and P(c) for the products with
# their starts, the step takes
#
# $$ \max\left(P(c) + \frac{G + S}{c} + 2\lambda,\ \ G + S + 2c\lambda\right): $$
#
# either the products are busy all the time, or the link is.


# %%
# %%rank 0
def step_by_formula(product: float, num_bytes: float, n: int, c: int, link) -> float:
    """Seconds of gather, product and scatter in c chunks; `product` is P(c)."""
    sent_s = 2 * (n - 1) / n * num_bytes / link.bandwidth_bytes_per_s  # gathers and scatters
    latency_s = (n - 1) * link.latency_s
    return max(product + sent_s / c + 2 * latency_s, sent_s + 2 * c * latency_s)


by_formula = {
    (num_tokens, c): 1e6
    * step_by_formula(product_us[num_tokens, c] / 1e6, 4 * num_tokens * MLP_WIDTH, 4, c, SLOW_LINK)
    for num_tokens, c in runs
}
numbers = torch.Generator().manual_seed(0)
sizes = ((LONG, MLP_WIDTH), (MLP_WIDTH, 4 * MLP_WIDTH), (4 * MLP_WIDTH, MLP_WIDTH))
x_all, A_all, B_all = (torch.randn(*size, generator=numbers) for size in sizes)
in_one_go = F.gelu(x_all @ A_all) @ B_all
chunk_error = max(
    (
        (torch.cat([out for outs in runs[LONG, c][0] for out in outs]) - in_one_go).norm()
        / in_one_go.norm()
    ).item()
    for c in CHUNKS
)
plot_lines(
    CHUNKS,
    {
        f"{num_tokens} tokens": [step_us[num_tokens, c] / step_us[num_tokens, 1] for c in CHUNKS]
        for num_tokens in (LONG, SHORT)
    },
    ideal={"not cut": [1.0] * len(CHUNKS)},
    logx=True,
    ticks=CHUNKS,
    xlabel="chunks",
    ylabel="step / step that is not cut",
    title="Cutting pays for long products only",
)

# %%
# %%rank 0
display(
    claim("the MLP in chunks against one process, relative error", chunk_error, ("<", 1e-5)),
    claim(
        "512 tokens, not cut: messages and products, µs",
        [step_us[LONG, 1] - product_us[LONG, 1], product_us[LONG, 1]],
        [209, 351],
        rtol=0.003,
    ),
    claim(
        "steps on the emulated cluster / by the formula, both lengths, all chunks",
        [step_us[key] / by_formula[key] for key in runs],
        [1.0] * len(runs),
        rtol=1e-6,
    ),
    claim(
        "512 tokens: the best of 1, 2, 4 and 8 chunks",
        min(CHUNKS, key=lambda c: step_us[LONG, c]),
        4,
    ),
    claim(
        "512 tokens: share of the exposed time that 4 chunks save",
        (step_us[LONG, 1] - step_us[LONG, 4]) / (step_us[LONG, 1] - product_us[LONG, 1]),
        (">", 0.45),
    ),
    claim(
        "64 tokens: step with 2, 4 and 8 chunks / not cut",
        [step_us[SHORT, c] / step_us[SHORT, 1] for c in CHUNKS[1:]],
        (">", 1.0),
    ),
)

# %% [markdown]
# Now an MLP of GPT-3's width on eight GPUs, by the formula, its products at 60 % of the peak of an
# H100. (A GPU also multiplies small chunks less efficiently; that is not in the formula.)


# %%
# %%rank 0
def chunk_explorer(width: int = 12288, tokens: int = 2048, link: str = "NVLink 4 (H100)"):
    """Exposed time of an MLP on 8 GPUs against the number of chunks, by the formula."""
    product_s = 2 * 2 * tokens * width * 4 * width / 8 / (0.6 * cost.H100.peak())
    counts = [2**i for i in range(6)]
    steps = [step_by_formula(product_s, 2 * tokens * width, 8, c, LINKS[link]) for c in counts]
    best = min(range(len(counts)), key=lambda i: steps[i])
    return plot_lines(
        counts,
        {"exposed": [1e6 * (step - product_s) for step in steps]},
        ideal={"products": [1e6 * product_s] * len(counts)},
        logx=True,
        logy=True,
        ticks=counts,
        xlabel="chunks",
        ylabel="µs",
        title=f"{link}: best with {counts[best]} chunks, "
        f"step {100 * (1 - steps[best] / steps[0]):.0f} % shorter",
    )


explore(
    chunk_explorer,
    width=[1024, 2048, 4096, 8192, 12288, 20480],
    tokens=[512, 1024, 2048, 4096, 8192],
    link=list(LINKS),
    labels={"width": "width h", "tokens": "tokens s", "link": "link"},
    alt="Line: exposed communication of an MLP against the number of chunks",
)

# %% [markdown]
# Over a slow link the messages take longer than the products. Then no number of chunks hides them:
# keep tensor parallelism inside a node, chunks or not.
#
# PyTorch's version is called **async tensor parallelism** ([design and
# measurements](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)).
# In [torchtitan](https://github.com/pytorch/torchtitan) the option is
# `enable_async_tensor_parallel`, and it needs `torch.compile`: the compiler finds the pairs of
# gather and product, and of product and scatter, and puts one fused operation in place of each. It
# cuts t chunks for t ranks. A rank begins with its own chunk, which needs no message, and copies
# the others from the memory of their owners. That memory is
# [symmetric](https://docs.pytorch.org/docs/stable/symmetric_memory.html): every rank of a group can
# address it over NVLink, so a copy needs no kernel that would take cores away from the product.

# %%
# %%rank 0
ASYNC_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, bf16"
display(
    claim(
        "Llama 3 70B, FSDP 32 × TP 8 on 256 H100: tokens/s per GPU, plain and async",
        "597 and 652",
        status="cited",
        authority=ASYNC_TP,
    ),
    claim(
        "Llama 3 8B, FSDP 8 × TP 8 on 64 H100: tokens/s per GPU, plain and async",
        "4,378 and 4,809",
        status="cited",
        authority=ASYNC_TP,
    ),
)

# %% [markdown]
# ## 9 · Context parallelism: ring attention
#
# Now the sequence itself is too long: 128 thousand tokens or a million. Every rank gets s/n tokens,
# everywhere in the model. Norms and MLPs work on each token alone, so nothing changes for them. In
# attention a query has to see keys and values of all tokens before it.
#
# **Ring attention** keeps queries where they are and passes keys and values around a ring. At each
# of n steps a rank attends to the block of keys that it holds now, while the next block is already
# on its way. Softmax can be computed block by block if one keeps, per query, the largest score m
# and the sum l of exponentials so far, and rescales when a larger score comes. FlashAttention
# ([arXiv 2205.14135](https://arxiv.org/abs/2205.14135)) works like that. Here it is, a dozen lines:


# %%
def attend_in_blocks(query, blocks):
    """Softmax attention over blocks of (key, value), one after the other."""
    scale = query.shape[-1] ** -0.5
    largest = torch.full_like(query[..., :1], float("-inf"))
    total, out = torch.zeros_like(largest), torch.zeros_like(query)
    for key, value in blocks:
        scores = query @ key.mT * scale
        higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
        old, new = torch.exp(largest - higher), torch.exp(scores - higher)
        total = total * old + new.sum(-1, keepdim=True)
        out = out * old + new @ value
        largest = higher
    return out / total


torch.manual_seed(2)
q, k, v = (torch.randn(1, 8, 64, 16, dtype=torch.float64, device=device) for _ in range(3))
in_blocks = attend_in_blocks(q, zip(k.chunk(4, 2), v.chunk(4, 2), strict=True))
online_error = (in_blocks - F.scaled_dot_product_attention(q, k, v)).abs().max().item()

# %% [markdown]
# ### Causal masks and the zig-zag order
#
# A token attends to itself and to earlier ones only. If rank 0 holds the first tokens and rank 3
# the last, rank 3 has most of the work, and everybody waits for it.

# %%
# %%rank 0
contiguous_guess = predict(
    "4 ranks, tokens in order: which part of the time do they work on average?",
    guess=None,
    unit="%",
)
contiguous_guess

# %% [markdown]
# The cure: cut the sequence into 2n chunks and give rank r the chunks r and 2n − 1 − r, an early
# one and a late one.

# %%
# %%rank 0
from minidist.parallel.context import causal_work, positions


def pairs_of(layout: str, n: int, num: int) -> list[int]:
    """Pairs of a query and an earlier or equal key, per rank, of a sequence of `num` tokens."""
    return [int((positions(num, r, n, layout) + 1).sum()) for r in range(n)]


def draw_work(ax, layout: str, n: int, step: int | None = None) -> None:
    """The causal mask; colours: the rank whose queries they are. Dark: computed at a ring step."""
    num = 8 * n
    owner = np.empty(num, dtype=int)
    for r in range(n):
        owner[positions(num, r, n, layout).numpy()] = r
    for i in range(num):
        for j in range(i + 1):
            now = step is None or owner[j] == (owner[i] - step) % n
            ax.add_patch(plt_rectangle((j, i), PALETTE[owner[i] % 5], 1.0 if now else 0.18))
    ax.set(xlim=(0, num), ylim=(num, 0), aspect="equal", xlabel="key", ylabel="query", title=layout)


def plt_rectangle(at, colour: str, alpha: float):
    from matplotlib.patches import Rectangle

    return Rectangle(at, 1, 1, facecolor=colour, alpha=alpha, linewidth=0)


figure, _ = new_figure(8.5, 3.8)
figure.clear()
with style():
    for ax, layout in zip(figure.subplots(1, 2), ("contiguous", "zigzag"), strict=True):
        draw_work(ax, layout, 4)
        work = pairs_of(layout, 4, 8 * 4)
        used = 100 * sum(work) / 4 / max(work)
        ax.set_title(f"{layout}: {used:.0f} % used", loc="left")
figure

# %% [markdown]
# Each colour is the work of one rank. Left, its area grows from rank to rank; right, all four areas
# are equal. In a long sequence the areas on the left are as 1 to 3 to 5 to 7. (Where the blocks on
# the diagonal are computed whole and masked afterwards, as in `ring_attention`, they are as 1 to 2
# to 3 to 4.) Now step through the ring: dark are the pairs that are computed in this step. At step
# 0 each rank has its own keys, at step i those of the rank i places before it.


# %%
# %%rank 0
def ring_stepper(step: int = 0, ranks: int = 4, layout: str = "zigzag"):
    """Which pairs of query and key each rank computes at one step of the ring."""
    figure, _ = new_figure(8.5, 3.8)
    figure.clear()
    with style():
        left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
        step = min(step, ranks - 1)
        draw_work(left, layout, ranks, step)
        num = 8 * ranks
        owner = {int(t): r for r in range(ranks) for t in positions(num, r, ranks, layout)}
        work = [
            sum(
                owner[j] == (r - step) % ranks for i in owner if owner[i] == r for j in range(i + 1)
            )
            for r in range(ranks)
        ]
        right.barh(range(ranks), work, color=[PALETTE[r % 5] for r in range(ranks)], height=0.7)
        right.set(
            yticks=range(ranks),
            xlabel="pairs of this step",
            ylabel="rank",
            xlim=(0, 70),
            title=f"step {step}: keys of rank r − {step}",
        )
        right.invert_yaxis()
    return figure


explore(
    ring_stepper,
    step=(0, 7),
    ranks=[2, 4, 8],
    layout=["zigzag", "contiguous"],
    labels={"step": "step of the ring", "ranks": "ranks n", "layout": "order of tokens"},
    alt="The causal mask with the pairs of one ring step, and the work of each rank in it",
)

# %% [markdown]
# In the contiguous order some ranks have nothing to do in a step (all keys lie in the future), and
# others a whole square. In the zig-zag order every rank has the same work in **every step**, which
# matters, because in each step everybody waits for the slowest.
#
# Now on the four ranks: ring attention, and **Ulysses**, which exchanges tokens for heads instead.
# An all-to-all gives each rank all tokens of a part of the heads, ordinary attention follows, and
# another all-to-all goes back.

# %%
from minidist.parallel.context import (
    context_parallel_gpt,
    ring_attention,
    shard_sequence,
    sum_gradients,
    ulysses_attention,
)

attention_error = {}
for name, method in (("ring", ring_attention), ("ulysses", ulysses_attention)):
    for layout in ("zigzag", "contiguous"):
        whole = [t.clone().requires_grad_() for t in (q, k, v)]
        expected = F.scaled_dot_product_attention(*whole, is_causal=True)
        (expected * q).sum().backward()
        mine = [shard_sequence(t, 2, layout=layout).clone().requires_grad_() for t in (q, k, v)]
        out = method(*mine, layout=layout)
        (out * shard_sequence(q, 2, layout=layout)).sum().backward()
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, whole, strict=True))]
        attention_error[name, layout] = max(
            (a - shard_sequence(b, 2, layout=layout)).abs().max().item() for a, b in pairs
        )
try:
    ulysses_attention(*[torch.zeros(1, 6, 16, 8, device=device)] * 3)
    six_heads = "runs"
except ValueError as error:
    six_heads = str(error)

# %%
# %%rank 0
contiguous = causal_work(4, "contiguous")
in_pairs = pairs_of("contiguous", 4, 4096)
display(
    contiguous_guess.reveal(100 * sum(in_pairs) / 4 / max(in_pairs)),
    claim(
        "4,096 tokens, contiguous order: work of ranks 0 to 3 / that of rank 0",
        [work / in_pairs[0] for work in in_pairs],
        [1.0, 3.0, 5.0, 7.0],
        rtol=0.002,
    ),
    claim(
        "attention block by block against the whole: largest difference", online_error, ("<", 1e-12)
    ),
    claim(
        "ring and Ulysses, both orders: outputs and gradients against one rank",
        list(attention_error.values()),
        ("<", 1e-10),
        authority="arXiv 2310.01889, 2309.14509",
    ),
    claim(
        "share of the time that 4 ranks work in the contiguous order, diagonal blocks whole",
        sum(contiguous) / 4 / max(contiguous),
        2.5 / 4,
        rtol=1e-9,
    ),
    claim(
        "in the zig-zag order: least work of a rank / most",
        min(causal_work(4, "zigzag")) / max(causal_work(4, "zigzag")),
        1.0,
        rtol=1e-9,
    ),
    claim(
        "6 heads on 4 ranks with Ulysses",
        six_heads,
        lambda got: "6 heads cannot be split over 4 ranks" in got,
    ),
)

# %% [markdown]
# ### What a context-parallel GPT has to get right
#
# Three things besides attention. **Positions**: rank r's tokens do not begin at position 0. **The
# loss** is the mean over the tokens of all ranks. **Gradients are summed**, not averaged, over the
# ranks: each has seen some tokens of the same sequence. Here is the model trained right, and its
# first logits with positions that count from 0 on each rank.

# %%
torch.manual_seed(0)
alone, shared = (GPT(config).to(device, torch.float64) for _ in range(2))
shared.load_state_dict(alone.state_dict())
over_ranks = context_parallel_gpt(shared)
optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (alone, shared)]
for step in range(NUM_STEPS):
    tokens, answers = (t.to(device) for t in make_tokens(2, 64, 64, seed=step))
    here, goal = shard_sequence(tokens), shard_sequence(answers)
    if step == 0:
        shifted = shared.embed(here)  # counts from 0 on every rank
        for layer in over_ranks.blocks:
            shifted = layer(shifted)
        shifted = shared.head(shared.norm(shifted))
        position_error = (over_ranks(here) - shifted).abs().max().item()
    for optimizer in optimizers:
        optimizer.zero_grad()
    lm_loss(alone(tokens), answers).backward()
    over_ranks.loss(here, goal).backward()
    sum_gradients(over_ranks)
    for optimizer in optimizers:
        optimizer.step()
cp_drift = max(
    (a - b).abs().max().item() for a, b in zip(alone.parameters(), shared.parameters(), strict=True)
)

# %% [markdown]
# ### Ring or Ulysses?
#
# We count the bytes. The emulated cluster's broker sees every message of one attention layer,
# forward and backward.

# %%
# %%rank 0
ring_guess = predict(
    "32 ranks: how many times as many bytes as Ulysses does a ring send?",
    guess=None,
)
ring_guess

# %% [markdown]
# First counted on four ranks, then from the formulas that fit the count:


# %%
# %%rank 0
def attention_once(method: str) -> None:
    from minidist.parallel import context

    torch.manual_seed(0)
    mine = [context.shard_sequence(torch.randn(1, 8, 64, 16), 2).requires_grad_() for _ in range(3)]
    getattr(context, f"{method}_attention")(*mine).sum().backward()


from minidist.parallel.context import ring_bytes, ulysses_bytes

shape = {"batch": 1, "num_heads": 8, "num_tokens": 64, "head_width": 16, "itemsize": 4}
counted, on_paper = {}, {}
for method, paper in (("ring", ring_bytes), ("ulysses", ulysses_bytes)):
    _, trace = run_traced(attention_once, world_size, method)
    timeline = emulate.simulate(trace, emulate.clusters.dgx_h100())
    counted[method] = timeline.bytes_per_link["device 0"]
    on_paper[method] = sum(paper(**shape, num_ranks=world_size))
ns = [2, 4, 8, 16, 32]
long = {"batch": 1, "num_heads": 32, "num_tokens": 131072, "head_width": 128, "itemsize": 2}
plot_lines(
    ns,
    {
        "ring": [sum(ring_bytes(**long, num_ranks=n)) / 1e9 for n in ns],
        "Ulysses": [sum(ulysses_bytes(**long, num_ranks=n)) / 1e9 for n in ns],
    },
    logx=True,
    logy=True,
    ticks=ns,
    xlabel="ranks n",
    ylabel="GB per rank and layer",
    title="131,072 tokens, 32 heads of 128: bytes sent",
)

# %%
# %%rank 0
hide_tokens = cost.A100.peak() / nvlink.bandwidth_bytes_per_s
# A rank has two chunks: 4 pairs of chunks per step of the ring, less what the mask leaves out.
share = {n: causal_work(n, "zigzag")[0] / (4 * n) for n in (4, 64)}
on_32 = [sum(paper(**long, num_ranks=32)) for paper in (ring_bytes, ulysses_bytes)]
few = long | {"num_heads": 4}  # 8 query heads to a key-value head


def ring_over_ulysses(n: int, which: int) -> float:
    """Bytes, forward (0) or backward (1): half of what Ulysses sends belongs to keys and values."""
    wide, narrow = (ulysses_bytes(**sizes, num_ranks=n)[which] for sizes in (long, few))
    return ring_bytes(**few, num_ranks=n)[which] / ((wide + narrow) / 2)


display(
    ring_guess.reveal(on_32[0] / on_32[1]),
    claim(
        "context-parallel GPT, parameters after training against one rank", cp_drift, ("<", 1e-9)
    ),
    claim(
        "positions that count from 0 on each rank change the logits by", position_error, (">", 1e-3)
    ),
    claim(
        "bytes of ring attention, counted / on paper",
        counted["ring"] / on_paper["ring"],
        1.0,
        rtol=1e-9,
    ),
    claim(
        "bytes of Ulysses, counted / on paper",
        counted["ulysses"] / on_paper["ulysses"],
        1.0,
        rtol=1e-9,
    ),
    claim(
        "bytes, ring / Ulysses, on 32 ranks",
        on_32[0] / on_32[1],
        (">", 10.0),
    ),
    claim(
        "8 query heads to a key-value head, 2 ranks: bytes of a ring / of Ulysses",
        (ring_over_ulysses(2, 0) + ring_over_ulysses(2, 1)) / 2,
        2 / 3,
        rtol=1e-9,
    ),
    claim(
        "... and forward, on 2, 4 and 8 ranks",
        [ring_over_ulysses(n, 0) for n in (2, 4, 8)],
        ("<", 1.0),
    ),
    claim(
        "tokens per rank from which a ring over NVLink hides behind attention, A100, at peak",
        hide_tokens,
        1040,
        rtol=0.01,
        authority="Liu et al., arXiv 2310.01889: c >= F/B, without a mask",
    ),
    claim(
        "causal attention in the zig-zag order: share of a block of scores that is left per step",
        share[64],
        0.5,
        rtol=0.02,
    ),
    claim(
        "... so a ring hides from twice as many tokens per rank on, in F/B",
        1 / share[64],
        2.0,
        rtol=0.02,
    ),
)

# %% [markdown]
# Ulysses sends less, and less with every rank. But attention waits for its all-to-alls, and the
# heads must divide (with grouped queries, the few key-value heads). A rank of a ring sends about
# the same on any number of ranks, most of it in the backward pass, where our gradients of keys and
# values travel in fp32. But it can hide that. Forward, while a block of c × c scores is computed (4
# c² d FLOPs), the next keys and values (4 c d bytes) arrive. Without a mask that works from c = F/B
# tokens per rank on. With a causal mask and the zig-zag order half of each block is masked away,
# and the bytes are the same: from **2F/B** on, about 2,080 tokens per rank for an A100 at its peak.
#
# Grouped queries favour the ring, since only keys and values travel on it. With 8 query heads to a
# key-value head it hides from an eighth of these tokens on, and it sends less than Ulysses on two
# ranks (forward, on up to eight).
#
# Which axis goes where? The messages of tensor parallelism are on the critical path in every layer:
# **innermost**, on NVLink. A ring that hides may cross nodes. Data parallelism sends once per step:
# outermost. Lecture 9 puts them together.
#
# ## Now you
#
# Write the zig-zag order: a function that gives the **positions of the tokens of one rank**, as a
# list. The library's `positions` does it, too; do without. The cell after it tries your function on
# twenty sequences: every token must be somewhere, once, all ranks must have the same work, and each
# its two chunks.


# %%
def my_tokens(rank: int, num_ranks: int, num_tokens: int) -> list[int] | None:
    """Your turn. The sequence has 2 * num_ranks chunks of equal length; this rank has two."""
    return None


# %%
# %%rank 0
def check(answer) -> str:
    for case in range(20):
        n, num = 2 + case % 7, (1 + case // 4) * 2 * (2 + case % 7)
        found = [answer(r, n, num) for r in range(n)]
        if any(tokens is None for tokens in found):
            return "Not written yet."
        found = [sorted(int(t) for t in tokens) for tokens in found]
        if sorted(t for tokens in found for t in tokens) != list(range(num)):
            return f"{n} ranks, {num} tokens: a token is missing, or there twice."
        work = [sum(t + 1 for t in tokens) for tokens in found]
        if len(set(work)) > 1:
            return f"{n} ranks, {num} tokens: pairs per rank {work}."
        if any(found[r] != positions(num, r, n, "zigzag").tolist() for r in range(n)):
            return f"{n} ranks, {num} tokens: not the chunks r and {2 * n - 1} - r of {2 * n}."
    return "Right, in all 20 cases."


def one_answer(rank: int, num_ranks: int, num_tokens: int) -> list[int]:
    chunk = num_tokens // (2 * num_ranks)
    late = 2 * num_ranks - 1 - rank
    return [c * chunk + i for c in (rank, late) for i in range(chunk)]


def in_turn(rank: int, num_ranks: int, num_tokens: int) -> list[int]:
    return list(range(rank, num_tokens, num_ranks))


def to_and_fro(rank: int, num_ranks: int, num_tokens: int) -> list[int]:
    places = rank, 2 * num_ranks - 1 - rank
    return [t for t in range(num_tokens) if t % (2 * num_ranks) in places]


print(check(my_tokens))
display(
    claim("an early and a late chunk", check(one_answer), "Right, in all 20 cases."),
    claim("as an array", check(lambda *x: np.array(one_answer(*x))), "Right, in all 20 cases."),
    claim("every n-th token: not quite", check(in_turn), lambda got: "pairs per rank" in got),
    claim("to and fro: equal, without chunks", check(to_and_fro), lambda got: "chunks" in got),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `chunk = num_tokens // (2 * num_ranks)` and `late = 2 * num_ranks - 1 - rank`, and then
# `[c * chunk + i for c in (rank, late) for i in range(chunk)]`. Dealing out the tokens in turn is
# almost even: that is Striped Attention ([arXiv 2311.09431](https://arxiv.org/abs/2311.09431)).
#
# </details>
#
# ## Summary
#
# - Column-parallel: all of x, some output features. Row-parallel: some input features, a partial
#   sum. Column then row needs nothing in between.
# - f: identity, then all-reduce backward. g: all-reduce, then identity backward. `dist.all_gather`
#   alone cuts the gradient; an all-reduce in both directions multiplies it by the number of ranks.
# - A row-parallel bias is replicated and added once, after the sum.
# - A block sends four all-reduces of 2 b s h bytes per micro-batch, on the critical path.
# - Sequence parallelism splits each all-reduce into reduce-scatter and all-gather: the same bytes.
#   Activations are divided by t, if inputs are gathered again in the backward pass, for a quarter
#   more bytes. Replicated parameters' gradients must be summed.
# - A DTensor is a local tensor, a mesh and a placement per mesh dimension. Partial → Replicate is
#   an all-reduce, Partial → Shard a reduce-scatter, Shard → Replicate an all-gather; Replicate →
#   Shard sends nothing.
# - Async tensor parallelism cuts gather, product and scatter in chunks. One chunk's gather and
#   scatter stay exposed. Latencies and launches grow with the chunks, and no cut hides more than
#   the product lasts.
# - Context parallelism: zig-zag order, positions, sum of gradients. A ring sends more, unless there
#   are few key-value heads, and hides it; Ulysses needs heads that divide.
#
# ## Questions
#
# 1. An MLP with SwiGLU has two "up" matrices and one "down". How do you split it?
#
# <details><summary>Answer</summary>
#
# Both up matrices by columns, the same columns on the same rank, so that the element-wise product
# is local; down by rows. Still one all-reduce each way. Both column-parallel layers share one f.
#
# </details>
#
# 2. Two layers in a row, both column-parallel: what does it cost?
#
# <details><summary>Answer</summary>
#
# The second needs all features, so the output of the first is gathered (all-gather forward,
# reduce-scatter backward). Column then row avoids it.
#
# </details>
#
# 3. Under tensor parallelism without sequence parallelism, do gradients of layer norms have to be
#    reduced over the tensor ranks?
#
# <details><summary>Answer</summary>
#
# No. All ranks have the same activations there, and f has made the incoming gradient whole. Each
# computes the same gradient. (Summing them would multiply by t.)
#
# </details>
#
# 4. Dropout: which ranks need the same mask?
#
# <details><summary>Answer</summary>
#
# Where activations are replicated (after g, without sequence parallelism) all ranks must draw the
# same mask. Where they are split (inside attention, in sequence-parallel regions) masks must
# differ. Hence two random streams: `RngTracker` in `lib/minidist/parallel/tensor/config.py`.
#
# </details>
#
# 5. Your model has 8 key-value heads and 64 query heads. How many ranks for Ulysses, for tensor
#    parallelism, for a ring?
#
# <details><summary>Answer</summary>
#
# Ulysses and tensor parallelism: up to 8 without copying key-value heads; more if each is kept by
# several ranks. A ring: any number that divides the tokens into 2n chunks.
#
# </details>
#
# 6. A weight of a 2 × 4 mesh (dp, tp) is placed `[Shard(0), Shard(1)]`. Which part of it does a
#    rank hold, and what does `redistribute` to `[Replicate(), Shard(1)]` send?
#
# <details><summary>Answer</summary>
#
# An eighth: half of the rows, a quarter of the columns. An all-gather over the two dp ranks: each
# sends its eighth and then holds a quarter. No tp rank takes part. FSDP does that before it uses
# the layer.
#
# </details>
#
# 7. Gather and scatter of a block take 100 µs each, its products 150 µs. What is the shortest step
#    that cutting can reach?
#
# <details><summary>Answer</summary>
#
# 200 µs: the link is busy all the time, and then the products hide and not the messages. Without
# chunks it takes 350 µs.
#
# </details>
#
# ## Try it
#
# - Take `f` out in section 2 and train a two-layer MLP. Does the loss fall? Do the ranks agree?
# - In the ring stepper choose the contiguous order and eight ranks. Who waits in step 3?
# - Find the width at which communication over NVLink 4 takes half as long as computing, at tp 8.
# - In section 7 leave `norm2` out of the plan. Does anything complain? Compare the gradients of its
#   weight on the ranks.
#
# Then do it yourself: write the layer of this lecture in the bonus notebook
# [**bonus_tensor_parallel**](../labs/bonus_tensor_parallel/bonus_tensor_parallel.ipynb), from f and
# g to the vocabulary-parallel loss. Outputs and gradients are held against one process in fp64, and
# the emulated cluster counts what you send. In
# [**lab3_fsdp**](../labs/lab3_fsdp/lab3_fsdp.ipynb) you shard what lecture 9 combines with it.
#
# ## What to read
#
# - *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*,
#   [arXiv 1909.08053](https://arxiv.org/abs/1909.08053)
# - *Reducing Activation Recomputation in Large Transformer Models* (sequence parallelism),
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198)
# - PyTorch: [DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html), [tensor
#   parallelism](https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html), the recipe
#   [DeviceMesh](https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html),
#   [symmetric memory](https://docs.pytorch.org/docs/stable/symmetric_memory.html)
# - [Introducing Async Tensor Parallelism in
#   PyTorch](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)
# - *FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion*,
#   [arXiv 2406.06858](https://arxiv.org/abs/2406.06858)
# - *Ring Attention with Blockwise Transformers for Near-Infinite Context*,
#   [arXiv 2310.01889](https://arxiv.org/abs/2310.01889)
# - *Striped Attention: Faster Ring Attention for Causal Transformers*,
#   [arXiv 2311.09431](https://arxiv.org/abs/2311.09431)
# - *DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
#   Transformer Models*, [arXiv 2309.14509](https://arxiv.org/abs/2309.14509)
# - *The Llama 3 Herd of Models*, section 3.3 (context parallelism by all-gather),
#   [arXiv 2407.21783](https://arxiv.org/abs/2407.21783)
# - *GSPMD: General and Scalable Parallelization for ML Computation Graphs*,
#   [arXiv 2105.04663](https://arxiv.org/abs/2105.04663)
# - In `lib/minidist/parallel/tensor/`: `mappings.py`, `layers.py`, `vocab.py`
