"""The command line: `autograder COMMAND …`; `autograder --help` lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from autograder import workers
from autograder.commands import add_commands
from autograder.course import Course, CourseError
from autograder.criteria import get_lab, lab_names
from autograder.history import choose, handed_in_before, read_history
from autograder.intake import Found, find_submissions

if TYPE_CHECKING:
    from autograder.similar import Pair
    from autograder.suspicious import Evidence

# What needs torch and nbgrader is imported by the command that needs it: wrong usage and --help
# answer at once.

EXIT_FAILED, EXIT_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 if it did what it was asked, 1 on our own failure, 2 on wrong usage."""
    parser = _parser()
    options = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no ✓ is no reason to stop.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(stderr=options.command == "grade" and options.json == Path("-"))
    try:
        return options.run(options, console)
    except (CourseError, ValueError) as error:
        print(f"autograder: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        if error.filename is None:
            raise
        print(f"autograder: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("autograder: interrupted; what was graded is kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autograder", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="make the course's secret key")
    init.set_defaults(run=_init)
    grade = commands.add_parser("grade", help="grade notebooks")
    grade.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH",
        help="a notebook, a folder of STUDENT/LAB.ipynb, or nbgrader's submitted/",
    )  # fmt: skip
    grade.add_argument("--lab", required=True, choices=lab_names())
    grade.add_argument("--ranks", type=_positive, help="number of ranks (default: the lab's)")
    grade.add_argument(
        "--jobs", type=_positive,
        help="submissions at once (default: what cores and GPUs are enough for)",
    )  # fmt: skip
    grade.add_argument(
        "--executor", choices=("pool", "slurm", "local"), default="pool",
        help="processes of this one (default), jobs of a Slurm cluster ([slurm] in course.toml), "
        "or the same jobs without Slurm",
    )  # fmt: skip
    grade.add_argument("--json", type=_writable, metavar="FILE", help="write all records as JSON")
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
    verify = commands.add_parser(
        "verify", help="prove the labs' tests with the bundled right and wrong submissions"
    )
    verify.add_argument("--lab", action="append", choices=lab_names(), help="default: every lab")
    verify.add_argument("--jobs", type=_positive, help="submissions at once")
    verify.add_argument(
        "--json", type=_writable, metavar="FILE", help="write the kill matrices as JSON"
    )
    verify.add_argument(
        "--covering", action="store_true", help="only submissions that lose every criterion once"
    )
    verify.add_argument(
        "--alone", action="store_true",
        help="grade each by itself; else those with different bugs are graded as one, and one by "
        "one where that one does not lose what all of them lose",
    )  # fmt: skip
    verify.set_defaults(run=_verify)
    release = commands.add_parser("release", help="write the repository that students get")
    release.add_argument("folder", type=Path, help="new, empty, or written by this before")
    release.add_argument(
        "--lab", action="append", choices=lab_names(), help="to hand out (default: every lab)"
    )
    release.add_argument(
        "--over", action="append", default=[], choices=lab_names(),
        help="a lab whose deadline is over: with its solution, and what it withholds",
    )  # fmt: skip
    release.set_defaults(run=_release)
    doctor = commands.add_parser("doctor", help="say what this machine can do, and what to mend")
    doctor.set_defaults(run=_doctor)
    add_commands(commands)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _writable(text: str) -> Path:
    """A file that can be written to: better known now than after an hour of grading."""
    path = Path(text)
    if text == "-":
        return path  # standard output
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"no folder {path.parent}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, and {path} is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written to")
    return path


def _init(options: argparse.Namespace, console: Console) -> int:
    course = Course.find()
    made = course.make_key()
    console.print(f"{'made' if made else 'kept'} {course.key_path}", highlight=False)
    return 0


