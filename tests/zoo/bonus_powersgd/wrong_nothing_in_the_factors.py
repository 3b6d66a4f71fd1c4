"""P and Q have their shapes, and nothing in them: nothing but the vectors ever travels.

loses: powersgd_basis, powersgd_factor
because: P and Q are both wrong.
says: powersgd_basis all of it is zero
says: powersgd_factor so Q cannot be judged
"""


# %% replaces="task3_power_step"
def power_step(matrices, qs):
    ps = [torch.zeros(m.shape[0], q.shape[1], dtype=m.dtype) for m, q in zip(matrices, qs)]
    return ps, [torch.zeros_like(q) for q in qs]
