"""Who may import whom: the layers of the course, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autograder.records import version

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "lib" / "minidist"
GRADER = ROOT / "autograder"

BASE = {"errors", "config", "cost"}
COMMUNICATION = {"launch", "device", "mesh", "collectives"}
PARTS = {"model", "data", "sampler", "precision", "checkpoint", "lr", "seeding", "metrics"}
TOOLS = {"emulate", "profile"}
LAYERS = BASE | COMMUNICATION | PARTS | TOOLS | {"parallel"}

# A part of minidist (a module or folder of lib/minidist) -> the parts that it may import.
MAY_IMPORT: dict[str, set[str]] = {
    **{part: set() for part in BASE},
    "lifetime": set(),
    "stacks": set(),
    "ports": set(),
    "fork_server": {"lifetime"},
    "launch": {"errors", "config", "fork_server", "lifetime", "ports", "stacks"},
    "device": {"errors", "config"},
    "mesh": {"errors", "config", "device"},
    "collectives": {"errors", "config", "device"},
    **{part: BASE | COMMUNICATION for part in PARTS | TOOLS},
    "sampler": BASE | COMMUNICATION | {"seeding"},  # a loader's workers are seeded per rank
    "parallel": {"errors", "config", "cost", "collectives", "mesh", "device", "precision"},
    "elastic": LAYERS,
    "train": LAYERS | {"elastic"},
    "peers": LAYERS | {"train"},
    "kernel": {"errors", "fork_server", "lifetime", "ports"},
    "claims": BASE,
    "plots": LAYERS,
    "widgets": LAYERS | {"plots"},
}
# Inside parallel/: siblings stay apart, except these.
PARALLEL_MAY_IMPORT = {"fsdp": {"zero"}, "hybrid": {"*"}}

# The oracle is torch or one process: never the course's own parallel code.
GRADER_MAY_IMPORT = {
    "errors",
    "device",
    "kernel",
    "launch",
    "fork_server",
    "ports",
    "emulate",
    "lifetime",
    "model",
    "data",
}
# These hold secrets or expected values, so what runs in the box must not need them.
TRUSTED = {
    "intake",
    "sandbox",
    "run",
    "practice",
    "referee",
    "journal",
    "bridge",
    "report",
    "report_page",
    "engine",
}
TRUSTED |= {"build", "sync", "zoo", "release", "doctor", "__main__", "safe_html", "scratch", "tidy"}
TRUSTED |= {"commands", "gradebook", "history", "lms", "publish", "regrade", "replay", "roster"}
TRUSTED |= {"course", "files", "guard", "judging", "options", "syscalls"}
TRUSTED |= {"executor", "job", "job_batch", "job_files", "slurm_jobs", "slurm_options"}
TRUSTED |= {"authored", "similar", "status", "status_view", "suspicious"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every (line, dotted name) that a file imports; `from a import b` counts as a.b."""
    package = ".".join(path.relative_to(LIB.parent if LIB in path.parents else ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"


def part_of(dotted: str) -> str | None:
    """minidist.emulate.broker.Broker -> emulate; None for other packages and minidist itself."""
    names = dotted.split(".")
    if names[0] != "minidist" or len(names) == 1:
        return None
    return names[1] if (LIB / names[1]).is_dir() or (LIB / f"{names[1]}.py").exists() else None


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if ".ipynb_checkpoints" not in path.parts)


def test_every_part_of_minidist_has_a_rule():
    parts = {path.stem for path in LIB.glob("*.py")} | {
        path.parent.name for path in LIB.glob("*/*.py")
    }
    assert parts - {"__init__"} <= set(MAY_IMPORT), "say in MAY_IMPORT what a new part may import"


def test_parts_of_minidist_import_only_what_is_below_them():
    wrong = []
    for path in files(LIB):
        own = path.relative_to(LIB).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for line, name in imports(path):
            part = part_of(name)
            if part is not None and part != own and part not in MAY_IMPORT[own]:
                wrong.append(f"{path}:{line}: {own} may not import {name}")
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


def test_what_runs_while_grading_is_part_of_the_grader_s_version():
    """Else a class stays graded by what such a part did before it was mended."""
    todo, needed = set(GRADER_MAY_IMPORT), set()
    while todo:
        part = todo.pop()
        needed.add(part)
        paths = [LIB / f"{part}.py"] if (LIB / f"{part}.py").exists() else files(LIB / part)
        found = {part_of(name) for path in paths for _, name in imports(path)}
        todo |= {below for below in found if below is not None and below not in needed}
    assert needed <= set(version._GRADING), "a part that the grader imports"


def test_what_runs_in_the_box_needs_nothing_trusted():
    wrong = []
    seen: set[Path] = set()
    todo = [GRADER / "probe.py", GRADER / "__init__.py"]
    while todo:
        path = todo.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        tree = ast.parse(path.read_text("utf-8"))
        top = {node.lineno for node in tree.body}
        for line, name in imports(path):
            names = name.split(".")
            if names[0] != "autograder" or len(names) == 1 or line not in top:
                continue
            if names[1] in TRUSTED:
                wrong.append(f"{path}:{line}: imports {name}")
            todo += [GRADER / f"{names[1]}.py", GRADER / names[1] / "__init__.py"]
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
            grader = names[0] == "autograder" and name != "autograder.check"
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


@pytest.mark.parametrize("module", ["minidist", "minidist.kernel", "minidist.kernel.front"])
def test_no_torch_where_it_would_only_cost_time(module):
    code = (
        f"import sys, {module}; "
        "print(sorted({'torch', 'ipykernel', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]", f"import {module} imports {done.stdout.strip()}"


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
