"""What each rank did when: one row per rank, communication below its compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minidist.plots.charts import square
from minidist.plots.style import COLOURS, FAINT, into, style, text_colour

if TYPE_CHECKING:
    from minidist.emulate import Timeline
    from minidist.parallel.pipeline import Timeline as PipelineTimeline

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def unit_of(seconds: float) -> tuple[float, str]:
    """Scale and name of the unit in which a time reads best.

    >>> unit_of(0.02)
    (0.001, 'ms')
    """
    return next(((scale, name) for scale, name in _UNITS if seconds >= scale), _UNITS[-1])


def plot_timeline(
    timeline: Timeline,
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """A timeline of the emulated cluster: compute above, communication below, per rank.

    Args:
        start_s, end_s: the part to show, in virtual seconds.
    """
    end_s = timeline.makespan_s if end_s is None else end_s
    scale, unit = unit_of(end_s - start_s)
    figure, ax = into(ax, height=0.9 + 0.62 * timeline.world_size)
    lanes = {"compute": (0.06, 0.42), "copy": (0.48, 0.12), "communication": (0.6, 0.28)}
    shown = []
    with style():
        for rank, intervals in enumerate(timeline.intervals):
            ax.axhspan(rank + 0.06, rank + 0.88, color=COLOURS["idle"], linewidth=0)
            for each in intervals:
                if each.kind not in lanes or each.end_s <= start_s or each.start_s >= end_s:
                    continue
                low, high = max(each.start_s, start_s), min(each.end_s, end_s)
                offset, height = lanes[each.kind]
                ax.broken_barh(
                    [((low - start_s) / scale, (high - low) / scale)], (rank + offset, height),
                    color=COLOURS[each.kind], edgecolor="white", linewidth=0.3,
                )  # fmt: skip
                if each.kind not in shown:
                    shown.append(each.kind)
        _finish(ax, timeline.world_size, (end_s - start_s) / scale, unit, title)
        _legend(figure, [*(kind for kind in lanes if kind in shown), "idle"])
    return figure


def plot_pipeline(timeline: PipelineTimeline, *, title: str = "", ax: Axes | None = None) -> Figure:
    """A pipeline's schedule: micro-batches by number; forward, backward, weight gradient."""
    names = {"F": "forward", "B": "backward", "W": "weight", "U": "update"}
    ranks = timeline.spans
    begin_s = min((span.start_s for rank in ranks for span in rank), default=0.0)
    width_s = max((span.end_s for rank in ranks for span in rank), default=1.0) - begin_s
    figure, ax = into(ax, height=0.9 + 0.42 * len(ranks))
    shown: list[str] = []
    with style():
        for rank, spans in enumerate(ranks):
            ax.axhspan(rank + 0.06, rank + 0.94, color=COLOURS["idle"], linewidth=0)
            for span in spans:
                kind = names[_letter(span.action)]
                start, width = span.start_s - begin_s, span.end_s - span.start_s
                ax.broken_barh(
                    [(start, width)], (rank + 0.06, 0.88), color=COLOURS[kind],
                    edgecolor="white", linewidth=0.8,
                )  # fmt: skip
                if width > 0.012 * width_s:
                    ax.text(
                        start + width / 2, rank + 0.5, str(span.action.micro_batch), ha="center",
                        va="center", fontsize=8, color=text_colour(COLOURS[kind]),
                        fontweight="bold" if span.action.chunk % 2 else "normal",
                    )  # fmt: skip
                if kind not in shown:
                    shown.append(kind)
        _finish(ax, len(ranks), width_s, "time of one forward = 1", title)
        if ax.get_xlabel().startswith("time ("):
            ax.set_xlabel("time")
        _legend(figure, [*(k for k in names.values() if k in shown), "idle"])
    return figure


def _letter(action: Any) -> str:
    kind = getattr(action.kind, "value", action.kind)
    return str(kind)[0].upper()


def _finish(ax: Axes, num_ranks: int, width: float, unit: str, title: str) -> None:
    ax.set_yticks([rank + 0.47 for rank in range(num_ranks)])
    ax.set_yticklabels([f"rank {rank}" for rank in range(num_ranks)])
    ax.set_ylim(num_ranks, 0)
    ax.set_xlim(0, width)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time ({unit})", color=FAINT)
    ax.set_title(title)


def _legend(figure: Figure, kinds: list[str]) -> None:
    if figure.legends:  # several timelines in one figure share one
        return
    handles = [square(COLOURS[kind], kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(kinds), frameon=False)
