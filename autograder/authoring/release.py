"""Writes the repository that students get: labs to fill in, without anything that holds answers.

    notebooks to fill in   labs/LAB/LAB.ipynb of the labs that are released
    lib/minidist           without withheld modules, and without modules that need withheld ones
    notebooks/             lectures; outputs take the place of code that needs withheld modules
    autograder/            checks give the same verdicts as the grader does, on practice data

When a lab is over, a new release with `--over LAB` adds its solution (not with
`--without-solutions`) and the modules that it withheld, except modules that a different lab
withholds. A lab of the calendar withholds its modules from the first release on, because students
keep what they once have. Solutions of labs that are not over, the class of wrong submissions and
this course's tests are never included.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import nbformat

from autograder.authoring.lectures import (
    Cell,
    outermost,
    plan_lecture,
    run_once,
    write_for_students,
)
from autograder.authoring.notebooks import edited_by_hand
from autograder.authoring.placing import earlier_files, put_in_place
from autograder.course.calendar import say_time
from autograder.course.course import Course, CourseError
from autograder.course.course_toml import NAME
from autograder.criteria import OURS, get_lab

COPIED = (
    *("pyproject.toml", "environment.yml", "versions.txt", "LICENSE", "nbgrader_config.py"),
    *(".dockerignore", ".devcontainer/devcontainer.json"),
)
_TARGETS = ("help", "lab", "clean", "install")  # targets of the Makefile that students get
NEEDS = "needs a withheld module"
_IGNORE = shutil.ignore_patterns("__pycache__", "*.pyc", ".ipynb_checkpoints")
_IGNORE_ANSWERS = shutil.ignore_patterns("__pycache__", "*.pyc", f"{OURS}.py")


@dataclass(frozen=True, kw_only=True)
class Release:
    """What was written, and what was left out.

    Attributes:
        withheld: module -> the labs that it waits for.
        lectures: lecture -> how many of its code cells wait for a lab, and how many it has.
        waits: lecture -> the labs that these cells wait for.
    """

    folder: Path
    labs: tuple[str, ...]
    withheld: dict[str, tuple[str, ...]]
    lectures: dict[str, tuple[int, int]]
    waits: dict[str, tuple[str, ...]] = field(default_factory=dict)


def write_release(
    course: Course,
    folder: Path,
    labs: Sequence[str],
    over: Sequence[str] = (),
    execute: Callable[[Path, Path, Path], Path] = run_once,
    *,
    later: Sequence[str] = (),
    solutions: bool = True,
) -> Release:
    """Writes the students' repository; replaces what an earlier release wrote there.

    It is written beside the folder first, so that a failure leaves an earlier release whole.

    Args:
        folder: a new or empty folder, or the folder of an earlier release. Only files that this
            release had written are replaced or removed; all others are kept.
        labs: labs to hand out.
        over: labs whose deadline is over; students get what these labs withheld.
        execute: runs a lecture whose outputs take the place of withheld code.
        later: labs that are handed out later; their modules are withheld, too.
        solutions: students also get the solutions of labs that are over.

    Raises:
        CourseError: the folder holds something else, a file that is not ours is where one of ours
            would be, or a notebook was edited since it was built. Then nothing is written.
    """
    earlier = earlier_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.resolve().parent, prefix=".release-") as draft:
        waiting = [lab for lab in dict.fromkeys([*labs, *later]) if lab not in over]
        missing = find_withheld(course.root / "lib" / "minidist", waiting)
        made = _write(course, Path(draft), [*dict.fromkeys([*labs, *over])], missing, execute)
        for lab in over if solutions else ():
            _copy(course.root / "solutions" / lab / f"{lab}.ipynb", Path(draft, "solutions", lab))
        put_in_place(Path(draft), folder, earlier)
    return replace(made, folder=folder)


def _write(
    course: Course,
    folder: Path,
    handed_out: Sequence[str],
    missing: dict[str, tuple[str, ...]],
    execute: Callable[[Path, Path, Path], Path],
) -> Release:
    """Writes a release into an empty folder; `missing` are the withheld modules."""
    masters = [_master(course, lab) for lab in handed_out]
    library = course.root / "lib" / "minidist"
    lectures = {path: plan_lecture(path, library, missing) for path in lectures_of(course)}
    cut = {path: cells for path, cells in lectures.items() if any(c.needs for c in cells)}
    executed = {path: execute(path, library, course.root / "build" / "lectures") for path in cut}

    shutil.copytree(course.root / "autograder", folder / "autograder", ignore=_IGNORE_ANSWERS)
    shutil.copytree(library, folder / "lib" / "minidist", ignore=_IGNORE)
    for name in missing:
        _remove_module(folder / "lib", name)
    for lab, master in zip(handed_out, masters, strict=True):
        _copy(master, folder / "labs" / lab)
    for path, cells in lectures.items():
        _copy(path, folder / "notebooks")
        if path in cut:
            nbformat.write(
                write_for_students(path, executed[path], cells, missing),
                folder / "notebooks" / path.name,
            )
    counts = {path.stem: _count(cells) for path, cells in lectures.items()}
    waits = {path.stem: _labs_of(cells, missing) for path, cells in cut.items()}
    for name in COPIED:
        _copy(course.root / name, (folder / name).parent)
    if (course.root / NAME).is_file():
        (folder / NAME).write_text(
            _course_options((course.root / NAME).read_text("utf-8")), "utf-8"
        )
    (folder / "Makefile").write_text(_makefile((course.root / "Makefile").read_text("utf-8")))
    due = {
        lab: say_time(at, course.calendar.zone)
        for lab in handed_out
        if (at := course.calendar.of(lab).due) is not None
    }
    made = Release(
        folder=folder,
        labs=tuple(handed_out),
        withheld=missing,
        lectures=counts,
        waits=waits,
    )
    (folder / "README.md").write_text(_readme(made, due), "utf-8")
    return made


def lectures_of(course: Course) -> list[Path]:
    """The lectures' notebooks, in order."""
    return sorted((course.root / "notebooks").glob("[0-9]*.ipynb"))


