"""How many micro-batches' activations are in memory at once, and how large a tensor is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autograder.criteria.criterion import Finding

MEMORY_LIMIT = 2.5  # in micro-batches
LARGEST = 1.5  # likewise, for a single tensor: micro-batches must not be concatenated


class EmulatedMemory:
    """Counts what autograd keeps for backward, and refuses to keep more than `limit_bytes`."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes, self.live_bytes, self.peak_bytes = limit_bytes, 0, 0
        self.kept_bytes = 0  # in total, including those that were freed
        self.largest = 0  # how many numbers the largest tensor has

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, tensors saved for backward are counted until they are freed."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor
        ):
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        """Adds the bytes of a tensor that is kept; raises a MemoryError above the limit."""
        self.largest = max(self.largest, tensor.numel())
        self.kept_bytes += tensor.nbytes
        self.live_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.live_bytes > self.limit_bytes:
            raise MemoryError(
                "out of memory (emulated): autograd holds the activations of more than two "
                f"micro-batches at once, {self.live_bytes} bytes. backward() of a micro-batch "
                "frees its activations: call it before the forward pass of the next one, without "
                "retain_graph, and keep losses only detached"
            )


class _Kept:
    """A tensor that is saved for backward; when autograd drops it, its bytes count as free."""

    def __init__(self, memory: EmulatedMemory, tensor: torch.Tensor) -> None:
        self.memory, self.tensor = memory, tensor
        memory.keep(tensor)

    def __del__(self) -> None:
        self.memory.live_bytes -= self.tensor.nbytes


def peak_of(work: Callable[[], object], one: Callable[[], object]) -> list[float]:
    """The activations of `work`, as multiples of those of `one` micro-batch.

    Returns:
        the peak in memory, and the largest tensor.
    """
    memories = []
    for run in (one, work):
        memory = EmulatedMemory(float("inf"))
        with memory.watch():
            run()
        memories.append(memory)
    return compared(*memories)


def compared(one: EmulatedMemory, work: EmulatedMemory) -> list[float]:
    """Peak and largest tensor of `work`, as multiples of those of `one`."""
    return [work.peak_bytes / max(1, one.peak_bytes), work.largest / max(1, one.largest)]


def too_much_memory(peak: Any, rank: int) -> Finding | None:
    """A finding if several micro-batches were put together, or more than two were in memory.

    Args:
        peak: what `peak_of` returned; anything else is not judged here.
    """
    if not isinstance(peak, list) or not all(isinstance(value, float) for value in peak):
        return None
    most, largest = peak
    if largest > LARGEST:
        return Finding(
            f"a batch as large as {largest:.1f} micro-batches went forward: each micro-batch has "
            "to go forward and backward by itself.",
            rank,
        )
    if most > MEMORY_LIMIT:
        return Finding(
            f"the activations of {most:.1f} micro-batches were in memory at once; at most two "
            "should be: backward() of a micro-batch, before the next one goes forward, frees them, "
            "unless it retains the graph.",
            rank,
        )
    return None
