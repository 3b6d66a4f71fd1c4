"""Walks in the direction of the ring: each rank sends on what it has not just received.

loses: ring_plan_reduce
"""


# %% replaces="task2_steps"
def ring_steps(rank, world_size):
    n = world_size
    return [((rank + s) % n, (rank + s - 1) % n) for s in range(2 * (n - 1))]
