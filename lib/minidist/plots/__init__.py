"""Figures of the course. Every function takes data, returns a matplotlib Figure, and shows nothing.

All figures have one style (`style`): the colours of Okabe and Ito, which colour-blind readers can
distinguish, on an opaque white background, so that a figure looks the same in a light and a dark
JupyterLab. Each kind of work has the same colour in all figures: `COLOURS`. Labels are next to
their lines and bars.

- `style`      colours, fonts, the background
- `charts`     lines with direct labels, bars, stacked bars
- `timelines`  each rank's work over time: emulated cluster, profiler, pipelines
- `steps`      a collective step by step, from its `Schedule`
- `numbers`    floating-point formats
- `stills`     pictures of a figure with controls, drawn beforehand for pages without Python

Only this package and `minidist.widgets` import matplotlib and ipywidgets.
"""

from minidist.plots.charts import plot_bars, plot_lines, plot_stacked
from minidist.plots.collective_steps import plot_step, plot_steps
from minidist.plots.numbers import plot_formats, plot_spacing
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
