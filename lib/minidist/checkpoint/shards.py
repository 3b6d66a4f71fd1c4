"""Parts of global tensors: saved by one layout of ranks, read by a different one.

A rank holds a box of a tensor: it begins at `offsets` and has the local tensor's shape. Boxes of
all ranks together cover the tensor; several ranks may hold the same box (replicas). To read a box,
find the saved boxes that overlap with it, and copy the overlaps.

    saved by 4 ranks   [  0  |  1  |  2  |  3  ]
    read by 3 ranks    [   0   |   1   |   2   ]    rank 1 reads from the files of ranks 1 and 2

The same idea as in torch.distributed.checkpoint (see `native`), in code that is short to read.

>>> overlap(Box((0,), (4,)), Box((3,), (4,)))
Box(offsets=(3,), sizes=(1,))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minidist.errors import named_rank


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.sizes:
            numel *= size
        return numel

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as an index into a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes of the same tensor share; None if nothing."""
    starts = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = tuple(
        min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """This rank's part of a global tensor.

    Args:
        tensor: the part itself, of any shape that fits; may be empty.
        global_shape: shape of the whole tensor.
        offsets: where the part begins in it, one number per dimension.

    Raises:
        ValueError: the part does not lie inside the whole.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = tuple(self.tensor.shape)
        same_rank = len(sizes) == len(self.global_shape) == len(self.offsets)
        if not same_rank or any(
            start < 0 or start + size > whole
            for start, size, whole in zip(self.offsets, sizes, self.global_shape, strict=True)
        ):
            raise ValueError(
                f"Shard: a part of shape {sizes} at {self.offsets} does not lie inside a tensor "
                f"of shape {self.global_shape}"
            )

    @property
    def box(self) -> Box:
        return Box(tuple(self.offsets), tuple(self.tensor.shape))


Shards = Mapping[str, Shard | Sequence[Shard]]


def shards_of(source: nn.Module | Mapping[str, Any]) -> dict[str, Shard]:
    """Parameters and buffers as shards: DTensors by their placement, the others as a whole.

    Args:
        source: a module, or a mapping of names to tensors.
    """
    named = source.state_dict() if isinstance(source, nn.Module) else source
    found = {}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"shards_of: {name!r} is {type(tensor).__name__}, not a tensor")
        if hasattr(tensor, "device_mesh"):  # a DTensor
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            shape, offsets = compute_local_shape_and_global_offset(
                tensor.shape,
                tensor.device_mesh,  # type: ignore[attr-defined]
                tensor.placements,  # type: ignore[attr-defined]
            )
            local = tensor.to_local()  # type: ignore[attr-defined]
            if local.numel() == 0:
                offsets = (0,) * len(shape)
            found[name] = Shard(
                tensor=local, global_shape=tuple(tensor.shape), offsets=tuple(offsets)
            )
        else:
            found[name] = Shard(
                tensor=tensor, global_shape=tuple(tensor.shape), offsets=(0,) * tensor.dim()
            )
    return found


def boxes_to_write(
    shards: Shards, rank: int, exchange: Callable[[Any], list[Any]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Which tensors this rank writes, and the index of what all ranks write.

    Args:
        exchange: returns the values that all ranks passed to it, in the order of ranks.

    Returns:
        key -> tensor of this rank, and name -> {shape, dtype, boxes: [offsets, sizes, rank, key]}.

    Raises:
        ValueError: ranks disagree about a tensor's shape or dtype, or parts of it are missing.
    """
    held = [
        (name, shard)
        for name, parts in shards.items()
        for shard in ([parts] if isinstance(parts, Shard) else parts)
    ]
    described = [
        (name, shard.global_shape, str(shard.tensor.dtype), shard.box) for name, shard in held
    ]
    index: dict[str, Any] = {}
    mine: dict[str, Tensor] = {}
    taken: set[tuple[str, Box]] = set()
    for owner, boxes in enumerate(exchange(described)):
        for position, (name, global_shape, dtype, box) in enumerate(boxes):
            entry = index.setdefault(
                name, {"shape": list(global_shape), "dtype": dtype, "boxes": []}
            )
            if (entry["shape"], entry["dtype"]) != (list(global_shape), dtype):
                raise ValueError(
                    f"checkpoint: rank {owner} says {name!r} is {dtype} {list(global_shape)}, "
                    f"others say {entry['dtype']} {entry['shape']}"
                )
            if box.numel == 0 or (name, box) in taken:
                continue
            taken.add((name, box))
            key = f"{name}@{','.join(map(str, box.offsets))}+{','.join(map(str, box.sizes))}"
            entry["boxes"].append([list(box.offsets), list(box.sizes), owner, key])
            if owner == rank:
                # torch.save would write the whole storage of a view into the file.
                mine[key] = held[position][1].tensor.detach().contiguous().clone()
    for name, entry in index.items():
        _check_cover(name, entry)
    return mine, index


def _check_cover(name: str, entry: dict[str, Any]) -> None:
    """Raise ValueError if an element is in no box."""
    whole = Box((0,) * len(entry["shape"]), tuple(entry["shape"]))
    boxes = [Box(tuple(start), tuple(size)) for start, size, _, _ in entry["boxes"]]
    held = sum(box.numel for box in boxes)
    if held >= whole.numel and _some_overlap(boxes):  # some are held twice: look at each
        found = torch.zeros(whole.sizes, dtype=torch.bool)
        for box in boxes:
            found[box.within(whole)] = True
        held = int(found.sum())
    if held < whole.numel:
        raise ValueError(
            f"checkpoint: the ranks hold {held} of the {whole.numel} elements of {name!r}; every "
            "element has to be on some rank"
        )


def _some_overlap(boxes: list[Box]) -> bool:
    """Whether two boxes share an element: compares those that overlap along one dimension."""
    if len(boxes) < 2:
        return False
    cut = max(range(len(boxes[0].sizes)), key=lambda d: len({box.offsets[d] for box in boxes}))
    before: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[cut]):
        before = [each for each in before if each.offsets[cut] + each.sizes[cut] > box.offsets[cut]]
        if any(overlap(box, each) for each in before):
            return True
        before.append(box)
    return False


