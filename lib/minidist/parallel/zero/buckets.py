"""Buckets of parameters: one collective of stage 1 or 2 sends one bucket."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minidist.parallel.zero.exchange import GradientBucket
from minidist.parallel.zero.partition import Layout, Piece
from minidist.unsupported import Unsupported

STRIDES = Unsupported(
    "Zero2Optimizer",
    "parameters that are not contiguous, such as those in channels_last",
    instead="use ShardedOptimizer, or make them contiguous",
)


@dataclass
class ShardedBucket:
    """Some parameters of one dtype and device, and the pieces that this rank owns."""

    params: list[Tensor]
    layout: Layout
    # One tensor per piece of this rank: the parameter itself (stage 1) or a view of its elements
    # (stage 2). Its .grad holds the gradient.
    pieces: list[Tensor]
    # The tensors that the wrapped optimiser updates: the pieces, or master copies of them.
    owned: list[Tensor]
    gradients: GradientBucket


def elements_of(param: Tensor, piece: Piece) -> Tensor:
    """The piece's elements, as a 1-D view of the parameter."""
    if not param.is_contiguous():
        raise STRIDES.error(
            f"a parameter of shape {tuple(param.shape)} with strides {param.stride()} is not "
            "contiguous and cannot be cut by element"
        )
    return param.view(-1)[piece.begin : piece.end]
