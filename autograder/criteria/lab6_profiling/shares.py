"""Criteria for the results computed from a trace: utilisation, overlap, breakdown and export.

Every rank gets its own traces, with names, kinds and times drawn at random.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from autograder.criteria.common.answers import (
    as_number,
    described_scalar,
    is_close,
    item_of,
    naming,
    read,
    returned,
    short,
    unit_hint,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, per_rank
from autograder.criteria.lab6_profiling.spans import (
    KINDS,
    Span,
    active_seconds,
    draw_name,
    pack,
    seconds_of,
    unpack,
)

CASES = 5
PARTS = (*KINDS, "idle")


def _row(rng: np.random.Generator, kind: str, begin: float, end: float, count: int) -> list[Span]:
    """Disjoint spans of one kind between two points, with gaps."""
    cuts = np.sort(rng.uniform(begin, end, 2 * count)).tolist()
    pairs = zip(cuts[::2], cuts[1::2], strict=True)
    return [Span(0, kind, draw_name(rng), a, b) for a, b in pairs]


def _shuffled(rng: np.random.Generator, spans: list[Span]) -> list[Span]:
    return [spans[i] for i in rng.permutation(len(spans))]


def _draw(draw: Draw, make: Callable[..., list[Span]]) -> list[Values]:
    """`CASES` traces per rank, each with a window; all spans of a trace are of that rank.

    Args:
        make: the spans, from a generator, the trace's number, and the end of a window from 0 on.
    """
    inputs = []
    for rank in range(draw.world_size):
        rng, values = draw.private(rank), Values(windows=[])
        for number in range(CASES):
            end = float(rng.uniform(0.05, 5.0))
            spans = make(rng, number, end)
            shift = float(rng.uniform(0, 50))
            # One trace has gaps of microseconds, as between the kernels of a GPU: they count, too.
            unit = 1e-4 if number == 3 else 1.0
            spans = [
                Span(rank, s.kind, s.name, (s.start + shift) * unit, (s.end + shift) * unit)
                for s in spans
            ]
            values["windows"].append([shift * unit, (shift + end) * unit])
            values |= pack(_shuffled(rng, spans), str(number))
        inputs.append(values)
    return inputs


def draw_utilisation(draw: Draw) -> list[Values]:
    """Two streams that compute at once, nested kernels, and a window that cuts some kernels."""

    def make(rng: np.random.Generator, number: int, end: float) -> list[Span]:
        spans = _row(rng, "compute", -0.3 * end, 1.3 * end, 9)
        spans += _row(rng, "compute", -0.3 * end, 1.3 * end, 6)
        spans.append(Span(0, "compute", draw_name(rng), -0.1 * end, 0.1 * end))
        spans.append(Span(0, "compute", draw_name(rng), 0.05 * end, 0.08 * end))
        spans.append(Span(0, "compute", draw_name(rng), 0.9 * end, 1.2 * end))
        if number == 0:  # from before the window until after it
            spans = [Span(0, "compute", draw_name(rng), -0.1 * end, 1.1 * end)]
        if number == 1:  # only outside of the window
            spans = _row(rng, "compute", -0.3 * end, 0.0, 3) + _row(rng, "compute", end, 2 * end, 2)
        for kind in KINDS[1:]:
            spans += _row(rng, kind, 0, end, 3)
        if number == CASES - 1:  # nothing at all happens at both ends of the window
            spans = [s for s in spans if s.start > 0.1 * end and s.end < 0.9 * end]
            spans += _row(rng, "compute", 0.3 * end, 0.6 * end, 2)
        return spans

    return _draw(draw, make)


def draw_overlap(draw: Draw) -> list[Values]:
    """Communication that is hidden fully, partly or not at all; outside the window; or absent."""

    def make(rng: np.random.Generator, number: int, end: float) -> list[Span]:
        spans = _row(rng, "compute", -0.2 * end, 0.7 * end, 4 if number else 7)
        spans += _row(rng, "compute", -0.2 * end, 0.7 * end, 3)  # a second stream
        if number == CASES - 1:  # one long computation hides all communication
            spans = [Span(0, "compute", draw_name(rng), 0.0, end)]
        if number == 2:  # nothing computes in the window, so nothing hides
            spans = _row(rng, "compute", -0.2 * end, 0.0, 3)
        if number == 0:  # no communication in the whole trace
            pass
        elif number != 1:
            spans += _row(rng, "communication", 0.1 * end, 1.3 * end, 6)
            spans += _row(rng, "communication", 0.1 * end, 0.8 * end, 2)  # a second group of ranks
        else:
            spans += _row(rng, "communication", 1.1 * end, 1.3 * end, 2)  # not in the window
        for kind in ("copy", "loader", "host"):
            spans += _row(rng, kind, 0, end, 2)
        return spans

    return _draw(draw, make)


def draw_breakdown(draw: Draw) -> list[Values]:
    """Spans of all kinds, overlapping and alone."""

    def make(rng: np.random.Generator, number: int, end: float) -> list[Span]:
        spans = [span for kind in KINDS for span in _row(rng, kind, 0.05 * end, 0.9 * end, 4)]
        # For every kind, one span begins before the window, and one span lies outside the window.
        for place, kind in enumerate(KINDS):
            spans.append(Span(0, kind, draw_name(rng), -0.2 * end, 0.01 * (place + 1) * end))
            spans.append(Span(0, kind, draw_name(rng), 1.1 * end, 1.2 * end))
        if number == 0:  # some kinds do not occur at all, and their parts are 0
            spans = [s for s in spans if s.kind in ("compute", "loader")]
        if number == 2:  # nothing happens at all
            spans = []
        if number == CASES - 1:  # nothing happens at both ends of the window, nor beyond them
            spans = [s for s in spans if s.start > 0 and s.end < end]
        return spans

    return _draw(draw, make)


@per_rank
def draw_export(rng: np.random.Generator) -> Values:
    """Several ranks; spans of different kinds overlap, those of one kind do not.

    Two spans of each rank are equal, and have no length. Two spans of different kinds overlap and
    have the same name, so a name does not tell kinds apart.
    """
    spans = []
    for r in range(3):
        for kind in rng.permutation(KINDS):
            row = _row(rng, str(kind), 0, 0.5, int(rng.integers(2, 6)))
            # As in a real trace, most names occur many times.
            name = draw_name(rng)
            spans += [Span(r + 2, s.kind, name, s.start, s.end) for s in row]
        at = float(rng.uniform(0.5, 0.6))
        spans += [Span(r + 2, str(rng.choice(KINDS)), draw_name(rng), at, at)] * 2
        shared = draw_name(rng)
        for kind, begin in zip(rng.permutation(KINDS)[:2], (0.7, 0.8), strict=True):
            spans.append(Span(r + 2, str(kind), shared, begin, begin + 0.2))
    return pack(_shuffled(rng, spans), "0")


# --- observe -------------------------------------------------------------------------------------


def observe_share(function: Any, inputs: Values, context: Context) -> Values:
    """The function's number for every trace."""
    shares = []
    for number, (start, end) in enumerate(inputs["windows"]):
        spans = unpack(inputs, str(number))
        with naming(_call(spans, start, end)):
            shares.append(described_scalar(function(spans, start, end)))
    return {"shares": shares}


