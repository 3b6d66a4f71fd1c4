"""Latency and bandwidth between ranks, measured with messages and with collectives.

Phases: every pair of ranks exchanges messages (ping-pong) while the other ranks wait; every
collective runs at several sizes; a straight line through the times gives latency and bandwidth
(`minidist.cost.fit_link`).

    send and back:  t = 2 (latency + bytes / bandwidth)
    bus bandwidth:  bytes / t times a factor per collective, 2(n-1)/n for an all-reduce. With this
                    factor an ideal ring gives the bandwidth of the wire (nccl-tests,
                    doc/PERFORMANCE.md)

Example, on all ranks::

    pairs = measure_pairs()                         # a row per ordered pair
    for pair in pairs:
        print(pair.source, pair.target, pair.bandwidth_bytes_per_s / 1e9)
    for row in measure_collectives(("all_reduce", "all_gather")):
        print(row.kind, row.num_bytes, row.bus_bytes_per_s / 1e9)

A time is the shortest of all rounds, because noise only makes a round longer. On one machine over
gloo the figures describe its TCP stack and its scheduler, not a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minidist import cost
from minidist.device import all_gather_single, choose_device, reduce_scatter_single

DEFAULT_BYTES = (4, 1 << 12, 1 << 16, 1 << 20, 1 << 22)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """Messages from a source to a target rank; a time is half of a round trip.

    Attributes:
        source, target: global ranks.
        latency_s: of the fit; without a fit, the time of the smallest message.
        bandwidth_bytes_per_s: of the fit; without a fit, the bandwidth of the largest message.
        is_fit: whether a line fits: larger messages took longer.
        num_bytes, seconds: the measured sizes and times.
    """

    source: int
    target: int
    latency_s: float
    bandwidth_bytes_per_s: float
    is_fit: bool
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One collective at one size.

    Attributes:
        num_bytes: of the whole buffer; for all_gather and reduce_scatter n times a rank's share.
        seconds: time of the slowest rank in the best round.
    """

    kind: str
    num_ranks: int
    num_bytes: int
    seconds: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float


def pair_row(
    source: int, target: int, num_bytes: Sequence[int], seconds: Sequence[float]
) -> PairRow:
    """A row from one-way times.

    >>> times = [50e-6 + b / 1e9 for b in DEFAULT_BYTES]
    >>> row = pair_row(0, 1, DEFAULT_BYTES, times)
    >>> round(row.latency_s * 1e6, 3), round(row.bandwidth_bytes_per_s / 1e9, 3), row.is_fit
    (50.0, 1.0, True)
    """
    try:
        link = cost.fit_link(num_bytes=num_bytes, seconds=seconds, kind="send").link
        latency_s, bandwidth, is_fit = link.latency_s, link.bandwidth_bytes_per_s, True
    except ValueError:  # no fit, e.g. because of noise larger messages took less time
        latency_s, bandwidth, is_fit = seconds[0], num_bytes[-1] / seconds[-1], False
    return PairRow(
        source=source,
        target=target,
        latency_s=latency_s,
        bandwidth_bytes_per_s=bandwidth,
        is_fit=is_fit,
        num_bytes=tuple(num_bytes),
        seconds=tuple(seconds),
    )


def measure_pairs(
    num_bytes: Sequence[int] = DEFAULT_BYTES,
    *,
    rounds: int = 5,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> list[PairRow]:
    """Collective: ping-pong between every ordered pair of ranks; the same rows on all ranks.

    Args:
        num_bytes: message sizes, ascending, at least three.
        rounds: round trips per pair and size; the shortest counts.
        device: of the messages; None means the backend's device.

    Raises:
        ValueError: invalid sizes or rounds.
    """
    _check(num_bytes, rounds)
    if len(num_bytes) < 3:
        raise ValueError(f"measure_pairs: a fit wants three sizes or more, got {len(num_bytes)}")
    device = device or _device(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    rows: list[PairRow] = []
    for source in ranks:
        for target in ranks:
            if source == target:
                continue
            best = [float("inf")] * len(num_bytes)
            for index, size in enumerate(num_bytes):
                ball = torch.zeros(size, dtype=torch.uint8, device=device)
                _synchronize(device)
                dist.barrier(group)
                for count in range(rounds + 1):
                    seconds = _ping_pong(ball, source, target, group)
                    if count > 0:  # round 0 opens the connection and synchronises the two ranks
                        best[index] = min(best[index], seconds)
            # Only the source has measured the time.
            times: list[Any] = [best]
            dist.broadcast_object_list(times, src=source, group=group, device=device)
            rows.append(pair_row(source, target, num_bytes, times[0]))
    return rows


def _ping_pong(
    ball: torch.Tensor, source: int, target: int, group: dist.ProcessGroup | None
) -> float:
    """Half of the round-trip time on the source; 0 on all other ranks."""
    rank = dist.get_rank()
    start_s = time.perf_counter()
    if rank == source:
        _message(dist.isend, ball, target, group)
        _message(dist.irecv, ball, target, group)
    elif rank == target:
        _message(dist.irecv, ball, source, group)
        _message(dist.isend, ball, source, group)
    _synchronize(ball.device)
    return (time.perf_counter() - start_s) / 2 if rank == source else 0.0


def _message(op: Any, tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group)]):
        work.wait()


