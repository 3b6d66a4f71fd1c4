"""What the broker saw of a sharded training: each step's computes, all-gathers and reductions.

The values in an all-gather show which unit it brings. All parameters change between two steps, so
each step has to gather the current values of the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from autograder.criteria.common import oracle
from autograder.criteria.common.charged import reaches_all
from autograder.criteria.common.emulated import of_every_rank
from autograder.criteria.criterion import Case, Finding, Values
from autograder.criteria.lab3_fsdp import parts
from minidist.emulate.trace import Collective, Event

LAYERS, WIDTH, STEPS = 6, 84, 2  # 2, 3, 4, 6 and 7 divide the 84 rows
UNIT_NUMEL = WIDTH * WIDTH + WIDTH
MAX_WHOLE = 3  # units at a time
FACTOR = 0.5  # by which every parameter changes between two steps: exact in every float
_FLOATS = ("float32", "bfloat16", "float16", "float64")


def _first(number: int) -> int:
    """The index of a step's first compute; steps from `STEPS` on are passes without backward."""
    return LAYERS * (2 * min(number, STEPS) + max(number - STEPS, 0))


class Step:
    """One step of one rank: its computes, all-gathers and reductions, in their order.

    Numbers from `STEPS` on are of passes without backward, which come after the steps.
    """

    def __init__(self, case: Case, rank: int, number: int, mine: list[tuple[int, Collective]]):
        self.rank, self.number = rank, number
        events = case.trace.events[rank]
        computes = [i for i, e in enumerate(events) if e.kind == "compute"]
        here = computes[_first(number) : _first(number + 1)]
        self.forward, self.backward = here[:LAYERS], here[LAYERS:]
        begin = computes[_first(number) - 1] if number else -1
        later = computes[_first(number + 1) :]  # the steps that follow
        end = later[0] if later else len(events)
        self.waited = {e.key: i for i, e in reversed(list(enumerate(events))) if e.kind == "wait"}
        self.gathers = [(i, c) for i, c in mine if begin < i < here[-1] and c.kind == "all_gather"]
        back = self.backward[0] if self.backward else end
        self.reductions = [c for i, c in mine if back < i < end and c.kind != "all_gather"]
        self.unfinished = [c for c in self.reductions if self.waited.get(c.key, end) >= end]
        # The units that are found by this step's values, and those found by any step's values.
        changes = min(number, STEPS)  # of the parameters, so far
        self.units = self._units_by([changes], case)
        self.units_of_any_step = self._units_by(range(changes + 1), case)

    def _units_by(self, steps: Iterable[int], case: Case) -> list[set[int]]:
        """The units in each all-gather, found by the values that they had in one of `steps`."""
        sent = [v for step in steps for v in _as_sent(case.inputs[0], self.gathers, step)]
        values, order = parts.lookup([], sent)
        return [
            set().union(*(_units_in(c, r, values, order) for r in c.payloads))
            for _, c in self.gathers
        ]

    def _gathers_of(self, unit: int, old: bool = False) -> list[tuple[int, int]]:
        """(issued, waited for) of each all-gather that brings `unit`, as places in the events.

        One that is never waited for has a billion as its second place.
        """
        return [
            (i, self.waited.get(c.key, 10**9))
            for (i, c), units in zip(
                self.gathers, self.units_of_any_step if old else self.units, strict=True
            )
            if unit in units
        ]

    def not_gathered(self, old: bool = False) -> Finding | None:
        """A finding if some unit was not gathered, and waited for, before its forward.

        Args:
            old: the all-gather may also have brought the values of an earlier step.
        """
        for unit in range(LAYERS):
            found = [g for g in self._gathers_of(unit, old) if g[0] < self.forward[unit]]
            if not found and any(g[0] < self.forward[unit] for g in self._gathers_of(unit, True)):
                return Finding(
                    f"the all-gather of unit {unit} in step {self.number} brought values of an "
                    "earlier step: send the shard as it is now.",
                    self.rank,
                )
            if not found:
                return Finding(
                    f"unit {unit} was not in any all-gather before its forward pass, in step "
                    f"{self.number}: shards have to be gathered anew in every step, with the "
                    "values that they have then.",
                    self.rank,
                )
            if min(waited for _, waited in found) > self.forward[unit]:
                return Finding(
                    f"unit {unit} computed before its all-gather was waited for, in step "
                    f"{self.number}: until then, anything may lie in its parameters.",
                    self.rank,
                )
        return None

    def _begun(self, unit: int, direction: str) -> int:
        """Where the all-gather that brings `unit` for a pass was issued; a billion if nowhere."""
        forward = direction == "forward"
        issued = [i for i, _ in self._gathers_of(unit, old=True)]
        return min((i for i in issued if forward or i > self.forward[unit]), default=10**9)

    def started_late(self, direction: str) -> str:
        """Which unit's all-gather began after the unit before it (in this pass) began to compute.

        "" if none; a unit that is not gathered again for backward, as it was kept, is not late.
        """
        order = list(range(LAYERS)) if direction == "forward" else list(range(LAYERS))[::-1]
        places = self.forward if direction == "forward" else self.backward[::-1]
        for before, unit in pairwise(order):
            begun = self._begun(unit, direction)
            if places[before] < begun < 10**9:
                return f"the all-gather of unit {unit} began after unit {before} had computed."
        return ""

    def too_far_ahead(self) -> Finding | None:
        """A finding if more than `MAX_WHOLE` units are whole, or on their way, at a time.

        The criterion with a memory limit judges whether all of them are.
        """
        for direction, places in (("forward", self.forward), ("backward", self.backward[::-1])):
            order = list(range(LAYERS))[:: 1 if direction == "forward" else -1]
            for unit in order:
                rest = order[order.index(unit) :]
                ahead = [u for u in rest if self._begun(u, direction) < places[unit]]
                if len(ahead) == LAYERS:
                    break
                if len(ahead) > MAX_WHOLE:
                    return Finding(
                        f"{direction} of step {self.number}: while unit {unit} computed, units "
                        f"{ahead} were whole or on their way, expected at most {MAX_WHOLE} at a "
                        "time.",
                        self.rank,
                    )
        return None

    def not_gathered_again(self, units: Iterable[int]) -> Finding | None:
        """A finding if one of `units` stayed whole between forward and backward."""
        for unit in units:
            if not any(issued > self.forward[unit] for issued, _ in self._gathers_of(unit)):
                return Finding(
                    f"unit {unit} was not gathered again for backward: it was not freed after "
                    "forward (reshard_after_forward).",
                    self.rank,
                )
        return None


