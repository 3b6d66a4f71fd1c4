"""Each rank's work over time, in one format for all sources.

A `Timeline` is a list of `Span`s. Its sources are

- torch.profiler, or an exported trace file of torch.profiler: `minidist.profile.trace`;
- the emulated cluster: `from_emulated(timeline)`;
- your own measurements: `Timeline(spans)`.

`minidist.profile.overlap` computes the shares of a step from a timeline.
`save_chrome_trace(timeline, path)` writes a file for Perfetto (https://ui.perfetto.dev) or
chrome://tracing, which show all ranks below each other.

>>> timeline = Timeline((
...     Span(rank=0, lane="device", kind="compute", name="backward", start_s=0, end_s=3),
...     Span(rank=0, lane="network", kind="communication", name="all_reduce", start_s=2, end_s=4),
... ))
>>> timeline.makespan_s, timeline.ranks, timeline.collectives(0)
(4, (0,), {'all_reduce': 1})
>>> [event["name"] for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]
['backward', 'all_reduce']
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch.distributed as dist

    from minidist.emulate.simulate import Timeline as EmulatedTimeline

Kind = Literal["compute", "communication", "copy", "loader", "idle"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Spans whose name has this prefix are the host's calls that pass a collective to the backend's
# thread. Their time counts as communication, but they do not count as collectives.
HOST_CALL = "c10d::"


@dataclass(frozen=True, kw_only=True)
class Span:
    """One activity of a rank, with its start and end.

    Attributes:
        lane: where the activity ran: a thread, a CUDA stream, a link. Spans of one lane may nest.
        kind: "communication" begins when the rank joins the collective, not when data starts to
            flow, so it includes the wait for later ranks. (This is true for records of gloo and
            NCCL; in the emulated cluster it begins when the last rank is there.)
        start_s, end_s: seconds on a time axis that all ranks of a timeline share.
    """

    rank: int
    lane: str
    kind: Kind
    name: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Span: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.end_s >= self.start_s:
            raise ValueError(
                f"Span {self.name!r} of rank {self.rank} ends at {self.end_s} s, before its start "
                f"at {self.start_s} s"
            )


@dataclass(frozen=True, kw_only=True)
class Window:
    """A time range of one rank, usually a training step."""

    rank: int
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Spans and steps of one or several ranks.

    Attributes:
        spans: in any order.
        steps: a window per rank and step; empty if the source has no steps.
        origin_unix_ns: Unix time of second 0, or None if the time axis is not the wall clock.
    """

    spans: tuple[Span, ...]
    steps: tuple[Window, ...] = ()
    origin_unix_ns: int | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a span or a step, ascending."""
        return tuple(sorted({each.rank for each in (*self.spans, *self.steps)}))

    @property
    def start_s(self) -> float:
        return min((each.start_s for each in (*self.spans, *self.steps)), default=0.0)

    @property
    def end_s(self) -> float:
        return max((each.end_s for each in (*self.spans, *self.steps)), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end over all ranks."""
        return self.end_s - self.start_s

    def of(self, rank: int, *kinds: Kind) -> list[Span]:
        """The spans of a rank, sorted by start; of the given kinds, or of all if none is given."""
        chosen = [s for s in self.spans if s.rank == rank and (not kinds or s.kind in kinds)]
        return sorted(chosen, key=lambda s: (s.start_s, s.end_s, s.lane, s.name))

    def windows(self, rank: int) -> list[Window]:
        """The rank's steps in order; without steps, one window over the whole timeline."""
        steps = sorted((w for w in self.steps if w.rank == rank), key=lambda w: w.start_s)
        return steps or [Window(rank=rank, name="all", start_s=self.start_s, end_s=self.end_s)]

    def collectives(self, rank: int, window: Window | None = None) -> dict[str, int]:
        """How often each collective (or message) of a rank starts, in a window or in total."""
        return dict(
            Counter(
                span.name
                for span in self.of(rank, "communication")
                if not span.name.startswith(HOST_CALL)
                and (window is None or window.start_s <= span.start_s < window.end_s)
            )
        )


