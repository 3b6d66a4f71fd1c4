"""Tensors that every rank holds: compare their form, and copy the values of one rank to all.

Data parallelism and ZeRO start with these functions. They use torch's own collectives.
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
    """Collective: check that all ranks hold tensors of the same form in the same order.

    Raises:
        MismatchError: on every rank: names, shapes, dtypes or `requires_grad` differ. The message
            gives the first difference from rank 0.
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


def raise_on_all(
    problem: str | None, group: dist.ProcessGroup | None = None, where: str = ""
) -> None:
    """Collective: raise on every rank if any rank has a problem, so that no rank waits for it.

    Raises:
        ValueError: on every rank: the ranks of the group with a problem, and each one's problem.
    """
    every: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, problem, group=group)
    found = [f"on rank {global_rank(group, r)}: {text}" for r, text in enumerate(every) if text]
    if found:
        raise ValueError(f"[rank {dist.get_rank()}] {where}: {'; '.join(found)}")


def _describe(entry: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype, requires_grad = entry
    return f"{name} {dtype}{list(shape)}{'' if requires_grad else ' (frozen)'}"


def broadcast_tensors(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, source: int = 0
) -> None:
    """Collective: overwrite tensors in place with the values of rank `source` of the group.

    This sends one message per dtype and device instead of one per tensor, because a model has
    hundreds of small tensors and each message costs a latency.

    Args:
        tensors: with the same shapes, dtypes and order on every rank.
        source: the rank in `group`, not the global rank.
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
            # .data: autograd may have saved this buffer for a backward pass that does not read the
            # value (BatchNorm in training mode), and would raise an error after a plain write.
            tensor.data.copy_(piece.view(tensor.shape))


def global_rank(group: dist.ProcessGroup | None, group_rank: int) -> int:
    """The global rank of a rank of the group, as `src=` of a collective needs it."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)
