# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 2
#     language: python
#     name: torchrun-2
# ---

# %% [markdown]
# # 1 · Why distributed training
#
# One GPU is a fast machine. Still, large models are trained on hundreds or thousands of them. That
# is expensive, and every later lecture is about the trouble that it makes. So first: why is one not
# enough? There are three reasons, and each can be computed before a single GPU is rented.
#
# **After this lecture you can**
#
# - say how many bytes the training of a model needs, and which of them grow with what;
# - say how many operations it takes, hence how many days on which machine, and what it costs;
# - spot an estimate that cannot be true, in two lines;
# - say which wall a job hits first: memory, time or data;
# - say which kind of parallelism moves which wall, and what it asks for in return.
#
# It takes about 60 minutes. The kernel is *torchrun × 2*: every cell runs on two ranks. Most cells
# here begin with `%%rank 0` and run on one, because they are arithmetic. Seven times the lecture
# asks for your guess before it computes. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: a larger model is measured
seed = 0

# %%
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minidist import device as devices
from minidist.model import GPT, GPTConfig

torch.manual_seed(seed)
device = devices.choose_device()
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(devices.choose_backend())
rank, world_size = dist.get_rank(), dist.get_world_size()

# %%
# %%rank 0
# %matplotlib inline
import math
from dataclasses import replace

import numpy as np
from IPython.display import display
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minidist import cost, emulate
from minidist.claims import claim
from minidist.emulate.teach import run_traced
from minidist.plots import (
    COLOURS,
    PALETTE,
    new_figure,
    plot_bars,
    plot_lines,
    plot_stacked,
    plot_timeline,
    style,
)
from minidist.profile import MemoryTracker, measure_scaling
from minidist.widgets import explore, predict

A100, MONTH_S = cost.A100, cost.YEAR_S / 12
SHEETS = "NVIDIA data sheets, via stas00/ml-engineering"

# %% [markdown]
# ## Three walls in one picture
#
# Take one A100, a GPU with 80 GB, and models of every size. Each is trained in 16 bits with Adam,
# on 20 tokens per parameter, at 40 % of the GPU's peak. Up to which size is one GPU enough?


# %%
# %%rank 0
def tokens_in_a_month(num_parameters, share_of_peak=0.4):
    """What one A100 gets through: FLOPs of a month / FLOPs per token."""
    return MONTH_S * share_of_peak * A100.peak() / (6 * num_parameters)


sizes = np.geomspace(1e8, 1e12, 193)
panels = [  # needed, what one A100 has
    ("Memory", "GB", {"needed": 16 * sizes / 1e9}, {"one A100": np.full(193, 80.0)}),
    ("Data", "tokens", {"wanted": 20 * sizes}, {"a month": [tokens_in_a_month(n) for n in sizes]}),
    (
        "Time on one A100",
        "years",
        {"needed": 20 * sizes / tokens_in_a_month(1) * sizes / 12},
        {"a month": np.full(193, 1 / 12)},
    ),
]
figure, _ = new_figure(11, 3.2)
figure.clear()
with style():
    axes = figure.subplots(1, 3)
for ax, (title, unit, needed, available) in zip(axes, panels, strict=True):
    plot_lines(
        sizes / 1e9,
        needed,
        ideal=available,
        logx=True,
        logy=True,
        markers=False,
        ax=ax,
        title=title,
        xlabel="parameters (billions)",
        ylabel=unit,
    )
figure

# %% [markdown]
# Each panel has a dashed line: what one GPU offers, in a month where time matters. Left of the
# crossing one GPU is enough. All three crossings lie between one and five billion parameters. To
# the right the gap grows fast: memory with the size of the model, time with its *square*, because a
# larger model wants more data too.
#
# The rest of this lecture derives the three lines from quantities that we measure.

# %%
# %%rank 0
memory_wall = sizes[np.searchsorted(16 * sizes, A100.memory_bytes)]
data_wall = sizes[np.argmax([20 * n > tokens_in_a_month(n) for n in sizes])]
step = sizes[1] / sizes[0] - 1  # the grid's resolution
display(
    claim(
        "one A100 holds the states of about 5 billion parameters", memory_wall, 80e9 / 16, rtol=step
    ),
    claim(
        "in a month it can give 20 tokens each to about 1.65 billion parameters",
        data_wall,
        (0.4 * 312e12 * MONTH_S / 120) ** 0.5,
        rtol=step,
    ),
    claim(
        "tokens per parameter that make the best of a budget of FLOPs",
        "about 20",
        status="cited",
        authority="Hoffmann et al., arXiv:2203.15556",
    ),
)

# %% [markdown]
# ## 1 · The memory wall
#
# What does a GPU hold while it trains? We do not guess, we look. `MemoryTracker` sees every tensor
# that is made in a step, and sorts it: parameters, gradients, the optimiser's state, and
# **activations**, which are what the forward pass keeps for the backward pass. Here is a small GPT
# that takes one step with AdamW ([arXiv 1711.05101](https://arxiv.org/abs/1711.05101)).

# %%
# %%rank 0
scale = 1 if quick else 4
config = GPTConfig(vocab_size=512, context=64, width=128 * scale, num_layers=4, num_heads=4)
model = GPT(config).to(device)
optimizer = torch.optim.AdamW(model.parameters())
num_parameters = sum(p.numel() for p in model.parameters())


