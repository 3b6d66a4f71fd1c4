"""The build tool: what it makes of a source, that it is stable, and that it never loses an edit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from autograder.authoring import notebooks, percent, sync
from autograder.authoring.__main__ import main
from autograder.proof import zoo

ROOT = Path(__file__).resolve().parents[2]

LAB = '''\
# %% [markdown]
# # A small lab

# %% given="imports"
import os

# %% tags=["script-only"]
print("only under torchrun")

# %% solution="double_it"
def double_it(x):
    """Twice x."""
    ### BEGIN SOLUTION
    return 2 * x  # SECRET
    ### END SOLUTION


# %% check="doubles"
check("doubles", double_it)

# %% solution="script"
# %%rank 0
# %%writefile hello.py
# # says hello
#
# def hello():
#     ### BEGIN SOLUTION
#     print("SECRET")
#     ### END SOLUTION

# %% check="greets"
check("greets", "hello.py")

# %% demo="look"
# %%rank 0
if os.environ.get("RANK"):
    # !ls hello.py

# %% [markdown] reflect="reflect_1"
# **Why twice?**
#
# <!-- BEGIN SOLUTION -->
# SECRET
# <!-- END SOLUTION -->

# %%
# a comment, and then:
# %matplotlib inline
'''

ZOO = '''\
"""Triples.

