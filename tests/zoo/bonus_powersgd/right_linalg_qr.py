"""Orthonormalises with torch.linalg.qr: other signs, and full columns for zeros.

loses: nothing
"""


# %% replaces="task1_orthonormalise"
def orthonormalise(matrix):
    return torch.linalg.qr(matrix)[0]


# %% replaces="task4_matrix_shape"
def matrix_shape(shape, rank):
    n, *others = shape or (0,)
    m = math.prod(others)
    return (n, m) if others and n * m > rank * (n + m) else None
