"""Two neighbours for every rank, also where there are two ranks or one.

loses: pipe_bytes
"""


# %% replaces="task6_bytes"
def pipeline_bytes(num_stages, num_micro_batches, activation_bytes):
    return 2 * num_micro_batches * activation_bytes


def data_parallel_bytes(num_ranks, parameter_bytes):
    return 2 * (num_ranks - 1) / num_ranks * parameter_bytes