def _call(spans: list[Span], start: float, end: float) -> str:
    count = sum(s.end > start and s.start < end for s in spans)
    return f"with {len(spans)} spans, {count} of them in the window from {start:.6g} to {end:.6g}"


def observe_breakdown(function: Any, inputs: Values, context: Context) -> Values:
    """The seconds of each part, for every window."""
    parts = []
    for number, (start, end) in enumerate(inputs["windows"]):
        spans = unpack(inputs, str(number))
        with naming(_call(spans, start, end)):
            found = function(spans, start, end)
            items = read(found, lambda f: list(f.items()), "breakdown", "a dict of seconds")
            parts.append({str(key): described_scalar(value) for key, value in items})
    return {"parts": parts}


def observe_export(chrome_trace: Any, inputs: Values, context: Context) -> Values:
    """The exported trace, as a JSON file would hold it."""
    trace = json.loads(json.dumps(returned(chrome_trace(unpack(inputs, "0")), "chrome_trace")))
    return {"trace": trace}


# --- what is right: for judges, and in place of a student's function -----------------------------


def utilisation(spans: Sequence[Span], start: float, end: float) -> float:
    """The share of the window in which something computes."""
    return seconds_of(active_seconds(spans, start, end), "compute") / (end - start)


def overlap(spans: Sequence[Span], start: float, end: float) -> float:
    """The share of communication that has computation beside it; 1.0 without communication."""
    found = active_seconds(spans, start, end)
    all_s = seconds_of(found, "communication")
    return seconds_of(found, "communication", "compute") / all_s if all_s else 1.0


