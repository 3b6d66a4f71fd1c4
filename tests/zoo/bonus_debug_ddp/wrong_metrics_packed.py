"""Packs metrics into one vector, as they come, if all ranks have equally many.

loses: debug_metrics_order
says: debug_metrics_order all ranks need one order of names
"""


# %% replaces="mend_10"
def reduce_metrics(metrics):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    if len({len(other) for other in everyone}) == 1:
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        dist.all_reduce(values)
        return dict(zip(metrics, (values / len(everyone)).tolist(), strict=True))
    reduced = {}
    for name in {name for other in everyone for name in other}:
        values = [other[name] for other in everyone if name in other]
        reduced[name] = sum(values) / len(values)
    return reduced
