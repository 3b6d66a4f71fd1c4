"""Judging, within bounds: answers come from a stranger's ranks, and anything may be in them."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autograder.criteria.criterion import Case, Criterion, Finding

MAX_CPU_S = 60.0  # an honest answer takes a fiftieth of it


class _TooLong(Exception):
    pass


def judge(criterion: Criterion, case: Case, max_cpu_s: float = MAX_CPU_S) -> list[Finding]:
    """What is wrong with the answers; an answer that cannot be judged is wrong.

    Args:
        max_cpu_s: seconds of this process's processor time, so that a machine which stalls costs
            nobody a point. Not enforced outside the main thread (practice, on one's own machine).
    """
    try:
        with _limited(max_cpu_s):
            return [_checked(finding, case.world_size) for finding in _findings(criterion, case)]
    except _TooLong:
        return [Finding(f"the answer cannot be judged: that took more than {max_cpu_s:g} s")]
    except Exception as error:
        traceback.print_exc()
        return [Finding(f"the answer cannot be judged ({type(error).__name__}: {error})")]


def _findings(criterion: Criterion, case: Case) -> list[Finding]:
    """What holds for every criterion, then its own judge."""
    if criterion.between_ranks and case.world_size == 1:
        return []
    if case.trace is not None and case.trace.faults:
        # Collectives that do not match have no time and no traffic that could be judged.
        hint = f". {criterion.fault_hint}" if criterion.fault_hint else ""
        return [Finding(f"{fault}{hint}") for fault in case.trace.faults]
    return criterion.judge(case)


def _checked(finding: Finding, world_size: int) -> Finding:
    """One that is about all ranks if its number is no rank's: it may come from an answer."""
    known = finding.rank is None or finding.rank in range(world_size)
    return finding if known else Finding(finding.message)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TooLong inside once so much processor time is used, and each second thereafter."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, raise_)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
