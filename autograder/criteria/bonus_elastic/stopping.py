"""Criteria for task 5 of bonus_elastic: a signal reaches some ranks, and all stop together."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from autograder.criteria.common.answers import item_of, plain, returned
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


class _Before(Exception):
    """Raised by the handler that was installed before the `with`."""


def _raise(number: int, frame: Any) -> None:
    raise _Before


@contextlib.contextmanager
def _between_lines() -> Iterator[None]:
    """Inside, this process gets a SIGTERM before each line of a function named `requested`."""

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_name != "requested":
            return None
        if event == "line":
            os.kill(os.getpid(), signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def draw_stop(draw: Draw) -> list[Values]:
    """For several runs, the step before which each rank gets the signal; -1 means never.

    In the last run the signal comes in the middle of `requested`.
    """
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
        [at[0] if rank == two else -1 for rank in range(size)],
    ]
    return [{"told": [run[rank] for run in runs], "_runs": runs} for rank in range(size)]


def observe_stop(preemption_class: Any, inputs: Values, context: Context) -> Values:
    """What `requested` says after each step, and whether the handler from before was called."""
    answer: Values = {"said": [], "called": False}
    with _our_handler():
        signal.signal(signal.SIGTERM, _raise)
        for number, told in enumerate(inputs["told"]):
            between = number == len(inputs["told"]) - 1
            said: list[bool] = []
            with preemption_class() as preemption:
                returned(preemption, "Preemption.__enter__")
                for step in range(STEPS):
                    # A scheduler may repeat its signal.
                    for _ in range(2 if step == told and not between else 0):
                        answer["called"] |= _kill_calls_the_old_one()
                    now = step == told and between and not answer["called"]
                    with _between_lines() if now else contextlib.nullcontext():
                        value = preemption.requested()
                    if now:
                        os.kill(os.getpid(), signal.SIGTERM)
                    if not isinstance(value, bool):
                        raise TypeError(f"requested: expected True or False, got {value!r}")
                    said.append(value)
            answer["said"].append(said)
    return answer


def _kill_calls_the_old_one() -> bool:
    """Sends this process a SIGTERM; whether that called the handler from before the `with`."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except _Before:
        return True
    return False


def judge_stop(case: Case) -> list[Finding]:
    """On all ranks False until a rank gets the signal, and True from that step on.

    In the last run the signal comes during a call; this call or the next one is the first True.
    Any collective may carry the votes, and none is needed once all have said True.
    """
    answers = [plain(answer) for answer in case.answers]
    findings = [
        Finding(
            "inside the `with` a SIGTERM called the handler that was there before, which raised: "
            "inside, only a handler of your own should run.",
            rank,
        )
        for rank, answer in enumerate(answers)
        if answer.get("called") is not False
    ]
    if findings:
        return findings
    runs = case.inputs[0]["_runs"]
    for number, told in enumerate(runs):
        first = min((step for step in told if step >= 0), default=STEPS)
        right = [step >= first for step in range(STEPS)]
        between = number == len(runs) - 1
        later = [step > first for step in range(STEPS)] if between else right
        together = item_of(answers[0].get("said"), number)
        heard = [
            f"rank {r} got the signal {'in requested() of' if between else 'before'} step {step}"
            for r, step in enumerate(told)
            if step >= 0
        ]
        for rank, answer in enumerate(answers):
            got = item_of(answer.get("said"), number)
            alike = got == together or together not in (right, later)
            if got in (right, later) and alike:
                continue
            hint = "Ranks that disagree hang: one leaves, the others wait for it."
            if not heard:
                hint = "Nobody was told to stop; what an earlier run was told is over."
            findings.append(
                Finding(
                    f"{', '.join(heard) or 'no rank got a signal'}: requested() after steps 0 to "
                    f"{STEPS - 1}: expected {right} on every rank"
                    f"{', or True one step later on all' * between}, got {got}. {hint}",
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
        answer["after"] = ""
        for before in (signal.SIG_IGN, signal.SIG_DFL, ours):
            signal.signal(signal.SIGTERM, before)
            with preemption_class():
                pass
            after = signal.getsignal(signal.SIGTERM)
            if after is not before and not answer["after"]:
                answer["after"] = f"{_handler_name(before)}, after it {_handler_name(after)}"
        signal.signal(signal.SIGTERM, ours)
        answer["through"] = ""
        try:
            with preemption_class():
                raise _Accident(inputs["text"])
        except _Accident as error:
            answer["through"] = str(error)
        answer["after error"] = signal.getsignal(signal.SIGTERM) is ours
    return answer


def _handler_name(handler: Any) -> str:
    return f"signal.{handler.name}" if isinstance(handler, signal.Handlers) else "a function"


def judge_handler(case: Case) -> Iterator[Finding]:
    """After the `with` the old handler is back, also after an error; the error comes through."""
    for rank, answer in enumerate(map(plain, case.answers)):
        problem = ""
        if answer.get("after") != "":
            problem = (
                f"before the `with` SIGTERM had {str(answer.get('after'))[:200]}: put back what "
                "signal.signal returned, whatever it is (a function, SIG_IGN or SIG_DFL)."
            )
        elif answer.get("through") != case.inputs[rank]["text"]:
            problem = "an error inside the `with` did not come through: __exit__ returned True."
        elif answer.get("after error") is not True:
            problem = "after an error inside the `with` the old handler is not back."
        if problem:
            yield Finding(problem, rank)
