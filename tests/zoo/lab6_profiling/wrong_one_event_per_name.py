"""Writes spans of the same name once.

loses: prof_export
"""


# %% replaces="task2_export"
def chrome_trace(spans: list[Span]) -> dict:
    events = []
    for s in spans:
        events.append(
            {
                "ph": "X",
                "name": s.name,
                "cat": s.kind,
                "ts": s.start * 1e6,
                "dur": (s.end - s.start) * 1e6,
                "pid": s.rank,
                "tid": KINDS.index(s.kind),
            }
        )
    return {"traceEvents": list({(e["pid"], e["name"]): e for e in events}.values())}
