"""Ulysses: exchange tokens for heads, attend, exchange back.

Attention mixes tokens but treats each head separately; all other parts of a transformer treat each
token separately. So before attention an all-to-all turns "all heads of T / n tokens" into "H / n
heads of all tokens", and a second all-to-all turns the result back. Between the two, any attention
for whole sequences works.

Phases:
1. all-to-all of query, key and value together: tokens are gathered, heads are split,
2. put the tokens into the sequence's order; attend; put them back into the layout's order,
3. all-to-all of the result: heads are gathered, tokens are split.
The backward pass of an all-to-all is the reverse all-to-all.

Compared with the ring, the number of collectives is constant, and the bytes per rank decrease with
n. But there can be at most as many ranks as heads, and each rank holds some heads of the whole
sequence.

Example, on each rank::

    out_BHTK = ulysses_attention(q_BHTK, k_BHTK, v_BHTK, group=group)   # (B, H, T / n, K)

Paper: DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minidist.parallel.context.layout import Layout, sequence_order
from minidist.parallel.context.ring import check_inputs


def ulysses_attention(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    layout: Layout = "zigzag",
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's tokens to the whole sequence; arguments as in `ring_attention`.

    Raises:
        ValueError: the heads cannot be split evenly, or shapes differ.
    """
    # Validate.
    check_inputs("ulysses_attention", query_BHTK, key_BHTK, value_BHTK, group, layout)
    check_heads("ulysses_attention", query_BHTK.shape[1], group)
    size = dist.get_world_size(group)

    # 1. Tokens are gathered, heads are split: (3, B, H, t, K) to (3, B, H / n, T, K).
    inputs = torch.stack([query_BHTK, key_BHTK, value_BHTK])
    inputs = _all_to_all(inputs.unflatten(2, (size, -1)).movedim(2, 0), group)
    inputs = inputs.movedim(0, 3).flatten(3, 4)

    # 2. Attend to the whole sequence.
    order = sequence_order(inputs.shape[3], size, layout).to(inputs.device)
    query, key, value = inputs.index_select(3, order)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
    out = out.index_select(2, order.argsort())

    # 3. Heads are gathered, tokens are split: (B, H / n, T, K) to (B, H, t, K).
    out = _all_to_all(out.unflatten(2, (size, -1)).movedim(2, 0), group)
    return out.movedim(0, 1).flatten(1, 2)


def check_heads(who: str, num_heads: int, group: dist.ProcessGroup | None) -> None:
    """Raises ValueError if the heads cannot be split evenly over the ranks."""
    size = dist.get_world_size(group)
    if num_heads % size:
        raise ValueError(
            f"[rank {dist.get_rank()}] {who}: {num_heads} heads cannot be split over {size} ranks "
            f"({num_heads} = {size} x {num_heads // size} + {num_heads % size}); ring attention "
            "needs no division of heads"
        )


def _all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Part i of the first dimension goes to rank i; part i of the result comes from rank i."""
    return x if dist.get_world_size(group) == 1 else _AllToAll.apply(x, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _all_to_all(grads[0], ctx.group), None
