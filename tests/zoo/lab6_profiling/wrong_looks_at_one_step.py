"""Looks at the second step alone.

loses: prof_finds_logging
"""


# %% replaces="task3_bottleneck"
def find_bottleneck(spans: list[Span], steps: list[tuple[float, float]]) -> str:
    """What the ranks lose most time with: one of CAUSES, or "none"."""
    ### BEGIN SOLUTION
    measured = steps[1:2]  # the first one warms up
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)

    # Per part, the seconds of every rank.
    seconds: dict[str, list[float]] = {}
    for own in by_rank.values():
        rows = [breakdown(own, start, end) for start, end in measured]
        for part in rows[0]:
            seconds.setdefault(part, []).append(sum(row[part] for row in rows))

    losses = {
        "loader": max(seconds["loader"]),
        "copies": max(seconds["copy"]),
        "logging": max(seconds["host"]),
        "straggler": max(seconds["compute"]) - min(seconds["compute"]),
        "buckets": min(seconds["communication"]),
    }
    worst = max(losses, key=lambda cause: losses[cause])
    total = sum(end - start for start, end in measured)
    return worst if losses[worst] > 0.1 * total else "none"
    ### END SOLUTION
