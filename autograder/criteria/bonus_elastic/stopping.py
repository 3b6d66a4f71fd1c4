"""Criteria for task 5 of bonus_elastic: a signal reaches some ranks, and all stop together."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

from autograder.criteria.common.answers import item_of, plain
from autograder.criteria.common.places import on_two_nodes
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values

STEPS = 6


@contextlib.contextmanager
def _our_handler() -> Iterator[Any]:
    """Installs a SIGTERM handler that does nothing, so that an unhandled signal ends no process."""

    def ignore(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, ignore)
    try:
        yield ignore
    finally:
        signal.signal(signal.SIGTERM, before)


# --- elastic_stop --------------------------------------------------------------------------------


def draw_stop(draw: Draw) -> list[Values]:
    """For several runs, the step before which each rank gets the signal; -1 means never."""
    rng = draw.shared()
    size = draw.world_size
    one, two = int(rng.integers(size)), int(rng.integers(size))
    at = [int(n) for n in rng.permutation(STEPS - 2)[:2] + 1]
    never = [-1] * size
    runs = [
        [at[0] if rank == one else -1 for rank in range(size)],
        never,
        [at[1]] * size,  # all of them, at the same step
        [at[0] if rank == two else STEPS - 1 for rank in range(size)],
        never,
    ]
    return [{"told": [run[rank] for run in runs], "_runs": runs} for rank in range(size)]


@on_two_nodes
def observe_stop(preemption_class: Any, inputs: Values, context: Context) -> Values:
    """What `requested` says after each step."""
    answers = []
    with _our_handler():
        for told in inputs["told"]:
            said: list[bool] = []
            with preemption_class() as preemption:
                for step in range(STEPS):
                    for _ in range(2 if step == told else 0):  # a scheduler may repeat its signal
                        os.kill(os.getpid(), signal.SIGTERM)
                    value = preemption.requested()
                    if not isinstance(value, bool):
                        raise TypeError(f"requested: expected True or False, got {value!r}")
                    said.append(value)
            answers.append(said)
    return {"said": answers}


def judge_stop(case: Case) -> list[Finding]:
    """On all ranks False until a rank gets the signal, and True from that step on."""
    findings: list[Finding] = []
    for number, told in enumerate(case.inputs[0]["_runs"]):
        first = min((step for step in told if step >= 0), default=STEPS)
        right = [step >= first for step in range(STEPS)]
        heard = {f"rank {r}": step for r, step in enumerate(told) if step >= 0}
        for rank, answer in enumerate(map(plain, case.answers)):
            got = item_of(answer.get("said"), number)
            if got == right:
                continue
            hint = "Ranks that disagree hang: one leaves, the others wait for it."
            if not heard:
                hint = "Nobody was told to stop; what an earlier run was told is over."
            findings.append(
                Finding(
                    f"the signal came before step {heard or 'none'}: expected {right} after steps "
                    f"0 to {STEPS - 1} on every rank, got {got}. {hint}",
                    rank,
                )
            )
        if findings:
            break
    return findings


# --- elastic_handler -----------------------------------------------------------------------------


class _Accident(Exception):
    """Stands for an error in a training loop."""


def draw_handler(draw: Draw) -> list[Values]:
    """The text of the error that is raised inside the `with`."""
    return [
        {"text": f"accident {draw.private(rank).integers(10**9)}"}
        for rank in range(draw.world_size)
    ]


def observe_handler(preemption_class: Any, inputs: Values, context: Context) -> Values:
    """Whether our handler is back after the `with`, and whether an error comes through."""
    answer: Values = {}
    with _our_handler() as ours:
        answer["after"] = True
        for before in (signal.SIG_IGN, signal.SIG_DFL, ours):
            signal.signal(signal.SIGTERM, before)
            with preemption_class():
                pass
            answer["after"] &= signal.getsignal(signal.SIGTERM) is before
        signal.signal(signal.SIGTERM, ours)
        answer["through"] = ""
        try:
            with preemption_class():
                raise _Accident(inputs["text"])
        except _Accident as error:
            answer["through"] = str(error)
        answer["after error"] = signal.getsignal(signal.SIGTERM) is ours
    return answer


def judge_handler(case: Case) -> Iterator[Finding]:
    """After the `with` the old handler is back, also after an error, which comes through."""
    for rank, answer in enumerate(map(plain, case.answers)):
        problem = ""
        if answer.get("after") is not True:
            problem = (
                "after the `with` SIGTERM has not the handler that it had before (which need not "
                "be Python's default): signal.signal returns the old one."
            )
        elif answer.get("through") != case.inputs[rank]["text"]:
            problem = "an error inside the `with` did not come through: __exit__ returned True."
        elif answer.get("after error") is not True:
            problem = "after an error inside the `with` the old handler is not back."
        if problem:
            yield Finding(problem, rank)
