"""Predicted time of a training step, for any mix of data, pipeline, context, tensor and expert
parallelism.

A stage runs its blocks (`minidist.cost.block`) for m micro-batches; the last stage also runs the
head. A pipeline adds its bubble and two exposed messages per micro-batch and chunk of layers.
Gradients and shards of parameters travel over dp and cp, and are hidden as far as the software
hides them (`minidist.cost.software`, `minidist.cost.exposed`). The optimiser reads and writes its
states once. All ranks wait for the slowest, which costs a little more with every doubling of nodes.

One set of constants per GPU generation and per software is fitted to the calibration rows in
`minidist/plan/published`; `make planner-report` prints every prediction beside the published
figure. `minidist.plan.error_bar` gives the error of the predictions of one kind.

Example: GPT-3 on 1,024 A100s, close to the 34 days of arXiv 2104.04473.

>>> from minidist.cost.hardware import DGX_A100
>>> from minidist.cost.software import MEGATRON_2021
>>> from minidist.cost.transformer import GPT3_175B
>>> plan = ParallelismConfig(dp=16, pp=8, tp=8)
>>> step = predict_step(model=GPT3_175B, parallelism=plan, node=DGX_A100, global_batch=1536,
...                     recompute="full", software=MEGATRON_2021)
>>> 30 < 300e9 / step.tokens_per_s / 86400 < 38
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from minidist.cost.block import BYTES, BlockTime, block_seconds, head_seconds
from minidist.cost.comm import p2p_seconds
from minidist.cost.exposed import data_parallel_seconds
from minidist.cost.hardware import Node
from minidist.cost.memory import MIXED_ADAM, StateBytes, parameters_per_gpu, shard_parameters
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.software import Software, usual_software
from minidist.cost.transformer import Transformer

PARTS = ("compute", "host", "tensor", "context", "expert", "pipeline", "data", "bubble")
PARTS += ("optimizer", "straggler")
STEP_SCHEDULES = ("1f1b", "zb_h1", "zb_h2")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimiser step, divided into parts. Only exposed communication counts.

    Attributes:
        compute_s: of the busiest stage: m micro-batches, forward, backward, recomputation.
        tensor_s, context_s, expert_s, pipeline_s, data_s: exposed communication by axis.
        host_s: time in which the GPU waits for the host to launch kernels (small layers).
        bubble_s: idle time of the busiest stage while the pipeline fills and drains.
        optimizer_s: the update, and what else a step does once.
        straggler_s: waiting for the slowest node.
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
    expert_s: float = 0.0
    straggler_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(getattr(self, f"{name}_s") for name in PARTS)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job."""
        return self.tokens / self.total_s

    def shares(self) -> dict[str, float]:
        """Share of the step of each part, largest first; the shares add up to 1."""
        total_s = self.total_s
        parts = {name: getattr(self, f"{name}_s") / total_s for name in PARTS}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))


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
    launch_s: float | None = None,
    software: Software | None = None,
    schedule: str = "1f1b",
    offload: bool = False,
    even_stages: bool = True,
) -> StepTime:
    """Seconds of one step, divided into parts.

    Args:
        global_batch, micro_batch: in sequences of `model.context` tokens.
        recompute: none, selective, full; half or every_second of the blocks' work.
        fused_attention: FlashAttention: no memory traffic for the scores.
        overlap_dp: False makes one reduction after backward, whatever the software can hide.
        launch_s: host time to launch the kernels of one block's forward pass, if it is not the
            software's; nearly 0 with CUDA graphs or torch.compile.
        software: the implementation; None takes what is usual today for the plan.
        schedule: of the pipeline: 1f1b (interleaved if the plan has virtual stages), zb_h1, zb_h2.
        offload: the optimiser's states live in host memory, and the host updates them.
        even_stages: False also takes layers that do not divide by pp, which some software spreads.

    Raises:
        ValueError: the batch, the model or the ranks are not divisible as the plan needs.
    """
    p = parallelism
    m = p.num_microbatches(global_batch=global_batch, micro_batch=micro_batch)
    found = p.problems(
        model=model, global_batch=global_batch, micro_batch=micro_batch, even_stages=even_stages
    )
    if found:
        raise ValueError(f"{p}: " + "; ".join(found))
    software = software or usual_software(p.zero_stage)
    if launch_s is not None:
        software = replace(software, launch_s=launch_s)
    if not overlap_dp:
        software = replace(software, overlap=0.0)
    block = block_seconds(
        model=model,
        parallelism=p,
        node=node,
        micro_batch=micro_batch,
        software=software,
        recompute=recompute,
        fused_attention=fused_attention,
        dropout=dropout,
        dtype=dtype,
    )
    return step_of_blocks(
        block,
        model=model,
        parallelism=p,
        node=node,
        micro_batch=micro_batch,
        num_microbatches=m,
        states=states,
        recompute=recompute,
        dtype=dtype,
        software=software,
        schedule=schedule,
        offload=offload,
    )


