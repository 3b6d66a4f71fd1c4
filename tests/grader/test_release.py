"""What students get holds no answer, and works."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import nbformat
import pytest
from course import ROOT

from autograder.__main__ import main
from autograder.authoring import release
from autograder.authoring.release import Release, _course_options, find_missing, week_by_week
from autograder.course.course import RELEASED, Course, CourseError
from autograder.criteria import OURS, get_lab, lab_names

RUN = 12  # tokens in a row that count as an answer
LABS = [name for name in lab_names() if (ROOT / "labs" / name / f"{name}.ipynb").is_file()]


def write_release(*args, **options):
    """A release whose lectures are not run: each code cell has printed a line."""

    def execute(lecture, *_):
        notebook = nbformat.read(lecture, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [nbformat.v4.new_output("stream", text="a line")]
        nbformat.write(notebook, made / lecture.name)
        return made / lecture.name

    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        return release.write_release(*args, **options, execute=execute)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "students"
    (folder / ".git").mkdir(parents=True)
    (folder / RELEASED).touch()
    (folder / "old.py").touch()
    return write_release(Course(ROOT), folder, LABS)


@cache
def tokens(text):
    """Words: names, numbers and strings. Signs are left out, for what idioms share is signs."""
    found, words = [], {tokenize.NAME, tokenize.NUMBER, tokenize.STRING}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in words and not token.string.startswith(('"""', "'''")):
                found.append(token.string)
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass  # a magic, or the end of a fragment: what came before counts
    return found


def runs(text):
    found = tokens(text)
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


# What a task shows, its single-process script for one, is no answer.
SHOWN = set().union(
    *(
        runs("".join(cell["source"]))
        for lab in LABS
        for cell in json.loads((ROOT / "labs" / lab / f"{lab}.ipynb").read_text("utf-8"))["cells"]
    )
)


def answers(lab):
    """Runs of tokens between BEGIN and END SOLUTION, each region by itself."""
    text = (ROOT / "solutions" / lab / f"{lab}.py").read_text("utf-8")
    regions = re.findall(r"### BEGIN SOLUTION\n(.*?)\n[ #]*### END SOLUTION", text, re.DOTALL)
    assert regions
    return set().union(*(runs(_dedent(region)) for region in regions)) - SHOWN


def _dedent(region):
    lines = region.split("\n")
    if all(line.startswith("#") for line in lines):  # a script that a cell writes
        lines = [line[2:] for line in lines]
    width = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return "\n".join(line[width:] for line in lines)


def sources(folder):
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py":
            yield path, path.read_text("utf-8")
        elif path.suffix == ".ipynb":
            for cell in json.loads(path.read_text("utf-8"))["cells"]:
                yield path, "".join(cell["source"])


def test_no_run_of_an_answer_is_in_it(released):
    assert_no_answer(released, released.labs)


@pytest.mark.parametrize(
    ("labs", "over", "later"),
    [(["lab1_ddp"], [], []), (["lab1_ddp"], [], LABS), (LABS, ["lab1_ddp"], [])],
)
def test_a_lab_withholds_until_it_is_over_also_before_it_is_out(tmp_path, labs, over, later):
    made = write_release(Course(ROOT), tmp_path, labs, over, later=later)
    waiting = {*labs, *later} - {*over}
    assert_no_answer(made, waiting)
    names = {"precision/scaler", "profile/trace", "checkpoint/store", "elastic"}
    library = tmp_path / "lib" / "minidist"
    there = {name for name in names if (library / f"{name}.py").is_file()}
    assert there == (names if waiting == {"lab1_ddp"} else set())
    assert {path.name for path in (tmp_path / "labs").iterdir()} == {*labs}