def train_step(batch, tracker=None):
    """One step; the tracker notes what is there after each of its phases."""
    tokens = torch.randint(0, config.vocab_size, (batch, config.context), device=device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    phases = {
        "forward": lambda: None,
        "backward": loss.backward,
        "update": optimizer.step,
        "end": optimizer.zero_grad,
    }
    for phase, act in phases.items():
        act()
        if tracker is not None:
            tracker.mark(phase)


train_step(2)  # Adam makes its state in the first step
trackers = {}
for batch in (4, 8, 16):
    with MemoryTracker(model, optimizer) as trackers[batch]:
        train_step(batch, trackers[batch])

# %%
# %%rank 0
rows = trackers[16].rows
kinds = ("parameters", "optimizer", "gradients", "activations", "other")
with style():
    figure, ax = new_figure(8.5, 3.4)
    ax.stackplot(
        range(len(rows)),
        [[getattr(row, kind) / 1e6 for row in rows] for kind in kinds],
        colors=[COLOURS[kind] for kind in kinds],
        labels=kinds,
        linewidth=0,
        step="post",
    )
    top = 1.2 * trackers[16].peak.total / 1e6
    for index, row in enumerate(rows):
        if row.is_mark and row.after != "end":
            ax.axvline(index, color="#222222", linewidth=0.8, linestyle=":")
            at_end = row.after == "update"
            ax.text(
                index + (-8 if at_end else 8),
                top,
                f"{row.after} ends",
                va="top",
                fontsize=9,
                ha="right" if at_end else "left",
            )
    ax.set(
        xlabel="operations of one step, in order",
        ylabel="memory (MB)",
        ylim=(0, top),
        title=f"One step of a GPT with {num_parameters / 1e6:.1f} M parameters, 16 sequences",
        xlim=(0, len(rows)),
    )
    figure.legend(loc="outside right center", frameon=False, reverse=True)
figure

# %% [markdown]
# Three kinds are there all the time or come back in every step, whatever the batch: parameters,
# optimiser state, gradients. They are called the **model states**. The fourth kind, activations,
# grows in the forward pass, and the backward pass frees it.
#
# First the states. Adam keeps two averages per parameter. In fp32 that makes 4 + 4 + 8 bytes.

# %%
# %%rank 0
STATES = ("parameters", "gradients", "optimizer")
end_of = {row.after: row for row in trackers[16].marks}
per_parameter = {
    kind: max(getattr(row, kind) for row in trackers[16].marks) / num_parameters for kind in kinds
}
display(
    claim(
        "fp32 with Adam: bytes per parameter for parameter, gradient, state",
        [per_parameter[kind] for kind in STATES],
        [4.0, 4.0, 8.0],
        rtol=1e-3,
    ),
    claim(
        "activations grow in proportion to the batch: 16 sequences against 4",
        trackers[16].peak_of("activations") / trackers[4].peak_of("activations"),
        4.0,
        rtol=0.01,
    ),
    claim(
        "the states do not: parameters, gradients and optimiser, 16 sequences against 4",
        [getattr(end_of["backward"], k) / getattr(trackers[4].marks[1], k) for k in STATES],
        [1.0, 1.0, 1.0],
        rtol=1e-9,
    ),
    claim(
        "after the backward pass hardly any activation is left, as a share of the peak",
        end_of["backward"].activations / trackers[16].peak_of("activations"),
        ("<", 0.01),
    ),
)

# %% [markdown]
# ### In 16 bits
#
# Large models are trained in **mixed precision**: the GPU multiplies in 16 bits, which is many
# times faster than in fp32. A small update of a 16-bit weight would be rounded away (lecture 6), so
# the optimiser keeps its own copy of the parameters in fp32, the *master weights*.

# %%
# %%rank 0
bytes_guess = predict(
    "In fp32 it is 16 bytes per parameter. With 16-bit parameters and gradients, and a copy?",
    guess=None,
    unit="bytes",
)
bytes_guess

# %% [markdown]
# We build such an optimiser, and count what it keeps.

# %%
# %%rank 0
half = GPT(config).to(device=device, dtype=torch.bfloat16)
masters = [p.detach().float().clone() for p in half.parameters()]
adam = torch.optim.AdamW(masters)
tokens = torch.randint(0, config.vocab_size, (2, config.context), device=device)
F.cross_entropy(half(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
for master, parameter in zip(masters, half.parameters(), strict=True):
    master.grad = parameter.grad.float()  # comes and goes, one at a time in a good implementation
adam.step()


def num_bytes(tensors):
    """Bytes per parameter."""
    return sum(t.numel() * t.element_size() for t in tensors) / num_parameters


kept = {
    "parameters": num_bytes(half.parameters()),
    "gradients": num_bytes(p.grad for p in half.parameters()),
    "copy": num_bytes(masters),
    "optimizer": num_bytes(
        t for state in adam.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])
    ),
}
plot_stacked(
    {"bf16 with Adam": kept, "fp32 with Adam": {"parameters": 4, "gradients": 4, "optimizer": 8}},
    xlabel="bytes per parameter",
    title="Model states, measured (copy: the master weights)",
)

# %% [markdown]
# The sum is 16 again, in other parts. **16 bytes per parameter** is the number to remember. You
# will meet 12: that is what the optimiser keeps, without parameters and gradients. And you will
# meet 18: many programs, [Megatron-Core](https://github.com/NVIDIA/Megatron-LM) among them, add
# gradients up in fp32, which makes 2 + 4 + 12 (lecture 5 counts both).

# %%
# %%rank 0
ZERO = "Rajbhandari et al., arXiv:1910.02054, section 3.1"
states = cost.MIXED_ADAM
display(
    bytes_guess.reveal(sum(kept.values())),
    claim(
        "16-bit parameters and gradients: bytes per parameter",
        [kept["parameters"], kept["gradients"]],
        [2.0, 2.0],
        rtol=1e-9,
    ),
    claim(
        "what the optimiser keeps, bytes per parameter",
        kept["copy"] + kept["optimizer"],
        12.0,
        rtol=1e-9,
        authority=ZERO,
        status="corrected",
        refutes="a common lecture",
        said=8,
        why="it counts the two averages only",
    ),
    claim(
        "all model states of mixed precision, bytes per parameter",
        sum(kept.values()),
        16.0,
        rtol=1e-9,
        authority=ZERO,
        status="corrected",
        refutes="a common lecture",
        said=12,
        why="12 is the optimiser's part alone; parameters and gradients come on top",
    ),
    claim(
        "with gradients in fp32 instead, bytes per parameter",
        sum(kept.values()) - kept["gradients"] + num_bytes(master.grad for master in masters),
        18.0,
        rtol=1e-9,
    ),
    claim(
        "GPT-3, 175 billion parameters: model states in TB",
        175e9 * states.total / 1e12,
        2.8,
        rtol=1e-3,
        authority=ZERO,
        status="corrected",
        refutes="a common lecture",
        said=2.1,
        why="12 bytes per parameter instead of 16",
    ),
)

# %% [markdown]
# ### Which models fit?
#
# How many parameters has a model? A transformer of l layers and width h has about 12 l h² in its
# blocks: 4 h² for attention, 8 h² for the MLP, and a table of embeddings. So two numbers from a
# paper's table are enough.

# %%
# %%rank 0
gpt3 = cost.GPT3_175B  # 96 layers, width 12,288
known = {
    "BERT-Large": 340e6,
    "GPT-2 XL": 1.56e9,
    "Llama 2 7B": cost.LLAMA2_7B.num_parameters,
    "Llama 2 13B": cost.LLAMA2_13B.num_parameters,
    "Llama 2 70B": cost.LLAMA2_70B.num_parameters,
    "GPT-3": gpt3.num_parameters,
}
display(
    claim(
        "12 l h^2 gives nearly all of GPT-3",
        12 * 96 * 12288**2 / gpt3.num_parameters,
        1.0,
        rtol=0.01,
    ),
    claim(
        "width 12,288 and 96 layers: billions of parameters",
        gpt3.num_parameters / 1e9,
        174.6,
        rtol=1e-3,
        authority="Brown et al., arXiv:2005.14165, tables 2.1 (shape) and D.1 (174,600 million)",
    ),
    claim("a 70-billion model's weights alone, 16 bits: GB", 70e9 * 2 / cost.GB, 140.0, rtol=1e-9),
    claim("GPT-3's weights alone, 32 bits: GB", 175e9 * 4 / cost.GB, 700.0, rtol=1e-9),
)
figure = plot_bars(
    {name: 16 * n / 1e9 for name, n in known.items()},
    limit=80,
    limit_label="one A100",
    xlabel="model states (GB, logarithmic)",
    title="16 bytes per parameter",
    form="{:,.0f}",
    colours={name: PALETTE[5] if 16 * n > 80e9 else PALETTE[0] for name, n in known.items()},
)
figure.axes[0].set_xscale("log")
figure.axes[0].set_xlim(1, 10_000)
figure

# %% [markdown]
# ### And the activations
#
# They depend on the batch and on the length of the sequences. For one block of a GPT the counting
# rule of Korthikanti et al. ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198)) says which
# tensors are kept. Does it hold for our model? The rule counts 2 bytes per number, and our model
# has 4. Outside of the blocks it keeps 2 h numbers per token for the last norm, and one per word of
# the vocabulary for the loss.

# %%
# %%rank 0
shape = cost.Transformer.from_config(config)
by_rule = (
    2
    * config.num_layers
    * cost.activation_bytes_per_layer(
        model=shape, micro_batch=16, fused_attention=True, dropout=False
    )
)
outside = 4 * 16 * config.context * (2 * config.width + config.vocab_size)
seventy_b = (
    cost.activation_bytes_per_layer(
        model=cost.LLAMA2_70B, micro_batch=1, dropout=False, fused_attention=True
    )
    * 80
)
display(
    claim(
        "measured activations, in those of the rule and of the last norm and the loss",
        trackers[16].peak_of("activations") / (by_rule + outside),
        1.0,
        rtol=0.02,
    ),
    claim(
        "70B, a single sequence of 4,096 tokens: activations in GB, more than an A100 has",
        seventy_b / 1e9,
        (">", 80),
    ),
    claim(
        "recomputing all blocks costs a third more arithmetic: GPT-3, relative",
        gpt3.flops_per_token(recompute="full") / gpt3.flops_per_token(),
        4 / 3,
        rtol=0.01,
    ),
)

# %% [markdown]
# Some cures need no second GPU: a smaller micro-batch, *recomputing* activations in the backward
# pass instead of keeping them (33 % more arithmetic), an optimiser with a smaller state. Others do:
# **sharding** the states over ranks (ZeRO, lecture 5), or cutting up the model (lectures 7, 8).
#
# Try it. On which of these numbers of A100s does the 70B model fit, and with which stage? What does
# ZeRO stage 0, plain data parallelism, do for memory?


# %%
# %%rank 0
MODELS = {
    "GPT-2 XL": cost.megatron_gpt(width=1600, num_layers=48, num_heads=25),
    "Llama 2 7B": cost.LLAMA2_7B,
    "Llama 2 13B": cost.LLAMA2_13B,
    "Llama 2 70B": cost.LLAMA2_70B,
    "GPT-3 175B": cost.GPT3_175B,
}
PARTS = ("parameters", "gradients", "optimizer", "activations")


def in_gb(memory):
    """A bar: memory by what it is for."""
    named = {part: getattr(memory, part) / 1e9 for part in PARTS}
    return named | {"other": memory.working / 1e9}


def memory_of(name, num_gpus, zero_stage, micro_batch=1, recompute="none"):
    """Bytes on each GPU."""
    plan = cost.ParallelismConfig(dp=num_gpus, zero_stage=zero_stage if num_gpus > 1 else 0)
    return cost.memory_per_gpu(
        model=MODELS[name],
        parallelism=plan,
        micro_batch=micro_batch,
        recompute=recompute,
        fused_attention=True,
    )


def calculator(model="Llama 2 13B", zero_stage=0, micro_batch=1, recompute="none"):
    """Memory per GPU on 1 to 512 GPUs, by what it is for."""
    bars = {
        f"{n} GPU" + "s" * (n > 1): in_gb(memory_of(model, n, zero_stage, micro_batch, recompute))
        for n in (1, 8, 64, 512)
    }
    return plot_stacked(
        bars,
        xlabel="GB per GPU (dashed: what an A100 has)",
        limit=80,
        title=f"{model}, ZeRO stage {zero_stage}",
    )


explore(
    calculator,
    model=list(MODELS),
    zero_stage=[0, 1, 2, 3],
    micro_batch=(1, 16),
    recompute=["none", "full"],
    labels={
        "model": "model",
        "zero_stage": "ZeRO stage (0: copies)",
        "micro_batch": "sequences per GPU",
        "recompute": "recompute activations",
    },
    alt="Stacked bars of memory per GPU for 1, 8, 64 and 512 GPUs, with the limit of an A100",
)

# %%
# %%rank 0
claim(
    "an A100's memory in GB (there is one of 40, too)",
    A100.memory_bytes / cost.GB,
    80.0,
    rtol=1e-9,
    authority=SHEETS,
)

# %% [markdown]
# ## 2 · The time wall
#
# How long does training take? Three numbers say it: the operations of one token, the number of
# tokens, and the operations per second that the hardware really does.
#
# ### Six operations per parameter and token
#
# In a matrix product each weight is multiplied once and added once per token: 2 operations. The
# backward pass does it twice more, for the gradient of the input and for that of the weight. Hence
# 6 N per token, and **6 N D** for D tokens. Torch can count. We compare with our GPT.

# %%
# %%rank 0
small = GPTConfig(vocab_size=512, context=64, width=128, num_layers=2, num_heads=4)
counted_model = GPT(small)
with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
    tokens = torch.randint(0, 512, (2, 64))
    counted_model(tokens).sum().backward()
per_token = counter.get_total_flops() / tokens.numel()
shape = cost.Transformer.from_config(small)
weights = small.num_layers * shape.block_weights + 512 * 128  # those that are multiplied with
exact = {
    name: cost.Transformer.flops_per_token(m) / (6 * m.num_parameters) for name, m in MODELS.items()
}
display(
    claim(
        "FLOPs that torch counts per token, against 6 x weights + 12 l s h",
        per_token,
        6.0 * weights + 12 * small.num_layers * 64 * 128,
        rtol=1e-9,
    ),
    claim(
        "6 N is a good rule for large models: GPT-3, exact count / 6 N",
        exact["GPT-3 175B"],
        1.03,
        rtol=0.01,
    ),
    claim(
        "GPT-3: FLOPs for its 300 billion tokens",
        cost.training_flops(num_parameters=175e9, tokens=300e9),
        3.14e23,
        rtol=0.01,
        authority="Brown et al., arXiv:2005.14165, table D.1",
    ),
)

# %% [markdown]
# The second term, 12 l s h, is attention: it grows with the length s of the sequence. For long
# sequences 6 N is not enough (lecture 8).
#
# ### Peak, and what is reached
#
# A training run never reaches a data sheet's peak. The share of it that goes into the operations
# that the model needs is the **model FLOPs utilisation** (MFU,
# [arXiv 2204.02311](https://arxiv.org/abs/2204.02311)). Here the model needs 6 N D; the definition
# also counts attention, and neither counts recomputation. Good runs reach about 40 to 60 %. And
# what does one core of this machine do, or its GPU if it has one?

# %%
# %%rank 0
years_guess = predict(
    "How long does GPT-3's training take on one core, or on your GPU?", guess=None, unit="years"
)
years_guess

# %% [markdown]
# We time a large matrix product, and assume that training is as fast.

# %%
# %%rank 0
n = 1024 if device.type == "cpu" else 8192
a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
best = float("inf")
for _ in range(4):
    began = time.perf_counter()
    (a @ b)[0, 0].item()  # .item() waits for a GPU
    best = min(best, time.perf_counter() - began)
here = 2 * n**3 / best
years = (
    cost.training_seconds_from_flops(
        num_parameters=175e9, tokens=300e9, num_gpus=1, flops_per_s_per_gpu=here
    )
    / cost.YEAR_S
)
where = "one core" if device.type == "cpu" else "one GPU"
print(f"{where}, fp32: {here / 1e12:.3g} TFLOP/s")
display(
    years_guess.reveal(f"{years:,.0f}"),
    claim(
        "peak of an A100: TFLOP/s in bf16 and in TF32",
        [A100.peak(d) / 1e12 for d in ("bf16", "tf32")],
        [312.0, 156.0],
        rtol=1e-9,
        authority=SHEETS,
    ),
    claim(
        "and in fp32",
        A100.peak("fp32") / 1e12,
        19.5,
        rtol=1e-9,
        authority=SHEETS,
        status="corrected",
        refutes="a common table",
        said=156,
        why="156 is TF32, which keeps 10 bits of the mantissa of a product's inputs",
    ),
)

# %% [markdown]
# ### Estimates, checked
#
# Numbers of this kind are passed around, and many are wrong. Two tests find most errors:
#
# 1. **Is it above the peak?** No GPU trains faster than peak / 6N tokens per second.
# 2. **Is the division right?** Days = tokens / rate / 86,400.

# %%
# %%rank 0
top = {
    name: cost.peak_tokens_per_s(num_parameters=p, peak_flops_per_s=A100.peak())
    for name, p in (("GPT-3", 175e9), ("70B", 70e9))
}
wait_s = cost.training_seconds(tokens=300e9, tokens_per_s=1000)
gpt3_flops = 3.14e23
display(
    claim(
        "GPT-3 on one A100, at most: tokens/s",
        top["GPT-3"],
        297,
        rtol=0.002,
        status="corrected",
        refutes="a common lecture",
        said=1000,
        why="1000 tokens/s would be 3.4 times the GPU's peak",
    ),
    claim(
        "a 70B model on one A100, at most: tokens/s",
        top["70B"],
        743,
        rtol=0.002,
        status="corrected",
        refutes="a common lecture",
        said=100_000,
        why="135 times the peak",
    ),
    claim(
        "300 billion tokens at 1000 tokens/s: hours",
        wait_s / cost.HOUR_S,
        83_333,
        rtol=1e-3,
        status="corrected",
        refutes="a comment in a listing",
        said=20_833,
        why="the code beside it computes four times as much",
    ),
    claim(
        "300 billion tokens at 1000 tokens/s: days",
        wait_s / cost.DAY_S,
        3472,
        rtol=1e-3,
        status="corrected",
        refutes="a comment in a listing",
        said=868,
        why="868 days need 4000 tokens/s",
    ),
    claim(
        "2 trillion tokens at 100,000 tokens/s: days (the division is right, the rate is not)",
        cost.training_seconds(tokens=2e12, tokens_per_s=100e3) / cost.DAY_S,
        231,
        rtol=0.005,
    ),
    claim(
        "75,000 steps of 4 million tokens take as long: the batch cancels",
        75_000 * (4e6 / 1000) / wait_s,
        1.0,
        rtol=1e-9,
    ),
)

# %% [markdown]
# The same tests for the days and years of whole training runs:

# %%
# %%rank 0
gpt3_years = gpt3_flops / (0.5 * A100.peak()) / cost.YEAR_S
resnet_s = 90 * 1.281e6 * 3 * 8.2e9 / (0.2 * A100.peak())  # 90 epochs, 8.2 GFLOPs forward
bert_s = cost.training_seconds_from_flops(
    num_parameters=340e6,
    tokens=256 * (0.9e6 * 128 + 0.1e6 * 512),
    num_gpus=1,
    flops_per_s_per_gpu=0.4 * A100.peak(),
)
azure_days = gpt3_flops / (10_000 * 0.3 * cost.V100.peak("fp16")) / cost.DAY_S
display(
    claim(
        "GPT-3 on one A100 at half its peak: years",
        gpt3_years,
        63.8,
        rtol=0.002,
        status="corrected",
        refutes="a common lecture",
        said=355,
        why="355 years is a V100 at 28 TFLOP/s",
        authority="arXiv:2005.14165, table D.1: the FLOPs",
    ),
    claim(
        "GPT-3 on one V100 at 28 TFLOP/s: years", gpt3_flops / 28e12 / cost.YEAR_S, 355, rtol=0.002
    ),
    claim(
        "GPT-3 on 10,000 V100 at 30 % of peak: days",
        azure_days,
        9.7,
        rtol=0.01,
        status="corrected",
        refutes="a common lecture",
        said=96,
        why="96 days would be 3 % of the peak; and 10,000 is the "
        "size of the cluster, not of the job",
    ),
    claim(
        "ResNet-50 on ImageNet, one A100 at 20 % of peak: days",
        resnet_s / cost.DAY_S,
        0.53,
        rtol=0.01,
        status="corrected",
        refutes="a common lecture",
        said=30,
        why="30 days are a GPU of 2013; 1 to 2 days a "
        "V100; it depends on the GPU by a factor of 50",
    ),
    claim(
        "BERT-Large on one A100 at 40 %: days, so 'a week' is right",
        bert_s / cost.DAY_S,
        8.06,
        rtol=0.005,
        authority="Devlin et al., arXiv:1810.04805, appendix A.2: steps, batch and lengths",
    ),
)

# %% [markdown]
# And some figures cannot be checked by arithmetic, only looked up. Keep the source beside them.

# %%
# %%rank 0
display(
    claim(
        "BERT-Large was trained on 64 TPU chips (16 Cloud TPUs) in 4 days",
        "64 chips, 4 days",
        status="cited",
        authority="arXiv:1810.04805; it does not name the TPU's generation",
    ),
    claim(
        "GPT-4's number of parameters; 1.7 trillion is a rumour",
        "not published",
        status="cited",
        authority="OpenAI, arXiv:2303.08774",
    ),
    claim(
        "Llama 2 was trained on up to 2,000 A100; the 2,048 often quoted are LLaMA 1",
        "2,000",
        status="cited",
        authority="arXiv:2307.09288, section 2.2.1, and arXiv:2302.13971",
    ),
    claim(
        "ResNet-50 has 25.6 million parameters; BERT-Large 340 million, for 16 GB of text",
        "25.6 and 340 million",
        status="cited",
        authority="torchvision; arXiv:1810.04805; arXiv:1907.11692, section 3.2",
    ),
    claim(
        "ImageNet in one hour on 256 GPUs, batch 8,192, at about 90 % scaling efficiency",
        "1 hour",
        status="cited",
        authority="Goyal et al., arXiv:1706.02677",
    ),
)

# %% [markdown]
# ## 3 · The data wall
#
# Data makes trouble in three ways.
#
# **A model wants many tokens.** That was the second panel of the first picture: the tokens that one
# GPU gets through in a month. It is the time wall, counted in tokens.
#
# **The data has to be read.** A token of text takes 2 bytes (4 if the vocabulary is larger than
# 65,536), an image of ImageNet about 115,000. And a language model computes far more per byte.

# %%
# %%rank 0
feed_guess = predict(
    "8 A100: how many times the bytes per second of Llama 2 7B does ResNet-50 read?", guess=None
)
feed_guess

# %% [markdown]
# A rate of reading is samples per second × bytes per sample. The samples per second follow from
# FLOPs, as above.

# %%
# %%rank 0
images_per_s = 0.2 * A100.peak() / (3 * 8.2e9)  # ResNet-50 at 20 % of the peak
image_bytes = 147.9e9 / 1.281e6  # of a JPEG in ImageNet
plan = cost.recommend(model=cost.LLAMA2_7B, node=cost.DGX_A100, num_gpus=8, global_batch=1024)[0]
feeds = {
    "ResNet-50 on ImageNet": 8 * images_per_s * image_bytes,
    "Llama 2 7B on text": 2 * plan.step.tokens_per_s,
}
display(
    feed_guess.reveal(f"{feeds['ResNet-50 on ImageNet'] / feeds['Llama 2 7B on text']:,.0f}"),
    claim("images per second that one A100 gets through", images_per_s, 2537, rtol=0.01),
    claim("8 A100 with ResNet-50 read GB/s", feeds["ResNet-50 on ImageNet"] / 1e9, 2.34, rtol=0.01),
    claim(
        "and so many times what a language model reads on them",
        feeds["ResNet-50 on ImageNet"] / feeds["Llama 2 7B on text"],
        (">", 10_000),
    ),
    claim(
        "text that GPT-3's filters left of 45 TB of Common Crawl: GB; about 400 billion tokens, of "
        "which training drew a part, with other texts, until it had seen 300 billion",
        570,
        status="cited",
        authority="arXiv:2005.14165, section 2.2 and table 2.2; often quoted as 45 TB",
    ),
    claim(
        "ImageNet's training archive: GB",
        147.9,
        status="cited",
        authority="ILSVRC2012, as distributed; 1,281,167 images (arXiv:1409.0575)",
    ),
)
figure = plot_bars(
    {name: rate / 1e6 for name, rate in feeds.items()},
    xlabel="MB/s that 8 A100 read (logarithmic)",
    form="{:,.2f}",
    title="What has to be fed",
)
figure.axes[0].set_xscale("log")
figure.axes[0].set_xlim(0.01, 1e5)
figure

# %% [markdown]
# **A larger batch does not learn in proportion.** More GPUs look at more samples per step. While
# the batch is small, twice the batch means half the steps. Once the gradient is hardly noisy any
# more, further samples hardly help. The scale is the **critical batch size** (McCandlish et al.,
# [arXiv 1812.06162](https://arxiv.org/abs/1812.06162)):
#
# steps / fewest steps = 1 + B_crit / B  and  samples / fewest samples = 1 + B / B_crit.

# %%
# %%rank 0
batches = np.geomspace(1 / 64, 64, 25)
both = np.array(
    [cost.steps_and_examples(batch=b, critical_batch=1.0, min_steps=1.0) for b in batches]
)
double = [cost.steps_and_examples(batch=b, critical_batch=1.0, min_steps=1.0)[0] for b in (4, 8)]
display(
    claim(
        "twice the GPUs, from 4 to 8 critical batches: steps fall to a share of only",
        double[1] / double[0],
        0.9,
        rtol=1e-9,
    ),
)
plot_lines(
    batches,
    {"steps (time, if GPUs are free)": both[:, 0], "samples (the bill)": both[:, 1]},
    logx=True,
    logy=True,
    markers=False,
    xlabel="batch / critical batch",
    ylabel="relative to the fewest",
    title="Time is bought with samples",
)

# %% [markdown]
# So data parallelism has a limit that a faster network does not move. Lecture 4 measures it on a
# small model.
#
# ## 4 · The bill
#
# GPUs are rented by the hour, so the bill is **GPU hours × price**. If N GPUs took 1/N of the time,
# the bill would not depend on N, and you would always take as many as you can get. A cost example
# that is passed around shows it with two bills that are nearly equal:

# %%
# %%rank 0
year = cost.cost_dollars(gpu_hours=24 * 365, dollars_per_gpu_hour=3)
days_bill = cost.cost_dollars(gpu_hours=256 * 36, dollars_per_gpu_hour=3)
display(
    claim("one A100 for a year at 3 dollars per hour", year, 26_280, rtol=1e-9),
    claim("256 of them for 1.5 days", days_bill, 27_648, rtol=1e-9),
    claim("so the example assumes this scaling efficiency", year / days_bill, 0.95, rtol=0.002),
    claim(
        "but is it enough for 175 billion parameters? Years of one A100 that are needed",
        gpt3_years,
        63.8,
        rtol=0.002,
        status="corrected",
        refutes="a cost example",
        said=1,
        why="a year of one A100 is a sixtieth of the work, whoever shares it",
    ),
    claim(
        "rent of an A100 in dollars per hour; prices change",
        "2 to 4",
        status="cited",
        authority="list prices of clouds; Google Cloud, A100 40 GB on demand: 2.93",
    ),
)

# %% [markdown]
# Prices multiply quickly: 8 GPUs are 16 to 32 dollars per hour, 1,000 GPUs 2,000 to 4,000, and a
# week of those 336,000 to 672,000. That is why **utilisation**, the share of the paid time that is
# useful work, deserves an engineer's time. The bill goes with 1 / utilisation. From 60 % to 90 % it
# falls by a third. Some texts say by half: they take the *gain in throughput*, 50 %, for the
# saving.

# %%
# %%rank 0
week = [
    cost.cost_dollars(
        gpu_hours=cost.gpu_hours(seconds=7 * cost.DAY_S, num_gpus=1000), dollars_per_gpu_hour=price
    )
    for price in (2, 4)
]
saved = cost.cost_saving(utilization_before=0.6, utilization_after=0.9)
llama_hours = 1_720_320
llama_mfu = cost.training_flops(num_parameters=70e9, tokens=2e12) / (
    llama_hours * cost.HOUR_S * A100.peak()
)
LLAMA2 = "Touvron et al., arXiv:2307.09288, table 2: 1,720,320 A100 hours"
display(
    claim(
        "an hour of 8 GPUs and of 1,000, at 2 and at 4 dollars",
        [cost.cost_dollars(gpu_hours=n, dollars_per_gpu_hour=d) for n in (8, 1000) for d in (2, 4)],
        [16, 32, 2000, 4000],
        rtol=1e-9,
    ),
    claim("a week of 1,000 GPUs, dollars", week, [336_000, 672_000], rtol=1e-9),
    claim(
        "from 60 % to 90 % utilisation saves, in %",
        100 * saved,
        33.3,
        rtol=0.002,
        status="corrected",
        refutes="a cost example",
        said=50,
        why="cost goes with 1 / utilisation: 1 - 60/90",
    ),
    claim(
        "of 672 thousand dollars remain, in thousands",
        672 * (1 - saved),
        448,
        rtol=1e-3,
        status="corrected",
        refutes="a cost example",
        said=403,
        why="403 is neither a third nor a half off",
    ),
    claim(
        "Llama 2 70B: weeks on 2,000 A100",
        llama_hours / 2000 / 24 / 7,
        5.12,
        rtol=0.002,
        authority=LLAMA2,
    ),
    claim(
        "Llama 2 70B at 2 dollars per hour: million dollars",
        2 * llama_hours / 1e6,
        3.44,
        rtol=0.01,
        authority=LLAMA2,
    ),
    claim("Llama 2 70B: model FLOPs utilisation", llama_mfu, 0.43, rtol=0.02, authority=LLAMA2),
)

# %% [markdown]
# ### Faster costs more
#
# N GPUs rarely take 1/N of the time. `cost.recommend` looks for the fastest plan on N GPUs, with
# all communication in it (lecture 9 takes it apart). Here is Llama 2 on 2 trillion tokens with a
# batch of 4 million tokens, on 64 to 4,096 GPUs.

# %%
# %%rank 0
faster_guess = predict(
    "Llama 2 7B, DGX A100: how many times as fast are 4,096 GPUs as 64?", guess=None
)
faster_guess

# %% [markdown]
# Move the controls: at which N does a faster result start to cost much more?

# %%
# %%rank 0
NODES = {"DGX A100": cost.DGX_A100, "DGX H100": cost.DGX_H100}
LLAMAS = {"7B": cost.LLAMA2_7B, "13B": cost.LLAMA2_13B, "70B": cost.LLAMA2_70B}
counts = [64 * 2**k for k in range(7)]
cached = {}


def run_of(model, node, num_gpus):
    """(days, GPU hours) of 2 trillion tokens by the fastest plan that fits."""
    key = model, node, num_gpus
    if key not in cached:
        plan = cost.recommend(
            model=LLAMAS[model], node=NODES[node], num_gpus=num_gpus, global_batch=1024, limit=1
        )[0]
        seconds = cost.training_seconds(tokens=2e12, tokens_per_s=plan.step.tokens_per_s)
        hours = cost.gpu_hours(seconds=seconds, num_gpus=num_gpus)
        cached[key] = seconds / cost.DAY_S, hours
    return cached[key]


def time_and_money(model="7B", node="DGX A100", dollars_per_hour=2.0):
    """Days and dollars over the number of GPUs, one point per doubling."""
    runs = [run_of(model, node, n) for n in counts]
    million = [hours * dollars_per_hour / 1e6 for _, hours in runs]
    days = [d for d, _ in runs]
    ticks = [d * 10**k for k in range(5) for d in (1, 2, 5) if days[-1] < d * 10**k < days[0]]
    figure = plot_lines(
        days,
        {"": million},
        logx=True,
        ticks=ticks,
        xlabel="days (logarithmic)",
        ylabel="million dollars",
        title=f"Llama 2 {model} on {node}",
    )
    ax = figure.axes[0]
    for n, d, dollars in zip(counts, days, million, strict=True):
        ax.annotate(f"{n} GPUs", (d, dollars), (4, 5), textcoords="offset points", fontsize=8)
    ax.set(ylim=(0, 1.2 * max(million)), xlim=(days[-1] / 1.4, days[0] * 1.4))
    return figure


explore(
    time_and_money,
    model=list(LLAMAS),
    node=list(NODES),
    dollars_per_hour=(1.0, 6.0, 0.5),
    labels={"model": "Llama 2", "node": "machine", "dollars_per_hour": "dollars per GPU hour"},
    alt="The bill over the days that a training run takes, from 64 to 4096 GPUs",
)

# %%
# %%rank 0
slow, fast = run_of("7B", "DGX A100", 64), run_of("7B", "DGX A100", 4096)
published = {"7B": 184_320, "70B": 1_720_320}
share = [run_of(name, "DGX A100", 2000)[1] / hours for name, hours in published.items()]
display(
    faster_guess.reveal(slow[0] / fast[0]),
    claim("64 times the GPUs make it faster by less than 64", slow[0] / fast[0], ("<", 50)),
    claim(
        "GPU hours predicted for 2,000 A100, in published ones: 7B, 70B",
        share,
        [0.69, 0.72],
        rtol=0.01,
        authority="arXiv:2307.09288, table 2: the published hours",
    ),
)

# %% [markdown]
# Both predictions are about 30 % below the published hours: the model takes the fastest plan, and
# knows nothing of restarts, failures, evaluation and slow hosts. Leave room for them in a budget.
#
# ## 5 · Which parallelism moves which wall
#
# | cut up | name | moves | asks for | lecture |
# |---|---|---|---|---|
# | the batch | **data** parallelism | time, data | an all-reduce of the gradients per step | 3, 4 |
# | and the states | **sharded** data parallel (ZeRO) | memory, time | up to 1.5 × the bytes | 5 |
# | the layers' matrices | **tensor** parallelism | memory, time | all-reduces in every layer | 8 |
# | the stack of layers | **pipeline** parallelism | memory, time | stages that wait | 7 |
# | the sequence | **context** parallelism | activations | keys and values go round | 8 |
# | the experts | **expert** parallelism | memory | all-to-alls in every layer of experts | 12 |
#
# Often a table says "below 1 billion parameters take this, above 100 billion take that", or gives a
# ladder by the number of GPUs. Parameters alone do not decide, and neither do GPUs: memory per GPU,
# links and batch do. Lecture 9 searches for the best plan. Here is what each does for memory:

# %%
# %%rank 0
Plan = cost.ParallelismConfig
ways = {
    "one GPU": Plan(),
    "data, 8": Plan(dp=8),
    "data, 8, ZeRO-1": Plan(dp=8, zero_stage=1),
    "data, 8, ZeRO-3": Plan(dp=8, zero_stage=3),
    "tensor, 8": Plan(tp=8, sequence_parallel=True),
    "pipeline, 8": Plan(pp=8),
}
memory = {
    name: cost.memory_per_gpu(
        model=cost.LLAMA2_13B,
        parallelism=way,
        micro_batch=1,
        num_microbatches=8,
        fused_attention=True,
    )
    for name, way in ways.items()
}
display(
    claim(
        "tensor and pipeline parallelism leave about an eighth of the states",
        [
            memory[name].model_states / memory["one GPU"].model_states
            for name in ("tensor, 8", "pipeline, 8")
        ],
        [1 / 8, 1 / 8],
        rtol=0.1,
    ),
)
plot_stacked(
    {name: in_gb(m) for name, m in memory.items()},
    xlabel="GB per GPU (dashed: what an A100 has)",
    limit=80,
    title="Llama 2 13B on 8 GPUs",
)

# %% [markdown]
# ### Why data parallelism is right
#
# The loss of a batch is an average, so its gradient is the average of the samples' gradients, and
# an average can be computed in parts. (A layer that mixes samples, BatchNorm, is the exception:
# lecture 3.) **Both ranks** of this notebook now take half a batch each. Their averaged gradients
# must be those of the whole batch.

# %%
torch.manual_seed(seed)  # the same weights and the same data on both ranks
regression = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
x, y = torch.randn(12, 16, device=device), torch.randn(12, 1, device=device)


def gradient(first, last):
    """The gradient of the mean loss of some samples, as one long vector."""
    regression.zero_grad()
    F.mse_loss(regression(x[first:last]), y[first:last]).backward()
    return torch.cat([p.grad.flatten() for p in regression.parameters()])


whole = gradient(0, 12)
mine = gradient(6 * rank, 6 * rank + 6)
averaged = mine.clone()
dist.all_reduce(averaged)
averaged /= world_size
error = ((averaged - whole).norm() / whole.norm()).item()
alone = ((mine - whole).norm() / whole.norm()).item()
print(f"off by {alone:.2f} alone, by {error:.1e} after the all-reduce")

# %% [markdown]
# **Broken on purpose.** Now the ranks get 9 and 3 samples, as happens with the last batch of an
# epoch. Everything else stays as it was.

# %%
# %%rank 0
uneven_guess = predict("By how much is the averaged gradient wrong?", guess=None, unit="%")
uneven_guess

# %% [markdown]
# No error is raised. The second half of the cell computes the right mean.

# %%
bounds = [(0, 9), (9, 12)][rank]
share = gradient(*bounds)
wrong = share.clone()
dist.all_reduce(wrong)
wrong /= world_size  # the mean of means: 3 samples count as much as 9

right = share * (bounds[1] - bounds[0])  # the sum over this rank's samples
dist.all_reduce(right)
num_samples = torch.tensor(float(bounds[1] - bounds[0]), device=device)
dist.all_reduce(num_samples)
right /= num_samples
off = [((v - whole).norm() / whole.norm()).item() for v in (wrong, right)]

# %%
# %%rank 0
display(
    uneven_guess.reveal(100 * off[0]),
    claim(
        "equal halves: averaged gradients against those of the whole batch, relative error",
        error,
        ("<", 1e-5),
    ),
    claim("a single rank's gradient is another one", alone, (">", 0.05)),
    claim("unequal parts, averaged as if equal: relative error", off[0], (">", 0.05)),
    claim("weighted by the number of samples it is right again", off[1], ("<", 1e-5)),
)

# %% [markdown]
# ### Why it is not free
#
# Every step ends with an all-reduce of all gradients. With N GPUs, a computation of T seconds and
# C·T seconds of communication that nothing hides, N GPUs do the work of **N / (1 + C)**. That can
# be less than 1. We try it on the **emulated cluster**: the program runs for real on four
# processes, and only the time is virtual, so it is the same on every machine. Eight layers take 1
# ms forward and 2 ms backward each; then gradients are all-reduced, one layer after the other.

# %%
# %%rank 0
slow_guess = predict(
    "24 ms of compute, 2.1 MB of gradients, links of 10 MB/s: how many times as fast are 4 GPUs?",
    guess=None,
)
slow_guess

# %% [markdown]
# The ranks run once, and their trace is replayed on links of many speeds.

# %%
# %%rank 0
LAYERS, WIDTH = 8, 256  # 256 KiB of gradients per layer


def data_parallel_step():
    """Forward, backward, then an all-reduce per layer: data parallelism without any overlap."""
    layers = [emulate.Charged(nn.Linear(WIDTH, WIDTH, bias=False), i) for i in range(LAYERS)]
    net = nn.Sequential(*layers)
    net(torch.ones(4, WIDTH)).square().mean().backward()
    if dist.get_world_size() > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)


