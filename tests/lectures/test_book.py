"""The static site: every page of the course can be written, and nothing in it leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import render
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPj/HwADAgH/"
FOLDED = "<details>\n\n*why*\n\n</details>"


def notebook(*cells, path):
    path.write_text(nbformat.writes(new_notebook(cells=list(cells))), encoding="utf-8")
    return path


def texts(folder, index):
    folder.mkdir()
    for name in ("page.html", "style.css"):
        (folder / name).write_text((ROOT / "book" / name).read_text("utf-8"), "utf-8")
    (folder / "index.md").write_text(index, "utf-8")
    (folder / "teaching.md").write_text("# Teaching\n", "utf-8")
    return folder


@pytest.mark.slow
def test_the_whole_course_can_be_written(tmp_path):
    lectures = {p.stem: p for p in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
    labs = {p.stem: p for p in sorted((ROOT / "labs").glob("*/*.ipynb"))}
    pages = render.write_book(tmp_path / "site", ROOT / "book", lectures, labs)
    assert len(pages) == len(lectures) + len(labs) + 2
    for page in pages:
        text = page.read_text("utf-8")
        assert "<script" not in text
        assert re.search("<h1", text)
    lab = (tmp_path / "site" / "lab1_ddp.html").read_text("utf-8")
    assert "aria-current" in lab
    assert "<math" in lab


def test_every_lecture_and_lab_is_on_the_course_map():
    readme = (ROOT / "README.md").read_text("utf-8")
    for path in (*(ROOT / "notebooks").glob("[0-9]*.ipynb"), *(ROOT / "labs").glob("*/*.ipynb")):
        assert f"({path.relative_to(ROOT)})" in readme


def test_figures_claims_and_widgets_are_in_the_page(tmp_path):
    widget = {"image/png": PNG, render.WIDGET: {"model_id": "7"}, "text/plain": "Explorer"}
    html = {"text/html": "<div>✓ twice two: 4</div>", "text/plain": "✓"}
    path = notebook(
        new_markdown_cell(f"# A lecture\n\n## A part\n\n$$\\frac{{a}}{{b}}$$\n\n{FOLDED}"),
        new_code_cell("quick = True", metadata={"tags": ["parameters"]}),
        new_code_cell("%%rank 0\nimport math", outputs=[]),
        new_code_cell("explore()", outputs=[new_output("display_data", widget)]),
        new_code_cell("claim()", outputs=[new_output("display_data", html)]),
        path=tmp_path / "01_x.ipynb",
    )
    folder = texts(tmp_path / "texts", "# Start\n\n[there](../notebooks/01_x.ipynb#a-part)\n")
    render.write_book(tmp_path / "site", folder, {"01_x": path}, {})
    page = (tmp_path / "site" / "01_x.html").read_text("utf-8")
    assert f"data:image/png;base64,{PNG}" in page.replace("\n", "")
    assert "✓ twice two: 4" in page
    assert "<mfrac>" in page
    assert "<em>why</em>" in page
    assert "quick = True" not in re.sub("<[^>]*>", "", page)
    assert "model_id" not in page
    assert 'alt="Explorer"' in page
    assert re.search('<p class="controls">Explorer', page), "nothing says where the controls stand"
    assert re.search(r'%%rank 0</span>\s*<span class="k[nw]?">import</span>', page), "no colours"
    assert 'href="01_x.html#a-part"' in (tmp_path / "site" / "index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x](02_y.ipynb)", "index.html: 02_y.html"),
        ("[x](#nothing)", "no such heading"),
        ('<img src="https://example.org/a.png">', "loads https://example.org/a.png from elsewhere"),
        ("$\\nonsense{a}$", "cannot be read: \\nonsense"),
    ],
)
def test_what_leads_nowhere_is_named(tmp_path, text, message):
    folder = texts(tmp_path / "texts", f"# Start\n\n{text}\n")
    with pytest.raises(render.BookError, match=re.escape(message)):
        render.write_book(tmp_path / "site", folder, {}, {})
