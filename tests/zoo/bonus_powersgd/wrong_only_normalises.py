"""Gives every column length 1 and leaves the angles as they are.

loses: powersgd_columns, powersgd_dependent, powersgd_basis, powersgd_first, powersgd_warm,
    powersgd_revive, powersgd_steps
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    lengths = matrix.norm(dim=0)
    return matrix / torch.where(lengths > 0, lengths, 1.0)
