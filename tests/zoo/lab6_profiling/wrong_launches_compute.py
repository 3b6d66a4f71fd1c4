"""Takes the operators that launch kernels for computation, also where a GPU computes.

loses: prof_spans_gpu
says: prof_spans_gpu became compute and is none
"""


# %% replaces="task1_spans"
def to_spans(events, rank):
    complete = [e for e in events if e.get("ph") == "X"]
    loading = [e for e in complete if e["name"].startswith("enumerate(DataLoader)")]

    def kind_of(e):
        category, name = e["cat"], e["name"]
        if e in loading:
            return "loader"
        if category == "kernel":
            return "communication" if name.startswith("nccl") else "compute"
        if category in ("gpu_memcpy", "gpu_memset"):
            return "copy"
        if category == "user_annotation" and name.startswith("gloo:"):
            return "communication"
        if category == "user_annotation" and name.startswith("host:"):
            return "host"
        if category == "cpu_op" and not name.startswith("c10d::") and not in_loader(e):
            return "compute"
        return None

    def in_loader(e):
        return any(
            o["tid"] == e["tid"] and o["ts"] <= e["ts"] and e["ts"] + e["dur"] <= o["ts"] + o["dur"]
            for o in loading
        )

    spans = []
    for e in complete:
        kind = kind_of(e)
        if kind:
            start = e["ts"] / 1e6
            spans.append(Span(rank, kind, e["name"], start, start + e["dur"] / 1e6))
    return spans
