"""The operators between replicated and split tensors, each with its correct backward pass.

Autograd does not see a collective called from `torch.distributed`: the gradient stops there, or is
wrong by a factor of the group's size. Each operator here defines both directions. The operators
form conjugate pairs: the backward pass of one is the forward pass of the other.

    forward          backward         name                      in the papers
    identity         all-reduce       copy_to                   f (1909.08053)
    all-reduce       identity         reduce_from               g (1909.08053)
    keep own part    all-gather       scatter_to
    all-gather       keep own part    gather_from
    all-gather       reduce-scatter   gather_sequence           g (2205.05198)
    reduce-scatter   all-gather       reduce_scatter_sequence   its conjugate (2205.05198)

`gather_from` and `gather_sequence` do the same forward, but differ backward. After `gather_from`
every rank continues with the same computation. So every rank's gradient is already whole, and the
rank keeps its own part. After `gather_sequence` every rank uses its copy in a different computation
(its columns of a weight), so the gradients must be summed.

Example, a column-parallel layer followed by a row-parallel one, on each rank::

    y = F.gelu(copy_to(x, group) @ A_columns)          # x, and its gradient, equal on all ranks
    z = reduce_from(y @ B_rows, group)                 # z equal on all ranks

Papers: Megatron-LM (arXiv 1909.08053), Reducing Activation Recomputation (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.device import all_gather_single, reduce_scatter_single
from minidist.parallel.tensor.config import split_evenly

Group = dist.ProcessGroup | None


def copy_to(x: Tensor, group: Group = None) -> Tensor:
    """f: identity forward, all-reduce (sum) of the gradient backward.

    For a replicated tensor that each rank then uses in a different computation. Any shape.
    """
    return x if dist.get_world_size(group) == 1 else _Copy.apply(x, group)


def reduce_from(x: Tensor, group: Group = None) -> Tensor:
    """g: all-reduce (sum) forward, identity backward. Turns partial sums into a replicated sum."""
    return x if dist.get_world_size(group) == 1 else _Reduce.apply(x, group)


def scatter_to(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Keep this rank's part of a replicated tensor; its gradient is gathered.

    Raises:
        ValueError: the size of `dim` is not a multiple of the group's size.
    """
    _check(x, dim, group, "scatter_to")
    return x if dist.get_world_size(group) == 1 else _Scatter.apply(x, dim, group)


def gather_from(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Join the parts of all ranks into a tensor that all ranks use in the same computation.

    Backward keeps this rank's part of the gradient. Parts must have equal shapes.
    """
    return x if dist.get_world_size(group) == 1 else _Gather.apply(x, dim, group)


def gather_sequence(x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
    """Join the parts of all ranks for a computation that differs between ranks.

    Backward is a reduce-scatter. (B, T / n, D) to (B, T, D) for dim=1.
    """
    return x if dist.get_world_size(group) == 1 else _GatherSequence.apply(x, dim, group)


def reduce_scatter_sequence(x: Tensor, dim: int = 1, group: Group = None) -> Tensor:
    """Sum partial results and keep this rank's part of the sum. Backward is an all-gather.

    (B, T, D) to (B, T / n, D) for dim=1.

    Raises:
        ValueError: the size of `dim` is not a multiple of the group's size.
    """
    _check(x, dim, group, "reduce_scatter_sequence")
    return x if dist.get_world_size(group) == 1 else _ReduceScatterSequence.apply(x, dim, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_from(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)  # all_reduce works in place
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return copy_to(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_from(grads[0], ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return scatter_to(grads[0], ctx.dim, ctx.group), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_scatter_sequence(grads[0], ctx.dim, ctx.group), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        # The collective splits the first dimension.
        whole = x.movedim(dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
        reduce_scatter_single(part, whole, group=group)
        return part.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gather_sequence(grads[0], ctx.dim, ctx.group), None, None


def all_gather(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Join the equal parts of all ranks along `dim`. Autograd does not see it."""
    part = x.detach().movedim(dim, 0).contiguous()
    whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    all_gather_single(whole, part, group=group)
    return whole.movedim(0, dim).contiguous()


def _check(x: Tensor, dim: int, group: Group, who: str) -> None:
    what = f"{who}: dimension {dim} of a tensor of shape {tuple(x.shape)}"
    split_evenly(what, x.shape[dim], dist.get_world_size(group), dist.get_rank())
