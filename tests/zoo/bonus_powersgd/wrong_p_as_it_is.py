"""Forgets to orthonormalise P.

loses: powersgd_basis
"""


# %% replaces="task3_power_step"
def power_step(matrices, qs):
    ps = packed_mean([m @ q for m, q in zip(matrices, qs)])
    return ps, packed_mean([m.T @ p for m, p in zip(matrices, ps)])