plan = emulate.ChargePlan((1e-3,) * LAYERS, (2e-3,) * LAYERS, b"any")
traces = {n: run_traced(data_parallel_step, n, plan=plan)[1] for n in (1, 2, 4)}


def machine(num_gpus, mb_per_s):
    """GPUs joined by links of some speed, without latency."""
    link = emulate.Link(bandwidth_bytes_per_s=1e6 * mb_per_s, latency_s=0)
    return replace(emulate.clusters.pcie_a100(num_gpus), intra_node=link, inter_node=link)


def speedup(num_gpus, mb_per_s):
    """Work per second against one GPU."""
    steps = {n: emulate.simulate(traces[n], machine(n, mb_per_s)).makespan_s for n in (1, num_gpus)}
    return num_gpus * steps[1] / steps[num_gpus]


# %%
# %%rank 0
speeds = np.geomspace(10, 100_000, 25).tolist()
lines = {f"{n} GPUs": [speedup(n, s) for s in speeds] for n in (2, 4)}
slowest = 4 * LAYERS * WIDTH**2 * 2 * 3 / 4 / 10e6  # seconds of communication at 10 MB/s
display(
    slow_guess.reveal(speedup(4, 10)),
    claim(
        "speedup of 4 emulated GPUs at 10 MB/s is N / (1 + C)",
        speedup(4, 10),
        cost.speedup_with_communication(num_gpus=4, compute_s=0.024, communication_s=slowest),
        rtol=1e-6,
    ),
    claim("four GPUs on a slow link are slower than one", speedup(4, 10), ("<", 1.0)),
    claim("and on a fast one nearly four times as fast", speedup(4, 100_000), (">", 3.9)),
)
plot_lines(
    speeds,
    lines,
    ideal={"one GPU": [1.0] * len(speeds)},
    logx=True,
    markers=False,
    xlabel="bandwidth of the links (MB/s)",
    ylabel="speedup",
    title="The same program, from slower than one GPU to four times as fast",
)


