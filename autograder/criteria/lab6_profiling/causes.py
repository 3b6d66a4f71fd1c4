"""Criteria for finding what slows a run down: each asks for one line of the lab's table.

A run is made from a table: seconds of each part, per step and rank, which are drawn. So a criterion
can ask for its own cause alone. A submission that aggregates this cause wrongly (the mean in place
of the maximum, one rank in place of all) fails in some of its runs. All other causes are so small
and so equal on all ranks that their aggregates do not matter. Only "none" asks for what concerns
all causes: the warm-up step, sums over steps, the limit, work hidden behind computation, any number
of ranks. All other runs have three ranks, like those that the lab makes up.

The answer for a run must be the cause, or must be any name but the cause. Choices that pass: any
way to add up, any of several equal losses, one window over all steps that count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from autograder.criteria.common.answers import item_of, naming, returned
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab6_profiling.runs import Run
from autograder.criteria.lab6_profiling.shares import breakdown
from autograder.criteria.lab6_profiling.spans import KINDS, Span, pack, unpack

CAUSES = ("loader", "copies", "logging", "straggler", "buckets")
NONE = "none"
NAMES = (*CAUSES, NONE)
LIMIT = 0.1
RANKS = 3  # of each run that asks for one cause
_PART = {"loader": "loader", "copies": "copy", "logging": "host", "buckets": "communication"}


# --- runs ----------------------------------------------------------------------------------------


def _planted(rng: np.random.Generator, cause: str, ranks: Any, rivals: float = 0.0) -> Run:
    """A run that loses 22 to 28 % with `cause` on some of its ranks, in every step alike.

    Args:
        ranks: makes the list of guilty ranks from the number of ranks.
        rivals: the first rank's exposed share of loading or copies, whichever is not the cause.
    """
    run = Run.quiet(rng, ranks=RANKS)
    guilty = ranks(run.num_ranks)
    run.add("compute" if cause == "straggler" else _PART[cause], rng.uniform(0.22, 0.28), guilty)
    if rivals:
        run.add("copy" if cause == "loader" else "loader", rivals, [0])
    return run


def _some(rng: np.random.Generator, cause: str) -> Iterator[tuple[bool, Run, str]]:
    """Slow on all ranks, on the first, a middle and the last one."""
    run = _planted(rng, cause, lambda n: list(range(n)))
    run.across = _PART[cause]
    yield True, run, "every rank loses the same, and what is exposed goes on into the next step"
    for ranks in (lambda n: [0], lambda n: [n // 2], lambda n: [n - 1]):
        yield (
            True,
            _planted(rng, cause, ranks),
            "one rank alone loses it, and the rank with most counts",
        )


def _copies(rng: np.random.Generator) -> Iterator[tuple[bool, Run, str]]:
    """As `_some`; and with loading, once as the smaller and once as the larger loss."""
    yield from _some(rng, "copies")
    why = "two losses are above the limit; the larger one is the answer"
    yield True, _planted(rng, "copies", lambda n: list(range(n)), rivals=0.14), why
    yield False, _planted(rng, "loader", lambda n: list(range(n)), rivals=0.14), why


def _logging(rng: np.random.Generator) -> Iterator[tuple[bool, Run, str]]:
    """One rank logs in some steps only, so that no step stands for the run."""
    for place, steps in enumerate(([1], [5], [2, 4], [1, 3, 5])):
        run = Run.quiet(rng, steps=5, ranks=RANKS)
        guilty = (0, run.num_ranks - 1, run.num_ranks // 2, 0)[place]
        share = float(rng.uniform(0.24, 0.3))
        seconds = share / (1 - share) * 5 / len(steps)
        for step in steps:
            run.add("host", seconds, [guilty], [step])
            run.lengths[step] += seconds
        yield True, run, f"rank {guilty} alone logs, in steps{steps}"


def _straggler(rng: np.random.Generator) -> Iterator[tuple[bool, Run, str]]:
    """One rank computes longer, or all but one do."""
    for ranks in (lambda n: [0], lambda n: [n // 2], lambda n: [n - 1]):
        yield True, _planted(rng, "straggler", ranks), "one rank computes longer than all others"
    for fast in (1, -1):
        ranks = partial(_all_but, which=fast)
        yield True, _planted(rng, "straggler", ranks), "all ranks but one compute longer"


def _all_but(num_ranks: int, which: int) -> list[int]:
    return [r for r in range(num_ranks) if r != which % num_ranks]


def _buckets(rng: np.random.Generator) -> Iterator[tuple[bool, Run, str]]:
    """A slow network that all ranks see; and ranks that only wait for one of them."""
    for last in (0, 1, -1):
        run = _planted(rng, "buckets", lambda n: list(range(n)))
        run.hide("communication", 0.95)
        run.add("communication", rng.uniform(0.05, 0.15), _all_but(run.num_ranks, last))
        yield True, run, "communication is exposed on every rank, the last one to arrive as well"
    for guilty, longer in ((0, "copy"), (1, "compute"), (-1, "loader")):
        run = Run.quiet(rng, ranks=RANKS)
        others = [part for part in ("host", "loader", "copy") if part != longer][:2]
        waited = 0.0
        for part, share in ((longer, float(rng.uniform(0.14, 0.16))), *((o, 0.09) for o in others)):
            run.add(part, share, [guilty % run.num_ranks])
            waited += share
        if longer == "copy":  # the guilty rank has no exposed communication
            run.parts["communication"][:, guilty] = 0.0
        run.add("communication", waited, _all_but(run.num_ranks, guilty))
        why = "all ranks but one only wait for that one; the rank with least communication counts"
        yield False, run, why


def _none(rng: np.random.Generator) -> Iterator[tuple[bool, Run, str]]:
    """What costs nothing or too little, runs just above the limit, and one with more ranks."""
    run = Run.quiet(rng, small=0.0)
    for part in ("loader", "copy", "host", "compute"):
        run.add(part, rng.uniform(0.091, 0.097), [int(rng.integers(run.num_ranks))])
    run.add("communication", rng.uniform(0.091, 0.097))
    yield True, run, "every loss is just below the limit of 10 %"

    run = Run.quiet(rng)
    run.lengths[0] += 27
    for part, seconds in (("loader", 15), ("compute", 4), ("host", 3), ("copy", 2)):
        run.add(part, seconds, [int(rng.integers(run.num_ranks))], [0])
    run.add("communication", 2, None, [0])
    yield True, run, "the losses are in steps[0], the warm-up"

    run = Run.quiet(rng, small=0.0)
    run.lengths[0] *= 2
    run.add(str(rng.choice(["loader", "copy", "host"])), rng.uniform(0.103, 0.109))
    yield False, run, "one loss is just above 10 % of the steps without the first"

    run = Run.quiet(rng, steps="ranks", small=0.0)
    # In the first step that counts, little communication is hidden, so that the code's judgement
    # of hidden communication, which has a criterion of its own, does not matter here.
    run.hide("communication", 0.02)
    run.add("communication", 0.03)
    run.add("communication", 0.15, None, [1])
    for rank in range(run.num_ranks):
        run.add("communication", 0.3, _all_but(run.num_ranks, rank), [rank + 2])
    yield False, run, "in each step a different rank is the last one, and over all steps each waits"

    run = Run.quiet(rng, small=0.0)
    run.across = str(rng.choice(["loader", "copy", "host"]))
    # A little above the limit. It falls below the limit if the part that began in the warm-up step
    # is left out, or the part that ends after the last step.
    run.add(run.across, rng.uniform(0.104, 0.112))
    run.beyond = float(rng.uniform(0.05, 0.1))
    why = (
        "half of it begins in one step and ends in the next, at both ends of the steps that count, "
        "too; of such a span each step has the part that lies in it"
    )
    yield False, run, why

    run = Run.quiet(rng, ranks=5)
    run.add("compute", 0.25, [int(rng.integers(3, 5))])
    run.add("communication", 0.25, [0])  # code that looks at rank 0 alone fails elsewhere, not here
    yield False, run, "one of five ranks computes longer, and it is not among the first three"

    run = Run.quiet(rng, steps=6, small=0.0)
    part = str(rng.choice(["loader", "copy", "host"]))
    run.add(part, 0.36, [int(rng.integers(run.num_ranks))], [3])
    yield True, run, "one step has a large loss, and the sum over the steps is small"

    run = Run.quiet(rng, steps=6, small=0.0)
    for step in (2, 4):
        run.shorten(step, 0.2)
        run.add(part, 0.09, [0], [step])
    yield True, run, "two short steps lose much of their time, which is little of all"

    run = Run.quiet(rng, small=0.0)
    for part in ("loader", "copy", "host", "communication"):
        run.add(part, rng.uniform(0.06, 0.07))
    yield True, run, "each rank loses a little; losses of different ranks do not add up"

    run = Run.quiet(rng)
    for part in ("loader", "copy", "host", "communication"):
        run.hide(part, rng.uniform(0.7, 0.9))
    yield True, run, "loading, copies, logging and collectives run beside computation"

    run = Run.quiet(rng, steps="ranks")
    for rank in range(run.num_ranks):
        for shift, part in enumerate(("loader", "copy", "host", "compute")):
            who = [(rank + shift) % run.num_ranks]
            run.add(part, 0.2 if run.num_ranks > 3 else 0.17, who, [rank + 2])
    yield True, run, "in each step a different rank is slow, and over all steps none is"


_RUNS = {
    "loader": partial(_some, cause="loader"),
    "copies": _copies,
    "logging": _logging,
    "straggler": _straggler,
    "buckets": _buckets,
    NONE: _none,
}


def draw_cause(draw: Draw, cause: str) -> list[Values]:
    """The runs of this cause, for each rank its own."""
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        values = Values(steps=[], _is=[], _why=[])
        for number, (is_cause, run, why) in enumerate(_RUNS[cause](rng)):
            spans, steps = run.build(rng)
            values["steps"].append(steps)
            values["_is"].append(is_cause)
            values["_why"].append(why)
            values |= pack([spans[i] for i in rng.permutation(len(spans))], str(number))
        inputs.append(values)
    return inputs


# --- observe and judge ---------------------------------------------------------------------------


def observe(find_bottleneck: Any, inputs: Values, context: Context) -> Values:
    """The name that the function returns for every trace."""
    said = []
    for number, steps in enumerate(inputs["steps"]):
        windows = [(float(a), float(b)) for a, b in steps]
        spans = unpack(inputs, str(number))
        ranks = len({s.rank for s in spans})
        with naming(f"find_bottleneck(…) with {ranks} ranks, {len(windows)} steps"):
            answer = find_bottleneck(spans, windows)
            said.append(str(returned(answer, "find_bottleneck"))[:50])
    return {"said": said}


def losses(spans: list[Span], steps: list[tuple[float, float]]) -> dict[str, float]:
    """The five losses of the lab's table as shares of the steps, the first step left out."""
    rows: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for rank in sorted({s.rank for s in spans}):
        own = [s for s in spans if s.rank == rank]
        parts = [breakdown(own, start, end) for start, end in steps[1:]]
        for kind in KINDS:
            rows[kind].append(sum(part[kind] for part in parts))
    total = steps[-1][1] - steps[1][0]
    return {
        "loader": max(rows["loader"]) / total,
        "copies": max(rows["copy"]) / total,
        "logging": max(rows["host"]) / total,
        "straggler": (max(rows["compute"]) - min(rows["compute"])) / total,
        "buckets": min(rows["communication"]) / total,
    }


def judge_cause(case: Case, cause: str) -> Iterator[Finding]:
    """Runs with this cause are called by it, and no others."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, steps in enumerate(inputs["steps"]):
            got = item_of(answer.get("said"), number)
            is_cause = inputs["_is"][number]
            if (got == cause) == is_cause and isinstance(got, str):
                continue
            found = losses(unpack(inputs, str(number)), [(a, b) for a, b in steps])
            table = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
            right = max(found, key=lambda name: found[name])
            right = right if found[right] > LIMIT else NONE
            names = "" if got in NAMES else f" The answer is one of {', '.join(NAMES)}."
            yield Finding(
                f"a run of {1 + int(inputs[f'{number}/rank'].max())} ranks and {len(steps)} steps: "
                f"expected {right!r}, got {got!r}.{names} By the table its losses are {table} of "
                f"the time: {inputs['_why'][number]}.",
                rank,
            )
            break
