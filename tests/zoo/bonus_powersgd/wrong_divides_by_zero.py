"""Plain Gram-Schmidt: a column of zeros becomes NaN.

loses: powersgd_dependent
class: example
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    columns = []
    for column in matrix.unbind(1):
        for other in columns:
            column = column - (other @ column) * other
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)
