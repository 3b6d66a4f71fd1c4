"""Moving rows: every rank gets all rows, or every rank gets the mean of its own row.

    gather_rows          rank r sends row r to all            ZeRO: parameters
    reduce_rows          rank r gets the mean of all row r    ZeRO: gradients

These are all-gather and reduce-scatter. NCCL has both. On gloo, the reduce-scatter is a whole
all-reduce, and the all-gather copies its output once more. So on a CPU with gloo, the ranks send
rows directly to each other, into their final memory, and the receiver adds. This also works for
rows of unequal length.

`GradientBucket` collects and sends gradients: it copies each gradient into the row of its owner as
soon as the gradient appears, and one collective sends all rows. Each row carries one flag per piece
that it holds. The sum of a flag over the ranks says whether any rank had a gradient. A parameter
that no rank used keeps `grad = None`, as in one process, so weight decay and momentum do not change
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.device import all_gather_single, reduce_scatter_single
from minidist.errors import named_rank
from minidist.parallel.zero.partition import Layout
from minidist.unsupported import Unsupported

SPARSE = Unsupported(
    "ShardedOptimizer, Zero2Optimizer, Zero3",
    "sparse gradients",
    instead="use sparse=False in the embedding",
)

# Tags separate the two kinds of rows from each other and from messages of other code.
_GATHER_TAG, _REDUCE_TAG = 7001, 7002


class Pending:
    """A collective in progress. `wait` returns its result, on a GPU as soon as it is enqueued."""

    def __init__(
        self, works: Sequence[Any], result: Callable[[], Tensor], keep: Tensor | None = None
    ) -> None:
        self._works = works
        self._result = result
        self._keep = keep  # memory that the collective reads

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._result()


def gather_rows(
    rows: Tensor, row: Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    """Start an all-gather. `wait()` returns `rows`.

    Args:
        rows: receives all rows, 1-D, sum(sizes) elements.
        row: this rank's row, 1-D, same dtype and device; must not change before `wait()`.
        sizes: elements of each rank's row.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    parts = rows.split(list(sizes))
    if world_size == 1:
        parts[0].copy_(row)
        return Pending([], lambda: rows)
    if _direct(row, group):
        works = _swap([row] * world_size, parts, rank, group, _GATHER_TAG)
        parts[rank].copy_(row)
        return Pending(works, lambda: rows)
    if len(set(sizes)) == 1:
        work = all_gather_single(rows, row, group=group, async_op=True)
        return Pending([work], lambda: rows)
    copies, own = row.repeat(world_size), [row.numel()] * world_size
    work = dist.all_to_all_single(rows, copies, list(sizes), own, group=group, async_op=True)
    return Pending([work], lambda: rows, keep=copies)


def reduce_rows(
    rows: Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    *,
    ordered: bool = False,
) -> Pending:
    """Start a reduce-scatter. `wait()` returns the mean over ranks of this rank's row.

    Args:
        rows: one row for every rank, 1-D, sum(sizes) elements; must not change before `wait()`.
        sizes: elements of each row.
        dtype: dtype of the result, and of the sum if the rows are added here. If the backend's
            reduce-scatter adds them, the sum has the dtype of `rows`.
        ordered: always add here, in the order of the ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    parts = rows.split(list(sizes))
    if world_size == 1:
        return Pending([], lambda: rows.to(dtype))
    if not ordered and not _direct(rows, group) and len(set(sizes)) == 1:
        output = torch.empty_like(parts[rank])
        work = reduce_scatter_single(output, rows, group=group, async_op=True)
        return Pending([work], lambda: output.to(dtype).div_(world_size), keep=rows)
    memory = rows.new_empty(world_size, sizes[rank])
    received = list(memory.unbind())
    if _direct(rows, group):
        works = _swap(parts, received, rank, group, _REDUCE_TAG)
        received[rank] = parts[rank]
    else:
        own = [sizes[rank]] * world_size
        works = [
            dist.all_to_all_single(
                memory.view(-1), rows, own, list(sizes), group=group, async_op=True
            )
        ]

    def mean() -> Tensor:
        # Scale the rows before adding them, so that half precision does not overflow.
        total = received[0].to(dtype) * (1 / world_size)
        for row in received[1:]:
            total.add_(row, alpha=1 / world_size)
        return total

    return Pending(works, mean, keep=rows)


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the group of all ranks for None."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("there is no default process group: call dist.init_process_group first")
    return group


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether this group sends CPU tensors with gloo."""
    # torch calls a group with one backend per device "undefined". Such a group uses gloo for CPU.
    name = str(dist.get_backend(group))
    return name in ("gloo", "undefined") or "cpu:gloo" in name


