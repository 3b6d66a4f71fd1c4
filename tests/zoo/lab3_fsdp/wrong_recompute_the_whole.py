"""One checkpoint around the whole model: in backward, all activations are there at once.

loses: fsdp_recompute
"""


# %% replaces="task5_recompute"
def recompute_units(model, units):
    model.forward = partial(checkpoint, model.forward, use_reentrant=False)
    return model
