# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 2
#     language: python
#     name: torchrun-2
# ---

# %% [markdown]
# # 6 · Mixed precision
#
# A number in 32 bits has more digits than most of training needs. In 16 bits it takes half of the
# memory, a message of such numbers takes half of the network, and tensor cores multiply it many
# times faster. But 16 bits run out: of digits, or of small numbers. **Mixed precision** uses 16
# bits where they are enough and 32 where they are not. This lecture is about telling them
# apart.
#
# After it you can
#
# - read a floating-point format, and say what it can and cannot hold;
# - show which gradients underflow in fp16, and what loss scaling does about it;
# - follow a GradScaler step by step, and put clipping, accumulation and DDP in the right places;
# - say why weights are kept in fp32, and what happens otherwise;
# - choose between fp16, bf16 and fp32;
# - scale numbers for fp8 by tensor, by tile and by block, and say what stays in fp32;
# - compute what mixed precision saves, and recognise the usual wrong figures.
#
# It takes about 80 minutes. Nothing in it needs a GPU: formats are the same everywhere, and
# autocast runs on a CPU too (though few CPUs are fast at it). Cells with `%%rank 0` run on one
# rank; section 5 uses both. Six times the lecture asks for your guess before it measures. Write it
# in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: longer trainings

# %%
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist.data import make_tokens
from minidist.device import choose_backend, choose_device
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.precision import (
    FORMATS,
    FP8_RECIPES,
    BlockScaling,
    DelayedScale,
    Fp8Linear,
    GradScaler,
    MasterWeights,
    accumulation_error,
    autocast_step,
    fp8_product,
    matmul_error,
    quantize,
    round_to,
    spacing,
    underflow_share,
    update_survives,
    use_fp8,
)

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = choose_device()  # a GPU of its own where there are enough, else the CPU
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(choose_backend(), timeout=timedelta(seconds=60))

# %%
# %%rank 0
# %matplotlib inline
import copy
import math
import warnings

import numpy as np
from IPython.display import display

from minidist import cost
from minidist.claims import claim
from minidist.plots import (
    COLOURS,
    PALETTE,
    new_figure,
    plot_bars,
    plot_formats,
    plot_lines,
    plot_spacing,
    plot_stacked,
)
from minidist.widgets import explore, predict

# %% [markdown]
# One picture first. A small GPT is trained for a while in fp32, and we look at the gradients that
# flow back through its layers in one step. How large are they, and where does fp16 end?

# %%
# %%rank 0
config = GPTConfig(vocab_size=64, context=32, width=32, num_layers=3, num_heads=4)
tokens, targets = (t.to(device) for t in make_tokens(64, 32, 64, seed=1))


def make_gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config).to(device)


def flowing_gradients(model) -> torch.Tensor:
    """All elements of the gradients with respect to the outputs of linear layers."""
    found, handles = [], []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            handles.append(
                layer.register_full_backward_hook(
                    lambda m, gi, go: found.append(go[0].detach().flatten().cpu())
                )
            )
    lm_loss(model(tokens), targets).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return torch.cat(found)


trained = make_gpt()
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
for step in range(60 if quick else 300):
    part = slice(16 * (step % 4), 16 * (step % 4) + 16)
    optimizer.zero_grad()
    loss = lm_loss(trained(tokens[part]), targets[part])
    loss.backward()
    optimizer.step()
flowing = flowing_gradients(trained)
print(f"loss {loss:.2f}; {len(flowing):,} gradient elements")


# %%
# %%rank 0
def gradient_histogram(power: int = 0):
    """Histogram of gradients times 2**power on a log axis, with the limits of fp16."""
    figure, ax = new_figure(8.0, 3.2)
    values = flowing[flowing != 0].abs().double() * 2.0**power
    fp16 = FORMATS["fp16"]
    zero, subnormal = underflow_share(flowing, fp16, 2.0**power)
    lost = float((values > fp16.max).double().mean())
    bins = np.linspace(-40, 24, 129)
    ax.hist(np.log2(values.numpy()), bins, color=COLOURS["compute"])
    ax.axvspan(-40, -25, color=PALETTE[5], alpha=0.25, zorder=0)
    ax.axvspan(-25, -14, color=PALETTE[1], alpha=0.25, zorder=0)
    ax.axvspan(16, 24, color=PALETTE[5], alpha=0.25, zorder=0)
    for x, text in ((-32.5, "zero"), (-19.5, "fewer digits"), (1, "normal fp16"), (20, "inf")):
        ax.text(x, 1.0, text, ha="center", va="bottom", transform=ax.get_xaxis_transform())
    ax.set(
        xlim=(-40, 24),
        xlabel=f"log2 |gradient x 2^{power}|   (zero: {100 * zero:.1f} %, "
        f"fewer digits: {100 * subnormal:.1f} %, inf: {100 * lost:.1f} %)",
        ylabel="elements",
    )
    return figure


gradient_histogram()

# %% [markdown]
# Part of the gradients would become zero in fp16, and most of the others lose digits. Half of the
# format, everything to the right, is empty. Keep this picture in mind; the slider that moves the
# histogram comes in section 2.
#
# ## 1 · Formats
#
# A floating-point number is sign × 1.mantissa × 2^exponent. Exponent bits decide the **range**,
# mantissa bits the **precision**. 16 bits have to be divided between the two.

# %%
# %%rank 0
plot_formats([FORMATS[n] for n in ("fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")])

# %% [markdown]
# - **fp16** has a fairly long mantissa and a short exponent: from 6·10⁻⁸ to 65,504.
# - **bf16** is fp32 with 16 mantissa bits cut off: the range of fp32, two to three decimal digits.
# - **tf32** is no storage format. Tensor cores round fp32 inputs to it.
# - **fp8** comes as e4m3 for weights and activations and e5m2 for gradients (DeepSeek-V3 takes e4m3
#   for all of them). Its range is so small that numbers are scaled before they are rounded. One
#   scale per tensor was the beginning ([arXiv 2209.05433](https://arxiv.org/abs/2209.05433)), and
#   one outlier then pushes all the others towards zero. So scales became local: DeepSeek-V3 has one
#   per 1 × 128 values of activations and 128 × 128 of weights
#   ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437)), MXFP8 one per 32 values
#   ([arXiv 2310.10537](https://arxiv.org/abs/2310.10537)), and NVFP4
#   ([arXiv 2509.25149](https://arxiv.org/abs/2509.25149)), with four bits, one per 16.
#
# One large number among 65,536 ordinary ones shows why:


# %%
# %%rank 0
def share_of_zeros(values: torch.Tensor, block: int) -> float:
    """How many of the values fp8 (e4m3) stores as 0, with one scale per block."""
    blocks = values.view(-1, block)
    scaled = blocks * (448 / blocks.abs().amax(dim=1, keepdim=True))  # 448 is e4m3's largest
    return (scaled.to(torch.float8_e4m3fn).float() == 0).float().mean().item()


ordinary = torch.randn(65_536, generator=torch.Generator().manual_seed(0))
ordinary[0] = 1e6
lost = {block: share_of_zeros(ordinary, block) for block in (32, 128, len(ordinary))}
print({f"a scale per {block}": f"{100 * share:.2f} % are 0" for block, share in lost.items()})
display(
    claim("one scale per tensor: share of the numbers that become 0", lost[65_536], (">", 0.9)),
    claim(
        "one scale per 32: only the neighbours of the large one",
        lost[32],
        31 / 65_536,
        rtol=0.15,
    ),
    claim(
        "one scale per 128, against 32: times as many",
        lost[128] / lost[32],
        127 / 31,
        rtol=0.15,
    ),
)

# %% [markdown]
# Below the smallest normal number the leading 1 is dropped: **subnormal** numbers. They do not
# vanish at once, but have fewer and fewer digits. The curves show the gap to the next number,
# relative to the number's size: flat where numbers are normal, rising to the left where they are
# subnormal.

# %%
# %%rank 0
figure = plot_spacing([FORMATS[name] for name in ("fp32", "fp16", "bf16", "fp8_e4m3")])
figure.axes[0].set_xlim(1e-45, 1e39)
figure

