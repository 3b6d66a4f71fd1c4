"""How the processes of a job end when one of them has died: each has to fail, and say so.

Whoever started the job, torchrun's agent or a person, reads exit codes and looks for the result: a
process that swallows the failure makes a job that has died look like one that is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from minidist.processes.fork_server import Child

TOO_EARLY = (
    "wrote --out, with the losses of too few steps: whoever finds the file takes the job for done. "
    "It is written at the end, and only then."
)


def wait_for_ends(
    processes: Sequence[Child], deadline_s: float, grace_s: float
) -> list[int | None]:
    """Waits until all have ended, or until `grace_s` after one has failed.

    Returns:
        the exit codes (negative: a signal); None of a process that is still running.
    """
    end_s = time.monotonic() + deadline_s
    failed = False
    while any(process.poll() is None for process in processes):
        now_s = time.monotonic()
        if not failed and any(process.poll() not in (None, 0) for process in processes):
            failed, end_s = True, min(end_s, now_s + grace_s)
        if now_s > end_s:
            break
        time.sleep(0.02)
    return [process.poll() for process in processes]


def lives_on(who: str, code: object, why: str = "") -> str:
    """What is wrong with how a process ended after a different one died; "" if it has failed.

    Args:
        who: the process, in words; code: its exit code, None if it is still running.
        why: what to do about it, if it is something else than usual.
    """
    if code is not None and code != 0:
        return ""
    did = "ended with exit code 0" if code is not None else "is still running"
    why = why or "Let the error of the collective end the process."
    return f"{who} {did}: whoever started the job takes it for done. {why}"
