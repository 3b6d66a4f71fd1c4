"""The steps of `autograder grade`; `grade.py` calls them in order."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from autograder.batch.grade_class import Runner, default_jobs, grade_class
from autograder.cli.arguments import EXIT_FAILED, EXIT_OK
from autograder.cli.next_steps import next_steps
from autograder.course.course import Course, CourseError
from autograder.criteria import get_lab
from autograder.files import write_whole
from autograder.gradebook import fill, not_graded
from autograder.gradebook.database import points_by_person
from autograder.gradebook.late import Late, late_students
from autograder.gradebook.settled import find_settled
from autograder.plain_text import clean, first_line, say
from autograder.records.record import Record
from autograder.regrading.changes import Regrading
from autograder.report import similar, suspicious
from autograder.report.authored import read_class
from autograder.report.page import Part
from autograder.report.pages import write_pages
from autograder.report.terminal import rich_table
from autograder.submission.choose_box import choose_sandbox
from autograder.submission.class_run import ClassRun
from autograder.submission.find import Found


@dataclass(kw_only=True)
class GradeOptions:
    """The options of `autograder grade`, under the same names."""

    lab: str
    executor: str = "pool"
    jobs: int | None = None
    trusted: bool = False
    ranks: int | None = None
    paths: Sequence[Path] = ()
    student: Sequence[str] = ()
    example: bool = False
    no_gradebook: bool = False
    json: Path | None = None


class GradeCommand:
    """Grades a class in steps; each step stores what later steps need."""

    def __init__(
        self, options: GradeOptions, console: Console, course: Course, found: Found
    ) -> None:
        self.options, self.console, self.course = options, console, course
        self.submissions = found.submissions
        if not options.no_gradebook:
            fill.check_names(self.submissions)
        self.lab = get_lab(options.lab)
        self.left_out = found.left_out
        self.bundled = options.example and not options.paths
        # Under Slurm, each node looks for its own sandbox, so this machine needs none.
        sandboxed = options.executor == "slurm" or choose_sandbox(options.trusted, self.bundled)
        world_size = options.ranks or self.lab.grading_world_size
        again = bool(options.student)
        self.class_run = ClassRun(course, self.lab.name, world_size, sandboxed, again)
        if not sandboxed:
            console.print("[bold red]UNSANDBOXED[/]: nothing holds these submissions back")
        self.regrading = Regrading(self.class_run)
        self.records: list[Record] = []
        self.pairs: list[similar.Pair] = []
        self.evidence: list[suspicious.Evidence] = []
        self.late: list[Late] = []
        self.files: list[Path] = []
        usual = self.class_run.world_size == self.lab.grading_world_size
        self.fills_gradebook = usual and not options.no_gradebook
        self.nbgrader: fill.NbGrader | None = None

    def choose_runner(self) -> None:
        """Chooses what runs the submissions, and how many run at once."""
        options = self.options
        self.runner: Runner | None = None
        self.jobs: int = options.jobs or default_jobs(self.class_run.world_size, self.lab)
        if options.executor != "pool":
            from autograder.batch.slurm.runner import JobRunner

            trusted = options.trusted or self.bundled
            jobs = JobRunner(options.executor, self.course, self.console, trusted=trusted)
            self.runner, self.jobs = jobs, jobs.parallel(self.jobs)

    def grade(self) -> None:
        """Makes a record of every submission, and prints the table."""
        if self.fills_gradebook:
            self.nbgrader = fill.begin_nbgrader(self.course, self.lab.name)
        self.records = grade_class(
            self.submissions, self.class_run, self.jobs, self.console, self.runner
        )
        self.console.print(rich_table(self.records))
        if self.left_out:
            names = ", ".join(clean(folder.name) for folder in self.left_out)
            say(
                self.console,
                f"not graded, {len(self.left_out)} folders without {self.lab.name}.ipynb: {names}",
            )

    def show_changes(self) -> None:
        """Prints which students' verdicts are different than before."""
        self.regrading.show(self.records, self.console)

    def write_report(self) -> None:
        """Writes HTML pages and tables, with similar pairs and evidence: see `report.pages`."""
        example = self.bundled
        shown = self.records if example else self.regrading.whole_class(self.records)
        if not self.options.example:  # all submissions of the example are variants of one solution
            self._look_for_copies(shown)
        scored = {record.student for record in self.records if not record.infra}
        before = {} if example else not_graded.read(self.course, self.lab.name)
        left_out = {name: why for name, why in before.items() if name not in scored}
        left_out |= {folder.name: why for folder, why in self.left_out.items()}
        by_person: dict[str, dict[str, str]] = {}
        if not self.options.no_gradebook:
            with contextlib.suppress(CourseError):  # nbgrader's failure was reported
                by_person = points_by_person(self.course)
        rows = similar.rows(self.pairs), suspicious.rows(self.evidence)
        self.files += write_pages(
            self.course,
            self.regrading.history,
            self.lab.name,
            Part(shown, *rows, left_out),
            by_person,
            is_example=example,
        )

    def _look_for_copies(self, records: list[Record]) -> None:
        """Looks for near-identical submissions and evidence.

        An error here must not stop the gradebook, because the results are only advice.
        """
        files = [(record.student, Path(record.submission)) for record in records]
        try:
            notebooks = read_class(self.class_run, files)
            pairs = similar.similar_in_class(self.class_run, notebooks)
            self.evidence = suspicious.suspicious_in_class(self.class_run, notebooks, records)
            self.pairs = pairs
        except Exception:
            traceback.print_exc()
            print("autograder: the report lacks what is worth a look, see above", file=sys.stderr)

    def write_json(self) -> None:
        """Writes all records as JSON, if `--json` is given."""
        path = self.options.json
        if path is None:
            return
        nothing: dict[str, Any] = {"score": None, "max_score": None, "criteria": []}
        left_out = [
            {"submission": str(folder), "student": clean(folder.name), "lab": self.lab.name}
            | nothing
            | {"left_out": clean(why)}
            for folder, why in self.left_out.items()
        ]
        text = json.dumps([*(r.to_json() for r in self.records), *left_out], indent=1)
        if path == Path("-"):
            print(text)
        else:
            if path.exists() and not path.is_file():  # /dev/stdout
                path.write_text(text + "\n", encoding="utf-8")
            else:
                write_whole(path, f"{text}\n".encode())
            self.files.append(path)

    def fill_gradebook(self) -> None:
        """Fills nbgrader's gradebook and writes feedback, without INFRA submissions."""
        graded = [
            (submission, record)
            for submission, record in zip(self.submissions, self.records, strict=True)
            if not record.infra
        ]
        if not self.fills_gradebook:
            return
        not_graded.note(
            self.course,
            self.lab.name,
            graded=[record.student for _, record in graded],
            failed={r.student: first_line(r.infra.message) for r in self.records if r.infra},
            nothing={each.name: why for each, why in self.left_out.items() if each.is_dir()},
        )
        if not graded:
            return
        with self.console.status("nbgrader: gradebook and feedback"):
            submissions, records = [s for s, _ in graded], [r for _, r in graded]
            before = self.regrading.before
            settled = find_settled(self.course, self.lab.name, submissions, records, before)
            nbgrader, self.nbgrader = self.nbgrader, None  # `fill` ends it
            feedback = fill.fill_gradebook(submissions, records, self.class_run, settled, nbgrader)
            students = [submission.student for submission in submissions]
            self.late = late_students(self.course, self.lab.name, students)
        self.files += [feedback, self.course.nbgrader / "gradebook.db"]

    def close(self) -> None:
        """Ends nbgrader's process, if it was begun and nothing was filled in."""
        nbgrader, self.nbgrader = self.nbgrader, None
        if nbgrader is not None:
            nbgrader.close()

    def say_what_is_left(self) -> int:
        """Names the written files and the students with INFRA; returns the exit code."""
        if self.evidence:
            students = len({each.student for each in self.evidence})
            what = f"{students} submission{'s' * (students > 1)}"
            say(self.console, f"{what} with something to look at: see the report")
        if pairs := len(self.pairs):
            what = f"{pairs} near-identical pair{'s' * (pairs > 1)}"
            say(self.console, f"{what}, to be looked at: see the report")
        for late in self.late:
            say(self.console, f"late: {late.student}, {late.words}")
        for path in self.files:
            say(self.console, f"  {path}")
        code = EXIT_OK
        for record in self.records:
            if record.infra:
                said = clean(f"{record.student} was not graded: {record.infra.message}")
                print(f"autograder: {said}", file=sys.stderr)
                code = EXIT_FAILED
        for line in next_steps(self.course, self.lab.name, self.records, example=self.bundled):
            say(self.console, f"next: {line}")
        return code
