"""A lecture in JupyterLab: its controls are reached with Tab, move by keys, and change the figure,
which no narrow window cuts off.

What runs is the first part of a lecture, up to its first figure with controls, and one with every
kind of control. In JupyterLab keys that a control does not take go to the notebook: they would
choose another cell, or turn this one into text.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_server_helper import jupyter_lab
from nbformat.v4 import new_code_cell

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

LECTURE = Path(__file__).resolve().parents[2] / "notebooks" / "06_mixed_precision.ipynb"
ALL_KINDS = """\
%%rank 0
from minidist.plots import plot_lines


def curve(power: int = 2, name: str = "a", grid: bool = True, n: int = 8):
    return plot_lines([1, n], {name: [1, n**power + grid]}, xlabel="x", ylabel="y")


explore(curve, power=(1, 5), name=["a", "b"], grid=True, n=[4, 8, 16])
"""
# Kind of control -> the key that changes it.
KEYS = {
    "[role=slider]": "ArrowRight",
    "button:not(.mod-active)": "Space",
    "[type=checkbox]": "Space",
}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab with the notebook, without the user's settings."""
    notebook = nbformat.read(LECTURE, as_version=4)
    first = next(i for i, cell in enumerate(notebook.cells) if "\nexplore(" in cell.source)
    notebook.cells = [*notebook.cells[: first + 1], new_code_cell(ALL_KINDS)]
    (tmp_path / "work").mkdir()
    nbformat.write(notebook, tmp_path / "work" / "part.ipynb")
    with jupyter_lab(tmp_path / "work", tmp_path, "--LabApp.news_url=None") as address:
        yield f"{address}/lab/tree/part.ipynb?reset"


@pytest.mark.slow
def test_controls_work_by_keyboard(lab: str):
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 2000})
        page.set_default_timeout(400_000)
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext?.isReady")
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        boxes = page.locator(".jp-OutputArea-output .widget-vbox")
        page.wait_for_function("document.querySelectorAll('.widget-vbox img').length == 2")
        cells = "window.jupyterapp.shell.currentWidget.content.widgets.map(w => w.model.type)"
        before = page.evaluate(cells)

        for box, kinds in ((boxes.nth(0), ["[role=slider]"]), (boxes.nth(1), list(KEYS))):
            picture = box.locator("img")
            assert picture.get_attribute("alt")
            assert picture.evaluate(RIGHT_EDGE) <= box.evaluate(RIGHT_EDGE), "cut off"
            labels = box.locator("label").all_inner_texts()
            assert sum(bool(label.strip("\u200b ")) for label in labels) >= 2
            for kind in kinds:
                control = box.locator(kind).first
                reach_by_tab(page, box, control)
                shown = picture.get_attribute("src")
                page.keyboard.press(KEYS[kind])
                end = time.monotonic() + 20
                while picture.get_attribute("src") == shown:
                    assert time.monotonic() < end, f"{kind}: {KEYS[kind]} changed no figure"
                    page.wait_for_timeout(50)
        assert page.evaluate(cells) == before, "a key went to the notebook"
        browser.close()


RIGHT_EDGE = "element => element.getBoundingClientRect().right"


def reach_by_tab(page, box, control) -> None:
    """Tab from the first control of the figure to this one."""
    box.locator("[tabindex='0'], button, input").first.focus()
    for _ in range(20):
        if control.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError("Tab does not lead to the control")
