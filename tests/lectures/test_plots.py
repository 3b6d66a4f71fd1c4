"""Figures and widgets: they draw the data that they are given, and their text can be read."""

from __future__ import annotations

import itertools

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from minidist import plots
from minidist.collectives import ring_steps
from minidist.collectives.algorithms import tree_steps
from minidist.emulate import Event, Trace, clusters, simulate
from minidist.parallel import pipeline
from minidist.plots.collective_steps import holdings
from minidist.plots.style import text_colour
from minidist.precision.formats import FORMATS
from minidist.profile import Span, Window, from_profiler
from minidist.profile import Timeline as Profile
from minidist.widgets import explore


def trace(*collectives: str):
    work = [Event(kind="compute", name="forward", duration_s=1e-3)]
    for i, name in enumerate(collectives or ("all_reduce",)):
        work += [
            Event(
                kind="issue", key=f"0/{i}", collective=name, ranks=(0, 1), nbytes=10**7, group="0"
            ),
            Event(kind="compute", name="backward", duration_s=2e-3),
            Event(kind="wait", key=f"0/{i}"),
        ]
    return Trace(world_size=2, events=[list(work), list(work)])


FIGURES = {
    "lines": lambda: plots.plot_lines(
        [1, 2, 4, 8],
        {"DDP": [1, 1.9, 3.7, 7.0], "flat": [1, 1.6, 2.9, 5.0], "naive": [1, 1.6, 2.9, 5.05]},
        xlabel="GPUs",
        ylabel="speed-up",
        ideal={"ideal": [1, 2, 4, 8]},
        logx=True,
        ticks=[1, 2, 4, 8],
    ),
    "bars": lambda: plots.plot_bars({"a": 1.0, "b": 2.0}, xlabel="time (s)", limit=1.5),
    "stacked": lambda: plots.plot_stacked(
        {"DDP": {"parameters": 14, "optimizer": 84}, "ZeRO-3": {"parameters": 2, "optimizer": 10}},
        xlabel="memory (GB)",
        limit=80,
        limit_label="80 GB",
    ),
    "timeline": lambda: plots.plot_timeline(simulate(trace(), clusters.pcie_a100()), title="t"),
    "profile": lambda: plots.plot_timeline(profiled(), title="t"),
    "pipeline": lambda: plots.plot_pipeline(
        pipeline.simulate(pipeline.interleaved(2, 4, 2)), title="t"
    ),
    "zero bubble": lambda: plots.plot_pipeline(pipeline.simulate(pipeline.zb_h1(3, 6))),
    "one step": lambda: plots.plot_step(ring_steps(3), 1),
    "all steps": lambda: plots.plot_steps(tree_steps(4)),
    "formats": lambda: plots.plot_formats(list(FORMATS.values())),
    "spacing": lambda: plots.plot_spacing(list(FORMATS.values())),
}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_no_text_lies_outside_of_the_figure_or_on_other_text(draw, monkeypatch):
    before = dict(matplotlib.rcParams)
    figure = draw()
    assert isinstance(figure, Figure)
    assert dict(matplotlib.rcParams) == before, "the user's own settings were changed"
    drawn: list[Text] = []
    draw_text = Text.draw
    monkeypatch.setattr(Text, "draw", lambda self, *a: (drawn.append(self), draw_text(self, *a))[1])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    card, renderer = figure.bbox, canvas.get_renderer()
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in dict.fromkeys(drawn)
        if text.get_text().strip() and text.get_visible()
    ]
    assert boxes
    for words, box in boxes:
        inside = (
            box.x0 >= card.x0 - 2
            and box.x1 <= card.x1 + 2
            and box.y0 >= card.y0 - 2
            and box.y1 <= card.y1 + 2
        )
        assert inside, f"{words!r} is cut off at {box}"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        width = min(a.x1, b.x1) - max(a.x0, b.x0)
        height = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width < 3 or height < 4, f"{one!r} lies on {other!r}"


def test_a_timeline_shows_what_happened():
    figure = FIGURES["timeline"]()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["compute", "communication", "idle"]
    assert figure.axes[0].get_xlabel() == "time (ms)"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_gathers_and_scatters_that_meet_have_colours_of_their_own():
    def draw(*collectives: str) -> list[str]:
        return legend_of(plots.plot_timeline(simulate(trace(*collectives), clusters.pcie_a100())))

    assert draw("all_gather", "reduce_scatter") == [
        *("compute", "all-gather", "reduce-scatter", "idle"),
    ]
    assert draw("all_gather", "all_reduce") == ["compute", "communication", "idle"]
    assert len(set(plots.COLOURS[kind] for kind in ("all-gather", "reduce-scatter"))) == 2


def test_drawings_in_one_figure_share_a_legend_of_all_their_kinds():
    figure, _ = plots.new_figure(7, 5)
    figure.clear()
    first, second, third = figure.subplots(3, 1)
    plots.plot_pipeline(pipeline.simulate(pipeline.gpipe(2, 2)), ax=first)
    plots.plot_pipeline(pipeline.simulate(pipeline.zb_h1(2, 4)), ax=second)
    plots.plot_pipeline(pipeline.simulate(pipeline.gpipe(2, 2)), ax=third)
    assert legend_of(figure) == ["forward", "backward", "weight", "idle"]


