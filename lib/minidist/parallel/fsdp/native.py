"""`fully_shard` per block: all steps of FSDP2, in the order in which a program writes them.

Phases:
1. mesh       one axis (shard over all ranks), or two (HSDP: replicas of a sharded group)
2. shard      the blocks first, then the model: all other parameters belong to the root
3. values     a model on the meta device gets memory and values, shard by shard
4. train      as without FSDP2; the optimiser is made after sharding, over DTensors

Example::

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_model(GPT(config), lambda m: m.blocks, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(x).sum().backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()

PyTorch FSDP: arXiv 2304.11277. HSDP shards inside a node, where links are fast, and replicates
between nodes. For M bytes of parameters, W ranks and R nodes that each hold one replica,
2 M (R-1) / R bytes leave a node in a step (an all-reduce of its shards) instead of 3 M (W-1) / W.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from minidist.parallel.zero.materialise import materialise


def shard_model(
    model: nn.Module,
    units: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: (),
    *,
    mesh: DeviceMesh | None = None,
    replicas: int = 1,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    offload: bool = False,
) -> Any:
    """Shard a model in place with `fully_shard`; returns it.

    Args:
        units: returns the modules to gather and free one at a time, usually the blocks.
        mesh: 1-D, or 2-D ("replicate", "shard"); None makes a mesh over all ranks.
        replicas: number of replicas if no mesh is given: 1 shards over all ranks, world_size // 8
            shards over nodes of 8.
        policy: param_dtype to compute in, reduce_dtype for gradients, output_dtype.
        reshard_after_forward: True frees parameters between forward and backward. False keeps them
            (ZeRO-2's traffic). A number keeps them sharded over that many ranks. None is torch's
            default: True for all modules except the root.
        offload: keep shards, gradients and optimiser state in CPU memory.

    Raises:
        ValueError: `replicas` does not divide the number of ranks, or the mesh has a different
            form, or both `mesh` and `replicas` are given.
    """
    # 1. mesh. Always explicit, because without a mesh torch uses a GPU if there is one.
    if mesh is None:
        mesh = _make_mesh(replicas)
    elif mesh.ndim > 2 or replicas != 1 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
        raise ValueError(
            f"shard_model: a mesh of 1 axis, or of 2 with names, and no replicas; got {mesh}"
        )
    # 2. shard
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    options["mp_policy"] = policy or MixedPrecisionPolicy()
    # Pinned memory makes copies to a GPU asynchronous; it does not exist without a GPU.
    on_gpu = mesh.device_type == "cuda"
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    for unit in units(model):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def _make_mesh(replicas: int) -> DeviceMesh:
    world_size = dist.get_world_size()
    if replicas < 1 or world_size % replicas:
        raise ValueError(f"shard_model: {replicas} replicas of {world_size} ranks leave a rest")
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shape = (replicas, world_size // replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def initialise(
    model: nn.Module,
    device: torch.device | str,
    init: Callable[[nn.Module], None] | None = None,
) -> None:
    """Give a sharded model on the meta device its memory and values. Phase 3.

    With the same seed on all ranks, the values are those of the unsharded model: the model's own
    initialisation runs for one whole parameter at a time, and each rank keeps its shard. torch's
    usual `model.to_empty(device)` and `reset_parameters()` do less work, but draw different numbers
    for every number of ranks.

    Args:
        init: as in `minidist.parallel.zero.materialise.materialise`.
    """
    device = torch.device(device)
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    model.to_empty(device=device)
    for module, name, buffer in buffers:  # `materialise` allocates these, and checks their values
        module._buffers[name] = buffer
    writers = {param: partial(_write, param) for param in model.parameters()}
    materialise(model, writers, device, init)


@torch.no_grad()
def _write(param: nn.Parameter, value: Tensor) -> None:
    assert isinstance(param, DTensor)
    # No source rank: every rank has the same values and cuts its own shard from them.
    own = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    param.to_local().copy_(own.to_local())


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip by the global norm and return the norm as an ordinary tensor. Collective.

    torch's own function is also right for DTensors, but returns a DTensor: each rank has only a
    part of its value until `full_tensor()`.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@contextlib.contextmanager
def no_sync(model: FSDPModule) -> Iterator[None]:
    """Accumulate whole gradients inside the block; the next backward outside reduces their sum.

    Blocks may be nested: the outermost one counts.
    """
    is_outermost = not getattr(model, "_in_no_sync", False)
    object.__setattr__(model, "_in_no_sync", True)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if is_outermost:
            object.__setattr__(model, "_in_no_sync", False)
            model.set_requires_gradient_sync(True)
