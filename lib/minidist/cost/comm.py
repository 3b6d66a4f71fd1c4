"""The time of a collective in the alpha-beta-gamma model.

A message of B bytes over a link takes alpha + B * beta: alpha is the latency in seconds, beta is
1 / bandwidth. Adding B received bytes to a buffer takes B * gamma (gamma is small compared with
beta, and 0 by default). A link is full duplex: a rank sends and receives at the same time.

With n ranks and a buffer of B bytes (Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009):

    all-reduce            latency                bandwidth
    ring                  2(n-1) alpha           2 (n-1)/n B beta     least bytes, most messages
    halving-doubling      2 log2(n) alpha        2 (n-1)/n B beta     as few bytes, few messages
    tree                  2 log2(n) alpha        2 log2(n) B beta     whole buffer on every level
    tree, pipelined       2 (log2(n)+k-1) alpha  4 (log2(n)+k-1)/k B beta    k chunks, 2 children
    double tree           2 (log2(n)+k-1) alpha  2 (log2(n)+k-1)/k B beta    two trees, half each

Example: 100 MB over 100 Gbit/s on 8 ranks takes 14 ms on a ring. The bandwidth is in bytes, not in
bits.

>>> link = Wire(bandwidth_bytes_per_s=100e9 / 8, latency_s=0)
>>> round(all_reduce_seconds(num_bytes=100e6, num_ranks=8, link=link, algorithm="ring") * 1e3, 3)
14.0

`collective_seconds` is also the clock of the emulated cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class LinkLike(Protocol):
    """An object with bandwidth (one direction) and latency: `Link`, `Wire`, emulate's `Link`."""

    @property
    def bandwidth_bytes_per_s(self) -> float: ...
    @property
    def latency_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A link that has only the two numbers of the model."""

    bandwidth_bytes_per_s: float
    latency_s: float


def _checked(num_bytes: float, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"a collective needs at least 1 rank, got {num_ranks}")
    if not num_bytes >= 0:
        raise ValueError(f"num_bytes must not be negative, got {num_bytes}")


def _log2_ceil(num_ranks: int) -> int:
    return (num_ranks - 1).bit_length()


def p2p_seconds(*, num_bytes: float, link: LinkLike) -> float:
    """One message: alpha + B beta."""
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


# ------------------------------------------------------------------------------ all-reduce, by name


def _ring(n: int, size: float, alpha: float, beta: float, gamma: float) -> float:
    """n-1 steps of reduce-scatter and n-1 steps of all-gather, each with a chunk of B/n."""
    return 2 * (n - 1) * (alpha + size / n * beta) + (n - 1) * size / n * gamma


def _halving_doubling(n: int, size: float, alpha: float, beta: float, gamma: float) -> float:
    """Exchange half of the buffer, then a quarter, ..., each time with a nearer rank; then the same
    steps in reverse. If n is not a power of two, each extra rank first sends its buffer to a
    partner and receives the result at the end: 2 messages of the whole buffer."""
    power = 1 << (n.bit_length() - 1)
    extra = 0.0 if power == n else 2 * (alpha + size * beta) + size * gamma
    share = (power - 1) / power * size
    return 2 * math.log2(power) * alpha + 2 * share * beta + share * gamma + extra


def _tree(n: int, size: float, alpha: float, beta: float, gamma: float) -> float:
    """Binomial reduce to a root, then broadcast: whole buffer on each of ceil(log2(n)) levels."""
    return _log2_ceil(n) * (2 * (alpha + size * beta) + size * gamma)


def _pipelined(
    levels: int, size: float, alpha: float, beta: float, gamma: float, *, children: int
) -> float:
    """k chunks move up a tree and down again: (levels + k - 1) steps each way. In each step an
    inner rank's link carries one chunk per child. The best k without gamma is
    sqrt((levels-1) children B beta/alpha).
    """
    per_step = children * size
    k = 1
    if levels > 1 and size > 0:  # k is at most the number of bytes
        whole = per_step * (beta + gamma / 2)
        best = math.sqrt((levels - 1) * whole / alpha) if alpha > 0 else math.inf
        best = max(1.0, min(size, best))
        k = min(
            (math.floor(best), math.ceil(best)),
            key=lambda c: (levels + c - 1) * (alpha + whole / c),
        )
    up_and_down = 2 * (alpha + per_step / k * beta) + per_step / k * gamma
    return (levels + k - 1) * up_and_down


def _pipelined_tree(n: int, size: float, alpha: float, beta: float, gamma: float) -> float:
    """A binary tree: two children share an inner rank's link, so large buffers take 4 B beta."""
    return _pipelined(_log2_ceil(n), size, alpha, beta, gamma, children=2 if n > 2 else 1)


