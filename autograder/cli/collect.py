"""`autograder collect`: takes a learning platform's download apart, one folder per student."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from autograder.cli.arguments import EXIT_OK
from autograder.course.course import Course
from autograder.criteria import lab_names
from autograder.plain_text import say


def add_command(commands: Any) -> None:
    """Adds `collect` to the parser's subcommands."""
    collect = commands.add_parser(
        "collect",
        help="take the download of a learning platform, one folder per student",
        description="Reads what Canvas, Moodle, Gradescope or Brightspace let you download, GitHub "
        "Classroom's checkouts, or nbgrader's submitted/ or inbound/, and writes "
        "STUDENT/LAB/LAB.ipynb and timestamp.txt. Of several that a student handed in, it takes "
        "the last before the deadline. If somebody is not in the class list, nothing is written.",
    )
    collect.add_argument("download", type=Path, metavar="DOWNLOAD", help="a zip or a folder")
    collect.add_argument("--lab", required=True, choices=lab_names())
    collect.add_argument(
        "--into", type=Path, metavar="FOLDER", help="default: build/collected, of all labs"
    )
    collect.add_argument("--all", action="store_true", help="list everything that was handed in")
    collect.add_argument(
        "--roster",
        type=Path,
        metavar="FILE.csv",
        help="a class list (default: what `autograder roster` put into the gradebook)",
    )
    collect.add_argument("--id", metavar="COLUMN", help="of the roster, with the students' ids")
    collect.add_argument(
        "--as",
        dest="said",
        action="append",
        default=[],
        type=_said,
        metavar="NAME=STUDENT",
        help="whose it is, where the class list does not tell; NAME= leaves it out",
    )
    collect.set_defaults(run=_collect)


def _said(text: str) -> tuple[str, str]:
    name, equals, student = text.rpartition("=")
    if not (name.strip() and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=STUDENT, got {text!r}")
    return name.strip(), student.strip()


def _collect(options: argparse.Namespace, console: Console) -> int:
    from autograder.gradebook.collect import collect
    from autograder.gradebook.roster import read_roster

    course = Course.find()
    roster = read_roster(options.roster, options.id) if options.roster else None
    into = options.into or course.build / "collected"
    done = collect(
        course, options.lab, options.download, into, roster=roster, said=dict(options.said)
    )
    for student, what in done.taken.items():
        say(console, f"{student}: {what}")
        if options.all:
            for attempt in done.attempts[student]:
                say(console, f"    {attempt}")
    for name in done.others:
        say(console, f"nobody's, and not taken: {name}")
    if done.missing:
        say(console, f"nothing handed in: {', '.join(done.missing)}")
    say(console, f"{len(done.taken)} students, from {done.system}'s download, in {into}")
    say(console, f"next: autograder grade {into} --lab {options.lab}")
    return EXIT_OK
