"""Overlap adds up pairs of spans: two kernels at once count twice, and the window is not looked at.

loses: prof_overlap
"""


# %% replaces="task2_shares"
def covered(spans: list[Span], kinds: Iterable[str], start: float, end: float) -> float:
    """Seconds of the window in which a span of at least one of the kinds is going on."""
    ### BEGIN SOLUTION
    chosen = [(max(s.start, start), min(s.end, end)) for s in spans if s.kind in kinds]
    seconds, reached = 0.0, start
    for a, b in sorted(chosen):
        if b > max(a, reached):
            seconds += b - max(a, reached)  # only what no earlier span has covered
            reached = b
    return seconds
    ### END SOLUTION


def utilisation(spans: list[Span], start: float, end: float) -> float:
    """Share of the window in which something computes."""
    ### BEGIN SOLUTION
    return covered(spans, {"compute"}, start, end) / (end - start)
    ### END SOLUTION


def overlap(spans: list[Span], start: float, end: float) -> float:
    """Each pair of a computation and a collective counts, inside of the window or not."""
    compute = [s for s in spans if s.kind == "compute"]
    communication = [s for s in spans if s.kind == "communication"]
    total = sum(s.end - s.start for s in communication)
    if total == 0:
        return 1.0
    hidden = sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in communication for b in compute
    )
    return hidden / total


def breakdown(spans: list[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of the window by what goes on: the first that applies, and "idle"."""
    ### BEGIN SOLUTION
    parts, before = {}, 0.0
    for number, kind in enumerate(KINDS):
        now = covered(spans, KINDS[: number + 1], start, end)
        parts[kind] = now - before
        before = now
    parts["idle"] = (end - start) - before
    return parts
    ### END SOLUTION
