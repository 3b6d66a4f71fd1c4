"""Which rank owns what: two ways to cut a list of parameters into one row per rank.

    three parameters a (6 elements), b (3), c (3) over two ranks

    by_parameter   row 0: a a a a a a        row 1: b b b c c c
    by_element     row 0: a a a a a a        row 1: b b b c c c      (here both agree)

    by_element over three ranks     row 0: a a a a    row 1: a a b b    row 2: b c c c

*By parameter* keeps every parameter whole, so any optimiser can update it, including those that use
its shape (Adafactor, Muon). But the largest parameter limits the balance. *By element* gives equal
rows (the last rows are padded), which collectives need. But the optimiser must treat all elements
alike (SGD, Adam and similar optimisers do).

>>> layout = by_element([6, 3, 3], world_size=3)
>>> layout.sizes, layout.rows[1]
((4, 4, 4), (Piece(index=0, begin=4, end=6, offset=0), Piece(index=1, begin=0, end=2, offset=2)))
>>> by_parameter([6, 3, 3], world_size=2).sizes
(6, 6)

ZeRO: arXiv 1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of the flattened parameter `index`, at `offset` in its rank's row."""

    index: int
    begin: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """Which rank owns each element of some parameters: one row of pieces per rank.

    Args:
        numels: number of elements of each parameter.
        rows: the pieces of each rank, in the order of their offsets.
        sizes: number of elements of each rank's row, including padding at its end.
    """

    numels: tuple[int, ...]
    rows: tuple[tuple[Piece, ...], ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the concatenation of all rows of a by-element layout."""
        starts, at = [], 0
        for numel in self.numels:
            starts.append(at)
            at += numel
        return tuple(starts)


def by_element(numels: Sequence[int], world_size: int) -> Layout:
    """Concatenate all parameters and cut the line into equal rows; the last rows are padded.

    Args:
        numels: elements of each parameter.
        world_size: number of rows.
    """
    _check(numels, world_size)
    size = -(-sum(numels) // world_size)
    rows: list[list[Piece]] = [[] for _ in range(world_size)]
    at = 0
    for index, numel in enumerate(numels):
        begin = 0
        while begin < numel:
            rank, offset = divmod(at + begin, size)
            end = min(numel, begin + size - offset)
            rows[rank].append(Piece(index, begin, end, offset))
            begin = end
        at += numel
    return Layout(tuple(numels), tuple(map(tuple, rows)), (size,) * world_size)


def by_parameter(numels: Sequence[int], world_size: int, loads: list[int] | None = None) -> Layout:
    """Give each parameter to the rank that has the least so far; largest parameters first.

    Assigning by index instead could give one rank nearly everything: in a model of alternating
    weights and biases on two ranks, all weights have even indices.

    Args:
        numels: elements of each parameter.
        world_size: number of rows.
        loads: number of elements that each rank already owns; updated in place.
    """
    _check(numels, world_size)
    loads = [0] * world_size if loads is None else loads
    rows: list[list[Piece]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        rank = loads.index(min(loads))
        rows[rank].append(Piece(index, 0, numels[index], sizes[rank]))
        sizes[rank] += numels[index]
        loads[rank] += numels[index]
    return Layout(tuple(numels), tuple(map(tuple, rows)), tuple(sizes))


def everywhere(numels: Sequence[int], world_size: int) -> Layout:
    """Every rank has all parameters."""
    _check(numels, world_size)
    starts = [sum(numels[:i]) for i in range(len(numels))]
    row = tuple(Piece(i, 0, numel, starts[i]) for i, numel in enumerate(numels))
    return Layout(tuple(numels), (row,) * world_size, (sum(numels),) * world_size)


def _check(numels: Sequence[int], world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"partition: world_size must be at least 1, got {world_size}")
    if any(numel < 0 for numel in numels):
        raise ValueError(f"partition: elements cannot be negative, got {list(numels)}")
