"""The warm-up does not look at M: it invents micro-batches.

loses: pipe_1f1b
"""


# %% replaces="task2_schedules"
def gpipe(rank, num_stages, num_micro_batches):
    return [(k, i) for k in ("forward", "backward") for i in range(num_micro_batches)]


def one_f_one_b(rank, num_stages, num_micro_batches):
    warm_up = num_stages - 1 - rank
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        steps += [("forward", warm_up + i), ("backward", i)]
    return steps + [("backward", i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