# %% [markdown]
# One step of it as a timeline, at the speed that you choose:


# %%
# %%rank 0
def watch(num_gpus=4, mb_per_s=300):
    """Timeline of one step: computing, communicating, idle."""
    timeline = emulate.simulate(traces[num_gpus], machine(num_gpus, mb_per_s))
    return plot_timeline(
        timeline,
        title=f"{num_gpus} GPUs, {mb_per_s} MB/s: speedup {speedup(num_gpus, mb_per_s):.2f}",
    )


explore(
    watch,
    num_gpus=[1, 2, 4],
    mb_per_s=[10, 30, 100, 300, 1000, 3000, 10_000],
    labels={"num_gpus": "GPUs", "mb_per_s": "bandwidth of the links (MB/s)"},
    alt="Timeline of one data-parallel step, per rank: compute, communication, idle",
)

# %% [markdown]
# All communication comes after all computation. It need not: the last layer's gradient is ready
# long before the first one's. Sending it at once hides communication behind the backward pass, as
# far as that lasts. Lecture 3 does it.
#
# ### An epoch on this machine
#
# Now on the real clock, and this is what the first lab is for: the same epoch on one rank and on
# two. It has 16,384 samples in batches of 1,024, of which two ranks take 512 each. First, is it the
# same training? Each rank of this notebook trains for an epoch alone, and then both together.


