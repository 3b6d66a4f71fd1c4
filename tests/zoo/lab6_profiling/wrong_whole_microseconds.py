"""Cuts times down to whole microseconds.

loses: prof_spans_cpu, prof_spans_gpu
because: both traces have times with fractions, as real ones do
says: prof_spans_cpu times are off by less than a microsecond: do not round
"""


# %% replaces="task1_spans"
def to_spans(events: list[dict], rank: int) -> list[Span]:
    events = [event for event in events if event.get("ph") == "X"]
    on_gpu = any(event["cat"] == "kernel" for event in events)
    loading = [
        (event["tid"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("enumerate(DataLoader)")
    ]

    def kind_of(event: dict) -> str | None:
        category, name = event["cat"], event["name"]
        begin, end = event["ts"], event["ts"] + event["dur"]
        if name.startswith("enumerate(DataLoader)"):
            return "loader"
        if category == "kernel":
            return "communication" if name.startswith("nccl") else "compute"
        if category in ("gpu_memcpy", "gpu_memset"):
            return "copy"
        if category == "user_annotation" and name.startswith("gloo:"):
            return "communication"
        if category == "user_annotation" and name.startswith("host:"):
            return "host"
        if category != "cpu_op" or name.startswith("c10d::") or on_gpu:
            return None
        if any(event["tid"] == tid and a <= begin and end <= b for tid, a, b in loading):
            return None
        return "compute"

    spans = []
    for event in events:
        kind = kind_of(event)
        if kind is not None:
            start, end = int(event["ts"]) / 1e6, int(event["ts"] + event["dur"]) / 1e6
            spans.append(Span(rank, kind, event["name"], start, end))
    return spans
