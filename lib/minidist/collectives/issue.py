"""What every collective does before and after its steps: validate, stage, check, issue.

A public collective builds a `CollectiveCall`, which validates everything that needs no
communication. It then defines a function that does the work with the transport, and passes this
function to `CollectiveCall.issue`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from minidist.collectives import log
from minidist.collectives.agreement import agree, agree_on_sizes
from minidist.collectives.async_work import Channel, CollectiveWork, may_use_thread
from minidist.collectives.reduction import Reduction
from minidist.collectives.schedule import Schedule, chunk_offsets
from minidist.collectives.transport import (
    Chunks,
    Transport,
    even_chunks,
    list_chunks,
    run_steps,
)


class CollectiveCall:
    """One call of a collective on this rank.

    Args:
        kind: name of the function, for errors and the log.
        tensors: all tensors that the collective reads or writes.
        group: None means the default group.

    Raises:
        ValueError: no such group, this rank is not in it, the tensors differ in dtype or device,
            or are not dense.
    """

    def __init__(self, kind: str, tensors: Sequence[torch.Tensor], group: Any) -> None:
        self.kind = kind
        self.tensors = list(tensors)
        self.group = _resolve(kind, group)
        self.transport = Transport(self.group)
        self.rank, self.size = self.transport.rank, self.transport.size
        self.require(bool(self.tensors), "no tensors were given")
        first = self.tensors[0]
        for tensor in self.tensors:
            self.require(
                tensor.layout == torch.strided, f"tensors must be dense, got {tensor.layout}"
            )
            self.require(
                (tensor.dtype, tensor.device) == (first.dtype, first.device),
                f"tensors must have one dtype and device, got {first.dtype} on {first.device} "
                f"and {tensor.dtype} on {tensor.device}",
            )
        self.dtype, self.device = first.dtype, first.device
        backend = self.transport.backend(self.device)
        # Gloo's send and recv work only with host memory.
        self.wire_device = self.device if backend == "nccl" else torch.device("cpu")

    # ---------------------------------------------------------------- validate

    def require(self, holds: bool, message: str) -> None:
        """Raise ValueError with this message unless the condition holds."""
        if not holds:
            raise ValueError(f"{self.kind}: {message} (rank {self.rank} of {self.size})")

    def reduction(self, op: Any) -> Reduction:
        try:
            return Reduction.of(op, self.dtype)
        except ValueError as error:
            where = f"(rank {self.rank} of {self.size})"
            raise ValueError(f"{self.kind}: {error} {where}") from None

    def root(self, name: str, rank: int | None, group_rank: int | None) -> int:
        """The root's rank in the group. The caller gives a global rank or a rank in the group."""
        self.require(rank is None or group_rank is None, f"give {name}= or group_{name}=, not both")
        if group_rank is None:
            if rank is None:
                rank = 0
            ranks = dist.get_process_group_ranks(self.group)
            self.require(rank in ranks, f"root {name}={rank} is not in the group of ranks {ranks}")
            return ranks.index(rank)
        self.require(
            0 <= group_rank < self.size,
            f"root group_{name}={group_rank} is not in a group of {self.size} ranks",
        )
        return group_rank

    def require_parts(self, name: str, parts: Sequence[torch.Tensor]) -> None:
        self.require(
            len(parts) == self.size,
            f"{name} must have one tensor per rank, {self.size} of them, got {len(parts)}",
        )

    def require_numel(self, name: str, tensor: torch.Tensor, numel: int) -> None:
        self.require(
            tensor.numel() == numel,
            f"{name} must have {numel} elements, got {tensor.numel()}",
        )

    def part_sizes(self, name: str, whole: torch.Tensor | Sequence[torch.Tensor]) -> list[int]:
        """Number of elements of each rank's part of a tensor (cut evenly) or of a list."""
        if not isinstance(whole, torch.Tensor):
            self.require_parts(name, whole)
            return [part.numel() for part in whole]
        offsets = chunk_offsets(whole.numel(), self.size)
        return [end - begin for begin, end in pairwise(offsets)]

    # ------------------------------------------------------------------- stage

    def stage(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None, *, copy: bool = False
    ) -> torch.Tensor:
        """The tensor's values, 1-D and contiguous, in memory that the transport can send.

        This is the tensor's own memory if the transport can send that and `copy` is False.
        """
        # .data: as in torch, autograd does not count a collective as an in-place change.
        plain = tensor.data.resolve_conj().resolve_neg()
        flat = plain.reshape(-1).to(self.wire_device, dtype or tensor.dtype)
        if not flat.is_contiguous():  # reshape leaves an expanded one-dimensional tensor expanded
            flat = flat.contiguous()
        return flat.clone() if copy and flat.data_ptr() == plain.data_ptr() else flat

    def unstage(self, flat: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write the staged values back, unless they already are in the tensor's own memory."""
        if flat.data_ptr() != tensor.data_ptr() or flat.dtype != tensor.dtype:
            tensor.data.copy_(flat.view(tensor.shape))

    def chunks(self, whole: torch.Tensor | Sequence[torch.Tensor], *, copy: bool = False) -> Chunks:
        """The staged parts of a tensor, or of a list of tensors, as the chunks of a schedule."""
        if isinstance(whole, torch.Tensor):
            return even_chunks(self.stage(whole, copy=copy), self.size)
        return list_chunks([self.stage(part, copy=copy) for part in whole])

    # ------------------------------------------------------------------- issue

    def describe(self, **about: Any) -> str:
        """A text of what this rank is about to do; ranks that do the same have the same text."""
        known = {"call": self.kind, "dtype": str(self.dtype)} | about
        return json.dumps({key: value for key, value in known.items() if value not in (None, "")})

    def issue(
        self,
        body: Callable[[Transport], int],
        outputs: Sequence[torch.Tensor],
        async_op: bool,
        *,
        check: bool = False,
        op: str = "",
        root: int | None = None,
        same: Any = None,
        how: Callable[[], str] | None = None,
        message: Sequence[torch.Tensor] = (),
        sizes: tuple[list[int], list[int]] | None = None,
        after: CollectiveWork | None = None,
    ) -> CollectiveWork:
        """Run the operation, or start it if `async_op`.

        Args:
            body: does the work, and returns the number of bytes sent.
            outputs: the future's value.
            check: first compare kind, dtype, op, root, `same` and `how()` over all ranks.
            message: the tensors that this rank contributes, for the log.
            sizes: how many elements this rank sends to each rank, and how many it expects from
                each rank. Only for `check` of a collective whose ranks may send different amounts.
            after: an operation of a different group that must be complete first.

        Returns:
            The operation's handle. Unless `async_op`, the operation is over.
        """

        channel = Channel.of(self.group)

        def checked(transport: Transport) -> int:
            if self.wire_device.type != "cpu":
                channel.connect(self.group, self.wire_device)
            if not check:
                return body(transport)
            about = self.describe(op=op, root=root, shape=same, how=how() if how else None)
            num_bytes = agree(transport, self.wire_device, about)
            if sizes is not None:
                num_bytes += agree_on_sizes(transport, self.wire_device, *sizes)
            return num_bytes + body(transport)

        work = CollectiveWork(self.kind, self.transport, checked, self.tensors, outputs, after)
        log.watch(work, self.kind, op, self.group, list(message), self.dtype)
        threaded = async_op and may_use_thread(self.transport, self.device)
        channel.issue(work, threaded=threaded)
        if not async_op:
            work.wait()
        return work


def all_reduce_by(
    kind: str,
    steps: Callable[[int], Schedule],
    tensor: torch.Tensor,
    op: Any,
    group: Any,
    async_op: bool,
    *,
    check: bool = False,
    accumulate_dtype: torch.dtype | None = None,
) -> CollectiveWork:
    """All-reduce in place, by any schedule that leaves the total of every chunk on every rank.

    Args:
        steps: world size -> schedule.
        accumulate_dtype: dtype of the partial sums, also on the wire; the total is rounded to the
            tensor's dtype once. None means the tensor's dtype.

    Raises: as `ring_all_reduce`.
    """
    # Validate.
    call = CollectiveCall(kind, [tensor], group)
    require_writable(call, tensor)
    reduction = call.reduction(op)
    # Derive.
    schedule = steps(call.size)

    def body(transport: Transport) -> int:
        flat = call.stage(tensor, accumulate_dtype)
        num_bytes = run_steps(
            schedule, even_chunks(flat, schedule.num_chunks), transport, reduction
        )
        reduction.finish(flat, transport.size)
        call.unstage(flat, tensor)
        return num_bytes

    def how() -> str:
        digest = hashlib.sha256(repr(schedule).encode()).hexdigest()[:8]
        wide = "" if accumulate_dtype is None else f", sums in {accumulate_dtype}"
        return f"{schedule.num_chunks} chunks, schedule {digest}{wide}"

    # Issue.
    about = {"op": reduction.name, "same": list(tensor.shape), "message": [tensor], "how": how}
    return call.issue(body, [tensor], async_op, check=check, **about)


def reduce_scatter_by(
    kind: str,
    run: Callable[[CollectiveCall, list[int], Reduction, Transport], int],
    output: torch.Tensor,
    input: torch.Tensor | Sequence[torch.Tensor],
    op: Any,
    group: Any,
    async_op: bool,
    check: bool,
) -> CollectiveWork:
    """Reduce-scatter, by any way that leaves the total of part r in the output of rank r.

    Args:
        run: gets the sizes of the parts, does the work, and returns the number of bytes sent.

    Raises: as `ring_reduce_scatter`.
    """
    # Validate.
    parts = [input] if isinstance(input, torch.Tensor) else list(input)
    call = CollectiveCall(kind, [output, *parts], group)
    require_writable(call, output)
    reduction = call.reduction(op)
    sizes = call.part_sizes("input", input)
    call.require_numel("output", output, sizes[call.rank])
    # Issue.
    about = {"check": check, "op": reduction.name, "same": sizes, "message": parts}
    return call.issue(partial(run, call, sizes, reduction), [output], async_op, **about)


def gather_by(
    kind: str,
    steps: Callable[[int], Schedule],
    output: torch.Tensor | Sequence[torch.Tensor],
    input: torch.Tensor,
    group: Any,
    async_op: bool,
    check: bool,
) -> CollectiveWork:
    """All-gather, by any schedule that copies chunk r from rank r to all ranks.

    Raises: as `ring_all_gather`.
    """
    # Validate.
    parts = [output] if isinstance(output, torch.Tensor) else list(output)
    call = CollectiveCall(kind, [input, *parts], group)
    sizes = call.part_sizes("output", output)
    call.require_numel("input", input, sizes[call.rank])
    for part in parts:
        require_writable(call, part)
    # Derive.
    schedule = steps(call.size)

    def body(transport: Transport) -> int:
        flats = [call.stage(part) for part in parts]
        whole = isinstance(output, torch.Tensor)
        chunks = even_chunks(flats[0], call.size) if whole else list_chunks(flats)
        chunks(transport.rank, 1).copy_(call.stage(input))
        num_bytes = run_steps(schedule, chunks, transport)
        for flat, part in zip(flats, parts, strict=True):
            call.unstage(flat, part)
        return num_bytes

    # Issue.
    return call.issue(body, parts, async_op, check=check, same=sizes, message=[input])


def require_writable(call: CollectiveCall, tensor: torch.Tensor) -> None:
    repeated = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    call.require(not repeated, "an expanded tensor cannot be written to: give its .contiguous()")


def _resolve(kind: str, group: Any) -> dist.ProcessGroup:
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError(f"{kind}: call init_process_group first, or give a group")
    if not isinstance(group, dist.ProcessGroup):
        rank = dist.get_rank() if dist.is_initialized() else None
        raise ValueError(f"{kind}: rank {rank} is not in the group, or it is none: {group!r}")
    return group
