"""Lab 1 as a stock course has it: the judge sits in the notebook, or in a test file beside it.

    nbgrader   locked check cells with a region of hidden tests; the points are in the metadata
    otter      `grader.check("name")` in the notebook, and tests/NAME.py in the grader's archive

Demonstrations and questions that a person grades are left out: neither earns points by itself.
"""

from __future__ import annotations

import ast
import copy
import io
import json
import zipfile
from pathlib import Path
from typing import Any, Literal

from autograder.criteria import get_lab

LAB = "lab1_ddp"
Notebook = dict[str, Any]
Grader = Literal["nbgrader", "otter"]

_LINE = "# --- what a check cell holds"
_STUB = "# The tests of this cell are hidden.\n"
_BEGIN, _END = "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"
_OTTER_START = "\n\nimport otter\n\ngrader = otter.Notebook()"


def check_source() -> str:
    """The source of `stock_check.check` and its helper, as it is put into cells and test files."""
    text = (Path(__file__).resolve().parent / "stock_check.py").read_text("utf-8")
    below = text[text.index(_LINE) :]
    return below[below.index("\n") :].strip() + "\n"


def is_check(cell: Notebook) -> bool:
    """Whether a cell is one of the lab's own checks, by the metadata that it came with."""
    nbgrader = cell["metadata"].get("nbgrader", {})
    return cell["cell_type"] == "code" and bool(nbgrader.get("grade"))


def subjects(master: Notebook) -> dict[str, str]:
    """Criterion -> the expression that its check cell hands in: a name, or a path in quotes."""
    found = {}
    for cell in filter(is_check, master["cells"]):
        call = ast.parse(_text(cell)).body[0]
        assert isinstance(call, ast.Expr)
        assert isinstance(call.value, ast.Call)
        found[ast.literal_eval(call.value.args[0])] = ast.unparse(call.value.args[1])
    return found


def hidden_source(name: str, subject: str) -> str:
    """The source of nbgrader's check cell, as the instructor has it."""
    body = f"{check_source()}\n\ncheck({name!r}, {subject})"
    return f"{_STUB}{_BEGIN}\n{body}\n{_END}"


def nbgrader_source(solution: Notebook, ranks: int) -> Notebook:
    """The instructor's notebook: `solution` (with its solution marks), and hidden tests."""
    names = subjects(solution)
    made = _without_extras(solution, ranks)
    for cell in filter(is_check, made["cells"]):
        name = cell["metadata"]["nbgrader"]["grade_id"]
        cell["source"] = hidden_source(name, names[name])
    return made


def submission(notebook: Notebook, grader: Grader, ranks: int) -> Notebook:
    """What a student of the stock course would have handed in, instead of `notebook`.

    Args:
        notebook: a submission to our lab, as plain JSON.
        grader: whose check cells it gets.
        ranks: number of ranks of the kernel.
    """
    made = _without_extras(notebook, ranks)
    for cell in made["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id")
        if is_check(cell):
            cell["source"] = _STUB if grader == "nbgrader" else f'grader.check("{name}")'
        elif name == "imports" and grader == "otter":
            cell["source"] = _text(cell) + _OTTER_START
    return made


def otter_tests(master: Notebook) -> dict[str, str]:
    """File name -> content of otter's test files, in its format of exceptions."""
    lab, files = get_lab(LAB), {}
    for name, subject in subjects(master).items():
        value = ast.unparse(_FromEnv().visit(ast.parse(subject, mode="eval")))
        points = float(lab[name].points)
        files[f"{name}.py"] = (
            "from otter.test_files import test_case\n\n"
            f"OK_FORMAT = False\nname = {name!r}\n\n\n{check_source()}\n\n"
            f"@test_case(points={points}, hidden=True)\n"
            f"def test(env):\n    check({name!r}, {value})\n"
        )
    return files


class _FromEnv(ast.NodeTransformer):
    """Looks each name up in the notebook, where KeyError says that it is not there."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(f"env[{node.id!r}]", mode="eval").body


def otter_archive(master: Notebook) -> bytes:
    """otter's autograder.zip: the settings and the tests."""
    settings = {"lang": "python", "logo": False, "print_summary": False, "print_score": False}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("otter_config.json", json.dumps(settings))
        for name, text in otter_tests(master).items():
            archive.writestr(f"tests/{name}", text)
    return target.getvalue()


def _without_extras(notebook: Notebook, ranks: int) -> Notebook:
    """A copy without demonstrations and reflections, for the kernel with `ranks` ranks."""
    made = copy.deepcopy(notebook)
    made["cells"] = [cell for cell in made["cells"] if not _is_extra(cell)]
    name = f"torchrun-{ranks}"
    made["metadata"]["kernelspec"] = {
        "name": name,
        "display_name": f"torchrun × {ranks}",
        "language": "python",
    }
    return made


def _is_extra(cell: Notebook) -> bool:
    nbgrader = cell["metadata"].get("nbgrader", {})
    demo = cell["metadata"].get("minidist", {}).get("replay") is False
    return demo or (cell["cell_type"] == "markdown" and bool(nbgrader.get("grade")))


def _text(cell: Notebook) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)
