"""Seconds of one transformer block and of the head, for one micro-batch on one GPU.

    matrix products    FLOPs / (peak * e),   e = e_max * rows / (rows + r); in fp8
                       inputs and weights are read once more to be converted
    attention          FLOPs of the whole square / (peak * e_attention); unfused as products
    everything else    traffic * 2 * stored activation bytes / (memory bandwidth * e_memory)
    routing            8 reads and writes of the tokens sent, and expert_s per expert of the rank
    tensor parallel    2 all-reduces of the block's output (sequence parallelism: the same bytes),
                       as far as the software does not hide them behind products
    experts            2 all-to-alls of the tokens: over NVLink one copy per expert, over the
                       network one per node
    at least           launch_s, the time in which the host launches the kernels

A product with few rows fills the chip badly: r models this. A term for thin products (few
columns after tensor parallelism) was tried; the calibration rows fitted it to zero. `GPU` has
e_max, r, e_attention and e_memory, one set per generation; `Software` has the rest.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from minidist.cost.comm import all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from minidist.cost.hardware import GPU, Node
from minidist.cost.memory import activation_bytes_per_layer
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.software import Software
from minidist.cost.transformer import Transformer

BYTES = 2  # of an activation and of a gathered parameter
# Bytes per entry that a conversion to fp8 moves: 2 are read; one is written, and one transposed.
_CAST_TRAFFIC = 4.0
# Reads and writes of a routed token: sorted by rank, by expert, back by each, and summed.
_ROUTING_COPIES = 8.0
# Bytes per logit that the loss reads and writes: 16-bit logits, fp32 softmax, both gradients.
_LOGIT_TRAFFIC = 12.0


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Seconds of one block for one micro-batch on one GPU; communication as far as it is exposed.

    Attributes:
        forward_s, again_s: forward, and what recomputation repeats during backward.
        weight_s: the part of backward that computes gradients of weights (zero-bubble schedules
            move this part).
        tensor_s, context_s, expert_s: forward, backward and recomputation together.
        host_s: how much longer the host's launches take than the GPU's work.
    """

    forward_s: float
    again_s: float
    weight_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    host_s: float

    @property
    def compute_s(self) -> float:
        """A backward pass costs two forward passes."""
        return 3 * self.forward_s + self.again_s

    @property
    def wait_s(self) -> float:
        return self.tensor_s + self.context_s + self.expert_s + self.host_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.wait_s


def product_seconds(*, gpu: GPU, dtype: str, rows: float, n: float, k: float) -> float:
    """A matrix product of rows x k by k x n."""
    share = gpu.matmul_efficiency * rows / (rows + gpu.half_rows)
    seconds = 2 * rows * n * k / (gpu.peak(dtype) * share)
    if dtype != "fp8":
        return seconds
    # Of three products with a pair of operands each, every operand is converted once: input and
    # weights in the forward pass, the gradient of the output in the backward pass.
    entries = (rows * k + n * k + rows * n) / 3
    return seconds + _CAST_TRAFFIC * entries / gpu.attainable_memory_bandwidth


def head_seconds(
    *, model: Transformer, gpu: GPU, dtype: str, tokens: float, tp: int, software: Software
) -> float:
    """Forward and backward of the head, which stays in 16 bits, and the loss."""
    n, k = model.vocab_size / tp, float(model.width)
    dtype = "bf16" if dtype == "fp8" else dtype
    traffic_s = software.traffic * _LOGIT_TRAFFIC * tokens * n / gpu.attainable_memory_bandwidth
    return 3 * product_seconds(gpu=gpu, dtype=dtype, rows=tokens, n=n, k=k) + traffic_s


def _products(model: Transformer, gpu: GPU, dtype: str, tokens: float, tp: int, ep: int) -> float:
    """Forward pass of all products of a block."""
    h = float(model.width)
    product = functools.partial(product_seconds, gpu=gpu, dtype=dtype)
    attention_n = model.attention_weights / h / 2 / tp  # as two products of width h
    seconds = 2 * product(rows=tokens, n=attention_n, k=h)
    matrices = 3 if model.gated_mlp else 2
    dense_s = matrices * product(rows=tokens, n=model.mlp_width / tp, k=h)
    if not model.num_experts:
        return seconds + dense_s
    # Every rank holds experts / ep, and each of these gets the tokens of ep ranks. With ep > 1
    # tensor ranks route a part of the tokens each, to whole experts.
    cut, own = (1, tokens / tp) if ep > 1 else (tp, tokens)
    rows = own * model.experts_per_token * ep / model.num_experts
    routed_s = matrices * product(rows=rows, n=model.expert_width / cut, k=h)
    routed_s *= model.num_experts / ep
    shared = model.shared_experts * model.expert_width
    shared_s = matrices * product(rows=tokens, n=shared / tp, k=h) if shared else 0.0
    dense = model.dense_layers / model.num_layers
    return seconds + dense * dense_s + (1 - dense) * (routed_s + shared_s)


def _attention(
    model: Transformer, gpu: GPU, dtype: str, tokens: float, tp: int, fused: bool
) -> float:
    flops = tokens * model.attention_flops_per_token() / model.num_layers / tp
    dtype = "bf16" if dtype == "fp8" else dtype  # scores stay in 16 bits
    head = model.head_width
    if fused:
        efficiency = gpu.attention_efficiency * head / (head + gpu.half_head)
        return flops / (gpu.peak(dtype) * efficiency)
    shape = model.context / (model.context + gpu.half_rows) * head / (head + gpu.half_head)
    return flops / (gpu.peak(dtype) * gpu.matmul_efficiency * shape)


