"""Measured constants of implementations: how much traffic they hide, and what their launches cost.

How much of its traffic ZeRO-3 hides depends on the implementation. DeepSpeed in 2021 gathered over
one network port per node at a time and hid little; FSDP keeps all ports busy and hides most. So a
step time belongs to a plan *and* an implementation. The constants of an implementation were fitted
to all its calibration rows in `minidist/plan/published` together, never to one row.

>>> DEEPSPEED_2021.gather_ports < 1.1 < FSDP.gather_ports
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Software:
    """One implementation.

    Attributes:
        jitter: how much longer launching takes, with every doubling of the tensor ranks, because
            these wait for each other in every block.
        tensor_exposed: share of tensor parallelism's traffic that is not hidden behind products.
        expert_s: time per expert that a rank holds, in a forward pass, whatever its tokens: each
            expert has products of its own, launched one by one.
        launch_s: host time to launch the kernels of one block's forward pass. Backward takes twice
            as long. With CUDA graphs or torch.compile it is smaller.
        traffic: memory traffic of everything but matrix products / (twice the stored activations).
            1 is a write and a read of each kept tensor; unfused kernels need more.
        attention: speed of its FlashAttention / `GPU.attention_efficiency`, which is the speed of
            the kernels of 2023.
        overlap: share of the computing time of backward (ZeRO-3: of the whole step) behind which
            gradient and parameter traffic can hide; 0 means a reduction after backward.
        gather_ports: how many network ports of a node ZeRO-2 and ZeRO-3 keep busy while they gather
            and scatter shards. A node of 8 GPUs has 8.
        gather_half_nodes: number of nodes over which these ports move half as much: rings of many
            nodes carry small shards and wait for their slowest link.
        bucket_bytes, shard_bucket_bytes: gradients per all-reduce, and per reduce-scatter of
            ZeRO-1. Each bucket pays the latency of the ring.
        bucket_bytes_per_rank: a bucket has at least this times the ranks, so that rings of many
            ranks do not only wait.
        step_s: time per step outside of forward and backward: norms, logging, the loader.
        straggler: how much longer a step takes with every doubling of the nodes, since all wait for
            the slowest.
    """

    name: str
    launch_s: float
    traffic: float
    overlap: float
    attention: float = 1.0
    jitter: float = 0.0
    tensor_exposed: float = 1.0
    expert_s: float = 0.0
    gather_ports: float = 8.0
    gather_half_nodes: float = math.inf
    bucket_bytes: float = 25e6
    shard_bucket_bytes: float = 25e6
    bucket_bytes_per_rank: float = 0.0
    step_s: float = 0.0
    straggler: float = 0.0


MEGATRON_2021 = Software(
    name="megatron-2021",
    launch_s=0.000848,
    traffic=1.143,
    overlap=0.0,
    bucket_bytes=1e12,
    shard_bucket_bytes=1e12,
    step_s=0.004328,
    straggler=0,
    jitter=0.03152,
)
DEEPSPEED_2021 = Software(
    name="deepspeed-2021",
    launch_s=0.9e-3,
    traffic=1.0,
    overlap=0.2551,
    gather_ports=0.9971,
)
FSDP = Software(
    name="fsdp",
    launch_s=0.0006,
    traffic=1.505,
    overlap=0.6362,
    gather_ports=8.0,
    gather_half_nodes=79.16,
    step_s=0.02673,
    straggler=0.008315,
)
NANOTRON = Software(
    name="nanotron",
    launch_s=0.0006,
    traffic=0.2038,
    overlap=0.2276,
    bucket_bytes=2.193e06,
    shard_bucket_bytes=5.781e06,
    step_s=0.04946,
    straggler=0.0005646,
    attention=1.521,
)
# Megatron Core of 2024 and 2025 in NVIDIA's recipes: all-gathers and reduce-scatters of tensor
# parallelism run piece by piece beside the products that need them, cuDNN's attention.
NEMO = Software(
    name="nemo",
    launch_s=0.6e-3,
    traffic=0.764,
    overlap=1,
    attention=1.804,
    tensor_exposed=0.007985,
    expert_s=5.831e-05,
    # Megatron-LM's defaults: 40 million gradients of 4 bytes, or 1 million for each rank.
    bucket_bytes=160e6,
    shard_bucket_bytes=160e6,
    bucket_bytes_per_rank=4e6,
)
# Three implementations of today without calibration rows, so their constants are not fitted:
# - Megatron without NeMo's flags: as in 2021, but it hides what FSDP hides;
# - FSDP2: as FSDP, with the FlashAttention that was measured with nanotron;
# - torch.compile: it fuses kernels (traffic 1), and its launches take half the time.
MEGATRON = replace(
    NEMO,
    name="megatron",
    traffic=MEGATRON_2021.traffic,
    overlap=FSDP.overlap,
    attention=NANOTRON.attention,
    tensor_exposed=1.0,
    step_s=MEGATRON_2021.step_s,
    straggler=MEGATRON_2021.straggler,
)
FSDP2 = replace(FSDP, name="fsdp2", attention=NANOTRON.attention, expert_s=NEMO.expert_s)
FSDP2_COMPILE = replace(FSDP2, name="fsdp2-compile", launch_s=0.3e-3, traffic=1.0)
SOFTWARE = {
    software.name: software
    for software in (
        MEGATRON_2021,
        DEEPSPEED_2021,
        NEMO,
        MEGATRON,
        FSDP,
        FSDP2,
        FSDP2_COMPILE,
        NANOTRON,
    )
}


def usual_software(zero_stage: int) -> Software:
    """What somebody would run today: FSDP2 to shard parameters, Megatron for everything else."""
    return FSDP2 if zero_stage == 3 else MEGATRON
