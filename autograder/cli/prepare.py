"""Commands before a class is graded: init, verify, release and doctor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autograder.batch import pool
from autograder.cli.arguments import EXIT_FAILED, positive, writable
from autograder.course.calendar import Calendar, say_time
from autograder.course.course import Course, CourseError
from autograder.criteria import lab_names

if TYPE_CHECKING:
    from autograder.authoring.release import Release


def add_commands(commands: Any) -> None:
    """Adds these commands to the parser's subcommands."""
    init = commands.add_parser("init", help="make the course's secret key")
    init.set_defaults(run=_init)
    _add_verify(commands)
    _add_release(commands)
    doctor = commands.add_parser("doctor", help="say what this machine can do, and what to mend")
    doctor.set_defaults(run=_doctor)


def _init(options: argparse.Namespace, console: Console) -> int:
    course = Course.find()
    made = course.make_key()
    console.print(f"{'made' if made else 'kept'} {course.key_path}", highlight=False)
    return 0


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify", help="prove the labs' tests with the bundled right and wrong submissions"
    )
    verify.add_argument("--lab", action="append", choices=lab_names(), help="default: every lab")
    verify.add_argument("--jobs", type=positive, help="submissions at once")
    verify.add_argument(
        "--json", type=writable, metavar="FILE", help="write the kill matrices as JSON"
    )
    verify.add_argument(
        "--covering", action="store_true", help="only submissions that lose every criterion once"
    )
    verify.add_argument(
        "--alone",
        action="store_true",
        help="grade each by itself; else those with different bugs are graded as one, and one by "
        "one where that one does not lose what all of them lose",
    )
    verify.add_argument(
        "--only", action="append", metavar="NAME", help="only submissions of this name (wrong_*)"
    )
    verify.add_argument(
        "--draws",
        type=positive,
        metavar="N",
        help="run each check N times with other draws: those that a submission must lose, and all "
        "of a right one",
    )
    verify.set_defaults(run=_verify)


