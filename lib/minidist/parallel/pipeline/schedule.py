"""Pipeline schedules as data: for every rank, the ordered list of its computations.

The layers of a model are cut into stages. With p ranks and v chunks per rank there are p * v
stages; stage s is chunk s // p of rank s % p. A batch is cut into m micro-batches. A schedule says
in which order each rank runs their forward (F) and backward (B) passes. It does not list sends and
receives, because they follow from the order (`program.py`).

    naive        one micro-batch at a time: model parallelism, all ranks but one are idle
    gpipe        all forwards, then all backwards                          arXiv 1811.06965
    one_f_one_b  the same bubble, but at most p micro-batches in memory    arXiv 2006.09503
    pipedream    1F1B without a flush: an update (U) after each backward   arXiv 1806.03377
    interleaved  1F1B over v chunks per rank: the bubble is v times less   arXiv 2104.04473
    zb_h1        the weight gradient (W) runs later, and fills the bubble  arXiv 2401.10241

>>> print(one_f_one_b(3, 4))
1F1B: 3 ranks, 4 micro-batches
rank 0: F0 F1 F2 B0 F3 B1 B2 B3
rank 1: F0 F1 B0 F2 B1 F3 B2 B3
rank 2: F0 B0 F1 B1 F2 B2 F3 B3

Phases of a builder: validate, count the warm-up, list the actions of each rank. Your own schedule
is a `Schedule` too, and `check.py` finds its mistakes. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """What a rank does with one micro-batch on one of its chunks."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of input and weights; only of the input if the schedule has W
    WEIGHT = "W"  # gradients of the weights, after their B (zero bubble)
    UPDATE = "U"  # optimizer step with the gradients of this one micro-batch (PipeDream)


F, B, W, U = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.UPDATE


@dataclass(frozen=True)
class Action:
    """One micro-batch through one chunk. Printed e.g. as F3, or F3.1 on chunk 1."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Args:
        name: name for messages and drawings.
        num_ranks: p, pipeline ranks.
        num_micro_batches: m.
        actions: the actions of each rank, in order.
        num_chunks: v, stages per rank.
    """

    name: str
    num_ranks: int
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of action that occur."""
        return frozenset(action.kind for actions in self.actions for action in actions)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return B in self.kinds

    @property
    def splits_backward(self) -> bool:
        """Whether B computes only the input gradient, and W the weight gradient."""
        return W in self.kinds

    @property
    def updates_each_micro_batch(self) -> bool:
        """Whether weights change inside the schedule (PipeDream)."""
        return U in self.kinds

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is chunk `chunk` of rank `rank`."""
        return chunk * self.num_ranks + rank

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        return stage % self.num_ranks, stage // self.num_ranks

    def needs(self, rank: int, action: Action) -> Iterator[tuple[int, Action]]:
        """The (rank, action) pairs that must be over before `action` of `rank` can start."""
        kind, micro_batch, chunk = action.kind, action.micro_batch, action.chunk
        stage = self.stage(rank, chunk)
        if kind is F:
            if stage > 0:  # its input
                before, its_chunk = self.place(stage - 1)
                yield before, Action(F, micro_batch, its_chunk)
            return
        if kind is B:
            yield rank, Action(F, micro_batch, chunk)
            if stage < self.num_stages - 1:  # the gradient of its output
                after, its_chunk = self.place(stage + 1)
                yield after, Action(B, micro_batch, its_chunk)
            return
        last = W if kind is U and self.splits_backward else B
        yield rank, Action(last, micro_batch, chunk)

    def __str__(self) -> str:
        chunks = f", {self.num_chunks} chunks per rank" if self.num_chunks > 1 else ""
        lines = [
            f"{self.name}: {self.num_ranks} ranks, {self.num_micro_batches} micro-batches{chunks}"
        ]
        lines += [f"rank {r}: {' '.join(map(str, a))}" for r, a in enumerate(self.actions)]
        return "\n".join(lines)


# Builders ---------------------------------------------------------------------------------------


def naive(num_ranks: int, num_micro_batches: int = 1) -> Schedule:
    """One micro-batch at a time, forward and backward: one of p ranks works.

    >>> print(naive(2, 2))
    naive: 2 ranks, 2 micro-batches
    rank 0: F0 B0 F1 B1
    rank 1: F0 B0 F1 B1
    """
    _validate("naive", num_ranks, num_micro_batches)
    actions = [Action(k, i) for i in range(num_micro_batches) for k in (F, B)]
    return _build("naive", num_ranks, num_micro_batches, lambda rank: actions)


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965); m micro-batches are in memory.

    The paper draws the backwards in reverse order; time and memory are the same in both orders.
    """
    _validate("gpipe", num_ranks, num_micro_batches)
    actions = [Action(k, i) for k in (F, B) for i in range(num_micro_batches)]
    return _build("GPipe", num_ranks, num_micro_batches, lambda rank: actions)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One forward, one backward (arXiv 2006.09503, "PipeDream-flush").

    Rank r starts with p - r - 1 forwards, so that it is ready when the first backward arrives. It
    holds at most p - r micro-batches.
    """
    _validate("one_f_one_b", num_ranks, num_micro_batches)

    def of_rank(rank: int) -> Iterator[Action]:
        return _alternate(
            [Action(F, i) for i in range(num_micro_batches)],
            [Action(B, i) for i in range(num_micro_batches)],
            num_ranks - rank - 1,
        )

    return _build("1F1B", num_ranks, num_micro_batches, of_rank)


