"""A DDP communication hook that reduces in shared memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from minidist.collectives.shared.group import SharedMemoryGroup


def shared_memory_hook(
    state: SharedMemoryGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP bucket through shared memory: `ddp.register_comm_hook(shared, hook)`.

    Args:
        state: a `SharedMemoryGroup` of the ranks that DDP was given.
        bucket: one bucket of gradients, 1-D, of any floating dtype.
    """
    work = state.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    return work.get_future()


# DDP compares a hook's annotations with types, not with their names.
shared_memory_hook.__annotations__ |= {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
