"""Subcommands besides grading: replay, status, publish, roster and extend."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from autograder.cli.arguments import EXIT_FAILED, EXIT_OK, add_trusted
from autograder.course.course import Course
from autograder.criteria import lab_names
from autograder.plain_text import clean, say


def add_commands(commands: Any) -> None:
    """Adds these commands to the parser's subcommands."""
    _add_replay(commands)
    _add_status(commands)
    _add_publish(commands)
    _add_roster(commands)
    _add_extend(commands)


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="run a graded notebook again with the same draws, and compare with its record",
        description="Runs the notebook of a record again with the same draws. Journal and "
        "gradebook stay as they are. Exit code 0: every criterion ends as in the record; "
        "1: one does not.",
    )
    replay.add_argument("id", metavar="ID", help="a student, or the start of a record's key")
    replay.add_argument("--lab", choices=lab_names(), help="where the student has several")
    replay.add_argument(
        "--notebook", type=Path, metavar="FILE", help="write the notebook as it was run now"
    )
    add_trusted(replay, "run")
    replay.set_defaults(run=_replay)


def _replay(options: argparse.Namespace, console: Console) -> int:
    from autograder.records.grading import read_history
    from autograder.regrading.find_gradings import find_grading
    from autograder.regrading.replay import explain, replay, replay_table
    from autograder.submission.choose_box import choose_sandbox
    from autograder.submission.engine import InfrastructureError

    course = Course.find()
    course.key()
    if options.notebook is not None and options.notebook.exists():
        raise ValueError(f"{options.notebook} exists already: name another file")
    grading = find_grading(read_history(course), options.id, options.lab)
    sandboxed = choose_sandbox(options.trusted, bundled=False)
    try:
        with console.status(f"replaying {escape(clean(grading.student))}"):
            result = replay(grading, course, sandboxed=sandboxed, keep=options.notebook)
    except InfrastructureError as error:
        print(f"autograder: the grader itself failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    console.print(replay_table(result))
    for line in explain(result):
        say(console, line)
    return EXIT_OK if result.agrees else EXIT_FAILED


def _add_status(commands: Any) -> None:
    status = commands.add_parser(
        "status",
        help="say what a `grade` in another terminal is doing, or what became of it",
        description="Reads the journal and changes nothing: who is done, running (at which "
        "check, for how long), waiting, or failed by the grader (INFRA, with tries), who is "
        "grading and for how long still.",
    )
    status.add_argument("--watch", action="store_true", help="go on until nobody grades")
    status.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds (1)")
    status.add_argument("--lab", choices=lab_names(), help="default: the lab graded last")
    status.add_argument("--json", action="store_true", help="write it as JSON")
    status.set_defaults(run=_status)


def _status(options: argparse.Namespace, console: Console) -> int:
    from autograder.records.progress_view import ProgressView, to_json, watch

    if options.every <= 0:
        raise ValueError(f"--every: expected more than 0 seconds, got {options.every:g}")
    status = ProgressView(Course.find(), options.lab)
    if options.json:
        print(json.dumps(to_json(status.refresh(), time.time()), indent=1))
    elif options.watch:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C only ends watching
            watch(status, console, options.every, time.time)
    else:
        console.print(status.view(status.refresh(), time.time()))
    return EXIT_OK


def _add_publish(commands: Any) -> None:
    publish = commands.add_parser(
        "publish",
        help="write the gradebook as a file that Canvas, Moodle or Gradescope imports",
        description="Takes nbgrader's scores: what a person gave and late penalties are in them. "
        "Says who has no submission, who waits for a person, and who is left out and why. Exit "
        "code 1: somebody who has a grade is not in the file.",
        epilog="canvas: Grades > Import. moodle: Grades > Import > CSV file, map 'Email address'. "
        "gradescope: upload the zip as the assignment's autograder, then rerun it; it hands out "
        "these results, and only to the notebooks that were graded.",
    )
    publish.add_argument("--to", required=True, choices=("csv", "canvas", "moodle", "gradescope"))
    publish.add_argument(
        "--lab", action="append", default=[], help="default: every lab in the gradebook"
    )
    publish.add_argument(
        "--roster",
        type=Path,
        metavar="FILE",
        help="a class list with the other system's ids: Canvas's gradebook export, say",
    )
    publish.add_argument("--id", metavar="COLUMN", help="of the roster, with nbgrader's ids")
    publish.add_argument(
        "--column",
        action="append",
        default=[],
        type=_column,
        metavar="LAB=NAME",
        help="the lab's column there (default: the roster's, else the lab's name)",
    )
    publish.add_argument("--out-of", type=float, metavar="N", help="full marks there")
    publish.add_argument(
        "--cap", action="store_true", help="nobody gets more than full marks (Moodle wants that)"
    )
    publish.add_argument("--zero", action="store_true", help="0 for whoever has not handed in")
    publish.add_argument("--out", type=Path, metavar="FILE", help="default: in build/publish")
    publish.add_argument("--force", action="store_true", help="replace a file that is there")
    publish.set_defaults(run=_publish)


def _column(text: str) -> tuple[str, str]:
    lab, equals, name = text.partition("=")
    if not (lab and equals and name.strip()):
        raise argparse.ArgumentTypeError(f"expected LAB=NAME, got {text!r}")
    return lab, name.strip()


def _publish(options: argparse.Namespace, console: Console) -> int:
    from autograder.gradebook.publish import PublishOptions, publish, save
    from autograder.gradebook.roster import read_roster

    if options.out_of is not None and not 0 < options.out_of < 1e6:
        raise ValueError(f"--out-of: expected a number above 0, got {options.out_of:g}")
    course = Course.find()
    published = publish(
        course,
        options.to,
        PublishOptions(
            labs=tuple(dict.fromkeys(options.lab)),
            roster=read_roster(options.roster, options.id) if options.roster else None,
            columns=dict(options.column),
            out_of=options.out_of,
            zero=options.zero,
            cap=options.cap,
        ),
    )
    suffix = "zip" if options.to == "gradescope" else "csv"
    name = f"{'-'.join((*published.labs, options.to))}.{suffix}"
    path = options.out or course.build / "publish" / name
    if published.num_grades:
        save(path, published.made.data, force=options.force)
        say(console, f"{path}")
    else:
        say(console, "nobody in it would have a grade, so nothing was written:")
    for line in published.explain():
        say(console, f"  {line}")
    return EXIT_OK if published.complete and published.num_grades else EXIT_FAILED


def _add_roster(commands: Any) -> None:
    roster = commands.add_parser(
        "roster",
        help="put a class list into nbgrader's gradebook",
        description="Reads ids, names, addresses and LMS ids from a CSV file, as Canvas, Moodle, "
        "Gradescope or nbgrader export it, and puts them into nbgrader's gradebook. Running it "
        "twice changes nothing; nobody is removed, and an empty cell changes nothing.",
    )
    roster.add_argument("file", type=Path, metavar="FILE.csv")
    roster.add_argument(
        "--id", metavar="COLUMN", help="the column with the names of the students' folders"
    )
    roster.add_argument("--dry-run", action="store_true", help="only say what would be done")
    roster.set_defaults(run=_roster)


def _roster(options: argparse.Namespace, console: Console) -> int:
    from autograder.gradebook.roster import import_roster, read_roster

    roster = read_roster(options.file, options.id)
    done = import_roster(Course.find(), roster, dry=options.dry_run)
    would = "would be " if options.dry_run else ""
    counts = f"{len(done.added)} {would}new, {len(done.changed)} {would}changed"
    say(console, f"{counts}, {len(done.same)} as before")
    for student, news in done.changed.items():
        say(console, f"  {student}: {'; '.join(news)}")
    if not any(person.first_name or person.last_name for person in roster.people):
        say(console, f"  NOBODY HAS A NAME: no column is known to hold one ({options.file})")
    if roster.unused:
        say(console, f"  columns that are not used: {', '.join(roster.unused)}")
    if done.others:
        say(console, f"  in the gradebook, but not in the list: {', '.join(done.others)}")
    return EXIT_OK


def _add_extend(commands: Any) -> None:
    extend = commands.add_parser(
        "extend",
        help="give a student more time for a lab, or list who has more",
        description="Moves one student's due date, before or after the student hands in. A late "
        "penalty in the gradebook is changed at once; feedback pages follow when the class is "
        "graded again. Due dates and penalties are in course.toml, [calendar].",
    )
    extend.add_argument("student", nargs="?", metavar="STUDENT")
    extend.add_argument("lab", nargs="?", metavar="LAB", choices=lab_names())
    extend.add_argument(
        "date",
        nargs="?",
        metavar="DATE",
        help="2026-10-30 (the end of that day), or a time such as 2026-10-30T12:00:00+01:00",
    )
    extend.add_argument("--new", action="store_true", help="the gradebook need not know STUDENT")
    extend.set_defaults(run=_extend)


def _extend(options: argparse.Namespace, console: Console) -> int:
    from autograder.course.calendar import read_date, say_time
    from autograder.gradebook.late import extend, read_extensions

    course = Course.find()
    zone = course.calendar.zone
    if options.student is None:
        for lab, of in read_extensions(course).items():
            for student, until in of.items():
                say(console, f"{lab}: {student} until {say_time(until, zone)}")
        return EXIT_OK
    if options.date is None:
        raise ValueError("expected STUDENT LAB DATE")
    until = read_date(options.date, zone, "DATE", ends_day=True)
    student = extend(course, options.student, options.lab, until, new=options.new)
    say(console, f"{options.lab}: {student} has time until {say_time(until, zone)}")
    return EXIT_OK
