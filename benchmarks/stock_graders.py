"""The same attacks against our grader, stock nbgrader and otter-grader: who gains what.

    python benchmarks/stock_graders.py --otter OTTER/bin/python [--all | --only TITLE …] [--resume]

Stock graders have the judge inside the accused: the tests are cells of the notebook, or are run by
its process. Here all three have the same criteria, draws and judges, on as many ranks; only the
place of the judge differs. Before anything else the reference must get full marks and the starter
nothing from each of them, else there is nothing to compare.

The attacks were written for our grader, not for the others: what only nbgrader or otter falls for
is not among them. Writes build/bench/stock_graders.json and .txt after every attack, so a run can
be stopped and go on (--resume).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from attack_corpus import LAB, Attack, bases, load_attacks  # noqa: E402
from attack_grader import AttackCourse, reference  # noqa: E402
from harness import RESULTS, machine  # noqa: E402
from stock_attacks import OUTLIVES, SAMPLE, why_not  # noqa: E402
from stock_box import StockCourse, find_bwrap, find_otter, version_of  # noqa: E402
from stock_notebooks import Notebook, submission  # noqa: E402
from stock_table import Cell, Row, table  # noqa: E402

from autograder.criteria import get_lab  # noqa: E402

HONEST_DEADLINE_S = 900.0  # for three honest submissions
MIN_DEADLINE_S = 120.0  # for an attack and the classmate after it; longer on a slow machine
POINTS = {criterion.name: criterion.points for criterion in get_lab(LAB).criteria}
RANKS = get_lab(LAB).grading_world_size
CLASSMATE = {"setup", "sampler_partition", "sampler_tail", "sampler_epoch"}  # what it has done
GRADERS = ("ours", "nbgrader", "otter")
_LEAK = re.compile(r"LEAKED[^\n\\\"]{0,160}")


def main() -> int:
    """Grades, prints the table; 1 if the comparison is void."""
    options = _arguments()
    attacks = {attack.title: attack for attack in load_attacks() if attack.group != "fair"}
    titles = options.only or (list(attacks) if options.all else list(SAMPLE))
    if unknown := [title for title in titles if title not in attacks]:
        raise SystemExit(f"no such attacks: {', '.join(unknown)}; they are called GROUP/NAME")
    rows = _load(RESULTS / "stock_graders.json") if options.resume else {}
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        graders = _graders(Path(folder), options.otter)
        void = _grade_honest(rows, graders)
        for title in titles if not void else ():
            if title in rows and not rows[title].blocked():
                continue
            began = time.monotonic()
            cells = {name: grader.attack(attacks[title]) for name, grader in graders.items()}
            earned = sum(POINTS[name] for name in attacks[title].passes)
            rows[title] = Row(title, earned, cells)
            _keep(rows, void)
            said = ", ".join(f"{name} {cell.text()}" for name, cell in cells.items())
            print(f"{time.monotonic() - began:6.1f} s  {title}: {said}", flush=True)
    graders_were = ", ".join(
        version_of(*each)
        for each in (("nbgrader", sys.executable), ("otter-grader", options.otter))
    )
    head = f"stock graders: {machine()}, {graders_were}, {datetime.date.today()}"
    text = _keep(rows, void, head)
    print(f"\n{text}")
    return 1 if void else 0


def _grade_honest(rows: dict[str, Row], graders: Mapping[str, Any]) -> list[str]:
    """Grades the reference and the starter; where a grader does not give them what they earn."""
    void = []
    for title in ("reference", "starter"):
        cells = {name: grader.baseline(title) for name, grader in graders.items()}
        earned = sum(POINTS.values()) if title == "reference" else 0.0
        rows[title] = Row(title, earned, cells)
        void += [
            f"{name} {title} {cell.score:g}"
            for name, cell in cells.items()
            if not cell.note and cell.score != earned
        ]
    print("honest submissions:", "void" if void else "as they have earned", flush=True)
    return void


class _Blocked:
    """A grader that is not here: the table says why, and has no number."""

    def __init__(self, why: str) -> None:
        self.why = f"BLOCKED: {why}"

    def baseline(self, title: str) -> Cell:
        """Nothing but the reason."""
        return Cell(note=self.why)

    def attack(self, attack: Attack) -> Cell:
        """The reason why it is not run by anybody, or why not here."""
        return Cell(note=why_not(attack.title) or self.why)


class _Ours:
    """Our grader, in the course of tests/helpers/attack_grader.py."""

    def __init__(self, folder: Path) -> None:
        self.course = AttackCourse.make(folder)

    def baseline(self, title: str) -> Cell:
        """What an honest submission gets."""
        attack = dataclasses.replace(reference(), name=title, notebook=_base(title))
        return Cell(score=float(self.course.grade(attack).record.score or 0))

    def attack(self, attack: Attack) -> Cell:
        """What an attack gains, and what it does to others."""
        outcome = self.course.grade(attack)
        scores = {c.criterion: float(c.points) for c in outcome.record.criteria}
        harm = [p for p in outcome.problems if "journal" in p or "our own failure" in p]
        harm += [
            f"{path} was changed"
            for path, old in self.course.before.items()
            if self.course.state().get(path) != old
        ]
        if attack.group in OUTLIVES and not harm:
            notebook = classmate(f"# after {attack.title}")
            mate = dataclasses.replace(
                reference(),
                name=f"classmate-{attack.name}",
                group="after",
                passes=frozenset(CLASSMATE),
                notebook=notebook,
            )
            harm += [f"classmate: {problem}" for problem in self.course.grade(mate).problems]
        leaks = [p for p in outcome.problems if "LEAKED" in p or "POISON" in p]
        return Cell(
            score=sum(scores.values()),
            gained=gained(scores, attack.passes),
            leaks=leaks,
            harm=harm,
            seconds=outcome.seconds,
            said="\n".join(outcome.problems),
        )


class _Stock:
    """nbgrader or otter-grader."""

    def __init__(self, course: StockCourse) -> None:
        self.course = course
        copy = course.copy("first")
        # They are part of every course from now on: other students' work, graded already.
        students = {"reference": _base("reference"), "starter": _base("starter")}
        students["earlier"] = classmate("# earlier")
        for student, notebook in students.items():
            self._hand_in(copy, student, notebook)
        run = course.grade(copy, list(students), HONEST_DEADLINE_S)
        self.first = run.graded
        self.deadline_s = max(MIN_DEADLINE_S, 2 * run.seconds)
        print(f"{run.seconds:6.1f} s  {course.grader}: honest submissions", flush=True)
        course.keep(copy)

    def baseline(self, title: str) -> Cell:
        """What an honest submission gets."""
        return Cell(score=self.first[title].total)

    def attack(self, attack: Attack) -> Cell:
        """What an attack gains, and what it does to others."""
        if reason := why_not(attack.title):
            return Cell(note=reason)
        course = self.course.copy(attack.title.replace("/", "-"))
        stock = dataclasses.replace(
            attack, notebook=submission(attack.notebook, self.course.grader, RANKS)
        )
        stock.write(self.course.submit(course, "attacker"))
        students = ["attacker"]
        if attack.group in OUTLIVES:
            self._hand_in(course, "classmate", classmate("# classmate"))
            students.append("classmate")
        run = self.course.grade(course, students, self.deadline_s)
        harm = ["the class was stopped: nothing more after the deadline"] if run.stopped else []
        if "classmate" in students and _wrong(run.graded["classmate"].scores):
            harm.append(f"the classmate got {run.graded['classmate'].total:g} points, not the 23")
        for student in ("reference", "starter", "earlier"):
            if self.course.read(course, student).scores != self.first[student].scores:
                harm.append(f"the grade of {student} was changed")
        mine = run.graded["attacker"]
        return Cell(
            score=mine.total,
            gained=gained(mine.scores, attack.passes),
            graded=bool(mine.scores),
            leaks=leaks(mine.said, attack.group),
            harm=harm,
            seconds=run.seconds,
            said=run.said,
        )

    def _hand_in(self, course: Path, student: str, notebook: Notebook) -> None:
        folder = self.course.submit(course, student)
        folder.mkdir(parents=True)
        made = submission(notebook, self.course.grader, RANKS)
        (folder / f"{LAB}.ipynb").write_text(json.dumps(made), "utf-8")


def gained(scores: Mapping[str, float], passes: frozenset[str]) -> float:
    """Points beyond those that the docstring of an attack says are earned.

    >>> gained({"setup": 5.0, "script": 8.0}, frozenset({"setup"}))
    8.0
    """
    return sum(
        max(0.0, points - (POINTS.get(name, 0.0) if name in passes else 0.0))
        for name, points in scores.items()
    )


def leaks(said: str, group: str) -> list[str]:
    """What a submission says it has seen that is the course's, not merely installed."""
    found = [] if group == "importing" else _LEAK.findall(said)
    return sorted({line for line in found if str(ROOT) not in line})[:20]


