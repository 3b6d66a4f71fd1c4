"""N - 2 steps in the second half: one chunk never arrives.

loses: ring_plan_gather
"""


# %% replaces="task2_steps"
def ring_steps(rank, world_size):
    n = world_size
    return [((rank - s) % n, (rank - s - 1) % n) for s in range(2 * n - 3)]
