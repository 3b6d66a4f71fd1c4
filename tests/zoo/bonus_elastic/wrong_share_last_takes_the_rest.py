"""The last rank takes the whole remainder; all others wait for it.

loses: elastic_share
"""


# %% replaces="task1_share"
def share_of_batch(size: int, world_size: int, rank: int) -> slice:
    """Which places of a batch of `size` samples a rank takes."""
    small = size // world_size
    begin = rank * small
    if rank == world_size - 1:
        return slice(begin, size)
    return slice(begin, begin + small)
