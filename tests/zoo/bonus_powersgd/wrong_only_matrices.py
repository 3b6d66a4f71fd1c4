"""Leaves tensors of three and more dimensions alone.

loses: powersgd_shapes, powersgd_first, powersgd_steps, powersgd_numbers, powersgd_seconds
"""


# %% replaces="task4_matrix_shape"
def matrix_shape(shape, rank):
    if len(shape) != 2 or rank * sum(shape) >= math.prod(shape):
        return None
    return tuple(shape)
