"""Clipping by the global norm when every rank holds only some of the gradients.

The 2-norm of all gradients is the root of the sum of squares over ranks, so one all-reduce of one
number is enough. (`torch.nn.utils.clip_grad_norm_` on shards would clip each rank by its own norm,
and the ranks would drift apart.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from minidist.device import by_dtype_and_device
from minidist.errors import named_rank
from minidist.unsupported import Unsupported

PIECES = Unsupported(
    "BucketedDDP, OverlappedDDP, ShardedOptimizer, Zero2Optimizer, Zero3, LocalSGD, "
    "average_gradients",
    "pieces of a Zero3 model, of which each rank holds different elements",
    instead="Zero3 averages gradients by itself: give its pieces to a torch optimiser or to a "
    "WholeOptimizer, and nothing else around it",
)

# Not an attribute of the tensor: a group cannot be pickled.
_groups: Any = WeakTensorKeyDictionary()
_whole: Any = WeakTensorKeyDictionary()
_parameter_of: Any = WeakTensorKeyDictionary()  # of a master copy


def note_shard_group(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Note that the other ranks of `group` hold the other elements of a cut parameter."""
    _groups[tensor] = group


def note_whole(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Note that every rank of `group` holds this parameter beside others that are cut."""
    _whole[tensor] = group


def copy_note(tensor: Tensor, master: Tensor) -> None:
    """What was noted of a parameter holds for its master copy, too."""
    _parameter_of[master] = tensor
    for notes in (_groups, _whole):
        if tensor in notes:
            notes[master] = notes[tensor]


def parameters_of_masters(tensors: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """parameter -> its master, for those tensors that are masters of a `MasterWeights`."""
    return {_parameter_of[each]: each for each in tensors if each in _parameter_of}


def counts_here(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a norm over the group counts this tensor on this rank: a whole one counts once."""
    return tensor not in _whole or dist.get_rank(group) == 0


def shard_group(tensors: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """The ranks that hold the other elements of these tensors; None if they are whole."""
    if not _groups:
        return None
    found = (_groups.get(tensor) for tensor in tensors)
    return next((g for g in found if g is not None and dist.get_world_size(g) > 1), None)


def is_held_by_zero3(tensor: Tensor) -> bool:
    """Whether autograd gives the gradients to a tensor that is not this parameter."""
    return tensor in _groups or tensor in _whole


def refuse_pieces(tensors: Iterable[Tensor], where: str) -> None:
    """Raise ValueError if ranks hold different elements, where something averages over ranks."""
    if shard_group(tensors) is not None:
        raise PIECES.error(f"got parameters that Zero3 has cut on {named_rank()}", where=where)


def own_norms(
    tensors: list[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The norm of each tensor's elements on this rank, also where they are a Zero3 piece's."""
    with torch._C.DisableTorchFunctionSubclass():  # a piece's gradient refuses norms otherwise
        return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


@torch.no_grad()
def clip_by_global_norm(
    shards: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Scale `.grad` of the shards so that the norm over all ranks is at most `max_norm`.

    Collective. Every element must be in the shard of exactly one rank, unless it was noted as whole
    on every rank: then it counts once.

    Args:
        shards: the tensors that this rank owns; tensors without a gradient are left out.
        norm_type: p of the p-norm, `math.inf` for the largest magnitude.

    Returns:
        The norm before scaling, a float64 scalar, on every rank.
    """
    if not max_norm >= 0 or not norm_type > 0:
        raise ValueError(
            f"clip: expected max_norm >= 0 and norm_type > 0, {named_rank(group)} got {max_norm} "
            f"and {norm_type}"
        )
    shards = list(shards)
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    counted = [s.grad for s in shards if s.grad is not None and counts_here(s, group)]
    # A rank without a gradient must take part too, with the same device type and dtype.
    device = shards[0].device if shards else torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    infinite = norm_type == math.inf
    total = torch.zeros((), dtype=torch.float64, device=device)
    for alike in by_dtype_and_device(g for g in counted if g.numel()):
        exact = alike[0].dtype if alike[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(own_norms(alike, norm_type, dtype=exact)).to(total)
        total = torch.maximum(total, norms.max()) if infinite else total + (norms**norm_type).sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    norm = total if infinite else total ** (1 / norm_type)
    # As in torch: no gradient grows, and the small number prevents a division by zero.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for alike in by_dtype_and_device(gradients):
        torch._foreach_mul_(alike, scale.to(alike[0]))
    return norm