loses: doubles
status: doubles WRONG
"""

# %% replaces="double_it"
def double_it(x):
    return 3 * x
'''


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A checkout with one lab of two criteria and three submissions."""
    lab = SimpleNamespace(
        name="lab9_small",
        practice_world_size=2,
        gates=(SimpleNamespace(idea="doubling"),),
        criteria=(
            SimpleNamespace(name="doubles", listed_points=2.0),
            SimpleNamespace(name="greets", listed_points=0.5),
        ),
    )
    monkeypatch.setattr(notebooks, "get_lab", lambda name: lab)
    monkeypatch.setattr(zoo, "get_lab", lambda name: lab)
    files = {
        "notebooks/01_hello.py": "# %% [markdown]\n# # Hello\n\n# %%\nprint(1)\n",
        "solutions/lab9_small/lab9_small.py": LAB,
        "tests/zoo/lab9_small/triples.py": ZOO,
        "tests/zoo/lab9_small/reference.py": '"""Right.\n\nloses: nothing\n"""\n',
        "tests/zoo/lab9_small/starter.py": '"""Raw.\n\nbase: starter\nloses: everything\n"""\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def read(path: Path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    return notebook, {cell.id: cell for cell in notebook.cells}


def save(notebook, path: Path) -> None:
    nbformat.write(notebook, path, version=nbformat.NO_CONVERT)


def lab_paths(course: Path) -> tuple[Path, Path, Path]:
    folder = course / "solutions" / "lab9_small"
    return (
        folder / "lab9_small.py",
        folder / "lab9_small.ipynb",
        course / "labs/lab9_small/lab9_small.ipynb",
    )


def test_options_become_nbgrader_metadata(course):
    notebook = notebooks.build_notebook(lab_paths(course)[0])
    cells = {cell.id: cell for cell in notebook.cells}
    assert [cell.id for cell in notebook.cells] == [
        "lab9_small-001",
        "imports",
        "double_it",
        "doubles",
        "script",
        "greets",
        "look",
        "reflect_1",
        "lab9_small-009",
    ]
    assert cells["doubles"].metadata.nbgrader == {
        "grade": True,
        "grade_id": "doubles",
        "locked": True,
        "points": 2,
        "schema_version": 3,
        "solution": False,
        "task": False,
    }
    assert cells["greets"].metadata.nbgrader["points"] == 0.5
    assert cells["imports"].metadata.nbgrader["locked"] is True
    assert cells["double_it"].metadata.nbgrader["solution"] is True
    assert cells["double_it"].metadata.nbgrader["locked"] is False
    assert cells["look"].metadata.minidist == {"replay": False}
    assert "nbgrader" not in cells["lab9_small-009"].metadata
    assert notebook.metadata.kernelspec.name == "torchrun-2"
    assert notebook.metadata.kernelspec.display_name == "torchrun × 2"
    assert "version" not in notebook.metadata.language_info


def test_magics_are_live_in_the_notebook(course):
    cells = {cell.id: cell for cell in notebooks.build_notebook(lab_paths(course)[0]).cells}
    script = cells["script"].source.split("\n")
    assert script[:5] == ["%%rank 0", "%%writefile hello.py", "# says hello", "", "def hello():"]
    assert cells["look"].source == '%%rank 0\nif os.environ.get("RANK"):\n    !ls hello.py'
    assert cells["lab9_small-009"].source == "# a comment, and then:\n%matplotlib inline"


@pytest.mark.parametrize(
    "source",
    [
        "%%rank 0\nx = 1",
        "%%rank 0\n# only a comment",
        "%%rank 0\n\n# twice\n# !important",
        "%%rank 0,1\n%%time\n%matplotlib inline\nx = 1\n!ls \\\n    -l\ny = 2",
        "%%rank 0\n%%writefile f.py\n# %% a cell marker\n\n    # indented\n%not a magic\n",
        "%%writefile f.py\nx = '''\n# !ls\n'''\n",
        "%%writefile f.sh\n#!/bin/bash\nls",
        "%%bash\n# ls\nls\n",
        "# !important\n# # %really\n# copy the weights\nls = 1",
        "text = '''\n%%rank 0\n# !ls\n'''\n!ls",
        "if True:\n    !nvidia-smi\n    x = !ls",
        "",
    ],
)
@pytest.mark.parametrize("marker", ["# %%", '# %% tags=["active-ipynb"]'])
@pytest.mark.parametrize("commented", [False, True])
def test_round_trip_of_a_cell_with_magics(source, marker, commented):
    if "active" in marker:
        text = "\n".join(f"# {line}" if line else "#" for line in source.split("\n"))
    else:
        text = percent.source_to_script(source, commented=commented)
    script = f"{marker}\n{text}\n\n# %% [markdown]\n# end\n"
    cells, _ = percent.read_cells(script, where="here")
    assert [cell.source for cell in cells] == [source, "end"]
    live = [line for line in text.split("\n") if line.lstrip().startswith(("%", "!"))]
    assert live == [] or "'''" in source, "a magic that is not commented is not Python"


def test_live_line_under_writefile_is_refused():
    with pytest.raises(notebooks.BuildError, match=r"here: cell 1: .*writefile.*'x = 1'"):
        percent.read_cells("# %%\n# %%writefile f.py\nx = 1\n", where="here")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('check="greets"', 'check="sings"', "no criterion 'sings'"),
        ('# %% check="greets"\ncheck("greets", "hello.py")\n', "", "have no check cell.*greets"),
        ('given="imports"', 'given="double_it"', "used twice: double_it"),
        ('given="imports"', 'given="a" check="doubles"', "at most one of"),
        ('given="imports"', 'givn="imports"', "at most one of"),
        ('given="imports"', 'given="im ports"', "letters, digits"),
        ('# %% solution="double_it"', "# %%", "no solution="),
        ("# %% [markdown]\n", '# %% [markdown] check="doubles"\n', "must be a code cell"),
        ('[markdown] reflect="reflect_1"', 'reflect="reflect_1"', "must be a markdown cell"),
        (' reflect="reflect_1"', "", 'no solution="name" or reflect='),
        ("<!-- BEGIN SOLUTION -->", "<!-- END SOLUTION -->", "no model answer"),
    ],
)
def test_mistakes_in_a_source_are_named(course, old, new, message):
    py = lab_paths(course)[0]
    assert old in LAB
    with pytest.raises(notebooks.BuildError, match=message) as caught:
        notebooks.build_notebook(py, text=LAB.replace(old, new))
    assert str(py) in str(caught.value)


