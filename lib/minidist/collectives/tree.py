"""Trees: fewer latencies than the ring.

Reduce up to the root, then broadcast down: 2 log2 N steps instead of 2 (N-1). This is faster for
messages whose time is mostly latency. Large messages are cut into chunks (`num_chunks`) that follow
each other through the tree, so that all levels work at once.

In one binary tree, half of the ranks are leaves that only send S bytes up, while an inner rank
sends up to 3 S: S up and 2 S down. With two trees, each carries half of the message, and the leaves
of one tree are inner ranks of the other. Then every rank sends about 2 S. NCCL's tree works this
way.

    N = 7       3                    chunk k of 4: leaves send it up in step 1 + k,
              /   \\                  the root has it after step 2 + k,
             1     5                 the leaves have it again after step 4 + k
            / \\   / \\
           0   2 4   6

Example::

    t = torch.ones(3) * rank        # seven ranks
    tree_all_reduce(t)              # all: tensor([21., 21., 21.])

Torch's own: `dist.all_reduce` (NCCL chooses rings or trees; NCCL_ALGO=Tree asks for the latter).
Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.algorithms import double_tree_steps, tree_steps
from minidist.collectives.async_work import CollectiveWork
from minidist.collectives.issue import all_reduce_by


def tree_all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    double: bool = False,
    num_chunks: int = 1,
    check: bool = False,
    accumulate_dtype: torch.dtype | None = None,
) -> CollectiveWork:
    """Reduce a tensor over all ranks, in place, over one binary tree or two.

    Args:
        double: use two trees, each for half of the tensor.
        num_chunks: chunks per tree that are in flight together; 1 for small tensors.
        The other arguments, the errors and the result are as for `ring_all_reduce`.
    """
    steps = partial(double_tree_steps if double else tree_steps, num_chunks=num_chunks)
    return all_reduce_by(
        *("tree_all_reduce", steps, tensor, op, group, async_op),
        check=check,
        accumulate_dtype=accumulate_dtype,
    )
