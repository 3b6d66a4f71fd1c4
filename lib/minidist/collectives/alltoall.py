"""All-to-all: every rank sends one of its parts to each of the other ranks.

The result is a transpose of ranks and parts. In step t of N-1, rank r sends to rank r + t and
receives from rank r - t (mod N), so each rank sends one message and receives one at a time. Expert
parallelism depends on this collective.

    rank 0   a0 a1 a2           rank 0   a0 b0 c0
    rank 1   b0 b1 b2    ->     rank 1   a1 b1 c1
    rank 2   c0 c1 c2           rank 2   a2 b2 c2

Example::

    inputs = [torch.tensor([10 * rank + peer]) for peer in range(world_size)]
    outputs = [torch.empty(1, dtype=torch.int64) for _ in range(world_size)]
    all_to_all(outputs, inputs)                 # rank 1 of 3: 1, 11, 21

Torch's own: `dist.all_to_all`, `dist.all_to_all_single`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from minidist.collectives.algorithms import all_to_all_steps
from minidist.collectives.async_work import CollectiveWork
from minidist.collectives.issue import CollectiveCall, require_writable
from minidist.collectives.transport import Transport, run_steps


def all_to_all(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    check: bool = False,
) -> CollectiveWork:
    """Send `inputs[r]` to rank r, and receive into `outputs[r]` what rank r sends to this rank.

    Args:
        outputs: N tensors, `outputs[r]` as large as rank r's input for this rank.
        inputs: N tensors of any sizes, one dtype for all.
        group, async_op: as for `ring_all_reduce`.
        check: first compare the dtypes of all ranks, and the sizes that each rank sends with the
            sizes that the receivers expect.

    Raises:
        ValueError: not N tensors; or this rank r's own `inputs[r]` and `outputs[r]` differ in size.
        MismatchError: with `check`, on every rank. Without `check`, an output whose size differs
            from the arriving message is not detected, or ends the process (gloo).
    """
    # Validate.
    call = CollectiveCall("all_to_all", [*outputs, *inputs], group)
    call.require_parts("outputs", outputs)
    call.require_parts("inputs", inputs)
    me, size = call.rank, call.size
    call.require_numel(f"outputs[{me}]", outputs[me], inputs[me].numel())
    for output in outputs:
        require_writable(call, output)
    # Derive.
    schedule = all_to_all_steps(size)

    def body(transport: Transport) -> int:
        sent = [call.stage(tensor) for tensor in inputs]
        received = [call.stage(tensor) for tensor in outputs]
        received[me].copy_(sent[me])

        def chunk(number: int, _: int) -> torch.Tensor:
            source, target = divmod(number, size)
            return sent[target] if source == me else received[source]

        num_bytes = run_steps(schedule, chunk, transport)
        for flat, output in zip(received, outputs, strict=True):
            call.unstage(flat, output)
        return num_bytes

    # Issue.
    sizes = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
    return call.issue(body, outputs, async_op, check=check, message=inputs, sizes=sizes)
