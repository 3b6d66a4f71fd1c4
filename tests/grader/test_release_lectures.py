"""Lectures of a release: what waits for a lab is named by what it needs, and the rest runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import nbformat
import pytest
from course import ROOT
from nbformat.v4 import new_code_cell, new_notebook, new_output

from autograder.authoring.cells import parse_cell, split_magic
from autograder.authoring.lectures import plan_lecture, write_for_students
from autograder.authoring.release import write_release
from autograder.course.course import Course
from autograder.criteria import lab_names

LIBRARY = ROOT / "lib" / "minidist"
MISSING = {"minidist.precision.scaler": ("lab4_amp",), "minidist.elastic": ("lab5_multinode",)}
LABS = [name for name in lab_names() if name.startswith("lab")]
# Each lecture, and the lab or bonus that most of its code waits for.
# CI runs the first two, of which most waits, and `make nightly` the others.
MOST_WAITS = [
    ("lab6_profiling", "11_finding_the_time"),
    ("lab1_ddp", "03_data_parallelism"),
    ("lab1_ddp", "12_mixture_of_experts"),
    ("lab2_accumulation", "04_big_batches"),
    ("lab3_fsdp", "05_sharding"),
    ("lab4_amp", "06_mixed_precision"),
    ("lab5_multinode", "10_many_nodes"),
    ("lab6_profiling", "09_hybrid_and_planning"),
    ("lab1_ddp", "00_start_here"),
    ("lab6_profiling", "01_why_distributed"),
    ("bonus_ring_all_reduce", "02_collectives"),
    ("bonus_pipeline", "07_pipeline_parallelism"),
    ("bonus_tensor_parallel", "08_tensor_sequence_context"),
]


def lecture(tmp_path, *sources, outputs=()):
    path = tmp_path / "01_it.ipynb"
    cells = [new_code_cell(source) for source in sources]
    for cell, output in zip(cells, outputs, strict=False):
        cell.outputs = output
    nbformat.write(new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize(
    ("sources", "kept"),
    [
        # an import loses its withheld names only, and what they lead to waits
        (
            [
                "from minidist.precision import FORMATS, GradScaler\nx = 1",
                "GradScaler()",
                "FORMATS",
            ],
            ["from minidist.precision import FORMATS\nx = 1", "", "FORMATS"],
        ),
        (
            ["import minidist.elastic as e", "def f():\n    return e.share_of_batch", "f()", "1"],
            ["", "", "", "1"],
        ),
        (
            ["from minidist import precision", "precision.GradScaler()", "precision.FORMATS"],
            ["from minidist import precision", "", "precision.FORMATS"],
        ),
        # a local name of a function is not the notebook's
        (
            ["from minidist.elastic import Preemption as p", "def f(p):\n    return p", "f(1)"],
            ["", "def f(p):\n    return p", "f(1)"],
        ),
        # ... and neither is a comprehension's, or that of a caught error
        (
            ["from minidist.elastic import train", "e = 1", "{e: 1 for e in train()}", "e"],
            ["", "e = 1", "", "e"],
        ),
        (
            [
                "from minidist.elastic import train",
                "try:\n    train()\nexcept OSError as e:\n    print(e)",
                "try:\n    1\nexcept OSError as e:\n    print(e)",
            ],
            ["", "", "try:\n    1\nexcept OSError as e:\n    print(e)"],
        ),
        # a name that is made anew is free again
        (["from minidist.elastic import Preemption as p", "p = 1", "p"], ["", "p = 1", "p"]),
        # a script that a cell writes, and the command that runs it
        (
            ["%%writefile job.py\nimport minidist.elastic\n", "!python job.py", "!ls"],
            ["", "", "!ls"],
        ),
        # a function that reads what the cell makes later
        (
            ["from minidist.elastic import train", "def f():\n    return a\na = train()\nf()"],
            ["", ""],
        ),
        # what a dropped statement changes waits, too; what it only shows stays
        (
            [
                "from minidist.elastic import train",
                "a = {}\nb = 2\na['x'] = train()\ndisplay(b)",
                "a",
                "b",
            ],
            ["", "b = 2", "", "b"],
        ),
        (
            ["%%rank 0\nfrom minidist.elastic import Preemption\nimport math", "%%rank 0\nmath.pi"],
            ["%%rank 0\nimport math", "%%rank 0\nmath.pi"],
        ),
    ],
)
def test_what_stays_of_a_cell(tmp_path, sources, kept):
    cells = plan_lecture(lecture(tmp_path, *sources), LIBRARY, MISSING)
    assert [cell.source for cell in cells] == kept


def test_outputs_take_the_place_of_code(tmp_path):
    picture = new_output("display_data", {"image/png": "aGVsbG8=\n", "text/plain": "<Figure>"})
    sources = ["from minidist.elastic import Preemption", "Preemption().draw()", "print(1)"]
    outputs = [[], [picture, new_output("stream", text="12 steps\n")], []]
    path = lecture(tmp_path, *sources, outputs=outputs)
    cells = plan_lecture(path, LIBRARY, MISSING)
    made = write_for_students(path, path, cells, MISSING)
    shown, rest = made.cells
    assert shown.cell_type == "markdown"
    assert "when lab5_multinode is over" in shown.source
    assert "```text\n12 steps\n```" in shown.source
    assert shown.attachments == {"output1.png": {"image/png": "aGVsbG8="}}
    assert rest.source == "print(1)"
    nbformat.validate(made)


def test_code_that_prints_withheld_code_leaves_no_output(tmp_path):
    sources = ["import inspect, minidist.elastic", "print(inspect.getsource(minidist.elastic))"]
    path = lecture(tmp_path, *sources, outputs=[[], [new_output("stream", text="def secret(): 1")]])
    made = write_for_students(path, path, plan_lecture(path, LIBRARY, MISSING), MISSING)
    assert "secret" not in nbformat.writes(made)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Lab -> the students' folder while it is open and later labs wait; no lecture was executed."""
    folders = {}

    def make(lab):
        if lab not in folders:
            folders[lab] = tmp_path_factory.mktemp(lab)
            later = LABS[LABS.index(lab) :] if lab in LABS else []
            write_release(
                Course(ROOT), folders[lab], [lab], later=later, execute=lambda path, *_: path
            )
        return folders[lab]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "lab",
    [
        name if name in LABS else pytest.param(name, marks=pytest.mark.nightly)
        for name in lab_names()
    ],
)
def test_every_name_that_a_lecture_reads_is_there(released, lab):
    """Of every lecture while any lab is open: also of those that are not run."""
    folder = released(lab)
    lectures = sorted((folder / "notebooks").glob("*.ipynb"))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    done = subprocess.run([*ruff, *lectures], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

    cells = [
        c.source for path in lectures for c in nbformat.read(path, 4).cells if c.cell_type == "code"
    ]
    nodes = [node for cell in cells for node in ast.walk(parse_cell(split_magic(cell)[1]))]
    imports = {ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)}
    done = run_python("\n".join(sorted(imports, key=lambda line: "__future__" not in line)), folder)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lab", "name"),
    MOST_WAITS[:2] + [pytest.param(*each, marks=pytest.mark.nightly) for each in MOST_WAITS[2:]],
)
def test_a_lecture_runs_in_the_students_folder(released, tmp_path, lab, name):
    folder = released(lab)
    code = f"""
import papermill
papermill.execute_notebook({str(folder / "notebooks" / f"{name}.ipynb")!r},
    {str(tmp_path / "out.ipynb")!r}, cwd={str(tmp_path)!r}, progress_bar=False, start_timeout=120)
"""
    done = run_python(code, folder)
    assert done.returncode == 0, done.stderr[-3000:]


def run_python(code, folder):
    """Runs Python with the library of a students' folder."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{folder / 'lib'}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
    )
