"""`autograder watch`: grades each submission as it comes in, and gives the feedback back.

    folder or exchange -> what is new (gradebook/incoming) -> the steps of `autograder grade`
    -> feedback beside the notebook or in the exchange (gradebook/returning)

It can be killed at any time. What was graded is in the journal, what was given back is in
`build/watch/LAB.json`, and the next watch goes on from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from autograder.batch import pool
from autograder.cli.arguments import EXCHANGE, EXIT_FAILED, EXIT_OK, add_how_to_grade, positive
from autograder.cli.installation import check_installation
from autograder.cli.stop import Stop
from autograder.course.course import Course, CourseError
from autograder.criteria import lab_names
from autograder.plain_text import say
from autograder.signals import handling

PER_DAY, EVERY_S, SETTLE_S = 5, 10.0, 3.0
_ONCE_WITHIN_S = 120.0  # `--once` waits this long for files that are still being written
_SPREAD_S = 2.0  # wait until all files of an update are there


def add_command(commands: Any) -> None:
    """Adds `watch` to the parser's subcommands."""
    watch = commands.add_parser(
        "watch",
        help="grade submissions as they come in, and give the feedback back",
        description="Grades what is new in a folder of STUDENT/LAB.ipynb or in nbgrader's "
        "exchange, again and again: a changed notebook is graded again, an unchanged one never. "
        "Fills the gradebook and gives the feedback back: STUDENT/LAB.feedback.html beside the "
        "notebook, or through the exchange. It ends after the submissions at hand when it gets "
        "SIGTERM or Ctrl-C (at once at the second, or with --executor slurm); started again, it "
        "goes on where it was, also after having been killed.",
    )
    watch.add_argument("where", metavar=f"FOLDER|{EXCHANGE}", help="where submissions come in")
    watch.add_argument(
        "--lab", required=True, action="append", choices=lab_names(), help="may be given again"
    )
    watch.add_argument(
        "--per-day",
        type=positive,
        default=PER_DAY,
        metavar="K",
        help=f"how often a student is graded within 24 hours (default: {PER_DAY}); what comes "
        "after that waits, and the student is told until when",
    )
    watch.add_argument(
        "--feedback", type=Path, metavar="FOLDER", help="write STUDENT/LAB.feedback.html there"
    )
    watch.add_argument("--once", action="store_true", help="grade what is there and end, for cron")
    watch.add_argument(
        "--every",
        type=_seconds,
        default=EVERY_S,
        metavar="S",
        help=f"seconds between two looks (default: {EVERY_S:g})",
    )
    watch.add_argument(
        "--settle",
        type=_seconds,
        default=SETTLE_S,
        metavar="S",
        help="a file that has changed within these seconds may still be being written (default: "
        f"{SETTLE_S:g})",
    )
    add_how_to_grade(watch)
    watch.set_defaults(run=_watch)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 24 * 3600:
        raise argparse.ArgumentTypeError(f"expected seconds, above 0 and up to a day, got {text}")
    return value


def _watch(options: argparse.Namespace, console: Console) -> int:
    check_installation()
    course = Course.find()
    course.key()
    course.make_private()
    from autograder.gradebook.watching import only_watch

    stop = Stop(at_once=options.executor == "slurm")
    with handling((signal.SIGTERM, signal.SIGINT), stop):
        try:
            with only_watch(course):
                return _loop(options, console, course, stop)
        except BlockingIOError:
            if not options.once:
                raise CourseError(f"another watch of {course.root} is at work") from None
            say(console, f"another watch of {course.root} is at work, and takes what is new")
            return EXIT_OK
        except KeyboardInterrupt:
            if stop.count > 1:
                raise
            say(console, "ended: what was graded is kept, and the next watch goes on from there")
            return EXIT_OK


def _loop(options: argparse.Namespace, console: Console, course: Course, stop: Stop) -> int:
    labs = list(dict.fromkeys(options.lab))
    if options.executor == "pool":
        pool.begin(*labs)
    from autograder.cli.watch_round import LabWatch, code_of

    watches = [LabWatch(options, console, course, lab, stop) for lab in labs]
    code, failed = code_of(labs), False
    ends_at = time.monotonic() + _ONCE_WITHIN_S
    say(console, f"watching {options.where} for {', '.join(labs)}")
    while True:
        growing = False
        for watch in watches:
            if not stop.asked and watch.has_news() and code_of(labs) != code:
                _begin_anew(console, stop)
            if not stop.asked:
                done = watch.round()
                failed, growing = failed or done.failed, growing or done.growing
        if stop.asked:
            say(console, "ended, as asked: the next watch goes on from here")
            return EXIT_OK
        if options.once and not (growing and time.monotonic() < ends_at):
            return EXIT_FAILED if failed else EXIT_OK
        stop.pause(min(options.every, options.settle) if growing else options.every)


def _begin_anew(console: Console, stop: Stop) -> None:
    """Starts this command again, so that verdicts come from the code that is on disk now."""
    say(console, "the grader's code has changed: beginning anew with it")
    stop.pause(_SPREAD_S)
    if not stop.asked:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
