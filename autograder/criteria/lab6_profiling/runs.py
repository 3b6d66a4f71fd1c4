"""Makes traces of runs with several ranks from a table: seconds per part, step and rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from autograder.criteria.lab6_profiling.spans import Span, draw_name

_WAITS = ("host", "loader", "copy")  # in the order in which a step meets them


@dataclass
class Run:
    """What each rank does in each step; a usual step has length 1. Step 0 is the warm-up.

    Attributes:
        lengths: of the steps; all ranks share them.
        parts: kind -> array [step, rank] of the seconds that `breakdown` should give this kind.
        hidden: kind -> share of the computation during which this kind runs as well.
        across: a kind whose spans go on from the end of a step into the next one.
        beyond: the share of a step for which spans of that kind go on after the last step.
    """

    lengths: np.ndarray
    parts: dict[str, np.ndarray]
    hidden: dict[str, float] = field(default_factory=dict)
    across: str = ""
    beyond: float = 0.0

    @classmethod
    def quiet(
        cls,
        rng: np.random.Generator,
        steps: int | Literal["ranks"] | None = None,
        small: float = 0.02,
        ranks: int | None = None,
    ) -> Run:
        """A run that loses next to nothing.

        Args:
            ranks: how many there are. Default: 3 to 5.
            steps: that count; "ranks" are two more than there are ranks. Default: 2 to 4.
            small: no loss is larger than this share.
        """
        num_ranks = ranks or int(rng.integers(3, 6))
        count = num_ranks + 2 if steps == "ranks" else steps or int(rng.integers(2, 5))
        shape = (1 + count, num_ranks)
        parts = {kind: rng.uniform(0, small, shape) for kind in _WAITS}
        parts["compute"] = rng.uniform(0.3, 0.35) + rng.uniform(0, small / 4, shape)
        parts["communication"] = np.tile(rng.uniform(0, small, (1 + count, 1)), num_ranks)
        return cls(np.ones(1 + count), parts)

    @property
    def num_ranks(self) -> int:
        """How many ranks the run has."""
        return self.parts["compute"].shape[1]

    def add(
        self,
        part: str,
        seconds: float,
        ranks: list[int] | None = None,
        steps: list[int] | None = None,
    ) -> None:
        """Lets some ranks (default: all) spend more seconds with a part, in some steps."""
        table = self.parts[part]
        rows = range(len(table)) if steps is None else steps
        table[np.ix_(list(rows), range(self.num_ranks) if ranks is None else ranks)] += seconds

    def shorten(self, step: int, factor: float) -> None:
        """Makes a step shorter, with everything in it."""
        self.lengths[step] *= factor
        for table in self.parts.values():
            table[step] *= factor

    def hide(self, kind: str, share: float) -> None:
        """Lets work of a kind run beside this share of each computation as well."""
        self.hidden[kind] = share

    def build(self, rng: np.random.Generator) -> tuple[list[Span], list[tuple[float, float]]]:
        """The spans of all ranks and the window of each step, on a clock of seconds."""
        scale, now = float(rng.uniform(0.02, 0.4)), float(rng.uniform(0, 20))
        spans: list[Span] = []
        windows: list[tuple[float, float]] = []
        for step, length in enumerate(self.lengths.tolist()):
            end = now + scale * length
            windows.append((now, end))
            for rank in range(self.num_ranks):
                seconds = {k: float(t[step, rank]) * scale for k, t in self.parts.items()}
                assert sum(seconds.values()) <= end - now, "a step has more in it than its length"
                self._fill(rng, spans, rank, seconds, now, end)
            now = end
        if self.beyond:
            more = Span(0, self.across, draw_name(rng), now, now + scale * self.beyond)
            spans += [replace(more, rank=rank) for rank in range(self.num_ranks)]
        return (_joined(spans, self.across) if self.across else spans), windows

    def _fill(
        self,
        rng: np.random.Generator,
        spans: list[Span],
        rank: int,
        seconds: dict[str, float],
        now: float,
        end: float,
    ) -> None:
        """Adds one step of one rank: waits, computation, exposed communication, nothing."""

        def add(kind: str, begin: float, length: float) -> None:
            if length > 0:
                spans.append(Span(rank, kind, draw_name(rng), begin, begin + length))

        for kind in sorted(_WAITS, key=lambda k: k != self.across):
            length = seconds[kind]
            if kind == self.across:
                length /= 2
                add(kind, end - length, length)
            add(kind, now, length)
            now += length
        computed = now + seconds["compute"]
        cuts = [now, *np.sort(rng.uniform(now, computed, 3)).tolist(), computed]
        for one, two in pairwise(cuts):
            add("compute", one, two - one)
        add("compute", (3 * now + computed) / 4, (computed - now) / 4)  # a second stream
        for kind in _WAITS:
            length = self.hidden.get(kind, 0.0) * seconds["compute"]
            add(kind, float(rng.uniform(now, computed - length)), length)
        # Collectives follow one another: the first ones are hidden, the last ones are not.
        begin = computed - self.hidden.get("communication", 0.2) * seconds["compute"]
        marks = np.linspace(begin, computed + seconds["communication"], int(rng.integers(6, 15)))
        for one, two in pairwise(marks.tolist()):
            add("communication", one, two - one)


def _joined(spans: list[Span], kind: str) -> list[Span]:
    """The spans; two of this kind that touch at the end of a step become one."""
    kept = [s for s in spans if s.kind != kind]
    for rank in {s.rank for s in spans}:
        own = sorted((s for s in spans if s.kind == kind and s.rank == rank), key=lambda s: s.start)
        for span in own:
            last = kept[-1]
            if (last.rank, last.kind) == (rank, kind) and abs(last.end - span.start) < 1e-12:
                kept[-1] = Span(rank, kind, last.name, last.start, span.end)
            else:
                kept.append(span)
    return kept