def pipedream(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B without flush: an update follows each backward (arXiv 1806.03377).

    `num_micro_batches` is the number of mini-batches of the whole run. The forward and the backward
    of a mini-batch see different weights, unless the weights are stashed (`weight_stashing.py`).
    """
    base = one_f_one_b(num_ranks, num_micro_batches)

    def of_rank(rank: int) -> Iterator[Action]:
        for action in base.actions[rank]:
            yield action
            if action.kind is B:
                yield Action(U, action.micro_batch)

    return _build("PipeDream", num_ranks, num_micro_batches, of_rank)


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """1F1B over v chunks per rank (arXiv 2104.04473, section 2.2).

    Micro-batches enter in groups of p: a group passes chunk 0 of all ranks, then chunk 1, and so
    on. The bubble is v times smaller, but the ranks send v times as much or more. With one chunk
    this is 1F1B.

    Raises:
        ValueError: m is not a multiple of p (for more than one chunk).
    """
    _validate("interleaved", num_ranks, num_micro_batches, num_chunks)
    p, m, v = num_ranks, num_micro_batches, num_chunks
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ValueError(
            f"interleaved: num_micro_batches must be a multiple of num_ranks, since micro-batches "
            f"pass the chunks in groups of {p}; got {m} micro-batches on {p} ranks"
        )

    def in_groups(kind: Kind, chunks: Iterable[int]) -> list[Action]:
        chunks = list(chunks)
        return [
            Action(kind, first + i, chunk)
            for first in range(0, m, p)
            for chunk in chunks
            for i in range(p)
        ]

    def of_rank(rank: int) -> Iterator[Action]:
        # Each earlier rank has two more warm-up forwards, not one as in 1F1B, because rank 0 must
        # have sent a whole group ahead.
        warmup = 2 * (p - rank - 1) + (v - 1) * p
        forwards, backwards = in_groups(F, range(v)), in_groups(B, reversed(range(v)))
        return _alternate(forwards, backwards, warmup)

    return _build("interleaved 1F1B", p, m, of_rank, v)


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B with delayed weight gradients (arXiv 2401.10241, section 2, "ZB-H1").

    B computes only the input gradient, for which the previous rank waits. Rank r runs W of a
    micro-batch r backwards later. So every rank holds at most p micro-batches, like rank 0 in 1F1B,
    and the remaining W run while the rank would otherwise wait.
    """
    _validate("zb_h1", num_ranks, num_micro_batches)

    def of_rank(rank: int) -> Iterator[Action]:
        done = waiting = 0
        for action in one_f_one_b(num_ranks, num_micro_batches).actions[rank]:
            yield action
            if action.kind is B:
                waiting += 1
                if waiting > rank:
                    yield Action(W, done)
                    done, waiting = done + 1, waiting - 1
        for micro_batch in range(done, num_micro_batches):
            yield Action(W, micro_batch)

    return _build("ZB-H1", num_ranks, num_micro_batches, of_rank)


def forward_only(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Evaluation: no backward, no kept activations. Groups of p micro-batches pass all chunks."""
    _validate("forward_only", num_ranks, num_micro_batches, num_chunks)
    groups = range(0, num_micro_batches, num_ranks)
    actions = [
        Action(F, i, chunk)
        for first in groups
        for chunk in range(num_chunks)
        for i in range(first, min(first + num_ranks, num_micro_batches))
    ]
    return _build("forward only", num_ranks, num_micro_batches, lambda rank: actions, num_chunks)


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> Iterator[Action]:
    """`warmup` forwards; then forward, backward, ...; then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def _validate(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> None:
    for what, value in (
        ("num_ranks", num_ranks),
        ("num_micro_batches", num_micro_batches),
        ("num_chunks", num_chunks),
    ):
        if value < 1:
            raise ValueError(f"{name}: {what} must be at least 1, got {value}")


def _build(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    of_rank: Callable[[int], Iterable[Action]],
    num_chunks: int = 1,
) -> Schedule:
    actions = tuple(tuple(of_rank(rank)) for rank in range(num_ranks))
    return Schedule(name, num_ranks, num_micro_batches, actions, num_chunks)
