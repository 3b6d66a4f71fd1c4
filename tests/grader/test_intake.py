"""Intake: what a notebook may be, which cells are put back, and that nothing else survives."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from autograder.submission.find import find_submissions
from autograder.submission.intake import Intake, IntakeLimits, read_submission


def _cell(source: str, grade_id: str | None = None, **roles: Any) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": "code",
        "execution_count": 3,
        "id": grade_id or "x" + str(abs(hash(source)) % 10**6),
        "metadata": {},
        "outputs": [{"output_type": "stream", "name": "stdout", "text": "old"}],
        "source": source,
    }
    if grade_id:
        nbgrader = {"grade": False, "locked": False, "solution": False, "task": False}
        cell["metadata"]["nbgrader"] = {
            "schema_version": 3,
            "grade_id": grade_id,
            **nbgrader,
        } | roles
    return cell


def _notebook(*cells: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5} | top


IMPORTS = _cell("import torch", "imports", locked=True)
SETUP = _cell("def setup(): ...", "setup_distributed", solution=True)
CHECK = _cell('check("setup", setup)', "setup", grade=True, locked=True, points=5)
DEMO = _cell("show(setup)", "watch_it", locked=True)
DEMO["metadata"]["minidist"] = {"replay": False}
KERNEL = {"name": "torchrun-2", "display_name": "torchrun × 2"}
DDP = _cell("class DDP: ...", "ddp", solution=True)
KERNEL = {"name": "torchrun-2", "display_name": "torchrun × 2"}
CHECK_DDP = _cell('check("ddp", DDP)', "ddp_check", grade=True, locked=True, points=8)
CELLS = [IMPORTS, SETUP, CHECK, DEMO, DDP, CHECK_DDP]
MASTER = nbformat.from_dict(_notebook(*copy.deepcopy(CELLS), metadata={"kernelspec": KERNEL}))


@pytest.fixture
def read(tmp_path: Path):
    def read(content: Any, **limits: int) -> Intake:
        path = tmp_path / "lab.ipynb"
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        path.write_bytes(content)
        return read_submission(path, MASTER, IntakeLimits(**limits))

    return read


def _edited(*edits: tuple[int, str, Any]) -> list[dict[str, Any]]:
    cells = copy.deepcopy(CELLS)
    for index, key, value in edits:
        cells[index][key] = value
    return cells


def _kinds(intake: Intake) -> list[tuple[str, str]]:
    assert intake.notebook is not None, intake.invalid
    return [
        (cell.metadata.minidist.kind, cell.source)
        for cell in intake.notebook.cells
        if cell.cell_type == "code"
    ]


def test_an_honest_notebook_keeps_its_code_and_nothing_else(read):
    answer = "def setup():\n    return 0, 1, 'cpu'"
    cells = _edited((1, "source", answer), (1, "attachments", {"a": {"image/png": "eA=="}}))
    for cell in cells:
        cell["metadata"] |= {"tags": ["skip-execution", "parameters"], "deletable": True}
    own = _cell("helper = 1")
    own["metadata"] = {"minidist": {"kind": "check", "replay": False}, "papermill": {"x": 1}}
    cells[1:1] = [own, {"cell_type": "markdown", "metadata": {"a": 1}, "source": ["# Hi\n", "you"]}]
    intake = read(_notebook(*cells, metadata={"kernelspec": {"name": "evil"}, "widgets": {}}))

    assert intake.invalid is None
    assert intake.notes == []
    notebook = intake.notebook
    assert notebook is not None
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata == {"kernelspec": KERNEL}
    assert _kinds(intake) == [
        ("given", "import torch"),
        ("student", "helper = 1"),
        ("solution", answer),
        ("check", CHECK["source"]),
        ("given", "show(setup)"),
        ("solution", DDP["source"]),
        ("check", CHECK_DDP["source"]),
    ]
    by_id = {cell.id: cell for cell in notebook.cells}
    assert by_id["cell-003"].source == "# Hi\nyou"
    assert by_id["cell-002"].metadata == {
        "minidist": {"kind": "student", "grade_id": None, "replay": True}
    }
    assert by_id["setup"].metadata.nbgrader == MASTER.cells[2].metadata.nbgrader
    assert by_id["setup"].metadata.minidist.grade_id == "setup"
    assert [
        c.id for c in notebook.cells if not c.metadata.get("minidist", {}).get("replay", True)
    ] == ["watch_it"]
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"minidist", "nbgrader"}
        assert "attachments" not in cell
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_edited_locked_cells_are_put_back_and_claims_do_not_help(read):
    forged = _edited(
        (2, "source", "print('100 points')"), (5, "cell_type", "raw"), (0, "source", "import evil")
    )
    forged[2]["metadata"]["nbgrader"] |= {"grade": False, "locked": False, "solution": True}
    forged[2]["metadata"]["nbgrader"]["points"] = 100
    forged.append(_cell("second()", "setup", grade=True, points=50))
    forged.append(_cell("mine()", "unknown_check", grade=True, points=50))
    intake = read(_notebook(*forged))
    assert _kinds(intake) == [
        ("given", "import torch"),
        ("solution", SETUP["source"]),
        ("check", CHECK["source"]),
        ("given", DEMO["source"]),
        ("solution", DDP["source"]),
        ("check", CHECK_DDP["source"]),
        ("student", "second()"),
        ("student", "mine()"),
    ]
    assert intake.notebook is not None
    assert intake.notebook.cells[2].metadata.nbgrader == MASTER.cells[2].metadata.nbgrader
    assert "nbgrader" not in intake.notebook.cells[6].metadata
    assert sum("edited" in note for note in intake.notes) == 3
    assert sum("second cell" in note for note in intake.notes) == 1


def test_missing_locked_cells_are_inserted_where_the_master_has_them(read):
    own = _cell("extra = 1")
    intake = read(_notebook(SETUP, own, DDP))
    assert [source for _, source in _kinds(intake)] == [
        IMPORTS["source"],
        SETUP["source"],
        CHECK["source"],
        DEMO["source"],
        own["source"],
        DDP["source"],
        CHECK_DDP["source"],
    ]
    assert sum("put back" in note for note in intake.notes) == 4
    gone = read(_notebook(SETUP, own))
    assert any(note.startswith("ddp: ") and "missing" in note for note in gone.notes)
    assert [source for _, source in _kinds(gone)][-3:-1] == [DEMO["source"], CHECK_DDP["source"]]


def test_the_students_order_is_kept(read):
    order = [IMPORTS, CHECK_DDP, DDP, CHECK, DEMO, SETUP]
    intake = read(_notebook(*order))
    assert [source for _, source in _kinds(intake)] == [cell["source"] for cell in order]
    assert intake.notes == []


@pytest.mark.parametrize("keep_ids", [True, False])
def test_lost_metadata_costs_nothing(read, keep_ids: bool):
    cells = copy.deepcopy(CELLS)
    for cell in cells:
        cell["metadata"] = {"vscode": {"languageId": "python"}, "id": "Zx81"}
        if not keep_ids:
            del cell["id"]
    cells[1]["source"] = "def setup(): return 1"
    minor = 5 if keep_ids else 2
    intake = read(_notebook(*cells, nbformat_minor=minor, metadata={"colab": {"provenance": []}}))
    kinds = _kinds(intake)
    assert [kind for kind, _ in kinds] == [
        "given",
        "solution" if keep_ids else "student",
        "check",
        "given",
        "solution" if keep_ids else "student",
        "check",
    ]
    assert kinds[1][1] == "def setup(): return 1"


@pytest.mark.parametrize("minor", [0, 1, 2, 3, 4, 5])
def test_every_minor_version_of_4(read, minor: int):
    cells = _edited((1, "source", ["def setup():\r\n", "    return 1\r\n"]))
    for cell in cells:
        if minor < 5:
            del cell["id"]
        else:
            cell["id"] = "same"
    notebook = _notebook(*cells, nbformat_minor=minor)
    raw = b"\xef\xbb\xbf" + json.dumps(notebook, indent=1).replace("\n", "\r\n").encode()
    intake = read(raw)
    assert _kinds(intake)[1] == ("solution", "def setup():\n    return 1\n")
    nbformat.validate(intake.notebook)
    again = read(raw)
    assert intake == again


def test_odd_content_is_repaired(read):
    odd = {"cell_type": "heading", "level": 1, "source": "Title", "metadata": []}
    broken = _cell("x = '\ud800'")
    intake = read(_notebook(*CELLS, odd, broken, {"cell_type": "code"}))
    assert intake.notebook is not None
    assert intake.notebook.cells[6].cell_type == "raw"
    assert intake.notebook.cells[7].source == "x = '\N{REPLACEMENT CHARACTER}'"
    assert intake.notebook.cells[8].source == ""
    assert len(intake.notes) == 2
    nbformat.writes(intake.notebook).encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"x = 1", "not JSON"),
        (b'{"cells": [', "not JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not JSON"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"cells": ["\xff"]}', "not UTF-8"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested"),
        (b"[" + b"[]," * 600_000 + b"1]", "too many parts"),
        ([1, 2], "not a notebook"),
        ({"a": 1}, "not a notebook"),
        (_notebook(*CELLS, nbformat=3), "format is 3"),
        (_notebook(*CELLS, nbformat=5), "format is 5"),
        (_notebook(*CELLS, nbformat="4"), "format is 4"),
        (_notebook(*CELLS, nbformat=None), "format is None"),
        ({"nbformat": 3, "worksheets": [{"cells": []}]}, "format is 3"),
        ({"nbformat": 4, "cells": {}}, "list of cells"),
        ({"nbformat": 4}, "list of cells"),
        (_notebook(), "no code cells"),
        (_notebook({"cell_type": "markdown", "source": "x"}), "no code cells"),
        (_notebook(*CELLS, "text"), "cell 7"),  # type: ignore[arg-type]
        (_notebook(_cell("x") | {"source": 5}), "cell 1"),
        (_notebook(_cell("x") | {"source": ["a", 5]}), "cell 1"),
        (_notebook(_cell("x" * 1_000_001)), "1000001 characters"),
        (_notebook(*[_cell("x")] * 10_001), "10001 cells"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_with_a_reason(read, content: Any, reason: str):
    intake = read(content)
    assert intake.notebook is None
    assert reason in (intake.invalid or "")
    assert len(intake.sha256) == 64


def test_brackets_in_strings_are_not_nesting(read):
    tricky = "s = '" + "[" * 5000 + '\\" {{ \\\\"'
    intake = read(_notebook(*_edited((1, "source", tricky))))
    assert _kinds(intake)[1][1] == tricky


@pytest.mark.parametrize("piece", [b'"\\"', b'"', b'\\"', b'["\\', b'"[\\\\'])
def test_the_depth_check_takes_linear_time(read, piece: bytes):
    """Seconds; if it were quadratic, far more than the limit of every test (600 s)."""
    assert read(piece * (2_000_000 // len(piece)))


def test_a_big_file_is_not_read_whole(tmp_path: Path):
    path = tmp_path / "big.ipynb"
    with path.open("wb") as file:
        file.truncate(200 << 30)  # sparse: reading it all would take minutes and all memory
    intake = read_submission(path, MASTER)
    assert "too big" in (intake.invalid or "")
    assert "20 MiB" in (intake.invalid or "")


def test_only_regular_files(tmp_path: Path):
    good = tmp_path / "good.ipynb"
    good.write_text(json.dumps(_notebook(*CELLS)))
    assert read_submission(good, MASTER).invalid is None
    link, fifo, folder = tmp_path / "link.ipynb", tmp_path / "fifo.ipynb", tmp_path / "dir.ipynb"
    link.symlink_to(good)
    os.mkfifo(fifo)
    folder.mkdir()
    assert "symbolic link" in (read_submission(link, MASTER).invalid or "")
    assert "regular file" in (read_submission(fifo, MASTER).invalid or "")
    assert "regular file" in (read_submission(folder, MASTER).invalid or "")
    assert "regular file" in (read_submission(Path("/dev/zero"), MASTER).invalid or "")
    assert "no file" in (read_submission(tmp_path / "none.ipynb", MASTER).invalid or "")
    assert "opened" in (read_submission(Path("a\0b"), MASTER).invalid or "")


def test_a_graded_cell_that_students_fill_in_keeps_their_text(tmp_path: Path):
    essay = _cell("answer", "essay", grade=True, solution=True, points=3)
    master = nbformat.from_dict(_notebook(essay))
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(_notebook(essay | {"source": "mine"})))
    assert _kinds(read_submission(path, master)) == [("solution", "mine")]


def test_ids_are_unique_and_valid(tmp_path: Path):
    names = ["cell-002", "with space", "y" * 80]
    cells = [_cell(name, name, locked=True) for name in names]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(_notebook(cells[0], _cell("own"), *cells[1:])))
    notebook = read_submission(path, nbformat.from_dict(_notebook(*cells))).notebook
    assert notebook is not None
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == 4


# --- folders -----------------------------------------------------------------------------------


def _write(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(v4.new_notebook(), path)


def _found(*paths: Path) -> list[tuple[str, str]]:
    return [(s.student, s.path.name) for s in find_submissions(paths, "lab1_ddp").submissions]


def test_find_submissions(tmp_path: Path):
    plain, nested = tmp_path / "plain", tmp_path / "submitted"
    _write(plain / "bob/lab1_ddp.ipynb", plain / "ann/lab1_ddp.ipynb", plain / "cy/Untitled.ipynb")
    _write(plain / "dan/lab2.ipynb", plain / "dan/lab3.ipynb", plain / ".git/lab1_ddp.ipynb")
    (plain / "eve").mkdir()
    expected = [(name, "lab1_ddp.ipynb") for name in ("ann", "bob", "dan")]
    expected.insert(2, ("cy", "Untitled.ipynb"))
    assert _found(plain) == expected
    assert _found(plain / "bob") == [("bob", "lab1_ddp.ipynb")]
    assert _found(plain / "bob/lab1_ddp.ipynb") == [("bob", "lab1_ddp.ipynb")]
    assert _found(plain / "cy/Untitled.ipynb") == [("Untitled", "Untitled.ipynb")]

    for name in ("ann", "bob"):
        _write(nested / name / "lab1_ddp/lab1_ddp.ipynb", nested / name / "lab1_ddp/notes.ipynb")
        _write(nested / name / "lab2/lab2.ipynb")
    both = [("ann", "lab1_ddp.ipynb"), ("bob", "lab1_ddp.ipynb")]
    assert _found(nested) == both
    assert _found(nested / "ann", nested / "bob" / "lab1_ddp") == both
    assert _found(nested / "ann/lab1_ddp/lab1_ddp.ipynb", nested / "ann") == both[:1]


def test_find_submissions_says_what_is_missing(tmp_path: Path):
    with pytest.raises(ValueError, match="no file or folder"):
        find_submissions([tmp_path / "none"], "lab1_ddp")
    with pytest.raises(ValueError, match=r"expected lab1_ddp\.ipynb"):
        find_submissions([tmp_path], "lab1_ddp")


def test_folders_without_a_notebook_are_named(tmp_path: Path):
    _write(tmp_path / "ann/lab1_ddp.ipynb", tmp_path / "dan/lab2/lab2.ipynb")
    (tmp_path / "eve").mkdir()
    (tmp_path / "eve/lab1_ddp.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "kim").symlink_to("/etc")
    left_out = find_submissions([tmp_path], "lab1_ddp").left_out
    assert [folder.name for folder in left_out] == ["dan", "eve", "kim"]
    assert "no lab1_ddp.ipynb" in left_out[tmp_path / "eve"]
    assert "link" in left_out[tmp_path / "kim"]


@pytest.mark.parametrize("theirs", ["lab1_ddp.ipynb", "lab1_ddp/lab1_ddp.ipynb"])
def test_a_notebook_beside_those_of_students_is_refused(tmp_path: Path, theirs: str):
    """Else the class would be one student, who has the folder's name."""
    fall = tmp_path / "fall26"
    _write(fall / "lab1_ddp.ipynb", *(fall / name / theirs for name in ("amy", "ben")))
    with pytest.raises(ValueError, match=r"fall26 holds lab1_ddp.*\(amy, ben\): move"):
        find_submissions([fall], "lab1_ddp")
    assert _found(fall / "lab1_ddp.ipynb") == [("fall26", "lab1_ddp.ipynb")]
    assert len(_found(fall / "amy", fall / "ben")) == 2


