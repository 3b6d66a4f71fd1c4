# ---
# jupyter:
#   kernelspec:
#     display_name: torchrun × 4
#     language: python
#     name: torchrun-4
# ---

# %% [markdown]
# # 12 · Mixture of experts
#
# A dense model uses all of its weights for every token. A **mixture of experts** has many MLPs in
# the place of one, and a router sends each token to a few of them. The model grows with the number
# of experts; the cost of a token does not. Someone has to hold all those experts, so they are
# spread over ranks, and tokens travel: that is **expert parallelism**.
#
# After this lecture you can
#
# - compute the parameters of such a model, and how many of them one token meets;
# - write a router, and say what capacity is and which tokens it drops;
# - send tokens to their experts and back with gradients, and count the bytes;
# - say why one popular expert slows down every rank, and balance the load in two ways;
# - combine expert and data parallelism, and divide each gradient by the right number.
#
# It takes about 80 minutes. **The kernel is *torchrun × 4***: every cell runs on four ranks; a cell
# that begins with `%%rank 0` computes, draws and checks on one of them. Six times the lecture asks
# for your guess before it measures. Write it in the cell in place of `None`.

# %% tags=["parameters"]
quick = True  # False: longer training of the four models in section 6

# %%
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minidist import train as program
from minidist.data import make_tokens
from minidist.device import choose_backend, choose_device
from minidist.model import GPT, GPTConfig, lm_loss
from minidist.parallel.expert import (
    MoE,
    MoEConfig,
    Router,
    all_to_all,
    all_to_all_bytes,
    average_gradients,
    balance_loss,
    count_choices,
    dispatch,
    expert_capacity,
    imbalance,
    keep_within_capacity,
    make_expert_mesh,
    update_bias,
    use_experts,
)

warnings.filterwarnings("ignore", category=FutureWarning)
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
import inspect
import math
from dataclasses import replace

from IPython.display import display

from minidist import cost, emulate
from minidist.claims import claim
from minidist.emulate.teach import run_traced
from minidist.plots import PALETTE, new_figure, plot_lines, plot_stacked, plot_timeline
from minidist.plots import style as plot_style
from minidist.plots.style import text_colour
from minidist.widgets import explore, predict

DEEPSEEK = "DeepSeek-V3, arXiv 2412.19437"
SWITCH = "Switch Transformer, arXiv 2101.03961"

# %% [markdown]
# ## 1 · Why sparse
#
# More parameters lower the loss. In a dense model each of them also costs about 6 FLOPs per token
# in training. We want the first without the second. So let only a part of the parameters work on a
# token.
#
# DeepSeek-V3 ([arXiv 2412.19437](https://arxiv.org/abs/2412.19437)) has 671 billion parameters. In
# 58 of its 61 blocks the MLP is 256 experts and one shared expert, and a token visits 8 of the 256.

# %%
# %%rank 0
share_guess = predict("Which part of DeepSeek-V3 works on one token?", guess=None, unit="%")
share_guess

# %% [markdown]
# We count from the published sizes. `cost.Transformer` knows Mixtral
# ([arXiv 2401.04088](https://arxiv.org/abs/2401.04088)) and DeepSeek-V3. The sizes of
# [Llama 4 Maverick](https://ai.meta.com/blog/llama-4-multimodal-intelligence/) are those of the
# `config.json` that comes with its weights: every other block has 128 experts and a shared one, and
# a token visits one of the 128.

# %%
# %%rank 0
maverick = replace(
    cost.LLAMA3_405B,
    context=8192,
    vocab_size=202_048,
    width=5120,
    num_layers=48,
    num_heads=40,
    num_kv_heads=8,
    mlp_ratio=16_384 / 5120,
    num_experts=128,
    experts_per_token=1,
    expert_width=8192,
    shared_experts=1,
    dense_layers=24,
)
models = {
    "Llama 3 405B (dense)": cost.LLAMA3_405B,
    "Mixtral 8x7B": cost.MIXTRAL_8X7B,
    "Llama 4 Maverick": maverick,
    "DeepSeek-V3": cost.DEEPSEEK_V3,
}
plot_stacked(
    {
        name: {
            "works on a token": model.active_parameters / 1e9,
            "rests": (model.num_parameters - model.active_parameters) / 1e9,
        }
        for name, model in models.items()
    },
    xlabel="billion parameters",
    title="Most of a sparse model rests",
    form="{:.0f}",
)

# %%
# %%rank 0
v3 = cost.DEEPSEEK_V3
working = 100 * v3.active_parameters / v3.num_parameters
in_experts = v3.num_layers * v3.routed_weights / v3.num_parameters
state_tb = 16 * v3.num_parameters / 1e12  # bytes of weights, gradients and Adam, as in lecture 5
display(
    share_guess.reveal(working),
    claim("DeepSeek-V3: billion parameters", v3.num_parameters / 1e9, 671, rtol=0.002),
    claim("DeepSeek-V3: of these for one token", v3.active_parameters / 1e9, 37, rtol=0.02),
    claim("Llama 4 Maverick: billion parameters", maverick.num_parameters / 1e9, 400, rtol=0.005),
    claim(
        "Llama 4 Maverick: of these for one token", maverick.active_parameters / 1e9, 17, rtol=0.02
    ),
    claim(
        "Mixtral 8x7B: billion parameters, not 8 x 7",
        cost.MIXTRAL_8X7B.num_parameters / 1e9,
        46.7,
        rtol=0.001,
    ),
    claim(
        "Mixtral 8x7B: of these for one token",
        cost.MIXTRAL_8X7B.active_parameters / 1e9,
        12.9,
        rtol=0.002,
    ),
    claim(
        "FLOPs per token, Llama 3 405B / Llama 4 Maverick",
        cost.LLAMA3_405B.flops_per_token() / maverick.flops_per_token(),
        21.7,
        rtol=0.01,
    ),
    claim("share of DeepSeek-V3 that is routed experts", in_experts, 0.974, rtol=0.001),
    claim("terabytes of training state at 16 bytes per parameter", state_tb, 10.7, rtol=0.01),
)

