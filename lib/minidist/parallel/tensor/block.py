"""A transformer block split over the ranks of a group, with or without sequence parallelism.

Tensor parallelism (f: identity, all-reduce backward; g: all-reduce, identity backward):

    x --+-- norm1 -- f -- q, k, v -- own heads -- out -- g --(+)-- y
        +-----------------------------------------------------^
    y --+-- norm2 -- f -- up -- GELU -- down -- g --(+)--
        +--------------------------------------------^

Activations outside f...g are whole on every rank. There are two all-reduces forward and two
backward.

With sequence parallelism, f is an all-gather and g is a reduce-scatter along the sequence. Outside
f...g a rank holds T / n tokens, so norms, dropout and the residual stream cost 1 / n of the memory.
An all-reduce is a reduce-scatter plus an all-gather, so the bytes are the same, unless the gathered
inputs are not kept for backward: then they are gathered once more.

Papers: Megatron-LM (arXiv 1909.08053), sequence parallelism (arXiv 2205.05198, figure 5).
Letters of shapes: B batch, T tokens, D width, H heads of this rank, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from minidist.errors import named_rank
from minidist.packing import PACKED
from minidist.parallel.tensor.config import TensorParallel
from minidist.parallel.tensor.layers import (
    ColumnParallelLinear,
    ParallelLayerNorm,
    RowParallelLinear,
    column_parallel,
)
from minidist.replaced import check_layer, check_parts

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor) -> Tensor:
    """Each token attends to itself and to the tokens before it; (B, H, T, K)."""
    return F.scaled_dot_product_attention(query_BHTK, key_BHTK, value_BHTK, is_causal=True)


class ParallelAttention(nn.Module):
    """Causal self-attention; each rank computes H / n of the heads, which are independent.

    Args:
        full: a `minidist.model.Attention`, or an object with its `query`, `key`, `value`, `out`,
            `num_heads` and `dropout`; the same on all ranks.
        attend: the attention itself, on this rank's heads (B, H / n, T, K). Context parallelism
            replaces it.

    Raises:
        ValueError: the heads cannot be split evenly, or `full` has other parts besides.
    """

    def __init__(self, full: Any, tp: TensorParallel, *, attend: Attend = causal_attention) -> None:
        super().__init__()
        check_parts("ParallelAttention", full, ("query", "key", "value", "out", "dropout"))
        self.training = getattr(full, "training", True)
        self.num_heads = tp.split("ParallelAttention: heads", full.num_heads)
        self.tp = tp
        self.attend = attend
        self.query = ColumnParallelLinear(full.query, tp)
        self.key = ColumnParallelLinear(full.key, tp)
        self.value = ColumnParallelLinear(full.value, tp)
        self.out = RowParallelLinear(full.out, tp)
        self.dropout = ParallelDropout.of(full.dropout, tp)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        """`mask_B1TT`: which token (row) sees which (column); None means all earlier ones."""
        projected = column_parallel(x_BTD, [self.query, self.key, self.value], self.tp)
        query_BHTK, key_BHTK, value_BHTK = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projected
        )
        if mask_B1TT is None:
            y_BHTK = self.attend(query_BHTK, key_BHTK, value_BHTK)
        elif self.attend is causal_attention:
            y_BHTK = F.scaled_dot_product_attention(
                query_BHTK, key_BHTK, value_BHTK, attn_mask=mask_B1TT
            )
        else:
            raise PACKED.error(
                f"the attention was replaced and takes no mask on {named_rank()}",
                where="ParallelAttention",
            )
        return self.dropout(self.out(y_BHTK.transpose(1, 2).flatten(2)))


class ParallelMLP(nn.Module):
    """Column-parallel, GELU, row-parallel. GELU works on each feature alone, so it sends nothing.

    Args:
        full: a `minidist.model.MLP`, or an object with its `up`, `down` and `dropout`.
    """

    def __init__(self, full: Any, tp: TensorParallel) -> None:
        super().__init__()
        check_parts("ParallelMLP", full, ("up", "down", "dropout"))
        self.training = getattr(full, "training", True)
        self.up = ColumnParallelLinear(full.up, tp)
        self.down = RowParallelLinear(full.down, tp)
        self.dropout = ParallelDropout.of(full.dropout, tp)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x_BTD))))


class ParallelBlock(nn.Module):
    """A pre-norm block.

    Args:
        full: a `minidist.model.Block`, or an object with its `norm1`, `attention`, `norm2`, `mlp`.

    Shapes: (B, T, D) to (B, T, D), the same on all ranks; with sequence parallelism (B, T / n, D)
    to (B, T / n, D), this rank's part.
    """

    def __init__(self, full: Any, tp: TensorParallel) -> None:
        super().__init__()
        check_parts("ParallelBlock", full, ("norm1", "attention", "norm2", "mlp"))
        self.training = getattr(full, "training", True)
        self.norm1 = ParallelLayerNorm(full.norm1, tp)
        self.attention = ParallelAttention(full.attention, tp)
        self.norm2 = ParallelLayerNorm(full.norm2, tp)
        self.mlp = ParallelMLP(full.mlp, tp)

    def forward(self, x_BTD: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), mask_B1TT)
        return x_BTD + self.mlp(self.norm2(x_BTD))


class ParallelDropout(nn.Module):
    """Dropout after a row-parallel layer.

    After such a layer the activations are the same on all ranks, so the mask must be the same too:
    it comes from the default random stream, which must have the same seed on all ranks. With
    sequence parallelism each rank holds different tokens, and draws its own mask.

    Raises:
        ValueError: sequence parallelism without an `RngTracker`.
    """

    def __init__(self, p: float, tp: TensorParallel, *, inplace: bool = False) -> None:
        super().__init__()
        if p > 0 and tp.sequence_parallel and tp.rng is None:
            raise ValueError(
                f"ParallelDropout: p = {p} with sequence parallelism needs an RngTracker "
                "(TensorParallel(rng=...)): the ranks hold different tokens"
            )
        self.p, self.inplace = p, inplace
        self.tp = tp

    @classmethod
    def of(cls, full: Any, tp: TensorParallel) -> ParallelDropout:
        """In place of an `nn.Dropout`, with its options and its mode."""
        check_layer("ParallelDropout", full, nn.Dropout)
        return cls(full.p, tp, inplace=full.inplace).train(full.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.tp.sequence_parallel and self.tp.rng is not None:
            with self.tp.rng.fork():
                return F.dropout(x, self.p, inplace=self.inplace)
        return F.dropout(x, self.p, inplace=self.inplace)
