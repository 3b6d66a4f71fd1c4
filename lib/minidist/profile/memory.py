"""The content of a rank's memory in a step: parameters, gradients, optimiser state, activations.

Phases: record the storages that exist at the start; after every operation record the storages that
the operation made (a `TorchDispatchMode` sees all operations, including backward and the
optimiser); give each storage a category as soon as its use is known; a weak reference tells when a
storage is freed.

Example::

    with MemoryTracker(model, optimizer) as tracker:
        loss = model(inputs).sum();     tracker.mark("forward")
        loss.backward();                tracker.mark("backward")
        optimizer.step();               tracker.mark("optimizer")
    tracker.peak.total, tracker.peak_of("activations"), tracker.rows

The category of a storage, where the first match wins:

1. "parameters": it belongs to a parameter or buffer. A gathered parameter of FSDP or ZeRO-3 counts
   from the moment that autograd saves it for backward.
2. "gradients": it belongs to a `.grad`.
3. "optimizer": it belongs to the optimiser's state.
4. "activations": autograd saved a part of it for backward (`saved_tensors_hooks`), even if it is
   the batch itself; or activation checkpointing recomputes it during backward.
5. "other": the rest, such as temporaries and communication buckets.

The tracker does not predict a use. So a gradient is "other" until it is accumulated, and an output
becomes an activation when an operation saves it.

The tracker counts the bytes of living storages, each storage once, on any device. It does not count
memory inside an operation (workspaces) and memory that an allocator keeps. On a GPU, the rows also
have `torch.cuda.memory_allocated` and `memory_reserved`. torch-native, by module:
`torch.distributed._tools.mem_tracker.MemTracker`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist.precision.clip import is_held_by_zero3

Category = Literal["parameters", "gradients", "optimizer", "activations", "other"]
CATEGORIES: tuple[Category, ...] = get_args(Category)  # a storage moves only towards the front


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes of living storages after one operation.

    Attributes:
        time_s: seconds since the tracker was entered.
        after: the operation, such as "aten.mm.default", or the name of a mark.
        allocated_bytes: of the CUDA allocator; None without a GPU.
    """

    time_s: float
    after: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    is_mark: bool = False
    allocated_bytes: int | None = None

    @property
    def total(self) -> int:
        return sum(getattr(self, category) for category in CATEGORIES)


@dataclass(slots=True)
class _Entry:
    """One living storage."""

    reference: Any
    num_bytes: int
    category: Category


