"""The reentrant form: a unit whose input needs no gradient gets none for its weights.

loses: fsdp_recompute
"""


# %% replaces="task5_recompute"
def recompute_units(model, units):
    def again(forward):
        def call(*args, **kwargs):
            return checkpoint(lambda *a: forward(*a, **kwargs), *args, use_reentrant=True)

        return call

    for unit in units:
        unit.forward = again(unit.forward)
    return model
