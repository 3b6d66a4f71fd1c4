"""Training that continues when ranks are lost, return, or are told to leave.

torchrun restarts every worker when one dies, as when it loses a peer, or when a node joins; the
script starts again, possibly with a different number of ranks. So a fault-tolerant script is an
ordinary one that

1. loads the newest complete checkpoint before it trains (`minidist.checkpoint`),
2. saves often enough, and once more when the scheduler says that time is up (`Preemption`),
3. takes the same global batch at every world size (`share_of_batch`), so that the learning rate and
   the loss curve mean the same after a restart.

Example, a script for `torchrun --max-restarts 3 --nproc-per-node 2 train.py`::

    dist.init_process_group(choose_backend())
    checkpoints = Checkpoints("checkpoints")
    state = {"model": model, "optimizer": optimizer}
    with Preemption() as preemption:
        ended = train_elastically(
            train_step, num_steps=1000, checkpoints=checkpoints, shared=state, every=50,
            preemption=preemption,
        )

At the same world size, a restarted run equals an uninterrupted run bit for bit, if the checkpoint
holds everything that determines the run: parameters, optimizer, scheduler, scaler, random numbers,
and the position of the sampler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from minidist.checkpoint import Checkpoints
from minidist.checkpoint.saving import States
from minidist.checkpoint.shards import Shards


class Preemption:
    """Notices that this job should end soon: SIGTERM, or SIGUSR1 as Slurm's --signal sends it.

    The signal may reach one rank only, or all at different steps; `requested` makes the ranks
    agree. Inside `with`, in the main thread.

    Args:
        signals: what to listen to.
        grace_s: a rank that does not call `requested` within this time after a signal is ended.
            When a rank has died, torchrun sends SIGTERM to the remaining ranks, and these may hang
            in a collective with the dead rank.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        grace_s: float = 20.0,
    ) -> None:
        self.signals = tuple(signals)
        self.grace_s = grace_s
        self._timer: threading.Timer | None = None
        self._seen = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._in_time()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._seen.is_set():
            self._seen.set()
            self._timer = threading.Timer(self.grace_s, os._exit, [128 + number])
            self._timer.daemon = True
            self._timer.start()

    def _in_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def requested(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether any rank has been told to end; the same answer on all ranks. A collective."""
        self._in_time()
        if not dist.is_initialized():
            return self._seen.is_set()
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        flag = torch.tensor([float(self._seen.is_set())], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag.item())


def share_of_batch(global_batch: int, world_size: int, rank: int) -> slice:
    """Which samples of the global batch a rank takes; shares differ by one sample at most.

    Ranks then have unequal batches: weight each rank's mean loss by `share / global_batch` and sum
    the gradients, instead of averaging them.

    >>> [share_of_batch(8, 3, rank) for rank in range(3)]
    [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]

    Raises:
        ValueError: a rank would have no sample.
    """
    if global_batch < world_size:
        raise ValueError(
            f"share_of_batch: {world_size} ranks need a global batch of at least {world_size} "
            f"samples, got {global_batch}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"share_of_batch: rank {rank} of {world_size} ranks")
    begin, end = (global_batch * i // world_size for i in (rank, rank + 1))
    return slice(begin, end)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    step: int  # steps done in all, earlier runs included
    first_step: int  # where this run began
    preempted: bool  # it stopped because it was told to, and can be resumed


def train_elastically(
    train_step: Callable[[int], object],
    *,
    num_steps: int,
    checkpoints: Checkpoints,
    shared: States,
    local: States | None = None,
    sharded: Callable[[], Shards] | None = None,
    every: int,
    preemption: Preemption | None = None,
) -> Ended:
    """Resume from the newest checkpoint, train to `num_steps`, save on the way and at the end.

    Args:
        train_step: does step number i, counted from 0 over all runs.
        shared, local: what checkpoints hold, see `Checkpoints.save`. `local` is left out after a
            restart with a different number of ranks.
        sharded: returns this rank's parts of global tensors; called at every save and load. If the
            number of ranks has changed, saved tensors are cut into the new parts.
        every: steps between checkpoints.
        preemption: asked after every step; if it says so, a checkpoint is saved and training ends.

    Raises:
        ValueError: `every` is below 1.
    """
    if every < 1:
        raise ValueError(f"train_elastically: every must be at least 1, got {every}")

    def parts() -> dict[str, Any]:
        return {"shared": shared, "local": local, "sharded": sharded() if sharded else None}

    # Resume.
    found = checkpoints.load(**parts(), any_world_size=True)
    first_step = step = found or 0
    saved_at = found

    # Train and save.
    preempted = False
    while step < num_steps and not preempted:
        train_step(step)
        step += 1
        preempted = preemption is not None and preemption.requested()
        if preempted or step % every == 0 or step == num_steps:
            checkpoints.save(step, **parts())
            saved_at = step
    if saved_at != step:
        checkpoints.save(step, **parts())
    return Ended(step=step, first_step=first_step, preempted=preempted)


def restart_count() -> int:
    """How often torchrun has restarted the workers so far; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
