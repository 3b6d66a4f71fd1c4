"""The static site: every page can be written, is read without help, and leads nowhere wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from ipython_pygments_lexers import IPython3Lexer
from matplotlib.figure import Figure
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pages import problems_on_a_phone
from pygments.token import Error
from sources import SPHINX, corrections, write_sources

from minidist import claims
from minidist.kernel.highlight import highlight_rank_cells
from minidist.plots import stills
from minidist.widgets import explore

ROOT = Path(__file__).resolve().parents[2]
MAX_PAGE_BYTES = 3_000_000
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPj/HwADAgH/"


def build(root: Path, out: Path, api: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Builds the site of a repository, without running its lectures."""
    write_sources(out.with_name("source"), lambda path: path, api=api, root=root)
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *SPHINX, out.with_name("source"), out],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_small(tmp_path)


@pytest.fixture(scope="module")
def small_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of a small repository."""
    folder = tmp_path_factory.mktemp("small")
    done = build(make_small(folder), folder / "site", api=("cost",))
    assert done.returncode == 0, done.stderr
    return folder / "site"


def explorers(pictures: Path) -> list[NotebookNode]:
    """Outputs of figures with controls, drawn beforehand: few combinations, and many."""

    def bars(power: int = 2, name: str = "a", grid: bool = False) -> Figure:
        """Bars."""
        if power == 5:
            raise ValueError("no power 5")
        figure = Figure(figsize=(2.0, 1.5))
        figure.subplots().barh(["x", name], [1, 2**power + grid])
        return figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIDIST_PICTURES", str(pictures))
        patch.setattr(stills, "MOST_SECONDS", 1e9)
        wide = explore(bars, power=(1, 5), name=["a", "b"], grid=False, labels={"power": "p"})
        many = explore(bars, power=(1, 4), name=[*map(str, range(30)), "a"])
        found = [one._repr_mimebundle_() for one in (wide, many)]
    return [new_output("display_data", data) for data in found]


def make_small(folder: Path) -> Path:
    """A repository with one lecture and one lab."""
    root = folder / "course"
    shutil.copytree(ROOT / "book", root / "book")
    (root / "README.md").write_text(
        "# C\n\n## The course\n\n| Lecture |\n|---|\n| [One](notebooks/01_x.ipynb) |\n\nMore.\n"
    )
    widget = {
        "image/png": PNG,
        "application/vnd.jupyter.widget-view+json": {"model_id": "7"},
        "text/plain": "Explorer",
    }
    cells = [
        new_markdown_cell(f"# A lecture\n\n## A part\n\n$$\\frac{{a}}{{b_0}} {'+ c' * 60}$$\n"),
        new_code_cell("quick = True", metadata={"tags": ["parameters"]}),
        new_code_cell("%%rank 0\nimport math"),
        new_code_cell("explore()", outputs=[new_output("display_data", widget)]),
        *[
            new_code_cell("explore(bars)", outputs=[output])
            for output in explorers(root / "notebooks" / "pictures")
        ],
        new_code_cell(
            "claim()", outputs=[new_output("display_data", {"text/html": "<p>✓ twice two: 4</p>"})]
        ),
        new_markdown_cell("To [the lab](../labs/lab1_x/lab1_x.ipynb)."),
    ]
    shutil.copy(ROOT / "notebooks" / "claims.csv", root / "notebooks")
    about = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    nbformat.write(new_notebook(cells=cells, metadata=about), root / "notebooks" / "01_x.ipynb")
    for name in ("lab1_x", "bonus_x"):
        (root / "labs" / name).mkdir(parents=True)
        lab = new_notebook(cells=[new_markdown_cell("# A lab\n")])
        nbformat.write(lab, root / "labs" / name / f"{name}.ipynb")
    index = root / "book" / "index.md"
    index.write_text(re.sub(r"\[[^\]]*\]\(labs/[^)]*\)", "a bonus", index.read_text("utf-8")))
    return root


def test_figures_claims_and_widgets_are_in_the_page(small_site):
    page = (small_site / "notebooks" / "01_x.html").read_text("utf-8")
    assert 'src="../_images/' in page
    assert "✓ twice two: 4" in page
    assert "<mfrac>" in page
    assert "<msub>" in page
    assert '<span class="kn">import</span>' in page  # below %%rank as well
    assert "quick = True" not in re.sub("<[^>]*>", "", page)
    assert "model_id" not in page
    assert 'href="../labs/lab1_x/lab1_x.html"' in page
    assert 'href="notebooks/01_x.html"' in (small_site / "index.html").read_text("utf-8")
    reference = (small_site / "reference" / "cost.html").read_text("utf-8")
    assert "all_reduce_seconds" in reference
    assert "viewcode-link" in reference


def test_controls_of_a_page_show_other_pictures_by_keyboard_and_mouse(small_site, browser):
    page = browser.new_page()
    page.goto((small_site / "notebooks" / "01_x.html").as_uri())
    explorer = page.locator(".explorer").first
    image, slider = explorer.locator("img"), explorer.get_by_label("p", exact=True)
    seen = [_shown(image)]
    slider.focus()
    page.keyboard.press("ArrowRight")
    seen.append(_shown(image))
    assert slider.get_attribute("aria-valuetext") == "3"
    assert explorer.locator(".explorer-value").inner_text() == "3"
    explorer.get_by_label("name").select_option("b")
    seen.append(_shown(image))
    explorer.get_by_label("grid").check()
    seen.append(_shown(image))
    assert len(set(seen)) == 4
    assert explorer.get_by_role("status").inner_text() == image.get_attribute("alt") != ""
    slider.focus()
    page.keyboard.press("End")
    assert not image.is_visible()
    assert explorer.get_by_text("ValueError: no power 5").is_visible()
    page.keyboard.press("ArrowLeft")
    _shown(image)


@pytest.mark.slow
def test_controls_that_move_one_at_a_time_go_back(small_site, browser):
    page = browser.new_page()
    page.goto((small_site / "notebooks" / "01_x.html").as_uri())
    explorer = page.locator(".explorer").nth(1)
    image, first = explorer.locator("img"), _shown(explorer.locator("img"))
    explorer.get_by_label("power").fill("3")
    moved = _shown(image)
    explorer.get_by_label("name").select_option("7")
    assert explorer.locator(".explorer-value").inner_text() == "2"
    assert len({first, moved, _shown(image)}) == 3
    explorer.get_by_label("name").select_option("a")
    assert _shown(image) == first


def _shown(image) -> str:
    """The address of a picture that is there and visible."""
    image.page.wait_for_function(
        "image => image.complete && image.naturalWidth > 99 && image.checkVisibility()",
        arg=image.element_handle(),
    )
    return image.get_attribute("src")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_controls_and_wide_formulas_read_well_with_a_reader_and_on_a_phone(
    small_site, browser, theme
):
    assert problems_on_a_phone(browser, small_site / "notebooks" / "01_x.html", theme) == []


@pytest.mark.slow
def test_without_javascript_the_first_picture_stays(small_site, browser):
    page = browser.new_page(java_script_enabled=False)
    page.goto((small_site / "notebooks" / "01_x.html").as_uri())
    assert page.locator(".explorer img").first.is_visible()
    assert not page.locator(".explorer input").first.is_visible()


def test_what_is_often_said_and_wrong_has_a_row_with_its_lecture_and_source():
    page = corrections(ROOT / "notebooks")
    rows = [row for row in claims.load(ROOT / "notebooks" / "claims.csv") if row.refutes]
    assert len(rows) > 100
    for row in rows:
        assert f"| {row.text} |" in page
    assert "[Lecture 7](notebooks/07_pipeline_parallelism.ipynb)" in page
    assert "[2104.04473](https://arxiv.org/abs/2104.04473)" in page
    assert "not published trillion" not in page  # a unit goes with a number only


def test_what_leads_nowhere_is_named(small, tmp_path):
    index = small / "book" / "index.md"
    index.write_text(index.read_text("utf-8") + "\n[x](02_y.ipynb)\n[x](#nothing)\n", "utf-8")
    done = build(small, tmp_path / "site", api=())
    assert done.returncode != 0
    assert "02_y.ipynb" in done.stderr
    assert "nothing" in done.stderr


def test_a_formula_that_cannot_be_read_is_named(small, tmp_path):
    (small / "book" / "index.md").write_text("# Start\n\n$\\nonsense{a}$\n", "utf-8")
    done = build(small, tmp_path / "site", api=())
    assert done.returncode != 0
    assert "cannot be read: \\nonsense" in done.stderr


def test_table_and_teaching_notes_agree_how_long_a_lecture_takes():
    """A class that asks questions takes at least as long as the lecture says that reading does."""
    table = re.findall(
        r"^\| (\d+) \|.*\| ([\d.]+)[ +\d]* \|$", (ROOT / "README.md").read_text(), re.M
    )
    hours = {int(number): float(each) for number, each in table}
    notes = re.findall(r"^## (\d+) · .*\((\d+) min", (ROOT / "book/teaching.md").read_text(), re.M)
    in_class = {int(number): int(minutes) for number, minutes in notes}
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))[1:]:  # 0 says it in words
        number = int(path.stem[:2])
        alone = re.search(r"takes about (\d+) minutes", path.read_text())
        assert alone, path.name
        assert int(alone[1]) <= in_class[number], path.name
        assert abs(60 * hours[number] - in_class[number]) <= 15, path.name


@pytest.mark.parametrize("folder", ["notebooks", "labs", "solutions"])
def test_all_code_can_be_coloured(folder):
    highlight_rank_cells()
    for path in (ROOT / folder).rglob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            tokens = IPython3Lexer().get_tokens(cell.source) if cell.cell_type == "code" else ()
            assert [text for kind, text in tokens if kind is Error] == [], cell.source


def test_every_lecture_and_lab_is_on_the_course_map():
    readme = (ROOT / "README.md").read_text("utf-8")
    for path in (*(ROOT / "notebooks").glob("[0-9]*.ipynb"), *(ROOT / "labs").glob("*/*.ipynb")):
        assert f"({path.relative_to(ROOT)})" in readme


# --- the whole course -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "book"
    subprocess.run([sys.executable, ROOT / "book", "--as-is", "--out", out], check=True)
    return out


def pages_of(site: Path) -> list[Path]:
    """All pages but those with the library's code."""
    pages = (page.relative_to(site) for page in sorted(site.rglob("*.html")))
    return [site / page for page in pages if page.parts[0] not in ("_modules", "_static")]


