"""Predicted time of a training step, for any mix of data, pipeline, context and tensor parallelism.

The model works block by block. On one GPU the forward pass of one block and one micro-batch takes

    matrix products    FLOPs / (tp cp) / (peak * matmul_efficiency)
    everything else    2 * stored activation bytes / memory bandwidth   (written once, read once)
    tensor parallel    2 all-reduces of the block's output (sequence parallelism: the same bytes)
    at least           launch_s, the time the host needs to launch its kernels

Backward takes twice the products, twice the traffic and the same all-reduces; recomputation repeats
forward. A stage runs its blocks; the last stage also runs the head. A pipeline adds its bubble and
two exposed messages per micro-batch and chunk of layers. The reduction of gradients over dp runs
behind backward, as far as backward takes long enough to hide it. The optimiser reads and writes its
states once.

Two numbers are fitted: `GPU.matmul_efficiency` (0.7 of peak on A100, 0.5 on H100) and `launch_s`
(0.9 ms, eager Megatron). tests/cost/test_cost_published.py compares the predictions with published
measurements: the error is 5 to 15 % on average, and up to a factor of two for single runs with
effects that the model does not contain. Kernels, NCCL and clocks differ.

Example: GPT-3 on 1,024 A100s, close to the 34 days of arXiv 2104.04473.

>>> from minidist.cost.hardware import DGX_A100
>>> from minidist.cost.transformer import GPT3_175B
>>> plan = ParallelismConfig(dp=16, pp=8, tp=8)
>>> step = predict_step(model=GPT3_175B, parallelism=plan, node=DGX_A100, global_batch=1536,
...                     recompute="full")
>>> 30 < 300e9 / step.tokens_per_s / 86400 < 38
True
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.cost.comm import all_gather_seconds, all_reduce_seconds, p2p_seconds
from minidist.cost.hardware import Node
from minidist.cost.memory import (
    MIXED_ADAM,
    StateBytes,
    activation_bytes_per_layer,
    parameters_per_gpu,
)
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.transformer import Transformer

_BYTES = 2  # of an activation and of a gathered parameter


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimiser step, divided into parts. Only exposed communication counts.

    Attributes:
        compute_s: of the busiest stage: m micro-batches, forward, backward, recomputation.
        tensor_s, context_s, pipeline_s, data_s: exposed communication by axis.
        host_s: time in which the GPU waits for the host to launch kernels (small layers).
        bubble_s: idle time of the busiest stage while the pipeline fills and drains.
        optimizer_s: the update.
        hidden_s: communication that runs behind computation (not part of the total).
        mfu, hfu: utilisation without and with recomputation.
    """

    compute_s: float
    host_s: float
    tensor_s: float
    context_s: float
    pipeline_s: float
    data_s: float
    bubble_s: float
    optimizer_s: float
    hidden_s: float
    tokens: int
    num_gpus: int
    mfu: float
    hfu: float

    @property
    def total_s(self) -> float:
        return (
            self.compute_s
            + self.host_s
            + self.tensor_s
            + self.context_s
            + self.pipeline_s
            + self.data_s
            + self.bubble_s
            + self.optimizer_s
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job."""
        return self.tokens / self.total_s

    def shares(self) -> dict[str, float]:
        """Share of the step of each part, largest first; the shares add up to 1."""
        names = ("compute", "host", "tensor", "context", "pipeline", "data", "bubble", "optimizer")
        parts = {name: getattr(self, f"{name}_s") / self.total_s for name in names}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Seconds of one block for one micro-batch on one GPU."""

    forward_s: float
    again_s: float  # recomputed during backward
    tensor_s: float  # exposed all-reduces, forward, backward and recomputation together
    context_s: float
    host_s: float  # how much longer the host's launches take than the GPU's work

    @property
    def compute_s(self) -> float:
        return 3 * self.forward_s + self.again_s


def _block(
    model: Transformer,
    p: ParallelismConfig,
    node: Node,
    micro_batch: int,
    recompute: str,
    fused_attention: bool,
    dropout: bool,
    dtype: str,
    launch_s: float,
) -> _Block:
    tokens = micro_batch * model.context / p.cp
    flops_per_s = node.gpu.peak(dtype) * node.gpu.matmul_efficiency
    attention_s = tokens * model.attention_flops_per_token() / model.num_layers / p.tp / flops_per_s
    products_s = tokens * 2 * model.block_weights / p.tp / flops_per_s

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
        return 2 * stored / node.gpu.memory_bandwidth_bytes_per_s

    forward_s = products_s + attention_s + traffic_s("none")
    again_s, passes = 0.0, 2
    if recompute == "full":
        again_s, passes = forward_s, 3
    elif recompute == "selective":
        again_s = attention_s + traffic_s("none") - traffic_s("selective")

    tensor_s = 0.0
    if p.tp > 1:
        link = node.link_for(num_ranks=p.tp).attainable
        size = tokens * model.width * _BYTES
        tensor_s = 2 * passes * all_reduce_seconds(num_bytes=size, num_ranks=p.tp, link=link)
    context_s = 0.0
    if p.cp > 1:  # the ring passes keys and values on while attention computes
        link = node.link_for(num_ranks=p.cp, stride=p.tp).attainable
        size = micro_batch * model.context * 2 * model.kv_width / p.tp * _BYTES
        ring_s = all_gather_seconds(num_bytes=size, num_ranks=p.cp, link=link)
        context_s = max(0.0, ring_s - attention_s) + 2 * max(0.0, ring_s - attention_s)
    busy_s = 3 * forward_s + again_s + tensor_s + context_s
    launches = 4 if recompute == "full" else 3  # a backward pass has twice the kernels of a forward
    return _Block(
        forward_s=forward_s,
        again_s=again_s,
        tensor_s=tensor_s,
        context_s=context_s,
        host_s=max(0.0, launches * launch_s - busy_s),
    )


def _data_parallel(
    model: Transformer,
    p: ParallelismConfig,
    node: Node,
    states: StateBytes,
    num_microbatches: int,
    backward_s: float,
    compute_s: float,
    overlap: bool,
) -> tuple[float, float]:
    """(exposed, hidden) seconds of gradient and parameter traffic over dp (and cp)."""
    n = p.shard_ranks
    if n == 1:
        return 0.0, 0.0
    stride = p.tp if p.cp > 1 else p.stride("dp")
    link = node.link_for(num_ranks=n, stride=stride).attainable
    held = parameters_per_gpu(model=model, parallelism=p)
    layers = max(1, model.num_layers // p.pp)
    collectives = layers if overlap else 1  # one bucket per block, or one after backward
    num_nodes = min(n, max(1, n * stride // node.num_gpus))
    latency_s = collectives * (
        (n - num_nodes) * node.intra_node.latency_s + (num_nodes - 1) * node.network.latency_s
    )

    def ring_s(num_bytes: float) -> float:  # time of an all-gather, and of a reduce-scatter
        return latency_s + (n - 1) / n * num_bytes / link.bandwidth_bytes_per_s

    gather_s, reduce_s = ring_s(held * _BYTES), ring_s(held * states.gradient)
    if p.zero_stage == 3:  # every micro-batch gathers for forward and again for backward
        total_s = num_microbatches * (2 * gather_s + reduce_s)
        room_s = compute_s
        floor_s = (gather_s + reduce_s) / layers  # the first gather, the last reduction
    elif p.zero_stage > 0:  # stage 2 keeps no whole gradient, so it reduces every micro-batch
        times = num_microbatches if p.zero_stage == 2 else 1
        total_s, room_s = times * reduce_s + gather_s, times * backward_s
        floor_s = reduce_s / layers + gather_s  # the updated parameters are gathered after the step
    else:
        total_s, room_s, floor_s = 2 * reduce_s, backward_s, 2 * reduce_s / layers
    if not overlap:
        return total_s, 0.0
    exposed_s = max(floor_s, total_s - room_s)
    return exposed_s, total_s - exposed_s


def predict_step(
    *,
    model: Transformer,
    parallelism: ParallelismConfig,
    node: Node,
    global_batch: int,
    micro_batch: int = 1,
    states: StateBytes = MIXED_ADAM,
    recompute: str = "none",
    fused_attention: bool = False,
    dropout: bool = True,
    overlap_dp: bool = True,
    dtype: str = "bf16",
    launch_s: float = 0.9e-3,
) -> StepTime:
    """Seconds of one step, divided into parts.

    Args:
        global_batch, micro_batch: in sequences of `model.context` tokens.
        recompute: none, selective or full.
        fused_attention: FlashAttention: no memory traffic for the scores.
        overlap_dp: True reduces gradients behind backward (DDP, FSDP); False makes one reduction
            after backward.
        launch_s: host time to launch the kernels of one block's forward pass; nearly 0 with CUDA
            graphs or torch.compile.

    Raises:
        ValueError: the batch, the model or the ranks are not divisible as the plan needs.
    """
    p = parallelism
    m = p.num_microbatches(global_batch=global_batch, micro_batch=micro_batch)
    if found := p.problems(model=model, global_batch=global_batch, micro_batch=micro_batch):
        raise ValueError(f"{p}: " + "; ".join(found))

    # One micro-batch in one stage. The last stage has the head, so it is the busiest stage.
    block = _block(
        model, p, node, micro_batch, recompute, fused_attention, dropout, dtype, launch_s
    )
    layers = model.num_layers / p.pp
    tokens = micro_batch * model.context / p.cp
    flops_per_s = node.gpu.peak(dtype) * node.gpu.matmul_efficiency
    head_s = 3 * tokens * 2 * model.vocab_size * model.width / p.tp / flops_per_s
    stage_s = layers * block.compute_s + head_s
    stage_wait_s = layers * (block.tensor_s + block.context_s + block.host_s)

    # The pipeline: messages of each micro-batch, and the time to fill and drain the pipeline.
    pipeline_s = bubble_s = 0.0
    if p.pp > 1:
        message_s = _message_s(p, node, tokens * model.width * _BYTES / p.tp)
        pipeline_s = 2 * m * message_s * p.virtual_stages
        mean_stage_s = layers * block.compute_s + head_s / p.pp + stage_wait_s
        bubble_s = (p.pp - 1) * (mean_stage_s + 2 * message_s) / p.virtual_stages

    compute_s = m * stage_s
    backward_s = layers * (2 * block.forward_s + block.again_s) + head_s * 2 / 3
    data_s, hidden_s = _data_parallel(model, p, node, states, m, backward_s, compute_s, overlap_dp)
    optimizer_s = _optimizer_s(model, p, node, states)

    total_tokens = global_batch * model.context
    parts = dict(
        compute_s=compute_s,
        host_s=m * layers * block.host_s,
        tensor_s=m * layers * block.tensor_s,
        context_s=m * layers * block.context_s,
        pipeline_s=pipeline_s,
        data_s=data_s,
        bubble_s=bubble_s,
        optimizer_s=optimizer_s,
    )
    capacity = p.world_size * node.gpu.peak(dtype) * sum(parts.values())
    return StepTime(
        **parts,
        hidden_s=hidden_s,
        tokens=total_tokens,
        num_gpus=p.world_size,
        mfu=total_tokens * model.flops_per_token() / capacity,
        hfu=total_tokens * model.flops_per_token(recompute=recompute) / capacity,
    )


def _optimizer_s(model: Transformer, p: ParallelismConfig, node: Node, states: StateBytes) -> float:
    """Seconds to read and write what the optimiser updates on one GPU."""
    held = parameters_per_gpu(model=model, parallelism=p)
    mine = held / (p.shard_ranks if p.zero_stage else 1)
    update_bytes = 2 * states.optimizer + states.parameter + states.gradient
    return mine * update_bytes / node.gpu.memory_bandwidth_bytes_per_s


def _message_s(p: ParallelismConfig, node: Node, num_bytes: float) -> float:
    """Seconds of a message from one stage to the next."""
    stride = min(p.stride("pp"), node.num_gpus)
    return p2p_seconds(
        num_bytes=num_bytes, link=node.link_for(num_ranks=2, stride=stride).attainable
    )