def block_seconds(
    *,
    model: Transformer,
    parallelism: ParallelismConfig,
    node: Node,
    micro_batch: int,
    software: Software,
    recompute: str,
    fused_attention: bool,
    dropout: bool,
    dtype: str,
) -> BlockTime:
    """One block of a plan. Of `parallelism` only tp, cp, ep and sequence_parallel matter."""
    p, gpu = parallelism, node.gpu
    tokens = micro_batch * model.context / p.cp
    products_s = _products(model, gpu, dtype, tokens, p.tp, p.ep)
    attention_s = _attention(model, gpu, dtype, tokens, p.tp, fused_attention)
    if fused_attention:
        attention_s /= software.attention

    def traffic_s(mode: str) -> float:
        stored = activation_bytes_per_layer(
            model=model,
            micro_batch=micro_batch,
            tp=p.tp,
            cp=p.cp,
            sequence_parallel=p.sequence_parallel,
            recompute=mode,
            fused_attention=fused_attention,
            dropout=dropout,
        )
        return software.traffic * 2 * stored / gpu.attainable_memory_bandwidth

    forward_s = products_s + attention_s + traffic_s("none")
    forward_s += _routing(model, gpu, p, tokens, software)
    again_s, passes = _recomputed(
        recompute,
        forward_s,
        half_s=forward_s - attention_s - products_s / 2,
        scores_s=attention_s + traffic_s("none") - traffic_s("selective"),
    )
    tensor_s = passes * _tensor(model, p, node, tokens)
    if p.tp <= node.num_gpus:  # it is hidden by copies over NVLink beside the products
        tensor_s *= software.tensor_exposed
    context_s = _context(model, p, node, micro_batch, attention_s) if p.cp > 1 else 0.0
    expert_s = passes * _expert(model, p, node, tokens) if p.ep > 1 else 0.0
    busy_s = 3 * forward_s + again_s + tensor_s + context_s + expert_s
    # A backward pass launches twice the kernels of a forward pass.
    launches = 3 + (again_s / forward_s)
    host_s = launches * software.launch_s * (1 + software.jitter * math.log2(p.tp))
    return BlockTime(
        forward_s=forward_s,
        again_s=again_s,
        weight_s=products_s,
        tensor_s=tensor_s,
        context_s=context_s,
        expert_s=expert_s,
        host_s=max(0.0, host_s - busy_s),
    )


def _routing(
    model: Transformer, gpu: GPU, p: ParallelismConfig, tokens: float, software: Software
) -> float:
    """Forward pass of what experts need beside their products.

    Tokens are sorted by expert and rank, sorted back, and summed; each expert of this rank has
    kernels of its own.
    """
    if not model.num_experts:
        return 0.0
    share = 1 - model.dense_layers / model.num_layers
    copies = tokens / p.tp * model.experts_per_token * model.width * BYTES
    moved_s = _ROUTING_COPIES * copies / gpu.attainable_memory_bandwidth
    return share * (moved_s + model.num_experts / p.ep * software.expert_s)


def _recomputed(
    recompute: str, forward_s: float, half_s: float, scores_s: float
) -> tuple[float, float]:
    """Seconds that backward repeats, and how often the block's all-reduces run in all.

    half: all but attention and every second matrix product; every_second: every second block.
    These are torchtitan's two kinds of selective recomputation."""
    table = {
        "none": (0.0, 2.0),
        "selective": (scores_s, 2.0),
        "half": (half_s, 2.5),
        "every_second": (forward_s / 2, 2.5),
        "full": (forward_s, 3.0),
    }
    if recompute not in table:
        raise ValueError(f"recompute is one of {', '.join(table)}, got {recompute!r}")
    return table[recompute]


def _tensor(model: Transformer, p: ParallelismConfig, node: Node, tokens: float) -> float:
    """Two all-reduces, after attention and after the MLP."""
    if p.tp == 1:
        return 0.0
    link = node.link_for(num_ranks=p.tp).attainable
    size = tokens * model.width * BYTES
    return 2 * all_reduce_seconds(num_bytes=size, num_ranks=p.tp, link=link)


def _context(
    model: Transformer, p: ParallelismConfig, node: Node, micro_batch: int, attention_s: float
) -> float:
    """The ring passes keys and values on while attention computes; backward passes twice."""
    link = node.link_for(num_ranks=p.cp, stride=p.tp).attainable
    size = micro_batch * model.context * 2 * model.kv_width / p.tp * BYTES
    ring_s = all_gather_seconds(num_bytes=size, num_ranks=p.cp, link=link)
    return 3 * max(0.0, ring_s - attention_s)


def _expert(model: Transformer, p: ParallelismConfig, node: Node, tokens: float) -> float:
    """Tokens go to their experts and come back: two all-to-alls, in the layers with experts.

    Over the network a token travels once to each node that it visits, and is copied there
    (DeepSeek-V3, arXiv 2412.19437, section 3.2.2). The ranks of an ep group are taken to be
    neighbours: a group that is not larger than a node lies inside one node."""
    per_token = model.width * BYTES
    mine = tokens / p.tp
    inside = node.intra_node.attainable
    copies = mine * model.experts_per_token * per_token
    moe = 1 - model.dense_layers / model.num_layers
    if p.ep <= node.num_gpus:
        return 2 * moe * all_to_all_seconds(num_bytes=copies, num_ranks=p.ep, link=inside)
    nodes = p.ep / node.num_gpus
    visited = nodes * (1 - (1 - 1 / nodes) ** model.experts_per_token)
    visited = min(visited, model.nodes_per_token or visited)
    port = node.network.attainable
    outside_s = (nodes - 1) * port.latency_s
    outside_s += mine * visited * (1 - 1 / nodes) * per_token / port.bandwidth_bytes_per_s
    copied_s = all_to_all_seconds(num_bytes=copies, num_ranks=node.num_gpus, link=inside)
    return 2 * moe * max(outside_s, copied_s)
