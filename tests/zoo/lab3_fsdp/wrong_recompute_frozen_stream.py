"""Sets the random stream back for the second forward, and leaves it there.

loses: fsdp_recompute
"""


# %% replaces="task5_recompute"
def recompute_units(model, units):
    def again(forward):
        def call(*args, **kwargs):
            state, calls = torch.get_rng_state(), []

            def run(*inputs):
                if calls:
                    torch.set_rng_state(state)
                calls.append(1)
                return forward(*inputs, **kwargs)

            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

        return call

    for unit in units:
        unit.forward = again(unit.forward)
    return model