def breakdown(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of the window by the first kind that runs, or "idle"."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for kinds, seconds in active_seconds(spans, start, end).items():
        parts[next((k for k in KINDS if k in kinds), "idle")] += seconds
    return parts


# --- judge ---------------------------------------------------------------------------------------


def judge_utilisation(case: Case) -> Iterator[Finding]:
    """The share of the window in which something computes."""

    def explain(got: float, spans: list[Span], start: float, end: float) -> str:
        compute = [s for s in spans if s.kind == "compute"]
        right = utilisation(spans, start, end)
        if end - start < 1e-3 and got > right:
            return "This window is short: gaps of a few microseconds between kernels count, too."
        if is_close(got, _as_given(compute, start, end) / (end - start)):
            return "Spans come in any order: sort them by start first."
        first, last = min(s.start for s in spans), max(s.end for s in spans)
        if is_close(got, right * (end - start) / (min(end, last) - max(start, first))):
            return "Divide by end - start: where nothing happens at its ends, time passes as well."
        clipped = math.fsum(max(0, min(s.end, end) - max(s.start, start)) for s in compute)
        if is_close(got, clipped / (end - start)):
            return "Two computations at the same time count once: merge them first."
        whole = active_seconds(spans, first, last)
        if is_close(got, seconds_of(whole, "compute") / (end - start)):
            return "What lies outside the window does not count: clip it."
        busy = (end - start) - active_seconds(spans, start, end).get(frozenset(), 0.0)
        if is_close(got, busy / (end - start)):
            return "Only computation counts: a device that waits for data is not used."
        return ""

    return _judge_shares(case, "utilisation", utilisation, explain)


def _as_given(spans: list[Span], start: float, end: float) -> float:
    """The seconds that a walk over the spans finds if it takes them for sorted."""
    found, reached = 0.0, start
    for span in spans:
        if min(span.end, end) > max(span.start, reached):
            found += min(span.end, end) - max(span.start, reached)
            reached = min(span.end, end)
    return found


def judge_overlap(case: Case) -> Iterator[Finding]:
    """The share of communication time that overlaps computation; 1 without communication."""

    def explain(got: float, spans: list[Span], start: float, end: float) -> str:
        found = active_seconds(spans, start, end)
        all_s = seconds_of(found, "communication")
        hidden = seconds_of(found, "communication", "compute")
        if not all_s and any(s.kind == "communication" for s in spans):
            return "All communication lies outside the window; inside there is none: 1.0."
        if not all_s:
            return "Without communication nothing is exposed: 1.0."
        if is_close(got, 1 - hidden / all_s):
            return "That is the exposed share."
        if is_close(got, hidden / (end - start)):
            return "That is the share of the window; divide by all communication."
        if is_close(got, hidden / seconds_of(found, "compute")):
            return "That is the share of the computation; divide by all communication."
        return ""

    return _judge_shares(case, "overlap", overlap, explain)


def _judge_shares(
    case: Case, what: str, expected: Callable[..., float], explain: Callable[..., str]
) -> Iterator[Finding]:
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, (start, end) in enumerate(inputs["windows"]):
            spans, got = unpack(inputs, str(number)), item_of(answer.get("shares"), number)
            wanted = expected(spans, start, end)
            if not is_close(got, wanted):
                value = as_number(got)
                hint = "" if value is None else explain(value, spans, start, end)
                yield Finding(
                    f"{what} of a trace with {len(spans)} spans: expected {wanted:.4f}, got "
                    f"{short(got)}. {hint}".rstrip(),
                    rank,
                )
                break


def judge_breakdown(case: Case) -> Iterator[Finding]:
    """Each moment of the window belongs to exactly one part, the first that applies."""
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        for number, (start, end) in enumerate(inputs["windows"]):
            got = item_of(answer.get("parts"), number)
            wanted = breakdown(unpack(inputs, str(number)), start, end)
            if problem := _breakdown_problem(got, wanted, end - start):
                yield Finding(problem, rank)
                break


def _breakdown_problem(got: Any, wanted: dict[str, float], window_s: float) -> str | None:
    if not isinstance(got, dict) or sorted(got) != sorted(wanted):
        keys = sorted(got) if isinstance(got, dict) else got
        return f"expected the keys {sorted(wanted)}, got {keys!r}."
    for part in PARTS:
        if not is_close(got[part], wanted[part], atol=1e-7 * window_s):
            numbers = [as_number(v) for v in got.values()]
            total = math.fsum(n for n in numbers if n is not None)
            hint = (
                "The parts add up to the window, so some moment is in the wrong part: compute > "
                "communication > copy > loader > host > idle."
                if is_close(total, window_s)
                else f"The parts add up to {total:.6g} s, the window has {window_s:.6g} s."
            )
            hint = unit_hint(got[part], wanted[part]) or hint
            return f"{part}: expected {wanted[part]:.6g} s, got {short(got[part])}. {hint}"
    return None


def judge_export(case: Case) -> Iterator[Finding]:
    """One complete event per span, in microseconds; different kinds do not overlap in a lane.

    A tid may be a number or text, and other events may be there as well.
    """
    for rank, (inputs, answer) in enumerate(zip(case.inputs, case.answers, strict=True)):
        if problem := _export_problem(answer.get("trace"), unpack(inputs, "0")):
            yield Finding(problem, rank)


def _away(value: Any, wanted: float) -> float:
    """The distance of two times; infinite if the first one is no number."""
    number = as_number(value)
    return math.inf if number is None else abs(number - wanted)


def _export_problem(trace: Any, spans: list[Span]) -> str | None:
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        return "expected a dict with a list under 'traceEvents'."
    complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    if len(complete) != len(spans):
        hint = ""
        if len(complete) == sum(s.end > s.start for s in spans):
            hint = " A span of length 0 gets an event, too."
        elif len(complete) == len({(s.rank, s.name) for s in spans}):
            hint = " Many spans have the same name; each gets its own event."
        elif len(complete) == len(set(spans)):
            hint = " Some spans are equal; each gets its own event."
        return f"expected {len(spans)} events with ph 'X', one per span, got {len(complete)}.{hint}"
    by_name: dict[str, list[Any]] = {}
    for event in complete:
        by_name.setdefault(str(event.get("name")), []).append(event)
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        events = by_name.get(span.name)
        if not events:
            return f"an event called {span.name!r} is missing: one for each span."
        event = min(events, key=lambda e: _away(e.get("ts"), span.start * 1e6))
        events.remove(event)
        for key, wanted in (("ts", span.start * 1e6), ("dur", (span.end - span.start) * 1e6)):
            if not is_close(event.get(key), wanted, atol=1e-3):
                hint = "Microseconds." if key == "ts" else "A duration in microseconds, not an end."
                return (
                    f"{key} of a span: expected {wanted:.3f}, got {short(event.get(key))}. {hint}"
                )
        if event.get("pid") != span.rank:
            return f"pid: expected the rank, {span.rank}, got {event.get('pid')!r}."
        if event.get("cat") != span.kind:
            return f"cat: expected the kind, {span.kind!r}, got {event.get('cat')!r}."
        lanes.setdefault(f"{span.rank} {event.get('tid')!r}", []).append(span)
    for lane in lanes.values():
        lane.sort(key=lambda s: s.start)
        for one, two in pairwise(lane):
            if one.end > two.start and one.kind != two.kind:
                return (
                    f"a {one.kind} and a {two.kind} span of rank {one.rank} overlap and have the "
                    "same tid: a viewer would draw one over the other. Give each kind its own tid."
                )
    return None
