"""Counts the two all-reduces of the forward pass.

loses: btp_paper
"""


# %% replaces="task9_price"
def tensor_parallel_bytes(batch, tokens, width, itemsize, num_ranks):
    return 2 * 2 * (num_ranks - 1) / num_ranks * batch * tokens * width * itemsize


def data_parallel_bytes(width, itemsize, num_ranks):
    parameters = 12 * width**2 + 13 * width
    return 2 * (num_ranks - 1) / num_ranks * parameters * itemsize
