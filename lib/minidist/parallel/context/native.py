"""Context parallelism with torch alone.

**What torch has**: `torch.distributed.tensor.experimental.context_parallel`, a prototype that
replaces `F.scaled_dot_product_attention` by a ring with the same zig-zag order. It needs CUDA (it
supports the flash, memory-efficient and cuDNN kernels), so the tests do not run this example::

    positions_T = torch.arange(T, device="cuda")
    with context_parallel(mesh.device_mesh["cp"], buffers=[tokens_BT, targets_BT, positions_T],
                          buffer_seq_dims=[1, 1, 0]):         # sharded in place for the block
        logits_BTV = model.head(...)                          # with model.embed(tokens, positions)
        loss = lm_loss(logits_BTV, targets_BT)                # of the rank's own tokens
        loss.backward()

**What torch's functional collectives allow**: autograd sees these collectives, and they run on any
backend.

- `all_gather_attention`: gather keys and values, then attend with a mask. Llama 3 does this (arXiv
  2407.21783, section 3.3.2): for long sequences the gather costs little compared with attention,
  and any mask is possible. Each rank holds the keys and values of the whole sequence; with ring
  attention it holds those of three ranks.
- `all_to_all_attention`: Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor

from minidist.parallel.context.layout import Layout, positions, sequence_order
from minidist.parallel.context.ring import check_inputs
from minidist.parallel.context.ulysses import check_heads


def all_gather_attention(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    layout: Layout = "zigzag",
) -> Tensor:
    """Attention of this rank's tokens to the whole sequence; arguments as in `ring_attention`."""
    check_inputs("all_gather_attention", query_BHTK, key_BHTK, value_BHTK, group, layout)
    # All-gather forward, reduce-scatter of the gradient backward.
    gather: Any = getattr(functional, "all_gather_single_autograd", None)
    gather = gather or functional.all_gather_tensor_autograd  # its name before torch 2.13
    key_value = torch.stack([key_BHTK, value_BHTK]).movedim(3, 0).contiguous()
    gathered = gather(key_value, 0, group or dist.group.WORLD)
    key, value = _with_contiguous_gradient(gathered).movedim(0, 3)

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mask = None
    if causal:
        own, every = (x.to(key.device) for x in _positions(key.shape[2], rank, size, layout))
        mask = own.unsqueeze(1) >= every.unsqueeze(0)
    return F.scaled_dot_product_attention(query_BHTK, key, value, attn_mask=mask)


def all_to_all_attention(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    layout: Layout = "zigzag",
) -> Tensor:
    """Ulysses; arguments as in `ring_attention`. The ranks must divide the heads evenly."""
    check_inputs("all_to_all_attention", query_BHTK, key_BHTK, value_BHTK, group, layout)
    check_heads("all_to_all_attention", query_BHTK.shape[1], group)
    size = dist.get_world_size(group)
    heads_first = torch.stack([query_BHTK, key_BHTK, value_BHTK]).movedim(2, 0)  # (H, 3, B, t, K)
    inputs = _exchange(heads_first, group).unflatten(0, (size, -1))  # (n, H / n, 3, B, t, K)
    inputs = inputs.movedim(0, 3).flatten(3, 4)  # (H / n, 3, B, T, K)
    order = sequence_order(inputs.shape[3], size, layout).to(inputs.device)
    query, key, value = inputs.index_select(3, order).unbind(1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal)  # (H / n, B, T, K)
    tokens_first = out.index_select(2, order.argsort()).movedim(2, 0)
    out = _exchange(tokens_first, group).unflatten(0, (size, -1))  # (n, t, H / n, B, K)
    return out.movedim(2, 1).flatten(0, 1).permute(2, 0, 1, 3)


def _exchange(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    size = dist.get_world_size(group)
    parts = [x.shape[0] // size] * size
    exchange: Any = functional.all_to_all_single_autograd
    out = exchange(x.contiguous(), parts, parts, group or dist.group.WORLD)
    return _with_contiguous_gradient(out)


def _with_contiguous_gradient(x: Tensor) -> Tensor:
    """The same tensor; torch 2.11's collectives refuse a gradient that is not contiguous."""
    if x.requires_grad:
        x.register_hook(Tensor.contiguous)
    return x


def _positions(num_tokens: int, rank: int, size: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """Positions of this rank's tokens, and of the gathered tokens."""
    every = torch.cat([positions(num_tokens, r, size, layout) for r in range(size)])
    return positions(num_tokens, rank, size, layout), every
