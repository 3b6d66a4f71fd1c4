"""Takes t1/tN for the efficiency of strong scaling as well.

loses: prof_scaling
"""


# %% replaces="task6_scaling"
def scaling(step_s, mode):
    base = step_s[min(step_s)]
    return {n: (n * base / t, base / t) for n, t in step_s.items()}
