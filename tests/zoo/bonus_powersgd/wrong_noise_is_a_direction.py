"""Adds a small number to the length: no NaN, but rounding noise becomes a column.

loses: powersgd_dependent
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    p = matrix.clone()
    for i in range(p.shape[1]):
        for _ in range(2):
            p[:, i] -= p[:, :i] @ (p[:, :i].T @ p[:, i])
        p[:, i] /= p[:, i].norm() + 1e-12
    return p
