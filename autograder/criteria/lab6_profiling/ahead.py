"""Criteria for loading ahead.

Loading ahead is judged by the source of the batches: it counts the requests for batches while the
loop holds one batch, and after the loop has broken off.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autograder.criteria.common.answers import as_number, described, item_of, naming, returned
from autograder.criteria.criterion import Case, Context, Finding, Values, per_rank
from autograder.criteria.lab6_profiling.spans import is_same

PATIENCE_S = 6.0  # the longest wait for a student's thread; a correct thread needs milliseconds
HANG_S = 25.0  # a call that has not ended by then hangs; below the deadline of the cell
BATCHES = 60  # of the source whose batches are counted while they are loaded ahead
MANY = 200_000  # batches of the source whose loop breaks off early
ENOUGH = 1000  # batches that may be made after that; a thread that stops makes one or two
GRACE_S = 0.2  # too many requests to the source come within this time

# --- ahead, but not too far -----------------------------------------------------------------------


@per_rank
def draw_ahead(rng: np.random.Generator) -> Values:
    """A small and a large depth per rank, so that no queue of a fixed length serves both."""
    return {"depths": [int(rng.integers(1, 3)), int(rng.integers(5, 8))]}


def observe_ahead(prefetch: Any, inputs: Values, context: Context) -> Values:
    """How many batches the source made ahead while the loop held its first, second, third batch."""
    counts, lost = [], []
    for depth in inputs["depths"]:
        produced = [0]

        def source(produced: list[int] = produced) -> Iterator[int]:
            for number in range(BATCHES):
                produced[0] += 1
                yield number

        batches = iter(_iterable(prefetch(source(), depth)))
        row, got = [], []
        for taken in (1, 2, 3):
            got.append(_next(batches, taken))
            deadline = time.monotonic() + PATIENCE_S
            while produced[0] < taken + depth and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(GRACE_S)
            row.append(produced[0] - taken)
            if row[-1] < depth:
                return {"counts": [*counts, row]}
        counts.append(row)
        lost.append(BATCHES - len([*got, *batches]))
    return {"counts": counts, "lost": lost}


def judge_ahead(case: Case) -> Iterator[Finding]:
    """While the loop uses a batch, `depth` batches are loaded ahead, and at most two more.

    A queue, a condition or an executor may be used.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, depth in enumerate(inputs["depths"]):
            row = item_of(answer.get("counts"), number)
            numbers = [n for n in row if as_number(n) is not None] if isinstance(row, list) else []
            if len(numbers) < 3 or min(numbers) < depth:
                got = min(numbers, default=None)
                yield Finding(
                    f"depth={depth}: while the loop works on a batch, {depth} more should get "
                    f"ready; {got} did. "
                    + (
                        f"The queue needs room for `depth` batches, here {depth}."
                        if got
                        else "A thread of its own has to fill the queue."
                    ),
                    rank,
                )
                break
            if max(numbers) > depth + 2:
                gone = as_number(item_of(answer.get("lost"), number)) or 0
                yield Finding(
                    f"depth={depth}: {max(numbers)} batches were loaded ahead. "
                    + (
                        f"{gone:.0f} of {BATCHES} never reached the loop: one for which there is "
                        "no room has to wait."
                        if gone > 0
                        else "Memory is not endless: a thread makes them, through a queue with a "
                        "limit (queue.Queue(maxsize=…))."
                    ),
                    rank,
                )
                break


@per_rank
def draw_ends(rng: np.random.Generator) -> Values:
    """Batches, a depth, and how the source fails.

    One batch is None, one is 0, and one is a list, of which the rank makes an array.
    """
    count = int(rng.integers(9, 16))
    batches: list[Any] = [int(n) for n in rng.integers(0, 99, count)]
    batches[0] = rng.integers(0, 99, 4).tolist()
    batches[int(rng.integers(2, count - 2))] = None
    batches[1] = 0
    return {
        "batches": batches,
        "depth": int(rng.integers(1, 4)),
        "broken": int(rng.integers(4, 8)),
        "word": f"disk {int(rng.integers(1 << 30))}",
        "sector": int(rng.integers(1 << 30)),
    }


class DiskError(Exception):
    """The error that the source raises; no submission can know its type."""

    sector: int | None = None


# When the loop breaks off, the thread wants to put something into a full queue: a batch, the end or
# an error. In the last case the loop has not begun, so there need not be a thread.
BREAKS = (
    "a loop broke off after 3 batches",
    "a loop broke off after 3 batches, when the source was through and the queue full",
    "a loop broke off after 3 batches, when the source had failed and the queue was full",
    "a loop broke off after 0 batches",
)


