"""PowerSGD: a gradient matrix travels as two thin matrices.

A gradient M of rows x columns is approximately a product of rank r:

    M  ~  P Q^T        P: rows x r,  Q: columns x r

Phases of one step of a power iteration, which starts with the Q of the previous training step:
1. P = M Q, mean over the ranks. Parameters too small to compress travel uncompressed with it.
2. P gets orthonormal columns (the same on all ranks, from the same bits).
3. Q = M^T P, mean over the ranks.
4. The result is P Q^T, the projection of the mean gradient on the columns of P.

Example::

    PowerSGD(rank=2).reduce(flat_N, segments_of(parameters))
    # a 512 x 512 weight: 2 x (512 + 512) numbers instead of 262144, 128 times fewer

P and Q need only one all-reduce each because the mean is linear: mean(M_i Q) = mean(M_i) Q.
Vogels et al., arXiv 1905.13727.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from minidist.parallel.compression.compressor import Compressor, Exchange, Segment
from minidist.parallel.compression.exchange import Exact, two_phase_mean


class PowerSGD(Compressor):
    """Low-rank compression of every parameter that has two or more dimensions.

    Args:
        rank: number of columns of P and Q; 1 to 4 are usual. A higher rank approximates better.
        start_step: number of uncompressed steps at first. Early gradients change fast, and torch
            advises a tenth of the training. torch's hook needs at least 2, because DDP builds new
            buckets. Here state belongs to parameters, so 0 works.
        min_ratio: a parameter is compressed only if this saves more than this factor.
        warm_start: start from the Q of the last step; otherwise from random numbers at each step.
        seed: seed of the random numbers. Must be the same on all ranks.
        batched: treat all parameters of a bucket as one square matrix, padded with zeros. This
            takes one product instead of one per parameter, compresses biases too, and sends fewer
            bytes. But the rows have no meaning, so the approximation is worse. (torch's batched
            hook.)
        error_feedback: see `Compressor`. Without it, all but the largest r directions are lost.
    """

    def __init__(
        self,
        rank: int = 1,
        *,
        start_step: int = 0,
        min_ratio: float = 2.0,
        warm_start: bool = True,
        seed: int = 0,
        batched: bool = False,
        error_feedback: bool = True,
    ) -> None:
        if rank < 1:
            raise ValueError(f"PowerSGD: rank must be at least 1, got {rank}")
        if start_step < 0 or min_ratio < 0:
            raise ValueError(
                "PowerSGD: start_step and min_ratio must not be negative, got "
                f"{start_step} and {min_ratio}"
            )
        super().__init__(error_feedback=error_feedback)
        self.rank = rank
        self.start_step = start_step
        self.min_ratio = min_ratio
        self.warm_start = warm_start
        self.seed = seed
        self.batched = batched
        self._factors: dict[Hashable, torch.Tensor] = {}  # the Q of each parameter
        self._num_calls: dict[Hashable, int] = {}

    def _exchange(self, values: torch.Tensor, segments: list[Segment], group: Any) -> Exchange:
        step = self._num_calls.get(segments[0].key, 0)
        for segment in segments:
            self._num_calls[segment.key] = step + 1
        if not self.batched:
            return (yield from self._approximate(values, segments, step, group))
        numel = values.numel()
        side = math.ceil(math.sqrt(numel))
        square = values.new_zeros(side * side)
        square[:numel] = values
        # The state of a bucket is stored under the key of its first parameter.
        whole = [Segment(segments[0].key, (side, side))]
        mean, sent = yield from self._approximate(square, whole, step, group)
        return mean[:numel], sent[:numel]

    def _approximate(
        self, values: torch.Tensor, segments: list[Segment], step: int, group: Any
    ) -> Exchange:
        """The four phases, for the matrices of these segments."""
        parts = values.split([segment.numel for segment in segments])
        low = {
            i: parts[i].view(segment.shape[0], -1)
            for i, segment in enumerate(segments)
            if step >= self.start_step and self._is_worth_it(segment.shape)
        }
        whole = [i for i in range(len(segments)) if i not in low]
        # 1. P = M Q, and the other parameters uncompressed.
        q = {i: self._start(i, step, segments[i].key, matrix) for i, matrix in low.items()}
        p = {i: matrix @ q[i] for i, matrix in low.items()}
        means = yield from self._mean_of([*(parts[i] for i in whole), *p.values()], group)
        result: list[torch.Tensor] = list(parts)
        for i, mean in zip(whole, means, strict=False):
            result[i] = mean
        if not low:
            return torch.cat(result), values
        # 2. Orthonormal columns.
        p = {i: orthonormalise(mean) for i, mean in zip(low, means[len(whole) :], strict=True)}
        # 3. Q = M^T P.
        means = yield from self._mean_of([low[i].T @ p[i] for i in low], group)
        # 4. P Q^T. Every rank has sent as much as the result contains, so `sent` is the result.
        sent = list(parts)
        for i, mean in zip(low, means, strict=True):
            result[i] = sent[i] = (p[i] @ mean.T).reshape(-1)
            self._keep(segments[i].key, mean, q[i])
        return torch.cat(result), torch.cat(sent)

    def _is_worth_it(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or 0 in shape:
            return False
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        thin = (rows + columns) * min(self.rank, rows, columns)
        return thin * self.min_ratio < rows * columns

    def _start(self, i: int, step: int, key: Hashable, matrix: torch.Tensor) -> torch.Tensor:
        """The Q that this step starts with."""
        known = self._factors.get(key) if self.warm_start else None
        if known is not None and len(known) == matrix.shape[1]:  # DDP builds its buckets anew once
            return known.to(matrix.device, matrix.dtype)
        # Drawn on the CPU, so that the numbers are the same for every device and rank.
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * step + i)
        shape = (matrix.shape[1], min(self.rank, *matrix.shape))
        q = torch.randn(shape, generator=generator, dtype=torch.float64)
        return q.to(matrix.device, matrix.dtype)

    def _keep(self, key: Hashable, new: torch.Tensor, old: torch.Tensor) -> None:
        """Keep the new Q for the next step.

        A column that is zero or not finite is not kept, because P = M Q would then stay zero or
        not finite for ever.
        """
        norms = new.norm(dim=0)
        self._factors[key] = torch.where((norms > 0) & torch.isfinite(norms), new, old)

    def _mean_of(self, tensors: list[torch.Tensor], group: Any) -> Any:
        """Mean of several tensors in one exchange."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        mean, _ = yield from two_phase_mean(flat, Exact(), group, self.traffic)
        parts = mean.split([tensor.numel() for tensor in tensors])
        return [part.view(like.shape) for part, like in zip(parts, tensors, strict=True)]

    def _tables(self) -> dict[str, dict[Hashable, Any]]:
        return {**super()._tables(), "factors": self._factors, "num_calls": self._num_calls}


def orthonormalise(matrix: torch.Tensor) -> torch.Tensor:
    """The columns made orthonormal, from first to last (modified Gram-Schmidt).

    A column that depends linearly on earlier columns becomes zero. Only rounding noise is left of
    such a column. Dividing this noise by its length would give a direction that is not orthogonal
    to the other columns, and P P^T would no longer be a projection.

    >>> orthonormalise(torch.tensor([[3.0, 3.0], [4.0, 4.0]]))
    tensor([[0.6000, 0.0000],
            [0.8000, 0.0000]])

    Args:
        matrix: rows x r, with r small: one pass over the matrix per column.
    """
    columns: list[torch.Tensor] = []
    tolerance = 10 * torch.finfo(matrix.dtype).eps
    for column in matrix.unbind(1):
        length = torch.linalg.vector_norm(column)
        column = column / torch.where(length > 0, length, 1.0)
        for _ in range(2):  # one pass leaves an error of eps / (length that is left); two suffice
            for other in columns:
                column = column - (other @ column) * other
        left = torch.linalg.vector_norm(column)
        # NaN must stay NaN, so the test is for "too small" and not for "large enough".
        columns.append(torch.where(left <= tolerance, 0.0, column / left))
    return torch.stack(columns, dim=1)
