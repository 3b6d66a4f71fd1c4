"""Criteria that run no pipeline: where to cut it, the schedules, and what a schedule keeps.

A schedule is a function of rank, stages and micro-batches, so every real rank evaluates the
schedules of several *virtual* ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from autograder.criteria.common.answers import described, item_of, read_pairs, unchanged
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, integer, per_rank

Step = tuple[str, int]
FORWARD, BACKWARD = "forward", "backward"


# --- cutting -------------------------------------------------------------------------------------


@per_rank
def draw_cut(rng: np.random.Generator) -> Values:
    """Layers of different costs, where equal layer counts make bad stages; and some easy cases.

    Some costs are small whole numbers, some zero, some fractions far below one, some FLOPs; no sum
    of them is rounded.
    """
    cases: list[list[Any]] = [[[3, 1, 2], 1], [[5, 1, 1, 1], 4], [[0, 2, 0], 3]]
    # Sums that are as equal as possible (2, 4, 7) are not the cheapest cut (6, 6, 1).
    k = int(rng.integers(2, 9))
    cases.append([[2 * k, 4 * k, 6 * k, k], 3])
    # Layers that only reshape cost nothing, wherever they are.
    a, b, c = (int(cost) for cost in rng.integers(1, 30, 3))
    cases.append([[0, a, 0, b, c, 0], 3])
    units = [1] * 8 + [2.0**-10] * 2 + [2.0**-20, 10**12]
    while len(cases) < len(units):
        unit = units[len(cases)]
        costs = [unit * int(c) for c in rng.integers(1, 30, int(rng.integers(6, 13)))]
        if rng.random() < 0.5:
            costs[-1] *= 4  # a head with a large vocabulary
        stages = int(rng.integers(2, 6))
        counts = [len(costs) * s // stages for s in range(stages + 1)]
        by_count = max(sum(costs[a:b]) for a, b in pairwise(counts))
        if by_count > 1.15 * least_cost(costs, stages):
            cases.append([costs, stages])
    return {"cases": cases}


def least_cost(costs: list[float], stages: int) -> float:
    """The cost of the most expensive stage of the best cut, by dynamic programming."""
    sums = np.concatenate([[0], np.cumsum(costs)])
    best = [float(s) for s in sums]
    for used in range(1, stages):
        best = [
            min(
                (max(best[j], float(sums[i] - sums[j])) for j in range(used, i)),
                default=float("inf"),
            )
            for i in range(len(sums))
        ]
    return best[-1]


def observe_cut(cut_layers: Any, inputs: Values, context: Context) -> Values:
    """Begin and end of every stage."""
    cuts = []
    for costs, stages in inputs["cases"]:
        given = list(costs)
        cuts.append(read_pairs(_lasting(cut_layers(given, stages), "cut_layers"), "cut_layers"))
        unchanged(f"cut_layers({costs}, {stages})", "costs", given, costs)
    return {"cuts": cuts}


def _lasting(values: Any, what: str) -> Any:
    """`values`; raises an error for an iterator, which can be read only once."""
    if isinstance(values, Iterator):
        raise TypeError(f"expected a list from {what}, got {described(values)}: use list(…).")
    return values


def judge_cut(case: Case) -> Iterator[Finding]:
    """Stages are contiguous, complete and not empty, and their largest cost is minimal.

    Of several such cuts any one is right.
    """
    for rank, answer in enumerate(case.answers):
        for number, (costs, stages) in enumerate(case.inputs[rank]["cases"]):
            problem = _cut_problem(item_of(answer.get("cuts"), number), costs, stages)
            if problem:
                yield Finding(f"cut_layers({costs}, {stages}): {problem}", rank)
                break


def _cut_problem(got: Any, costs: list[float], stages: int) -> str | None:
    pairs = _pairs(got)
    if pairs is None:
        return "expected a list of pairs (begin, end)."
    if len(pairs) != stages:
        return f"expected {stages} stages, got {len(pairs)}."
    at = 0
    for begin, end in pairs:
        if begin != at:
            return f"expected a stage that begins at layer {at}, got ({begin}, {end})."
        if end <= begin:
            return f"stage ({begin}, {end}) is empty: its rank would have nothing to do."
        at = end
    if at != len(costs):
        return f"the last stage ends at {at}, expected {len(costs)}."
    sums = [sum(costs[a:b]) for a, b in pairs]
    least = least_cost(costs, stages)
    if max(sums) > least:
        return (
            f"the stages cost {[float(f'{cost:.4g}') for cost in sums]}. The dearest sets the pace "
            f"of all: {max(sums):g} here, but {least:g} is possible."
        )
    return None


def _pairs(values: Any) -> list[tuple[int, int]] | None:
    if not isinstance(values, list):
        return None
    for pair in values:
        if not isinstance(pair, list) or len(pair) != 2 or any(type(v) is not int for v in pair):
            return None
    return [(a, b) for a, b in values]


# --- schedules -----------------------------------------------------------------------------------


def gpipe_of(num_micro_batches: int) -> list[Step]:
    """All forwards, then all backwards."""
    return [(what, i) for what in (FORWARD, BACKWARD) for i in range(num_micro_batches)]


def one_f_one_b_of(rank: int, num_stages: int, num_micro_batches: int) -> list[Step]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    warm_up = min(num_stages - 1 - rank, num_micro_batches)
    steps = [(FORWARD, i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        steps += [(FORWARD, warm_up + i), (BACKWARD, i)]
    return steps + [(BACKWARD, i) for i in range(num_micro_batches - warm_up, num_micro_batches)]


def one_f_one_b_everywhere(num_stages: int, m: int) -> list[list[Step]]:
    """1F1B of m micro-batches on all ranks."""
    return [one_f_one_b_of(rank, num_stages, m) for rank in range(num_stages)]


def most_kept(steps: list[Step]) -> int:
    """The largest number of micro-batches that are between forward and backward at once."""
    changes = [1 if what == FORWARD else -1 for what, _ in steps]
    return max([0, *np.cumsum(changes).tolist()])


def draw_schedules(draw: Draw) -> list[Values]:
    """Pairs [stages, micro-batches]: fewer, as many and more stages, one stage, one micro-batch."""
    rng = draw.shared()
    pairs = [[1, 3], [2, 1], [4, 4], [3, 2], [2, 6]]
    pairs += [[int(rng.integers(3, 8)), int(rng.integers(8, 14))] for _ in range(2)]
    many = int(rng.integers(5, 9))
    pairs.append([many, int(rng.integers(2, many - 1))])  # too few for a full warm-up of rank 0
    return [{"pairs": pairs} for _ in range(draw.world_size)]


def observe_schedules(build: Any, inputs: Values, context: Context) -> Values:
    """The schedules of the virtual ranks that this rank evaluates."""
    answer: Values = {}
    for stages, micro_batches in inputs["pairs"]:
        for rank in range(context.rank, stages, context.world_size):
            steps = _lasting(build(rank, stages, micro_batches), "this function")
            answer[f"{stages}/{micro_batches}/{rank}"] = read_pairs(steps, "this function", _kind)
    return answer


def _kind(value: Any, what: str) -> str:
    return str(value)[:20]


def _schedules(case: Case) -> Any:
    """Yields (real rank, stages, micro-batches, virtual rank, schedule or None)."""
    for stages, micro_batches in case.inputs[0]["pairs"]:
        for rank in range(stages):
            real = rank % case.world_size
            got = case.answers[real].get(f"{stages}/{micro_batches}/{rank}")
            yield real, stages, micro_batches, rank, _steps(got)


def _steps(values: Any) -> list[Step] | None:
    if not isinstance(values, list):
        return None
    for step in values:
        if not isinstance(step, list) or len(step) != 2 or step[0] not in (FORWARD, BACKWARD):
            return None
        if type(step[1]) is not int:
            return None
    return [(what, i) for what, i in values]


def _incomplete(steps: list[Step] | None, micro_batches: int) -> str | None:
    if steps is None:
        return 'expected a list of ("forward" or "backward", micro-batch).'
    for what in (FORWARD, BACKWARD):
        numbers = sorted(i for kind, i in steps if kind == what)
        if numbers != list(range(micro_batches)):
            return f"expected each of {micro_batches} micro-batches once in {what}, got {numbers}."
    return None


def judge_gpipe(case: Case) -> list[Finding]:
    """All forwards in order, then all backwards, in order or in reverse, alike on all ranks."""
    orders: dict[tuple[int, int], list[int]] = {}
    for real, stages, m, rank, steps in _schedules(case):
        where = f"gpipe({rank}, {stages}, {m})"
        problem = _incomplete(steps, m)
        if not problem and [what for what, _ in steps] != [FORWARD] * m + [BACKWARD] * m:
            problem = "expected all forwards, then all backwards."
        if not problem and [i for _, i in steps[:m]] != list(range(m)):
            problem = f"expected the forwards in order, got {[i for _, i in steps[:m]]}."
        if not problem:
            backwards = [i for _, i in steps[m:]]
            if backwards != orders.setdefault((stages, m), backwards):
                problem = "its backwards have a different order than those of another rank."
            elif backwards not in (list(range(m)), list(range(m))[::-1]):
                problem = f"expected the backwards in order (or reversed), got {backwards}."
        if problem:
            return [Finding(f"{where}: {problem}", real)]
    return []


def judge_1f1b(case: Case) -> list[Finding]:
    """The schedule is the one of `one_f_one_b_of`: no other schedule is 1F1B."""
    for real, stages, m, rank, steps in _schedules(case):
        where = f"one_f_one_b({rank}, {stages}, {m})"
        problem = _incomplete(steps, m)
        right = one_f_one_b_of(rank, stages, m)
        if not problem and steps != right:
            begins = next((k for k, (what, _) in enumerate(steps) if what == BACKWARD), m)
            problem = (
                f"forwards before the first backward: {begins}, expected {min(stages - rank, m)}: "
                "a warm-up, and the first of the pairs. "
            )
            if begins == min(stages - rank, m):
                at = next(k for k, (a, b) in enumerate(zip(steps, right, strict=True)) if a != b)
                problem = f"step {at} is {steps[at]}, expected {right[at]}. "
            if most_kept(steps) > min(stages - rank, m):
                problem += f"It keeps {most_kept(steps)} micro-batches at once."
        if problem:
            return [Finding(f"{where}: {problem.strip()}", real)]
    return []


# --- what a schedule keeps -----------------------------------------------------------------------


@per_rank
def draw_kept(rng: np.random.Generator) -> Values:
    """1F1B and GPipe schedules, and random ones that nobody would use."""
    schedules: list[Any] = []
    for _ in range(6):
        m, stages = int(rng.integers(3, 9)), int(rng.integers(2, 7))
        schedules.append(_at_random(rng, m))
        schedules.append(one_f_one_b_of(int(rng.integers(stages)), stages, m))
    schedules.append(gpipe_of(int(rng.integers(3, 9))))
    return {"schedules": [[list(step) for step in steps] for steps in schedules]}


def _at_random(rng: np.random.Generator, m: int) -> list[Step]:
    steps: list[Step] = []
    waiting, kept = list(range(m)), []
    while waiting or kept:
        if waiting and (not kept or rng.random() < 0.5):
            steps.append((FORWARD, waiting.pop(int(rng.integers(len(waiting))))))
            kept.append(steps[-1][1])
        else:
            steps.append((BACKWARD, kept.pop(int(rng.integers(len(kept))))))
    return steps


def observe_kept(peak_kept: Any, inputs: Values, context: Context) -> Values:
    """The peak of every schedule."""
    peaks = []
    for steps in inputs["schedules"]:
        right = [(what, i) for what, i in steps]
        given = list(right)
        peaks.append(integer(peak_kept(given), "peak_kept"))
        unchanged("peak_kept", "schedule", given, right)
    return {"peaks": peaks}


def judge_kept(case: Case) -> Iterator[Finding]:
    """The peak is the largest number of micro-batches after forward and before backward."""
    for rank, answer in enumerate(case.answers):
        for number, steps in enumerate(case.inputs[rank]["schedules"]):
            right = most_kept([(what, i) for what, i in steps])
            got = item_of(answer.get("peaks"), number)
            if type(got) is not int or got != right:
                text = " ".join(f"{what[0].upper()}{i}" for what, i in steps)
                yield Finding(
                    f"{text}: expected {right}, got {got}. A micro-batch is kept from its "
                    "forward until its backward.",
                    rank,
                )
                break
