"""One micro-batch at a time, in both schedules.

loses: pipe_gpipe, pipe_1f1b
because: it is the wrong list in both functions.
"""


# %% replaces="task2_schedules"
def gpipe(rank, num_stages, num_micro_batches):
    return [(k, i) for i in range(num_micro_batches) for k in ("forward", "backward")]


def one_f_one_b(rank, num_stages, num_micro_batches):
    return [(k, i) for i in range(num_micro_batches) for k in ("forward", "backward")]
