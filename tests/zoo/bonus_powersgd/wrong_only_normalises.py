"""Gives every column length 1 and leaves the angles as they are.

loses: powersgd_columns, powersgd_dependent
because: columns that are not made orthogonal are wrong whether they depend on each other or not.
says: powersgd_columns Subtract from each column its projection on every finished one.
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    lengths = matrix.norm(dim=0)
    return matrix / torch.where(lengths > 0, lengths, 1.0)
