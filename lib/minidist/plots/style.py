"""One style for every figure: colours, fonts, the white background."""

from __future__ import annotations

import io
import sys
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito, Color universal design (2008), without its yellow, which is faint on white.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
INK, FAINT, GRID = "#222222", "#6B6B6B", "#DDDDDD"

# Each kind of work has the same colour in every figure.
COLOURS = {
    "compute": "#0072B2",
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "weight": "#009E73",
    "update": "#CC79A7",
    "loader": "#D55E00",
    "copy": "#CC79A7",
    "communication": "#E69F00",
    "all-gather": "#E69F00",
    "reduce-scatter": "#8C510A",
    "idle": "#EEEEEE",
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "other": "#999999",
}

_RC: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 100,
    "axes.prop_cycle": cycler(color=PALETTE),
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
}


def style() -> Any:
    """A context in which figures have the style of the course.

    >>> with style():
    ...     figure, ax = new_figure()
    """
    return matplotlib.rc_context(_RC)


def new_figure(width: float = 7.5, height: float = 3.0) -> tuple[Figure, Axes]:
    """A figure and its axes; sizes in inches. pyplot does not know the figure, so nothing shows it
    twice."""
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots()


def show_in_notebooks() -> None:
    """Make IPython show a figure as a picture if it is the last value of a cell, even without
    pyplot."""
    if "IPython" not in sys.modules:
        return
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is not None:
        formatter = shell.display_formatter.formatters["image/png"]
        formatter.for_type(Figure, _to_png)


def describe(figure: Figure) -> str:
    """A figure in words, for readers who cannot see it: its titles, axes, lines and texts.

    >>> figure, ax = new_figure()
    >>> _ = ax.set(title="Speed-up", xlabel="GPUs", ylabel="times")
    >>> _ = ax.plot([1, 2], [1, 2], label="ideal")
    >>> describe(figure)
    'Speed-up; x: GPUs; y: times; ideal'
    """
    words = []
    for ax in figure.axes:
        labels = [label for label in ax.get_legend_handles_labels()[1] if label]
        title = ax.get_title("left") or ax.get_title()
        axes = [f"x: {ax.get_xlabel()}" if ax.get_xlabel() else ""]
        axes += [f"y: {ax.get_ylabel()}" if ax.get_ylabel() else ""]
        texts = [text.get_text() for text in ax.texts] if len(ax.texts) <= 8 else []
        texts = [text for text in texts if any(map(str.isalpha, text))]
        words += [title, *axes, *labels, *texts]
    plain = (" ".join(word.split()) for word in words)
    return "; ".join(dict.fromkeys(word for word in plain if word)) or "a drawing"


def _to_png(figure: Figure) -> tuple[bytes, dict[str, str]]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue(), {"alt": describe(figure)}


def into(ax: Axes | None, width: float = 7.5, height: float = 3.0) -> tuple[Figure, Axes]:
    """The given axes and their figure, or a new figure with axes if `ax` is None."""
    if ax is None:
        return new_figure(width, height)
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure, ax


def text_colour(background: str) -> str:
    """Black or white, whichever has more contrast with a colour (WCAG relative luminance).

    >>> text_colour("#0072B2"), text_colour("#EEEEEE")
    ('white', 'black')
    """
    parts = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "black"
