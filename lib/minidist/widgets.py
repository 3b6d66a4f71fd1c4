"""Figures with controls, for lectures: moving a slider runs a real computation again.

Example, in a notebook::

    def buckets(cap_mb: float = 25.0, latency_us: float = 10.0) -> Figure: ...

    explore(buckets, cap_mb=(1, 100), latency_us=[1, 10, 100],
            labels={"cap_mb": "bucket size (MB)", "latency_us": "latency (µs)"})

The controls have labels and work by keyboard: Tab goes from one control to the next, arrow keys
move a slider, the space bar presses a button. There are no drop-down menus, because in JupyterLab
the arrow keys would go to the notebook and select a different cell. The output also holds the first
figure as a picture. Programs without a browser (papermill, GitHub, HTML) show this picture instead
of the controls. Where MINIDIST_PICTURES names a folder, as it does when the course's site is
made, a picture for each value is drawn into it (`minidist.plots.stills`), and the controls move on
the page.

On a kernel with several ranks the controls exist on rank 0 only, so `draw` must use rank 0 only: a
callback that calls a collective would wait for ranks that never call it.
"""

from __future__ import annotations

import base64
import html
import inspect
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from minidist.plots.stills import Choice, draw_all, stops

PICTURES = "application/vnd.minidist.pictures+json"
Control = tuple[float, float] | tuple[float, float, float] | Sequence[Any] | bool
_MOST_BUTTONS = 6  # a list of more texts gets a slider instead of buttons


def explore(
    draw: Callable[..., Figure],
    *,
    labels: Mapping[str, str] | None = None,
    alt: str = "",
    **controls: Control,
) -> Explorer:
    """Show the figure that `draw` returns, with a control for each argument named in `controls`.

    Args:
        draw: takes the controls' values by name. The defaults of its parameters are the initial
            values of the controls. An exception of `draw` is shown in place of the figure; if the
            first drawing fails, `explore` also raises the exception.
        labels: names of the controls with their units; default: the parameter's name.
        alt: describes the figure for readers who cannot see it; default: first line of `draw`'s
            docstring.
        controls: (low, high) or (low, high, step) for a slider (of whole numbers, if all are
            integers), a list of values for a slider over them, a list of a few texts for a row of
            buttons, True or False for a check box.

    Raises:
        ValueError: `draw` has no such parameter, or no default for it, or its default is not in
            the list of values.
    """
    return Explorer(draw, controls, dict(labels or {}), alt)


class Explorer:
    """A figure and its controls; shown when it is the last value of a cell."""

    def __init__(
        self,
        draw: Callable[..., Figure],
        controls: Mapping[str, Control],
        labels: Mapping[str, str],
        alt: str,
    ) -> None:
        self._draw = draw
        self._alt = alt or (inspect.getdoc(draw) or draw.__name__).split("\n")[0]
        self.controls: dict[str, Any] = {}
        parameters = inspect.signature(draw).parameters
        self._labels = {name: labels.get(name, name) for name in controls}
        label_em = 0.55 * max(map(len, self._labels.values()), default=0) + 1
        for name, control in controls.items():
            if name not in parameters or parameters[name].default is inspect.Parameter.empty:
                defaults = [p.name for p in parameters.values() if p.default is not p.empty]
                raise ValueError(
                    f"explore: {draw.__name__} has no parameter {name!r} with a default; it has "
                    f"{defaults}"
                )
            begin = parameters[name].default
            self.controls[name] = _make_control(control, begin, self._labels[name], label_em)
        self.picture = ipywidgets.HTML()
        rows = [_row(self.controls[name], self._labels[name], label_em) for name in controls]
        self.box = ipywidgets.VBox([*rows, self.picture])
        for widget in self.controls.values():
            widget.observe(self._changed, names="value")
        self.png = b""
        self._changed(None)

    @property
    def values(self) -> dict[str, Any]:
        """The current values of the controls."""
        return {name: widget.value for name, widget in self.controls.items()}

    def _changed(self, change: Any) -> None:
        try:
            figure = self._draw(**self.values)
        except Exception as error:
            text = html.escape(f"{type(error).__name__}: {error}")
            self.picture.value = f'<pre role="alert">{text}</pre>'
            if change is None:
                raise
            return
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        self.png = buffer.getvalue()
        data = base64.b64encode(self.png).decode()
        alt = html.escape(self._alt, quote=True)
        source = f'src="data:image/png;base64,{data}"'
        self.picture.value = f'<img style="max-width: 100%" alt="{alt}" {source}>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        where = ", ".join(f"{self._labels[n]} = {value}" for n, value in self.values.items())
        bundle: dict[str, Any] = {
            "application/vnd.jupyter.widget-view+json": view,
            "image/png": base64.b64encode(self.png).decode(),
            "text/plain": f"{self._alt} ({where}). Open the notebook in JupyterLab to change it.",
        }
        if folder := os.environ.get("MINIDIST_PICTURES"):
            choices = [_choice(name, self._labels[name], c) for name, c in self.controls.items()]
            bundle[PICTURES] = draw_all(self._draw, choices, self._alt, Path(folder))
        return bundle


