"""HTML of a submission as a page may show it: text and structure, nothing that runs.

Named in nbgrader_config.py as nbconvert's filters. Feedback and formgrader show what a student
wrote and what student code displayed; a script in there would run as whoever opens the page, and
in formgrader that is the instructor, with the right to change every grade.
"""

from __future__ import annotations

import bleach
from nbconvert.filters.markdown import markdown2html

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


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "src":  # a picture from elsewhere would tell its owner who opened the page, and when
        return tag == "img" and value.startswith(("data:image/png;", "data:image/jpeg;"))
    if name == "href" and value.strip().lower().startswith("data:"):
        return False
    return name in ATTRIBUTES["*"] or name in ATTRIBUTES.get(tag, ())


def clean(html: str | bytes) -> str:
    """The HTML with every other tag and attribute shown as text or left out.

    >>> clean('<b onclick="x()">a</b><script>b</script><img src="http://x/y.png">')
    '<b>a</b>&lt;script&gt;b&lt;/script&gt;<img>'
    """
    text = html.decode(errors="replace") if isinstance(html, bytes) else str(html)
    return bleach.clean(
        text, tags=TAGS, attributes=_allowed, protocols={"http", "https", "mailto", "data"}
    )


def markdown(source: str) -> str:
    """Markdown as clean HTML.

    >>> markdown("**a** [b](javascript:x) <script>c</script>").strip()
    '<p><strong>a</strong> <a>b</a> &lt;script&gt;c&lt;/script&gt;</p>'
    """
    return clean(markdown2html(source))
