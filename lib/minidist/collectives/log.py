"""Records the collectives of a `with` block: kind, order, bytes, and which ranks waited.

Example::

    with CollectiveLog() as log:
        ddp(x).sum().backward()
        ring_all_reduce(t)
    print(log)              # a table
    log.counts()            # {"all_reduce": 1, "ring_all_reduce": 1}
    print(log.gather())     # on all ranks: who came last to each collective, and who waited

The log sees:

- every collective, send and recv that torch.distributed runs on a backend written in C++ (gloo,
  NCCL), whatever code calls it: your code, DDP's reducer, FSDP2, DTensor, functional collectives.
  torch sends all of these through its dispatcher, where a `TorchDispatchMode` sees them;
- every collective of this package over point-to-point messages, also as the backend "minidist". For
  these, the log counts the bytes that this rank sent, message by message.

The log takes the end of a collective from its future. On gloo, torch's reduce-scatter, send and
recv have no future, so the log has no end for them.

The log does not see:

- torch's collectives on other backends written in Python (the emulated cluster has its own
  `Trace`);
- calls from threads other than the block's thread and autograd's threads;
- what NCCL does on the GPU: for this log, a torch collective on NCCL ends when it is queued.

`num_bytes` is what torch and nccl-tests call the message of a rank: the bytes of the rank's input
tensors (an all-gather's shard, a reduce-scatter's whole buffer). In a broadcast and a scatter only
the root has an input, so there it is the bytes of the tensor that every rank ends up with.
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
    """A context manager that records every collective called inside. Can be nested and reused."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[Record] = []
        self._numbers: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._paused = False
        # torch's operations in progress: the operation's future, and the future of the callback
        # that records the end.
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
                    stamped.wait()  # a future may be done before its callback has run
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
        """Merge the logs of all ranks of `group`. This is a collective: all these ranks call it.

        The merged log compares times of different ranks, so the clocks of different machines must
        agree (NTP) more closely than the delays of interest. Ranks of one machine share one clock.

        Raises:
            MismatchError: the ranks of a group called different collectives as their k-th, or
                different numbers of collectives.
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

        with contextlib.suppress(RuntimeError):  # not every Work has a future, see the module doc
            future = work.get_future()
            stamped = future.then(stamp)
            with self._lock:
                self._pending.append((future, stamped))

    def _functional_result(self, func: Any, args: Any, result: Any) -> bool:
        """Record the end of a functional collective: it has no Work, it ends in wait_tensor.

        Returns whether this call is wait_tensor.
        """
        if func._schema.name != "_c10d_functional::wait_tensor":
            return False
        record = self._functional.pop(args[0].data_ptr(), None)
        if record is not None:
            record.ended_s = time.time()
        return True


# Tensor subclasses that repeat the call with the plain tensors they contain, if we return
# NotImplemented. Compared by name, because importing DTensor takes longer than importing this whole
# package.
_WRAPPERS = ("DTensor", "AsyncCollectiveTensor")

# The logs whose `with` blocks are active. Our own collectives run in their own threads, where no
# dispatch mode sees them, so they look up the logs here.
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
