"""Handlers of signals for the time of a `with` block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling(
    numbers: Collection[signal.Signals],
    handler: Callable[..., Any] | signal.Handlers,
    *,
    instead_of: signal.Handlers | None = None,
) -> Iterator[None]:
    """Handles these signals; afterwards their earlier handlers are back.

    Does nothing outside the main thread, where Python does not allow it.

    Args:
        instead_of: handle only the signals that have this handler now.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if instead_of in (None, signal.getsignal(number)):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
