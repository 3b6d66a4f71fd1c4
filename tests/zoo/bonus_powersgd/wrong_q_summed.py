"""The mean of P, but the sum of Q.

loses: powersgd_factor
"""


# %% replaces="task3_power_step"
def power_step(matrices, qs):
    ps = [orthonormalise(p) for p in packed_mean([m @ q for m, q in zip(matrices, qs)])]
    n = dist.get_world_size()
    return ps, [n * q for q in packed_mean([m.T @ p for m, p in zip(matrices, ps)])]
