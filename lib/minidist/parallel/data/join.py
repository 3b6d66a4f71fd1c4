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

ZeRO, pipelines and tensor parallelism cannot go on without a rank: its parameters are nowhere else.
`in_step` works with everything. It tells at once which rank has no batch left, or stops all::

    for x, y in in_step(loader):        # MismatchError: step 6: no batch on rank 1 ...
        ...
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from minidist.errors import MismatchError, named_rank
from minidist.parallel.data.bucketed import BucketedDDP
from minidist.parallel.data.replicas import broadcast_state
from minidist.unsupported import Unsupported

UNEVEN = Unsupported(
    "join",
    "uneven numbers of batches with anything but a BucketedDDP",
    instead='iterate over in_step(batches), or in_step(batches, when_uneven="stop") to leave out '
    "what some ranks lack",
)

Batch = TypeVar("Batch")

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
        TypeError: not a BucketedDDP.
        MismatchError: on every rank, if some forwards of a step are under `no_sync` and some are
            not, or if only some of them would broadcast buffers.
    """
    if divide_by not in ("all", "active"):
        raise ValueError(f'join: divide_by must be "all" or "active", got {divide_by!r}')
    if not isinstance(ddp, BucketedDDP):
        raise UNEVEN.error(f"got a {type(ddp).__name__} on {named_rank()}", TypeError)
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


_NONE_LEFT, _HAS_BATCH, _FAILED = range(3)
_POLL_S = 0.5  # how often a rank that waits asks whether another rank has left its loop

_loops: Counter[str] = Counter()  # loops so far of a group: the same number on all ranks


def in_step(
    batches: Iterable[Batch],
    group: dist.ProcessGroup | None = None,
    *,
    when_uneven: Literal["raise", "stop"] = "raise",
) -> Iterator[Batch]:
    """Collective: the batches of this rank, as long as every rank of the group has one.

    Works with every kind of parallelism, and notices a rank that leaves its loop by `break`, too.
    Costs one small all-reduce per batch.

    Args:
        when_uneven: when only some ranks have a batch left, "raise" an error on all ranks, or
            "stop" on all ranks (batches that were fetched by then are dropped).

    Raises:
        MismatchError: on every rank, with the ranks that have no batch left or whose data raised an
            error; or on the other ranks, with those that have left the loop. The group is then of
            no further use.
    """
    if when_uneven not in ("raise", "stop"):
        raise ValueError(f'in_step: when_uneven must be "raise" or "stop", got {when_uneven!r}')
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = "_".join(map(str, ranks))
    loop = f"minidist/in_step/{name}/{_loops[name]}"
    _loops[name] += 1
    compare = partial(_compare, ranks=ranks, loop=loop, group=group, when_uneven=when_uneven)
    steps, iterator = 0, iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            compare(_NONE_LEFT, steps)
            return
        except Exception:
            compare(_FAILED, steps, when_uneven="stop")  # here, the error itself says more
            raise
        if not compare(_HAS_BATCH, steps):
            return
        steps += 1
        try:
            yield batch
        except GeneratorExit:
            # By `break` or an error: the others may be in the middle of a step, so no collective.
            with contextlib.suppress(Exception):
                _get_default_store().set(f"{loop}/{dist.get_rank()}", str(steps))
            raise


def _compare(
    own: int,
    steps: int,
    *,
    ranks: list[int],
    loop: str,
    group: dist.ProcessGroup | None,
    when_uneven: str,
) -> bool:
    """Collective: whether all ranks have a batch."""
    backend = dist.get_backend(group)
    statuses = torch.zeros(
        len(ranks), dtype=torch.int32, device="cuda" if backend == "nccl" else "cpu"
    )
    statuses[dist.get_rank(group)] = own
    work = dist.all_reduce(statuses, group=group, async_op=True)
    if work is not None and backend in ("gloo", "nccl"):
        _watch(work, steps, ranks, loop)
    if work is not None:
        work.wait()
    every = statuses.tolist()
    kinds = set(every)
    if len(kinds) > 1 and (when_uneven == "raise" or _FAILED in kinds - {own}):
        texts = ("no batch", "a batch", "its data raised an error")
        said = [
            f"rank {', '.join(str(r) for r, k in zip(ranks, every, strict=True) if k == kind)}: "
            f"{texts[kind]}"
            for kind in sorted(kinds)
        ]
        raise _not_in_step(steps, "; ".join(said))
    return kinds == {_HAS_BATCH}


def _watch(work: Any, steps: int, ranks: list[int], loop: str) -> None:
    """Wait for the other ranks; raise if one of them has left its loop and will not come."""
    next_s = time.monotonic() + _POLL_S
    while not work.is_completed():
        time.sleep(1e-4)
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + _POLL_S
        store = _get_default_store()
        # A rank that has left after this step has taken part in it: its data is on the way.
        left = {rank: f"{loop}/{rank}" for rank in ranks if store.check([f"{loop}/{rank}"])}
        gone = [rank for rank, key in left.items() if int(store.get(key)) <= steps]
        if gone:
            names = ", ".join(map(str, gone))
            raise _not_in_step(steps, f"rank {names}: has left the loop (break, or an error)")


def _not_in_step(steps: int, said: str) -> MismatchError:
    return MismatchError(
        f"in_step: after {steps} steps the ranks are not in step: {said}; give all ranks the same "
        'number of batches (drop_last=True), or use when_uneven="stop"',
        rank=dist.get_rank(),
    )
