"""Judges answers within a time limit, because the answers of untrusted ranks may hold anything."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autograder.criteria.criterion import Case, Criterion, Finding

MAX_CPU_S = 60.0  # judging an honest answer takes a fiftieth of this


class _TooLong(Exception):
    pass


def judge(criterion: Criterion, case: Case, max_cpu_s: float = MAX_CPU_S) -> list[Finding]:
    """Findings about what is wrong with the answers; an answer that cannot be judged is wrong.

    Args:
        max_cpu_s: limit in seconds of this process's CPU time. CPU time is used so that nobody
            loses a point on a machine that stalls. Not enforced outside the main thread (the
            practice referee on a student's machine).
    """
    try:
        with _limited(max_cpu_s):
            return [_checked(finding, case.world_size) for finding in criterion.findings(case)]
    except _TooLong:
        return [Finding(f"the answer cannot be judged: that took more than {max_cpu_s:g} s")]
    except Exception as error:
        traceback.print_exc()
        return [Finding(f"the answer cannot be judged ({type(error).__name__}: {error})")]


def _checked(finding: Finding, world_size: int) -> Finding:
    """The finding, attributed to all ranks if its rank number does not exist.

    A judge may have read the number from an untrusted answer.
    """
    known = finding.rank is None or finding.rank in range(world_size)
    return finding if known else Finding(finding.message)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TooLong in the body after this much CPU time, and after each further CPU second."""
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