# %% tags=["open"]
def make_epoch(group, batch_size: int):
    """A model on each rank of the group; the function returned trains it for one epoch."""
    here = devices.choose_device()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1)).to(here)
    ddp = nn.parallel.DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x, y = torch.randn(16384, 256, device=here), torch.randn(16384, 1, device=here)
    first, batch = batch_size * dist.get_rank(group), batch_size * dist.get_world_size(group)

    def epoch() -> torch.Tensor:
        for at in range(first, len(x), batch):
            optimizer.zero_grad()
            F.mse_loss(ddp(x[at : at + batch_size]), y[at : at + batch_size]).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    return epoch


by_themselves = [dist.new_group([r]) for r in range(world_size)]
one_rank = make_epoch(by_themselves[rank], 1024)()
two_ranks = make_epoch(dist.group.WORLD, 512)()
apart = ((two_ranks - one_rank).abs().max() / one_rank.abs().max()).item()

# %%
# %%rank 0
epoch_guess = predict("How many times as fast are two ranks of this machine?", guess=None)
display(
    claim("an epoch on two ranks against one: parameters, relative error", apart, ("<", 1e-4)),
    epoch_guess,
)

# %% [markdown]
# `measure_scaling` starts fresh processes and times the epoch in turn on one rank and on two, seven
# times. A machine that is busy with something else slows both down.

