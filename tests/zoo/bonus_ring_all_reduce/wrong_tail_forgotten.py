"""Chunks of numel // N: what is left over belongs to none.

loses: ring_chunks
class: example
"""


# %% replaces="task1_chunks"
def chunk_bounds(numel, num_chunks):
    size = numel // num_chunks
    return [(c * size, (c + 1) * size) for c in range(num_chunks)]
