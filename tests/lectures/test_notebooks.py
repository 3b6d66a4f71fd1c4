"""Every lecture runs from top to bottom, as a student would run it, and what it claims is true.

A lecture is run by papermill on its own kernel. MINIDIST_CLAIMS collects what it claimed.
"""

from __future__ import annotations

import json
import pkgutil
import re
import time
from pathlib import Path

import nbformat
import papermill
import pytest

from minidist import claims

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
LECTURES = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
MIN_FIGURES, MIN_WIDGETS, MIN_CLAIMS = 3, 2, 12
WIDGET = "application/vnd.jupyter.widget-view+json"
HANGS_S = 400  # a cell; far more than a whole lecture takes on a busy machine


def run(path: Path, tmp_path: Path, monkeypatch) -> tuple[nbformat.NotebookNode, list]:
    """The notebook with its outputs, and the claims that it made."""
    log = tmp_path / "claims.jsonl"
    monkeypatch.setenv("MINIDIST_CLAIMS", str(log))
    monkeypatch.setenv("MINIDIST_LECTURE", path.stem)
    notebook = papermill.execute_notebook(
        str(path),
        None,
        cwd=str(tmp_path),
        progress_bar=False,
        start_timeout=120,
        execution_timeout=HANGS_S,
    )
    return notebook, claims.load(log) if log.exists() else []


def when(path: Path) -> list[pytest.MarkDecorator]:
    """`make test` runs lecture 1 and CI the short ones; CI runs 3 and 11 as students get them."""
    number = int(path.stem[:2])
    long = number in (3, 4, 5, 9, 10, 11)
    return [pytest.mark.nightly if long else pytest.mark.slow] * (number != 1)


def outputs_of(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", [pytest.param(p, marks=when(p), id=p.stem) for p in LECTURES])
def test_lecture(path, tmp_path, monkeypatch):
    notebook, made = run(path, tmp_path, monkeypatch)
    outputs = outputs_of(notebook)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    widgets = [output for output in outputs if WIDGET in output.get("data", {})]
    if path.stem == "00_start_here":
        text = "".join(output.get("text", "") for output in outputs)
        assert pictures
        assert "[rank 1" in text, "the other ranks' output is missing"
        return
    assert all("image/png" in w["data"] for w in widgets), "a widget shows nothing on GitHub"
    assert len(pictures) - len(widgets) >= MIN_FIGURES
    assert len(widgets) >= MIN_WIDGETS
    assert len({claim.text for claim in made}) >= MIN_CLAIMS
    assert [str(claim) for claim in made if not claim.passed] == []
    made = claims.with_kinds(made, [path.with_suffix(".py")])
    assert [str(claim) for claim in made if claim.status != "cited" and not claim.kind] == []
    errors = [o for o in outputs if o.get("output_type") == "error"]
    assert errors == []


def test_a_lecture_that_fails_leaves_no_files(tmp_path, monkeypatch):
    """Lecture 10 up to the place where it makes its folder, and then an error."""
    notebook = nbformat.read(NOTEBOOKS / "10_many_nodes.ipynb", as_version=4)
    end = next(i for i, cell in enumerate(notebook.cells) if "\nwork = " in cell.source)
    code = "%%rank 0\n(work / 'there').touch()\nprint(work)\n1 / 0"
    notebook.cells = [*notebook.cells[: end + 1], nbformat.v4.new_code_cell(code)]
    nbformat.write(notebook, tmp_path / "fails.ipynb")
    with pytest.raises(papermill.PapermillExecutionError, match="ZeroDivisionError"):
        papermill.execute_notebook(
            str(tmp_path / "fails.ipynb"),
            str(tmp_path / "out.ipynb"),
            cwd=str(tmp_path),
            progress_bar=False,
            start_timeout=120,
        )
    ran = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    printed = "".join(output.get("text", "") for output in outputs_of(ran))
    folder = next(line for line in printed.splitlines() if "lecture10-" in line)
    ends_at = time.monotonic() + 30
    while Path(folder).exists():
        assert time.monotonic() < ends_at, f"{folder} is left"
        time.sleep(0.1)


@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)
def test_lecture_has_its_parts(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are committed"
    if path.stem == "00_start_here":
        return
    assert "you can" in notebook.cells[0].source, "it does not say what one can do after it"
    assert re.search(r"^## Summary$", text, re.M)
    assert re.search(r"^## (What to read|Read)$", text, re.M)
    assert text.count("<details>") >= 5, "questions without folded answers"
    assert re.search(r"arXiv[: ]\d{4}\.\d{4,5}", text), "nothing to read"
    assert re.search(r"lab[1-6]_\w+", text), "no lab is named"
    assert any("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells)
    assert len(json.dumps(notebook)) < 1_000_000


@pytest.mark.parametrize("path", LECTURES[1:], ids=lambda path: path.stem)
def test_lecture_uses_what_is_there_and_leaves_nothing(path):
    """It asks for its device, and what it writes goes with its kernel, however that ends."""
    code = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if "outputs" in c)
    assert re.search(r"\bchoose_device\(", code)
    assert re.search(r"\bchoose_backend\(", code)
    for made in re.finditer(r"(with )?tempfile\.(mkdtemp|TemporaryDirectory)\(([^)]*)", code):
        assert made[1] or "dir=" in made[3], made[0]


def there(name: str, folders: list[Path]) -> bool:
    """Whether a dotted name of the library, a path, or a file of one of the folders is there."""
    if name.startswith("minidist."):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            return False
        return True
    if "/" in name:
        return (NOTEBOOKS.parent / name).exists()
    return any((folder / name).exists() for folder in folders)


@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)
def test_what_a_lecture_tells_to_read_is_there(path):
    """A file without a folder is looked for in the folders that the lecture names."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    paths = re.findall(r"`(lib/[\w/.]+)`", text)
    folders = [NOTEBOOKS.parent / re.sub(r"[^/]*\.py$", "", found) for found in paths]
    named = re.findall(r"`(\w+\.py|minidist(?:\.\w+)+)`", text) + paths
    assert [name for name in named if not there(name, folders)] == []
