"""Walks through the spans as they come, although they come in any order.

loses: prof_utilisation
"""


# %% replaces="task2_shares"
def covered(spans, kinds, start, end):
    seconds, reached = 0.0, start
    for s in spans:
        if s.kind in kinds and min(s.end, end) > max(s.start, reached):
            seconds += min(s.end, end) - max(s.start, reached)
            reached = min(s.end, end)
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
    parts, before = {}, 0.0
    for number, kind in enumerate(KINDS):
        now = covered(spans, KINDS[: number + 1], start, end)
        parts[kind] = now - before
        before = now
    return parts | {"idle": end - start - before}
