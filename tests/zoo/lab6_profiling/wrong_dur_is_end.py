"""Writes the end of a span where its length belongs.

loses: prof_export
says: prof_export A duration in microseconds, not an end
"""


# %% replaces="task2_export"
def chrome_trace(spans):
    events = []
    for s in spans:
        start, end = s.start * 1e6, s.end * 1e6
        events.append(
            {
                "ph": "X",
                "name": s.name,
                "cat": s.kind,
                "pid": s.rank,
                "tid": s.kind,
                "ts": start,
                "dur": end,
            }
        )
    return {"traceEvents": events}
