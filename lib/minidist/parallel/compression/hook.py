"""Compressors in data parallelism: as communication hooks of torch's DDP, and in our own DDP.

Example::

    compressor = PowerSGD(rank=2)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(HookState(compressor), compression_hook)
    ...
    print(f"{compressor.traffic.ratio:.1f} times fewer bytes than fp32")

DDP calls the hook when a bucket's gradients are ready, while backward continues for earlier layers.
The first collective of each bucket starts at once and overlaps with backward. (For `Int8` this is
only the small one that agrees on the step sizes; for `TopK` it is both.) The later collectives
start when the last bucket is ready, for all buckets in order. They could start earlier, in the
callback of the first collective. But on a backend that runs callbacks in threads (gloo), two ranks
could then start the collectives of two buckets in different orders, and the wrong collectives would
meet.
"""

# No `from __future__ import annotations`: DDP reads the hook's annotations and rejects strings.
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minidist.parallel.compression.compressor import Compressor, segments_of


class Running:
    """A reduction in progress."""

    def __init__(
        self,
        steps: Generator[Any, None, torch.Tensor],
        deliver: Callable[[torch.Tensor], object],
    ) -> None:
        self._steps = steps
        self._deliver = deliver
        self._work: Any = None
        self._done = False
        self.advance()

    def advance(self) -> bool:
        """Wait for the current collective and start the next; False once the reduction is over."""
        if self._done:
            return False
        if self._work is not None:
            self._work.wait()
        try:
            self._work = next(self._steps)
        except StopIteration as end:
            self._done = True
            self._deliver(end.value)
        return not self._done

    def wait(self) -> None:
        """Run the reduction to its end."""
        while self.advance():
            pass


@dataclass
class HookState:
    """First argument of `register_comm_hook`.

    Args:
        compressor: used for all buckets.
        group: the group that DDP was given; None means all ranks.
    """

    compressor: Compressor
    group: dist.ProcessGroup | None = None
    _running: list[Running] = field(default_factory=list)


def compression_hook(
    state: HookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Second argument of `register_comm_hook`: averages one bucket, in place."""
    buffer = bucket.buffer()
    if bucket.index() == 0:
        state._running.clear()  # left over if an earlier backward raised half-way
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    # The gradients in the buffer have the order of bucket.parameters().
    steps = state.compressor.phases(buffer, segments_of(bucket.parameters()), state.group)
    state._running.append(Running(steps, lambda mean: future.set_result(buffer.copy_(mean))))
    if bucket.is_last():
        running, state._running = state._running, []
        while running:
            running = [each for each in running if each.advance()]
    return future


class Bucket(Protocol):
    """A flat gradient and the parameters it holds, in order."""

    flat: torch.Tensor
    parameters: Any


def sum_in_place(
    compressor: Compressor,
    flat: torch.Tensor,
    buckets: Iterable[Bucket],
    group: dist.ProcessGroup | None = None,
) -> Running:
    """Sum `flat` over the group, in place. Suits `reduce=` of `minidist.parallel.data.BucketedDDP`.

    Args:
        flat: the memory of one of the buckets.
        buckets: the buckets, used to look up which parameters `flat` holds, e.g. `ddp.buckets`.

    Returns:
        A handle to wait for. The first collective has been started; `wait` does the rest, so all
        ranks must wait for their buckets in the same order.

    Raises:
        ValueError: `flat` belongs to none of the buckets.
    """
    parameters: Sequence[torch.Tensor] | None = next(
        (bucket.parameters for bucket in buckets if bucket.flat is flat), None
    )
    if parameters is None:
        raise ValueError(
            f"sum_in_place: the tensor of shape {tuple(flat.shape)} is not of these buckets"
        )
    steps = compressor.phases(flat, segments_of(parameters), group)
    n = dist.get_world_size(group)
    return Running(steps, lambda mean: flat.copy_(mean).mul_(n))
