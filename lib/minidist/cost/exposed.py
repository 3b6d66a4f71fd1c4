"""Traffic of data parallelism and ZeRO, and how much of it a step waits for.

Gradients (and with ZeRO the shards of parameters) go around a ring of the dp * cp ranks:

    ZeRO-0     one all-reduce per bucket                        after or behind backward
    ZeRO-1     reduce-scatter, then all-gather of parameters
    ZeRO-2     reduce-scatter for every micro-batch, one all-gather
    ZeRO-3     two all-gathers and a reduce-scatter for every micro-batch and block

How much is hidden is measured, not assumed: `Software.overlap` is the share of the computing time
behind which traffic can hide, `Software.gather_ports` the network ports that gathers keep busy.
With few tokens per GPU (small micro-batches, many nodes) there is little to hide behind:
then the step takes as long as the network.
"""

from __future__ import annotations

import math

from minidist.cost.block import BYTES
from minidist.cost.hardware import Node
from minidist.cost.memory import StateBytes, parameters_per_gpu
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.software import Software
from minidist.cost.transformer import Transformer


def data_parallel_seconds(
    *,
    model: Transformer,
    parallelism: ParallelismConfig,
    node: Node,
    states: StateBytes,
    num_microbatches: int,
    backward_s: float,
    compute_s: float,
    software: Software,
) -> tuple[float, float]:
    """(exposed, hidden) seconds of gradient and parameter traffic over dp and cp.

    Args:
        backward_s: of one micro-batch in the busiest stage; compute_s: of all micro-batches.
    """
    p, m = parallelism, num_microbatches
    n = p.shard_ranks
    if n == 1:
        return 0.0, 0.0
    stride = p.tp if p.cp > 1 else p.stride("dp")
    link = node.link_for(num_ranks=n, stride=stride).attainable
    held = parameters_per_gpu(model=model, parallelism=p)
    layers = max(1, model.num_layers // p.pp)
    num_nodes = min(n, max(1, -(-n * stride // node.num_gpus)))
    ring_latency_s = (n - num_nodes) * node.intra_node.latency_s
    ring_latency_s += (num_nodes - 1) * node.network.latency_s

    bandwidth = link.bandwidth_bytes_per_s
    if p.zero_stage >= 2 and num_nodes > 1:
        ports = software.gather_ports / (1 + num_nodes / software.gather_half_nodes)
        bandwidth = min(bandwidth, ports * node.network.attainable.bandwidth_bytes_per_s)

    def ring_s(num_bytes: float, collectives: float) -> float:  # an all-gather, a reduce-scatter
        return collectives * ring_latency_s + (n - 1) / n * num_bytes / bandwidth

    bucket_bytes = software.shard_bucket_bytes if p.zero_stage else software.bucket_bytes
    buckets = max(1, math.ceil(held * states.gradient / bucket_bytes))
    per_block = layers if p.zero_stage >= 2 else buckets
    gather_s, reduce_s = ring_s(held * BYTES, per_block), ring_s(held * states.gradient, per_block)
    if p.zero_stage == 3:  # every micro-batch gathers for forward and again for backward
        total_s = m * (2 * gather_s + reduce_s)
        room_s, floor_s = compute_s, (gather_s + reduce_s) / per_block
    elif p.zero_stage == 2:  # no whole gradient is kept, so every micro-batch reduces
        total_s, room_s = m * reduce_s + gather_s, m * backward_s
        floor_s = reduce_s / per_block
    elif p.zero_stage == 1:
        total_s, room_s, floor_s = reduce_s + gather_s, backward_s, reduce_s / per_block
    else:
        total_s, room_s, floor_s = 2 * reduce_s, backward_s, 2 * reduce_s / per_block
    exposed_s = max(min(floor_s, total_s), total_s - software.overlap * room_s)
    return exposed_s, total_s - exposed_s