# %% [markdown]
# A well-known tutorial writes: "fp16 range [6e-5, 65504]; gradients below 6e-5 underflow to zero",
# and takes 0.0001 as an example of a gradient that is lost. Let us ask the hardware's own
# conversion.


# %%
# %%rank 0
def as_fp16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).to(torch.float16).double().item()


smallest = min(x for x in (2.0**-k for k in range(40)) if as_fp16(x))
infos = {name: torch.finfo(f.dtype) for name, f in FORMATS.items() if f.dtype is not None}
common = "a common tutorial"
display(
    claim(
        "largest number of each format against torch",
        [FORMATS[n].max for n in infos],
        [i.max for i in infos.values()],
        rtol=1e-12,
    ),
    claim(
        "smallest normal number of each format",
        [FORMATS[n].smallest_normal for n in infos],
        [i.smallest_normal for i in infos.values()],
        rtol=1e-12,
    ),
    claim("largest fp16", float(torch.finfo(torch.float16).max), 65504.0, exact=True),
    claim("smallest normal fp16", torch.finfo(torch.float16).smallest_normal, 6.1e-5, rtol=0.02),
    claim(
        "smallest fp16 above zero",
        smallest,
        5.96e-8,
        rtol=0.001,
        status="corrected",
        said=6e-5,
        refutes=common,
        why="below 6e-5 numbers are subnormal: fewer digits, not zero",
    ),
    claim(
        "0.0001 in fp16",
        as_fp16(1e-4),
        1e-4,
        rtol=0.001,
        status="corrected",
        said=0.0,
        refutes=common,
        why="it is even a normal number; the rounding error is 0.02 %",
    ),
    claim(
        "0.0001 x 1024 in fp16, divided by 1024 again",
        as_fp16(1e-4 * 1024) / 1024,
        1e-4,
        rtol=0.001,
    ),
    claim("what does vanish: 2e-8", as_fp16(2e-8), 0.0, exact=True),
)

# %% [markdown]
# `minidist.precision.round_to` rounds to any of the formats on any hardware. It must agree with
# torch's casts in every bit, ties, subnormals and infinities included.

# %%
# %%rank 0
generator = torch.Generator().manual_seed(0)
numbers = torch.randn(200_000, generator=generator) * 2.0 ** torch.randint(
    -30, 20, (200_000,), generator=generator
)
agree = [
    torch.equal(round_to(numbers, FORMATS[n]), numbers.to(FORMATS[n].dtype).float())
    for n in ("fp16", "bf16", "fp8_e5m2")
]
display(
    claim("200,000 numbers rounded as torch rounds them: fp16, bf16, fp8 e5m2", all(agree), True),
    claim(
        "gap above 1 in fp16 and bf16",
        [spacing(torch.tensor(1.0), FORMATS[n]).item() for n in ("fp16", "bf16")],
        [2.0**-10, 2.0**-7],
        exact=True,
    ),
    claim(
        "decimal digits of fp16 and bf16",
        [-math.log10(FORMATS[n].epsilon / 2) for n in ("fp16", "bf16")],
        [3.3, 2.4],
        rtol=0.02,
    ),
)


# %%
# %%rank 0
def number_explorer(exponent: float = -5.0, digits: float = 3.1416):
    """Relative rounding error of digits x 10**exponent in each format; 1 means it became zero."""
    value = torch.tensor(digits * 10.0**exponent, dtype=torch.float64)
    bars = {}
    for name, fmt in FORMATS.items():
        rounded = round_to(value, fmt)
        wrong = float((rounded - value).abs() / value)
        shown = "inf" if math.isinf(rounded) else f"{float(rounded):.5g}"
        bars[f"{name}: {shown}"] = min(max(wrong, 1e-9), 1.0)
    figure = plot_bars(
        bars,
        xlabel="relative error (1: lost)",
        form="{:.1g}",
        title=f"{digits:.4f} x 10^{exponent:.1f}",
    )
    figure.axes[0].set_xscale("log")
    figure.axes[0].set_xlim(1e-9, 30)
    return figure


explore(
    number_explorer,
    exponent=(-12.0, 8.0, 0.5),
    digits=(1.0, 9.9, 0.1),
    labels={"exponent": "exponent of ten", "digits": "leading digits"},
    alt="Bars: relative error of a number in fp32, tf32, fp16, bf16 and two fp8 formats",
)

# %% [markdown]
# ## 2 · Underflow, and loss scaling
#
# Why are gradients so small? The loss is a *mean* over tokens: with 2,048 tokens the gradient of
# each token's logits starts with a factor of 1/2048. And the better the model, the smaller they
# get.
#
# Multiply the **loss** by a scale S. The chain rule multiplies every gradient by S. Divide them by
# S, in fp32, before the optimizer sees them. Mathematically nothing happens. In fp16 the histogram
# moves to the right, into the range ([arXiv 1710.03740](https://arxiv.org/abs/1710.03740)). Move it
# yourself: how far can you go before something becomes inf?

# %%
# %%rank 0
explore(
    gradient_histogram,
    power=(0, 28),
    labels={"power": "loss scale, as a power of 2"},
    alt="Histogram of gradients on a log axis; shaded: zero, subnormal, inf in fp16",
)

# %%
# %%rank 0
powers = list(range(0, 31, 2))
fp16 = FORMATS["fp16"]
shares = {p: underflow_share(flowing, fp16, 2.0**p) for p in powers}
overflow = {p: float((flowing.abs().double() * 2.0**p > fp16.max).double().mean()) for p in powers}
display(
    claim(
        "share of these gradients that become zero in fp16 without scaling",
        shares[0][0],
        (">", 0.02),
    ),
    claim("... zero or with fewer digits", sum(shares[0]), (">", 0.5)),
    claim("with a scale of 2^16: zero", shares[16][0], ("<", 0.01)),
    claim("at 2^30 some are inf", overflow[30], (">", 0.0)),
    claim(
        "in bf16 without scaling: zero or with fewer digits",
        sum(underflow_share(flowing, FORMATS["bf16"])),
        0.0,
        atol=1e-12,
    ),
)
plot_lines(
    powers,
    {
        "zero": [100 * z for z, _ in shares.values()],
        "subnormal": [100 * s for _, s in shares.values()],
        "inf": [100 * o for o in overflow.values()],
    },
    xlabel="loss scale (power of 2)",
    ylabel="share of the gradients (%)",
    title="Between underflow and overflow lies a wide valley",
)

# %% [markdown]
# Does it matter for the *weights'* gradients? We run autocast in fp16 with a scale of 1/1000, which
# makes gradients as small as those of a batch a thousand times as large, and with 2¹⁶; then in bf16
# without a scale and with 2¹⁶. The reference is fp32.


# %%
# %%rank 0
def weight_gradient(dtype, scale: float = 1.0) -> torch.Tensor:
    trained.zero_grad()
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        loss = lm_loss(trained(tokens[:16]), targets[:16])
    (loss * scale).backward()
    return torch.cat([p.grad.flatten().double() / scale for p in trained.parameters()]).cpu()


reference = weight_gradient(None)
wrong = {
    name: float((weight_gradient(*how) - reference).norm() / reference.norm())
    for name, how in {
        "fp16": (torch.float16, 1e-3),  # as for a batch a thousand times as large
        "fp16, scale 2^16": (torch.float16, 2.0**16),
        "bf16": (torch.bfloat16, 1.0),
        "bf16, scale 2^16": (torch.bfloat16, 2.0**16),
    }.items()
}
print({name: f"{value:.1e}" for name, value in wrong.items()})
display(
    claim(
        "fp16: error with tiny gradients / error with scale 2^16",
        wrong["fp16"] / wrong["fp16, scale 2^16"],
        (">", 3.0),
    ),
    claim(
        "bf16: scaling changes the error by a factor of",
        wrong["bf16, scale 2^16"] / wrong["bf16"],
        1.0,
        rtol=0.05,
    ),
    claim(
        "where range is no problem, fp16 is more exact than bf16 by a factor of",
        wrong["bf16"] / wrong["fp16, scale 2^16"],
        (">", 2.0),
    ),
)

