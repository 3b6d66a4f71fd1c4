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

`algorithms.py` has these and the other collectives, `memory.py` the memory and the
barrier, `work.py` the asynchronous form, `ddp_hook.py` the hook for DistributedDataParallel.

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

from minidist.collectives import log
from minidist.collectives.reduction import Reduction
from minidist.collectives.schedule import chunk_offsets
from minidist.collectives.shared import algorithms
from minidist.collectives.shared.calls import REDUCIBLE, check_dtype
from minidist.collectives.shared.space import LINE_BYTES, SharedSpace, round_up
from minidist.collectives.shared.work import SharedWork, Worker
from minidist.errors import MinidistError

# Large enough that a barrier per chunk costs little, small enough to stay in a level-3 cache.
CHUNK_BYTES = 1 << 20


class SharedMemoryGroup:
    """The ranks of a process group on one machine, and memory that they share.

    Creating it is collective, and so is every method except `close`: all ranks call the same in the
    same order, with tensors of the same size and dtype, or each gets a `MismatchError`. After an
    error that is no ValueError the group is of no more use. All results are the same bits on every
    rank. Sums, means and products of 16-bit floats are taken in fp32 and rounded once.

    Tensors: float16, bfloat16, float32, float64 or integers, any shape, any size including 0. On
    another device than the CPU, or not contiguous, they are copied first. `broadcast` and
    `all_gather` reduce nothing and take any dtype.

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
        """Replace `tensor` on every rank by a reduction of all ranks', e.g. their sum.

        Args:
            tensor: any shape, the same numel and dtype on every rank.
            op: "sum", "avg", "max", "min", "prod", for integers also "band", "bor", "bxor"; or such
                a `dist.ReduceOp`. A mean of integers is rounded towards zero.
            async_op: return a `SharedWork` at once; leave `tensor` alone until it is done.

        Raises:
            ValueError: an unsupported `op` or dtype.
            MismatchError: another rank called something else.
            DeadlineError: a rank ended, gave up, or did not come in time.
        """
        check_dtype("all_reduce", tensor)
        name = Reduction.of(op, tensor.dtype).name

        def run() -> None:
            flat = _flat(tensor)
            algorithms.all_reduce(self._space, flat, name)
            _put_back(flat, tensor)

        return self._start("all_reduce", run, tensor, async_op, message=tensor, op=name)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> SharedWork | None:
        """Reduce `input` over all ranks; rank r gets the r-th of `num_ranks` parts.

        Args:
            output: this rank's part; may be that part of `input` itself.
            input: any numel, same dtype; unchanged. Cut as `torch.tensor_split` does, the first
                parts one element longer if it does not divide. No copies if it does, and if it lies
                in a `buffer`.
            op, async_op: see `all_reduce`, and for the errors.
        """
        check_dtype("reduce_scatter", input)
        name = Reduction.of(op, input.dtype).name
        bounds = self._check_sizes(
            "reduce_scatter", part=("output", output), whole=("input", input)
        )

        def run() -> None:
            part, whole = _flat(output), _flat(input)
            rows = self._rows(whole, bounds)
            row = part if _is_view(rows, whole) else rows.new_empty(rows.size(1))
            algorithms.reduce_scatter(self._space, row, rows, name, whole.numel())
            if row is not part:
                part.copy_(row[: part.numel()])
            _put_back(part, output)

        return self._start("reduce_scatter", run, output, async_op, message=input, op=name)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False
    ) -> SharedWork | None:
        """Concatenate every rank's `input`, by rank, into `output`.

        Args:
            output: any numel, of parts as in `reduce_scatter`.
            input: this rank's part, same dtype; may be that part of `output` itself. If the parts
                are equal, one copy less if it lies in a `buffer`, on each rank wherever it likes.
            async_op: see `all_reduce`, and for the errors.
        """
        bounds = self._check_sizes("all_gather", part=("input", input), whole=("output", output))

        def run() -> None:
            whole, part = _flat(output), _flat(input)
            if part.dtype not in REDUCIBLE:  # copied as bytes, in the same parts
                size = part.element_size()
                whole, part = whole.view(torch.uint8), part.view(torch.uint8)
                cuts = [size * cut for cut in bounds]
            else:
                cuts = bounds
            rows, row = self._rows(whole, cuts), part
            if not _is_view(rows, whole):
                row = rows.new_zeros(rows.size(1))
                row[: part.numel()] = part
            algorithms.all_gather(self._space, rows, row, whole.numel())
            if not _is_view(rows, whole):
                for at, start, end in zip(rows, cuts[:-1], cuts[1:], strict=True):
                    whole[start:end] = at[: end - start]
            _put_back(whole.view(output.dtype), output)

        return self._start("all_gather", run, output, async_op, message=input)

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
        root = self._root(src, group_src)

        def run() -> None:
            flat = _flat(tensor)
            reducible = tensor.dtype in REDUCIBLE
            algorithms.broadcast(self._space, flat if reducible else flat.view(torch.uint8), root)
            _put_back(flat, tensor)

        return self._start("broadcast", run, tensor, async_op, message=tensor)

    def barrier(self) -> None:
        """Return when all ranks have called it."""

        def run() -> None:
            self._space.announce("barrier")
            self._space.meet()

        self._start("barrier", run, None, False)

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

        self._start("", agree, None, False)
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
        self,
        kind: str,
        run: Callable[[], None],
        result: torch.Tensor | None,
        async_op: bool,
        *,
        message: torch.Tensor | None = None,
        op: str = "",
    ) -> SharedWork | None:
        if self._broken is not None:
            raise MinidistError(
                f"this SharedMemoryGroup cannot be used: {self._broken}", rank=self.rank
            )
        if kind:
            tensors = [] if message is None else [message]
            group = self.group or dist.group.WORLD
            run = log.timed(run, f"shared_{kind}", op, group, tensors, async_op)
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
        self, what: str, part: tuple[str, torch.Tensor], whole: tuple[str, torch.Tensor]
    ) -> list[int]:
        """Where the ranks' parts of the whole begin, and where the last one ends."""
        (part_name, mine), (whole_name, all_) = part, whole
        bounds = chunk_offsets(all_.numel(), self.num_ranks)
        expected = bounds[self.rank + 1] - bounds[self.rank]
        if mine.numel() != expected or all_.dtype != mine.dtype:
            raise ValueError(
                f"{what}: {part_name} must hold the part of rank {self.rank} of {self.num_ranks}, "
                f"{expected} of the {all_.numel()} elements of {whole_name}, in one dtype; got "
                f"{tuple(mine.shape)} {mine.dtype} and {tuple(all_.shape)} {all_.dtype}"
            )
        return bounds

    def _rows(self, whole_N: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """The parts as rows of one length: a view if they are equal, else a padded copy."""
        if bounds[1] * self.num_ranks == whole_N.numel():
            return whole_N.view(self.num_ranks, -1)
        rows = whole_N.new_zeros(self.num_ranks, bounds[1])  # the first part is the longest
        for row, start, end in zip(rows, bounds[:-1], bounds[1:], strict=True):
            row[: end - start] = whole_N[start:end]
        return rows


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as 1-D on the CPU: a view of it if that is possible, else a copy."""
    return tensor.detach().cpu().contiguous().view(-1)


def _is_view(rows: torch.Tensor, whole: torch.Tensor) -> bool:
    return rows.numel() == whole.numel()  # a copy is padded, so it is longer


def _put_back(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `flat` into the tensor it came from, unless it is a view of it."""
    if flat.device != tensor.device or flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
