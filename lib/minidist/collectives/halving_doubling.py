"""Recursive halving and doubling: as many bytes as a ring, as few steps as a tree.

**Halving** (a reduce-scatter): rank r and the rank at distance N/2 exchange halves of their buffers
and add what they receive. They then do the same with half of that half at distance N/4, and so on.
After log2 N steps rank r has chunk r.
**Doubling** (an all-gather): the same steps in reverse order. The size of a message doubles with
each step.

Distances are powers of two. Let P be the largest power of two that is at most N. The last N-P ranks
first add ("fold") their buffers to the buffers of ranks 0 .. N-P-1, and get the result from those
ranks at the end. This takes two more steps and, for the ranks concerned, up to S more bytes.

Example::

    t = torch.arange(4.0)               # three ranks: rank 2 folds into rank 0
    halving_doubling_all_reduce(t)      # all: tensor([0., 3., 6., 9.])

Torch's own: `dist.all_reduce`.
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19 (2005).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.algorithms import halving_doubling_steps
from minidist.collectives.async_work import CollectiveWork
from minidist.collectives.issue import all_reduce_by


def halving_doubling_all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    check: bool = False,
    accumulate_dtype: torch.dtype | None = None,
) -> CollectiveWork:
    """Reduce a tensor over all ranks, in place. Any world size.

    Arguments, errors and result: as for `ring_all_reduce`.
    """
    return all_reduce_by(
        *("halving_doubling_all_reduce", halving_doubling_steps, tensor, op, group, async_op),
        check=check,
        accumulate_dtype=accumulate_dtype,
    )
