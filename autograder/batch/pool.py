"""The pool of processes that grade a class; imported before anything that needs torch.

Workers are forked from a server that has imported what they need. `begin` starts it, so that it
imports while the grader does the same: a class begins some seconds sooner. Whatever dies, a worker
at any moment or the server, costs a task one try and no other task anything.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from minidist.processes.fork_server import Child, Server, fork
from minidist.processes.lifetime import die_with_parent

_END_WITHIN_S = 20  # told to end, a worker takes down what it has started
_DIES_WITHIN_S = 5  # between the end of its pipe and its own
_ending = False  # of a worker: it was told to end; no Event, whose lock a second signal would await
_server: Server | None = None


def begin(*labs: str) -> None:
    """Starts what workers are forked from, for submissions of these labs; returns at once.

    It is made once: workers of other labs import a little more.
    """
    global _server
    if _server is None:
        _server = Server(
            ["autograder.submission.attempt", *(f"autograder.criteria.{lab}" for lab in labs)]
        )
    with contextlib.suppress(OSError):  # then it is started when it is needed
        _server.start()


def run_pool(
    work: Callable[[Any], Any],
    todo: Mapping[int, Any],
    places: Sequence[Mapping[str, str]],
    done: Callable[[int, Any], None],
) -> dict[int, str]:
    """Calls `work` for each task, as many at once as there are places, and `done` with its number
    and what came of it.

    Args:
        places: for each worker what its environment has more than this process's.

    Returns:
        the tasks without a result, and why: their worker was killed, or none could be started.

    Raises:
        Exception: what `work` or `done` raised, after all workers were told to end.
    """
    waiting, free = deque(todo), deque(places)
    idle: list[_Worker] = []
    busy: dict[connection.Connection, _Worker] = {}
    lost: dict[int, str] = {}
    try:
        while waiting or busy:
            while waiting and (idle or free):
                worker = idle.pop() if idle else None
                try:
                    worker = worker or _start(work, free)
                except OSError as error:
                    if not busy:  # else the next one may start when a worker has ended
                        reason = f"a worker process of the grader could not be started ({error})"
                        lost[waiting.popleft()] = reason
                    break
                if worker.begin(waiting[0], todo[waiting[0]]):
                    waiting.popleft()
                    busy[worker.pipe] = worker
                else:  # killed before it had anything to do
                    free.append(worker.end())
            for pipe in connection.wait(list(busy)) if busy else ():
                worker = busy.pop(pipe)  # pyright: ignore[reportArgumentType]
                try:
                    error, result = worker.pipe.recv()
                except (OSError, EOFError, pickle.UnpicklingError):
                    free.append(worker.end(time.monotonic() + _DIES_WITHIN_S))
                    lost[worker.number] = "a worker process of the grader was killed"
                    continue
                idle.append(worker)
                if error is not None:
                    raise error
                done(worker.number, result)
    except BaseException:
        for worker in [*idle, *busy.values()]:
            worker.terminate()
        raise
    finally:
        ends_at = time.monotonic() + _END_WITHIN_S + _DIES_WITHIN_S
        for worker in [*idle, *busy.values()]:
            worker.end(ends_at)
    return lost


@dataclass
class _Worker:
    """A worker, as the grader sees it, and the number of its task."""

    child: Child
    place: Mapping[str, str]
    number: int = -1

    @property
    def pipe(self) -> connection.Connection:
        return self.child.pipe

    def begin(self, number: int, task: Any) -> bool:
        """Gives it a task; whether it is there to take it."""
        self.number = number
        try:
            self.pipe.send(task)
        except OSError:
            return False
        return True

    def terminate(self) -> None:
        if self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGTERM)

    def end(self, ends_at: float = 0.0) -> Mapping[str, str]:
        """Waits until then for its end, which comes after its task; its place is free."""
        self.pipe.close()
        if self.child.join(ends_at - time.monotonic()) is None:
            self.child.kill()
        self.child.close()
        return self.place


def _start(work: Callable[[Any], Any], free: deque[Mapping[str, str]]) -> _Worker:
    begin()
    place = free.popleft()
    try:
        return _Worker(fork(_work_on, work, env=os.environ | place, server=_server), place)
    except BaseException:
        free.appendleft(place)
        raise


# --- in a worker ----------------------------------------------------------------------------------


def _work_on(pipe: connection.Connection, work: Callable[[Any], Any]) -> None:
    """Does one task after the other, until there is none or the grader is gone."""
    _prepare()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        error = result = None
        try:
            result = work(task)
        except Exception as raised:
            error = raised
            error.add_note(traceback.format_exc())
        if _ending:  # and something has taken SystemExit for an error of its own
            return
        try:
            pipe.send((error, result))
        except OSError:  # the grader is gone
            return


def _prepare() -> None:
    """Leaves Ctrl-C to the grader; ends on SIGTERM by way of `finally`, or with the server.

    The server ends with the grader, which holds the only other end of its socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _end)
    die_with_parent(os.getppid(), signal.SIGTERM)


def _end(*_: Any) -> None:
    """Once: the grader and the end of the server may both tell it."""
    global _ending
    if not _ending:
        _ending = True
        signal.alarm(_END_WITHIN_S)  # the system ends it then
        sys.exit(128 + signal.SIGTERM)
