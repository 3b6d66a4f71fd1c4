"""Gradient compression with torch's own hooks.

Example::

    ddp = DistributedDataParallel(model)
    register_torch_hook(ddp, "powersgd", rank=2, start_step=10)

Limits of torch's hooks: PowerSGD's hook keeps state per bucket, so it cannot compress the first two
steps. No hook counts bytes. On gloo, PowerSGD's hook needs all gradients in one bucket: it starts
collectives in callbacks, which gloo runs in threads. With several buckets two ranks may start them
in different orders (a hang, or an abort by "Received data size doesn't match"). The bf16,
quantisation and batched PowerSGD hooks do not run on gloo at all (torch 2.13), but
`Cast(torch.bfloat16)`, `Int8` and `PowerSGD(batched=True)` do.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def register_torch_hook(
    ddp: DistributedDataParallel,
    name: str,
    *,
    rank: int = 1,
    start_step: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Register torch's "none", "fp16" or "powersgd" hook.

    Args:
        rank: columns of PowerSGD's matrices.
        start_step: uncompressed steps before PowerSGD, at least 2.
        group: the group that DDP was given; None means all ranks.

    Returns:
        The hook's state: a `PowerSGDState`, or the group.
    """
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return state
    hooks = {"none": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
    if name not in hooks:
        raise ValueError(
            f'register_torch_hook: name must be "none", "fp16" or "powersgd", got {name!r}'
        )
    ddp.register_comm_hook(group, hooks[name])
    return group
