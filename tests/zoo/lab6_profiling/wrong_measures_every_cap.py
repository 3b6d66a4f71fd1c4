"""As many measurements as there are gradients: more than 64 for a large model.

loses: prof_bucket_tune
"""


# %% replaces="task5_tune"
def tune_plan(sizes: list[int], measure: Callable[[list[list[int]]], float]) -> list[list[int]]:
    """The plan with the shortest step among those with equal caps; at most 64 measurements."""
    ### BEGIN SOLUTION
    num_caps = len(sizes)
    caps = [sum(sizes) * (1 + 1e-9) / (k + 1) for k in range(num_caps)]
    plans = [plan_buckets(sizes, cap) for cap in caps]
    plans.append(plan_buckets(sizes, 0))  # each gradient alone
    return min(plans, key=measure)
    ### END SOLUTION
