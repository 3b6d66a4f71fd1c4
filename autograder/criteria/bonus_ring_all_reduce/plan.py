"""Criteria for the plan of a ring all-reduce: which rank sends which chunk in which step.

A plan is a function of rank and world size, so every real rank evaluates several *virtual* ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autograder.criteria.common.answers import described, item_of, read_pairs, returned, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

VIRTUAL_WORLDS = (2, 3, 5, 8)
ALSO_ONE = (1, *VIRTUAL_WORLDS)  # one rank has a plan without steps; only `judge_gather` judges it
# In float64, int(61 / 7 * 7) is 60; the last size is too large for float32.
LOST_BY_ROUNDING = ((61, 7), (15, 13), (20_000_003, 7))


# --- chunks --------------------------------------------------------------------------------------


def draw_chunks(draw: Draw) -> list[Values]:
    """Sizes that divide evenly and that do not, below the number of chunks, zero, and large."""
    rng = draw.shared()
    cases = []
    for chunks in (1, 3, 4, 7):
        whole = chunks * int(rng.integers(3, 9))
        cases += [[whole, chunks], [whole + int(rng.integers(1, max(2, chunks))), chunks]]
    cases += [[2, 5], [0, 3], [1, 1], *map(list, LOST_BY_ROUNDING)]
    return [{"cases": cases} for _ in range(draw.world_size)]


def observe_chunks(chunk_bounds: Any, inputs: Values, context: Context) -> Values:
    """Begin and end of every chunk."""
    answer: Values = {"bounds": []}
    for case in inputs["cases"]:
        chunks = _noted(chunk_bounds(*case), "chunk_bounds", answer)
        answer["bounds"].append(read_pairs(chunks, "chunk_bounds"))
    return answer


def _noted(pairs: Any, what: str, answer: Values) -> Any:
    """The pairs that `what` returned. If they are no list, the answer notes their type.

    An iterator has no length and no items, and is empty after it has been read once.
    """
    if not hasattr(returned(pairs, what), "__getitem__"):
        answer["no list"] = f"{what}: expected a list of pairs, got {described(pairs)}."
    return pairs


def _no_list(case: Case) -> Iterator[Finding]:
    """Findings for the notes of `_noted`."""
    for rank, answer in enumerate(case.answers):
        if note := told(answer, "no list"):
            yield Finding(str(note), rank)


def judge_chunks(case: Case) -> Iterator[Finding]:
    """Requires consecutive chunks that cover everything once and differ by at most one.

    Any of them may be the longer ones.
    """
    yield from _no_list(case)
    for rank, answer in enumerate(case.answers):
        for number, (numel, chunks) in enumerate(case.inputs[rank]["cases"]):
            bounds = item_of(answer.get("bounds"), number)
            problem = _chunks_problem(bounds, numel, chunks)
            if problem:
                yield Finding(f"chunk_bounds({numel}, {chunks}): {problem}", rank)
                break


def _pairs(values: Any) -> list[tuple[int, int]] | None:
    """The values as a list of pairs of ints, or None if they are something else."""
    if not isinstance(values, list):
        return None
    pairs = []
    for pair in values:
        if not isinstance(pair, list) or len(pair) != 2 or any(type(v) is not int for v in pair):
            return None
        pairs.append((pair[0], pair[1]))
    return pairs


def _chunks_problem(values: Any, numel: int, chunks: int) -> str | None:
    bounds = _pairs(values)
    if bounds is None:
        return "expected a list of pairs (begin, end)."
    if len(bounds) != chunks:
        return f"expected {chunks} chunks, got {len(bounds)}."
    at = 0
    for begin, end in bounds:
        if begin != at or end < begin:
            return f"expected a chunk that begins at {at}, got ({begin}, {end})."
        at = end
    if at != numel:
        return f"the last chunk ends at {at}, expected {numel}."
    sizes = [end - begin for begin, end in bounds]
    if max(sizes) - min(sizes) > 1:
        return f"the sizes are {sizes}; no two should differ by more than one."
    return None


# --- steps ---------------------------------------------------------------------------------------


def _draw_worlds(draw: Draw, worlds: tuple[int, ...]) -> list[Values]:
    """Draws nothing: the criterion evaluates all ranks of all virtual worlds."""
    return [{"worlds": list(worlds)} for _ in range(draw.world_size)]


draw_reduce = partial(_draw_worlds, worlds=VIRTUAL_WORLDS)
draw_gather = partial(_draw_worlds, worlds=ALSO_ONE)


def observe_steps(ring_steps: Any, inputs: Values, context: Context) -> Values:
    """The steps of the virtual ranks that this real rank evaluates."""
    answer: Values = {}
    for world_size in inputs["worlds"]:
        for rank in range(context.rank, world_size, context.world_size):
            steps = _noted(ring_steps(rank, world_size), "ring_steps", answer)
            answer[f"{world_size}/{rank}"] = read_pairs(steps, "ring_steps")
    return answer


@dataclass(frozen=True)
class _Half:
    """N - 1 steps of all ranks of one virtual world: per rank its pairs (sent, received)."""

    n: int
    steps: list[list[tuple[int, int]]]

    def walk(self) -> list[list[tuple[int, int]]]:
        """The steps, relative to the chunk that a rank sends first."""
        return [
            [((sent - own[0][0]) % self.n, (got - own[0][0]) % self.n) for sent, got in own]
            for own in self.steps
        ]


def _half(case: Case, n: int, first: bool) -> _Half | Finding:
    """The steps of one half if they fit together, otherwise a finding."""
    halves = []
    for rank in range(n):
        real = rank % case.world_size
        steps = _pairs(case.answers[real].get(f"{n}/{rank}"))
        where = f"ring_steps({rank}, {n})"
        if steps is None:
            return Finding(f"{where}: expected a list of pairs (sent, received).", real)
        # Missing steps at the end, and additional steps, count as faults of the second half.
        if len(steps) < n - 1 if first else len(steps) != 2 * (n - 1):
            return Finding(f"{where}: expected {2 * (n - 1)} steps, got {len(steps)}.", real)
        half = steps[: n - 1] if first else steps[n - 1 :]
        if others := [chunk for step in half for chunk in step if not 0 <= chunk < n]:
            text = f"{where}: chunks have the numbers 0 to {n - 1}, got {others[0]}."
            return Finding(text, real)
        halves.append(half)
    for step in range(n - 1):
        for rank in range(n):
            sent, received = halves[rank - 1][step][0], halves[rank][step][1]
            if sent != received:
                return Finding(
                    f"{n} ranks, step {step if first else n - 1 + step}: rank {(rank - 1) % n} "
                    f"sends chunk {sent} to rank {rank}, which expects chunk {received}.",
                    rank % case.world_size,
                )
    return _Half(n, halves)


def _sums(half: _Half) -> list[list[int]] | Finding:
    """Per rank the chunks whose sum it has after the first half, or why there are none.

    The rank of the finding is a virtual one.
    """
    n = half.n
    # held[r, c, k]: how often chunk c of rank r contains the numbers of rank k.
    held = np.stack([np.tile(np.eye(n, dtype=int)[rank], (n, 1)) for rank in range(n)])
    for step in range(n - 1):
        sent = [held[rank, half.steps[rank][step][0]].copy() for rank in range(n)]
        for rank in range(n):
            held[rank, half.steps[rank][step][1]] += sent[rank - 1]
    whole = [[c for c in range(n) if (held[rank, c] == 1).all()] for rank in range(n)]
    for rank, chunks in enumerate(whole):
        if not chunks:
            found = f"the best chunk holds {int((held[rank] > 0).sum(axis=1).max())} ranks"
            if (held[rank] > 1).any():
                found = "some numbers were added twice"
            return Finding(
                f"{n} ranks, after {n - 1} steps: rank {rank} has no chunk with everybody's "
                f"numbers in it, once each; {found}. Send on what you have just added to.",
                rank,
            )
    if len({chunks[0] for chunks in whole}) < n:
        return Finding(f"{n} ranks: two of them have the sum of the same chunk.")
    return whole


def judge_reduce(case: Case) -> Iterator[Finding]:
    """Requires that N - 1 adding steps give each rank the whole sum of a different chunk.

    A rank may begin with any chunk.
    """
    for n in VIRTUAL_WORLDS:
        half = _half(case, n, first=True)
        found = half if isinstance(half, Finding) else _sums(half)
        if isinstance(found, Finding):
            rank = None if found.rank is None else found.rank % case.world_size
            yield replace(found, rank=rank)
            return


def judge_gather(case: Case) -> Iterator[Finding]:
    """Requires that N - 1 more steps give all sums to all ranks.

    A rank begins with the sums that the first half has left. If a rank has none, which costs
    `judge_reduce`, the second half is judged as if each rank had the sum that it sends first. A
    second half that repeats the steps of the first repeats the same mistake, and is not judged.
    Only this judge reports steps that are no list.
    """
    yield from _no_list(case)
    for n in ALSO_ONE:
        half, before = _half(case, n, first=False), _half(case, n, first=True)
        if isinstance(half, Finding):
            yield half
            return
        left = before if isinstance(before, Finding) else _sums(before)
        if isinstance(left, Finding):
            if isinstance(before, _Half) and half.walk() == before.walk():
                return
            left = [[steps[0][0]] for steps in half.steps]
        if problem := _gather_problem(half, [set(chunks) for chunks in left], case.world_size):
            yield problem
            return


def _gather_problem(half: _Half, has: list[set[int]], world_size: int) -> Finding | None:
    """What is wrong with the second half, if rank r begins with the sums of chunks `has[r]`."""
    n = half.n
    for step in range(n - 1):
        for rank, own in enumerate(half.steps):
            if own[step][0] not in has[rank]:
                return Finding(
                    f"{n} ranks, step {n - 1 + step}: rank {rank} sends chunk {own[step][0]}, "
                    f"whose sum it does not have yet. It has the sums of chunks "
                    f"{sorted(has[rank])}.",
                    rank % world_size,
                )
        for rank, own in enumerate(half.steps):
            has[rank].add(own[step][1])
    for rank, chunks in enumerate(has):
        if missing := sorted(set(range(n)) - chunks):
            return Finding(
                f"{n} ranks, at the end: rank {rank} lacks the sums of chunks {missing}.",
                rank % world_size,
            )
    return None