def _choice(name: str, label: str, control: Any) -> Choice:
    """The values that a page without a kernel can show."""
    some = False
    if isinstance(control, ipywidgets.Checkbox):
        values: Sequence[Any] = (False, True)
    elif isinstance(control, ipywidgets.ToggleButtons | ipywidgets.SelectionSlider):
        values = control.options
    else:
        values, some = stops(control.min, control.max, control.step, control.value)
    return Choice(name, label, values, values.index(control.value), some)


def _row(control: Any, label: str, label_em: float) -> Any:
    """A control beside its label. Buttons need a separate label: theirs would be above them."""
    if not isinstance(control, ipywidgets.ToggleButtons):
        return control
    place = ipywidgets.Layout(width=f"{label_em:.1f}em", display="flex", justify_content="flex-end")
    return ipywidgets.HBox([ipywidgets.Label(label, layout=place), control])


def _make_control(control: Control, value: Any, label: str, label_em: float) -> Any:
    """One control. All labels are as wide as the longest label, so that the controls line up."""
    style = {"description_width": f"{label_em:.1f}em"}
    common: dict[str, Any] = {"value": value, "description": label, "style": style}
    wide = ipywidgets.Layout(width=f"{label_em + 26:.1f}em", max_width="100%")
    if isinstance(control, bool):
        return ipywidgets.Checkbox(**common)
    if isinstance(control, tuple):
        low, high, *step = control
        whole = all(isinstance(number, int) for number in (*control, value))
        slider = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
        size = step[0] if step else (1 if whole else (high - low) / 100)
        return slider(**common, min=low, max=high, step=size, continuous_update=False, layout=wide)
    options = list(control)
    if value not in options:
        raise ValueError(f"explore: {label!r} begins at {value!r}, which is not in {options}")
    if all(isinstance(option, str) for option in options) and len(options) <= _MOST_BUTTONS:
        return ipywidgets.ToggleButtons(
            value=value,
            options=options,
            style={"button_width": "auto"},
            tooltips=[f"{label}: {option}" for option in options],
            layout=ipywidgets.Layout(width="auto", max_width="100%"),
        )
    return ipywidgets.SelectionSlider(
        **common, options=options, continuous_update=False, layout=wide
    )


@dataclass
class Prediction:
    """A question with the reader's guess; `reveal` shows the measured value beside it."""

    question: str
    guess: Any
    unit: str = ""
    measured: Any = None

    def reveal(self, measured: Any) -> Prediction:
        """Keep the measured value, and show both."""
        self.measured = measured
        return self

    def __str__(self) -> str:
        known = "none yet; write one in place of None and run this cell again"
        guess = known if self.guess is None else self._with_unit(self.guess)
        if self.measured is None:
            return f"{self.question}  Your guess: {guess}"
        guess = "none" if self.guess is None else guess
        return f"{self.question}  Your guess: {guess}. Found: {self._with_unit(self.measured)}"

    __repr__ = __str__

    def _with_unit(self, value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return f"{text} {self.unit}".rstrip()


def predict(question: str, guess: Any = None, *, unit: str = "") -> Prediction:
    """Keep a guess before anything is measured.

    >>> share = predict("Which part of the tokens is dropped?", guess=5, unit="%")
    >>> share
    Which part of the tokens is dropped?  Your guess: 5 %
    >>> predict("How many?").reveal(3)
    How many?  Your guess: none. Found: 3
    >>> share.reveal(11.52)
    Which part of the tokens is dropped?  Your guess: 5 %. Found: 11.52 %

    Args:
        question: what is to be guessed.
        guess: a number or a text; None means no guess.
        unit: of the guess and of the measured value.
    """
    return Prediction(question, guess, unit)
