"""The warm-up of two stages, written as a number.

loses: pipe_1f1b
"""


# %% replaces="task2_schedules"
def gpipe(rank, num_stages, num_micro_batches):
    return [(k, i) for k in ("forward", "backward") for i in range(num_micro_batches)]


def one_f_one_b(rank, num_stages, num_micro_batches):
    warm_up = min(1 - rank if rank < 1 else 0, num_micro_batches)
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(num_micro_batches):
        if warm_up + i < num_micro_batches:
            steps.append(("forward", warm_up + i))
        steps.append(("backward", i))
    return steps