def test_a_student_may_have_folders(tmp_path: Path):
    _write(tmp_path / "amy/lab1_ddp.ipynb", tmp_path / "amy/drafts/first.ipynb")
    _write(tmp_path / "amy/.ipynb_checkpoints/lab1_ddp.ipynb")
    assert _found(tmp_path / "amy") == [("amy", "lab1_ddp.ipynb")]


def test_links_and_odd_names(tmp_path: Path):
    inside, outside = tmp_path / "class", tmp_path / "secret"
    _write(inside / "a\x1b[2Jb/lab1_ddp.ipynb", outside / "lab1_ddp.ipynb")
    _write(outside / "eve/lab1_ddp.ipynb", inside / "\u202efdp/lab1_ddp.ipynb")
    (inside / "mallory").symlink_to(outside)
    (inside / "trudy").mkdir()
    (inside / "trudy/lab1_ddp").symlink_to(outside)
    (inside / "oscar").mkdir()
    (inside / "oscar/lab1_ddp.ipynb").symlink_to(outside / "lab1_ddp.ipynb")
    found = find_submissions([inside], "lab1_ddp").submissions
    assert [s.student for s in found] == ["a\ufffd[2Jb", "oscar", "\ufffdfdp"]
    assert "symbolic link" in (read_submission(found[1].path, MASTER).invalid or "")


@pytest.mark.parametrize(
    ("made_of", "said"),
    [
        (lambda text: "<!DOCTYPE html><p>" + text, "it is a web page"),
        (lambda text: "import torch\n", "text or a script"),
        (lambda text: text[: len(text) // 2], "ends in the middle"),
        (lambda text: text.replace("\n", "\n<<<<<<< HEAD\n", 1), "line 2 has marks of a merge"),
        (lambda text: text.replace('"cells": [', '"cells": [,', 1), "line 2 was damaged"),
    ],
)
def test_a_file_that_is_no_notebook_is_called_what_it_is(tmp_path, made_of, said):
    path = tmp_path / "lab1_ddp.ipynb"
    path.write_text(made_of(nbformat.writes(MASTER)), encoding="utf-8")
    assert said in (read_submission(path, MASTER).invalid or "")
