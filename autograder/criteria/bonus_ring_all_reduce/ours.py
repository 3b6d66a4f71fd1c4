"""Our versions of functions of earlier tasks, so that one fault is not counted twice."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from autograder.criteria.bonus_ring_all_reduce.model import ring_s as ring_seconds
from autograder.criteria.bonus_ring_all_reduce.model import tree_s as tree_seconds

__all__ = [
    "chunk_bounds",
    "exchange",
    "ring_all_reduce",
    "ring_seconds",
    "ring_steps",
    "tree_seconds",
]


def chunk_bounds(numel: int, num_chunks: int) -> list[tuple[int, int]]:
    """The chunks into which torch would split a tensor."""
    parts = torch.empty(numel, device="meta").tensor_split(num_chunks)
    return list(pairwise(accumulate((len(part) for part in parts), initial=0)))


def ring_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Simulates all ranks: each sends the chunk that has changed last, at first its own."""
    changed = [{own: 0} for own in range(world_size)]
    steps = []
    for step in range(2 * (world_size - 1)):
        sent = [max(chunks, key=lambda c, chunks=chunks: chunks[c]) for chunks in changed]
        for receiver, chunks in enumerate(changed):
            chunks[sent[receiver - 1]] = step + 1
        steps.append((sent[rank], sent[rank - 1]))
    return steps


def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """A send to the next rank and a receive from the one before, started together."""
    if (num_ranks := dist.get_world_size()) > 1:
        ahead, behind = ((dist.get_rank() + way) % num_ranks for way in (1, -1))
        sent = dist.P2POp(dist.isend, outgoing, ahead)
        received = dist.P2POp(dist.irecv, incoming, behind)
        for work in dist.batch_isend_irecv([received, sent]):
            work.wait()
    else:
        incoming.copy_(outgoing)


def ring_all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Without a ring: each rank sends its tensor to all others, which is enough for the hook."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own, total = tensor.clone(), tensor
    for shift in range(1, world_size):
        came = torch.empty_like(own)
        sent = dist.P2POp(dist.isend, own, (rank + shift) % world_size)
        received = dist.P2POp(dist.irecv, came, (rank - shift) % world_size)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
        total.copy_(torch.maximum(total, came) if op == "max" else total + came)
    if op == "mean":
        total.div_(world_size)
    return total
