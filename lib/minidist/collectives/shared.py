"""Collectives through memory that the ranks of one machine share.

A message between two processes of one machine is copied into the kernel and out again. Ranks that
map the same memory read each other's numbers where they lie. An all-reduce has three forms:

**in place**, for a tensor that lies in a `buffer` of the group. All arrive; each rank reduces its
slice of all buffers and writes it into all buffers; all arrive. Every rank reads N bytes and writes
N bytes in all, as a memcpy of N bytes does::

    rank 0's buffer  [ slice 0 | slice 1 ]       rank 0 adds up both slices 0 and writes both,
    rank 1's buffer  [ slice 0 | slice 1 ]       rank 1 adds up both slices 1 and writes both

**direct**, for other tensors of two ranks, and for small ones. The tensor streams through slots in
shared memory, a chunk at a time: copy the chunk into the own slot; all arrive; add up all slots.

**sliced**, for large ones of more ranks: copy the chunk into the own slot; all arrive; reduce the
own slice of all slots; all arrive; copy the slices out. In place and sliced are the reduce-scatter
and all-gather of Rabenseifner ("Optimization of Collective Reduction Operations", ICCS 2004,
doi:10.1007/978-3-540-24685-5_1), with loads and stores for messages.

`shared_algorithms.py` has these and the other collectives, `shared_memory.py` the memory and the
barrier, `shared_work.py` the asynchronous form and the hook for DistributedDataParallel.

Example::

    shared = SharedMemoryGroup()                     # collective; ranks of one machine
    x = torch.full((5,), float(dist.get_rank()))
    shared.all_reduce(x)                             # on two ranks: tensor([1., 1., 1., 1., 1.])

    gradients = shared.buffer(1 << 20)               # zeros, fp32, in shared memory
    shared.all_reduce(gradients, dist.ReduceOp.AVG)  # without copies

    ddp.register_comm_hook(shared, shared_memory_hook)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives import shared_algorithms as algorithms
from minidist.collectives.shared_calls import check_dtype, op_name
from minidist.collectives.shared_memory import SharedMemoryError
from minidist.collectives.shared_space import LINE_BYTES, SharedSpace, round_up
from minidist.collectives.shared_work import SharedWork, Worker, shared_memory_hook
from minidist.errors import MinidistError

__all__ = ["SharedMemoryError", "SharedMemoryGroup", "SharedWork", "shared_memory_hook"]

# Large enough that a barrier per chunk costs little, small enough to stay in a level-3 cache.
CHUNK_BYTES = 1 << 20


class SharedMemoryGroup:
    """The ranks of a process group on one machine, and memory that they share.

    Creating it is collective, and so is every method except `close`: all ranks call the same in the
    same order, with tensors of the same size and dtype, or each gets a `MismatchError`. After an
    error that is no ValueError the group is of no more use. All results are the same bits on every
    rank. Sums and means of 16-bit floats are taken in fp32 and rounded once.

    Tensors: float16, bfloat16, float32, float64 or integers, any shape, any size including 0. On
    another device than the CPU, or not contiguous, they are copied first.

    Args:
        group: its ranks must run on one host, in one container; None means the default group.
        chunk_bytes: size of a slot; each rank has two. At least 64 per rank.
        timeout_s: how long to wait for a rank before the `DeadlineError` that names it. A rank
            whose process ends is noticed within milliseconds.

    Raises:
        SharedMemoryError: on every rank, when one of them cannot map the memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        timeout_s: float = 300.0,
    ) -> None:
        num_ranks = dist.get_world_size(group)
        if chunk_bytes < LINE_BYTES * num_ranks:
            raise ValueError(
                f"chunk_bytes must be at least {LINE_BYTES} for each of {num_ranks} ranks, "
                f"got {chunk_bytes}"
            )
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._space = SharedSpace(group, round_up(chunk_bytes, LINE_BYTES), timeout_s)
        self._worker = Worker()
        self._broken: str | None = None
        self.group = group
        self.rank, self.num_ranks = self._space.rank, num_ranks

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> SharedWork | None:
        """Replace `tensor` on every rank by the sum, mean, maximum or minimum of all ranks'.

        Args:
            tensor: any shape, the same numel and dtype on every rank.
            op: "sum", "avg", "max", "min", or such a `dist.ReduceOp`. A mean of integers is rounded
                towards zero.
            async_op: return a `SharedWork` at once; leave `tensor` alone until it is done.

        Raises:
            ValueError: an unsupported `op` or dtype.
            MismatchError: another rank called something else.
            DeadlineError: a rank ended, gave up, or did not come in time.
        """
        name = op_name(op)
        check_dtype("all_reduce", tensor)

        def run() -> None:
            flat = _flat(tensor)
            algorithms.all_reduce(self._space, flat, name)
            _put_back(flat, tensor)

        return self._start(run, tensor, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> SharedWork | None:
        """Reduce `input` over all ranks; rank r gets the r-th of `num_ranks` equal parts.

        Args:
            output: numel M; may be this rank's own part of `input`.
            input: numel num_ranks × M, same dtype; unchanged. No copies if it lies in a `buffer`.
            op, async_op: see `all_reduce`, and for the errors.
        """
        name = op_name(op)
        check_dtype("reduce_scatter", input)
        self._check_sizes("reduce_scatter", small=("output", output), large=("input", input))

        def run() -> None:
            part, whole = _flat(output), _flat(input).view(self.num_ranks, -1)
            algorithms.reduce_scatter(self._space, part, whole, name)
            _put_back(part, output)

        return self._start(run, output, async_op)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> SharedWork | None:
        """Concatenate every rank's `input`, by rank, into `output`.

        Args:
            output: numel num_ranks × M.
            input: numel M, same dtype; may be this rank's own part of `output`. One copy less if
                it lies in a `buffer`, on each rank wherever it likes.
            async_op: see `all_reduce`, and for the errors.
        """
        check_dtype("all_gather", input)
        self._check_sizes("all_gather", small=("input", input), large=("output", output))

        def run() -> None:
            whole = _flat(output)
            algorithms.all_gather(self._space, whole.view(self.num_ranks, -1), _flat(input))
            _put_back(whole, output)

        return self._start(run, output, async_op)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        async_op: bool = False,
        *,
        group_src: int | None = None,
    ) -> SharedWork | None:
        """Replace `tensor` on every rank by that of one rank.

        Args:
            tensor: any shape, the same numel and dtype on every rank.
            src, group_src: that rank, global or in the group; without both, the group's first.
            async_op: see `all_reduce`, and for the errors.
        """
        check_dtype("broadcast", tensor)
        root = self._root(src, group_src)

        def run() -> None:
            flat = _flat(tensor)
            algorithms.broadcast(self._space, flat, root)
            _put_back(flat, tensor)

        return self._start(run, tensor, async_op)

    def barrier(self) -> None:
        """Return when all ranks have called it."""

        def run() -> None:
            self._space.announce("barrier")
            self._space.meet()

        self._start(run, None, False)

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A 1-D tensor of zeros in shared memory, one per rank; collectives need not copy it.

        Contiguous parts of it will do as well, if they are the same parts on every rank. It is used
        like any other tensor, and others touch it only inside a collective. The memory is freed
        when the group is closed (or gone) and the tensor is gone, too.

        Raises:
            SharedMemoryError: on every rank, when one of them cannot map that much.
        """
        if numel < 0:
            raise ValueError(f"buffer: numel must be at least 0, got {numel}")
        empty = torch.empty(0, dtype=dtype)
        check_dtype("buffer", empty)

        def agree() -> None:
            self._space.announce("buffer", numel, dtype)
            self._space.meet()

        self._start(agree, None, False)
        if numel == 0:
            return empty
        place = self._space.add_buffer(numel * dtype.itemsize)
        return self._space.views(place, 0, numel, dtype)[self.rank]

    def close(self) -> None:
        """End the worker thread and let go of the memory. Not collective; buffers stay readable."""
        self._worker.stop()
        self._broken = self._broken or "it was closed"
        self._space.forget()

    def _start(
        self, run: Callable[[], None], result: torch.Tensor | None, async_op: bool
    ) -> SharedWork | None:
        if self._broken is not None:
            raise MinidistError(
                f"this SharedMemoryGroup cannot be used: {self._broken}", rank=self.rank
            )
        if async_op:
            return self._worker.submit(lambda: self._guarded(run, patient=True), result)
        if self._worker.busy:
            # Collectives keep the order in which they were called.
            self._worker.submit(lambda: self._guarded(run, patient=True), result).wait()
        else:
            self._guarded(run, patient=False)
        return None

    def _guarded(self, run: Callable[[], None], patient: bool) -> None:
        self._space.patient = patient
        try:
            run()
        except BaseException as error:
            # The ranks are no longer in step: the others must not wait for this one.
            self._broken = f"an earlier call failed ({type(error).__name__}: {error})"
            self._space.flags.give_up()
            raise

    def _root(self, src: int | None, group_src: int | None) -> int:
        if src is not None and group_src is not None:
            raise ValueError(f"broadcast: give src or group_src, got both ({src}, {group_src})")
        if src is not None:
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            if src not in ranks:
                raise ValueError(f"broadcast: src must be one of the ranks {ranks}, got {src}")
            return ranks.index(src)
        root = group_src or 0
        if not 0 <= root < self.num_ranks:
            raise ValueError(f"broadcast: group_src must be 0 to {self.num_ranks - 1}, got {root}")
        return root

    def _check_sizes(
        self, what: str, small: tuple[str, torch.Tensor], large: tuple[str, torch.Tensor]
    ) -> None:
        (part_name, part), (whole_name, whole) = small, large
        if whole.numel() != self.num_ranks * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{what}: {whole_name} must hold {self.num_ranks} (ranks) times the elements of "
                f"{part_name} in one dtype, got {tuple(whole.shape)} {whole.dtype} and "
                f"{tuple(part.shape)} {part.dtype}"
            )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as 1-D on the CPU: a view of it if that is possible, else a copy."""
    return tensor.detach().cpu().contiguous().view(-1)


def _put_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `flat` into the tensor it came from, unless it is a view of it."""
    if flat.device != tensor.device or flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
