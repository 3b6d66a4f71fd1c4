"""Criteria for finding what slows a run down: traces of several ranks with one planted cause.

Names, magnitudes, the number of ranks and steps, and the rank that causes the loss are drawn. In
every trace much work is hidden behind computation (loading ahead, logging, copies, collectives).
The hidden work costs no time, although it is longer than the planted loss. Losses that are not
planted stay below 5 % of a step, and planted losses are above 20 %; the limit in the lab's rule is
10 %. A planted slow loader or copy affects one rank in the second trace and all ranks in the other
traces. The third trace has a second, smaller planted loss, except for "buckets" and "none".
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab6_profiling.spans import Span, draw_name, nth, pack, unpack

CAUSES = ("loader", "copies", "logging", "straggler", "buckets")
_WAITS = (("logging", "host"), ("loader", "loader"), ("copies", "copy"))
NONE = "none"
TRACES = 3
_HINTS = {
    "loader": "the device stands still until its batch has come, on some rank",
    "copies": "the device stands still while its batch is copied, on some rank",
    "logging": "on one rank the device stands still while the host writes a log; all others wait "
    "for that rank in the next all-reduce",
    "straggler": "one rank computes longer than the others, and they wait for it",
    "buckets": "on every rank, the last one to arrive as well, communication goes on long after "
    "the computation; the buckets are many and small",
    NONE: "whatever happens beside computation costs nothing, and steps[0] is a warm-up step",
}


def draw_cause(draw: Draw, cause: str) -> list[Values]:
    """`TRACES` runs with this cause for each rank."""
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), Values(steps=[])
        for number in range(TRACES):
            second = None
            if number == 2 and cause not in (NONE, "buckets"):
                second = str(rng.choice([c for c in ("loader", "copies", "logging") if c != cause]))
            spans, steps = _draw_run(rng, cause, number == 1, second)
            values["steps"].append(steps)
            values |= pack([spans[i] for i in rng.permutation(len(spans))], str(number))
        inputs.append(values)
    return inputs


def _draw_run(
    rng: np.random.Generator, cause: str, on_one_rank: bool, second: str | None
) -> tuple[list[Span], list[tuple[float, float]]]:
    """Spans of all ranks, and the window of each step; the first step is a warm-up.

    Args:
        on_one_rank: a loader or copy is slow on one rank, not on all; logs are written in odd
            steps, not in even steps.
        second: a second loss, smaller than the first, on one rank.
    """
    num_ranks, num_steps = int(rng.integers(3, 6)), 2 * int(rng.integers(1, 3)) + 1
    busy = float(rng.uniform(0.02, 0.4))
    share = float(rng.uniform(0.22, 0.3))
    extra = busy * share / (1 - share)
    to_blame = int(rng.integers(num_ranks))
    now, spans, steps = float(rng.uniform(0, 20)), [], []
    for step in range(num_steps):
        small = rng.uniform(0.005, 0.03, (3, num_ranks)) * busy
        lost: dict[str, np.ndarray] = {what: small[i] for i, (what, _) in enumerate(_WAITS)}
        factor = 1 + rng.uniform(0, 0.01, num_ranks)
        if cause in ("loader", "copies"):
            who = np.arange(num_ranks) == to_blame if on_one_rank else np.ones(num_ranks)
            lost[cause] = lost[cause] + extra * rng.uniform(0.95, 1.05, num_ranks) * who
        elif cause == "logging":
            # Without a second loss, logging occurs in every other step and takes twice as long, so
            # that a single step does not represent the run.
            times = 1 if second else 2 * (step % 2 == on_one_rank)
            lost[cause][to_blame] += extra * times
        elif cause == "straggler":
            factor[to_blame] += extra / (0.9 * busy)
        elif cause == NONE and step == 0:  # warm-up: workers start, libraries choose algorithms
            lost["loader"][to_blame] += 20 * busy
            factor[(to_blame + 1) % num_ranks] += 4
        if second is not None:
            lost[second][(to_blame + 1) % num_ranks] += 0.6 * extra
        tail = extra if cause == "buckets" else 0.0
        end = _draw_step(rng, spans, now, busy, lost, factor, tail, cause)
        steps.append((now, end))
        now = end
    return spans, steps


def _draw_step(
    rng: np.random.Generator,
    spans: list[Span],
    begin: float,
    busy: float,
    lost: dict[str, np.ndarray],
    factor: np.ndarray,
    tail: float,
    cause: str,
) -> float:
    """Adds one step of all ranks: waits, forward, backward with collectives, optimizer.

    Returns:
        The end of the step.
    """
    backward: list[tuple[float, float]] = []
    for rank, slower in enumerate(factor.tolist()):
        now = begin
        for what, kind in _WAITS:
            length = float(lost[what][rank])
            spans.append(Span(rank, kind, draw_name(rng), now, now + length))
            now += length
        middle, end = now + 0.3 * busy * slower, now + 0.9 * busy * slower
        backward.append((middle, end))
        _compute(rng, spans, rank, now, end)
        # Work hidden behind computation: much of each kind, but little of the planted kind.
        for what, kind in _WAITS:
            part = rng.uniform(0.05, 0.15) if what == cause else rng.uniform(0.7, 0.9)
            length = float(part) * (end - now)
            start = float(rng.uniform(now, end - length))
            spans.append(Span(rank, kind, draw_name(rng), start, start + length))
    done = _collectives(rng, spans, backward, busy, tail)
    end = done + 0.1 * busy
    for rank in range(len(factor)):
        _compute(rng, spans, rank, done, end)
    return end


def _compute(rng: np.random.Generator, spans: list[Span], rank: int, a: float, b: float) -> None:
    """Computation without a gap: kernels of one stream, and a kernel of a second stream."""
    cuts = [a, *np.sort(rng.uniform(a, b, 3)).tolist(), b]
    for one, two in pairwise(cuts):
        spans.append(Span(rank, "compute", draw_name(rng), one, two))
    spans.append(Span(rank, "compute", draw_name(rng), (3 * a + b) / 4, (a + b) / 2))


def _collectives(
    rng: np.random.Generator,
    spans: list[Span],
    backward: list[tuple[float, float]],
    busy: float,
    tail: float,
) -> float:
    """Adds the all-reduces of one step.

    A span begins at the rank's call, or when its previous all-reduce ends if that is later. It ends
    for all ranks at the same time.

    Returns:
        The end of the last all-reduce.
    """
    length = 0.6 * busy
    count = int(rng.integers(35, 55) if tail else rng.integers(12, 40))
    # With a tail the network is always busy, and the last bucket ends `tail` after backward.
    each = (length + tail - length / count) / count if tail else 0.4 * length / count
    name, free = draw_name(rng), [0.0] * len(backward)
    end = 0.0
    for number in range(count):
        issued = [a + (number + 1) / count * (b - a) for a, b in backward]
        starts = [max(free[rank], at) for rank, at in enumerate(issued)]
        end = max(end, *issued) + each
        for rank, start in enumerate(starts):
            spans.append(Span(rank, "communication", name, start, end))
            free[rank] = end
    return end


def observe(find_bottleneck: Any, inputs: Values, context: Context) -> Values:
    """The name that the function returns for every trace."""
    said = []
    for number, steps in enumerate(inputs["steps"]):
        windows = [(float(a), float(b)) for a, b in steps]
        answer = find_bottleneck(unpack(inputs, str(number)), windows)
        if not isinstance(answer, str):
            raise TypeError(f"find_bottleneck: expected one of the names, got {answer!r}")
        said.append(answer[:50])
    return {"said": said}


def judge_cause(case: Case, cause: str) -> Iterator[Finding]:
    """The function names the cause for every trace."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number in range(len(inputs["steps"])):
            got = nth(answer.get("said"), number)
            if got != cause:
                ranks = 1 + int(inputs[f"{number}/rank"].max())
                yield Finding(
                    f"a run of {ranks} ranks and {len(inputs['steps'][number])} steps: expected "
                    f"{cause!r}, got {got!r}. In that trace {_HINTS[cause]}.",
                    rank,
                )
                break


def functions(cause: str) -> dict[str, Any]:
    """`draw` and `judge` for one cause, as keyword arguments of a criterion."""
    return {"draw": partial(draw_cause, cause=cause), "judge": partial(judge_cause, cause=cause)}