def _source(kind: str, depth: int, made: list[int]) -> Iterator[int]:
    """The source of a loop that breaks off; counts its batches in `made`."""
    for number in range(3 + depth if kind in BREAKS[1:3] else MANY):
        made[0] += 1
        yield number
    if kind == BREAKS[2]:
        raise DiskError(kind)


def _next(batches: Iterator[Any], number: int) -> Any:
    for batch in batches:
        return batch
    raise ValueError(f"prefetch: the loop has ended before batch {number} of {BATCHES}")


def _iterable(found: Any) -> Any:
    """What `prefetch` has returned, if a loop can run over it."""
    if not hasattr(returned(found, "prefetch"), "__iter__"):
        raise TypeError(f"prefetch: expected an iterator, got {described(found)}")
    return found


class _NoBeginning:
    """A source that fails before its first batch, like a DataLoader whose workers do not start."""

    def __iter__(self) -> Iterator[int]:
        raise DiskError("no beginning")


def _said_without_beginning(prefetch: Any, depth: int) -> str:
    """The error that a loop over `_NoBeginning` gets; "" if it still waits, or gets none."""
    said = [""]

    def loop() -> None:
        try:
            list(prefetch(_NoBeginning(), depth))
        except Exception as error:
            said[0] = type(error).__name__

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return said[0]


def _ends(work: Callable[[], Any]) -> bool:
    """Whether a call ends in time, in a thread of its own; raises the error that it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    if errors:
        raise errors.pop()  # off the list, which would keep the traceback and its loop alive
    return not thread.is_alive()


def _is_in_put(threads: set[threading.Thread]) -> bool:
    """Whether one of the threads waits for room in a queue."""
    frames = sys._current_frames()
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            if frame.f_code is queue.Queue.put.__code__:
                return True
            frame = frame.f_back
    return False


def _takes_all(source: Any, depth: int, prefetch: Any, taken: list[Any]) -> bool:
    """Whether a loop that puts the batches into `taken` ends in time."""

    def loop() -> None:
        for batch in _iterable(prefetch(source, depth)):
            taken.append(batch)

    return _ends(loop)


def observe_ends(prefetch: Any, inputs: Values, context: Context) -> Values:
    """The delivered batches, an error of the source, and threads left after a loop breaks off."""
    depth, broken = inputs["depth"], inputs["broken"]
    batches = [np.array(b) if isinstance(b, list) else b for b in inputs["batches"]]
    before = set(threading.enumerate())
    delivered: list[Any] = []
    with naming(f"prefetch(batches, {depth}) with a list of {len(batches)} batches"):
        if not _takes_all(list(batches), depth, prefetch, delivered):
            return _waits_for(f"a source of {len(batches)} batches", delivered, before)

    def breaks() -> Iterator[Any]:
        yield from batches[:broken]
        error = DiskError(inputs["word"])
        error.sector = inputs["sector"]
        raise error

    before_error, said, sector = [], "", None
    before = set(threading.enumerate())
    try:
        if not _takes_all(breaks(), depth, prefetch, before_error):
            what = f"a source that raises an error after {broken} batches"
            return _waits_for(what, before_error, before)
    except Exception as error:
        said, sector = f"{type(error).__name__}: {error}", getattr(error, "sector", None)
    return {
        "delivered": _described(delivered),
        "before_error": _described(before_error),
        "said": said,
        "sector": sector,
        **_observe_breaks(prefetch, depth),
    }


def _waits_for(what: str, taken: list[Any], before: set[threading.Thread]) -> Values:
    """The facts about a loop that never ended; one of the new threads runs the loop."""
    others = len(set(threading.enumerate()) - before) - 1
    return {"waits": [what, len(taken), others]}


def _observe_breaks(prefetch: Any, depth: int) -> Values:
    """What becomes of the thread when a loop breaks off; and a source without a beginning."""
    before = set(threading.enumerate())
    left, before_break, after_break, in_put = [], [], [], []
    for kind in BREAKS:
        made = [0]
        loop = iter(prefetch(_source(kind, depth, made), depth))
        with contextlib.suppress(DiskError):  # if early, `before_error` shows that
            for _ in range(0 if kind == BREAKS[-1] else 3):
                next(loop, None)
        time.sleep(GRACE_S)  # the queue is full now, and the thread waits for room
        before_break.append(made[0])
        closes = _ends(getattr(loop, "close", lambda: None))
        del loop
        left.append(
            _threads_beside(before) if closes else -1
        )  # -1: close() hangs, so nobody can count
        after_break.append(made[0] - before_break[-1])
        in_put.append(_is_in_put(set(threading.enumerate()) - before))
        if not closes:
            break
        before = set(threading.enumerate())
    return {
        "left": left,
        "before_break": before_break,
        "after_break": after_break,
        "in_put": in_put,
        "no_beginning": "" if -1 in left else _said_without_beginning(prefetch, depth),
    }


def _described(batches: list[Any]) -> list[Any]:
    """Batches in the form in which they were drawn; anything else as text."""
    lists = [b.tolist() if isinstance(b, np.ndarray) else b for b in batches]
    return [b if b is None or isinstance(b, int | list) else repr(b)[:80] for b in lists]


def _threads_beside(known: set[threading.Thread]) -> int:
    """How many threads there are beside the known ones, once they have had time to end."""
    deadline = time.monotonic() + PATIENCE_S
    while set(threading.enumerate()) - known and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(set(threading.enumerate()) - known)


def judge_ends(case: Case) -> Iterator[Finding]:
    """Batches come in order, errors are passed on, and no thread is left."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        batches, broken = inputs["batches"], inputs["broken"]
        said = str(answer.get("said"))
        if isinstance(answer.get("waits"), list):
            yield Finding(_waits_problem(answer["waits"]), rank)
        elif not is_same(answer.get("delivered"), batches):
            yield Finding(
                f"expected the {len(batches)} batches in order, got "
                f"{answer.get('delivered')!r}. "
                "None and 0 are batches, too: mark the end with an object of your own.",
                rank,
            )
        elif not answer.get("said"):
            yield Finding(
                "the source raised an error and the loop never heard of it. Catch it in the "
                "thread, send it through the queue, and raise it in the loop.",
                rank,
            )
        elif not said.startswith(DiskError.__name__) or inputs["word"] not in said:
            yield Finding(
                f"the source raised a {DiskError.__name__}, and the loop got {said[:200]!r}: raise "
                "that error itself, because whoever expects it looks for its type.",
                rank,
            )
        elif not is_same(answer.get("sector"), inputs["sector"]):
            yield Finding(
                f"the source raised a {DiskError.__name__} with an attribute, and the error that "
                "the loop got has lost it: raise that error itself, not a new one with its text.",
                rank,
            )
        elif not is_same(answer.get("before_error"), batches[:broken]):
            yield Finding(
                f"the source raised after {broken} batches; expected these first, got "
                f"{answer.get('before_error')!r}.",
                rank,
            )
        elif problem := _break_problem(answer, inputs["depth"]):
            yield Finding(problem, rank)
        elif answer.get("no_beginning") != DiskError.__name__:
            yield Finding(
                f"the source raised a {DiskError.__name__} in iter(), before its first batch, and "
                "the loop never got it. All that the thread does with the source can fail.",
                rank,
            )


