"""Searches plans by moving the borders between buckets one gradient at a time; takes all steps
but the first as one window.

loses: nothing
"""


# %% replaces="task3_bottleneck"
def find_bottleneck(spans, steps):
    from collections import defaultdict

    lanes = defaultdict(list)
    for s in spans:
        lanes[s.rank].append(s)
    span_of_steps = steps[1][0], steps[-1][1]  # they follow one another without a gap
    rows = [breakdown(own, *span_of_steps) for own in lanes.values()]
    limit = 0.1 * (span_of_steps[1] - span_of_steps[0])
    column = {part: sorted(row[part] for row in rows) for part in rows[0]}
    guilty = {
        "straggler": column["compute"][-1] - column["compute"][0],
        "loader": column["loader"][-1],
        "copies": column["copy"][-1],
        "logging": column["host"][-1],
        "buckets": column["communication"][0],
    }
    above = {cause: loss for cause, loss in guilty.items() if loss > limit}
    return max(above, key=above.get, default="none")


# %% replaces="task5_tune"
def tune_plan(sizes, measure):
    order = list(reversed(range(len(sizes))))

    def build(cuts):
        edges = sorted({0, *cuts, len(order)})
        return [order[edges[i] : edges[i + 1]] for i in range(len(edges) - 1)]

    def even(k):
        return {round(len(order) * i / k) for i in range(1, k)}

    # Every number of buckets, where there are at most 36.
    wanted = {round(len(order) ** (i / 35)) for i in range(36)}
    if len(order) <= 36:
        wanted = set(range(1, len(order) + 1))
    tried = [(measure(build(even(k))), even(k)) for k in sorted(wanted)]
    best_s, cuts = min(tried, key=lambda pair: pair[0])
    left = 64 - len(tried)
    for cut in sorted(cuts, reverse=True):
        for moved in (cut + 1, cut - 1):
            if left == 0:
                return build(cuts)
            left -= 1
            other = (cuts - {cut}) | {min(max(moved, 1), len(order) - 1)}
            seconds = measure(build(other))
            if seconds < best_s:
                best_s, cuts = seconds, other
                break
    return build(cuts)
