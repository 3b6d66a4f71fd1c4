"""Sends its own chunk in every step of the first half.

loses: ring_plan_reduce
class: example
says: ring_plan_reduce some numbers were added twice
"""


# %% replaces="task2_steps"
def ring_steps(rank, world_size):
    n = world_size
    first = [(rank, (rank - 1) % n) for _ in range(n - 1)]
    return first + [((rank + 1 - s) % n, (rank - s) % n) for s in range(n - 1)]