# %% [markdown]
# fp16 has the digits, bf16 has the range. With bf16 you need no loss scaling.
#
# ## 3 · The GradScaler, watched
#
# Which scale? Gradients change during training, so it is found by trying.
# **[GradScaler](https://docs.pytorch.org/docs/stable/amp.html)** starts high (2¹⁶). If any gradient
# is inf or NaN, the step is *skipped* and the scale halved. After 2,000 good steps in a row it is
# doubled. So a skipped step now and then is normal.
#
# | call | what it does |
# |---|---|
# | `scaler.scale(loss).backward()` | multiplies the loss |
# | `scaler.unscale_(optimizer)` | divides gradients, looks for inf and NaN; before clipping |
# | `scaler.step(optimizer)` | unscales if needed; steps, unless something was not finite |
# | `scaler.update()` | halves or grows the scale |
#
# Below, a toy whose gradient is 1 most of the time, and 10³⁸ at steps 12, 13 and 40, so that it
# overflows even in fp32 when it is multiplied by the scale. The scale may grow every 8 steps.


# %%
# %%rank 0
def watch(scaler, steps: int = 64):
    """Scale and weight after each step; the gradient explodes at three of them."""
    w = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=0.01)
    scales, weights = [], []
    for step in range(steps):
        optimizer.zero_grad()
        size = 1e38 if step in (12, 13, 40) else 1.0
        scaler.scale(-(w * size).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(w.item())
    return scales, weights


# One weight, on the CPU also where there are GPUs.
scales, weights = watch(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8))

figure, ax = new_figure(7.5, 3.0)
ax.step(range(64), np.log2(scales), where="mid", color=PALETTE[0])
for step in (12, 13, 40):
    ax.axvline(step, color=PALETTE[5], linestyle=":", linewidth=1.2)
ax.set(xlabel="step (dotted: overflow, step skipped)", ylabel="loss scale (power of 2)")
ax.set_title("Halved at an overflow, doubled after 8 good steps", loc="left", fontweight="bold")
figure

# %%
# %%rank 0
taken = [step for step in range(1, 64) if weights[step] != weights[step - 1]]
display(
    claim("steps that were skipped", sorted(set(range(1, 64)) - set(taken)), [12, 13, 40]),
    claim(
        "the scale after an overflow, of the one before", scales[12] / scales[11], 0.5, exact=True
    ),
    claim(
        "good steps from the last overflow to the next doubling",
        next(s for s in range(41, 64) if scales[s] > scales[s - 1]) - 40,
        8,
    ),
)

# %% [markdown]
# That was torch's. `minidist.precision.GradScaler` takes the same steps, to the last bit:

# %%
# %%rank 0
our_scales, our_weights = watch(GradScaler(2.0**10, growth_interval=8))
display(
    claim("our scaler's scales are torch's", our_scales, scales, exact=True),
    claim("... and so are the weights", our_weights, weights, exact=True),
)

# %% [markdown]
# A learning-rate scheduler that steps although the optimizer's step was skipped runs ahead. This
# is why torch warns "lr_scheduler.step() before optimizer.step()" in the first step of many fp16
# trainings.
#
# ### Broken on purpose: clip before unscaling
#
# A gradient has norm 0.5, and gradients are to be clipped to norm 1, so clipping should leave it
# alone. The learning rate is 1, the loss scale 2¹⁶.

# %%
# %%rank 0
clip_guess = predict("How long is the step if the scaled gradient is clipped?", guess=None)
clip_guess

# %% [markdown]
# We clip once after `unscale_` and once without it.


