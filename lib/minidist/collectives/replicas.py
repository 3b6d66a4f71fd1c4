"""Tensors that every rank holds: compare their form, and make their values those of one rank.

What data parallelism and ZeRO begin with; over torch's own collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.device import by_dtype_and_device
from minidist.errors import MismatchError


def check_same_tensors(
    named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Collective: raise on every rank unless all hold tensors of the same form, in the same order.

    Raises:
        MismatchError: names, shapes, dtypes or `requires_grad` differ; the message has the first
            difference to rank 0.
    """
    own = [
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
        for name, t in named
    ]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    for other, entries in enumerate(every):
        for theirs, first in zip_longest(entries, every[0]):
            if theirs != first:
                raise MismatchError(
                    "the ranks hold different models: rank 0 of the group has "
                    f"{_describe(first)}, rank {other} has {_describe(theirs)}",
                    rank=dist.get_rank(),
                )


def _describe(entry: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype, requires_grad = entry
    return f"{name} {dtype}{list(shape)}{'' if requires_grad else ' (frozen)'}"


def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Collective: overwrite tensors in place with those of rank `source` of the group.

    One message per dtype and device instead of one per tensor: a model has hundreds of small
    tensors, and each message costs a latency.

    Args:
        tensors: of the same shapes, dtypes and order on every rank.
        source: rank in `group`, not in the world.
    """
    for members in by_dtype_and_device(tensors):
        flat = torch.cat([t.detach().reshape(-1) for t in members])
        # gloo does not broadcast bool.
        wire = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
        dist.broadcast(wire, src=global_rank(group, source), group=group)
        if dist.get_rank(group) == source:
            continue
        pieces = flat.split([t.numel() for t in members])
        for tensor, piece in zip(members, pieces, strict=True):
            # .data: autograd may have saved this buffer for a backward pass that does not read its
            # value (BatchNorm in training mode), and must not take the write for a mistake.
            tensor.data.copy_(piece.view(tensor.shape))


def global_rank(group: dist.ProcessGroup | None, group_rank: int) -> int:
    """What `src=` of a collective wants: the rank in the world of a rank of the group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)
