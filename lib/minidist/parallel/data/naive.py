"""Data parallelism, step 1 of 4: one all-reduce per parameter, after backward.

Every rank computes the gradient of its own batch; the mean over ranks is the gradient of the joint
batch. This is right, but slow for two reasons: each small tensor costs a full latency, and nothing
overlaps (the network is idle during backward, the processors are idle afterwards).

Example::

    loss_fn(model(x), y).backward()   # x, y: this rank's part of the batch
    average_gradients(model)          # p.grad is now the mean over ranks
    optimizer.step()

Background: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677), section 3.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from minidist.precision.clip import refuse_pieces


@torch.no_grad()
def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Collective: replace every gradient by its mean over the ranks of `group`.

    A parameter without a gradient counts as zero and gets the mean too, because all ranks must make
    the same calls, even if their data take different paths through the model.
    """
    refuse_pieces(module.parameters(), "average_gradients")
    world_size = dist.get_world_size(group)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        # ReduceOp.AVG would do both at once; not every backend has it.
        parameter.grad.div_(world_size)
