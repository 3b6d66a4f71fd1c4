"""The algorithms: functions that return the `Schedule` of a collective.

Notation: N ranks, S bytes per rank, alpha the latency of a message, B the bandwidth of a link.

| all-reduce               | steps            | bytes sent by the busiest rank  | paper          |
|--------------------------|------------------|---------------------------------|----------------|
| `ring_steps`             | 2 (N-1)          | 2 (N-1)/N S                     | Patarasuk 2009 |
| `direct_steps`           | 2                | 2 (N-1)/N S                     |                |
| `halving_doubling_steps` | 2 log2 N         | 2 (N-1)/N S, N a power of two   | Thakur 2005    |
| `tree_steps`             | 2 log2 N + K - 1 | 3 S, K chunks in flight         |                |
| `double_tree_steps`      | 2 log2 N + K - 1 | 2 S                             | Sanders 2009   |
| `hierarchical_steps`     | 2 (L-1) + 2 (M-1)| 2 (M-1)/M S/L to other nodes    | Mikami 2018    |

(The last one on M nodes of L ranks.)

Papers: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009). R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 19 (2005). P. Sanders,
J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009). Rings came to deep learning with Baidu's all-reduce and Horovod
(arXiv:1802.05799).

Schedules are immutable and cached. Pure Python: importing this does not import torch.
"""

from __future__ import annotations

from functools import cache

from minidist.collectives.schedule import Action, Schedule, Step, Transfer

# ------------------------------------------------------------------------------ ring


@cache
def ring_reduce_scatter_steps(world_size: int) -> Schedule:
    """Chunk c starts at rank c+1, goes around the ring once, and ends complete on rank c.

    >>> print(ring_reduce_scatter_steps(3))
    ring reduce-scatter: 3 ranks, 3 chunks, 2 steps
    1: 0 -2-> 1 reduce   1 -0-> 2 reduce   2 -1-> 0 reduce
    2: 0 -1-> 1 reduce   1 -2-> 2 reduce   2 -0-> 0 reduce
    """
    return _ring("ring reduce-scatter", world_size, "reduce", first=-1)


@cache
def ring_all_gather_steps(world_size: int) -> Schedule:
    """Chunk c starts at rank c and goes around the ring once."""
    return _ring("ring all-gather", world_size, "copy", first=0)


@cache
def ring_steps(world_size: int, num_segments: int = 1) -> Schedule:
    """All-reduce: reduce-scatter, then all-gather.

    Args:
        num_segments: messages per chunk. With more than one, a rank adds the first segment while
            the next segment is still on its way.
    """
    n, k = world_size, _positive("num_segments", num_segments)
    ring = ring_reduce_scatter_steps(n) + ring_all_gather_steps(n)
    name = "ring all-reduce" + (f" in {k} segments" if k > 1 else "")
    pieces = [ring.moved(chunk=lambda c, s=s: c * k + s, num_chunks=n * k) for s in range(k)]
    return _all_beside(pieces).named(name)


def _ring(name: str, n: int, action: Action, first: int) -> Schedule:
    steps = tuple(
        tuple(Transfer(rank, (rank + 1) % n, (rank + first - t) % n, action) for rank in range(n))
        for t in range(n - 1)
    )
    return Schedule(name, n, n, steps)


# ---------------------------------------------------------------------------- direct


@cache
def direct_reduce_scatter_steps(world_size: int, num_segments: int = 1) -> Schedule:
    """Every rank sends chunk c directly to rank c, which adds up all N versions at once.

    Args:
        num_segments: the number of steps. Each step sends one part of every chunk. Chunk c then
            consists of the schedule's chunks c num_segments, ..., (c + 1) num_segments - 1.

    >>> print(direct_reduce_scatter_steps(2, num_segments=2))
    direct reduce-scatter: 2 ranks, 4 chunks, 2 steps
    1: 1 -0-> 0 reduce   0 -2-> 1 reduce
    2: 1 -1-> 0 reduce   0 -3-> 1 reduce
    """
    n, k = world_size, _positive("num_segments", num_segments)
    steps = [
        tuple(
            Transfer(s, d, d * k + segment, "reduce") for d in range(n) for s in range(n) if s != d
        )
        for segment in range(k)
    ]
    return Schedule("direct reduce-scatter", n, n * k, _without_empty(steps))


@cache
def direct_all_gather_steps(world_size: int) -> Schedule:
    return direct_reduce_scatter_steps(world_size).backwards().named("direct all-gather")


