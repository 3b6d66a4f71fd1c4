"""Puts all spans of a rank into one row of the viewer, where they cover each other.

loses: prof_export
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
                "tid": 0,
                "ts": start,
                "dur": end - start,
            }
        )
    return {"traceEvents": events}
