"""Direct exchange: the ring's bytes in two steps.

**Reduce-scatter**: every rank sends chunk c directly to rank c, which then holds all N versions of
the chunk and adds them up at once. **All-gather**: every rank sends its chunk to all other ranks.

Direct exchange has two advantages over the ring: it takes two latencies instead of 2 (N-1), and
partial sums do not travel, so half-precision values are summed in float32 and rounded once. It has
one drawback: N-1 messages arrive at each rank at once. This needs scratch memory, and a network in
which every rank has a fast path to every other rank (NVLink with switches, or the memory of one
machine).

Example::

    t = torch.full((5,), 0.1, dtype=torch.bfloat16)
    direct_all_reduce(t, "avg")

Torch's own: `dist.all_reduce`, `dist.reduce_scatter_tensor`, `dist.all_gather_into_tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives.algorithms import (
    direct_all_gather_steps,
    direct_reduce_scatter_steps,
    direct_steps,
)
from minidist.collectives.async_work import CollectiveWork
from minidist.collectives.issue import CollectiveCall, all_reduce_by, gather_by, reduce_scatter_by
from minidist.collectives.reduction import Reduction
from minidist.collectives.transport import Transport, even_chunks, run_steps

# A message larger than this travels in parts, because fresh memory pages for the whole message
# would cost more than sending it in parts.
_SEGMENT_BYTES = 8 << 20


def direct_all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    check: bool = False,
    accumulate_dtype: torch.dtype | None = None,
) -> CollectiveWork:
    """Reduce a tensor over all ranks, in place. Arguments: as for `ring_all_reduce`."""
    return all_reduce_by(
        *("direct_all_reduce", direct_steps, tensor, op, group, async_op),
        check=check,
        accumulate_dtype=accumulate_dtype,
    )


def direct_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor | Sequence[torch.Tensor],
    op: Any = "sum",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    check: bool = False,
) -> CollectiveWork:
    """Reduce over all ranks; each keeps its own part. Arguments: as for `ring_reduce_scatter`.

    Only this rank's own part is copied, into `output`; the other parts are sent from the input's
    memory. A large part travels in segments, so that the receive buffers stay small.
    """
    parts = [input] if isinstance(input, torch.Tensor) else list(input)

    def run(
        call: CollectiveCall, sizes: list[int], reduction: Reduction, transport: Transport
    ) -> int:
        k = max(1, math.ceil(max(sizes) * output.element_size() / _SEGMENT_BYTES))
        schedule = direct_reduce_scatter_steps(call.size, num_segments=k)
        aliased = any(_storage(part) == _storage(output) for part in parts)
        chunks = call.chunks(input)
        total = call.stage(output, copy=aliased)
        total.copy_(chunks(transport.rank, 1))

        def segment(index: int, count: int) -> torch.Tensor:
            chunk, which = divmod(index, k)
            whole = total if chunk == transport.rank else chunks(chunk, 1)
            return even_chunks(whole, k)(which, count)

        num_bytes = run_steps(schedule, segment, transport, reduction)
        reduction.finish(total, transport.size)
        call.unstage(total, output)
        return num_bytes

    kind = "direct_reduce_scatter"
    return reduce_scatter_by(kind, run, output, input, op, group, async_op, check)


def direct_all_gather(
    output: torch.Tensor | Sequence[torch.Tensor],
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    check: bool = False,
) -> CollectiveWork:
    """Every rank gets the inputs of all ranks. Arguments: as for `ring_all_gather`."""
    steps = direct_all_gather_steps
    return gather_by("direct_all_gather", steps, output, input, group, async_op, check)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
