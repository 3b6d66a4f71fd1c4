"""The pictures of a figure with controls, drawn beforehand, for pages that run no Python.

The same limits hold for all figures. Up to `MOST_TOGETHER` combinations of the controls' values are
all drawn. If there are more, each control moves alone, while the others keep their first value. A
range of more than `MOST_STOPS` values is drawn in larger steps (of 2, 5, 10, 20, ... values). If
even this needs more than `MOST_PICTURES`, or if the first drawing shows that all pictures would
take more than `MOST_SECONDS` of the processor, there is one picture, and the controls are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from minidist.plots.style import describe

MOST_TOGETHER = 100
MOST_STOPS = 31
MOST_PICTURES = 150
MOST_SECONDS = 60.0
_ALT_CHARACTERS = 300


@dataclass(frozen=True)
class Choice:
    """A control, and the values that it can be moved to.

    Attributes:
        name: of the argument of `draw`.
        label: what readers see beside the control.
        values: in the control's order.
        first: index of the value that the control begins at.
        some: whether the control has more values, which are left out.
    """

    name: str
    label: str
    values: Sequence[Any]
    first: int
    some: bool = False


def stops(low: float, high: float, step: float, begin: float) -> tuple[list[Any], bool]:
    """The values of a range that get a picture, its ends and `begin` among them; whether others
    are left out.

    >>> stops(0, 4, 2, 2)
    ([0, 2, 4], False)
    >>> stops(0, 100, 1, 33)[0][:9]
    [0, 5, 10, 15, 20, 25, 30, 33, 35]
    """
    count = int((high - low) / step + 1e-9) + 1
    strides = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    stride = next(each for each in strides if math.ceil(count / each) <= MOST_STOPS)
    whole = all(isinstance(number, int) for number in (low, step, begin))
    found = {low + i * step for i in (*range(0, count, stride), count - 1)}
    if not whole:
        found = {round(value, 10) for value in found}
    return sorted(found | {begin}), stride > 1


def combinations(choices: Sequence[Choice]) -> tuple[list[tuple[int, ...]], bool]:
    """Indices of the values of each picture, the first ones first; whether these are all.

    >>> combinations([Choice("a", "a", (1, 2), 1), Choice("b", "b", (7, 8), 0)])
    ([(1, 0), (0, 0), (0, 1), (1, 1)], True)
    """
    first = tuple(choice.first for choice in choices)
    places = [range(len(choice.values)) for choice in choices]
    together = math.prod(map(len, places)) <= MOST_TOGETHER
    if together:
        wanted = list(itertools.product(*places))
    else:
        wanted = [(*first[:i], k, *first[i + 1 :]) for i, row in enumerate(places) for k in row]
    return list(dict.fromkeys([first, *wanted])), together


def draw_all(
    draw: Callable[..., Figure], choices: Sequence[Choice], alt: str, folder: Path
) -> dict[str, Any]:
    """Draws every picture into `folder`; what a page needs to show them, as JSON.

    Args:
        draw: takes the controls' values by name.
        choices: the controls.
        alt: describes what all pictures show.
        folder: is made if it is missing; files are named after their content.

    Returns:
        `controls`; `fixed`: whether only the first picture was drawn; `together`: whether there is
        one of each combination; `pictures`: indices of the values, with commas -> the picture's
        `file` and `alt`, or the `text` of the error that `draw` raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted, together = combinations(choices)

    def drawn(some: Sequence[tuple[int, ...]]) -> dict[str, dict[str, str]]:
        found = {}
        for indices in some:
            pairs = zip(choices, indices, strict=True)
            values = {choice.name: choice.values[i] for choice, i in pairs}
            found[",".join(map(str, indices))] = _picture(draw, values, alt, folder)
        return found

    began = _processor_s()
    pictures = drawn(wanted[:1])
    seconds = (_processor_s() - began) * len(wanted)
    fixed = len(wanted) > MOST_PICTURES or seconds > MOST_SECONDS
    if not fixed:
        pictures |= drawn(wanted[1:])
    return {
        "controls": [_control(choice) for choice in choices],
        "fixed": fixed,
        "together": together,
        "pictures": pictures,
    }


def _control(choice: Choice) -> dict[str, Any]:
    kind = "select" if any(isinstance(value, str) for value in choice.values) else "range"
    return {
        "label": choice.label,
        "values": [_shown(value) for value in choice.values],
        "kind": "checkbox" if isinstance(choice.values[0], bool) else kind,
        "first": choice.first,
        "some": choice.some,
    }


def _picture(
    draw: Callable[..., Figure], values: dict[str, Any], alt: str, folder: Path
) -> dict[str, str]:
    unnamed = folder / "unnamed.webp"
    # Warnings and printed text of values that nobody has chosen would stand above the figure.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            figure = draw(**values)
        except Exception as error:  # the page shows it, as the notebook does
            return {"text": f"{type(error).__name__}: {error}"}
        figure.savefig(unnamed, dpi=110, pil_kwargs={"lossless": True, "method": 1})
    file = f"{hashlib.sha256(unnamed.read_bytes()).hexdigest()[:20]}.webp"
    unnamed.replace(folder / file)
    return {"file": file, "alt": f"{alt.rstrip('.')}: {describe(figure)}"[:_ALT_CHARACTERS]}


def _processor_s() -> float:
    """Seconds of this process and of those that it has started: a busy machine adds none."""
    times = os.times()
    return sum(times[:4])


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
