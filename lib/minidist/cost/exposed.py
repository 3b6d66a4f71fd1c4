"""Traffic of data parallelism and ZeRO, and how much of it a step waits for.

Gradients (and with ZeRO the shards of parameters) go around a ring of the dp * cp ranks, those of
routed experts around the dp * cp * tp / ep ranks that hold the same experts:

    ZeRO-0     one all-reduce per bucket                        after or behind backward
    ZeRO-1     reduce-scatter, then all-gather of parameters
    ZeRO-2     reduce-scatter for every micro-batch, one all-gather
    ZeRO-3     two all-gathers and a reduce-scatter for every micro-batch and block
    HSDP       the same among the ranks that share one copy, and one all-reduce of the shards'
               gradients over the copies

An all-reduce of few bytes goes up and down a tree of nodes, so its latency grows with the logarithm
of the nodes; a reduce-scatter and an all-gather know only the ring, whose latency grows with the
ranks (NCCL's algorithms, `minidist.cost.nccl`).

How much is hidden is measured, not assumed: `Software.overlap` is the share of the computing time
behind which traffic can hide, `Software.gather_ports` the network ports that gathers keep busy.
With few tokens per GPU (small micro-batches, many nodes) there is little to hide behind:
then the step takes as long as the network.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from minidist.cost.block import BYTES
from minidist.cost.hardware import Node
from minidist.cost.memory import StateBytes, parameters_per_gpu, routed_per_gpu
from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.software import Software
from minidist.cost.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Ranks that hold the same parameters: a ring of them, and its wire.

    Attributes:
        held: parameters on each rank.
        ranks, stride: how many, and how far apart neighbours are.
        pieces: collectives that these parameters take.
    """

    node: Node
    software: Software
    held: float
    ranks: int
    stride: int
    pieces: int
    sharded: bool

    @functools.cached_property
    def nodes(self) -> int:
        return min(self.ranks, max(1, -(-self.ranks * self.stride // self.node.num_gpus)))

    @functools.cached_property
    def bandwidth(self) -> float:
        link = self.node.link_for(num_ranks=self.ranks, stride=self.stride).attainable
        if not self.sharded or self.nodes == 1:
            return link.bandwidth_bytes_per_s
        ports = self.software.gather_ports / (1 + self.nodes / self.software.gather_half_nodes)
        port = self.node.network.attainable.bandwidth_bytes_per_s
        return min(link.bandwidth_bytes_per_s, ports * port)

    def ring_s(self, num_bytes: float) -> float:
        """An all-gather, or a reduce-scatter, of all pieces together."""
        if self.ranks == 1:
            return 0.0
        hops_s = (self.ranks - self.nodes) * self.node.intra_node.latency_s
        hops_s += (self.nodes - 1) * self.node.network.latency_s
        share = (self.ranks - 1) / self.ranks
        return self.pieces * hops_s + share * num_bytes / self.bandwidth

    def all_reduce_s(self, num_bytes: float) -> float:
        """By ring or by tree, whichever has the smaller latency; both move the same bytes."""
        if self.ranks == 1:
            return 0.0
        per_node = -(-self.ranks // self.nodes)
        tree_s = 2 * math.log2(self.nodes) * self.node.network.latency_s
        tree_s += 2 * (per_node - 1) * self.node.intra_node.latency_s
        moved_s = 2 * (self.ranks - 1) / self.ranks * num_bytes / self.bandwidth
        return min(2 * self.ring_s(num_bytes), self.pieces * tree_s + moved_s)


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
    """(exposed, hidden) seconds of gradient and parameter traffic.

    Args:
        backward_s: of one micro-batch in the busiest stage; compute_s: of all micro-batches.
    """
    p = parallelism
    held = parameters_per_gpu(model=model, parallelism=p)
    stride = p.tp if p.cp > 1 else p.stride("dp")
    parts = [(held, p.shard_ranks, stride)]
    if p.ep > 1:
        layers = -(-model.num_layers // p.pp)
        routed = layers * routed_per_gpu(model=model, parallelism=p)
        same = p.shard_ranks * p.tp // p.ep
        parts = [(held - routed, p.shard_ranks, stride), (routed, same, p.ep)]
    total_s = floor_s = 0.0
    for count, ranks, apart in parts:
        if ranks > 1 and count > 0:
            one_s, one_floor_s = _traffic(
                model, p, node, states, num_microbatches, software, count, ranks, apart
            )
            total_s, floor_s = total_s + one_s, max(floor_s, one_floor_s)
    room_s = {2: num_microbatches * backward_s, 3: compute_s}.get(p.zero_stage, backward_s)
    exposed_s = max(min(floor_s, total_s), total_s - software.overlap * room_s)
    return exposed_s, total_s - exposed_s


def _traffic(
    model: Transformer,
    p: ParallelismConfig,
    node: Node,
    states: StateBytes,
    m: int,
    software: Software,
    held: float,
    ranks: int,
    stride: int,
) -> tuple[float, float]:
    """Seconds of all traffic of one group, and of its last piece, which nothing can hide."""
    shard = ranks // p.replicas
    bucket_bytes = software.shard_bucket_bytes if p.zero_stage else software.bucket_bytes
    bucket_bytes = max(bucket_bytes, software.bucket_bytes_per_rank * ranks)
    pieces = max(1, math.ceil(held * states.gradient / bucket_bytes))
    if p.zero_stage >= 2:
        pieces = max(1, model.num_layers // p.pp)
    group = _Group(
        node=node,
        software=software,
        held=held,
        ranks=shard if p.zero_stage else ranks,
        stride=stride,
        pieces=pieces,
        sharded=p.zero_stage >= 2,
    )
    gather_s, reduce_s = group.ring_s(held * BYTES), group.ring_s(held * states.gradient)
    if p.zero_stage == 0:
        total_s = group.all_reduce_s(held * states.gradient)
        return total_s, total_s / pieces
    copies_s = 0.0
    if p.replicas > 1:
        copies = _Group(
            node=node,
            software=software,
            held=held / shard,
            ranks=p.replicas,
            stride=stride * shard,
            pieces=pieces,
            sharded=False,
        )
        copies_s = copies.all_reduce_s(held / shard * states.gradient)
    last_s = (reduce_s + copies_s) / pieces
    if p.zero_stage == 1:
        return reduce_s + copies_s + gather_s, last_s
    if p.zero_stage == 2:  # no whole gradient is kept, so every micro-batch reduces
        return m * reduce_s + copies_s + gather_s, last_s
    # Every micro-batch gathers for forward and again for backward.
    return m * (2 * gather_s + reduce_s) + copies_s, last_s + gather_s / pieces
