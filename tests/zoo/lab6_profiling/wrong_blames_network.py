"""Takes any rank that stands in an all-reduce for long as proof of a slow network.

loses: prof_finds_buckets
"""


# %% replaces="task3_bottleneck"
def find_bottleneck(spans, steps):
    measured = steps[1:]
    seconds = {}
    for r in sorted({s.rank for s in spans}):
        own = [s for s in spans if s.rank == r]
        for start, end in measured:
            for part, value in breakdown(own, start, end).items():
                seconds.setdefault(part, {}).setdefault(r, []).append(value)
    total = sum(end - start for start, end in measured)
    seconds = {part: {r: sum(v) for r, v in row.items()} for part, row in seconds.items()}
    if max(seconds["communication"].values()) > 0.15 * total:
        return "buckets"
    losses = {
        "loader": max(seconds["loader"].values()),
        "copies": max(seconds["copy"].values()),
        "logging": max(seconds["host"].values()),
        "straggler": max(seconds["compute"].values()) - min(seconds["compute"].values()),
        "buckets": min(seconds["communication"].values()),
    }
    worst = max(losses, key=losses.get)
    return worst if losses[worst] > 0.1 * total else "none"
