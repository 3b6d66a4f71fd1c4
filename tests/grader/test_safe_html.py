"""What pages show of a submission: bounded, so that one cannot hold up a class."""

from __future__ import annotations

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from autograder.report.safe_html import (
    MAX_CELL_CHARS,
    MAX_CODE_CHARS,
    MAX_DEPTH,
    MAX_HTML_CHARS,
    MAX_RICH_CHARS,
    clean,
    shorten,
)


@pytest.mark.parametrize(
    "page",
    [
        "<div>" * (MAX_DEPTH + 1),
        "<p>" + "<b class=i>" * 120 + "<p>x" * 120,
        "<p><b class=i></p></x>" * 200,  # closes what was never opened
        "<B>" * 200,
        "x" * (MAX_HTML_CHARS + 1),
    ],
)
def test_what_is_too_deep_or_too_long_is_shown_as_text(page):
    shown = clean(page)
    assert "<" not in shown
    assert len(shown) < 5 * MAX_CELL_CHARS


def test_an_honest_page_stays():
    table = "<table>" + "<tr><td>1</td><td><img><br></td></tr>" * 500 + "</table>"
    assert clean(table).count("<tr>") == 500


def test_a_page_has_as_much_of_a_notebook_as_it_can_show():
    honest = new_code_cell("x = 1", outputs=[new_output("display_data", {"text/html": "<b>x</b>"})])
    rich = [new_output("display_data", {"text/html": "x" * 900_000}) for _ in range(10)]
    large = [new_code_cell("1," * 400_000), new_markdown_cell("# x" * 50_000)]
    many = [new_code_cell("y" * MAX_CELL_CHARS) for _ in range(100)]
    notebook = new_notebook(cells=[honest, new_code_cell("x", outputs=rich), *large, *many])
    shorten(notebook)
    assert honest.source == "x = 1"
    assert honest.outputs[0].data == {"text/html": "<b>x</b>"}
    shown = sum(len(output.data.get("text/html", "")) for output in rich)
    assert 0 < shown <= MAX_RICH_CHARS
    assert "left out" in rich[-1].data["text/plain"]
    assert all("left out" in cell.source for cell in large)
    whole = sum(len(cell.source) for cell in notebook.cells)
    assert whole < MAX_CODE_CHARS + 100 * len(notebook.cells)