def _verify(options: argparse.Namespace, console: Console) -> int:
    labs = options.lab or lab_names()
    pool.begin(*labs)
    from autograder.box.sandbox import probe_support
    from autograder.proof.verify import matrix_table, verify_lab

    proofs = []
    chosen = {
        "jobs": options.jobs,
        "covering": options.covering,
        "alone": options.alone,
        "only": options.only,
        "sandbox": probe_support().works,
    }
    for name in labs:
        if options.draws is not None:
            from autograder.proof.draws import verify_draws  # imports torch

            proof = verify_draws(name, console, options.draws, **chosen)
            done = f"{proof.num_checks} checks of {proof.num_entries} submissions"
        else:
            proof = verify_lab(name, console, **chosen)
            done = f"{proof.num_entries} submissions"
            console.print(matrix_table(proof))
        proofs.append(proof)
        for problem in proof.problems:
            console.print(f"[bold red]✗[/] {escape(problem)}", highlight=False, soft_wrap=True)
        verdict = "[bold red]NOT PROVEN[/]" if proof.problems else "[bold green]proven[/]"
        console.print(f"{name}: {verdict}, {done} in {proof.seconds:.0f} s\n")
    if options.json is not None:
        text = json.dumps([proof.record() for proof in proofs], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return EXIT_FAILED if any(proof.problems for proof in proofs) else 0


def _add_release(commands: Any) -> None:
    release = commands.add_parser("release", help="write the repository that students get")
    release.add_argument(
        "folder", type=Path, nargs="?", help="new, empty, or written by this before"
    )
    release.add_argument(
        "--lab",
        action="append",
        choices=lab_names(),
        help="to hand out (default: every lab that [calendar] in course.toml uses, and releases by "
        "now)",
    )
    release.add_argument(
        "--over",
        action="append",
        choices=lab_names(),
        help="a lab whose deadline is over: with its solution, and what it withholds (default: "
        "without --lab, those whose solutions [calendar] shows by now)",
    )
    release.add_argument(
        "--without-solutions",
        action="store_true",
        help="of labs that are over, hand out what they withheld, but not their solutions",
    )
    release.add_argument(
        "--plan",
        action="store_true",
        help="write nothing; show when each lab is out, and what students lack until it is over",
    )
    release.set_defaults(run=_release)


def _release(options: argparse.Namespace, console: Console) -> int:
    from autograder.authoring.release import write_release

    course, now = Course.find(), datetime.now(UTC)
    dates = {lab: course.calendar.of(lab) for lab in lab_names()}
    if options.plan:
        _show_plan(course, options.lab or [lab for lab in dates if dates[lab].used], console)
        return 0
    labs = options.lab or [lab for lab in dates if dates[lab].is_released(now)]
    over = options.over or []
    if options.over is None and options.lab is None:
        over = [lab for lab in labs if dates[lab].is_over(now)]
    if options.folder is None:
        raise CourseError("name the folder for the students' repository, or give --plan")
    dated = [lab for lab in course.calendar.labs if dates[lab].used and not dates[lab].is_over(now)]
    made = write_release(
        course, options.folder, labs, over, later=dated, solutions=not options.without_solutions
    )
    console.print(f"{made.folder}: {', '.join(made.labs)}", highlight=False, soft_wrap=True)
    console.print(_release_table(made, course.calendar))
    for lab, its in dates.items():
        if its.used and its.release is not None and lab not in made.labs:
            when = say_time(its.release, course.calendar.zone)
            console.print(f"not yet: {lab}, from {when} on", highlight=False, soft_wrap=True)
    _show_unused(course.calendar, made.labs, console)
    return 0


def _show_unused(calendar: Calendar, shown: Collection[str], console: Console) -> None:
    """Names the labs that are no part of the course."""
    if unused := [lab for lab in lab_names() if not calendar.of(lab).used and lab not in shown]:
        console.print(f"not used, says course.toml: {', '.join(unused)}", highlight=False)


def _release_table(made: Release, calendar: Calendar) -> Table:
    """What was left out, until when, and why."""
    from autograder.authoring.release import why_withheld

    def until(labs: Sequence[str]) -> str:
        dates = {lab: calendar.of(lab).solutions for lab in labs}
        return ", ".join(
            f"{lab} ({at.astimezone(calendar.zone):%Y-%m-%d})" if at else lab
            for lab, at in dates.items()
        )

    table = Table(box=box.SIMPLE_HEAD, title="left out" if made.withheld else "nothing is left out")
    for heading in ("what", "until this lab is over", "why"):
        table.add_column(heading, overflow="fold")
    for name, labs in made.withheld.items():
        table.add_row(name, until(labs), why_withheld(name, labs))
    for name, (hidden, count) in made.lectures.items():
        if hidden:
            table.add_row(
                f"{name}: code of {hidden} of {count} cells",
                until(made.waits[name]),
                "needs such a module; outputs are there",
            )
    return table


def _show_plan(course: Course, labs: Sequence[str], console: Console) -> None:
    """Prints when each lab is out, and which lecture cells and modules wait for it."""
    from autograder.authoring.release import week_by_week

    if not labs:
        raise CourseError(f"{course.root / 'course.toml'}: [calendar] uses no lab")
    first = datetime.min.replace(tzinfo=UTC)
    releases = {lab: course.calendar.of(lab).release or first for lab in labs}
    labs = sorted(labs, key=lambda lab: (releases[lab], not lab.startswith("lab")))
    console.print(_term_table(week_by_week(course, labs)))
    console.print(_dates_table(course, labs))
    _show_unused(course.calendar, labs, console)


def _term_table(weeks: Mapping[str, Mapping[str, tuple[int, int]]]) -> Table:
    """A row per lab, a column per lecture: how many of its code cells wait for the lab."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,  # to fit into 80 columns
        title="code cells that wait until a lab is over, by lecture",
        caption="A cell that waits is there with its outputs, without its code.",
    )
    table.add_column("lab", no_wrap=True)
    lectures = next(iter(weeks.values()))
    for lecture in lectures:
        table.add_column(lecture.partition("_")[0], justify="right", no_wrap=True, min_width=3)
    for lab, week in weeks.items():
        hidden = [week[lecture][0] for lecture in lectures]
        table.add_row(lab, *(str(number or "·") for number in hidden))
    table.add_section()
    table.add_row("of", *(str(count) for _, count in lectures.values()))
    return table


def _dates_table(course: Course, labs: Sequence[str]) -> Table:
    """A row per lab: its dates, and each module that it withholds, with what it would answer."""
    from autograder.authoring.release import NEEDS, find_withheld, why_withheld

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        width=75,
        title="what is out when, and what waits until `solutions`",
        caption="Modules of minidist wait, each after what it would answer;\n"
        "without a date for solutions, until a release with --over.",
    )
    for heading in ("released", "due", "solutions"):
        table.add_column(heading, width=11, overflow="fold")
    table.add_column("lab, and what it withholds", overflow="fold")
    for lab in labs:
        its = course.calendar.of(lab)
        whens = ((its.release, "at once"), (its.due, "·"), (its.solutions, "--over"))
        answers: dict[str, list[str]] = {}
        for name in find_withheld(course.root / "lib" / "minidist", [lab]):
            why = why_withheld(name, [lab])
            answers.setdefault(why, []).append(name.removeprefix("minidist."))
        others = len(answers.pop(NEEDS, []))
        lines = [lab, *(f"{why}: {', '.join(names)}" for why, names in answers.items())]
        table.add_row(
            *(say_time(at, course.calendar.zone) if at else unset for at, unset in whens),
            "\n".join([*lines, f"others that need these: {others}"] if others else lines),
        )
    return table


def _doctor(options: argparse.Namespace, console: Console) -> int:
    from autograder.cli.doctor import doctor_table, examine

    try:
        course = Course.find()
    except CourseError:
        course = None
    findings = examine(course)
    console.print(doctor_table(findings))
    return EXIT_FAILED if any(each.state == "missing" for each in findings) else 0
