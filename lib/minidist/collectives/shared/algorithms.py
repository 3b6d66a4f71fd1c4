"""The collectives themselves, as loads and stores in memory that all ranks map.

Legend: a *slot* is a piece of shared memory that one rank writes and all read; `slots[r]` is rank
r's. `meet()` is a barrier: what any rank wrote before it, all can read after it.

**One barrier per chunk is enough**, because a rank has two slots and uses them in turn. To
overwrite chunk i a rank must be at chunk i + 2, so it has met the others with chunk i + 1, and who
arrives there has finished with chunk i.

Results are the same bits on all ranks: either one rank computes an element and the others copy it,
or all add in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from minidist.collectives.shared.space import LINE_BYTES, SharedSpace, round_up

# In place, a chunk is read, reduced and written while it is in a level-2 cache.
IN_PLACE_BYTES = 256 << 10
# Up to here a second barrier costs more than the additions that it saves.
DIRECT_BYTES = 32 << 10

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def all_reduce(space: SharedSpace, tensor_N: torch.Tensor, op: str) -> None:
    """Reduce a 1-D CPU tensor over all ranks, by the form that suits its place and size."""
    numel, dtype = tensor_N.numel(), tensor_N.dtype
    place = space.place(tensor_N)
    space.announce("all_reduce", numel, dtype, op=op, place=place)
    if numel == 0:
        space.meet()
    elif place:
        _all_reduce_in_place(space, place, numel, dtype, op)
    elif space.num_ranks <= 2 or numel * dtype.itemsize <= DIRECT_BYTES:
        _all_reduce_direct(space, tensor_N, op)
    else:
        _all_reduce_sliced(space, tensor_N, op)


def _all_reduce_in_place(
    space: SharedSpace, place: int, numel: int, dtype: torch.dtype, op: str
) -> None:
    # Each rank reduces its slice of all buffers, chunk by chunk, and writes it to all buffers.
    # The chunk is still in the cache when it is written. The views are kept: to make them takes
    # longer than to add a few thousand numbers.
    chunks = space.plans.get((place, numel, dtype))
    if chunks is None:
        start, end = slice_bounds(numel, dtype, space.num_ranks)[space.rank]
        chunks = space.plans[place, numel, dtype] = [
            _own_first(space.views(place, at, length, dtype), space.rank)
            for at, length in _chunks(
                end - start, dtype, min(IN_PLACE_BYTES, space.chunk_bytes), start
            )
        ]
    space.meet()
    for views in chunks:
        _reduce(views[0], views, op, space.scratch)
        for view in views[1:]:
            view.copy_(views[0])
    space.meet()


def _all_reduce_direct(space: SharedSpace, tensor_N: torch.Tensor, op: str) -> None:
    # Everyone adds up everything, in the order of the ranks.
    for start, length in _chunks(tensor_N.numel(), tensor_N.dtype, space.chunk_bytes):
        chunk = tensor_N[start : start + length]
        slots = space.slots(length, chunk.dtype)
        slots[space.rank].copy_(chunk)
        space.meet()
        _reduce(chunk, slots, op, space.scratch)


def _all_reduce_sliced(space: SharedSpace, tensor_N: torch.Tensor, op: str) -> None:
    for start, length in _chunks(tensor_N.numel(), tensor_N.dtype, space.chunk_bytes):
        chunk = tensor_N[start : start + length]
        slots = space.slots(length, chunk.dtype)
        slots[space.rank].copy_(chunk)
        space.meet()
        # Reduce-scatter: each rank reduces its slice of all slots into its own slot.
        bounds = slice_bounds(length, chunk.dtype, space.num_ranks)
        low, high = bounds[space.rank]
        if low < high:
            slices = _own_first([slot[low:high] for slot in slots], space.rank)
            _reduce(slices[0], slices, op, space.scratch)
        space.meet()
        # All-gather: each rank takes every slice from the slot of the rank that reduced it.
        for slot, (low, high) in zip(slots, bounds, strict=True):
            chunk[low:high].copy_(slot[low:high])


def reduce_scatter(
    space: SharedSpace,
    output_M: torch.Tensor,
    input_NM: torch.Tensor,
    op: str,
    total: int,
) -> None:
    """Reduce `input_NM`, one row per rank; rank r gets row r. `total`: elements but for padding."""
    numel, dtype, rank = output_M.numel(), output_M.dtype, space.rank
    place = space.place(input_NM)
    space.announce("reduce_scatter", total, dtype, op=op, place=place)
    if numel == 0:
        space.meet()
    elif place:
        space.meet()
        for start, length in _chunks(numel, dtype, space.chunk_bytes):
            rows = space.views(place, rank * numel + start, length, dtype)
            _reduce(output_M[start : start + length], _own_first(rows, rank), op, space.scratch)
        # Nobody may go on and change its input while others still read it.
        space.meet()
    else:
        row_bytes = space.chunk_bytes // space.num_ranks
        for start, length in _chunks(numel, dtype, row_bytes):
            slots = [
                slot.view(space.num_ranks, length)
                for slot in space.slots(space.num_ranks * length, dtype)
            ]
            for row in range(space.num_ranks):
                if row != rank:
                    slots[rank][row].copy_(input_NM[row, start : start + length])
            space.meet()
            rows = [slot[rank] for slot in slots]
            rows[rank] = input_NM[rank, start : start + length]
            _reduce(output_M[start : start + length], _own_first(rows, rank), op, space.scratch)


def all_gather(
    space: SharedSpace, output_NM: torch.Tensor, input_M: torch.Tensor, total: int
) -> None:
    """Row r of `output_NM` becomes rank r's `input_M`. `total`: elements but for padding."""
    numel, dtype, rank = input_M.numel(), input_M.dtype, space.rank
    place = space.place(input_M)
    space.announce("all_gather", total, dtype, place=place)
    if numel == 0:
        space.meet()
    elif place:
        space.meet()
        for row, theirs in enumerate(space.places(place)):
            view = space.view(row, theirs, 0, numel, dtype)
            if output_NM[row].data_ptr() != view.data_ptr():
                output_NM[row].copy_(view)
        # Nobody may go on and change its input while others still read it.
        space.meet()
    else:
        output_NM[rank].copy_(input_M)
        for start, length in _chunks(numel, dtype, space.chunk_bytes):
            slots = space.slots(length, dtype)
            slots[rank].copy_(input_M[start : start + length])
            space.meet()
            for row, slot in enumerate(slots):
                if row != rank:
                    output_NM[row, start : start + length].copy_(slot)


