"""nbgrader's commands, in one process that imports nbgrader while a class is being graded.

Importing nbgrader takes longer than most of its commands, and on its command line each command is a
process of its own. Here each command is a fork of a process that has imported nbgrader and run
nothing, so no command sees what an earlier one has changed in memory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from multiprocessing import connection
from types import TracebackType
from typing import Self

from autograder.batch import pool
from autograder.course.course import Course, CourseError
from minidist.processes.fork_server import Child, fork_child

DEADLINE_S = 1800.0  # of one command
SAID = 3000  # characters of a failed command's output that are shown


class NbGrader:
    """The process. `begin` first waits for the command before it, if nobody has.

    Args:
        course: the commands run in its folder.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        self._child: Child | None = None
        self._begun: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.close()

    def begin(self, command: str, *arguments: str) -> None:
        """Starts a command, such as "autograde"; returns at once.

        Raises:
            CourseError: the command before it failed; see `wait`.
        """
        self.wait()
        self._begun = [command, *arguments]
        with contextlib.suppress(OSError):  # `wait` tries again
            self._send()

    def wait(self) -> str:
        """Waits until the command that was begun has ended; without one, returns at once.

        If the process was killed, or could not be started, a new one runs the command again.

        Returns:
            what the command said.

        Raises:
            CourseError: it failed, or took over half an hour; the message has the end of what it
                said.
        """
        if not self._begun:
            return ""
        command = self._begun[0]
        try:
            try:
                code, said = self._receive()
            except (EOFError, OSError):
                self.close()
                self._send()
                code, said = self._receive()
        except (EOFError, OSError):
            raise CourseError(f"nbgrader {command}: its process was killed, twice") from None
        finally:
            self._begun = []
        if code != 0:
            raise CourseError(f"nbgrader {command} failed:\n{said[-SAID:]}")
        return said

    def _send(self) -> None:
        if self._child is None:
            self._child = pool.fork(_run_commands, cwd=self._course.root)
        self._child.pipe.send(self._begun)

    def _receive(self) -> tuple[int, str]:
        if self._child is None:
            raise EOFError
        if not self._child.pipe.poll(DEADLINE_S):
            raise CourseError(f"nbgrader {self._begun[0]} took over {DEADLINE_S:.0f} s")
        return self._child.pipe.recv()

    def run(self, command: str, *arguments: str) -> str:
        """Runs a command; returns what it said.

        Raises:
            CourseError: see `wait`.
        """
        self.begin(command, *arguments)
        return self.wait()


# --- in the process -------------------------------------------------------------------------------


def _run_commands(pipe: connection.Connection) -> None:
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        for fd in (1, 2):
            os.dup2(said.fileno(), fd)
        from nbgrader.apps.nbgraderapp import NbGraderApp

        import autograder.gradebook.preprocessors
        import autograder.report.feedback  # noqa: F401

        while True:
            try:
                words = pipe.recv()
            except EOFError:
                return
            said.seek(0)
            said.truncate()
            pid = fork_child(partial(NbGraderApp.launch_instance, words))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said.seek(0)
            pipe.send((code, said.read()))
