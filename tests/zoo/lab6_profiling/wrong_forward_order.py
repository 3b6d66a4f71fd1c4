"""Fills the buckets in the order of the parameters.

loses: prof_bucket_plan
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
