"""Buckets of parameters: one collective of stage 1 or 2 sends one bucket.

>>> import torch
>>> params = [torch.zeros(3), torch.zeros(2), torch.zeros(4)]
>>> [[p.numel() for p in bucket] for bucket in cut_into_buckets(params, bucket_bytes=16)]
[[3, 2], [4]]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from minidist.parallel.zero.exchange import GradientBucket
from minidist.parallel.zero.partition import Layout, Piece


@dataclass
class Bucket:
    """Some parameters of one dtype and device, and the pieces that this rank owns."""

    params: list[Tensor]
    layout: Layout
    # One tensor per piece of this rank: the parameter itself (stage 1) or a view of its elements
    # (stage 2). Its .grad holds the gradient.
    pieces: list[Tensor]
    # The tensors that the wrapped optimiser updates: the pieces, or master copies of them.
    owned: list[Tensor]
    gradients: GradientBucket


def cut_into_buckets(
    params: list[Tensor], bucket_bytes: int, at_least: int = 1
) -> Iterator[list[Tensor]]:
    """Consecutive parameters, until a bucket has both `bucket_bytes` and `at_least` parameters."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for param in params:
        bucket.append(param)
        num_bytes += param.numel() * param.element_size()
        if num_bytes >= bucket_bytes and len(bucket) >= at_least:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket


def elements_of(param: Tensor, piece: Piece) -> Tensor:
    """The piece's elements, as a 1-D view of the parameter."""
    if not param.is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} with strides {param.stride()} is not "
            "contiguous and cannot be cut by element"
        )
    return param.view(-1)[piece.begin : piece.end]
