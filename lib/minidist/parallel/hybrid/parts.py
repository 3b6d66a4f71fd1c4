"""Which elements of which tensor a rank holds, and the whole model again from these elements.

Tensor parallelism cuts a matrix along a dimension. ZeRO then cuts the flattened remainder at any
element. Both results can be written as boxes, and checkpoints consist of boxes:

    elements 2 to 9 of 3 x 4     . . x x     a part of a row,
                                 x x x x     whole rows,
                                 x . . .     a part of a row

>>> boxes_of_range((3, 4), 2, 9)
[((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]

No box contains padding of the vocabulary, so the boxes of a model cover the same elements for any
number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Range = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True)
class Part:
    """A box of a tensor of the unsplit model, and this rank's memory for it.

    Args:
        tensor: a view; writing to it changes the trained values.
        global_shape: shape of the whole tensor.
        offsets: where the box begins in the whole tensor.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """Something that this rank updates: a parameter, or elements [begin, end) of a parameter.

    Args:
        name: the parameter's name in the unsplit GPT.
        tensor: the tensor that the optimiser updates, with the gradient in `.grad`.
        shape: shape of the parameter on this rank, before ZeRO cut it.
        split: (split dimension, its size in the whole model) if ranks hold parts of the parameter
            (tensor parallelism) or some of the experts that are stacked in it.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    begin: int
    end: int
    split: tuple[int, int] | None

    def parts(self, value: Tensor, place: int) -> list[Part]:
        """Boxes of `value`: the parameter itself, or optimiser state with as many elements.

        Args:
            place: which part of a split parameter this rank holds.
        """
        origin, whole = [0] * len(self.shape), list(self.shape)
        if self.split is not None:
            dim, whole[dim] = self.split
            origin[dim] = place * self.shape[dim]
        found = []
        # A value that has the parameter's own shape may be non-contiguous, so `view` could fail.
        value = value.detach()
        is_row = tuple(value.shape) != self.shape
        at = 0
        for offsets, sizes in boxes_of_range(self.shape, self.begin, self.end):
            view = value[at : at + prod(sizes)].view(sizes) if is_row else value
            at += prod(sizes)
            begins = [a + b for a, b in zip(origin, offsets, strict=True)]
            for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
                view = view.narrow(dim, 0, max(0, min(size, whole[dim] - begin)))
            if view.numel():
                found.append(Part(view, tuple(whole), tuple(begins)))
        return found


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> list[Range]:
    """(offsets, sizes) of the boxes that make up elements [begin, end) of a tensor, in order."""
    if not shape:
        return [((), ())] if begin < end else []
    row = prod(shape[1:])
    found: list[Range] = []
    while begin < end:
        first, column = divmod(begin, row)
        if column == 0 and end - begin >= row:
            num_rows = (end - begin) // row
            found.append(((first, *[0] * (len(shape) - 1)), (num_rows, *shape[1:])))
            begin += num_rows * row
        else:
            stop = min(end, (first + 1) * row)
            for offsets, sizes in boxes_of_range(shape[1:], column, column + stop - begin):
                found.append(((first, *offsets), (1, *sizes)))
            begin = stop
    return found


def join_parts(parts: Iterable[tuple[str, Part]]) -> dict[str, Tensor]:
    """The whole tensors, on the CPU of every rank. Collective over all ranks; for small models."""
    own = [
        (name, part.global_shape, part.offsets, part.tensor.cpu().clone()) for name, part in parts
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    whole: dict[str, Tensor] = {}
    for name, shape, offsets, tensor in (entry for entries in every for entry in entries):
        target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
        box = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        target[box] = tensor
    return whole
