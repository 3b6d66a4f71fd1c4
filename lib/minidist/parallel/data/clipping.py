"""Gradient clipping by global norm: one norm over all parameters, one factor for all gradients.

With DDP every rank holds the same mean gradients after backward, so every rank computes the same
norm by itself. Clip **after** the synchronisation; then nothing needs to be sent. Clipping before
the synchronisation, e.g. under `no_sync`, would use a different factor on each rank. If each rank
holds only a shard of the gradients (ZeRO, FSDP, tensor parallelism), the squares must be summed
over the ranks.

>>> w = nn.Parameter(torch.zeros(2))
>>> w.grad = torch.tensor([3.0, 4.0])
>>> clip_grad_norm([w], max_norm=1.0)       # the norm before clipping
tensor(5.)
>>> w.grad
tensor([0.6000, 0.8000])

With a GradScaler, unscale first, because the limit is for unscaled gradients. torch's own:
`clip_grad_norm_native`. Paper: Pascanu et al. (arXiv 1211.5063).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.device import by_dtype_and_device
from minidist.errors import MinidistError, named_rank
from minidist.precision.clip import counts_here, own_norms


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    shard_group: dist.ProcessGroup | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their joint norm is at most `max_norm`.

    Args:
        parameters: parameters without a gradient are left out.
        norm_type: 2 is usual; math.inf takes the largest absolute value.
        shard_group: None if every rank holds all gradients (DDP). Otherwise the ranks of this group
            hold disjoint parts (a rank may hold none), except for what Zero3 keeps whole, and the
            call is collective.
        error_if_nonfinite: raise, on all ranks, instead of scaling by nan or 0.

    Returns:
        The norm before clipping, the same on every rank: a scalar in float32, or in float64 for
        float64 gradients and for shards.

    Raises:
        ValueError: max_norm is not positive or norm_type is below 1.
        MinidistError: the norm is inf or nan, and `error_if_nonfinite` is set.
    """
    if not max_norm > 0 or not norm_type >= 1:
        raise ValueError(
            "clip_grad_norm: max_norm must be above 0 and norm_type at least 1, "
            f"{named_rank(shard_group)} got {max_norm} and {norm_type}"
        )
    having = [(p, p.grad) for p in parameters if p.grad is not None]
    grads = [grad for _, grad in having]
    counted = [g for p, g in having if shard_group is None or counts_here(p, shard_group)]
    norm = _norm(counted, norm_type, shard_group)
    if error_if_nonfinite and not torch.isfinite(norm):
        rank = dist.get_rank() if dist.is_initialized() else None
        raise MinidistError(f"clip_grad_norm: the gradients' norm is {norm.item()}", rank=rank)
    # The small constant avoids a division by zero. The clamp on the device saves the round trip
    # from GPU to CPU that `if norm > max_norm` would need.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for alike in by_dtype_and_device(grads):
        torch._foreach_mul_(alike, factor.to(alike[0]))
    return norm


def _norm(grads: list[Tensor], norm_type: float, shard_group: dist.ProcessGroup | None) -> Tensor:
    # At least float32, because squares of float16 overflow above 256. With shards always float64:
    # ranks may hold different dtypes or nothing, and this needs no agreement.
    wide = shard_group is not None or any(grad.dtype == torch.float64 for grad in grads)
    dtype = torch.float64 if wide else torch.float32
    device = grads[0].device if grads else _device(shard_group)
    norms = [torch.zeros((), dtype=dtype, device=device)]
    # Without a group, gradients of Zero3's pieces are refused.
    norms_of = torch._foreach_norm if shard_group is None else own_norms
    for alike in by_dtype_and_device(grads):
        norms += [n.to(device) for n in norms_of(alike, norm_type, dtype=dtype)]
    stacked = torch.stack(norms)
    if math.isinf(norm_type):
        total = stacked.max()
        if shard_group is not None:
            dist.all_reduce(total, op=dist.ReduceOp.MAX, group=shard_group)
        return total
    total = stacked.pow(norm_type).sum()
    if shard_group is not None:
        dist.all_reduce(total, group=shard_group)
    return total.pow(1 / norm_type)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def clip_grad_norm_native(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """torch's own function: for replicated gradients, and for DTensors of FSDP2 (global norm)."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
