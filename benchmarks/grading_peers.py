"""What `grading.py` grades, and how one would grade it without the autograder.

`make_class` makes the submissions, the same for all arms. Three peers run them on as many ranks
as the grader does; in all of them checks are judged by the practice referee:

    PapermillPerRank   torchrun, and in each rank a papermill with a plain IPython kernel
    StockNbgrader      `nbgrader autograde` with nbgrader's own Execute, and the torchrun kernel
    run_script         torchrun, and the submission's code as a plain script

Each returns the scores that it has found, so that a peer that does not do the work is seen.
"""

from __future__ import annotations

import copy
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from autograder.authoring.notebooks import to_bytes
from autograder.criteria import get_lab
from autograder.gradebook.database import put_alembic_on_path
from autograder.proof.zoo import ZooEntry, load_zoo

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 1800.0
# Entries of lab 1's zoo that neither hang nor lose a rank: a peer without deadlines would wait
# for ever. The first one passes on two ranks and not on three, so its score shows how many there
# were.
VARIED = (
    "wrong_hardcoded_two",
    "right_own_flattening",
    "wrong_loss_local",
    "right_tensor_hooks",
    "wrong_no_set_epoch",
    "right_futures",
    "wrong_no_buffers",
    "wrong_fixed_tolerance",
    "right_grad_views",
    "wrong_sampler_tail",
)
# What a plain IPython kernel lacks of the course's: a cell for some ranks only.
_RANK_MAGIC = """\
import os
from IPython.core.magic import register_cell_magic
@register_cell_magic("rank")
def _cell_for_a_rank(line, cell):
    if os.environ["RANK"] in line.replace(",", " ").split():
        get_ipython().run_cell(cell).raise_error()
"""
_PAPERMILL_PER_RANK = """\
import contextlib, os, sys, papermill
from papermill.exceptions import PapermillExecutionError
folder = sys.argv[2]
with contextlib.suppress(PapermillExecutionError):  # of a cell that raised; all have run
    papermill.execute_notebook(
        sys.argv[1], f"{folder}/{os.environ['RANK']}.ipynb", kernel_name="python3",
        progress_bar=False, cwd=folder)
"""
_NBGRADER_CONFIG = """\
c = get_config()
c.CourseDirectory.course_id = "peer"
c.CourseDirectory.root = {root!r}
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "released"
c.CourseDirectory.db_url = "sqlite:///" + {root!r} + "/gradebook.db"
c.CourseDirectory.ignore = ["*.py"]
c.Execute.kernel_name = "torchrun-{num_ranks}"
c.Execute.startup_timeout = 120
c.Execute.timeout = 600  # nbgrader's own 30 s are too short for a cell that starts a torchrun
"""


@dataclass(frozen=True)
class Handed:
    """One submission: who handed in what, and the score that it must get (points of 100)."""

    student: str
    content: bytes
    score: float

    @property
    def notebook(self) -> NotebookNode:
        """A notebook that the caller may change."""
        return nbformat.reads(self.content.decode(), as_version=4)


@cache
def zoo(lab: str) -> dict[str, ZooEntry]:
    """The lab's bundled submissions by name; not to be changed."""
    return {entry.name: entry for entry in load_zoo(lab)}


def make_class(lab: str, num: int, varied: Sequence[str] = VARIED) -> list[Handed]:
    """`num` submissions of a lab, no two of the same bytes; the same ones at every call.

    Every other one is the reference solution, the others are `varied` in turn. A comment with a
    number in the first solution cell makes each of them unlike all others.

    Args:
        varied: names of the lab's zoo; without any, all are the reference solution.
    """
    entries = zoo(lab)
    points = {criterion.name: criterion.points for criterion in get_lab(lab).criteria}
    handed = []
    for number in range(num):
        name = varied[number // 2 % len(varied)] if varied and number % 2 else "reference"
        notebook = copy.deepcopy(entries[name].notebook)
        first = next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("solution"))
        first.source += f"\n# submission {number}"
        score = entries[name].expected_score(points, get_lab(lab).gates)
        handed.append(Handed(f"student{number:04d}", to_bytes(notebook), score))
    return handed