def _grade(options: argparse.Namespace, console: Console) -> int:
    course = Course.find()
    course.key()
    found = _submissions(options, course)
    submissions = found.submissions
    if options.executor == "pool":
        workers.begin(options.lab)
    from autograder.batch import check_names, default_jobs, fill_gradebook, grade_class
    from autograder.bridge import choose_sandbox
    from autograder.criteria.base import Status
    from autograder.regrade import Regrading
    from autograder.report import clean, left_out_of, rich_table, write_csv
    from autograder.report_page import write_html
    from autograder.run import Settings
    from autograder.similar import rows
    from autograder.suspicious import rows as evidence_rows

    if not options.no_gradebook:
        check_names(submissions)
    lab = get_lab(options.lab)
    bundled = options.example and not options.paths
    settings = Settings(
        course, lab.name, options.ranks or lab.grading_world_size,
        # Under Slurm, each node looks for a sandbox of its own.
        options.executor == "slurm" or choose_sandbox(options.trusted, bundled=bundled),
        again=bool(options.student),
    )  # fmt: skip
    if not settings.sandboxed:
        console.print("[bold red]UNSANDBOXED[/]: nothing holds these submissions back")
    jobs = options.jobs or default_jobs(settings.world_size, lab)
    regrading = Regrading.begin(settings)
    runner = None
    if options.executor != "pool":
        from autograder.executor import JobRunner

        trusted = options.trusted or bundled
        runner = JobRunner(options.executor, course, console, trusted=trusted)
        jobs = runner.parallel(jobs)
    records = grade_class(submissions, settings, jobs, console, runner)
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
    if not options.no_gradebook and settings.world_size == lab.grading_world_size and done:
        with console.status("nbgrader: gradebook and feedback"):
            graded = [s for s, _ in done], [r for _, r in done]
            left.append(fill_gradebook(*graded, settings, regrading.settled(*graded)))
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
    from autograder.authored import read_class
    from autograder.similar import similar_in_class
    from autograder.suspicious import suspicious_in_class

    files = [(record["student"], Path(record["submission"])) for record in records]
    try:
        notebooks = read_class(course, lab, files)
        pairs = similar_in_class(course, lab, notebooks)
        return pairs, suspicious_in_class(course, lab, notebooks, records)
    except Exception:
        traceback.print_exc()
        print("autograder: the report lacks what is worth a look, see above", file=sys.stderr)
        return [], []


def _verify(options: argparse.Namespace, console: Console) -> int:
    labs = options.lab or lab_names()
    workers.begin(*labs)
    from autograder.sandbox import probe_support
    from autograder.verify import matrix_table, verify_lab

    proofs = []
    for name in labs:
        proof = verify_lab(
            name, console, jobs=options.jobs, covering=options.covering,
            alone=options.alone, sandbox=probe_support().works,
        )  # fmt: skip
        proofs.append(proof)
        console.print(matrix_table(proof))
        for problem in proof.problems:
            console.print(f"[bold red]✗[/] {escape(problem)}", highlight=False, soft_wrap=True)
        verdict = "[bold red]NOT PROVEN[/]" if proof.problems else "[bold green]proven[/]"
        console.print(
            f"{name}: {verdict}, {proof.num_entries} submissions in {proof.seconds:.0f} s\n"
        )
    if options.json is not None:
        text = json.dumps([proof.record() for proof in proofs], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return EXIT_FAILED if any(proof.problems for proof in proofs) else 0


def _release(options: argparse.Namespace, console: Console) -> int:
    from autograder.release import write_release

    made = write_release(Course.find(), options.folder, options.lab or lab_names(), options.over)
    console.print(f"{made.folder}: {', '.join(made.labs)}", highlight=False, soft_wrap=True)
    for what, names in (("modules", made.withheld), ("lectures", made.lectures_withheld)):
        if names:
            console.print(f"  left out, {what}: {', '.join(names)}", highlight=False)
    return 0


def _doctor(options: argparse.Namespace, console: Console) -> int:
    from autograder.doctor import doctor_table, examine

    try:
        course = Course.find()
    except CourseError:
        course = None
    findings = examine(course)
    console.print(doctor_table(findings))
    return EXIT_FAILED if any(each.state == "missing" for each in findings) else 0


def _submissions(options: argparse.Namespace, course: Course) -> Found:
    if not options.paths and not options.example and not options.student:
        raise ValueError("name a notebook or a folder, or say --example")
    if options.student and not options.paths and not options.example:
        return Found(handed_in_before(read_history(course), options.lab, options.student), {})
    found = find_submissions(options.paths, options.lab) if options.paths else Found([], {})
    if options.example:
        from autograder.zoo import write_class

        folder = course.build / "class"
        shutil.rmtree(folder, ignore_errors=True)  # of an older version, perhaps
        write_class(options.lab, folder, only_example=True)
        found.submissions.extend(find_submissions([folder], options.lab).submissions)
    return Found(choose(found.submissions, options.student), {}) if options.student else found


if __name__ == "__main__":
    sys.exit(main())
