"""The last chunk takes all that is left over: correct, and uneven.

loses: ring_chunks
"""


# %% replaces="task1_chunks"
def chunk_bounds(numel, num_chunks):
    size = numel // num_chunks
    bounds = [(c * size, (c + 1) * size) for c in range(num_chunks)]
    bounds[-1] = (bounds[-1][0], numel)
    return bounds
