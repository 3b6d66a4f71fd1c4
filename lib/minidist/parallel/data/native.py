"""Data parallelism with torch's own DistributedDataParallel, and what each of its options does.

Example::

    ddp = wrap_ddp(model, DDPOptions(gradient_as_bucket_view=True, hook="fp16"))
    loss_fn(ddp(x), y).backward()

Paper: Li et al. (arXiv 2006.15704).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from minidist.parallel.compression import torch_hook

# torch has renamed this option; from torch 2.13 on, the old name gives a warning.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """What `wrap_ddp` passes on, with torch's defaults."""

    # Size of a bucket in MiB: large buckets pay fewer latencies, small buckets start earlier. From
    # the second step on, the buckets follow the order of the first backward.
    bucket_cap_mb: float = 25.0
    # p.grad is a view into the bucket. This saves a copy and the memory of all gradients.
    gradient_as_bucket_view: bool = False
    # Search the graph for parameters that get no gradient in this step. Needed if a step may skip a
    # branch. Without it such a step raises, or hangs if only some ranks skip the branch.
    find_unused_parameters: bool = False
    # Every step uses the same parameters in the same way, so torch finds the unused ones only once.
    # Allows reentrant checkpointing, and parameters that are used several times.
    static_graph: bool = False
    # Overwrite buffers (BatchNorm's running statistics) with rank 0's before a forward, if the
    # forward before it was one of training. torch 2.13 renamed it to forward_sync_buffers.
    broadcast_buffers: bool = True
    # The form in which gradients travel. "bf16" needs NCCL; "powersgd" sends low-rank factors
    # (arXiv 1905.13727).
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: int = 1


def wrap_ddp(
    module: nn.Module,
    options: DDPOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> DistributedDataParallel:
    """Collective: torch's DDP around a module that is already on its device.

    Raises:
        ValueError: there is no such hook, or not on this backend or device.
    """
    options = options or DDPOptions()
    hook = torch_hook(options.hook, module, rank=options.powersgd_rank, group=group)
    sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: options.broadcast_buffers}
    device = next(module.parameters()).device
    ddp = DistributedDataParallel(
        module,
        device_ids=None if device.type == "cpu" else [device],
        process_group=group,
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        **sync_buffers,
    )
    if options.hook != "none":
        ddp.register_comm_hook(*hook)
    return ddp


def train_uneven(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> int:
    """Collective: train on a number of batches that may differ between ranks; returns the steps.

    Ranks without more batches shadow the collectives of the other ranks. At the end all ranks hold
    the parameters of a rank that trained until the last step. A mean still divides by the number of
    all ranks (`divide_by_initial_world_size`).
    """
    num_steps = 0
    with Join([ddp], divide_by_initial_world_size=True):
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_fn(ddp(inputs), targets).backward()
            optimizer.step()
            num_steps += 1
    return num_steps
