"""An all-reduce of compressed tensors, made of an all-to-all and an all-gather.

A backend's all-reduce adds the numbers in the dtype that travels. Here numbers travel in any form
and are added in full precision:

1. Cut into n chunks; chunk i of every rank goes to rank i (all-to-all, compressed).
2. Rank i decompresses its n chunks and takes their mean, in at least fp32.
3. The mean is compressed again and goes to everyone (all-gather).

    rank 0   a0 a1 a2        a0 b0 c0  ->  m0        m0 m1 m2
    rank 1   b0 b1 b2   ->   a1 b1 c1  ->  m1   ->   m0 m1 m2
    rank 2   c0 c1 c2        a2 b2 c2  ->  m2        m0 m1 m2

Each rank sends 2 (n-1)/n of the compressed tensor, as in a ring all-reduce. The same bits arrive
everywhere whatever the backend does, since every mean is computed on one rank and copied. Only
bytes move, so it does not matter which dtypes the backend can add.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from minidist.device import all_gather_single
from minidist.parallel.compression.base import Exchange, Traffic, chunk_size


class Codec(Protocol):
    """How values travel. `part` says which elements of the padded tensor are meant."""

    def encode(self, values: torch.Tensor, part: slice) -> torch.Tensor: ...

    def decode(self, wire: torch.Tensor, part: slice) -> torch.Tensor: ...


class Exact:
    """Values travel as they are."""

    def encode(self, values: torch.Tensor, part: slice) -> torch.Tensor:
        return values.clone()

    def decode(self, wire: torch.Tensor, part: slice) -> torch.Tensor:
        return wire


def two_phase_mean(values: torch.Tensor, codec: Codec, group: Any, traffic: Traffic) -> Exchange:
    """The mean of `values` over the group, compressed on both ways.

    Returns:
        (mean, sent), see `Compressor._exchange`. The mean's own rounding, on the way back, is part
        of `sent` on the rank that rounded: it alone knows the error, and its residual counts 1/n in
        the next mean, so it takes n times the error.
    """
    n, rank, numel = group.size(), group.rank(), values.numel()
    chunk = chunk_size(numel, n)
    everything, mine = slice(0, n * chunk), slice(rank * chunk, (rank + 1) * chunk)
    padded = values.new_zeros(n * chunk)
    padded[:numel] = values
    # 1. Chunk i goes to rank i.
    outgoing = codec.encode(padded, everything)
    incoming = torch.empty_like(outgoing)
    traffic.sent_bytes += 2 * (n - 1) * chunk * outgoing.element_size()
    yield dist.all_to_all_single(as_bytes(incoming), as_bytes(outgoing), group=group, async_op=True)
    # 2. The mean of the own chunk, in rank order.
    mean_of_mine = values.new_zeros(chunk)
    for row in incoming.view(n, chunk):
        mean_of_mine += codec.decode(row, mine)
    mean_of_mine /= n
    # 3. To everyone.
    answer = codec.encode(mean_of_mine, mine)
    gathered = torch.empty_like(outgoing)
    yield all_gather_single(as_bytes(gathered), as_bytes(answer), group=group, async_op=True)
    mean = codec.decode(gathered, everything)
    sent = codec.decode(outgoing, everything).clone()
    sent[mine] -= n * (mean_of_mine - mean[mine])
    return mean[:numel], sent[:numel]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, which every backend can move."""
    return tensor.view(torch.uint8)
