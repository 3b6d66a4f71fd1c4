"""Criterion for measuring the seconds of a training step, on a device that queues.

No real time is measured. The device and the clock are simulated with numbers that the referee drew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autograder.criteria.common.answers import described, is_close
from autograder.criteria.common.timed_collectives import (
    COLLECTIVE_S,
    LAUNCH_S,
    QueueingDevice,
    TimedCollectives,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values


def draw_timing(draw: Draw) -> list[Values]:
    """Slow warm-up steps, an outlier per rank, and a slowest rank: the first, middle, or last.

    The outliers of the other ranks are in steps in which the slowest rank is faster than its
    median, so that the median over the slowest rank of each step is not the largest median.
    """
    rng, n = draw.shared("settings"), draw.world_size
    settings = [
        {"warmup": int(rng.integers(2, 5)), "repeats": int(rng.integers(3, 6)) * 2 + 1},
        {"warmup": int(rng.integers(2, 5)), "repeats": 1},
        {"warmup": 0, "repeats": int(rng.integers(2, 4)) * 2},
    ]
    slowest = [int(r) for r in rng.permutation([0, n // 2, n - 1])]
    inputs: list[Values] = [{"settings": settings} for _ in range(n)]
    for number, setting in enumerate(settings):
        warmup, repeats, slow = setting["warmup"], setting["repeats"], slowest[number]
        works = [draw.private(r).uniform(2e-3, 3e-3, warmup + repeats) for r in range(n)]
        works[slow] += 2e-3
        fast = warmup + np.argsort(works[slow][warmup:])[: repeats // 2]
        for rank, work in enumerate(works):
            work[:warmup] *= 40
            if repeats > 1:
                places = np.arange(warmup, warmup + repeats) if rank == slow else fast
                work[int(rng.choice(places))] *= 30
            inputs[rank][f"work/{number}"] = work
    return inputs


def observe_timing(time_step: Any, inputs: Values, context: Context) -> Values:
    """The seconds that the function measures in each case, and how often it called the step."""
    seconds, calls = [], []
    for number, setting in enumerate(inputs["settings"]):
        machine = QueueingDevice(inputs[f"work/{number}"])
        with TimedCollectives(machine.communicate):
            result = time_step(
                machine.step,
                machine.synchronize,
                context.device,
                warmup=setting["warmup"],
                repeats=setting["repeats"],
                clock=machine.clock,
            )
        seconds.append(described(result))
        calls.append(machine.calls)
    return {"seconds": seconds, "calls": calls}


def judge_timing(case: Case) -> Iterator[Finding]:
    """The median of the timed steps on the slowest rank, with an empty queue around each step.

    One look at the clock may end a step and begin the next one.
    """
    for number, setting in enumerate(case.inputs[0]["settings"]):
        warmup, repeats = setting["warmup"], setting["repeats"]
        per_rank = [inputs[f"work/{number}"] for inputs in case.inputs]
        medians = [LAUNCH_S + float(np.median(work[warmup:])) for work in per_rank]
        what = f"warmup={warmup}, repeats={repeats}"
        for rank, answer in enumerate(case.answers):
            calls, seconds = answer.get("calls"), answer.get("seconds")
            got = seconds[number] if isinstance(seconds, list) and number < len(seconds) else None
            if not isinstance(calls, list) or calls[number : number + 1] != [warmup + repeats]:
                yield Finding(
                    f"{what}: step() was called {calls} times in the cases; expected "
                    f"{warmup + repeats} times in case {number}.",
                    rank,
                )
                break
            if not is_close(got, max(medians), rtol=0.0, atol=1e-9):
                hint = _explain_timing(got, per_rank, rank, warmup)
                yield Finding(
                    f"{what}: expected {max(medians) * 1e3:.4f} ms, got "
                    f"{_milliseconds(got)}.{hint}",
                    rank,
                )
                break


def _milliseconds(got: Any) -> str:
    return f"{got * 1e3:.4f} ms" if isinstance(got, float) else repr(got)


def _explain_timing(got: Any, per_rank: list[np.ndarray], rank: int, warmup: int) -> str:
    if not isinstance(got, float):
        return ""
    work, timed = per_rank[rank], np.stack(per_rank)[:, warmup:]
    medians = LAUNCH_S + np.median(timed, axis=1)
    for value, reason in (
        (float(medians[rank]), "That is this rank's own median: all wait for the slowest rank."),
        (
            LAUNCH_S,
            "That is how long it takes to queue a step: synchronize() before the second "
            "look at the clock.",
        ),
        (LAUNCH_S + float(work[warmup:].mean()), "That is the mean, which one outlier decides."),
        (
            LAUNCH_S + float(np.median(timed.max(axis=0))),
            "That is the median over the slowest rank of each step. Take each rank's median, then "
            "the largest.",
        ),
        (
            LAUNCH_S + float(np.sort(timed.max(axis=0))[(timed.shape[1] - 1) // 2]),
            "That is the lower middle of the slowest rank of each step. Take each rank's median, "
            "then the largest.",
        ),
        (
            LAUNCH_S + float(np.median(work)),
            "The warm-up steps were timed as well, or what they have left in the queue.",
        ),
        (
            LAUNCH_S + float(np.sort(timed, axis=1)[:, (timed.shape[1] - 1) // 2].max()),
            "The lower of the two in the middle was taken: the median is their mean.",
        ),
        (1e3 * float(medians.max()), "That is in milliseconds; seconds are asked for."),
        (
            float(medians.max()) + COLLECTIVE_S,
            "A collective was timed with each step: that is a wait for the other ranks.",
        ),
    ):
        if abs(got - value) <= 1e-9 * max(1.0, value):
            return " " + reason
    return " Is the queue empty when the clock is read first?"
