"""An instructor's first class in a browser: graded, looked at, points given by hand, published."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from course import LAB, TestCourse
from jupyter_server_helper import jupyter_lab
from lab_browser import picture

from autograder.proof.zoo import load_zoo, write_class

CLASS = ("reference", "right_own_flattening", "wrong_sum", "wrong_no_set_epoch")
SIZES = {"": (1280, 860), "_phone": (390, 800)}


@pytest.fixture
def graded(tmp_path: Path) -> TestCourse:
    """A class as it was handed in, with one answer that a person has to read."""
    course = TestCourse.make(tmp_path / "course")
    entries = load_zoo(LAB, *CLASS)
    for entry in entries:
        for cell in entry.notebook.cells:
            if cell.id == _reflections(entry.notebook)[0]:
                cell.source += "\n\nAn all-reduce of sums would need the learning rate divided."
    write_class(LAB, course.root / "handed_in", "flat", entries=entries)
    course.grade("handed_in")
    return course


def _reflections(notebook: Any) -> list[str]:
    return [
        cell.id
        for cell in notebook.cells
        if cell.cell_type == "markdown" and cell.metadata.get("nbgrader", {}).get("solution")
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_instructor_s_first_class(graded: TestCourse, tmp_path: Path, browser: Any):
    for theme in ("light", "dark"):
        for size, (width, height) in SIZES.items():
            shown = f"{size}{'_dark' if theme == 'dark' else ''}"
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=theme
            )
            page = context.new_page()
            page.goto((graded.root / "build" / "report.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            picture(page, f"report{shown}")

            # From a student in the report to what that student is told.
            page.click("a:has-text('wrong_sum')")
            page.click("a:has-text('feedback that the student gets') >> visible=true")
            said = page.locator("text=the gradients were summed, not averaged >> visible=true")
            said.first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            picture(page, f"feedback{shown}")
            context.close()

    # What a person has to grade, in formgrader.
    with jupyter_lab(graded.root, tmp_path) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(400_000)
        page.goto(f"{address}/formgrader/gradebook/{LAB}/{LAB}")
        page.click("td a >> nth=0")
        score = page.locator("input#reflect_1")
        score.wait_for()
        # Only then formgrader keeps what is typed.
        page.wait_for_function("formgrader.grades?.loaded && formgrader.comments?.loaded")
        score.fill("2")
        with page.expect_response(lambda r: "/api/grade/" in r.url and r.request.method == "PUT"):
            score.press("Tab")

    graded.run("-m", "autograder", "publish", "--lab", LAB, "--to", "csv")
    [table] = (graded.root / "build" / "publish").glob("*.csv")
    with table.open(newline="", encoding="utf-8") as file:
        published = [float(row["score"]) for row in csv.DictReader(file)]
    checked = [record["score"] for record in json.loads((graded.root / "records.json").read_text())]
    assert sum(published) == pytest.approx(sum(checked) + 2)
