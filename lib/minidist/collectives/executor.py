"""Runs a schedule on real ranks: the one place where the collectives send and receive.

For every step that this rank takes part in:

1. Post: all receives of the step, then all sends; none of them blocks.
2. Arrive: as a message comes, put it in its place or reduce it into what is there.
3. Leave: wait for the own sends, whose memory the next step may overwrite.

No deadlock is possible: a rank waits only for messages of the step it is in, a peer that has not
sent yet is in an earlier step, and nobody is in an earlier step than the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from minidist.collectives.reduction import Reduction
from minidist.collectives.schedule import Schedule, Transfer, chunk_offsets

# (chunk, num_chunks) -> the memory of these chunks: one-dimensional, contiguous.
Chunks = Callable[[int, int], torch.Tensor]
# Our messages carry this tag, so that on gloo they do not meet the user's own send and recv.
TAG = 0x6D64


def even_chunks(flat_E: torch.Tensor, num_chunks: int) -> Chunks:
    """A tensor of one dimension, cut as `schedule.chunk_offsets` says."""
    offsets = chunk_offsets(flat_E.numel(), num_chunks)
    return lambda chunk, count: flat_E[offsets[chunk] : offsets[chunk + count]]


def list_chunks(parts: Sequence[torch.Tensor]) -> Chunks:
    """One tensor per chunk, of any sizes; for schedules that send chunks one by one."""

    def part(chunk: int, count: int) -> torch.Tensor:
        assert count == 1
        return parts[chunk]

    return part


class Transport:
    """Messages between the ranks of one process group.

    Args:
        group: a process group with send and recv. `rank` and `size` are those in the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def backend(self, device: torch.device) -> str:
        """The name of the backend that carries tensors of this device.

        Raises:
            ValueError: the group has none.
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
        """Start all of them: pairs of a uint8 tensor and a rank of the group.

        Returns:
            What to wait for: handles of the sends, and one per receive.
        """
        tensor = (receives or sends)[0][0]
        if self.backend(tensor.device) == "nccl":
            # NCCL launches the whole batch as one kernel: in any other way, two ranks that both
            # send first would wait for each other.
            ops = [
                dist.P2POp(dist.irecv, t, group=self.group, group_peer=p) for t, p in receives
            ] + [dist.P2POp(dist.isend, t, group=self.group, group_peer=p) for t, p in sends]
            works = dist.batch_isend_irecv(ops)
            for work in works:
                work.wait()  # makes this stream wait, not this process
            return [], works[:1] * len(receives)
        # What isend and irecv call. They want a group that torch.distributed has registered.
        arriving = [self.group.recv([t], peer, TAG) for t, peer in receives]
        leaving = [self.group.send([t], peer, TAG) for t, peer in sends]
        return leaving, arriving


def run_steps(
    schedule: Schedule, chunks: Chunks, transport: Transport, reduction: Reduction | None = None
) -> int:
    """Take this rank's part in every step, in place.

    Args:
        schedule: for as many ranks as the transport has.
        chunks: where this rank's chunks are. A chunk must have as many bytes on every rank that
            sends or receives it. Empty chunks are not sent.
        reduction: needed where the schedule reduces.

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
        sends = [(_bytes(chunks(t.chunk, t.num_chunks)), t.dst) for t in outgoing]
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
            sends, [(_bytes(buffer), t.src) for t, _, buffer in arrivals]
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


def _bytes(flat_E: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: every backend carries these, whatever dtypes it knows."""
    return flat_E.view(torch.uint8)


def _buffer(scratch: dict[int, torch.Tensor], slot: int, like: torch.Tensor) -> torch.Tensor:
    """Memory to receive into, kept for the next steps: fresh pages cost more than the message."""
    have = scratch.get(slot)
    if have is None or have.numel() < like.numel():
        have = scratch[slot] = torch.empty_like(like)
    return have[: like.numel()]