# %%
# %%rank 0
def clipped_step(*, unscale_first: bool) -> float:
    """Length of an SGD step at rate 1 for a gradient of norm 0.5, clipped to norm 1."""
    w = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((w * torch.tensor([0.3, 0.4])).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return float(w.detach().norm())


display(
    clip_guess.reveal(clipped_step(unscale_first=False)),
    claim(
        "step with unscale_ before clipping: the gradient of norm 0.5 is left alone",
        clipped_step(unscale_first=True),
        0.5,
        rtol=1e-4,
    ),
    claim(
        "step when scaled gradients are clipped: norm 1 / 2^16",
        clipped_step(unscale_first=False),
        2.0**-16,
        rtol=1e-3,
    ),
)

# %% [markdown]
# The model hardly moves any more, and nothing complains. The same goes for everything that looks at
# gradients: norms that you log, gradient penalties, value clipping.
#
# ### Broken on purpose: fp16 parameters
#
# A scaler divides gradients in the parameters' dtype. If that is fp16, they underflow right there.
# Both torch's scaler and ours refuse.

# %%
# %%rank 0
half = nn.Linear(4, 1).half()
half_optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
refusals = []
for scaler in (GradScaler(), torch.amp.GradScaler("cpu")):
    half.weight.grad, half.bias.grad = torch.ones_like(half.weight), torch.ones_like(half.bias)
    scaler.scale(torch.ones(1))
    try:
        scaler.unscale_(half_optimizer)
        refusals.append("it worked")
    except (ValueError, RuntimeError) as error:
        refusals.append(str(error)[:60])
print(*refusals, sep="\n")
claim(
    "scalers that refuse fp16 gradients of fp16 parameters",
    sum("it worked" not in r for r in refusals),
    2,
)

# %% [markdown]
# ## 4 · Master weights: why parameters stay in fp32
#
# An update is learning rate × gradient, and often a thousand times smaller than the weight. A
# weight of 1 in fp16 has its next neighbour at 1 + 1/1024. An update of less than half of that is
# rounded away, and the next one again.

# %%
# %%rank 0
drift_guess = predict(
    "400 updates of 0.0006 make 0.24. How far do they move a weight of 1 in fp16?", guess=None
)
drift_guess

# %% [markdown]
# The same in three formats, one update after the other:


# %%
# %%rank 0
def add_up(name: str, update: float, steps: int) -> list[float]:
    """A weight of 1 that gets the same update in every step, rounded after each."""
    weight, path = torch.tensor(1.0, dtype=torch.float64), []
    for _ in range(steps):
        weight = round_to(weight + update, FORMATS[name])
        path.append(weight.item())
    return path


def smallest_update(name: str) -> float:
    """The smallest power of two that changes a weight of 1, by trying."""
    return min(2.0**-k for k in range(30) if update_survives(1.0, 2.0**-k, FORMATS[name]))


paths = {name: add_up(name, 6e-4, 400) for name in ("fp32", "fp16", "bf16")}
display(
    drift_guess.reveal(paths["fp16"][-1] - 1),
    claim(
        "bf16: 400 updates of 0.0006 move a weight of 1 by", paths["bf16"][-1] - 1, 0.0, exact=True
    ),
    claim("fp32: the same", paths["fp32"][-1] - 1, 400 * 6e-4, rtol=1e-3),
    claim(
        "fp16: the same, in multiples of what it should be",
        (paths["fp16"][-1] - 1) / 0.24,
        (">", 1.3),
    ),
    claim(
        "smallest power of two that survives at a weight of 1: fp16, bf16",
        [smallest_update("fp16"), smallest_update("bf16")],
        [2.0**-10, 2.0**-7],
        exact=True,
    ),
)
plot_lines(
    range(1, 401),
    paths,
    xlabel="step",
    ylabel="weight",
    markers=False,
    title="400 updates of 0.0006: right, too far, and nowhere",
)

# %% [markdown]
# fp16 goes *too far*, since each update is rounded up to the gap; bf16 does not move at all.
# Neither shows as an error. Hence **master weights**: the optimizer holds an fp32 copy, updates add
# up there, and the 16-bit weights are its rounded image. Under autocast the parameters *are* fp32,
# and 16-bit copies are made on the fly.
#
# Here training of the small GPT goes on in four ways, with a small learning rate, as in
# fine-tuning, where it matters most.


# %%
# %%rank 0
def fine_tune(way: str, steps: int, lr: float = 3e-5) -> list[float]:
    """Train the model from the beginning of the lecture on, with a small rate."""
    model = copy.deepcopy(trained)
    dtype = torch.bfloat16 if way == "bf16 autocast" else None
    if way in ("bf16 with fp32 master weights", "everything in bf16"):
        model = model.to(torch.bfloat16)
    parameters = list(model.parameters())
    optimizer = (
        MasterWeights(parameters, lambda masters: torch.optim.Adam(masters, lr=lr))
        if "master" in way
        else torch.optim.Adam(parameters, lr=lr)
    )
    return [
        autocast_step(model, lm_loss, tokens[:16], targets[:16], optimizer, dtype=dtype).item()
        for _ in range(steps)
    ]


ways = ("fp32", "bf16 autocast", "bf16 with fp32 master weights", "everything in bf16")
curves = {way: fine_tune(way, 60 if quick else 200) for way in ways}
plot_lines(
    range(1, len(curves["fp32"]) + 1),
    curves,
    xlabel="step",
    ylabel="loss",
    markers=False,
    title="Weights in bf16 alone fall behind",
)

# %%
# %%rank 0
fell = {way: losses[0] - np.mean(losses[-3:]) for way, losses in curves.items()}
display(
    claim(
        "progress with bf16 autocast / with fp32",
        fell["bf16 autocast"] / fell["fp32"],
        1.0,
        rtol=0.1,
    ),
    claim("progress with master weights / with fp32", fell[ways[2]] / fell["fp32"], 1.0, rtol=0.1),
    claim("progress with everything in bf16 / with fp32", fell[ways[3]] / fell["fp32"], ("<", 0.5)),
)

# %% [markdown]
# This is also why `model.half()` is a poor way to save memory in training: at a small learning rate
# most updates are lost.
#
# ## 5 · Autocast: which operation in which format
#
# [`torch.autocast`](https://docs.pytorch.org/docs/stable/amp.html) chooses per operation. Matrix
# products and convolutions run in 16 bits: they are where the time goes, and tensor cores add in
# fp32. Sums over many numbers (softmax, norms, losses) run in fp32. Every other operation runs in
# the format of its inputs. Wrap forward and loss, not backward: backward uses each operation's
# forward dtype.

# %%
# %%rank 0
seen = {}


def note_dtype(module, args, output) -> None:
    seen[type(module).__name__] = str(output.dtype).removeprefix("torch.")


watched = make_gpt()
for module in watched.modules():
    module.register_forward_hook(note_dtype)
with torch.autocast(device.type, dtype=torch.bfloat16):
    loss = lm_loss(watched(tokens[:4]), targets[:4])
loss.backward()
print(seen, "loss:", loss.dtype)
dtypes = {p.dtype for p in watched.parameters()} | {p.grad.dtype for p in watched.parameters()}
display(
    claim("dtype of a Linear's output under autocast", seen["Linear"], "bfloat16"),
    claim(
        "dtype of LayerNorm, residual stream and loss",
        [seen["LayerNorm"] == "float32", seen["Block"] == "float32", loss.dtype == torch.float32],
        [True, True, True],
    ),
    claim("parameters and gradients all stay in fp32", dtypes == {torch.float32}, True),
)

# %% [markdown]
# (The lists differ between CPU and GPU: softmax and LayerNorm of a bf16 tensor give fp32 on CUDA
# and bf16 on the CPU.) Why do sums need more bits? Add up 0.1 in bf16, one number after the other.

# %%
# %%rank 0
sum_guess = predict("0.1 + 0.1 + … in bf16, 4,096 times, should be 409.6. It is", guess=None)
sum_guess

# %% [markdown]
# Once the sum is large, 0.1 is less than half of its spacing, and the sum stops growing.

# %%
# %%rank 0
lengths = (16, 64, 256, 1024, 4096)
sums = accumulation_error(lengths, formats=("fp32", "fp16", "bf16"))
products = {
    accumulate: matmul_error((8, 32, 128), formats=("bf16",), accumulate=accumulate)
    for accumulate in ("fp32", "bf16")
}
by_format = {
    name: [100 * row.error for row in sums if row.format == name]
    for name in ("fp32", "fp16", "bf16")
}
display(
    sum_guess.reveal(409.6 * (1 - by_format["bf16"][-1] / 100)),
    claim(
        "4,096 times 0.1 in bf16: relative error of the sum, %", by_format["bf16"][-1], (">", 50.0)
    ),
    claim("fp32: the same, %", by_format["fp32"][-1], ("<", 0.01)),
    claim(
        "128 x 128 product of bf16 inputs: error when added in bf16 / in fp32",
        products["bf16"][-1].error / products["fp32"][-1].error,
        (">", 3.0),
    ),
)
plot_lines(
    lengths,
    by_format,
    logx=True,
    ticks=lengths,
    xlabel="numbers added up, one after the other",
    ylabel="error of the sum (%)",
    title="0.1 + 0.1 + 0.1 + …",
)

# %% [markdown]
# The same holds for sums over *ranks*. Under autocast gradients are fp32 and travel in fp32. If you
# reduce in bf16 to save traffic (a DDP hook, FSDP's `reduce_dtype`), each of N additions rounds to
# 8 bits. With few ranks that is fine; with a thousand, add in fp32.


# %%
# %%rank 0
def reduce_in(name: str, ranks: int) -> float:
    """Relative error of a sum over ranks that is rounded after every addition, as on a ring."""
    generator = torch.Generator().manual_seed(1)
    grads = 1 + 0.5 * torch.randn(ranks, 2000, generator=generator, dtype=torch.float64)
    total = torch.zeros(2000, dtype=torch.float64)
    for grad in grads:
        total = round_to(total + round_to(grad, FORMATS[name]), FORMATS[name])
    return float((total - grads.sum(0)).norm() / grads.sum(0).norm())


claim(
    "error of a sum over 512 ranks in bf16 / over 8 ranks",
    reduce_in("bf16", 512) / reduce_in("bf16", 8),
    (">", 5.0),
)

# %% [markdown]
# ### With DDP, on both ranks
#
# The order in a step: autocast around forward and loss, `scaler.scale(loss).backward()` (DDP
# averages in there), `unscale_`, clip, `step`, `update`. All ranks see the same averaged gradients,
# so all of them skip together. Here rank 1 alone meets an overflow in its local gradient.


# %%
def ddp_with_overflow() -> list:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**4)
    before = ddp.module.weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((2, 4), 3e38 if step == 1 and rank == 1 else 1.0, device=device)
        scaler.scale(ddp(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    moved = float((ddp.module.weight.detach() - before).abs().max())
    gathered = [None] * world_size
    dist.all_gather_object(gathered, (scaler.get_scale(), moved))
    return gathered


together = ddp_with_overflow()

# %%
# %%rank 0
print("scale and movement on each rank:", together)
display(
    claim(
        "DDP: the scale on both ranks, halved once",
        [scale for scale, _ in together],
        [8.0, 8.0],
        exact=True,
    ),
    claim(
        "... and how far a weight moved: two steps of three, at rate 0.1 with a gradient of 2",
        [moved for _, moved in together],
        [2 * 0.1 * 2] * 2,
        rtol=1e-5,
    ),
)

# %% [markdown]
# With sharded gradients only the rank that holds the overflow sees it.


# %%
def sharded_with_overflow(agree: bool) -> list:
    """As with FSDP: each rank holds and updates its own part; only rank 1's overflows."""
    w = nn.Parameter(torch.zeros(2, device=device))
    optimizer = torch.optim.SGD([w], lr=0.1)
    scaler = GradScaler(2.0**4, group=dist.group.WORLD if agree else None)
    w.grad = torch.full_like(w, float("inf") if rank == 1 else 16.0)
    scaler.step(optimizer)
    scaler.update()
    gathered = [None] * world_size
    dist.all_gather_object(gathered, (scaler.get_scale(), float(w.detach()[0])))
    return gathered


alone, agreed = sharded_with_overflow(False), sharded_with_overflow(True)

# %%
# %%rank 0
print("each decides:", alone, "\none decision:", agreed)
display(
    claim(
        "sharded, each rank decides for itself: scales on ranks 0 and 1",
        [scale for scale, _ in alone],
        [16.0, 8.0],
        exact=True,
    ),
    claim(
        "sharded, one decision for the group",
        [scale for scale, _ in agreed],
        [8.0, 8.0],
        exact=True,
    ),
)

# %% [markdown]
# Where each decides, rank 0 took its step and rank 1 did not: half of the model is one step ahead,
# and their scales differ from now on. Mend it with one small all-reduce: `GradScaler(group=…)`
# here, `ShardedGradScaler` in torch. (DTensors of FSDP2 do it inside torch's own GradScaler.)
#
# ## 6 · bf16: less to go wrong
#
# With bf16 there is no scaler, no skipped step and no scale in the checkpoint. What remains: fp32
# master weights and fp32 sums. Full training runs with fp32, with bf16, and with fp16 and scaler:


# %%
# %%rank 0
def full_run(name: str, steps: int, fp8: str | None = None) -> list[float]:
    model = make_gpt()
    if fp8:
        use_fp8(model, FP8_RECIPES[fp8])  # section 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    dtype = {"fp32": None, "bf16": torch.bfloat16}.get(name, torch.float16)
    scaler = torch.amp.GradScaler(device.type, enabled="scaler" in name)
    losses = []
    for step in range(steps):
        part = slice(8 * (step % 8), 8 * (step % 8) + 8)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = lm_loss(model(tokens[part]), targets[part])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


num_steps = 48 if quick else 300
runs = {name: full_run(name, num_steps) for name in ("fp32", "bf16", "fp16 + scaler")}
ends = {name: float(np.mean(losses[-8:])) for name, losses in runs.items()}
display(
    claim("final loss: bf16 / fp32", ends["bf16"] / ends["fp32"], 1.0, rtol=0.05),
    claim(
        "final loss: fp16 with scaler / fp32", ends["fp16 + scaler"] / ends["fp32"], 1.0, rtol=0.05
    ),
)
plot_lines(
    range(1, num_steps + 1),
    runs,
    xlabel="step",
    ylabel="loss",
    markers=False,
    title="Done right, you cannot tell them apart",
)

# %% [markdown]
# Which one?
#
# | | fp16 | bf16 |
# |---|---|---|
# | hardware | V100, T4 and newer | A100 and newer, recent CPUs |
# | loss scaling | needed | not needed |
# | master weights | needed | needed |
# | what can go wrong | overflow in activations, scale falls to nothing | small differences vanish |
#
# On hardware that has bf16, take bf16. In both cases keep softmax, norms and losses in fp32.
#
# ## 7 · fp8 training
#
# An H100 multiplies fp8 twice as fast as bf16, and an fp8 number takes half of the memory. But e4m3
# ends at 448 and has four binary digits. So each product's inputs are divided by a scale, rounded,
# and the scale is multiplied back into the result. Which numbers share a scale? Three answers are
# in use:
#
# | recipe | activations, gradients | weights | a scale is |
# |---|---|---|---|
# | tensor ([arXiv 2209.05433](https://arxiv.org/abs/2209.05433)) | one | one | fp32 |
# | tile ([DeepSeek-V3](https://arxiv.org/abs/2412.19437)) | 1 × 128 | 128 × 128 | fp32 |
# | MXFP8 ([arXiv 2310.10537](https://arxiv.org/abs/2310.10537)) | 1 × 32 | 1 × 32 | 2ᵏ, one byte |
#
# This is all of it, for any block:

# %%
# %%rank 0
import inspect

print(inspect.getsource(quantize).split('"""')[2].strip("\n"))
print(inspect.getsource(BlockScaling.scales_of).split('"""')[2])

# %% [markdown]
# A large language model has a few enormous activations
# ([arXiv 2402.17762](https://arxiv.org/abs/2402.17762)). We put one into the first of 256 tokens,
# multiply by a weight in fp8, and look at the *other* 255 tokens.

# %%
# %%rank 0
fp8_guess = predict(
    "No outlier, a scale per 128 numbers: the error of an fp8 product?", guess=None, unit="%"
)
fp8_guess

# %% [markdown]
# The simulation rounds in torch's fp8 dtypes and adds in fp32. (Hopper's tensor cores keep only
# about 14 bits of a sum of fp8 products, so DeepSeek-V3 adds partial sums of 128 in fp32 outside of
# them.) The error is that of a token's output against fp64, as a share of the output; we show the
# middle one of the 255.


# %%
# %%rank 0
source = torch.Generator().manual_seed(0)
ordinary_tokens = torch.randn(256, 512, generator=source)
a_weight = 0.02 * torch.randn(384, 512, generator=source)
largest_ones = [10.0**k for k in range(1, 8)]


def median_error(got, a, b, first: int = 0) -> float:
    """Error of a @ b.T per row, from row `first` on, in percent of the row; the median."""
    exact = (a.double() @ b.double().T)[first:]
    off = (got.double()[first:] - exact).norm(dim=1) / exact.norm(dim=1)
    return 100 * off.median().item()


by_recipe = {name: [] for name in (*FP8_RECIPES, "bf16")}
for largest in largest_ones:
    x = ordinary_tokens.clone()
    x[0, 7] = largest
    for name, recipe in FP8_RECIPES.items():
        got = fp8_product(x, a_weight, recipe.activations, recipe.weights)
        by_recipe[name].append(median_error(got, x, a_weight, 1))
    in_bf16 = x.bfloat16().float() @ a_weight.bfloat16().float().T
    by_recipe["bf16"].append(median_error(in_bf16, x, a_weight, 1))
plot_lines(
    largest_ones,
    by_recipe,
    logx=True,
    logy=True,
    xlabel="the one large activation (the others are about 1)",
    ylabel="error of the other tokens (%)",
    title="One scale for all: one number spoils 255 tokens",
)

# %%
# %%rank 0
display(
    fp8_guess.reveal(by_recipe["tile"][0]),
    claim("error of a product with tiles of 128, %", by_recipe["tile"][0], 3.7, rtol=0.02),
    claim(
        "fp8 / bf16: e4m3 has four bits fewer, so 2^4 times the error",
        by_recipe["tile"][0] / by_recipe["bf16"][0],
        16,
        rtol=0.05,
    ),
    claim(
        "one scale per tensor: error up to 10^4, and at 10^6, %",
        [max(by_recipe["tensor"][:4]), by_recipe["tensor"][5]],
        lambda error: error[0] < 4 and error[1] > 90,
    ),
    claim(
        "tiles and blocks: error at 10^7 / error without an outlier",
        [by_recipe[name][-1] / by_recipe[name][0] for name in ("tile", "mxfp8")],
        [1.0, 1.0],
        rtol=0.01,
    ),
    claim("MXFP8's error / tiles'", by_recipe["mxfp8"][0] / by_recipe["tile"][0], 1.12, rtol=0.02),
    claim(
        "H100: peak in fp8 / in bf16",
        cost.H100.peak("fp8") / cost.H100.peak("bf16"),
        2,
        rtol=0.01,
        authority="NVIDIA data sheet, dense",
    ),
)

# %% [markdown]
# fp8 is a floating-point format, so one scale for all is enough as long as the largest number is
# not 10⁵ times the others. A tile needs no such luck. MXFP8 is a little worse here although its
# blocks are smaller: its scales are powers of two, rounded down, so the largest numbers of a block
# are cut by up to an eighth. Rounding the scale up mends it ([arXiv
# 2506.08027](https://arxiv.org/abs/2506.08027)).
#
# **Gradients** differ between tokens by many powers of two. With one scale they need the range of
# e5m2, at the price of a digit. With tiles they keep e4m3.

# %%
# %%rank 0
spread = 2.0 ** (6 * torch.randn(256, 1, generator=source))  # two thirds within 2^-6 … 2^6
gradient = torch.randn(256, 384, generator=source) * spread
gradient_error = {}
for name, scaling in {
    "one scale, e4m3": BlockScaling(),
    "one scale, e5m2": FP8_RECIPES["tensor"].gradients,
    "tiles, e4m3": FP8_RECIPES["tile"].gradients,
}.items():
    got = fp8_product(gradient, a_weight.T, scaling, FP8_RECIPES["tile"].weights)
    gradient_error[name] = median_error(got, gradient, a_weight.T)
display(
    claim("gradients, one scale, e4m3: error, %", gradient_error["one scale, e4m3"], (">", 50)),
    claim("one scale, e5m2", gradient_error["one scale, e5m2"], 6.0, rtol=0.03),
    claim("tiles, e4m3", gradient_error["tiles, e4m3"], 3.7, rtol=0.02),
)

# %% [markdown]
# **When is the scale known?** *Current* scaling reads the tensor for its largest number, and again
# to round it. *Delayed* scaling takes the largest of the last steps, so that the kernel which makes
# the tensor can round it at once. It trusts that the next tensor is no larger. At step 6 one is:
# its numbers are 20 times as large.

# %%
# %%rank 0
delayed, scaled_with = DelayedScale(history=16), {"delayed": [], "current": []}
for step in range(12):
    x = torch.randn(64, 64, generator=source) * (20.0 if step >= 6 else 1.0)
    for name, rounded in (
        ("delayed", delayed.quantize(x)),
        ("current", quantize(x, BlockScaling())),
    ):
        off = (rounded.numbers() - x).norm() / x.norm()
        scaled_with[name].append(100 * off.item())
display(
    claim("error of the delayed scale at the jump, %", scaled_with["delayed"][6], (">", 50)),
    claim(
        "... one step later, against the current scale's",
        scaled_with["delayed"][7] / scaled_with["current"][7],
        lambda ratio: ratio < 2,
    ),
)
plot_lines(
    range(12),
    scaled_with,
    xlabel="step",
    ylabel="rounding error (%)",
    title="A delayed scale is late by one step",
)

# %% [markdown]
# ### What stays in fp32
#
# Only the inputs of matrix products are fp8. Sums are fp32, and so are norms, softmax and the loss.
# The output layer stays in bf16 or fp32. Master weights are more necessary than ever: an update
# below 1/32 of an fp8 weight would be rounded away. Bytes per parameter:
#
# | | bf16, fp32 gradients | fp8, as DeepSeek-V3 |
# |---|---|---|
# | weight for the products | 2 | 1 |
# | master weight | 4 | 4 |
# | gradient (sums of micro-batches) | 4 | 4 |
# | Adam's two moments | 8 | 4 (bf16) |
#
# So fp8 itself saves one byte of 18 here; the other four come from moments in bf16. What fp8 halves
# is what products read, what is kept for backward, and what is sent in fp8: gathered weights, or
# the tokens that go to experts (lecture 12).


# %%
# %%rank 0
def kept_input_bytes(layer: nn.Module, dtype) -> int:
    """Bytes of the input that a layer keeps for backward, scales included."""
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None),
    ):
        layer(ordinary_tokens)
    return sum(t.nbytes for t in kept if sorted(t.shape) != [384, 512])  # the weight is kept, too


