"""All-reduces that begin late, as on a network that is busy.

An asynchronous all-reduce may read its tensor at any time until somebody waits for it. Most
networks read it at once, so code that writes into the tensor too early is right by luck. Here each
one begins when somebody waits, or when `release` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class HeldBack:
    """Stands for `dist.all_reduce`; what is asynchronous is kept in `pending` until `release`."""

    def __init__(self) -> None:
        self.original = dist.all_reduce
        self.pending: list[_Work] = []

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        """As `dist.all_reduce`; if it is synchronous, it runs at once, after all held-back ones."""
        if not async_op:
            self.release()
            return self.original(tensor, op, group)
        work = _Work(self, tensor, op, group)
        self.pending.append(work)
        return work

    def release(self) -> None:
        """Begins and ends all that was held back, in order."""
        while self.pending:
            self.pending.pop(0).run()


class _Work:
    """The work handle of a held-back all-reduce; any use but get_future() releases all."""

    def __init__(self, held: HeldBack, tensor: torch.Tensor, op: Any, group: Any) -> None:
        self._held, self._call, self._tensor = held, (tensor, op, group), tensor
        self._future = _Future(held)
        self._real: Any = None

    def run(self) -> None:
        self._real = self._held.original(*self._call, async_op=True)
        self._real.wait()
        self._future.set_result([self._tensor])

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def __getattr__(self, name: str) -> Any:
        self._held.release()
        return getattr(self._real, name)


class _Future(torch.futures.Future[Any]):
    """The future of a `_Work`. Its wait() or value(), and those of its then(), release all."""

    def __init__(self, held: HeldBack) -> None:
        super().__init__()
        self._held = held

    def wait(self) -> Any:
        self._held.release()
        return super().wait()

    def value(self) -> Any:
        if not self.done():
            self._held.release()
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Any:
        after = _Future(self._held)

        def pass_on(done: torch.futures.Future[Any]) -> None:
            try:
                after.set_result(callback(done))
            except Exception as error:
                after.set_exception(error)

        self.add_done_callback(pass_on)
        return after