class ShardReader:
    """Reads boxes from the files of a checkpoint, whichever ranks wrote them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = json.loads((folder / "index.json").read_text())
        self._files: dict[int, dict[str, Tensor]] = {}

    def fill(self, shards: Shards) -> None:
        """Copy saved values into the tensors of `shards`.

        Raises:
            ValueError: a tensor is not in the checkpoint, has a different shape, is incomplete, or
                is of a kind (complex, floats) that the tensor to fill cannot hold.
        """
        for name, parts in shards.items():
            for shard in [parts] if isinstance(parts, Shard) else parts:
                self._fill_one(name, shard)

    def _fill_one(self, name: str, shard: Shard) -> None:
        entry = self.index.get(name)
        if entry is None:
            raise ValueError(
                f"{self.folder} has no {name!r}, which {named_rank()} wants; it has "
                f"{sorted(self.index)}"
            )
        if tuple(entry["shape"]) != tuple(shard.global_shape):
            raise ValueError(
                f"{self.folder}: {name!r} has shape {tuple(entry['shape'])}, expected "
                f"{tuple(shard.global_shape)} on {named_rank()}"
            )
        saved_as = getattr(torch, entry["dtype"].removeprefix("torch."))
        if not torch.can_cast(saved_as, shard.tensor.dtype):
            raise ValueError(
                f"{self.folder}: {name!r} is {saved_as}, and {shard.tensor.dtype} on "
                f"{named_rank()} cannot hold its values"
            )
        filled = 0
        with torch.no_grad():
            for offsets, sizes, owner, key in entry["boxes"]:
                saved = Box(tuple(offsets), tuple(sizes))
                common = overlap(saved, shard.box)
                if common is None:
                    continue
                part = self._file(owner)[key][common.within(saved)]
                shard.tensor[common.within(shard.box)].copy_(part)
                filled += common.numel
        if filled < shard.box.numel:
            raise ValueError(
                f"{self.folder}: {name!r}: found {filled} of {shard.box.numel} elements for "
                f"{named_rank()}"
            )

    def _file(self, owner: int) -> dict[str, Tensor]:
        if owner not in self._files:
            path = self.folder / f"shards-{owner}.pt"
            # Memory-mapped, so that only the wanted parts are read from the disk.
            self._files[owner] = torch.load(path, mmap=True, weights_only=True)
        return self._files[owner]
