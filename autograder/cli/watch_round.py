"""One look of `autograder watch` at one lab: grades new submissions and gives feedback back."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from autograder.cli.arguments import EXCHANGE
from autograder.cli.grade_steps import GradeCommand, GradeOptions
from autograder.cli.stop import Stop
from autograder.course.calendar import say_time
from autograder.course.course import Course, CourseError
from autograder.criteria.criterion import Status
from autograder.gradebook.exchange import Exchange
from autograder.gradebook.incoming import Inbox, Incoming, Look, identity_of, same_but_for_content
from autograder.gradebook.returning import Beside, Outbox, ToExchange
from autograder.gradebook.watching import Students, waits_for_its_turn, waits_for_us
from autograder.plain_text import clean, first_line, say
from autograder.records.record import Record
from autograder.records.version import graded_by
from autograder.submission.find import Found, display_name
from autograder.submission.without_run import known_record

_MANY = 10_000  # submissions that a cluster's queue may get at once


@dataclass
class Done:
    """The result of a look: whether something failed, and whether a file is still growing."""

    failed: bool = False
    growing: bool = False


def code_of(labs: Collection[str]) -> str:
    """A hash of the code on disk that verdicts in these labs depend on."""
    digest = hashlib.sha256()
    for lab in labs:
        for name, content in graded_by(lab).items():
            digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


class LabWatch:
    """Watches one lab.

    Raises:
        CourseError, ValueError: nothing can be watched, and the message says why.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        console: Console,
        course: Course,
        lab: str,
        stop: Stop,
    ) -> None:
        self.options, self.console, self.course, self.lab = options, console, course, lab
        self.stop = stop
        self.students = Students(course, lab)
        self.exchange: Exchange | None = None
        self._said: dict[str, str] = {}
        command = self._command([], console)  # raises without sandbox or Slurm
        command.choose_runner()
        self.at_once = _MANY if options.executor == "slurm" else command.jobs
        self.inbox, self.outbox = self._places()
        self._look = Look()

    def _places(self) -> tuple[Inbox, Outbox]:
        options, course, lab = self.options, self.course, self.lab
        if options.where == EXCHANGE:
            if options.feedback is not None:
                raise ValueError("--feedback is for a folder; the exchange has its own way back")
            self.exchange = Exchange(course)
            folder = self.exchange.submitted
            folder.mkdir(parents=True, exist_ok=True)
            return Inbox(course, lab, folder, 0.0), ToExchange(course, lab, self.exchange)
        folder = Path(options.where).absolute()
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {folder}: expected one with STUDENT/{lab}.ipynb, or the word "
                f"{EXCHANGE}"
            )
        if folder.is_relative_to(course.nbgrader) and options.feedback is None:
            raise ValueError(
                f"{folder} is nbgrader's own: name a folder for the pages with --feedback, or "
                f"watch the {EXCHANGE}"
            )
        elsewhere = options.feedback.absolute() if options.feedback else None
        inbox = Inbox(course, lab, folder, options.settle)
        return inbox, Beside(course, lab, folder, elsewhere)

    def has_news(self) -> bool:
        """Looks for what is new; `round` then grades it."""
        self._look = Look()
        try:
            if self.exchange is not None:
                for line in self.exchange.collect(self.lab, time.monotonic()):
                    self._say_once(line, line)
            known = self.students.returned()
            self._look = self.inbox.look(known)
        except (CourseError, ValueError, OSError) as error:
            self._say_once("look", f"nothing could be collected: {error}")
            self._look.failed = True
        else:
            self._said.pop("look", None)
        return bool(self._look.ready)

    def round(self) -> Done:
        """Grades what `has_news` has found; one failure stops nothing else."""
        look, done = self._look, Done(self._look.failed, bool(self._look.growing))
        for path, why in look.left_out.items():
            self._say_once(str(path), f"{display_name(path.name)}: not graded: {why}")
        if not look.ready:
            return done
        try:
            self._grade_all(look.ready, done)
        except (CourseError, ValueError, OSError) as error:  # course.toml is wrong, the disk full
            self._say_once("round", f"{self.lab}: {error}")
            done.failed = True
        return done

    # --- grading ----------------------------------------------------------------------------------

    def _grade_all(self, ready: Sequence[Incoming], done: Done) -> None:
        now = time.time()
        ready = [e for e in ready if not self.students[e.student].waits(e.identity, now)]
        if not ready:
            return
        self.course = Course(self.course.root)  # dates and points may have changed
        known = self._known(self._command(ready))
        todo = []
        for each in ready:
            until = self.students[each.student].held_until(self.options.per_day, now)
            if until is not None and each.student not in known:
                self._hold(each, until)
            else:
                todo.append(each)
        last: GradeCommand | None = None
        for batch in self._batches(todo):
            if self.stop.asked:
                break
            last = self._grade(batch, done) or last
        if last is not None:
            self._report(last)

    def _batches(self, todo: Sequence[Incoming]) -> Iterator[list[Incoming]]:
        """Batches of as many as run at once; those that failed before come last, each alone."""
        failed = [e for e in todo if self.students[e.student].trying == e.identity]
        new = [each for each in todo if each not in failed]
        for start in range(0, len(new), self.at_once):
            yield new[start : start + self.at_once]
        yield from ([each] for each in failed)

    def _grade(self, batch: Sequence[Incoming], done: Done) -> GradeCommand | None:
        """Grades a batch and gives feedback back; if several fail together, grades each alone."""
        for each in batch:
            self.students[each.student].begin(each.identity, time.time())
        self.students.save()
        try:
            command = self._command(batch)
            known = self._known(command)
            command.choose_runner()
            try:
                command.grade()
                self._count(command.records, known)
                command.fill_gradebook()
            finally:
                command.close()
            graded = {r.student for r in command.records if not r.infra}
            failed = self.outbox.give_back([e for e in batch if e.student in graded])
        except Exception as error:
            if len(batch) > 1:
                results = [self._grade([each], done) for each in batch if not self.stop.asked]
                return next(filter(None, reversed(results)), None)
            if not isinstance(error, CourseError | ValueError | OSError):
                traceback.print_exc()
            self._fail(batch[0], str(error), done)
            return None
        for each, record in zip(batch, command.records, strict=True):
            if record.infra:
                self._fail(each, record.infra.message, done)
            elif why := failed.get(each.student) or self._lacks_page(each):
                self._fail(each, f"graded, but the feedback could not be given back: {why}", done)
            else:
                self.students[each.student].end(self._identity_after(each))
                self._tell(f"{each.student}: {record.score or 0:g} of {record.max_score:g}")
        self.students.save()
        return command

    def _command(self, batch: Sequence[Incoming], console: Console | None = None) -> GradeCommand:
        """`autograder grade` for a batch, without output: `_tell` writes a line per student."""
        options = GradeOptions(
            lab=self.lab,
            jobs=self.options.jobs,
            executor=self.options.executor,
            trusted=self.options.trusted,
        )
        found = Found([each.submission for each in batch], {})
        return GradeCommand(options, console or Console(quiet=True), self.course, found)

    def _known(self, command: GradeCommand) -> set[str]:
        """Students whose submission the journal has: it is not run again, and not counted."""
        run = command.class_run
        return {
            submission.student
            for submission in command.submissions
            if known_record(submission, run, finished=run.finished) is not None
        }

    def _count(self, records: Sequence[Record], known: Collection[str]) -> None:
        """Counts what was run towards the limit, without our failures and unreadable files."""
        for record in records:
            ran = any(each.status is not Status.INVALID for each in record.criteria)
            if ran and not record.infra and record.student not in known:
                self.students[record.student].count(time.time())
        self.students.save()

    # --- afterwards -------------------------------------------------------------------------------

    def _identity_after(self, each: Incoming) -> str:
        """The identity after grading: a stand-in in nbgrader's folder must not count as new."""
        if not each.source.is_relative_to(self.course.nbgrader):
            return each.identity
        now = identity_of(each.source)
        return now if same_but_for_content(now, each.identity) else each.identity

    def _lacks_page(self, each: Incoming) -> str:
        page = self.course.feedback_page(self.lab, each.student)
        return "" if page.is_file() else f"there is no {page}"

    def _hold(self, each: Incoming, until: float) -> None:
        text = waits_for_its_turn(self.lab, self.options.per_day, until, self.course)
        self._let_wait(each, text, until, "as often as the limit allows; graded after")

    def _fail(self, each: Incoming, why: str, done: Done) -> None:
        done.failed = True
        known = self.students[each.student]
        self._tell(f"{each.student}: NOT GRADED: {first_line(why)}")
        self._let_wait(
            each, waits_for_us(self.lab, known.retry_at, self.course), known.retry_at, "again after"
        )

    def _let_wait(self, each: Incoming, text: str, until: float, why: str) -> None:
        """Tells a student, once, why there is no feedback yet."""
        known, told = self.students[each.student], f"{each.identity} {until:.0f}"
        if known.told == told:
            return
        when = say_time(datetime.fromtimestamp(until, UTC), self.course.calendar.zone)
        self._tell(f"{each.student}: waits: {why} {when}")
        known.told = told
        self.students.save()
        try:
            self.outbox.tell(each, text)
        except OSError as error:
            self._tell(f"{each.student}: this could not be told: {error}")

    def _report(self, command: GradeCommand) -> None:
        try:
            command.write_report()
        except Exception:
            traceback.print_exc()
            print("autograder: the report could not be written, see above", file=sys.stderr)

    def _tell(self, line: str) -> None:
        now = say_time(datetime.now(UTC), self.course.calendar.zone)
        say(self.console, f"{now}  {self.lab}  {clean(line)}")

    def _say_once(self, about: str, line: str) -> None:
        """Says a line unless it was the last line about the same thing."""
        if self._said.get(about) != line:
            self._said[about] = line
            self._tell(line)
