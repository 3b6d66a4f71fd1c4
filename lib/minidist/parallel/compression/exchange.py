"""An all-reduce of compressed tensors, made of an all-to-all and an all-gather.

A backend's all-reduce adds numbers in the dtype in which they travel. Here numbers can travel in
any form, but are added in full precision:

1. Each rank cuts its tensor into n chunks; chunk i goes to rank i (all-to-all, compressed).
2. Rank i decompresses the n chunks that it received and takes their mean, in at least fp32.
3. Rank i compresses the mean again and sends it to all ranks (all-gather).

    rank 0   a0 a1 a2        a0 b0 c0  ->  m0        m0 m1 m2
    rank 1   b0 b1 b2   ->   a1 b1 c1  ->  m1   ->   m0 m1 m2
    rank 2   c0 c1 c2        a2 b2 c2  ->  m2        m0 m1 m2

Each rank sends 2 (n-1)/n of the compressed tensor, as in a ring all-reduce. All ranks get the same
bits with any backend, because each mean is computed on one rank and copied. The backend only moves
bytes, so it does not matter which dtypes the backend can add.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from minidist.device import all_gather_single, as_bytes
from minidist.parallel.compression.compressor import Exchange, Traffic, chunk_size


class Codec(Protocol):
    """How values travel. `part` is the range of the values in the padded tensor."""

    def encode(self, values: torch.Tensor, part: slice) -> torch.Tensor: ...

    def decode(self, wire: torch.Tensor, part: slice) -> torch.Tensor: ...


class Exact:
    """Values travel without compression."""

    def encode(self, values: torch.Tensor, part: slice) -> torch.Tensor:
        return values.clone()

    def decode(self, wire: torch.Tensor, part: slice) -> torch.Tensor:
        return wire


def two_phase_mean(values: torch.Tensor, codec: Codec, group: Any, traffic: Traffic) -> Exchange:
    """The mean of `values` over the group, compressed in both collectives.

    Returns:
        (mean, sent), see `Compressor._exchange`. `sent` also accounts for the rounding of the mean
        in phase 3, on the rank that rounded, because only this rank knows the error. A residual
        counts only 1/n in the next mean, so this rank takes n times the error.
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
    # 2. The mean of this rank's chunk, in rank order.
    mean_of_mine = values.new_zeros(chunk)
    for row in incoming.view(n, chunk):
        mean_of_mine += codec.decode(row, mine)
    mean_of_mine /= n
    # 3. Send it to all ranks.
    answer = codec.encode(mean_of_mine, mine)
    gathered = torch.empty_like(outgoing)
    yield all_gather_single(as_bytes(gathered), as_bytes(answer), group=group, async_op=True)
    mean = codec.decode(gathered, everything)
    sent = codec.decode(outgoing, everything).clone()
    sent[mine] -= n * (mean_of_mine - mean[mine])
    return mean[:numel], sent[:numel]