def broadcast(space: SharedSpace, tensor_N: torch.Tensor, root: int) -> None:
    """Every rank's `tensor_N` becomes that of rank `root`."""
    numel, dtype = tensor_N.numel(), tensor_N.dtype
    space.announce("broadcast", numel, dtype, root=root)
    if numel == 0:
        space.meet()
    for start, length in _chunks(numel, dtype, space.chunk_bytes):
        slot = space.slots(length, dtype)[root]
        if space.rank == root:
            slot.copy_(tensor_N[start : start + length])
        space.meet()
        if space.rank != root:
            tensor_N[start : start + length].copy_(slot)


def slice_bounds(numel: int, dtype: torch.dtype, num_ranks: int) -> list[tuple[int, int]]:
    """Each rank's part of `numel` elements as (start, end): whole cache lines, empty ones last.

    Two ranks that write into one line would take it from each other at every store.

    >>> slice_bounds(40, torch.float32, 2)
    [(0, 32), (32, 40)]
    >>> slice_bounds(5, torch.float32, 2)
    [(0, 5), (5, 5)]
    """
    width = round_up(-(-numel // num_ranks), LINE_BYTES // dtype.itemsize)
    return [(min(r * width, numel), min((r + 1) * width, numel)) for r in range(num_ranks)]


def _chunks(
    numel: int, dtype: torch.dtype, chunk_bytes: int, start: int = 0
) -> list[tuple[int, int]]:
    """(start, length) of the chunks of elements start … start + numel."""
    step = max(1, chunk_bytes // dtype.itemsize)
    end = start + numel
    return [(at, min(step, end - at)) for at in range(start, end, step)]


def _own_first(views: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    return [views[rank], *views[:rank], *views[rank + 1 :]]


def _reduce(
    out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, scratch: torch.Tensor
) -> None:
    """out = op over parts. `out` may be the first part, and no other."""
    if len(parts) == 1:
        if parts[0] is not out:
            out.copy_(parts[0])
        return
    if out.dtype.itemsize == 2 and out.is_floating_point() and op in ("sum", "avg", "prod"):
        # 16-bit floats: add in fp32 and round once, else every addition would round.
        total = scratch[: out.numel()]
        total.copy_(parts[0])
        for part in parts[1:]:
            total.mul_(part) if op == "prod" else total.add_(part)
        if op == "avg":
            total.div_(len(parts))
        out.copy_(total)
        return
    combine = _COMBINE[op]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if op == "avg":
        if out.is_floating_point():
            out.div_(len(parts))
        else:
            out.div_(len(parts), rounding_mode="trunc")
