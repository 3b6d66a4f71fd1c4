"""Records the collectives of a block: which, in what order, how many bytes, and who waited.

Example::

    with CollectiveLog() as log:
        ddp(x).sum().backward()
        ring_all_reduce(t)
    print(log)              # a table
    log.counts()            # {"all_reduce": 1, "ring_all_reduce": 1}
    print(log.gather())     # on all ranks: who came last to each collective, and who waited

What is seen:

- every collective, send and recv that torch.distributed runs on a backend written in C++ (gloo,
  NCCL), whoever calls it: your code, DDP's reducer, FSDP2, DTensor, functional collectives. torch
  sends them all through its dispatcher, where a `TorchDispatchMode` sees them;
- every collective of this package over point-to-point messages, also as the backend "minidist".
  Here the bytes that this rank sent are counted message by message;

When a collective ended is known from its future. On gloo torch's reduce-scatter, send and recv have
none, and no end here.

Not seen: torch's collectives on other backends written in Python (the emulated cluster has its own
`Trace`), calls of other threads than the block's and autograd's, and what NCCL does on the GPU:
there a torch collective ends, for this log, when it is queued.

`num_bytes` is what torch and nccl-tests call the message of a rank: the bytes of its input tensors
(an all-gather's shard, a reduce-scatter's whole buffer); for a broadcast and a scatter, whose input
only the root has, those of the tensor that everyone ends up with.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.collectives.dispatched import read_call
from minidist.collectives.records import MergedLog, Record, milliseconds, shape_text, table, text

if TYPE_CHECKING:
    from minidist.collectives.async_work import CollectiveWork


class CollectiveLog(TorchDispatchMode):
    """A context manager that records every collective called inside. May be nested and reused."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[Record] = []
        self._numbers: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._paused = False
        # torch's operations under way: their future, and that of the callback that stamps the end.
        self._pending: list[tuple[Any, Any]] = []
        self._functional: dict[int, Record] = {}

    def __enter__(self) -> CollectiveLog:
        super().__enter__()
        _active.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        super().__exit__(*error)

    # ----------------------------------------------------------------- results

    @property
    def records(self) -> list[Record]:
        """In the order of their calls."""
        with self._lock:
            pending, self._pending = self._pending, []
            for future, stamped in pending:
                if future.done():
                    stamped.wait()  # whoever waits for the future may wake before the callback ran
                else:
                    self._pending.append((future, stamped))
            return list(self._records)

    def counts(self) -> dict[str, int]:
        """Number of calls of each kind."""
        return dict(Counter(record.kind for record in self.records))

    def num_bytes(self, kind: str | None = None) -> int:
        """Bytes of this rank's messages, of one kind or of all."""
        return sum(r.num_bytes for r in self.records if kind in (None, r.kind))

    def num_bytes_sent(self, group: str | None = None) -> int:
        """Bytes that our own algorithms sent from this rank, in one group (by name) or in all."""
        return sum(r.num_bytes_sent or 0 for r in self.records if group in (None, r.group))

    def __str__(self) -> str:
        records = self.records
        first_s = min((r.issued_s for r in records), default=0.0)
        head = ["group", "no", "collective", "op", "dtype", "shape", "bytes", "sent"]
        rows = [
            [
                *(r.group, text(r.number), r.kind, r.op, r.dtype, shape_text(r.shape)),
                *(f"{r.num_bytes:,}", text(r.num_bytes_sent), milliseconds(r.issued_s - first_s)),
                *(milliseconds(r.took_s), milliseconds(r.waited_s)),
            ]
            for r in records
        ]
        return table([*head, "at ms", "took ms", "waited ms"], rows)

    def gather(self, group: dist.ProcessGroup | None = None) -> MergedLog:
        """Merge the logs of all ranks of `group`: a collective, to be called by all of them.

        Times of ranks are compared, so the clocks of different machines have to agree (NTP) about
        as well as the delays that matter; ranks of one machine have one clock.

        Raises:
            MismatchError: ranks that took part in the k-th collective of a group called different
                ones, or unequal numbers of them.
        """
        records, self._paused = self.records, True
        try:
            logs: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(logs, (dist.get_rank(), records), group=group)
        finally:
            self._paused = False
        return MergedLog(dict(logs))

    # --------------------------------------------------------------- recording

    def add(
        self,
        kind: str,
        op: str,
        group: dist.ProcessGroup,
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> Record | None:
        """Record a call that begins now; None while paused."""
        if self._paused:
            return None
        name = str(group.group_name)
        dtype = tensors[0].dtype if tensors else dtype
        with self._lock:
            number = None
            if kind not in ("send", "recv"):
                number = self._numbers[name]
                self._numbers[name] += 1
            record = Record(
                kind=kind,
                op=op,
                group=name,
                ranks=tuple(dist.get_process_group_ranks(group)),
                number=number,
                dtype=str(dtype).removeprefix("torch.") if dtype else "",
                shape=tuple(tensors[0].shape) if tensors else (),
                num_bytes=sum(t.numel() * t.element_size() for t in tensors),
                issued_s=time.time(),
            )
            self._records.append(record)
        return record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(t.__name__ in _WRAPPERS for t in types):
            return NotImplemented
        record = None
        call = read_call(func, args)
        if call is not None:
            record = self.add(*call)
        result = func(*args, **(kwargs or {}))
        if record is not None and func.namespace == "c10d":
            self._watch_work(record, result)
        elif func.namespace == "_c10d_functional" and self._functional_result(func, args, result):
            return result
        if record is not None and isinstance(result, torch.Tensor):
            self._functional[result.data_ptr()] = record
        return result

    def _watch_work(self, record: Record, result: Any) -> None:
        work = dist._Work.unbox(result[-1] if isinstance(result, tuple) else result)

        def stamp(_: Any) -> None:
            record.ended_s = time.time()

        with contextlib.suppress(RuntimeError):  # see above: not every Work has a future
            future = work.get_future()
            stamped = future.then(stamp)
            with self._lock:
                self._pending.append((future, stamped))

    def _functional_result(self, func: Any, args: Any, result: Any) -> bool:
        """Functional collectives return no Work: they end in wait_tensor."""
        if func._schema.name != "_c10d_functional::wait_tensor":
            return False
        record = self._functional.pop(args[0].data_ptr(), None)
        if record is not None:
            record.ended_s = time.time()
        return True


# Tensors that, left to themselves, call again with the plain tensors inside. By name: importing
# DTensor takes longer than all of this package.
_WRAPPERS = ("DTensor", "AsyncCollectiveTensor")

# The logs whose blocks are running. Our own collectives run in threads of their own, where no
# dispatch mode sees them, so they have to find their logs here.
_active: list[CollectiveLog] = []


def watch(
    work: CollectiveWork,
    kind: str,
    op: str,
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Tell the active logs about one of our own collectives, before it is issued."""
    for log in _active:
        record = log.add(kind, op, group, tensors, dtype)
        if record is not None:
            _listen(work, record)


def _listen(work: CollectiveWork, record: Record) -> None:
    record.waited_s = 0.0

    def end() -> None:
        record.ended_s = time.time()
        record.num_bytes_sent = work.num_bytes_sent

    def wait(seconds: float) -> None:
        record.waited_s = (record.waited_s or 0.0) + seconds

    work.on_end.append(end)
    work.on_wait.append(wait)