def _double_tree(n: int, size: float, alpha: float, beta: float, gamma: float) -> float:
    """Two binary trees, each with half of the buffer. An inner rank of one tree is a leaf of the
    second tree, so every link is busy in both directions: 2 B beta for large buffers, with the
    latency of a tree (Sanders, Speck and Traeff 2009; NCCL since 2.4)."""
    return _pipelined(_log2_ceil(n), size, alpha, beta, gamma, children=1)


_ALL_REDUCE: dict[str, Callable[[int, float, float, float, float], float]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "pipelined_tree": _pipelined_tree,
    "double_tree": _double_tree,
}
ALL_REDUCE_ALGORITHMS = tuple(_ALL_REDUCE)


def all_reduce_seconds(
    *,
    num_bytes: float,
    num_ranks: int,
    link: LinkLike,
    algorithm: str = "ring",
    gamma_s_per_byte: float = 0.0,
) -> float:
    """Seconds of one all-reduce of `num_bytes` on `num_ranks`; algorithms: `ALL_REDUCE_ALGORITHMS`.

    >>> link = Wire(bandwidth_bytes_per_s=12.5e9, latency_s=10e-6)
    >>> small = [round(1e6 * all_reduce_seconds(num_bytes=1e3, num_ranks=64, link=link,
    ...          algorithm=a)) for a in ("ring", "halving_doubling", "tree")]
    >>> small  # microseconds: latency decides, 126 messages against 12
    [1260, 120, 121]

    Raises:
        ValueError: an unknown algorithm, no ranks, a negative size.
    """
    _checked(num_bytes, num_ranks)
    if algorithm not in _ALL_REDUCE:
        raise ValueError(
            f"all_reduce_seconds: unknown algorithm {algorithm!r}, known are "
            f"{', '.join(ALL_REDUCE_ALGORITHMS)}"
        )
    if num_ranks == 1:
        return 0.0
    beta = 1 / link.bandwidth_bytes_per_s
    return _ALL_REDUCE[algorithm](num_ranks, num_bytes, link.latency_s, beta, gamma_s_per_byte)


def fastest_all_reduce(
    *, num_bytes: float, num_ranks: int, link: LinkLike, gamma_s_per_byte: float = 0.0
) -> tuple[str, float]:
    """The algorithm with the shortest time, and that time.

    >>> wire = Wire(bandwidth_bytes_per_s=12.5e9, latency_s=10e-6)
    >>> fastest_all_reduce(num_bytes=1e3, num_ranks=64, link=wire)[0]
    'halving_doubling'
    """
    times = {
        name: all_reduce_seconds(
            num_bytes=num_bytes,
            num_ranks=num_ranks,
            link=link,
            algorithm=name,
            gamma_s_per_byte=gamma_s_per_byte,
        )
        for name in ALL_REDUCE_ALGORITHMS
    }
    best = min(times, key=lambda name: times[name])
    return best, times[best]


def hierarchical_all_reduce_seconds(
    *,
    num_bytes: float,
    ranks_per_node: int,
    num_nodes: int,
    intra_node: LinkLike,
    inter_node: LinkLike,
) -> float:
    """Reduce-scatter in the node, all-reduce of B/r across nodes, all-gather in the node.

    Every rank has its own network port (`inter_node`) and all-reduces B/r over this port, so r
    ranks per node divide the time of the slow part by r.

    >>> nvlink = Wire(bandwidth_bytes_per_s=300e9, latency_s=0)
    >>> port = Wire(bandwidth_bytes_per_s=25e9, latency_s=0)
    >>> t = hierarchical_all_reduce_seconds(num_bytes=1e9, ranks_per_node=8, num_nodes=4,
    ...                                     intra_node=nvlink, inter_node=port)
    >>> round(t * 1e3, 2)  # ms; one flat ring over a single port per node: 77.5
    13.33
    """
    _checked(num_bytes, ranks_per_node * num_nodes)
    inside = 2 * reduce_scatter_seconds(
        num_bytes=num_bytes, num_ranks=ranks_per_node, link=intra_node
    )
    return inside + all_reduce_seconds(
        num_bytes=num_bytes / ranks_per_node, num_ranks=num_nodes, link=inter_node
    )