def assert_no_answer(released, labs):
    wanted = {run: lab for lab in labs for run in answers(lab)}
    hits = [
        f"{path.relative_to(released.folder)}: {' '.join(run)} ({wanted[run]})"
        for path, text in sources(released.folder)
        if "solutions" not in path.parts  # of labs that are over: their idioms come again
        for run in sorted(runs(text) & wanted.keys())
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("lab", LABS)
def test_an_answer_would_be_found(lab):
    solution = json.loads((ROOT / "solutions" / lab / f"{lab}.ipynb").read_text("utf-8"))
    found = set().union(*(runs("".join(cell["source"])) for cell in solution["cells"]))
    assert len(found & answers(lab)) > 50


def test_it_holds_what_students_need_and_no_more(released):
    names = {path.name for path in released.folder.iterdir()}
    assert {"labs", "notebooks", "lib", "autograder", "Makefile", "README.md", ".git"} <= names
    assert not names & {"solutions", "tests", "benchmarks", "old.py"}
    assert not list(released.folder.rglob("zoo/*"))
    assert not list((released.folder / "autograder").rglob(f"{OURS}.py"))
    assert not list(released.folder.rglob("__pycache__"))
    for lab in LABS:
        for name in get_lab(lab).withheld:
            path = released.folder.joinpath("lib", *name.split("."))
            assert not path.exists()
            assert not path.with_suffix(".py").exists()
    for name in released.withheld:
        assert name in (released.folder / "README.md").read_text("utf-8")
    makefile = (released.folder / "Makefile").read_text("utf-8")
    assert re.search("^lab:", makefile, re.MULTILINE)
    assert not re.search("^(test|test-.*|flake|grade|verify|bench):", makefile, re.MULTILINE)
    subprocess.run(["make", "--dry-run", "lab"], cwd=released.folder, check=True)  # all is there


def test_every_lecture_is_there_and_says_what_waits_for_which_lab(released):
    lectures = {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert set(released.lectures) == lectures
    assert lectures == {path.stem for path in (released.folder / "notebooks").iterdir()}
    waiting = {name for name, (hidden, _) in released.lectures.items() if hidden}
    assert "03_data_parallelism" in waiting
    for name in waiting:
        notebook = json.loads((released.folder / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
        text = "".join(line for cell in notebook["cells"] for line in cell["source"])
        assert "is handed out when" in text
        nbformat.validate(nbformat.from_dict(notebook))


def test_no_body_that_is_withheld_can_be_found(released):
    bodies = {
        run: name
        for name in released.withheld
        for path in modules(ROOT / "lib" / Path(*name.split(".")))
        for body in functions(path.read_text("utf-8"))
        for run in runs(body)
    }
    kept = set().union(
        *(runs(p.read_text("utf-8")) for p in (released.folder / "lib").rglob("*.py"))
    )
    assert len(bodies) > 1000
    secret = bodies.keys() - kept - SHOWN
    hits = [
        f"{path.name}: {' '.join(run)} ({bodies[run]})"
        for path, text in sources(released.folder / "notebooks")
        for run in runs(text) & secret
    ]
    assert not hits, "\n".join(hits)


def functions(source):
    return [
        ast.get_source_segment(source, node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]


def modules(place):
    return list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def test_for_a_lab_only_its_own_lecture_and_a_few_steps_wait():
    weeks = week_by_week(Course(ROOT), [name for name in LABS if name.startswith("lab")])
    own = dict(zip(weeks, ("03", "04", "05", "06", "10", "11"), strict=True))
    for lab, lectures in weeks.items():
        for name, (hidden, count) in lectures.items():
            assert hidden <= 0.25 * count
            assert name[:2] == own[lab] or hidden < 8, f"{lab}: {name}: {hidden} of {count}"


def test_the_plan_is_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["release", "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.split() and line.split()[0] in LABS]
    assert [row[0] for row in rows] == sorted(LABS, key=lambda lab: not lab.startswith("lab"))
    lectures = sorted(path.stem[:2] for path in (ROOT / "notebooks").glob("[0-9]*.py"))
    assert ["lab", *lectures] in [line.split() for line in lines]
    assert all(len(row) == 1 + len(lectures) and "…" not in row for row in rows)


@pytest.mark.slow
def test_all_that_is_left_can_be_imported_and_checks_work(released):
    code = """
import importlib, pkgutil, minidist, autograder
assert minidist.__file__.startswith(ROOT), minidist.__file__
for package in (minidist, autograder):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
from autograder import check
check("accum_batch_size", (lambda *a: 0, lambda *a: 0, lambda *a: 0.0))
"""
    lib, root = released.folder / "lib", released.folder
    env = os.environ | {"PYTHONPATH": f"{lib}{os.pathsep}{root}", "MPLBACKEND": "agg"}
    env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"ROOT = {str(root)!r}\n{code}"],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
    )
    assert "accum_batch_size" in done.stdout + done.stderr, done.stderr[-3000:]
    assert "ModuleNotFoundError" not in done.stderr, done.stderr[-3000:]


def test_a_lab_that_is_over_brings_its_answers(tmp_path):
    made = write_release(Course(ROOT), tmp_path, [], over=LABS)
    assert made.withheld == {}
    assert (tmp_path / "solutions" / "lab1_ddp" / "lab1_ddp.ipynb").is_file()
    assert (tmp_path / "lib" / "minidist" / "parallel").is_dir()


def test_a_notebook_that_was_filled_in_is_not_handed_out(tmp_path):
    course, lab = Course(tmp_path / "course"), "lab1_ddp"
    master = course.root / "labs" / lab / f"{lab}.ipynb"
    master.parent.mkdir(parents=True)
    folder = tmp_path / "students"
    folder.mkdir()
    (folder / RELEASED).touch()
    (folder / "earlier").touch()
    with pytest.raises(CourseError, match="is missing: run `make build`"):
        write_release(course, folder, [lab])
    shutil.copy(ROOT / "solutions" / lab / f"{lab}.ipynb", master)
    with pytest.raises(CourseError, match="is not as it was built"):
        write_release(course, folder, [lab])
    assert (folder / "earlier").is_file()  # nothing was written, and nothing taken away


def test_what_the_grader_is_told_is_not_handed_out():
    text = '[points.lab1_ddp]\nsetup = 7\n[slurm]\nsetup = ["export TOKEN=x"]\n'
    text += '[limits.lab1_ddp]\nbox_memory_bytes = "12 GiB"  # of ours\n'
    given = _course_options(text)
    assert tomllib.loads(given) == {
        "points": {"lab1_ddp": {"setup": 7}},
        "limits": {"lab1_ddp": {"box_memory_bytes": "12 GiB"}},
    }
    assert "TOKEN" not in given


def test_nothing_of_anybody_else_is_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CourseError, match="is not empty, and no earlier release"):
        write_release(Course(ROOT), tmp_path, LABS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_release_touches_only_what_it_made(tmp_path):
    """notes.txt and syllabus/ are the instructor's; what an earlier release had more is ours."""
    folder = tmp_path / "students"
    gone = "lab2_accumulation"
    write_release(Course(ROOT), folder, [], over=["lab1_ddp", gone])
    own = {"notes.txt", "syllabus/week1.md", "labs/lab1_ddp/hints.md", "work/lab1_ddp/mine.ipynb"}
    for name in own:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    before = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}
    write_release(Course(ROOT), folder, [], over=["lab1_ddp"])
    after = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}
    assert own < after
    assert {name for name in before - after if "lab1_ddp" in name} == set()
    assert f"labs/{gone}/{gone}.ipynb" in before - after
    assert not (folder / "labs" / gone).exists()
    assert set((folder / RELEASED).read_text().splitlines()[1:]) == after - own - {RELEASED}
    for path in folder.rglob("*"):  # students read it; the course itself is private
        if path.relative_to(folder).as_posix() not in own:
            assert path.stat().st_mode & 0o444 == 0o444, path
    assert [path.name for path in tmp_path.iterdir()] == ["students"]


def test_a_file_of_yours_in_the_way_stops_a_release(tmp_path):
    write_release(Course(ROOT), tmp_path / "students", [], over=LABS[:1])
    mine = tmp_path / "students" / "labs" / LABS[1] / f"{LABS[1]}.ipynb"
    mine.parent.mkdir()
    mine.write_text("mine")
    readme = tmp_path / "students" / "README.md"
    readme.write_text("as it was")
    with pytest.raises(CourseError, match=f"files of yours.*{LABS[1]}"):
        write_release(Course(ROOT), tmp_path / "students", [], over=LABS[:2])
    assert (mine.read_text(), readme.read_text()) == ("mine", "as it was")


def test_the_calendar_says_what_is_handed_out(tmp_path, monkeypatch, capsys):
    asked = []

    def write(course, folder, labs, over, later, **_):
        asked.append((list(labs), list(over), list(later)))
        return Release(folder=folder, labs=tuple(labs), withheld={}, lectures={})

    monkeypatch.setattr("autograder.authoring.release.write_release", write)
    for kind in ("labs", "solutions"):
        (tmp_path / kind).mkdir()
    (tmp_path / "nbgrader_config.py").touch()
    unused = "bonus_zero"
    later = [lab for lab in lab_names() if lab not in ("lab1_ddp", unused)]
    text = f"[calendar]\n{unused}.used = false\n"
    text += "[calendar.lab1_ddp]\nrelease = 2020-01-01\nsolutions = 2020-02-01\n"
    text += "".join(f"[calendar.{lab}]\nrelease = 2999-01-01\n" for lab in later)
    (tmp_path / "course.toml").write_text(text)
    monkeypatch.setenv("AUTOGRADER_COURSE", str(tmp_path))
    assert main(["release", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"not yet: {later[0]}, from 2999-01-01 00:00 UTC on" in said
    assert f"not used, says course.toml: {unused}\n" in said
    assert main(["release", str(tmp_path / "out"), "--lab", later[0]]) == 0
    assert asked == [(["lab1_ddp"], ["lab1_ddp"], later), ([later[0]], [], later)]


def test_what_needs_a_withheld_module_goes_with_it(tmp_path):
    library = tmp_path / "minidist"
    for name, text in {
        "__init__": "",
        "a/__init__": "",
        "a/b": "SECRET = 1",
        "c": "from minidist.a import b",
        "d": "from .c import b",
        "e": "def late():\n    from minidist.a import b",
        "f": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from minidist.a import b",
        "g": "import minidist.a",
    }.items():
        path = library / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert find_missing(library, ["minidist.a.b"]) == ["minidist.a.b", "minidist.c", "minidist.d"]
    assert find_missing(library, []) == []
