"""Hierarchical all-reduce: most bytes travel on the fast links inside a node.

The links of a cluster differ: hundreds of GB/s inside a node, tens of GB/s between nodes. The
all-reduce has three phases:

1. Reduce-scatter inside each node: local rank l then holds shard l of the node's sum.
2. All-reduce across nodes, among the ranks with the same l: each rank reduces 1/local_size of the
   bytes.
3. All-gather inside each node.

    node 0   ranks 0 1 2 3      local groups   {0 1 2 3} {4 5 6 7}
    node 1   ranks 4 5 6 7      cross groups   {0 4} {1 5} {2 6} {3 7}

Example::

    local, cross = node_groups(local_size=4)          # once, on all ranks
    hierarchical_all_reduce(t, local_group=local, cross_group=cross)

Torch's own: `dist.all_reduce` on NCCL works in a similar way by itself; HSDP (`fully_shard` on a
mesh of two axes) has the same traffic. Mikami et al., "Massively Distributed SGD"
(arXiv:1811.05233).
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.agreement import gather_texts, tell, who_says_what
from minidist.collectives.algorithms import (
    ring_all_gather_steps,
    ring_reduce_scatter_steps,
    ring_steps,
)
from minidist.collectives.async_work import CollectiveWork
from minidist.collectives.issue import CollectiveCall, require_writable
from minidist.collectives.transport import Transport, even_chunks, run_steps
from minidist.errors import MismatchError

# Limits for `check`: bytes of one rank's description; how many different descriptions a node
# reports to the other nodes; bytes of a node's report.
_RANK_BYTES, _MAX_KINDS, _NODE_BYTES = 512, 8, 16384


def node_groups(local_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The local and the cross group of this rank, where rank = node * local_size + local rank.

    Collective over the default group.

    Raises:
        ValueError: the world size is not a multiple of `local_size`.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if local_size < 1 or world_size % local_size:
        raise ValueError(
            f"node_groups: {world_size} ranks are no whole number of nodes of {local_size}"
        )
    ranks = range(world_size)
    by_node = [list(ranks[first : first + local_size]) for first in ranks[::local_size]]
    by_local_rank = [list(ranks[local::local_size]) for local in range(local_size)]
    local_groups: list[Any] = [dist.new_group(group) for group in by_node]
    cross_groups: list[Any] = [dist.new_group(group) for group in by_local_rank]
    return local_groups[rank // local_size], cross_groups[rank % local_size]


def hierarchical_all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    async_op: bool = False,
    *,
    local_group: dist.ProcessGroup,
    cross_group: dist.ProcessGroup,
    check: bool = False,
) -> CollectiveWork:
    """Reduce a tensor over all ranks of all nodes, in place.

    Args:
        tensor, op, async_op: as for `ring_all_reduce`.
        local_group: the ranks of this rank's node. All nodes have the same number of ranks.
        cross_group: the ranks, one per node, that have the same local rank as this rank.
        check: as for `ring_all_reduce`, over all ranks of all nodes; it also compares the sizes of
            the groups.

    Raises:
        ValueError, MismatchError: as `ring_all_reduce`; MismatchError on all ranks of all nodes.
            Without `check`, groups that do not form a grid are not detected.
    """
    # Validate.
    local = CollectiveCall("hierarchical_all_reduce.local", [tensor], local_group)
    cross = CollectiveCall("hierarchical_all_reduce.cross", [tensor], cross_group)
    require_writable(local, tensor)
    reduction = local.reduction(op)
    # Derive. The phases share the staged tensor, which the first phase makes.
    scatter, gather = ring_reduce_scatter_steps(local.size), ring_all_gather_steps(local.size)
    across = ring_steps(cross.size)
    staged: list[torch.Tensor] = []

    def scatter_in_node(transport: Transport) -> int:
        staged.append(local.stage(tensor))
        return run_steps(scatter, even_chunks(staged[0], local.size), transport, reduction)

    def reduce_across(transport: Transport) -> int:
        shard = even_chunks(_here(staged[0]), local.size)(local.rank, 1)
        num_bytes = run_steps(across, even_chunks(shard, cross.size), transport, reduction)
        reduction.finish(shard, local.size * cross.size)
        return num_bytes

    def gather_in_node(transport: Transport) -> int:
        flat = _here(staged[0])
        num_bytes = run_steps(gather, even_chunks(flat, local.size), transport)
        local.unstage(flat, tensor)
        return num_bytes

    # Issue. All phases are queued now, so the order of calls is kept; each waits for the previous.
    numel = local.part_sizes("tensor", tensor)[local.rank]
    shard = torch.empty(numel, dtype=tensor.dtype, device="meta")
    about: dict[str, Any] = {"op": reduction.name}
    agreed = _agree_on_grid(local, cross, tensor, reduction.name) if check else None
    first = local.issue(scatter_in_node, [tensor], True, message=[tensor], after=agreed, **about)
    about |= {"message": [shard]}
    second = cross.issue(reduce_across, [tensor], True, after=first, **about)
    third = local.issue(gather_in_node, [tensor], True, after=second, **about)
    if not async_op:
        third.wait()
    return third


def _agree_on_grid(
    local: CollectiveCall, cross: CollectiveCall, tensor: torch.Tensor, op: str
) -> CollectiveWork:
    """Compare what all ranks are about to do: first within each node, then across the nodes.

    A node whose ranks differ reports this to the other nodes before any rank raises. If the node
    raised at once, the other nodes would wait for it.
    """
    mine = local.describe(
        op=op, shape=list(tensor.shape), ranks_per_node=local.size, nodes=cross.size
    )
    ranks = dist.get_process_group_ranks(local.group)
    found: dict[str, list[int]] = {}

    def compare_in_node(transport: Transport) -> int:
        rows, num_bytes = gather_texts(transport, local.wire_device, mine, _RANK_BYTES)
        found.update(who_says_what(zip(ranks, rows, strict=True)))
        return num_bytes

    def compare_nodes(transport: Transport) -> int:
        text = json.dumps(list(found.items())[:_MAX_KINDS])
        nodes, num_bytes = gather_texts(transport, cross.wire_device, text, _NODE_BYTES)
        callers: dict[str, list[int]] = {}
        for node in nodes:
            for row, who in json.loads(node):
                callers.setdefault(row, []).extend(who)
        if len(callers) > 1:
            raise MismatchError(f"the ranks do not agree: {tell(callers)}", rank=dist.get_rank())
        return num_bytes

    in_node = local.issue(compare_in_node, [tensor], True)
    return cross.issue(compare_nodes, [tensor], True, after=in_node)


def _here(flat: torch.Tensor) -> torch.Tensor:
    """Tell the allocator that the current stream, too, uses this memory of an earlier phase."""
    if flat.device.type != "cpu":
        flat.record_stream(torch.get_device_module(flat.device).current_stream(flat.device))
    return flat