# %% tags=["open"]
# %%rank 0
epochs = measure_scaling(make_epoch, [1, 2], mode="strong", batch_size=1024, rounds=7, warmup=1)

# %%
# %%rank 0
one, two = epochs
print(
    f"one rank {one.step_s:.2f} s (half of the rounds {one.low_s:.2f} to {one.high_s:.2f}), "
    f"two ranks {two.step_s:.2f} s ({two.low_s:.2f} to {two.high_s:.2f}): "
    f"{two.speedup:.2f} times as fast ({two.speedup_low:.2f} to {two.speedup_high:.2f})"
)
display(epoch_guess.reveal(two.speedup))
plot_bars(
    {"one rank": one.step_s, "two ranks": two.step_s},
    xlabel="seconds per epoch, median of 7",
    form="{:.2f}",
    title="The same epoch",
)

# %% [markdown]
# If the numbers in brackets lie far apart, your machine was busy: close what you can and run it
# again. Lecture 11 makes a report of such a measurement. Two ranks on one core (two hardware
# threads of a core are one), or a model so small that C is large, are no faster than one.
#
# ## Now you
#
# Two walls decide how many GPUs a job needs: its states must fit, and it must be over in time.
# Write a function that gives the **smallest number of A100s** for a model, a number of tokens and a
# number of days: states of 16 bytes per parameter, sharded evenly, in 80 GB per GPU (leave
# activations out), and 6 N D operations at 40 % of 312 TFLOP/s. The cell after it tries your
# function on six jobs: they must fit, and with one GPU less they must not.


