"""The ring: every rank sends only to the next rank.

**Reduce-scatter**, N-1 steps. The buffer is cut into N chunks. In each step every rank sends one
chunk to the next rank, and adds the chunk that arrives to its own copy of that chunk. At the end,
chunk r is complete on rank r.
**All-gather**, N-1 steps. The complete chunks go around the ring once more.
**All-reduce** is a reduce-scatter followed by an all-gather. A rank sends 2 (N-1)/N S bytes, the
minimum for an all-reduce over point-to-point messages, but pays 2 (N-1) latencies.

    chunks of rank 0   0 1 2        the ranks of a reduce-scatter with N = 3:
    chunks of rank 1   0 1 2        step 1   0 -2-> 1   1 -0-> 2   2 -1-> 0
    chunks of rank 2   0 1 2        step 2   0 -1-> 1   1 -2-> 2   2 -0-> 0

Example::

    t = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)      # two ranks
    ring_all_reduce(t)                                   # both: tensor([3., 6., 9.])
    work = ring_all_reduce(t, "avg", async_op=True)      # both, after work.wait(): the same

Torch's own: `dist.all_reduce`, `dist.reduce_scatter_tensor`, `dist.all_gather_into_tensor`.
Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009); Horovod, arXiv:1802.05799.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.algorithms import (
    ring_all_gather_steps,
    ring_reduce_scatter_steps,
    ring_steps,
)
from minidist.collectives.async_work import CollectiveWork
from minidist.collectives.issue import CollectiveCall, all_reduce_by, gather_by, reduce_scatter_by
from minidist.collectives.reduction import Reduction
from minidist.collectives.transport import Transport, run_steps


def ring_all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    num_segments: int = 1,
    check: bool = False,
    accumulate_dtype: torch.dtype | None = None,
) -> CollectiveWork:
    """Reduce a tensor over all ranks, in place, so that every rank has the result.

    All ranks get the same bits. The other all-reduce functions of this package take the same
    arguments, except `num_segments`; `hierarchical_all_reduce` takes two groups, and no
    `accumulate_dtype`.

    Args:
        tensor: any shape, also empty, and any strides; a CPU or accelerator tensor of any dtype
            that torch can reduce. The number of elements must be the same on all ranks.
        op: "sum", "avg", "max", "min", "prod", for integers also "band", "bor", "bxor"; or a
            `dist.ReduceOp`. The average of integers is rounded toward zero.
        group: None means the default group.
        async_op: return at once (the module `async_work` says what is guaranteed).
        num_segments: messages per chunk; with 2 or more, adding overlaps with receiving.
        check: first compare dtype, shape and op over all ranks (one more trip around the ring).
        accumulate_dtype: dtype of partial sums; by default the tensor's dtype. On a ring of N
            ranks, a bfloat16 sum is rounded N-1 times. With torch.float32 the sum is rounded once,
            but twice as many bytes travel. (`direct_all_reduce` rounds once without float32.)

    Returns:
        A handle with `wait()`, `is_completed()`, `get_future()` and `num_bytes_sent`. Unless
        `async_op`, the operation is over.

    Raises:
        ValueError: an argument is wrong, and this rank can see it without the other ranks.
        MismatchError: with `check`, the ranks do not agree. Without `check`, different sizes are
            not detected: gloo may report a broken connection, or fill only a part of a chunk.
    """
    steps = partial(ring_steps, num_segments=num_segments)
    return all_reduce_by(
        *("ring_all_reduce", steps, tensor, op, group, async_op),
        check=check,
        accumulate_dtype=accumulate_dtype,
    )


def ring_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor | Sequence[torch.Tensor],
    op: Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    check: bool = False,
) -> CollectiveWork:
    """Reduce over all ranks; each rank keeps its own part of the result.

    The input does not change, because its values are copied first.

    Args:
        output: receives part r on rank r.
        input: one tensor, cut into N parts as evenly as possible (the first parts may be one
            element longer, as in `torch.tensor_split`); or a list of N tensors, where part r has
            any size that is the same on all ranks.
        op, group, async_op, check: as for `ring_all_reduce`.

    Raises:
        ValueError: as `ring_all_reduce`; or `output` does not have the size of part r.
    """

    def run(call: CollectiveCall, _: list[int], reduction: Reduction, transport: Transport) -> int:
        schedule = ring_reduce_scatter_steps(call.size)
        chunks = call.chunks(input, copy=True)
        num_bytes = run_steps(schedule, chunks, transport, reduction)
        mine = chunks(transport.rank, 1)
        reduction.finish(mine, transport.size)
        call.unstage(mine, output)
        return num_bytes

    return reduce_scatter_by("ring_reduce_scatter", run, output, input, op, group, async_op, check)


def ring_all_gather(
    output: torch.Tensor | Sequence[torch.Tensor],
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    check: bool = False,
) -> CollectiveWork:
    """Every rank gets the inputs of all ranks.

    Args:
        output: one tensor, filled with N consecutive parts of sizes as even as possible (see
            `ring_reduce_scatter`); or a list of N tensors, where tensor r is as large as rank r's
            input.
        input: part r on rank r. May be the memory of part r of the output.
        group, async_op, check: as for `ring_all_reduce`.

    Raises:
        ValueError: as `ring_all_reduce`; or `input` does not have the size of part r.
    """
    return gather_by(
        "ring_all_gather", ring_all_gather_steps, output, input, group, async_op, check
    )
