"""Our versions of functions that a student writes in one task and calls in a later one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def flatten(tensors: Sequence[torch.Tensor], num_parts: int) -> torch.Tensor:
    """One vector, padded with zeros."""
    vector = torch.hstack([t.detach().flatten() for t in tensors]).clone()
    rest = vector.numel() % num_parts
    return torch.nn.functional.pad(vector, (0, num_parts - rest)) if rest else vector


@torch.no_grad()
def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Back into the tensors."""
    place = 0
    for tensor in tensors:
        tensor.copy_(flat[place : place + tensor.numel()].reshape(tensor.shape))
        place += tensor.numel()


def trainable_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """The trainable parameters, each of them once."""
    given, earlier, groups = list(params), set(), []
    for group in given if isinstance(given[0], dict) else [{"params": given}]:
        members = group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        once = {id(p): p for p in members if p.requires_grad and id(p) not in earlier}
        earlier |= set(once)
        groups += [{**group, "params": list(once.values())}] if once else []
    return groups
