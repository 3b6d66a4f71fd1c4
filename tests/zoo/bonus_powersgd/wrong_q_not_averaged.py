"""Q stays what this rank's own matrix gives.

loses: powersgd_factor
says: powersgd_factor That is this rank's own product
"""


# %% replaces="task3_power_step"
def power_step(matrices, qs):
    ps = [orthonormalise(p) for p in packed_mean([m @ q for m, q in zip(matrices, qs)])]
    return ps, [m.T @ p for m, p in zip(matrices, ps)]