def merge_timelines(timelines: Iterable[Timeline]) -> Timeline:
    """One timeline from the timelines of several ranks.

    If all timelines have a wall-clock origin, they are shifted to one time axis. Ranks of one
    machine share its clock; ranks of several machines are aligned as exactly as NTP aligns the
    clocks. If a timeline has no wall-clock origin, the seconds of all timelines stay unchanged.
    """
    parts = list(timelines)
    origins = [part.origin_unix_ns for part in parts if part.origin_unix_ns is not None]
    if len(origins) < len(parts) or not parts:
        return Timeline(
            tuple(span for part in parts for span in part.spans),
            tuple(step for part in parts for step in part.steps),
        )
    origin = min(origins)
    moved = [shift(part, (o - origin) / 1e9) for part, o in zip(parts, origins, strict=True)]
    return Timeline(
        tuple(span for part in moved for span in part.spans),
        tuple(step for part in moved for step in part.steps),
        origin,
    )


def shift(timeline: Timeline, seconds: float) -> Timeline:
    """The timeline moved by some seconds to later times; the result has no wall-clock origin."""
    move: Any = lambda x: replace(x, start_s=x.start_s + seconds, end_s=x.end_s + seconds)  # noqa: E731
    return Timeline(tuple(map(move, timeline.spans)), tuple(map(move, timeline.steps)))


def gather_timeline(timeline: Timeline, group: dist.ProcessGroup | None = None) -> Timeline:
    """Collective: the merged timeline of all ranks of `group`, returned on every rank."""
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, timeline, group=group)
    return merge_timelines(parts)


# ------------------------------------------------------------------------------------ other sources


def from_emulated(timeline: EmulatedTimeline) -> Timeline:
    """The emulated cluster's result, in virtual seconds: exact, and equal in every run.

    The steps come from the charge plan. A run with a roofline has no steps and gets one window over
    the whole run.
    """
    lanes = {"compute": "device", "idle": "device", "copy": "copy", "communication": "network"}
    spans, steps = [], []
    for rank, intervals in enumerate(timeline.intervals):
        for each in intervals:
            # "all_reduce 0/3" is the collective and its number in its group; keep the first word.
            name = each.name.split(" ")[0] if each.kind == "communication" else each.name
            kind: Any = each.kind
            spans.append(
                Span(
                    rank=rank,
                    lane=lanes[each.kind],
                    kind=kind,
                    name=name or each.kind,
                    start_s=each.start_s,
                    end_s=each.end_s,
                )
            )
        whole = [(0.0, timeline.makespan_s)]
        bounds = [(step.start_s, step.end_s) for step in timeline.steps] or whole
        steps += [
            Window(rank=rank, name=f"step {index}", start_s=start, end_s=end)
            for index, (start, end) in enumerate(bounds)
        ]
    return Timeline(tuple(spans), tuple(steps))


# ------------------------------------------------------------------------------------------- export


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Chrome trace format (Trace Event Format, complete events, microseconds).

    One process per rank and one thread per lane; steps have a separate lane.
    `minidist.profile.trace.read_trace` reads the format back.
    """
    events: list[dict[str, Any]] = []
    for rank in timeline.ranks:
        lanes = ["steps", *dict.fromkeys(span.lane for span in timeline.of(rank))]
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, tid, lane) for tid, lane in enumerate(lanes)]
        for step in timeline.steps:
            if step.rank == rank:
                events.append(_event(step, "step", 0))
        for span in timeline.of(rank):
            events.append(_event(span, span.kind, lanes.index(span.lane)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "minidist": {"origin_unix_ns": timeline.origin_unix_ns},
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(each: Span | Window, kind: str, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": each.name,
        "pid": each.rank,
        "tid": tid,
        "ts": each.start_s * 1e6,
        "dur": (each.end_s - each.start_s) * 1e6,
    }


def save_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `chrome_trace` as a JSON file for Perfetto."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
