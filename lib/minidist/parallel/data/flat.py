"""Data parallelism, step 2 of 4: one all-reduce of all gradients, after backward.

Phases: flatten the gradients into one tensor per dtype, all-reduce it, copy the means back. One
latency replaces hundreds, at the cost of two copies. The network is still idle during backward.

Example::

    loss_fn(model(x), y).backward()
    average_gradients_flat(model)     # one all-reduce, however many parameters
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from minidist.precision.clip import refuse_pieces


def average_gradients_flat(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Collective: like `naive.average_gradients`, with one message per dtype and device."""
    refuse_pieces(module.parameters(), "average_gradients_flat")
    average_flat(module.parameters(), group, dist.get_world_size(group))


@torch.no_grad()
def average_flat(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, divide_by: int
) -> None:
    """Collective: the sum over the group of the gradients of some parameters, divided."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)

    for alike in kinds.values():
        # Flatten.
        for p in alike:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.reshape(-1) for p in alike if p.grad is not None])
        # All-reduce.
        dist.all_reduce(flat, group=group)
        flat.div_(divide_by)
        # Copy back.
        pieces = flat.split([p.numel() for p in alike])
        for p, piece in zip(alike, pieces, strict=True):
            assert p.grad is not None
            p.grad.copy_(piece.view(p.shape))
