"""Collectives in the background: what `async_op=True` returns, and how the operation progresses.

Every process group has one `Channel`: a queue and, from the first asynchronous operation on, one
thread. The thread runs the operations of the group one after the other, each until it is complete.
An operation progresses even if nobody waits for it.

Guaranteed:

- Operations of one group run in the order in which they were called. As with any collective, all
  ranks must call them in the same order; then any number of operations may be in flight.
- A program may wait for operations in any order, any number of times, from any thread.
- A blocking operation waits until the earlier operations of the same group are complete. If none is
  in flight, the blocking operation runs in the calling thread.
- Operations of different groups run at the same time.
- Our messages carry their own tag: on gloo, a program may meanwhile use its own send and recv and
  torch's collectives on the same group.
- An operation that fails raises its error from `wait()` and from its future.

Not allowed:

- A callback given to `get_future().then(...)` may run in the channel's thread. If it calls a
  collective of the same group there, it gets a RuntimeError, because it would wait for itself.
- Until `wait()` returns, the operation's tensors belong to the operation.

Which thread runs an operation depends on the backend. On gloo, any thread may make point-to-point
calls. NCCL's calls only queue work on the GPU, so the operation is queued at once on a side stream,
without a thread, and `wait()` makes the current stream wait. With any other backend, an
asynchronous operation runs inside the call itself: it is correct, but overlaps with nothing.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from minidist.collectives.transport import Transport
from minidist.errors import DeadlineError

_THREAD_BACKENDS = ("gloo", "minidist")


class CollectiveWork(dist._Work):
    """A collective in progress, with the methods of torch's Work.

    Args:
        kind: name of the function that was called.
        transport: the transport of the group.
        body: carries out the collective, and returns the number of bytes that this rank sent.
        tensors: all tensors that the collective reads or writes; this object keeps them alive.
        outputs: the tensors that become the future's value.
        after: an operation of a different group that must be complete before this one starts.
    """

    def __init__(
        self,
        kind: str,
        transport: Transport,
        body: Callable[[Transport], int],
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        after: CollectiveWork | None = None,
    ) -> None:
        super().__init__()
        self._kind = kind
        self._transport = transport
        self._body: Callable[[Transport], int] | None = body
        self._tensors = list(tensors)
        self._outputs = list(outputs)
        self._after = after
        self.done = threading.Event()
        self._error: BaseException | None = None
        self._side = _SideStream(self._tensors)
        self._future: torch.futures.Future = torch.futures.Future(devices=self._side.devices)
        self.num_bytes_sent = 0
        # Callbacks of the logs.
        self.on_end: list[Callable[[], None]] = []
        self.on_wait: list[Callable[[float], None]] = []

    def __repr__(self) -> str:
        state = "failed" if self._error else "over" if self.is_completed() else "under way"
        return f"<{self._kind}: {state}, {self.num_bytes_sent:,} bytes sent>"

    # ------------------------------------------------------- what a caller uses

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is there, or raise the operation's error.

        On a GPU, return as soon as the current stream is made to wait for the result.

        Args:
            timeout: None means that only the group's own timeout applies, which every message has.

        Raises:
            DeadlineError: the operation is not over when the timeout ends. The operation goes on.
        """
        seconds = timeout.total_seconds() if timeout else None  # C++ passes zero for no timeout
        begin_s = time.monotonic()
        if not self.done.wait(seconds):
            raise DeadlineError(
                f"{self._kind} of group {self._transport.group.group_name!r} was not over "
                f"after {seconds:g} s",
                rank=self._transport.rank,
            )
        for listen in self.on_wait:
            listen(time.monotonic() - begin_s)
        if self._error is not None:
            raise self._error
        self._side.join()
        return True

    def is_completed(self) -> bool:
        return self.done.is_set() and self._side.is_over()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def get_future(self) -> torch.futures.Future:
        """A future of the list of result tensors."""
        return self._future

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    # ------------------------------------------------------ what a channel uses

    def run(self) -> None:
        """Run the operation. Never raises: `wait()` and the future raise the operation's error."""
        assert self._body is not None
        try:
            # Disable dispatch modes: a log, a profiler or a roofline must not count our own
            # additions and messages.
            with self._side, torch.inference_mode(), _disable_current_modes():
                if self._after is not None:
                    self._after.wait()
                self.num_bytes_sent = self._body(self._transport)
        except BaseException as error:
            self._error = error
        self._body = self._after = None
        for listen in self.on_end:
            listen()
        self.done.set()
        # Complete the future last, because its callbacks run inside this call.
        if isinstance(self._error, Exception):
            self._future.set_exception(self._error)
        elif self._error is None:
            with self._side.current():
                self._future.set_result(self._outputs)


class Channel:
    """The operations of one group on this rank, one at a time, in the order of their calls."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[CollectiveWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The `done` event of the operation queued last. Not the operation itself: the operation
        # refers to the group, and a channel must not keep its group alive.
        self._last = threading.Event()
        self._last.set()
        self._order = threading.Lock()
        self._connected = False
        weakref.finalize(self, self._queue.put, None)

    @staticmethod
    def of(group: dist.ProcessGroup) -> Channel:
        with _channels_lock:
            if group not in _channels:
                _channels[group] = Channel(f"minidist collectives of {group.group_name}")
            return _channels[group]

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """On NCCL, run a collective of all ranks before the first messages.

        NCCL's first batch must involve all ranks, but some of our steps involve only some ranks.
        """
        if not self._connected:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self._connected = True

    def issue(self, work: CollectiveWork, *, threaded: bool) -> CollectiveWork:
        """Run the operation now or queue it for the thread; the order of calls is kept."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a callback of a collective's future called a collective of the same group: it "
                "would wait for itself. Call wait() first, and the next collective after it"
            )
        with self._order:
            if not threaded and self._last.is_set():
                work.run()
                return work
            self._last = work.done
            self._queue.put(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_progress, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
        return work


# One channel per group and process, for as long as the group lives. It is a global because callers
# pass only the group.
_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
_channels_lock = threading.Lock()


def may_use_thread(transport: Transport, device: torch.device) -> bool:
    """Whether the channel's thread may send and receive for this group."""
    return transport.backend(device) in _THREAD_BACKENDS


def _progress(operations: queue.SimpleQueue[CollectiveWork | None]) -> None:
    while (work := operations.get()) is not None:
        work.run()
        del work  # otherwise its tensors would stay alive until the next operation


class _SideStream:
    """On an accelerator: a stream that starts after the caller's work; `join` waits for it.

    On the CPU it does nothing.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        found = [t.device for t in tensors if t.device.type != "cpu"]
        self.devices: list[Any] = list(dict.fromkeys(found))[:1]
        self._end: Any = None
        if self.devices:
            self._module = torch.get_device_module(self.devices[0])
            self._stream = self._module.Stream(self.devices[0])
            self._stream.wait_stream(self._module.current_stream(self.devices[0]))
            for tensor in tensors:
                if tensor.device == self.devices[0]:
                    tensor.record_stream(self._stream)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return self._module.stream(self._stream) if self.devices else contextlib.nullcontext()

    def __enter__(self) -> None:
        self._context = self.current()
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.devices:
            self._end = self._stream.record_event()
        self._context.__exit__(None, None, None)

    def join(self) -> None:
        if self._end is not None:
            self._module.current_stream(self.devices[0]).wait_event(self._end)

    def is_over(self) -> bool:
        return self._end is None or self._end.query()
