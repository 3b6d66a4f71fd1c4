"""Figures of the course. Every function takes data, returns a matplotlib Figure, and shows nothing.

One style for all (`style`): the colours of Okabe and Ito, which the colour-blind can tell apart,
on an opaque white card, so that a figure reads the same in a light and a dark JupyterLab. Kinds of
work have the same colour everywhere: `COLOURS`. Labels sit at the lines and bars they belong to.

- `style`      colours, fonts, the card
- `charts`     lines with direct labels, bars, stacked bars
- `timelines`  what each rank did when: emulated cluster, profiler, pipelines
- `steps`      a collective step by step, from its `Schedule`
- `numbers`    floating-point formats

This package and `minidist.widgets` are the only importers of matplotlib and ipywidgets.
"""

from minidist.plots.charts import plot_bars, plot_lines, plot_stacked
from minidist.plots.numbers import plot_formats, plot_spacing
from minidist.plots.steps import plot_step, plot_steps
from minidist.plots.style import COLOURS, PALETTE, new_figure, show_in_notebooks, style
from minidist.plots.timelines import plot_pipeline, plot_timeline

__all__ = [
    "COLOURS",
    "PALETTE",
    "new_figure",
    "plot_bars",
    "plot_formats",
    "plot_lines",
    "plot_pipeline",
    "plot_spacing",
    "plot_stacked",
    "plot_step",
    "plot_steps",
    "plot_timeline",
    "style",
]

show_in_notebooks()
