"""Cleans a submission's HTML for display: keeps text and structure, removes everything that runs.

nbgrader_config.py names these functions as nbconvert's filters. Feedback and formgrader show what a
student wrote and what student code displayed. A script in there would run with the rights of the
person who opens the page; in formgrader this is the instructor, who may change every grade.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape

import bleach
from nbconvert.filters.markdown import markdown2html
from nbformat import NotebookNode

_TAGS = """
    a abbr b blockquote br code col colgroup dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img
    kbd li mark ol p pre s small span strong sub summary sup table tbody td tfoot th thead tr u ul
"""
TAGS = frozenset(_TAGS.split())
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
_CUT = "[…] The rest is left out here; it is in the file that was handed in."
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]*)")
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
    '<b>a</b>&lt;script&gt;b&lt;/script&gt;<img>'
    """
    text = html.decode(errors="replace") if isinstance(html, bytes) else str(html)
    if len(text) > MAX_HTML_CHARS or _depth(text) > MAX_DEPTH:
        return f"{escape(text[:MAX_CELL_CHARS])} […]"
    return bleach.clean(
        text, tags=TAGS, attributes=_allowed, protocols={"http", "https", "mailto", "data"}
    )


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


def markdown(source: str) -> str:
    """Markdown as clean HTML.

    >>> markdown("**a** [b](javascript:x) <script>c</script>").strip()
    '<p><strong>a</strong> <a>b</a> &lt;script&gt;c&lt;/script&gt;</p>'
    """
    return clean(markdown2html(source))
