"""Who may import whom: floors between folders, read from the source."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source import imports_of

from autograder.box import sandbox
from autograder.criteria import get_lab, lab_names

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "lib" / "minidist"
GRADER = ROOT / "autograder"

# A room is a folder, or a file that lies beside the folders. What is in it may import what is in
# the same room and on a floor below; rooms on one floor stay apart.
GRADER_FLOORS = [
    {"__main__"},
    {"cli"},
    {"gradebook"},
    {"report"},
    {"proof"},
    {"batch"},
    {"regrading"},
    {"submission"},
    {"referee", "records", "authoring"},
    {"__init__"},
    {"inside"},
    {"criteria/LAB"},
    {"criteria/common"},
    {"box"},
    {"course"},
    {"criteria"},  # which labs there are, what a criterion is, limits
    {"plain_text", "files", "signals"},
]
LIB_FLOORS = [
    {"__main__"},
    {"widgets", "plan"},
    {"plots", "peers"},
    {"train"},
    {"elastic"},
    {"parallel", "checkpoint", "lr", "metrics", "profile", "average", "beside"},
    {"sampler", "precision", "emulate", "data", "model", "replaced"},
    {"seeding", "datasets", "packing"},
    {"collectives"},
    {"mesh"},
    {"launch", "device", "kernel", "claims"},
    {"processes"},
    {"errors", "cost", "comparing", "evidence", "unsupported", "outputs"},
]
# Inside parallel/: siblings stay apart, except these.
PARALLEL_MAY_IMPORT = {
    "data": {"compression"},
    "expert": {"data"},
    "fsdp": {"zero"},
    "hybrid": {"*"},
}
# The oracle is torch or one process: never the course's own parallel code.
GRADER_MAY_IMPORT = {
    "data",
    "device",
    "emulate",
    "errors",
    "kernel",
    "launch",
    "model",
    "processes",
}
# What a lab's text may use of the grader.
FOR_LABS = {"autograder.check", "autograder.is_not_started"}
# Whose criteria a lab may borrow.
LAB_MAY_IMPORT = {"bonus_debug_ddp": {"lab2_accumulation"}}


def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Every (line, dotted name) that a file imports; `from a import b` counts as a.b."""
    package = ".".join(path.relative_to(LIB.parent if LIB in path.parents else ROOT).parts[:-1])
    return imports_of(path, package)


def file_of(dotted: str) -> Path | None:
    """The file of ours that an imported name comes from; None for other packages."""
    names = dotted.split(".")
    root = {"minidist": LIB, "autograder": GRADER}.get(names[0])
    while root is not None and len(names) > 1:
        place = root.joinpath(*names[1:])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
        names.pop()
    return root and root / "__init__.py"


def room_of(file: Path) -> str:
    """autograder/criteria/lab1_ddp/script.py -> criteria/LAB; minidist/mesh.py -> mesh."""
    first, *more = file.relative_to(LIB if LIB in file.parents else GRADER).with_suffix("").parts
    if first == "criteria" and len(more) > 1:
        return "criteria/common" if more[0] == "common" else "criteria/LAB"
    return first


def part_of(dotted: str) -> str | None:
    """minidist.emulate.broker.Broker -> emulate; None for other packages and minidist itself."""
    file = file_of(dotted)
    if file is None or LIB not in file.parents or file == LIB / "__init__.py":
        return None
    return room_of(file)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if ".ipynb_checkpoints" not in path.parts)


def arrows(folder: Path) -> Iterator[tuple[Path, int, Path]]:
    """(file, line, file that it imports), for all that is ours."""
    for file in files(folder):
        for line, name in imports(file):
            target = file_of(name)
            if target is not None and target != file:
                yield file, line, target


@pytest.mark.parametrize(("root", "floors"), [(GRADER, GRADER_FLOORS), (LIB, LIB_FLOORS)])
def test_every_room_has_one_floor_and_every_floor_its_rooms(root, floors):
    rooms = {room_of(file) for file in files(root)} - ({"__init__"} if root == LIB else set())
    listed = [room for floor in floors for room in floor]
    assert sorted(listed) == sorted(rooms), "say above on which floor a new folder lies"


@pytest.mark.parametrize(("root", "floors"), [(GRADER, GRADER_FLOORS), (LIB, LIB_FLOORS)])
def test_nothing_imports_what_is_above_it(root, floors):
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    wrong = []
    for file, line, target in arrows(root):
        if root in target.parents and target != LIB / "__init__.py":
            own, other = room_of(file), room_of(target)
            if own != other and floor_of.get(own, 0) >= floor_of[other]:
                wrong.append(f"{file}:{line}: {own} may not import {target.relative_to(root)}")
    assert not wrong, "\n".join(wrong)


def test_no_lab_imports_the_criteria_of_another():
    wrong = []
    for lab in lab_names():
        own = GRADER / "criteria" / lab
        allowed = {lab, *LAB_MAY_IMPORT.get(lab, ())}
        for file, line, target in arrows(own):
            if room_of(target) == "criteria/LAB" and target.parent.name not in allowed:
                wrong.append(f"{file}:{line}: {lab} may not import {target.parent.name}")
    assert not wrong, "\n".join(wrong)


