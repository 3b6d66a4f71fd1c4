"""What a watch remembers of each student, in `build/watch/LAB.json`, in case it is killed.

The file is written whole, before and after each thing that must not be done twice. The
journal keeps the verdicts. Without the file everything is looked at again, nothing is graded
again, and all feedback is given back once more.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from autograder.course.calendar import say_time
from autograder.course.course import Course, CourseError
from autograder.files import write_whole

DAY_S = 24 * 3600.0
_RETRY_S, _RETRY_AT_MOST_S = 60.0, 3600.0


@dataclass
class Known:
    """One student, in one lab; times are seconds since 1970.

    Attributes:
        returned: identity of the submission whose feedback the student has.
        graded_at: when this student's submissions were graded, within the last day.
        trying: identity of a submission that was begun `tries` times and not returned; it waits
            until `retry_at`, so that one that kills the grader does not delay others.
        told: what the student was last told about having to wait.
    """

    returned: str = ""
    graded_at: list[float] = field(default_factory=list)
    trying: str = ""
    tries: int = 0
    retry_at: float = 0.0
    told: str = ""

    def held_until(self, per_day: int, now: float) -> float | None:
        """Until when the limit holds the next submission back; None if it does not."""
        recent = sorted(min(time, now) for time in self.graded_at if time > now - DAY_S)
        return recent[-per_day] + DAY_S if len(recent) >= per_day else None

    def begin(self, identity: str, now: float) -> None:
        """Notes that grading begins; the first retry may follow at once, later ones wait longer."""
        self.tries = self.tries + 1 if self.trying == identity else 1
        self.trying = identity
        wait = _RETRY_S * 2 ** min(self.tries - 2, 16) if self.tries > 1 else 0.0
        self.retry_at = now + min(wait, _RETRY_AT_MOST_S)

    def waits(self, identity: str, now: float) -> bool:
        """Whether the submission has failed before and it is not yet time to try again."""
        return self.trying == identity and now < self.retry_at <= now + _RETRY_AT_MOST_S

    def count(self, now: float) -> None:
        """Notes that a submission was graded."""
        self.graded_at = [time for time in self.graded_at if time > now - DAY_S] + [now]

    def end(self, identity: str) -> None:
        """Notes that the feedback was given back."""
        self.returned, self.trying, self.tries, self.retry_at, self.told = identity, "", 0, 0.0, ""


class Students:
    """All students of a lab that a watch knows."""

    def __init__(self, course: Course, lab: str) -> None:
        self.path = watch_folder(course) / f"{lab}.json"
        self._known: dict[str, Known] = {}
        try:
            found = json.loads(self.path.read_bytes())
            self._known = {name: Known(**values) for name, values in found.items()}
        except FileNotFoundError:
            return
        except (ValueError, TypeError, AttributeError) as error:
            raise CourseError(
                f"{self.path} is damaged ({error}); without it nothing is graded again, but all "
                "feedback is given back once more: remove it"
            ) from None

    def __getitem__(self, student: str) -> Known:
        return self._known.setdefault(student, Known())

    def returned(self) -> dict[str, str]:
        """Student -> identity of the submission whose feedback the student has."""
        return {name: known.returned for name, known in self._known.items()}

    def save(self) -> None:
        """Writes the file; when this returns, it is on disk."""
        plain = {name: asdict(known) for name, known in sorted(self._known.items())}
        write_whole(self.path, json.dumps(plain, indent=1).encode() + b"\n")


def watch_folder(course: Course) -> Path:
    """Where a watch keeps what it knows, and a copy of everything that it grades."""
    return course.build / "watch"


@contextmanager
def only_watch(course: Course) -> Iterator[None]:
    """Keeps other watches out of the course until the end, or until this process dies.

    Raises:
        BlockingIOError: a different watch is at work.
    """
    folder = watch_folder(course)
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def waits_for_its_turn(lab: str, per_day: int, until: float, course: Course) -> str:
    """Tells a student that the limit holds back the submission."""
    times = "once" if per_day == 1 else f"{per_day} times"
    return (
        f"Your notebook of {lab} has arrived and is kept, and it is not graded yet. Yours was "
        f"graded {times} within 24 hours, and the course grades no more than that. This one is "
        f"graded after {_say(until, course)}, without your doing anything. If you hand in again "
        "until then, the newest is graded. Whether it is late goes by when you handed it in."
    )


def waits_for_us(lab: str, until: float, course: Course) -> str:
    """Tells a student that the grader failed on the submission."""
    return (
        f"Your notebook of {lab} has arrived and is kept. Grading it failed, by a fault of the "
        f"grader and not of yours. It is tried again after {_say(until, course)}, and it does not "
        "count towards the gradings of a day."
    )


def _say(time: float, course: Course) -> str:
    return say_time(datetime.fromtimestamp(time, UTC), course.calendar.zone)
