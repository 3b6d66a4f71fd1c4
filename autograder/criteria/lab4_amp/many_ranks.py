"""A hook's bucket on many ranks, where few are there.

How a hook avoids overflow may be right for the few ranks of a check and wrong for more: a divisor
that is written into the code, for example. So each bucket is also given to a hook that believes to
be on many ranks, all of which have this rank's gradients. No rank but this one takes part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.common.pretending import pretending

RANKS = 48


class ManyRanks:
    """Calls a hook of its own for each bucket; what came out of it is in `values`."""

    def __init__(self, make_hook: Any, dtype: torch.dtype) -> None:
        self._make_hook, self._dtype, self._hook = make_hook, dtype, None
        # A hook may learn the number of ranks from elsewhere, as from the notebook's `world_size`.
        # It cannot know of ours then, and nothing is known of it.
        self._asked = False
        self.values: list[np.ndarray] = []

    def see(self, bucket: dist.GradBucket) -> None:
        """Reduces a bucket, and leaves it as it was. Errors are those of the hook's real call."""
        buffer = bucket.buffer()
        before = buffer.clone()
        instead = {(dist, "get_world_size"): self._size, (dist, "all_reduce"): _all_reduce}
        try:
            with pretending(self._make_hook, instead):
                self._hook = self._hook or self._make_hook(self._dtype)
                value = self._hook(None, bucket).wait()
            if self._asked:
                self.values.append(value.detach().float().numpy().ravel().copy())
        except Exception:
            self.values = []
        finally:
            buffer.copy_(before)

    def _size(self, group: Any = None) -> int:
        self._asked = True
        return RANKS


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Adds up what `RANKS` ranks have, if all have the same, and rounds once."""
    if op == dist.ReduceOp.SUM:
        tensor.copy_(tensor.double() * RANKS)
    return _Done(tensor) if async_op else None


class _Done:
    """What an all-reduce returns that has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
