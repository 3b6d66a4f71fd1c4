"""Adds up the lengths of all kernels: two streams at once count twice, and an operator inside
another one as well.

loses: prof_utilisation
class: example
says: prof_utilisation Two computations at the same time count once
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
    inside = (min(s.end, end) - max(s.start, start) for s in spans if s.kind == "compute")
    return sum(seconds for seconds in inside if seconds > 0) / (end - start)


def overlap(spans, start, end):
    communication = covered(spans, {"communication"}, start, end)
    if communication == 0:
        return 1.0
    either = covered(spans, {"compute", "communication"}, start, end)
    return (covered(spans, {"compute"}, start, end) + communication - either) / communication


def breakdown(spans, start, end):
    parts, before = {}, 0.0
    for number, kind in enumerate(PARTS):
        now = covered(spans, PARTS[: number + 1], start, end)
        parts[kind], before = now - before, now
    return parts | {"idle": end - start - before}