def week_by_week(course: Course, labs: Sequence[str]) -> dict[str, dict[str, tuple[int, int]]]:
    """lab -> lecture -> how many of its code cells wait for that lab, and how many it has."""
    library = course.root / "lib" / "minidist"
    weeks = {}
    for lab in labs:
        missing = find_withheld(library, [lab])
        lectures = {path: plan_lecture(path, library, missing) for path in lectures_of(course)}
        weeks[lab] = {path.stem: _count(cells) for path, cells in lectures.items()}
    return weeks


def _count(cells: Sequence[Cell]) -> tuple[int, int]:
    return sum(cell.hidden for cell in cells), len(cells)


def _labs_of(cells: Sequence[Cell], missing: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The labs that the hidden cells of a lecture wait for."""
    modules = {module for cell in cells if cell.hidden for module in cell.needs}
    return tuple(sorted({lab for module in modules for lab in missing[module]}))


def _master(course: Course, lab: str) -> Path:
    """The notebook to hand out; it must be as built, because an edited one may hold answers."""
    master = course.root / "labs" / lab / f"{lab}.ipynb"
    if not master.is_file():
        raise CourseError(f"{master} is missing: run `make build`")
    if edited_by_hand(master, key="released") is not None:
        raise CourseError(
            f"{master} is not as it was built, and might hold answers: delete it and run "
            "`make build`, or change its solution"
        )
    return master


def _copy(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, folder / file.name)


# --- what goes with a withheld module -----------------------------------------------------------


def find_missing(library: Path, withheld: Collection[str]) -> list[str]:
    """The withheld modules and all modules that cannot be imported without them.

    A module inside a missing package is not named itself.
    """
    modules = {_dotted(path, library): path for path in sorted(library.rglob("*.py"))}
    needs = {name: _needs(path, name) for name, path in modules.items()}
    missing = set(withheld)
    while more := {
        name
        for name, wanted in needs.items()
        if not outermost(name, missing) and any(outermost(each, missing) for each in wanted)
    }:
        missing |= more
    return sorted(name for name in missing if not outermost(name.rpartition(".")[0], missing))


def find_withheld(library: Path, labs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Module -> the labs that withhold it, or a module that it needs."""
    found: dict[str, tuple[str, ...]] = {}
    for lab in labs:
        for name in find_missing(library, get_lab(lab).withheld):
            found[name] = (*found.get(name, ()), lab)
    inside = {name for name in found if outermost(name.rpartition(".")[0], found)}
    return {name: labs for name, labs in sorted(found.items()) if name not in inside}


def why_withheld(module: str, labs: Sequence[str]) -> str:
    """What a withheld module, or one inside it, would answer in each of these labs."""
    reasons: set[str] = set()
    for lab in labs:
        withheld = get_lab(lab).withheld.items()
        own = {reason for name, reason in withheld if outermost(name, [module])}
        reasons |= own or {NEEDS}
    return ", ".join(sorted(reasons))


def _dotted(path: Path, library: Path) -> str:
    parts = path.relative_to(library.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _needs(path: Path, name: str) -> frozenset[str]:
    """The modules that a module imports at import time; imports inside functions do not count."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _imports(path.read_text("utf-8"), package)


@cache  # the library is read for every lab, or every week of a term
def _imports(text: str, package: str) -> frozenset[str]:
    found: set[str] = set()
    todo: list[ast.AST] = list(ast.parse(text).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return frozenset(found)


def _remove_module(lib: Path, name: str) -> None:
    path = lib.joinpath(*name.split("."))
    if path.is_dir():
        shutil.rmtree(path)
    path.with_suffix(".py").unlink(missing_ok=True)


# --- written for students -----------------------------------------------------------------------


def _makefile(text: str) -> str:
    """The course's Makefile with only the targets that work in the students' repository."""
    kept = []
    for block in text.split("\n\n"):
        rule = re.match(r"(?:#[^\n]*\n)*([a-z-]+):", block)
        if rule is None or rule[1] in _TARGETS:
            kept.append(block)
    return "\n\n".join(kept).rstrip("\n") + "\n"


def _course_options(text: str) -> str:
    """The tables of `course.toml` that checks read: points and limits, but not [slurm]."""
    tables = tomllib.loads(text)
    lines = ["# What the course sets: points of criteria, limits of a submission."]
    for section in ("points", "limits"):
        for lab, values in tables.get(section, {}).items():
            lines += ["", f"[{section}.{lab}]"]
            lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _readme(made: Release, due: Mapping[str, str]) -> str:
    rows = "\n".join(
        f"| `labs/{lab}/{lab}.ipynb` | {get_lab(lab).title} | {due.get(lab, '')} |"
        for lab in made.labs
    )
    lines = [
        "# Training over many GPUs: labs",
        "",
        "```bash",
        "make lab   # installs what it needs into .venv, copies labs to work/, opens JupyterLab",
        "```",
        "",
        "You need Linux, or WSL 2 on Windows, and Python 3.11 or newer. You need no GPU. On macOS",
        "or without Python, open the folder in VS Code and choose *Reopen in Container*, or see",
        "the first lines of `autograder/box/image/Dockerfile`.",
        "",
        "| Notebook | Lab | Due |",
        "|---|---|---|",
        rows,
        "",
        "Every cell of a notebook runs on several ranks. A cell with `check(…)` tests your work on",
        "practice data and says what is missing; your grade comes from the same tests with other",
        "data and another number of ranks. Hand in the notebook from `work/labs/`.",
    ]
    if made.withheld:
        lines += ["", "Not here until a lab is over, since it would be the answer:", ""]
        lines += [
            f"- `{name}` ({', '.join(labs)}): {why_withheld(name, labs)}"
            for name, labs in made.withheld.items()
        ]
        lines += [
            f"- lecture `{name}` ({', '.join(made.waits[name])}): the code of {hidden} of {count} "
            "steps, which needs the above; their outputs are here"
            for name, (hidden, count) in made.lectures.items()
            if hidden
        ]
    return "\n".join(lines) + "\n"