# %%
# %%rank 0
def fewest_gpus(num_parameters: float, tokens: float, days: float) -> int | None:
    """Your turn. math.ceil rounds up; 80e9 bytes and 312e12 operations per second are given."""
    return None


# %%
# %%rank 0
JOBS = [  # parameters, tokens, days
    (1e9, 20e9, 30),
    (7e9, 2e12, 28),
    (70e9, 2e12, 90),
    (70e9, 1e9, 365),
    (175e9, 300e9, 30),
    (640e9, 1e9, 365),
]


def is_enough(num_gpus: int, num_parameters: float, tokens: float, days: float) -> bool:
    seconds = cost.training_seconds_from_flops(
        num_parameters=num_parameters,
        tokens=tokens,
        num_gpus=num_gpus,
        flops_per_s_per_gpu=0.4 * A100.peak(),
    )
    fits = states.total * num_parameters / num_gpus <= A100.memory_bytes
    return fits and seconds <= days * cost.DAY_S


def check(answer) -> str:
    for job in JOBS:
        num_gpus = answer(*job)
        if num_gpus is None:
            return "Not written yet."
        if not isinstance(num_gpus, int | float | np.number) or not 1 <= num_gpus < math.inf:
            return f"{job}: {num_gpus!r} is no number of GPUs."
        if num_gpus != int(num_gpus):
            return f"{job}: {num_gpus:.2f} GPUs? A GPU cannot be halved."
        if not is_enough(num_gpus, *job):
            return f"{job}: {num_gpus} GPUs are not enough."
        if num_gpus > 1 and is_enough(num_gpus - 1, *job):
            return f"{job}: {num_gpus} GPUs are more than needed."
    return f"Right, for all {len(JOBS)} jobs."


