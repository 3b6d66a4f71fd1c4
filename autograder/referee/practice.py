"""The practice referee on a student's machine: the same criteria as in grading, with public seeds.

`python -m autograder.referee.practice PATH --world-size N` opens a check when a rank asks for
it, tells rank 0 the verdict, and ends when its ranks have gone. `inside/probe.py` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from autograder.course.course import Course, CourseError
from autograder.criteria import find_criterion
from autograder.criteria.criterion import Criterion, Draw, Lab, Status
from autograder.inside.messages import Message
from autograder.referee.referee import (
    ANSWER_DEADLINE_S,
    HELLO_DEADLINE_S,
    OpenCheck,
    Referee,
    draw_for,
)
from minidist.errors import ProtocolError


class PracticeReferee(Referee):
    """A referee whose checks are opened by the ranks that ask for them."""

    def __init__(self, path: Path, world_size: int, draw: Callable[[Criterion], Draw]) -> None:
        self._passed: dict[str, float] = {}
        super().__init__(path, world_size, draw)

    @property
    def connected(self) -> bool:
        """Whether any rank is connected."""
        return bool(self._connections)

    def _ask(self, rank: int, name: object) -> Message:
        self._open_for(rank, str(name))
        return super()._ask(rank, name)

    def _open_for(self, rank: int, name: str) -> None:
        """Opens the check `name`, unless it is open and this rank has not asked for it yet."""
        with self._changed:
            opened = self._open
            if opened and self._is_complete(opened):  # rank 0 is about to be told the verdict
                self._changed.wait_for(
                    lambda: self._open is not opened, timeout=opened.criterion.deadline_s
                )
                opened = self._open
            # A rank that has answered waits for the other ranks. So a rank that asks again, or asks
            # for a different check, has given up the open check.
            if opened and opened.criterion.name == name and rank not in opened.asked:
                return
            try:
                criterion = lab_of(name)[name]
            except ValueError as error:
                raise ProtocolError(str(error)) from None
            self.open(criterion)

    def _is_complete(self, opened: OpenCheck) -> bool:
        return all(map(opened.has_heard, range(self.world_size)))

    def _reply(self, opened: OpenCheck, rank: int) -> Message:
        """Waits until all ranks have answered, then tells rank 0 the verdict."""
        criterion = opened.criterion
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_complete(opened)
                    or self._open is not opened
                    or self._gone  # only ranks that left; not ranks of a script still to connect
                ),
                timeout=criterion.deadline_s,
            )
            if rank != 0 or self._open is not opened:
                return Message("noted")
        verdict = self.close(Status.TIMEOUT)
        self._passed[verdict.criterion] = verdict.points
        lab = lab_of(verdict.criterion)
        so_far = f"{sum(self._passed.values()):g} of {lab.max_score:g} points so far"
        return Message(
            "verdict",
            verdict.record()
            | {
                "title": criterion.title,
                "task": criterion.task,
                "so_far": so_far,
            },
        )


def lab_of(name: str) -> Lab:
    """The lab that has a criterion of this name, with the points of the current course.

    Raises:
        ValueError: no lab has one.
    """
    lab, _ = find_criterion(name)
    try:
        return Course.find().lab(lab.name)
    except CourseError:  # a notebook outside a course
        return lab


def main() -> None:
    """Serves until all ranks have gone, or for a while if no rank connects."""
    parser = argparse.ArgumentParser(prog="autograder.referee.practice", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--world-size", type=int, required=True)
    options = parser.parse_args()

    def draw(criterion: Criterion) -> Draw:
        lab, _ = find_criterion(criterion.name)
        return draw_for(b"practice", lab.name, criterion.name, "practice", options.world_size)

    torch.set_num_threads(1)
    parent = os.getppid()
    referee = PracticeReferee(options.path, options.world_size, draw)
    deadline, seen = time.monotonic() + HELLO_DEADLINE_S + ANSWER_DEADLINE_S, False
    try:
        while True:
            time.sleep(0.5)
            seen = seen or referee.connected
            if (seen and not referee.connected) or (not seen and time.monotonic() > deadline):
                return
            if os.getppid() != parent:
                return
    finally:
        referee.stop()
        with contextlib.suppress(OSError):
            options.path.parent.rmdir()  # removes an empty folder only: that of a plain script


if __name__ == "__main__":
    main()