class MemoryTracker(TorchDispatchMode):
    """Counts the memory of all operations in its `with` block; see the module's docstring.

    The tracker slows a step down by some tens of microseconds per operation: do not use it to
    measure time.

    Args:
        model: its parameters and buffers count as "parameters".
        optimizer: its state counts as "optimizer", as do its masters (`MasterWeights`); None if
            there is none.
        keep_rows: True keeps a row per operation; False keeps only peaks and marks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        keep_rows: bool = True,
    ) -> None:
        super().__init__()
        self.rows: list[MemoryRow] = []
        self.marks: list[MemoryRow] = []
        self.peak = MemoryRow(time_s=0.0, after="", **dict.fromkeys(CATEGORIES, 0))
        self._model, self._optimizer, self._keep_rows = model, optimizer, keep_rows
        self._entries: dict[int, _Entry] = {}
        self._live: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._peaks: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._lock = threading.RLock()  # backward has its own threads, which free and call hooks
        self._undo: list[Callable[[], Any]] = []
        self._start_s = 0.0

    # ---------------------------------------------------------------- results

    def peak_of(self, category: Category) -> int:
        """The largest number of bytes of a category. Categories may peak at different times."""
        return self._peaks[category]

    def mark(self, name: str) -> MemoryRow:
        """Record the current state under a name, such as the end of forward."""
        self._claim_gradients()
        row = self._row(name, is_mark=True)
        self.marks.append(row)
        return row

    # --------------------------------------------------------------- recording

    def __enter__(self) -> MemoryTracker:
        self._start_s = time.perf_counter()
        # Record the storages that exist now.
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._claim(tensor, "parameters")
        self._claim_gradients()
        self._claim_state()
        # Install hooks for the storages to come.
        for parameter in self._model.parameters():
            if parameter.requires_grad and not is_held_by_zero3(parameter):
                handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._undo.append(handle.remove)
        if self._optimizer is not None:
            # Some sharding code sets `.grad` by hand, which calls no hook of the parameter.
            stepping = getattr(self._optimizer, "optimizer", self._optimizer)
            before = stepping.register_step_pre_hook(lambda *_: self._claim_gradients())
            after = stepping.register_step_post_hook(lambda *_: self._claim_state())
            self._undo += [before.remove, after.remove]
        saved = torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda tensor: tensor)
        saved.__enter__()
        self._undo.append(lambda: saved.__exit__(None, None, None))
        self._watch_resizes()
        self._row("start")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(t.__name__ in ("DTensor", "AsyncCollectiveTensor") for t in types):
            return NotImplemented  # torch calls again with the plain tensors inside
        result = func(*args, **(kwargs or {}))
        # A forward inside a backward belongs to activation checkpointing. Its saved-tensor hooks
        # replace ours, so its results are claimed here.
        again = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        # Also the results of in-place operations: their storage may come from outside the block.
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._claim(tensor, "activations" if again else "other")
        self._row(str(func))
        return result

    def _claim(self, tensor: Tensor, category: Category) -> None:
        """Move a tensor's storage to `category`, if this comes before its old one in CATEGORIES."""
        for storage in _storages(tensor):
            key = storage._cdata  # one per storage, the same for all tensors on this storage
            with self._lock:
                entry = self._entries.get(key)
                if entry is None:
                    reference = weakref.ref(storage, lambda _, key=key: self._forget(key))
                    entry = self._entries[key] = _Entry(reference, storage.nbytes(), category)
                    self._live[category] += entry.num_bytes
                elif CATEGORIES.index(category) < CATEGORIES.index(entry.category):
                    self._live[entry.category] -= entry.num_bytes
                    entry.category = category
                    self._live[category] += entry.num_bytes

    def _forget(self, key: int) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._live[entry.category] -= entry.num_bytes

    def _claim_gradients(self) -> None:
        masters = getattr(self._optimizer, "masters", ())
        for parameter in (*self._model.parameters(), *masters):
            if parameter.grad is not None:
                self._claim(parameter.grad, "gradients")

    def _claim_state(self) -> None:
        for master in getattr(self._optimizer, "masters", ()):
            self._claim(master, "optimizer")
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            for value in tree_leaves(state):
                if isinstance(value, Tensor):
                    self._claim(value, "optimizer")

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._claim(parameter.grad, "gradients")
            self._row("gradient")

    def _on_save(self, tensor: Tensor) -> Tensor:
        # FSDP and ZeRO-3 compute with gathered parameters, which exist only temporarily.
        whose = tensor._base if tensor._base is not None else tensor
        self._claim(tensor, "parameters" if isinstance(whose, nn.Parameter) else "activations")
        return tensor

    def _watch_resizes(self) -> None:
        """Track `resize_`: FSDP frees and refills storages in place, without any operation."""
        original = torch.UntypedStorage.resize_
        tracker = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            with tracker._lock:
                entry = tracker._entries.get(storage._cdata)
                if entry is not None:
                    tracker._live[entry.category] += storage.nbytes() - entry.num_bytes
                    entry.num_bytes = storage.nbytes()
            return result

        def restore() -> None:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        self._undo.append(restore)

    def _row(self, after: str, is_mark: bool = False) -> MemoryRow:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        with self._lock:
            row = MemoryRow(
                time_s=time.perf_counter() - self._start_s,
                after=after,
                is_mark=is_mark,
                allocated_bytes=torch.cuda.memory_allocated() if on_gpu else None,
                **self._live,
            )
            if row.total > self.peak.total:
                self.peak = row
            for category in CATEGORIES:
                self._peaks[category] = max(self._peaks[category], self._live[category])
            if self._keep_rows:
                self.rows.append(row)
        return row


def _storages(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    """The storages of a tensor; for a DTensor or other wrapper, those of the inner tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            if isinstance(inner := getattr(tensor, name), Tensor):  # a DTensor also names its mesh
                yield from _storages(inner)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return
