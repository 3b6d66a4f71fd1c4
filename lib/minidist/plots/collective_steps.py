"""A collective step by step, drawn from the same `Schedule` that the ranks execute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from minidist.plots.style import FAINT, INK, PALETTE, into, style

if TYPE_CHECKING:
    from minidist.collectives.schedule import Schedule, Transfer

_COPY, _REDUCE = PALETTE[2], PALETTE[5]


def plot_step(
    schedule: Schedule, step: int, *, title: str | None = None, ax: Axes | None = None
) -> Figure:
    """What every rank holds before step number `step` (from 0), and what this step sends.

    A chunk has its number, as the arrows do, and is filled up to the share of ranks whose
    contributions it contains; one with the contributions of all ranks is complete. If `step` is the
    number of steps, the figure shows the final state.
    """
    inner = ax is not None
    held = holdings(schedule, step)
    n, num_chunks = schedule.world_size, schedule.num_chunks
    figure, ax = into(ax, 5.2, 5.2)
    size = 0.9 / num_chunks
    with style():
        places = {
            rank: (
                1.3 * math.sin(2 * math.pi * rank / n),
                1.3 * math.cos(2 * math.pi * rank / n),
            )
            for rank in range(n)
        }
        for rank, (x, y) in places.items():
            ax.text(x, y + 0.24, f"rank {rank}", ha="center", va="bottom", fontsize=9, color=INK)
            for chunk in range(num_chunks):
                _draw_chunk(
                    ax, x - 0.45 + chunk * size, y - 0.2, size, chunk, len(held[rank][chunk]) / n
                )
        if step < len(schedule.steps):
            for transfer in schedule.steps[step]:
                _draw_transfer(ax, transfer, places[transfer.src], places[transfer.dst])
        ax.set(xlim=(-2.0, 2.0), ylim=(-1.75, 1.95), aspect="equal")
        ax.axis("off")
        total = len(schedule.steps)
        ax.set_title(
            title
            if title is not None
            else f"{schedule.name}: "
            + (f"step {step + 1} of {total}" if step < total else f"after {total} steps")
        )
        if not inner:
            _legend(figure, columns=2)
    return figure


def plot_steps(schedule: Schedule, *, columns: int = 3, title: str | None = None) -> Figure:
    """All steps of a collective, and its final state, in one figure."""
    count = len(schedule.steps) + 1
    rows = math.ceil(count / columns)
    with style():
        figure = Figure(figsize=(3.4 * columns, 3.4 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for step, ax in enumerate(axes):
            if step >= count:
                ax.axis("off")
                continue
            name = f"step {step + 1}" if step < count - 1 else "the end"
            plot_step(schedule, step, title=name, ax=ax)
        figure.suptitle(title or schedule.name, x=0.01, ha="left", fontweight="bold", fontsize=12)
        _legend(figure)
    return figure


def holdings(schedule: Schedule, step: int) -> list[list[frozenset[int]]]:
    """Per rank and chunk: the ranks whose contributions the chunk contains before a step.

    >>> from minidist.collectives.algorithms import ring_steps
    >>> [len(chunk) for chunk in holdings(ring_steps(3), 2)[0]]
    [3, 2, 1]
    """
    held = [
        [frozenset({rank}) for _ in range(schedule.num_chunks)]
        for rank in range(schedule.world_size)
    ]
    for transfers in schedule.steps[:step]:
        before = [list(rank) for rank in held]
        for t in transfers:
            for chunk in t.chunks:
                sent = before[t.src][chunk]
                own = held[t.dst][chunk]
                held[t.dst][chunk] = own | sent if t.action == "reduce" else sent
    return held


def _legend(figure: Figure, columns: int = 4) -> None:
    handles = [
        Line2D([], [], color=_REDUCE, label="adds the chunk of this number"),
        Line2D([], [], color=_COPY, label="copies it"),
        Patch(color=PALETTE[4], label="ranks summed so far"),
        Patch(color=PALETTE[0], label="all of them"),
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9
    )


def _draw_transfer(
    ax: Axes, transfer: Transfer, a: tuple[float, float], b: tuple[float, float]
) -> None:
    """An arrow from place `a` to place `b`, with the transfer's chunk on it."""
    colour = _REDUCE if transfer.action == "reduce" else _COPY
    ax.add_patch(
        FancyArrowPatch(
            a,
            b,
            arrowstyle="-|>",
            mutation_scale=14,
            color=colour,
            linewidth=1.8,
            shrinkA=38,
            shrinkB=38,
            connectionstyle="arc3,rad=0.12",
            zorder=3,
        )
    )
    ax.text(
        0.5 * (a[0] + b[0]) * 1.02,
        0.5 * (a[1] + b[1]) * 1.02,
        str(transfer).split(" -")[1].split("->")[0],
        fontsize=9,
        color=colour,
        ha="center",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        zorder=4,
    )


def _draw_chunk(ax: Axes, x: float, y: float, size: float, chunk: int, share: float) -> None:
    full = share == 1
    colour = PALETTE[0] if full else PALETTE[4]
    ax.add_patch(Rectangle((x, y), size * 0.94, 0.4, facecolor="white", edgecolor=FAINT, lw=0.8))
    ax.add_patch(Rectangle((x, y), size * 0.94, 0.4 * share, facecolor=colour, lw=0))
    ax.text(
        x + size * 0.47,
        y + 0.2,
        str(chunk),
        ha="center",
        va="center",
        fontsize=8,
        color="white" if full else INK,
    )
