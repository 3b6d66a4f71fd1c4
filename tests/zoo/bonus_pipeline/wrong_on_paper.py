"""A plan that nobody has checked: stages, schedules, the bubble and the bytes.

loses: pipe_cut, pipe_gpipe, pipe_1f1b, pipe_kept, pipe_bubble, pipe_choice, pipe_bytes
class: example
because: seven functions, each with a fault of its own.
says: pipe_gpipe expected all forwards, then all backwards
says: pipe_1f1b forwards before the first backward
says: pipe_kept is kept from its forward until its backward
says: pipe_bubble That is the idle time over the busy time
says: pipe_choice at most: expected 1, got 0
says: pipe_bytes A rank in the middle sends M activations on
"""


# %% replaces="task1_cut"
def cut_layers(costs, num_stages):
    size = -(-len(costs) // num_stages)
    return [(s * size, min(len(costs), (s + 1) * size)) for s in range(num_stages)]


# %% replaces="task2_schedules"
def gpipe(rank, num_stages, num_micro_batches):
    return [(k, i) for i in range(num_micro_batches) for k in ("forward", "backward")]


def one_f_one_b(rank, num_stages, num_micro_batches):
    return [(k, i) for i in range(num_micro_batches) for k in ("forward", "backward")]


# %% replaces="task2_kept"
def peak_kept(schedule):
    return sum(what == "forward" for what, _ in schedule)


# %% replaces="task3_bubble"
def bubble_fraction(num_stages, num_micro_batches):
    return (num_stages - 1) / num_micro_batches


def idle_seconds(num_stages, num_micro_batches, forward_s, backward_s):
    return num_micro_batches * (forward_s + backward_s)


def micro_batches_for(num_stages, most_bubble):
    return round((num_stages - 1) / most_bubble)


# %% replaces="task6_bytes"
def pipeline_bytes(num_stages, num_micro_batches, activation_bytes):
    return 2 * num_stages * num_micro_batches * activation_bytes


def data_parallel_bytes(num_ranks, parameter_bytes):
    return parameter_bytes
