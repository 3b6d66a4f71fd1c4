"""Counts activations, and forgets their gradients.

loses: pipe_bytes
"""


# %% replaces="task6_bytes"
def pipeline_bytes(num_stages, num_micro_batches, activation_bytes):
    return num_micro_batches * activation_bytes * (num_stages > 1)


def data_parallel_bytes(num_ranks, parameter_bytes):
    return 2 * (num_ranks - 1) / num_ranks * parameter_bytes
