"""Runs a hook as if there were many ranks.

How a hook avoids overflow may be right for the few ranks of a check and wrong for more: a divisor
that is written into the code, for example. So each bucket is also given to a hook that is told that
there are many ranks. All of them have this rank's gradients; no rank but this one takes part.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.common.pretending import in_world_of, pretending

RANKS = 48


class ManyRanks:
    """Keeps buckets, and gives them to a hook of its own once the real hook is done with all.

    Not before: the student's code may remember the number of ranks that it was told first.
    """

    def __init__(self, make_hook: Any, dtype: torch.dtype) -> None:
        self._make_hook, self._dtype = make_hook, dtype
        self.buckets: list[tuple[Any, Any]] = []

    def keep(self, bucket: dist.GradBucket) -> None:
        """Copies a bucket, before the real hook may write into it; and once more, full of ones."""
        buffer = bucket.buffer()
        full = _copy(bucket, torch.ones_like(buffer)), _copy(bucket, buffer.clone())
        self.buckets.append(full)

    def values(self) -> np.ndarray:
        """The results of all buckets; empty if the hook fails, or does not use `RANKS`.

        It may get the number of ranks elsewhere, or remember the real one. Then the mean of ones
        is not 1, and the results would not be those on many ranks.
        """
        instead = {
            (dist, "get_world_size"): lambda group=None: RANKS,
            (dist, "all_reduce"): _all_reduce,
        }
        # The hook's real call raises its errors.
        with (
            suppress(Exception),
            mock.patch.dict(os.environ, {"WORLD_SIZE": str(RANKS)}),
            in_world_of(self._make_hook, RANKS),
            pretending(self._make_hook, instead),
        ):
            hook, values = self._make_hook(self._dtype), [np.zeros(0, "f4")]
            for ones, bucket in self.buckets:
                if not bool(((hook(None, ones).wait().float() - 1).abs() < 0.05).all()):
                    break
                values.append(hook(None, bucket).wait().detach().float().numpy().ravel().copy())
            else:
                return np.concatenate(values)
        return np.zeros(0, "f4")


def _copy(bucket: dist.GradBucket, buffer: torch.Tensor) -> Any:
    """A bucket with a different buffer; DDP's own is valid only during the call of the hook."""
    shapes = [gradient.shape for gradient in bucket.gradients()]
    parts = buffer.split([shape.numel() for shape in shapes])
    has = {
        "buffer": buffer,
        "gradients": [part.view(shape) for part, shape in zip(parts, shapes, strict=True)],
        "parameters": bucket.parameters(),
        "index": bucket.index(),
        "is_last": bucket.is_last(),
    }
    methods = {name: lambda name=name: has[name] for name in has}
    return SimpleNamespace(**methods, set_buffer=lambda new: has.update(buffer=new))


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Adds up what `RANKS` ranks have, if all have the same, and rounds once."""
    if op == dist.ReduceOp.SUM:
        tensor.copy_(tensor.double() * RANKS)
    return _Done(tensor) if async_op else None


class _Done:
    """The work handle of an all-reduce that has ended."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