tile = FP8_RECIPES["tile"]
in_fp8 = kept_input_bytes(Fp8Linear(nn.Linear(512, 384), tile), None)
in_16_bits = kept_input_bytes(nn.Linear(512, 384), torch.bfloat16)
weight_bytes = quantize(torch.randn(512, 384), tile.weights).num_bytes / (512 * 384)
token = quantize(torch.randn(1, 7168), tile.activations).num_bytes  # DeepSeek-V3's width
display(
    claim(
        "input kept for backward, bytes per number: bf16", in_16_bits / (256 * 512), 2, rtol=1e-9
    ),
    claim("... fp8 with a scale per 128", in_fp8 / (256 * 512), 1 + 4 / 128, rtol=1e-9),
    claim(
        "bytes per parameter with fp8 weights",
        weight_bytes + 4 + 4 + 2 * 2,
        13,
        rtol=1e-3,
        authority="DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3",
    ),
    claim("a token of 7,168 numbers sent in fp8 / in bf16", token / (2 * 7168), 0.516, rtol=0.001),
)

# %% [markdown]
# Does a model learn from products that are wrong by 4 %? The run of section 6 again, with every
# linear layer but the last in fp8, forward and backward:

# %%
# %%rank 0
fp8_runs = {name: full_run("fp32", num_steps, fp8=name) for name in FP8_RECIPES}
beside = {
    name: 100 * (np.array(losses) / runs["fp32"] - 1)
    for name, losses in ({"bf16": runs["bf16"]} | fp8_runs).items()
}
display(
    claim(
        "final loss with fp8 products / fp32: tensor, tile, mxfp8",
        [float(np.mean(losses[-8:])) / ends["fp32"] for losses in fp8_runs.values()],
        [1.0, 1.0, 1.0],
        rtol=0.02,
    ),
    claim(
        "largest distance from fp32's curve, %: fp8 tiles, bf16",
        [float(np.abs(beside[name]).max()) for name in ("tile", "bf16")],
        lambda far: far[1] < far[0] < 5,
    ),
    claim(
        "DeepSeek-V3: loss of fp8 against bf16, relative error below, %",
        0.25,
        status="cited",
        authority="DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3",
    ),
)
plot_lines(
    range(1, num_steps + 1),
    beside,
    xlabel="step",
    ylabel="loss, against fp32 (%)",
    markers=False,
    title="fp8 wobbles around fp32, and arrives",
)