def test_build_is_complete_stable_and_leaks_nothing(course, capsys):
    py, solution, lab = lab_paths(course)
    assert main(["--check", "--root", str(course)]) == 1
    out = capsys.readouterr().out
    assert "01_hello.ipynb" in out
    assert str(solution) in out
    assert str(lab) in out
    assert not solution.exists()
    assert main(["--root", str(course)]) == 0
    first = {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    assert sorted(first) == sorted([course / "notebooks/01_hello.ipynb", lab, solution])
    assert main(["--check", "--root", str(course)]) == 0
    for path in first:
        path.unlink()
    assert main(["--root", str(course)]) == 0
    assert {path: path.read_bytes() for path in course.rglob("*.ipynb")} == first
    assert [path.name for path in lab.parent.iterdir()] == [lab.name], (
        "only the notebook is released"
    )
    assert b"SECRET" in first[solution]
    assert b"SECRET" not in first[lab]
    _, cells = read(lab)
    assert cells["reflect_1"].source == "**Why twice?**\n\nYOUR ANSWER HERE"
    assert cells["reflect_1"].metadata.nbgrader.points == notebooks.REFLECT_POINTS
    assert cells["script"].source.endswith(
        "def hello():\n    # YOUR CODE HERE\n    raise NotImplementedError()"
    )
    assert cells["doubles"].metadata.editable is False
    assert read(solution)[0].metadata.minidist.built == read(lab)[0].metadata.minidist.built
    py.write_text(LAB.replace("Twice x", "Two x"))
    assert main(["--check", "--root", str(course)]) == 1
    assert main(["--root", str(course)]) == 0
    assert "Two x" in read(lab)[1]["double_it"].source


def test_running_a_built_notebook_is_no_edit(course):
    notebooks.build_course(course)
    _, solution, _ = lab_paths(course)
    before = solution.read_bytes()
    notebook, cells = read(solution)
    cells["imports"].outputs = [nbformat.v4.new_output("stream", text="hello")]
    cells["imports"].execution_count = 3
    save(notebook, solution)
    stale, complaints = notebooks.build_course(course)
    assert (stale, complaints) == ([solution], [])
    assert solution.read_bytes() == before


def test_an_edited_notebook_is_kept_and_synced_back(course, capsys):
    notebooks.build_course(course)
    py, solution, lab = lab_paths(course)
    notebook, cells = read(solution)
    cells["double_it"].source = cells["double_it"].source.replace("2 * x", "x + x")
    cells["script"].source = cells["script"].source.replace("# says hello", "# says hi\n!ls")
    cells["look"].source += "\nprint(2)"
    cells["lab9_small-001"].source += "\n\nMore text"
    cells["greets"].metadata.nbgrader["grade_id"] = "greets"
    notebook.cells.insert(2, nbformat.v4.new_code_cell("x = 1\n!ls"))
    save(notebook, solution)
    edited = solution.read_bytes()

    assert main(["--root", str(course)]) == 1
    error = capsys.readouterr().err
    assert "--sync" in error
    assert "cell double_it: changed" in error
    assert "+    return x + x  # SECRET" in error
    assert "added" in error
    assert solution.read_bytes() == edited, "an edit must never be overwritten"

    assert main(["--sync", "--root", str(course)]) == 0
    text = py.read_text()
    assert "    return x + x  # SECRET\n" in text
    assert "# # says hi\n# !ls\n" in text
    assert "# More text\n\n# %% given" in text
    assert '# %%\nx = 1\n# !ls\n\n# %% solution="double_it"' in text
    assert 'print("only under torchrun")' in text
    markers = [line for line in text.splitlines() if line.startswith("# %% ")]
    assert markers == [line for line in LAB.splitlines() if line.startswith("# %% ")]
    assert main(["--check", "--root", str(course)]) == 0
    assert "x = 1" in "".join(cell.source for cell in read(lab)[0].cells)


def test_sync_follows_moved_and_deleted_cells(course):
    notebooks.build_course(course)
    py, solution, _ = lab_paths(course)
    notebook, _ = read(solution)
    del notebook.cells[1]
    notebook.cells.insert(0, notebook.cells.pop())
    save(notebook, solution)
    assert sync.sync(py)
    text = py.read_text()
    assert text.startswith("# %%\n# a comment, and then:\n# %matplotlib inline\n\n# %% [markdown]")
    assert "imports" not in text
    assert "only under torchrun" in text
    assert not sync.sync(py)
    assert notebooks.build_course(course)[1] == []


def test_sync_keeps_tags_line_ends_and_the_mode(course):
    py, solution, _ = lab_paths(course)
    py.write_bytes(LAB.replace("\n", "\r\n").encode())
    py.chmod(0o640)
    notebooks.build_course(course)
    notebook, cells = read(solution)
    cells["imports"].source = "import sys"
    notebook.cells.insert(0, nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]}))
    save(notebook, solution)
    assert sync.sync(py)
    assert py.stat().st_mode & 0o777 == 0o640
    data = py.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n")
    assert b'# %% tags=["parameters"]\r\nx = 1\r\n' in data
    assert notebooks.build_course(course)[1] == []
    assert read(solution)[0].cells[0].metadata.tags == ["parameters"]


DRAWS = "figure, ax = new_figure()\nax.plot([1])\nax.set(title='one')\nfigure\n"


