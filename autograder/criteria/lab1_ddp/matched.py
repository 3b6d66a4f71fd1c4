"""If ranks begin different collectives, every rank raises an error that lists the calls of all.

gloo pairs collectives by their order, and a process dies where the sizes of a pair differ. So here
every rank tells the others, through the group's store, what it is about to call, and goes on only
if all call the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from autograder.criteria.common.pretending import pretending
from autograder.criteria.criterion import Context

NAMES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor")
WAIT_S = 8.0
ENDED = "nothing more"


class DifferentCollectivesError(RuntimeError):
    """Ranks have begun different collectives, or some have begun none."""


@contextmanager
def matched_collectives(subject: Any, context: Context) -> Iterator[None]:
    """Inside, collectives of the default group raise on all ranks where their calls differ.

    Args:
        subject: the student's function or class; it may have imported collectives by name.
    """
    calls = _Calls(context)
    with pretending(subject, {(dist, name): calls.watched(name) for name in NAMES}):
        try:
            yield
        finally:
            calls.post(ENDED)


class _Calls:
    """What this rank has called, and what the store knows of the others."""

    def __init__(self, context: Context) -> None:
        self.rank, self.world_size = context.rank, context.world_size
        self.store = dist.distributed_c10d._get_default_store()
        self.made: list[str] = []

    def watched(self, name: str) -> Callable[..., Any]:
        """The collective of this name; before it begins, it waits until all ranks have come."""
        original = getattr(dist, name)

        @wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") in (None, dist.group.WORLD):
                given = (*args, *kwargs.values())
                tensor = next((a for a in given if isinstance(a, torch.Tensor)), None)
                self.meet(f"{name}{_show(tensor)}")
            return original(*args, **kwargs)

        return collective

    def post(self, call: str) -> None:
        """Tells the others what this rank calls next."""
        self.store.set(f"call/{self.rank}/{len(self.made)}", call)
        self.made.append(call)

    def meet(self, call: str) -> None:
        """Waits until every rank has told its call; raises if they are not the same."""
        number = len(self.made)
        self.post(call)
        end_s = time.monotonic() + WAIT_S
        said = [self._of(rank, number, end_s) for rank in range(self.world_size)]
        if len(set(said)) > 1:
            lines = [
                f"rank {rank}: {', '.join([*self.made[-3:-1], next_call])}"
                for rank, next_call in enumerate(said)
            ]
            raise DifferentCollectivesError(
                f"the ranks began different collectives, call {number + 1} since the wrapping "
                f"(the last ones of each): {'; '.join(lines)}"
            )

    def _of(self, rank: int, number: int, end_s: float) -> str:
        key = f"call/{rank}/{number}"
        while not self.store.check([key]):
            if time.monotonic() > end_s:
                return f"nothing for {WAIT_S:g} s"
            time.sleep(0.001)
        return self.store.get(key).decode()


def _show(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return ""
    return f" of {tensor.numel()} × {str(tensor.dtype).removeprefix('torch.')}"