# %% [markdown]
# It does: rounding errors differ from element to element and from step to step, so most of them
# cancel in the sums. Speed cannot be simulated; section 8 measures it where a GPU has fp8.
#
# ## 8 · What it saves
#
# ### Memory
#
# "Mixed precision saves half of the memory" is a common sentence. Half of *what*? Count bytes per
# parameter with Adam: fp32 needs 4 + 4 + 8. With master weights it is 2 for the weight, 2 for its
# gradient (4 if micro-batches add up in fp32, as in section 7), 4 for the master, 8 for Adam's
# states. Autocast has the 4 + 4 + 8 of fp32 and, during a step, a 16-bit copy of the weights
# besides. What shrinks is activations.

# %%
# %%rank 0
kept_guess = predict(
    "Our GPT: bytes kept for backward, bf16 autocast / fp32?", guess=None, unit="%"
)
kept_guess

# %% [markdown]
# We count the storages that autograd keeps in one forward pass.

# %%
# %%rank 0
fp32_bytes, mixed_bytes = (cost.state_bytes(precision=p) for p in ("fp32", "bf16_mixed"))


def saved_bytes(dtype) -> int:
    """Bytes that autograd keeps for backward, the weights and their 16-bit copies left out."""
    model, kept = make_gpt(), {}
    mine = {p.numel() for p in model.parameters()}

    def pack(tensor):
        if tensor.numel() not in mine:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = lm_loss(model(tokens[:16]), targets[:16])
        total = sum(kept.values())
        loss.backward()
    return total


activations = {"fp32": saved_bytes(None), "bf16 autocast": saved_bytes(torch.bfloat16)}
display(
    kept_guess.reveal(100 * activations["bf16 autocast"] / activations["fp32"]),
    claim(
        "70 billion weights alone, fp32 and 16 bits, GB",
        [70e9 * b.parameter / cost.GB for b in (fp32_bytes, mixed_bytes)],
        [280.0, 140.0],
        rtol=1e-9,
    ),
    claim(
        "saving in parameters, gradients and optimizer states, %",
        100 * (1 - mixed_bytes.total / fp32_bytes.total),
        0.0,
        atol=1e-9,
        status="corrected",
        said=50,
        refutes="a common summary",
        why="fp32 Adam: 4 + 4 + 8 = 16 bytes; mixed: 2 + 2 + 12 = 16; activations shrink",
    ),
    claim(
        "activations kept for backward, bf16 autocast / fp32 (small GPT, measured)",
        activations["bf16 autocast"] / activations["fp32"],
        0.65,
        rtol=0.01,
    ),
)
plot_stacked(
    {
        "fp32": {"parameters": 4, "gradients": 4, "optimizer": 8},
        "mixed (bf16 + master)": {"parameters": 2, "gradients": 2, "optimizer": 12},
    },
    xlabel="bytes per parameter (the master weights count as optimizer)",
    form="{:.0f}",
)

