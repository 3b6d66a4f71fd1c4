"""Fills the buckets in the order of the parameters. The first bucket is complete last, so every
plan made of such buckets sends everything after backward, and the tuner has nothing good to
choose from.

loses: prof_bucket_plan, prof_bucket_tune
"""


# %% replaces="task5_plan"
def plan_buckets(sizes, cap):
    plan, current, total = [], [], 0
    for index in range(len(sizes)):
        if current and total + sizes[index] > cap:
            plan.append(current)
            current, total = [], 0
        current.append(index)
        total += sizes[index]
    return [*plan, current]