def in_blocks(handed: Sequence[Handed], size: int) -> list[list[Handed]]:
    """The class in blocks of `size`; the last one takes what is left, if that is at least half.

    >>> [len(block) for block in in_blocks([Handed("", b"", 0.0)] * 16, 6)]
    [6, 6, 4]
    >>> [len(block) for block in in_blocks([Handed("", b"", 0.0)] * 14, 6)]
    [6, 6]
    """
    blocks = [list(handed[start : start + size]) for start in range(0, len(handed), size)]
    return [block for block in blocks if 2 * len(block) >= size]


def hand_in(block: Sequence[Handed], lab: str, folder: Path) -> Path:
    """Writes FOLDER/STUDENT/LAB/LAB.ipynb, as nbgrader wants it; returns the folder."""
    for each in block:
        path = folder / each.student / lab / f"{lab}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_bytes(each.content)
    return folder


def without_demonstrations(notebook: NotebookNode) -> NotebookNode:
    """Only the cells that the grader runs too."""
    notebook.cells = [
        cell
        for cell in notebook.cells
        if cell.metadata.get("minidist", {}).get("replay", True) is not False
    ]
    return notebook


def check_scores(arm: str, found: Mapping[str, float], block: Sequence[Handed]) -> None:
    """Raises RuntimeError where an arm did not find what is right."""
    wanted = {each.student: each.score for each in block}
    wrong = {s: (found.get(s), w) for s, w in wanted.items() if found.get(s) != w}
    if wrong:
        raise RuntimeError(f"{arm}: scores (found, expected): {wrong}")


def run(command: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None) -> str:
    """Runs `python COMMAND` in `folder`; what it printed. RuntimeError where it failed."""
    put_alembic_on_path()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | dict(env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=DEADLINE_S,
    )
    if done.returncode:
        said = done.stdout[-4000:]
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


def torchrun(num_ranks: int, folder: Path, *command: str) -> str:
    """Runs a script under torchrun on this machine; what it printed."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    return run([*start, *command], folder)


class PapermillPerRank:
    """torchrun with a papermill in each rank, submission by submission, `jobs` at once."""

    def __init__(self, lab: str, num_ranks: int, folder: Path, jobs: int, demos: bool) -> None:
        self.lab, self.num_ranks, self.folder, self.jobs = lab, num_ranks, folder, jobs
        self.demos = demos
        folder.mkdir()
        self.script = folder / "per_rank.py"
        self.script.write_text(_PAPERMILL_PER_RANK)

    def grade(self, submitted: Path) -> dict[str, float]:
        """Runs all cells of all submissions in a folder; scores by student."""
        with ThreadPoolExecutor(self.jobs) as pool:
            students = sorted(path.name for path in submitted.iterdir())
            notebooks = [submitted / name / self.lab / f"{self.lab}.ipynb" for name in students]
            return dict(zip(students, pool.map(self._one, notebooks), strict=True))

    def _one(self, path: Path) -> float:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            notebook = for_plain_kernels(nbformat.read(path, as_version=4), self.demos)
            nbformat.write(notebook, folder / "in.ipynb")
            torchrun(self.num_ranks, folder, str(self.script), str(folder / "in.ipynb"), name)
            run_on = [nbformat.read(folder / f"{rank}.ipynb", 4) for rank in range(self.num_ranks)]
            for rank, each in enumerate(run_on):
                code = [c for c in each.cells if c.cell_type == "code" and c.source.strip()]
                if left := [c for c in code if c.execution_count is None]:
                    raise RuntimeError(f"{path}: rank {rank} left out {len(left)} cells")
            return score_by_outputs(run_on[0], self.lab)


def for_plain_kernels(notebook: NotebookNode, demos: bool) -> NotebookNode:
    """The notebook with the magic that it needs on top, and going on after a cell that raised."""
    if not demos:
        notebook = without_demonstrations(notebook)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_RANK_MAGIC))
    for cell in notebook.cells:
        cell.metadata.setdefault("tags", []).append("raises-exception")
    return notebook


def score_by_outputs(notebook: NotebookNode, lab: str) -> float:
    """The points of all checks that the practice referee's line says are passed."""
    score = 0.0
    for criterion in get_lab(lab).criteria:
        [cell] = [
            cell
            for cell in notebook.cells
            if cell.metadata.get("nbgrader", {}).get("grade_id") == criterion.name
        ]
        said = "".join(o.text for o in cell.outputs if o.output_type == "stream")
        score += criterion.points * (f"✓ {criterion.name} " in said)
    return score


