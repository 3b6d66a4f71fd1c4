"""Begins the second half with the chunk of its own number, whose sum it does not have.

loses: ring_plan_gather
"""


# %% replaces="task2_steps"
def ring_steps(rank, world_size):
    n = world_size
    half = [((rank - s) % n, (rank - s - 1) % n) for s in range(n - 1)]
    return half + half