# %% [markdown]
# What halves is what is 16 bits wide: activations of matrix products (our GPT keeps its residual
# stream and norms in fp32), weights in inference, and messages that are sent in 16 bits. Under
# autocast DDP sends fp32 gradients, so its traffic does not shrink.
#
# ### Speed
#
# The second common sentence is "twice as fast". It compares an A100's 312 TFLOP/s in fp16 with "156
# in fp32". But 156 is **TF32** on tensor cores. Plain fp32 is 19.5.

# %%
# %%rank 0
peaks = {name: cost.A100.peak(name) / 1e12 for name in ("fp32", "tf32", "fp16", "bf16")}
sheet = "NVIDIA data sheet, dense"
display(
    claim("A100 in fp16, TFLOP/s", peaks["fp16"], 312.0, rtol=1e-9, authority=sheet),
    claim(
        "A100 in fp32, TFLOP/s",
        peaks["fp32"],
        19.5,
        rtol=1e-9,
        status="corrected",
        said=156,
        refutes=common,
        why="156 is TF32 on tensor cores; plain fp32 is 19.5",
    ),
    claim(
        "fp16 / fp32 at peak, x",
        peaks["fp16"] / peaks["fp32"],
        16.0,
        rtol=1e-3,
        status="corrected",
        said=2,
        refutes=common,
        why="2 is against TF32",
    ),
)
plot_bars(
    {f"{name}{', tensor cores' if name != 'fp32' else ''}": p for name, p in peaks.items()},
    xlabel="A100, peak TFLOP/s (dense)",
    form="{:.4g}",
)

# %% [markdown]
# And the peak is for large matrix products only. What is limited by *memory* (element-wise
# operations, norms, small products) gains at most a factor of two, from half the bytes. So there is
# no single factor.

# %%
# %%rank 0
step_guess = predict(
    "Half of an fp32 step is large products, now 16 x as fast, the rest 2 x. The step?",
    guess=None,
    unit="x",
)
step_guess

# %% [markdown]
# A roofline shows it for each size: an operation takes as long as its arithmetic or its bytes,
# whichever takes longer.

# %%
# %%rank 0
BANDWIDTH = 2.0e12  # bytes per second, A100 SXM 80 GB


def product_s(n: int, name: str, num_bytes: int) -> float:
    """Roofline time of an n x n matrix product."""
    return max(2 * n**3 / (peaks[name] * 1e12), 3 * n * n * num_bytes / BANDWIDTH)


def step_speedup(share: int = 80, baseline: str = "fp32", size: int = 4096):
    """Speed-up of a step by bf16, over the share of its time that is matrix products."""
    gain = product_s(size, baseline, 4) / product_s(size, "bf16", 2)
    shares = np.arange(0, 101)
    overall = 1 / (shares / 100 / gain + (1 - shares / 100) / 2)
    figure = plot_lines(
        shares,
        {"bf16": overall},
        xlabel="share of matrix products in the old step (%)",
        ylabel="speed-up of a step",
        markers=False,
        ideal={"2 x": np.full(101, 2.0)},
        title=f"products of {size} against {baseline}: {gain:.1f} x; "
        f"{share} % of the step: {overall[share]:.1f} x",
    )
    figure.axes[0].plot(share, overall[share], "o", color=PALETTE[1], markersize=9)
    return figure


explore(
    step_speedup,
    share=(0, 100),
    baseline=["fp32", "tf32"],
    size=[64, 128, 256, 1024, 4096],
    labels={
        "share": "matrix products (% of the step)",
        "baseline": "compared with",
        "size": "matrix size n",
    },
    alt="Speed-up of a training step by bf16 against the share of matrix products",
)

# %%
# %%rank 0
sizes = (32, 64, 128, 256, 512, 1024, 4096)
gains = [product_s(n, "fp32", 4) / product_s(n, "bf16", 2) for n in sizes]
in_mind = [1 / (f / gains[-1] + (1 - f) / 2) for f in (0.0, 0.5, 0.9)]
display(
    step_guess.reveal(in_mind[1]),
    claim("small products are bound by memory: bf16 gains", gains[0], 2.0, rtol=1e-9),
    claim("large ones by arithmetic: bf16 gains", gains[-1], 16.0, rtol=1e-3),
    claim(
        "a step with 0, 50 and 90 % matrix products gets faster by (roofline)",
        in_mind,
        [2.0, 3.56, 9.41],
        rtol=0.01,
        why="no single factor: it depends on the share of matrix "
        "products and on what it is compared with",
    ),
    claim(
        "against TF32, which PyTorch can use for fp32 matrices, large products gain",
        product_s(4096, "tf32", 4) / product_s(4096, "bf16", 2),
        2.0,
        rtol=1e-9,
    ),
)
plot_lines(
    sizes,
    {
        "bf16 / fp32": gains,
        "bf16 / TF32": [product_s(n, "tf32", 4) / product_s(n, "bf16", 2) for n in sizes],
    },
    logx=True,
    ticks=sizes,
    xlabel="matrix size n",
    ylabel="speed-up (roofline, A100)",
    title="Two for bytes, sixteen for arithmetic",
)

# %% [markdown]
# If this notebook runs on a GPU, the next cell measures it. On a CPU it only says so: CPUs without
# 16-bit units are slower in bf16 and fp16 than in fp32.


# %%
# %%rank 0
def product_ms(dtype, n: int = 4096) -> float:
    """Milliseconds of an n x n product on the GPU."""
    a = torch.randn(n, n, device="cuda").to(dtype)
    one = torch.ones((), device="cuda")  # a scale per tensor
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(12):
        if repeat == 2:
            begin.record()
        if dtype == torch.float8_e4m3fn:
            torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        else:
            a @ a
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10


if torch.cuda.is_available():
    ms = {"fp32": product_ms(torch.float32), "bf16": product_ms(torch.bfloat16)}
    if torch.cuda.get_device_capability() >= (8, 9):  # the first with fp8
        ms["fp8"] = product_ms(torch.float8_e4m3fn)
    print("4096 x 4096 product, ms:", {name: round(each, 3) for name, each in ms.items()})
else:
    print("no GPU here")

# %% [markdown]
# What an H100 gave us: large products gain about what the data sheet promises. A whole step of
# GPT-2 medium (8 sequences of 1,024 tokens, not compiled) gains a third of that over fp32.

# %%
# %%rank 0
measured = "this course's make gpu, one H100, 2026-11-27"
bf16_peak = cost.H100.peak("bf16")
gpt2_medium = GPTConfig(
    num_layers=24, width=1024, num_heads=16, vocab_size=50304, context=1024, tied=True
)
step_memory = cost.memory_per_gpu(
    model=cost.Transformer.from_config(gpt2_medium),
    parallelism=cost.ParallelismConfig(),
    micro_batch=8,
    states=fp32_bytes,
    fused_attention=True,
    autocast=True,
    framework_bytes=0,
)
display(
    claim(
        "H100 at peak, bf16 / fp32 (products of 8192: 15.8 measured)",
        bf16_peak / cost.H100.peak("fp32"),
        15.8,
        rtol=0.1,
        authority=measured,
    ),
    claim(
        "H100 at peak, bf16 / TF32 (products of 8192: 1.94 measured)",
        bf16_peak / cost.H100.peak("tf32"),
        1.94,
        rtol=0.05,
        authority=measured,
    ),
    claim(
        "GPT-2 medium, a step in bf16 is faster than in fp32, and than in TF32, by",
        "5.8 x, 2.0 x",
        status="cited",
        authority=measured,
    ),
    claim("its peak memory, bf16 / fp32", 0.78, status="cited", authority=measured),
    claim(
        "its peak memory in bf16 by the formulas, GiB (16.1 measured)",
        step_memory.total / cost.GIB,
        16.1,
        rtol=0.03,
        authority=measured,
        why="states in fp32, activations and copies of the weights as autocast keeps them",
    ),
)

# %% [markdown]
# ### Names of today
#
# `torch.cuda.amp.autocast` and `torch.cuda.amp.GradScaler`, which most listings use, are
# deprecated. The names are `torch.autocast("cuda", dtype=torch.bfloat16)` and
# `torch.amp.GradScaler("cuda")`.