def for_memory(num_parameters, tokens, days):
    return math.ceil(16 * num_parameters / 80e9)


def for_time(num_parameters, tokens, days):
    return math.ceil(6 * num_parameters * tokens / (0.4 * 312e12 * 86_400 * days))


print(check(fewest_gpus))
display(
    claim(
        "the larger of the two numbers is the answer",
        check(lambda *job: max(for_memory(*job), for_time(*job))),
        "Right, for all 6 jobs.",
    ),
    claim("memory alone", check(for_memory), lambda got: "not enough" in got),
    claim(
        "not rounded up",
        check(lambda n, d, t: max(1, 16 * n / 80e9, 6 * n * d / (0.4 * 312e12 * 86_400 * t))),
        lambda got: "halved" in got,
    ),
    claim("time alone", check(for_time), lambda got: "not enough" in got),
    claim(
        "rounded to the nearest number",
        check(lambda *job: max(1, round(6 * job[0] * job[1] / (0.4 * 312e12 * 86_400 * job[2])))),
        lambda got: got.startswith("(7000000000.0") and "not enough" in got,
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `for_memory = math.ceil(16 * num_parameters / 80e9)`,
# `for_time = math.ceil(6 * num_parameters * tokens / (0.4 * 312e12 * 86_400 * days))`, and then
# `max(for_memory, for_time)`. The wall that asks for more GPUs decides: memory for a large model on
# few tokens, time for the other jobs here.
#
# </details>
#
# ## Summary
#
# - **Memory**: 16 bytes per parameter for the states with Adam, in fp32 and in mixed precision (18
#   with fp32 gradients), and activations in proportion to the batch. One 80 GB GPU holds the states
#   of 5 billion parameters.
# - **Time**: 6 N D operations at 40 to 60 % of the peak. With 20 tokens per parameter it grows with
#   the square of the model.
# - **Data**: tokens to get through, bytes to read, and a batch beyond which more samples per step
#   hardly help.
# - **Bill**: GPU hours × price. It goes with 1 / utilisation: 60 → 90 % saves a third.
# - Copies (data parallelism) move the time wall, not the memory wall. Sharding and cutting up the
#   model move both. All of them pay in communication: if nothing hides it, N GPUs do the work of
#   N / (1 + C).
#
# ## Questions
#
# **1.** Does a model of 3 billion parameters train on one A100 with 80 GB?
#
# <details><summary>Answer</summary>
#
# States: 3 · 16 = 48 GB. About 30 GB remain for activations. So yes, with a small micro-batch or
# with recomputation. On the 40 GB version: no.
#
# </details>
#
# **2.** A blog says: "We trained our 13B model on 8 A100 in two days, on 300 billion tokens." Can
# that be?
#
# <details><summary>Answer</summary>
#
# 6 · 13e9 · 300e9 = 2.3e22 operations. Eight A100 at their very peak do 8 · 312e12 · 172,800 =
# 4.3e20 in two days. It is off by a factor of 54, and by over 100 at a realistic 45 %.
#
# </details>
#
# **3.** Your job costs 90,000 dollars at 30 % MFU. You reach 45 %. What does it cost now?
#
# <details><summary>Answer</summary>
#
# 90,000 · 30 / 45 = 60,000 dollars. A third less, for 50 % more throughput.
#
# </details>
#
# **4.** You double the GPUs and the batch, and each step takes as long as before. Is training twice
# as fast?
#
# <details><summary>Answer</summary>
#
# Per sample yes. To a given loss only while the batch is well below the critical one. Above it the
# number of steps hardly falls, and you pay nearly twice for the same progress.
#
# </details>
#
# **5.** Which wall does a recommender with tables of 2 TB and a tiny network on top hit?
#
# <details><summary>Answer</summary>
#
# Memory, and nearly only that: the tables do not fit, while the arithmetic per sample is small. It
# needs its tables cut up, and hardly any of the rest.
#
# </details>
#
# **6.** 45 ms of computation, and 15 ms of gradients over the network, nothing hidden. What do 16
# GPUs deliver?
#
# <details><summary>Answer</summary>
#
# C = 15 / 45 = 1/3, so 16 / (4/3) = 12 GPUs' worth, 75 %. If two thirds of the traffic hid behind
# the backward pass: C = 1/9 and 14.4.
#
# </details>
#
# ## The lab
#
# In [**lab1_ddp**](../labs/lab1_ddp/lab1_ddp.ipynb) you make a training loop run on many ranks,
# from averaged gradients to overlap. Before, lecture 2 shows what the ranks say to each other.
#
# ## Read
#
# - S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
#   [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): where the 16 bytes come from, and how to
#   shard them.
# - J. Kaplan et al., "Scaling Laws for Neural Language Models",
#   [arXiv 2001.08361](https://arxiv.org/abs/2001.08361): 6 N D.
# - J. Hoffmann et al., "Training Compute-Optimal Large Language Models",
#   [arXiv 2203.15556](https://arxiv.org/abs/2203.15556): how many tokens a model wants.
# - V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): activations, counted.
# - S. McCandlish et al., "An Empirical Model of Large-Batch Training",
#   [arXiv 1812.06162](https://arxiv.org/abs/1812.06162): the critical batch size.
# - A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways",
#   [arXiv 2204.02311](https://arxiv.org/abs/2204.02311): MFU, in its appendix B.
# - D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM", [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): the same arithmetic for
#   3,072 GPUs, and what was measured.
