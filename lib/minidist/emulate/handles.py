"""Handles of collectives under way on the emulated cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from minidist.emulate.client import Client, CollectiveError
from minidist.emulate.tensors import Tensors, to_bytes


class InFlight:
    """Detects writes to the tensors that a collective sends, between the call and `wait`.

    The broker has a copy, so its result is right. A real network reads the tensors meanwhile.
    """

    def __init__(self, kind: str, tensors: Tensors, data: memoryview | None) -> None:
        self._kind = kind
        self._tensors = list(tensors)
        self._versions = self._count_writes()
        self._sum = _sum_of(data)

    def _count_writes(self) -> list[int]:
        return [t._version for t in self._tensors if not t.is_inference()]

    def check(self, rank: int) -> None:
        """Raises CollectiveError if the numbers of a tensor have changed."""
        if self._count_writes() == self._versions:
            return
        with torch.no_grad(), _disable_current_modes():
            data = to_bytes(self._tensors, self._tensors[0].dtype)
        # Views of one tensor count their writes together, so a different view may be written.
        if _sum_of(data) != self._sum:
            first = self._tensors[0]
            what = f"{self._kind}({str(first.dtype).removeprefix('torch.')}{list(first.shape)})"
            raise CollectiveError(
                f"{what} was under way when the tensor that it sends was written to: call wait() "
                "before, or use another tensor. A real network may send old or new numbers.",
                rank=rank,
            )


def _sum_of(data: memoryview | None) -> int:
    """A checksum that costs far less than sending."""
    if data is None:
        return 0
    numbers = np.frombuffer(data, np.uint8)
    whole = numbers.size // 8 * 8
    return int(numbers[:whole].view(np.uint64).sum()) ^ hash(numbers[whole:].tobytes())


class EmulatedWork(dist._Work):
    """A collective under way. `wait` fetches the result and moves the rank's compute clock."""

    def __init__(
        self,
        client: Client,
        key: str,
        outputs: Tensors,
        store: Callable[[np.ndarray], None] | None,
        *,
        sent: InFlight | None = None,
        eager: bool = False,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._client = client
        self._key = key
        self._outputs = list(outputs)
        self._store = store
        self._sent = sent
        self._fetched = eager  # an eager send needs no answer
        self._waited = False
        self._source = source
        self._lock = threading.RLock()

    def wait(self, timeout: Any = None) -> bool:
        with self._lock:
            if not self._fetched:
                self._fetch(moves_clock=True)
            elif not self._waited:
                self._check_sent()
                self._report_wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """A completed future: a thread that completed it later would also run its callbacks.

        Callbacks may call collectives. During backward, the wait is reported at the end of
        backward, because DDP's reducer (C++ code, whose waits are not seen) waits there.
        """
        with self._lock:
            if not self._fetched:
                self._fetch(moves_clock=False)
                self._report_wait_later()
        future = _Future(self)
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        with self._lock:
            if not self._fetched:
                answer, _ = self._client.call({"t": "poll", "key": self._key})
                if not answer.get("done"):
                    return False
                self._fetch(moves_clock=False)
                self._report_wait_later()
        return True

    def is_success(self) -> bool:
        return self._fetched

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        return self._source

    def _fetch(self, *, moves_clock: bool) -> None:
        header = {"t": "fetch", "key": self._key, "wait": moves_clock, "st": self._client.stream}
        _, payload = self._client.call(header)
        self._fetched = True
        self._waited = moves_clock
        self._check_sent()
        if self._store is not None:
            # These copies are not compute of the rank: a roofline must not see them.
            with torch.no_grad(), _disable_current_modes():
                self._store(payload)
            self._store = None

    def _check_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.check(self._client.rank)

    def _report_wait(self) -> None:
        with self._lock:
            if not self._waited:
                self._waited = True
                self._client.post({"t": "wait", "key": self._key, "st": self._client.stream})

    def _report_wait_later(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._report_wait)
        else:
            self._report_wait()


class _Future(torch.futures.Future):
    """Reports when Python code waits for it; C++ code waits for the C++ future, unreported."""

    def __init__(self, work: EmulatedWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        self._work._report_wait()
        return super().wait()


class ManyWorks(dist._Work):
    """Several collectives that were called together."""

    def __init__(self, works: list[EmulatedWork], outputs: Tensors) -> None:
        super().__init__()
        self._works = works
        self._outputs = list(outputs)

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def get_future(self) -> torch.futures.Future:
        for work in self._works:
            work.get_future()
        future = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs
