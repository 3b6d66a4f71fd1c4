"""What algorithms in shared memory stand on: slots, buffers, and barriers that compare calls."""

from __future__ import annotations

import ctypes
import mmap

import torch
import torch.distributed as dist

from minidist.collectives.shared.calls import Call, compare, pack
from minidist.collectives.shared.memory import Flags, map_together

LINE_BYTES = 64  # what travels between two cores at a time


class SharedSpace:
    """The shared memory of one group as one rank sees it.

    Every rank has two slots of `chunk_bytes`, used in turn, for tensors that stream through; and
    buffers for tensors that stay.

    Args:
        group: ranks of one machine.
        chunk_bytes: size of a slot, a multiple of 64.
        timeout_s: how long `meet` waits for a rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, chunk_bytes: int, timeout_s: float) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.chunk_bytes = chunk_bytes
        # The flags come first, then the slots.
        num_words = Flags.num_words(self.num_ranks)
        self._slots_at = round_up(8 * num_words, mmap.PAGESIZE)
        self._memory, pids = map_together(self._slots_at + 2 * self.num_ranks * chunk_bytes, group)
        words = memoryview(self._memory)[: 8 * num_words].cast("Q")
        self.flags = Flags(words, self.rank, pids, timeout_s)
        self.patient = False
        self.scratch = torch.empty(chunk_bytes // 2, dtype=torch.float32)
        self._turn = 0
        self._slots: dict[tuple[torch.dtype, int], tuple[list[torch.Tensor], ...]] = {}
        self._buffers: list[_Buffer] = []
        self.plans: dict[tuple, list[list[torch.Tensor]]] = {}
        self._call: Call | None = None
        self._num_calls = 0

    # ---------------------------------------------------------------- barriers

    def announce(
        self,
        kind: str,
        numel: int = 0,
        dtype: torch.dtype = torch.uint8,
        *,
        op: str = "sum",
        root: int = 0,
        place: int = 0,
    ) -> None:
        """Begin a collective: the next `meet` fails unless all ranks have announced the same."""
        self._num_calls += 1
        self._call = (pack(kind, numel=numel, dtype=dtype, op=op, root=root), place)
        self.flags.announce(self._call)

    def meet(self) -> None:
        """A barrier: what any rank wrote before, all can read after."""
        self.flags.arrive()
        self.flags.wait(self.patient)
        if self._call is not None:
            mine, self._call = self._call, None
            for other, theirs in self.flags.announced():
                compare(mine, self.rank, theirs, other, self._num_calls)

    def places(self, place: int) -> list[int]:
        """`place` of every rank, as announced; between the first `meet` and the last."""
        places = [place] * self.num_ranks
        for other, (_, theirs) in self.flags.announced():
            places[other] = theirs
        return places

    # ---------------------------------------------------------------- slots

    def slots(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The next slot of every rank, as 1-D tensors of `numel` elements (at least 1)."""
        self._turn ^= 1
        both = self._slots.get((dtype, numel))
        if both is None:
            if len(self._slots) >= 64:
                self._slots.clear()
            both = self._slots[dtype, numel] = tuple(
                [
                    torch.frombuffer(
                        self._memory,
                        dtype=dtype,
                        count=numel,
                        offset=self._slots_at + (2 * rank + turn) * self.chunk_bytes,
                    )
                    for rank in range(self.num_ranks)
                ]
                for turn in range(2)
            )
        return both[self._turn]

    # ---------------------------------------------------------------- buffers

    def add_buffer(self, num_bytes: int) -> int:
        """Make a buffer of `num_bytes` per rank (collective); returns its `place`."""
        self._buffers.append(_Buffer(num_bytes, self.rank, self.num_ranks, self.group))
        return len(self._buffers) << 40

    def place(self, tensor: torch.Tensor) -> int:
        """Where in this rank's part of a buffer a contiguous tensor begins; 0 if in none.

        The buffer's number, counted from 1, above 40 bits of offset in bytes: the same number on
        all ranks means the same place in each rank's part.
        """
        if self._buffers and tensor.is_contiguous():
            pointer = tensor.data_ptr()
            for number, buffer in enumerate(self._buffers, start=1):
                if buffer.begin <= pointer < buffer.end:
                    return number << 40 | pointer - buffer.begin
        return 0

    def views(self, place: int, start: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Elements start … start + numel of what begins at `place`, in every rank's part."""
        return [self.view(rank, place, start, numel, dtype) for rank in range(self.num_ranks)]

    def view(
        self, rank: int, place: int, start: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The same in the part of one rank."""
        buffer = self._buffers[(place >> 40) - 1]
        offset = rank * buffer.stride + (place & (1 << 40) - 1) + start * dtype.itemsize
        return torch.frombuffer(buffer.memory, dtype=dtype, count=numel, offset=offset)

    def forget(self) -> None:
        """Drop all views and buffers; memory goes when nothing refers to it."""
        self.plans.clear()
        self._slots.clear()
        self._buffers.clear()


class _Buffer:
    """One mapping with an equal part for every rank."""

    def __init__(
        self, num_bytes: int, rank: int, num_ranks: int, group: dist.ProcessGroup | None
    ) -> None:
        self.stride = round_up(num_bytes, mmap.PAGESIZE)
        self.memory, _ = map_together(num_ranks * self.stride, group)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.begin = address + rank * self.stride
        self.end = self.begin + num_bytes


def round_up(number: int, multiple: int) -> int:
    """
    >>> round_up(1, 64), round_up(64, 64), round_up(0, 64)
    (64, 64, 0)
    """
    return -(-number // multiple) * multiple
