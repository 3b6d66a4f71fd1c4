"""How many bytes the new tensors of a piece of code have at once, without a limit."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchFunctionMode):
    """Within this context, sees what each of torch's functions returns in this thread.

    Tensors that were there before, and views of them, do not count.

    Attributes:
        peak_bytes: the most bytes of new tensors that were alive at any moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the function, and notes the memory of its results."""
        for storage in _storages((args, kwargs)):
            ref = StorageWeakRef(storage)
            if ref.cdata not in self._alive:
                self._known[ref.cdata] = ref
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            ref = StorageWeakRef(storage)
            if ref.cdata not in self._known:
                self._alive[ref.cdata] = ref, storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes())
        return out

    def alive_bytes(self) -> int:
        """The bytes of new tensors that are alive now."""
        self._alive = {c: kept for c, kept in self._alive.items() if not kept[0].expired()}
        return sum(size for _, size in self._alive.values())


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    return [t.untyped_storage() for t in tensors if not t.is_meta]  # they have shapes, no memory
