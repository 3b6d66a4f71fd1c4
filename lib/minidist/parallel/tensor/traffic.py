"""What tensor parallelism sends: formulas for the collectives of a block.

With N = B T D itemsize bytes of activations, a block sends per micro-batch

    tensor parallel:     forward 2 all-reduces of N;  backward 2 all-reduces of N
    sequence parallel:   forward 2 all-gathers and 2 reduce-scatters of N;  backward the same,
                         and six small all-reduces for norms and biases

A ring moves 2 (n-1)/n N bytes per rank for an all-reduce, and (n-1)/n N for an all-gather or a
reduce-scatter (Patarasuk and Yuan 2009), so the activations cost the same on the wire:

>>> whole = block_traffic(batch=1, num_tokens=2048, width=1024, itemsize=2)
>>> [(each.op, each.phase, each.count, each.num_bytes) for each in whole]
[('all_reduce', 'forward', 2, 4194304), ('all_reduce', 'backward', 2, 4194304)]
>>> split = block_traffic(batch=1, num_tokens=2048, width=1024, itemsize=2, sequence_parallel=True)
>>> split[-1]  # two norms' weights and biases, two row-parallel biases
Traffic(op='all_reduce', phase='backward', count=6, num_bytes=2048)
>>> wire_bytes(whole, 4) == wire_bytes(split[:-1], 4)
True

The counts are Megatron-LM's (arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minidist.cost.bandwidth import bus_factor


@dataclass(frozen=True)
class Traffic:
    """`count` collectives of one kind."""

    op: str  # "all_reduce", "all_gather" or "reduce_scatter"
    phase: str  # "forward" or "backward"
    count: int
    num_bytes: int  # of the whole tensor, each


def block_traffic(
    *,
    batch: int,
    num_tokens: int,
    width: int,
    itemsize: int,
    sequence_parallel: bool = False,
    overlap: bool = False,
    bias: bool = True,
) -> list[Traffic]:
    """Collectives of one `ParallelBlock`, forward and backward, per rank.

    Args:
        itemsize: bytes per element.
        overlap: column-parallel layers keep only their part of the sequence, and gather it again
            in the backward pass.
        bias: whether linear layers have a bias (layer norms always have a bias).
    """
    num_bytes = batch * num_tokens * width * itemsize
    if not sequence_parallel:
        return [Traffic("all_reduce", phase, 2, num_bytes) for phase in ("forward", "backward")]
    return [
        Traffic("all_gather", "forward", 2, num_bytes),
        Traffic("reduce_scatter", "forward", 2, num_bytes),
        Traffic("all_gather", "backward", 4 if overlap else 2, num_bytes),
        Traffic("reduce_scatter", "backward", 2, num_bytes),
        Traffic("all_reduce", "backward", 6 if bias else 4, width * itemsize),
    ]


def wire_bytes(traffic: Iterable[Traffic], num_ranks: int) -> float:
    """Bytes that each rank sends if every collective is a ring."""
    return sum(
        each.count * bus_factor(kind=each.op, num_ranks=num_ranks) * each.num_bytes
        for each in traffic
    )
