"""Leaves the last unit as it is: it holds what it has computed inside.

loses: fsdp_recompute
"""


# %% replaces="task5_recompute"
def recompute_units(model, units):
    for unit in units[:-1]:
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
    return model
