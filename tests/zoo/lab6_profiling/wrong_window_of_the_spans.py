"""Divides by the time from the first span to the last one.

loses: prof_utilisation
"""


# %% replaces="task2_shares"
def covered(spans: list[Span], kinds: Iterable[str], start: float, end: float) -> float:
    kinds = set(kinds)
    total, reached = 0.0, start
    for span in sorted((s for s in spans if s.kind in kinds), key=lambda s: s.start):
        left, right = max(span.start, reached), min(span.end, end)
        if right > left:
            total += right - left
            reached = right
    return total


def utilisation(spans: list[Span], start: float, end: float) -> float:
    return covered(spans, {"compute"}, start, end) / (
        min(end, max(s.end for s in spans)) - max(start, min(s.start for s in spans))
    )


def overlap(spans: list[Span], start: float, end: float) -> float:
    sent = covered(spans, {"communication"}, start, end)
    if sent == 0:
        return 1.0
    both = covered(spans, {"compute", "communication"}, start, end)
    return (covered(spans, {"compute"}, start, end) + sent - both) / sent


def breakdown(spans: list[Span], start: float, end: float) -> dict[str, float]:
    parts, seen, before = {}, [], 0.0
    for kind in KINDS:
        seen.append(kind)
        now = covered(spans, seen, start, end)
        parts[kind] = now - before
        before = now
    parts["idle"] = end - start - before
    return parts
