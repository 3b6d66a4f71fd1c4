"""Figures with controls, as pages show them: no Python runs there, so each picture is a file.

`minidist.plots.stills` says which pictures there are; `_static/explorer.js` shows the one that
belongs to the controls' values. Without JavaScript the first picture stays.
"""

from __future__ import annotations

import hashlib
import html
import json
from typing import Any

FOLDER = "_static/explorers"


def as_html(drawn: dict[str, Any], root: str) -> str:
    """The controls and the first picture.

    Args:
        drawn: what `minidist.plots.stills.draw_all` returns.
        root: the way from the page to the site's root, such as "../".
    """
    controls, pictures = drawn["controls"], drawn["pictures"]
    shown = {
        "first": [control["first"] for control in controls],
        "values": [control["values"] for control in controls],
        "together": drawn["together"],
        "pictures": {
            key: picture | {"file": f"{root}{FOLDER}/{picture['file']}"}
            if "file" in picture
            else picture
            for key, picture in pictures.items()
        },
    }
    data = json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c")
    mark = hashlib.sha256(data.encode()).hexdigest()[:8]
    rows = "\n".join(_row(control, f"explorer-{mark}-{i}") for i, control in enumerate(controls))
    first = shown["pictures"][",".join(map(str, shown["first"]))]  # writing has sorted the keys
    image = f'<img src="{_quoted(first.get("file", ""))}" alt="{_quoted(first.get("alt", ""))}">'
    moves = not drawn["fixed"]
    parts = [f'<div class="explorer-controls" hidden>\n{rows}\n</div>'] if moves else []
    parts += [f'<p class="explorer-note">{_note(drawn)}</p>'] if _note(drawn) else []
    parts.append(image)
    if moves:
        parts.append('<p role="status" class="explorer-said"></p>')
        parts.append(f'<script type="application/json">{data}</script>')
    return "\n".join(['<div class="explorer">', *parts, "</div>"])


def _row(control: dict[str, Any], name: str) -> str:
    """A label, its control, and for a slider the value."""
    first, values = control["first"], control["values"]
    field = f'id="{name}" autocomplete="off"'
    label = f'<label for="{name}">{_quoted(control["label"])}</label>'
    if control["kind"] == "checkbox":
        return f'{label}<input type="checkbox" {field}{" checked" if first else ""}>'
    if control["kind"] == "select":
        options = "".join(
            f'<option value="{i}"{" selected" if i == first else ""}>{_quoted(value)}</option>'
            for i, value in enumerate(values)
        )
        return f"{label}<select {field}>{options}</select>"
    return (
        f'{label}<input type="range" {field} min="0" max="{len(values) - 1}" value="{first}" '
        f'aria-valuetext="{_quoted(values[first])}">'
        f'<span class="explorer-value" aria-hidden="true">{_quoted(values[first])}</span>'
    )


def _note(drawn: dict[str, Any]) -> str:
    """What is different in JupyterLab."""
    if drawn["fixed"]:
        return "This figure has controls, which move in JupyterLab."
    some = any(control["some"] for control in drawn["controls"])
    if not drawn["together"]:
        more = ", and sliders have finer steps" if some else ""
        return (
            "Here one control moves at a time, and the others go back to where they began. "
            f"In JupyterLab all move together{more}."
        )
    return "In JupyterLab the sliders have finer steps." if some else ""


def _quoted(text: str) -> str:
    return html.escape(text, quote=True)
