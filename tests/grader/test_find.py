"""What is found in the folders of a class, and that outputs of any size cost nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import nbformat
import pytest
from course import ROOT
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nbformat import v4

from autograder.submission.find import find_submissions
from autograder.submission.intake import IntakeLimits, read_submission
from autograder.submission.strip import Stripper, TooBigError


def _lab(path: Path, lab: str = "lab1_ddp", text: str = "") -> Path:
    """The released notebook of a lab, as a student may name it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.read(ROOT / "labs" / lab / f"{lab}.ipynb", as_version=4)
    notebook.cells.append(v4.new_markdown_cell(text or path.name, id="own"))
    nbformat.write(notebook, path)
    return path


def test_copies_of_a_browser_and_odd_names_are_right_work(tmp_path: Path):
    for name in ("lab1_ddp (1).ipynb", "lab1_ddp (2).ipynb", "lab1_ddp (10).ipynb"):
        _lab(tmp_path / "amy" / name)
    for name in ("lab1_ddp-1.ipynb", "lab1_ddp-2.ipynb"):
        _lab(tmp_path / "ben" / name)
    _lab(tmp_path / "cem" / "Lab1_DDP.IPYNB")
    _lab(tmp_path / "dan" / "my work.ipynb")
    _lab(tmp_path / "dan" / "lab2.ipynb", "lab2_accumulation")
    found = find_submissions([tmp_path], "lab1_ddp")
    assert [(s.student, s.path.name) for s in found.submissions] == [
        ("amy", "lab1_ddp (10).ipynb"),
        ("ben", "lab1_ddp-2.ipynb"),
        ("cem", "Lab1_DDP.IPYNB"),
        ("dan", "my work.ipynb"),
    ]
    lines = list(found.explain())
    assert lines[0].endswith("lab1_ddp (10).ipynb (the newest of 3 copies)")


def test_the_wrong_labs_notebook_is_nothing_handed_in(tmp_path: Path):
    for student, name in (("bob", "lab1_ddp.ipynb"), ("cy", "homework.ipynb")):
        _lab(tmp_path / student / name, "lab2_accumulation")
    _lab(tmp_path / "ann" / "lab1_ddp.ipynb")
    found = find_submissions([tmp_path], "lab1_ddp")
    assert [s.student for s in found.submissions] == ["ann"]
    assert [folder.name for folder in found.left_out] == ["bob", "cy"]
    assert set(found.left_out.values()) == {
        "holds the notebook of lab2_accumulation, and none of lab1_ddp"
    }
    for path in (tmp_path / "bob", tmp_path / "cy" / "homework.ipynb"):
        with pytest.raises(ValueError, match=r"the notebook of lab2_accumulation, not of lab1_ddp"):
            find_submissions([path], "lab1_ddp")


def test_what_could_be_two_submissions_stops_with_all_names(tmp_path: Path):
    _lab(tmp_path / "ann" / "lab1_ddp.ipynb")
    for student in ("bob", "cy"):
        for name in ("draft.ipynb", "final.ipynb"):
            _lab(tmp_path / student / name)
    with pytest.raises(ValueError, match="all notebooks but one") as error:
        find_submissions([tmp_path], "lab1_ddp")
    for student in ("bob", "cy"):
        assert f"{student}: several notebooks of lab1_ddp: draft.ipynb, final.ipynb" in str(
            error.value
        )


