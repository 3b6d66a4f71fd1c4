"""PyTorch's own data parallelism, for criteria that hand a wrapped model to the student's code."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.criterion import Context


def wrap(module: nn.Module, context: Context) -> DistributedDataParallel:
    """Wraps a module that is on this rank's device in torch's DDP."""
    ids = [context.device] if context.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids)
