"""Each rank's work over time: one row per rank, communication below compute."""

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
    """Scale and name of the unit that suits a time: s, ms or µs.

    >>> unit_of(0.02)
    (0.001, 'ms')
    """
    return next(((scale, name) for scale, name in _UNITS if seconds >= scale), _UNITS[-1])


_MESSAGES = "communication"
# Kind -> offset and height inside a rank's row.
_LANES = {
    "compute": (0.06, 0.42),
    "loader": (0.06, 0.42),  # the loop waits for its batch and computes nothing
    "copy": (0.48, 0.12),
    "communication": (0.6, 0.28),
    "all-gather": (0.6, 0.28),
    "reduce-scatter": (0.6, 0.28),
}


def plot_timeline(
    timeline: Timeline | Profile,
    *,
    start_s: float | None = None,
    end_s: float | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Every rank's work over time: compute above, communication below.

    Args:
        timeline: a timeline of the emulated cluster; or of `minidist.profile`, which contains the
            steps of torch.profiler's traces (`from_profiler`, `read_trace`, `gather_timeline`). In
            a profile, lines mark the starts of steps, and adjacent operators become one bar.
        start_s, end_s: the range to show, in seconds of the timeline; by default all of it.

    Raises:
        ValueError: the range is empty.
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
                    [((low - start_s) / scale, (high - low) / scale)],
                    (row + offset, height),
                    color=COLOURS[kind],
                    edgecolor="white",
                    linewidth=0.0 if is_profile else 0.3,
                )
                if kind not in shown:
                    shown.append(kind)
            if is_profile:
                starts = [
                    window.start_s for window in timeline.steps if window.rank == [*rows][row]
                ]
                inside = [(at - start_s) / scale for at in starts if start_s <= at <= end_s]
                ax.vlines(inside, row + 0.02, row + 0.92, color=FAINT, linewidth=1.2)
        _finish(ax, list(rows), (end_s - start_s) / scale, unit, title)
        _legend(figure, [*shown, "idle"])
    return figure


def _is_profile(timeline: object) -> TypeIs[Profile]:
    """Whether a timeline is a profile, without an import of `minidist.profile`.

    The students' repository may lack that module. A caller with a profile has already imported it.
    """
    profile = sys.modules.get("minidist.profile")
    return profile is not None and isinstance(timeline, profile.Timeline)


def _emulated_rows(timeline: Timeline) -> dict[int, list[tuple[str, float, float]]]:
    """Rank -> (kind, start, end) of each of its intervals.

    If it has both all-gathers and reduce-scatters (sharded training), each gets a separate kind."""
    halves = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}

    def half_of(name: str) -> str:
        return next((kind for start, kind in halves.items() if name.startswith(start)), "")

    names = {each.name for row in timeline.intervals for each in row if each.kind == _MESSAGES}
    meet = set(halves.values()) <= {half_of(name) for name in names}
    return {
        rank: [
            (
                (half_of(each.name) if meet and each.kind == _MESSAGES else "") or each.kind,
                each.start_s,
                each.end_s,
            )
            for each in intervals
        ]
        for rank, intervals in enumerate(timeline.intervals)
    }


def _profile_rows(timeline: Profile) -> dict[int, list[tuple[str, float, float]]]:
    """As `_emulated_rows`; adjacent spans are merged, because a trace has thousands of them."""
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
    """A pipeline's schedule: numbered micro-batches; forward, backward, weight gradient, update."""
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
                    [(start, width)],
                    (rank + 0.06, 0.88),
                    color=COLOURS[kind],
                    edgecolor="white",
                    linewidth=0.8,
                )
                if width > 0.012 * width_s:
                    ax.text(
                        start + width / 2,
                        rank + 0.5,
                        str(span.action.micro_batch),
                        ha="center",
                        va="center",
                        fontsize=8,
                        color=text_colour(COLOURS[kind]),
                        fontweight="bold" if span.action.chunk % 2 else "normal",
                    )
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
    for legend in list(figure.legends):  # several timelines in one figure share one legend
        kinds = [*kinds, *(text.get_text() for text in legend.get_texts())]
        legend.remove()
    kinds = [kind for kind in COLOURS if kind in kinds]  # in one order, "idle" last
    handles = [square(COLOURS[kind], kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(kinds), frameon=False)
