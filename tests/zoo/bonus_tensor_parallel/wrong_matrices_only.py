"""Counts the gradients of the matrices, not of biases and norms.

loses: btp_paper
"""


# %% replaces="task9_price"
def tensor_parallel_bytes(batch, tokens, width, itemsize, num_ranks):
    return 4 * 2 * (num_ranks - 1) / num_ranks * batch * tokens * width * itemsize


def data_parallel_bytes(width, itemsize, num_ranks):
    parameters = 12 * width**2
    return 2 * (num_ranks - 1) / num_ranks * parameters * itemsize
