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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from minidist.errors import named_rank
from minidist.unsupported import Unsupported

BF16_HOOK = Unsupported(
    "wrap_ddp, register_torch_hook",
    "bf16 messages of torch's DDP on gloo",
    instead='use "fp16" or minidist.parallel.compression',
)
POWERSGD_BESIDE_GPUS = Unsupported(
    "wrap_ddp, register_torch_hook",
    "gradients on the CPU, on a machine with a GPU, in torch's PowerSGD hook, which waits for that "
    "GPU and fails",
    instead="give these ranks CUDA_VISIBLE_DEVICES='', or use minidist.parallel.compression",
)

_HOOKS: dict[str, Callable[..., Any]] = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}


def register_torch_hook(
    ddp: DistributedDataParallel,
    name: str,
    *,
    rank: int = 1,
    start_step: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Register torch's "none", "fp16", "bf16" or "powersgd" hook.

    Args:
        rank: columns of PowerSGD's matrices.
        start_step: uncompressed steps before PowerSGD, at least 2.
        group: the group that DDP was given; None means all ranks.

    Returns:
        The hook's state: a `PowerSGDState`, or the group.

    Raises:
        ValueError: there is no such hook, or not on this backend or device.
    """
    state, hook = torch_hook(name, ddp, rank=rank, start_step=start_step, group=group)
    ddp.register_comm_hook(state, hook)
    return state


def torch_hook(
    name: str,
    module: nn.Module,
    *,
    rank: int = 1,
    start_step: int = 2,
    group: dist.ProcessGroup | None = None,
) -> tuple[Any, Callable[..., Any]]:
    """State and function for `register_comm_hook`; arguments and errors as there."""
    if name not in _HOOKS:
        raise ValueError(f"the hook is {', '.join(_HOOKS)}; got {name!r} on {named_rank()}")
    if name == "bf16" and (backend := dist.get_backend(group)) != "nccl":
        raise BF16_HOOK.error(f"torch's bf16 hook needs nccl, got {backend} on {named_rank()}")
    state: Any = group
    if name == "powersgd":
        on_cpu = next(module.parameters()).device.type == "cpu"
        if on_cpu and torch.cuda.is_available():
            raise POWERSGD_BESIDE_GPUS.error(f"{named_rank()} trains on the CPU and sees a GPU")
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )
    return state, _HOOKS[name]
