"""The pool of processes that grade a class; imported before anything that needs torch.

Workers are forked from a process that has imported what they need. `begin` starts it, so that it
imports while the grader does the same: a class begins some seconds sooner.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import forkserver
from typing import Any

from minidist.lifetime import die_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")
_END_WITHIN_S = 20  # told to end, a worker takes down what it has started
_ending = False  # of a worker: it was told to end; no Event, whose lock a second signal would await


def begin(*labs: str) -> None:
    """Starts what workers are forked from, for submissions of these labs; returns at once.

    It is started once: workers of other labs import a little more.
    """
    criteria = [f"autograder.criteria.{lab}" for lab in labs]
    _CONTEXT.set_forkserver_preload(["autograder.run", *criteria])
    forkserver.ensure_running()


def run_pool(
    work: Callable[[Any], Any],
    todo: Mapping[int, Any],
    places: Sequence[Mapping[str, str]],
    done: Callable[[int, Any], None],
) -> None:
    """Calls `work` for each task, as many at once as there are places, and `done` with its number
    and what came of it.

    Args:
        places: for each worker what its environment has more than this process's.

    Raises:
        BrokenProcessPool: a worker was killed; tasks without a result may be tried again.
        KeyboardInterrupt: after all workers were told to end.
    """
    queue = _CONTEXT.SimpleQueue()
    for place in places:
        queue.put(dict(place))
    with ProcessPoolExecutor(len(places), _CONTEXT, _prepare, (queue,)) as pool:
        futures = {pool.submit(_run, work, todo[number]): number for number in todo}
        try:
            for future in as_completed(futures):
                done(futures[future], future.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _prepare(places: Any) -> None:
    """Leaves Ctrl-C to the grader; ends on SIGTERM by way of `finally`, or with who has made it.

    Takes a place that no other worker has.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _end)
    die_with_parent(os.getppid(), signal.SIGTERM)  # without it the pool starts others
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ.update(places.get())


def _end(*_: Any) -> None:
    """Once: the pool and who has made this process may both tell it."""
    global _ending
    if not _ending:
        _ending = True
        signal.alarm(_END_WITHIN_S)  # the system ends it then
        sys.exit(128 + signal.SIGTERM)


def _end_with(parent: Any) -> None:
    """A worker whose grader was killed would go on with what is queued, for nobody."""
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _run(work: Callable[[Any], Any], task: Any) -> Any:
    """A task in a worker: the pool itself would take SystemExit for a result."""
    made_by = os.getppid()
    try:
        return work(task)
    finally:
        if _ending or os.getppid() != made_by:
            os._exit(1)
