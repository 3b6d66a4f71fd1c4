"""Notebooks and Markdown to pages: nbconvert for cells, markdown-it for text, MathML for formulas.

text     Markdown as on GitHub, $formulas$, <details>; headings become anchors
code     highlighted by Pygments
outputs  what nbconvert shows; of a widget the picture that it holds, and where its controls stand
links    to a notebook become links to its page; every link inside the site is checked
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert as to_mathml
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbconvert.exporters import HTMLExporter
from nbconvert.filters import Highlight2HTML
from nbformat.v4 import new_output
from pygments.formatters import HtmlFormatter

WIDGET = "application/vnd.jupyter.widget-view+json"
COURSE_MAP = "<!-- course map -->"
HIDDEN_TAGS = ("parameters", "injected-parameters", "remove-cell")


class BookError(Exception):
    """A page that cannot be written, or links that lead nowhere; the message lists them."""


def write_book(
    out: Path, texts: Path, lectures: Mapping[str, Path], labs: Mapping[str, Path]
) -> list[Path]:
    """Writes the site.

    Args:
        out: folder of the site; what is in it is replaced.
        texts: folder with index.md, teaching.md, page.html and style.css.
        lectures, labs: name -> notebook, in the order of the menu.

    Returns:
        Every page.

    Raises:
        BookError: a formula cannot be read, or a link leads nowhere.
    """
    notebooks = {
        **{name: nbformat.read(path, as_version=4) for name, path in lectures.items()},
        **{name: nbformat.read(path, as_version=4) for name, path in labs.items()},
    }
    titles = {"index": "Start", "teaching": "Teaching notes"}
    titles |= {name: _title(notebook, name) for name, notebook in notebooks.items()}
    menu = _menu(titles, list(lectures), list(labs))
    frame = (texts / "page.html").read_text("utf-8")
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.html"), *out.glob("*.css")):
        old.unlink()
    (out / "style.css").write_text(_style(texts), "utf-8")

    exporter = _Exporter()
    pages = []
    for name, title in titles.items():
        if name in notebooks:
            body = exporter.from_notebook_node(_for_reading(notebooks[name]))[0]
        else:
            body = to_html(_text(texts, name))
        marked = menu.replace(f'href="{name}.html"', f'href="{name}.html" aria-current="page"')
        page = out / f"{name}.html"
        page.write_text(
            frame.replace("{{ title }}", html.escape(title))
            .replace("{{ menu }}", marked)
            .replace("{{ body }}", body),
            "utf-8",
        )
        pages.append(page)
    if broken := find_broken_links(pages):
        raise BookError("links that lead nowhere:\n  " + "\n  ".join(broken))
    return pages


def _text(texts: Path, name: str) -> str:
    """A page's Markdown; the course map is the README's."""
    text = (texts / f"{name}.md").read_text("utf-8")
    if COURSE_MAP in text:
        readme = (texts.parent / "README.md").read_text("utf-8")
        found = re.search(r"^## The course\n\n(\|.*?)\n\n", readme, re.M | re.S)
        if found is None:
            raise BookError("README.md has no table under '## The course'")
        text = text.replace(COURSE_MAP, found[1])
    return text


# --- text -----------------------------------------------------------------------------------------


def _formula(source: str, options: Mapping[str, Any]) -> str:
    try:
        formula = to_mathml(source, display="block" if options["display_mode"] else "inline")
    except Exception as error:
        raise BookError(f"formula ${source}$ cannot be read: {error!r}") from error
    if unknown := re.search(r">(\\[A-Za-z]+)<", formula):  # shown as it is, by the converter
        raise BookError(f"formula ${source}$ cannot be read: {unknown[1]} is not known")
    return formula


_MARKDOWN = (
    MarkdownIt("commonmark", {"html": True})
    .enable(["table", "strikethrough"])
    .use(dollarmath_plugin, renderer=_formula, double_inline=True, allow_digits=False)
    .use(anchors_plugin, max_level=3)
)
_NOTEBOOK_LINK = re.compile(r'href="(?:[^":]*/)?([\w-]+)\.ipynb(#[^"]*)?"')


def to_html(markdown: str) -> str:
    """A page's text; links to notebooks lead to their pages."""
    text = _MARKDOWN.render(markdown)
    return _NOTEBOOK_LINK.sub(r'href="\1.html\2"', text)


