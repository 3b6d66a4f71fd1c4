"""Lines and bars with labels next to them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from minidist.plots.style import COLOURS, FAINT, INK, PALETTE, into, style, text_colour

Numbers = Sequence[float] | np.ndarray
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P")


def plot_lines(
    x: Numbers | Mapping[str, Numbers],
    lines: Mapping[str, Numbers],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    markers: bool | None = None,
    ideal: Mapping[str, Numbers] | None = None,
    ax: Axes | None = None,
    ticks: Numbers | None = None,
) -> Figure:
    """Lines with their names at their ends.

    Args:
        x: x values of all lines, or a mapping from label to the x values of this line.
        lines: label -> values.
        xlabel, ylabel: with the unit, e.g. "message size (bytes)".
        markers: None marks the points of lines with at most 20 points.
        ideal: further lines, thin and grey: the values that theory allows.
        ticks: x values that get a number on the axis.
    """

    def x_of(label: str) -> Numbers:
        return x[label] if isinstance(x, Mapping) else x

    figure, ax = into(ax)
    with style():
        for label, values in (ideal or {}).items():
            ax.plot(x_of(label), values, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
        for number, (label, values) in enumerate(lines.items()):
            show = len(values) <= 20 if markers is None else markers
            ax.plot(
                x_of(label),
                values,
                color=PALETTE[number % len(PALETTE)],
                linestyle=_STYLES[number // len(PALETTE) % len(_STYLES)],
                marker=_MARKERS[number % len(_MARKERS)] if show else None,
            )
        if logx:
            ax.set_xscale("log", base=2 if ticks is not None else 10)
        if logy:
            ax.set_yscale("log")
        if ticks is not None:
            ax.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
        if logx and ticks is None:
            _number_log_axis(ax.xaxis, *ax.get_xlim())
        if logy:
            _number_log_axis(ax.yaxis, *ax.get_ylim())
        ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
        ax.grid(axis="y", linewidth=0.6)
        ends = [
            (label, float(np.asarray(x_of(label))[-1]), float(np.asarray(values)[-1]), colour)
            for group, colours in ((ideal or {}, [FAINT] * 99), (lines, PALETTE * 4))
            for (label, values), colour in zip(group.items(), colours, strict=False)
            if len(values)
        ]
        _label_ends(figure, ax, ends)
    return figure


def _number_log_axis(axis: Axis, low: float, high: float) -> None:
    """Number a short axis with 1, 2, 5, 10: powers of ten alone would give one or two numbers."""
    if low > 1e-3 and high < 1e6 and high / low < 200:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def _label_ends(figure: Figure, ax: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write each name beside the end of its line; move names apart if they would overlap."""
    if not ends:
        return
    figure.draw_without_rendering()
    at = [(ax.transData.transform((x, y)), label, colour) for label, x, y, colour in ends]
    at = [entry for entry in at if np.isfinite(entry[0]).all()]
    at.sort(key=lambda entry: entry[0][1])
    line, near = 13.0 * figure.dpi / 72, 60.0 * figure.dpi / 72
    placed: list[tuple[float, float]] = []
    for (x, y), label, colour in at:
        beside = [top for other, top in placed if abs(other - x) < near]
        y_text = max([y, *(top + line for top in beside)])
        placed.append((x, y_text))
        here = ax.transData.inverted().transform((x, y))
        ax.annotate(
            label,
            (float(here[0]), float(here[1])),
            (6, (y_text - y) * 72 / figure.dpi),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def plot_bars(
    bars: Mapping[str, float],
    *,
    xlabel: str,
    title: str = "",
    colours: Mapping[str, str] | None = None,
    limit: float | None = None,
    limit_label: str = "",
    form: str = "{:.3g}",
    ax: Axes | None = None,
) -> Figure:
    """Horizontal bars with their values at their ends, and an optional limit as a dashed line."""
    figure, ax = into(ax, height=0.6 + 0.36 * len(bars))
    with style():
        names, values = list(bars), list(bars.values())
        colour = [(colours or {}).get(name, PALETTE[0]) for name in names]
        drawn = ax.barh(names, values, color=colour, height=0.66)
        ax.bar_label(drawn, [form.format(value) for value in values], padding=4, color=INK)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        _draw_limit(ax, limit, limit_label)
        ax.set(xlabel=xlabel, title=title)
        ax.tick_params(axis="y", length=0)
    return figure


def plot_stacked(
    bars: Mapping[str, Mapping[str, float]],
    *,
    xlabel: str,
    title: str = "",
    limit: float | None = None,
    limit_label: str = "",
    form: str = "{:.3g}",
    ax: Axes | None = None,
) -> Figure:
    """Horizontal stacked bars: name -> part -> value. A legend above the bars names the parts."""
    figure, ax = into(ax, height=1.0 + 0.42 * len(bars))
    with style():
        parts = list(dict.fromkeys(part for values in bars.values() for part in values))
        # Parts without an entry in COLOURS get the unused colours of the palette, then grey.
        taken = {COLOURS[part] for part in parts if part in COLOURS}
        left_over = [colour for colour in PALETTE if colour not in taken]
        free = itertools.chain(left_over, itertools.repeat(COLOURS["other"]))
        colours = {part: COLOURS.get(part) or next(free) for part in parts}
        total = max((sum(values.values()) for values in bars.values()), default=1.0) or 1.0
        for row, values in enumerate(bars.values()):
            left = 0.0
            for part, value in values.items():
                ax.barh(
                    row,
                    value,
                    left=left,
                    height=0.66,
                    color=colours[part],
                    edgecolor="white",
                    linewidth=0.8,
                )
                if value > 0.07 * max(total, limit or 0.0):
                    ax.text(
                        left + value / 2,
                        row,
                        form.format(value),
                        ha="center",
                        va="center",
                        color=text_colour(colours[part]),
                        fontsize=9,
                    )
                left += value
            ax.text(left, row, "  " + form.format(left), va="center", color=INK)
        ax.set_yticks(range(len(bars)), list(bars))
        ax.invert_yaxis()
        ax.margins(x=0.12)
        _draw_limit(ax, limit, limit_label)
        ax.set(xlabel=xlabel)
        ax.tick_params(axis="y", length=0)
        handles: list[Any] = [square(colours[part], part) for part in parts]
        figure.legend(
            handles=handles, loc="outside upper left", ncols=min(6, len(parts)), frameon=False
        )
        if title:
            ax.set_title(title)
    return figure


def square(colour: str, label: str) -> Any:
    """A coloured square for a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _draw_limit(ax: Axes, limit: float | None, label: str) -> None:
    if limit is None:
        return
    ax.axvline(limit, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    ax.annotate(
        label,
        (limit, 1),
        (0, 2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="bottom",
        ha="center",
        fontsize=9,
    )
