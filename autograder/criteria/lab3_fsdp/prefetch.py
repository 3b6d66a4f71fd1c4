"""Criteria for prefetch, in virtual time: what is on its way while a unit computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autograder.criteria.common.emulated import even_cluster
from autograder.criteria.criterion import Case, Finding
from autograder.criteria.lab3_fsdp.emulated import BACKWARD_S, EVALUATIONS, FORWARD_S
from autograder.criteria.lab3_fsdp.sharded_steps import (
    LAYERS,
    STEPS,
    UNIT_NUMEL,
    Step,
    every_evaluation,
    every_step,
)
from minidist.emulate.clusters import Cluster
from minidist.emulate.simulate import simulate

GATHER_TO_FORWARD = 0.5  # time of a unit's all-gather / time of its forward
# Targets. No prefetch gives 0.71 in both directions, blocking all-gathers 0.75, prefetch about 1.
# Waiting at once for each reduce-scatter is allowed and gives 0.83 in backward.
EFFICIENCY = {"forward": 0.88, "backward": 0.79}
LATENCY_S = 1e-6


def grading_cluster(world_size: int) -> Cluster:
    """Links on which the all-gather of a unit takes the same time for any number of ranks."""
    share = (world_size - 1) / world_size
    bandwidth = share * UNIT_NUMEL * 4 / (GATHER_TO_FORWARD * FORWARD_S)
    return even_cluster(world_size, bandwidth, LATENCY_S)


def judge_prefetch_forward(case: Case) -> Iterator[Finding]:
    """In virtual time, the forward pass of one unit hides the all-gather of the next unit."""
    return _judge_prefetch(
        case,
        "forward",
        "Start the all-gather of unit i + 1 (async_op=True) before unit i computes.",
    )


def judge_prefetch_backward(case: Case) -> Iterator[Finding]:
    """In virtual time, the backward pass of one unit hides the all-gather of the unit before it."""
    return _judge_prefetch(
        case,
        "backward",
        "Start the all-gather of unit i - 1 (async_op=True) before the backward of unit i.",
    )


def _judge_prefetch(case: Case, direction: str, hint: str) -> Iterator[Finding]:
    steps = list(every_step(case))
    # A different criterion judges whether a gather brings the current values.
    findings = [s if isinstance(s, Finding) else s.not_gathered(old=True) for s in steps]
    yield from filter(None, findings)
    if any(findings):
        return
    # Only the last step counts: in the first one, a class may still learn the order of its units.
    last = [step for step in steps if isinstance(step, Step) and step.number == STEPS - 1]
    for step in last:
        if why := step.started_late(direction):
            yield Finding(f"{direction}: {why} {hint}", step.rank)
            return
    for step in every_evaluation(case) if direction == "forward" else ():
        if why := step.started_late(direction):
            number = step.number - STEPS
            when = f"forward {EVALUATIONS[number // 2]}, pass {number + 1} without backward"
            yield Finding(f"{when}: {why} {hint}", step.rank)
            return
    timeline = simulate(case.trace, grading_cluster(case.world_size))
    efficiency = min(
        _efficiency(timeline.event_times[step.rank], getattr(step, direction), direction)
        for step in last
    )
    if not efficiency >= EFFICIENCY[direction]:
        yield Finding(
            f"{direction}: {efficiency:.2f} of the virtual time between the first and the last "
            f"unit is compute, target {EFFICIENCY[direction]}: the units wait for their "
            f"parameters. {hint}"
        )


def _efficiency(times: Any, computes: list[int], direction: str) -> float:
    span = times[computes[-1]][1] - times[computes[0]][0]
    return LAYERS * (FORWARD_S if direction == "forward" else BACKWARD_S) / max(span, 1e-12)
