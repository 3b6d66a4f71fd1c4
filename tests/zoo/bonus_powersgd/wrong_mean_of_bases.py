"""Orthonormalises P on every rank, then takes the mean of these.

loses: powersgd_basis
class: example
says: powersgd_basis Take the mean first, then orthonormalise
"""


# %% replaces="task3_power_step"
def power_step(matrices, qs):
    ps = packed_mean([orthonormalise(m @ q) for m, q in zip(matrices, qs)])
    return ps, packed_mean([m.T @ p for m, p in zip(matrices, ps)])
