"""Everybody takes the quotient rounded up, until nothing is left.

loses: elastic_share
"""


# %% replaces="task1_share"
def share_of_batch(size: int, world_size: int, rank: int) -> slice:
    """Which places of a batch of `size` samples a rank takes."""
    large = -(-size // world_size)
    return slice(min(rank * large, size), min((rank + 1) * large, size))
