"""`autograder grade`: grades a class, from its notebooks to report and gradebook."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from autograder.batch import pool
from autograder.cli.arguments import add_how_to_grade, positive, writable
from autograder.cli.installation import check_installation
from autograder.course.course import Course
from autograder.criteria import lab_names
from autograder.plain_text import clean, say
from autograder.records.grading import read_history
from autograder.regrading.find_gradings import choose, handed_in_before
from autograder.submission.find import Found, find_submissions


def add_command(commands: Any) -> None:
    """Adds `grade` to the parser's subcommands."""
    grade = commands.add_parser("grade", help="grade notebooks")
    grade.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a notebook, a folder of STUDENT/LAB.ipynb, or nbgrader's submitted/",
    )
    grade.add_argument("--lab", required=True, choices=lab_names())
    grade.add_argument("--ranks", type=positive, help="number of ranks (default: the lab's)")
    add_how_to_grade(grade)
    grade.add_argument("--json", type=writable, metavar="FILE", help="write all records as JSON")
    grade.add_argument("--example", action="store_true", help="grade the bundled example class")
    grade.add_argument(
        "--no-gradebook", action="store_true", help="leave nbgrader's gradebook and feedback alone"
    )
    grade.add_argument(
        "--student",
        action="append",
        default=[],
        metavar="NAME",
        help="grade only this student, also where there is a record; without PATH: the notebook "
        "that was graded last",
    )
    grade.set_defaults(run=_grade)


def _grade(options: argparse.Namespace, console: Console) -> int:
    check_installation()
    course = Course.find()
    course.key()
    course.make_private()
    found = _submissions(options, course)
    for line in found.explain():
        say(console, clean(line))
    if options.executor == "pool":
        pool.begin(options.lab)  # it imports torch while this process looks at the class
    from autograder.cli.grade_steps import GradeCommand, GradeOptions

    chosen = {field.name: getattr(options, field.name) for field in fields(GradeOptions)}
    command = GradeCommand(GradeOptions(**chosen), console, course, found)
    command.choose_runner()
    command.grade()
    command.show_changes()
    command.write_json()
    try:
        command.fill_gradebook()
    finally:
        command.write_report()  # last, as it links to the feedback; also if nbgrader failed
    return command.say_what_is_left()


def _submissions(options: argparse.Namespace, course: Course) -> Found:
    if not options.paths and not options.example and not options.student:
        raise ValueError("name a notebook or a folder, or say --example")
    if options.student and not options.paths and not options.example:
        return Found(handed_in_before(read_history(course), options.lab, options.student), {})
    found = find_submissions(options.paths, options.lab) if options.paths else Found([], {})
    if options.example:
        from autograder.proof.zoo import write_class

        folder = course.build / "class"
        shutil.rmtree(folder, ignore_errors=True)  # may be from an older version
        write_class(options.lab, folder, only_example=True)
        found.submissions.extend(find_submissions([folder], options.lab).submissions)
    if options.student:
        return Found(choose(found.submissions, options.student), {}, found.notes)
    return found
