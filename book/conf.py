"""Sphinx's settings for the course's site; `python book` writes the sources that it reads."""

import html
import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from minidist.kernel.highlight import highlight_rank_cells

project = "Training over many GPUs"
author = "the course's maintainers"
copyright = ""
language = "en"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["**/.ipynb_checkpoints"]

# papermill has run the lectures; labs are shown as students get them.
nb_execution_mode = "off"
nb_merge_streams = True
# Widgets need a kernel; beside them are pictures of what they show.
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
myst_enable_extensions = ["dollarmath", "strikethrough"]
myst_heading_anchors = 4
myst_dmath_allow_labels = False
myst_dmath_double_inline = True
suppress_warnings = [
    "myst.header",
    "ref.python",  # a class is listed once, but its package and its module are both names of it
]

default_role = "literal"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["deepspeed", "megatron"]
napoleon_use_ivar = True
napoleon_custom_sections = ["Phases", "Layout"]
add_module_names = False

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_js_files = [("explorer.js", {"defer": "defer"})]
html_favicon = "_static/favicon.svg"
html_show_copyright = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def _formula(self: Any, node: nodes.Element) -> None:
    """Writes a formula as MathML, which browsers draw without any script."""
    is_block = isinstance(node, nodes.math_block)
    source = node.astext()
    try:
        formula = convert(source, display="block" if is_block else "inline")
    except Exception as error:
        raise ExtensionError(f"formula ${source}$ cannot be read: {error!r}") from error
    if unknown := re.search(r">(\\[A-Za-z]+)<", formula):  # shown as it is, by the converter
        raise ExtensionError(f"formula ${source}$ cannot be read: {unknown[1]} is not known")
    label = html.escape(source, quote=True)
    shown = formula.replace("<math ", f'<math alttext="{label}" ', 1)
    # A wide one scrolls on a phone, for which it has to take the focus.
    self.body.append(f'<div class="math" tabindex="0">{shown}</div>' if is_block else shown)
    raise nodes.SkipNode


def _only_own(
    app: Sphinx, what: str, name: str, found: object, skip: bool, options: object
) -> bool | None:
    """A package's page leaves out what the package has imported from elsewhere."""
    module = "minidist." + app.env.docname.removeprefix("reference/")
    own = str(getattr(found, "__module__", module)).startswith(module)
    return None if own or what != "module" else True


def _pictures(
    app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain text: indented blocks are diagrams, and | and _ mean nothing."""
    text, before, in_block = [], "", False
    for line, last in zip(lines, ["", *lines], strict=False):
        indented = line.startswith("    ")
        if indented and not last.strip() and not before.startswith(" ") and not in_block:
            in_block = True
            if not before.endswith("::"):
                text += [".. code-block:: none", ""]
        elif line.startswith("1. ") and last.strip():
            text.append("")
        in_block = in_block and (indented or not line.strip())
        plain = in_block or line.startswith((">>>", "..."))
        text.append(line if plain else re.sub(r"_(?=\W|$)", r"\_", line).replace("|", r"\|"))
        before = line if line.strip() else before
    lines[:] = text


def setup(app: Sphinx) -> None:
    """Colours, formulas without scripts from elsewhere, and the reference of the library."""
    highlight_rank_cells()
    app.add_node(nodes.math, html=(_formula, None), override=True)
    app.add_node(nodes.math_block, html=(_formula, None), override=True)
    app.connect("autodoc-skip-member", _only_own)
    app.connect("autodoc-process-docstring", _pictures, priority=400)  # before napoleon