class StockNbgrader:
    """A course of its own with nbgrader's own preprocessors, in which nothing of ours is set."""

    def __init__(self, lab: str, num_ranks: int, folder: Path, demos: bool) -> None:
        self.lab, self.folder, self.demos = lab, folder, demos
        source = folder / "solutions" / lab
        source.mkdir(parents=True)
        shutil.copy(ROOT / "solutions" / lab / f"{lab}.ipynb", source)
        settings = _NBGRADER_CONFIG.format(root=str(folder), num_ranks=num_ranks)
        (folder / "nbgrader_config.py").write_text(settings)
        run(["-m", "nbgrader", "generate_assignment", lab], folder)

    def grade(self, submitted: Path) -> dict[str, float]:
        """Grades all submissions in a folder in one call; scores by student."""
        for path in () if self.demos else submitted.glob("*/*/*.ipynb"):
            nbformat.write(without_demonstrations(nbformat.read(path, as_version=4)), path)
        run(
            [
                *("-m", "nbgrader", "autograde", self.lab),
                f"--CourseDirectory.submitted_directory={submitted}",
                f"--CourseDirectory.autograded_directory={submitted}.graded",
            ],
            self.folder,
        )
        with sqlite3.connect(self.folder / "gradebook.db") as database:
            scores = dict(
                database.execute(
                    "select s.student_id, sum(g.auto_score) from grade g"
                    " join submitted_notebook n on n.id = g.notebook_id"
                    " join submitted_assignment s on s.id = n.assignment_id group by s.student_id"
                )
            )
        return {path.name: scores[path.name] for path in submitted.iterdir()}


def as_script(notebook: NotebookNode) -> str:
    """The code that the grader runs, as a script for torchrun.

    Raises:
        ValueError: a cell begins with a magic that has no counterpart in a script.
    """
    parts = []
    for cell in without_demonstrations(notebook).cells:
        if cell.cell_type != "code":
            continue
        lines = cell.source.split("\n")
        if lines[0] == "%%rank 0" and lines[1].startswith("%%writefile "):
            name, text = lines[1].split()[1], "\n".join(lines[2:]) + "\n"
            parts.append(f"if IS_RANK_ZERO:\n    open({name!r}, 'w').write({text!r})")
        elif any(line.startswith(("%", "!")) for line in lines):
            raise ValueError(f"a script has no magics: {cell.source[:80]!r}")
        else:
            parts.append(cell.source)
    return "\n\n".join([*parts, "dist.barrier()", "cleanup()", ""])


def run_script(handed: Handed, num_ranks: int, folder: Path) -> None:
    """Runs a submission's code under torchrun; it must get full marks in practice."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        Path(name, "lab.py").write_text(as_script(handed.notebook), "utf-8")
        said = torchrun(num_ranks, Path(name), "lab.py")
    if f"({handed.score:g} of 100 points so far)" not in said:
        raise RuntimeError(f"{handed.student}: the script did not get its points:\n{said[-4000:]}")
