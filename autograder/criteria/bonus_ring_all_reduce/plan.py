"""Criteria for the plan of a ring all-reduce: which rank sends which chunk in which step.

A plan is a function of rank and world size, so every real rank evaluates several *virtual* ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer

VIRTUAL_WORLDS = (2, 3, 5, 8)


# --- chunks --------------------------------------------------------------------------------------


def draw_chunks(draw: Draw) -> list[Values]:
    """Sizes that divide evenly and that do not, sizes below the number of chunks, and zero."""
    rng = draw.shared()
    cases = []
    for chunks in (1, 3, 4, 7):
        whole = chunks * int(rng.integers(3, 9))
        cases += [[whole, chunks], [whole + int(rng.integers(1, max(2, chunks))), chunks]]
    cases += [[2, 5], [0, 3], [1, 1]]
    return [{"cases": cases} for _ in range(draw.world_size)]


def observe_chunks(chunk_bounds: Any, inputs: Values, context: Context) -> Values:
    """Begin and end of every chunk."""
    return {
        "bounds": [
            [[integer(begin, "begin"), integer(end, "end")] for begin, end in chunk_bounds(*case)]
            for case in inputs["cases"]
        ]
    }


def judge_chunks(case: Case) -> Iterator[Finding]:
    """Requires consecutive chunks that cover everything once and differ by at most one."""
    for rank, answer in enumerate(case.answers):
        for number, (numel, chunks) in enumerate(case.inputs[rank]["cases"]):
            bounds = _item(answer.get("bounds"), number)
            problem = _chunks_problem(bounds, numel, chunks)
            if problem:
                yield Finding(f"chunk_bounds({numel}, {chunks}): {problem}", rank)
                break


def _item(values: Any, number: int) -> Any:
    return values[number] if isinstance(values, list) and number < len(values) else None


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


def draw_steps(draw: Draw) -> list[Values]:
    """Draws nothing: the criterion evaluates all ranks of all virtual worlds."""
    return [{} for _ in range(draw.world_size)]


def observe_steps(ring_steps: Any, inputs: Values, context: Context) -> Values:
    """The steps of the virtual ranks that this real rank evaluates."""
    answer: Values = {}
    for world_size in VIRTUAL_WORLDS:
        for rank in range(context.rank, world_size, context.world_size):
            answer[f"{world_size}/{rank}"] = [
                [integer(sent, "a chunk to send"), integer(received, "a chunk to receive")]
                for sent, received in ring_steps(rank, world_size)
            ]
    return answer


def _plan(case: Case, world_size: int) -> list[list[tuple[int, int]]] | Finding:
    """The steps of each virtual rank if all steps fit together, otherwise a finding."""
    plan = []
    for rank in range(world_size):
        real = rank % case.world_size
        steps = _pairs(case.answers[real].get(f"{world_size}/{rank}"))
        where = f"ring_steps({rank}, {world_size})"
        if steps is None or len(steps) != 2 * (world_size - 1):
            got = "no list of pairs" if steps is None else f"{len(steps)} steps"
            return Finding(f"{where}: expected {2 * (world_size - 1)} steps, got {got}.", real)
        if any(not 0 <= chunk < world_size for step in steps for chunk in step):
            return Finding(f"{where}: chunks have the numbers 0 to {world_size - 1}.", real)
        plan.append(steps)
    for step in range(2 * (world_size - 1)):
        for rank in range(world_size):
            sent, received = plan[rank - 1][step][0], plan[rank][step][1]
            if sent != received:
                return Finding(
                    f"{world_size} ranks, step {step}: rank {(rank - 1) % world_size} sends chunk "
                    f"{sent} to rank {rank}, which expects chunk {received}.",
                    rank % case.world_size,
                )
    return plan


def judge_reduce(case: Case) -> list[Finding]:
    """Requires that N - 1 adding steps give each rank the whole sum of a different chunk."""
    findings: list[Finding] = []
    for n in VIRTUAL_WORLDS:
        plan = _plan(case, n)
        if isinstance(plan, Finding):
            return [plan]
        # held[r, c, k]: how often chunk c of rank r contains the numbers of rank k.
        held = np.stack([np.tile(np.eye(n, dtype=int)[rank], (n, 1)) for rank in range(n)])
        for step in range(n - 1):
            sent = [held[rank, plan[rank][step][0]].copy() for rank in range(n)]
            for rank in range(n):
                held[rank, plan[rank][step][1]] += sent[rank - 1]
        whole = [[c for c in range(n) if (held[rank, c] == 1).all()] for rank in range(n)]
        for rank, chunks in enumerate(whole):
            if not chunks:
                found = f"the best chunk holds {int((held[rank] > 0).sum(axis=1).max())} ranks"
                if (held[rank] > 1).any():
                    found = "some numbers were added twice"
                findings.append(
                    Finding(
                        f"{n} ranks, after {n - 1} steps: rank {rank} has no chunk with "
                        f"everybody's numbers in it, once each; {found}. Send on what you have "
                        "just added to.",
                        rank % case.world_size,
                    )
                )
                break
        if findings:
            break
        if len({chunks[0] for chunks in whole}) < n:
            findings.append(Finding(f"{n} ranks: two of them have the sum of the same chunk."))
            break
    return findings


def judge_gather(case: Case) -> Iterator[Finding]:
    """Requires that N - 1 more steps give all sums to all ranks.

    The judge assumes that each rank already has the sum of the chunk that it sends first.
    """
    for n in VIRTUAL_WORLDS:
        plan = _plan(case, n)
        if isinstance(plan, Finding):
            yield plan
            return
        has = [{plan[rank][n - 1][0]} for rank in range(n)]
        for step in range(n - 1, 2 * (n - 1)):
            for rank in range(n):
                if plan[rank][step][0] not in has[rank]:
                    yield Finding(
                        f"{n} ranks, step {step}: rank {rank} sends chunk {plan[rank][step][0]}, "
                        "whose sum it does not have yet.",
                        rank % case.world_size,
                    )
                    return
            for rank in range(n):
                has[rank].add(plan[rank][step][1])
        for rank in range(n):
            if len(has[rank]) < n:
                missing = sorted(set(range(n)) - has[rank])
                yield Finding(
                    f"{n} ranks, at the end: rank {rank} lacks the sums of chunks {missing}.",
                    rank % case.world_size,
                )
                return
