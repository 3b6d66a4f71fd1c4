"""Which tokens of a sequence a rank holds.

In causal attention a token attends to the tokens before it, so later tokens cost more. If rank r
simply held the r-th part ("contiguous"), the last rank would have the most work, and the other
ranks would wait for it. "zigzag" cuts the sequence into 2 n chunks and gives rank r an early and a
late chunk, r and 2 n - 1 - r. This makes the work equal.

>>> [positions(8, rank, 2, "zigzag").tolist() for rank in range(2)]
[[0, 1, 6, 7], [2, 3, 4, 5]]
>>> causal_work(4, "contiguous"), causal_work(4, "zigzag")
([1, 2, 3, 4], [9, 9, 9, 9])

In a distributed program::

    tokens_BT, targets_BT = shard_sequence(tokens_BT, group=group), shard_sequence(...)

The zig-zag order is used by Llama 3 (arXiv 2407.21783, section 3.3.2); striped attention (arXiv
2311.09431) balances the same work with interleaved tokens.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.device import all_gather_single

Layout = Literal["zigzag", "contiguous"]


def chunks_of(rank: int, size: int, layout: Layout) -> tuple[int, ...]:
    """Numbers of the chunks that a rank holds, in their order in the rank's memory.

    The sequence has `size` chunks (contiguous) or `2 * size` chunks (zigzag) of equal length.
    """
    return (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)


def positions(
    num_tokens: int,
    rank: int,
    size: int,
    layout: Layout = "zigzag",
    device: torch.device | None = None,
) -> Tensor:
    """Position in the sequence of each token that `rank` holds, int64 (num_tokens / size,).

    Raises:
        ValueError: the tokens cannot be split evenly, or the layout is unknown.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout: expected one of {get_args(Layout)}, got {layout!r}")
    chunks = chunks_of(rank, size, layout)
    num_chunks = size * len(chunks)
    if num_tokens % num_chunks:
        raise ValueError(
            f"{layout} layout over {size} ranks: {num_tokens} tokens cannot be split "
            f"into {num_chunks} chunks ({num_tokens} = {num_chunks} x {num_tokens // num_chunks} + "
            f"{num_tokens % num_chunks}); pad to {-(-num_tokens // num_chunks) * num_chunks}"
        )
    length = num_tokens // num_chunks
    return torch.cat([torch.arange(length, device=device) + chunk * length for chunk in chunks])


def shard_sequence(
    x: Tensor,
    dim: int = 1,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "zigzag",
) -> Tensor:
    """This rank's tokens of a whole sequence, in the layout's order. No communication."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return x.index_select(dim, positions(x.shape[dim], rank, size, layout).to(x.device))


def unshard_sequence(
    x: Tensor,
    dim: int = 1,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "zigzag",
) -> Tensor:
    """The whole sequence, in order, from the parts of all ranks. Autograd does not see it."""
    size = dist.get_world_size(group)
    part = x.detach().movedim(dim, 0).contiguous()
    whole = part.new_empty(part.shape[0] * size, *part.shape[1:])
    all_gather_single(whole, part, group=group)
    return whole[sequence_order(len(whole), size, layout).to(x.device)].movedim(0, dim)


def sequence_order(num_tokens: int, size: int, layout: Layout) -> Tensor:
    """Index that puts the concatenated parts of ranks 0, 1, ... into the sequence's order."""
    return torch.cat([positions(num_tokens, r, size, layout) for r in range(size)]).argsort()


def causal_work(size: int, layout: Layout) -> list[int]:
    """Number of (query, key) pairs of chunks that each rank computes in causal attention."""
    return [sum(chunk + 1 for chunk in chunks_of(r, size, layout)) for r in range(size)]
