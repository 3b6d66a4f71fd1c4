"""Cleans a submission's HTML for display: keeps text and structure, removes everything that runs.

`SAFE` makes `clean` and `markdown` nbconvert's filters. Feedback and formgrader show what a student
wrote and what student code displayed. A script in such content would run with the rights of whoever
opens the page; in formgrader this is the instructor, who may change every grade.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any, Literal
from xml.etree import ElementTree

import bleach
from jinja2 import pass_context
from latex2mathml.converter import convert
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

_TAGS = """
    a abbr b blockquote br code col colgroup dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img
    kbd li mark ol p pre s small span strong sub summary sup table tbody td tfoot th thead tr u ul
"""
_MATH = """
    math menclose mfenced mfrac mi mmultiscripts mn mo mover mpadded mphantom mroot mrow mspace
    msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover
"""
_OF_MATH = """
    accent columnalign depth display displaystyle fence height linethickness lspace mathcolor
    mathvariant maxsize minsize movablelimits notation rspace scriptlevel separator stretchy width
"""
TAGS = frozenset(_TAGS.split())
MATH_TAGS, MATH_ATTRIBUTES = frozenset(_MATH.split()), frozenset(_OF_MATH.split())
ATTRIBUTES = {
    "*": ["class", "title"],
    "a": ["href"],
    "img": ["alt", "height", "src", "width"],
    "details": ["open"],
    "ol": ["start"],
    "td": ["align", "colspan", "rowspan"],
    "th": ["align", "colspan", "rowspan"],
}


# Cleaning takes seconds per MiB, and its time grows with the square of the nesting depth of tags.
MAX_HTML_CHARS = 1_000_000
MAX_DEPTH = 100
# How much of a notebook a page shows: characters of a cell, of all cells, and of rich output.
MAX_CELL_CHARS = 20_000
MAX_CODE_CHARS = 300_000
MAX_RICH_CHARS = 3_000_000
# A formula takes a millisecond: how many of a cell are drawn, and how long each may be.
MAX_FORMULAS = 300
MAX_FORMULA_CHARS = 2000
_XMLNS = ' xmlns="http://www.w3.org/1998/Math/MathML"'
_CUT = "[…] The rest is left out here; it is in the file that was handed in."
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]*)")
_IMG_WITHOUT_ALT = re.compile(r"<img(?![^>]* alt=)")
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "wbr"}
_RICH = ("text/html", "text/markdown", "text/latex", "image/svg+xml")


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "src":  # an external picture's server would learn who opened the page, and when
        return tag == "img" and value.startswith(("data:image/png;", "data:image/jpeg;"))
    if name == "href" and re.sub(r"[\x00-\x20\x7f-\xa0]", "", value).lower().startswith("data:"):
        return False
    return name in ATTRIBUTES["*"] or name in ATTRIBUTES.get(tag, ())


def clean(html: str | bytes) -> str:
    """The HTML with allowed tags and attributes only; other tags are shown as text.

    >>> clean('<b onclick="x()">a</b><script>b</script><img src="http://x/y.png">')
    '<b>a</b>&lt;script&gt;b&lt;/script&gt;<img alt="without a description">'
    """
    text = html.decode(errors="replace") if isinstance(html, bytes) else str(html)
    if len(text) > MAX_HTML_CHARS or _depth(text) > MAX_DEPTH:
        return f"{escape(text[:MAX_CELL_CHARS])} […]"
    cleaned = bleach.clean(
        text, tags=TAGS, attributes=_allowed, protocols={"http", "https", "mailto", "data"}
    )
    return _IMG_WITHOUT_ALT.sub('<img alt="without a description"', cleaned)


def _depth(text: str) -> int:
    """The greatest nesting depth of tags; a tag counts as open until it is closed.

    >>> _depth("<b><i>x</i><br>"), _depth("<td>" * 3), _depth("a < b")
    (2, 3, 0)
    """
    opened: Counter[str] = Counter()
    depth = deepest = 0
    for closing, name in _TAG.findall(text.lower()):
        if not closing and name not in _VOID:
            opened[name] += 1
            depth += 1
            deepest = max(deepest, depth)
        elif closing and opened[name]:  # ignores a closing tag without an open one
            opened[name] -= 1
            depth -= 1
    return deepest


def shorten(notebook: NotebookNode) -> None:
    """Cuts a graded notebook to what a page can show, so that one notebook cannot delay a class."""
    code, rich = MAX_CODE_CHARS, MAX_RICH_CHARS
    for cell in notebook.cells:
        room = min(MAX_CELL_CHARS, code)
        if len(cell.source) > room:
            mark = "# " if cell.cell_type == "code" else ""
            cell.source = f"{cell.source[:room]}\n{mark}{_CUT}"
        code = max(0, code - len(cell.source))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            for kind in _RICH:
                size = len(str(data.get(kind, "")))
                if size > min(rich, MAX_HTML_CHARS):
                    del data[kind]
                    data.setdefault("text/plain", _CUT)
                else:
                    rich -= size


class _Renderer(IPythonRenderer):
    """Leaves a mark in place of each formula, because `clean` would show MathML as text."""

    def __init__(self, attachments: dict[str, dict[str, str]]) -> None:
        super().__init__(escape=False, exclude_anchor_links=True, attachments=attachments)
        self._mark = f"formula-{secrets.token_hex(8)}-"
        self._formulas: list[str] = []

    def inline_math(self, body: str) -> str:
        return self._put(body, "inline")

    def block_math(self, body: str) -> str:
        return self._put(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return self._put(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")

    def image(self, text: str, url: str, title: str | None = None) -> str:
        """A picture, or its text if the attachment is missing."""
        try:
            return super().image(text, url, title)
        except InvalidNotebook:
            return escape(text)

    def _put(self, tex: str, display: Literal["inline", "block"]) -> str:
        few = len(self._formulas) < MAX_FORMULAS
        self._formulas.append(mathml(tex, display) if few else _as_code(tex))
        return f"{self._mark}{len(self._formulas) - 1}-"

    def put_formulas(self, html: str) -> str:
        """The HTML with the formulas in place of the marks."""
        return re.sub(rf"{self._mark}(\d+)-", lambda found: self._formulas[int(found[1])], html)


def mathml(tex: str, display: Literal["inline", "block"]) -> str:
    r"""A formula as MathML, or as code if it cannot be read or is too long.

    >>> mathml(r"\nonsense{N}", "inline")
    '<code>\\nonsense{N}</code>'
    """
    try:
        if len(tex) > MAX_FORMULA_CHARS:
            return _as_code(tex)
        tree = ElementTree.fromstring(convert(tex, display=display).replace(_XMLNS, ""))
    except Exception:  # a student's formula may cause many kinds of errors
        return _as_code(tex)
    for part in tree.iter():
        if part.tag not in MATH_TAGS or (part.text or "").startswith("\\"):
            return _as_code(tex)
        part.attrib = {k: v for k, v in part.attrib.items() if k in MATH_ATTRIBUTES}
    tree.set("alttext", tex)
    if display == "block":
        tree.set("tabindex", "0")  # the keyboard can scroll a wide formula
    return ElementTree.tostring(tree, encoding="unicode")


def _as_code(tex: str) -> str:
    return f"<code>{escape(tex)}</code>"


@pass_context
def markdown(context: Mapping[str, Any], source: str) -> str:
    """Markdown as clean HTML, with formulas as MathML.

    Args:
        context: the template's context; its "cell" may have attachments.

    >>> markdown({}, "**a** [b](javascript:x) <script>c</script>").strip()
    '<p><strong>a</strong> <a>b</a> &lt;script&gt;c&lt;/script&gt;</p>'
    """
    attachments = context.get("cell", {}).get("attachments", {})
    return _render(source, attachments) if attachments else _render_plain(source)


@functools.lru_cache(maxsize=128)  # most texts of a class are equal
def _render_plain(source: str) -> str:
    return _render(source, {})


def _render(source: str, attachments: dict[str, dict[str, str]]) -> str:
    renderer = _Renderer(attachments)
    made = MarkdownWithMath(renderer=renderer).render(source)
    return renderer.put_formulas(clean(made).replace("<pre>", '<pre tabindex="0">'))


# nbconvert's settings for every page that shows what a student wrote.
SAFE: dict[str, Any] = {
    "sanitize_html": True,
    "filters": {
        "clean_html": "autograder.report.safe_html.clean",
        "markdown2html": "autograder.report.safe_html.markdown",
    },
}
