"""Thinks that the smallest run always has one rank.

loses: prof_scaling
"""


# %% replaces="task6_scaling"
def scaling(step_s, mode):
    t1 = step_s[min(step_s)]
    rows = {}
    for n, t in step_s.items():
        speedup = t1 / t if mode == "strong" else n * t1 / t
        rows[n] = speedup, speedup / n
    return rows
