"""A cell that failed is reported as itself, not as the names that it leaves undefined."""

from __future__ import annotations

import shutil

import nbformat
import pytest
from course import LAB, ROOT
from nbformat.v4 import new_code_cell, new_output

from autograder.course.course import Course
from autograder.criteria.criterion import Status, Verdict
from autograder.submission.attempt import run_once
from autograder.submission.choose_box import choose_sandbox
from autograder.submission.class_run import ClassRun
from autograder.submission.failed_cells import explain, read_failure

SYNTAX = {  # source -> what is said of it
    "class DDP(nn.Module)\n    pass": "SyntaxError in line 1 (`class DDP(nn.Module)`)",
    "\n\n%%rank 0\n%%time\nx = 1\ndef f(:": "SyntaxError in line 6 (`def f(:`)",
    "x = 1\n!ls\n%matplotlib inline\nfor x in range(3) print(x)": "SyntaxError in line 4",
    "for i in x:\n    a\n  b": "IndentationError in line 3 (`b`)",
    "# nothing\n\ndef f(: pass": "SyntaxError in line 3 (`def f(: pass`)",
}


def failed(source, ename="NameError", why="[ranks 0, 1] something"):
    outcome = {"kind": "error", "ename": ename, "why": why}
    return read_failure(new_code_cell(source, execution_count=7), outcome)


@pytest.mark.parametrize("source", SYNTAX)
def test_the_line_is_that_of_the_cell_magics_included(source):
    assert failed(source).error.startswith(SYNTAX[source])


def test_the_line_of_another_error_is_that_of_the_cell_not_of_a_library():
    cell = new_code_cell("\nx = 1\n%time y = (")
    trace = ["File lib.py:9", "Cell \x1b[32mIn[7]\x1b[39m, line 2", "Cell In[7], line 1"]
    cell.outputs = [new_output("error", ename="E", evalue="", traceback=trace)]
    why = "[rank 0] incomplete input (<unknown>, line 1)"
    failure = read_failure(cell, {"kind": "error", "ename": "SyntaxError", "why": why})
    assert failure.error == "SyntaxError in line 3 (`%time y = (`): incomplete input"


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("klass DDP(nn.Module):", "DDP", True),
        ("async def go(:", "go", True),
        ("if x:\n    from a import (b as DDP", "DDP", True),
        ("DDP: type = (", "DDP", True),
        ("DDP, other = (", "DDP", True),
        ("class DDPlus(:", "DDP", False),
        ("model = DDP(net", "DDP", False),
        ("    return DDP(net", "DDP", False),
        ("DDP(net", "DDP", False),
        ("DDP[0", "DDP", False),
    ],
)
def test_only_a_cell_that_would_define_the_name_is_the_reason(source, name, expected):
    assert failed(source).defines(name) is expected


def test_a_missing_name_that_no_failed_cell_defines_stays_as_it_is():
    said = "[ranks 0, 1] name 'DDP' is not defined"
    verdict = Verdict("ddp_weights", Status.STUDENT_ERROR, 0.0, 5.0, said)
    assert explain(verdict, [failed("def other(:")], {}) == (verdict, None)
    passed = Verdict("ddp_weights", Status.PASS, 5.0, 5.0, said)
    assert explain(passed, [failed("class DDP(:")], {}) == (passed, None)


def test_a_magic_that_swallows_errors_is_looked_into():
    swallowed = read_failure(new_code_cell("%%capture\nclass DDP(:"), {"kind": "ok"})
    assert swallowed.error.startswith("SyntaxError in line 2")
    for source in ("%%capture\nclass DDP: pass", "%%bash\nif [ x ]; then :; fi", "x = 1"):
        assert read_failure(new_code_cell(source), {"kind": "ok"}) is None


@pytest.mark.slow
def test_a_submission_with_broken_cells_says_so_and_what_follows(tmp_path):
    shutil.copytree(ROOT / "labs" / LAB, tmp_path / "labs" / LAB)
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    course = Course(tmp_path)
    course.make_key()
    notebook = nbformat.read(ROOT / "solutions" / LAB / f"{LAB}.ipynb", as_version=4)
    broken = {
        "task1_setup": lambda source: f"%nosuch 3\n{source}",
        "task3_sampler": lambda source: (
            "%%capture\n" + source.replace("class Shard", "klass Shard")
        ),
        "task7_ddp": lambda source: source.replace("DDP(nn.Module):", "DDP(nn.Module)"),
    }
    for cell in notebook.cells:
        if cell.get("id") in broken:
            cell.source = broken.pop(cell.id)(cell.source)
    assert not broken
    path = tmp_path / f"{LAB}.ipynb"
    nbformat.write(notebook, path)
    class_run = ClassRun(course, LAB, 2, choose_sandbox(True, False))
    intake = class_run.read(path)
    verdicts = run_once(intake.notebook, class_run, "ada:1", tmp_path / "x.ipynb", lambda *_: None)
    said = {verdict.criterion: verdict.message for verdict in verdicts}
    assert "(task1_setup) failed" in said["setup"]
    assert "`%nosuch` not found" in said["setup"]
    assert "SyntaxError in line 2 (`klass ShardSampler" in said["sampler_partition"]
    assert "SyntaxError in line 1 (`class DDP(nn.Module)`)" in said["ddp_weights"]
    assert "expected ':'" in said["ddp_weights"]
    assert "follows from ddp_weights" in said["ddp_scaling"]
    assert "no train: this follows from sampler_partition" in said["train_steps"]  # an annotation
    assert not [name for name, message in said.items() if "is not defined" in message]
    assert (
        said["wrap_model"] == said["gradients_in_sync"] == ""
    )  # one fault costs what depends on it
