"""Buckets: gradients that travel together, as views of one flat tensor.

>>> weights = [nn.Parameter(torch.zeros(100)) for _ in range(2)]
>>> bucket = FlatBucket(weights)
>>> bucket.flat.shape, [slot.shape for slot in bucket.slots]
(torch.Size([200]), [torch.Size([100]), torch.Size([100])])

Which parameters share a bucket is decided by `cut_into_buckets` (minidist.collectives.buckets).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

LARGE = 2**16  # elements: with as many or more, a kernel takes longer than its launch


class Work(Protocol):
    """A reduction in progress: torch's Work, or any object with `wait`."""

    def wait(self) -> Any: ...


class FlatBucket:
    """Parameters whose gradients are reduced in one message.

    Attributes:
        flat: the message, (number of elements,).
        slots: per parameter, the view of `flat` that holds its gradient, in the parameter's shape.
        waiting: positions of the gradients that have not arrived yet in this backward.
        work: the reduction in progress; None before it, or if it was complete at once.
    """

    waiting: set[int]
    work: Work | None

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        num_elements = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(num_elements, dtype=first.dtype, device=first.device)
        pieces = self.flat.split([p.numel() for p in self.parameters])
        self.slots = [_shaped(piece, p) for piece, p in zip(pieces, self.parameters, strict=True)]
        self.reset()

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    @property
    def is_outdated(self) -> bool:
        """Whether a parameter has a different dtype, device or shape than its slot."""
        return any(
            p.dtype != slot.dtype or p.device != slot.device or p.shape != slot.shape
            for p, slot in zip(self.parameters, self.slots, strict=True)
        )

    def reset(self) -> None:
        """Prepare for a backward: no gradient has arrived."""
        self.waiting = set(range(len(self.parameters)))
        self.work = None
        self._arrived: list[tuple[int, Tensor | None]] = []

    def take(self, position: int) -> None:
        """The gradient of one parameter has arrived, or will not: then it counts as zero."""
        self.waiting.discard(position)
        self._arrived.append((position, self.parameters[position].grad))

    def pack(self, scale: float, as_view: bool) -> None:
        """Write scale * gradients into `flat`.

        All small gradients share a few kernels, because a GPU starts these sooner than one for
        each. A large one has its own kernel, which copies and scales in one pass over its memory.

        Args:
            as_view: let `p.grad` be the slot's memory from now on. This saves the copy back.
        """
        slots, grads, unscaled = [], [], []
        for position, grad in self._arrived:
            slot = self.slots[position]
            if grad is None:
                slot.zero_()
                continue
            if grad.data_ptr() == slot.data_ptr():  # autograd has added to the slot directly
                unscaled.append(slot)
                continue
            if scale != 1 and grad.numel() >= LARGE:
                torch.mul(grad.detach(), scale, out=slot)
            else:
                slots.append(slot)
                grads.append(grad.detach())
            if as_view:
                # A separate tensor, because `.to()` replaces the data of `p.grad`.
                self.parameters[position].grad = slot.detach()
        self._arrived.clear()  # what is not a view is not needed any more
        if slots:
            torch._foreach_copy_(slots, grads)
        if scale != 1 and (unscaled := slots + unscaled):
            torch._foreach_mul_(unscaled, scale)

    def deliver(self, used: set[nn.Parameter] | None, as_view: bool) -> None:
        """After the reduction: every parameter's gradient becomes its slot, or a copy of it.

        Args:
            used: parameters that have a gradient on some rank; the others keep their old gradient.
                None means all parameters.
        """
        targets, sources = [], []
        for parameter, slot in zip(self.parameters, self.slots, strict=True):
            if not parameter.requires_grad or (used is not None and parameter not in used):
                continue
            if as_view:
                if parameter.grad is None or parameter.grad.data_ptr() != slot.data_ptr():
                    parameter.grad = slot.detach()
            elif parameter.grad is None:
                parameter.grad = slot.clone()
            else:
                targets.append(parameter.grad.detach())
                sources.append(slot)
        if targets:
            torch._foreach_copy_(targets, sources)


def _shaped(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """`piece` with the parameter's shape, and with its strides if it is dense (channels last).

    Autograd expects a gradient to have the memory layout of its parameter.
    """
    if parameter.is_contiguous():
        return piece.view(parameter.shape)
    strides = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, size in strides:
        if size != 1 and stride != expected:
            return piece.view(parameter.shape)
        expected *= size
    return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