@pytest.mark.parametrize(
    ("head", "body", "folded"),
    [
        ("# %%", DRAWS, True),
        ("# %%", "# %%rank 0\n# %matplotlib inline\n" + DRAWS, True),
        ('# %% demo="see_it"', DRAWS, True),
        ('# %% tags=["open"]', DRAWS, False),
        ('# %% solution="draws"', DRAWS, False),
        ("# %%", "figure, ax = new_figure()\nfigure\n", False),  # short
        ("# %%", "y = torch.ones(3)\n" + DRAWS, False),
        (
            "# %%",
            "# %%writefile figure.py\n" + "\n".join(f"# {line}" for line in DRAWS.split()),
            False,
        ),
        ("# %%", "def step(x):\n    y = x\n    z = y\n    return z\n" + DRAWS[:30], False),
    ],
)
def test_cells_that_only_draw_are_folded_and_no_source_says_so(course, head, body, folded):
    py, solution, _ = lab_paths(course)
    py.write_text(f"{head}\n{body}\n{LAB}")
    notebooks.build_course(course)
    notebook, _ = read(solution)
    cell = notebook.cells[0]
    assert cell.metadata.get("jupyter", {}).get("source_hidden", False) == folded
    assert ("hide-input" in cell.metadata.get("tags", [])) == folded
    cell.source += "\n# edited"
    save(notebook, solution)
    assert sync.sync(py)
    assert py.read_text().startswith(f"{head}\n")


def test_a_source_is_never_left_half_written(course, monkeypatch):
    notebooks.build_course(course)
    py, solution, _ = lab_paths(course)
    notebook, cells = read(solution)
    cells["imports"].source = "import sys  # \ud83d"
    solution.write_text(json.dumps(notebook))
    with pytest.raises(notebooks.BuildError, match=r"'\\ud83d', which no file can"):
        sync.sync(py)
    assert py.read_text() == LAB


def test_edits_on_both_sides_are_refused(course):
    notebooks.build_course(course)
    py, solution, _ = lab_paths(course)
    notebook, cells = read(solution)
    cells["imports"].source = "import sys"
    save(notebook, solution)
    py.write_text(LAB.replace("Twice x", "Two x"))
    with pytest.raises(notebooks.BuildError, match="both edited"):
        sync.sync(py)
    assert "Two x" in py.read_text()


def test_points_changed_in_a_notebook_cannot_be_synced(course):
    notebooks.build_course(course)
    py, solution, _ = lab_paths(course)
    notebook, cells = read(solution)
    cells["doubles"].metadata.nbgrader["points"] = 7
    save(notebook, solution)
    with pytest.raises(notebooks.BuildError, match="autograder/criteria"):
        sync.sync(py)
    assert py.read_text() == LAB


def test_an_edited_release_is_kept(course):
    notebooks.build_course(course)
    py, _, lab = lab_paths(course)
    notebook, cells = read(lab)
    cells["imports"].source = "import sys"
    save(notebook, lab)
    stale, complaints = notebooks.build_course(course)
    assert stale == [lab]
    assert "import sys" in complaints[0]
    assert read(lab)[1]["imports"].source == "import sys"
    lab.unlink()
    assert notebooks.build_course(course) == ([lab], [])
    # A release that is merely old is rebuilt.
    py.write_text(LAB.replace("Twice x", "Two x"))
    assert notebooks.build_course(course)[1] == []


def test_zoo_entries_are_the_reference_with_cells_replaced(course):
    entries = {entry.name: entry for entry in zoo.load_zoo("lab9_small", root=course)}
    assert list(entries) == ["reference", "starter", "triples"]
    sources = {
        name: {cell.id: cell.source for cell in entry.notebook.cells}
        for name, entry in entries.items()
    }
    assert sources["triples"]["double_it"] == "def double_it(x):\n    return 3 * x"
    assert sources["triples"]["script"] == sources["reference"]["script"]
    assert "SECRET" in sources["reference"]["double_it"]
    assert "SOLUTION" not in sources["reference"]["double_it"] + sources["reference"]["script"]
    assert "YOUR CODE HERE" in sources["starter"]["double_it"]
    assert entries["triples"].loses == {"doubles"}
    assert entries["triples"].statuses == {"doubles": "WRONG"}
    assert entries["starter"].loses == "everything"
    assert entries["reference"].loses == frozenset()
    points = {"doubles": 2.0, "greets": 0.5}
    assert [entry.expected_score(points) for entry in entries.values()] == [2.5, 0.0, 0.5]


DIFF = '''\
Triples.

loses: doubles

@@ double_it
 def double_it(x):
-    """Twice x."""
-    return 2 * x  # SECRET
+    return 3 * x
'''


