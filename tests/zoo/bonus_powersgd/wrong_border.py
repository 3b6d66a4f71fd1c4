"""Compresses also where exactly as much is sent as before.

loses: powersgd_shapes
"""


# %% replaces="task4_matrix_shape"
def matrix_shape(shape, rank):
    if len(shape) < 2:
        return None
    n, m = shape[0], math.prod(shape[1:])
    return None if rank * (n + m) > n * m else (n, m)