# %% [markdown]
# Maverick has about as many parameters as Llama 3 405B and costs a twentieth of its FLOPs per
# token. Attention, embeddings and shared experts work on every token; the routed experts do not,
# and they are nearly all of the model.
#
# Memory does not get cheaper. At lecture 5's 16 bytes per parameter, DeepSeek-V3 needs 10.7 TB of
# training state, whether a weight rests or not. Nearly all of it is experts, and experts are
# independent of each other. So rank 0 holds some and rank 1 holds others. Now we need something
# that decides which token goes where.
#
# ## 2 · The router
#
# The router is one small matrix with a row per expert. Softmax turns the products into
# probabilities. The token goes to the k most probable experts, and their outputs are added, each
# times its probability. For k > 1 these weights are divided by their sum, so that they add up to 1.
# (DeepSeek-V3 and Llama 4 take the sigmoid of each product in place of the softmax.) This is the
# forward pass of `minidist.parallel.expert.Router`:

# %%
# %%rank 0
print(inspect.getsource(Router.forward))

# %% [markdown]
# The choice is a list of numbers and has no gradient. The *weights* have one. If more of expert 3
# and less of the others would lower the loss, its weight grows, and the router will choose it more
# often. An expert that was not visited teaches the router nothing.
#
# Before anything is sent we need an oracle: one process, every expert on every token, and a mask.
# It costs E/k times too much and cannot be wrong about who is where.


# %%
def every_expert(x, layer):
    """Tokens (N, D) through all experts; what was not chosen gets the weight 0."""
    probabilities = (x @ layer.router.weight_ED.T).softmax(1)
    top = probabilities.topk(layer.config.top_k, dim=1)
    chosen = top.values / top.values.sum(1, keepdim=True)
    weights = torch.zeros_like(probabilities).scatter(1, top.indices, chosen)
    y = layer.shared(x)
    for e, (up, down) in enumerate(zip(layer.experts.up_LDF, layer.experts.down_LFD, strict=True)):
        y = y + weights[:, e : e + 1] * (F.gelu(x @ up) @ down)
    return y


# %% [markdown]
# Now the same on four ranks: eight experts, two on each rank, and each rank has *its own* eight
# tokens. All ranks draw all weights from one seed, and each keeps its experts.

# %%
mesh = make_expert_mesh()  # all ranks hold the experts together, once
config = MoEConfig(width=16, expert_width=32, num_experts=8, top_k=2, shared_experts=1)


def build(mesh=None):
    torch.manual_seed(0)
    return MoE(config, mesh).to(device, torch.float64)


whole, layer = build(), build(mesh)
torch.manual_seed(1)
batch = torch.randn(world_size, 8, 16, dtype=torch.float64).to(device)

every = torch.stack([every_expert(x, whole) for x in batch])
y = layer(batch[rank])
own = mesh.own_experts(8)
routing = layer.routing
everything = [None] * world_size
dist.all_gather_object(everything, routing.choices_NK.tolist())
print(f"rank {rank} holds experts {list(own)}")

# %% [markdown]
# Each rank has the loss of its own tokens, and the loss of the batch is the mean of these. So
# gradients are averaged over ranks.

# %%
every.square().mean().backward()  # the mean over the whole batch
y.square().mean().backward()  # the mean over this rank's tokens
average_gradients(layer, mesh)
worst = torch.stack(
    [
        (y - every[rank]).abs().max(),
        (layer.router.weight_ED.grad - whole.router.weight_ED.grad).abs().max(),
        (layer.experts.up_LDF.grad - whole.experts.up_LDF.grad[own.start : own.stop]).abs().max(),
        (layer.shared[0].weight.grad - whole.shared[0].weight.grad).abs().max(),
    ]
).detach()
dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # of all ranks

# %%
# %%rank 0
display(
    claim("four ranks against every expert: output", worst[0].item(), ("<", 1e-12)),
    claim("four ranks: gradient of the router", worst[1].item(), ("<", 1e-12)),
    claim("four ranks: gradients of the experts", worst[2].item(), ("<", 1e-12)),
    claim("four ranks: gradient of the shared expert", worst[3].item(), ("<", 1e-12)),
    claim(
        "experts that one rank of four holds, of eight",
        layer.experts.up_LDF.shape[0],
        2,
    ),
    claim(
        "the weights of a token add up to 1: largest difference",
        (routing.weights_NK.sum(1) - 1).abs().max().item(),
        ("<", 1e-12),
    ),
)

# %% [markdown]
# The outputs agree, and so do all gradients. How did the tokens get there?
#
# ## 3 · Dispatch and combine
#
# Each token makes k rows, one per choice. A rank sorts its rows by expert, so what goes to one rank
# is in one piece. An **all-to-all** exchanges the pieces. Experts compute; a second all-to-all
# brings the rows back; each row is multiplied by its weight and added to its token.
#
# Here is what has just happened. A square is a row; its number is the rank it came from, its colour
# the rank that holds its expert.


# %%
# %%rank 0
def draw_rows(ax, rows, title: str) -> None:
    """A line of squares per rank. A row is (rank of its token, rank of its expert)."""
    from matplotlib.patches import Rectangle

    for line, squares in enumerate(rows):
        for place, (source, home) in enumerate(squares):
            box = Rectangle((place, line + 0.1), 0.9, 0.8, facecolor=PALETTE[home], linewidth=0)
            ax.add_patch(box)
            ink = text_colour(PALETTE[home])
            ax.text(place + 0.45, line + 0.5, source, ha="center", va="center", color=ink)
    longest = max(len(squares) for squares in rows)
    ax.set(xlim=(-0.2, longest + 0.2), ylim=(len(rows), 0), title=title)
    ax.set_yticks([i + 0.5 for i in range(len(rows))], [f"rank {i}" for i in range(len(rows))])
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)


