"""Uneven inputs: some ranks run out of batches early, but the other ranks still need them.

An all-reduce needs every rank. A rank that has left the loop must therefore still take part: it
*shadows* the collectives of the ranks that still train, with zeros as data. At each forward all
ranks exchange a status, so every rank knows which ranks still train.

Phases of a step: exchange one status per rank; a rank that trains continues its step; a rank that
has joined repeats the step's collectives. When no rank trains any more, a rank that trained in the
last step broadcasts its parameters and buffers, because joined ranks took no optimizer steps.

Example::

    with join(ddp):
        for x, y in loader:                 # 7 batches on rank 0, 5 on rank 1
            optimizer.zero_grad()
            loss_fn(ddp(x), y).backward()
            optimizer.step()
    # here the replicas are equal again, after 7 steps

torch's own: `torch.distributed.algorithms.join.Join`, see native.py. To avoid the problem, give
every rank the same number of batches (minidist.sampler).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from minidist.errors import MismatchError
from minidist.parallel.data.bucketed import BucketedDDP
from minidist.parallel.data.replicas import broadcast_state

# Bits of a rank's status in a step; the status is 0 once the rank has joined.
_TRAINS, _SYNCS, _SHARES_BUFFERS = 1, 2, 4


@contextmanager
def join(ddp: BucketedDDP, divide_by: Literal["all", "active"] = "all") -> Iterator[None]:
    """Collective: let ranks leave the block after different numbers of steps.

    Costs one small all-reduce per forward. If autograd records a forward in the block, exactly one
    backward must follow it.

    Args:
        divide_by: the divisor of a mean. "all" is the number of ranks of the group: every sample
            keeps its weight, and the last steps become smaller. "active" is the number of ranks
            that still have data.

    Raises:
        ValueError: divide_by has a different value.
        MismatchError: on every rank, if some forwards of a step are under `no_sync` and some are
            not, or if only some of them would broadcast buffers.
    """
    if divide_by not in ("all", "active"):
        raise ValueError(f'join: divide_by must be "all" or "active", got {divide_by!r}')
    rounds = _Rounds(ddp)

    def announce(sync: bool) -> None:
        status = _TRAINS | (_SYNCS if sync else 0)
        active = rounds.exchange(status | (_SHARES_BUFFERS if ddp.shares_buffers() else 0))
        ddp.source = active[0]
        if divide_by == "active":
            ddp.num_active = len(active)

    before = (ddp.num_active, ddp.source)
    ddp.before_forward = announce
    try:
        yield
        # This rank has no more data: shadow the other ranks until no rank has data.
        while active := rounds.exchange(0):
            ddp.source = active[0]
            if rounds.status & _SYNCS:
                if rounds.status & _SHARES_BUFFERS:
                    ddp.broadcast_buffers()
                ddp.shadow_backward()
        broadcast_state(ddp.module, ddp.group, rounds.last_active)
    finally:
        ddp.before_forward = None
        ddp.num_active, ddp.source = before


class _Rounds:
    """The exchange of statuses, and the result of the last exchange."""

    def __init__(self, ddp: BucketedDDP) -> None:
        self._group = ddp.group
        self._device = ddp.buckets[0].flat.device
        self.status = 0  # the common status of the ranks that train
        self.last_active = 0  # a rank that trained in the very last step

    def exchange(self, own: int) -> list[int]:
        """Collective: send this rank's status; returns the ranks of the group that still train."""
        statuses = torch.zeros(
            dist.get_world_size(self._group), dtype=torch.int32, device=self._device
        )
        statuses[dist.get_rank(self._group)] = own
        dist.all_reduce(statuses, group=self._group)
        every = statuses.tolist()
        active = [rank for rank, status in enumerate(every) if status]
        if len({status for status in every if status}) > 1:
            raise MismatchError(
                "join: ranks are at different kinds of step (1 trains, +2 synchronises, "
                f"+4 broadcasts buffers): {every}",
                rank=dist.get_rank(),
            )
        if active:
            self.status = every[active[0]]
            self.last_active = active[0]
        return active
