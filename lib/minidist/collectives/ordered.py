"""A sum in the order of the ranks: the same bits every time, on every rank and every backend.

    ((g0 + g1) + g2) + g3       as one process adds the gradients of four micro-batches

Other all-reduces add in an order that depends on the algorithm, the size and the number of ranks.
The price: every rank receives the whole tensor of every other rank, (n - 1) times its bytes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def ordered_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a contiguous tensor over the ranks of the group, in place and in their order."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor, group=group)
    tensor.copy_(every[0])
    for other in every[1:]:
        tensor.add_(other)