# %%
# %%rank 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.cuda.amp.GradScaler(enabled=False)
display(
    claim(
        "torch.cuda.amp.GradScaler warns that it is deprecated",
        any("deprecated" in str(w.message) for w in caught),
        True,
        why="use torch.amp.GradScaler('cuda')",
    ),
    claim(
        "published: fp8 and bf16 trainings of a 175-billion-parameter GPT, same quality",
        "matched",
        status="cited",
        authority="Micikevicius et al., arXiv 2209.05433",
    ),
)

# %% [markdown]
# ## Now you
#
# GradScaler finds its scale by trying. With all gradients at hand it can be computed. Write a
# function that gives the **largest power of two** by which gradients can be multiplied so that
# **none becomes inf in fp16**. The cell after it tries your function on twenty sets of gradients.


# %%
def largest_scale(gradients: torch.Tensor) -> float | None:
    """Your turn. The largest number of fp16 is 65,504; the scale may be below 1."""
    return None


# %%
# %%rank 0
def check(answer) -> str:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        gradients = torch.randn(1000, generator=generator).double() * 10.0 ** (seed - 12)
        if seed % 2:  # the largest is negative, and a power of two
            gradients[0] = -(2.0 ** math.ceil(math.log2(gradients.abs().max())))
        scale = answer(gradients.clone())
        if scale is None:
            return "Not written yet."
        if not isinstance(scale, int | float | np.number | torch.Tensor):
            return f"Case {seed}: {scale!r} is no number."
        if not 0 < scale < math.inf or math.log2(scale) % 1:
            return f"Case {seed}: {scale:.4g} is no power of two."
        if (gradients * scale).half().isinf().any():
            return f"Case {seed}: with {scale:.4g} some are inf."
        if not (gradients * (2 * scale)).half().isinf().any():
            return f"Case {seed}: {scale:.4g} is smaller than needed."
    return "Right, in all 20 cases."


def one_answer(gradients: torch.Tensor) -> float:
    return 2.0 ** math.floor(math.log2(65_504 / gradients.abs().max().item()))


print(check(largest_scale))
display(
    claim("the largest gradient decides", check(one_answer), "Right, in all 20 cases."),
    claim(
        "a scale taken from the mean lets the largest overflow",
        check(lambda g: 2.0 ** math.floor(math.log2(65_504 / g.abs().mean().item()))),
        lambda got: "inf" in got,
    ),
    claim("2^16 is not for all", check(lambda g: 2.0**16), lambda got: "smaller" in got),
    claim(
        "a negative gradient overflows, too",
        check(lambda g: 2.0 ** math.floor(math.log2(65_504 / g.max().item()))),
        lambda got: "inf" in got,
    ),
    claim(
        "65,536 is inf already",
        check(lambda g: 2.0 ** math.floor(math.log2(65_536 / g.abs().max().item()))),
        lambda got: "inf" in got,
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `2.0 ** math.floor(math.log2(65_504 / gradients.abs().max().item()))`. GradScaler cannot do that,
# since it has to choose the scale before backward, in which a gradient inside the model may be
# larger than those of the weights. So it tries.
#
# </details>
#
# ## Summary
#
# - Exponent bits are range, mantissa bits are precision. fp16: 6·10⁻⁸ to 65,504 and three digits.
#   bf16: the range of fp32 and two digits.
# - Gradients are small, and fp16 rounds many of them to zero. Loss scaling moves them into range;
#   GradScaler finds the scale by trying, and skips steps that overflow.
# - Unscale before you clip or look. One decision for all ranks: DDP has it for free, sharded
#   gradients need an all-reduce.
# - Weights need fp32 masters in both formats, since updates are too small for 16 bits. Sums,
#   softmax, norms and losses need fp32.
# - Autocast does this per operation. With bf16 there is no scaler.
# - fp8 is for the inputs of matrix products. With a scale per 128 or 32 numbers, an outlier hurts
#   its neighbours only. Sums, master weights and their gradients stay in fp32.
# - It saves activations and time, and messages where they are sent in 16 bits, not model state: 16
#   bytes per parameter before, 16 or 18 after. Time: a factor of 2 for what memory bounds, up to 16
#   at peak for matrix products (A100, against plain fp32).
#
# ## Questions
#
# 1. Your fp16 training logs a gradient norm of 65,536 in every step, on a model whose norm was
#    about 1 in fp32. What happened?
#
# <details><summary>Answer</summary>
#
# The norm was taken before `unscale_`: it is 1 × the loss scale of 2¹⁶.
#
# </details>
#
# 2. The scale halves in every step until it is 10⁻³, and nothing trains. Where do you look?
#
# <details><summary>Answer</summary>
#
# Something is not finite at any scale: inf or NaN in the forward pass (an activation above 65,504,
# a division by zero, a mask of −10⁹ in fp16), or NaN in the data. Check the loss first. Scaling is
# no cure for overflow in *activations*.
#
# </details>
#
# 3. Accumulation over 4 micro-batches with a GradScaler: where do `scale`, `unscale_`, `step` and
#    `update` go?
#
# <details><summary>Answer</summary>
#
# `scale(loss / 4).backward()` for each micro-batch, always with the same scale; `unscale_`, clip,
# `step`, `update` once at the end. Updating in between would add gradients of different scales.
#
# </details>
#
# 4. Why does bf16 training need master weights, although its range is that of fp32?
#
# <details><summary>Answer</summary>
#
# Because of precision, not range: an update below 1/512 of a weight is rounded away, and one below
# 1/256 for weights just above a power of two.
#
# </details>
#
# 5. In a checkpoint of an fp16 training, what has to be saved besides model and optimizer?
#
# <details><summary>Answer</summary>
#
# The scaler's state (scale and growth counter); and if parameters are 16-bit, the masters: rounded
# weights alone lose what the updates added.
#
# </details>
#
# 6. A GPU has twice the FLOP/s in fp8 as in bf16. Is a step twice as fast?
#
# <details><summary>Answer</summary>
#
# Only the part that is large matrix products, and less than that, since inputs have to be scaled
# and cast. Optimizer, norms, softmax, attention and messages stay.
#
# </details>
#
# 7. Why does a tile lie along the dimension that a product sums over, and what does that mean for
#    backward?
#
# <details><summary>Answer</summary>
#
# Then all terms of a partial sum have the same scale, which is multiplied in once, after the sum.
# The gradient of the weight sums over *tokens*, so the same activations are rounded again, in tiles
# along tokens.
#
# </details>
#
# ## Try it
#
# - Round MXFP8's scales up instead of down in section 7: which curve does it join?
# - In section 3 set `growth_interval` to 2 and let the gradient explode at every tenth step. How
#   many steps are lost?
# - Multiply the weights of one layer by 1,000 and train with fp16. Which step overflows, and does a
#   smaller scale help?
# - Repeat section 4 with Adam and learning rates from 10⁻⁵ to 10⁻². When does pure bf16 keep up?
#
# Then do it yourself: [**lab4_amp**](../labs/lab4_amp/lab4_amp.ipynb) asks for rounding, a
# GradScaler from scratch, the training loop with clipping and accumulation, and master weights.
#
# ## What to read
#
# - *Mixed Precision Training*, [arXiv 1710.03740](https://arxiv.org/abs/1710.03740)
# - *A Study of BFLOAT16 for Deep Learning Training*,
#   [arXiv 1905.12322](https://arxiv.org/abs/1905.12322)
# - *FP8 Formats for Deep Learning*, [arXiv 2209.05433](https://arxiv.org/abs/2209.05433)
# - *Microscaling Data Formats for Deep Learning* (MXFP8),
#   [arXiv 2310.10537](https://arxiv.org/abs/2310.10537), and *Recipes for Pre-training LLMs with
#   MXFP8*, [arXiv 2506.08027](https://arxiv.org/abs/2506.08027)
# - *DeepSeek-V3 Technical Report*, section 3.3 (fp8 training),
#   [arXiv 2412.19437](https://arxiv.org/abs/2412.19437)
# - *Revisiting BFloat16 Training* (pure bf16: what it loses, stochastic rounding),
#   [arXiv 2010.06192](https://arxiv.org/abs/2010.06192)
# - The library: `lib/minidist/precision/`.