def measure_collectives(
    kinds: Sequence[str] = COLLECTIVES,
    num_bytes: Sequence[int] = DEFAULT_BYTES,
    *,
    rounds: int = 5,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> list[CollectiveRow]:
    """Collective: time collectives at several sizes; the same rows on all ranks.

    Sizes are rounded up to whole float32 per rank. `fit_collective` fits a line to the rows.

    Raises:
        ValueError: an unknown collective, or invalid sizes or rounds.
    """
    _check(num_bytes, rounds)
    unknown = [kind for kind in kinds if kind not in COLLECTIVES]
    if unknown:
        raise ValueError(f"measure_collectives: {unknown} are not among {COLLECTIVES}")
    device, n = device or _device(group), dist.get_world_size(group)
    rows = []
    for kind in kinds:
        for size in num_bytes:
            per_rank = max(1, -(-size // (4 * n)))
            call, whole = _collective(kind, per_rank, n, group, device)
            best = float("inf")
            for count in range(rounds + 1):
                _synchronize(device)
                dist.barrier(group)
                start_s = time.perf_counter()
                call()
                _synchronize(device)
                slowest = torch.tensor(time.perf_counter() - start_s, device=device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
                if count > 0:
                    best = min(best, slowest.item())
            rows.append(collective_row(kind, n, whole, best))
    return rows


def collective_row(kind: str, num_ranks: int, num_bytes: int, seconds: float) -> CollectiveRow:
    """A row with its algorithm bandwidth and bus bandwidth.

    >>> row = collective_row("all_reduce", 8, 2**34, 0.128)
    >>> round(row.algorithm_bytes_per_s / 1e9), round(row.bus_bytes_per_s / 1e9)
    (134, 235)
    """
    return CollectiveRow(
        kind=kind,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        seconds=seconds,
        algorithm_bytes_per_s=cost.algorithm_bandwidth(num_bytes=num_bytes, seconds=seconds),
        bus_bytes_per_s=cost.bus_bandwidth(
            kind=kind, num_bytes=num_bytes, seconds=seconds, num_ranks=num_ranks
        ),
    )


def fit_collective(rows: Sequence[CollectiveRow], kind: str) -> cost.Fit:
    """The latency per message and bandwidth of a ring that fit the rows of one collective best.

    Raises:
        ValueError: as `minidist.cost.fit_link`: too few rows, or larger sizes did not take longer.
    """
    own = [row for row in rows if row.kind == kind]
    return cost.fit_link(
        num_bytes=[row.num_bytes for row in own],
        seconds=[row.seconds for row in own],
        kind=kind,
        num_ranks=own[0].num_ranks if own else 2,
    )


def _collective(
    kind: str, per_rank: int, n: int, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Callable[[], Any], int]:
    """The call, and the bytes of its whole buffer. The data is 0, so that repeated sums stay 0."""
    whole = torch.zeros(n * per_rank, device=device)
    part = torch.zeros(per_rank, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_single(whole, part, group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group=group, group_src=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }
    return calls[kind], whole.numel() * whole.element_size()


def _check(num_bytes: Sequence[int], rounds: int) -> None:
    if not num_bytes or min(num_bytes) < 1 or list(num_bytes) != sorted(set(num_bytes)):
        raise ValueError(f"sizes must be ascending and at least 1 byte, got {tuple(num_bytes)}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which this group's collectives need their tensors."""
    return choose_device() if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
