"""Puts all products below each other: every Q has the same number of columns.

loses: nothing
"""


# %% replaces="task3_power_step"
def power_step(matrices, qs):
    if not matrices:
        return [], []
    r = qs[0].shape[1]
    (tall,) = packed_mean([torch.cat([m @ q for m, q in zip(matrices, qs)])])
    ps = [orthonormalise(p) for p in tall.view(-1, r).split([m.shape[0] for m in matrices])]
    (tall,) = packed_mean([torch.cat([m.T @ p for m, p in zip(matrices, ps)])])
    return ps, list(tall.split([m.shape[1] for m in matrices]))
