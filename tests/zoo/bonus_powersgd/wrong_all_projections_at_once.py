"""Subtracts the projections on all columns at once, and only once: nearly parallel ones stay so.

loses: powersgd_dependent
says: powersgd_dependent subtract one projection after the other
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    result = torch.zeros_like(matrix)
    for i, column in enumerate(matrix.unbind(1)):
        left = column - result @ (result.T @ column)
        if left.norm() > 1e-5 * column.norm():
            result[:, i] = left / left.norm()
    return result