def step_of_blocks(
    block: BlockTime,
    *,
    model: Transformer,
    parallelism: ParallelismConfig,
    node: Node,
    micro_batch: int,
    num_microbatches: int,
    states: StateBytes,
    recompute: str,
    dtype: str,
    software: Software,
    schedule: str = "1f1b",
    offload: bool = False,
) -> StepTime:
    """The step of a plan from the time of one of its blocks. Layers that do not divide by the
    stages are spread as evenly as possible."""
    p, m = parallelism, num_microbatches
    tokens = micro_batch * model.context / p.cp
    head_s = head_seconds(
        model=model, gpu=node.gpu, dtype=dtype, tokens=tokens, tp=p.tp, software=software
    )
    layers = _busiest_layers(model.num_layers, p.pp, block.total_s, head_s)
    has_head = layers * p.pp == model.num_layers or layers == model.num_layers // p.pp
    stage_s = layers * block.compute_s + (head_s if has_head else 0.0)
    pipeline_s, bubble_s = _pipeline(model, p, node, block, head_s, tokens, m, schedule)
    backward_s = layers * (2 * block.forward_s + block.again_s) + head_s * 2 / 3
    data_s, hidden_s = data_parallel_seconds(
        model=model,
        parallelism=p,
        node=node,
        states=states,
        num_microbatches=m,
        backward_s=backward_s,
        compute_s=m * stage_s,
        software=software,
    )
    parts = dict(
        compute_s=m * stage_s,
        host_s=m * layers * block.host_s,
        tensor_s=m * layers * block.tensor_s,
        context_s=m * layers * block.context_s,
        expert_s=m * layers * block.expert_s,
        pipeline_s=pipeline_s,
        data_s=data_s,
        bubble_s=bubble_s,
        optimizer_s=software.step_s + _optimizer_s(model, p, node, states, offload),
    )
    nodes = max(1.0, p.world_size / node.num_gpus)
    parts["straggler_s"] = sum(parts.values()) * software.straggler * math.log2(nodes)
    total_tokens = p.dp * m * micro_batch * model.context
    capacity = p.world_size * node.gpu.peak(dtype) * sum(parts.values())
    counted = recompute if recompute in ("none", "selective", "full") else "none"
    return StepTime(
        **parts,
        hidden_s=hidden_s,
        tokens=total_tokens,
        num_gpus=p.world_size,
        mfu=total_tokens * model.flops_per_token() / capacity,
        hfu=total_tokens * model.flops_per_token(recompute=counted) / capacity,
    )


def _busiest_layers(num_layers: int, pp: int, block_s: float, head_s: float) -> int:
    """Blocks of the busiest stage: the larger part, or the smaller part together with the head."""
    few, many = num_layers // pp, -(-num_layers // pp)
    return many if many * block_s >= few * block_s + head_s else few


def _pipeline(
    model: Transformer,
    p: ParallelismConfig,
    node: Node,
    block: BlockTime,
    head_s: float,
    tokens: float,
    m: int,
    schedule: str,
) -> tuple[float, float]:
    """(seconds of exposed messages, seconds in which the pipeline fills and drains)."""
    if schedule not in STEP_SCHEDULES:
        raise ValueError(f"schedule is one of {', '.join(STEP_SCHEDULES)}, got {schedule!r}")
    if p.pp == 1:
        return 0.0, 0.0
    link = node.link_for(num_ranks=2, stride=min(p.stride("pp"), node.num_gpus)).attainable
    message_s = p2p_seconds(num_bytes=tokens * model.width * BYTES / p.tp, link=link)
    layers = model.num_layers / p.pp
    mean_stage_s = layers * block.total_s + head_s / p.pp
    weight_s = layers * block.weight_s + head_s / 3 / p.pp
    moved = {"1f1b": 0, "zb_h1": 1, "zb_h2": 2}[schedule]
    idle_s = max(0.0, mean_stage_s - moved * weight_s)
    tied_s = 0.0
    if model.tied:  # the first and the last stage add up the gradients of their table
        table = 2 * 2 * model.vocab_size * model.width / p.tp
        tied_s = p2p_seconds(num_bytes=table, link=link)
    messages_s = 2 * m * message_s * p.virtual_stages + tied_s
    return messages_s, (p.pp - 1) * (idle_s + 2 * message_s) / p.virtual_stages


def _optimizer_s(
    model: Transformer, p: ParallelismConfig, node: Node, states: StateBytes, offload: bool
) -> float:
    """Seconds to read and write what the optimiser updates on one GPU. The host of an offloaded
    optimiser gets gradients and returns parameters over PCIe, and its memory is slower."""
    count = shard_parameters if p.zero_stage else parameters_per_gpu
    mine = count(model=model, parallelism=p)
    update_bytes = 2 * states.optimizer + states.parameter + states.gradient
    if not offload:
        return mine * update_bytes / node.gpu.attainable_memory_bandwidth
    moved_s = mine * (states.gradient + states.parameter) / node.host_link_bytes_per_s
    return moved_s + mine * update_bytes / node.host_memory_bytes_per_s
