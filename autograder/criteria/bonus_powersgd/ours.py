"""Our versions of functions that a student writes in one task and calls in a later one.

A later task is judged with these if the student's own are wrong, which costs points once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from autograder.criteria.bonus_powersgd.columns import expected_shape


def orthonormalise(matrix: torch.Tensor) -> torch.Tensor:
    """By Householder reflections; zeros for columns that depend on those before."""
    q, r = torch.linalg.qr(matrix.double())
    lengths = torch.linalg.vector_norm(matrix.double(), dim=0)
    return (q * (r.diagonal().abs() > 1e-5 * lengths)).to(matrix.dtype)


def packed_mean(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Means over ranks, with the helpers of DDP."""
    if not tensors:
        return []
    flat = _flatten_dense_tensors(tensors) / dist.get_world_size()
    dist.all_reduce(flat)
    return list(_unflatten_dense_tensors(flat, tensors))


def power_step(
    matrices: list[torch.Tensor], qs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """P and the new Q of every matrix."""
    products = [torch.einsum("nm,mr->nr", m, q) for m, q in zip(matrices, qs, strict=True)]
    ps = list(map(orthonormalise, packed_mean(products)))
    return ps, packed_mean(
        [torch.einsum("nm,nr->mr", m, p) for m, p in zip(matrices, ps, strict=True)]
    )


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Rows and columns, where compression saves something."""
    found = expected_shape(list(shape), rank)
    return (found[0], found[1]) if found else None


def numbers_sent(shapes: list[tuple[int, ...]], rank: int) -> int:
    """Numbers that travel in one step."""
    pairs = [(math.prod(shape), matrix_shape(shape, rank)) for shape in shapes]
    return sum(rank * sum(pair) if pair else whole for whole, pair in pairs)


def train(model: Any, reducer: Any, batches: Any, lr: float, loss_fn: Any) -> list[float]:
    """The lab's `train`, with updates by hand, so that only the reducer is judged."""
    losses = []
    for x, y in batches:
        model.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        reducer.reduce_gradients()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=lr)
        losses.append(float(loss))
    return losses
