"""Asynchronous collectives: a thread that runs them in order, and what a caller holds meanwhile.

A collective on the CPU needs the CPU, so the thread gains only the time for which ranks would have
waited for each other, and cores that nothing else uses. It releases the GIL in torch's operations
and while it waits, so autograd goes on beside it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from minidist.errors import MinidistError


class SharedWork:
    """A collective under way, with the methods of `dist.Work` that callers use."""

    def __init__(self, result: torch.Tensor | None, thread: threading.Thread) -> None:
        self._future: torch.futures.Future[torch.Tensor | None] = torch.futures.Future()
        self._result = result
        self._thread = thread

    def wait(self) -> bool:
        """Return when the result is there; raise here what went wrong."""
        if threading.current_thread() is self._thread and not self._future.done():
            raise MinidistError(
                "wait() inside a callback of a shared-memory future: the thread that runs the "
                "callback would have to do the work that it waits for"
            )
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future:
        """A future of the tensor with the result. Its callbacks run in the worker thread."""
        return self._future

    def _finish(self, error: Exception | None) -> None:
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)  # pyright: ignore[reportArgumentType]


class Worker:
    """Runs what is submitted, in order, in one thread; the thread starts with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], SharedWork] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: SharedWork | None = None

    def submit(self, job: Callable[[], None], result: torch.Tensor | None) -> SharedWork:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name="shared-memory collectives", daemon=True
            )
            self._thread.start()
        self._last = SharedWork(result, self._thread)
        self._jobs.put((job, self._last))
        return self._last

    @property
    def busy(self) -> bool:
        """Whether something submitted is not finished; the last one finishes last."""
        return self._last is not None and not self._last.is_completed()

    def stop(self) -> None:
        """End the thread after what has been submitted."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None


def _serve(jobs: queue.SimpleQueue[tuple[Callable[[], None], SharedWork] | None]) -> None:
    while (item := jobs.get()) is not None:
        job, work = item
        error = None
        try:
            job()
        except Exception as caught:
            error = caught
        work._finish(error)
        del item, job, work  # nothing of a finished collective stays alive here
