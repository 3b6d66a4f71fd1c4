"""Takes every column shorter than 1e-4 for zero, whatever its size was.

loses: powersgd_columns
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    columns = []
    for column in matrix.unbind(1):
        for _ in range(2):
            for other in columns:
                column = column - (other @ column) * other
        length = column.norm()
        columns.append(column / length if length > 1e-4 else 0 * column)
    return torch.stack(columns, dim=1)
