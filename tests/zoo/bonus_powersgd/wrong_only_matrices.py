"""Leaves tensors of three and more dimensions alone.

loses: powersgd_shapes
"""


# %% replaces="task4_matrix_shape"
def matrix_shape(shape, rank):
    if len(shape) != 2 or rank * sum(shape) >= math.prod(shape):
        return None
    return tuple(shape)
