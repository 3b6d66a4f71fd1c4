"""Calls GPipe 1F1B.

loses: pipe_1f1b
class: example
says: pipe_1f1b micro-batches at once
"""


# %% replaces="task2_schedules"
def gpipe(rank, num_stages, num_micro_batches):
    return [(k, i) for k in ("forward", "backward") for i in range(num_micro_batches)]


def one_f_one_b(rank, num_stages, num_micro_batches):
    return gpipe(rank, num_stages, num_micro_batches)
