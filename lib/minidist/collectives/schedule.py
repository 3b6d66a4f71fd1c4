"""A collective as data: a list of steps, each with the transfers between ranks.

An algorithm such as the ring is just a `Schedule`. `transport.run_steps` executes a schedule on
real ranks, `simulate` computes its result without ranks, the lectures draw it, and the alpha-beta
model estimates its time. All four use the same schedule, so they cannot disagree.

- Every rank holds a buffer of the same size, cut into `num_chunks` chunks.
- A `Transfer` sends consecutive chunks from one rank to another. The receiver adds them to its own
  chunks ("reduce") or replaces its own chunks by them ("copy").
- The transfers of a step happen at once: all of them read the values from before the step.

Example, the sum of three ranks on a ring::

>>> from minidist.collectives.algorithms import ring_steps
>>> print(ring_steps(3))
ring all-reduce: 3 ranks, 3 chunks, 4 steps
1: 0 -2-> 1 reduce   1 -0-> 2 reduce   2 -1-> 0 reduce
2: 0 -1-> 1 reduce   1 -2-> 2 reduce   2 -0-> 0 reduce
3: 0 -0-> 1 copy   1 -1-> 2 copy   2 -2-> 0 copy
4: 0 -2-> 1 copy   1 -0-> 2 copy   2 -1-> 0 copy
>>> simulate(ring_steps(3), [[1, 2, 3], [10, 20, 30], [100, 200, 300]])
[[111, 222, 333], [111, 222, 333], [111, 222, 333]]

Pure Python: importing this does not import torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

Action = Literal["reduce", "copy"]


class Transfer(NamedTuple):
    """One message from rank `src` to rank `dst`: `num_chunks` chunks, starting with `chunk`."""

    src: int
    dst: int
    chunk: int
    action: Action
    num_chunks: int = 1

    def __str__(self) -> str:
        last = self.chunk + self.num_chunks - 1
        chunks = str(self.chunk) if self.num_chunks == 1 else f"{self.chunk}..{last}"
        return f"{self.src} -{chunks}-> {self.dst} {self.action}"

    @property
    def chunks(self) -> range:
        return range(self.chunk, self.chunk + self.num_chunks)


Step = tuple[Transfer, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of one collective for all ranks.

    Args:
        name: name of the collective, for titles.
        world_size: number of ranks.
        num_chunks: chunks that each rank's buffer is cut into.
        steps: tuples of transfers.

    Raises:
        ValueError: a rank or chunk does not exist, a transfer goes from a rank to itself, or a step
            is ambiguous: a rank would send a chunk that it receives in the same step, or receive a
            chunk twice and at least once as a copy.
    """

    name: str
    world_size: int
    num_chunks: int
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"{self.name}: world_size must be at least 1, got {self.world_size}")
        for number, step in enumerate(self.steps, 1):
            self._check(step, f"{self.name}, step {number}")

    def _check(self, step: Step, where: str) -> None:
        sent: set[tuple[int, int]] = set()
        received: dict[tuple[int, int], Action] = {}
        for transfer in step:
            src, dst, _, action, _ = transfer
            if not (0 <= src < self.world_size and 0 <= dst < self.world_size) or src == dst:
                raise ValueError(
                    f"{where}: [{transfer}] is not between two of {self.world_size} ranks"
                )
            if transfer.chunk < 0 or transfer.chunks.stop > self.num_chunks:
                raise ValueError(f"{where}: [{transfer}] is not within {self.num_chunks} chunks")
            for chunk in transfer.chunks:
                sent.add((src, chunk))
                before = received.get((dst, chunk))
                if before is not None and "copy" in (before, action):
                    raise ValueError(f"{where}: rank {dst} receives chunk {chunk} twice")
                received[dst, chunk] = action
        for rank, chunk in sorted(sent & received.keys()):
            raise ValueError(f"{where}: rank {rank} sends chunk {chunk} while it receives it")

    def __str__(self) -> str:
        head = f"{self.name}: {self.world_size} ranks, {self.num_chunks} chunks"
        lines = [f"{head}, {len(self.steps)} steps"]
        lines += [f"{i}: " + "   ".join(map(str, step)) for i, step in enumerate(self.steps, 1)]
        return "\n".join(lines)

    # ------------------------------------------------- schedules out of schedules

    def __add__(self, other: Schedule) -> Schedule:
        """First this schedule, then the other."""
        self._must_match(other)
        return replace(self, steps=self.steps + other.steps)

    def beside(self, other: Schedule) -> Schedule:
        """Both schedules at once, step by step.

        `Schedule` raises ValueError if their transfers of a step conflict on a chunk.
        """
        self._must_match(other)
        pairs = zip_longest(self.steps, other.steps, fillvalue=())
        return replace(self, steps=tuple(mine + theirs for mine, theirs in pairs))

    def backwards(self) -> Schedule:
        """The steps in reverse order, with copies turned into reductions and vice versa.

        A broadcast run backwards is a reduce; an all-gather run backwards is a reduce-scatter.
        """
        turned: dict[Action, Action] = {"copy": "reduce", "reduce": "copy"}
        steps = tuple(
            tuple(Transfer(t.dst, t.src, t.chunk, turned[t.action], t.num_chunks) for t in step)
            for step in reversed(self.steps)
        )
        return replace(self, steps=steps)

    def moved(
        self,
        *,
        rank: Callable[[int], int] = lambda rank: rank,
        chunk: Callable[[int], int] = lambda chunk: chunk,
        world_size: int | None = None,
        num_chunks: int | None = None,
        repeat: int = 1,
    ) -> Schedule:
        """The same pattern on different ranks and chunks.

        Each chunk becomes `repeat` chunks.
        """
        steps = tuple(
            tuple(
                Transfer(rank(t.src), rank(t.dst), chunk(t.chunk), t.action, t.num_chunks * repeat)
                for t in step
            )
            for step in self.steps
        )
        return Schedule(
            self.name, world_size or self.world_size, num_chunks or self.num_chunks, steps
        )

    def named(self, name: str) -> Schedule:
        return replace(self, name=name)

    def _must_match(self, other: Schedule) -> None:
        ours, theirs = (self.world_size, self.num_chunks), (other.world_size, other.num_chunks)
        if ours != theirs:
            raise ValueError(
                f"{self.name} and {other.name} differ in (world_size, num_chunks): {ours}, {theirs}"
            )

    # --------------------------------------------------------- questions about it

    @cached_property
    def by_rank(self) -> list[list[tuple[Step, Step]]]:
        """Per rank, for each step that this rank takes part in: (its sends, its receives)."""
        parts: list[list[tuple[Step, Step]]] = [[] for _ in range(self.world_size)]
        for step in self.steps:
            sends: dict[int, list[Transfer]] = {}
            receives: dict[int, list[Transfer]] = {}
            for transfer in step:
                sends.setdefault(transfer.src, []).append(transfer)
                receives.setdefault(transfer.dst, []).append(transfer)
            for rank in sends.keys() | receives.keys():
                parts[rank].append((tuple(sends.get(rank, ())), tuple(receives.get(rank, ()))))
        return parts

    def num_bytes_sent(self, num_bytes: int, itemsize: int = 1) -> list[int]:
        """Bytes that each rank sends for a buffer of `num_bytes` bytes; no element is split.

        >>> from minidist.collectives.algorithms import ring_steps
        >>> ring_steps(4).num_bytes_sent(1000)  # 2 (N-1)/N 1000
        [1500, 1500, 1500, 1500]
        """
        offsets = chunk_offsets(num_bytes // itemsize, self.num_chunks)
        sent = [0] * self.world_size
        for step in self.steps:
            for t in step:
                sent[t.src] += (offsets[t.chunks.stop] - offsets[t.chunk]) * itemsize
        return sent

    def time_s(self, num_bytes: float, *, latency_s: float, bandwidth_bytes_per_s: float) -> float:
        """Seconds in the alpha-beta model: alpha = `latency_s`, beta = 1 / bandwidth.

        A step takes one latency plus the time in which the busiest rank sends (or receives) all of
        its messages of the step. Every rank has one link of the given bandwidth in each direction,
        and a step begins when the previous step is over.

        >>> from minidist.collectives.algorithms import ring_steps
        >>> ring_steps(4).time_s(1e9, latency_s=0.25, bandwidth_bytes_per_s=1e9)  # 6 x 0.25 + 1.5
        3.0
        """
        chunk_s = num_bytes / self.num_chunks / bandwidth_bytes_per_s
        total_s = 0.0
        for step in self.steps:
            load: dict[tuple[str, int], int] = {}
            for t in step:
                for link in (("out", t.src), ("in", t.dst)):
                    load[link] = load.get(link, 0) + t.num_chunks
            total_s += latency_s + max(load.values(), default=0) * chunk_s
        return total_s


def chunk_offsets(numel: int, num_chunks: int) -> list[int]:
    """Where the chunks of a buffer begin, and where the last one ends.

    Chunks are as even as possible; the first chunks may be one element longer, as in
    `torch.tensor_split`.

    >>> chunk_offsets(10, 4)
    [0, 3, 6, 8, 10]
    """
    size, longer = divmod(numel, num_chunks)
    return [chunk * size + min(chunk, longer) for chunk in range(num_chunks + 1)]


def simulate(
    schedule: Schedule,
    values: Sequence[Sequence[Any]],
    reduce: Callable[[Any, Any], Any] = operator.add,
) -> list[list[Any]]:
    """What every rank holds at the end, computed in one process.

    Args:
        values: `values[rank][chunk]`, of any type that `reduce` can combine.
        reduce: `reduce(own, received)`.

    Example, which ranks have contributed to which chunk:

    >>> from minidist.collectives.algorithms import ring_reduce_scatter_steps
    >>> simulate(ring_reduce_scatter_steps(3), [["a"] * 3, ["b"] * 3, ["c"] * 3])
    [['acb', 'ac', 'a'], ['b', 'bac', 'ba'], ['cb', 'c', 'cba']]
    """
    held = [list(row) for row in values]
    for step in schedule.steps:
        for t in step:  # one by one is correct: no rank sends a chunk that it receives in this step
            for chunk in t.chunks:
                arrived, own = held[t.src][chunk], held[t.dst][chunk]
                held[t.dst][chunk] = reduce(own, arrived) if t.action == "reduce" else arrived
    return held
