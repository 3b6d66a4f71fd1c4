"""Our versions of what a student writes in an earlier task and calls in a later one.

A later task is judged with them if the student's own are wrong: one mistake costs points once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.lab3_fsdp.memory import state_bytes


class FSDP(nn.Module):
    """The class of task 3, by torch's own means."""

    def __init__(self, model: nn.Module, units: list[nn.Module]) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh

        device = next(model.parameters()).device.type
        self.model = shard_model(model, units, init_device_mesh(device, (dist.get_world_size(),)))

    def local_parameters(self) -> list[nn.Parameter]:
        """The shards."""
        return list(self.model.parameters())

    def forward(self, *args: Any) -> Any:
        """The model's output."""
        return self.model(*args)


def shard_model(model: nn.Module, units: list[nn.Module], mesh: Any, **options: Any) -> nn.Module:
    """Torch's `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    for module in (*units, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def policies(device_type: str, mixed: bool, offload: bool) -> dict[str, object]:
    """Both policies of task 4."""
    from torch.distributed import fsdp

    dtypes = (torch.bfloat16, torch.float32) if mixed else (None, None)
    rest = fsdp.CPUOffloadPolicy(pin_memory=device_type != "cpu") if offload else None
    return {
        "mp_policy": fsdp.MixedPrecisionPolicy(*dtypes),
        "offload_policy": rest or fsdp.OffloadPolicy(),
    }


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Whole tensors, with torch's names, written by rank 0."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    whole = {name: _gathered(value) for name, value in model.state_dict().items()}
    state = {
        names[p]: {key: _gathered(value) for key, value in kept.items()}
        for p, kept in optimizer.state.items()
    }
    groups = [
        group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    if dist.get_rank() == 0:
        torch.save({"model": whole, "optimizer": {"state": state, "param_groups": groups}}, path)


def _gathered(value: Any) -> Any:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def bytes_per_rank(
    num_params: int, world_size: int, strategy: str, mixed: bool = False
) -> tuple[int, ...]:
    """Bytes of weights, gradients and optimizer states."""
    return tuple(state_bytes(num_params, world_size, strategy, mixed))