def classmate(note: str) -> Notebook:
    """Somebody who has done tasks 1 and 3, and nothing else: quick to grade."""
    notebook, right = _base("starter"), _base("reference")
    done = {_name(cell): cell["source"] for cell in right["cells"]}
    for cell in notebook["cells"]:
        if _name(cell) in ("task1_setup", "task3_sampler"):
            cell["source"] = done[_name(cell)] + f"\n{note}"
    return notebook


def _wrong(scores: Mapping[str, float]) -> bool:
    honest = {name: points if name in CLASSMATE else 0.0 for name, points in POINTS.items()}
    return dict(scores) != honest


def _name(cell: Notebook) -> str | None:
    return cell["metadata"].get("nbgrader", {}).get("grade_id")


def _base(name: str) -> Notebook:
    return json.loads(json.dumps(bases()[name]))


def _graders(folder: Path, otter: str) -> dict[str, Any]:
    (folder / "ours").mkdir()
    graders: dict[str, Any] = {"ours": _Ours(folder / "ours")}
    solution = json.loads((ROOT / "solutions" / LAB / f"{LAB}.ipynb").read_text("utf-8"))
    no_box = find_bwrap()
    for name, python, why in (
        ("nbgrader", sys.executable, no_box),
        ("otter", otter, no_box or find_otter(otter)),
    ):
        if why:
            graders[name] = _Blocked(why)
            continue
        made = StockCourse(folder / name, name, python, RANKS, solution)  # type: ignore[arg-type]
        graders[name] = _Stock(made)
    return graders


def _load(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    return {row["name"]: Row.read(row) for row in json.loads(path.read_text("utf-8"))}


def _keep(rows: Mapping[str, Row], void: list[str], head: str = "") -> str:
    """Leaves rows and table in build/bench; the table, below `head`."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(row)) for row in rows.values())
    (RESULTS / "stock_graders.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    text = table(list(rows.values()), GRADERS)
    if void:
        text = f"VOID, these are not the points that were earned: {', '.join(void)}\n\n{text}"
    text = f"{head}\n{text}" if head else text
    (RESULTS / "stock_graders.txt").write_text(text + "\n", "utf-8")
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--otter", default="", metavar="PYTHON", help="where otter is installed")
    parser.add_argument("--all", action="store_true", help="all attacks, not the sample")
    parser.add_argument("--only", nargs="+", metavar="TITLE", help="these: GROUP/NAME")
    parser.add_argument("--resume", action="store_true", help="keep what build/bench has of them")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
