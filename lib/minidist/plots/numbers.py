"""Floating-point formats: their bits, and the distance between neighbouring numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minidist.plots.charts import plot_lines
from minidist.plots.style import INK, PALETTE, into, style, text_colour


class FloatFormat(Protocol):
    """The attributes of `minidist.precision.Format` that the figures use."""

    @property
    def name(self) -> str: ...
    @property
    def exponent_bits(self) -> int: ...
    @property
    def mantissa_bits(self) -> int: ...


def plot_formats(formats: Sequence[FloatFormat], *, ax: Axes | None = None) -> Figure:
    """Sign, exponent and mantissa of each format, one square per bit."""
    figure, ax = into(ax, height=0.7 + 0.45 * len(formats))
    with style():
        for row, each in enumerate(formats):
            parts = (
                ("s", 1, "#000000"),
                ("exponent", each.exponent_bits, PALETTE[1]),
                ("mantissa", each.mantissa_bits, PALETTE[0]),
            )
            at = 0
            for name, bits, colour in parts:
                ax.broken_barh(
                    [(at + i, 1) for i in range(bits)],
                    (row + 0.12, 0.76),
                    color=colour,
                    edgecolor="white",
                    linewidth=0.5,
                )
                if bits > 1:
                    words = f"{bits} {name}" if bits > 6 else str(bits)
                    ax.text(
                        at + bits / 2,
                        row + 0.5,
                        words,
                        ha="center",
                        va="center",
                        fontsize=9,
                        color=text_colour(colour),
                    )
                at += bits
            ax.text(at + 0.4, row + 0.5, f"{at} bits", va="center", color=INK, fontsize=9)
        ax.set_yticks([row + 0.5 for row in range(len(formats))])
        ax.set_yticklabels([each.name for each in formats])
        ax.set_ylim(len(formats), 0)
        ax.set_xlim(0, max(1 + f.exponent_bits + f.mantissa_bits for f in formats) + 4)
        ax.tick_params(axis="y", length=0)
        ax.set_xticks([])
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
    return figure


def plot_spacing(formats: Sequence[FloatFormat], *, ax: Axes | None = None) -> Figure:
    """Gap between neighbouring numbers divided by their size, from tiny to huge numbers.

    The curve is flat for normal numbers. To the left it rises: subnormal numbers lose digits.
    """
    lines, xs = {}, {}
    for each in formats:
        bias = 2 ** (each.exponent_bits - 1) - 1
        smallest = 1 - bias
        exponents = np.arange(smallest - each.mantissa_bits, bias + 1)
        gap = np.maximum(exponents, smallest) - each.mantissa_bits
        xs[each.name] = 2.0 ** exponents.clip(-320, 320)
        lines[each.name] = 2.0 ** (gap - exponents).astype(float)
    return plot_lines(
        xs,
        lines,
        xlabel="size of the number",
        ylabel="gap to the next, relative",
        logx=True,
        logy=True,
        markers=False,
        ax=ax,
    )
