"""One training step under autocast, and the dtypes of sharded training.

Autocast keeps parameters in fp32 and chooses a dtype per operation: matrix products and
convolutions in 16 bits, sums, norms, softmax and losses in fp32. `torch.autocast(device_type,
dtype)` works for all devices; the version in torch.cuda is deprecated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minidist.errors import named_rank
from minidist.precision.scaler import held_parameters, shards_gradients


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of sharded training; None means the dtype of the parameters.

    Args:
        param_dtype: of parameters while a layer computes, and of their all-gather.
        reduce_dtype: of gradients while they are reduced. fp32 is the safe choice, because a sum
            over many ranks in bf16 has only 8 bits of precision.
        output_dtype: of the model's output.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).output_dtype

    Raises:
        ValueError: a dtype is not a floating-point dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy: {name} must be a floating-point dtype, got {dtype}"
                )


def autocast_step(
    model: nn.Module,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    optimizer: Any,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    scaler: Any = None,
    max_norm: float | None = None,
) -> torch.Tensor:
    """Forward, backward and one step of the optimiser. Works on any device, and inside DDP.

    Args:
        dtype: of the matrix products; None trains without autocast.
        scaler: a `GradScaler`, ours or torch's; fp16 needs one, bf16 does not.
        max_norm: clip the gradients to this norm, after unscaling, because the norm is meant for
            unscaled gradients.

    Returns:
        The loss, a detached scalar.
    """
    optimizer.zero_grad()
    # Forward and loss run under autocast. Backward runs outside: it uses the forward dtypes anyway.
    with torch.autocast(inputs.device.type, dtype=dtype, enabled=dtype is not None):
        loss = loss_fn(model(inputs), targets)
    (loss if scaler is None else scaler.scale(loss)).backward()
    unscale_clip_step(model, optimizer, scaler=scaler, max_norm=max_norm)
    return loss.detach()


def unscale_clip_step(
    model: nn.Module, optimizer: Any, *, scaler: Any = None, max_norm: float | None = None
) -> torch.Tensor | None:
    """What follows the backward of a step, for any optimizer, with a scaler or without.

    Returns:
        The norm before clipping, None without clipping.

    Raises:
        ValueError: ranks hold different gradients, and torch's scaler would decide on each rank
            alone which steps to skip.
    """
    if scaler is not None:
        alone = isinstance(scaler, torch.amp.GradScaler) and not hasattr(scaler, "process_group")
        if alone and scaler.is_enabled() and shards_gradients(optimizer):
            raise ValueError(
                f"every rank holds different gradients of {type(optimizer).__name__}, and all must "
                f"skip the same steps; torch.amp.GradScaler decides on each rank alone: use "
                f"minidist.precision.GradScaler(group=...) on {named_rank()}"
            )
        if hasattr(optimizer, "prepare_gradients"):  # torch's scaler does not call it
            optimizer.prepare_gradients()
    norm = None
    if max_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = clip_gradients(model, optimizer, max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return norm


def clip_gradients(model: nn.Module, optimizer: Any, max_norm: float) -> torch.Tensor:
    """Clip what the optimizer's step will use by its global norm.

    An optimizer that moves gradients (master weights, ZeRO) or a model that shards them has its own
    `clip_grad_norm_`, and this function calls it. Otherwise the optimizer's parameters hold the
    gradients; they may be DTensors.

    Returns:
        The norm before clipping, the same on every rank: a scalar.
    """
    for holder in (optimizer, model):
        own: Any = getattr(holder, "clip_grad_norm_", None)
        if callable(own):
            norm: Any = own(max_norm)
            return norm
    norm = nn.utils.clip_grad_norm_(held_parameters(optimizer), max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # pyright: ignore