# --- notebooks ------------------------------------------------------------------------------------


class _Exporter(HTMLExporter):
    """nbconvert's cells without its page, which would load scripts from elsewhere."""

    def __init__(self) -> None:
        super().__init__(template_name="basic", filters={"highlight_code": _highlight})

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return to_html(source)


_COLOUR = Highlight2HTML()


def _highlight(source: str, language: str | None = None, metadata: Any = None) -> str:
    """Code in colours; what follows a first line `%%rank 0` is Python, which nbconvert misses."""
    magic, _, code = source.partition("\n")
    if not magic.startswith("%%rank"):
        return _COLOUR(source, language)
    line = f'<span class="c1">{html.escape(magic)}</span>\n'
    return re.sub(
        r"(<pre>(?:<span></span>)?)", lambda found: found[1] + line, _COLOUR(code), count=1
    )


def _for_reading(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what only a running notebook needs."""
    cells = []
    for cell in notebook.cells:
        if set(cell.metadata.get("tags", [])) & set(HIDDEN_TAGS):
            continue
        outputs = cell.get("outputs", [])
        for place in reversed(range(len(outputs))):
            if WIDGET in outputs[place].get("data", {}):
                outputs[place : place + 1] = _still(outputs[place])
        cells.append(cell)
    notebook.cells = cells
    notebook.metadata.pop("widgets", None)
    return notebook


def _still(widget: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """A widget's picture, and below it what it shows and where its controls stand."""
    words = widget.data.get("text/plain", "")
    below = {"text/html": f'<p class="controls">{html.escape(words)}</p>'}
    return [
        new_output(
            "display_data",
            {"image/png": widget.data["image/png"]},
            metadata={"image/png": {"alt": words}},
        ),
        new_output("display_data", below),
    ]


def _title(notebook: nbformat.NotebookNode, name: str) -> str:
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^# (.+)$", cell.source, re.M)):
            return re.sub(r"[`*]", "", found[1])
    raise BookError(f"{name} has no heading '# …'")


# --- page -----------------------------------------------------------------------------------------


def _menu(titles: Mapping[str, str], lectures: list[str], labs: list[str]) -> str:
    def items(names: list[str]) -> str:
        links = (f'<li><a href="{n}.html">{html.escape(titles[n])}</a></li>' for n in names)
        return f"<ul>{''.join(links)}</ul>"

    return (
        items(["index", "teaching"])
        + f"<h2>Lectures</h2>{items(lectures)}<h2>Labs</h2>{items(labs)}"
    )


def _style(texts: Path) -> str:
    """Our style, and Pygments' colours for light and dark."""
    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    own = (texts / "style.css").read_text("utf-8")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{own}"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[tuple[str, str]] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.ids.add(value)
            elif key in ("href", "src") and value:
                self.targets.append((tag, value))


def find_broken_links(pages: list[Path]) -> list[str]:
    """Links to files or anchors that are not there, and what a page would load from elsewhere."""
    found: dict[Path, _Links] = {}
    for page in pages:
        found[page] = _Links()
        found[page].feed(page.read_text("utf-8"))
    broken = []
    for page, links in found.items():
        for tag, target in links.targets:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "mailto"):
                if tag != "a":
                    broken.append(f"{page.name}: loads {target} from elsewhere")
                continue
            if parts.scheme == "data":
                continue
            file = page.parent / unquote(parts.path) if parts.path else page
            if not file.is_file():
                broken.append(f"{page.name}: {target}")
            elif parts.fragment and file in found and parts.fragment not in found[file].ids:
                broken.append(f"{page.name}: {target} (no such heading)")
    return broken
