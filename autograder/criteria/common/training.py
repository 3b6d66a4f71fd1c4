"""Training by PyTorch's own means, to compare with."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autograder.criteria.criterion import Context


def wrap(module: nn.Module, context: Context) -> DistributedDataParallel:
    """torch's DDP around a module that is on this rank's device."""
    ids = [context.device] if context.device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids)
