"""Closes a bucket after it has grown beyond its limit.

loses: prof_bucket_plan
says: prof_bucket_plan is larger than the cap though it holds several gradients
"""


# %% replaces="task5_plan"
def plan_buckets(sizes, cap):
    plan, total = [[]], 0
    for index in reversed(range(len(sizes))):
        if total >= cap and plan[-1]:
            plan.append([])
            total = 0
        plan[-1].append(index)
        total += sizes[index]
    return plan
