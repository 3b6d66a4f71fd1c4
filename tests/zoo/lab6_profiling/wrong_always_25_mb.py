"""Takes buckets of 25 MB for every model and every network.

loses: prof_bucket_tune
class: example
says: prof_bucket_tune Try many caps
"""


# %% replaces="task5_tune"
def tune_plan(sizes, measure):
    return plan_buckets(sizes, 25 * 2**20)