class _Rank:
    """All steps of one rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.rank = rank
        events = case.trace.events[rank]
        evaluations = case.inputs[0].get("evaluations", 0)
        self.finding = _wrong_order(events, rank, evaluations)
        if self.finding:
            return
        issued = {e.key: i for i, e in enumerate(events) if e.kind == "issue"}
        mine = [
            (issued[c.key], c)
            for c in case.trace.collectives
            if c.key in issued
            and c.numel > 0
            and c.dtype in _FLOATS
            and reaches_all(c, case.world_size)
        ]
        self.steps = [Step(case, rank, number, mine) for number in range(STEPS)]
        # If an evaluation fails, fewer of them are recorded; a different criterion judges that.
        made = sum(e.kind == "compute" for e in events) // LAYERS - 2 * STEPS
        self.evaluations = [Step(case, rank, STEPS + number, mine) for number in range(made)]


def _wrong_order(events: Sequence[Event], rank: int, evaluations: int) -> Finding | None:
    """A finding unless each step went forward through all layers, and then backward.

    Up to `evaluations` passes that only go forward may follow; the last one may end early.
    """
    computes = [(e.direction, e.layer) for e in events if e.kind == "compute"]
    step = [("forward", i) for i in range(LAYERS)]
    step += [("backward", i) for i in reversed(range(LAYERS))]
    expected, more = step * STEPS, step[:LAYERS] * evaluations
    if not len(expected) <= len(computes) <= len(expected + more):
        return Finding(
            f"{len(computes)} forward and backward passes of layers, expected "
            f"{len(expected + more)}.",
            rank,
        )
    if computes != (expected + more)[: len(computes)]:
        return Finding(
            "layers did not compute in the order of a step: forward from the first to the last, "
            "then backward from the last to the first, then the next step.",
            rank,
        )
    return None


def _as_sent(inputs: Values, gathers: list[tuple[int, Collective]], step: int) -> list[np.ndarray]:
    """The model's parameters in a step, rounded to bf16 if an all-gather carried bf16."""
    params = [p * np.float32(FACTOR**step) for p in oracle.parameters_of(inputs)]
    if any(c.dtype == "bfloat16" for _, c in gathers):
        params = [torch.from_numpy(p).bfloat16().float().numpy() for p in params]
    return params


def _units_in(c: Collective, rank: int, values: np.ndarray, order: np.ndarray) -> set[int]:
    """The units whose parameters this rank sent, without stray matches."""
    sent = c.payloads.get(rank)
    if sent is None:
        return set()
    flat = np.asarray(sent, dtype=np.float64).ravel()
    places = parts.find(values, order, flat[flat != 0])
    numbers = places[places >= 0] // UNIT_NUMEL % LAYERS
    units, counts = np.unique(numbers, return_counts=True)
    # A value rounded to bf16 may occur in several units: keep the most frequent units.
    return {int(u) for u, n in zip(units, counts, strict=True) if n >= 0.5 * counts.max()}


def every_step(case: Case) -> Iterator[Step | Finding]:
    """All steps of all ranks; if the order of a rank's layers is wrong, findings only."""
    for found in of_every_rank(case, _Rank):
        if isinstance(found, Finding):
            yield found
        else:
            yield from found.steps


def every_evaluation(case: Case) -> list[Step]:
    """The passes without backward of all ranks, after the steps; none if `every_step` has findings.

    Only their forward is to be looked at.
    """
    ranks = of_every_rank(case, _Rank)
    return [it for found in ranks if isinstance(found, _Rank) for it in found.evaluations]
