"""Gates: whoever misses the idea of a lab does not pass it, however much else is right.

Points are per criterion, so a submission that sums gradients instead of averaging them would lose a
few points only. If the criteria of a gate are lost, the points of all others are reduced in
proportion, so that the lab gives at most what the gate allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autograder.criteria.criterion import Lab, Verdict


def apply_gates(lab: Lab, verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts, with fewer points if an idea of the lab is missing.

    A criterion that could not be tested (INFRA, BLOCKED) closes no gate.
    """
    plain = [_without_rule(lab, verdict) for verdict in verdicts]
    passed = {verdict.criterion for verdict in plain if not verdict.status.is_lost}
    closed = [gate for gate in lab.gates if len(passed.intersection(gate.criteria)) < gate.needed]
    total = round(sum(verdict.points for verdict in plain), 6)  # without float errors
    gate = min(closed, key=lambda gate: gate.at_most, default=None)
    if gate is None or total <= gate.at_most:
        return tuple(plain)
    cents = [math.floor(100 * verdict.points * gate.at_most / total) for verdict in plain]
    rest = round(100 * gate.at_most) - sum(cents)  # lost by rounding down; one each for the first
    for place, verdict in enumerate(plain):
        if rest and verdict.points:
            cents[place], rest = cents[place] + 1, rest - 1

    def reduced(verdict: Verdict, hundredths: int) -> Verdict:
        missed = verdict.criterion in gate.criteria and verdict.criterion not in passed
        message = f"{gate.rule}.\n{verdict.message}" if missed else verdict.message
        return replace(verdict, points=hundredths / 100, message=message)

    return tuple(map(reduced, plain, cents))


def _without_rule(lab: Lab, verdict: Verdict) -> Verdict:
    """The verdict without the line of an earlier `apply_gates`; the course may have changed."""
    first, _, rest = verdict.message.partition("\n")
    old = any(first.startswith(gate.without) for gate in lab.gates)
    return replace(verdict, message=rest) if old else verdict
