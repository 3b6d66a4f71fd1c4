"""Activation checkpointing: keep a layer's input only, and compute the layer again in backward.

Memory for activations falls to one input per layer, for one more forward pass (a third more
arithmetic). The second forward must draw the dropout masks of the first, so the random streams are
set back for it. This holds in all forms of parallelism: streams that differ between ranks depend on
the default stream (`parallel.tensor.RngTracker`). Buffers, such as a BatchNorm's running mean, are
updated by the first forward only. Collectives inside a layer run a second time, on all ranks alike.

>>> block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh())
>>> recompute(block)(torch.ones(2, 3)).shape
torch.Size([2, 3])

Paper: Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Module = TypeVar("Module", bound=nn.Module)


def recompute(module: Module) -> Module:
    """Let `module` compute its forward again in backward. Changes and returns the module.

    Names of parameters stay. Evaluation (no gradients, or eval mode) computes once, as before. A
    second call changes nothing.

    Args:
        module: calls that need gradients must give the same result twice, except for random
            numbers: a layer that counts its calls, say, does not.
    """
    if not hasattr(module.forward, "computes_again"):
        forward = module.forward

        def again(*inputs: Any, **named: Any) -> Any:
            kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
            try:
                return forward(*inputs, **named)
            finally:  # .data: BatchNorm has saved its buffers for backward, and does not read them
                for buffer, value in kept:
                    buffer.data.copy_(value)

        @functools.wraps(forward)
        def twice(*inputs: Any, **named: Any) -> Any:
            if module.training and torch.is_grad_enabled():
                calls = iter((forward, again))
                either = lambda *a, **k: next(calls, again)(*a, **k)  # noqa: E731
                return checkpoint(either, *inputs, use_reentrant=False, **named)
            return forward(*inputs, **named)

        twice.computes_again = True  # type: ignore[attr-defined]
        module.forward = twice
    return module
