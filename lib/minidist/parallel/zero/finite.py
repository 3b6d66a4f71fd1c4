"""Names the parameters of a sharded model that are nan or inf; each rank sees only its elements."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.errors import MinidistError

_MOST_NAMED = 5


def raise_if_not_finite(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Collective: raise MinidistError on every rank if a parameter on any rank is nan or inf."""
    own = [
        (name, _count(piece.detach()), 0 if piece.grad is None else _count(piece.grad))
        for name, piece in model.named_parameters()
    ]
    every: list[list[tuple[str, int, int]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(every, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    said: dict[str, list[str]] = {"parameters": [], "gradients": []}
    for column, lines in enumerate(said.values(), 1):
        for row in zip(*every, strict=True):
            held = {rank: each[column] for rank, each in zip(ranks, row, strict=True)}
            where = ", ".join(f"{count} on rank {rank}" for rank, count in held.items() if count)
            if where:
                lines.append(f"{row[0][0]} ({where})")
    if said["parameters"]:
        raise MinidistError(
            f"Zero3: elements that are nan or inf in the parameters {_few(said['parameters'])}"
            f" and in the gradients {_few(said['gradients']) or '-'}; no further step can mend "
            "them: start from finite parameters or load the last checkpoint, and look at the batch "
            "and the learning rate of the step that made them so",
            rank=dist.get_rank(),
        )


def _count(values: Tensor) -> int:
    return int((~torch.isfinite(values)).sum())


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return "; ".join(names[:_MOST_NAMED]) + more