def _waits_problem(waits: list[Any]) -> str:
    what, taken, threads = (item_of(waits, i) for i in range(3))
    thread = (
        "Its thread has ended: before it does, it has to tell the loop why, through the queue."
        if is_same(threads, 0)
        else "Its thread is still there."
    )
    return (
        f"a loop over {what} got {taken} batches, and still waited after {HANG_S:.0f} s. {thread}"
    )


def _break_problem(answer: Values, depth: int) -> str | None:
    for number, kind in enumerate(BREAKS):
        before, after = (
            as_number(item_of(answer.get(f"{when}_break"), number)) for when in ("before", "after")
        )
        if before is None or after is None:
            return "the batches of a loop that breaks off were not counted."
        # A thread that is too far ahead is judged elsewhere; it may even have made all batches.
        if before <= 3 + depth + 2 and after > ENOUGH:
            return (
                f"{kind}, and after that the thread made {after:.0f} more. It has to stop then, "
                "though its source is not through."
            )
        left = item_of(answer.get("left"), number)
        if is_same(left, 0):
            continue
        what = (
            f"close() of the generator did not return in {HANG_S:.0f} s"
            if is_same(left, -1)
            else "the loading thread is still there"
        )
        why = ""
        if is_same(item_of(answer.get("in_put"), number), True):
            who = "the thread" if left == -1 else "it"
            why = f": {who} waits in put() for room in the queue that nobody will make"
        return f"{kind}, and {what}{why}. {_MORE[kind]}".rstrip()
    return None


# The hint for each break; a submission that fails at one has passed those before it.
_MORE = {
    BREAKS[0]: "The thread has to notice that the loop has gone.",
    BREAKS[1]: "With batches left the thread did end; with only the end left to tell it must, too.",
    BREAKS[2]: "With batches left the thread did end; with an error left to tell it must, too.",
    BREAKS[3]: "(Start it at the first batch, not before.)",
}
