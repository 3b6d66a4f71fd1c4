"""Lets collectives take time on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


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