def test_a_number_in_a_step_is_always_that_of_a_chunk():
    figure = plots.plot_step(ring_steps(3), 2)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(text for text in texts if text.isdigit()) == sorted("012" * 3 + "012")


def profiled():
    """Two ranks of a profile: what a merged trace of torch.profiler looks like."""
    spans = [
        Span(rank=rank, lane=lane, kind=kind, name="op", start_s=1 + start, end_s=1 + end)
        for rank in (0, 2)
        for lane, kind, start, end in [
            ("thread 1", "loader", 0.0, 0.1),
            ("thread 1", "compute", 0.1, 0.3),
            ("thread 1", "compute", 0.3, 0.5),  # touches the one before
            ("thread 2", "communication", 0.4, 0.9),
        ]
    ]
    steps = [
        Window(rank=r, name=f"step {k}", start_s=1 + k / 2, end_s=1.5 + k / 2)
        for r in (0, 2)
        for k in (0, 1)
    ]
    return Profile(tuple(spans), tuple(steps))


def test_a_profiles_timeline_is_drawn_too():
    axes = (figure := plots.plot_timeline(profiled())).axes[0]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["compute", "loader", "communication", "idle"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 2"]
    assert axes.get_xlim() == pytest.approx((0, 1000 if axes.get_xlabel() == "time (ms)" else 1))
    bars = [each for each in axes.collections if isinstance(each, PolyCollection)]
    assert len(bars) == 2 * 3, "loader, the two operators as one, communication"
    marks = [each for each in axes.collections if isinstance(each, LineCollection)]
    assert [len(each.get_segments()) for each in marks] == [2, 2], "the steps' starts"
    assert len(plots.plot_timeline(profiled(), start_s=1.45, end_s=1.6).axes[0].collections) < 8
    with pytest.raises(ValueError, match=r"nothing between 1\.0 s and 0\.5 s"):
        plots.plot_timeline(profiled(), end_s=0.5)
    # And from torch.profiler itself.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            with torch.profiler.record_function("step"):
                torch.ones(64, 64) @ torch.ones(64, 64)
    axes = plots.plot_timeline(from_profiler(profile, step="step")).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0"]
    marks = [each for each in axes.collections if isinstance(each, LineCollection)]
    assert [len(each.get_segments()) for each in marks] == [3]


@pytest.mark.parametrize("schedule", [ring_steps(4), tree_steps(5)], ids=lambda s: s.name)
def test_in_the_end_everybody_holds_everything(schedule):
    everyone = frozenset(range(schedule.world_size))
    for rank in holdings(schedule, len(schedule.steps)):
        assert set(rank) == {everyone}
    assert all(len(chunk) == 1 for rank in holdings(schedule, 0) for chunk in rank)


def test_text_on_every_colour_can_be_read():
    def luminance(colour):
        parts = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in matplotlib.colors.to_rgb(colour)
        ]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    for colour in {*plots.COLOURS.values(), *plots.PALETTE}:
        light, dark = sorted((luminance(colour), luminance(text_colour(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, colour


# -- widgets -------------------------------------------------------------------------------------


def curve(power: int = 2, scale: float = 1.0, name: str = "a", grid: bool = True, n: int = 8):
    """A power of x."""
    if power == 3:
        raise ZeroDivisionError("no <cubes>")
    return plots.plot_lines([1, 2], {name: [scale, scale * 2**power]}, xlabel="x", ylabel="y")


def test_controls_run_the_computation_again():
    widget = explore(
        curve,
        power=(1, 5),
        scale=(0.5, 2.0),
        name=["a", "b"],
        grid=True,
        n=[4, 8, 16],
        labels={"power": "power of x"},
    )
    kinds = {name: type(control).__name__ for name, control in widget.controls.items()}
    assert kinds == {
        "power": "IntSlider",
        "scale": "FloatSlider",
        "name": "ToggleButtons",
        "grid": "Checkbox",
        "n": "SelectionSlider",
    }
    assert widget.controls["power"].description == "power of x"
    first = widget.png
    widget.controls["power"].value = 4
    assert widget.png != first
    assert 'alt="A power of x."' in widget.picture.value
    widget.controls["power"].value = 3
    assert "ZeroDivisionError: no &lt;cubes&gt;" in widget.picture.value


def test_without_a_browser_there_is_a_picture():
    bundle = explore(curve, power=(1, 5))._repr_mimebundle_()
    assert bundle["image/png"].startswith("iVBOR")
    assert bundle["text/plain"].startswith("A power of x. (power = 2)")
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"]


def test_wrong_use_says_what_is_right():
    with pytest.raises(ValueError, match=r"no parameter 'colour' with a default; it has \['power'"):
        explore(curve, colour=(1, 2))
    with pytest.raises(ValueError, match=r"'n' begins at 8, which is not in \[1, 2\]"):
        explore(curve, n=[1, 2])
    with pytest.raises(ZeroDivisionError):
        explore(lambda x=0: 1 / x, x=(0, 1))