@cache
def direct_steps(world_size: int) -> Schedule:
    """All-reduce in two steps: as many bytes as the ring, but N-1 messages reach a rank at once."""
    two = direct_reduce_scatter_steps(world_size) + direct_all_gather_steps(world_size)
    return two.named("direct all-reduce")


# ------------------------------------------------------- recursive halving, doubling


@cache
def halving_doubling_steps(world_size: int) -> Schedule:
    """All-reduce by recursive halving (a reduce-scatter) and doubling (an all-gather).

    Distances are powers of two, so only P ranks take part, where P is the largest power of two
    that is at most N. Rank P+i first adds its buffer to the buffer of rank i, and gets the result
    from rank i at the end.

    >>> print(halving_doubling_steps(4))
    halving-doubling all-reduce: 4 ranks, 4 chunks, 4 steps
    1: 2 -0..1-> 0 reduce   3 -0..1-> 1 reduce   0 -2..3-> 2 reduce   1 -2..3-> 3 reduce
    2: 1 -0-> 0 reduce   0 -1-> 1 reduce   3 -2-> 2 reduce   2 -3-> 3 reduce
    3: 0 -0-> 1 copy   1 -1-> 0 copy   2 -2-> 3 copy   3 -3-> 2 copy
    4: 0 -0..1-> 2 copy   1 -0..1-> 3 copy   2 -2..3-> 0 copy   3 -2..3-> 1 copy
    """
    n = _positive("world_size", world_size)
    p = 1 << (n.bit_length() - 1)
    fold = [Transfer(rank, rank - p, 0, "reduce", p) for rank in range(p, n)]
    # Before a doubling step at distance d, rank r holds the d chunks of its aligned block of d
    # ranks.
    distances = [1 << t for t in range(p.bit_length() - 1)]
    doubling = [[Transfer(r, r ^ d, r // d * d, "copy", d) for r in range(p)] for d in distances]
    name = "halving-doubling all-reduce"
    folding = Schedule(name, n, p, _without_empty([fold]))
    gathering = Schedule(name, n, p, _without_empty(doubling))
    return folding + gathering.backwards() + gathering + folding.backwards()


# ---------------------------------------------------------------------- binary trees


def tree_parents(world_size: int) -> list[int | None]:
    """The parent of every rank in a binary tree whose ranks are 0 .. N-1 from left to right.

    Even ranks are leaves. The height of rank r is the number of zeros at the end of r + 1 in
    binary.

    >>> tree_parents(7)
    [1, 3, 1, None, 5, 3, 5]
    """
    parents: list[int | None] = []
    for x in range(1, _positive("world_size", world_size) + 1):
        low = x & -x
        up = x - low if x & (low << 1) else x + low
        if up > world_size:  # this inner node does not exist: take the next one further up
            up = x - low
        parents.append(up - 1 if up else None)
    return parents


@cache
def tree_steps(world_size: int, num_chunks: int = 1) -> Schedule:
    """All-reduce over one binary tree: reduce up to the root, then broadcast down.

    Args:
        num_chunks: K chunks follow each other through the tree. Each chunk is one step, hence one
            level, behind the chunk before it. The first chunks go down while the last still go up.
    """
    k = _positive("num_chunks", num_chunks)
    return _over_tree("tree all-reduce", tree_parents(world_size), k)


@cache
def double_tree_steps(world_size: int, num_chunks: int = 1) -> Schedule:
    """All-reduce over two binary trees, each with half of the buffer.

    A leaf of one tree is an inner rank of the other tree (if N is odd, one rank is a leaf in both).
    No rank therefore sends much more than 2 S bytes, whereas an inner rank of a single tree sends
    up to 3 S. `num_chunks` is per tree.
    """
    n, k = world_size, _positive("num_chunks", num_chunks)
    one = _over_tree("double-tree all-reduce", tree_parents(n), k)
    first = one.moved(num_chunks=2 * k)
    # Leaves are the even ranks. Mirroring (for even N) and shifting by one (for odd N) both move
    # leaves to odd ranks.
    other = (lambda r: n - 1 - r) if n % 2 == 0 else (lambda r: (r + 1) % n)
    return first.beside(one.moved(rank=other, chunk=lambda c: c + k, num_chunks=2 * k))


def _over_tree(name: str, parents: list[int | None], num_chunks: int) -> Schedule:
    depth = [_depth(parents, rank) for rank in range(len(parents))]
    deepest = max(depth)
    steps: list[list[Transfer]] = [[] for _ in range(2 * deepest + num_chunks - 1)]
    if not deepest:
        steps = []
    for rank, parent in enumerate(parents):
        for chunk in range(num_chunks if parent is not None else 0):
            assert parent is not None
            steps[deepest - depth[rank] + chunk].append(Transfer(rank, parent, chunk, "reduce"))
            steps[deepest + depth[parent] + chunk].append(Transfer(parent, rank, chunk, "copy"))
    return Schedule(name, len(parents), num_chunks, tuple(map(tuple, steps)))


def _depth(parents: list[int | None], rank: int) -> int:
    parent = parents[rank]
    return 0 if parent is None else 1 + _depth(parents, parent)


# --------------------------------------------------------------------- with one root


@cache
def broadcast_steps(world_size: int, root: int = 0) -> Schedule:
    """A binomial tree: each rank that has the buffer sends it on.

    The number of ranks that have the buffer doubles with each step.

    >>> print(broadcast_steps(4))
    broadcast: 4 ranks, 1 chunks, 2 steps
    1: 0 -0-> 1 copy
    2: 0 -0-> 2 copy   1 -0-> 3 copy
    """
    n, steps, have = world_size, [], 1
    while have < n:
        pairs = [(r, r + have) for r in range(have) if r + have < n]
        steps.append([Transfer((s + root) % n, (d + root) % n, 0, "copy") for s, d in pairs])
        have *= 2
    return Schedule("broadcast", n, 1, _without_empty(steps))


@cache
def reduce_steps(world_size: int, root: int = 0) -> Schedule:
    """The broadcast, backwards."""
    return broadcast_steps(world_size, root).backwards().named("reduce")


@cache
def gather_steps(world_size: int, root: int = 0) -> Schedule:
    """Chunk c goes directly from rank c to the root.

    A binomial tree would save latencies at the root, but inner ranks would have to carry the data
    of other ranks.
    """
    n = world_size
    step = [Transfer(rank, root, rank, "copy") for rank in range(n) if rank != root]
    return Schedule("gather", n, n, _without_empty([step]))


@cache
def scatter_steps(world_size: int, root: int = 0) -> Schedule:
    """Chunk c goes directly from the root to rank c."""
    n = world_size
    step = [Transfer(root, rank, rank, "copy") for rank in range(n) if rank != root]
    return Schedule("scatter", n, n, _without_empty([step]))


@cache
def all_to_all_steps(world_size: int) -> Schedule:
    """Chunk s N + d goes from rank s to rank d.

    In step t rank s sends to rank s + t (mod N), so in each step every rank sends one message and
    receives one.
    """
    n = world_size
    steps = [
        [Transfer(s, (s + t) % n, s * n + (s + t) % n, "copy") for s in range(n)]
        for t in range(1, n)
    ]
    return Schedule("all-to-all", n, n * n, _without_empty(steps))


# ---------------------------------------------------------------------- hierarchical


@cache
def hierarchical_steps(num_nodes: int, local_size: int) -> Schedule:
    """All-reduce on nodes of `local_size` ranks each; rank = node * local_size + local rank.

    The phases are a reduce-scatter in each node, an all-reduce of each shard over the nodes, and an
    all-gather in each node; all of them are rings. A shard is 1/local_size of the buffer, and a
    rank sends 2 (M-1)/M of a shard to other nodes (M nodes).
    """
    m, size = _positive("num_nodes", num_nodes), _positive("local_size", local_size)
    world, chunks = m * size, m * size

    def in_nodes(ring: Schedule) -> Schedule:
        on_node = [
            ring.moved(
                rank=lambda r, node=node: node * size + r,
                chunk=lambda c: c * m,
                world_size=world,
                num_chunks=chunks,
                repeat=m,
            )
            for node in range(m)
        ]
        return _all_beside(on_node)

    across = [
        ring_steps(m).moved(
            rank=lambda node, local=local: node * size + local,
            chunk=lambda c, local=local: local * m + c,
            world_size=world,
            num_chunks=chunks,
        )
        for local in range(size)
    ]
    first = in_nodes(ring_reduce_scatter_steps(size))
    last = in_nodes(ring_all_gather_steps(size))
    return (first + _all_beside(across) + last).named("hierarchical all-reduce")


def _all_beside(schedules: list[Schedule]) -> Schedule:
    first, *others = schedules
    for other in others:
        first = first.beside(other)
    return first


def _without_empty(steps: list[list[Transfer]] | list[Step]) -> tuple[Step, ...]:
    return tuple(tuple(step) for step in steps if step)


def _positive(what: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}")
    return value
