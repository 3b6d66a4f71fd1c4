"""What each rank did when: one row per rank, communication below its compute."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minidist.plots.charts import square
from minidist.plots.style import COLOURS, FAINT, into, style, text_colour

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from minidist.emulate import Timeline
    from minidist.parallel.pipeline import Timeline as PipelineTimeline
    from minidist.profile import Timeline as Profile

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def unit_of(seconds: float) -> tuple[float, str]:
    """Scale and name of the unit in which a time reads best.

    >>> unit_of(0.02)
    (0.001, 'ms')
    """
    return next(((scale, name) for scale, name in _UNITS if seconds >= scale), _UNITS[-1])


# Kind -> offset and height in a rank's row.
_LANES = {
    "compute": (0.06, 0.42),
    "loader": (0.06, 0.42),  # the loop waits for its batch and computes nothing
    "copy": (0.48, 0.12),
    "communication": (0.6, 0.28),
}


def plot_timeline(
    timeline: Timeline | Profile,
    *,
    start_s: float | None = None,
    end_s: float | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """What every rank did when: compute above, communication below.

    Args:
        timeline: of the emulated cluster; or of `minidist.profile`, which has the steps of
            torch.profiler's traces (`from_profiler`, `read_trace`, `gather_timeline`). Of those the
            starts of steps are marked, and operators that touch are drawn as one.
        start_s, end_s: the part to show, in seconds of the timeline; all of it by default.

    Raises:
        ValueError: the part is empty.
    """
    is_profile = _is_profile(timeline)
    rows = _profile_rows(timeline) if is_profile else _emulated_rows(timeline)
    start_s = (timeline.start_s if is_profile else 0.0) if start_s is None else start_s
    end_s = (timeline.end_s if is_profile else timeline.makespan_s) if end_s is None else end_s
    if not end_s > start_s:
        raise ValueError(f"plot_timeline: nothing between {start_s} s and {end_s} s")
    scale, unit = unit_of(end_s - start_s)
    figure, ax = into(ax, height=0.9 + 0.62 * len(rows))
    shown = []
    with style():
        for row, bars in enumerate(rows.values()):
            ax.axhspan(row + 0.06, row + 0.88, color=COLOURS["idle"], linewidth=0)
            for kind, begin, end in bars:
                if kind not in _LANES or end <= start_s or begin >= end_s:
                    continue
                low, high = max(begin, start_s), min(end, end_s)
                offset, height = _LANES[kind]
                ax.broken_barh(
                    [((low - start_s) / scale, (high - low) / scale)], (row + offset, height),
                    color=COLOURS[kind], edgecolor="white", linewidth=0.0 if is_profile else 0.3,
                )  # fmt: skip
                if kind not in shown:
                    shown.append(kind)
            if is_profile:
                starts = [
                    window.start_s for window in timeline.steps if window.rank == [*rows][row]
                ]
                inside = [(at - start_s) / scale for at in starts if start_s <= at <= end_s]
                ax.vlines(inside, row + 0.02, row + 0.92, color=FAINT, linewidth=1.2)
        _finish(ax, list(rows), (end_s - start_s) / scale, unit, title)
        _legend(figure, [*(kind for kind in _LANES if kind in shown), "idle"])
    return figure


def _is_profile(timeline: object) -> TypeIs[Profile]:
    """Whoever has one has imported its module, which the repository of students may lack."""
    profile = sys.modules.get("minidist.profile")
    return profile is not None and isinstance(timeline, profile.Timeline)


def _emulated_rows(timeline: Timeline) -> dict[int, list[tuple[str, float, float]]]:
    """Rank -> (kind, start, end) of what it did."""
    return {
        rank: [(each.kind, each.start_s, each.end_s) for each in intervals]
        for rank, intervals in enumerate(timeline.intervals)
    }


def _profile_rows(timeline: Profile) -> dict[int, list[tuple[str, float, float]]]:
    """As `_emulated_rows`; a trace has thousands of operators, so what touches becomes one bar."""
    from minidist.profile.intervals import merge

    return {
        rank: [
            (kind, start, end)
            for kind in ("compute", "loader", "copy", "communication")
            for start, end in merge([(s.start_s, s.end_s) for s in timeline.of(rank, kind)])
        ]
        for rank in timeline.ranks
    }


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
        _finish(ax, range(len(ranks)), width_s, "time of one forward = 1", title)
        if ax.get_xlabel().startswith("time ("):
            ax.set_xlabel("time")
        _legend(figure, [*(k for k in names.values() if k in shown), "idle"])
    return figure


def _letter(action: Any) -> str:
    kind = getattr(action.kind, "value", action.kind)
    return str(kind)[0].upper()


def _finish(ax: Axes, ranks: Sequence[int], width: float, unit: str, title: str) -> None:
    ax.set_yticks([row + 0.47 for row in range(len(ranks))])
    ax.set_yticklabels([f"rank {rank}" for rank in ranks])
    ax.set_ylim(len(ranks), 0)
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
