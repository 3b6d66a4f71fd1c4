"""Sorts the names, but does not ask the other ranks for theirs.

loses: debug_metrics_missing
class: example
"""


# %% replaces="mend_10"
def reduce_metrics(metrics):
    reduced = {}
    for name in sorted(metrics):
        total = torch.tensor(metrics[name], dtype=torch.float64)
        dist.all_reduce(total)
        reduced[name] = total.item() / dist.get_world_size()
    return reduced