class _Links(HTMLParser):
    """What a page leads to, and what it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.leads_to: list[str] = []
        self.loads: list[str] = []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a":
            self.leads_to.append(given.get("href") or "")
        else:
            self.loads += [given.get(key) or "" for key in ("src", "href")]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_pages_are_complete_and_need_no_network(site):
    pages = pages_of(site)
    lectures = list((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    labs = list((ROOT / "labs").glob("*/*.ipynb"))
    for path in (*lectures, *labs):
        assert (site / path.relative_to(ROOT)).with_suffix(".html").is_file()
    for page in pages:
        assert page.stat().st_size <= MAX_PAGE_BYTES, page
        links = _Links(page)
        for target in links.loads:
            assert not urlsplit(target).netloc, f"{page.name} loads {target}"
        for target in (*links.leads_to, *links.loads):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            assert (page.parent / unquote(parts.path)).exists(), f"{page.name}: {target}"
    assert "<math" in (site / "labs" / "lab1_ddp" / "lab1_ddp.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_pages_read_well_with_a_reader_and_on_a_phone(site, browser, theme, every):
    """A lecture and a module in both themes; in `make nightly` every page in one of them.

    Pages about modules have all the same colours: their contrast is looked at in one of them.
    """
    in_both = [site / "notebooks" / "02_collectives.html", site / "reference" / "plan.html"]
    assert all(page.is_file() for page in in_both)
    problems = []
    for page in {*(pages_of(site)[theme == "dark" :: 2] if every else ()), *in_both}:
        contrast = page in in_both or page.parent.name != "reference"
        problems += problems_on_a_phone(browser, page, theme, contrast=contrast)
    assert problems == []


@pytest.mark.slow
def test_search_finds_a_word_of_a_lecture(site, browser):
    import http.server
    import threading
    from functools import partial

    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/search.html?q=halving")
        page.wait_for_selector("#search-results a", timeout=400_000)
        assert "Collectives" in page.inner_text("#search-results")
    finally:
        server.shutdown()
        server.server_close()
