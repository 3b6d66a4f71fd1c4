"""Tries one bucket for all and one for each, and nothing in between.

loses: prof_bucket_tune
"""


# %% replaces="task5_tune"
def tune_plan(sizes, measure):
    return min([plan_buckets(sizes, sum(sizes)), plan_buckets(sizes, 0)], key=measure)
