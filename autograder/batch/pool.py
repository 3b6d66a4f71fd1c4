"""The pool of processes that grade a class; imported before anything that needs torch.

Workers are forked from a fork server that has imported what the workers need. `begin` starts this
server, so that it imports while the grader imports too: a class begins some seconds sooner. If a
worker or the server dies, at any moment, this costs a task one try and costs other tasks nothing.
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

from autograder.criteria import parts_of
from minidist.processes import fork_server
from minidist.processes.fork_server import Child, Server
from minidist.processes.lifetime import die_with_parent

_END_WITHIN_S = 20  # a worker that is told to end first stops what it has started
_DIES_WITHIN_S = 5  # between the end of a worker's pipe and the end of the worker
# In a worker: whether it was told to end. Not an Event: a second signal could wait for its lock.
_ending = False
_servers: dict[bool, Server] = {}  # True -> the server for grading


def begin(*labs: str) -> None:
    """Starts the fork server, with the imports for these labs; returns at once.

    The server is made only once; workers for different labs import the missing modules themselves.
    Without a lab, the server is for work that does not need torch.
    """
    grades = bool(labs)
    if grades not in _servers:
        # The first optimizer of a judge imports torch._dynamo, which takes more than a second.
        graders = ["autograder.submission.attempt", "torch._dynamo"] if grades else []
        parts = [part for lab in labs for part in parts_of(lab)]
        _servers[grades] = Server(["autograder.records.journal", *graders, *parts])
    with contextlib.suppress(OSError):  # in that case `fork` starts the server when needed
        _servers[grades].start()


def run_pool(
    work: Callable[[Any], Any],
    todo: Mapping[int, Any],
    places: Sequence[Mapping[str, str]],
    done: Callable[[int, Any], None],
) -> dict[int, str]:
    """Calls `work` for each task, and `done` with the task's number and result.

    As many tasks run at once as there are places.

    Args:
        places: for each worker, the variables that are added to this process's environment.

    Returns:
        the tasks without a result, and why: the worker was killed, or could not be started.

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
                    if not busy:  # else retry when a worker has finished its task
                        reason = f"a worker process of the grader could not be started ({error})"
                        lost[waiting.popleft()] = reason
                    break
                if worker.begin(waiting[0], todo[waiting[0]]):
                    waiting.popleft()
                    busy[worker.pipe] = worker
                else:  # the worker was killed while it was idle
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
    """The grader's view of a worker, with the number of the worker's task."""

    child: Child
    place: Mapping[str, str]
    number: int = -1

    @property
    def pipe(self) -> connection.Connection:
        return self.child.pipe

    def begin(self, number: int, task: Any) -> bool:
        """Sends the worker a task; False if the worker is dead."""
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
        """Waits until `ends_at` for the worker to end, then kills it; returns its free place.

        A worker ends after its current task.
        """
        self.pipe.close()
        if self.child.join(ends_at - time.monotonic()) is None:
            self.child.kill()
        self.child.close()
        return self.place


def fork(work: Callable[..., object], *args: Any, **options: Any) -> Child:
    """`fork_server.fork` from the server for grading, if there is one.

    Raises:
        OSError: no process could be started.
    """
    if not _servers:
        begin()
    return fork_server.fork(work, *args, server=_servers.get(True) or _servers[False], **options)


def _start(work: Callable[[Any], Any], free: deque[Mapping[str, str]]) -> _Worker:
    place = free.popleft()
    try:
        return _Worker(fork(_work_on, work, env=os.environ | place), place)
    except BaseException:
        free.appendleft(place)
        raise


# --- in a worker ----------------------------------------------------------------------------------


def _work_on(pipe: connection.Connection, work: Callable[[Any], Any]) -> None:
    """Does one task after the other, until the pipe is closed or the grader is gone."""
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
        if _ending:  # some library caught the SystemExit of `_end`
            return
        try:
            pipe.send((error, result))
        except OSError:  # the grader is gone
            return


def _prepare() -> None:
    """Sets the worker's signals: ignores Ctrl-C, and ends on SIGTERM through all `finally` blocks.

    The worker also gets SIGTERM when the fork server dies. The server dies when the grader does,
    because the grader holds the only other end of the server's socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _end)
    die_with_parent(os.getppid(), signal.SIGTERM)


def _end(*_: Any) -> None:
    """Ends the worker, at the first SIGTERM only: grader and dying server may both send one."""
    global _ending
    if not _ending:
        _ending = True
        signal.alarm(_END_WITHIN_S)  # SIGALRM kills a worker that takes too long
        sys.exit(128 + signal.SIGTERM)
