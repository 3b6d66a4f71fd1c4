"""What fills a rank's memory in a step: parameters, gradients, optimiser state, activations.

Phases: note what is there at the start; after every operation look at the storages that it made
(a `TorchDispatchMode` sees them all, backward's and the optimiser's included); sort them into
categories when they show what they are; let a weak reference say when each is freed.

Example::

    with MemoryTracker(model, optimizer) as tracker:
        loss = model(inputs).sum();     tracker.mark("forward")
        loss.backward();                tracker.mark("backward")
        optimizer.step();               tracker.mark("optimizer")
    tracker.peak.total, tracker.peak_of("activations"), tracker.rows

How a storage shows what it is, first match wins: it belongs to a parameter or buffer, a gathered
one of FSDP or ZeRO-3 included from where backward saves it; to a `.grad`; to the optimiser's state;
autograd saved a part of it for backward (`saved_tensors_hooks`), which makes it an activation, also
if it is the batch itself, or activation checkpointing computes it once more during backward. The
rest is "other": temporaries, communication buckets. Nothing is guessed beforehand, so a gradient is
"other" until it has been accumulated, and an output counts as activation from the operation that
saves it.

Counted are the bytes of living storages, each once, on any device. Memory inside an operation
(workspaces) does not show, nor what an allocator keeps: on a GPU, the rows carry
`torch.cuda.memory_allocated` and `memory_reserved` beside it. Torch-native, by module:
`torch.distributed._tools.mem_tracker.MemTracker`; `native_peak_bytes` runs it.
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

Category = Literal["parameters", "gradients", "optimizer", "activations", "other"]
CATEGORIES: tuple[Category, ...] = get_args(Category)  # a storage moves up this list, never down


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Living bytes after one operation.

    Attributes:
        time_s: since the tracker was entered.
        after: the operation, such as "aten.mm.default", or the name of a mark.
        allocated_bytes, reserved_bytes: what the CUDA allocator says; None without a GPU.
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
    reserved_bytes: int | None = None

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
    """Counts the memory of everything that happens inside; see the module.

    Slows a step down by some tens of microseconds per operation: use it to see memory, not time.

    Args:
        model: its parameters and buffers count as "parameters".
        optimizer: its state counts as "optimizer"; None if there is none.
        keep_rows: a row per operation; False keeps only peaks and marks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
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
        self._lock = threading.RLock()  # backward frees and calls hooks on threads of its own
        self._undo: list[Callable[[], Any]] = []
        self._start_s = 0.0

    # ---------------------------------------------------------------- results

    def peak_of(self, category: Category) -> int:
        """Most bytes that a category ever had; the peaks of several need not coincide."""
        return self._peaks[category]

    def mark(self, name: str) -> MemoryRow:
        """Note the state of this moment under a name, such as the end of forward."""
        self._claim_gradients()
        row = self._row(name, is_mark=True)
        self.marks.append(row)
        return row

    # --------------------------------------------------------------- recording

    def __enter__(self) -> MemoryTracker:
        self._start_s = time.perf_counter()
        # Note what is there ...
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._claim(tensor, "parameters")
        self._claim_gradients()
        self._claim_state()
        # ... and arrange to hear of what comes.
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._undo.append(handle.remove)
        if self._optimizer is not None:
            # Some sharding code sets `.grad` by hand, which no hook of a parameter hears of.
            before = self._optimizer.register_step_pre_hook(lambda *_: self._claim_gradients())
            after = self._optimizer.register_step_post_hook(lambda *_: self._claim_state())
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
            return NotImplemented  # comes again, with the plain tensors inside
        result = func(*args, **(kwargs or {}))
        # A forward inside a backward is activation checkpointing's, whose hooks hide ours.
        again = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        # In-place operations, too: one may be the first sight of a storage made outside.
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._claim(tensor, "activations" if again else "other")
        self._row(str(func))
        return result

    def _claim(self, tensor: Tensor, category: Category) -> None:
        """Put the storage of a tensor into a category, if that is higher than its own."""
        for storage in _storages(tensor):
            key = storage._cdata  # one per storage, whatever tensors look at it
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
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._claim(parameter.grad, "gradients")

    def _claim_state(self) -> None:
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            for value in tree_leaves(state):
                if isinstance(value, Tensor):
                    self._claim(value, "optimizer")

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._claim(parameter.grad, "gradients")
            self._row("gradient")

    def _on_save(self, tensor: Tensor) -> Tensor:
        # FSDP and ZeRO-3 compute with gathered parameters that the model has only for a while.
        whose = tensor._base if tensor._base is not None else tensor
        self._claim(tensor, "parameters" if isinstance(whose, nn.Parameter) else "activations")
        return tensor

    def _watch_resizes(self) -> None:
        """FSDP frees and fills storages in place, which no operation shows."""
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
                reserved_bytes=torch.cuda.memory_reserved() if on_gpu else None,
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
    """The memory behind a tensor; of a DTensor or another wrapper, that of the tensors inside."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            if isinstance(inner := getattr(tensor, name), Tensor):  # a DTensor names its mesh too
                yield from _storages(inner)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return


def native_peak_bytes(
    step: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Peak of one call of `step`, as torch's own MemTracker counts it.

    Returns:
        Its categories ("Parameter", "Gradient", "Activation", "Optstate", "Temp", "Buffer", …) and
        "Total", in bytes, summed over devices.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, *(() if optimizer is None else (optimizer,)))
    with tracker:
        step()
    sums: dict[str, int] = {}
    for snapshot in tracker.get_tracker_snapshot("peak").values():
        for name, num_bytes in snapshot.items():
            key = getattr(name, "value", str(name))
            sums[key] = sums.get(key, 0) + num_bytes
    return sums
