"""A span belongs to the step in which it begins.

loses: prof_finds_nothing
"""


# %% replaces="task3_bottleneck"
def find_bottleneck(spans: list[Span], steps: list[tuple[float, float]]) -> str:
    counted = steps[1:]
    sums = {}
    for rank in {s.rank for s in spans}:
        own = [s for s in spans if s.rank == rank]
        total = dict.fromkeys((*KINDS, "idle"), 0.0)
        for start, end in counted:
            for kind, seconds in breakdown(
                [s for s in own if start <= s.start < end], start, end
            ).items():
                total[kind] += seconds
        sums[rank] = total
    per_kind = {kind: [total[kind] for total in sums.values()] for kind in KINDS}
    losses = {
        "loader": max(per_kind["loader"]),
        "copies": max(per_kind["copy"]),
        "logging": max(per_kind["host"]),
        "straggler": max(per_kind["compute"]) - min(per_kind["compute"]),
        "buckets": min(per_kind["communication"]),
    }
    worst = max(losses, key=losses.get)
    duration = sum(end - start for start, end in counted)
    return worst if losses[worst] > 0.1 * duration else "none"
