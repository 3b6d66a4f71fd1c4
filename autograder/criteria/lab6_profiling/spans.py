"""Traces that the referee draws: spans as arrays, and the right results for them.

The judge does not merge intervals as a student would. It cuts the time axis at every start and
end of a span, and finds for each piece which kinds of span run in this piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from autograder.criteria.criterion import Values

KINDS = ("compute", "communication", "copy", "loader", "host")
_WORDS = ("gemm", "softmax", "layer_norm", "gelu", "embed", "attn", "bias", "reduce", "conv", "sgd")


@dataclass(frozen=True)
class Span:
    """The same as the lab's own `Span`: an activity with its start and end, in seconds."""

    rank: int
    kind: str
    name: str
    start: float
    end: float


def pack(spans: Sequence[Span], prefix: str) -> Values:
    """Spans as arrays that can be sent to a rank."""
    return {
        f"{prefix}/rank": np.array([s.rank for s in spans], dtype=np.int64),
        f"{prefix}/kind": np.array([KINDS.index(s.kind) for s in spans], dtype=np.int64),
        f"{prefix}/start": np.array([s.start for s in spans], dtype=np.float64),
        f"{prefix}/end": np.array([s.end for s in spans], dtype=np.float64),
        f"{prefix}/names": [s.name for s in spans],
    }


def unpack(values: Values, prefix: str) -> list[Span]:
    """The spans that `pack` was given."""
    columns = (values[f"{prefix}/{c}"].tolist() for c in ("rank", "kind", "start", "end"))
    return [
        Span(rank, KINDS[kind], name, start, end)
        for rank, kind, start, end, name in zip(*columns, values[f"{prefix}/names"], strict=True)
    ]


def draw_name(rng: np.random.Generator) -> str:
    """A name that says nothing about its kind."""
    number = int(rng.integers(1 << 24))
    return f"{_WORDS[number % len(_WORDS)]}_{number:06x}"


def active_seconds(spans: Sequence[Span], start: float, end: float) -> dict[frozenset[str], float]:
    """Seconds of the window, by the set of kinds that run at that moment."""
    inside = [s for s in spans if s.end > start and s.start < end and s.end > s.start]
    cuts = {start, end} | {t for s in inside for t in (s.start, s.end) if start < t < end}
    points = sorted(cuts)
    found: dict[frozenset[str], float] = {}
    for left, right in pairwise(points):
        middle = (left + right) / 2
        kinds = frozenset(s.kind for s in inside if s.start <= middle < s.end)
        found[kinds] = found.get(kinds, 0.0) + right - left
    return found


def seconds_of(found: dict[frozenset[str], float], *kinds: str) -> float:
    """Seconds in which all of these kinds run."""
    return math.fsum(v for active, v in found.items() if active.issuperset(kinds))


def covered(spans: Sequence[Span], kinds: Iterable[str], start: float, end: float) -> float:
    """Seconds of the window in which a span of one of `kinds` runs: the lab's own helper."""
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    return math.fsum(v for k, v in active_seconds(spans, start, end).items() if k & wanted)


def expected_spans(events: Sequence[Values]) -> list[Span]:
    """The spans that the lab's table makes of the events."""
    timed = [event for event in events if "dur" in event and event.get("ph") == "X"]
    categories = {event["cat"] for event in timed}
    loading = [event for event in timed if event["name"].startswith("enumerate(DataLoader)")]
    spans = []
    for event in timed:
        name, category, kind = event["name"], event["cat"], None
        start, end = event["ts"], event["ts"] + event["dur"]
        if event in loading:
            kind = "loader"
        elif category == "kernel":
            kind = "communication" if name.startswith("nccl") else "compute"
        elif category in ("gpu_memcpy", "gpu_memset"):
            kind = "copy"
        elif category == "user_annotation" and name.startswith("gloo:"):
            kind = "communication"
        elif category == "user_annotation" and name.startswith("host:"):
            kind = "host"
        elif category == "cpu_op" and "kernel" not in categories and not name.startswith("c10d::"):
            inside = any(
                o["tid"] == event["tid"] and o["ts"] <= start and end <= o["ts"] + o["dur"]
                for o in loading
            )
            kind = None if inside else "compute"
        if kind:
            spans.append(Span(0, kind, name, start / 1e6, end / 1e6))
    return spans


def is_same(got: Any, wanted: Any) -> bool:
    """Equality of plain values of the same type; an array never equals a list, for example."""
    return type(got) is type(wanted) and got == wanted