def test_everything_in_a_class_is_named_with_the_reason(tmp_path: Path):
    _lab(tmp_path / "ann" / "lab1_ddp.ipynb")
    _lab(tmp_path / ".bob" / "lab1_ddp.ipynb")
    _lab(tmp_path / "repo" / "work" / "lab1_ddp" / "lab1_ddp.ipynb")
    for name in ("cy/lab1_ddp.ipynb.txt", "dan/lab1_ddp.py", "eve.zip", "kim.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    left_out = find_submissions([tmp_path], "lab1_ddp").left_out
    assert {path.name: why for path, why in left_out.items()} == {
        ".bob": "its name begins with a dot: rename it",
        "cy": "there is no lab1_ddp.ipynb and no other notebook in it, but lab1_ddp.ipynb.txt",
        "dan": "there is no lab1_ddp.ipynb and no other notebook in it, but lab1_ddp.py",
        "eve.zip": "a loose file: put it, unpacked, into a folder of its student",
        "kim.ipynb": "a loose file: put it, unpacked, into a folder of its student",
        "repo": "there is no lab1_ddp.ipynb and no other notebook in it, but "
        "work/lab1_ddp/lab1_ddp.ipynb",
    }


MASTER_OF_LAB = nbformat.read(ROOT / "labs" / "lab1_ddp" / "lab1_ddp.ipynb", as_version=4)


# --- outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one picture", "many lines"])
def test_outputs_cost_nothing_whatever_their_size(tmp_path: Path, kind: str):
    """They are thrown away anyway: 31 MiB of them were a zero for right work."""
    path = _lab(tmp_path / "lab1_ddp.ipynb", text='"outputs": [ is text here')
    plain = read_submission(path, MASTER_OF_LAB)
    notebook = json.loads(path.read_text())
    big = {
        "output_type": "display_data",
        "metadata": {},
        "data": {"image/png": "iVBOR" * 7_000_000},
    }
    lines = {"output_type": "stream", "name": "stdout", "text": ['"]}[{ \\ \n'] * 400_000}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [big if kind == "one picture" else lines]
            break
    path.write_text(json.dumps(notebook))
    assert path.stat().st_size > 6 << 20
    read = read_submission(path, MASTER_OF_LAB, IntakeLimits(max_bytes=2 << 20))
    assert read.invalid is None
    assert read.notebook == plain.notebook
    assert read.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@example([{"outputs": [None]}], 1)  # in a list of the notebook that is not its cells
@given(
    st.recursive(
        st.none() | st.integers() | st.text(st.sampled_from('"\\[]{}:, outputs'), max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["outputs", "source", '"', "\\"]), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    st.integers(1, 40),
)
def test_only_the_outputs_of_cells_are_dropped_wherever_a_piece_ends(value, size):
    cell = {"source": value, "outputs": [value], "metadata": value}
    notebook = {"cells": [cell, {"data": value}], "metadata": value}
    raw = json.dumps(notebook).encode()
    stripper = Stripper(1 << 20, 1 << 20)
    for at in range(0, len(raw), size):
        stripper.feed(raw[at : at + size])
    cell["outputs"] = []
    assert json.loads(stripper.kept) == notebook


def test_outputs_that_never_end_take_bounded_time():
    stripper = Stripper(1 << 20, 1000)
    stripper.feed(b'{"cells": [{"outputs": [')
    with pytest.raises(TooBigError, match="too many parts"):
        stripper.feed(b"[" * 2000)


def test_thousands_of_empty_cells_are_left_out(tmp_path: Path):
    """Each took a message to every rank: 9,000 of them took two minutes."""
    path = _lab(tmp_path / "lab1_ddp.ipynb")
    plain = read_submission(path, MASTER_OF_LAB).notebook
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[5:5] = [v4.new_code_cell(" \n", id=f"e{i}") for i in range(3000)]
    nbformat.write(notebook, path)
    read = read_submission(path, MASTER_OF_LAB)
    assert read.notebook is not None
    assert plain is not None
    assert [c.source for c in read.notebook.cells] == [c.source for c in plain.cells]
    assert "3000 empty cells were left out" in read.notes
    notebook.cells = notebook.cells[:5] + notebook.cells[3000 - 20 + 5 :]
    nbformat.write(notebook, path)
    few = read_submission(path, MASTER_OF_LAB).notebook
    assert few is not None
    assert len(few.cells) == len(plain.cells) + 20


def test_doubled_cell_ids_bury_no_result(tmp_path: Path, capfd, recwarn):
    from autograder.gradebook.fill import _is_readable

    path = _lab(tmp_path / "lab1_ddp.ipynb")
    notebook = json.loads(path.read_text())
    notebook["cells"] += [
        {"cell_type": "markdown", "id": "same", "metadata": {}, "source": ""} for _ in range(300)
    ]
    path.write_text(json.dumps(notebook))
    _is_readable(path)
    said = capfd.readouterr()
    assert not said.out + said.err
    assert not list(recwarn)
