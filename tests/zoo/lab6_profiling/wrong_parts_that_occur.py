"""The breakdown has the kinds that occur, and no others.

loses: prof_breakdown
"""


# %% replaces="task2_shares"
def covered(spans: list[Span], kinds: Iterable[str], start: float, end: float) -> float:
    """Seconds of the window in which a span of at least one of the kinds is going on."""
    chosen = [(max(s.start, start), min(s.end, end)) for s in spans if s.kind in kinds]
    seconds, reached = 0.0, start
    for a, b in sorted(chosen):
        if b > max(a, reached):
            seconds += b - max(a, reached)  # only what no earlier span has covered
            reached = b
    return seconds


def utilisation(spans: list[Span], start: float, end: float) -> float:
    """Share of the window in which something computes."""
    return covered(spans, {"compute"}, start, end) / (end - start)


def overlap(spans: list[Span], start: float, end: float) -> float:
    """Share of the communication that has computation beside it; 1.0 without communication."""
    communication = covered(spans, {"communication"}, start, end)
    if communication == 0:
        return 1.0
    compute = covered(spans, {"compute"}, start, end)
    either = covered(spans, {"compute", "communication"}, start, end)
    return (compute + communication - either) / communication


def breakdown(spans: list[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of the window by what goes on: the first that applies, and "idle"."""
    parts, before = {}, 0.0
    for number, kind in enumerate(KINDS):
        if not any(s.kind == kind for s in spans):
            continue
        now = covered(spans, KINDS[: number + 1], start, end)
        parts[kind] = now - before
        before = now
    parts["idle"] = (end - start) - before
    return parts
