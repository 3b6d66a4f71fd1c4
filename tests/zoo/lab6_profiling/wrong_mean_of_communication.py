"""Takes the mean over ranks for the network's own time.

loses: prof_finds_buckets
"""


# %% replaces="task3_bottleneck"
def find_bottleneck(spans, steps):
    measured = steps[1:]
    seconds = {}
    for r in sorted({s.rank for s in spans}):
        own = [s for s in spans if s.rank == r]
        rows = [breakdown(own, start, end) for start, end in measured]
        for part in rows[0]:
            seconds.setdefault(part, []).append(sum(row[part] for row in rows))
    losses = {
        "loader": max(seconds["loader"]),
        "copies": max(seconds["copy"]),
        "logging": max(seconds["host"]),
        "straggler": max(seconds["compute"]) - min(seconds["compute"]),
        "buckets": statistics.fmean(seconds["communication"]),
    }
    worst = max(losses, key=losses.get)
    return worst if losses[worst] > 0.1 * sum(end - start for start, end in measured) else "none"
