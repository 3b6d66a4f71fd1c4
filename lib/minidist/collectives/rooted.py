"""Collectives with one special rank, the root: broadcast, reduce, gather, scatter.

**Broadcast** goes down a binomial tree: each rank that has the tensor sends it on, so after t steps
2^t ranks have it. **Reduce** is the broadcast run backwards. **Gather** is N-1 direct messages to
the root, and **scatter** is N-1 direct messages from the root.

    broadcast, N = 5        step 1   0 -> 1
                            step 2   0 -> 2   1 -> 3
                            step 3   0 -> 4

Example::

    t = torch.tensor([rank])
    broadcast(t, src=1)                                 # on all ranks: tensor([1])
    parts = [torch.empty_like(t) for _ in range(world_size)] if rank == 0 else None
    gather(t, parts, dst=0)

As in torch, the root is a global rank (`src`, `dst`) or a rank of the group (`group_src`,
`group_dst`).
Torch's own: `dist.broadcast`, `dist.reduce`, `dist.gather`, `dist.scatter`.
Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.algorithms import (
    broadcast_steps,
    gather_steps,
    reduce_steps,
    scatter_steps,
)
from minidist.collectives.async_work import CollectiveWork
from minidist.collectives.issue import CollectiveCall, require_writable
from minidist.collectives.transport import Transport, even_chunks, list_chunks, run_steps


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    group_src: int | None = None,
    check: bool = False,
) -> CollectiveWork:
    """Copy the root's tensor to all ranks.

    Args:
        tensor: the same number of elements and dtype on all ranks.
        src, group_src: the root's global rank, or its rank in the group; by default global rank 0.
        group, async_op, check: as for `ring_all_reduce`.

    Raises:
        ValueError: the root is not in the group, or as `ring_all_reduce`.
    """
    call = CollectiveCall("broadcast", [tensor], group)
    require_writable(call, tensor)
    root = call.root("src", src, group_src)
    schedule = broadcast_steps(call.size, root)

    def body(transport: Transport) -> int:
        flat = call.stage(tensor)
        num_bytes = run_steps(schedule, even_chunks(flat, 1), transport)
        if transport.rank != root:
            call.unstage(flat, tensor)
        return num_bytes

    about = {"check": check, "root": root, "same": list(tensor.shape), "message": [tensor]}
    return call.issue(body, [tensor], async_op, **about)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
    check: bool = False,
) -> CollectiveWork:
    """Reduce over all ranks into the root's tensor. The tensors of other ranks do not change.

    Args:
        tensor: as for `ring_all_reduce`.
        dst, group_dst: the root's global rank, or its rank in the group; by default global rank 0.
        op, group, async_op, check: as for `ring_all_reduce`.

    Raises:
        ValueError: the root is not in the group, or as `ring_all_reduce`.
    """
    call = CollectiveCall("reduce", [tensor], group)
    root = call.root("dst", dst, group_dst)
    reduction = call.reduction(op)
    if call.rank == root:
        require_writable(call, tensor)
    schedule = reduce_steps(call.size, root)

    def body(transport: Transport) -> int:
        is_root = transport.rank == root
        flat = call.stage(tensor, copy=not is_root)
        num_bytes = run_steps(schedule, even_chunks(flat, 1), transport, reduction)
        if is_root:
            reduction.finish(flat, transport.size)
            call.unstage(flat, tensor)
        return num_bytes

    about = {"op": reduction.name, "root": root, "same": list(tensor.shape), "message": [tensor]}
    return call.issue(body, [tensor], async_op, check=check, **about)


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
    check: bool = False,
) -> CollectiveWork:
    """Collect one tensor of every rank on the root.

    Args:
        tensor: of any size; the sizes may differ between ranks.
        gather_list: on the root, one tensor per rank, as large as this rank's `tensor`; on other
            ranks None.
        dst, group_dst: the root's global rank, or its rank in the group; by default global rank 0.
        group, async_op, check: as for `ring_all_reduce`; `check` also compares each rank's size
            with the size of the root's tensor for this rank.

    Raises:
        ValueError: the root is not in the group; `gather_list` is missing, too long or too short on
            the root, or given on a different rank; the root's own part differs from `tensor` in
            size.
        MismatchError: with `check`, on every rank.
    """
    parts = list(gather_list or [])
    call = CollectiveCall("gather", [tensor, *parts], group)
    root = call.root("dst", dst, group_dst)
    _only_on_root(call, "gather_list", parts, root)
    if call.rank == root:
        call.require_numel(f"gather_list[{root}]", parts[root], tensor.numel())
        for part in parts:
            require_writable(call, part)
    schedule = gather_steps(call.size, root)

    def body(transport: Transport) -> int:
        flat = call.stage(tensor)
        if transport.rank != root:
            return run_steps(schedule, lambda *_: flat, transport)
        flats = [call.stage(part) for part in parts]
        flats[root].copy_(flat)
        run_steps(schedule, list_chunks(flats), transport)
        for flat, part in zip(flats, parts, strict=True):
            call.unstage(flat, part)
        return 0

    # Issue.
    sizes = _only(root, tensor.numel(), call.size), _sizes(parts, call.size)
    about: dict[str, Any] = {"root": root, "message": [tensor], "sizes": sizes}
    return call.issue(body, parts, async_op, check=check, **about)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    group_src: int | None = None,
    check: bool = False,
) -> CollectiveWork:
    """Send one of the root's tensors to each rank.

    Args:
        tensor: receives this rank's part.
        scatter_list: on the root, one tensor per rank, as large as `tensor` on this rank; on other
            ranks None.
        src, group_src: the root's global rank, or its rank in the group; by default global rank 0.
        group, async_op, check: as for `gather`.

    Raises:
        ValueError, MismatchError: as `gather`.
    """
    parts = list(scatter_list or [])
    call = CollectiveCall("scatter", [tensor, *parts], group)
    require_writable(call, tensor)
    root = call.root("src", src, group_src)
    _only_on_root(call, "scatter_list", parts, root)
    if call.rank == root:
        call.require_numel(f"scatter_list[{root}]", parts[root], tensor.numel())
    schedule = scatter_steps(call.size, root)

    def body(transport: Transport) -> int:
        if transport.rank == root:
            flats = [call.stage(part) for part in parts]
            tensor.data.copy_(flats[root].view(tensor.shape))
            return run_steps(schedule, list_chunks(flats), transport)
        flat = call.stage(tensor)
        run_steps(schedule, lambda *_: flat, transport)
        call.unstage(flat, tensor)
        return 0

    # Issue.
    sizes = _sizes(parts, call.size), _only(root, tensor.numel(), call.size)
    about: dict[str, Any] = {"root": root, "message": [tensor], "sizes": sizes}
    return call.issue(body, [tensor], async_op, check=check, **about)


def _sizes(parts: Sequence[torch.Tensor], num_ranks: int) -> list[int]:
    """Number of elements per rank: on the root, the sizes of its parts; on other ranks, zeros."""
    return [part.numel() for part in parts] or [0] * num_ranks


def _only(root: int, numel: int, num_ranks: int) -> list[int]:
    """Number of elements per rank, if only the root sends or receives elements."""
    return [numel if rank == root else 0 for rank in range(num_ranks)]


def _only_on_root(call: CollectiveCall, name: str, parts: list[torch.Tensor], root: int) -> None:
    if call.rank == root:
        call.require_parts(name, parts)
    else:
        call.require(not parts, f"{name} belongs to the root, rank {root} of the group")
