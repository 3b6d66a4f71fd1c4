"""As many layers in each stage, whatever they cost.

loses: pipe_cut
class: example
"""


# %% replaces="task1_cut"
def cut_layers(costs, num_stages):
    cuts = [len(costs) * s // num_stages for s in range(num_stages + 1)]
    return list(itertools.pairwise(cuts))
