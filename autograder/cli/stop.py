"""How `autograder watch` is asked to end."""

from __future__ import annotations

import os
import time
from types import FrameType

_NAP_S = 0.2


class Stop:
    """Handles SIGTERM and Ctrl-C: the first asks to end, a second one ends at once.

    `pause` polls a plain flag: a handler that takes a lock could wait for the code it interrupts.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once, self.count = at_once, 0

    @property
    def asked(self) -> bool:
        return self.count > 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.at_once or self.count > 1:
            raise KeyboardInterrupt
        os.write(2, b"autograder: ends after the submissions at hand; once more: at once\n")

    def pause(self, seconds: float) -> None:
        """Waits, unless it is asked to end."""
        ends_at = time.monotonic() + seconds
        while not self.asked and (left := ends_at - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_S))
