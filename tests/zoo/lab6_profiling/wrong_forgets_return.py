"""Computes the seconds of a step, and forgets to return them.

loses: prof_bucket_predict
"""


# %% replaces="task5_predict"
def predict_step(
    plan: list[list[int]],
    sizes: list[int],
    backward_s: list[float],
    forward_s: float,
    all_reduce_s: Callable[[float], float],
) -> float:
    """Seconds of a step in which the buckets of the plan travel while backward goes on."""
    now, there = forward_s, [0.0] * len(sizes)
    for index in reversed(range(len(sizes))):
        now += backward_s[index]
        there[index] = now

    free = 0.0  # when the network has delivered all buckets so far
    for bucket in plan:
        start = max(free, max(there[index] for index in bucket))
        free = start + all_reduce_s(sum(sizes[index] for index in bucket))
    max(now, free)