def diff_of(course, text):
    (course / "tests/zoo/lab9_small/triples.py").unlink(missing_ok=True)
    (course / "tests/zoo/lab9_small/triples.diff").write_text(text)
    return zoo.load_zoo("lab9_small", "trip*", root=course)


def test_a_diff_makes_the_same_submission_as_a_whole_cell(course):
    (whole,) = zoo.load_zoo("lab9_small", "triples", root=course)
    (diff,) = diff_of(course, DIFF)
    assert diff.replaced == whole.replaced
    assert (diff.name, diff.docstring) == ("triples", "Triples.\n\nloses: doubles")
    assert diff.notebook == whole.notebook


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return 2 * x", "return 4 * x", "one place with these lines, found 0:\ndef double_it"),
        ("@@ double_it\n", "@@ double_it\n+import os\n\n@@ double_it\n", "found 4:"),
        ("@@ double_it", "@@ tripel", "no such solution cell"),
        ("-    ", "     ", "a part of double_it changes nothing"),
        ("-    return", "return", r"expected ' ', '-' or '\+' before 'return 2"),
    ],
)
def test_mistakes_in_a_diff_are_named(course, old, new, message):
    text = DIFF.replace(old, new)
    if "nothing" in message:
        text = text.replace("+    return 3 * x\n", "")
    with pytest.raises(notebooks.BuildError, match=message):
        diff_of(course, text)


def test_a_submission_has_one_file(course):
    (course / "tests/zoo/lab9_small/triples.diff").write_text(DIFF)
    with pytest.raises(notebooks.BuildError, match=r"both triples\.py and triples\.diff"):
        zoo.load_zoo("lab9_small", root=course)


@pytest.mark.parametrize("layout", ["nbgrader", "flat"])
def test_write_class(course, tmp_path, layout):
    dest = tmp_path / "class"
    paths = zoo.write_class("lab9_small", dest, layout, root=course)
    middle = "lab9_small/" if layout == "nbgrader" else ""
    assert [str(path.relative_to(dest)) for path in paths] == [
        f"{name}/{middle}lab9_small.ipynb" for name in ("reference", "starter", "triples")
    ]
    _, cells = read(paths[2])
    assert cells["double_it"].metadata.nbgrader["checksum"], "a submission starts from the release"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('replaces="double_it"', 'replaces="tripel"', r"triples\.py: changes 'tripel'"),
        ('replaces="double_it"', 'replaces="doubles"', "no such solution cell"),
        ("loses: doubles", "loses: sings", "no such criteria: .'sings'"),
        ("loses: doubles", "is wrong", "needs a line"),
        ("status: doubles", "status: greets", "not in loses"),
        (
            "loses: doubles",
            "loses: doubles\nmisses: greeting",
            "gates of lab9_small are .'doubling'",
        ),
        (' replaces="double_it"', "", "cell 2 has no replaces"),
    ],
)
def test_mistakes_in_a_zoo_file_are_named(course, old, new, message):
    assert old in ZOO
    (course / "tests/zoo/lab9_small/triples.py").write_text(ZOO.replace(old, new))
    with pytest.raises(notebooks.BuildError, match=message):
        zoo.load_zoo("lab9_small", root=course)


@pytest.mark.slow
def test_stock_nbgrader_releases_the_same_notebook_and_nothing_else(tmp_path):
    """With the course's nbgrader_config.py, from its root, with no activated environment."""
    shutil.copy(ROOT / "nbgrader_config.py", tmp_path)
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    (tmp_path / "solutions" / "lab1_ddp" / "answers.py").write_text("ANSWER = 42\n")
    nbgrader = Path(sys.executable).parent / "nbgrader"
    done = subprocess.run(
        [nbgrader, "generate_assignment", "lab1_ddp"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    released = [path for path in (tmp_path / "labs").rglob("*") if path.is_file()]
    assert released == [tmp_path / "labs/lab1_ddp/lab1_ddp.ipynb"]
    assert released[0].read_bytes() == (ROOT / "labs/lab1_ddp/lab1_ddp.ipynb").read_bytes()
    assert (tmp_path / "build" / "nbgrader" / "gradebook.db").exists()


TEXTS = [*(ROOT / "notebooks").glob("[0-9]*.ipynb"), *(ROOT / "solutions").glob("*/*.ipynb")]
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_every_paper_that_a_text_names_is_a_link(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            plain = re.sub(r"\[[^\]]*\]\([^)]*\)", "", cell.source)
            assert not PAPER.findall(plain), cell.source[:100]
