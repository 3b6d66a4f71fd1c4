"""Takes each finished column out of all that follow, twice over.

loses: nothing
"""


# %% replaces="task1_orthonormalise"
def sweep(p, least):
    for i in range(p.shape[1]):
        length = p[:, i].norm()
        if length <= least[i]:
            p[:, i] = 0
            continue
        p[:, i] /= length
        p[:, i + 1 :] -= torch.outer(p[:, i], p[:, i] @ p[:, i + 1 :])
    return p


def orthonormalise(matrix):
    p = sweep(matrix.clone(), 1e-5 * matrix.norm(dim=0))
    return sweep(p, torch.full((p.shape[1],), 0.1))


# %% replaces="task3_power_step"
def power_step(matrices, qs):
    # The sum does for P: its length is forgotten anyway.
    n = dist.get_world_size()
    ps = packed_mean([n * torch.mm(m, q) for m, q in zip(matrices, qs)])
    ps = list(map(orthonormalise, ps))
    return ps, packed_mean([torch.mm(m.t(), p) for m, p in zip(matrices, ps)])
