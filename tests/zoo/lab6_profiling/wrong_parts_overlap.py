"""Adds up each kind for itself, so that what hides behind computation counts as lost; and finds
the bottleneck from that. Loading ahead, logging beside and copies in the background look guilty.

loses: prof_breakdown
class: example
"""

# %% replaces="task2_shares"
PARTS = ("compute", "communication", "copy", "loader", "host")


def covered(spans, kinds, start, end):
    seconds, reached = 0.0, start
    for a, b in sorted((max(s.start, start), min(s.end, end)) for s in spans if s.kind in kinds):
        if b > max(a, reached):
            seconds += b - max(a, reached)
            reached = b
    return seconds


def utilisation(spans, start, end):
    return covered(spans, {"compute"}, start, end) / (end - start)


def overlap(spans, start, end):
    communication = covered(spans, {"communication"}, start, end)
    if communication == 0:
        return 1.0
    either = covered(spans, {"compute", "communication"}, start, end)
    return (covered(spans, {"compute"}, start, end) + communication - either) / communication


def breakdown(spans, start, end):
    parts = {kind: covered(spans, {kind}, start, end) for kind in PARTS}
    return parts | {"idle": end - start - covered(spans, PARTS, start, end)}
