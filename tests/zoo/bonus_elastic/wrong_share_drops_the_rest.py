"""Every rank takes the quotient; the remainder is left lying.

loses: elastic_share
class: example
says: elastic_share the last ones are taken by nobody
"""


# %% replaces="task1_share"
def share_of_batch(size: int, world_size: int, rank: int) -> slice:
    """Which places of a batch of `size` samples a rank takes."""
    small = size // world_size
    begin = rank * small
    return slice(begin, begin + small)
