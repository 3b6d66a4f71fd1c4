"""`autograder grade`: a class, from its notebooks to report and gradebook."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autograder.batch import pool
from autograder.cli.arguments import EXIT_FAILED, positive, writable
from autograder.course.course import Course
from autograder.criteria import get_lab, lab_names
from autograder.records.grading import read_history
from autograder.regrading.history import choose, handed_in_before
from autograder.submission.intake import Found, find_submissions

if TYPE_CHECKING:
    from autograder.report.similar import Pair
    from autograder.report.suspicious import Evidence


def add_command(commands: Any) -> None:
    """Adds it to the parser's subcommands."""
    grade = commands.add_parser("grade", help="grade notebooks")
    grade.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH",
        help="a notebook, a folder of STUDENT/LAB.ipynb, or nbgrader's submitted/",
    )  # fmt: skip
    grade.add_argument("--lab", required=True, choices=lab_names())
    grade.add_argument("--ranks", type=positive, help="number of ranks (default: the lab's)")
    grade.add_argument(
        "--jobs", type=positive,
        help="submissions at once (default: what cores and GPUs are enough for)",
    )  # fmt: skip
    grade.add_argument(
        "--executor", choices=("pool", "slurm", "local"), default="pool",
        help="processes of this one (default), jobs of a Slurm cluster ([slurm] in course.toml), "
        "or the same jobs without Slurm",
    )  # fmt: skip
    grade.add_argument("--json", type=writable, metavar="FILE", help="write all records as JSON")
    grade.add_argument(
        "--trusted", action="store_true", help="grade without a sandbox where there is none"
    )
    grade.add_argument("--example", action="store_true", help="grade the bundled example class")
    grade.add_argument(
        "--no-gradebook", action="store_true", help="leave nbgrader's gradebook and feedback alone"
    )
    grade.add_argument(
        "--student", action="append", default=[], metavar="NAME",
        help="grade only this student, also where there is a record; without PATH: the notebook "
        "that was graded last",
    )  # fmt: skip
    grade.set_defaults(run=_grade)


def _grade(options: argparse.Namespace, console: Console) -> int:
    course = Course.find()
    course.key()
    found = _submissions(options, course)
    submissions = found.submissions
    if options.executor == "pool":
        pool.begin(options.lab)
    from autograder.batch.grade_class import default_jobs, grade_class
    from autograder.criteria.criterion import Status
    from autograder.gradebook.fill import check_names, fill_gradebook
    from autograder.gradebook.settled import find_settled
    from autograder.plain_text import clean
    from autograder.regrading.changes import Regrading
    from autograder.report.page import write_html
    from autograder.report.similar import rows
    from autograder.report.suspicious import rows as evidence_rows
    from autograder.report.terminal import left_out_of, rich_table, write_csv
    from autograder.submission.choose_box import choose_sandbox
    from autograder.submission.class_run import ClassRun

    if not options.no_gradebook:
        check_names(submissions)
    lab = get_lab(options.lab)
    bundled = options.example and not options.paths
    class_run = ClassRun(
        course, lab.name, options.ranks or lab.grading_world_size,
        # Under Slurm, each node looks for a sandbox of its own.
        options.executor == "slurm" or choose_sandbox(options.trusted, bundled=bundled),
        again=bool(options.student),
    )  # fmt: skip
    if not class_run.sandboxed:
        console.print("[bold red]UNSANDBOXED[/]: nothing holds these submissions back")
    jobs = options.jobs or default_jobs(class_run.world_size, lab)
    regrading = Regrading(class_run)
    runner = None
    if options.executor != "pool":
        from autograder.batch.slurm.runner import JobRunner

        trusted = options.trusted or bundled
        runner = JobRunner(options.executor, course, console, trusted=trusted)
        jobs = runner.parallel(jobs)
    records = grade_class(submissions, class_run, jobs, console, runner)
    console.print(rich_table(records))
    left_out = left_out_of(found.left_out, lab.name)
    if left_out:
        names = ", ".join(each["student"] for each in left_out)
        say = f"not graded, {len(left_out)} folders without {lab.name}.ipynb: {clean(names)}"
        console.print(say, markup=False, highlight=False, soft_wrap=True)
    regrading.show(records, console)
    left = [course.build / "report.html", course.build / "grades.csv"]
    shown = regrading.whole_class(records) if options.student else records
    pairs, evidence = [], []
    if not options.example:  # whose submissions are all variants of one
        pairs, evidence = _worth_a_look(course, lab.name, shown)
    write_html(shown, left[0], rows(pairs), evidence_rows(evidence), left_out)
    write_csv(shown, left[1])
    if options.json is not None:
        text = json.dumps([*records, *left_out], indent=1)
        if options.json == Path("-"):
            print(text)
        else:
            options.json.write_text(text + "\n", encoding="utf-8")
            left.append(options.json)
    infra = [r for r in records if any(c["status"] == Status.INFRA for c in r["criteria"])]
    # Whom the grader has failed is left out, and is not in the way of the others.
    done = [(s, r) for s, r in zip(submissions, records, strict=True) if r not in infra]
    if not options.no_gradebook and class_run.world_size == lab.grading_world_size and done:
        with console.status("nbgrader: gradebook and feedback"):
            graded = [s for s, _ in done], [r for _, r in done]
            settled = find_settled(course, lab.name, *graded, regrading.before)
            left.append(fill_gradebook(*graded, class_run, settled))
        left.append(course.build / "nbgrader" / "gradebook.db")
    if evidence:
        students = len({each.student for each in evidence})
        console.print(f"{students} submissions with something to look at: see the report")
    if pairs:
        console.print(f"{len(pairs)} near-identical pairs, to be looked at: see the report")
    for path in left:
        console.print(f"  {path}", highlight=False, soft_wrap=True)
    for record in infra:
        message = record["criteria"][0]["message"]
        said = clean(f"{record['student']} was not graded: {message}")
        print(f"autograder: {said}", file=sys.stderr)
    return EXIT_FAILED if infra else 0


def _worth_a_look(
    course: Course, lab: str, records: Sequence[dict[str, Any]]
) -> tuple[list[Pair], list[Evidence]]:
    """Near-identical submissions, and evidence: advice, which must not stop the gradebook."""
    from autograder.report.authored import read_class
    from autograder.report.similar import similar_in_class
    from autograder.report.suspicious import suspicious_in_class

    files = [(record["student"], Path(record["submission"])) for record in records]
    try:
        notebooks = read_class(course, lab, files)
        pairs = similar_in_class(course, lab, notebooks)
        return pairs, suspicious_in_class(course, lab, notebooks, records)
    except Exception:
        traceback.print_exc()
        print("autograder: the report lacks what is worth a look, see above", file=sys.stderr)
        return [], []


def _submissions(options: argparse.Namespace, course: Course) -> Found:
    if not options.paths and not options.example and not options.student:
        raise ValueError("name a notebook or a folder, or say --example")
    if options.student and not options.paths and not options.example:
        return Found(handed_in_before(read_history(course), options.lab, options.student), {})
    found = find_submissions(options.paths, options.lab) if options.paths else Found([], {})
    if options.example:
        from autograder.proof.zoo import write_class

        folder = course.build / "class"
        shutil.rmtree(folder, ignore_errors=True)  # of an older version, perhaps
        write_class(options.lab, folder, only_example=True)
        found.submissions.extend(find_submissions([folder], options.lab).submissions)
    return Found(choose(found.submissions, options.student), {}) if options.student else found
