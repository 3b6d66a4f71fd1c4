"""Says that every schedule keeps all micro-batches.

loses: pipe_kept
"""


# %% replaces="task2_kept"
def peak_kept(schedule):
    return len(schedule) // 2
