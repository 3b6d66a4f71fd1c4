"""A device that queues its work, and collectives that take time: all on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

LAUNCH_S = 1e-4  # the time that the program needs to queue a step
COLLECTIVE_S = 5e-3


class QueueingDevice:
    """A simulated device that queues each step and executes it later; no real time passes.

    It works while steps are queued, so a wait after each step costs time.

    Args:
        work_s: seconds of each step.
        begin_s: what the clock shows first. As with `time.perf_counter`, that may be anything, and
            the clocks of two ranks cannot be compared.
        hides_early: a collective takes no time while work may be queued.
    """

    def __init__(
        self, work_s: Sequence[float], begin_s: float = 100.0, *, hides_early: bool = False
    ) -> None:
        self.work_s, self.now_s, self.ready_s, self.calls = work_s, begin_s, begin_s, 0
        self.hides_early = hides_early
        self.idle = False  # synchronize() was called last

    def step(self) -> None:
        """Queues the next step."""
        self.idle = False
        work_s = float(self.work_s[min(self.calls, len(self.work_s) - 1)])
        self.calls += 1
        self.now_s += LAUNCH_S
        self.ready_s = max(self.ready_s, self.now_s) + work_s

    def synchronize(self) -> None:
        """Waits until the queue is empty."""
        self.now_s = max(self.now_s, self.ready_s)
        self.idle = True

    def communicate(self) -> None:
        """A collective: it takes time that belongs to no step."""
        if self.idle or not self.hides_early:
            self.now_s += COLLECTIVE_S

    def clock(self) -> float:
        """Seconds."""
        return self.now_s


class TimedCollectives(TorchDispatchMode):
    """Within this context, each collective of this thread calls `communicate` first."""

    def __init__(self, communicate: Callable[[], None]) -> None:
        super().__init__()
        self.communicate = communicate

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation: over a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.communicate()
        return func(*args, **(kwargs or {}))
