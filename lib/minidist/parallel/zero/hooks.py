"""The autograd helpers of stage 3, mainly a callback when the backward of a unit is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class _AfterBackward(torch.autograd.Function):
    """Identity; runs the callback when the gradients of its outputs (the unit's inputs) exist."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.callback()
        return None, *gradients


def call_after_backward(inputs: Any, callback: Callable[[], None]) -> Any:
    """Returns the inputs, changed so that `callback` runs when backward has reached them.

    At that time the gradients of the unit's parameters exist, too: autograd runs operations in the
    reverse order of their recording, and accumulates into leaves before anything else.
    """
    leaves, spec = tree_flatten(inputs)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not at:
        return inputs
    watched = _AfterBackward.apply(callback, *(leaves[i] for i in at))
    for i, tensor in zip(at, watched, strict=True):  # pyright: ignore[reportArgumentType]
        leaves[i] = tensor
    return tree_unflatten(leaves, spec)


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in nested containers to `dtype`; keep everything else."""

    def cast_one(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast_one, values)


def backward_is_running() -> bool:
    """Whether a backward is running; then a forward is a recomputation (checkpointing)."""
    return torch._C._current_graph_task_id() != -1
