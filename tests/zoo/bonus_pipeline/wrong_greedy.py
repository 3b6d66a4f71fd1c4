"""Closes a stage as soon as it has its share.

loses: pipe_cut
"""


# %% replaces="task1_cut"
def cut_layers(costs, num_stages):
    share, cuts, now = sum(costs) / num_stages, [0], 0.0
    for i, cost in enumerate(costs):
        left = num_stages - len(cuts)
        if i > cuts[-1] and left and (now + cost > share or len(costs) - i <= left):
            cuts.append(i)
            now = 0.0
        now += cost
    return list(itertools.pairwise([*cuts, len(costs)]))
