"""Divides in floats: a share of 2**54 + 1 is one too small.

loses: zero_memory, zero_bytes
because: memory and traffic are two functions, and each rounds.
"""


# %% replaces="task7_planning"
def memory_per_rank(sizes, num_ranks, stage):
    whole, share = sum(sizes), sum(math.ceil(size / num_ranks) for size in sizes)
    parameters = share if stage >= 3 else whole
    gradients = share if stage >= 2 else whole
    optimizer = (2 * whole, 3 * share, 3 * share, 2 * share)[stage]
    return 4 * parameters, 4 * gradients, 4 * optimizer


def bytes_sent(sizes, num_ranks, stage, micro_batches=1):
    once = 4 * (num_ranks - 1) * sum(math.ceil(size / num_ranks) for size in sizes)
    return once * (2, 3, micro_batches + 1, 3 * micro_batches)[stage]