def test_no_circle_among_files():
    """In the order of a depth-first search, no file is met again while it is open."""
    below: dict[Path, set[Path]] = {}
    for file, _, target in [*arrows(GRADER), *arrows(LIB)]:
        below.setdefault(file, set()).add(target)
    done: set[Path] = set()

    def visit(file: Path, open_files: tuple[Path, ...]) -> None:
        assert file not in open_files, " -> ".join(map(str, [*open_files, file]))
        if file not in done:
            for target in sorted(below.get(file, ())):
                visit(target, (*open_files, file))
            done.add(file)

    for file in sorted(below):
        visit(file, ())


def test_a_box_shows_what_it_needs_and_no_more():
    """What runs there imports nothing of the grader that is not shown; folders are shown whole."""
    shown = {name for name in sandbox._SHOWN_IN_BOX if (GRADER / name).is_dir()}
    assert shown == {"inside", "criteria"}
    wrong = [
        f"{file}:{line}: {target.relative_to(GRADER)} is not in the box"
        for folder in sorted(shown)
        for file, line, target in arrows(GRADER / folder)
        if GRADER in target.parents
        and room_of(target).partition("/")[0] not in {*shown, "__init__"}
    ]
    assert not wrong, "\n".join(wrong)


def test_parallelisms_do_not_import_each_other():
    wrong = []
    for path in files(LIB / "parallel"):
        own = path.relative_to(LIB / "parallel").parts[0].removesuffix(".py")
        allowed = PARALLEL_MAY_IMPORT.get(own, set())
        for line, name in imports(path):
            names = name.split(".")
            if names[:2] != ["minidist", "parallel"] or own == "__init__" or "*" in allowed:
                continue
            if names[2] not in {own, *allowed}:
                wrong.append(f"{path}:{line}: {own} may not import {name}")
    assert not wrong, "\n".join(wrong)


def test_grader_imports_no_parallel_code_of_the_course():
    wrong = []
    for path in files(GRADER):
        for line, name in imports(path):
            part = part_of(name)
            if part is not None and part not in GRADER_MAY_IMPORT:
                wrong.append(f"{path}:{line}: the grader may not import {name}")
    assert not wrong, "\n".join(wrong)


def test_course_material_uses_public_names_only():
    wrong = []
    sources = sorted((ROOT / "notebooks").glob("*.py")) + sorted(
        (ROOT / "solutions").glob("*/*.py")
    )
    assert sources
    for path in sources:
        for line, name in imports(path):
            names = name.split(".")
            private = names[0] == "minidist" and any(part.startswith("_") for part in names)
            grader = names[0] == "autograder" and name not in FOR_LABS
            if private or grader:
                wrong.append(f"{path}:{line}: {name} is not public")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_course_material():
    for path in [*files(LIB), *files(GRADER)]:
        for line, name in imports(path):
            assert name.split(".")[0] not in ("notebooks", "solutions", "labs", "tests"), (
                path,
                line,
            )


def test_only_plots_and_widgets_import_matplotlib_and_ipywidgets():
    wrong = []
    for path in files(LIB):
        if path.relative_to(LIB).parts[0].removesuffix(".py") in ("plots", "widgets"):
            continue
        for line, name in imports(path):
            if name.split(".")[0] in ("matplotlib", "ipywidgets"):
                wrong.append(f"{path}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def test_no_torch_where_it_would_only_cost_time():
    modules = ["minidist", "minidist.kernel", "minidist.kernel.front", "autograder.proof.verify"]
    modules += [f"autograder.criteria.{lab}.table" for lab in lab_names()]
    modules += [f"autograder.cli.{path.stem}" for path in sorted((GRADER / "cli").glob("[!_]*.py"))]
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        "    slow = {'torch', 'ipykernel', 'matplotlib'} & sys.modules.keys()\n"
        "    assert not slow, f'{module} imports {slow}'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_criterion_is_found_in_its_own_table_only():
    last = get_lab(lab_names()[-1])
    find = f"from autograder.criteria import find_criterion as f; f({last.criteria[0].name!r})"
    tables = {name for name in modules_after(find) if name.endswith(".table")}
    assert tables == {f"autograder.criteria.{last.name}.table"}
    for lab in map(get_lab, lab_names()):  # else, tables would be imported to look for it
        table = (GRADER / "criteria" / lab.name / "table.py").read_text("utf-8")
        assert not [each.name for each in lab.criteria if f'"{each.name}"' not in table]


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh process has after it ran this."""
    code = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_rules_can_fail(tmp_path, monkeypatch):
    """A relative import, a plain one and one inside a function are all seen."""
    fake = tmp_path / "lib" / "minidist" / "kernel"
    fake.mkdir(parents=True)
    (fake / "front.py").write_text(
        "import torch\nfrom .. import launch\ndef f():\n    from minidist.emulate import run\n"
    )
    monkeypatch.setitem(globals(), "LIB", tmp_path / "lib" / "minidist")
    found = [name for _, name in imports(fake / "front.py")]
    assert found == ["torch", "minidist.launch", "minidist.emulate.run"]
