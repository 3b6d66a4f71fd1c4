"""Takes a slow loader or copy for one only where every rank has it.

loses: prof_finds_loader, prof_finds_copies
because: the same mistake stands in two lines of the table
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
    losses = {
        "loader": min(seconds["loader"].values()),
        "copies": min(seconds["copy"].values()),
        "logging": max(seconds["host"].values()),
        "straggler": max(seconds["compute"].values()) - min(seconds["compute"].values()),
        "buckets": min(seconds["communication"].values()),
    }
    worst = max(losses, key=losses.get)
    return worst if losses[worst] > 0.1 * total else "none"
