"""Runs a schedule on real ranks: the only place where the collectives send and receive.

For every step that this rank takes part in:

1. Post: start all receives of the step, then all sends; none of them blocks.
2. Arrive: put each message in its place, or reduce it into the chunk that is there.
3. Leave: wait for this rank's sends, because the next step may overwrite their memory.

No deadlock is possible: a rank waits only for messages of its current step, a peer that has not
sent yet is in an earlier step, and no rank is in an earlier step than the slowest rank, which
therefore can always go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from minidist.collectives.reduction import Reduction
from minidist.collectives.schedule import Schedule, Transfer, chunk_offsets
from minidist.device import as_bytes

# (chunk, num_chunks) -> the memory of these chunks: one-dimensional, contiguous.
Chunks = Callable[[int, int], torch.Tensor]
# Our messages carry this tag, so that on gloo they do not mix with the user's own send and recv.
TAG = 0x6D64


def even_chunks(flat_E: torch.Tensor, num_chunks: int) -> Chunks:
    """A one-dimensional tensor, cut at `schedule.chunk_offsets`."""
    offsets = chunk_offsets(flat_E.numel(), num_chunks)
    return lambda chunk, count: flat_E[offsets[chunk] : offsets[chunk + count]]


def list_chunks(parts: Sequence[torch.Tensor]) -> Chunks:
    """One tensor of any size per chunk; only for schedules whose transfers have one chunk each."""

    def part(chunk: int, count: int) -> torch.Tensor:
        assert count == 1
        return parts[chunk]

    return part


class Transport:
    """Messages between the ranks of one process group.

    Args:
        group: a process group with send and recv. `rank` is this rank's rank in the group, and
            `size` is the number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def backend(self, device: torch.device) -> str:
        """The name of the backend that carries tensors of this device.

        Raises:
            ValueError: the group has no such backend.
        """
        if type(self.group) is not dist.ProcessGroup:  # a backend written in Python
            return self.group.name()
        try:
            return self.group._get_backend(device).name()
        except RuntimeError as error:
            raise ValueError(
                f"group {self.group.group_name!r} carries no {device.type} tensors"
            ) from error

    def exchange(
        self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        """Start all sends and receives. Each is a pair of a uint8 tensor and a rank of the group.

        Returns:
            The handles to wait for: those of the sends, and one per receive.
        """
        tensor = (receives or sends)[0][0]
        if self.backend(tensor.device) == "nccl":
            # NCCL launches the whole batch as one kernel. Without a batch, two ranks that both send
            # first would wait for each other.
            ops = [
                dist.P2POp(dist.irecv, t, group=self.group, group_peer=p) for t, p in receives
            ] + [dist.P2POp(dist.isend, t, group=self.group, group_peer=p) for t, p in sends]
            works = dist.batch_isend_irecv(ops)
            for work in works:
                work.wait()  # makes the current stream wait, not this process
            return [], works[:1] * len(receives)
        # The calls that isend and irecv make. Those two functions themselves accept only a group
        # that torch.distributed has registered.
        arriving = [self.group.recv([t], peer, TAG) for t, peer in receives]
        leaving = [self.group.send([t], peer, TAG) for t, peer in sends]
        return leaving, arriving


def run_steps(
    schedule: Schedule, chunks: Chunks, transport: Transport, reduction: Reduction | None = None
) -> int:
    """Do this rank's part of every step, in place.

    Args:
        schedule: a schedule for the transport's number of ranks.
        chunks: the memory of this rank's chunks. A chunk must have the same number of bytes on
            every rank that sends or receives it. Empty chunks are not sent.
        reduction: needed if the schedule reduces.

    Returns:
        Number of bytes that this rank has sent.
    """
    if schedule.world_size != transport.size:
        raise ValueError(
            f"{schedule.name}: the schedule is for {schedule.world_size} ranks, "
            f"the group has {transport.size}"
        )
    num_bytes_sent = 0
    scratch: dict[int, torch.Tensor] = {}
    for outgoing, incoming in schedule.by_rank[transport.rank]:
        # 1. Post.
        sends = [(as_bytes(chunks(t.chunk, t.num_chunks)), t.dst) for t in outgoing]
        sends = [(data, peer) for data, peer in sends if data.numel()]
        arrivals: list[tuple[Transfer, torch.Tensor, torch.Tensor]] = []
        for t in incoming:
            place = chunks(t.chunk, t.num_chunks)
            if place.numel():
                slot = len(arrivals)
                buffer = place if t.action == "copy" else _buffer(scratch, slot, place)
                arrivals.append((t, place, buffer))
        if not sends and not arrivals:
            continue
        leaving, arriving = transport.exchange(
            sends, [(as_bytes(buffer), t.src) for t, _, buffer in arrivals]
        )
        # 2. Arrive.
        to_reduce: dict[tuple[int, int], tuple[torch.Tensor, list[Callable[[], torch.Tensor]]]] = {}
        for (t, place, buffer), work in zip(arrivals, arriving, strict=True):
            if t.action == "copy":
                work.wait()
            else:
                _, waiting = to_reduce.setdefault((t.chunk, t.num_chunks), (place, []))
                waiting.append(lambda work=work, buffer=buffer: (work.wait(), buffer)[1])
        for place, waiting in to_reduce.values():
            assert reduction is not None, f"{schedule.name} reduces, and no reduction was given"
            reduction.combine(place, waiting)
        # 3. Leave.
        for work in leaving:
            work.wait()
        num_bytes_sent += sum(data.numel() for data, _ in sends)
    return num_bytes_sent


def _buffer(scratch: dict[int, torch.Tensor], slot: int, like: torch.Tensor) -> torch.Tensor:
    """A receive buffer, kept for later steps: fresh memory pages cost more than the message."""
    have = scratch.get(slot)
    if have is None or have.numel() < like.numel():
        have = scratch[slot] = torch.empty_like(like)
    return have[: like.numel()]