# ---------------------------------------------------------------------------- the other collectives


def reduce_scatter_seconds(
    *, num_bytes: float, num_ranks: int, link: LinkLike, gamma_s_per_byte: float = 0.0
) -> float:
    """Ring: (n-1) alpha + (n-1)/n B beta. B is the whole buffer before the scatter."""
    _checked(num_bytes, num_ranks)
    share = (num_ranks - 1) / num_ranks * num_bytes
    per_byte = 1 / link.bandwidth_bytes_per_s + gamma_s_per_byte
    return (num_ranks - 1) * link.latency_s + share * per_byte


def all_gather_seconds(*, num_bytes: float, num_ranks: int, link: LinkLike) -> float:
    """Ring: (n-1) alpha + (n-1)/n B beta. B is the gathered buffer, n times one rank's part."""
    return reduce_scatter_seconds(num_bytes=num_bytes, num_ranks=num_ranks, link=link)


def broadcast_seconds(*, num_bytes: float, num_ranks: int, link: LinkLike) -> float:
    """A pipelined tree with small chunks: log2(n) alpha + B beta. A reduce takes the same time."""
    _checked(num_bytes, num_ranks)
    if num_ranks == 1:
        return 0.0
    return _log2_ceil(num_ranks) * link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def all_to_all_seconds(*, num_bytes: float, num_ranks: int, link: LinkLike) -> float:
    """Pairwise exchange: (n-1) alpha + (n-1)/n B beta. B is one rank's whole buffer, including the
    part that the rank keeps."""
    return reduce_scatter_seconds(num_bytes=num_bytes, num_ranks=num_ranks, link=link)


def gather_seconds(*, num_bytes: float, num_ranks: int, link: LinkLike) -> float:
    """All parts go through the root's link: alpha + (n-1)/n B beta, where B is the gathered buffer.
    A scatter takes the same time, and so does each direction of a parameter server's step."""
    _checked(num_bytes, num_ranks)
    if num_ranks == 1:
        return 0.0
    return link.latency_s + (num_ranks - 1) / num_ranks * num_bytes / link.bandwidth_bytes_per_s


def barrier_seconds(*, num_ranks: int, link: LinkLike) -> float:
    """Dissemination algorithm: log2(n) rounds of empty messages."""
    return _log2_ceil(num_ranks) * link.latency_s


_SECONDS: dict[str, Callable[..., float]] = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_to_all": all_to_all_seconds,
    "broadcast": broadcast_seconds,
    "reduce": broadcast_seconds,
    "gather": gather_seconds,
    "scatter": gather_seconds,
}


def collective_seconds(*, kind: str, num_bytes: float, num_ranks: int, link: LinkLike) -> float:
    """Seconds of a collective by its name, once all of its ranks have issued it.

    Args:
        kind: all_reduce, all_gather, reduce_scatter (rings), broadcast, reduce (pipelined trees),
            gather, scatter (through the root's link), all_to_all, barrier, send.
        num_bytes: all_reduce, broadcast, reduce, send: the buffer. all_gather, gather: everything
            gathered. reduce_scatter, scatter: everything before it is cut up. all_to_all: what
            one rank holds, its own part included.
        num_ranks: size of the group; one rank alone takes no time.
    """
    if kind == "send":
        return p2p_seconds(num_bytes=num_bytes, link=link)
    if kind == "barrier":
        return barrier_seconds(num_ranks=num_ranks, link=link)
    if kind not in _SECONDS:
        raise ValueError(f"collective_seconds: unknown kind {kind!r}")
    return _SECONDS[kind](num_bytes=num_bytes, num_ranks=num_ranks, link=link)
