"""Rounds the cap to a whole number of bytes: a bucket may be larger than it.

loses: prof_bucket_plan
"""


# %% replaces="task5_plan"
def plan_buckets(sizes: list[int], cap: float) -> list[list[int]]:
    plan, used = [], 0
    cap = round(cap)
    for i in reversed(range(len(sizes))):
        if not plan or used + sizes[i] > cap:
            plan.append([])
            used = 0
        plan[-1].append(i)
        used += sizes[i]
    return plan