def _direct(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and is_gloo(group)


def _swap(
    sends: Sequence[Tensor],
    receives: Sequence[Tensor],
    rank: int,
    group: dist.ProcessGroup,
    tag: int,
) -> list[Any]:
    """Send sends[q] to every other rank q and receive receives[q] from it; skip empty rows."""
    world_size = len(sends)
    ops = []
    for step in range(1, world_size):
        # At each step every rank sends to one rank and receives from one rank.
        to, source = (rank + step) % world_size, (rank - step) % world_size
        if sends[to].numel():
            ops.append(dist.P2POp(dist.isend, sends[to], group=group, tag=tag, group_peer=to))
        if receives[source].numel():
            ops.append(
                dist.P2POp(dist.irecv, receives[source], group=group, tag=tag, group_peer=source)
            )
    return dist.batch_isend_irecv(ops) if ops else []


class GradientBucket:
    """Collects gradients of some parameters and sends them to the ranks that own the parameters.

    Phases, once per backward pass: `add` each gradient; `launch` the reduce-scatter; `finish`.
    Without a launch, the added gradients stay, and the next backward pass adds to them.

    Args:
        layout: which rank owns which elements.
        wire_dtype: dtype in which gradients are collected and sent.
        dtype: dtype of the result.
    """

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.group = group
        self.device = device
        self.wire_dtype = wire_dtype
        self.dtype = dtype
        self.pieces = layout.rows[dist.get_rank(group)]
        # A row on the wire has the elements, then one flag per piece. All rows have the same number
        # of flags, so that rows of equal length stay equal.
        num_flags = max(len(pieces) for pieces in layout.rows)
        self.sizes = [size + num_flags for size in layout.sizes]
        self._own_size = layout.sizes[dist.get_rank(group)]
        self._targets: list[list[tuple[int, int, int, int]]] = [[] for _ in layout.numels]
        self._flags: list[slice] = []
        start = 0
        for size, pieces in zip(layout.sizes, layout.rows, strict=True):
            for i, piece in enumerate(pieces):
                self._targets[piece.index].append(
                    (start + piece.offset, piece.begin, piece.end, start + size + i)
                )
            start += size + num_flags
            self._flags.append(slice(start - num_flags, start))
        self.ordered = False  # whether sums are made in the order of the ranks, on any backend
        self._rows: Tensor | None = None
        self._filled: set[int] = set()
        self._sent: tuple[Pending, set[int]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added since the last launch."""
        return not self._filled

    def add(self, index: int, gradient: Tensor) -> None:
        """Put the whole gradient of one parameter into the rows of its owners."""
        if gradient.layout is not torch.strided:
            raise SPARSE.error(
                f"gradients have to be dense to be sharded, got {gradient.layout} for parameter "
                f"{index} of its bucket on {named_rank()}"
            )
        if self._rows is None:
            self._rows = torch.empty(sum(self.sizes), dtype=self.wire_dtype, device=self.device)
        for at, begin, end, _ in self._targets[index]:
            target = self._rows[at : at + end - begin]
            if end - begin == gradient.numel():
                target, source = target.view(gradient.shape), gradient
            else:
                source = gradient.reshape(-1)[begin:end]
            if index in self._filled:
                target.add_(source)
            else:
                target.copy_(source)
        self._filled.add(index)

    def clear(self) -> None:
        """Drop the gradients that were added but not launched."""
        self._rows, self._filled = None, set()

    def launch(self) -> None:
        """Start the reduce-scatter. A parameter without a gradient on this rank counts as zero."""
        rows = self._rows
        if rows is None:
            rows = torch.empty(sum(self.sizes), dtype=self.wire_dtype, device=self.device)
        for flags in self._flags:
            rows[flags] = 1
        for index in range(len(self._targets)):
            if index not in self._filled:
                for at, begin, end, flag in self._targets[index]:
                    rows[at : at + end - begin] = 0
                    rows[flag] = 0
        pending = reduce_rows(rows, self.sizes, self.group, self.dtype, ordered=self.ordered)
        self._sent = (pending, self._filled)
        self._rows, self._filled = None, set()

    def finish(self) -> tuple[Tensor, list[bool]]:
        """Wait. Returns this rank's row of mean gradients, and which pieces have a gradient.

        A piece has a gradient if any rank added one.
        """
        assert self._sent is not None, "finish() without launch()"
        pending, filled = self._sent
        self._sent = None
        row = pending.wait()
        present = [piece.index in filled for piece in self.pieces]
        if not all(present):  # read the other ranks' flags only if they can change the result
            flags = row[self._own_size :][: len(present)].tolist()
            present = [mine or flag > 0 for mine, flag in zip(present, flags, strict=True)]
        return row[: self._own_size], present
