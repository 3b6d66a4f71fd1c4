"""A student's first hour in a browser: the front page, a lecture, a task, a hang, one's points."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from jupyter_server_helper import jupyter_lab
from lab_browser import Notebook, picture

from autograder.authoring.desk import FRONT_PAGE, set_out
from autograder.proof.zoo import load_zoo

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "autograder" / "authoring" / "jupyter"
HANG = """\
if rank == 1:
    pass  # forgets to take part
else:
    dist.all_reduce(torch.ones(3))
dist.barrier()
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """What `make lab` sets out."""
    root = tmp_path / "course"
    for name in ("labs", "notebooks"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    list(set_out(root))
    return root


@pytest.mark.slow
def test_a_student_s_first_hour(course: Path, tmp_path: Path, browser: Any):
    with jupyter_lab(course / "work", tmp_path, JUPYTER_CONFIG_PATH=str(SETTINGS)) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(400_000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)

        # The front page says where to begin.
        page.click(".jp-MarkdownViewer a:has-text('Start here')")
        page.wait_for_selector(".jp-Notebook h1")
        lecture = Notebook(page)
        lecture.wait()
        cells = page.evaluate(
            "window.jupyterapp.shell.currentWidget.content.widgets"
            ".filter(w => w.model.type === 'code').map(w => w.model.sharedModel.id)"
        )
        shown = [lecture.run(cell) for cell in cells[:2]]
        assert any("rank 1" in text for text in shown), shown

        # A lab, with nothing done yet: its check says so, and is no failure.
        page.goto(f"{address}/lab/tree/labs/lab1_ddp/lab1_ddp.ipynb?reset")
        page.wait_for_selector(".jp-Notebook h1:has-text('Lab 1')")
        lab = Notebook(page)
        lab.wait()
        for cell in ("imports", "helpers", "task1_setup"):
            assert "Error" not in lab.run(cell)
        assert "not started" in lab.run("setup")

        # The task is done, and the check gives its points.
        [reference] = load_zoo("lab1_ddp", "reference")
        solved = {cell.id: cell.source for cell in reference.notebook.cells}
        for cell in ("task1_setup", "task2_wrap"):
            lab.write(cell, solved[cell])
            lab.run(cell)
        assert "I am rank 1 of 2" in lab.run("see_setup")
        lab.run("see_wrap")
        assert "✓ setup  5/5" in lab.run("setup")
        assert "✓ wrap_model" in lab.run("wrap_model")

        # One rank forgets a collective: who waits is told, and where.
        lab.write("see_wrap", HANG)
        lab.begin("see_wrap")
        page.wait_for_function(
            "() => /rank 1.*waits in barrier/"
            ".test(document.querySelector('.jp-Notebook').innerText)"
        )
        told = lab.text("see_wrap")
        assert re.search(r"rank 0.*waits in all_reduce", told), told
        assert re.search(r"rank 1.*waits in barrier", told), told
        lab.show("see_wrap")
        picture(page, "hang")
        lab.command("apputils:change-theme", theme="JupyterLab Dark")
        # The command ends before the theme is there.
        page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
        lab.show("see_wrap")
        picture(page, "hang_dark")
        in_dark = page.evaluate(
            "getComputedStyle(document.querySelector('.jp-OutputArea-output')"
            ".appendChild(document.createElement('img'))).filter"
        )
        assert "invert" in in_dark, in_dark  # a figure's white ground would shine
        lab.command("notebook:interrupt-kernel")
        page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
            " === 'idle'"
        )

        # Validate runs the saved notebook, and tells the points.
        lab.write("see_wrap", solved["see_wrap"])
        lab.command("docmanager:save")
        page.click("button:has-text('Validate'), jp-button:has-text('Validate')")
        said = page.inner_text(".jp-Dialog:has-text('Validation Results')")
        assert re.search(r"So far \d+ of 100 points; checks that fail: \d+ of 18", said), said
        page.keyboard.press("Escape")

        # The lab's points are on the front page.
        list(set_out(course))
        front = (course / "work" / FRONT_PAGE).read_text("utf-8")
        assert re.search(r"lab1_ddp.ipynb\): \*\*\d+ of 100 points\*\*", front), front
        assert errors == []
