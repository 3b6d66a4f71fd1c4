"""Bisects over whole costs: fractions are not cut at their best.

loses: pipe_cut
"""


# %% replaces="task1_cut"
def cut_layers(costs: list[float], num_stages: int) -> list[tuple[int, int]]:
    """Contiguous stages, none of them empty, whose dearest one is as cheap as can be."""

    def fill(limit):
        cuts, begin, now = [], 0, 0.0
        for i, cost in enumerate(costs):
            left = num_stages - len(cuts) - 1
            if i > begin and (now + cost > limit or len(costs) - i == left):
                cuts.append((begin, i))
                begin, now = i, 0.0
            now += cost
        cuts.append((begin, len(costs)))
        return cuts

    low, high = math.ceil(max(costs)), math.ceil(sum(costs))
    while low < high:
        middle = (low + high) // 2
        if len(fill(middle)) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return fill(low)