per_rank = config.num_experts // world_size
before = [
    [(r, e // per_rank) for token in choices for e in token] for r, choices in enumerate(everything)
]
ordered = [sorted(rows, key=lambda row: row[1]) for rows in before]
after = [[row for rows in ordered for row in rows if row[1] == r] for r in range(world_size)]
figure, _ = new_figure(8.5, 5.6)
figure.clear()
with plot_style():
    for ax, rows, title in zip(
        figure.subplots(3, 1),
        (before, ordered, after),
        ("after the router", "sorted by expert", "after the all-to-all"),
        strict=True,
    ):
        draw_rows(ax, rows, title)
figure

# %% [markdown]
# The last picture shows the difficulty of this lecture: the rows are of unequal length. Nobody
# knows how many rows will come before the routers have spoken. So ranks tell each other the sizes
# first, in a tiny all-to-all, and then send the rows. This is `dispatch`:

# %%
# %%rank 0
print(inspect.getsource(dispatch).split('"""')[2])

# %% [markdown]
# One thing is not in it. `dist.all_to_all_single` writes into a tensor that autograd knows nothing
# of; lecture 8 met the same with `all_gather`. Backward has to be written: **the gradient of a row
# travels back the way that the row came**, which is an all-to-all with both lists of sizes swapped.
# Try it with unequal sizes. Rank r multiplies what it gets by r + 1, so a row's gradient says where
# it has been.

# %%
send = [(rank + to) % 3 for to in range(world_size)]
receive = [(source + rank) % 3 for source in range(world_size)]
rows = torch.ones(sum(send), 2, device=device, requires_grad=True)
plain = rows.new_empty(sum(receive), 2)
dist.all_to_all_single(plain, rows, receive, send)
ours = all_to_all(rows, send, receive)
(ours * (rank + 1)).sum().backward()
where = rows.grad[:, 0].tolist()
rows_on_rank = count_choices(routing).view(world_size, -1).sum(1).tolist()

# %%
# %%rank 0
display(
    claim("what dist.all_to_all_single has filled requires a gradient", plain.requires_grad, False),
    claim("what all_to_all gives requires one", ours.requires_grad, True),
    claim(
        "the gradients of rank 0's rows say where they were, +1", where, [2.0, 3.0, 3.0], exact=True
    ),
    claim("rows that rank 0 got of the three other ranks together", ours.shape[0], 3),
    claim(
        "rows on each rank after the all-to-all, drawn / counted by an all-reduce",
        [len(squares) for squares in after],
        rows_on_rank,
    ),
)

# %% [markdown]
# ## 4 · Capacity, and what is dropped
#
# Rows of unknown number are unpleasant. A compiler wants fixed shapes, and memory must suffice for
# the worst case. GShard ([arXiv 2006.16668](https://arxiv.org/abs/2006.16668)) and the Switch
# Transformer ([arXiv 2101.03961](https://arxiv.org/abs/2101.03961)) give every expert a buffer of a
# fixed size, the **capacity**:
#
# $$ C = \text{factor} \cdot \frac{N k}{E} \quad\text{rows, for } N \text{ tokens.} $$
#
# A row that finds the buffer full is **dropped**: this expert adds nothing to the token. If all k
# rows of a token are dropped, it goes on through the residual connection (and a shared expert, if
# there is one) alone. A factor of 1 is enough if every expert gets exactly the mean. Take a router
# without any preference: each of 512 tokens throws dice for 2 of 64 experts. An expert gets 16 rows
# in the mean.

# %%
# %%rank 0
drop_guess = predict("Dice, capacity factor 1: which part is dropped?", guess=None, unit="%")
drop_guess


# %%
# %%rank 0
def throw(num_tokens: int, num_experts: int, top_k: int, skew: float = 0.0, seed: int = 0):
    """Choices (N, K) of a router that prefers early experts by `skew`; 0 is dice."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_tokens, num_experts, generator=generator)
    gumbel = -(-uniform.log()).log()  # its top k is a draw without replacement
    return (gumbel - skew * torch.arange(num_experts) / num_experts).topk(top_k, dim=1).indices


def dropped_and_empty(choices, num_experts: int, factor: float) -> tuple[float, float]:
    """Percent of choices that are dropped, and percent of all buffers that stay empty."""
    capacity = expert_capacity(*choices.shape, num_experts, factor)
    kept = keep_within_capacity(choices, num_experts, capacity).sum().item()
    return 100 * (1 - kept / choices.numel()), 100 * (1 - kept / (num_experts * capacity))


dice = [throw(512, 64, 2, seed=seed) for seed in range(20)]
factors = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0]
found = {
    factor: [
        sum(v) / len(dice)
        for v in zip(*(dropped_and_empty(c, 64, factor) for c in dice), strict=True)
    ]
    for factor in factors
}
plot_lines(
    factors,
    {"dropped": [found[f][0] for f in factors], "empty buffers": [found[f][1] for f in factors]},
    xlabel="capacity factor",
    ylabel="percent",
    title="512 tokens, 2 of 64 experts each, by dice",
)


# %%
# %%rank 0
def binomial_drop(n: int, p: float, room: int) -> float:
    """Percent of rows beyond `room`, if each of n tokens chooses an expert with probability p."""
    beyond = ((x - room) * math.comb(n, x) * p**x * (1 - p) ** (n - x) for x in range(room, n + 1))
    return 100 * sum(beyond) / (n * p)


mean_rows = 512 * 2 / 64
display(
    drop_guess.reveal(found[1.0][0]),
    claim(
        "dropped by fair dice at factor 1, in percent: 100 / sqrt(2 pi rows per expert)",
        found[1.0][0],
        100 / math.sqrt(2 * math.pi * mean_rows),
        rtol=0.05,
    ),
    claim(
        "dropped at factor 1.25, in percent, against the binomial distribution",
        found[1.25][0],
        binomial_drop(512, 2 / 64, 20),
        rtol=0.1,
    ),
    claim("buffers that stay empty at factor 1.25, in percent", found[1.25][1], 21.9, atol=0.5),
    claim("dropped at factor 2, in percent", found[2.0][0], ("<", 0.05)),
    claim(
        "16 experts, factor 1.25, percent dropped: 512 and 64 tokens by dice, and with a skew of 1",
        [
            dropped_and_empty(throw(tokens, 16, 2, skew), 16, 1.25)[0]
            for skew in (0.0, 1.0)
            for tokens in (512, 64)
        ],
        [0.2, 3.1, 5.0, 8.6],
        atol=0.1,
    ),
)

# %% [markdown]
# Even dice drop a tenth here: chance alone fills some experts above their mean. The
# more rows an expert gets in the mean, the less chance matters. A larger factor drops less and
# sends more empty rows: at a factor of 2, half of all. Move the sliders; a **skew** makes early
# experts more popular.


# %%
# %%rank 0
def capacity_view(factor: float = 1.25, skew: float = 1.0, tokens: int = 512):
    """Rows of each of 16 experts, what fits, and what is dropped."""
    choices = throw(tokens, 16, 2, skew)
    load = torch.bincount(choices.flatten(), minlength=16)
    capacity = expert_capacity(tokens, 2, 16, factor)
    dropped, empty = dropped_and_empty(choices, 16, factor)
    figure, ax = new_figure(8.0, 3.2)
    with plot_style():
        kept = load.clamp(max=capacity)
        ax.bar(range(16), kept, color=PALETTE[0], label="kept")
        ax.bar(range(16), load - kept, bottom=kept, color=PALETTE[5], label="dropped")
        ax.axhline(capacity, color="#222222", linewidth=1.2, linestyle=(0, (4, 3)))
        ax.set(xlabel="expert", ylabel="rows", xticks=range(16))
        ax.set_title(
            f"{dropped:.1f} % dropped, {empty:.0f} % empty, fullest {imbalance(load):.2f} x mean"
        )
        figure.legend(loc="outside right upper", frameon=False)
    return figure


explore(
    capacity_view,
    factor=(0.5, 4.0, 0.25),
    skew=(0.0, 4.0, 0.25),
    tokens=[64, 512, 4096],
    labels={"factor": "capacity factor", "skew": "skew", "tokens": "tokens"},
    alt="Rows of each expert, what fits into its buffer, and what is dropped",
)

# %% [markdown]
# At a factor of 1.25 dice drop 0.2 % of the rows with 512 tokens and 3 % with 64; with a skew of 1
# it is 5 % and 9 %. One can also drop nothing: sizes are exchanged, as `dispatch` does, and kernels
# take groups of unequal size (MegaBlocks, [arXiv 2211.15841](https://arxiv.org/abs/2211.15841)).
# DeepSeek-V3 drops nothing, either. Then no token is lost, but an overfull expert costs time.
#
# ## 5 · What it costs
#
# ### Bytes
#
# A rank has N tokens, each goes to k experts, and of n ranks n − 1 are not its own. With an even
# load one exchange sends
#
# $$ N \, k \, D \cdot \frac{n-1}{n} \ \text{numbers.} $$
#
# Now a layer on the emulated cluster, forward and backward: four ranks, 128 tokens each, k = 2,
# width 64, in fp32. The tokens are made so that the load is exactly even; with `hot` a part of them
# wants the two experts of rank 0.

# %%
# %%rank 0
bytes_guess = predict(
    "Forward and backward: KiB of rows that one rank sends?", guess=None, unit="KiB"
)
bytes_guess


# %%
# %%rank 0
def layer_once(hot: float) -> None:
    torch.manual_seed(0)
    sizes = MoEConfig(width=64, expert_width=512, num_experts=8, top_k=2)
    layer = MoE(sizes, make_expert_mesh())
    with torch.no_grad():  # a router that reads the wish from the token
        layer.router.weight_ED.zero_().fill_diagonal_(8.0)
    first = torch.arange(128) % 4 * 2
    first[: round(128 * hot)] = 0
    x = 2.0 * F.one_hot(first, 64) + F.one_hot(first + 1, 64)
    layer(x.requires_grad_()).sum().backward()


hots = (0.0, 0.25, 0.5, 1.0)
traces = {hot: run_traced(layer_once, world_size, hot)[1] for hot in hots}
h100, laptop = emulate.clusters.dgx_h100(), emulate.clusters.laptop(4)
even = emulate.simulate(traces[0.0], h100)
once = all_to_all_bytes(num_tokens=128, top_k=2, width=64, itemsize=4, num_ranks=4)
sizes_bytes = 3 * 2 * 8  # to each of three ranks, two numbers of 8 bytes
sent = even.bytes_per_link["device 0"]
exchanges = [i for i in even.intervals[0] if i.kind == "communication"]
formula_s = once / 450e9 + 3 * 3.4e-6
display(
    bytes_guess.reveal((sent - sizes_bytes) / 1024),
    claim("exchanges of one layer, forward and backward, and one of sizes", len(exchanges), 5),
    claim(
        "bytes that a rank sends / four exchanges and the sizes",
        sent / (4 * once + sizes_bytes),
        1.0,
        rtol=1e-9,
    ),
    claim(
        "seconds of an exchange on a DGX H100 / (n-1) latencies and bytes over bandwidth",
        (exchanges[1].end_s - exchanges[1].start_s) / formula_s,
        1.0,
        rtol=1e-9,
    ),
)

# %% [markdown]
# Four exchanges: dispatch and combine, each forward and backward. And like the all-reduces of
# tensor parallelism they are **on the critical path**: the expert cannot begin before its tokens
# are there.
#
# At real size: 4,096 tokens of DeepSeek-V3 per GPU, on one node of 8 GPUs or on 8 nodes. Rows go
# out in fp8 (1 byte) and come back in bf16 (2 bytes). We compare one layer's exchanges, forward
# only, with the time of its expert products at half of an H100's bf16 peak.


# %%
# %%rank 0
def v3_layer_ms(link, copies: float) -> dict[str, float]:
    """Milliseconds of one layer, forward, of 4,096 tokens per GPU; 7 of 8 copies go elsewhere."""
    products = 2 * 3 * 7168 * 2048 * (8 + 1) * 4096  # eight experts and the shared one
    once = all_to_all_bytes(num_tokens=4096, top_k=1, width=7168, itemsize=1 + 2, num_ranks=8)
    return {
        "compute": 1e3 * products / (0.5 * cost.H100.peak()),
        "communication": 1e3 * copies * once / link.bandwidth_bytes_per_s,
    }


torch.manual_seed(0)
nodes = torch.rand(20_000, 256).topk(8, dim=1).indices // 32  # 256 experts on 8 nodes
per_token = sum((nodes == node).any(1).double().mean().item() for node in range(8))
choices_of_link = {
    "one node, NVLink": v3_layer_ms(cost.NVLINK4, 8),
    "8 nodes, a copy per expert": v3_layer_ms(cost.INFINIBAND_NDR, 8),
    "8 nodes, a copy per node": v3_layer_ms(cost.INFINIBAND_NDR, per_token),
    "8 nodes, at most 4 nodes": v3_layer_ms(cost.INFINIBAND_NDR, 4),
}
plot_stacked(
    choices_of_link,
    xlabel="ms per layer, forward",
    title="One layer of DeepSeek-V3, nothing overlapped",
    form="{:.1f}",
)

# %%
# %%rank 0
times = {name: parts["communication"] for name, parts in choices_of_link.items()}
computing = choices_of_link["one node, NVLink"]["compute"]
display(
    claim(
        "nodes that 8 random experts on 8 nodes lie on",
        per_token,
        8 * (1 - math.comb(224, 8) / math.comb(256, 8)),
        rtol=0.005,
    ),
    claim(
        "a copy per expert over InfiniBand / computing",
        times["8 nodes, a copy per expert"] / computing,
        (">", 1.75),
    ),
    claim(
        "at most 4 nodes / computing",
        times["8 nodes, at most 4 nodes"] / computing,
        1.0,
        atol=0.5,
    ),
    claim("exchange over NVLink / computing", times["one node, NVLink"] / computing, ("<", 0.5)),
    claim(
        "DeepSeek-V3: computing to communicating across nodes, before overlap",
        "about 1 to 1",
        status="cited",
        authority=f"{DEEPSEEK}, section 3.2.1",
    ),
)

# %% [markdown]
# Inside a node the exchange is short beside computing. Between nodes it is almost twice as long as
# computing, if each expert gets a copy of its own. DeepSeek-V3 sends a token **once per node**,
# over InfiniBand, and lets NVLink copy it to the GPUs of that node. And its router may choose
# experts on **at most four nodes**. What is left is about as long as computing, and its schedule
# (DualPipe, lecture 7) hides it behind another micro-batch.
#
# ### Imbalance is a straggler
#
# Now make experts popular. In the next run all tokens want the two experts of rank 0: it has four
# times the mean load, and three ranks have nothing. We replay it on four slow devices, where
# computing is a large part of the layer.

# %%
# %%rank 0
slow_guess = predict("How many times as long as even does the layer take?", guess=None)
slow_guess

# %%
# %%rank 0
lines = {hot: emulate.simulate(traces[hot], laptop) for hot in hots}


def rows_of(trace) -> list[int]:
    """Rows that each rank's experts had to compute: what it sends back in the combine."""
    return [
        [e.nbytes for e in events if e.kind == "issue"][2] // (64 * 4) for events in trace.events
    ]


def busy_s(line) -> list[float]:
    return [sum(i.end_s - i.start_s for i in r if i.kind == "compute") for r in line.intervals]


loads = {hot: max(rows_of(t)) / (sum(rows_of(t)) / world_size) for hot, t in traces.items()}
slower = {hot: line.makespan_s / lines[0.0].makespan_s for hot, line in lines.items()}
figure, _ = new_figure(8.5, 6.6)
figure.clear()
with plot_style():
    axes = figure.subplots(2, 1)
for ax, hot in zip(axes, (0.0, 1.0), strict=True):
    plot_timeline(
        lines[hot],
        end_s=lines[1.0].makespan_s,
        title=f"fullest rank {loads[hot]:.1f} x mean: {1e3 * lines[hot].makespan_s:.2f} ms",
        ax=ax,
    )
figure

# %%
# %%rank 0
display(
    slow_guess.reveal(slower[1.0]),
    claim("rows on rank 0 / mean, all tokens hot", loads[1.0], 4.0, rtol=1e-9),
    claim("rows on rank 0 / mean, an even load", loads[0.0], 1.0, rtol=1e-9),
    claim("the layer takes this many times as long", slower[1.0], (">", 1.8)),
    claim(
        "the layer slows down by less than the load, since not all of it is experts",
        slower[1.0],
        ("<", 4.0),
    ),
    claim(
        "share of their time that four ranks compute, even / all hot",
        lines[0.0].efficiency / lines[1.0].efficiency,
        (">", 1.5),
    ),
    claim(
        "computing on the fullest rank / on the emptiest",
        max(busy_s(lines[1.0])) / min(busy_s(lines[1.0])),
        (">", 3),
    ),
)

# %% [markdown]
# The work is the same, it only lies elsewhere. Every rank waits for the fullest one, forward and
# backward, in every layer. It is lecture 11's straggler, except that no machine is broken: the
# router is. The emulated cluster charges an exchange by its largest *sender*, so it is kind to the
# dispatch: on a real network the full rank's port is a bottleneck on the way in as well.


# %%
# %%rank 0
def straggler(hot: float = 0.5, cluster: str = "slow devices"):
    """One layer, forward and backward, with a part of the tokens on the experts of rank 0."""
    line = emulate.simulate(traces[hot], laptop if cluster == "slow devices" else h100)
    title = (
        f"fullest rank {loads[hot]:.2f} x mean, {100 * line.efficiency:.0f} % of the time computing"
    )
    return plot_timeline(line, title=title)


explore(
    straggler,
    hot=list(hots),
    cluster=["slow devices", "DGX H100"],
    labels={"hot": "part that is hot", "cluster": "cluster"},
    alt="Timeline of one layer with an uneven load",
)

# %% [markdown]
# On the DGX H100 our small layer is all latency. That is a lesson as well: few tokens per rank, and
# the exchange of sizes costs as much as that of rows.
#
# We have to keep the load even. Will training do that by itself?
#
# ## 6 · Balance: a loss, or a bias
#
# Training does the opposite. An expert that is chosen learns; one that has learned is chosen. Two
# remedies are in use.
#
# **An auxiliary loss** (GShard, Switch). Let fᵢ be the share of choices of expert i, Pᵢ its mean
# probability, and add α · E · Σ fᵢPᵢ to the loss. E · Σ fᵢPᵢ is 1 when all is even. Counts have no
# gradient; that of Pᵢ is proportional to fᵢ, so the fullest expert is pushed down most. But this is
# a second goal beside the one that we train for.
#
# **A bias without a loss** ([arXiv 2408.15664](https://arxiv.org/abs/2408.15664), DeepSeek-V3).
# Each expert has a number that is added to its probability *when the router chooses*, and not in
# the weights. After each step it moves down by γ where the load was above the mean, and up where it
# was below. No gradient is disturbed.

# %%
# %%rank 0
print(inspect.getsource(balance_loss), inspect.getsource(update_bias), sep="\n\n")

# %% [markdown]
# Both count the choices of *all* ranks of a group. Now compare four small GPTs with 8 experts, 2
# per token: without help, with α = 0.1, with α = 1, and with a bias. There are four ranks, so each
# trains one of them, alone, with all experts in its own process.

# %%
# %%rank 0
skew_guess = predict("Fullest expert / mean after 60 steps without help?", guess=None)
skew_guess

# %%
NUM_STEPS = 60 if quick else 300
alone = make_expert_mesh(1).ep_group  # this rank only: nothing is counted elsewhere


def train(alpha: float, speed: float):
    """Loss of the language model, and load of the fullest expert / mean, of every step."""
    torch.manual_seed(0)
    sizes = GPTConfig(vocab_size=64, context=32, width=32, num_layers=1, num_heads=4)
    model = GPT(sizes)
    experts = MoEConfig(width=32, expert_width=32, num_experts=8, top_k=2)
    (layer,) = use_experts(model, experts)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, fullest = [], []
    for step in range(NUM_STEPS):
        tokens, answers = (t.to(device) for t in make_tokens(64, 32, 64, seed=step))
        optimizer.zero_grad()
        loss = lm_loss(model(tokens), answers)
        (loss + alpha * balance_loss(layer.routing, alone)).backward()
        optimizer.step()
        load = count_choices(layer.routing, alone)
        if speed:
            update_bias(layer.router, load, speed=speed)
        losses.append(loss.item())
        fullest.append(imbalance(load))
    return losses, fullest


four = {
    "no help": (0.0, 0.0),
    "loss, α = 0.1": (0.1, 0.0),
    "loss, α = 1": (1.0, 0.0),
    "bias": (0.0, 0.003),
}
results = [None] * world_size
dist.all_gather_object(results, train(*list(four.values())[rank]))
runs = dict(zip(four, results, strict=True))

# %%
# %%rank 0
figure, _ = new_figure(9.5, 3.6)
figure.clear()
with plot_style():
    left, right = figure.subplots(1, 2)
steps = list(range(1, NUM_STEPS + 1))
for ax, which, ylabel in ((left, 0, "loss"), (right, 1, "fullest expert / mean")):
    plot_lines(
        steps,
        {name: run[which] for name, run in runs.items()},
        xlabel="step",
        ylabel=ylabel,
        ax=ax,
    )
figure


# %%
# %%rank 0
def late(name: str, which: int) -> float:
    """Mean of the last third of a run."""
    values = runs[name][which][-NUM_STEPS // 3 :]
    return sum(values) / len(values)


display(
    skew_guess.reveal(late("no help", 1)),
    claim("no help: fullest expert / mean, late", late("no help", 1), (">", 1.6)),
    claim("α = 0.1: fullest expert / mean, late", late("loss, α = 0.1", 1), ("<", 1.35)),
    claim("bias: fullest expert / mean, late", late("bias", 1), ("<", 1.35)),
    claim(
        "α = 1: loss at step 20 above that without help",
        runs["loss, α = 1"][0][19] - runs["no help"][0][19],
        (">", 0.5),
    ),
    claim("α = 1: fullest expert / mean, at worst", max(runs["loss, α = 1"][1]), 4.0, atol=0.1),
    claim(
        "bias and α = 0.1: late loss less that without help",
        [late(name, 0) - late("no help", 0) for name in ("bias", "loss, α = 0.1")],
        ("<", 0.03),
    ),
)

# %% [markdown]
# Without help the fullest expert has about twice the mean load. The bias evens it, and so does α =
# 0.1, and neither costs anything that we could measure in a model this small. α = 1 shows what is
# wrong with a second goal. It pushes so hard that the tokens swing from one expert to the next. In
# some steps every token visits the same one (4 times the mean), and meanwhile the model learns
# hardly any language. The right α has to be found by trial. DeepSeek-V3 uses the bias with γ =
# 0.001 (0 for the last 500 billion of 14.8 trillion tokens) and keeps a tiny loss, α = 0.0001,
# against extremes within one sequence.
#
# ## 7 · Beside data parallelism
#
# With more ranks than one set of experts needs, there are copies. On four ranks with **ep = 2**,
# ranks 0 and 1 hold all experts, and so do 2 and 3. Every rank still has its own tokens: for
# attention, router and shared experts this *is* data parallelism over four ranks. Only the experts
# see a different picture.
#
# | | held by | its gradient on one rank is | sum over | divide by |
# |---|---|---|---|---|
# | attention, router, shared experts | all 4 ranks | of that rank's tokens | all 4 | 4 |
# | expert | 2 ranks (*edp* group) | of the tokens of its *ep* group, already | the 2 copies | 4 |
#
# The last number is where programs go wrong. There are two copies, so one takes the mean of two.

# %%
# %%rank 0
copies_guess = predict("Mean over the 2 copies: how many times too large?", guess=None)
copies_guess

# %%
half = make_expert_mesh(2)
copied = build(half)
copied(batch[rank]).square().mean().backward()
wrong = copied.experts.up_LDF.grad.clone()
dist.all_reduce(wrong, group=half.edp_group)
wrong /= dist.get_world_size(half.edp_group)  # the mean over the copies
average_gradients(copied, half)
mine = half.own_experts(8)
right = whole.experts.up_LDF.grad[mine.start : mine.stop]
mesh_error = torch.stack(
    [
        (copied.experts.up_LDF.grad - right).abs().max(),
        (copied.router.weight_ED.grad - whole.router.weight_ED.grad).abs().max(),
    ]
)
dist.all_reduce(mesh_error, op=dist.ReduceOp.MAX)
too_large = (wrong.norm() / right.norm()).item()
copies = dist.get_process_group_ranks(half.edp_group)
print(f"rank {rank}: experts {list(mine)}, copies on ranks {copies}")

# %%
# %%rank 0
try:
    replace(half, ep=3).own_experts(8)
    three = "works"
except ValueError as error:
    three = str(error)
display(
    copies_guess.reveal(too_large),
    claim(
        "ep 2 x dp 2: gradients of the experts against one process",
        mesh_error[0].item(),
        ("<", 1e-12),
    ),
    claim("ep 2 x dp 2: gradient of the router", mesh_error[1].item(), ("<", 1e-12)),
    claim("mean over the copies: gradient too large by a factor of ep", too_large, 2.0, rtol=1e-9),
    claim("8 experts on 3 ranks", three, lambda got: "8 = 3 x 2 + 2" in got),
)

# %% [markdown]
# AdamW hides such a factor, since it divides by the gradient's size. Clipping does not: the
# experts' part of the norm is wrong, and so everybody's step is.
#
# How large should ep be? Large enough that the experts fit; small enough that tokens stay on fast
# links. DeepSeek-V3 was trained on 2,048 GPUs with 16 pipeline stages and ep 64, over eight nodes.
# We count lecture 5's 16 bytes per parameter; its own recipe, with Adam's moments in bf16, needs
# fewer.


# %%
# %%rank 0
def gb_per_gpu(ep: int = 64, stages: int = 16, zero1: bool = True):
    """Training state of DeepSeek-V3 on one of 2,048 GPUs."""
    rest = (1 - in_experts) * v3.num_parameters / stages
    experts = in_experts * v3.num_parameters / stages / ep
    replicas = 2048 // stages  # of what is not an expert; experts have replicas / ep copies

    def state(parameters: float, copies: float) -> dict[str, float]:
        return {
            "weights, gradients": 4 * parameters,
            "optimizer": 12 * parameters / (copies if zero1 else 1),
        }

    bars = {
        "routed experts": state(experts, max(1.0, replicas / ep)),
        "the rest": state(rest, replicas),
    }
    total = sum(sum(parts.values()) for parts in bars.values()) / 1e9
    return plot_stacked(
        {n: {k: v / 1e9 for k, v in parts.items()} for n, parts in bars.items()},
        xlabel="GB per GPU",
        limit=80.0,
        limit_label="80 GB",
        title=f"{total:.1f} GB in all; tokens {'stay in a node' if ep <= 8 else 'cross nodes'}",
        form="{:.1f}",
    )


explore(
    gb_per_gpu,
    ep=[1, 2, 4, 8, 16, 32, 64, 128],
    stages=[1, 4, 8, 16],
    zero1=True,
    labels={"ep": "ep", "stages": "pipeline stages", "zero1": "optimizer state sharded (ZeRO-1)"},
    alt="Training state per GPU of DeepSeek-V3's experts and of the rest",
)

# %%
# %%rank 0
experts_gb = 4 * in_experts * v3.num_parameters / 16 / 64 / 1e9
display(
    claim(
        "GB of weights and gradients of experts per GPU, ep 64, 16 stages",
        experts_gb,
        2.55,
        rtol=0.01,
    ),
    claim("the same GB with ep 1", experts_gb * 64, (">", 160)),
)

# %% [markdown]
# ### In the training program
#
# `python -m minidist.train` does all of this: `--num-experts 8` puts experts in the place of every
# MLP, and of the data-parallel ranks `--ep` share them. It counts each expert once when it clips,
# with `--zero 1` it shards an expert's Adam over the expert's copies, and its log has the imbalance
# and what was dropped. `--ep` changes who holds which expert, and nothing else. So three runs must
# have one loss curve:

# %% tags=["open"]
options = "--num-experts 8 --top-k 2 --shared-experts 1 --precision fp64 --zero 1 --quiet"
options += " --num-layers 2 --width 32 --steps 12 --lr 0.01 --max-norm 0.5 --eval-every 0"
records = {1: [], 2: [], 4: []}
for ep, record in records.items():
    program.train(program.parse_args([*options.split(), "--ep", str(ep)]), on_step=record.append)

# %%
# %%rank 0
curves = {
    ep: torch.tensor([[step["loss"], step["grad_norm"]] for step in record], dtype=torch.float64)
    for ep, record in records.items()
}
for step in (0, 3, 11):
    losses = "   ".join(f"ep {ep}: {curve[step, 0]:.12f}" for ep, curve in curves.items())
    print(f"step {step + 1:2}  loss  {losses}")
print(f"fullest expert / mean in the last step: {records[2][-1]['imbalance']:.2f}")
try:
    program.parse_args([*options.split(), "--ep", "3"]).check(world_size)
    three = "works"
except ValueError as error:
    three = str(error)
display(
    claim(
        "ep 2 and 4 against ep 1, losses and gradient norms: largest relative difference",
        max((curves[ep] / curves[1] - 1).abs().max().item() for ep in (2, 4)),
        ("<", 1e-9),
    ),
    claim("every step was clipped: smallest norm", curves[2][:, 1].min().item(), (">", 0.5)),
    claim("--ep 3 on four ranks", three, lambda got: "4 ranks do not divide" in got),
)

# %% [markdown]
# ## 8 · What was chosen
#
# | | routed experts, width | per token | shared | balance | dropped |
# |---|---|---|---|---|---|
# | GShard | up to 2,048, of 8,192, every other block | 2 | 0 | loss | yes |
# | Switch | up to 2,048, of 6,144 | 1 | 0 | loss, α = 0.01 | yes |
# | Mixtral 8x7B | 8, of 14,336 | 2 | 0 | | |
# | DeepSeek-V3 | 256, of 2,048 | 8 | 1 | bias, and loss with α = 0.0001 | no |
# | Llama 4 Maverick | 128, of 8,192, every other block | 1 | 1 | | |
#
# An empty field means that the publication does not say. DeepSeek-V3's experts are many and narrow
# (DeepSeekMoE, [arXiv 2401.06066](https://arxiv.org/abs/2401.06066)): with 8 of 256 there are far
# more combinations than with 2 of 8, and the FLOPs are the same if an expert is a quarter as wide.
# Shared experts take what every token
# needs, so that the routed ones need not all learn it.

# %%
# %%rank 0
combinations = math.comb(256, 8) / math.comb(8, 2)
display(
    claim(
        "combinations, 8 of 256 / 2 of 8, as a power of ten",
        math.log10(combinations),
        13.2,
        rtol=0.01,
    ),
    claim("Switch: factor of its auxiliary loss", 0.01, status="cited", authority=SWITCH),
    claim("DeepSeek-V3: speed of its bias", 0.001, status="cited", authority=DEEPSEEK),
)

# %% [markdown]
# ## Now you
#
# Write a function that takes choices (N, K) and gives the **smallest capacity factor that drops
# nothing**, without the help of rounding: a buffer of 7.5 rows has room for 7. The cell after it
# tries your function on twenty routers.


# %%
def smallest_factor(choices_NK, num_experts: int) -> float | None:
    """Your turn. torch.bincount counts; a fraction of N * K / E is what you are after."""
    return None


# %%
# %%rank 0
def check(answer) -> str:
    for seed in range(20):
        choices = throw(64 + 16 * seed, 8, 2, skew=0.1 * seed, seed=seed)
        factor = answer(choices, 8)
        if factor is None:
            return "Not written yet."
        rows = float(factor) * choices.numel() / 8
        if not keep_within_capacity(choices, 8, math.floor(rows + 1e-3)).all():
            return f"Case {seed}: {factor:.4g} drops a row."
        if keep_within_capacity(choices, 8, math.ceil(rows - 1e-3) - 1).all():
            return f"Case {seed}: {factor:.4g} is larger than needed."
    return "Right, in all 20 cases."


def one_answer(choices_NK, num_experts: int) -> float:
    return imbalance(torch.bincount(choices_NK.flatten(), minlength=num_experts))


print(check(smallest_factor))
display(
    claim(
        "the load of the fullest expert / mean is that factor",
        check(one_answer),
        "Right, in all 20 cases.",
    ),
    claim(
        "a factor of 4 is larger than needed", check(lambda c, e: 4.0), lambda got: "larger" in got
    ),
    claim("a factor of 1 drops a row", check(lambda c, e: 1.0), lambda got: "drops" in got),
    claim(
        "half a row too few drops a row",
        check(lambda c, e: one_answer(c, e) - 0.5 * e / c.numel()),
        lambda got: "drops" in got,
    ),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `load = torch.bincount(choices_NK.flatten(), minlength=num_experts)`, and then
# `load.max() / load.double().mean()`. It is the imbalance of section 6: capacity has to pay for the
# fullest expert, and so does everybody's time when nothing is dropped.
#
# </details>
#
# ## Summary
#
# - A token meets k experts of E: parameters grow with E, FLOPs with k. Memory pays for all of them.
# - The router learns through the weights of the experts it has chosen. Choices have no gradient.
# - Dispatch: sort by expert, exchange sizes, exchange rows. Combine goes back. The gradient of an
#   all-to-all is the all-to-all with sizes swapped.
# - Capacity makes shapes fixed and drops rows: with many experts about 100/√(2π · rows per expert)
#   percent at factor 1, by chance alone.
# - Four exchanges of N k D (n−1)/n numbers per layer and step, on the critical path. Between nodes:
#   one copy per node, few nodes.
# - The fullest expert sets the pace of all ranks. An auxiliary loss evens the load and competes
#   with the model's own; a bias on the choice does not.
# - Experts: sum over copies only. Everything else: over all ranks. Divide both by all ranks.
#
# ## Questions
#
# 1. k = 1, and the weight is divided by the sum of the weights. What does the router learn?
#
# <details><summary>Answer</summary>
#
# Nothing. The weight is p/p = 1, a constant, so its gradient is 0. With k = 1 the weight must be
# the probability itself, as in the Switch Transformer. `Router` does that.
#
# </details>
#
# 2. First choices of all tokens are served before second choices. May a language model drop rows
#    like that?
#
# <details><summary>Answer</summary>
#
# In training it leaks: a *later* token's first choice can push out an *earlier* token's second one,
# so the past depends on the future. And whether a row is dropped depends on the other sequences in
# the batch. Both are reasons to drop nothing.
#
# </details>
#
# 3. You clip gradients by their global norm under expert parallelism. Which sums over ranks do you
#    need?
#
# <details><summary>Answer</summary>
#
# The squared norm of the replicated parameters counts once: every rank has it. The squared norms of
# the experts are added over the ep group, since each rank has different ones, and not over the edp
# group, whose ranks have the same ones.
#
# </details>
#
# 4. Should the bias be part of the weights as well as of the choice?
#
# <details><summary>Answer</summary>
#
# No. It would then change the output of the model for reasons of balance alone: a rarely chosen
# expert would speak louder, whatever it has learned.
#
# </details>
#
# 5. Tensor parallelism inside each expert, or more expert parallelism?
#
# <details><summary>Answer</summary>
#
# Narrow experts (2,048 wide) cut by eight are 256 wide: small products that run badly, and an
# all-reduce on top. Expert parallelism keeps the products whole. Tensor parallelism remains for
# attention, whose group need not be that of the experts.
#
# </details>
#
# ## Try it
#
# - Give `train` other speeds: 0.0003 and 0.1. What does a bias do that moves too fast?
# - In section 2 take `average_gradients` away and compare the experts' gradients: which factor?
# - Set `capacity_factor=1.0` in `train`. Does the loss show what was dropped?
#
# In [**lab3_fsdp**](../labs/lab3_fsdp/lab3_fsdp.ipynb) you shard parameters that all ranks use;
# here each rank used its own. The operators with a backward pass of their own are in
# [**bonus_tensor_parallel**](../labs/bonus_tensor_parallel/bonus_tensor_parallel.ipynb).
#
# ## What to read
#
# - *GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding*,
#   [arXiv 2006.16668](https://arxiv.org/abs/2006.16668)
# - *Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity*,
#   [arXiv 2101.03961](https://arxiv.org/abs/2101.03961)
# - *MegaBlocks: Efficient Sparse Training with Mixture-of-Experts*,
#   [arXiv 2211.15841](https://arxiv.org/abs/2211.15841)
# - *Mixtral of Experts*, [arXiv 2401.04088](https://arxiv.org/abs/2401.04088)
# - *DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models*,
#   [arXiv 2401.06066](https://arxiv.org/abs/2401.06066)
# - *Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts*,
#   [arXiv 2408.15664](https://arxiv.org/abs/2408.15664)
# - *DeepSeek-V3 Technical Report*, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437)
# - In `lib/minidist/parallel/expert/`: `router.py`, `dispatch.py`, `layer.py`, `gradients.py`
