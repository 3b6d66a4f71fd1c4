"""`make lab`: own copies in order, a front page, and nothing that only instructors use."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from jupyter_server_helper import jupyter_lab
from nbformat.v4 import new_output

from autograder.authoring.desk import FRONT_PAGE, front_page, set_out

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "autograder" / "authoring" / "jupyter"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    root = tmp_path / "labs" / "course"  # a folder above may be called so, too
    for name in ("labs/lab1_ddp", "labs/bonus_zero"):
        shutil.copytree(ROOT / name, root / name)
    (root / "notebooks").mkdir()
    for name in ("00_start_here", "03_data_parallelism"):
        shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", root / "notebooks")
    shutil.copy(ROOT / "nbgrader_config.py", root)
    return root


def test_copies_keep_what_a_student_wrote(course):
    assert len(list(set_out(course))) == 4
    mine = course / "work" / "labs" / "lab1_ddp" / "lab1_ddp.ipynb"
    mine.write_text("mine")
    said = list(set_out(course))
    assert said == [
        "kept  work/labs/lab1_ddp/lab1_ddp.ipynb "
        "(delete it to get labs/lab1_ddp/lab1_ddp.ipynb afresh)"
    ]
    assert mine.read_text() == "mine"
    assert (course / "work" / "nbgrader_config.py").samefile(course / "nbgrader_config.py")


def test_the_front_page_tells_ones_points_and_a_run_notebook_has_not_changed(course):
    list(set_out(course))
    page = course / "work" / FRONT_PAGE
    assert "points" not in page.read_text("utf-8")
    mine = course / "work" / "labs" / "lab1_ddp" / "lab1_ddp.ipynb"
    notebook = nbformat.read(mine, as_version=4)
    checks = {
        cell.metadata.nbgrader.grade_id: cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("grade")
    }
    said = {"setup": "✓ setup  5/5  one process group  (5 of 100 points so far)\n"}
    said |= {"wrap_model": "[rank 1] ✓ wrap_model  5/5", "script": "✓ scripts  8/8"}
    for name, text in said.items():
        checks[name].outputs = [new_output("stream", text=text)]
    checks["ddp_scaling"].outputs = [new_output("error", ename="CheckFailed", evalue="no")]
    notebook.metadata["language_info"] = {"name": "python", "version": "3.99"}
    nbformat.write(notebook, mine)
    assert list(set_out(course)) == []
    assert "lab1_ddp.ipynb): **5 of 100 points** when last saved" in page.read_text("utf-8")
    checks["setup"].source += "\n"
    nbformat.write(notebook, mine)
    assert [line.split()[:2] for line in set_out(course)] == [
        ["kept", "work/labs/lab1_ddp/lab1_ddp.ipynb"]
    ]


def test_a_copy_of_an_earlier_course_moves_along(course):
    old = course / "work" / "lab1_ddp" / "lab1_ddp.ipynb"
    old.parent.mkdir(parents=True)
    old.write_text("mine")
    assert "moved work/labs/lab1_ddp/lab1_ddp.ipynb" in list(set_out(course))
    assert (course / "work" / "labs" / "lab1_ddp" / "lab1_ddp.ipynb").read_text() == "mine"


def test_links_of_the_front_page_and_between_notebooks_hold(course):
    list(set_out(course))
    page = (course / "work" / FRONT_PAGE).read_text("utf-8")
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert links == [
        "notebooks/00_start_here.ipynb",
        "notebooks/00_start_here.ipynb",
        "notebooks/03_data_parallelism.ipynb",
        "labs/lab1_ddp/lab1_ddp.ipynb",
        "labs/bonus_zero/bonus_zero.ipynb",
    ]
    assert all((course / "work" / link).is_file() for link in links)
    lecture = course / "work" / "notebooks" / "03_data_parallelism.ipynb"
    [lab] = set(re.findall(r"\]\((\.\./labs/[^)]*)\)", lecture.read_text("utf-8")))
    assert (lecture.parent / lab).is_file()


def test_without_lectures_or_labs_the_page_still_reads(tmp_path):
    assert front_page(tmp_path).startswith("# Training over many GPUs\n")


@pytest.mark.slow
def test_jupyterlab_opens_with_the_course_and_leads_to_a_lab(course, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    list(set_out(course))
    with (
        jupyter_lab(course / "work", tmp_path, JUPYTER_CONFIG_PATH=str(SETTINGS)) as address,
        playwright.sync_playwright() as started,
    ):
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(400_000)
        page.goto(address)
        page.click(".jp-MarkdownViewer a:has-text('Lab 1')")
        page.wait_for_selector(".jp-Notebook h1:has-text('Lab 1')")
        assert page.locator("text=Validate").count()
        for unwanted in ("Formgrader", "Create Assignment", "official Jupyter news"):
            assert page.locator(f"text={unwanted}").count() == 0, unwanted
        browser.close()
