"""Every block recomputes, also those that are in no unit.

loses: fsdp_recompute
says: fsdp_recompute is in no unit, and it was computed 2 times
"""


# %% replaces="task5_recompute"
def recompute_units(model, units):
    for module in model.modules():
        if type(module) is type(units[0]):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return model
