"""`autograder verify --draws N`: no verdict may be a matter of luck.

Each submission of the bundled class runs once. Each check that it must lose runs N times there,
with other secret draws each time. It must lose every time, and its message must have the words of
the `says:` line. A right submission must pass all checks N times. Submissions with different faults
run as one; if a verdict is not the expected one there, each of them runs alone, and that counts.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nbformat import NotebookNode
from rich.console import Console
from rich.progress import Progress

from autograder.batch import pool
from autograder.batch.grade_class import default_jobs
from autograder.course.course import Course
from autograder.criteria import get_lab
from autograder.criteria.criterion import Criterion, Status, Verdict
from autograder.proof.verify import Row, choose_entries, expected_of, throwaway_course
from autograder.proof.zoo import ZooEntry, combine, load_zoo, write_class
from autograder.submission.attempt import run_once
from autograder.submission.class_run import ClassRun
from autograder.submission.engine import InfrastructureError

KEY = "00" * 32  # the same draws in every run, so that every failure can be repeated
# Checks that end so run once: a run costs a deadline or fresh ranks, and draws do not matter.
NO_LUCK = (Status.TIMEOUT, Status.RANK_LOST)
WALL_S = 4 * 3600


@dataclass(frozen=True)
class DrawsProof:
    """How often checks ran, and where a verdict was not the expected one."""

    lab: str
    num_entries: int
    num_checks: int
    problems: tuple[str, ...]
    seconds: float

    def record(self) -> dict[str, Any]:
        """The proof as JSON."""
        return asdict(self) | {"proven": not self.problems, "seconds": round(self.seconds, 1)}


def verify_draws(
    name: str,
    console: Console,
    num_draws: int,
    *,
    jobs: int | None = None,
    covering: bool = False,
    alone: bool = False,
    only: Sequence[str] | None = None,
    sandbox: bool = True,
) -> DrawsProof:
    """Runs each check of a lab's bundled class `num_draws` times; options as for `verify_lab`."""
    lab, began, checkout = get_lab(name), time.monotonic(), Course.find().root
    entries = [e for e in load_zoo(name, root=checkout) if e.loses != "everything"]
    entries = choose_entries(lab, entries, covering, only)
    num_checks, problems = 0, []
    with tempfile.TemporaryDirectory(prefix="draws-") as folder:
        course = throwaway_course(Path(folder), checkout)
        course.key_path.write_text(f"{KEY}\n")
        (course.root / "course.toml").write_text(f"[limits.{name}]\nwall_s = {WALL_S}\n")
        class_run = ClassRun(course, name, lab.grading_world_size, sandbox)
        work = partial(_try, class_run=class_run, num_draws=num_draws)

        def problems_of(some: Sequence[ZooEntry], progress: Progress) -> list[tuple[str, ...]]:
            """What was wrong with each of the entries."""
            if not some:
                return []
            paths = write_class(name, course.root / "class", root=checkout, entries=some)
            tasks = dict(enumerate(zip(some, paths, strict=True)))
            bar = progress.add_task(f"drawing for {name}", total=len(tasks))
            found: list[tuple[str, ...]] = [()] * len(some)

            def done(number: int, result: tuple[int, list[str]]) -> None:
                nonlocal num_checks
                num_checks += result[0]
                found[number] = tuple(result[1])
                progress.update(bar, advance=1, description=f"drew for {some[number].name}")

            places = [{}] * min(jobs or default_jobs(class_run.world_size, lab), len(tasks))
            for number, why in pool.run_pool(work, tasks, places, done).items():
                found[number] = (f"{some[number].name}: {why}",)
            return found

        with Progress(console=console) as progress:
            together = entries if alone else combine(entries)
            first = problems_of(together, progress)
            bad = [entry for entry, found in zip(together, first, strict=True) if found]
            # One fault may hide a different one: the parts run once more, each alone.
            again = problems_of([part for entry in bad for part in entry.parts], progress)
        first = [f for e, f in zip(together, first, strict=True) if not e.parts]
        problems = [problem for found in [*first, *again] for problem in found]
    seconds = time.monotonic() - began
    return DrawsProof(name, len(entries), num_checks, tuple(sorted(problems)), seconds)


def _try(task: tuple[ZooEntry, Path], class_run: ClassRun, num_draws: int) -> tuple[int, list[str]]:
    """How many checks of a submission ran, and what was wrong with which draw."""
    entry, path = task
    lab = class_run.lab
    criteria = [c for c in lab.criteria if not entry.loses or c.name in entry.loses]
    times = {c.name: 1 if entry.statuses.get(c.name) in NO_LUCK else num_draws for c in criteria}
    notebook = class_run.read(path).notebook
    assert notebook is not None, f"{entry.name} is no notebook"
    turns, problems, name = Counter[str](), [], entry.name

    def note(verdict: Verdict, seconds: float) -> None:
        """Called after each check: the next one of this criterion gets the next draw."""
        turn, criterion = turns[verdict.criterion], verdict.criterion
        turns[criterion] += 1
        row = Row(
            name=name,
            expected={criterion: expected_of(lab, entry)[criterion]},
            got={criterion: str(verdict.status)},
            seconds=seconds,
            messages={criterion: verdict.message},
            says={c: words for c, words in entry.says.items() if c == criterion},
            extra=frozenset(c.name for c in lab.criteria if c.extra),
        )
        problems.extend(f"{name}: {criterion}, draw {turn}: {why}" for why in row.wrong().values())

    def seed_of(criterion: Criterion) -> str:
        return f"draw {turns[criterion.name]}"

    executed = class_run.course.build / f"{name}.ipynb"
    executed.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)  # the ranks need the cores
    try:
        run_once(repeated(notebook, times), class_run, seed_of, executed, note)
    except InfrastructureError as error:
        problems.append(f"{name}: the grader failed: {error}")
    problems += [
        f"{name}: {criterion}: {turns[criterion]} of {wanted} draws were judged"
        for criterion, wanted in times.items()
        if turns[criterion] < wanted
    ]
    return turns.total(), problems


def repeated(notebook: NotebookNode, times: dict[str, int]) -> NotebookNode:
    """The notebook with each check as often as `times` says, and without the other checks."""
    made = copy.copy(notebook)
    made.cells = []
    for cell in notebook.cells:
        meta = cell.metadata.get("minidist", {})
        turns = times.get(meta["grade_id"], 0) if meta.get("kind") == "check" else 1
        for turn in range(turns):
            again = copy.deepcopy(cell)
            again.id = f"{cell.id}-{turn}" if turn else cell.id
            made.cells.append(again)
    return made
